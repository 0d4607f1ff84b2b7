//! The access log: one line a request, whatever becomes of it.

use std::io;
use std::sync::{Arc, Mutex};

use http::{Request, header};
use tokio::join;
use tollgate_domain::RequestId;
use tollgate_serving::test_support::FakeWorker;
use tollgate_wire::v1::{FinishReason, RefusedReason};

use super::test_gateway::{TestGateway, json, text};
use crate::telemetry::{LogFormat, LogOptions, log_subscriber};

const CONFIG: &str = r#"
    [gateway.access_log]
    requests = "all"
    [plans.open]
    [tenants.acme]
    plan = "open"
"#;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("a lock").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// Returns the access log's lines, and their text as a whole.
    fn read(&self) -> (Vec<serde_json::Value>, String) {
        let text = String::from_utf8(self.0.lock().expect("a lock").clone()).expect("text");
        let lines = text.lines().filter(|line| line.contains("tollgate_access"));
        (lines.map(|line| serde_json::from_str(line).expect("JSON")).collect(), text)
    }
}

#[tokio::test]
async fn access_log_has_one_line_for_each_request() {
    let lines = Lines::default();
    let writer = lines.clone();
    let options = LogOptions { format: LogFormat::Json, filter: "info".into() };
    let subscriber = log_subscriber(&options, move || writer.clone()).expect("a filter");
    // The tasks of this test run on this thread.
    let _guard = tracing::subscriber::set_default(subscriber);
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, CONFIG, &[&worker]).await;

    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let body = r#"{"model":"fake","messages":[{"role":"user","content":"A secret prompt"}]}"#;
    let request = Request::post("/v1/chat/completions")
        .header(header::AUTHORIZATION, format!("Bearer {}", gateway.key("acme")))
        .header("x-client-request-id", "mine\t7")
        .header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"))
        .body(body.into())
        .expect("a request");
    let (response, ()) = join!(gateway.answer(request, RequestId::from_random(77)), async {
        let run = worker.run().await;
        let path = format!("/v1/usage/{}", RequestId::from_random(77));
        let (_, usage) = json(gateway.ask("acme", "GET", &path, "").await).await;
        assert_eq!((&usage["state"], &usage["trace_id"]), (&"running".into(), &trace.into()));
        assert_eq!(usage["client_request_id"], "mine\t7", "{usage}");
        run.answer("A secret answer.").await;
    });
    json(response).await;
    let (response, ()) = join!(gateway.chat(r#""stream":true"#), async {
        let run = worker.run().await;
        run.token(0, "Hi.", 100).await;
        run.end_choice(0, FinishReason::Fault).await;
        run.end(1, 100).await;
    });
    text(response).await;
    let (response, ()) = join!(gateway.chat(""), async {
        worker.run().await.refuse(RefusedReason::Invalid).await;
    });
    json(response).await;
    json(gateway.chat(r#""n":0"#).await).await;
    gateway.settled().await;

    let (found, whole) = lines.read();
    assert_eq!(found.len(), 4, "{whole}");
    let answered = &found[0];
    for (field, expected) in [
        ("endpoint", "chat_completions"),
        ("tenant", "acme"),
        ("model", "fake"),
        ("trace_id", trace),
    ] {
        assert_eq!(answered[field], expected, "{answered}");
    }
    assert_eq!(answered["client_request_id"], "mine\t7", "escaped in the line: {whole}");
    assert_eq!((&answered["status"], answered["reference_ns"].as_u64()), (&200.into(), Some(100)));
    assert_eq!(answered["key"], gateway.key_id("acme"));
    assert!(answered.get("error").is_none() && answered["decode_ns"].is_u64(), "{answered}");
    // A stream that has begun has its status.
    assert_eq!((&found[1]["status"], &found[1]["error"]), (&200.into(), &"worker_lost".into()));
    for line in &found[2..] {
        assert_eq!((&line["status"], &line["error"]), (&400.into(), &"invalid_request".into()));
    }
    assert!(!whole.contains("secret") && !whole.contains(gateway.key("acme")), "{whole}");
    assert!(!whole.chars().any(|c| c.is_control() && c != '\n'), "{whole:?}");
}
