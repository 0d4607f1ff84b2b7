//! The requests of the moment, for the live view: counts since the start, the last minute of
//! each tenant, and the last refusals. The memory is bounded, and a flood of refusals changes
//! counts and a ring.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_admission::Scope;
use tollgate_domain::{Caller, DeviceNanos, TenantId, UtcTime};
use tollgate_serving::Clock;

use super::tenants::Outcome;
use crate::reply::ApiError;

/// The requests for work that have ended.
pub(crate) struct Activity {
    clock: Clock,
    counts: Mutex<ActivityCounts>,
}

#[derive(Default)]
struct ActivityCounts {
    totals: RequestTotals,
    tenants: HashMap<TenantId, LastMinute>,
    /// The newest refusals, the newest last.
    recent: VecDeque<RecentRefusal>,
}

/// Requests for work by their end, and their device time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct RequestTotals {
    /// Requests that were answered whole.
    pub(crate) answered: u64,
    /// Requests that got the answer of an earlier one.
    pub(crate) repeated: u64,
    /// Requests that were refused.
    pub(crate) refused: u64,
    /// Requests that failed.
    pub(crate) failed: u64,
    /// Requests that their client left.
    pub(crate) cancelled: u64,
    /// Device time that was attributed to them.
    #[schemars(with = "u64")]
    #[serde(rename = "attributed_ns")]
    pub(crate) attributed: DeviceNanos,
}

/// A refusal, without anything of the request's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecentRefusal {
    /// The number of the refusal since the start; the first has the number 1.
    pub(crate) number: u64,
    pub(crate) at: UtcTime,
    pub(crate) caller: Caller,
    /// The kind of the error, as in metrics. For limits it is the name of the limit.
    pub(crate) kind: &'static str,
    /// The scope of the limit that refused; `None` if no limit did.
    pub(crate) scope: Option<Scope>,
    /// The wait that the client was told.
    pub(crate) retry_after: Option<Duration>,
}

/// The requests of a tenant in the last minute, in slots of [`SLOT_SECONDS`].
#[derive(Clone, Debug, Default)]
struct LastMinute {
    slots: [MinuteTotals; SLOTS],
    /// The number of the newest slot since 1970.
    newest: u64,
}

/// The requests of a tenant in one minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct MinuteTotals {
    /// Requests that ended, refused ones included.
    pub(crate) ended: u64,
    /// Requests that were refused.
    pub(crate) refused: u64,
    /// Device time that was attributed to requests that ended.
    #[schemars(with = "u64")]
    #[serde(rename = "attributed_ns")]
    pub(crate) attributed: DeviceNanos,
}

impl Activity {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, counts: Mutex::default() }
    }

    /// Counts the end of a request of `caller`. `refusal` is the error of a refused one.
    pub(super) fn count(&self, caller: &Caller, outcome: Outcome, refusal: Option<&ApiError>) {
        let now = self.clock.utc();
        let mut counts = self.counts();
        *counts.totals.of(outcome) += 1;
        if let Some(slot) = counts.slot(&caller.tenant, now) {
            slot.ended += 1;
            slot.refused += u64::from(refusal.is_some());
        }
        let Some(error) = refusal else { return };
        // Counted under this lock, so the numbers of refusals have no gap.
        let number = counts.totals.refused;
        if counts.recent.len() == MOST_RECENT {
            counts.recent.pop_front();
        }
        counts.recent.push_back(RecentRefusal {
            number,
            at: now,
            caller: caller.clone(),
            kind: error.kind().0,
            scope: error.limit_scope().cloned(),
            retry_after: error.told_wait(),
        });
    }

    /// Adds device time of a request that has ended.
    pub(super) fn used(&self, tenant: &TenantId, time: DeviceNanos) {
        let now = self.clock.utc();
        let mut counts = self.counts();
        counts.totals.attributed += time;
        if let Some(slot) = counts.slot(tenant, now) {
            slot.attributed += time;
        }
    }

    /// Returns the counts since the start.
    pub(crate) fn totals(&self) -> RequestTotals {
        self.counts().totals
    }

    /// Returns the last minute of each tenant with a request in it.
    pub(crate) fn last_minute(&self) -> HashMap<TenantId, MinuteTotals> {
        let now = slot_of(self.clock.utc());
        let counts = self.counts();
        let minutes = counts.tenants.iter().map(|(name, minute)| (name, minute.sum(now)));
        minutes
            .filter(|(_, minute)| *minute != MinuteTotals::default())
            .map(|(name, minute)| (name.clone(), minute))
            .collect()
    }

    /// Returns the remembered refusals after the one with the number `seen`, the oldest first.
    pub(crate) fn refusals_after(&self, seen: u64) -> Vec<RecentRefusal> {
        let counts = self.counts();
        counts.recent.iter().filter(|refusal| refusal.number > seen).cloned().collect()
    }

    fn counts(&self) -> MutexGuard<'_, ActivityCounts> {
        // Every change under the lock is complete before a panic could happen.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Activity").field("totals", &self.totals()).finish_non_exhaustive()
    }
}

impl ActivityCounts {
    /// Returns the slot of this moment of `tenant`; `None` if too many tenants are busy.
    fn slot(&mut self, tenant: &TenantId, now: UtcTime) -> Option<&mut MinuteTotals> {
        let now = slot_of(now);
        if !self.tenants.contains_key(tenant) {
            // Only when the map is full, because this looks at every tenant.
            if self.tenants.len() >= MOST_TENANTS {
                self.tenants.retain(|_, minute| minute.sum(now) != MinuteTotals::default());
            }
            if self.tenants.len() >= MOST_TENANTS {
                return None;
            }
        }
        Some(self.tenants.entry(tenant.clone()).or_default().slot(now))
    }
}

impl RequestTotals {
    fn of(&mut self, outcome: Outcome) -> &mut u64 {
        match outcome {
            Outcome::Answered => &mut self.answered,
            Outcome::Repeated => &mut self.repeated,
            Outcome::Refused => &mut self.refused,
            Outcome::Failed => &mut self.failed,
            Outcome::Cancelled => &mut self.cancelled,
        }
    }

    /// Returns the requests that ended after `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        let Self { answered, repeated, refused, failed, cancelled, attributed } = self;
        // No difference is negative, because the counts only grow.
        Self {
            answered: answered - earlier.answered,
            repeated: repeated - earlier.repeated,
            refused: refused - earlier.refused,
            failed: failed - earlier.failed,
            cancelled: cancelled - earlier.cancelled,
            attributed: attributed - earlier.attributed,
        }
    }
}

impl LastMinute {
    /// Returns the slot with the number `now`.
    fn slot(&mut self, now: u64) -> &mut MinuteTotals {
        // A clock that steps back counts into the newest slot.
        let now = now.max(self.newest);
        let passed = (now - self.newest).min(SLOTS as u64);
        for number in now + 1 - passed..=now {
            self.slots[place_of(number)] = MinuteTotals::default();
        }
        self.newest = now;
        &mut self.slots[place_of(now)]
    }

    /// Returns the sum over the minute that ends with the slot `now`.
    fn sum(&self, now: u64) -> MinuteTotals {
        let oldest = now.saturating_sub(SLOTS as u64 - 1);
        let newest = self.newest;
        let kept = newest.saturating_sub(SLOTS as u64 - 1)..=newest;
        let recent = kept.filter(|number| *number >= oldest).map(place_of);
        recent.fold(MinuteTotals::default(), |sum, place| {
            let MinuteTotals { ended, refused, attributed } = self.slots[place];
            MinuteTotals {
                ended: sum.ended + ended,
                refused: sum.refused + refused,
                attributed: sum.attributed + attributed,
            }
        })
    }
}

fn slot_of(time: UtcTime) -> u64 {
    time.unix_seconds() / SLOT_SECONDS
}

fn place_of(slot: u64) -> usize {
    (slot % SLOTS as u64) as usize
}

/// Seconds of one slot.
const SLOT_SECONDS: u64 = 5;
/// Slots of a minute.
const SLOTS: usize = 12;
/// Refusals that are remembered.
pub(crate) const MOST_RECENT: usize = 200;
/// Tenants with a last minute in memory at most. Others are not listed until a place is free.
const MOST_TENANTS: usize = 1_000;

#[cfg(test)]
mod tests {
    use tollgate_domain::KeyId;

    use super::*;

    fn caller(tenant: &str) -> Caller {
        Caller {
            tenant: TenantId::new(tenant).expect("a name"),
            key: KeyId::new("k1").expect("a name"),
        }
    }

    #[test]
    fn minute_forgets_by_slot() {
        let mut minute = LastMinute::default();
        for slot in [100, 100, 105, 111] {
            minute.slot(slot).ended += 1;
        }
        let at = |slot| minute.sum(slot).ended;
        assert_eq!([at(111), at(112), at(116), at(117), at(122), at(123)], [4, 2, 2, 1, 1, 0]);
        // The slot that took the place of an old one begins empty.
        minute.slot(112).ended += 1;
        assert_eq!(minute.sum(112).ended, 3);
        // A clock that stepped back loses nothing.
        minute.slot(90).ended += 1;
        assert_eq!(minute.sum(112).ended, 4);
        minute.slot(10_000).ended += 1;
        assert_eq!(minute.sum(10_000).ended, 1);
    }

    #[test]
    fn activity_of_flood_is_bounded() {
        let activity = Activity::new(Clock::system());
        let error = ApiError::ReadLimit { per_second: 1, retry_after: Duration::from_secs(2) };
        for number in 0..2 * MOST_TENANTS as u64 {
            activity.count(&caller(&format!("t{number}")), Outcome::Refused, Some(&error));
        }
        activity.count(&caller("t1"), Outcome::Answered, None);
        activity.used(&caller("t1").tenant, DeviceNanos(7));
        let totals = activity.totals();
        assert_eq!((totals.refused, totals.answered, totals.attributed.nanos()), (2_000, 1, 7));
        let minutes = activity.last_minute();
        assert_eq!(minutes.len(), MOST_TENANTS);
        let of_first = minutes[&caller("t1").tenant];
        assert_eq!((of_first.ended, of_first.refused, of_first.attributed.nanos()), (2, 1, 7));
        let recent = activity.refusals_after(0);
        assert_eq!(recent.len(), MOST_RECENT);
        let numbers: Vec<u64> = recent.iter().map(|refusal| refusal.number).collect();
        assert_eq!(numbers, (1_801..=2_000).collect::<Vec<_>>());
        assert_eq!(recent[0].retry_after, Some(Duration::from_secs(2)));
        assert_eq!(activity.refusals_after(1_999).len(), 1);
    }
}
