//! Requests that clients send again with their `Idempotency-Key`.

use futures_util::future::join_all;
use http::{Response, StatusCode};
use tokio::join;
use tollgate_wire::v1::{FinishReason, RefusedReason};

use super::test_gateway::{PLAIN, TestGateway, header, json, text};
use tollgate_serving::test_support::FakeWorker;

const CHAT: &str = r#"{"model":"fake","messages":[{"role":"user","content":"Hello there"}]}"#;
const STREAM: &str =
    r#"{"model":"fake","stream":true,"messages":[{"role":"user","content":"Hello there"}]}"#;
const OTHER: &str = r#"{"model":"fake","messages":[{"role":"user","content":"Hello again"}]}"#;

async fn send(gateway: &TestGateway, body: &str, key: &str) -> Response<axum::body::Body> {
    gateway.ask_again("acme", "POST", "/v1/chat/completions", body, Some(key)).await
}

/// Returns the status, the code and the value of `x-should-retry`.
async fn refusal(response: Response<axum::body::Body>) -> (StatusCode, String, String) {
    let retry = header(&response, "x-should-retry").to_owned();
    let (status, body) = json(response).await;
    (status, body["error"]["code"].as_str().expect("a code").to_owned(), retry)
}

#[tokio::test]
async fn idempotent_requests_run_once_in_parallel() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (responses, ()) = join!(join_all((0..200).map(|_| send(&gateway, CHAT, "once"))), async {
        worker.run().await.answer("Hi.").await;
    });
    let mut bodies = Vec::new();
    let mut repeats = 0;
    for response in responses {
        repeats += usize::from(!header(&response, "x-tollgate-replay-of").is_empty());
        let (status, body) = text(response).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        bodies.push(body);
    }
    bodies.dedup();
    assert_eq!((bodies.len(), repeats), (1, 199), "one answer for all: {bodies:?}");
    // The fake worker would never answer a second run.
    let late = send(&gateway, CHAT, "once").await;
    assert!(header(&late, "x-tollgate-replay-of").starts_with("req-"));
    assert_eq!(text(late).await.1, bodies[0]);
    gateway.settled().await;
}

#[tokio::test]
async fn idempotency_key_binds_body_and_tenant() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (first, ()) =
        join!(send(&gateway, CHAT, "a"), async { worker.run().await.answer("Hi.").await });
    assert_eq!(first.status(), StatusCode::OK);
    let (status, code, retry) = refusal(send(&gateway, OTHER, "a").await).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!((code.as_str(), retry.as_str()), ("idempotency_key_reused", "false"));
    // Another key, or the same key of another tenant, is another request.
    let path = "/v1/chat/completions";
    let (mine, ()) =
        join!(send(&gateway, OTHER, "b"), async { worker.run().await.answer("Ho.").await });
    let (theirs, ()) = join!(gateway.ask_again("other", "POST", path, CHAT, Some("a")), async {
        worker.run().await.answer("Ha.").await;
    });
    for (response, said) in [(mine, "Ho."), (theirs, "Ha.")] {
        assert_eq!(header(&response, "x-tollgate-replay-of"), "");
        assert_eq!(json(response).await.1["choices"][0]["message"]["content"], said);
    }
    gateway.settled().await;
}

#[tokio::test]
async fn idempotency_key_has_bounded_visible_characters() {
    let folder = TestGateway::folder();
    let gateway = TestGateway::open(folder, PLAIN, &[]).await;
    for key in [String::new(), "a key".to_owned(), "x".repeat(256)] {
        let (status, body) = json(send(&gateway, CHAT, &key).await).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{key:?}");
        assert_eq!(body["error"]["param"], "Idempotency-Key");
    }
    // The longest key is accepted; the request fails because no worker runs.
    let response = send(&gateway, CHAT, &"x".repeat(255)).await;
    assert_ne!(response.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn idempotent_request_survives_client_disconnect() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    for (body, key) in [(CHAT, "whole"), (STREAM, "stream")] {
        let run = {
            let mut asked = Box::pin(send(&gateway, body, key));
            tokio::select! {
                run = worker.run() => run,
                _ = &mut asked => panic!("nobody has answered"),
            }
            // The client has left by now.
        };
        run.token(0, "Hi", 10).await;
        tokio::task::yield_now().await;
        let (again, ()) = join!(send(&gateway, body, key), async {
            run.end_choice(0, FinishReason::Stop).await;
            run.end(1, 100).await;
        });
        assert!(header(&again, "x-tollgate-replay-of").starts_with("req-"));
        let (status, told) = text(again).await;
        assert_eq!(status, StatusCode::OK, "{told}");
        assert!(told.contains("Hi"), "{told}");
    }
    gateway.settled().await;
}

/// A plan with one place, so that a second request waits.
const ONE_PLACE: &str = r#"
[plans.one]
concurrent = 1
queued = 8
[tenants.acme]
plan = "one"
[tenants.other]
plan = "one"
"#;

/// Waits until `count` requests wait for a place.
async fn queued(gateway: &TestGateway, count: usize) {
    let waiting = async {
        while gateway.api.serving.limits().status().queued != count {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(std::time::Duration::from_secs(30), waiting).await;
    waited.unwrap_or_else(|_| panic!("{:?}", gateway.api.serving.limits().status()));
}

#[tokio::test]
async fn idempotent_request_without_place_ends_with_its_client() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, ONE_PLACE, &[&worker]).await;
    for (body, key) in [(CHAT, "whole"), (STREAM, "stream")] {
        let mut runs = Box::pin(gateway.chat(""));
        let running = tokio::select! {
            run = worker.run() => run,
            _ = &mut runs => panic!("nobody has answered"),
        };
        let mut waits = Box::pin(send(&gateway, body, key));
        tokio::select! {
            () = queued(&gateway, 1) => {}
            _ = &mut waits => panic!("the place is taken"),
        }
        drop(waits);
        queued(&gateway, 0).await;
        let (first, ()) = join!(runs, running.answer("Hi."));
        assert_eq!(first.status(), StatusCode::OK);
        // Nothing ran under the key, so the request runs now.
        let (again, ()) =
            join!(send(&gateway, body, key), async { worker.run().await.answer("Hi.").await });
        assert_eq!(header(&again, "x-tollgate-replay-of"), "");
        assert_eq!(text(again).await.0, StatusCode::OK);
    }
    gateway.settled().await;
}

/// The control: a request that is awaited by a repeat keeps its place in the queue.
#[tokio::test]
async fn idempotent_request_with_waiting_repeat_keeps_its_place() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, ONE_PLACE, &[&worker]).await;
    let mut runs = Box::pin(gateway.chat(""));
    let running = tokio::select! {
        run = worker.run() => run,
        _ = &mut runs => panic!("nobody has answered"),
    };
    let mut waits = Box::pin(send(&gateway, CHAT, "k"));
    tokio::select! {
        () = queued(&gateway, 1) => {}
        _ = &mut waits => panic!("the place is taken"),
    }
    let mut repeat = Box::pin(send(&gateway, CHAT, "k"));
    assert!(futures_util::poll!(&mut repeat).is_pending(), "the repeat waits");
    drop(waits);
    let (first, repeat, ()) = join!(runs, repeat, async {
        running.answer("Hi.").await;
        worker.run().await.answer("Hi again.").await;
    });
    assert_eq!(first.status(), StatusCode::OK);
    assert!(header(&repeat, "x-tollgate-replay-of").starts_with("req-"));
    assert!(text(repeat).await.1.contains("Hi again."));
    gateway.settled().await;
}

#[tokio::test]
async fn idempotent_stream_replays_same_bytes() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (first, ()) =
        join!(send(&gateway, STREAM, "s"), async { worker.run().await.answer("Hi.").await });
    let first = text(first).await.1;
    assert!(first.ends_with("data: [DONE]\n\n"), "{first}");
    let again = send(&gateway, STREAM, "s").await;
    assert_eq!(header(&again, "content-type"), "text/event-stream");
    assert_eq!(text(again).await.1, first);
    gateway.settled().await;
}

#[tokio::test]
async fn uncharged_failure_frees_idempotency_key() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (refused, ()) = join!(send(&gateway, CHAT, "k"), async {
        worker.run().await.refuse(RefusedReason::Overloaded).await;
    });
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let malformed = send(&gateway, "{", "k").await;
    assert_eq!(malformed.status(), StatusCode::BAD_REQUEST, "the key was free for any body");
    let (again, ()) =
        join!(send(&gateway, OTHER, "k"), async { worker.run().await.answer("Hi.").await });
    assert_eq!(header(&again, "x-tollgate-replay-of"), "");
    assert_eq!(again.status(), StatusCode::OK);
    gateway.settled().await;
}

/// A response that is too large to keep is not run again either.
#[tokio::test]
async fn unkept_response_is_not_run_again() {
    for limits in ["largest_answer = \"10B\"", "answers = \"10B\""] {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let config = format!("[gateway.idempotency]\n{limits}\n{PLAIN}");
        let gateway = TestGateway::open(folder, &config, &[&worker]).await;
        for (body, key) in [(CHAT, "whole"), (STREAM, "stream")] {
            let (first, ()) =
                join!(send(&gateway, body, key), async { worker.run().await.answer("Hi.").await });
            assert_eq!(text(first).await.0, StatusCode::OK);
            gateway.settled().await;
            let (status, code, retry) = refusal(send(&gateway, body, key).await).await;
            assert_eq!(status, StatusCode::CONFLICT);
            assert_eq!((code.as_str(), retry.as_str()), ("idempotency_answer_gone", "false"));
        }
    }
}

#[tokio::test]
async fn idempotency_keys_are_limited_per_tenant() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let config = format!("[gateway.idempotency]\nkeys_per_tenant = 2\n{PLAIN}");
    let gateway = TestGateway::open(folder, &config, &[&worker]).await;
    for key in ["a", "b"] {
        let (first, ()) =
            join!(send(&gateway, CHAT, key), async { worker.run().await.answer("Hi.").await });
        assert_eq!(first.status(), StatusCode::OK);
    }
    let (status, code, retry) = refusal(send(&gateway, CHAT, "c").await).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!((code.as_str(), retry.as_str()), ("rate_limit_exceeded", "false"));
    assert_eq!(
        send(&gateway, CHAT, "a").await.status(),
        StatusCode::OK,
        "a repeat needs no gateway"
    );
    let path = "/v1/chat/completions";
    let (other, ()) = join!(gateway.ask_again("other", "POST", path, CHAT, Some("c")), async {
        worker.run().await.answer("Hi.").await;
    });
    assert_eq!(other.status(), StatusCode::OK);
    gateway.settled().await;
}

/// A body of more than 64 KiB for a chat.
fn large_chat() -> String {
    let padding = " ".repeat(100 * 1024);
    format!("{CHAT}{padding}")
}

#[tokio::test]
async fn waiting_repeat_holds_no_large_body() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let body = large_chat();
    let mut first = Box::pin(send(&gateway, &body, "large"));
    let run = tokio::select! {
        run = worker.run() => run,
        _ = &mut first => panic!("nobody has answered"),
    };
    // The first request's memory went back when its prompt was tokenized.
    assert_eq!(gateway.api.bodies.taken(), 0);
    let mut repeat = Box::pin(send(&gateway, &body, "large"));
    assert!(futures_util::poll!(&mut repeat).is_pending(), "the repeat waits");
    assert_eq!(gateway.api.bodies.taken(), 0, "the repeat holds memory");
    let (first, repeat, ()) = join!(first, repeat, run.answer("Hi."));
    assert!(header(&repeat, "x-tollgate-replay-of").starts_with("req-"));
    assert_eq!(text(repeat).await, text(first).await);
    gateway.settled().await;
}

/// The first request leaves without a result. A repeat that still has its body runs; one
/// that let a large body go tells its client to send it again.
#[test]
fn repeat_without_its_body_is_sent_again() {
    // With one thread for blocking work, the test can hold the lookup of a key up.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().expect("a runtime");
    runtime.block_on(async {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        for (key, body) in [("small", CHAT.to_owned()), ("large", large_chat())] {
            let (release, released) = std::sync::mpsc::sync_channel::<()>(1);
            let held = tokio::task::spawn_blocking(move || released.recv());
            let mut first = Box::pin(send(&gateway, &body, key));
            assert!(futures_util::poll!(&mut first).is_pending(), "the key is looked up");
            let mut repeat = Box::pin(send(&gateway, &body, key));
            assert!(futures_util::poll!(&mut repeat).is_pending(), "the repeat waits");
            drop(first);
            drop(release);
            held.await.expect("ends").expect_err("nothing is sent");
            if key == "small" {
                let (ran, ()) = join!(repeat, async { worker.run().await.answer("Hi.").await });
                assert_eq!(ran.status(), StatusCode::OK);
                continue;
            }
            let (status, code, retry) = refusal(repeat.await).await;
            assert_eq!((status, code.as_str()), (StatusCode::CONFLICT, "idempotency_unsettled"));
            assert_ne!(retry, "false", "the client may send it again");
            let (again, ()) = join!(send(&gateway, &body, key), async {
                worker.run().await.answer("Hi.").await;
            });
            assert_eq!(again.status(), StatusCode::OK, "the body sent again runs");
        }
        gateway.settled().await;
    });
}
