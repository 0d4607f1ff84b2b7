//! Calls of tools through the routes, against a fake worker.

use http::StatusCode;
use tokio::join;
use tollgate_serving::test_support::FakeWorker;

use super::test_gateway::{PLAIN, TestGateway, json, text};

const TOOLS: &str = r#""tools":[{"type":"function","function":{"name":"get_limit","parameters":
    {"type":"object","properties":{"plan":{"type":"string"}}}}}]"#;

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_limit\", \"arguments\": {\"plan\": \"a\"}}\n</tool_call>";

/// Names the form of calls, which the fake worker's template does not show.
fn config() -> String {
    format!("{PLAIN}\n[models.fake]\npath = \".\"\ntool_format = \"hermes\"\n")
}

#[tokio::test]
async fn calls_reach_the_client_in_both_forms() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, &config(), &[&worker]).await;
    let (response, ()) = join!(gateway.chat(TOOLS), async {
        worker.run().await.answer(CALL).await;
    });
    let (status, body) = json(response).await;
    assert_eq!(status, StatusCode::OK);
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], serde_json::Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    assert_eq!(call["function"]["name"], "get_limit");
    assert_eq!(call["function"]["arguments"], r#"{"plan": "a"}"#);

    let streamed = format!(r#"{TOOLS},"stream":true"#);
    let (response, ()) = join!(gateway.chat(&streamed), async {
        worker.run().await.answer(CALL).await;
    });
    let (_, transcript) = text(response).await;
    for part in [
        r#""delta":{"role":"assistant","content":null}"#,
        r#""tool_calls":[{"index":0,"id":"call_"#,
        r#""function":{"name":"get_limit","arguments":""}"#,
        r#""tool_calls":[{"index":0,"function":{"arguments":"{\"plan\": \"a\"}"}}]"#,
        r#""finish_reason":"tool_calls""#,
    ] {
        assert!(transcript.contains(part), "{part} in {transcript}");
    }
    gateway.settled().await;
}

/// The same text is content if the client offers no tool.
#[tokio::test]
async fn text_of_a_call_is_content_without_tools() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, &config(), &[&worker]).await;
    for fields in [r#""n":1"#, &format!(r#"{TOOLS},"tool_choice":"none""#)] {
        let (response, ()) = join!(gateway.chat(fields), async {
            worker.run().await.answer(CALL).await;
        });
        let (_, body) = json(response).await;
        assert_eq!(body["choices"][0]["message"]["content"], CALL);
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
    }
    gateway.settled().await;
}

#[tokio::test]
async fn tools_without_known_form_are_refused() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (status, body) = json(gateway.chat(TOOLS).await).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(body["error"]["param"], "tools");
    assert_eq!(body["error"]["code"], "unsupported_parameter");
}
