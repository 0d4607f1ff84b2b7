//! The responses that the stack makes without a handler.

use axum::routing::{get, post};
use axum::{Extension, Router};
use http::StatusCode;
use http_body_util::BodyExt as _;
use serde_json::Value;
use tollgate_edge::listener::{ConnectionOwners, OwnerBound, OwnerId};
use tower::ServiceExt as _;

use super::*;

/// Routes of a test: an axum router without a head check of its own.
pub(crate) struct TestRoutes(pub(crate) Router);

impl TestRoutes {
    pub(crate) fn new(router: Router) -> Self {
        let router = router.fallback(unknown_route).method_not_allowed_fallback(method_not_allowed);
        Self(router)
    }
}

impl Routes for TestRoutes {
    type Target = ();

    fn label(&self, _path: &str) -> &'static str {
        "other"
    }

    /// Authenticates by the header `x-owner`: the owner's number and its bound.
    fn check_head<B>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        _now: MonotonicTime,
    ) -> Result<(), ApiError> {
        let (Some(owner), Some(peer)) = (request.headers().get("x-owner"), peer) else {
            return Ok(());
        };
        let (number, most) = owner.to_str().unwrap().split_once('/').unwrap();
        let owner = OwnerId(number.parse().unwrap());
        let bounds = vec![OwnerBound { owner, most: most.parse().unwrap() }];
        let most = bounds[0].most;
        peer.authenticate(&ConnectionOwners { bounds, holder: owner })
            .map_err(|_| ApiError::ConnectionLimit { most, owner: "tenant acme".to_owned() })
    }

    async fn answer(&self, (): (), mut request: Request, id: RequestId) -> Response {
        request.extensions_mut().insert(id);
        self.0.clone().oneshot(request).await.unwrap_or_else(|never| match never {})
    }
}

const LIMIT: u64 = 1_000;

async fn read(body: Bytes) -> String {
    body.len().to_string()
}

async fn bug() -> &'static str {
    panic!("a secret of the client's")
}

fn service(metrics: &Arc<Metrics>) -> Arc<Stack<TestRoutes>> {
    let routes = Router::new()
        .route("/v1/models", get(|| async { "models" }))
        .route("/v1/read", post(read))
        .route("/v1/bug", get(bug))
        .route("/v1/id", get(|Extension(id): Extension<RequestId>| async move { id.to_string() }));
    let metrics = Arc::clone(metrics);
    Stack::new(
        TestRoutes::new(routes),
        StackOptions {
            metrics,
            access_log: AccessLog::off(),
            sources: None,
            cors: None,
            largest_body: LargestBody::new(LIMIT),
            gateway: 0,
        },
        Clock::system(),
    )
}

async fn ask(service: &Stack<TestRoutes>, request: http::request::Builder, body: Body) -> Received {
    let verdict = service.check_head(request.body(body).unwrap(), None, None);
    let response = service.finish(verdict).await.response;
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Received { parts, body: String::from_utf8(body.to_vec()).unwrap() }
}

struct Received {
    parts: http::response::Parts,
    body: String,
}

impl Received {
    fn code(&self) -> String {
        let body: Value = serde_json::from_str(&self.body).unwrap();
        body["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

#[tokio::test]
async fn stack_refusals_are_json() {
    let service = service(&Metrics::new(Clock::system()));
    let encoded =
        |coding: &str| Request::post("/v1/read").header("content-encoding", coding.to_owned());
    // T39: an encoded body is refused by its header alone.
    for (request, body, status, code) in [
        (Request::get("/"), Body::empty(), 404, "unknown_url"),
        (Request::get("/v1/nothing"), Body::empty(), 404, "unknown_url"),
        (Request::put("/v1/models"), Body::empty(), 405, "method_not_allowed"),
        (Request::get("/v1/bug"), Body::empty(), 500, "server_error"),
        (encoded("zstd"), Body::from("x"), 415, "unsupported_content_encoding"),
        (encoded("gzip, identity"), Body::from("x"), 415, "unsupported_content_encoding"),
        (Request::post("/v1/read"), Body::from(vec![0; 1_001]), 413, "request_too_large"),
    ] {
        let answer = ask(&service, request, body).await;
        assert_eq!(answer.parts.status.as_u16(), status);
        assert_eq!(answer.code(), code);
        assert_eq!(answer.parts.headers["content-type"], "application/json");
        assert!(!answer.body.contains("secret"));
        assert!(answer.parts.headers.contains_key("x-request-id"), "{status}");
    }
}

#[tokio::test]
async fn stack_passes_bodies_within_bounds() {
    let service = service(&Metrics::new(Clock::system()));
    let identity = Request::post("/v1/read").header("content-encoding", "identity");
    let answer = ask(&service, identity, Body::from(vec![0; 1_000])).await;
    assert_eq!((answer.parts.status, answer.body.as_str()), (StatusCode::OK, "1000"));
}

#[tokio::test]
async fn stack_draws_request_ids() {
    let service = service(&Metrics::new(Clock::system()));
    let mut seen = std::collections::HashSet::new();
    for _ in 0..100 {
        let request = Request::get("/v1/id").header("x-request-id", "req-forged");
        let answer = ask(&service, request, Body::empty()).await;
        let id = answer.parts.headers["x-request-id"].to_str().unwrap();
        assert_eq!(answer.body, id, "the handler sees the same");
        assert!(id.starts_with("req-") && id.len() == 36 && seen.insert(id.to_owned()));
    }
}

#[tokio::test]
async fn stack_cuts_unsized_bodies_at_limit() {
    let service = service(&Metrics::new(Clock::system()));
    let pieces =
        futures_util::stream::iter((0..100).map(|_| Ok::<_, std::io::Error>(vec![0; 100])));
    let answer = ask(&service, Request::post("/v1/read"), Body::from_stream(pieces)).await;
    assert_eq!(answer.parts.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn stack_closes_connection_after_chunked_request() {
    // T11
    let service = service(&Metrics::new(Clock::system()));
    let request = || Request::post("/v1/read").header("transfer-encoding", "chunked");
    let answer = ask(&service, request(), Body::empty()).await;
    assert_eq!(answer.parts.headers["connection"], "close");
    let answer = ask(&service, request().version(Version::HTTP_2), Body::empty()).await;
    assert!(!answer.parts.headers.contains_key("connection"));
}

#[tokio::test]
async fn metrics_gain_no_series_from_clients() {
    // T50
    let metrics = Metrics::new(Clock::system());
    let service = service(&metrics);
    for n in 0..500 {
        let request = Request::get(format!("/v1/{n}")).header("user-agent", n.to_string());
        ask(&service, request, Body::empty()).await;
        ask(&service, Request::get(format!("/v1/models/{n}")), Body::empty()).await;
    }
    let text = metrics.text();
    assert!(
        text.contains(r#"tollgate_requests_total{endpoint="other",status="4xx"} 1000"#),
        "{text}"
    );
    assert!(text.contains(r#"tollgate_errors_total{kind="unknown_route"} 1000"#), "{text}");
    assert!(text.lines().count() < 200, "{text}");
}
