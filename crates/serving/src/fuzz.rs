//! Hostile messages of a worker, as functions for fuzz targets. Whatever a worker
//! reports, the gateway accepts no more than it ordered.

#![expect(clippy::expect_used, reason = "the fixtures of a fuzz target are constants")]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::block::{Attempt, Stages};
use tollgate_domain::{
    Block, Caller, DeviceClass, DeviceNanos, KeyId, ModelName, RequestId, SamplingDefaults,
    TenantId, Transfers, Usage, WorkerEpoch,
};
use tollgate_text::Tokenizer;
use tollgate_wire::v1;

use crate::model::{BuiltTokenizer, ServedModel};
use crate::orders::{Orders, Origin, Terms, Unordered, at_most_since, without_invalid};
use crate::timings::WorkerTimings;
use crate::workers::{StreamCheck, WorkerEvent};

const EPOCH: WorkerEpoch = WorkerEpoch(0x0123_4567_89ab_cdef);
const MAX_TOKENS: u32 = 8;

/// Checks a journal block of a worker that has one order: `acme`'s request
/// `req-1` with key `k`, one prompt of three tokens, two choices of at most eight
/// tokens, on model `m`. The bits of `state` say how far the order's stream is.
pub fn check_block(message: v1::JournalBlock, state: u8) {
    let Ok(block) = Block::try_from(message) else { return };
    let orders = Orders::default();
    let (caller, attempt) = (caller(), attempt());
    let opened = start();
    let now = opened + Duration::from_secs(1);
    let mut placement = orders.open(attempt.clone(), EPOCH, caller.clone(), terms(), opened);
    placement.streamed(u64::from(state & 3));
    let heard = Usage {
        prompt_tokens: 3,
        completion_tokens: 2,
        attributed: DeviceNanos(100),
        reference: DeviceNanos(100),
        ..Usage::default()
    };
    if state & 4 != 0 {
        placement.finished(heard).expect("no block has come before");
    }
    if state & 8 != 0 {
        drop(placement);
    }
    // No order is forgotten, so the others are judged by nothing else.
    let origin = Origin::Ours(Unordered { may_have_asked: &|_| false, model: None });
    let invalid = orders.check(block.parts(), &origin, now);
    assert_eq!(orders.check(block.parts(), &origin, now), invalid, "checked again");
    let accepted = without_invalid(&block, &invalid);
    let parts = accepted.parts();
    let is_ordered = |c: &Caller, a: &Attempt| *c == caller && *a == attempt;
    let mut time = DeviceNanos::ZERO;
    for share in &parts.shares {
        assert!(is_ordered(&share.caller, &share.attempt) && parts.epoch == EPOCH);
        time += share.attributed;
    }
    assert!(time <= at_most_since(opened, now), "{time}");
    assert!(parts.finished.len() <= 1);
    let most = terms().cost([MAX_TOKENS, MAX_TOKENS].map(u64::from));
    for finished in &parts.finished {
        assert!(is_ordered(&finished.caller, &finished.attempt));
        let usage = &finished.usage;
        assert!(usage.prompt_tokens <= 3 && usage.completion_tokens <= 16);
        assert!(usage.reference <= most, "{}", usage.reference);
        assert!(state & 4 == 0 || *usage == heard);
    }
    assert_eq!(parts.wall, block.parts().wall);
}

/// Checks the events of a stream of the same order.
pub fn check_events(events: Vec<v1::RunEvent>) {
    let terms = terms();
    let assignment = assignment();
    let opened = start();
    let now = opened + Duration::from_secs(1);
    let mut check = StreamCheck::new(&assignment, terms.clone(), opened);
    let most = terms.cost([MAX_TOKENS, MAX_TOKENS].map(u64::from));
    let (mut tokens, mut reference) = (0, DeviceNanos::ZERO);
    for event in events {
        match check.check(event, now) {
            Err(_) => return,
            Ok(WorkerEvent::Delta(_, progress)) => {
                assert!(progress.tokens >= tokens && progress.tokens <= 2 * u64::from(MAX_TOKENS));
                assert!(progress.reference >= reference && progress.reference <= most);
                assert!(progress.attributed <= at_most_since(opened, now));
                (tokens, reference) = (progress.tokens, progress.reference);
            }
            Ok(WorkerEvent::Finished {
                usage,
                timings: WorkerTimings { stages, transfers, grammar: _ },
            }) => {
                assert_eq!(usage.completion_tokens, tokens);
                assert!(usage.reference >= reference && usage.reference <= most);
                assert!(usage.prompt_tokens <= 3);
                let Transfers { to_device, to_host } = transfers.unwrap_or_default();
                let Stages { queue_ns, prefill_ns, decode_ns } = stages;
                let longest = to_device.max(to_host).nanos();
                let longest = longest.max(queue_ns).max(prefill_ns).max(decode_ns);
                assert!(longest <= at_most_since(opened, now).nanos());
                return;
            }
            Ok(WorkerEvent::Refused(_)) => {
                assert_eq!(tokens, 0, "a refusal comes before tokens");
                return;
            }
            Ok(WorkerEvent::PromptLogprobs { .. } | WorkerEvent::ChoiceFinished { .. }) => {}
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "an instant has no other constructor")]
fn start() -> Instant {
    Instant::now()
}

fn caller() -> Caller {
    Caller { tenant: TenantId::new("acme").expect("a name"), key: KeyId::new("k").expect("a name") }
}

fn attempt() -> Attempt {
    Attempt { request: RequestId::new("req-1").expect("a name"), attempt: 0 }
}

fn assignment() -> v1::Assignment {
    v1::Assignment {
        request_id: "req-1".into(),
        tenant: "acme".into(),
        key: "k".into(),
        model: "m".into(),
        prompts: vec![v1::Prompt { tokens: vec![0, 0, 0] }],
        choices: 2,
        max_tokens: MAX_TOKENS,
        sampling: Some(v1::Sampling { top_logprobs: Some(1), ..v1::Sampling::default() }),
        ..v1::Assignment::default()
    }
}

fn terms() -> Terms {
    static MODEL: OnceLock<Arc<ServedModel>> = OnceLock::new();
    let model = MODEL.get_or_init(|| {
        let tokenizer = Tokenizer::from_json(TOKENIZER.as_bytes()).expect("a tokenizer");
        let text = BuiltTokenizer { tokenizer: Arc::new(tokenizer), longest_token: 1 };
        Arc::new(ServedModel {
            defaults: SamplingDefaults::default(),
            name: ModelName::new("m").expect("a name"),
            hash: String::new(),
            class: DeviceClass::cpu(),
            text: Arc::new(text),
            template: None,
            context_length: 256,
            vocabulary: 1,
            table: serde_json::from_str(TABLE).expect("a table"),
        })
    });
    Terms::of(Arc::clone(model), &assignment())
}

/// A tokenizer that knows a single token, as JSON.
pub const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
    "normalizer":null,"pre_tokenizer":null,"post_processor":null,
    "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
    "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,
    "end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
    "vocab":{"a":0},"merges":[]}}"#;

const TABLE: &str = r#"{"version":"v1","step_ns":1000.0,"linear":[[1,10000.0],[256,100000.0]],
    "head":[[1,1000.0],[32,2000.0]],"ns_per_kv_byte":0.001,"ns_per_attention_flop":0.0001,
    "shape":{"kv_bytes_per_token":1024,"flop_per_pair":1024},"reference_batch":32,
    "reference_chunk":256}"#;

#[cfg(test)]
mod tests {
    use tollgate_domain::block::{BlockParts, Device, FinishedAttempt, Share};
    use tollgate_domain::{FinishReason, SequenceId, Tier, UtcTime, WorkerName};

    use super::*;

    fn block(number: u64) -> Block {
        let usage = Usage {
            prompt_tokens: 3,
            completion_tokens: 2,
            attributed: DeviceNanos(100),
            reference: DeviceNanos(100),
            ..Usage::default()
        };
        let share = Share {
            sequence: SequenceId(1),
            caller: caller(),
            attempt: attempt(),
            attributed: DeviceNanos(100),
            tier: Tier::Interactive,
        };
        let finished = FinishedAttempt {
            caller: caller(),
            attempt: attempt(),
            usage,
            stages: Stages::default(),
            reason: FinishReason::Stop,
            finished: UtcTime(5),
            tier: Tier::Interactive,
        };
        let parts = BlockParts {
            epoch: EPOCH,
            number,
            worker: WorkerName::new("0").expect("a name"),
            device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: String::new() },
            model: ModelName::new("m").expect("a name"),
            calibration: "v1".into(),
            first_step: 1,
            last_step: 1,
            started: UtcTime(1),
            wall: DeviceNanos(100),
            overhead: DeviceNanos::ZERO,
            idle: DeviceNanos::ZERO,
            loss: DeviceNanos::ZERO,
            shares: vec![share],
            finished: vec![finished],
            last_of_epoch: false,
            energy: None,
        };
        Block::try_from(parts).expect("it balances")
    }

    /// The connection may end after the check and before the block is in the ledger. The block then
    /// comes again, when the request's stream has long ended.
    #[test]
    fn order_lives_until_its_end_is_recorded() {
        let (orders, opened) = (Orders::default(), start());
        let now = opened + Duration::from_secs(1);
        let placement = orders.open(attempt(), EPOCH, caller(), terms(), opened);
        let origin = Origin::Ours(Unordered { may_have_asked: &|_| false, model: None });
        let check = |number| orders.check(block(number).parts(), &origin, now).len();
        assert_eq!(check(1), 0);
        drop(placement);
        assert_eq!(check(1), 0, "it comes again");
        orders.recorded(&attempt());
        assert_eq!(check(2), 2, "the order is done");
    }
}
