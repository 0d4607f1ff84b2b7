//! A block of a worker's metering journal: a span of whole steps in which
//! every nanosecond has an owner. The worker closes it, the wire carries it,
//! the ledger posts it; all three read this one type.
//!
//! A [`Block`] exists only balanced: its maker adds up what it is given, so
//! whoever holds one need not add again.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{
    Caller, DeviceClass, DeviceNanos, FinishReason, Millijoules, ModelName, RequestId, SequenceId,
    Usage, UtcTime, WorkerEpoch, WorkerName,
};

/// The longest wall time of one block, a day: more is a lie or a broken clock.
pub const LONGEST_BLOCK: DeviceNanos = DeviceNanos::from_secs(86_400);
/// The most device time of one attempt, by either meter: a day for each of
/// the 128 choices that a request can have at most. Sums of years of such
/// figures still fit a signed 64-bit integer.
pub const LONGEST_ATTEMPT: DeviceNanos = DeviceNanos::from_secs(128 * 86_400);
/// The most tokens of one kind of one attempt.
pub const MOST_TOKENS: u64 = 1 << 40;
/// The most shares, and the most finished attempts, in one block.
pub const LARGEST_BLOCK: usize = 65_536;

/// A device as reports and limits know it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Device {
    /// The kind whose time is comparable.
    pub class: DeviceClass,
    /// For people: `NVIDIA H200`, `cpu, 2 threads`.
    pub name: String,
    /// The vendor's id; empty on a CPU.
    pub uuid: String,
}

/// One attempt at one request: a request that is placed again is a new attempt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// The request.
    pub request: RequestId,
    /// 0 at first.
    pub attempt: u32,
}

/// Device time of one sequence over the steps of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The sequence within the worker's epoch.
    pub sequence: SequenceId,
    /// Who pays, with which key.
    pub caller: Caller,
    /// For which request.
    pub attempt: Attempt,
    /// Its part of the steps' device time.
    pub attributed: DeviceNanos,
}

/// Where a request's time in a worker went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stages {
    /// Waiting for a place in the batch, ns.
    pub queue_ns: u64,
    /// From the first step to the first token, ns.
    pub prefill_ns: u64,
    /// From the first token to the last, ns.
    pub decode_ns: u64,
}

/// An attempt that ended within the block, with its final figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedAttempt {
    /// Who pays, with which key.
    pub caller: Caller,
    /// Which attempt of which request.
    pub attempt: Attempt,
    /// What the device did for it, over all its blocks.
    pub usage: Usage,
    /// Where its time went.
    pub stages: Stages,
    /// Why it ended.
    pub reason: FinishReason,
    /// When, by the worker host's clock.
    pub finished: UtcTime,
}

/// The fields of a [`Block`], unchecked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockParts {
    /// The life of the worker that wrote it.
    pub epoch: WorkerEpoch,
    /// Its number in the epoch, from 1 without gaps.
    pub number: u64,
    /// The worker's name in config.
    pub worker: WorkerName,
    /// The device whose time it is.
    pub device: Device,
    /// The model that it served.
    pub model: ModelName,
    /// Version of the cost table that split the steps.
    pub calibration: String,
    /// The first step of the span; 0 where it holds no step.
    pub first_step: u64,
    /// The last one; 0 where it holds no step.
    pub last_step: u64,
    /// When the span began, by the worker host's clock.
    pub started: UtcTime,
    /// Its length by the monotonic clock.
    pub wall: DeviceNanos,
    /// Device time that no tenant owns: warm-up, calibration, recompute.
    pub overhead: DeviceNanos,
    /// Time between steps.
    pub idle: DeviceNanos,
    /// Device time that a fault made worthless.
    pub loss: DeviceNanos,
    /// What is the tenants'.
    pub shares: Vec<Share>,
    /// The attempts that ended in it.
    pub finished: Vec<FinishedAttempt>,
    /// No block of this epoch follows.
    pub last_of_epoch: bool,
    /// What the device drew from the block's begin to its end, where it told.
    /// Left out of the words where it did not, as it was before it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<Millijoules>,
}

/// A block's energy by what its time was spent on; it sums to the block's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnergyParts {
    /// Of [`BlockParts::overhead`].
    pub overhead: Millijoules,
    /// Of [`BlockParts::idle`].
    pub idle: Millijoules,
    /// Of [`BlockParts::loss`].
    pub loss: Millijoules,
    /// Of each of [`BlockParts::shares`], in their order.
    pub shares: Vec<Millijoules>,
}

/// A checked block: its entries sum to its wall time exactly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BlockParts", into = "BlockParts")]
pub struct Block {
    parts: BlockParts,
}

/// Why a block was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The entries do not sum to the wall time, or overflow on the way.
    #[error(
        "block {number}: shares, overhead, idle and loss are {entries:?} ns but wall time is {wall} ns"
    )]
    Unbalanced {
        /// The block's number.
        number: u64,
        /// What the entries sum to; `None` where the sum overflows.
        entries: Option<u64>,
        /// The wall time stated.
        wall: u64,
    },
    /// A field holds what no honest worker writes.
    #[error("block {number}: {field} is out of bounds")]
    OutOfBounds {
        /// The block's number.
        number: u64,
        /// The field.
        field: &'static str,
    },
    /// An attempt's final figure is less than what it has in this block alone.
    #[error("block {number}: an attempt's final figure is less than its shares")]
    Understated {
        /// The block's number.
        number: u64,
    },
}

impl BlockParts {
    /// Splits the energy by the nanoseconds that everything took: largest
    /// remainder, ties to overhead, idle, loss and the shares in this order.
    /// `None` where the device told none.
    pub fn energy_parts(&self) -> Option<EnergyParts> {
        let energy = self.energy?;
        let shares = self.shares.iter().map(|share| share.attributed);
        let times: Vec<_> =
            [self.overhead, self.idle, self.loss].into_iter().chain(shares).collect();
        // Of no time at all a checked block has no energy.
        let parts = energy.split(&times).unwrap_or_else(|| vec![Millijoules::ZERO; times.len()]);
        let [overhead, idle, loss, ref shares @ ..] = parts[..] else { return None };
        Some(EnergyParts { overhead, idle, loss, shares: shares.to_vec() })
    }
}

impl Block {
    /// The fields.
    pub fn parts(&self) -> &BlockParts {
        &self.parts
    }

    /// The fields, by value.
    pub fn into_parts(self) -> BlockParts {
        self.parts
    }

    /// The same span of time without the records of some attempts: their
    /// device time is loss, with what it drew, and of their ends it says nothing.
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
        parts.loss = lost;
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
        let number = parts.number;
        if let Some(field) = out_of_bounds(&parts) {
            return Err(BlockError::OutOfBounds { number, field });
        }
        let entries = [parts.overhead, parts.idle, parts.loss]
            .into_iter()
            .chain(parts.shares.iter().map(|share| share.attributed))
            .try_fold(DeviceNanos::ZERO, DeviceNanos::checked_add);
        if entries != Some(parts.wall) {
            return Err(BlockError::Unbalanced {
                number,
                entries: entries.map(DeviceNanos::nanos),
                wall: parts.wall.nanos(),
            });
        }
        if is_understated(&parts) {
            return Err(BlockError::Understated { number });
        }
        Ok(Self { parts })
    }
}

/// Whether an attempt that ended in a balanced block says that it had less
/// than its shares there sum to.
fn is_understated(parts: &BlockParts) -> bool {
    let mut stated: HashMap<_, DeviceNanos> = parts
        .finished
        .iter()
        .map(|finished| ((&finished.caller, &finished.attempt), finished.usage.attributed))
        .collect();
    parts.shares.iter().any(|share| {
        let Some(left) = stated.get_mut(&(&share.caller, &share.attempt)) else {
            return false; // it goes on
        };
        match left.nanos().checked_sub(share.attributed.nanos()) {
            Some(less) => *left = DeviceNanos(less),
            None => return true,
        }
        false
    })
}

/// The first field that is out of bounds, if one is. Times and counts must
/// fit a signed 64-bit integer, which is what a database keeps.
fn out_of_bounds(parts: &BlockParts) -> Option<&'static str> {
    const FITS: u64 = i64::MAX as u64;
    let steps = match (parts.first_step, parts.last_step) {
        (0, 0) => parts.shares.is_empty(),
        (first, last) => first > 0 && first <= last && last <= FITS,
    };
    let figures = |finished: &FinishedAttempt| {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
            finished.usage;
        let Stages { queue_ns, prefill_ns, decode_ns } = finished.stages;
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
            }],
            finished: Vec::new(),
            last_of_epoch: false,
            energy: Some(Millijoules(7)),
        }
    }

    #[test]
    fn an_attempts_figures_are_bounded_and_no_less_than_its_shares() {
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
            // Two choices of it.
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
            });
            assert_eq!(Block::try_from(parts).is_ok(), good, "{usage:?}");
        }
    }

    #[test]
    fn what_is_taken_out_is_loss() {
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
    fn energy_goes_with_the_time_to_the_last_millijoule() {
        let parts = parts();
        let split = parts.energy_parts().expect("it was told");
        let EnergyParts { overhead, idle, loss, shares } = split;
        // Of 7 mJ by 10, 20, 30 and 40 %: 0.7, 1.4, 2.1 and 2.8.
        assert_eq!([overhead, idle, loss, shares[0]].map(Millijoules::millijoules), [1, 1, 2, 3]);
        assert_eq!(BlockParts { energy: None, ..parts }.energy_parts(), None);
    }

    /// The digests of blocks that were posted before energy was known stay.
    #[test]
    fn a_block_without_energy_says_what_it_always_said() {
        let parts = BlockParts { energy: None, ..parts() };
        let text = serde_json::to_string(&parts).expect("JSON");
        assert!(text.ends_with(r#""finished":[],"last_of_epoch":false}"#), "{text}");
        assert_eq!(serde_json::from_str::<BlockParts>(&text).expect("parts"), parts);
    }

    #[test]
    fn a_block_balances_or_does_not_exist() {
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
