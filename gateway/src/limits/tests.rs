//! Which scopes bind whom, in which order, and that they are taken together;
//! what each has spent is known again after a restart.

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use tollgate_admission::{AdmissionOptions, CapFigures, Estimate, Figures, Reserve, ReserveError};
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, MonotonicTime, RequestId, TenantId, UtcTime,
};

use super::*;
use crate::api::tests::room::{Room, header as header_of, json};
use crate::auth::{Authenticator, KeyOptions, KeyStore};
use crate::upstream::fake::FakeWorker;

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

fn config() -> Config {
    Config::from_toml(std::path::Path::new("test.toml"), CONFIG).expect("a config")
}

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

fn model(name: &str) -> ModelName {
    ModelName::new(name).expect("a name")
}

fn with_plan(plan: Option<&str>) -> KeyOptions {
    let plan = plan.map(|plan| PlanName::new(plan).expect("a name"));
    KeyOptions { plan, ..KeyOptions::default() }
}

/// What binds a new key of `of` with `plan`.
fn bound(config: &Config, of: &str, plan: Option<&str>, of_model: &str) -> Result<Bound, ApiError> {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = KeyStore::open(folder.path()).expect("opens");
    let key = keys.create(&tenant(of), with_plan(plan), UtcTime(0)).expect("creates");
    let door = Authenticator::new(keys, Vec::new()).expect("no issuers");
    let bearer = format!("Bearer {}", key.secret.expose());
    let bearer = HeaderValue::from_str(&bearer).expect("a header value");
    let headers = HeaderMap::from_iter([(header::AUTHORIZATION, bearer)]);
    let caller = door.authenticate(&headers, None, UtcTime(1)).expect("good");
    let of = config.tenant(caller.tenant()).expect("a tenant");
    let scopes = of_caller(config, &caller, of)?;
    Ok(bind(config, scopes, of, &model(of_model)))
}

#[test]
fn scopes_stand_narrowest_first() {
    let config = config();
    for (of, plan, of_model, kinds, pool, weight) in [
        ("acme", None, "fake", vec!["tenant", "pool"], None, 3.0),
        ("acme", Some("key"), "fake", vec!["key", "tenant", "pool"], None, 3.0),
        ("other", None, "fake", vec!["pool"], Some("trial"), 2.0),
        ("other", Some("key"), "tollgate-demo", vec!["key", "pool", "model"], Some("trial"), 2.0),
        ("acme", Some("key"), "tollgate-demo", vec!["key", "tenant", "pool", "model"], None, 3.0),
    ] {
        let bound = bound(&config, of, plan, of_model).expect("bound");
        let found: Vec<_> = bound.scopes.iter().map(|limited| limited.scope.kind()).collect();
        assert_eq!(found, kinds, "{of} {plan:?} {of_model}");
        // Who has a plan of its own has a share of its own, with that plan's weight.
        let share = (bound.pool.as_ref().map(PoolName::as_str), bound.weight);
        assert_eq!(share, (pool, weight), "{of} {plan:?} {of_model}");
    }
}

/// Denied, not unlimited; and the answer says which plan.
#[test]
fn a_key_whose_plan_is_gone_is_refused() {
    let refused = bound(&config(), "acme", Some("gone"), "fake").expect_err("refused");
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    let ApiError::Permission { message } = refused else { panic!("{refused:?}") };
    assert_eq!(message, "The plan 'gone' that limits this key is not configured here.");
}

/// Where a scope stands, seen by a request that asks for nothing of it.
fn standing(admission: &Admission, number: u128, limited: ScopeLimits, utc: UtcTime) -> Figures {
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
async fn what_the_pool_refuses_the_tenant_keeps() {
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
    let now = room.api.serving.clock.utc();
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
    let admission = &room.api.serving.admission;
    let acme = room.api.config.tenant(&tenant("acme")).expect("a tenant");
    let own = of_tenant(acme).next().expect("its own");
    let figures = standing(admission, 1 << 65, own, now);
    assert_eq!(figures.requests.map(|rate| rate.remaining), Some(4));
    let plan = PlanName::new("key").expect("a name");
    let of_key = of_key(&room.api.config, &key.record.id, &plan).expect("a plan");
    let figures = standing(admission, 1 << 66, of_key, now);
    assert_eq!(figures.day.map(|day| day.remaining), Some(DeviceNanos::from_secs(10)));
}

#[test]
fn every_scope_with_a_cap_knows_its_spend_again() {
    let config = config();
    let folder = tempfile::tempdir().expect("a folder");
    let store = KeyStore::open(folder.path()).expect("opens");
    let new = |of, plan| store.create(&tenant(of), with_plan(plan), UtcTime(0)).expect("a key");
    let ids = [new("acme", Some("key")), new("acme", None), new("other", Some("gone"))]
        .map(|key| key.record.id);
    let row = |of, key: usize, of_model, seconds| SpendRow {
        caller: Caller { tenant: tenant(of), key: ids[key].clone() },
        model: model(of_model),
        class: DeviceClass::cpu(),
        reference: DeviceNanos::from_secs(seconds),
    };
    let day = vec![
        row("acme", 0, "fake", 1),
        row("acme", 0, "tollgate-demo", 2),
        row("acme", 1, "fake", 4),
        row("other", 2, "tollgate-demo", 8),
        row("nobody", 2, "tollgate-demo", 16),
    ];
    let month = vec![row("acme", 0, "fake", 9), row("acme", 1, "fake", 10)];
    let now = UtcTime(1_795_132_800 * 1_000_000_000);
    let admission = Admission::new(AdmissionOptions::default());
    restore_spend(&admission, &config, &store, Spending { day, month }, now.day());

    let left = |found: Option<CapFigures>| found.map(|cap| cap.remaining.nanos() / 1_000_000_000);
    let scopes = bound(&config, "acme", None, "tollgate-demo").expect("bound").scopes;
    let plan = PlanName::new("key").expect("a name");
    let keys = ids.iter().map(|id| of_key(&config, id, &plan).expect("a plan"));
    let found: Vec<_> = keys
        .chain(scopes)
        .zip(1..)
        .map(|(limited, number)| {
            let name = limited.scope.kind();
            let figures = standing(&admission, number, limited, now);
            (name, left(figures.day), left(figures.month))
        })
        .collect();
    assert_eq!(
        found,
        [
            ("key", Some(7), None),
            ("key", Some(10), None), // it has no plan, so nothing was kept for it
            ("key", Some(10), None), // its plan is gone: it is refused elsewhere
            ("tenant", Some(13), Some(21)),
            ("pool", Some(15), None),
            ("model", Some(24), None),
        ]
    );
}

/// T24: however many trial tenants there are, together they get what their pool
/// gets, on one share of its weight, and admission remembers the pool alone.
#[test]
fn thousands_of_trial_tenants_get_one_pool() {
    const TENANTS: usize = 3_000;
    for (limit, admitted, running, later) in [
        // Forty at once, and one a second from then on.
        ("requests_per_minute = { limit = 60, burst = 40 }", 40, 40, 10),
        ("concurrent = 8\nqueued = 16", 24, 8, 0),
        // Each may cost 30 ms: the last one gets what is left.
        ("device_time_per_day = \"1s\"", 34, 34, 0),
    ] {
        let mut text = format!(
            "[plans.trial]\nweight = 0.5\n{limit}\n[pools.trial]\nplan = \"trial\"\n[models.fake]\npath = \"/\"\n"
        );
        let names: Vec<String> = (0..TENANTS).map(|number| format!("trial-{number}")).collect();
        names.iter().for_each(|name| text += &format!("[tenants.{name}]\npool = \"trial\"\n"));
        let config = Config::from_toml(std::path::Path::new("test.toml"), &text).expect("a config");
        let folder = tempfile::tempdir().expect("a folder");
        let keys = KeyStore::open(folder.path()).expect("opens");
        let wanted = names.iter().map(|name| (tenant(name), KeyOptions::default()));
        let news = keys.create_all(wanted, UtcTime(0)).expect("creates");
        let door = Authenticator::new(keys, Vec::new()).expect("no issuers");
        let admission = Admission::new(AdmissionOptions::default());
        let mut holds = Vec::new();
        let ask = |number: usize, seconds: u64| {
            let bearer = format!("Bearer {}", news[number % TENANTS].secret.expose());
            let bearer = HeaderValue::from_str(&bearer).expect("a header value");
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, bearer)]);
            let caller = door.authenticate(&headers, None, UtcTime(1)).expect("good");
            let of = config.tenant(caller.tenant()).expect("a tenant");
            let scopes = of_caller(&config, &caller, of).expect("its plan is there");
            let bound = bind(&config, scopes, of, &model("fake"));
            let share = (bound.pool.as_ref().map(PoolName::as_str), bound.weight);
            assert_eq!(share, (Some("trial"), 0.5), "all of them run on one share");
            let cost = DeviceNanos(30_000_000);
            let reserve = Reserve {
                id: RequestId::from_random(number as u128),
                scopes: bound.scopes,
                class: DeviceClass::cpu(),
                estimate: Estimate {
                    tokens: 1,
                    expected: cost,
                    worst: cost,
                    least: DeviceNanos(1),
                },
                queue_deadline: MonotonicTime(u64::MAX),
                expires: MonotonicTime(u64::MAX),
            };
            admission.reserve(MonotonicTime(seconds * 1_000_000_000), UtcTime(1), reserve)
        };
        holds.extend((0..TENANTS).filter_map(|number| ask(number, 1).ok()));
        assert_eq!(holds.len(), admitted, "{limit}");
        let budget: u64 = holds.iter().filter_map(|h| h.budget()).map(DeviceNanos::nanos).sum();
        assert!(budget <= 1_000_000_000, "{limit}: {budget} ns held of a second");
        let status = admission.status();
        assert_eq!((status.running, status.queued), (running, admitted - running), "{limit}");
        assert_eq!(status.scopes, 1, "{limit}");
        let more = (0..TENANTS).filter_map(|number| ask(TENANTS + number, 11).ok());
        let more: Vec<_> = more.collect();
        assert_eq!(more.len(), later, "{limit}");
    }
}

/// C18: who comes back against what it was told is refused before its body is
/// read, for a reason that it is told; its neighbour is not, and an admin can
/// lift it.
#[tokio::test]
async fn who_does_not_wait_is_penalised() {
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
    let mut told = Vec::new();
    for _ in 0..4 {
        let response = room.ask("acme", "POST", "/v1/completions", "no JSON").await;
        assert!(!header_of(&response, "retry-after-ms").is_empty());
        let (status, body) = json(response).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{body}");
        told.push(body["error"]["message"].as_str().expect("a message").starts_with("Penalty"));
    }
    assert!(!told[0] && told[3], "the first has done nothing wrong: {told:?}");
    let (penalties, now) = (&room.api.serving.penalties, room.api.serving.clock.now());
    assert!(penalties.check(now, &tenant("other")).is_ok());
    let listed = penalties.of_tenants(now);
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0].offender, listed[0].offences), (&tenant("acme"), 4));
    assert_eq!(penalties.lift_tenant(now, &tenant("acme")), 1);
    let (_, body) = json(room.ask("acme", "POST", "/v1/completions", "no JSON").await).await;
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.contains("1 requests a minute for tenant acme"), "{message}");
}
