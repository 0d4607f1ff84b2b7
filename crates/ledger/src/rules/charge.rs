//! Rules for charges: what an attempt adds to its day, and what a fault cap takes
//! back from it.

use std::collections::BTreeMap;

use tollgate_domain::{FinishReason, FinishedAttempt, Stages, Tier, Usage};

use crate::act::FaultCap;
use crate::error::LedgerError;
use crate::rows::CallerId;
use crate::rows::charges::{Payable, StoredCharge};
use crate::rows::daily::{DailyChange, DailyKey};

/// A block's changes of days, summed before they are written: a caller's row is
/// written once for a block, not once for each of its requests.
pub(crate) struct DayChanges<'a> {
    model: &'a str,
    class: &'a str,
    changes: BTreeMap<(u32, CallerId, Tier), DailyChange>,
}

impl<'a> DayChanges<'a> {
    /// Returns no changes, for a block of `model` on a device of `class`.
    pub(crate) fn new(model: &'a str, class: &'a str) -> Self {
        Self { model, class, changes: BTreeMap::new() }
    }

    /// Adds to a day of a caller in a tier; `None` where a sum does not fit.
    pub(crate) fn add(
        &mut self,
        day: u32,
        (caller, tier): (CallerId, Tier),
        change: &DailyChange,
    ) -> Option<()> {
        // Sorted keys: the same block always writes its days in the same order.
        self.changes.entry((day, caller, tier)).or_default().add(change)
    }

    /// Returns the changes by key.
    pub(crate) fn into_rows(self) -> impl Iterator<Item = (DailyKey<'a>, DailyChange)> {
        let Self { model, class, changes } = self;
        changes.into_iter().map(move |((day, caller, tier), change)| {
            (DailyKey { day, caller, model, class, tier }, change)
        })
    }
}

impl DailyChange {
    /// Adds `other`; `None` where a sum does not fit.
    pub(crate) fn add(&mut self, other: &Self) -> Option<()> {
        let Self {
            charges,
            entries,
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
            energy_mj,
        } = other;
        // Each field is named above, so a new field fails to compile until it is added here.
        for (sum, figure) in [
            (&mut self.charges, charges),
            (&mut self.entries, entries),
            (&mut self.requests, requests),
            (&mut self.prompt_tokens, prompt_tokens),
            (&mut self.cached_tokens, cached_tokens),
            (&mut self.completion_tokens, completion_tokens),
            (&mut self.attributed_ns, attributed_ns),
            (&mut self.reference_ns, reference_ns),
        ] {
            *sum = sum.checked_add(*figure)?;
        }
        if let Some(energy) = energy_mj {
            // A sum of some energy and none is the known energy; only no energy at all stays
            // `None`.
            self.energy_mj = Some(self.energy_mj.unwrap_or(0).checked_add(*energy)?);
        }
        Some(())
    }

    /// Returns the change by one entry of device time.
    pub(crate) fn by_entry(attributed_ns: i64, energy_mj: Option<i64>) -> Self {
        Self { entries: 1, attributed_ns, energy_mj, ..Self::default() }
    }

    /// Returns the change by one charge. Device time counts by its entries, on the
    /// day of the work, and is not part of a charge.
    pub(crate) fn by_charge(payable: &Payable, is_counted: bool) -> Self {
        Self {
            charges: 1,
            requests: i64::from(is_counted),
            prompt_tokens: payable.prompt_tokens,
            cached_tokens: payable.cached_tokens,
            completion_tokens: payable.completion_tokens,
            reference_ns: payable.reference_ns,
            ..Self::default()
        }
    }
}

impl Payable {
    /// Returns all of `usage`.
    pub(crate) fn of(usage: &Usage) -> Self {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
            *usage;
        Self {
            // The casts change no figure: `Block` and `payable_of_cap` have checked the bounds.
            prompt_tokens: prompt_tokens as i64,
            cached_tokens: cached_tokens as i64,
            completion_tokens: completion_tokens as i64,
            attributed_ns: attributed.nanos() as i64,
            reference_ns: reference.nanos() as i64,
        }
    }

    /// Returns true if a statement counts the attempt as a request: an attempt that
    /// failed without charge does not count.
    pub(crate) fn is_counted(&self, reason: FinishReason) -> bool {
        reason != FinishReason::Fault || *self != Self::default()
    }
}

/// Returns the figures of a fault cap.
///
/// # Errors
/// A figure or the time is larger than the database can hold.
pub(crate) fn payable_of_cap(cap: &FaultCap) -> Result<Payable, LedgerError> {
    let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
        cap.payable;
    // SQLite holds signed 64-bit integers only.
    let fits =
        [prompt_tokens, cached_tokens, completion_tokens, attributed.nanos(), reference.nanos()]
            .into_iter()
            .all(|figure| i64::try_from(figure).is_ok());
    if !fits {
        return Err(LedgerError::Damaged("a fault cap's figures do not fit".to_owned()));
    }
    if i64::try_from(cap.at.0).is_err() {
        return Err(LedgerError::Damaged("a fault cap's time does not fit".to_owned()));
    }
    Ok(Payable::of(&cap.payable))
}

/// Returns the end of an attempt. Its worker died before it could record the end.
pub(crate) fn end_by_cap(cap: &FaultCap) -> FinishedAttempt {
    FinishedAttempt {
        caller: cap.caller.clone(),
        attempt: cap.attempt.clone(),
        usage: cap.payable,
        // Only the worker measures stages; its report may still come and fill them in.
        stages: Stages::default(),
        reason: FinishReason::Fault,
        finished: cap.at,
        tier: cap.tier,
    }
}

/// A charge after a fault.
pub(crate) struct LoweredCharge {
    pub(crate) payable: Payable,
    pub(crate) is_counted: bool,
    /// The change of the charge's day.
    pub(crate) change: DailyChange,
}

/// Lowers a charge to what its cap allows.
pub(crate) fn lower(charged: &StoredCharge, cap: &Payable) -> LoweredCharge {
    let before = &charged.payable;
    let payable = Payable {
        // The lower figure of each: a cap must never raise what the worker reported.
        prompt_tokens: before.prompt_tokens.min(cap.prompt_tokens),
        cached_tokens: before.cached_tokens.min(cap.cached_tokens),
        completion_tokens: before.completion_tokens.min(cap.completion_tokens),
        // The entries hold the device time, so the cap's figure only decides if the attempt
        // counts.
        attributed_ns: cap.attributed_ns,
        reference_ns: before.reference_ns.min(cap.reference_ns),
    };
    let is_counted = payable.is_counted(FinishReason::Fault);
    let change = DailyChange {
        // An attempt that now costs nothing no longer counts as a request.
        requests: i64::from(is_counted) - i64::from(charged.is_counted),
        prompt_tokens: payable.prompt_tokens - before.prompt_tokens,
        cached_tokens: payable.cached_tokens - before.cached_tokens,
        completion_tokens: payable.completion_tokens - before.completion_tokens,
        reference_ns: payable.reference_ns - before.reference_ns,
        // The row of the charge stays, and the corrections of the entries change
        // device time and energy.
        ..DailyChange::default()
    };
    LoweredCharge { payable, is_counted, change }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charged(is_counted: bool) -> StoredCharge {
        let payable = Payable {
            prompt_tokens: 10,
            cached_tokens: 2,
            completion_tokens: 5,
            attributed_ns: 0,
            reference_ns: 90,
        };
        let (model, class, tier) = ("m".into(), "cpu".into(), Tier::Interactive);
        StoredCharge { model, class, tier, day: 1, is_counted, payable }
    }

    #[test]
    fn cap_of_zero_uncounts_the_request() {
        let lowered = lower(&charged(true), &Payable::default());
        assert!(!lowered.is_counted);
        assert_eq!(lowered.change.requests, -1);
        assert_eq!(lowered.change.reference_ns, -90);
        assert_eq!(lowered.change.charges, 0);
    }

    #[test]
    fn cap_never_raises_a_charge() {
        let cap = Payable { prompt_tokens: 100, reference_ns: 40, ..Payable::default() };
        let lowered = lower(&charged(true), &cap);
        assert_eq!((lowered.payable.prompt_tokens, lowered.payable.reference_ns), (10, 40));
        assert!(lowered.is_counted);
        assert_eq!(lowered.change.prompt_tokens, 0);
    }

    #[test]
    fn daily_change_rejects_overflow() {
        let mut sum = DailyChange::by_entry(i64::MAX, Some(1));
        assert_eq!(sum.add(&DailyChange::by_entry(1, None)), None);
    }
}
