//! The bounds of requests: a value beyond a bound is refused with the field that
//! holds it, a value within passes, and a neutral value changes nothing.
#![allow(missing_docs)]

mod common;

use common::LIMITS;
use tollgate_domain::Grammar;
use tollgate_openai::{CHAT, COMPLETIONS, CompletionRequest, Violation, json};
use tollgate_text::Prompt;

/// Bytes of the largest body that the gateway reads by default.
const BODY_BYTES: usize = 2 << 20;

/// The depth to which JSON may nest by default.
const JSON_DEPTH: u32 = 32;

const MESSAGES: &str = r#""messages":[{"role":"user","content":"hi"}]"#;

fn chat_with(fields: &str) -> Result<CompletionRequest, Violation> {
    let comma = if fields.is_empty() { "" } else { "," };
    CHAT.parse(&format!(r#"{{"model":"m",{MESSAGES}{comma}{fields}}}"#), &LIMITS)
}

fn completion_with(fields: &str) -> Result<CompletionRequest, Violation> {
    let comma = if fields.is_empty() { "" } else { "," };
    COMPLETIONS.parse(&format!(r#"{{"model":"m"{comma}{fields}}}"#), &LIMITS)
}

fn check(found: &Result<CompletionRequest, Violation>, expected: Option<&str>, fields: &str) {
    match (found, expected) {
        (Ok(_), None) => {}
        (Err(violation), Some(param)) => {
            assert_eq!(violation.param.as_deref(), Some(param), "{fields}: {}", violation.message);
            assert!(!violation.message.is_empty());
        }
        (found, expected) => panic!("{fields}: expected {expected:?}, found {found:?}"),
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "one table of cases")]
fn chat_fields_keep_their_bounds() {
    let stop_of = |bytes: usize| format!(r#""stop":["{}"]"#, "s".repeat(bytes));
    let biases = |count: usize| {
        let entries: Vec<String> = (0..count).map(|token| format!(r#""{token}":1"#)).collect();
        format!(r#""logit_bias":{{{}}}"#, entries.join(","))
    };
    let metadata = |count: usize| {
        let entries: Vec<String> = (0..count).map(|key| format!(r#""{key}":"v""#)).collect();
        format!(r#""metadata":{{{}}}"#, entries.join(","))
    };
    let stops = |count: usize| format!(r#""stop":{:?}"#, vec!["s"; count]);
    let tokens = |count: usize| format!(r#""stop_token_ids":{:?}"#, vec![7; count]);
    let owned = [
        (stops(16), None),
        (stops(17), Some("stop")),
        (tokens(64), None),
        (tokens(65), Some("stop_token_ids")),
        (stop_of(256), None),
        (stop_of(257), Some("stop")),
        (biases(300), None),
        (biases(301), Some("logit_bias")),
        (metadata(16), None),
        (metadata(17), Some("metadata")),
        (format!(r#""user":"{}""#, "u".repeat(513)), Some("user")),
    ];
    for (fields, expected) in &owned {
        check(&chat_with(fields), *expected, &fields[..fields.len().min(80)]);
    }
    for (fields, expected) in [
        ("", None),
        (r#""n":1"#, None),
        (r#""n":8"#, None),
        (r#""n":0"#, Some("n")),
        (r#""n":9"#, Some("n")),
        (r#""n":-1"#, Some("n")),
        (r#""n":1.5"#, Some("n")),
        (r#""n":"2""#, Some("n")),
        (r#""n":null"#, None),
        (r#""max_tokens":1"#, None),
        (r#""max_tokens":0"#, Some("max_tokens")),
        (r#""max_tokens":-5"#, Some("max_tokens")),
        (r#""max_tokens":99999999999"#, Some("max_tokens")),
        (r#""max_completion_tokens":0"#, Some("max_completion_tokens")),
        (r#""max_tokens":5,"max_completion_tokens":5"#, None),
        (r#""max_tokens":5,"max_completion_tokens":6"#, Some("max_tokens")),
        (r#""temperature":0"#, None),
        (r#""temperature":2"#, None),
        (r#""temperature":2.01"#, Some("temperature")),
        (r#""temperature":-0.01"#, Some("temperature")),
        (r#""temperature":"hot""#, Some("temperature")),
        (r#""top_k":1"#, None),
        (r#""top_k":0"#, None),
        (r#""top_k":-1"#, None),
        (r#""top_k":null"#, None),
        (r#""top_k":2147483647"#, None),
        (r#""top_k":2147483648"#, Some("top_k")),
        (r#""top_k":-2"#, Some("top_k")),
        (r#""top_k":1.5"#, Some("top_k")),
        (r#""top_k":"40""#, Some("top_k")),
        (r#""top_p":1"#, None),
        (r#""top_p":1.1"#, Some("top_p")),
        (r#""min_p":0"#, None),
        (r#""min_p":1"#, None),
        (r#""min_p":null"#, None),
        (r#""min_p":1.1"#, Some("min_p")),
        (r#""min_p":-0.1"#, Some("min_p")),
        (r#""min_p":"0.05""#, Some("min_p")),
        (r#""repetition_penalty":0.01"#, None),
        (r#""repetition_penalty":10"#, None),
        (r#""repetition_penalty":null"#, None),
        (r#""repetition_penalty":0"#, Some("repetition_penalty")),
        (r#""repetition_penalty":10.1"#, Some("repetition_penalty")),
        (r#""repetition_penalty":"much""#, Some("repetition_penalty")),
        (r#""presence_penalty":-2"#, None),
        (r#""presence_penalty":-2.1"#, Some("presence_penalty")),
        (r#""frequency_penalty":2"#, None),
        (r#""frequency_penalty":2.1"#, Some("frequency_penalty")),
        (r#""stop":"x""#, None),
        (r#""stop":["a","b","c","d"]"#, None),
        (r#""stop":["a",""]"#, Some("stop[1]")),
        (r#""stop":[""]"#, Some("stop")),
        (r#""stop":"""#, None),
        (r#""stop":[1]"#, Some("stop")),
        (r#""stop":7"#, Some("stop")),
        (r#""stop":null"#, None),
        (r#""stop":[]"#, None),
        (r#""seed":-3"#, None),
        (r#""seed":1.5"#, Some("seed")),
        (r#""logit_bias":{"5":-100}"#, None),
        (r#""logit_bias":{"5":-100.5}"#, Some("logit_bias.5")),
        (r#""logit_bias":{"x":1}"#, Some("logit_bias.x")),
        (r#""logit_bias":{"1":1,"01":2}"#, Some("logit_bias.1")),
        (r#""logit_bias":[1]"#, Some("logit_bias")),
        (r#""logprobs":true,"top_logprobs":20"#, None),
        (r#""logprobs":true,"top_logprobs":21"#, Some("top_logprobs")),
        (r#""top_logprobs":1"#, Some("top_logprobs")),
        (r#""logprobs":false,"top_logprobs":0"#, None),
        (r#""logprobs":1"#, Some("logprobs")),
        (r#""stream":"yes""#, Some("stream")),
        (r#""stream":true,"stream_options":{"include_usage":true}"#, None),
        (
            r#""stream":true,"stream_options":{"include_usage":1}"#,
            Some("stream_options.include_usage"),
        ),
        (r#""stream":true,"stream_options":[]"#, Some("stream_options")),
        (r#""stream_options":{"include_usage":true}"#, Some("stream_options")),
        (r#""stream_options":null"#, None),
        (r#""tools":[]"#, None),
        (r#""tool_choice":"auto""#, None),
        (r#""tool_choice":"required""#, Some("tool_choice")),
        (r#""response_format":{"type":"text"}"#, None),
        (r#""response_format":{"type":"json_object"}"#, None),
        (r#""response_format":{"type":"xml"}"#, Some("response_format.type")),
        (r#""response_format":{"type":"json_schema"}"#, Some("response_format.json_schema")),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"name":"a"}}"#,
            Some("response_format.json_schema.schema"),
        ),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object","properties":{"a":{"not":{}}}}}}"#,
            Some("response_format.json_schema.schema.properties.a.not"),
        ),
        (r#""response_format":"json""#, Some("response_format")),
        (r#""response_format":{"type":"json_object"},"guided_regex":"a""#, Some("response_format")),
        (r#""structured_outputs":{"json":{},"regex":"a"}"#, Some("structured_outputs.regex")),
        (r#""structured_outputs":{"grammar":"root"}"#, Some("structured_outputs.grammar")),
        (r#""structured_outputs":{"json_object":false}"#, None),
        (r#""guided_json":"{\"type\": \"wish\"}""#, Some("guided_json.type")),
        (r#""guided_json":"{""#, Some("guided_json")),
        (r#""guided_choice":[]"#, Some("guided_choice")),
        (r#""guided_choice":["a",""]"#, Some("guided_choice")),
        (r#""guided_regex":"""#, Some("guided_regex")),
        (r#""guided_choice":["a"],"ignore_eos":true"#, Some("ignore_eos")),
        (r#""service_tier":"auto""#, None),
        (r#""service_tier":"flex""#, None),
        (r#""service_tier":"priority""#, Some("service_tier")),
        (r#""service_tier":1"#, Some("service_tier")),
        (r#""functions":[{"name":"f"}]"#, Some("functions")),
        (r#""modalities":["text"]"#, None),
        (r#""modalities":["text","audio"]"#, Some("modalities")),
        (r#""store":true"#, Some("store")),
        (r#""reasoning_effort":"high""#, Some("reasoning_effort")),
        (r#""chat_template":"{{ x }}""#, Some("chat_template")),
        (r#""documents":[{"url":"http://internal/"}]"#, Some("documents")),
        (r#""metadata":{"a":1}"#, Some("metadata")),
        (r#""stop_token_ids":[0,4294967295]"#, None),
        (r#""stop_token_ids":[]"#, None),
        (r#""stop_token_ids":[-1]"#, Some("stop_token_ids")),
        (r#""stop_token_ids":7"#, Some("stop_token_ids")),
        (r#""ignore_eos":true"#, None),
        (r#""ignore_eos":1"#, Some("ignore_eos")),
        (r#""an_unknown_field":{"deep":[1,2]},"top_a":5"#, None),
        (r#""n":1,"n":2"#, Some("n")),
    ] {
        check(&chat_with(fields), expected, fields);
    }
}

#[test]
fn chat_messages_keep_their_shape() {
    let many = |count: usize| {
        let message = r#"{"role":"user","content":"x"}"#;
        format!("[{}]", vec![message; count].join(","))
    };
    let owned = [(many(2_048), None), (many(2_049), Some("messages"))];
    for (messages, expected) in &owned {
        let body = format!(r#"{{"model":"m","messages":{messages}}}"#);
        check(&CHAT.parse(&body, &LIMITS), *expected, "many messages");
    }
    for (messages, expected) in [
        ("[]", Some("messages")),
        ("null", Some("messages")),
        ("\"hi\"", Some("messages")),
        ("[1]", Some("messages[0]")),
        (r#"[["user","hi"]]"#, Some("messages[0]")),
        (r#"[{"role":"user"}]"#, Some("messages[0].content")),
        (r#"[{"role":"user","content":null}]"#, Some("messages[0].content")),
        (r#"[{"content":"hi"}]"#, Some("messages[0].role")),
        (r#"[{"role":"tool","content":"hi"}]"#, Some("messages[0].tool_call_id")),
        (r#"[{"role":"robot","content":"hi"}]"#, Some("messages[0].role")),
        (r#"[{"role":"developer","content":"hi"}]"#, None),
        (r#"[{"role":"user","content":"hi","name":"bob"}]"#, None),
        (r#"[{"role":"user","content":"hi","name":7}]"#, Some("messages[0].name")),
        (r#"[{"role":"user","content":"hi","extra":1}]"#, None),
        (r#"[{"role":"user","content":"hi","content":"ho"}]"#, Some("messages[0].content")),
        (r#"[{"role":"assistant","content":"hi","refusal":null,"tool_calls":[]}]"#, None),
        (
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#,
            None,
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/"}}]}]"#,
            Some("messages[0].content[0].type"),
        ),
        (r#"[{"role":"user","content":[{"type":"text"}]}]"#, Some("messages[0].content[0].text")),
        (r#"[{"role":"user","content":"\ud800"}]"#, Some("messages[0].content")),
    ] {
        let body = format!(r#"{{"model":"m","messages":{messages}}}"#);
        check(&CHAT.parse(&body, &LIMITS), expected, messages);
    }
    let body = r#"{"model":"m","messages":[{"role":"user","content":[
        {"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
    let request = CHAT.parse(body, &LIMITS).expect("text parts");
    let Prompt::Chat(chat) = request.prompt else { panic!("a chat") };
    assert_eq!(chat.messages[0].content, "ab");
}

#[test]
fn template_arguments_keep_their_bounds() {
    let entries = |count: usize| {
        let entries: Vec<String> = (0..count).map(|number| format!(r#""k{number}":1"#)).collect();
        format!(r#""chat_template_kwargs":{{{}}}"#, entries.join(","))
    };
    let long = |size: usize| format!(r#""chat_template_kwargs":{{"a":"{}"}}"#, "x".repeat(size));
    let whole = Some("chat_template_kwargs");
    for (fields, expected) in [
        (r#""chat_template_kwargs":null"#.to_owned(), None),
        (r#""chat_template_kwargs":{}"#.to_owned(), None),
        (r#""chat_template_kwargs":{"enable_thinking":false}"#.to_owned(), None),
        (r#""chat_template_kwargs":{"a":[[{}]]}"#.to_owned(), None),
        (r#""chat_template_kwargs":{"a":[[{"b":[]}]]}"#.to_owned(), whole),
        (r#""chat_template_kwargs":[]"#.to_owned(), whole),
        (r#""chat_template_kwargs":"x""#.to_owned(), whole),
        (r#""chat_template_kwargs":{"a":1,"a":2}"#.to_owned(), whole),
        (entries(32), None),
        (entries(33), whole),
        (long(4_088), None),
        (long(4_089), whole),
        (
            r#""chat_template_kwargs":{"messages":[]}"#.to_owned(),
            Some("chat_template_kwargs.messages"),
        ),
        (
            r#""chat_template_kwargs":{"add_generation_prompt":false}"#.to_owned(),
            Some("chat_template_kwargs.add_generation_prompt"),
        ),
        (r#""chat_template_kwargs":{"+":1}"#.to_owned(), Some("chat_template_kwargs.+")),
    ] {
        check(&chat_with(&fields), expected, &fields);
    }
    let request = chat_with(r#""chat_template_kwargs":{"enable_thinking":false}"#);
    let Prompt::Chat(chat) = request.expect("valid").prompt else { panic!("a chat") };
    assert_eq!(chat.arguments["enable_thinking"], false);
    assert_eq!(chat.arguments.len(), 1);
}

#[test]
fn completion_fields_keep_their_bounds() {
    let texts = |count: usize| format!(r#""prompt":[{}]"#, vec![r#""x""#; count].join(","));
    let owned = [(texts(16), None), (texts(17), Some("prompt"))];
    for (fields, expected) in &owned {
        check(&completion_with(fields), *expected, fields);
    }
    for (fields, expected) in [
        (r#""prompt":"hi""#, None),
        (r#""prompt":["hi","ho"]"#, None),
        (r#""prompt":[1,2,3]"#, None),
        (r#""prompt":[[1,2],[3]]"#, None),
        (r#""prompt":[]"#, Some("prompt")),
        (r#""prompt":"""#, Some("prompt")),
        (r#""prompt":[""]"#, Some("prompt")),
        (r#""prompt":[[1],[]]"#, Some("prompt")),
        (r#""prompt":[1,"a"]"#, Some("prompt")),
        (r#""prompt":["a",1]"#, Some("prompt")),
        (r#""prompt":[-1]"#, Some("prompt")),
        (r#""prompt":[4294967296]"#, Some("prompt")),
        (r#""prompt":{"a":1}"#, Some("prompt")),
        ("", Some("prompt")),
        (r#""prompt":"hi","suffix":"x""#, None),
        (r#""prompt":["hi","ho"],"suffix":"x""#, None),
        (r#""prompt":[1,2],"suffix":"x""#, Some("suffix")),
        (r#""prompt":"hi","suffix":1"#, Some("suffix")),
        (r#""prompt":"hi","suffix":"x","echo":true"#, Some("echo")),
        (r#""prompt":"hi","suffix":null"#, None),
        (r#""prompt":"hi","best_of":1"#, None),
        (r#""prompt":"hi","best_of":2"#, Some("best_of")),
        (r#""prompt":"hi","best_of":2,"n":2"#, None),
        (r#""prompt":"hi","best_of":100"#, Some("best_of")),
        (r#""prompt":"hi","logprobs":0"#, None),
        (r#""prompt":"hi","logprobs":5"#, None),
        (r#""prompt":"hi","logprobs":6"#, Some("logprobs")),
        (r#""prompt":"hi","logprobs":true"#, Some("logprobs")),
        (r#""prompt":"hi","max_tokens":0"#, Some("max_tokens")),
        (r#""prompt":"hi","max_tokens":0,"echo":true"#, None),
        (r#""prompt":"hi","echo":"yes""#, Some("echo")),
        (r#""prompt":"hi","n":9"#, Some("n")),
    ] {
        check(&completion_with(fields), expected, fields);
    }
}

/// vLLM's fields change the answer there, so an answer without them is not what the
/// client asked for.
#[test]
fn unserved_fields_of_vllm_are_refused() {
    for (field, neutral, other) in [
        ("min_tokens", "0", "5"),
        ("length_penalty", "1.0", "0.5"),
        ("use_beam_search", "false", "true"),
        ("allowed_token_ids", "null", "[1]"),
        ("bad_words", "[]", r#"["x"]"#),
        ("logits_processors", "[]", r#"["x"]"#),
        ("prompt_logprobs", "null", "1"),
        ("truncate_prompt_tokens", "null", "8"),
        ("skip_special_tokens", "true", "false"),
        ("include_stop_str_in_output", "false", "true"),
        ("guided_grammar", "null", r#""root ::= x""#),
    ] {
        for (value, expected) in [(neutral, None), (other, Some(field))] {
            let fields = format!(r#""{field}":{value}"#);
            check(&chat_with(&fields), expected, &fields);
            let fields = format!(r#""prompt":"hi",{fields}"#);
            check(&completion_with(&fields), expected, &fields);
        }
    }
}

#[test]
fn refusal_of_unserved_field_names_served_values() {
    for (fields, expected) in [
        (
            r#""functions":[{"name":"f"}]"#,
            "This gateway does not serve 'functions' (the older form of 'tools'). Leave it out.",
        ),
        (
            r#""guided_grammar":"root ::= x""#,
            "This gateway does not serve 'guided_grammar' (an answer in the form of a grammar). Leave it out.",
        ),
        (r#""store":true"#, "This gateway serves 'store' only as false."),
        (r#""min_tokens":1"#, "This gateway serves 'min_tokens' only as 0."),
        (r#""audio":{}"#, "This gateway does not serve 'audio'. Leave it out."),
    ] {
        assert_eq!(chat_with(fields).expect_err(fields).message, expected);
    }
}

#[test]
fn fields_of_the_form_give_the_grammar() {
    let schema = r#"{"type":"object","properties":{"b":{},"a":{}}}"#;
    let as_text = serde_json::to_string(schema).expect("a string");
    let json_schema = || Grammar::JsonSchema(schema.to_owned());
    for (fields, expected) in [
        (r#""response_format":{"type":"text"}"#.to_owned(), None),
        (r#""response_format":null,"guided_json":null"#.to_owned(), None),
        (r#""structured_outputs":{"json_object":true}"#.to_owned(), Some(Grammar::JsonObject)),
        (format!(r#""guided_json":{schema}"#), Some(json_schema())),
        (format!(r#""guided_json":{as_text}"#), Some(json_schema())),
        (format!(r#""structured_outputs":{{"json":{schema}}}"#), Some(json_schema())),
        (r#""guided_regex":"a+""#.to_owned(), Some(Grammar::Regex("a+".to_owned()))),
        (
            r#""structured_outputs":{"choice":["a","b"]}"#.to_owned(),
            Some(Grammar::Choice(vec!["a".to_owned(), "b".to_owned()])),
        ),
    ] {
        let chat = chat_with(&fields).expect(&fields);
        assert_eq!(chat.sampling.grammar, expected, "{fields}");
        if !fields.contains("response_format") {
            let completion = completion_with(&format!(r#""prompt":"hi",{fields}"#)).expect(&fields);
            assert_eq!(completion.sampling.grammar, expected, "{fields}");
        }
    }
    let format = format!(
        r#""response_format":{{"type":"json_schema","json_schema":{{"name":"n","strict":true,"schema":{schema}}}}}"#
    );
    // The keys keep their order: answers come in the order of the schema.
    assert_eq!(chat_with(&format).expect(&format).sampling.grammar, Some(json_schema()));
}

#[test]
fn body_without_object_is_refused_without_param() {
    for body in ["", "nothing", "[]", "1", "null", "{", r#"{"model":"m"} x"#, r#"{"model"}"#] {
        for found in [CHAT.parse(body, &LIMITS), COMPLETIONS.parse(body, &LIMITS)] {
            let violation = found.expect_err(body);
            assert_eq!(violation.param, None, "{body}");
        }
    }
    let violation = CHAT.parse(r#"{"messages":[]}"#, &LIMITS).expect_err("no model");
    assert_eq!(violation.code, Some("missing_required_parameter"));
}

#[test]
fn parse_bombs_are_refused() {
    let size = BODY_BYTES;
    let bombs = [
        "[".repeat(size),
        format!(r#"{{"model":"m","messages":[{}0]}}"#, "0,".repeat(size / 2)),
        format!(r#"{{"model":"m",{MESSAGES},"stop":[{}0]}}"#, "0,".repeat(size / 2)),
        format!(r#"{{"model":"m",{MESSAGES},"tools":{}}}"#, "[0],".repeat(10)),
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":[{}0]}}]}}"#,
            "0,".repeat(size / 2)
        ),
        format!(
            r#"{{"model":"m",{MESSAGES},"logit_bias":{{{}"a":1}}}}"#,
            r#""1":1,"#.repeat(size / 6)
        ),
        format!(r#"{{"model":"m","prompt":[{}0]}}"#, "0,".repeat(size)),
        format!(r#"{{"model":"m","prompt":[{}[0]]}}"#, "[0],".repeat(size / 4)),
        format!(r#"{{{}"model":"m"}}"#, r#""model":"m","#.repeat(1_000)),
    ];
    for bomb in &bombs {
        let start = &bomb[..60.min(bomb.len())];
        let text = match json::text(bomb.as_bytes(), JSON_DEPTH) {
            Ok(text) => text,
            Err(_) => continue,
        };
        assert!(CHAT.parse(text, &LIMITS).is_err(), "{start}");
        assert!(COMPLETIONS.parse(text, &LIMITS).is_err(), "{start}");
    }
}

#[test]
fn life_without_a_part_names_the_part() {
    use tollgate_openai::batches::life;
    let refused = |anchor, seconds| life("expires_after", anchor, seconds).expect_err("a part");
    for (anchor, seconds, param, code) in [
        (None, Some("3600"), "expires_after[anchor]", Some("missing_required_parameter")),
        (Some("created_at"), None, "expires_after[seconds]", Some("missing_required_parameter")),
        (Some("now"), Some("3600"), "expires_after[anchor]", None),
        (Some("created_at"), Some("x"), "expires_after[seconds]", None),
    ] {
        let refused = refused(anchor, seconds);
        assert_eq!((refused.param.as_deref(), refused.code), (Some(param), code));
    }
}
