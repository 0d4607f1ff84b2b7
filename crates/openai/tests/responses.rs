//! Responses as clients read them: streams and bodies, byte for byte.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

use std::time::Duration;

use tollgate_domain::block::Stages;
use tollgate_domain::{DeviceClass, DeviceNanos, StopReason, TextDelta, TokenLogprob, Usage};
use tollgate_openai::{
    CHAT, COMPLETIONS, ChunkWriter, Echo, ResponseBuilder, ResponseMeta, UsageReport,
};

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
    TextDelta { choice, text: text.into(), logprobs: Vec::new() }
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
    let delta = TextDelta { choice: 0, text: " c".into(), logprobs: vec![logprob(b" c", -0.25)] };
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
        logprobs: vec![logprob(b"\xc3", f32::NEG_INFINITY), logprob(b"\xa9", -0.5)],
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
