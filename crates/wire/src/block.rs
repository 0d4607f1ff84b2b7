//! Conversions between blocks of the journal and their messages. A message from a
//! worker is accepted only if its names are valid, its sums are exact, and its
//! figures are plausible (see [`tollgate_domain::block`]).

use tollgate_domain::block::LARGEST_BLOCK;
use tollgate_domain::{
    Attempt, Block, BlockError, BlockParts, Caller, Device, DeviceClass, DeviceNanos, FinishReason,
    FinishedAttempt, InvalidName, KeyId, Millijoules, ModelName, RequestId, SequenceId, Share,
    Stages, TenantId, Tier, Usage, UtcTime, WorkerEpoch, WorkerName,
};

use crate::v1;

/// The format that this version writes, in [`v1::JournalBlock::format`].
pub const BLOCK_FORMAT: u32 = 1;

/// The reasons why a message is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A name breaks the rules of names.
    #[error("{field}")]
    Name {
        /// The name of the field.
        field: &'static str,
        /// The rule that the name breaks.
        source: InvalidName,
    },
    /// A required field is absent.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A number has no meaning in its enum.
    #[error("{field} {value} is unknown")]
    Unknown {
        /// The name of the field.
        field: &'static str,
        /// The number in the message.
        value: i64,
    },
    /// A list has more elements than the gateway reads.
    #[error("{0} has too many elements")]
    TooMany(&'static str),
    /// The block does not balance, or a figure is not plausible.
    #[error(transparent)]
    Block(#[from] BlockError),
}

impl TryFrom<v1::JournalBlock> for Block {
    type Error = WireError;

    fn try_from(message: v1::JournalBlock) -> Result<Self, WireError> {
        // Exhaustive, so that a new field of the message fails to compile until it is handled.
        let v1::JournalBlock {
            format,
            epoch,
            block,
            worker,
            device,
            model,
            calibration,
            first_step,
            last_step,
            started_utc_ns,
            wall_ns,
            overhead_ns,
            idle_ns,
            loss_ns,
            shares,
            finished,
            last_of_epoch,
            energy_mj,
            recorded: _, // a fact about the ledger, not about the block
        } = message;
        // Checked before any field, because another format may give a field another meaning.
        if format != BLOCK_FORMAT {
            return Err(WireError::Unknown { field: "format", value: format.into() });
        }
        // Checked first: the conversion below allocates as much as the lists have.
        if shares.len() > LARGEST_BLOCK {
            return Err(WireError::TooMany("shares"));
        }
        if finished.len() > LARGEST_BLOCK {
            return Err(WireError::TooMany("finished"));
        }
        let parts = BlockParts {
            epoch: named("epoch", WorkerEpoch::try_from(epoch))?,
            number: block,
            worker: named("worker", WorkerName::new(&worker))?,
            device: device.ok_or(WireError::Missing("device"))?.try_into()?,
            model: named("model", ModelName::new(&model))?,
            calibration,
            first_step,
            last_step,
            started: UtcTime(started_utc_ns),
            wall: DeviceNanos(wall_ns),
            overhead: DeviceNanos(overhead_ns),
            idle: DeviceNanos(idle_ns),
            loss: DeviceNanos(loss_ns),
            shares: shares.into_iter().map(Share::try_from).collect::<Result<_, _>>()?,
            finished: finished
                .into_iter()
                .map(FinishedAttempt::try_from)
                .collect::<Result<_, _>>()?,
            last_of_epoch,
            energy: energy_mj.map(Millijoules),
        };
        // The domain checks the sums, so that no maker of a block can leave the check out.
        Ok(Self::try_from(parts)?)
    }
}

impl From<Block> for v1::JournalBlock {
    fn from(block: Block) -> Self {
        // Exhaustive, so that a new part of a block cannot be lost on its way to the disk.
        let BlockParts {
            epoch,
            number,
            worker,
            device,
            model,
            calibration,
            first_step,
            last_step,
            started,
            wall,
            overhead,
            idle,
            loss,
            shares,
            finished,
            last_of_epoch,
            energy,
        } = block.into_parts();
        Self {
            format: BLOCK_FORMAT,
            epoch: epoch.to_string(),
            block: number,
            worker: worker.to_string(),
            device: Some(v1::Device {
                class: device.class.to_string(),
                name: device.name,
                uuid: device.uuid,
                threads: 0, // announced by the worker and not part of a bill
            }),
            model: model.to_string(),
            calibration,
            first_step,
            last_step,
            started_utc_ns: started.0,
            wall_ns: wall.nanos(),
            overhead_ns: overhead.nanos(),
            idle_ns: idle.nanos(),
            loss_ns: loss.nanos(),
            shares: shares.into_iter().map(v1::Share::from).collect(),
            finished: finished.into_iter().map(v1::RequestRecord::from).collect(),
            last_of_epoch,
            energy_mj: energy.map(Millijoules::millijoules),
            recorded: false,
        }
    }
}

impl TryFrom<v1::Device> for Device {
    type Error = WireError;

    fn try_from(message: v1::Device) -> Result<Self, WireError> {
        // The number of threads is announced by the worker and is not part of a bill.
        let v1::Device { class, name, uuid, threads: _ } = message;
        Ok(Self { class: named("device.class", DeviceClass::new(&class))?, name, uuid })
    }
}

impl TryFrom<v1::Share> for Share {
    type Error = WireError;

    fn try_from(message: v1::Share) -> Result<Self, WireError> {
        // Exhaustive, so that a figure of a bill cannot be dropped by mistake.
        let v1::Share { sequence, request_id, attempt, tenant, key, attributed_ns, tier } = message;
        Ok(Self {
            sequence: SequenceId(sequence),
            caller: Caller { tenant: tenant_id(&tenant)?, key: key_id(&key)? },
            attempt: Attempt { request: request(&request_id)?, attempt },
            attributed: DeviceNanos(attributed_ns),
            tier: tier_numbered("shares.tier", tier)?,
        })
    }
}

impl From<Share> for v1::Share {
    fn from(share: Share) -> Self {
        let Share { sequence, caller, attempt, attributed, tier } = share;
        Self {
            sequence: sequence.0,
            request_id: attempt.request.to_string(),
            attempt: attempt.attempt,
            tenant: caller.tenant.to_string(),
            key: caller.key.to_string(),
            attributed_ns: attributed.nanos(),
            tier: v1::Tier::from(tier).into(),
        }
    }
}

impl TryFrom<v1::RequestRecord> for FinishedAttempt {
    type Error = WireError;

    fn try_from(message: v1::RequestRecord) -> Result<Self, WireError> {
        // Read before the fields are moved. An unknown number becomes `Unspecified`.
        let reason = message.reason();
        let v1::RequestRecord {
            request_id,
            attempt,
            tenant,
            key,
            usage,
            stages,
            reason: number,
            finished_utc_ns,
            tier,
        } = message;
        Ok(Self {
            caller: Caller { tenant: tenant_id(&tenant)?, key: key_id(&key)? },
            attempt: Attempt { request: request(&request_id)?, attempt },
            // Protobuf cannot require a message, so its absence is checked here.
            usage: usage.ok_or(WireError::Missing("finished.usage"))?.into(),
            stages: stages.ok_or(WireError::Missing("finished.stages"))?.into(),
            // A request without a reason cannot be settled, so the whole block is rejected.
            reason: finish_reason(reason)
                .ok_or(WireError::Unknown { field: "finished.reason", value: number.into() })?,
            finished: UtcTime(finished_utc_ns),
            tier: tier_numbered("finished.tier", tier)?,
        })
    }
}

impl From<FinishedAttempt> for v1::RequestRecord {
    fn from(finished: FinishedAttempt) -> Self {
        let FinishedAttempt { caller, attempt, usage, stages, reason, finished, tier } = finished;
        Self {
            request_id: attempt.request.to_string(),
            attempt: attempt.attempt,
            tenant: caller.tenant.to_string(),
            key: caller.key.to_string(),
            usage: Some(usage.into()),
            stages: Some(stages.into()),
            reason: v1::FinishReason::from(reason).into(),
            finished_utc_ns: finished.0,
            tier: v1::Tier::from(tier).into(),
        }
    }
}

/// Converts the figures without a check of their own. The block and the order
/// decide whether they are plausible.
impl From<v1::Usage> for Usage {
    fn from(message: v1::Usage) -> Self {
        let v1::Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
        } = message;
        Self {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed: DeviceNanos(attributed_ns),
            reference: DeviceNanos(reference_ns),
        }
    }
}

impl From<Usage> for v1::Usage {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
            usage;
        Self {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns: attributed.nanos(),
            reference_ns: reference.nanos(),
        }
    }
}

impl From<v1::Stages> for Stages {
    fn from(message: v1::Stages) -> Self {
        let v1::Stages { queue_ns, prefill_ns, decode_ns } = message;
        Self { queue_ns, prefill_ns, decode_ns }
    }
}

impl From<Stages> for v1::Stages {
    fn from(stages: Stages) -> Self {
        let Stages { queue_ns, prefill_ns, decode_ns } = stages;
        Self { queue_ns, prefill_ns, decode_ns }
    }
}

/// Returns the reason that a message names; `None` if it names none.
pub fn finish_reason(message: v1::FinishReason) -> Option<FinishReason> {
    match message {
        // Zero is also the value of an absent field, so it cannot name a reason.
        v1::FinishReason::Unspecified => None,
        v1::FinishReason::Stop => Some(FinishReason::Stop),
        v1::FinishReason::Length => Some(FinishReason::Length),
        v1::FinishReason::Cancelled => Some(FinishReason::Cancelled),
        v1::FinishReason::Deadline => Some(FinishReason::Deadline),
        v1::FinishReason::Fault => Some(FinishReason::Fault),
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
            FinishReason::Deadline => Self::Deadline,
            FinishReason::Fault => Self::Fault,
        }
    }
}

impl From<Tier> for v1::Tier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Interactive => Self::Interactive,
            Tier::Batch => Self::Batch,
        }
    }
}

impl From<v1::Tier> for Tier {
    fn from(message: v1::Tier) -> Self {
        match message {
            v1::Tier::Interactive => Self::Interactive,
            v1::Tier::Batch => Self::Batch,
        }
    }
}

/// Returns the tier of this number. An unknown number has no price, so it is refused.
fn tier_numbered(field: &'static str, number: i32) -> Result<Tier, WireError> {
    let unknown = |_| WireError::Unknown { field, value: number.into() };
    v1::Tier::try_from(number).map(Tier::from).map_err(unknown)
}

fn tenant_id(tenant: &str) -> Result<TenantId, WireError> {
    named("tenant", TenantId::new(tenant))
}

fn key_id(key: &str) -> Result<KeyId, WireError> {
    named("key", KeyId::new(key))
}

fn request(id: &str) -> Result<RequestId, WireError> {
    named("request_id", RequestId::new(id))
}

fn named<T>(field: &'static str, name: Result<T, InvalidName>) -> Result<T, WireError> {
    name.map_err(|source| WireError::Name { field, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid_block() -> v1::JournalBlock {
        v1::JournalBlock {
            format: 1,
            epoch: "0123456789abcdef0123456789abcdef".into(),
            block: 1,
            worker: "0".into(),
            device: Some(v1::Device { class: "cpu".into(), name: "cpu".into(), ..<_>::default() }),
            model: "m".into(),
            calibration: "v1".into(),
            first_step: 1,
            last_step: 2,
            started_utc_ns: 9,
            wall_ns: 60,
            overhead_ns: 10,
            idle_ns: 20,
            loss_ns: 5,
            shares: vec![v1::Share {
                sequence: 1,
                request_id: "req-1".into(),
                attempt: 0,
                tenant: "acme".into(),
                key: "k".into(),
                attributed_ns: 25,
                tier: v1::Tier::Batch.into(),
            }],
            finished: vec![v1::RequestRecord {
                request_id: "req-1".into(),
                attempt: 0,
                tenant: "acme".into(),
                key: "k".into(),
                usage: Some(v1::Usage {
                    prompt_tokens: 3,
                    completion_tokens: 2,
                    attributed_ns: 25,
                    ..<_>::default()
                }),
                stages: Some(v1::Stages::default()),
                reason: v1::FinishReason::Stop.into(),
                finished_utc_ns: 10,
                tier: v1::Tier::Batch.into(),
            }],
            last_of_epoch: false,
            energy_mj: Some(7),
            recorded: false,
        }
    }

    fn usage_of(block: &mut v1::JournalBlock) -> &mut v1::Usage {
        block.finished[0].usage.as_mut().expect("a valid block has usage")
    }

    #[test]
    fn valid_block_survives_conversion() {
        for energy_mj in [valid_block().energy_mj, Some(0), None] {
            let sent = v1::JournalBlock { energy_mj, ..valid_block() };
            let block = Block::try_from(sent.clone()).expect("a valid block");
            assert_eq!(v1::JournalBlock::from(block), sent);
        }
    }

    #[test]
    fn invalid_block_is_refused() {
        type Change = fn(&mut v1::JournalBlock);
        let changes: &[(&str, Change)] = &[
            ("unknown format", |block| block.format = 2),
            ("epoch", |block| block.epoch = "7".into()),
            ("no number", |block| block.block = 0),
            ("a name with spaces", |block| block.worker = "a b".into()),
            ("no device", |block| block.device = None),
            ("no model", |block| block.model.clear()),
            ("a share of an unknown tier", |block| block.shares[0].tier = 2),
            ("an end of an unknown tier", |block| block.finished[0].tier = 2),
            ("no calibration", |block| block.calibration.clear()),
            ("steps backwards", |block| (block.first_step, block.last_step) = (3, 2)),
            ("shares without steps", |block| (block.first_step, block.last_step) = (0, 0)),
            ("one ns too much", |block| block.shares[0].attributed_ns += 1),
            ("one ns too little", |block| block.idle_ns -= 1),
            ("minus one as unsigned", |block| block.loss_ns = u64::MAX),
            ("wraps to the right sum", |block| {
                block.idle_ns = u64::MAX;
                block.loss_ns = 26;
            }),
            ("a hundred years", |block| {
                block.wall_ns = 100 * 365 * 86_400 * 1_000_000_000;
                block.idle_ns = block.wall_ns - 40;
            }),
            ("a power station", |block| block.energy_mj = Some(u64::MAX)),
            ("a tenant without name", |block| block.shares[0].tenant.clear()),
            ("a request with a line break", |block| block.shares[0].request_id = "a\nb".into()),
            ("no usage", |block| block.finished[0].usage = None),
            ("no reason", |block| block.finished[0].reason = 0),
            ("an unknown reason", |block| block.finished[0].reason = 99),
            ("huge tokens", |block| {
                usage_of(block).prompt_tokens = 1 << 41;
            }),
            ("more cached than there are", |block| usage_of(block).cached_tokens = 4),
            ("less than its shares", |block| usage_of(block).attributed_ns = 24),
            ("centuries of device time", |block| usage_of(block).attributed_ns = 1 << 62),
            ("centuries of reference cost", |block| usage_of(block).reference_ns = 1 << 62),
        ];
        for (name, change) in changes {
            let mut block = valid_block();
            change(&mut block);
            assert!(Block::try_from(block).is_err(), "{name}");
        }
    }
}
