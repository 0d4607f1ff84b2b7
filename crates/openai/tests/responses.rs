//! Responses as clients read them: streams and bodies, byte for byte.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tollgate_domain::block::Stages;
use tollgate_domain::{
    DeviceClass, DeviceNanos, StopReason, TextDelta, TokenLogprob, ToolFormat, Usage,
};
use tollgate_openai::{
    CHAT, COMPLETIONS, ChunkWriter, Echo, ResponseBuilder, ResponseMeta, UsageReport,
};
use tollgate_text::{AnswerSyntax, ReasoningSyntax, ToolSignature};

fn meta() -> ResponseMeta {
    ResponseMeta {
        id: "chatcmpl-1".into(),
        created: 1_700_000_000,
        model: "m".into(),
        fingerprint: "fp_1".into(),
        choices: 1,
        echoes: Vec::new(),
        prompts: 1,
        logprobs: false,
        include_usage: false,
        answer: AnswerSyntax::default(),
        flex: false,
    }
}

fn usage() -> UsageReport {
    UsageReport {
        grammar: None,
        usage: Usage {
            prompt_tokens: 3,
            cached_tokens: 1,
            completion_tokens: 2,
            attributed: DeviceNanos(500),
            reference: DeviceNanos(400),
        },
        class: DeviceClass::cpu(),
        reserved: DeviceNanos(900),
        stages: Stages { queue_ns: 10, prefill_ns: 20, decode_ns: 30 },
        transfers: None,
        read: Duration::from_nanos(40),
        preprocess: Duration::from_nanos(50),
        place: Duration::from_nanos(60),
    }
}

fn text(choice: u32, text: &str) -> TextDelta {
    TextDelta { choice, text: text.into(), tokens: 1, ..TextDelta::default() }
}

fn logprob(bytes: &[u8], logprob: f32) -> TokenLogprob {
    TokenLogprob { bytes: bytes.to_vec(), logprob, top: vec![(bytes.to_vec(), logprob)] }
}

fn utf8(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("text")
}

#[test]
fn chat_stream_reports_usage() {
    let mut meta = meta();
    meta.include_usage = true;
    meta.choices = 2;
    let mut writer = ChunkWriter::new(CHAT, meta);
    let mut out = Vec::new();
    writer.delta(&text(0, "Hello"), &mut out);
    writer.delta(&text(1, ""), &mut out);
    writer.delta(&text(0, " \"you\""), &mut out);
    writer.delta(&text(9, "unknown"), &mut out);
    writer.finish_choice(0, StopReason::Stop, &mut out);
    writer.finish_choice(1, StopReason::Length, &mut out);
    writer.finish(&usage(), &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn chat_stream_failure_ends_with_error_event() {
    let mut writer = ChunkWriter::new(CHAT, meta());
    let envelope = r#"{"error":{"message":"The worker that was answering stopped. You are charged for what you received.","type":"server_error","param":null,"code":"worker_lost"}}"#;
    let mut out = Vec::new();
    writer.delta(&text(0, "Hel"), &mut out);
    writer.fail(envelope.as_bytes(), &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn completion_stream_echoes_scored_prompt() {
    let mut meta = meta();
    meta.logprobs = true;
    meta.echoes = vec![Echo { text: "A b".into(), first_token: b"A".to_vec() }];
    let mut writer = ChunkWriter::new(COMPLETIONS, meta);
    let mut out = Vec::new();
    writer.prompt_logprobs(0, &[logprob(b" b", -0.5)], &mut out);
    let delta = TextDelta {
        choice: 0,
        text: " c".into(),
        tokens: 1,
        logprobs: vec![logprob(b" c", -0.25)],
        ..TextDelta::default()
    };
    writer.delta(&delta, &mut out);
    writer.finish_choice(0, StopReason::Length, &mut out);
    writer.finish(&usage(), &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn chat_response_has_logprobs() {
    let mut meta = meta();
    meta.logprobs = true;
    let mut builder = ResponseBuilder::new(CHAT, meta);
    builder.delta(text(0, "forgotten"));
    builder.restart();
    let delta = TextDelta {
        choice: 0,
        text: "é".into(),
        tokens: 2,
        logprobs: vec![logprob(b"\xc3", f32::NEG_INFINITY), logprob(b"\xa9", -0.5)],
        ..TextDelta::default()
    };
    builder.delta(delta);
    builder.finish_choice(0, StopReason::Stop);
    insta::assert_snapshot!(utf8(builder.finish(&usage())));
}

#[test]
fn completion_response_echoes_prompts() {
    let mut meta = meta();
    meta.prompts = 2;
    meta.echoes =
        ["A", "B"].map(|text| Echo { text: text.into(), first_token: text.into() }).to_vec();
    let mut builder = ResponseBuilder::new(COMPLETIONS, meta);
    builder.delta(text(1, " two"));
    builder.delta(text(0, " one"));
    builder.finish_choice(0, StopReason::Stop);
    builder.finish_choice(1, StopReason::Length);
    insta::assert_snapshot!(utf8(builder.finish(&usage())));
}

/// Returns facts of a response that may have reasoning and calls of `get_limit`.
fn meta_with_tools(format: ToolFormat) -> ResponseMeta {
    let tools = [("get_limit".to_owned(), ToolSignature::default())].into();
    let tools = Some((format, Arc::new(tools)));
    ResponseMeta {
        id: "chatcmpl-01ab".into(),
        answer: AnswerSyntax { tools, reasoning: ReasoningSyntax::Marked },
        ..meta()
    }
}

/// An answer with reasoning, text and two calls, in pieces that split markers.
const ANSWER: [&str; 10] = [
    "<thi",
    "nk>\nHm.\n</think>\n\nI look.\n<tool_",
    "call>\n{\"name\": \"get_li",
    "mit\", \"arguments\": {\"pl",
    "an\": \"a\"}",
    "}\n</tool_call>",
    "\n<tool_call>",
    "{\"name\": \"get_limit\", \"arguments\": {}",
    "}</tool_call",
    ">",
];

#[test]
fn chat_stream_has_reasoning_and_calls() {
    let mut meta = meta_with_tools(ToolFormat::Hermes);
    meta.choices = 2;
    let mut writer = ChunkWriter::new(CHAT, meta);
    let mut out = Vec::new();
    for piece in ANSWER {
        writer.delta(&text(0, piece), &mut out);
    }
    writer.delta(&text(1, "No <tool_call> here"), &mut out);
    writer.finish_choice(0, StopReason::Stop, &mut out);
    writer.finish_choice(1, StopReason::Stop, &mut out);
    writer.finish(&usage(), &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn chat_response_has_reasoning_and_calls() {
    let mut builder = ResponseBuilder::new(CHAT, meta_with_tools(ToolFormat::Hermes));
    builder.delta(text(0, "<tool_call>forgotten"));
    builder.restart();
    for piece in ANSWER {
        builder.delta(text(0, piece));
    }
    builder.finish_choice(0, StopReason::Stop);
    insta::assert_snapshot!(utf8(builder.finish(&usage())));
}

/// Clients tell an answer of calls alone by its null content.
#[test]
fn chat_response_of_calls_alone_has_null_content() {
    let mut builder = ResponseBuilder::new(CHAT, meta_with_tools(ToolFormat::Mistral));
    builder.delta(text(0, "[TOOL_CALLS][{\"name\": \"get_limit\", \"arguments\": {}}]"));
    builder.finish_choice(0, StopReason::Stop);
    let body: Value = serde_json::from_slice(&builder.finish(&usage())).expect("JSON");
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["content"], Value::Null);
    assert_eq!(choice["finish_reason"], "tool_calls");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["arguments"], "{}");
    // The templates of this family take no other ids.
    let id = call["id"].as_str().expect("an id");
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
}

#[test]
fn chat_response_that_was_cut_off_says_so() {
    let mut builder = ResponseBuilder::new(CHAT, meta_with_tools(ToolFormat::Hermes));
    builder.delta(text(0, "<tool_call>{\"name\": \"get_limit\", \"arguments\": {\"pl"));
    builder.finish_choice(0, StopReason::Length);
    let body: Value = serde_json::from_slice(&builder.finish(&usage())).expect("JSON");
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"pl");
}

/// Clients parse the arguments of an answer that says it ended for its calls.
#[test]
fn chat_call_cut_by_stop_string_ends_so() {
    let open = "{\"name\": \"get_limit\", \"arguments\": {";
    for (format, answer, expected) in [
        (ToolFormat::Hermes, format!("<tool_call>{open}\""), "stop"),
        (ToolFormat::Llama3, format!("{open}\""), "stop"),
        (ToolFormat::Mistral, format!("[TOOL_CALLS][{open}\""), "stop"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=get_limit><parameter=a>\nx".into(), "stop"),
        // The second call is cut off.
        (ToolFormat::Mistral, format!("[TOOL_CALLS][{open}}}}}, {open}\""), "stop"),
        // The stop string stands after the arguments.
        (ToolFormat::Hermes, format!("<tool_call>{open}}}}}\n"), "tool_calls"),
        (ToolFormat::Mistral, format!("[TOOL_CALLS][{open}}}}}"), "tool_calls"),
    ] {
        let mut builder = ResponseBuilder::new(CHAT, meta_with_tools(format));
        builder.delta(text(0, &answer));
        builder.finish_choice(0, StopReason::Stop);
        let whole: Value = serde_json::from_slice(&builder.finish(&usage())).expect("JSON");
        assert_eq!(whole["choices"][0]["finish_reason"], expected, "{answer}");
        let mut writer = ChunkWriter::new(CHAT, meta_with_tools(format));
        let mut out = Vec::new();
        for piece in answer.split_inclusive(' ') {
            writer.delta(&text(0, piece), &mut out);
        }
        writer.finish_choice(0, StopReason::Stop, &mut out);
        let streamed = format!("\"finish_reason\":\"{expected}\"");
        assert!(utf8(out).contains(&streamed), "{format:?}: {answer}");
    }
}

#[test]
fn usage_counts_reasoning_tokens_of_all_choices() {
    let meta = || {
        let mut meta = meta_with_tools(ToolFormat::Hermes);
        (meta.choices, meta.include_usage) = (2, true);
        meta
    };
    let choices = [&["<think>", "Hm", ".", "</think>", "\n\n", "Hi"][..], &["<think>", "cut"]];
    let mut builder = ResponseBuilder::new(CHAT, meta());
    let mut writer = ChunkWriter::new(CHAT, meta());
    let mut out = Vec::new();
    // A request that starts again counts its last answer alone.
    builder.delta(text(0, "<think>gone"));
    builder.restart();
    for (pieces, choice) in choices.iter().zip(0..) {
        for piece in *pieces {
            builder.delta(text(choice, piece));
            writer.delta(&text(choice, piece), &mut out);
        }
        builder.finish_choice(choice, StopReason::Stop);
        writer.finish_choice(choice, StopReason::Stop, &mut out);
    }
    writer.finish(&usage(), &mut out);
    let whole: Value = serde_json::from_slice(&builder.finish(&usage())).expect("JSON");
    assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 3);
    let streamed = utf8(out)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .find(|chunk| chunk["usage"].is_object())
        .expect("a chunk with usage");
    assert_eq!(streamed["usage"], whole["usage"]);
}

/// A slow reader gets several tokens in one delta. The bytes of each token say which of
/// them stand before the end of reasoning.
#[test]
fn usage_counts_reasoning_tokens_of_joined_deltas() {
    let pieces = ["<think>", "Because of everything", "!", "</think>", "a", "b", "c"];
    let sizes: Vec<u32> = pieces.iter().map(|piece| piece.len() as u32).collect();
    let counted = |token_bytes: Vec<u32>| {
        let mut builder = ResponseBuilder::new(CHAT, meta_with_tools(ToolFormat::Hermes));
        let tokens = pieces.len() as u32;
        builder.delta(TextDelta { tokens, token_bytes, ..text(0, &pieces.concat()) });
        builder.finish_choice(0, StopReason::Stop);
        let whole: Value = serde_json::from_slice(&builder.finish(&usage())).expect("JSON");
        assert_eq!(whole["choices"][0]["message"]["content"], "abc");
        whole["usage"]["completion_tokens_details"]["reasoning_tokens"].clone()
    };
    assert_eq!(counted(sizes), 2);
    // Figures that do not fit the text, or none: shared by bytes, 22 of 40.
    for sizes in [vec![], vec![1; 6], vec![9, 99, 1, 1, 1, 1, 1]] {
        assert_eq!(counted(sizes), 3);
    }
}

/// Text is held back and regrouped; every token is still reported once, in order.
#[test]
fn chat_stream_reports_every_token_of_a_call() {
    let mut meta = meta_with_tools(ToolFormat::Hermes);
    meta.logprobs = true;
    let mut writer = ChunkWriter::new(CHAT, meta);
    let mut out = Vec::new();
    for piece in ANSWER {
        let logprobs = vec![logprob(piece.as_bytes(), -0.5)];
        writer.delta(
            &TextDelta {
                choice: 0,
                text: piece.into(),
                tokens: 1,
                logprobs,
                ..TextDelta::default()
            },
            &mut out,
        );
    }
    // An end token has no text.
    let logprobs = vec![logprob(b"<|im_end|>", -0.25)];
    writer.delta(
        &TextDelta { choice: 0, text: String::new(), tokens: 1, logprobs, ..TextDelta::default() },
        &mut out,
    );
    writer.finish_choice(0, StopReason::Stop, &mut out);
    let tokens: Vec<String> = utf8(out)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .map(|token| token["token"].as_str().expect("a token").to_owned())
        .collect();
    let expected: Vec<&str> = ANSWER.into_iter().chain(["<|im_end|>"]).collect();
    assert_eq!(tokens, expected);
}
