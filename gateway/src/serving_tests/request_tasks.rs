//! Requests that fail: clients that leave, workers that die or send invalid
//! events, deadlines, revoked keys. In each case the hold is resolved once and the
//! ledger has the bill.

use http::StatusCode;
use http_body_util::BodyExt;
use tokio::join;
use tollgate_domain::{RequestId, TenantId};
use tollgate_ledger::RequestRow;
use tollgate_wire::v1::{CancelReason, FinishReason, RefusedReason};

use crate::api::tests::test_gateway::{PLAIN, TestGateway, header, json, text};
use crate::auth::{KeyOptions, UnderWay};
use tollgate_serving::test_support::FakeWorker;

const STREAM: &str = r#""stream":true,"max_tokens":8"#;
const WHOLE: &str = r#""max_tokens":8"#;

/// Returns the ledger's row of `acme`'s request `number`.
fn row(gateway: &TestGateway, number: u128) -> Option<RequestRow> {
    let tenant = TenantId::new("acme").expect("a name");
    gateway.ledger.reader().request(&tenant, &RequestId::from_random(number)).expect("a ledger")
}

/// Returns a config in which both tenants have a plan with `limits`. The rate does
/// not refill within a test.
fn plan(limits: &str) -> String {
    format!(
        "[plans.open]\n{limits}\n[tenants.acme]\nplan = \"open\"\n[tenants.other]\nplan = \"open\"\n"
    )
}

const TOKENS: &str = "tokens_per_minute = { limit = 1, burst = 1000 }";

/// Returns the tokens that `acme` has left, by asking twice at no cost.
async fn tokens_left(gateway: &TestGateway, worker: &mut FakeWorker) -> u64 {
    let (response, ()) = join!(gateway.chat(r#""max_tokens":1"#), async {
        worker.run().await.refuse(RefusedReason::Invalid).await;
    });
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let (response, ()) = join!(gateway.chat(r#""max_tokens":1"#), async {
        let run = worker.run().await;
        run.end_choice(0, FinishReason::Stop).await;
        run.end(0, 0).await;
    });
    header(&response, "x-ratelimit-remaining-tokens").parse().expect("a figure")
}

#[tokio::test]
async fn client_that_leaves_pays_work_done() {
    for streamed in [true, false] {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, &plan(TOKENS), &[&worker]).await;
        let before = tokens_left(&gateway, &mut worker).await;
        let prompt = {
            let mut asking = Box::pin(gateway.chat(if streamed { STREAM } else { WHOLE }));
            let mut run = tokio::select! {
                run = worker.run() => run,
                _ = &mut asking => panic!("answered before the worker sent an event"),
            };
            let prompt = run.assignment.prompts[0].tokens.len() as u64;
            if streamed {
                let (response, _) = join!(asking, run.token(0, "Hi", 100));
                let mut body = response.into_body();
                body.frame().await.expect("a frame").expect("data");
            } else {
                run.token(0, "Hi", 100).await;
                drop(asking);
            }
            assert_eq!(run.cancels.recv().await, Some(CancelReason::Client));
            for figure in 101..105 {
                run.token(0, "Hi", figure).await;
            }
            run.end_choice(0, FinishReason::Cancelled).await;
            run.end(5, 700).await;
            prompt
        };
        gateway.settled().await;
        let after = tokens_left(&gateway, &mut worker).await;
        // Between the two figures the helper asked once, which costs its prompt.
        assert_eq!(before - after, (prompt + 5) + prompt, "streamed: {streamed}");
        assert!(
            row(&gateway, 2).is_none(),
            "only the journal writes the usage of a request whose client left"
        );
    }
}

#[tokio::test]
async fn request_without_delivered_content_is_replaced() {
    for sent_before in [false, true] {
        let folder = TestGateway::folder();
        let mut first = FakeWorker::start(folder.path(), "a");
        let mut second = FakeWorker::start(folder.path(), "b");
        let gateway = TestGateway::open(folder, PLAIN, &[&first, &second]).await;
        let (response, ()) = join!(gateway.chat(WHOLE), async {
            // Both workers are idle, so either may be chosen first.
            let (run, other) = tokio::select! {
                run = first.run() => (run, &mut second),
                run = second.run() => (run, &mut first),
            };
            let seed = run.assignment.sampling.clone().map(|sampling| sampling.seed);
            if sent_before {
                run.token(0, "half an ans", 100).await;
            }
            drop(run);
            let again = other.run().await;
            assert_eq!(again.assignment.attempt, 1);
            assert_eq!(again.assignment.sampling.clone().map(|sampling| sampling.seed), seed);
            again.answer("Hi.").await;
        });
        let (status, body) = json(response).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            body["choices"][0]["message"]["content"], "Hi.",
            "token sent before: {sent_before}"
        );
        gateway.settled().await;
        let row = row(&gateway, 0).expect("the fault cap is in the ledger");
        assert_eq!(row.usage.attributed.nanos(), 0, "a lost attempt is not billed");
    }
}

#[tokio::test]
async fn broken_stream_bills_delivered_content_only() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(STREAM), async {
        let run = worker.run().await;
        run.token(0, "Hel", 100).await;
        run.token(0, "lo", 200).await;
    });
    let (status, transcript) = text(response).await;
    assert_eq!(status, StatusCode::OK);
    assert!(transcript.contains(r#""content":"Hel""#), "{transcript}");
    assert!(transcript.contains(r#""code":"worker_lost""#), "{transcript}");
    assert!(transcript.ends_with("data: [DONE]\n\n"), "{transcript}");
    gateway.settled().await;
    let row = row(&gateway, 0).expect("the fault cap is in the ledger");
    assert_eq!((row.usage.reference.nanos(), row.usage.completion_tokens), (200, 2));
}

#[tokio::test]
async fn invalid_events_are_rejected_and_counted() {
    for (figure, what) in
        [(u64::MAX, "more device time than has passed"), (50, "a meter that went back")]
    {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let (response, ()) = join!(gateway.chat(STREAM), async {
            let run = worker.run().await;
            run.token(0, "true", 100).await;
            run.token(0, "false", figure).await;
        });
        let (_, transcript) = text(response).await;
        assert!(
            transcript.contains("true") && !transcript.contains("false"),
            "{what}: {transcript}"
        );
        assert!(transcript.contains("worker_lost"), "{what}: {transcript}");
        assert_eq!(gateway.api.serving.workers().protocol_violations(), 1, "{what}");
        gateway.settled().await;
        let row = row(&gateway, 0).expect("the fault cap is in the ledger");
        assert_eq!(row.usage.reference.nanos(), 100, "{what}");
    }
}

#[tokio::test]
async fn deadline_is_status_before_first_token_event_after() {
    let deadline = format!("[gateway.deadlines]\nqueue = \"100ms\"\nrequest = \"100ms\"\n{PLAIN}");
    for sent in [false, true] {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, &deadline, &[&worker]).await;
        let ((status, should_retry, body), ()) = join!(
            async {
                let response = gateway.chat(STREAM).await;
                let should_retry = header(&response, "x-should-retry").to_owned();
                let (status, body) = text(response).await;
                (status, should_retry, body)
            },
            async {
                let mut run = worker.run().await;
                if sent {
                    run.token(0, "Hi", 100).await;
                }
                assert_eq!(run.cancels.recv().await, Some(CancelReason::Deadline));
                run.end_choice(0, FinishReason::Deadline).await;
                run.end(u64::from(sent), 100).await;
            }
        );
        assert!(body.contains(r#""code":"deadline_exceeded""#), "{body}");
        if sent {
            assert_eq!(status, StatusCode::OK);
            assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
        } else {
            assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
            assert_eq!(should_retry, "false");
        }
        gateway.settled().await;
    }
}

#[tokio::test]
async fn worker_refusal_goes_to_next_worker_or_client() {
    for (reason, expected, tries) in [
        (RefusedReason::Overloaded, StatusCode::SERVICE_UNAVAILABLE, 2),
        (RefusedReason::Deadline, StatusCode::SERVICE_UNAVAILABLE, 2),
        (RefusedReason::Draining, StatusCode::SERVICE_UNAVAILABLE, 2),
        (RefusedReason::Invalid, StatusCode::BAD_REQUEST, 1),
        (RefusedReason::Budget, StatusCode::INTERNAL_SERVER_ERROR, 1),
    ] {
        let folder = TestGateway::folder();
        let mut first = FakeWorker::start(folder.path(), "a");
        let mut second = FakeWorker::start(folder.path(), "b");
        let gateway = TestGateway::open(folder, PLAIN, &[&first, &second]).await;
        let (response, ()) = join!(gateway.chat(WHOLE), async {
            for _ in 0..tries {
                let run = tokio::select! {
                    run = first.run() => run,
                    run = second.run() => run,
                };
                run.refuse(reason).await;
            }
        });
        assert_eq!(response.status(), expected, "{reason:?}");
        gateway.settled().await;
        assert!(row(&gateway, 0).is_none(), "nothing was done");
    }
}

#[tokio::test]
async fn queued_request_gets_place_before_last_event() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = plan("concurrent = 1\nqueued = 1");
    let gateway = TestGateway::open(folder, &config, &[&worker]).await;
    let refused = tokio::sync::Notify::new();
    let ask = async || {
        let response = gateway.chat(WHOLE).await;
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            refused.notify_one();
        }
        response
    };
    let ((), ()) = join!(
        async {
            let (first, second, third) = join!(ask(), ask(), ask());
            let mut statuses = [first.status(), second.status(), third.status()];
            statuses.sort_unstable();
            // One runs, one waits, one is refused, in whichever order they came.
            assert_eq!(statuses, [StatusCode::OK, StatusCode::OK, StatusCode::TOO_MANY_REQUESTS]);
            // The place is free as soon as the answer is there.
            for _ in 0..3 {
                assert_eq!(gateway.chat(WHOLE).await.status(), StatusCode::OK);
            }
        },
        async {
            for number in 0..5 {
                let run = worker.run().await;
                if number == 0 {
                    refused.notified().await; // all three have come
                }
                assert!(worker.runs.try_recv().is_err(), "one at a time");
                run.answer("Hi.").await;
            }
        }
    );
    gateway.settled().await;
}

#[tokio::test]
async fn queued_request_outlives_worker() {
    let folder = TestGateway::folder();
    let at = folder.path().to_owned();
    let mut first = FakeWorker::start(&at, "w0");
    let config = plan("concurrent = 1\nqueued = 1");
    let gateway = TestGateway::open(folder, &config, &[&first]).await;
    let mut running = Box::pin(gateway.chat(STREAM));
    let run = tokio::select! {
        run = first.run() => run,
        _ = &mut running => panic!("answered before the worker sent an event"),
    };
    let (response, _) = join!(running, run.token(0, "Hi", 100));
    let mut waiting = Box::pin(gateway.chat(WHOLE));
    while gateway.api.serving.limits().status().queued == 0 {
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("answered before its turn came"),
            () = tokio::task::yield_now() => {}
        }
    }
    // The worker dies, and is back a moment later.
    drop((first, run));
    let (_, transcript) = text(response).await;
    assert!(transcript.contains("You are charged for what you received."), "{transcript}");
    while gateway.api.serving.workers().connected().next().is_some() {
        gateway.api.serving.workers().changed().await;
    }
    std::fs::remove_file(at.join("w0.sock")).expect("removes");
    let mut second = FakeWorker::start(&at, "w0");
    let (response, ()) = join!(waiting, async { second.run().await.answer("Hi.").await });
    assert_eq!(response.status(), StatusCode::OK);
    gateway.settled().await;
}

#[tokio::test]
async fn cap_becomes_budget_of_worker() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = plan("device_time_per_day = { default = \"1ms\" }");
    let gateway = TestGateway::open(folder, &config, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(r#""max_tokens":200"#), async {
        let run = worker.run().await;
        let budget = run.assignment.budget_ns.expect("a cap applies");
        assert!(budget <= 1_000_000, "{budget}");
        run.token(0, "Hi", 100).await;
        run.end_choice(0, FinishReason::Length).await;
        run.end(1, 1_000).await;
    });
    let (status, body) = json(response).await;
    assert_eq!((status, &body["choices"][0]["finish_reason"]), (StatusCode::OK, &"length".into()));
    gateway.settled().await;
}

#[tokio::test]
async fn shutdown_ends_requests_with_an_error() {
    for streamed in [true, false] {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let ((status, body), ()) = join!(
            async { text(gateway.chat(if streamed { STREAM } else { WHOLE }).await).await },
            async {
                let mut run = worker.run().await;
                run.token(0, "Hi", 100).await;
                if streamed {
                    // The token has gone out once a second one is asked for.
                    run.token(0, "Ho", 200).await;
                }
                tokio::task::yield_now().await;
                gateway.stopping.cancel();
                assert_eq!(run.cancels.recv().await, Some(CancelReason::Client));
                run.end_choice(0, FinishReason::Cancelled).await;
                run.end(if streamed { 2 } else { 1 }, 300).await;
            }
        );
        assert!(body.contains(r#""code":"draining""#), "{status} {body}");
        gateway.settled().await;
        let row = row(&gateway, 0).expect("the fault cap is in the ledger");
        assert!(row.usage.reference.nanos() <= 200, "content that did not go out is not billed");
    }
}

/// Running requests of a revoked key end if an admin asks for it. The client is
/// told why, and the tenant pays the work that was done.
#[tokio::test]
async fn revoked_key_ends_running_requests_when_asked() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, &plan(TOKENS), &[&worker]).await;
    let before = tokens_left(&gateway, &mut worker).await;
    let keys = gateway.api.authenticator.keys().clone();
    let listed = keys.list(None).expect("reads");
    let acme = listed.iter().find(|key| key.tenant.as_str() == "acme").expect("a key").clone();
    let ((_, body), prompt) = join!(async { text(gateway.chat(STREAM).await).await }, async {
        let mut run = worker.run().await;
        run.token(0, "Hi", 100).await;
        let now = gateway.api.serving.clock().utc();
        keys.revoke(&acme.id, UnderWay::Finish, now).expect("revokes");
        gateway.api.serving.in_flight().end_revoked(|key| keys.ends_requests(key));
        tokio::task::yield_now().await;
        assert!(
            run.cancels.try_recv().is_err(),
            "the request goes on unless the admin asks to end it"
        );
        keys.revoke(&acme.id, UnderWay::End, now).expect("a second revocation may end requests");
        // The sweeper ends the request within a second.
        assert_eq!(run.cancels.recv().await, Some(CancelReason::Client));
        let prompt = run.assignment.prompts[0].tokens.len() as u64;
        run.end_choice(0, FinishReason::Cancelled).await;
        run.end(1, 100).await;
        prompt
    });
    assert!(body.contains("Hi"), "{body}");
    assert!(body.contains(r#""code":"invalid_api_key""#) && body.contains("revoked"), "{body}");
    gateway.settled().await;
    assert_eq!(gateway.chat(WHOLE).await.status(), StatusCode::UNAUTHORIZED);
    let key = keys.create(&acme.tenant, KeyOptions::default(), gateway.api.serving.clock().utc());
    let gateway = gateway.with_key("acme", key.expect("a key").secret.expose());
    let after = tokens_left(&gateway, &mut worker).await;
    assert_eq!(before - after, (prompt + 1) + prompt);
}

#[tokio::test]
async fn leaving_the_queue_is_no_offence() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let penalties = "[gateway.penalties]\nwasted_time_per_minute = \"1ms\"\n";
    let config = format!("{penalties}{}", plan("concurrent = 1\nqueued = 1"));
    let gateway = TestGateway::open(folder, &config, &[&worker]).await;
    let (tenant, penalties) =
        (TenantId::new("acme").expect("a name"), gateway.api.serving.penalties());
    let mut first = Box::pin(gateway.chat(WHOLE));
    let run = tokio::select! {
        run = worker.run() => run,
        _ = &mut first => panic!("answered before the worker sent an event"),
    };
    for _ in 0..3 {
        let mut waiting = Box::pin(gateway.chat(WHOLE));
        while gateway.api.serving.limits().status().queued == 0 {
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("answered before its turn came"),
                () = tokio::task::yield_now() => {}
            }
        }
        drop(waiting);
        while gateway.api.serving.limits().status().queued > 0 {
            tokio::task::yield_now().await;
        }
        let checked = penalties.check(gateway.api.serving.clock().now(), &tenant);
        assert_eq!(checked, Ok(()));
    }
    let (response, ()) = join!(first, run.answer("Hi."));
    assert_eq!(response.status(), StatusCode::OK);
    gateway.settled().await;
}

#[tokio::test]
async fn wasted_time_earns_a_penalty() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = format!("[gateway.penalties]\nwasted_time_per_minute = \"1ms\"\n{PLAIN}");
    let gateway = TestGateway::open(folder, &config, &[&worker]).await;
    // Clients that leave before any time is spent waste none, however many they are.
    for spent_ns in [0, 0, 0, 0, 0, 700_000, 700_000] {
        let mut asking = Box::pin(gateway.chat(WHOLE));
        let mut run = tokio::select! {
            run = worker.run() => run,
            _ = &mut asking => panic!("answered before the worker sent an event"),
        };
        drop(asking);
        assert_eq!(run.cancels.recv().await, Some(CancelReason::Client));
        run.end_after(0, spent_ns).await;
        gateway.settled().await;
    }
    let response = gateway.chat(WHOLE).await;
    assert!(!header(&response, "retry-after-ms").is_empty());
    let (status, body) = json(response).await;
    assert_eq!(
        (status, &body["error"]["code"]),
        (StatusCode::TOO_MANY_REQUESTS, &"rate_limit_exceeded".into())
    );
}

#[tokio::test]
async fn delivered_content_is_not_wasted() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = format!("[gateway.penalties]\nwasted_time_per_minute = \"1ms\"\n{PLAIN}");
    let gateway = TestGateway::open(folder, &config, &[&worker]).await;
    for _ in 0..4 {
        let mut response = Box::pin(gateway.chat(STREAM));
        let mut run = tokio::select! {
            run = worker.run() => run,
            _ = &mut response => panic!("answered before the worker sent an event"),
        };
        let (response, _) = join!(response, run.token_after("Hello", 700_000));
        let mut body = response.into_body();
        let mut seen = String::new();
        while !seen.contains("Hello") {
            let frame = body.frame().await.expect("more of the answer").expect("whole");
            seen.push_str(&String::from_utf8_lossy(frame.data_ref().expect("data")));
        }
        drop(body);
        assert_eq!(run.cancels.recv().await, Some(CancelReason::Client));
        run.end_after(1, 700_000).await;
        gateway.settled().await;
    }
    let mut asking = Box::pin(gateway.chat(WHOLE));
    tokio::select! {
        run = worker.run() => run.answer("Hello").await,
        response = &mut asking => panic!("refused: {}", response.status()),
    }
    assert_eq!(asking.await.status(), StatusCode::OK);
}
