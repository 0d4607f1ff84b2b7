//! The `usage` object at the end of a response: the keys that clients know, and
//! tollgate's own figures under `tollgate`.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::block::Stages;
use tollgate_domain::{DeviceClass, DeviceNanos, StopReason, Transfers, Usage};

/// The measured figures of a finished request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageReport {
    /// Tokens and device time.
    pub usage: Usage,
    /// The class of the device that ran the request.
    pub class: DeviceClass,
    /// The reference cost that admission reserved.
    pub reserved: DeviceNanos,
    /// Time in the stages of the worker.
    pub stages: Stages,
    /// Time of copies to and from the device; `None` on a device that shares the
    /// host's memory.
    pub transfers: Option<Transfers>,
    /// Time of the worker's host for the request's grammar; `None` without a grammar.
    pub grammar: Option<Duration>,
    /// Time until the body had arrived.
    pub read: Duration,
    /// Time for parsing and tokenizing.
    pub preprocess: Duration,
    /// Time from admission until a worker was chosen.
    pub place: Duration,
}

/// Returns the value of `finish_reason`.
pub(crate) fn finish_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Stop => "stop",
        StopReason::Length => "length",
    }
}

/// The `usage` object.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Usage")]
pub(crate) struct UsageBody<'a> {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
    tollgate: Figures<'a>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PromptDetails {
    cached_tokens: u64,
    audio_tokens: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct CompletionDetails {
    reasoning_tokens: u64,
    audio_tokens: u64,
    accepted_prediction_tokens: u64,
    rejected_prediction_tokens: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "DeviceFigures")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    grammar_ns: Option<u64>,
}

impl<'a> UsageBody<'a> {
    /// Renders the figures of a request that has `reasoning_tokens` tokens of reasoning.
    pub(crate) fn new(report: &'a UsageReport, reasoning_tokens: u64) -> Self {
        let UsageReport {
            usage,
            class,
            reserved,
            stages,
            transfers,
            grammar,
            read,
            preprocess,
            place,
        } = report;
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.total_tokens(),
            prompt_tokens_details: PromptDetails {
                cached_tokens: usage.cached_tokens,
                // Typed clients expect these keys, although the gateway has no such tokens.
                audio_tokens: 0,
            },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens,
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
                grammar_ns: grammar.map(nanos),
            },
        }
    }
}

/// Returns a span in nanoseconds.
fn nanos(span: Duration) -> u64 {
    // 64 bits hold 584 years of nanoseconds, far more than any request lasts.
    span.as_nanos() as u64
}
