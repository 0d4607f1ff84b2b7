//! What every request passes, in one list, and the routes it can reach.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::Limited;
use tollgate_domain::RequestId;
use tower::util::BoxCloneSyncService;
use tower::{Layer as _, ServiceBuilder};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::sensitive_headers::SetSensitiveRequestHeadersLayer;

use crate::listener::RequestService;
use crate::reply::{ApiError, ErrorKind};
use crate::source::SourceRing;
use crate::telemetry::Metrics;

/// What the layers need.
#[derive(Clone)]
pub(crate) struct StackOptions {
    pub(crate) metrics: Arc<Metrics>,
    /// `None`: no ring, as on the admin listener, whose clients are few.
    pub(crate) sources: Option<SourceRing>,
    /// Bytes of the largest body of any route.
    pub(crate) largest_body: u64,
    /// Names a route for metrics: one of a closed set.
    pub(crate) endpoint: fn(&str) -> &'static str,
}

/// Routes behind the layers. Outermost first: a request passes from top to
/// bottom, its response from bottom to top.
pub(crate) fn stack(routes: Router, options: StackOptions) -> RequestService {
    let StackOptions { metrics, sources, largest_body, endpoint } = options;
    let counted = Counted { metrics, endpoint };
    let routes = ServiceBuilder::new()
        // Two lengths in one head are how requests are smuggled; an unread body
        // is no place to go on from.
        .layer(from_fn(end_after_chunks))
        // Declared encodings are refused before a byte of them is read.
        .layer(from_fn(refuse_encodings))
        // A declared size is refused unread; an undeclared one at the limit.
        .layer(from_fn_with_state(BodyLimit(largest_body), limit_body))
        .service(routes);
    let ringed: RequestService = match sources {
        // Nothing dearer than a lookup may come before the source ring.
        Some(ring) => BoxCloneSyncService::new(ring.layer().layer(routes)),
        None => BoxCloneSyncService::new(routes),
    };
    BoxCloneSyncService::new(
        ServiceBuilder::new()
            // Every response has an id, so it comes before all that responds.
            .layer(from_fn(name_request))
            // Secrets are marked before anything could log a header.
            .layer(SetSensitiveRequestHeadersLayer::new([
                header::AUTHORIZATION,
                header::PROXY_AUTHORIZATION,
                header::COOKIE,
            ]))
            // Outside of what refuses or panics, so that these count, too.
            .layer(from_fn_with_state(counted, count))
            // A bug costs one request, not the connection's others.
            .layer(CatchPanicLayer::custom(answer_panic))
            .service(ringed),
    )
}

/// The public routes, and JSON for what is none of them.
pub(crate) fn public(routes: Router) -> Router {
    routes.fallback(unknown_route).method_not_allowed_fallback(method_not_allowed)
}

/// Gives the request an id of ours: what a client sends under that name is
/// not believed, because ids name entries of the ledger.
async fn name_request(mut request: Request, next: Next) -> Response {
    let id = random_id();
    let value = HeaderValue::from_str(id.as_str()).expect("hex digits are visible ASCII");
    request.headers_mut().remove(REQUEST_ID);
    request.extensions_mut().insert(id);
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, value);
    response
}

fn random_id() -> RequestId {
    let mut bits = [0; 16];
    // The system's generator does not fail once it has been seeded.
    aws_lc_rs::rand::fill(&mut bits).expect("the system gives random bytes");
    RequestId::from_random(u128::from_ne_bytes(bits))
}

#[derive(Clone)]
struct Counted {
    metrics: Arc<Metrics>,
    endpoint: fn(&str) -> &'static str,
}

async fn count(State(counted): State<Counted>, request: Request, next: Next) -> Response {
    let Counted { metrics, endpoint } = counted;
    let endpoint = endpoint(request.uri().path());
    let began = Instant::now();
    let in_flight = InFlight::begin(metrics);
    let response = next.run(request).await;
    let metrics = &in_flight.0;
    metrics.request_answered(endpoint, response.status(), began.elapsed());
    if let Some(ErrorKind(kind)) = response.extensions().get() {
        metrics.error(kind);
    }
    response
}

/// Counted down also when the client leaves and the handler is dropped.
struct InFlight(Arc<Metrics>);

impl InFlight {
    fn begin(metrics: Arc<Metrics>) -> Self {
        metrics.request_began();
        Self(metrics)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.request_left();
    }
}

fn answer_panic(panic: Box<dyn Any + Send + 'static>) -> Response {
    // The panic hook has said where; what it said may hold a client's words.
    drop(panic);
    tracing::error!("a handler panicked");
    ApiError::Internal.into_response()
}

/// Over HTTP/1 a chunked request is the last on its connection. hyper takes
/// chunks where a head has both `Transfer-Encoding` and `Content-Length`, and
/// forgets that there were both; RFC 9112, 6.3 wants the connection closed
/// then, so that nothing is read as a next request that a proxy meant as body.
async fn end_after_chunks(request: Request, next: Next) -> Response {
    let is_http1 = request.version() < http::Version::HTTP_2;
    let is_chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
    let has_body = !request.body().is_end_stream();
    let mut response = next.run(request).await;
    // A body that was refused unread leaves the connection nowhere: say so.
    if is_http1 && (is_chunked || has_body && is_refused_unread(response.status())) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The refusals that come before a byte of the body is read.
fn is_refused_unread(status: StatusCode) -> bool {
    const UNREAD: [StatusCode; 6] = [
        StatusCode::UNAUTHORIZED,
        StatusCode::FORBIDDEN,
        StatusCode::NOT_FOUND,
        StatusCode::METHOD_NOT_ALLOWED,
        StatusCode::PAYLOAD_TOO_LARGE,
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
    ];
    UNREAD.contains(&status)
}

async fn refuse_encodings(request: Request, next: Next) -> Response {
    let encoded = request.headers().get_all(header::CONTENT_ENCODING).iter().find(|encoding| {
        !encoding.as_bytes().eq_ignore_ascii_case(b"identity") && !encoding.is_empty()
    });
    match encoded {
        Some(encoding) => {
            let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
            ApiError::UnsupportedEncoding { encoding }.into_response()
        }
        None => next.run(request).await,
    }
}

#[derive(Clone, Copy)]
struct BodyLimit(u64);

async fn limit_body(
    State(BodyLimit(limit)): State<BodyLimit>,
    request: Request,
    next: Next,
) -> Response {
    if http_body::Body::size_hint(request.body()).lower() > limit {
        return ApiError::BodyTooLarge { limit }.into_response();
    }
    // One byte more, so that a reader of its own finds its limit exceeded
    // rather than its body broken.
    let most = usize::try_from(limit.saturating_add(1)).unwrap_or(usize::MAX);
    next.run(request.map(|body| Body::new(Limited::new(body, most)))).await
}

pub(crate) async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::UnknownRoute { method, path: uri.path().to_owned() }
}

pub(crate) async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::MethodNotAllowed { method, path: uri.path().to_owned() }
}

/// The public routes, for metrics.
pub(crate) fn public_endpoint(path: &str) -> &'static str {
    match path {
        "/v1/chat/completions" => "chat_completions",
        "/v1/completions" => "completions",
        "/v1/models" => "models",
        "/v1/usage" => "usage",
        _ if path.starts_with("/v1/models/") => "model",
        _ if path.starts_with("/v1/usage/") => "request_usage",
        _ => "other",
    }
}

/// The id of a request, in every response.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[cfg(test)]
mod tests;
