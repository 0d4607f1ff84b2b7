//! The route table of the public API, and the dispatch by that table. A path
//! stands in [`ROUTES`] and nowhere else: the router, the head check, the
//! scopes of keys and the labels of metrics read it there.

use std::pin::Pin;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, Method, StatusCode, header};
use http_body::Body as _;
use percent_encoding::percent_decode_str;
use tollgate_domain::{Caller, MonotonicTime, RequestId};
use tollgate_edge::Peer;
use tollgate_openai::{CHAT, COMPLETIONS};

use crate::api::{self, Api, Call, KnownCaller, RouteKind, jobs, limits, models, usage};
use crate::auth::Endpoint;
use crate::cors::{self, Cors};
use crate::openapi;
use crate::read_limit::ReadLimit;
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
    /// This prefix, one segment, which is the parameter, and this suffix.
    SegmentThen(&'static str, &'static str),
    /// This prefix and all that follows, slashes included.
    Rest(&'static str),
}

/// The method of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteMethod {
    /// GET, and HEAD, which is answered without the body.
    Get,
    Post,
    Delete,
}

type Handler = fn(Api, Call) -> HandlerFuture;
type HandlerFuture = Pin<Box<dyn Future<Output = Result<Response, ApiError>> + Send>>;

/// All routes of the public API.
static ROUTES: [Route; 17] = [
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
        // A model's name may have slashes.
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
        path: Pattern::Exact(FILES),
        method: RouteMethod::Post,
        endpoint: Endpoint::Batches,
        label: "files",
        kind: RouteKind::Change,
        handler: |api, call| Box::pin(jobs::files::upload(api, call)),
    },
    Route {
        path: Pattern::Exact(FILES),
        method: RouteMethod::Get,
        endpoint: Endpoint::Batches,
        label: "files",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(jobs::files::list(api, call)),
    },
    Route {
        path: Pattern::Segment("/v1/files/"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Batches,
        label: "file",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(jobs::files::show(api, call)),
    },
    Route {
        path: Pattern::Segment("/v1/files/"),
        method: RouteMethod::Delete,
        endpoint: Endpoint::Batches,
        label: "file",
        kind: RouteKind::Change,
        handler: |api, call| Box::pin(jobs::files::delete(api, call)),
    },
    Route {
        path: Pattern::SegmentThen("/v1/files/", "/content"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Batches,
        label: "file_content",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(jobs::files::content(api, call)),
    },
    Route {
        path: Pattern::Exact("/v1/batches"),
        method: RouteMethod::Post,
        endpoint: Endpoint::Batches,
        label: "batches",
        kind: RouteKind::Change,
        handler: |api, call| Box::pin(jobs::batches::create(api, call)),
    },
    Route {
        path: Pattern::Exact("/v1/batches"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Batches,
        label: "batches",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(jobs::batches::list(api, call)),
    },
    Route {
        path: Pattern::Segment("/v1/batches/"),
        method: RouteMethod::Get,
        endpoint: Endpoint::Batches,
        label: "batch",
        kind: RouteKind::ReadOnly,
        handler: |api, call| Box::pin(jobs::batches::show(api, call)),
    },
    Route {
        path: Pattern::SegmentThen("/v1/batches/", "/cancel"),
        method: RouteMethod::Post,
        endpoint: Endpoint::Batches,
        label: "batch_cancel",
        kind: RouteKind::Change,
        handler: |api, call| Box::pin(jobs::batches::cancel(api, call)),
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

/// The path of uploads. Their bodies may be larger than those of all other routes.
const FILES: &str = "/v1/files";

/// Returns the method and the path of each route, as an OpenAPI document names them.
pub(crate) fn documented_routes() -> impl Iterator<Item = (&'static str, String)> {
    ROUTES.iter().map(|route| {
        let path = match route.path {
            Pattern::Exact(path) => path.to_owned(),
            Pattern::Segment(prefix) => format!("{prefix}{{id}}"),
            Pattern::SegmentThen(prefix, suffix) => format!("{prefix}{{id}}{suffix}"),
            Pattern::Rest(prefix) => format!("{prefix}{{name}}"),
        };
        let method = match route.method {
            RouteMethod::Get => "GET",
            RouteMethod::Post => "POST",
            RouteMethod::Delete => "DELETE",
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
            Self::SegmentThen(prefix, suffix) => path
                .strip_prefix(prefix)
                .and_then(|rest| rest.strip_suffix(suffix))
                .filter(|segment| !segment.contains('/')),
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
            Self::Delete => method == Method::DELETE,
        }
    }

    /// Returns the methods as the `allow` header lists them.
    fn allow(self) -> &'static str {
        match self {
            Self::Get => "GET,HEAD",
            Self::Post => "POST",
            Self::Delete => "DELETE",
        }
    }
}

/// The public API: it answers requests by [`ROUTES`].
pub(crate) struct PublicRoutes {
    api: Api,
    /// The rate of each caller on the read-only routes.
    reads: ReadLimit<Caller>,
    cors: Cors,
}

/// The outcome of the head check: the route and the caller, or no route.
pub(crate) enum Target {
    /// The handler of a route answers.
    Handler { route: &'static Route, caller: Box<KnownCaller> },
    /// The path is no route.
    UnknownRoute,
    /// The path is a route, for these methods and not for that of the request.
    WrongMethod(HeaderValue),
    /// A browser asks if a page may call the path with these methods.
    Preflight(HeaderValue),
}

impl PublicRoutes {
    /// Creates the routes. `reads` limits the read-only routes.
    pub(crate) fn new(api: Api, reads: ReadLimit<Caller>) -> Self {
        let cors = Cors::new(api.config.clone());
        Self { api, reads, cors }
    }

    /// Calls a read-only route, unless its caller sends too many requests.
    async fn answer_read(&self, handler: Handler, call: Call) -> Result<Response, ApiError> {
        self.reads.check(call.caller.caller.caller())?;
        handler(self.api.clone(), call).await
    }
}

/// Returns the routes of a path, one for each method.
fn routes_of(path: &str) -> impl Iterator<Item = &'static Route> {
    ROUTES.iter().filter(move |route| route.path.parameter(path).is_some())
}

/// Returns the methods of a path as the `allow` header lists them; `None` if no route has
/// the path.
fn allowed(path: &str) -> Option<HeaderValue> {
    let methods: Vec<&str> = routes_of(path).map(|route| route.method.allow()).collect();
    // Names of methods are always a valid header.
    HeaderValue::try_from(methods.join(",")).ok().filter(|_| !methods.is_empty())
}

/// Endpoints of OpenAI's and of Anthropic's API that are not served, below `/v1`, with a
/// sentence for clients.
const UNSERVED: &[(&str, &str)] = &[
    // Some libraries use the Responses API unless told otherwise, so the sentence names the
    // option of each.
    (
        "responses",
        "The Responses API is not served here. Set the client to chat completions: AI SDK \
         provider.chat(MODEL), Agents SDK set_default_openai_api(\"chat_completions\"), \
         pydantic-ai openai-chat:MODEL, LangChain use_responses_api=False, LiteLLM \
         openai/chat_completions/MODEL.",
    ),
    ("messages", "The Messages API is not served here. Use chat completions."),
    ("assistants", "The Assistants API is not served here. Use chat completions."),
    ("threads", "The Assistants API is not served here. Use chat completions."),
    ("conversations", "The Conversations API is not served here. Use chat completions."),
    ("embeddings", "Embeddings are not served here."),
    ("moderations", "Moderations are not served here."),
    ("uploads", "Uploads in parts are not served here. Use /v1/files."),
    ("images", "Images are not served here."),
    ("videos", "Videos are not served here."),
    ("audio", "Audio is not served here."),
    ("realtime", "The Realtime API is not served here."),
    ("fine_tuning", "Fine-tuning is not served here."),
    ("vector_stores", "Vector stores are not served here."),
];

/// Returns a sentence about a path that is no route, if the mistake is a common one.
fn hint(path: &str) -> Option<&'static str> {
    if routes_of(&format!("/v1{path}")).next().is_some() {
        return Some("The base URL must end in /v1.");
    }
    if path.starts_with("/openai/") {
        return Some(
            "This is the form of Azure's URLs. Use the client for OpenAI, with a base URL that ends in /v1.",
        );
    }
    let below = path.strip_prefix("/v1").unwrap_or(path).strip_prefix('/')?;
    let endpoint = below.split('/').next()?;
    UNSERVED.iter().find(|(name, _)| *name == endpoint).map(|(_, sentence)| *sentence)
}

impl Routes for PublicRoutes {
    type Target = Target;

    fn label(&self, path: &str) -> &'static str {
        // All methods of a path have one label.
        routes_of(path).next().map_or("other", |route| route.label)
    }

    fn largest_body(&self, path: &str) -> Option<u64> {
        let file = || self.api.config.current().gateway().jobs.file.0;
        // The form around the file is small.
        (path == FILES).then(|| file().saturating_add(jobs::LARGEST_FORM))
    }

    fn check_head<B>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<Target, ApiError> {
        // An unknown path needs no caller, so no credential is checked for it.
        let (path, method) = (request.uri().path(), request.method());
        let route = routes_of(path).find(|route| route.method.takes(method));
        let is_preflight = self.cors.is_preflight(request);
        let Some(route) = route.filter(|_| !is_preflight) else {
            return Ok(match allowed(path) {
                None => Target::UnknownRoute,
                // A preflight has no credential, and costs nothing but a request of its source.
                Some(methods) if is_preflight => Target::Preflight(methods),
                Some(methods) => Target::WrongMethod(methods),
            });
        };
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
                let answered = match route.kind {
                    // Plans limit work, so the rate of reads does not count it.
                    RouteKind::Work => (route.handler)(self.api.clone(), call).await,
                    RouteKind::ReadOnly | RouteKind::Change => {
                        self.answer_read(route.handler, call).await
                    }
                };
                answered.into_response()
            }
            Target::UnknownRoute => {
                let path = request.uri().path();
                let (method, hint) = (request.method().clone(), hint(path));
                ApiError::UnknownRoute { method, path: path.to_owned(), hint }.into_response()
            }
            Target::Preflight(methods) => {
                let mut response = StatusCode::NO_CONTENT.into_response();
                cors::write_preflight(methods, request.headers(), response.headers_mut());
                response
            }
            Target::WrongMethod(methods) => {
                let error = ApiError::MethodNotAllowed {
                    method: request.method().clone(),
                    path: request.uri().path().to_owned(),
                };
                let mut response = error.into_response();
                // RFC 9110, 15.5.6 requires the header with a 405.
                response.headers_mut().insert(header::ALLOW, methods);
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
            ("/v1/files/file-1", "file", "file-1"),
            ("/v1/files/file-1/content", "file_content", "file-1"),
            ("/v1/files//content", "other", ""),
            ("/v1/files/a/b/content", "other", ""),
            ("/v1/batches/batch_1/cancel", "batch_cancel", "batch_1"),
            ("*", "other", ""),
            ("", "other", ""),
        ] {
            let route = routes_of(path).next();
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
        for path in ["/v1/embeddings", "/embeddings", "/v1/uploads/upload-1/parts", "/v1/responses"]
        {
            assert!(hint(path).is_some_and(|hint| hint.contains("served here")), "{path}");
        }
        let azure = hint("/openai/deployments/gpt/chat/completions").expect("Azure's form");
        assert!(azure.contains("Azure"), "{azure}");
        for (name, _) in UNSERVED {
            assert!(routes_of(&format!("/v1/{name}")).next().is_none(), "{name} is served");
        }
    }

    #[test]
    fn routes_of_one_path_share_its_label() {
        let routes: Vec<_> = documented_routes().zip(&ROUTES).collect();
        for (index, ((method, path), route)) in routes.iter().enumerate() {
            for ((other_method, other_path), other) in &routes[..index] {
                assert!(path != other_path || method != other_method, "{method} {path}");
                assert_eq!(path == other_path, route.label == other.label, "{path} {other_path}");
            }
        }
        assert_eq!(allowed("/v1/files").expect("a route"), "POST,GET,HEAD");
    }
}
