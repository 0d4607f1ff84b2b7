//! The steps that every request passes on either listener, in one list, and
//! the seam to the routes that answer it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, Version, header};
use hyper::body::Incoming;
use tollgate_domain::{Caller, MonotonicTime, RequestId};
use tollgate_edge::drain_body::{RequestBody, UnreadBody, UnwantedBody, lend};
use tollgate_edge::listener::{Answer, BadHead, HeadVerdict, RefusedHead, RequestRefusal};
use tollgate_edge::request_ids::RequestIds;
use tollgate_edge::source::{SourceRefusal, SourceRing};
use tollgate_edge::{Peer, Service};

use crate::Clock;
use crate::access_log::{AccessEnd, AccessFacts, AccessLog};
use crate::auth::shows_token;
use crate::client_ids::ClientIds;
use crate::cors::{Cors, CorsHeaders};
use crate::doors::LargestBody;
use crate::reply::{ApiError, ErrorKind};
use crate::telemetry::Metrics;

/// The routes behind a stack.
pub(crate) trait Routes: Send + Sync + 'static {
    /// The facts that the head check found and that the handler needs.
    type Target: Send + 'static;

    /// Returns the label of `path` in metrics, one of a closed set.
    fn label(&self, path: &str) -> &'static str;

    /// Returns the size of the largest body of `path`, if it differs from that of the other
    /// paths.
    fn largest_body(&self, _path: &str) -> Option<u64> {
        None
    }

    /// Decides what the head of a request alone decides, without waiting.
    fn check_head<B>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<Self::Target, ApiError>;

    /// Returns the caller of a request that the head check refused, for the access log.
    fn refused_caller<B>(
        &self,
        _request: &http::Request<B>,
        _peer: Option<&Peer>,
        _now: MonotonicTime,
    ) -> Option<Caller> {
        None
    }

    /// Returns the caller of a request that passed the head check.
    fn caller(&self, _target: &Self::Target) -> Option<Caller> {
        None
    }

    /// Answers a request that passed the head check.
    fn answer(
        &self,
        target: Self::Target,
        request: Request,
        id: RequestId,
    ) -> impl Future<Output = Response> + Send;
}

/// The parts of a stack that differ between the listeners.
#[derive(Clone)]
pub(crate) struct StackOptions {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) access_log: AccessLog,
    /// `None` on the admin listener, whose clients are few.
    pub(crate) sources: Option<SourceRing>,
    /// `None` on the admin listener, which no web page may call.
    pub(crate) cors: Option<Cors>,
    /// The size of the largest body of a route that has no size of its own.
    pub(crate) largest_body: LargestBody,
    /// The number of the gateway in request ids, 0 where there is one gateway.
    pub(crate) gateway: u32,
}

/// The service behind a listener: its routes, and the steps before and after
/// every one of them. The steps are one function and no tower layers, because
/// layers would be most of the cost of a refusal.
pub(crate) struct Stack<R> {
    routes: R,
    options: StackOptions,
    clock: Clock,
    ids: RequestIds,
}

/// The mark of a response whose request has a record of its own, which writes the line of the
/// access log. It is in the response's extensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HasRecord;

/// A request that passed the head check, on its way to the routes.
pub(crate) struct Passed<T> {
    request: Request,
    target: T,
    label: &'static str,
    began: MonotonicTime,
    id: RequestId,
    id_header: HeaderValue,
    /// The facts for the access log, while it is on.
    access: Option<AccessFacts>,
    /// The headers for web pages that read the response.
    cors: CorsHeaders,
    /// The size of the largest body, bytes.
    largest_body: u64,
}

impl<R: Routes> Stack<R> {
    pub(crate) fn new(routes: R, options: StackOptions, clock: Clock) -> Arc<Self> {
        let ids = RequestIds::new(options.gateway);
        Arc::new(Self { routes, options, ids, clock })
    }

    /// Checks the head of a request, from the top of the list to the bottom,
    /// without waiting. Most requests of attackers end here, so the gateway
    /// builds nothing for them but a response. `refusal` is the listener's
    /// reason to refuse the request.
    pub(crate) fn check_head<B: RequestBody>(
        &self,
        request: http::Request<B>,
        peer: Option<&Peer>,
        refusal: Option<ApiError>,
    ) -> HeadVerdict<Passed<R::Target>, B> {
        let StackOptions { metrics, cors, largest_body, .. } = &self.options;
        let own_size = self.routes.largest_body(request.uri().path());
        // Read for each request, because a reload can change the size.
        let largest_body = own_size.unwrap_or_else(|| largest_body.bytes());
        let began = self.clock.now();
        // Every response has an id of ours. A client's own `x-request-id` is
        // ignored, because ids name entries of the ledger.
        let (id_bits, id_header) = self.ids.draw(|| self.clock.utc());
        let label = self.routes.label(request.uri().path());
        // Before the verdict, because a page must be able to read a refusal, too.
        let cors = cors.as_ref().map(|cors| cors.headers(request.headers())).unwrap_or_default();
        let verdict = match refusal {
            Some(error) => Err(error),
            None => guarded(|| self.verdict(&request, peer, (began, largest_body))),
        };
        match verdict {
            Err(error) => {
                let mut response = error.to_response();
                metrics.error(error.kind().0);
                metrics.request_counted(label, response.status());
                let end = AccessEnd {
                    status: Some(response.status()),
                    error: Some(error.kind().0),
                    work: None,
                };
                // Gathered only for a line that is written, because attacks bring many refusals.
                self.options.access_log.write(&end, || AccessFacts {
                    request: RequestId::from_random(id_bits),
                    endpoint: label,
                    caller: self.routes.refused_caller(&request, peer, began),
                    client: ClientIds::of(request.headers()),
                });
                response.headers_mut().insert(REQUEST_ID, id_header);
                cors.write(response.headers_mut());
                let unwanted = UnwantedBody::of(request, largest_body);
                HeadVerdict::Refused(RefusedHead { response, unwanted })
            }
            Ok(target) => {
                let is_empty = request.body().is_end_stream();
                let mut request =
                    request.map(|body| if is_empty { Body::empty() } else { Body::new(body) });
                // A handler must not mistake the client's id for ours.
                request.headers_mut().remove(REQUEST_ID);
                // Marked before a handler could log a header; the head check
                // logs none.
                hide_secrets(request.headers_mut());
                let id = RequestId::from_random(id_bits);
                let access = self.options.access_log.is_on().then(|| AccessFacts {
                    request: id.clone(),
                    endpoint: label,
                    caller: self.routes.caller(&target),
                    client: ClientIds::of(request.headers()),
                });
                HeadVerdict::Passed(Passed {
                    request,
                    target,
                    label,
                    began,
                    id,
                    id_header,
                    access,
                    cors,
                    largest_body,
                })
            }
        }
    }

    /// Decides whether the head allows the request.
    fn verdict<B: http_body::Body>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        (now, largest_body): (MonotonicTime, u64),
    ) -> Result<R::Target, ApiError> {
        let StackOptions { sources, .. } = &self.options;
        // Nothing dearer than a lookup may come before the source ring.
        in_ring(sources.as_ref(), request.headers(), peer)?;
        check_body_and_host(request, largest_body)?;
        self.routes.check_head(request, peer, now)
    }

    /// Asks the routes for the response, and settles what is left of the
    /// request's body.
    pub(crate) async fn finish<B: RequestBody>(
        &self,
        verdict: HeadVerdict<Passed<R::Target>, B>,
    ) -> Answer<Body> {
        let StackOptions { metrics, .. } = &self.options;
        let passed = match verdict {
            HeadVerdict::Passed(passed) => passed,
            HeadVerdict::Refused(RefusedHead { response, unwanted }) => {
                let mut response = response.map(Body::from);
                let leftover = match unwanted {
                    Some(unwanted) => UnreadBody::from(unwanted).settle(&mut response).await,
                    None => None,
                };
                return Answer { response, leftover };
            }
        };
        let Passed { request, target, label, began, id, id_header, access, cors, largest_body } =
            passed;
        // Created before the handler runs, so refusals and panics are counted.
        let in_flight = InFlight::begin(metrics);
        let (request, unread) = lend(request, largest_body);
        let request = request.map(|body| body.map_or_else(Body::empty, Body::new));
        let mut response = self.route(target, request, id).await;
        // Bytes that no handler has read must not be read as the next request.
        // Boxed, because few requests leave a rest and the future would grow
        // for all of them.
        let leftover = match unread {
            Some(unread) => Box::pin(unread.settle(&mut response)).await,
            None => None,
        };
        drop(in_flight);
        let elapsed = self.clock.now().since(began);
        metrics.request_answered(label, response.status(), elapsed);
        let error = response.extensions().get().map(|ErrorKind(kind)| *kind);
        if let Some(kind) = error {
            metrics.error(kind);
        }
        // The record of a request for work writes the line itself, once its figures are known.
        if let Some(facts) = access.filter(|_| response.extensions().get::<HasRecord>().is_none()) {
            let end = AccessEnd { status: Some(response.status()), error, work: None };
            self.options.access_log.write(&end, || facts);
        }
        response.headers_mut().insert(REQUEST_ID, id_header);
        cors.write(response.headers_mut());
        Answer { response, leftover }
    }

    /// Calls the routes. A panic costs this request and no other request of
    /// the connection.
    async fn route(&self, target: R::Target, request: Request, id: RequestId) -> Response {
        let answering = self.routes.answer(target, request, id);
        AssertUnwindSafe(answering).catch_unwind().await.unwrap_or_else(|panic| {
            log_panic(panic);
            ApiError::Internal.into_response()
        })
    }
}

impl<R: Routes> Service for Stack<R> {
    type Passed = Passed<R::Target>;
    type Body = Body;

    fn is_costly(&self, headers: &HeaderMap) -> bool {
        // Verifying the signature of a token takes a fraction of a millisecond.
        shows_token(headers)
    }

    fn check_head(
        &self,
        request: http::Request<Incoming>,
        peer: &Peer,
        refusal: Option<RequestRefusal>,
    ) -> HeadVerdict<Self::Passed, Incoming> {
        self.check_head(request, Some(peer), refusal.map(ApiError::from))
    }

    async fn answer(&self, verdict: HeadVerdict<Self::Passed, Incoming>) -> Answer<Body> {
        self.finish(verdict).await
    }

    fn plain_http_body(&self) -> Bytes {
        let error = ApiError::malformed(
            "This port speaks HTTPS only. Use https:// instead of http:// in the URL.",
        );
        error.envelope().to_json().into()
    }
}

impl From<RequestRefusal> for ApiError {
    fn from(refusal: RequestRefusal) -> Self {
        match refusal {
            RequestRefusal::BadHead(BadHead::TooLarge) => Self::HeadTooLarge,
            RequestRefusal::BadHead(BadHead::Malformed(message)) => Self::malformed(message),
            RequestRefusal::Closing => Self::Draining,
        }
    }
}

impl From<SourceRefusal> for ApiError {
    fn from(refusal: SourceRefusal) -> Self {
        let SourceRefusal { per_second, retry_after } = refusal;
        Self::SourceLimit { per_second, retry_after }
    }
}

/// Marks the headers that carry secrets, so that no log shows their values.
fn hide_secrets(headers: &mut HeaderMap) {
    for name in [header::AUTHORIZATION, header::PROXY_AUTHORIZATION, header::COOKIE] {
        // `entry` alone would reserve room for each header that is absent.
        if headers.contains_key(&name)
            && let header::Entry::Occupied(mut values) = headers.entry(name)
        {
            values.iter_mut().for_each(|value| value.set_sensitive(true));
        }
    }
}

/// Counts the request against its network source.
fn in_ring(
    ring: Option<&SourceRing>,
    headers: &HeaderMap,
    peer: Option<&Peer>,
) -> Result<(), ApiError> {
    let Some(ring) = ring else { return Ok(()) };
    // Only a request that did not come through the listener has no peer.
    let peer = peer.ok_or(ApiError::Internal)?;
    Ok(ring.check(peer.client(headers))?)
}

/// Checks the host, the encoding and the declared size of the body.
fn check_body_and_host<B: http_body::Body>(
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
    // A declared size is refused unread; an undeclared size at the limit.
    if request.body().size_hint().lower() > largest_body {
        return Err(ApiError::BodyTooLarge { limit: largest_body });
    }
    Ok(())
}

/// Checks that a request over HTTP/2 names its host once, or twice the same.
/// The listener has checked the heads of HTTP/1.
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
        // With two names, a proxy and this gateway could route by different ones.
        _ => Err(ApiError::malformed("There must be one host.")),
    }
}

/// A count of the requests in a handler. The drop counts down, also when the
/// client leaves and the handler's future is dropped.
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

/// Runs a head check. A panic costs this request and no other request of the
/// connection.
fn guarded<T>(check: impl FnOnce() -> Result<T, ApiError>) -> Result<T, ApiError> {
    catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|panic| {
        log_panic(panic);
        Err(ApiError::Internal)
    })
}

fn log_panic(panic: Box<dyn Any + Send + 'static>) {
    // The panic hook has logged the place; the payload may quote a client.
    drop(panic);
    tracing::error!("a handler panicked; its request was answered with 500");
}

pub(crate) async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::UnknownRoute { method, path: uri.path().to_owned(), hint: None }
}

pub(crate) async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::MethodNotAllowed { method, path: uri.path().to_owned() }
}

/// The header of every response that names its request.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[cfg(test)]
mod socket_tests;
#[cfg(test)]
pub(crate) mod tests;
