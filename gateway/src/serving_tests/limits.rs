//! Limits and penalties through the API.

use std::sync::Arc;

use axum::body::Body;
use http::{Request, StatusCode, header};
use tollgate_admission::{Admission, Estimate, Figures, Reserve, ReserveError, Scope, ScopeLimits};
use tollgate_config::Plan;
use tollgate_domain::{
    DeviceClass, DeviceNanos, MonotonicTime, PlanName, RequestId, TenantId, UtcTime,
};
use tollgate_serving::test_support::FakeWorker;

use crate::api::tests::room::{Room, header as header_of, json};
use crate::auth::KeyOptions;

const CONFIG: &str = r#"
[plans.key]
device_time_per_day = "10s"
[plans.own]
requests_per_minute = 5
device_time_per_day = "20s"
device_time_per_month = "40s"
weight = 3
[plans.shared]
requests_per_minute = { limit = 60, burst = 1 }
device_time_per_day = "30s"
weight = 2
[plans.model]
device_time_per_day = "50s"

[pools.trial]
plan = "shared"
[tenants.acme]
plan = "own"
pool = "trial"
[tenants.other]
pool = "trial"
[models.tollgate-demo]
plan = "model"
"#;

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

fn with_plan(plan: Option<&str>) -> KeyOptions {
    let plan = plan.map(|plan| PlanName::new(plan).expect("a name"));
    KeyOptions { plan, ..KeyOptions::default() }
}

fn scope(scope: Scope, plan: &Plan) -> ScopeLimits {
    ScopeLimits { scope, limits: Arc::clone(&plan.limits) }
}

/// Returns the state of a scope, as a request that takes nothing of it reads it.
fn state_of(admission: &Admission, number: u128, limited: ScopeLimits, utc: UtcTime) -> Figures {
    let reserve = Reserve {
        id: RequestId::from_random(number),
        scopes: vec![limited],
        class: DeviceClass::cpu(),
        estimate: Estimate {
            tokens: 0,
            expected: DeviceNanos::ZERO,
            worst: DeviceNanos::ZERO,
            least: DeviceNanos::ZERO,
        },
        queue_deadline: MonotonicTime(u64::MAX),
        expires: MonotonicTime(u64::MAX),
    };
    match admission.reserve(MonotonicTime::default(), utc, reserve) {
        Ok(hold) => hold.figures().clone(),
        Err(ReserveError::Refused(refusal)) => refusal.figures,
        Err(ReserveError::AlreadyHeld) => panic!("numbers are used once"),
    }
}

#[tokio::test]
async fn refusal_by_pool_takes_nothing_from_tenant() {
    let folder = Room::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let room = Room::open(folder, CONFIG, &[&worker]).await;
    // The pool has one request at once: the other tenant takes it.
    let body = r#"{"model":"fake","prompt":"a"}"#;
    let (response, ()) = tokio::join!(room.ask("other", "POST", "/v1/completions", body), async {
        worker.run().await.answer("Hi.").await;
    });
    assert_eq!(response.status(), StatusCode::OK);

    let keys = room.api.authenticator.keys();
    let now = room.api.serving.clock().utc();
    let key = keys.create(&tenant("acme"), with_plan(Some("key")), now).expect("a key");
    let request = Request::post("/v1/completions")
        .header(header::AUTHORIZATION, format!("Bearer {}", key.secret.expose()))
        .body(Body::from(body))
        .expect("a request");
    let response = room.answer(request, RequestId::from_random(1 << 64)).await;
    assert_eq!(header_of(&response, "x-ratelimit-limit-requests"), "60", "the tightest");
    assert_eq!(header_of(&response, "x-ratelimit-remaining-requests"), "0");
    let (status, body) = json(response).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.contains("60 requests a minute for pool trial"), "{message}");

    // One of acme's five is taken by looking; the refused request took none.
    let admission = &room.admission;
    let acme = room.api.config.tenant(&tenant("acme")).expect("a tenant");
    let plan = acme.plan.as_ref().expect("a plan of its own");
    let own = scope(Scope::Tenant(acme.name.clone()), plan);
    let figures = state_of(admission, 1 << 65, own, now);
    assert_eq!(figures.requests.map(|rate| rate.remaining), Some(4));
    let plan = PlanName::new("key").expect("a name");
    let plan = room.api.config.plan(&plan).expect("a plan");
    let of_key = scope(Scope::Key(key.record.id.clone()), plan);
    let figures = state_of(admission, 1 << 66, of_key, now);
    assert_eq!(figures.day.map(|day| day.remaining), Some(DeviceNanos::from_secs(10)));
}

/// A tenant with clients that do not wait is refused before a body is read, and is
/// told why. Other tenants are not refused, and an admin can lift the penalty.
#[tokio::test]
async fn penalty_refuses_tenant_that_does_not_wait() {
    let folder = Room::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = "[gateway.penalties]\nrefused_clients = 1\n\
                  [plans.slow]\nrequests_per_minute = { limit = 1, burst = 1 }\n\
                  [tenants.acme]\nplan = \"slow\"\n[tenants.other]\nplan = \"slow\"\n";
    let room = Room::open(folder, config, &[&worker]).await;
    for of in ["acme", "other"] {
        let body = r#"{"model":"fake","prompt":"a"}"#;
        let (response, ()) = tokio::join!(room.ask(of, "POST", "/v1/completions", body), async {
            worker.run().await.answer("Hi.").await;
        });
        assert_eq!(response.status(), StatusCode::OK);
    }
    // Each is told to come back in a minute, which is all that one client may be.
    let mut are_penalties = Vec::new();
    for _ in 0..4 {
        let response = room.ask("acme", "POST", "/v1/completions", "no JSON").await;
        assert!(!header_of(&response, "retry-after-ms").is_empty());
        let (status, body) = json(response).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{body}");
        are_penalties
            .push(body["error"]["message"].as_str().expect("a message").starts_with("Penalty"));
    }
    assert!(!are_penalties[0] && are_penalties[3], "{are_penalties:?}");
    let (penalties, now) = (room.api.serving.penalties(), room.api.serving.clock().now());
    assert!(penalties.check(now, &tenant("other")).is_ok());
    let listed = penalties.list(now);
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0].offender, listed[0].offences), (&tenant("acme"), 4));
    assert_eq!(penalties.lift(now, &tenant("acme")), 1);
    let (_, body) = json(room.ask("acme", "POST", "/v1/completions", "no JSON").await).await;
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.contains("1 requests a minute for tenant acme"), "{message}");
}
