//! The scheduler: decides, as plain data, which sequences run in the next step.
//!
//! [`decide`] reads the running sequences, the waiting ones and the free capacity, and
//! returns [`Decisions`]. [`decide`] changes nothing and reads no clock. Sequences that
//! decode come first. Prompts are then read in chunks that keep the predicted step within
//! its time budget.
//!
//! The order follows the virtual times of [`Shares`]. The queue head with the smallest
//! virtual time is admitted next. A smaller request of another tenant never overtakes a
//! head that does not fit, unless the head needs a large part of the KV cache, or the
//! smaller request fits into the spare capacity. If a head does not fit, the scheduler may
//! preempt a request of a tenant that is ahead by more than a guard. A preempted request is
//! computed again later.
//! `docs/scheduling.md` explains the rules for admins.

mod plan;
mod queue_heads;
mod shares;

use std::time::Duration;

use tollgate_domain::{CostTable, DeviceNanos, MonotonicTime, SequenceId, SequenceWork, Tier};

use self::plan::{Planner, Queues};
use crate::backend::StepLimits;

pub(crate) use shares::Name;
pub use shares::{NodeId, Rank, Seat, Shares, Waiting};

/// The rule that decides which request runs next. Only the first is for production. The
/// others are controls that show in benchmarks what the first rule is worth; config cannot
/// select them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SchedulePolicy {
    /// Device time over weight, by share owner, then tenant, then key.
    #[default]
    Fair,
    /// Order of arrival, for all tenants alike.
    FirstComeFirstServed,
    /// The rule of `Fair` with tokens counted instead of device time.
    TokenCounters,
    /// The rule of `Fair` with a share for each key.
    KeyCounters,
}

/// Limits that a decision must not exceed.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Cost table that predicts the time of a step.
    pub table: CostTable,
    /// Longest predicted time of a step.
    pub step_time_budget: Duration,
    /// Largest part by which batch work makes a step with interactive work longer, in
    /// percent of the predicted time of the interactive work.
    pub batch_step: u32,
    /// Largest number of sequences in the batch.
    pub max_sequences: u32,
    /// Limits of the backend for one step.
    pub limits: StepLimits,
    /// KV blocks in the pool.
    pub total_blocks: u32,
    /// Device time by which another share owner or tenant must be ahead before it can be
    /// preempted. The same distance from the smallest virtual time gives access to the
    /// headroom.
    pub guard: DeviceNanos,
    /// Time during which a preempted sequence cannot be preempted again.
    pub rest: Duration,
    /// Capacity that is kept free for share owners that hold little.
    pub spare: Spare,
}

impl Bounds {
    /// Returns the number of KV blocks that are reserved for tenants near the smallest
    /// virtual time.
    pub fn headroom(&self) -> u32 {
        self.total_blocks / HEADROOM_PARTS
    }

    /// Returns the largest credit of a share owner against those that used the device while
    /// nothing waited. The credit is above the guard, so that the owner can still preempt,
    /// by one step: a sequence may be charged for its last step after the request came.
    pub fn most_credit(&self) -> DeviceNanos {
        let step = self.step_time_budget.as_nanos().min(u128::from(u32::MAX)) as u64;
        DeviceNanos(self.guard.nanos().saturating_add(step))
    }
}

/// Returns true if `blocks` are a large part of a pool of `total` blocks.
pub(crate) fn is_large(blocks: u32, total: u32) -> bool {
    blocks > total / LARGE_PARTS
}

/// Divisor of the pool: a sequence with at most one part in this many is not large.
const LARGE_PARTS: u32 = 4;
/// Divisor of the pool: one part in this many is headroom for tenants near the smallest
/// virtual time.
const HEADROOM_PARTS: u32 = 10;

/// Capacity of the batch that is kept free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spare {
    /// Sequences in the batch.
    pub places: u32,
    /// Blocks of the KV cache.
    pub blocks: u32,
}

impl Spare {
    /// Returns the capacity to keep free of a batch of `places` and a pool of `blocks`.
    pub(crate) fn of(places: u32, blocks: u32) -> Self {
        let least = LEAST_SPARE_PLACES.min(places / MOST_SPARE_PARTS);
        Self { places: (places / SPARE_PARTS).max(least), blocks: blocks / SPARE_PARTS }
    }
}

/// Divisor of places and KV blocks: one part in this many is kept free for share owners that
/// hold little.
const SPARE_PARTS: u32 = 32;
/// Fewest places that are kept free. The first requests of a few share owners take these, and
/// their next ones would wait for long answers of others.
const LEAST_SPARE_PLACES: u32 = 8;
/// Divisor of places: at most one part in this many is kept free in a small batch.
const MOST_SPARE_PARTS: u32 = 8;

/// The input of a decision.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Time of the decision.
    pub now: MonotonicTime,
    /// Sequences that hold KV blocks, in order of arrival.
    pub running: &'a [Running],
    /// Queues and virtual times of all share owners.
    pub shares: &'a Shares,
    /// KV blocks that no sequence holds.
    pub free_blocks: u32,
}

/// A sequence in the batch.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// Id of the sequence.
    pub sequence: SequenceId,
    /// Node of the key that the sequence belongs to.
    pub key: NodeId,
    /// Tokens in the KV cache now.
    pub cached: u32,
    /// Largest number of tokens that the KV cache has held for the sequence. These tokens
    /// have been computed at least once.
    pub computed: u32,
    /// Tokens of the prompt and generated tokens.
    pub known: u32,
    /// Known tokens that are not in the cache: 1 while the sequence decodes. During
    /// recomputation, only the tokens that were in the cache before the preemption.
    pub pending: u32,
    /// Logit rows to compute for the pending tokens.
    pub rows: Rows,
    /// Largest number of tokens that the sequence can reach.
    pub most: u32,
    /// KV blocks that the sequence holds, shared ones included.
    pub blocks: u32,
    /// KV blocks that become free if this sequence alone releases its blocks.
    pub exclusive: u32,
    /// Choices that fork from the sequence after its prompt is read.
    pub followers: u32,
    /// Time of the last preemption.
    pub preempted_at: Option<MonotonicTime>,
}

/// Logit rows to compute for the pending tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// No rows, not even after the last token.
    None,
    /// One row, after the last token.
    Last,
    /// One row after each token.
    All,
}

/// The result of a decision. The fields are applied in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Requests that waited past their deadline, by the id of their first sequence.
    pub refuse: Vec<SequenceId>,
    /// Sequences that lose their KV blocks.
    pub preempt: Vec<SequenceId>,
    /// Sequences that stay in the batch and keep only their first KV blocks.
    pub shrink: Vec<Shrink>,
    /// Share owners whose large request waits for room while others pass it. Waiting for
    /// room earns no credit, so they are lifted to the smallest virtual time of the others.
    pub passed: Vec<NodeId>,
    /// Entries that leave their queue for the batch, as key and rank: prompts that start
    /// and preempted sequences that resume.
    pub admit: Vec<(NodeId, Rank)>,
    /// The work of the step, in order.
    pub chunks: Vec<Chunk>,
}

/// A sequence that gives up its last KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shrink {
    /// Id of the sequence.
    pub sequence: SequenceId,
    /// Number of KV blocks that the sequence keeps.
    pub blocks: u32,
}

/// The work of one sequence in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Id of the sequence.
    pub sequence: SequenceId,
    /// Number of tokens to feed.
    pub tokens: u32,
    /// Number of KV blocks that the sequence must hold for this step.
    pub blocks: u32,
    /// Logit rows to compute.
    pub rows: Rows,
}

/// Returns the time budget of a step on a device with this cost table: `BUDGET_STEPS` times
/// the shortest possible step, at least `LEAST_BUDGET` and at most `most`.
///
/// A new request waits for the running step and then for its own, so the budget bounds the
/// delay that other tenants cause. Reading a prompt in more chunks costs little: each extra
/// chunk reads the weights once more, and that is the time of a shortest step.
pub fn step_time_budget(table: &CostTable, most: Duration) -> Duration {
    let mut shortest = table.step_cost();
    // The shortest step decodes one token without context.
    let token = SequenceWork { sequence: SequenceId(0), new_tokens: 1, logit_rows: 1, context: 0 };
    shortest.add(&token);
    let shortest = Duration::from_nanos(shortest.predicted().nanos());
    // `min` comes last so that the admin's limit also wins over `LEAST_BUDGET`.
    shortest.saturating_mul(BUDGET_STEPS).max(LEAST_BUDGET).min(most)
}

/// Shortest steps in a time budget. Reading the weights then takes at most this fraction of
/// the budget.
const BUDGET_STEPS: u32 = 16;
/// Smallest time budget. Accounting and delivery take some tens of microseconds for each
/// step, so a smaller budget would waste the device.
const LEAST_BUDGET: Duration = Duration::from_millis(1);

/// Decides the next step. Unless nothing runs and nothing waits, the result makes progress:
/// the result contains a chunk, a preemption or a refusal.
pub fn decide(view: &View<'_>, bounds: &Bounds) -> Decisions {
    let mut plan = Planner::new(view, bounds);
    // Order matters: expired requests must not be admitted, decoding takes blocks before new
    // prompts do, and batch work gets what interactive work leaves.
    plan.refuse();
    let mut queues = Queues::new(view);
    for tier in [Tier::Interactive, Tier::Batch] {
        plan.bound(tier);
        plan.decode(tier);
        plan.read(tier, &mut queues);
    }
    plan.decisions()
}

#[cfg(test)]
mod tests;
