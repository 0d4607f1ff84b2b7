//! The route table of the public API, and the dispatch by that table. A path
//! stands in [`ROUTES`] and nowhere else: the router, the head check, the
//! scopes of keys and the labels of metrics read it there.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, Method, StatusCode, header};
use http_body::Body as _;
use percent_encoding::percent_decode_str;
use tollgate_domain::{Caller, MonotonicTime, RequestId};
use tollgate_edge::Peer;
use tollgate_openai::{CHAT, COMPLETIONS};
use tower::{Layer as _, Service, ServiceExt as _};

use crate::api::{self, Api, Call, KnownCaller, RouteKind, limits, models, usage};
use crate::auth::Endpoint;
use crate::cors::{self, Cors};
use crate::openapi;
use crate::read_limit::{ByCaller, ReadLimit, ReadLimited};
use crate::reply::ApiError;
use crate::stack::Routes;

/// One route of the public API.
pub(crate) struct Route {
    path: Pattern,
    method: RouteMethod,
    /// The part of the API that a key's scopes name.
    endpoint: Endpoint,
    /// The route's label in metrics.
    label: &'static str,
    kind: RouteKind,
    handler: Handler,
}

/// The paths that a route takes.
enum Pattern {
    /// Exactly this path.
    Exact(&'static str),
    /// This prefix and one more segment, which is the parameter.
    Segment(&'static str),
    /// This prefix and all that follows, slashes included.
    Rest(&'static str),
}

/// The method of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteMethod {
    /// GET, and HEAD, which is answered without the body.
    Get,
    Post,
}

type Handler = fn(Api, Call) -> HandlerFuture;
type HandlerFuture = Pin<Box<dyn Future<Output = Result<Response, ApiError>> + Send>>;

/// All routes of the public API.
static ROUTES: [Route; 8] = [
    Route {
        path: Pattern::Exact("/v1/chat/completions"),
        method: RouteMethod::Post,
        endpoint: Endpoint::Chat,
        label: "chat_completions",
        kind: RouteKind::Work,
        handler: |api, call| Box::pin(async move { Ok(api::generate(api, call, CHAT).await) }),
    },
    Route {
        path: Pattern::Exact("/v1/completions"),
        method: RouteMethod::Post,
        endpoint: Endpoint::Completions,
        label: "completions",
        kind: RouteKind::Work,
        handler: |api, call| {
            Box::pin(async move { Ok(api::generate(api, call, COMPLETIONS).await) })
        },
    },
    Route {
        path: Pattern::Exact("/v1/models"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Models,
        label: "models",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(models::list(api, call)),
    },
    Route {
        path: Pattern::Rest("/v1/models/"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Models,
        label: "model",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(models::show(api, call)),
    },
    Route {
        path: Pattern::Exact("/v1/limits"),
        method: RouteMethod::Get,
        // What is left of a limit tells what the tenant has used.
        endpoint: Endpoint::Usage,
        label: "limits",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(limits::list(api, call)),
    },
    Route {
        path: Pattern::Exact("/v1/usage"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Usage,
        label: "usage",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(usage::list(api, call)),
    },
    Route {
        path: Pattern::Segment("/v1/usage/"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Usage,
        label: "request_usage",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(usage::show(api, call)),
    },
    Route {
        path: Pattern::Exact("/openapi.json"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Models,
        label: "openapi",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(openapi::show(api, call)),
    },
];

/// Returns the method and the path of each route, as an OpenAPI document names them.
pub(crate) fn documented_routes() -> impl Iterator<Item = (&'static str, String)> {
    ROUTES.iter().map(|route| {
        let path = match route.path {
            Pattern::Exact(path) => path.to_owned(),
            Pattern::Segment(prefix) => format!("{prefix}{{id}}"),
            Pattern::Rest(prefix) => format!("{prefix}{{name}}"),
        };
        let method = match route.method {
            RouteMethod::Get => "GET",
            RouteMethod::Post => "POST",
        };
        (method, path)
    })
}

impl Pattern {
    /// Returns the still encoded parameter if the pattern takes `path`.
    fn parameter<'p>(&self, path: &'p str) -> Option<&'p str> {
        let rest = match self {
            Self::Exact(exact) => return (path == *exact).then_some(""),
            Self::Segment(prefix) => {
                // An id has no slash, so a longer path belongs to no route.
                path.strip_prefix(prefix).filter(|segment| !segment.contains('/'))
            }
            Self::Rest(prefix) => path.strip_prefix(prefix),
        };
        rest.filter(|parameter| !parameter.is_empty())
    }
}

impl RouteMethod {
    fn takes(self, method: &Method) -> bool {
        match self {
            Self::Get => method == Method::GET || method == Method::HEAD,
            Self::Post => method == Method::POST,
        }
    }

    /// Returns the methods as the `allow` header lists them.
    fn allow(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Get => "GET,HEAD",
            Self::Post => "POST",
        })
    }
}

/// The public API: it answers requests by [`ROUTES`].
pub(crate) struct PublicRoutes {
    api: Api,
    /// The dispatch to read-only routes, behind their rate.
    read_only: ReadLimited<ByCaller, ReadOnlyDispatch>,
    cors: Cors,
}

/// A call of a read-only route.
struct ReadCall {
    handler: Handler,
    api: Api,
    call: Call,
}

/// The dispatch to read-only routes, as the service that the rate limit wraps.
#[derive(Clone, Copy)]
struct ReadOnlyDispatch;

impl Service<http::Request<ReadCall>> for ReadOnlyDispatch {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<ReadCall>) -> Self::Future {
        let ReadCall { handler, api, call } = request.into_body();
        Box::pin(async move { Ok(handler(api, call).await.into_response()) })
    }
}

/// The outcome of the head check: the route and the caller, or no route.
pub(crate) enum Target {
    /// The handler of a route answers.
    Handler { route: &'static Route, caller: Box<KnownCaller> },
    /// The path is no route.
    UnknownRoute,
    /// The path is a route, for other methods.
    WrongMethod(&'static Route),
    /// A browser asks if a page may call the route.
    Preflight(&'static Route),
}

impl PublicRoutes {
    /// Creates the routes. `reads` limits the read-only routes.
    pub(crate) fn new(api: Api, reads: &ReadLimit<ByCaller>) -> Self {
        let cors = Cors::new(api.config.clone());
        Self { api, read_only: reads.layer().layer(ReadOnlyDispatch), cors }
    }

    /// Calls a read-only route, unless its caller sends too many requests.
    async fn answer_read(&self, handler: Handler, call: Call) -> Response {
        let caller = call.caller.caller.caller().clone();
        let mut request = http::Request::new(ReadCall { handler, api: self.api.clone(), call });
        // `tower_governor` sees a request's head alone, so the key travels
        // there. The handler gets the `ReadCall` and no extension.
        request.extensions_mut().insert(caller);
        // `oneshot` consumes its service. The clone shares the buckets.
        let answered = self.read_only.clone().oneshot(request).await;
        answered.unwrap_or_else(|never| match never {})
    }
}

fn find(path: &str) -> Option<&'static Route> {
    ROUTES.iter().find(|route| route.path.parameter(path).is_some())
}

/// Endpoints of OpenAI's and of Anthropic's API that are not served, below `/v1`, with a
/// sentence for clients.
const UNSERVED: &[(&str, &str)] = &[
    ("responses", "The Responses API is not served here. Use chat completions."),
    ("messages", "The Messages API is not served here. Use chat completions."),
    ("assistants", "The Assistants API is not served here. Use chat completions."),
    ("threads", "The Assistants API is not served here. Use chat completions."),
    ("conversations", "The Conversations API is not served here. Use chat completions."),
    ("embeddings", "Embeddings are not served here."),
    ("moderations", "Moderations are not served here."),
    ("files", "Files are not served here."),
    ("uploads", "Files are not served here."),
    ("batches", "Batches are not served here."),
    ("images", "Images are not served here."),
    ("videos", "Videos are not served here."),
    ("audio", "Audio is not served here."),
    ("realtime", "The Realtime API is not served here."),
    ("fine_tuning", "Fine-tuning is not served here."),
    ("vector_stores", "Vector stores are not served here."),
];

/// Returns a sentence about a path that is no route, if the mistake is a common one.
fn hint(path: &str) -> Option<&'static str> {
    if find(&format!("/v1{path}")).is_some() {
        return Some("The base URL must end in /v1.");
    }
    let below = path.strip_prefix("/v1").unwrap_or(path).strip_prefix('/')?;
    let endpoint = below.split('/').next()?;
    UNSERVED.iter().find(|(name, _)| *name == endpoint).map(|(_, sentence)| *sentence)
}

impl Routes for PublicRoutes {
    type Target = Target;

    fn label(&self, path: &str) -> &'static str {
        find(path).map_or("other", |route| route.label)
    }

    fn check_head<B>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<Target, ApiError> {
        // An unknown path needs no caller, so no credential is checked for it.
        let Some(route) = find(request.uri().path()) else { return Ok(Target::UnknownRoute) };
        // A preflight has no credential, and costs nothing but a request of its source.
        if self.cors.is_preflight(request) {
            return Ok(Target::Preflight(route));
        }
        if !route.method.takes(request.method()) {
            return Ok(Target::WrongMethod(route));
        }
        let headers = request.headers();
        let caller = self.api.known_caller(route.kind, route.endpoint, headers, peer, now)?;
        // Boxed, so that a refusal does not move a large value.
        Ok(Target::Handler { route, caller: Box::new(caller) })
    }

    fn refused_caller<B>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Option<Caller> {
        self.api.caller_of(request.headers(), peer, now)
    }

    fn caller(&self, target: &Target) -> Option<Caller> {
        match target {
            Target::Handler { caller, .. } => Some(caller.caller.caller().clone()),
            Target::UnknownRoute | Target::WrongMethod(_) | Target::Preflight(_) => None,
        }
    }

    async fn answer(&self, target: Target, request: Request, id: RequestId) -> Response {
        let is_head = request.method() == Method::HEAD;
        let mut response = match target {
            Target::Handler { route, caller } => {
                // Decoded after the match: an encoded slash is part of a name.
                let parameter = decoded(route.path.parameter(request.uri().path()));
                let endpoint = route.endpoint;
                let label = route.label;
                let call = Call { request, id, endpoint, label, caller: *caller, parameter };
                match route.kind {
                    RouteKind::Work => {
                        (route.handler)(self.api.clone(), call).await.into_response()
                    }
                    RouteKind::ReadOnly => self.answer_read(route.handler, call).await,
                }
            }
            Target::UnknownRoute => {
                let path = request.uri().path();
                let (method, hint) = (request.method().clone(), hint(path));
                ApiError::UnknownRoute { method, path: path.to_owned(), hint }.into_response()
            }
            Target::Preflight(route) => {
                let mut response = StatusCode::NO_CONTENT.into_response();
                let methods = route.method.allow();
                cors::write_preflight(methods, request.headers(), response.headers_mut());
                response
            }
            Target::WrongMethod(route) => {
                let error = ApiError::MethodNotAllowed {
                    method: request.method().clone(),
                    path: request.uri().path().to_owned(),
                };
                let mut response = error.into_response();
                // RFC 9110, 15.5.6 requires the header with a 405.
                response.headers_mut().insert(header::ALLOW, route.method.allow());
                response
            }
        };
        // A 204 must have no length (RFC 9110, 8.6).
        if response.status() != StatusCode::NO_CONTENT
            && let Some(length) = response.size_hint().exact()
        {
            response.headers_mut().entry(header::CONTENT_LENGTH).or_insert_with(|| length.into());
        }
        if is_head {
            // The length above is that of the body which GET would send.
            *response.body_mut() = Body::empty();
        }
        response
    }
}

/// Decodes a parameter of a path. Bytes that are no text name nothing, so the
/// handler gets an empty name and answers 404.
fn decoded(parameter: Option<&str>) -> String {
    let bytes = percent_decode_str(parameter.unwrap_or_default());
    bytes.decode_utf8().map(Into::into).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_table_takes_its_paths() {
        for (path, label, parameter) in [
            ("/v1/models", "models", ""),
            ("/v1/models/", "other", ""),
            ("/v1/models/demo", "model", "demo"),
            ("/v1/models/org/demo", "model", "org/demo"),
            ("/v1/models/org%2Fdemo", "model", "org/demo"),
            ("/v1/models/%ff", "model", ""),
            ("/v1/limits", "limits", ""),
            ("/v1/usage", "usage", ""),
            ("/v1/usage/req-1", "request_usage", "req-1"),
            ("/v1/usage/req-1/more", "other", ""),
            ("/v1/usage/", "other", ""),
            ("/v1/chat/completions", "chat_completions", ""),
            ("/v1/completions", "completions", ""),
            ("/v1/completions/", "other", ""),
            ("*", "other", ""),
            ("", "other", ""),
        ] {
            let route = find(path);
            assert_eq!(route.map_or("other", |route| route.label), label, "{path}");
            let found = route.and_then(|route| route.path.parameter(path));
            assert_eq!(decoded(found), parameter, "{path}");
        }
    }

    #[test]
    fn common_mistakes_in_paths_get_hints() {
        let version = Some("The base URL must end in /v1.");
        for (path, expected) in [
            ("/chat/completions", version),
            ("/models", version),
            ("/models/demo", version),
            ("/v1/v1/models", None),
            ("/v1/nothing", None),
            ("/", None),
            ("", None),
            ("*", None),
        ] {
            assert_eq!(hint(path), expected, "{path}");
        }
        for path in ["/v1/embeddings", "/embeddings", "/v1/files/file-1/content", "/v1/responses"] {
            assert!(hint(path).is_some_and(|hint| hint.contains("served here")), "{path}");
        }
        for (name, _) in UNSERVED {
            assert!(find(&format!("/v1/{name}")).is_none(), "{name} is served");
        }
    }

    #[test]
    fn route_labels_and_paths_are_unique() {
        let labels: std::collections::HashSet<_> = ROUTES.iter().map(|route| route.label).collect();
        assert_eq!(labels.len(), ROUTES.len());
    }
}
