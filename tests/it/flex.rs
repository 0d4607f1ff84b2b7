//! Requests with `service_tier: "flex"`: the batch tier for single requests.

use serde_json::{Value, json};

use crate::support::{Tollgate, get, post};

const CONFIG: &str = r#"
[plans.flexible]
requests_per_minute = 600
tokens_per_minute = 60
concurrent = 16
flex = true

[plans.capped]
concurrent = 16
device_time_per_day = { default = "1us" }
flex = true

[plans.strict]
concurrent = 16

[pools.strict]
plan = "strict"

[tenants.acme]
plan = "flexible"
[tenants.spent]
plan = "capped"
[tenants.pooled]
plan = "flexible"
pool = "strict"
[tenants.other]
plan = "strict"
"#;

fn ask(tier: &str, max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Count." }], "service_tier": tier,
    })
}

#[tokio::test]
async fn flex_takes_no_token_rate_and_keeps_caps() {
    let gateway = Tollgate::with_config(CONFIG);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let chat = "/v1/chat/completions";
    for _ in 0..4 {
        let (status, body) = post(&connection, chat, &ask("flex", 200)).await;
        assert_eq!((status, &body["service_tier"]), (200, &json!("flex")), "{body}");
    }
    // No token was taken, so the limit has all of them.
    let (_, limits) = get(&connection, "/v1/limits").await;
    let limits = limits["data"].as_array().expect("limits");
    let tokens = limits.iter().find(|limit| limit["limit"] == "tokens_per_minute");
    assert_eq!(tokens.expect("the limit")["remaining"], 60, "{limits:?}");
    // The control: the same request is refused as an interactive one.
    let (status, body) = post(&connection, chat, &ask("default", 200)).await;
    assert_eq!((status, &body["error"]["code"]), (429, &json!("rate_limit_exceeded")), "{body}");

    let connection = gateway.connect(&gateway.key("spent", &[])).await;
    let (status, body) = post(&connection, chat, &ask("flex", 4)).await;
    assert_eq!((status, &body["error"]["code"]), (429, &json!("insufficient_quota")), "{body}");
}

#[tokio::test]
async fn flex_is_refused_unless_every_plan_allows_it() {
    let gateway = Tollgate::with_config(CONFIG);
    let chat = "/v1/chat/completions";
    for (tenant, options, plan) in [
        ("other", &[][..], "strict"),
        ("pooled", &[], "strict"),
        ("acme", &["--plan", "strict"], "strict"),
    ] {
        let connection = gateway.connect(&gateway.key(tenant, options)).await;
        let (status, body) = post(&connection, chat, &ask("flex", 4)).await;
        let error = &body["error"];
        assert_eq!((status, &error["param"]), (400, &json!("service_tier")), "{tenant}: {body}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(plan), "{tenant}: {message}");
        let (status, body) = post(&connection, chat, &ask("auto", 4)).await;
        assert_eq!((status, &body["service_tier"]), (200, &Value::Null), "{tenant}: {body}");
    }
}
