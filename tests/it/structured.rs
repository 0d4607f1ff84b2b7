//! Answers of a fixed form: JSON under a schema, expressions, choices. Random answers keep
//! to the form, neighbours do not notice, and a form that cannot be enforced is refused
//! before it costs anything.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tollgate_loadtest::client::Connection;

use crate::support::{OPEN, Tollgate, get, of_schema, post, with_fields};

const CHAT: &str = "/v1/chat/completions";
/// The token `<` of the demo model, with which a call begins.
const OPENS_CALL: u32 = 30;

/// A chat whose answer is sampled at random: most answers are nonsense within the form.
fn wild(seed: u64, fields: &Value) -> Value {
    let body = json!({
        "model": "tollgate-demo", "temperature": 1.5, "seed": seed, "max_tokens": 400,
        "messages": [{ "role": "user", "content": "What is a rate limit?" }],
    });
    with_fields(body, fields)
}

/// Returns the content and the finish reason of an answer.
async fn answer(connection: &Connection, body: &Value) -> (String, String) {
    let (status, reply) = post(connection, CHAT, body).await;
    assert_eq!(status, 200, "{body}: {reply}");
    let choice = &reply["choices"][0];
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    (text(&choice["message"]["content"]), text(&choice["finish_reason"]))
}

#[tokio::test]
async fn random_answers_keep_to_their_form() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let reply = json!({ "type": "object", "additionalProperties": false,
        "required": ["kind", "limit", "tags"],
        "properties": {
            "kind": { "enum": ["rate", "cap"] },
            "limit": { "type": "integer", "minimum": 1, "maximum": 99 },
            "tags": { "type": "array", "maxItems": 2, "items": { "type": "string", "maxLength": 8 } },
        } });
    let is_reply = |text: &str| {
        let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
        let tags = value["tags"].as_array();
        value.as_object().is_some_and(|fields| fields.len() == 3)
            && ["rate", "cap"].iter().any(|kind| value["kind"] == *kind)
            && value["limit"].as_u64().is_some_and(|limit| (1..100).contains(&limit))
            && tags.is_some_and(|tags| {
                tags.len() <= 2
                    && tags
                        .iter()
                        .all(|tag| tag.as_str().is_some_and(|tag| tag.chars().count() <= 8))
            })
    };
    let is_digits = |text: &str| text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_choice = |text: &str| text == "yes" || text == "no, \"never\"";
    let is_object =
        |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
    type Form<'a> = (Value, &'a dyn Fn(&str) -> bool);
    let forms: [Form<'_>; 5] = [
        (of_schema(&reply), &is_reply),
        (json!({ "guided_json": reply }), &is_reply),
        (json!({ "structured_outputs": { "regex": "[0-9]{3}" } }), &is_digits),
        (json!({ "guided_choice": ["yes", "no, \"never\""] }), &is_choice),
        (json!({ "response_format": { "type": "json_object" } }), &is_object),
    ];
    for (fields, is_right) in &forms {
        let mut whole = 0;
        for seed in 0..8 {
            let (content, end) = answer(&connection, &wild(seed, fields)).await;
            // An answer that was cut off is a beginning of the form.
            if end == "stop" {
                assert!(is_right(&content), "{fields}: {content}");
                whole += 1;
            }
        }
        assert!(whole > 0, "no answer to {fields} ended by itself");
    }
}

#[tokio::test]
async fn forms_change_no_answer_of_neighbours() {
    let gateway = Tollgate::with_config(OPEN);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let schema = of_schema(&json!({ "type": "array", "items": { "type": "string" } }));
    let plain = |seed| {
        let mut body = wild(seed, &json!({}));
        body["temperature"] = json!(0);
        body["max_tokens"] = json!(40);
        body
    };
    let (alone, _) = answer(&connection, &plain(0)).await;
    let connection = Arc::new(connection);
    let mut answers = JoinSet::new();
    for seed in 0..16 {
        // Every second request has a form, so the batch holds both kinds.
        let has_form = seed % 2 == 0;
        let body = if has_form { wild(seed, &schema) } else { plain(seed) };
        let connection = Arc::clone(&connection);
        answers.spawn(async move { (has_form, answer(&connection, &body).await) });
    }
    while let Some(answered) = answers.join_next().await {
        let (has_form, (content, end)) = answered.expect("no panic");
        if has_form {
            assert!(content.starts_with('['), "{content}");
            assert!(end == "length" || serde_json::from_str::<Vec<String>>(&content).is_ok());
        } else {
            assert_eq!(content, alone);
        }
    }
}

#[tokio::test]
async fn host_time_of_forms_is_reported() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let figure = async |fields: Value| {
        let (status, reply) = post(&connection, CHAT, &wild(1, &fields)).await;
        assert_eq!(status, 200, "{reply}");
        reply["usage"]["tollgate"]["grammar_ns"].as_u64()
    };
    assert!(figure(json!({ "guided_regex": "[a-z]{8}" })).await > Some(0));
    assert_eq!(figure(json!({})).await, None);
}

#[tokio::test]
async fn unenforceable_form_is_refused_and_free() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for (fields, param) in [
        (
            of_schema(&json!({ "properties": { "a": { "not": {} } } })),
            "response_format.json_schema.schema.properties.a.not",
        ),
        (
            of_schema(&json!({ "$ref": "https://example.com/" })),
            "response_format.json_schema.schema.$ref",
        ),
        (json!({ "guided_regex": "(?=a)b" }), "guided_regex"),
        (json!({ "structured_outputs": { "regex": "(a" } }), "structured_outputs.regex"),
        // These pass the gateway's check; the worker's compiler refuses them.
        (of_schema(&json!({ "type": "integer", "minimum": 3, "maximum": 2 })), "response_format"),
        (json!({ "guided_regex": "a[^\\x00-\\x{10FFFF}]" }), "guided_regex"),
    ] {
        let (status, reply) = post(&connection, CHAT, &wild(1, &fields)).await;
        assert_eq!(status, 400, "{fields}: {reply}");
        assert_eq!(reply["error"]["param"], param, "{reply}");
    }
    let (_, usage) = get(&connection, "/v1/usage").await;
    assert!(!usage.to_string().contains("\"completion_tokens\":1"), "{usage}");
}

/// A tenant that spends its grammar time is refused until the time has come back, and only
/// where it asks for a form.
#[tokio::test]
async fn forms_beyond_their_host_time_are_refused() {
    let gateway = Tollgate::with_config(
        "[plans.p]\ngrammar_time_per_minute = \"20ms\"\n[tenants.acme]\nplan = \"p\"\n",
    );
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let mut refused = None;
    // Each form is new, so each is compiled; even the fastest takes a part of the limit.
    for number in 0..400 {
        let regex = format!("[a-z]{{8}}{number}");
        let body = wild(number, &json!({ "guided_regex": regex, "max_tokens": 4 }));
        let (status, reply) = post(&connection, CHAT, &body).await;
        if status != 200 {
            refused = Some((status, reply));
            break;
        }
    }
    let (status, reply) = refused.expect("no form was refused");
    assert_eq!(status, 429, "{reply}");
    assert_eq!(reply["error"]["code"], "rate_limit_exceeded", "{reply}");
    let message = reply["error"]["message"].as_str().expect("text");
    assert!(message.contains("20ms of grammar time a minute for tenant acme"), "{message}");
    let (status, reply) = post(&connection, CHAT, &wild(1, &json!({ "max_tokens": 4 }))).await;
    assert_eq!(status, 200, "{reply}");
}

/// An answer to a request with tools and a form is a call or has the form. The bias decides
/// which of the two begins.
#[tokio::test]
async fn answer_beside_tools_is_call_or_form() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let schema = json!({ "type": "object", "additionalProperties": false,
        "required": ["limit"], "properties": { "limit": { "type": "integer", "minimum": 0, "maximum": 9 } } });
    let mut fields = of_schema(&schema);
    fields["tools"] = json!([{ "type": "function",
        "function": { "name": "get_limit", "parameters": schema } }]);
    let is_valid = |text: &Value| {
        let value: Value = serde_json::from_str(text.as_str().expect("text")).expect("JSON");
        value.as_object().is_some_and(|it| it.len() == 1)
            && value["limit"].as_i64().is_some_and(|limit| limit <= 9)
    };
    let opens_call = OPENS_CALL.to_string();
    for (seed, bias, choice) in
        [(1, 100, "auto"), (2, -100, "auto"), (3, -100, "required"), (4, 100, "none")]
    {
        fields["logit_bias"] = json!({ &opens_call: bias });
        fields["tool_choice"] = json!(choice);
        let (status, reply) = post(&connection, CHAT, &wild(seed, &fields)).await;
        assert_eq!(status, 200, "{reply}");
        let (message, end) =
            (&reply["choices"][0]["message"], &reply["choices"][0]["finish_reason"]);
        match (bias > 0 && choice == "auto") || choice == "required" {
            true => {
                assert_eq!((end, &message["content"]), (&json!("tool_calls"), &Value::Null));
                let calls = message["tool_calls"].as_array().expect("calls");
                assert!(!calls.is_empty(), "{reply}");
                for call in calls {
                    assert!(is_valid(&call["function"]["arguments"]), "{reply}");
                }
            }
            false => {
                assert_eq!((end, &message["tool_calls"]), (&json!("stop"), &Value::Null));
                assert!(is_valid(&message["content"]), "{reply}");
            }
        }
    }
}

/// Checks that the demo model decides by itself: it calls the function that a question asks for,
/// with the right argument, repeats the function's result, and answers other questions in words.
#[tokio::test]
async fn demo_model_calls_tools_by_itself() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let function = |name: &str, argument: &str, values: &[&str]| {
        json!({ "type": "function", "function": {
            "name": name,
            "parameters": { "type": "object", "additionalProperties": false,
                "required": [argument],
                "properties": { argument: { "type": "string", "enum": values } } } } })
    };
    let tools = json!([
        function("get_limit", "name", &["requests", "tokens", "device_time", "concurrent"]),
        function("get_usage", "period", &["day", "month"]),
    ]);
    let ask = |messages: &Value| json!({ "model": "tollgate-demo", "messages": messages, "tools": tools, "max_tokens": 100 });
    for (question, name, arguments) in [
        ("What is my request limit?", "get_limit", json!({ "name": "requests" })),
        ("Show my concurrency limit.", "get_limit", json!({ "name": "concurrent" })),
        ("How much have I used this month?", "get_usage", json!({ "period": "month" })),
    ] {
        let mut messages = json!([{ "role": "user", "content": question }]);
        let (status, reply) = post(&connection, CHAT, &ask(&messages)).await;
        assert_eq!((status, &reply["choices"][0]["finish_reason"]), (200, &json!("tool_calls")));
        let message = &reply["choices"][0]["message"];
        let [call] = &message["tool_calls"].as_array().expect("calls")[..] else {
            panic!("{reply}")
        };
        let text = call["function"]["arguments"].as_str().expect("text");
        let given: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!((&call["function"]["name"], given), (&json!(name), arguments), "{reply}");
        let history = messages.as_array_mut().expect("messages");
        history.push(message.clone());
        let result = json!({ "role": "tool", "tool_call_id": call["id"], "content": "7 a minute" });
        history.push(result);
        let (status, reply) = post(&connection, CHAT, &ask(&messages)).await;
        let answer = reply["choices"][0]["message"]["content"].as_str().expect("text");
        assert!(status == 200 && answer.starts_with("The tool answered: "), "{reply}");
    }
    let messages = json!([{ "role": "user", "content": "What is 2 plus 2?" }]);
    let (_, reply) = post(&connection, CHAT, &ask(&messages)).await;
    assert_eq!(reply["choices"][0]["message"]["content"], "2 plus 2 is 4.", "{reply}");
}

/// Schemas that libraries write and that demand nothing are served, and a call that was cut off
/// can be sent back with the tool's message about it.
#[tokio::test]
async fn schemas_and_calls_of_libraries_are_served() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for property in [
        json!({ "type": "object", "propertyNames": { "type": "string" }, "maxProperties": 1,
            "additionalProperties": { "type": "integer", "minimum": 0, "maximum": 9 } }),
        json!({ "type": "string", "format": "password", "writeOnly": true, "maxLength": 3 }),
        json!({ "type": "string", "format": "cuid2", "pattern": "^[0-9a-z]{3}$" }),
        json!({ "type": "array", "uniqueItems": false, "maxItems": 1, "items": { "type": "null" } }),
        json!({ "type": "string", "deprecated": true, "maxLength": 2 }),
    ] {
        let schema = json!({ "type": "object", "additionalProperties": false,
            "required": ["v"], "properties": { "v": property } });
        let (status, reply) = post(&connection, CHAT, &wild(1, &of_schema(&schema))).await;
        assert_eq!(status, 200, "{schema} {reply}");
    }
    let call = json!({ "id": "c1", "type": "function",
        "function": { "name": "f", "arguments": "{\"a\":" } });
    let body = json!({ "model": "tollgate-demo", "max_tokens": 4, "messages": [
        { "role": "user", "content": "Say hello." },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c1", "content": "Invalid JSON" },
    ] });
    let (status, reply) = post(&connection, CHAT, &body).await;
    assert_eq!(status, 200, "{reply}");
}
