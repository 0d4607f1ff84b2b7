//! Tools and their calls in requests: each mistake is refused with its place, and the rest
//! reaches the chat template as the client wrote it.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use common::LIMITS;
use serde_json::{Value, json};
use tollgate_domain::{Grammar, ToolFormat};
use tollgate_openai::{CHAT, CompletionRequest, Violation};
use tollgate_text::{Chat, Prompt};

fn parse(fields: Value) -> Result<CompletionRequest, Violation> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let entries = body.as_object_mut().expect("an object");
    let Value::Object(fields) = fields else { panic!("fields") };
    entries.extend(fields);
    CHAT.parse(&body.to_string(), &LIMITS)
}

fn chat(request: CompletionRequest) -> Chat {
    match request.prompt {
        Prompt::Chat(chat) => chat,
        other => panic!("{other:?}"),
    }
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

#[test]
fn tools_are_refused_with_their_place() {
    let named = |name: Value| json!({"tools": [{"type": "function", "function": {"name": name}}]});
    let with = |key: &str, value: Value| {
        let mut tool = function("f");
        tool["function"][key] = value;
        json!({ "tools": [tool] })
    };
    let many = |count: usize| {
        let tools: Vec<Value> = (0..count).map(|number| function(&format!("f{number}"))).collect();
        json!({ "tools": tools })
    };
    for (fields, expected) in [
        (named(json!("get_limit-2")), None),
        (named(json!("n".repeat(64))), None),
        (named(json!("n".repeat(65))), Some("tools[0].function.name")),
        (named(json!("")), Some("tools[0].function.name")),
        (named(json!("get limit")), Some("tools[0].function.name")),
        (named(json!("<|im_end|>")), Some("tools[0].function.name")),
        (named(json!(7)), Some("tools[0].function.name")),
        (named(Value::Null), Some("tools[0].function.name")),
        (with("description", json!("What it does.")), None),
        (with("description", json!(1)), Some("tools[0].function.description")),
        (with("parameters", json!({"type": "object"})), None),
        (with("parameters", json!([])), Some("tools[0].function.parameters")),
        (with("parameters", json!({"type": "string"})), Some("tools[0].function.parameters.type")),
        (with("parameters", json!({"type": "array"})), Some("tools[0].function.parameters.type")),
        (with("parameters", json!({"type": null})), Some("tools[0].function.parameters.type")),
        (
            with("parameters", json!({"type": ["string", "null"]})),
            Some("tools[0].function.parameters.type"),
        ),
        (with("parameters", json!({"type": ["object", "null"]})), None),
        (with("parameters", json!({"properties": {"a": {}}})), None),
        (with("parameters", Value::Null), None),
        (with("strict", json!(true)), None),
        (with("strict", json!("yes")), Some("tools[0].function.strict")),
        (many(128), None),
        (many(129), Some("tools")),
        (with("description", json!("x".repeat(256 << 10))), Some("tools")),
        (
            json!({"tools": [function("f"), function("g"), function("f")]}),
            Some("tools[2].function.name"),
        ),
        (json!({"tools": {}}), Some("tools")),
        (json!({"tools": [1]}), Some("tools[0]")),
        (json!({"tools": [{"type": "function"}]}), Some("tools[0].function")),
        (json!({"tools": [{"function": {"name": "f"}}]}), Some("tools[0].type")),
        (json!({"tools": [{"type": "web_search"}]}), Some("tools[0].type")),
        (json!({"tools": [function("f")], "tool_choice": "auto"}), None),
        (json!({"tools": [function("f")], "tool_choice": "any"}), Some("tool_choice")),
        (json!({"tools": [function("f")], "parallel_tool_calls": false}), None),
        (json!({"tools": [function("f")], "parallel_tool_calls": 1}), Some("parallel_tool_calls")),
    ] {
        check(fields, expected);
    }
}

/// Asserts that a request with `fields` is sound, or is refused for `expected`.
fn check(fields: Value, expected: Option<&str>) {
    let shown = fields.to_string().chars().take(120).collect::<String>();
    let found = parse(fields).err().map(|violation| violation.param);
    assert_eq!(found, expected.map(|param| Some(param.to_owned())), "{shown}");
}

#[test]
fn choices_and_strict_tools_are_checked() {
    let choose = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (fields, expected) in [
        (json!({"tools": [function("f")], "tool_choice": "required"}), None),
        (json!({"tool_choice": "required"}), Some("tool_choice")),
        (json!({"tools": [function("f")], "tool_choice": choose("f")}), None),
        (
            json!({"tools": [function("f")], "tool_choice": choose("g")}),
            Some("tool_choice.function.name"),
        ),
        (
            json!({"tools": [function("f")], "tool_choice": {"type": "allowed_tools"}}),
            Some("tool_choice.type"),
        ),
        (
            json!({"tools": [function("f")], "tool_choice": {"type": "function"}}),
            Some("tool_choice.function"),
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true,
                "parameters": {"type": "object", "not": {}}}}]}),
            Some("tools[0].function.parameters.not"),
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f",
                "parameters": {"type": "object", "not": {}}}}]}),
            None,
        ),
    ] {
        check(fields, expected);
    }
}

#[test]
fn tools_reach_the_template_in_the_callers_order() {
    let parameters =
        r#"{"type":"object","properties":{"zeta":{"type":"string"},"alpha":{"enum":[2,1]}}}"#;
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"tools":[{{"function":{{"strict":true,"parameters":{parameters},"name":"f","description":"d"}},"type":"function"}}]}}"#
    );
    let request = CHAT.parse(&body, &LIMITS).expect("valid");
    assert!(request.tools.is_some());
    let tool = chat(request).tools[0].to_string();
    let expected = format!(
        r#"{{"type":"function","function":{{"name":"f","description":"d","parameters":{parameters}}}}}"#
    );
    assert_eq!(tool, expected);
}

#[test]
fn unused_tools_stay_out_of_the_prompt() {
    for fields in [json!({"tools": [function("f")], "tool_choice": "none"}), json!({"tools": []})] {
        let request = parse(fields).expect("valid");
        assert_eq!(request.tools, None);
        assert_eq!(chat(request).tools, Vec::<Value>::new());
    }
}

#[test]
fn calls_in_messages_are_refused_with_their_place() {
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
    let asks = |calls: Value| json!({"role": "assistant", "content": null, "tool_calls": calls});
    let tells = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "12"});
    let user = json!({"role": "user", "content": "hi"});
    let at = |place: &str| Some(place.to_owned());
    for (messages, expected) in [
        (json!([user, asks(json!([call("a", json!("{}"))])), tells("a")]), None),
        (
            json!([
                asks(json!([call("a", json!("")), call("b", json!("{\"x\":1}"))])),
                tells("b"),
                tells("a")
            ]),
            None,
        ),
        // A model's call can be cut off, and agents send it back.
        (json!([asks(json!([call("a", json!("{\"x\":"))])), tells("a")]), None),
        (json!([asks(json!([call("a", json!("[1]"))]))]), None),
        (json!([asks(json!([call("a", json!("null"))]))]), None),
        (
            json!([asks(json!([call("a", json!({"x": 1}))]))]),
            at("messages[0].tool_calls[0].function.arguments"),
        ),
        (
            json!([asks(json!([call("a", json!("[".repeat(100_000)))]))]),
            at("messages[0].tool_calls[0].function.arguments"),
        ),
        (json!([asks(json!([call("", json!("{}"))]))]), at("messages[0].tool_calls[0].id")),
        (
            json!([asks(json!([call("a", json!("{}")), call("a", json!("{}"))]))]),
            at("messages[0].tool_calls[1].id"),
        ),
        (json!([asks(json!([{"id": "a"}]))]), at("messages[0].tool_calls[0].function")),
        (
            json!([asks(json!([{"id": "a", "type": "custom", "function": {}}]))]),
            at("messages[0].tool_calls[0].type"),
        ),
        (json!([asks(json!([]))]), at("messages[0].content")),
        // Each message of a tool answers a call of its own.
        (json!([user, tells("a")]), at("messages[1].tool_call_id")),
        (
            json!([asks(json!([call("a", json!("{}"))])), tells("b")]),
            at("messages[1].tool_call_id"),
        ),
        (
            json!([asks(json!([call("a", json!("{}"))])), tells("a"), tells("a")]),
            at("messages[2].tool_call_id"),
        ),
        (json!([{"role": "tool", "content": "12"}]), at("messages[0].tool_call_id")),
        (
            json!([{"role": "user", "content": "hi", "tool_calls": [call("a", json!("{}"))]}]),
            at("messages[0].tool_calls"),
        ),
        (
            json!([{"role": "user", "content": "hi", "tool_call_id": "a"}]),
            at("messages[0].tool_call_id"),
        ),
        (json!([{"role": "assistant", "content": "hi", "reasoning_content": "Hm."}]), None),
        (json!([{"role": "assistant", "content": null, "reasoning_content": "Hm."}]), None),
        (json!([user, {"role": "assistant", "content": null}]), at("messages[1].content")),
        (
            json!([{"role": "assistant", "content": "hi", "reasoning_content": []}]),
            at("messages[0].reasoning_content"),
        ),
    ] {
        let found = parse(json!({ "messages": messages })).err().map(|violation| violation.param);
        let shown = messages.to_string().chars().take(200).collect::<String>();
        assert_eq!(found, expected.map(Some), "{shown}");
    }
}

#[test]
fn calls_reach_the_template_parsed() {
    let messages = json!([
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [{"id": "a", "type": "function",
            "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": [true]}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "12"}]},
    ]);
    let chat = chat(parse(json!({ "messages": messages })).expect("valid"));
    let [asks, tells] = &chat.messages[..] else { panic!("two messages") };
    assert_eq!(asks.content, "");
    assert_eq!(asks.reasoning.as_deref(), Some("Hm."));
    assert_eq!(asks.tool_calls[0].arguments.to_string(), r#"{"z":1,"a":[true]}"#);
    assert_eq!(tells.content, "12");
    let cut = json!([{"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
        "function": {"name": "f", "arguments": "{\"z\":"}}]}]);
    let chat = self::chat(parse(json!({ "messages": cut })).expect("valid"));
    assert_eq!(chat.messages[0].tool_calls[0].arguments, json!({}));
    let answers = tells.answers.as_ref().expect("it answers a call");
    assert_eq!((answers.id.as_str(), answers.name.as_str()), ("a", "f"));
}

/// Adds `fields` to the JSON object `body`, in place of fields of the same name.
fn with_fields(mut body: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// Returns the form of the calls of a request with two tools, the second one strict.
fn form(format: ToolFormat, strict: bool, fields: &Value) -> Result<Option<Grammar>, Violation> {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let unchecked = json!({"type": "object", "not": {}});
    let tool = |name: &str, strict: bool, parameters: &Value| {
        json!({"type": "function", "function": {"name": name, "strict": strict,
            "parameters": parameters}})
    };
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool("f", false, &unchecked), tool("g", strict, &schema)]});
    let body = with_fields(body, fields);
    let request = CHAT.parse(&body.to_string(), &LIMITS).expect("it is sound");
    request.tools.expect("tools").grammar(format, request.sampling.grammar)
}

#[test]
fn form_of_calls_follows_the_choice() {
    let calls = |fields: Value, strict| match form(ToolFormat::Hermes, strict, &fields) {
        Ok(Some(Grammar::Calls(calls))) => Some(calls),
        other => {
            assert_eq!(other, Ok(None), "{fields}");
            None
        }
    };
    // A model that decides by itself writes as it likes, unless a tool is strict.
    assert_eq!(calls(json!({}), false), None);
    let auto = calls(json!({}), true).expect("a strict tool");
    assert!(!auto.required && auto.separator.is_some());
    let begins: Vec<&str> = auto.calls.iter().map(|call| call.begin.as_str()).collect();
    assert_eq!(
        begins,
        ["f", "g"].map(|name| { format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": ") })
    );
    // A schema that cannot be enforced gives an object, as the tool is not strict.
    assert_eq!(auto.calls[0].schema, r#"{"type":"object"}"#);
    assert!(auto.calls[1].schema.contains("integer"));
    let required = calls(json!({"tool_choice": "required", "parallel_tool_calls": false}), false);
    let required = required.expect("a call is required");
    assert!(required.required && required.separator.is_none() && required.calls.len() == 2);
    let choice = json!({"tool_choice": {"type": "function", "function": {"name": "g"}}});
    let named = calls(choice, false).expect("a call is required");
    assert!(named.required && named.separator.is_none());
    assert_eq!(named.calls.len(), 1);
    assert!(named.calls[0].begin.contains("\"g\""));
}

#[test]
fn unenforceable_form_of_calls_is_refused() {
    let required = json!({"tool_choice": "required"});
    for (format, strict, fields, param) in [
        (ToolFormat::Qwen3Coder, false, &required, "tool_choice"),
        (ToolFormat::Qwen3Coder, true, &json!({}), "tools"),
        (ToolFormat::Llama3, true, &json!({}), "tools"),
    ] {
        let violation = form(format, strict, fields).expect_err("it is refused");
        assert_eq!(violation.param.as_deref(), Some(param), "{}", violation.message);
    }
    for format in [ToolFormat::Llama3, ToolFormat::Mistral] {
        assert!(form(format, false, &required).expect("it is enforced").is_some());
        assert_eq!(form(format, false, &json!({})), Ok(None));
    }
}

/// Arguments that are no object would leave the call as text.
#[test]
fn form_of_required_call_has_object() {
    for parameters in [json!({}), json!({"type": ["null", "object"]}), json!({"type": "object"})] {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}],
            "tool_choice": "required", "tools": [{"type": "function",
                "function": {"name": "f", "parameters": parameters}}]});
        let request = CHAT.parse(&body.to_string(), &LIMITS).expect("it is sound");
        let tools = request.tools.expect("it has tools");
        let Ok(Some(Grammar::Calls(calls))) = tools.grammar(ToolFormat::Hermes, None) else {
            panic!("{parameters}");
        };
        assert_eq!(calls.calls[0].schema, r#"{"type":"object"}"#, "{parameters}");
    }
}

#[test]
fn form_of_content_stands_beside_calls() {
    let json =
        |fields: &Value| with_fields(json!({"response_format": {"type": "json_object"}}), fields);
    let calls = |format, fields: Value| match form(format, false, &json(&fields)) {
        Ok(Some(Grammar::Calls(calls))) => calls,
        other => panic!("{fields}: {other:?}"),
    };
    for format in [ToolFormat::Hermes, ToolFormat::Mistral] {
        let auto = calls(format, json!({}));
        assert_eq!(auto.content.as_deref(), Some(r#"{"type":"object"}"#));
        assert!(!auto.required && auto.calls.len() == 2);
        // An answer that begins with a call has no other content.
        let required = calls(format, json!({"tool_choice": "required"}));
        assert_eq!((required.required, required.content), (true, None));
    }
    // Without a call the form is that of the answer alone.
    let none = json(&json!({"tool_choice": "none"}));
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": none["tool_choice"], "response_format": none["response_format"]});
    let request = CHAT.parse(&body.to_string(), &LIMITS).expect("it is sound");
    assert_eq!((request.tools, request.sampling.grammar), (None, Some(Grammar::JsonObject)));
    for (format, fields, param) in [
        (ToolFormat::Qwen3Coder, json(&json!({})), "response_format"),
        (ToolFormat::Llama3, json(&json!({})), "response_format"),
        (ToolFormat::Hermes, json!({"guided_regex": "[a-z]"}), "structured_outputs"),
        (ToolFormat::Hermes, json!({"guided_choice": ["a"]}), "structured_outputs"),
    ] {
        let violation = form(format, false, &fields).expect_err("it is refused");
        assert_eq!(violation.param.as_deref(), Some(param), "{}", violation.message);
    }
}
