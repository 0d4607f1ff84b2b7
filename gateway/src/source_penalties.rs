//! Penalties for network sources that send credentials which do not
//! authenticate. A valid credential from a penalised source is still served.
//! Tenants' own penalties are in the serving crate.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate_admission::{ListedPenalty, Offence, Penalty, PenaltyBook};
use tollgate_config::Penalties as PenaltyConfig;
use tollgate_domain::MonotonicTime;
use tollgate_edge::source::{MOST_SOURCES, Source};
use tollgate_serving::penalties::penalty_terms;

use crate::auth::AuthError;
use crate::reply::ApiError;
use crate::telemetry::Metrics;

/// The penalties of all network sources. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct SourcePenalties {
    book: Arc<Mutex<PenaltyBook<Source>>>,
    metrics: Arc<Metrics>,
}

impl SourcePenalties {
    /// Makes an empty book of penalties.
    pub(crate) fn new(config: &PenaltyConfig, metrics: Arc<Metrics>) -> Self {
        let terms = penalty_terms(config);
        // Beyond the bound, sources share the entry of their crowd.
        let book = PenaltyBook::new(terms, MOST_SOURCES, |source: &Source| source.in_crowd());
        Self { book: Arc::new(Mutex::new(book)), metrics }
    }

    /// Applies the terms of a new config to offences from now on.
    pub(crate) fn set_terms(&self, config: &PenaltyConfig) {
        self.lock().set_terms(penalty_terms(config));
    }

    /// Counts a credential from `source` that did not authenticate, and returns
    /// the error for its client.
    pub(crate) fn failed_authentication(
        &self,
        now: MonotonicTime,
        source: Option<Source>,
        error: AuthError,
    ) -> ApiError {
        // A request without a credential is no attempt to guess one, and a credential that
        // cannot be checked says nothing of its sender.
        let is_attempt = !matches!(error, AuthError::Missing | AuthError::Unconfirmed);
        let Some(source) = source.filter(|_| is_attempt) else { return error.into() };
        let counted = self.lock().count(now, &source, Offence::FailedAuthentication, 1);
        if counted.began {
            self.metrics.penalty_began(Offence::FailedAuthentication.as_str());
        }
        counted.penalty.map_or_else(|| error.into(), penalty_error)
    }

    /// Returns the penalties that hold, the longest first, up to a bound.
    pub(crate) fn list(&self, now: MonotonicTime) -> Vec<ListedPenalty<Source>> {
        self.lock().list(now, MOST_LISTED)
    }

    /// Returns the penalties of `source` that hold.
    pub(crate) fn list_of(&self, now: MonotonicTime, source: Source) -> Vec<ListedPenalty<Source>> {
        self.lock().list_of(now, &source)
    }

    /// Returns the number of penalties that hold by offence, in the order of [`Offence::ALL`].
    pub(crate) fn held(&self, now: MonotonicTime) -> [usize; Offence::ALL.len()] {
        self.lock().held(now)
    }

    /// Lifts the penalties of `source` and returns how many held.
    pub(crate) fn lift(&self, now: MonotonicTime, source: Source) -> usize {
        self.lock().lift(now, &source)
    }

    /// Forgets offences that have decayed. The composition root calls this once a
    /// second.
    pub(crate) fn sweep(&self, now: MonotonicTime) {
        self.lock().sweep(now);
    }

    fn lock(&self) -> MutexGuard<'_, PenaltyBook<Source>> {
        // Every change under the lock is complete before a panic could happen.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn penalty_error(penalty: Penalty) -> ApiError {
    let Penalty { offence, left } = penalty;
    ApiError::Penalty { offence, retry_after: left }
}

/// Penalties in one list.
const MOST_LISTED: usize = 1_000;

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use http::StatusCode;

    use super::*;

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    #[test]
    fn source_penalties_throttle_guessing_source_only() {
        let config =
            PenaltyConfig { failed_authentications_per_minute: 5, ..PenaltyConfig::default() };
        let penalties =
            SourcePenalties::new(&config, Metrics::new(tollgate_serving::Clock::system()));
        let source = |last| Some(Source::of(IpAddr::from(Ipv4Addr::new(192, 0, 2, last))));
        let fail = |now, source, error| penalties.failed_authentication(now, source, error);
        for _ in 0..5 {
            let error = fail(at(0), source(1), AuthError::Rejected);
            assert_eq!(error.status(), StatusCode::UNAUTHORIZED);
        }
        let error = fail(at(0), source(1), AuthError::Malformed);
        assert_eq!(error.status(), StatusCode::TOO_MANY_REQUESTS);
        let error = fail(at(0), source(1), AuthError::Missing);
        assert_eq!(error.status(), StatusCode::UNAUTHORIZED, "a missing key is no guess");
        let error = fail(at(0), source(2), AuthError::Rejected);
        assert_eq!(error.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(penalties.list(at(0)).len(), 1);
        assert_eq!(penalties.lift(at(0), source(1).expect("one")), 1);
        let error = fail(at(0), source(1), AuthError::Rejected);
        assert_eq!(error.status(), StatusCode::UNAUTHORIZED);
    }
}
