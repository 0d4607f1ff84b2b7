//! The rate of requests that no plan limits: read-only routes of the API, keyed
//! by caller, and the admin API. `tower_governor` enforces the rate; this module
//! chooses its keys and words its refusals.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use governor::middleware::NoOpMiddleware;
use tollgate_config::ReadLimits;
use tollgate_domain::Caller;
use tower::{Layer, Service};
use tower_governor::governor::{GovernorConfig, GovernorConfigBuilder};
use tower_governor::key_extractor::{GlobalKeyExtractor, KeyExtractor};
use tower_governor::{GovernorError, GovernorLayer, ResponseFuture};

use crate::reply::ApiError;

/// A read limit with keys of `K`. Clones share it.
#[derive(Clone)]
pub(crate) struct ReadLimit<K: KeyExtractor> {
    buckets: Arc<ArcSwap<Buckets<K>>>,
}

/// The buckets of a read limit, and the rate at which they fill.
struct Buckets<K: KeyExtractor> {
    limits: ReadLimits,
    keys: K,
    governor: Arc<GovernorConfig<K, NoOpMiddleware>>,
}

/// The layer that enforces a read limit, as it is when a request comes.
#[derive(Clone)]
pub(crate) struct ReadLimitLayer<K: KeyExtractor>(ReadLimit<K>);

/// A service behind a read limit.
#[derive(Clone)]
pub(crate) struct ReadLimited<K: KeyExtractor, S> {
    limit: ReadLimit<K>,
    inner: S,
}

impl ReadLimit<ByCaller> {
    /// Creates a limit with a bucket for each caller.
    pub(crate) fn by_caller(limits: &ReadLimits) -> Self {
        Self::new(ByCaller, limits)
    }
}

impl ReadLimit<GlobalKeyExtractor> {
    /// Creates a limit with one bucket, for the holders of the admin key.
    pub(crate) fn of_admins(limits: &ReadLimits) -> Self {
        Self::new(GlobalKeyExtractor, limits)
    }
}

impl<K: KeyExtractor> ReadLimit<K> {
    fn new(keys: K, limits: &ReadLimits) -> Self {
        Self { buckets: Arc::new(ArcSwap::from_pointee(Buckets::new(keys, limits))) }
    }

    /// Puts another rate in force. A changed rate begins with a full burst for every key;
    /// the same rate keeps every bucket.
    pub(crate) fn adopt(&self, limits: &ReadLimits) {
        let buckets = self.buckets.load();
        if buckets.limits != *limits {
            self.buckets.store(Arc::new(Buckets::new(buckets.keys.clone(), limits)));
        }
    }

    /// Returns the layer that enforces the limit.
    pub(crate) fn layer(&self) -> ReadLimitLayer<K> {
        ReadLimitLayer(self.clone())
    }

    /// Drops the buckets that are full again. Called once a second, so that the
    /// map holds only callers of the last seconds.
    pub(crate) fn sweep(&self) {
        self.buckets.load().governor.limiter().retain_recent();
    }
}

impl<K: KeyExtractor> Buckets<K> {
    #[expect(
        clippy::expect_used,
        reason = "the config bounds the rate, so neither period nor burst is zero"
    )]
    fn new(keys: K, limits: &ReadLimits) -> Self {
        let ReadLimits { requests_per_second: _, request_burst } = *limits;
        let governor = GovernorConfigBuilder::default()
            .period(Duration::from_secs(1) / per_second(limits).get())
            .burst_size(request_burst.max(1))
            .key_extractor(keys.clone())
            .finish()
            .expect("neither period nor burst is zero");
        Self { limits: limits.clone(), keys, governor: Arc::new(governor) }
    }

    /// Returns the crate's layer over these buckets.
    fn layer(&self) -> GovernorLayer<K, NoOpMiddleware, Body> {
        let per_second = per_second(&self.limits).get();
        GovernorLayer::new(Arc::clone(&self.governor))
            // The crate's own answer is plain text, and clients expect the API's JSON.
            .error_handler(move |error| refusal(error, per_second))
    }
}

impl<K: KeyExtractor, S> Layer<S> for ReadLimitLayer<K> {
    type Service = ReadLimited<K, S>;

    fn layer(&self, inner: S) -> Self::Service {
        ReadLimited { limit: self.0.clone(), inner }
    }
}

impl<K, S, B> Service<http::Request<B>> for ReadLimited<K, S>
where
    K: KeyExtractor,
    S: Service<http::Request<B>, Response = Response> + Clone,
{
    type Response = Response;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, Body>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        // The clone is not ready; the one that `poll_ready` made ready is used up.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        // Made for each request, because a reload may have replaced the buckets.
        self.limit.buckets.load().layer().layer(ready).call(request)
    }
}

/// Config refuses zero, which is the only rate that has no period.
fn per_second(limits: &ReadLimits) -> NonZeroU32 {
    NonZeroU32::new(limits.requests_per_second).unwrap_or(NonZeroU32::MIN)
}

/// Keys by the caller, which the dispatch of routes puts into the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByCaller;

impl KeyExtractor for ByCaller {
    type Key = Caller;

    fn extract<B>(&self, request: &http::Request<B>) -> Result<Caller, GovernorError> {
        request.extensions().get().cloned().ok_or(GovernorError::UnableToExtractKey)
    }
}

/// Words a refusal in the API's own envelope.
fn refusal(error: GovernorError, per_second: u32) -> Response {
    let error = match error {
        GovernorError::TooManyRequests { wait_time, .. } => {
            // The crate rounds the wait down to whole seconds.
            let retry_after = Duration::from_secs(wait_time + 1);
            ApiError::ReadLimit { per_second, retry_after }
        }
        // The dispatch inserts every caller, so a missing one is a mistake of the gateway.
        GovernorError::UnableToExtractKey | GovernorError::Other { .. } => ApiError::Internal,
    };
    error.into_response()
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
