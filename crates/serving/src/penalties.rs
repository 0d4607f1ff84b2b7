//! Penalties for tenants that offend again and again: the tenant waits, and is
//! told why.
//!
//! A tenant is penalised for its behaviour as a caller. Offences before
//! authentication belong to network sources, and the front door counts them.
//! The check is a lookup and comes before a body is read. The arithmetic is
//! admission's.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_admission::{ListedPenalty, Offence, PenaltyBook, PenaltyTerms};
use tollgate_config::Penalties as PenaltyConfig;
use tollgate_domain::{DeviceNanos, MonotonicTime, TenantId};

use crate::error::Refusal;
use crate::observer::Observer;

/// The penalties of all tenants. Clones share them.
#[derive(Clone)]
pub struct TenantPenalties {
    /// Bounded by the tenants of the config: only their offences are counted.
    book: Arc<Mutex<PenaltyBook<TenantId>>>,
    observer: Arc<dyn Observer>,
}

/// Returns the terms of penalties that `config` asks for.
pub fn penalty_terms(config: &PenaltyConfig) -> PenaltyTerms {
    let PenaltyConfig {
        refused_clients,
        wasted_time_per_minute,
        failed_authentications_per_minute,
        longest,
    } = *config;
    let free = |offence| match offence {
        // A refusal weighs the wait that the client was told. A client that waits
        // as told therefore adds a minute of weight in a minute.
        Offence::Refusals => u64::from(refused_clients) * MINUTE_MILLIS,
        Offence::FailedAuthentication => failed_authentications_per_minute.into(),
        Offence::Cancels => micros(wasted_time_per_minute),
    };
    PenaltyTerms { free_per_minute: Offence::ALL.map(free), longest }
}

impl TenantPenalties {
    /// Makes an empty book of penalties.
    pub fn new(config: &PenaltyConfig, observer: Arc<dyn Observer>) -> Self {
        // Without a limit and a crowd: the tenants of the config are the bound.
        let book = PenaltyBook::new(penalty_terms(config), usize::MAX, Clone::clone);
        Self { book: Arc::new(Mutex::new(book)), observer }
    }

    /// Applies the terms of a new config to offences from now on.
    pub fn set_terms(&self, config: &PenaltyConfig) {
        self.lock().set_terms(penalty_terms(config));
    }

    /// Refuses a tenant that has a penalty.
    ///
    /// # Errors
    /// [`Refusal::Penalty`].
    pub fn check(&self, now: MonotonicTime, tenant: &TenantId) -> Result<(), Refusal> {
        self.lock().penalty(now, tenant).map_or(Ok(()), |penalty| Err(penalty.into()))
    }

    /// Counts a request of `tenant` that was refused for a reason of the client's
    /// own. `retry_after` is the wait that the client was told. `tenant` must be
    /// one of the config's.
    pub fn count_refusal(
        &self,
        now: MonotonicTime,
        tenant: &TenantId,
        retry_after: Option<Duration>,
    ) {
        let wait = retry_after.unwrap_or(UNTOLD_WAIT).clamp(SHORTEST_WAIT, LONGEST_WAIT);
        let weight = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        self.count(now, tenant, Offence::Refusals, weight);
    }

    /// Counts the device time of a request of `tenant` that its client left, as far as
    /// the client has none of its result.
    pub fn count_wasted_time(&self, now: MonotonicTime, tenant: &TenantId, wasted: DeviceNanos) {
        // A count without weight would still raise the number of offences in the list.
        if wasted > DeviceNanos::ZERO {
            self.count(now, tenant, Offence::Cancels, micros(Duration::from_nanos(wasted.nanos())));
        }
    }

    /// Returns the penalties that hold, the longest first, up to a bound.
    pub fn list(&self, now: MonotonicTime) -> Vec<ListedPenalty<TenantId>> {
        self.lock().list(now, MOST_LISTED)
    }

    /// Returns the penalties of `tenant` that hold.
    pub fn list_of(&self, now: MonotonicTime, tenant: &TenantId) -> Vec<ListedPenalty<TenantId>> {
        self.lock().list_of(now, tenant)
    }

    /// Returns the number of penalties that hold by offence, in the order of [`Offence::ALL`].
    pub fn held(&self, now: MonotonicTime) -> [usize; Offence::ALL.len()] {
        self.lock().held(now)
    }

    /// Lifts the penalties of `tenant` and returns how many held.
    pub fn lift(&self, now: MonotonicTime, tenant: &TenantId) -> usize {
        self.lock().lift(now, tenant)
    }

    /// Forgets offences that have decayed. The sweeper calls this once a second.
    pub fn sweep(&self, now: MonotonicTime) {
        self.lock().sweep(now);
    }

    fn count(&self, now: MonotonicTime, tenant: &TenantId, offence: Offence, weight: u64) {
        let counted = self.lock().count(now, tenant, offence, weight);
        if counted.began {
            self.observer.penalty_began(offence);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PenaltyBook<TenantId>> {
        // Every change under the lock is complete before a panic could happen.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the unit in which wasted time is counted.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

const MINUTE_MILLIS: u64 = 60_000;

/// The shortest wait that a refusal counts as. No client comes back sooner.
const SHORTEST_WAIT: Duration = Duration::from_millis(100);

/// The longest wait that a refusal counts as. No client sleeps longer.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The wait that a refusal counts as if the client was told none.
const UNTOLD_WAIT: Duration = Duration::from_secs(1);

/// Penalties in one list.
const MOST_LISTED: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::NoObserver;

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    fn acme() -> TenantId {
        TenantId::new("acme").expect("a name")
    }

    /// A thousand clients that wait as told for an hour get no penalty; a storm
    /// that does not wait gets one, which decays.
    #[test]
    fn penalties_spare_clients_that_wait() {
        let penalties = TenantPenalties::new(&PenaltyConfig::default(), Arc::new(NoObserver));
        let wait = Some(Duration::from_secs(2));
        for second in (0..3_600).step_by(2) {
            for _ in 0..1_000 {
                penalties.count_refusal(at(second), &acme(), wait);
            }
            assert_eq!(penalties.check(at(second), &acme()), Ok(()), "at {second} s");
        }
        for second in 3_600..3_640 {
            for _ in 0..2_000 {
                penalties.count_refusal(at(second), &acme(), wait);
            }
        }
        let refused = penalties.check(at(3_640), &acme()).expect_err("a storm");
        assert!(matches!(refused, Refusal::Penalty { offence: Offence::Refusals, .. }));
        assert_eq!(penalties.check(at(3_701), &acme()), Ok(()), "the penalty has decayed");
    }
}
