//! Slices of caps, where several gateways share the caps: what a request lacks, and the calls
//! that ask the database for it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tollgate_cluster::{Answer, Ask, Order};
use tollgate_domain::{ExactAmount, MonotonicTime, UtcDay, UtcTime};

use super::{Bounds, Core};
use crate::cap::{Spend, Unit};
use crate::refusal::Limit;
use crate::scope::{Scope, ScopeState};
use crate::slices::{CapCall, CapName, CapWant};
use crate::terms::Reserve;

/// The places of the calls of this life of the gateway.
#[derive(Debug)]
pub(super) struct SliceCalls {
    newest: Order,
    /// True if all work of earlier lives is settled.
    is_settled: bool,
}

/// The kind of a call for all slices.
#[derive(Clone, Copy)]
enum Occasion<'a> {
    /// Requests lack these amounts.
    Wanted(&'a HashMap<CapName, u64>),
    /// A beat. Other gateways lack some of these caps.
    Beat(&'a HashSet<CapName>),
    /// The end of the gateway.
    Stop,
}

impl Core {
    /// Makes every cap one of which this gateway has only a slice.
    pub(crate) fn share_caps(&mut self, life: u64) {
        self.slices = Some(SliceCalls { newest: Order { life, call: 0 }, is_settled: false });
    }

    /// Makes the states of caps of which an earlier life has a slice, so that the next beat asks
    /// for them.
    pub(crate) fn remember_slices(&mut self, caps: &[CapName]) {
        for CapName { scope, limit, class } in caps {
            let state = self.scope(scope.clone());
            match (limit, class) {
                (Limit::DeviceTimePerDay, Some(class)) => state.class(class).day.share(),
                (Limit::DeviceTimePerMonth, Some(class)) => state.class(class).month.share(),
                (Limit::BudgetPerMonth, None) => state.budget.share(),
                _ => {}
            }
        }
    }

    /// Returns what the slices lack for a request that every other limit admits. The
    /// database is asked for nothing that another limit refuses.
    pub(crate) fn lacking(
        &mut self,
        now: MonotonicTime,
        utc: UtcTime,
        request: &Reserve,
    ) -> Vec<CapWant> {
        if self.slices.is_none() {
            return Vec::new();
        }
        self.see(utc);
        let (day, month) = (self.day, self.month);
        let mut wants = Vec::new();
        for limited in &request.scopes {
            // Where there is no room for a state, the reservation that follows is refused.
            if !limited.has_cap(&request.class)
                || self.make_room(now, std::slice::from_ref(limited)).is_err()
            {
                continue;
            }
            let state = self.scope(limited.scope.clone());
            state.refresh(limited, &request.class, now, (day, month));
            state.wants(&limited.scope, now, request, &mut wants);
        }
        if wants.is_empty() || !self.passes_without_caps(utc, request) {
            return Vec::new();
        }
        wants
    }

    /// Begins calls for what requests want.
    pub(crate) fn calls_for(&mut self, utc: UtcTime, wants: &[CapWant]) -> Vec<CapCall> {
        self.see(utc);
        let mut sums: HashMap<CapName, u64> = HashMap::new();
        for CapWant { cap, asked } in wants {
            let sum = sums.entry(cap.clone()).or_default();
            *sum = sum.saturating_add(*asked);
        }
        self.calls(MonotonicTime::default(), Occasion::Wanted(&sums))
    }

    /// Begins the calls of a beat.
    pub(crate) fn calls_at_beat(
        &mut self,
        now: MonotonicTime,
        utc: UtcTime,
        hungry: &HashSet<CapName>,
    ) -> Vec<CapCall> {
        self.see(utc);
        self.calls(now, Occasion::Beat(hungry))
    }

    /// Begins the calls of a gateway that stops: each slice ends at what was spent of it.
    pub(crate) fn calls_at_stop(&mut self, utc: UtcTime) -> Vec<CapCall> {
        self.see(utc);
        self.calls(MonotonicTime::default(), Occasion::Stop)
    }

    fn calls(&mut self, now: MonotonicTime, occasion: Occasion<'_>) -> Vec<CapCall> {
        let (day, month) = (self.day, self.month);
        let Some(calls) = &mut self.slices else { return Vec::new() };
        let mut caller = Caller { calls, now, day, occasion, made: Vec::new() };
        let wanted: Option<HashSet<&Scope>> = match occasion {
            Occasion::Wanted(sums) => Some(sums.keys().map(|cap| &cap.scope).collect()),
            Occasion::Beat(_) | Occasion::Stop => None,
        };
        let mut visit = |scope: &Scope, state: &mut ScopeState| {
            let limits = Arc::clone(&state.limits);
            state.budget.roll(month.0);
            let value = limits.budget_per_month.map_or(0, |budget| budget.nanos);
            let name = || CapName::new(scope, Limit::BudgetPerMonth, None);
            caller.call(name, value, &mut state.budget);
            for (class, of_class) in &mut state.classes {
                of_class.day.roll(day.0);
                of_class.month.roll(month.0);
                let value = limits.device_time_per_day.limit(class).map_or(0, |cap| cap.nanos());
                let name = || CapName::new(scope, Limit::DeviceTimePerDay, Some(class));
                caller.call(name, value, &mut of_class.day);
                let value = limits.device_time_per_month.limit(class).map_or(0, |cap| cap.nanos());
                let name = || CapName::new(scope, Limit::DeviceTimePerMonth, Some(class));
                caller.call(name, value, &mut of_class.month);
            }
        };
        match wanted {
            Some(wanted) => {
                for scope in wanted {
                    if let Some(state) = self.scopes.get_mut(scope) {
                        visit(scope, state);
                    }
                }
            }
            None => self.scopes.iter_mut().for_each(|(scope, state)| visit(scope, state)),
        }
        caller.made
    }

    /// Adopts the answer to a call.
    pub(crate) fn cap_answered(&mut self, now: MonotonicTime, call: &CapCall, answer: &Answer) {
        let Some(SliceCalls { is_settled, .. }) = self.slices else { return };
        let CapCall { cap: CapName { scope, limit, class }, value, period, ask, .. } = call;
        let Some(state) = self.scopes.get_mut(scope) else { return };
        let said = (*period, ask.used);
        // An answer for a cap of unknown value tells nothing of its rest.
        let now = Some(now).filter(|_| *value > 0);
        match (limit, class) {
            (Limit::BudgetPerMonth, _) => state.budget.answered(now, said, answer, is_settled),
            (Limit::DeviceTimePerDay, Some(class)) => {
                state.class(class).day.answered(now, said, answer, is_settled);
            }
            (_, Some(class)) => state.class(class).month.answered(now, said, answer, is_settled),
            (_, None) => {}
        }
    }

    /// Notes that all work of earlier lives of the gateway is settled.
    pub(crate) fn settle_earlier_lives(&mut self) {
        let Some(calls) = &mut self.slices else { return };
        calls.is_settled = true;
        for state in self.scopes.values_mut() {
            state.budget.settle_earlier();
            for of_class in state.classes.values_mut() {
                of_class.day.settle_earlier();
                of_class.month.settle_earlier();
            }
        }
    }
}

/// The maker of calls.
struct Caller<'a> {
    calls: &'a mut SliceCalls,
    now: MonotonicTime,
    day: UtcDay,
    occasion: Occasion<'a>,
    made: Vec<CapCall>,
}

impl Caller<'_> {
    /// Adds the call for one slice, if there is one.
    fn call<U: Unit>(&mut self, name: impl FnOnce() -> CapName, value: u64, spend: &mut Spend<U>) {
        if !spend.has_share() {
            return;
        }
        let (name, newest) = (name(), self.calls.newest);
        let order = Order { call: newest.call + 1, ..newest };
        let asked: Option<(u32, Ask)> = match self.occasion {
            Occasion::Wanted(sums) => {
                sums.get(&name).and_then(|asked| spend.ask_for(order, *asked))
            }
            Occasion::Beat(hungry) => spend.ask_at_beat(self.now, order, hungry.contains(&name)),
            Occasion::Stop => spend.ask_at_stop(order),
        };
        let Some((period, ask)) = asked else { return };
        self.calls.newest = order;
        let (first_day, previous) = match name.limit {
            Limit::DeviceTimePerDay => (self.day, before(self.day)),
            _ => {
                let first = self.day.first_of_month();
                (first, before(first).first_of_month())
            }
        };
        self.made.push(CapCall { cap: name, value, period, first_day, previous, ask });
    }
}

impl ScopeState {
    /// Adds what the slices lack for a request as if the caps had no other use.
    fn wants(
        &self,
        scope: &Scope,
        now: MonotonicTime,
        request: &Reserve,
        wants: &mut Vec<CapWant>,
    ) {
        let Reserve { class, estimate, .. } = request;
        let Some(of_class) = self.classes.get(class) else { return };
        for (limit, cap, spend) in [
            (Limit::DeviceTimePerDay, &self.limits.device_time_per_day, &of_class.day),
            (Limit::DeviceTimePerMonth, &self.limits.device_time_per_month, &of_class.month),
        ] {
            let Some(cap) = cap.limit(class) else { continue };
            // Only the cap itself may cut an answer short, so the slice must have the worst case.
            let asked = estimate.worst.max(estimate.least).min(cap).nanos().max(1);
            if spend.now().should_ask(now, asked) {
                wants.push(CapWant { cap: CapName::new(scope, limit, Some(class)), asked });
            }
        }
        let Some(budget) = self.limits.budget_per_month else { return };
        let whole = ExactAmount::of_nanos(budget.nanos);
        let asked = Bounds::within(estimate, None, Some(whole)).money.nanos_up().max(1);
        if self.budget.now().should_ask(now, asked) {
            let cap = CapName::new(scope, Limit::BudgetPerMonth, None);
            wants.push(CapWant { cap, asked });
        }
    }
}

fn before(day: UtcDay) -> UtcDay {
    UtcDay(day.0.saturating_sub(1))
}
