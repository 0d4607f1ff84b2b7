//! Whole requests through the routes, against a fake worker.

use http::StatusCode;
use serde_json::json;
use tokio::join;
use tollgate_wire::v1::{FinishReason, RefusedReason, Sampling, SamplingDefaults};

use super::test_gateway::{PLAIN, TestGateway, header, json, text};
use tollgate_serving::test_support::{CONTEXT, FakeWorker};

#[tokio::test]
async fn chat_answers_in_one_piece() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(r#""stop":"END","seed":5,"max_tokens":9"#), async {
        let run = worker.run().await;
        let assignment = &run.assignment;
        assert_eq!((assignment.tenant.as_str(), assignment.model.as_str()), ("acme", "fake"));
        assert_eq!((assignment.max_tokens, assignment.choices, assignment.attempt), (9, 1, 0));
        assert_eq!(assignment.stop, ["END"]);
        assert_eq!(assignment.sampling.as_ref().map(|sampling| sampling.seed), Some(5));
        assert_eq!(assignment.budget_ns, None, "no cap applies");
        assert!(!assignment.prompts[0].tokens.is_empty());
        run.answer("Hi.").await;
    });
    assert_eq!(header(&response, "content-type"), "application/json");
    assert_eq!(header(&response, "x-tollgate-reference-ns"), "100");
    assert!(!header(&response, "x-tollgate-reserved-ns").is_empty());
    let (status, body) = json(response).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["choices"][0]["message"]["content"], "Hi.");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["usage"]["completion_tokens"], 1);
    gateway.settled().await;
}

#[tokio::test]
async fn stream_headers_wait_for_first_token() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    // Refused before the first token: a plain status, though a stream was asked for.
    let (response, ()) = join!(gateway.chat(r#""stream":true"#), async {
        worker.run().await.refuse(RefusedReason::Overloaded).await;
    });
    assert_eq!(header(&response, "retry-after-ms"), "1500");
    assert_eq!(json(response).await.0, StatusCode::SERVICE_UNAVAILABLE);
    let usage = r#""stream":true,"stream_options":{"include_usage":true}"#;
    let (response, ()) = join!(gateway.chat(usage), async {
        worker.run().await.answer("Hi.").await;
    });
    for (name, value) in [
        ("content-type", "text/event-stream"),
        ("cache-control", "no-cache"),
        ("x-accel-buffering", "no"),
    ] {
        assert_eq!(header(&response, name), value);
    }
    let (status, transcript) = text(response).await;
    assert_eq!(status, StatusCode::OK);
    let lines: Vec<&str> = transcript.split("\n\n").collect();
    assert!(lines[0].starts_with("data: {"), "{transcript}");
    assert!(lines[0].contains(r#""delta":{"role":"assistant","content":""}"#), "{transcript}");
    assert!(lines[1].contains(r#""delta":{"content":"Hi."}"#), "{transcript}");
    assert!(lines[2].contains(r#""finish_reason":"stop"}],"usage":null}"#), "{transcript}");
    assert!(lines[3].contains(r#""choices":[],"usage":{"#), "{transcript}");
    assert_eq!(lines[4..], ["data: [DONE]", ""]);
    gateway.settled().await;
}

/// The usage reports each stage of a request except the last, which ends after the
/// usage is written. The metrics count every stage once.
#[tokio::test]
async fn response_reports_time_of_each_stage() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(r#""n":1"#), async {
        worker.run().await.answer("Hi.").await;
    });
    let (_, body) = json(response).await;
    let figures = &body["usage"]["tollgate"];
    for (figure, worker_says) in [
        ("queue_ns", 1),
        ("prefill_ns", 2),
        ("decode_ns", 3),
        ("to_device_ns", 4),
        ("to_host_ns", 5),
    ] {
        assert_eq!(figures[figure], worker_says, "{figures}");
    }
    for figure in ["read_ns", "preprocess_ns", "place_ns"] {
        assert!(figures[figure].is_u64(), "{figure} of {figures}");
    }
    let tokenised = figures["preprocess_ns"].as_u64();
    assert!(tokenised > Some(1_000), "{tokenised:?} ns for a template and a tokenizer");
    let (response, ()) = join!(gateway.chat(r#""stream":true"#), async {
        worker.run().await.answer("Hi.").await;
    });
    text(response).await;
    // A refused request has no stages.
    let (response, ()) = join!(gateway.chat(r#""n":1"#), async {
        worker.run().await.refuse(RefusedReason::Overloaded).await;
    });
    assert_eq!(json(response).await.0, StatusCode::SERVICE_UNAVAILABLE);
    gateway.settled().await;
    let metrics = gateway.api.metrics.text();
    for stage in
        ["read", "preprocess", "place", "queue", "prefill", "decode", "to_device", "to_host", "out"]
    {
        let line = format!("tollgate_stage_seconds_count{{stage=\"{stage}\"}} 2");
        assert!(metrics.contains(&line), "{line} is missing in:\n{metrics}");
    }
}

/// Every request of a tenant counts once, however it ends. Its device time counts for it.
#[tokio::test]
async fn tenant_requests_count_once_by_their_end() {
    const CONFIG: &str = r#"
        [plans.two]
        requests_per_minute = { limit = 1, burst = 4 }
        [tenants.acme]
        plan = "two"
    "#;
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, CONFIG, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(""), async {
        worker.run().await.answer("Hi.").await;
    });
    assert_eq!(json(response).await.0, StatusCode::OK);
    let (response, ()) = join!(gateway.chat(r#""stream":true"#), async {
        let run = worker.run().await;
        run.token(0, "Hi.", 100).await;
        run.end_choice(0, FinishReason::Fault).await;
        run.end(1, 100).await;
    });
    assert!(text(response).await.1.contains("worker_lost"));
    assert_eq!(json(gateway.chat(r#""n":0"#).await).await.0, StatusCode::BAD_REQUEST);
    let (response, ()) = join!(gateway.chat(""), async {
        worker.run().await.refuse(RefusedReason::Invalid).await;
    });
    assert_eq!(json(response).await.0, StatusCode::BAD_REQUEST);
    let limited = gateway.chat("").await;
    assert_eq!(json(limited).await.0, StatusCode::TOO_MANY_REQUESTS);
    gateway.settled().await;
    let metrics = gateway.api.metrics.text();
    let requests = |outcome: &str, count: u32| {
        format!("tollgate_tenant_requests_total{{tenant=\"acme\",outcome=\"{outcome}\"}} {count}\n")
    };
    let refused =
        |kind: &str| format!("tollgate_tenant_refusals_total{{tenant=\"acme\",kind=\"{kind}\"}} ");
    for line in [
        requests("answered", 1),
        requests("failed", 1),
        refused("invalid_request") + "2\n",
        refused("requests_per_minute"),
        r#"tollgate_tenant_device_seconds_total{tenant="acme",class="cpu"} "#.to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} is missing in:\n{metrics}");
    }
}

/// Reported stage times count only up to the time that the worker had the request.
#[tokio::test]
async fn stage_times_are_capped_by_request_time() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (response, ()) = join!(gateway.chat(r#""n":1"#), async {
        let run = worker.run().await;
        run.token(0, "Hi.", 100).await;
        run.end_choice(0, FinishReason::Stop).await;
        run.end_with_times(1, 100, [u64::MAX; 5]).await;
    });
    let (_, body) = json(response).await;
    let figures = &body["usage"]["tollgate"];
    for figure in ["queue_ns", "prefill_ns", "decode_ns", "to_device_ns", "to_host_ns"] {
        let told = figures[figure].as_u64().expect("a figure");
        assert!(told > 0 && told < 60_000_000_000, "{figure} of {figures}");
    }
    gateway.settled().await;
}

#[tokio::test]
async fn invalid_requests_never_reach_worker() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let long = "word ".repeat(4 * CONTEXT as usize);
    let huge = "x".repeat(1024 * 1024);
    let chat = |content: &str| {
        format!(r#"{{"model":"fake","messages":[{{"role":"user","content":"{content}"}}]}}"#)
    };
    let prompt = |fields: &str| format!(r#"{{"model":"fake","prompt":{fields}}}"#);
    for (path, body, status, code, param) in [
        ("chat/completions", chat(&long), 400, "context_length_exceeded", "messages"),
        ("chat/completions", chat(&huge), 400, "context_length_exceeded", "messages"),
        (
            "completions",
            prompt(r#""a","max_tokens":256"#),
            400,
            "context_length_exceeded",
            "prompt",
        ),
        ("completions", prompt("[2048]"), 400, "invalid_value", "prompt"),
        (
            "completions",
            prompt(r#""a","logit_bias":{"2048":1}"#),
            400,
            "invalid_value",
            "logit_bias",
        ),
        ("completions", r#"{"model":"nope","prompt":"a"}"#.into(), 404, "model_not_found", "model"),
        ("completions", r#"{"model":"a b","prompt":"a"}"#.into(), 404, "model_not_found", "model"),
        ("completions", r#"{"model":"tollgate-demo","prompt":"a"}"#.into(), 503, "overloaded", ""),
        ("completions", "x".repeat(2 * 1024 * 1024 + 1), 413, "request_too_large", ""),
        ("completions", "[".repeat(100), 400, "", ""),
    ] {
        let response = gateway.ask("acme", "POST", &format!("/v1/{path}"), &body).await;
        let (found, error) = json(response).await;
        let start = &body[..body.len().min(60)];
        assert_eq!(found.as_u16(), status, "{start}: {error}");
        assert_eq!(error["error"]["code"].as_str().unwrap_or(""), code, "{start}: {error}");
        assert_eq!(error["error"]["param"].as_str().unwrap_or(""), param, "{start}: {error}");
    }
    gateway.settled().await;
}

#[tokio::test]
async fn models_list_follows_tenant_permissions() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let config = "[plans.open]\n[tenants.acme]\nplan = \"open\"\n[tenants.other]\nplan = \"open\"\nmodels = [\"tollgate-demo\"]\n";
    let gateway = TestGateway::open(folder, config, &[&worker]).await;
    for (tenant, expected) in
        [("acme", vec!["fake", "tollgate-demo"]), ("other", vec!["tollgate-demo"])]
    {
        let (_, list) = json(gateway.ask(tenant, "GET", "/v1/models", "").await).await;
        let ids: Vec<_> = list["data"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|model| model["id"].clone())
            .collect();
        assert_eq!(ids, expected, "{tenant}");
    }
    for (tenant, model, expected) in
        [("acme", "fake", 200), ("other", "fake", 404), ("acme", "no/pe", 404)]
    {
        let response = gateway.ask(tenant, "GET", &format!("/v1/models/{model}"), "").await;
        assert_eq!(response.status().as_u16(), expected, "{tenant} {model}");
    }
    let body = r#"{"model":"fake","prompt":"a"}"#;
    let response = gateway.ask("other", "POST", "/v1/completions", body).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn completion_echoes_prompts() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let body = r#"{"model":"fake","prompt":["one","two"],"n":2,"echo":true,"max_tokens":3}"#;
    let (response, ()) = join!(gateway.ask("acme", "POST", "/v1/completions", body), async {
        let run = worker.run().await;
        assert_eq!((run.assignment.prompts.len(), run.assignment.choices), (2, 2));
        for choice in 0..4 {
            run.token(choice, &format!(" {choice}"), 100).await;
            run.end_choice(choice, FinishReason::Length).await;
        }
        run.end(4, 100).await;
    });
    let (_, body) = json(response).await;
    let texts: Vec<_> = (0..4).map(|choice| body["choices"][choice]["text"].clone()).collect();
    assert_eq!(texts, ["one 0", "one 1", "two 2", "two 3"]);
    gateway.settled().await;
}

#[tokio::test]
async fn sampling_parameters_left_out_take_the_models_defaults() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start_announcing(folder.path(), "w0", |announcement| {
        announcement.models[0].sampling_defaults = Some(SamplingDefaults {
            temperature: Some(0.7),
            top_k: Some(20),
            top_p: None,
            repetition_penalty: Some(1.1),
            min_p: Some(0.05),
        });
    });
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    for (fields, expected) in [
        ("", (0.7, 20, 1.0, 1.1, 0.05)),
        (r#","temperature":0"#, (0.0, 20, 1.0, 1.1, 0.05)),
        (r#","temperature":null,"top_k":-1,"top_p":0.5"#, (0.7, 0, 0.5, 1.1, 0.05)),
        (
            r#","temperature":2,"top_k":3,"top_p":0,"repetition_penalty":1,"min_p":0.25"#,
            (2.0, 3, 0.0, 1.0, 0.25),
        ),
        (r#","min_p":0"#, (0.7, 20, 1.0, 1.1, 0.0)),
    ] {
        for (path, prompt) in [
            ("/v1/chat/completions", r#""messages":[{"role":"user","content":"Hi"}]"#),
            ("/v1/completions", r#""prompt":"Hi""#),
        ] {
            let body = format!(r#"{{"model":"fake",{prompt}{fields}}}"#);
            let (response, sampling) = join!(gateway.ask("acme", "POST", path, &body), async {
                let run = worker.run().await;
                let sampling = run.assignment.sampling.clone().expect("sampling");
                run.answer("Hi.").await;
                sampling
            });
            assert_eq!(response.status(), StatusCode::OK);
            let Sampling { temperature, top_k, top_p, repetition_penalty, min_p, .. } = sampling;
            let found = (temperature, top_k, top_p, repetition_penalty, min_p);
            assert_eq!(found, expected, "{body}");
        }
    }
    let (_, model) = json(gateway.ask("acme", "GET", "/v1/models/fake", "").await).await;
    let told = json!({
        "min_p": 0.05, "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 1.0
    });
    assert_eq!(model["sampling_defaults"], told);
}

#[tokio::test]
async fn worker_with_impossible_sampling_defaults_is_not_connected() {
    type Change = fn(&mut SamplingDefaults);
    let cases: [Change; 5] = [
        |it| it.temperature = Some(2.1),
        |it| it.top_p = Some(f32::NAN),
        |it| it.min_p = Some(1.5),
        |it| it.repetition_penalty = Some(0.0),
        |it| it.repetition_penalty = Some(11.0),
    ];
    for change in cases {
        let folder = TestGateway::folder();
        let worker = FakeWorker::start_announcing(folder.path(), "w0", |announcement| {
            let mut defaults = SamplingDefaults::default();
            change(&mut defaults);
            announcement.models[0].sampling_defaults = Some(defaults);
        });
        let gateway = TestGateway::open_at_once(folder, PLAIN, &[&worker]);
        while gateway.api.serving.workers().protocol_violations() == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(gateway.api.serving.workers().connected().count(), 0);
    }
}
