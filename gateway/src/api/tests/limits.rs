//! `GET /v1/limits`, and the headers of limits.

use http::StatusCode;
use serde_json::{Value, json as value};
use tokio::join;
use tollgate_serving::test_support::FakeWorker;
use tollgate_wire::v1::RefusedReason;

use super::test_gateway::{PLAIN, TestGateway, json};

const CONFIG: &str = r#"
    [plans.key]
    requests_per_minute = 30
    [plans.wide]
    tokens_per_minute = 100_000
    concurrent = 2
    queued = 3
    device_time_per_minute = "1m"
    device_time_per_day = "1h"
    device_time_per_month = "10h"
    [plans.model]
    requests_per_minute = 1_000
    [pools.trial]
    plan = "key"
    [tenants.acme]
    plan = "wide"
    pool = "trial"
    [models.fake]
    path = "/"
    plan = "model"
"#;

fn find<'a>(limits: &'a Value, scope: &str, limit: &str) -> &'a Value {
    let all = limits["data"].as_array().expect("a list");
    let found = all.iter().find(|it| it["scope"] == scope && it["limit"] == limit);
    found.unwrap_or_else(|| panic!("no {limit} of {scope} in {limits}"))
}

#[tokio::test]
async fn limits_list_what_is_left_in_every_scope() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, CONFIG, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(""), async {
        worker.run().await.answer("Hi.").await;
    });
    let headers = response.headers().clone();
    assert_eq!(json(response).await.0, StatusCode::OK);
    gateway.settled().await;
    for name in ["device-time", "device-time-day", "device-time-month"] {
        for header in ["ratelimit", "ratelimit-policy"] {
            let value = headers[header].to_str().expect("text");
            assert!(value.contains(&format!("\"{name}\";")), "{header}: {value}");
        }
    }
    let before = gateway.ask("acme", "GET", "/v1/limits", "").await;
    let (status, limits) = json(before).await;
    assert_eq!(status, StatusCode::OK, "{limits}");
    assert_eq!(
        (&limits["tenant"], limits["data"].as_array().map(Vec::len)),
        (&value!("acme"), Some(10))
    );
    let requests = find(&limits, "pool", "requests_per_minute");
    assert_eq!((&requests["value"], &requests["unit"]), (&value!(30), &value!("requests")));
    assert_eq!(requests["remaining"], 29, "{requests}");
    let model = find(&limits, "model", "requests_per_minute");
    assert_eq!((&model["name"], &model["burst"]), (&value!("fake"), &value!(1_000)));
    let day = find(&limits, "tenant", "device_time_per_day");
    assert_eq!((&day["device_class"], &day["unit"]), (&value!("cpu"), &value!("device_ns")));
    assert_eq!(day["used"].as_u64(), Some(100), "what the worker has told: {day}");
    assert!(day["refills_in_ms"].as_u64() <= Some(86_400_000), "{day}");
    let queued = find(&limits, "tenant", "queued");
    assert_eq!((&queued["used"], &queued["refills_in_ms"]), (&value!(0), &Value::Null));
    // Reading takes nothing.
    let (_, again) = json(gateway.ask("acme", "GET", "/v1/limits", "").await).await;
    let day_again = find(&again, "tenant", "device_time_per_day");
    assert_eq!((&day_again["used"], &day_again["remaining"]), (&day["used"], &day["remaining"]));
}

/// The worker refuses a form after 1 ms of work, which counts against the tenant's limit. A
/// request without a form has no such limit.
#[tokio::test]
async fn refused_form_takes_grammar_time() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, CONFIG, &[&worker]).await;
    let form = r#""response_format":{"type":"json_object"}"#;
    let (response, ()) = join!(gateway.chat(form), async {
        worker.run().await.refuse_after(RefusedReason::Grammar, 1_000_000).await;
    });
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    gateway.settled().await;
    let (_, limits) = json(gateway.ask("acme", "GET", "/v1/limits", "").await).await;
    let limit = find(&limits, "tenant", "grammar_time_per_minute");
    assert_eq!((&limit["value"], &limit["unit"]), (&value!(2_000_000_000_u64), &value!("host_ns")));
    assert!((1..=1_000_000).contains(&limit["used"].as_u64().expect("a number")), "{limit}");
    for (fields, has_form) in [(form, true), ("", false)] {
        let (response, ()) = join!(gateway.chat(fields), async {
            worker.run().await.answer("{}").await;
        });
        let header = response.headers()["ratelimit-policy"].to_str().expect("text");
        let policy = r#""grammar-time";q=2000;qu="host-milliseconds";w=60"#;
        assert_eq!(header.contains(policy), has_form, "{header}");
        gateway.settled().await;
    }
}

#[tokio::test]
async fn models_tell_their_context() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (_, models) = json(gateway.ask("acme", "GET", "/v1/models", "").await).await;
    assert!(models["data"][0]["max_model_len"].as_u64() > Some(0), "{models}");
}
