//! The rate of requests that no plan limits: read-only routes of the API, keyed
//! by caller, and the admin API.

use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use governor::clock::{Clock as _, DefaultClock};
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use tollgate_config::ReadLimits;

use crate::reply::ApiError;

/// A read limit with a bucket for each key of type `K`. Clones share it.
#[derive(Clone)]
pub(crate) struct ReadLimit<K: Hash + Eq + Clone> {
    buckets: Arc<ArcSwap<Buckets<K>>>,
}

/// The read limit of the admin API: one bucket, which all admins share.
pub(crate) type AdminReadLimit = ReadLimit<()>;

/// The buckets of a read limit, and the rate at which they fill.
struct Buckets<K: Hash + Eq + Clone> {
    limits: ReadLimits,
    limiter: RateLimiter<K, DefaultKeyedStateStore<K>, DefaultClock>,
}

impl<K: Hash + Eq + Clone> ReadLimit<K> {
    /// Creates a limit whose buckets are all full.
    pub(crate) fn new(limits: &ReadLimits) -> Self {
        Self { buckets: Arc::new(ArcSwap::from_pointee(Buckets::new(limits))) }
    }

    /// Puts another rate in force. A changed rate begins with a full burst for every key;
    /// the same rate keeps every bucket.
    pub(crate) fn adopt(&self, limits: &ReadLimits) {
        if self.buckets.load().limits != *limits {
            self.buckets.store(Arc::new(Buckets::new(limits)));
        }
    }

    /// Counts one request of `key`.
    ///
    /// # Errors
    /// `key` has sent too many requests.
    pub(crate) fn check(&self, key: &K) -> Result<(), ApiError> {
        let buckets = self.buckets.load();
        let Buckets { limits, limiter } = &**buckets;
        limiter.check_key(key).map_err(|refused| ApiError::ReadLimit {
            per_second: limits.requests_per_second,
            // The limiter's own clock, because making another one asks the processor what it
            // can do, which takes microseconds in a virtual machine.
            retry_after: refused.wait_time_from(limiter.clock().now()),
        })
    }

    /// Drops the buckets that are full again. Called once a second, so that the
    /// map holds only callers of the last seconds.
    pub(crate) fn sweep(&self) {
        self.buckets.load().limiter.retain_recent();
    }
}

impl<K: Hash + Eq + Clone> Buckets<K> {
    fn new(limits: &ReadLimits) -> Self {
        let ReadLimits { requests_per_second, request_burst } = *limits;
        // Config refuses zero.
        let least_one = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        let quota =
            Quota::per_second(least_one(requests_per_second)).allow_burst(least_one(request_burst));
        Self { limits: limits.clone(), limiter: RateLimiter::dashmap(quota) }
    }
}

/// Lets requests of admins pass at their rate. Belongs inside the check of the admin key, so
/// that only admins spend the rate.
pub(crate) async fn limit_admins(
    State(limit): State<AdminReadLimit>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    limit.check(&())?;
    Ok(next.run(request).await)
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use crate::api::tests::test_gateway::{PLAIN, TestGateway, header, json};

    #[tokio::test]
    async fn read_limit_refuses_one_caller_beyond_burst() {
        let config =
            format!("{PLAIN}[gateway.reads]\nrequests_per_second = 1\nrequest_burst = 2\n");
        let gateway = TestGateway::open(TestGateway::folder(), &config, &[]).await;
        let models = async |tenant| gateway.ask(tenant, "GET", "/v1/models", "").await;
        for _ in 0..2 {
            assert_eq!(models("acme").await.status(), StatusCode::OK);
        }
        let refused = models("acme").await;
        assert!(header(&refused, "retry-after").parse::<u64>().is_ok_and(|wait| wait >= 1));
        let (status, body) = json(refused).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(body["error"]["code"], "rate_limit_exceeded");
        assert_eq!(models("other").await.status(), StatusCode::OK, "a key of its own");
        // Plans limit work; a spent read limit does not.
        let chat = gateway.chat("").await.status();
        assert_eq!(chat, StatusCode::NOT_FOUND, "no worker serves the model");
    }
}
