//! A synthetic device: every place that names it says that it is synthetic, its answers
//! have the requested length, and the bill adds up.

use serde_json::{Value, json};

use crate::support::{Tollgate, post};

const CONFIG: &str = r#"
[worker]
engine = "synthetic"

[worker.synthetic]
speed = 50.0
context = 4_096

[plans.open]
requests_per_minute = 100_000

[tenants.acme]
plan = "open"
"#;

#[tokio::test]
async fn synthetic_engine_replaces_a_device() {
    let mut gateway = Tollgate::with_config(CONFIG);
    let banner = gateway.banner.join("\n");
    for expected in ["worker 0   synthetic: 28ms", "speed 50", "10000 KV tokens", "tollgate-demo"] {
        assert!(banner.contains(expected), "{expected} is missing in:\n{banner}");
    }
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for (content, max_tokens, tokens, reason) in [
        ("Tell me a story. [5 tokens]", 100, 5, "stop"),
        ("Tell me a story. [1 tokens]", 100, 1, "stop"),
        ("Tell me a story.", 40, 40, "length"),
        ("Tell me a story. [500 tokens]", 20, 20, "length"),
    ] {
        let body = json!({
            "model": "tollgate-demo", "max_tokens": max_tokens, "temperature": 1.5,
            "messages": [{ "role": "user", "content": content }],
        });
        let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{reply}");
        assert_eq!(reply["usage"]["completion_tokens"], tokens, "{content}");
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], reason, "{content}");
        let words = choice["message"]["content"].as_str().expect("text").split_whitespace();
        // The end token counts and has no text.
        assert_eq!(words.count() as u64, tokens - u64::from(reason == "stop"), "{reply}");
    }
    assert_eq!(gateway.stop(), Some(0));
    let usage: Value = serde_json::from_str(&gateway.command(&["usage", "--json"])).expect("JSON");
    let row = &usage["rows"][0];
    assert_eq!((&row["device_class"], &row["gpu_ns"]), (&json!("synthetic"), &json!(0)));
    assert_eq!(row["completion_tokens"], 66);
    // The answer has 66 tokens; each takes a step of at least (28 + 0.3) ms / 50.
    assert!(row["attributed_ns"].as_u64().is_some_and(|ns| ns >= 66 * 566_000), "{row}");
    // The device was not measured; the price is the cost model's.
    assert!(!gateway.data().join("calibration").exists());
}
