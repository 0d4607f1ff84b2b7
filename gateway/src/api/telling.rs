//! What all parts of one answer say alike, and the figures at its end.

use std::time::Duration;

use serde::Serialize;
use tollgate_domain::{RequestId, StopReason};

use super::asked::Dialect;
use crate::path::{InFront, InWorker, Path};
use crate::pump::Receipt;

/// The frame of one answer: what each chunk, or the whole, repeats.
#[derive(Clone, Debug)]
pub(crate) struct Telling {
    pub(crate) dialect: Dialect,
    /// `chatcmpl-...` or `cmpl-...`.
    pub(crate) id: String,
    /// Unix seconds.
    pub(crate) created: u64,
    pub(crate) model: String,
    /// Names the weights that answered.
    pub(crate) fingerprint: String,
    /// Choices for each prompt.
    pub(crate) choices: u32,
    /// One for each prompt where the prompt is to stand before the answer.
    pub(crate) echoes: Vec<Echo>,
    /// How many prompts there are.
    pub(crate) prompts: u32,
    /// Whether log-probabilities are told.
    pub(crate) logprobs: bool,
    /// Whether a stream tells its usage at the end.
    pub(crate) include_usage: bool,
}

/// A prompt to be repeated.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    /// All of it.
    pub(crate) text: String,
    /// The bytes of its first token.
    pub(crate) first: Vec<u8>,
}

impl Telling {
    /// The id that a client sees in the body, after the one in the header.
    pub(crate) fn id(dialect: Dialect, request: &RequestId) -> String {
        let bare = request.as_str().strip_prefix("req-").unwrap_or(request.as_str());
        match dialect {
            Dialect::Chat => format!("chatcmpl-{bare}"),
            Dialect::Completion => format!("cmpl-{bare}"),
        }
    }

    /// All choices over all prompts.
    pub(super) fn all_choices(&self) -> u32 {
        self.prompts * self.choices
    }

    /// The choices of prompt `prompt`; none where there is no such prompt.
    pub(super) fn choices_of(&self, prompt: u32) -> std::ops::Range<u32> {
        if prompt >= self.prompts {
            return 0..0;
        }
        prompt * self.choices..(prompt + 1) * self.choices
    }

    /// What is repeated before choice `choice`, if anything is.
    pub(super) fn echo(&self, choice: u32) -> Option<&Echo> {
        self.echoes.get((choice / self.choices) as usize)
    }
}

/// Returns the value of `finish_reason`.
pub(super) fn finish_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Stop => "stop",
        StopReason::Length => "length",
    }
}

/// `usage`: the keys that clients know, and ours beside them.
#[derive(Debug, Serialize)]
pub(super) struct UsageBody<'a> {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
    tollgate: Figures<'a>,
}

#[derive(Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
    audio_tokens: u64,
}

#[derive(Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
    audio_tokens: u64,
    accepted_prediction_tokens: u64,
    rejected_prediction_tokens: u64,
}

#[derive(Debug, Serialize)]
struct Figures<'a> {
    device_class: &'a str,
    attributed_ns: u64,
    reference_ns: u64,
    reserved_ns: u64,
    queue_ns: u64,
    prefill_ns: u64,
    decode_ns: u64,
    read_ns: u64,
    preprocess_ns: u64,
    place_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    to_device_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to_host_ns: Option<u64>,
}

impl<'a> UsageBody<'a> {
    /// The figures of `receipt`.
    pub(super) fn of(receipt: &'a Receipt) -> Self {
        let Receipt { usage, path, class, reserved } = receipt;
        let Path { in_front: InFront { read, preprocess }, place, in_worker } = path;
        let InWorker { stages, transfers } = in_worker;
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.total_tokens(),
            prompt_tokens_details: PromptDetails {
                cached_tokens: usage.cached_tokens,
                audio_tokens: 0,
            },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: 0,
                audio_tokens: 0,
                accepted_prediction_tokens: 0,
                rejected_prediction_tokens: 0,
            },
            tollgate: Figures {
                device_class: class.as_str(),
                attributed_ns: usage.attributed.nanos(),
                reference_ns: usage.reference.nanos(),
                reserved_ns: reserved.nanos(),
                queue_ns: stages.queue_ns,
                prefill_ns: stages.prefill_ns,
                decode_ns: stages.decode_ns,
                read_ns: nanos(*read),
                preprocess_ns: nanos(*preprocess),
                place_ns: nanos(*place),
                to_device_ns: transfers.map(|moved| moved.to_device.nanos()),
                to_host_ns: transfers.map(|moved| moved.to_host.nanos()),
            },
        }
    }
}

/// Enough for 584 years.
fn nanos(span: Duration) -> u64 {
    span.as_nanos() as u64
}
