//! Who runs next, decided as data.
//!
//! [`decide`] looks at what runs, what waits and what is free, and says what
//! the engine should do; it changes nothing and reads no clock. The rule:
//! sequences that decode come first, then prompts are read in chunks that keep
//! the predicted step within its box. Everything goes by the counters of
//! [`Shares`]: the smallest is served next or nobody is, however small another
//! request may be. Where there is no place for it, a request of whoever is
//! ahead by more than a guard gives its place back and is computed again later.
//! `docs/scheduling.md` tells it to those who run a worker.

mod heads;
mod plan;
mod shares;

use std::time::Duration;

use tollgate_domain::{CostTable, DeviceNanos, MonotonicTime, SequenceId, SequenceWork};

use self::plan::Plan;
use crate::backend::StepLimits;

pub(crate) use shares::Name;
pub use shares::{NodeId, Rank, Seat, Shares, Waiting};

/// The class that a request runs in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Someone waits for the answer.
    #[default]
    Interactive,
    /// Runs on what interactive work leaves.
    Batch,
}

/// How it is decided who runs next. All but the first are controls for
/// benchmarks, to show what the first is worth; an admin cannot choose them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulePolicy {
    /// Device time over weight, by holder of a share, tenant and key.
    #[default]
    Fair,
    /// In order of arrival, whosever it is.
    FirstComeFirstServed,
    /// As `Fair`, but tokens are counted in place of device time.
    TokenCounters,
    /// As `Fair`, but each key has a share of its own.
    KeyCounters,
}

/// What a decision may not exceed.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Predicts how long a step takes.
    pub table: CostTable,
    /// How long it should take at most.
    pub step_time_budget: Duration,
    /// Sequences in the batch.
    pub max_sequences: u32,
    /// What the backend takes in one step.
    pub limits: StepLimits,
    /// KV blocks in the pool.
    pub total_blocks: u32,
    /// Device time that another must be ahead before it loses a place, and
    /// within which of the smallest counter the last of the pool may be used.
    pub guard: DeviceNanos,
    /// How long a sequence that lost its place keeps the next one.
    pub rest: Duration,
    /// What whoever has as much already leaves to those who come.
    pub spare: Spare,
}

impl Bounds {
    /// KV blocks that are only for who is near the smallest counter.
    pub fn headroom(&self) -> u32 {
        self.total_blocks / HEADROOM_PARTS
    }
}

/// One part in so many of the KV cache is for who is near the smallest counter.
const HEADROOM_PARTS: u32 = 10;

/// A part of the batch that is kept free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spare {
    /// Places.
    pub places: u32,
    /// KV blocks.
    pub blocks: u32,
}

/// All that a decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The time.
    pub now: MonotonicTime,
    /// Sequences that hold KV, in order of arrival.
    pub running: &'a [Running],
    /// What waits, and what each has had.
    pub shares: &'a Shares,
    /// Free KV blocks.
    pub free_blocks: u32,
}

/// A sequence in the batch.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// Which.
    pub sequence: SequenceId,
    /// Whose.
    pub key: NodeId,
    /// Tokens in the KV cache.
    pub cached: u32,
    /// Tokens that were in the KV cache at any time: what was computed for it.
    pub computed: u32,
    /// Tokens known and not in the cache: 1 when it decodes. While it computes
    /// again after a preemption, only those that it had before.
    pub pending: u32,
    /// Which rows of logits the pending tokens want.
    pub rows: Rows,
    /// Tokens it may come to at most.
    pub most: u32,
    /// KV blocks that it holds, shared ones too.
    pub blocks: u32,
    /// Those that become free if it alone lets go.
    pub exclusive: u32,
    /// Choices that will fork from it when its prompt is read.
    pub followers: u32,
    /// When it last lost its place.
    pub preempted_at: Option<MonotonicTime>,
}

/// Rows of logits that a sequence's pending tokens want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None, not even after the last.
    None,
    /// One, after the last.
    Last,
    /// One after each.
    All,
}

/// What to do, to be applied in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Requests, by their first sequence, that waited past their deadline.
    pub refuse: Vec<SequenceId>,
    /// Sequences that give their KV back.
    pub preempt: Vec<SequenceId>,
    /// What leaves its line for a place in the batch, as key and rank: prompts
    /// that start, sequences that come back.
    pub admit: Vec<(NodeId, Rank)>,
    /// The step.
    pub chunks: Vec<Chunk>,
}

/// A sequence's part in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which.
    pub sequence: SequenceId,
    /// Tokens to feed.
    pub tokens: u32,
    /// KV blocks that it should hold from here on.
    pub blocks: u32,
    /// Which rows of logits to compute.
    pub rows: Rows,
}

/// How long a step should take at most on a device that `table` prices: `most`,
/// and where the model is fast as long as `BOX_STEPS` of its shortest steps.
/// Whoever comes waits for the step that runs and for his own, so the box is
/// what others can make him wait; and a prompt that is read in more chunks than
/// that costs little more, since reading the weights once more is what a
/// shortest step takes.
pub fn step_time_budget(table: &CostTable, most: Duration) -> Duration {
    let mut shortest = table.step_cost();
    let token = SequenceWork { sequence: SequenceId(0), new_tokens: 1, logit_rows: 1, context: 0 };
    shortest.add(&token);
    let shortest = Duration::from_nanos(shortest.predicted().nanos());
    shortest.saturating_mul(BOX_STEPS).max(LEAST_BOX).min(most)
}

/// With so many shortest steps in a box, reading the weights is at most so
/// small a part of it.
const BOX_STEPS: u32 = 16;
/// Beside each step there is its account and its telling, some tens of
/// microseconds: less than this is not worth it.
const LEAST_BOX: Duration = Duration::from_millis(1);

/// Decides the next step. Unless nothing runs or waits, what it returns always
/// gets somewhere: there is a chunk, or a sequence is preempted or refused.
pub fn decide(view: &View<'_>, bounds: &Bounds) -> Decisions {
    let mut plan = Plan::new(view, bounds);
    plan.refuse();
    plan.decode();
    plan.read();
    plan.decisions()
}

#[cfg(test)]
mod tests;
