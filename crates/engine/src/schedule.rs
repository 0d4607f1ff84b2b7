//! Who runs next, decided as data.
//!
//! [`decide`] looks at what runs, what waits and what is free, and says what
//! the engine should do; it changes nothing and reads no clock. The rule:
//! sequences that decode come first, then prefill in chunks that keep the
//! predicted step within its box; waiting prompts start by round robin over
//! tenants and in order of arrival within one. When the KV pool runs out, the
//! latest arrival gives its blocks back and is computed again later, before
//! anything new starts. Nobody is skipped for being large.

mod queues;

use std::time::Duration;

use tollgate_domain::{CostTable, DeviceNanos, MonotonicTime, SequenceId, SequenceWork};

use crate::backend::StepLimits;
use crate::kv::blocks_for;

pub use queues::{Queues, Waiting};

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
    pub step_box: Duration,
    /// Sequences in the batch.
    pub max_sequences: u32,
    /// What the backend takes in one step.
    pub limits: StepLimits,
}

/// All that a decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The time.
    pub now: MonotonicTime,
    /// Sequences that hold KV, in order of arrival.
    pub running: &'a [Running],
    /// Sequences that gave theirs back, in order of arrival.
    pub preempted: &'a [Preempted],
    /// What has not started.
    pub queues: &'a Queues,
    /// Free KV blocks.
    pub free_blocks: u32,
}

/// A sequence in the batch.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// Which.
    pub sequence: SequenceId,
    /// Tokens in the KV cache.
    pub cached: u32,
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
}

/// A sequence that waits to be computed again.
#[derive(Clone, Copy, Debug)]
pub struct Preempted {
    /// Which.
    pub sequence: SequenceId,
    /// Tokens that its cache will hold before it goes on.
    pub tokens: u32,
    /// Tokens to be computed again before it goes on: its first chunk's bound.
    pub pending: u32,
    /// Tokens it may come to at most.
    pub most: u32,
    /// Which rows of logits the pending tokens want.
    pub rows: Rows,
    /// Choices that will fork from it when its prompt is read.
    pub followers: u32,
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
    /// Preempted sequences that come back.
    pub resume: Vec<SequenceId>,
    /// Waiting prompts, by the sequence of their first choice, that start.
    pub admit: Vec<SequenceId>,
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

/// Decides the next step. Unless nothing runs or waits, what it returns always
/// gets somewhere: there is a chunk, or a sequence is preempted or refused.
pub fn decide(view: &View<'_>, bounds: &Bounds) -> Decisions {
    let mut plan = Plan::new(view, bounds);
    plan.decisions.refuse = view.queues.expired(view.now).collect();
    plan.decode();
    plan.prefill();
    if plan.decisions.preempt.is_empty() && plan.resume() {
        plan.admit();
    }
    plan.decisions
}

/// A step in the making.
struct Plan<'a> {
    view: &'a View<'a>,
    bounds: &'a Bounds,
    decisions: Decisions,
    works: Vec<SequenceWork>,
    free: u32,
    sequences: u32,
    tokens_left: u32,
    rows_left: u32,
    /// No prefill is in the step yet, so the next gets at least a little.
    first_prefill: bool,
}

impl<'a> Plan<'a> {
    fn new(view: &'a View<'a>, bounds: &'a Bounds) -> Self {
        Self {
            view,
            bounds,
            decisions: Decisions::default(),
            works: Vec::with_capacity(view.running.len() + 1),
            free: view.free_blocks,
            sequences: view.running.iter().map(|running| 1 + running.followers).sum(),
            tokens_left: bounds.limits.tokens,
            rows_left: bounds.limits.logit_rows,
            first_prefill: true,
        }
    }

    /// One token of every sequence that decodes, oldest first; whoever needs a
    /// block that is not there takes it from the latest arrival.
    fn decode(&mut self) {
        for running in self.view.running.iter().filter(|running| running.pending == 1) {
            if self.tokens_left == 0 || self.rows_left == 0 || self.is_preempted(running.sequence) {
                continue;
            }
            if let Some(blocks) = self.blocks_to_grow(running) {
                self.push(running.sequence, running.cached, 1, running.rows, blocks);
            }
        }
    }

    /// Chunks of the prompts that have started, oldest first, while the box
    /// has room.
    fn prefill(&mut self) {
        for running in self.view.running.iter().filter(|running| running.pending > 1) {
            if self.is_preempted(running.sequence) {
                continue;
            }
            let tokens =
                self.chunk(running.sequence, running.cached, running.pending, running.rows);
            if tokens == 0 {
                return;
            }
            if let Some(blocks) = self.blocks_to_grow(running) {
                self.push_prefill(
                    running.sequence,
                    running.cached,
                    (tokens, running.pending),
                    running.rows,
                    blocks,
                );
            }
        }
    }

    /// Brings back what was preempted, oldest first. False if one has to wait,
    /// and with it everything that has not started.
    fn resume(&mut self) -> bool {
        for preempted in self.view.preempted {
            let Preempted { sequence, tokens, pending, most, rows, followers } = *preempted;
            // Not before there is air: it would soon be preempted again.
            let Some(blocks) = self.room(tokens, most, followers, RESERVE_BLOCKS) else {
                return false;
            };
            let chunk = self.chunk(sequence, 0, pending, rows);
            if chunk == 0 {
                return false;
            }
            self.take_room(blocks, followers);
            self.decisions.resume.push(sequence);
            self.push_prefill(sequence, 0, (chunk, pending), rows, blocks);
        }
        true
    }

    /// Starts waiting prompts in turn, while the step has room for them.
    fn admit(&mut self) {
        for waiting in self.view.queues.in_turn() {
            if self.decisions.refuse.contains(&waiting.request) {
                continue;
            }
            let &Waiting { leader, prompt_tokens, most, rows, followers, .. } = waiting;
            let Some(blocks) = self.room(prompt_tokens, most, followers, 0) else { return };
            let chunk = self.chunk(leader, 0, prompt_tokens, rows);
            if chunk == 0 {
                return;
            }
            self.take_room(blocks, followers);
            self.decisions.admit.push(leader);
            self.push_prefill(leader, 0, (chunk, prompt_tokens), rows, blocks);
        }
    }

    /// Blocks that a running sequence should hold for its next tokens, grown
    /// ahead where the pool allows it. `None` if it had to be preempted itself.
    fn blocks_to_grow(&mut self, running: &Running) -> Option<u32> {
        let needed = blocks_for(running.cached + running.pending);
        if needed <= running.blocks {
            return Some(running.blocks);
        }
        while self.free < needed - running.blocks {
            if self.preempt_latest() == running.sequence {
                return None;
            }
        }
        let more = (reserved(needed, running.most) - running.blocks).min(self.free);
        self.free -= more;
        Some(running.blocks + more)
    }

    /// Preempts the latest arrival that still holds blocks and says which.
    fn preempt_latest(&mut self) -> SequenceId {
        let latest = self
            .view
            .running
            .iter()
            .rev()
            .find(|running| !self.is_preempted(running.sequence))
            .expect("whoever asks for blocks is itself still there");
        self.decisions.preempt.push(latest.sequence);
        self.free += latest.exclusive;
        // It may have been given a place, and blocks, in this very step.
        if let Some(at) =
            self.decisions.chunks.iter().position(|chunk| chunk.sequence == latest.sequence)
        {
            let chunk = self.decisions.chunks.remove(at);
            self.works.remove(at);
            self.free += chunk.blocks - latest.blocks;
            self.tokens_left += chunk.tokens;
            self.rows_left += row_count(chunk.rows, chunk.tokens);
        }
        latest.sequence
    }

    fn is_preempted(&self, sequence: SequenceId) -> bool {
        self.decisions.preempt.contains(&sequence)
    }

    /// Blocks for a sequence that comes with `tokens` tokens, if there are
    /// enough of them and of places in the batch. What runs keeps a block each
    /// to grow into and `spare` more together, and each follower will want one
    /// for its own tail.
    fn room(&self, tokens: u32, most: u32, followers: u32, spare: u32) -> Option<u32> {
        if self.sequences + 1 + followers > self.bounds.max_sequences {
            return None;
        }
        let kept = if self.sequences == 0 { 0 } else { self.sequences + followers + spare };
        let usable = self.free.saturating_sub(kept);
        let needed = blocks_for(tokens);
        (needed <= usable).then(|| reserved(needed, most).min(usable))
    }

    fn take_room(&mut self, blocks: u32, followers: u32) {
        self.free -= blocks;
        self.sequences += 1 + followers;
    }

    /// Tokens of `pending` that fit the step; 0 if it is full.
    fn chunk(&self, sequence: SequenceId, cached: u32, pending: u32, rows: Rows) -> u32 {
        let most = match rows {
            Rows::None => pending.min(self.tokens_left),
            Rows::Last if self.rows_left == 0 => pending.saturating_sub(1).min(self.tokens_left),
            Rows::Last => pending.min(self.tokens_left),
            Rows::All => pending.min(self.tokens_left).min(self.rows_left),
        };
        let least = if self.first_prefill { LEAST_CHUNK.min(most) } else { 0 };
        let mut works = self.works.clone();
        let mut fits = |tokens: u32| {
            works.truncate(self.works.len());
            works.push(work(sequence, cached, tokens, chunk_rows(rows, tokens, pending)));
            self.bounds.table.predict_step(&works) <= self.step_box()
        };
        let tokens = largest(least, most, &mut fits);
        // Whole blocks suit every kernel better than odd ends.
        if tokens < pending && tokens > LEAST_CHUNK {
            tokens - tokens % LEAST_CHUNK
        } else {
            tokens
        }
    }

    fn step_box(&self) -> DeviceNanos {
        DeviceNanos(self.bounds.step_box.as_nanos().min(u128::from(u64::MAX)) as u64)
    }

    fn push_prefill(
        &mut self,
        sequence: SequenceId,
        cached: u32,
        (tokens, pending): (u32, u32),
        rows: Rows,
        blocks: u32,
    ) {
        self.first_prefill = false;
        self.push(sequence, cached, tokens, chunk_rows(rows, tokens, pending), blocks);
    }

    fn push(&mut self, sequence: SequenceId, cached: u32, tokens: u32, rows: Rows, blocks: u32) {
        self.tokens_left -= tokens;
        self.rows_left -= row_count(rows, tokens);
        self.works.push(work(sequence, cached, tokens, rows));
        self.decisions.chunks.push(Chunk { sequence, tokens, blocks, rows });
    }
}

/// The largest value in `low..=high` that fits, where everything below one
/// that fits does too; `low` itself is never asked.
fn largest(mut low: u32, mut high: u32, fits: &mut impl FnMut(u32) -> bool) -> u32 {
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// `needed` blocks and those reserved ahead, up to what is ever needed.
fn reserved(needed: u32, most: u32) -> u32 {
    needed.next_multiple_of(RESERVE_BLOCKS).min(blocks_for(most)).max(needed)
}

/// The rows of a chunk of `tokens` of `pending` tokens.
fn chunk_rows(rows: Rows, tokens: u32, pending: u32) -> Rows {
    match rows {
        Rows::Last if tokens < pending => Rows::None,
        rows => rows,
    }
}

fn row_count(rows: Rows, tokens: u32) -> u32 {
    match rows {
        Rows::None => 0,
        Rows::Last => 1,
        Rows::All => tokens,
    }
}

fn work(sequence: SequenceId, cached: u32, tokens: u32, rows: Rows) -> SequenceWork {
    SequenceWork {
        sequence,
        new_tokens: tokens,
        logit_rows: row_count(rows, tokens),
        context: cached,
    }
}

/// KV blocks are reserved in steps of this many: 256 tokens.
const RESERVE_BLOCKS: u32 = 16;
/// The first prefill in a step gets this many tokens even if the box is full,
/// so that prompts get read beside any number of decoders.
const LEAST_CHUNK: u32 = 16;

#[cfg(test)]
mod tests;
