//! The spend of caps: what ended requests are charged, what the ledger knows, what a reload
//! takes over, and which thresholds are reached.

use std::num::NonZeroU32;
use std::sync::Arc;

use tollgate_domain::{
    Budget, DeviceClass, DeviceNanos, ExactAmount, MonotonicTime, RequestId, Tier, UtcMonth,
};

use super::holds::{HeldScope, HoldRecord};
use super::{Core, is_capped};
use crate::bucket::Demand;
use crate::refusal::{Limit, Refusal};
use crate::reload::{NewLimits, PastCost, PastSpend};
use crate::scope::{Period, Scope, ScopeState};
use crate::terms::{CapReached, Spent};

impl Core {
    /// Adds spend from the ledger, before the first admission.
    pub(crate) fn restore_spend(
        &mut self,
        scope: Scope,
        class: &DeviceClass,
        period: Period,
        spent: DeviceNanos,
    ) {
        // Restored spend also advances the calendar, so that old spend is never counted as
        // today's.
        match period {
            Period::Day(day) => {
                self.day = self.day.max(day);
                self.scope(scope).class(class).day.restore(day.0, spent);
            }
            Period::Month(month) => {
                self.month = self.month.max(month);
                self.scope(scope).class(class).month.restore(month.0, spent);
            }
        }
    }

    /// Adds money that was spent in `month`.
    pub(crate) fn restore_cost(&mut self, scope: Scope, month: UtcMonth, cost: ExactAmount) {
        // The calendar advances, so that old money is never counted as this month's.
        self.month = self.month.max(month);
        self.scope(scope).budget.restore(month.0, cost);
    }

    /// Applies new limits to every scope in memory, and promotes the waiting requests that
    /// may run then, in order of arrival. A scope without new limits keeps the ones it has.
    pub(crate) fn adopt(
        &mut self,
        now: MonotonicTime,
        new_limits: &NewLimits<'_>,
    ) -> Vec<RequestId> {
        let NewLimits { revision, limits_of, spent, costs } = new_limits;
        for (scope, state) in &mut self.scopes {
            if let Some(change) = limits_of(scope) {
                state.refresh_all(&change.new, *revision, now);
                for (class, of_class) in &mut state.classes {
                    // Spend was not counted while there was no cap.
                    if change.begins_cap(class) {
                        of_class.day.forget_settled();
                        of_class.month.forget_settled();
                    }
                }
                if change.begins_budget() {
                    state.budget.forget_settled();
                }
            }
        }
        self.cap_open_holds();
        // Added after the loop above, which would forget these amounts.
        for PastSpend { scope, class, period, spent } in spent {
            self.restore_spend(scope.clone(), class, *period, *spent);
        }
        for PastCost { scope, month, cost } in costs {
            self.restore_cost(scope.clone(), *month, *cost);
        }
        self.run_all_that_may()
    }

    /// Changes the number of gateways that share the rates and places, and promotes the
    /// waiting requests that may run then, in order of arrival.
    pub(crate) fn share_among(
        &mut self,
        now: MonotonicTime,
        gateways: NonZeroU32,
    ) -> Vec<RequestId> {
        self.shared.gateways = gateways;
        self.share(now);
        self.run_all_that_may()
    }

    /// Runs the waiting requests that may, in order of arrival. Returns their ids.
    pub(super) fn run_all_that_may(&mut self) -> Vec<RequestId> {
        // No settlement may come for a long time, so the requests are not left waiting for
        // one.
        let waiting: Vec<(u64, RequestId)> =
            self.tickets.iter().map(|(ticket, id)| (*ticket, id.clone())).collect();
        waiting.into_iter().filter_map(|(ticket, id)| self.run(&id, ticket).then_some(id)).collect()
    }

    /// Counts the open holds against caps that did not exist when they were made.
    fn cap_open_holds(&mut self) {
        for record in self.holds.open_mut() {
            for held in &mut record.scopes {
                let Some(state) = self.scopes.get_mut(&held.scope) else { continue };
                if !held.budgeted && state.limits.budget_per_month.is_some() {
                    held.budgeted = true;
                    state.budget.hold(record.money);
                }
                if !held.capped && is_capped(&state.limits, &record.class) {
                    held.capped = true;
                    let of_class = state.class(&record.class);
                    of_class.day.hold(record.capped);
                    of_class.month.hold(record.capped);
                }
            }
        }
    }

    /// Replaces the held amounts by the spent amounts in every scope of a hold. A rate
    /// without state is full, so nothing needs correction. Spend against a cap always
    /// counts, even if its scope was forgotten.
    pub(super) fn charge(&mut self, now: MonotonicTime, record: &HoldRecord, charge: Charge) {
        let (capped, held_money) = match charge.held {
            Held::Open => (record.capped, record.money),
            Held::Released => Default::default(),
        };
        let Spent { reference, money, .. } = charge.spent;
        self.see_now(now);
        for held in &record.scopes {
            // Late usage may concern a scope that was idle and was forgotten.
            if held.capped && reference > DeviceNanos::ZERO
                || held.budgeted && money > ExactAmount::ZERO
            {
                self.scope(held.scope.clone());
            }
            let Some(state) = self.scopes.get_mut(&held.scope) else { continue };
            // Batch work took nothing from these rates, so nothing is given back.
            if record.tier == Tier::Interactive {
                state.settle_rates(now, record, &charge);
            }
            state.settle_grammar_time(now, record, &charge);
            let of_class = state.class(&record.class);
            if held.capped {
                // Rolled first: the spend belongs to the day on which the request ends.
                of_class.day.roll(self.day.0);
                of_class.month.roll(self.month.0);
                of_class.day.settle(capped, reference);
                of_class.month.settle(capped, reference);
            }
            if held.budgeted {
                state.budget.roll(self.month.0);
                state.budget.settle(held_money, money);
            }
            state.report_reached(held, &record.class, charge.spent, &mut self.reached);
        }
    }

    /// Notes that a cap refused a request, which reaches the last threshold of a cap that is
    /// nearly spent.
    pub(super) fn note_refusal(&mut self, refusal: &Refusal, class: &DeviceClass) {
        // A request that is larger than the whole cap says nothing of its spend.
        if !refusal.limit.is_cap() || refusal.resets.is_none() {
            return;
        }
        let Some(state) = self.scopes.get_mut(&refusal.scope) else { return };
        // A copy of the pointer, because the state is changed below while the limits are read.
        let limits = Arc::clone(&state.limits);
        let is_first = match refusal.limit {
            Limit::BudgetPerMonth => {
                let cap = limits.budget_per_month.map(|budget| money_of(&budget));
                cap.is_some_and(|cap| state.budget.newly_refused(cap))
            }
            Limit::DeviceTimePerDay => {
                let cap = limits.device_time_per_day.limit(class);
                cap.is_some_and(|cap| state.class(class).day.newly_refused(cap))
            }
            // Only caps get here, and the one of the month is left.
            _ => {
                let cap = limits.device_time_per_month.limit(class);
                cap.is_some_and(|cap| state.class(class).month.newly_refused(cap))
            }
        };
        if is_first {
            let (limit, scope) = (refusal.limit, refusal.scope.clone());
            let class = refusal.class.clone();
            self.reached.push(CapReached { limit, scope, class, percent: 100 });
        }
    }
}

impl ScopeState {
    /// Replaces the held amounts of the rates by the spent amounts.
    fn settle_rates(&mut self, now: MonotonicTime, record: &HoldRecord, charge: &Charge) {
        let estimate = &record.estimate;
        let (tokens, time) = match charge.held {
            Held::Open => (estimate.demand_of_tokens(), estimate.demand_of_time()),
            Held::Released => Default::default(),
        };
        if let Some(bucket) = &mut self.tokens {
            // Refilled before the correction: the excess is a debt as of now.
            bucket.refill(now);
            bucket.settle(tokens, charge.spent.tokens);
        }
        if let Some(bucket) = &mut self.class(&record.class).device_time {
            bucket.refill(now);
            bucket.settle(time, charge.spent.reference.nanos());
        }
    }

    /// Replaces the held grammar time by the spent one.
    fn settle_grammar_time(&mut self, now: MonotonicTime, record: &HoldRecord, charge: &Charge) {
        let Some(bucket) = &mut self.grammar_time else { return };
        let held = match charge.held {
            Held::Open => record.estimate.demand_of_grammar_time(),
            Held::Released => Demand::default(),
        };
        bucket.refill(now);
        bucket.settle(held, charge.spent.grammar_nanos());
    }

    /// Adds the thresholds of the scope's caps that the settlement of `spent` has reached.
    fn report_reached(
        &mut self,
        held: &HeldScope,
        class: &DeviceClass,
        spent: Spent,
        reached: &mut Vec<CapReached>,
    ) {
        let limits = Arc::clone(&self.limits);
        let mut report = |limit: Limit, percent: Option<u8>| {
            let Some(percent) = percent else { return };
            let class = limit.is_device_time().then(|| class.clone());
            reached.push(CapReached { limit, scope: held.scope.clone(), class, percent });
        };
        if held.capped {
            let of_class = self.class(class);
            for (limit, spend, cap) in [
                (Limit::DeviceTimePerDay, &mut of_class.day, &limits.device_time_per_day),
                (Limit::DeviceTimePerMonth, &mut of_class.month, &limits.device_time_per_month),
            ] {
                let Some(cap) = cap.limit(class) else { continue };
                report(limit, spend.newly_reached(cap, spent.reference));
            }
        }
        if held.budgeted
            && let Some(budget) = limits.budget_per_month
        {
            let percent = self.budget.newly_reached(money_of(&budget), spent.money);
            report(Limit::BudgetPerMonth, percent);
        }
    }
}

/// Returns the money of a budget.
fn money_of(budget: &Budget) -> ExactAmount {
    ExactAmount::of_nanos(budget.nanos)
}

/// A change from held amounts to spent amounts.
pub(super) struct Charge {
    pub(super) held: Held,
    pub(super) spent: Spent,
}

/// The amounts of a hold: still held, or released before.
pub(super) enum Held {
    Open,
    Released,
}

/// Returns the amount by which the true cost exceeded what the caps held; zero without a
/// cap.
pub(super) fn overrun(record: &HoldRecord, spent: Spent) -> DeviceNanos {
    if record.scopes.iter().any(|held| held.capped) {
        spent.reference.saturating_sub(record.capped)
    } else {
        DeviceNanos::ZERO
    }
}
