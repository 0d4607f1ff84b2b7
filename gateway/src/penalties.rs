//! Abuse has memory: who offends again and again waits, and is told why.
//!
//! Tenants are penalised for what they do as callers; network sources only
//! for credentials that do not authenticate, so that a good one from the same
//! source is served all the same. Asking is a lookup and comes before a body
//! is read. Admins list and lift penalties; the arithmetic is admission's.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_admission::{Counted, ListedPenalty, Offence, Penalty, PenaltyBook, PenaltyTerms};
use tollgate_config::Penalties as Terms;
use tollgate_domain::{MonotonicTime, TenantId};

use crate::auth::AuthError;
use crate::reply::ApiError;
use crate::telemetry::Metrics;
use tollgate_edge::source::{MOST_SOURCES, Source};

/// All penalties of a gateway. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Penalties {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Bounded by the tenants of the config: nobody else is counted.
    tenants: Mutex<PenaltyBook<TenantId>>,
    sources: Mutex<PenaltyBook<Source>>,
    metrics: Arc<Metrics>,
}

impl Penalties {
    /// None yet.
    pub(crate) fn new(config: &Terms, metrics: Arc<Metrics>) -> Self {
        let Terms {
            refused_clients,
            cancels_per_minute,
            failed_authentications_per_minute,
            longest,
        } = *config;
        let free = |offence| match offence {
            // A client that waits as told weighs a minute in a minute.
            Offence::Refusals => u64::from(refused_clients) * MINUTE_MILLIS,
            Offence::FailedAuthentication => failed_authentications_per_minute.into(),
            Offence::Cancels => cancels_per_minute.into(),
        };
        let terms = PenaltyTerms { free_per_minute: Offence::ALL.map(free), longest };
        let tenants = PenaltyBook::new(terms, usize::MAX, Clone::clone);
        let sources = PenaltyBook::new(terms, MOST_SOURCES, |source: &Source| source.in_crowd());
        let (tenants, sources) = (Mutex::new(tenants), Mutex::new(sources));
        Self { shared: Arc::new(Shared { tenants, sources, metrics }) }
    }

    /// Refuses a tenant that is penalised.
    ///
    /// # Errors
    /// The penalty, to be told.
    pub(crate) fn check(&self, now: MonotonicTime, tenant: &TenantId) -> Result<(), ApiError> {
        self.tenants().penalty(now, tenant).map_or(Ok(()), |penalty| Err(penalty.into()))
    }

    /// Enters that a request of `tenant`, which is one of the config's, was
    /// answered with `error`. Our own faults and overloads are not its offence.
    pub(crate) fn answered(&self, now: MonotonicTime, tenant: &TenantId, error: &ApiError) {
        if !error.status().is_client_error() {
            return;
        }
        let told = error.told_wait().unwrap_or(UNTOLD).clamp(SHORTEST, LONGEST);
        let weight = u64::try_from(told.as_millis()).unwrap_or(u64::MAX);
        let counted = self.tenants().count(now, tenant, Offence::Refusals, weight);
        self.told(counted, Offence::Refusals);
    }

    /// Enters that `tenant` left a request that waited or ran.
    pub(crate) fn cancelled(&self, now: MonotonicTime, tenant: &TenantId) {
        let counted = self.tenants().count(now, tenant, Offence::Cancels, 1);
        self.told(counted, Offence::Cancels);
    }

    /// Enters that a credential from `source` did not authenticate; what the
    /// client is told.
    pub(crate) fn failed_authentication(
        &self,
        now: MonotonicTime,
        source: Option<Source>,
        error: AuthError,
    ) -> ApiError {
        // Who shows nothing guesses nothing.
        let (Some(source), false) = (source, error == AuthError::Missing) else {
            return error.into();
        };
        let counted = self.sources().count(now, &source, Offence::FailedAuthentication, 1);
        self.told(counted, Offence::FailedAuthentication);
        counted.penalty.map_or_else(|| error.into(), ApiError::from)
    }

    /// Those of tenants that hold, the longest first.
    pub(crate) fn of_tenants(&self, now: MonotonicTime) -> Vec<ListedPenalty<TenantId>> {
        self.tenants().list(now, MOST_LISTED)
    }

    /// Those of sources that hold, the longest first.
    pub(crate) fn of_sources(&self, now: MonotonicTime) -> Vec<ListedPenalty<Source>> {
        self.sources().list(now, MOST_LISTED)
    }

    /// Takes a tenant's penalties away; how many held.
    pub(crate) fn lift_tenant(&self, now: MonotonicTime, tenant: &TenantId) -> usize {
        self.tenants().lift(now, tenant)
    }

    /// Takes a source's penalties away; how many held.
    pub(crate) fn lift_source(&self, now: MonotonicTime, source: Source) -> usize {
        self.sources().lift(now, &source)
    }

    /// Forgets what has decayed; call it each second.
    pub(crate) fn sweep(&self, now: MonotonicTime) {
        self.tenants().sweep(now);
        self.sources().sweep(now);
    }

    fn told(&self, counted: Counted, offence: Offence) {
        if counted.began {
            self.shared.metrics.penalty_began(offence.as_str());
        }
    }

    fn tenants(&self) -> MutexGuard<'_, PenaltyBook<TenantId>> {
        self.shared.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sources(&self) -> MutexGuard<'_, PenaltyBook<Source>> {
        self.shared.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<Penalty> for ApiError {
    fn from(penalty: Penalty) -> Self {
        let Penalty { offence, left } = penalty;
        Self::Penalty { offence, retry_after: left }
    }
}

const MINUTE_MILLIS: u64 = 60_000;

/// A refusal weighs the wait that it told of: that is for how long an honest
/// client stays away. None comes back sooner than this, and clients do not
/// sleep longer than that.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(60);

/// What a refusal weighs that named no time to come back.
const UNTOLD: Duration = Duration::from_secs(1);

/// Penalties in one list.
const MOST_LISTED: usize = 1_000;

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use http::StatusCode;
    use tollgate_admission::{Figures, Limit, Refusal, Scope};

    use super::*;

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    fn penalties() -> Penalties {
        let terms = Terms { failed_authentications_per_minute: 5, ..Terms::default() };
        Penalties::new(&terms, Metrics::new())
    }

    fn acme() -> TenantId {
        TenantId::new("acme").expect("a name")
    }

    fn refusal(wait: Duration) -> ApiError {
        ApiError::from(Refusal {
            limit: Limit::Requests,
            scope: Scope::Tenant(acme()),
            class: None,
            value: 60,
            largest: 60,
            asked: 1,
            remaining: 0,
            retry_after: Some(wait),
            resets: None,
            permanent: false,
            figures: Figures::default(),
        })
    }

    /// T20: a source that fails is throttled; another source is not.
    #[test]
    fn a_source_that_guesses_is_throttled() {
        let penalties = penalties();
        let source = |last| Some(Source::of(IpAddr::from(Ipv4Addr::new(192, 0, 2, last))));
        let fail = |now, source, error| penalties.failed_authentication(now, source, error);
        for _ in 0..5 {
            let told = fail(at(0), source(1), AuthError::Rejected);
            assert_eq!(told.status(), StatusCode::UNAUTHORIZED);
        }
        let told = fail(at(0), source(1), AuthError::Malformed);
        assert_eq!(told.status(), StatusCode::TOO_MANY_REQUESTS);
        let told = fail(at(0), source(1), AuthError::Missing);
        assert_eq!(told.status(), StatusCode::UNAUTHORIZED, "nothing was guessed");
        let told = fail(at(0), source(2), AuthError::Rejected);
        assert_eq!(told.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(penalties.of_sources(at(0)).len(), 1);
        assert_eq!(penalties.lift_source(at(0), source(1).expect("one")), 1);
        let told = fail(at(0), source(1), AuthError::Rejected);
        assert_eq!(told.status(), StatusCode::UNAUTHORIZED);
    }

    /// A thousand clients that wait as told for an hour are never penalised;
    /// a storm that does not wait is, and decays.
    #[test]
    fn who_waits_as_told_is_not_penalised() {
        let penalties = penalties();
        let wait = Duration::from_secs(2);
        for second in (0..3_600).step_by(2) {
            for _ in 0..1_000 {
                penalties.answered(at(second), &acme(), &refusal(wait));
            }
            assert_eq!(penalties.check(at(second), &acme()), Ok(()), "at {second} s");
        }
        for second in 3_600..3_640 {
            for _ in 0..2_000 {
                penalties.answered(at(second), &acme(), &refusal(wait));
            }
        }
        let told = penalties.check(at(3_640), &acme()).expect_err("a storm");
        assert!(matches!(told, ApiError::Penalty { offence: Offence::Refusals, .. }), "{told:?}");
        assert_eq!(penalties.check(at(3_701), &acme()), Ok(()), "it has decayed");
    }

    /// Faults of ours are nobody's offence.
    #[test]
    fn our_own_faults_do_not_count() {
        let penalties = penalties();
        for _ in 0..1_000_000 {
            penalties.answered(at(0), &acme(), &ApiError::Internal);
            penalties.answered(at(0), &acme(), &ApiError::Overloaded { retry_after: None });
        }
        assert_eq!(penalties.check(at(0), &acme()), Ok(()));
    }
}
