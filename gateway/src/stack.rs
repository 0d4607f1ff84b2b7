//! What every request passes, in one list, and the routes it can reach.

mod ids;
mod unread;

use std::any::Any;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::{BoxError, Router};
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, Version, header};
use tollgate_domain::{MonotonicTime, RequestId};
use tower::Service as _;

use self::ids::Ids;
use self::unread::Unread;

pub(crate) use self::unread::{Leftover, Unwanted};
use crate::Clock;
use crate::api::{Api, Asking};
use crate::listener::Peer;
use crate::reply::{ApiError, ErrorKind};
use crate::source::SourceRing;
use crate::telemetry::Metrics;

/// What the stack is made of.
#[derive(Clone)]
pub(crate) struct StackOptions {
    pub(crate) metrics: Arc<Metrics>,
    /// `None`: no ring, as on the admin listener, whose clients are few.
    pub(crate) sources: Option<SourceRing>,
    /// Bytes of the largest body of any route.
    pub(crate) largest_body: u64,
    /// Looks at the heads of requests for work; `None` where there are none.
    pub(crate) front: Option<Api>,
    /// Names a route for metrics: one of a closed set.
    pub(crate) endpoint: fn(&str) -> &'static str,
}

/// What answers requests: routes, and what comes before and after all of
/// them. One function and no layers, because most of a refusal's cost would be
/// the layers'.
pub(crate) struct Stack {
    routes: Router,
    options: StackOptions,
    clock: Clock,
    ids: Ids,
}

/// What a request's head came to.
pub(crate) enum Looked<B> {
    /// It is refused.
    Refused(Refused<B>),
    /// Nothing in it stands against the request.
    Passed(Passed),
}

/// A refusal, and what is left of its request.
pub(crate) struct Refused<B> {
    pub(crate) response: http::Response<Bytes>,
    /// `None`: there is no body.
    pub(crate) unwanted: Option<Unwanted<B>>,
}

/// A request on its way to the routes.
pub(crate) struct Passed {
    request: Request,
    endpoint: &'static str,
    began: MonotonicTime,
    id: HeaderValue,
}

/// A response, and what is left of its request.
pub(crate) struct Answer {
    pub(crate) response: Response,
    /// To be read and dropped while the response goes out.
    pub(crate) leftover: Option<Leftover>,
}

impl Stack {
    pub(crate) fn new(routes: Router, options: StackOptions, clock: Clock) -> Arc<Self> {
        Arc::new(Self { routes, options, ids: Ids::new(clock.clone()), clock })
    }

    /// Looks at a request's head: the list from top to bottom, of which nothing
    /// waits. Most of what attackers send ends here, so that no more is made of
    /// it than a response. `refused`: why the listener does not take it. Where a
    /// [token is shown](crate::auth::shows_token), it may take a signature's
    /// verification, and is not for the connection's own task.
    pub(crate) fn look<B>(
        &self,
        request: http::Request<B>,
        peer: Option<&Peer>,
        refused: Option<ApiError>,
    ) -> Looked<B>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let StackOptions { metrics, largest_body, endpoint, .. } = &self.options;
        let began = self.clock.now();
        // Every response has an id, of ours: what a client sends under that
        // name is not believed, because ids name entries of the ledger.
        let (id_bits, id) = self.ids.draw();
        let endpoint = endpoint(request.uri().path());
        let judged = match refused {
            Some(error) => Err(error),
            // A bug costs one request, not the connection's others.
            None => guarded(|| self.judge(&request, peer, began)),
        };
        match judged {
            Err(error) => {
                let mut response = error.to_response();
                metrics.error(error.kind().0);
                metrics.request_counted(endpoint, response.status());
                response.headers_mut().insert(REQUEST_ID, id);
                let unwanted = Unwanted::of(request, *largest_body);
                Looked::Refused(Refused { response, unwanted })
            }
            Ok(asking) => {
                let is_empty = request.body().is_end_stream();
                let mut request =
                    request.map(|body| if is_empty { Body::empty() } else { Body::new(body) });
                request.headers_mut().remove(REQUEST_ID);
                // Secrets are marked before a handler could log a header; what
                // judges logs none.
                hide_secrets(request.headers_mut());
                let extensions = request.extensions_mut();
                extensions.insert(RequestId::from_random(id_bits));
                peer.map(|peer| extensions.insert(peer.clone()));
                asking.map(|asking| extensions.insert(asking));
                Looked::Passed(Passed { request, endpoint, began, id })
            }
        }
    }

    /// Whether the head allows the request; what it says of who asks for work.
    fn judge<B: http_body::Body>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<Option<Asking>, ApiError> {
        let StackOptions { sources, largest_body, front, .. } = &self.options;
        // Nothing dearer than a lookup may come before the source ring.
        in_ring(sources.as_ref(), request.headers(), peer)?;
        of_head(request, *largest_body)?;
        let Some(front) = front else { return Ok(None) };
        let (method, path) = (request.method(), request.uri().path());
        front.look_at_head(method, path, request.headers(), peer, now)
    }

    /// Asks the routes, and deals with what is left of the request.
    pub(crate) async fn finish<B>(&self, looked: Looked<B>) -> Answer
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let StackOptions { metrics, largest_body, .. } = &self.options;
        let passed = match looked {
            Looked::Passed(passed) => passed,
            Looked::Refused(Refused { response, unwanted }) => {
                let mut response = response.map(Body::from);
                let leftover = match unwanted {
                    Some(unwanted) => Unread::from(unwanted).end(&mut response).await,
                    None => None,
                };
                return Answer { response, leftover };
            }
        };
        let Passed { request, endpoint, began, id } = passed;
        // Outside of what refuses or panics, so that these count, too.
        let in_flight = InFlight::begin(metrics);
        let (request, unread) = Unread::lend(request, *largest_body);
        let mut response = self.route(request).await;
        // What nobody has read must not be read as the next request.
        let leftover = match unread {
            Some(unread) => Box::pin(unread.end(&mut response)).await,
            None => None,
        };
        drop(in_flight);
        let elapsed = self.clock.now().since(began);
        metrics.request_answered(endpoint, response.status(), elapsed);
        if let Some(ErrorKind(kind)) = response.extensions().get() {
            metrics.error(kind);
        }
        response.headers_mut().insert(REQUEST_ID, id);
        Answer { response, leftover }
    }

    /// A bug costs one request, not the connection's others.
    async fn route(&self, request: Request) -> Response {
        let mut routes = self.routes.clone();
        match AssertUnwindSafe(routes.call(request)).catch_unwind().await {
            Ok(answered) => {
                let answered: Result<Response, Infallible> = answered;
                answered.unwrap_or_else(|never| match never {})
            }
            Err(panic) => answer_panic(panic),
        }
    }
}

/// The public routes, and JSON for what is none of them.
pub(crate) fn public(routes: Router) -> Router {
    routes.fallback(unknown_route).method_not_allowed_fallback(method_not_allowed)
}

fn hide_secrets(headers: &mut HeaderMap) {
    for name in [header::AUTHORIZATION, header::PROXY_AUTHORIZATION, header::COOKIE] {
        // `entry` alone would make room for each that is not there.
        if headers.contains_key(&name)
            && let header::Entry::Occupied(mut values) = headers.entry(name)
        {
            values.iter_mut().for_each(|value| value.set_sensitive(true));
        }
    }
}

fn in_ring(
    ring: Option<&SourceRing>,
    headers: &HeaderMap,
    peer: Option<&Peer>,
) -> Result<(), ApiError> {
    let Some(ring) = ring else { return Ok(()) };
    // Only a request that did not come through the listener has no peer.
    let peer = peer.ok_or(ApiError::Internal)?;
    ring.check(peer.client(headers))
}

/// What the head alone decides.
fn of_head<B: http_body::Body>(
    request: &http::Request<B>,
    largest_body: u64,
) -> Result<(), ApiError> {
    one_host(request)?;
    // Declared encodings are refused before a byte of them is read.
    let encoded = request.headers().get_all(header::CONTENT_ENCODING).iter().find(|encoding| {
        !encoding.as_bytes().eq_ignore_ascii_case(b"identity") && !encoding.is_empty()
    });
    if let Some(encoding) = encoded {
        let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
        return Err(ApiError::UnsupportedEncoding { encoding });
    }
    // A declared size is refused unread; an undeclared one at the limit.
    if request.body().size_hint().lower() > largest_body {
        return Err(ApiError::BodyTooLarge { limit: largest_body });
    }
    Ok(())
}

/// Over HTTP/2 a request names its host once, or twice the same; HTTP/1's
/// heads have been looked at by the listener.
fn one_host<B>(request: &http::Request<B>) -> Result<(), ApiError> {
    if request.version() != Version::HTTP_2 {
        return Ok(());
    }
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let mut hosts = request.headers().get_all(header::HOST).iter();
    match (authority, hosts.next(), hosts.next()) {
        (Some(_), None, None) | (None, Some(_), None) => Ok(()),
        (Some(authority), Some(host), None) if host.as_bytes().eq_ignore_ascii_case(authority) => {
            Ok(())
        }
        _ => Err(ApiError::malformed("There must be one host.")),
    }
}

/// Counted down also when the client leaves and the handler is dropped.
struct InFlight<'a>(&'a Metrics);

impl<'a> InFlight<'a> {
    fn begin(metrics: &'a Metrics) -> Self {
        metrics.request_began();
        Self(metrics)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.request_left();
    }
}

/// As [`Stack::route`].
fn guarded<T>(look: impl FnOnce() -> Result<T, ApiError>) -> Result<T, ApiError> {
    catch_unwind(AssertUnwindSafe(look)).unwrap_or_else(|panic| {
        tell_panic(panic);
        Err(ApiError::Internal)
    })
}

fn answer_panic(panic: Box<dyn Any + Send + 'static>) -> Response {
    tell_panic(panic);
    ApiError::Internal.into_response()
}

fn tell_panic(panic: Box<dyn Any + Send + 'static>) {
    // The panic hook has said where; what it said may hold a client's words.
    drop(panic);
    tracing::error!("a handler panicked");
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
