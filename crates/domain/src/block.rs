//! Blocks of a worker's metering journal. A block is a span of whole steps in which every
//! nanosecond has an owner. The worker closes the block, the wire carries it and the ledger
//! posts it, all as this one type.
//!
//! A [`Block`] is always balanced: its constructor checks the sums, so no later code has to
//! check them again.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{
    Caller, DeviceClass, DeviceNanos, FinishReason, Millijoules, ModelName, RequestId, SequenceId,
    Tier, Usage, UtcTime, WorkerEpoch, WorkerName,
};

/// Longest wall time of one block: a day. A longer time is a wrong report or a broken
/// clock.
pub const LONGEST_BLOCK: DeviceNanos = DeviceNanos::from_secs(86_400);
/// Largest device time of one attempt on either meter: a day for each of the 128 choices
/// that a request may have. Sums of years of such figures still fit a signed 64-bit
/// integer.
pub const LONGEST_ATTEMPT: DeviceNanos = DeviceNanos::from_secs(128 * 86_400);
/// Largest number of tokens of one kind in one attempt.
pub const MOST_TOKENS: u64 = 1 << 40;
/// Largest number of shares, and of finished attempts, in one block.
pub const LARGEST_BLOCK: usize = 65_536;

/// A device as reports and limits identify it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Device {
    /// Class of the device; times within a class are comparable.
    pub class: DeviceClass,
    /// Name for display: `NVIDIA H200`, `cpu, 2 threads`.
    pub name: String,
    /// Id from the vendor; empty for a CPU.
    pub uuid: String,
}

/// One attempt at one request. A request that is placed again is a new attempt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// Id of the request.
    pub request: RequestId,
    /// Number of the attempt, from 0.
    pub attempt: u32,
}

/// The device time of one sequence over the steps of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Sequence within the worker's epoch.
    pub sequence: SequenceId,
    /// Tenant and key that pay.
    pub caller: Caller,
    /// Attempt that the sequence belongs to.
    pub attempt: Attempt,
    /// Share of the steps' device time.
    pub attributed: DeviceNanos,
    /// Tier of the request. The text form names the batch tier only, so blocks without batch
    /// work keep their old bytes.
    #[serde(default, skip_serializing_if = "Tier::is_interactive")]
    pub tier: Tier,
}

/// Times that a request spent in each stage of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stages {
    /// Wait for a place in the batch, ns.
    pub queue_ns: u64,
    /// Time from the first step to the first token, ns.
    pub prefill_ns: u64,
    /// Time from the first token to the last, ns.
    pub decode_ns: u64,
}

/// An attempt that ended within the block, with its final figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedAttempt {
    /// Tenant and key that pay.
    pub caller: Caller,
    /// Request and number of the attempt.
    pub attempt: Attempt,
    /// Work that the device did for the attempt, over all its blocks.
    pub usage: Usage,
    /// Time in each stage.
    pub stages: Stages,
    /// Finish reason of the attempt.
    pub reason: FinishReason,
    /// End of the attempt, by the clock of the worker's host.
    pub finished: UtcTime,
    /// Tier of the request; in the text form as for a share.
    #[serde(default, skip_serializing_if = "Tier::is_interactive")]
    pub tier: Tier,
}

/// The unchecked fields of a [`Block`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockParts {
    /// Epoch of the worker that wrote the block.
    pub epoch: WorkerEpoch,
    /// Number of the block in the epoch, from 1 without gaps.
    pub number: u64,
    /// Name of the worker in config.
    pub worker: WorkerName,
    /// Device that the time belongs to.
    pub device: Device,
    /// Model that the worker served.
    pub model: ModelName,
    /// Version of the cost table that split the steps.
    pub calibration: String,
    /// Number of the first step; 0 if the block contains no step.
    pub first_step: u64,
    /// Number of the last step; 0 if the block contains no step.
    pub last_step: u64,
    /// Start of the span, by the clock of the worker's host.
    pub started: UtcTime,
    /// Length of the span, by the monotonic clock.
    pub wall: DeviceNanos,
    /// Device time of no tenant: warm-up, calibration, recomputation.
    pub overhead: DeviceNanos,
    /// Time between steps.
    pub idle: DeviceNanos,
    /// Device time that a fault made useless.
    pub loss: DeviceNanos,
    /// Shares of the tenants.
    pub shares: Vec<Share>,
    /// Attempts that ended in the block.
    pub finished: Vec<FinishedAttempt>,
    /// True if no block of this epoch follows.
    pub last_of_epoch: bool,
    /// Energy that the device used during the block, if it reports energy. The field is
    /// left out of the text form if absent, so blocks without energy keep their old bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<Millijoules>,
}

/// The energy of a block, split like its time. The parts sum to the energy of the block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnergyParts {
    /// Energy of [`BlockParts::overhead`].
    pub overhead: Millijoules,
    /// Energy of [`BlockParts::idle`].
    pub idle: Millijoules,
    /// Energy of [`BlockParts::loss`].
    pub loss: Millijoules,
    /// Energy of each of [`BlockParts::shares`], in their order.
    pub shares: Vec<Millijoules>,
}

/// A checked block: its entries sum to its wall time exactly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BlockParts", into = "BlockParts")]
pub struct Block {
    parts: BlockParts,
}

/// The reason for which a block was rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The entries do not sum to the wall time, or their sum overflows.
    #[error(
        "block {number}: shares, overhead, idle and loss are {entries:?} ns but wall time is {wall} ns"
    )]
    Unbalanced {
        /// Number of the block.
        number: u64,
        /// Sum of the entries; `None` on overflow.
        entries: Option<u64>,
        /// Reported wall time.
        wall: u64,
    },
    /// A field has a value that no correct worker writes.
    #[error("block {number}: {field} is out of bounds")]
    OutOfBounds {
        /// Number of the block.
        number: u64,
        /// Name of the field.
        field: &'static str,
    },
    /// The final figure of an attempt is less than its shares in this block alone.
    #[error("block {number}: an attempt's final figure is less than its shares")]
    Understated {
        /// Number of the block.
        number: u64,
    },
}

impl BlockParts {
    /// Splits the energy in proportion to time: largest remainder; ties go to overhead,
    /// idle, loss and the shares, in this order. Returns `None` if the device reported no
    /// energy.
    pub fn energy_parts(&self) -> Option<EnergyParts> {
        let energy = self.energy?;
        let shares = self.shares.iter().map(|share| share.attributed);
        let times: Vec<_> =
            [self.overhead, self.idle, self.loss].into_iter().chain(shares).collect();
        // A checked block without time has no energy.
        let parts = energy.split(&times).unwrap_or_else(|| vec![Millijoules::ZERO; times.len()]);
        // The split keeps the order of `times`, so the first three parts are known.
        let [overhead, idle, loss, ref shares @ ..] = parts[..] else { return None };
        Some(EnergyParts { overhead, idle, loss, shares: shares.to_vec() })
    }
}

impl Block {
    /// Returns the fields.
    pub fn parts(&self) -> &BlockParts {
        &self.parts
    }

    /// Returns the fields by value.
    pub fn into_parts(self) -> BlockParts {
        self.parts
    }

    /// Returns the block without the records of some attempts. Their device time and energy
    /// become loss, and their final figures are dropped.
    #[must_use]
    pub fn without(&self, untrue: impl Fn(&Caller, &Attempt) -> bool) -> Self {
        let mut parts = self.parts.clone();
        let mut lost = parts.loss;
        parts.shares.retain(|share| {
            let stays = !untrue(&share.caller, &share.attempt);
            if !stays {
                lost += share.attributed;
            }
            stays
        });
        // The time stays in the block as loss, so the block still balances.
        parts.loss = lost;
        // The final figures of removed attempts go with their shares.
        parts.finished.retain(|finished| !untrue(&finished.caller, &finished.attempt));
        Self { parts }
    }
}

impl From<Block> for BlockParts {
    fn from(block: Block) -> Self {
        block.parts
    }
}

impl TryFrom<BlockParts> for Block {
    type Error = BlockError;

    fn try_from(parts: BlockParts) -> Result<Self, BlockError> {
        // Errors name the block, because a worker sends many.
        let number = parts.number;
        if let Some(field) = out_of_bounds(&parts) {
            return Err(BlockError::OutOfBounds { number, field });
        }
        // Both sides of the wire check the sum: the worker may have a bug, and the bytes
        // may be damaged.
        let entries = [parts.overhead, parts.idle, parts.loss]
            .into_iter()
            .chain(parts.shares.iter().map(|share| share.attributed))
            // Checked addition: the amounts come from outside and may overflow.
            .try_fold(DeviceNanos::ZERO, DeviceNanos::checked_add);
        if entries != Some(parts.wall) {
            return Err(BlockError::Unbalanced {
                number,
                entries: entries.map(DeviceNanos::nanos),
                wall: parts.wall.nanos(),
            });
        }
        // Checked last, because it is only meaningful for a balanced block.
        if is_understated(&parts) {
            return Err(BlockError::Understated { number });
        }
        Ok(Self { parts })
    }
}

/// Returns true if an attempt that ended in the block reports less than the sum of its
/// shares there.
fn is_understated(parts: &BlockParts) -> bool {
    // Built once, so that the check is linear in the number of shares.
    let mut stated: HashMap<_, DeviceNanos> = parts
        .finished
        .iter()
        .map(|finished| ((&finished.caller, &finished.attempt), finished.usage.attributed))
        .collect();
    parts.shares.iter().any(|share| {
        let Some(left) = stated.get_mut(&(&share.caller, &share.attempt)) else {
            return false; // the attempt did not end in this block
        };
        match left.nanos().checked_sub(share.attributed.nanos()) {
            // Several choices of one attempt draw on the same figure.
            Some(less) => *left = DeviceNanos(less),
            None => return true,
        }
        false
    })
}

/// Returns the name of the first field that is out of bounds. Times and counts must fit a
/// signed 64-bit integer, which is the type of the database.
fn out_of_bounds(parts: &BlockParts) -> Option<&'static str> {
    const FITS: u64 = i64::MAX as u64;
    let steps = match (parts.first_step, parts.last_step) {
        // A span without a step has no device time to share.
        (0, 0) => parts.shares.is_empty(),
        (first, last) => first > 0 && first <= last && last <= FITS,
    };
    let figures = |finished: &FinishedAttempt| {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
            finished.usage;
        let Stages { queue_ns, prefill_ns, decode_ns } = finished.stages;
        // Cached tokens are a part of the prompt's tokens.
        cached_tokens <= prompt_tokens
            && prompt_tokens.max(completion_tokens) <= MOST_TOKENS
            && attributed.max(reference) <= LONGEST_ATTEMPT
            && [queue_ns, prefill_ns, decode_ns, finished.finished.0]
                .into_iter()
                .all(|figure| figure <= FITS)
    };
    [
        ("block", (1..=FITS).contains(&parts.number)),
        ("calibration", (1..=128).contains(&parts.calibration.len())),
        ("device", parts.device.name.len() <= 256 && parts.device.uuid.len() <= 128),
        ("steps", steps),
        ("started", parts.started.0 <= FITS),
        ("wall", parts.wall <= LONGEST_BLOCK),
        ("energy", parts.energy.is_none_or(|energy| energy.is_drawn_in(parts.wall))),
        ("shares", parts.shares.len() <= LARGEST_BLOCK),
        ("sequence", parts.shares.iter().all(|share| share.sequence.0 <= FITS)),
        ("finished", parts.finished.len() <= LARGEST_BLOCK),
        ("usage", parts.finished.iter().all(figures)),
    ]
    .into_iter()
    .find_map(|(field, within)| (!within).then_some(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KeyId, TenantId};

    fn parts() -> BlockParts {
        let caller = Caller {
            tenant: TenantId::new("acme").expect("a name"),
            key: KeyId::new("k1").expect("a name"),
        };
        let attempt = Attempt { request: RequestId::from_random(1), attempt: 0 };
        BlockParts {
            epoch: WorkerEpoch(7),
            number: 1,
            worker: WorkerName::new("0").expect("a name"),
            device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: String::new() },
            model: ModelName::new("m").expect("a name"),
            calibration: "v1".into(),
            first_step: 1,
            last_step: 3,
            started: UtcTime(5),
            wall: DeviceNanos(100),
            overhead: DeviceNanos(10),
            idle: DeviceNanos(20),
            loss: DeviceNanos(30),
            shares: vec![Share {
                sequence: SequenceId(1),
                caller,
                attempt,
                attributed: DeviceNanos(40),
                tier: Tier::Interactive,
            }],
            finished: Vec::new(),
            last_of_epoch: false,
            energy: Some(Millijoules(7)),
        }
    }

    #[test]
    fn attempt_figures_are_bounded_and_cover_shares() {
        let most = Usage {
            prompt_tokens: MOST_TOKENS,
            cached_tokens: MOST_TOKENS,
            completion_tokens: MOST_TOKENS,
            attributed: LONGEST_ATTEMPT,
            reference: LONGEST_ATTEMPT,
        };
        let above = LONGEST_ATTEMPT + DeviceNanos(1);
        let cases = [
            (most, true),
            (Usage { attributed: DeviceNanos(40), ..most }, true),
            (Usage { attributed: DeviceNanos(39), ..most }, false),
            (Usage { attributed: above, ..most }, false),
            (Usage { reference: above, ..most }, false),
            (Usage { reference: DeviceNanos(i64::MAX as u64), ..most }, false),
            (Usage { prompt_tokens: MOST_TOKENS + 1, ..most }, false),
            (Usage { prompt_tokens: MOST_TOKENS - 1, ..most }, false),
            (Usage { completion_tokens: MOST_TOKENS + 1, ..most }, false),
        ];
        for (usage, good) in cases {
            let mut parts = parts();
            // Two choices of the attempt.
            let mut second = parts.shares[0].clone();
            second.sequence = SequenceId(2);
            parts.shares[0].attributed = DeviceNanos(15);
            second.attributed = DeviceNanos(25);
            let Share { caller, attempt, .. } = second.clone();
            parts.shares.push(second);
            parts.finished.push(FinishedAttempt {
                caller,
                attempt,
                usage,
                stages: Stages::default(),
                reason: FinishReason::Stop,
                finished: UtcTime(6),
                tier: Tier::Interactive,
            });
            assert_eq!(Block::try_from(parts).is_ok(), good, "{usage:?}");
        }
    }

    #[test]
    fn removed_attempts_become_loss() {
        let mut parts = parts();
        let mut second = parts.shares[0].clone();
        second.caller.tenant = TenantId::new("beta").expect("a name");
        parts.shares[0].attributed = DeviceNanos(15);
        second.attributed = DeviceNanos(25);
        parts.shares.push(second.clone());
        let block = Block::try_from(parts.clone()).expect("it balances");
        let without = block.without(|caller, _| *caller == second.caller);
        assert_eq!(without.parts().loss, DeviceNanos(55));
        assert_eq!(without.parts().shares, parts.shares[..1]);
        assert_eq!(Block::try_from(without.clone().into_parts()), Ok(without));
    }

    #[test]
    fn energy_splits_like_time_without_remainder() {
        let parts = parts();
        let split = parts.energy_parts().expect("it was told");
        let EnergyParts { overhead, idle, loss, shares } = split;
        // 7 mJ split by 10, 20, 30 and 40 %: 0.7, 1.4, 2.1 and 2.8.
        assert_eq!([overhead, idle, loss, shares[0]].map(Millijoules::millijoules), [1, 1, 2, 3]);
        assert_eq!(BlockParts { energy: None, ..parts }.energy_parts(), None);
    }

    /// Checks that blocks from before the energy field keep their digests.
    #[test]
    fn block_without_energy_keeps_its_bytes() {
        let parts = BlockParts { energy: None, ..parts() };
        let text = serde_json::to_string(&parts).expect("JSON");
        assert!(text.ends_with(r#""finished":[],"last_of_epoch":false}"#), "{text}");
        assert_eq!(serde_json::from_str::<BlockParts>(&text).expect("parts"), parts);
    }

    /// Checks that blocks from before tiers keep their digests.
    #[test]
    fn interactive_block_keeps_its_bytes() {
        let mut parts = parts();
        let Share { caller, attempt, .. } = parts.shares[0].clone();
        let (stages, reason) = (Stages::default(), FinishReason::Stop);
        let usage = Usage { attributed: DeviceNanos(40), ..Usage::default() };
        let tier = Tier::Interactive;
        let end =
            FinishedAttempt { caller, attempt, usage, stages, reason, finished: UtcTime(6), tier };
        parts.finished.push(end);
        let text = serde_json::to_string(&parts).expect("JSON");
        assert!(!text.contains("tier"), "{text}");
        assert_eq!(serde_json::from_str::<BlockParts>(&text).expect("parts"), parts);
        parts.shares[0].tier = Tier::Batch;
        parts.finished[0].tier = Tier::Batch;
        let text = serde_json::to_string(&parts).expect("JSON");
        assert!(text.contains(r#""attributed":40,"tier":"batch"}"#), "{text}");
        assert!(text.contains(r#""finished":6,"tier":"batch"}"#), "{text}");
        assert_eq!(serde_json::from_str::<BlockParts>(&text).expect("parts"), parts);
    }

    #[test]
    fn unbalanced_blocks_are_rejected() {
        type Change = fn(&mut BlockParts);
        let cases: &[(Change, bool)] = &[
            (|_| (), true),
            (|block| block.wall = DeviceNanos(99), false),
            (|block| block.idle = DeviceNanos(u64::MAX), false),
            (|block| (block.idle, block.loss) = (DeviceNanos(50), DeviceNanos(0)), true),
            (|block| block.number = 0, false),
            (|block| block.first_step = 4, false),
            (|block| (block.first_step, block.last_step) = (0, 0), false),
            (|block| block.first_step = 0, false),
            (|block| block.wall = DeviceNanos(u64::MAX), false),
            (|block| block.calibration.clear(), false),
            (|block| block.shares[0].sequence = SequenceId(u64::MAX), false),
            (|block| block.energy = None, true),
            (|block| block.energy = Some(Millijoules(u64::MAX)), false),
        ];
        for (index, (change, good)) in cases.iter().enumerate() {
            let mut parts = parts();
            change(&mut parts);
            assert_eq!(Block::try_from(parts).is_ok(), *good, "case {index}");
        }
    }
}
