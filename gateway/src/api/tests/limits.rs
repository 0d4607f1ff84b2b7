//! `GET /v1/limits`, and the headers of limits.

use http::StatusCode;
use serde_json::{Value, json as value};
use tokio::join;
use tollgate_serving::test_support::FakeWorker;

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
        (&value!("acme"), Some(8))
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

#[tokio::test]
async fn models_tell_their_context() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (_, models) = json(gateway.ask("acme", "GET", "/v1/models", "").await).await;
    assert!(models["data"][0]["max_model_len"].as_u64() > Some(0), "{models}");
}
