//! Limits and penalties through the API.

use std::sync::Arc;

use axum::body::Body;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use http::{Request, StatusCode, header};
use tollgate_admission::{Scope, ScopeLimits};
use tollgate_config::Plan;
use tollgate_domain::{DeviceNanos, PlanName, RequestId, TenantId};
use tollgate_serving::test_support::{FakeRun, FakeWorker, LIMITS_CONFIG, state_of};
use tollgate_wire::v1::FinishReason;

use crate::api::tests::test_gateway::{PLAIN, TestGateway, header as header_of, json};
use crate::auth::KeyOptions;

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

fn with_plan(plan: Option<&str>) -> KeyOptions {
    let plan = plan.map(|plan| PlanName::new(plan).expect("a name"));
    KeyOptions { plan, ..KeyOptions::default() }
}

fn scope(scope: Scope, plan: &Plan) -> ScopeLimits {
    ScopeLimits { scope, limits: Arc::clone(&plan.limits), revision: 0 }
}

#[tokio::test]
async fn refusal_by_pool_takes_nothing_from_tenant() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, LIMITS_CONFIG, &[&worker]).await;
    // The pool has one request at once: the other tenant takes it.
    let body = r#"{"model":"fake","prompt":"a"}"#;
    let (response, ()) =
        tokio::join!(gateway.ask("other", "POST", "/v1/completions", body), async {
            worker.run().await.answer("Hi.").await;
        });
    assert_eq!(response.status(), StatusCode::OK);

    let keys = gateway.api.authenticator.keys();
    let now = gateway.api.serving.clock().utc();
    let key = keys.create(&tenant("acme"), with_plan(Some("key")), now).expect("a key");
    let request = Request::post("/v1/completions")
        .header(header::AUTHORIZATION, format!("Bearer {}", key.secret.expose()))
        .body(Body::from(body))
        .expect("a request");
    let response = gateway.answer(request, RequestId::from_random(1 << 64)).await;
    assert_eq!(header_of(&response, "x-ratelimit-limit-requests"), "60", "the tightest");
    assert_eq!(header_of(&response, "x-ratelimit-remaining-requests"), "0");
    let (status, body) = json(response).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.contains("60 requests a minute for pool trial"), "{message}");

    // One of acme's five is taken by reading the state; the refused request took none.
    let admission = &gateway.admission;
    let config = gateway.api.config.current();
    let acme = config.tenant(&tenant("acme")).expect("a tenant");
    let plan = acme.plan.as_ref().expect("a plan of its own");
    let own = scope(Scope::Tenant(acme.name.clone()), plan);
    let figures = state_of(admission, 1 << 65, own, now);
    assert_eq!(figures.requests.map(|rate| rate.remaining), Some(4));
    let plan = PlanName::new("key").expect("a name");
    let plan = config.plan(&plan).expect("a plan");
    let of_key = scope(Scope::Key(key.record.id.clone()), plan);
    let figures = state_of(admission, 1 << 66, of_key, now);
    assert_eq!(figures.day.map(|day| day.remaining), Some(DeviceNanos::from_secs(10)));
}

/// Every request counts before its body is read, also one that is refused later. Without a
/// rate of requests the same requests go on for ever.
#[tokio::test]
async fn refused_requests_stay_counted() {
    let refused = [
        ("/v1/completions", "no JSON", StatusCode::BAD_REQUEST),
        ("/v1/completions", r#"{"model":"gone","prompt":"a"}"#, StatusCode::NOT_FOUND),
        ("/v1/completions", r#"{"model":"fake","prompt":"a","n":999}"#, StatusCode::BAD_REQUEST),
        (
            "/v1/completions",
            r#"{"model":"fake","prompt":"a","max_tokens":999999999}"#,
            StatusCode::BAD_REQUEST,
        ),
    ];
    for (plan, is_limited) in [("requests_per_minute = 4", true), ("", false)] {
        let folder = TestGateway::folder();
        let worker = FakeWorker::start(folder.path(), "w0");
        let config = format!(
            "[plans.slow]\n{plan}\n[tenants.acme]\nplan = \"slow\"\n\
             [tenants.other]\nplan = \"slow\"\n"
        );
        let gateway = TestGateway::open(folder, &config, &[&worker]).await;
        for (path, body, expected) in refused {
            let response = gateway.ask("acme", "POST", path, body).await;
            assert_eq!(response.status(), expected, "{body}");
        }
        let fifth = gateway.ask("acme", "POST", "/v1/completions", "no JSON").await.status();
        let expected =
            if is_limited { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::BAD_REQUEST };
        assert_eq!(fifth, expected, "{plan}");
        let other = gateway.ask("other", "POST", "/v1/completions", "no JSON").await.status();
        assert_eq!(other, StatusCode::BAD_REQUEST, "the rate is acme's");
    }
}

/// A body of `declared` bytes, of which only the first ones come.
fn unfinished(declared: u64) -> Body {
    use futures_util::StreamExt as _;
    use futures_util::stream;

    struct Declared(Body, u64);

    impl http_body::Body for Declared {
        type Data = axum::body::Bytes;
        type Error = axum::Error;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, axum::Error>>> {
            std::pin::Pin::new(&mut self.0).poll_frame(cx)
        }

        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(self.1)
        }
    }

    let first = stream::iter([Ok::<_, std::io::Error>("{")]).chain(stream::pending());
    Body::new(Declared(Body::from_stream(first), declared))
}

/// Starts a request of `tenant` with an unfinished body. Returns the answer if there is one
/// at once, or else the request, which goes on until it is dropped.
async fn begin<'a>(
    gateway: &'a TestGateway,
    tenant: &str,
    number: u128,
    declared: u64,
) -> Result<StatusCode, std::pin::Pin<Box<dyn Future<Output = ()> + 'a>>> {
    let request = Request::post("/v1/completions")
        .header(header::AUTHORIZATION, format!("Bearer {}", gateway.key(tenant)))
        .body(unfinished(declared))
        .expect("a request");
    let mut answering = Box::pin(gateway.answer(request, RequestId::from_random(number)));
    // One poll runs the request up to the body that does not come.
    match futures_util::poll!(&mut answering) {
        std::task::Poll::Ready(response) => Ok(response.status()),
        std::task::Poll::Pending => Err(Box::pin(async { drop(answering.await) })),
    }
}

/// T61: the memory for bodies is taken before their first byte, by tenant and in all, and
/// returned when they end. With the budget opened wide the same bodies all hold memory.
#[tokio::test]
async fn unfinished_bodies_hold_bounded_memory() {
    const BODY: u64 = 64 * 1024;
    for (budget, expected) in [("128KiB", 2), ("1GiB", 50)] {
        let config = format!(
            "[gateway.requests]\nbody = \"64KiB\"\nbody_memory_per_tenant = \"{budget}\"\n\
             [plans.open]\n[tenants.acme]\nplan = \"open\"\n[tenants.other]\nplan = \"open\"\n"
        );
        let folder = TestGateway::folder();
        let worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, &config, &[&worker]).await;
        let mut held = Vec::new();
        for number in 0..50 {
            match begin(&gateway, "acme", number, BODY).await {
                Ok(status) => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
                Err(request) => held.push(request),
            }
        }
        assert_eq!(held.len(), expected, "{budget}");
        assert_eq!(gateway.api.bodies.taken(), expected as u64 * BODY, "{budget}");
        let other = begin(&gateway, "other", 100, BODY).await;
        assert!(other.is_err(), "another tenant's body has its own budget");
        drop((held, other));
        assert_eq!(gateway.api.bodies.taken(), 0, "bodies that end return their memory");
        let status = gateway.ask("acme", "POST", "/v1/completions", "no JSON").await.status();
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert_eq!(gateway.api.bodies.taken(), 0, "so does a body that was refused");
    }
}

/// T61: a declared length alone takes no memory from others: sixty bodies that declare
/// 120 MiB together, and of which one byte each has come, hold 64 KiB each.
#[tokio::test]
async fn declared_lengths_alone_take_little_memory() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let mut held = Vec::new();
    for number in 0..60 {
        let begun = begin(&gateway, "acme", number, 2 << 20).await;
        held.push(begun.expect_err("the body is on its way"));
    }
    assert_eq!(gateway.api.bodies.taken(), 60 * 64 * 1024);
    drop(held);
    assert_eq!(gateway.api.bodies.taken(), 0);
}

/// T61: the tenants of a pool have one budget together, and one of them half of it. With
/// plans of their own they have a budget each.
#[tokio::test]
async fn tenants_of_pool_share_memory_for_bodies() {
    for (tenants, expected) in [("pool = \"trials\"", [8, 8]), ("plan = \"open\"", [16, 16])] {
        let config = format!(
            "[gateway.requests]\nbody = \"64KiB\"\nbody_memory_per_tenant = \"1MiB\"\n\
             [plans.open]\n[pools.trials]\nplan = \"open\"\n\
             [tenants.acme]\n{tenants}\n[tenants.other]\n{tenants}\n"
        );
        let folder = TestGateway::folder();
        let worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, &config, &[&worker]).await;
        let mut held = Vec::new();
        let mut counts = [0; 2];
        for (at, name) in ["acme", "other"].into_iter().enumerate() {
            for number in 0..20 {
                match begin(&gateway, name, (at as u128) * 100 + number, 64 * 1024).await {
                    Ok(status) => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
                    Err(request) => {
                        held.push(request);
                        counts[at] += 1;
                    }
                }
            }
        }
        assert_eq!(counts, expected, "{tenants}");
    }
}

/// A request with a key keeps the place that it took before its body: a newcomer does not
/// take it while the key is looked up.
#[tokio::test]
async fn first_request_keeps_its_place() {
    let config = "[plans.one]\nconcurrent = 1\nqueued = 1\n\
                  [tenants.acme]\nplan = \"one\"\n[tenants.other]\nplan = \"one\"\n";
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, config, &[&worker]).await;
    let other = begin(&gateway, "acme", 1, 1024).await.expect_err("one of two places");
    let whole =
        futures_util::stream::iter([Ok::<_, std::io::Error>(r#"{"model":"fake","prompt":"a"}"#)]);
    let request = Request::post("/v1/completions")
        .header(header::AUTHORIZATION, format!("Bearer {}", gateway.key("acme")))
        .header("idempotency-key", "k")
        .body(Body::from_stream(whole))
        .expect("a request");
    let mut first = Box::pin(gateway.answer(request, RequestId::from_random(2)));
    // The poll reads the whole body and begins to look the key up on disk.
    assert!(futures_util::poll!(&mut first).is_pending());
    let newcomer = begin(&gateway, "acme", 3, 1024).await;
    assert_eq!(newcomer.err().map(drop), None, "the newcomer took the place");
    drop(other);
    let (response, ()) = tokio::join!(first, async { worker.run().await.answer("Hi.").await });
    assert_eq!(response.status(), StatusCode::OK);
    gateway.settled().await;
}

/// T61: a request takes its place before its body, so a tenant has no more bodies on their
/// way than requests that may run and wait.
#[tokio::test]
async fn unfinished_bodies_take_places() {
    for (places, expected) in [("concurrent = 2\nqueued = 2", 4), ("", 20)] {
        let config = format!(
            "[plans.few]\n{places}\n[tenants.acme]\nplan = \"few\"\n\
             [tenants.other]\nplan = \"few\"\n"
        );
        let folder = TestGateway::folder();
        let worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, &config, &[&worker]).await;
        let mut held = Vec::new();
        for number in 0..20 {
            match begin(&gateway, "acme", number, 1024).await {
                Ok(status) => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
                Err(request) => held.push(request),
            }
        }
        assert_eq!(held.len(), expected, "{places}");
        assert!(begin(&gateway, "other", 100, 1024).await.is_err(), "the places are acme's");
        drop(held);
        assert!(begin(&gateway, "acme", 101, 1024).await.is_err(), "the places came back");
    }
}

/// A tenant with clients that do not wait is refused before a body is read, and is
/// told why. Other tenants are not refused, and an admin can lift the penalty.
#[tokio::test]
async fn penalty_refuses_tenant_that_does_not_wait() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = "[gateway.penalties]\nrefused_clients = 1\n\
                  [plans.slow]\nrequests_per_minute = { limit = 1, burst = 1 }\n\
                  [tenants.acme]\nplan = \"slow\"\n[tenants.other]\nplan = \"slow\"\n";
    let gateway = TestGateway::open(folder, config, &[&worker]).await;
    for of in ["acme", "other"] {
        let body = r#"{"model":"fake","prompt":"a"}"#;
        let (response, ()) =
            tokio::join!(gateway.ask(of, "POST", "/v1/completions", body), async {
                worker.run().await.answer("Hi.").await;
            });
        assert_eq!(response.status(), StatusCode::OK);
    }
    // Each is told to come back in a minute, which is all that one client may be.
    let mut are_penalties = Vec::new();
    for _ in 0..4 {
        let response = gateway.ask("acme", "POST", "/v1/completions", "no JSON").await;
        assert!(!header_of(&response, "retry-after-ms").is_empty());
        let (status, body) = json(response).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{body}");
        are_penalties
            .push(body["error"]["message"].as_str().expect("a message").starts_with("Penalty"));
    }
    assert!(!are_penalties[0] && are_penalties[3], "{are_penalties:?}");
    let (penalties, now) = (gateway.api.serving.penalties(), gateway.api.serving.clock().now());
    assert!(penalties.check(now, &tenant("other")).is_ok());
    let listed = penalties.list(now);
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0].offender, listed[0].offences), (&tenant("acme"), 4));
    assert_eq!(penalties.lift(now, &tenant("acme")), 1);
    let (_, body) = json(gateway.ask("acme", "POST", "/v1/completions", "no JSON").await).await;
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.contains("1 requests a minute for tenant acme"), "{message}");
}

/// Fills the one place to run and the two to wait of a pool with requests of `first`, then
/// sends one of `other`. Returns the responses: those of `first` in the order of their ends,
/// then that of `other`.
async fn pool_with_full_queue(first: &str) -> (Vec<StatusCode>, StatusCode) {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = "[plans.shared]\nconcurrent = 1\nqueued = 2\n[pools.trial]\nplan = \"shared\"\n\
                  [tenants.acme]\npool = \"trial\"\n[tenants.other]\npool = \"trial\"\n";
    let gateway = TestGateway::open(folder, config, &[&worker]).await;
    let body = r#"{"model":"fake","prompt":"a"}"#;
    let ask = |tenant| gateway.ask(tenant, "POST", "/v1/completions", body);
    let mut greedy = futures_util::stream::FuturesUnordered::new();
    greedy.extend((0..3).map(|_| ask(first)));
    let running = tokio::select! {
        run = worker.run() => run,
        Some(response) = greedy.next() => panic!("{response:?}"),
    };
    // The other two wait before the newcomer comes.
    while gateway.api.serving.limits().status().queued < 2 {
        tokio::select! {
            Some(response) = greedy.next() => panic!("{response:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    let mut late = std::pin::pin!(ask("other"));
    let (mut ended, mut newcomer, mut answering) = (Vec::new(), None, None);
    let mut running = Some(running);
    while ended.len() < 3 || newcomer.is_none() {
        // The request that runs is answered when one of the others was refused.
        if answering.is_none()
            && (!ended.is_empty() || newcomer.is_some())
            && let Some(run) = running.take()
        {
            answering = Some(Box::pin(run.answer("Hi.")));
        }
        tokio::select! {
            Some(response) = greedy.next() => ended.push(response.status()),
            response = &mut late, if newcomer.is_none() => newcomer = Some(response.status()),
            run = worker.run() => running = Some(run),
            () = async { answering.as_mut().expect("checked").await }, if answering.is_some() => {
                answering = None;
            }
        }
    }
    (ended, newcomer.expect("the loop ends with it"))
}

/// Checks that a tenant of a pool cannot keep another out of the pool's queue: its latest
/// request gets 429, and the other waits in that place.
#[tokio::test]
async fn full_pool_queue_admits_another_tenant() {
    let (ended, newcomer) = pool_with_full_queue("acme").await;
    assert_eq!(newcomer, StatusCode::OK);
    assert_eq!(ended, [StatusCode::TOO_MANY_REQUESTS, StatusCode::OK, StatusCode::OK]);
}

/// The control: a tenant that fills the queue gets no fourth place for itself.
#[tokio::test]
async fn full_pool_queue_refuses_its_own_tenant() {
    let (ended, newcomer) = pool_with_full_queue("other").await;
    assert_eq!(newcomer, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ended, [StatusCode::OK; 3]);
}

/// Completes a request of `acme` that may have two hundred tokens with `tokens` of them.
async fn answer_with(run: FakeRun, tokens: u64) {
    for figure in 1..=tokens {
        run.token(0, "a", figure).await;
    }
    run.end_choice(0, FinishReason::Stop).await;
    run.end(tokens, tokens).await;
}

/// Short answers teach a small expectation. Then two hundred requests come at once and use
/// all that they may (T64). The holds alone would admit all of them.
#[tokio::test]
async fn taught_estimate_admits_one_burst_and_half() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = "[plans.rate]\ntokens_per_minute = { limit = 1_200, burst = 2_000 }\n\
                  [tenants.acme]\nplan = \"rate\"\n[tenants.other]\nplan = \"rate\"\n";
    let gateway = TestGateway::open(folder, config, &[&worker]).await;
    let clock = gateway.api.serving.clock();
    let started = clock.now();
    let body = r#"{"model":"fake","prompt":"a","max_tokens":200}"#;
    let ask = || gateway.ask("acme", "POST", "/v1/completions", body);
    let mut used = 0;
    let mut left = Vec::new();
    for _ in 0..30 {
        let (response, ()) = tokio::join!(ask(), async {
            answer_with(worker.run().await, 1).await;
        });
        let remaining = header_of(&response, "x-ratelimit-remaining-tokens");
        left.push(remaining.parse::<u64>().expect("a figure"));
        used += json(response).await.1["usage"]["total_tokens"].as_u64().expect("usage");
    }
    let (before, after) = (left[28], left[29]);
    let held = before.saturating_sub(after).max(1);
    assert!(200 * held <= after, "{held} tokens held of {after}: the attack needs more teaching");

    let mut flood = std::pin::pin!(join_all((0..200).map(|_| ask())));
    let mut runs = futures_util::stream::FuturesUnordered::new();
    let responses = loop {
        tokio::select! {
            responses = &mut flood => break responses,
            run = worker.run() => runs.push(answer_with(run, 200)),
            Some(()) = runs.next() => {}
        }
    };
    let mut refused = 0;
    for response in responses {
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            refused += 1;
            assert!(!header_of(&response, "retry-after").is_empty());
            assert_eq!(header_of(&response, "x-should-retry"), "");
        } else {
            used += json(response).await.1["usage"]["total_tokens"].as_u64().expect("usage");
        }
    }
    let refilled = 20 * (clock.now().since(started).as_secs() + 1);
    assert!(used <= 3_000 + refilled, "{used} tokens used of a burst of 2000");
    assert!(used >= 2_000 && refused > 100, "{used} used, {refused} refused: no attack came");

    // The debt is paid back first, and the refusal says when.
    let response = ask().await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let wait: u64 = header_of(&response, "retry-after").parse().expect("seconds");
    assert!((2..=60).contains(&wait), "{wait} s");
}
