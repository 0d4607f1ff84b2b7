//! Answers as clients read them: transcripts and bodies, byte for byte.

use std::time::Duration;

use tollgate_domain::block::Stages;
use tollgate_domain::{DeviceClass, DeviceNanos, StopReason, TextDelta, TokenLogprob, Usage};

use crate::api::asked::Dialect;
use crate::api::chunks::Chunks;
use crate::api::telling::{Echo, Telling};
use crate::api::whole::Whole;
use crate::path::{InFront, InWorker, Path};
use crate::pump::Receipt;
use crate::reply::ApiError;

fn telling(dialect: Dialect) -> Telling {
    Telling {
        dialect,
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

fn receipt() -> Receipt {
    Receipt {
        usage: Usage {
            prompt_tokens: 3,
            cached_tokens: 1,
            completion_tokens: 2,
            attributed: DeviceNanos(500),
            reference: DeviceNanos(400),
        },
        path: Path {
            in_front: InFront {
                read: Duration::from_nanos(40),
                preprocess: Duration::from_nanos(50),
            },
            place: Duration::from_nanos(60),
            in_worker: InWorker {
                stages: Stages { queue_ns: 10, prefill_ns: 20, decode_ns: 30 },
                transfers: None,
            },
        },
        class: DeviceClass::cpu(),
        reserved: DeviceNanos(900),
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
fn a_chat_stream_with_usage() {
    let mut telling = telling(Dialect::Chat);
    telling.include_usage = true;
    telling.choices = 2;
    let mut chunks = Chunks::new(telling);
    let mut out = Vec::new();
    chunks.delta(&text(0, "Hello"), &mut out);
    chunks.delta(&text(1, ""), &mut out);
    chunks.delta(&text(0, " \"you\""), &mut out);
    chunks.delta(&text(9, "nobody's"), &mut out);
    chunks.finished(0, StopReason::Stop, &mut out);
    chunks.finished(1, StopReason::Length, &mut out);
    chunks.end(&receipt(), &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn a_chat_stream_that_fails() {
    let mut chunks = Chunks::new(telling(Dialect::Chat));
    let mut out = Vec::new();
    chunks.delta(&text(0, "Hel"), &mut out);
    chunks.fail(&ApiError::WorkerLost { charged: true }, &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn a_completion_stream_with_echo_and_logprobs() {
    let mut telling = telling(Dialect::Completion);
    telling.logprobs = true;
    telling.echoes = vec![Echo { text: "A b".into(), first: b"A".to_vec() }];
    let mut chunks = Chunks::new(telling);
    let mut out = Vec::new();
    chunks.prompt_logprobs(0, &[logprob(b" b", -0.5)], &mut out);
    let delta = TextDelta { choice: 0, text: " c".into(), logprobs: vec![logprob(b" c", -0.25)] };
    chunks.delta(&delta, &mut out);
    chunks.finished(0, StopReason::Length, &mut out);
    chunks.end(&receipt(), &mut out);
    insta::assert_snapshot!(utf8(out));
}

#[test]
fn a_chat_answer_in_one_piece() {
    let mut telling = telling(Dialect::Chat);
    telling.logprobs = true;
    let mut whole = Whole::new(telling);
    whole.delta(&text(0, "forgotten"));
    whole.restart();
    let delta = TextDelta {
        choice: 0,
        text: "é".into(),
        logprobs: vec![logprob(b"\xc3", f32::NEG_INFINITY), logprob(b"\xa9", -0.5)],
    };
    whole.delta(&delta);
    whole.finished(0, StopReason::Stop);
    insta::assert_snapshot!(utf8(whole.into_json(&receipt())));
}

#[test]
fn completions_in_one_piece() {
    let mut telling = telling(Dialect::Completion);
    telling.prompts = 2;
    telling.echoes = ["A", "B"].map(|text| Echo { text: text.into(), first: text.into() }).to_vec();
    let mut whole = Whole::new(telling);
    whole.delta(&text(1, " two"));
    whole.delta(&text(0, " one"));
    whole.finished(0, StopReason::Stop);
    whole.finished(1, StopReason::Length);
    insta::assert_snapshot!(utf8(whole.into_json(&receipt())));
}
