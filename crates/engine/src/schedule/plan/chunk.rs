//! Chunks: how many tokens of a prompt are read in the step.

use std::ops::RangeInclusive;

use tollgate_domain::{DeviceNanos, SequenceId, SequenceWork};

use super::super::shares::Waiting;
use super::super::{Chunk, Rows, Running};
use super::Planner;

impl Planner<'_> {
    /// Returns true if at least one token of the waiting entry fits into the step.
    pub(super) fn has_room_to_read(&self, waiting: &Waiting) -> bool {
        let &Waiting { pending, rows, .. } = waiting;
        let pending = Pending { cached: 0, tokens: pending, rows };
        self.most_to_read(pending) > 0 && (self.reads_least() || self.fits_time_budget(pending, 1))
    }

    /// Returns true if the next token of a sequence that decodes fits beside the interactive
    /// work of the step. Interactive work itself always fits.
    pub(super) fn fits_batch_bound(&self, running: &Running) -> bool {
        let &Running { sequence, cached, rows, .. } = running;
        let Some(bound) = self.batch_bound else { return true };
        self.predicted_with(Chunk { sequence, tokens: 1, blocks: 0, rows }, cached) <= bound
    }

    /// Returns true if the next chunk of a prompt gets a minimum size. Batch work beside
    /// interactive work gets none: it may wait, and the minimum could exceed its bound.
    fn reads_least(&self) -> bool {
        self.first_read && self.batch_bound.is_none()
    }

    /// Returns the number of `pending` tokens that fit into the step, or 0 if the step is
    /// full.
    pub(super) fn chunk(&self, pending: Pending) -> u32 {
        let most = self.most_to_read(pending);
        let least = if self.reads_least() { LEAST_CHUNK.min(most) } else { 0 };
        if most == pending.tokens && self.fits_longer_step(pending) {
            return most;
        }
        let tokens = largest(least..=most, |tokens| self.fits_time_budget(pending, tokens));
        // Kernels run faster on whole blocks than on odd ends.
        if tokens < pending.tokens && tokens > LEAST_CHUNK {
            tokens - tokens % LEAST_CHUNK
        } else {
            tokens
        }
    }

    /// Returns the number of `pending` tokens that the device accepts beside the tokens
    /// already in the step.
    fn most_to_read(&self, Pending { tokens, rows, .. }: Pending) -> u32 {
        match rows {
            Rows::None => tokens.min(self.tokens_left),
            // Without a free row the newest token must wait for the next step.
            Rows::Last if self.rows_left == 0 => tokens.saturating_sub(1).min(self.tokens_left),
            Rows::Last => tokens.min(self.tokens_left),
            Rows::All => tokens.min(self.tokens_left).min(self.rows_left),
        }
    }

    fn fits_time_budget(&self, pending: Pending, tokens: u32) -> bool {
        self.predicted_reading(pending, tokens) <= self.step_time_budget()
    }

    /// Returns true if a whole prompt, or the rest of one, fits into a step that takes
    /// [`LONGER_STEP_PERCENT`] longer. A further step for a few tokens would delay its first
    /// token by more.
    fn fits_longer_step(&self, pending: Pending) -> bool {
        let most = longer(self.own_budget()).max(self.step_time_budget());
        // A step that is full already stays as it is, so that no second prompt makes it longer.
        self.batch_bound.is_none()
            && self.fits_time_budget(pending, 1)
            && self.predicted_reading(pending, pending.tokens) <= most
    }

    /// Returns the predicted time of the step if it reads `tokens` pending tokens more.
    fn predicted_reading(&self, pending: Pending, tokens: u32) -> DeviceNanos {
        let rows = pending.rows_of(tokens);
        // Only the amount of work matters for the prediction, so the id is arbitrary.
        let chunk = Chunk { sequence: SequenceId(0), tokens, blocks: 0, rows };
        self.predicted_with(chunk, pending.cached)
    }

    /// Returns the predicted time of the step with one more chunk.
    fn predicted_with(&self, chunk: Chunk, cached: u32) -> DeviceNanos {
        let mut cost = self.cost;
        cost.add(&work(&chunk, cached));
        cost.predicted()
    }

    /// Returns the longest predicted time of a step that reads prompts. If the sequences that
    /// decode take most of the time budget, prompts may make the step [`LONGER_STEP_PERCENT`]
    /// longer. Otherwise only one prompt would start in a step, however short it is.
    fn step_time_budget(&self) -> DeviceNanos {
        let budget = self.own_budget().max(longer(self.decoding));
        self.batch_bound.map_or(budget, |bound| bound.min(budget))
    }

    /// Returns the time budget of a step, whatever decodes in it.
    fn own_budget(&self) -> DeviceNanos {
        let budget = self.bounds.step_time_budget.as_nanos().min(u128::from(u64::MAX));
        DeviceNanos(budget as u64)
    }

    pub(super) fn count(&mut self, chunk: Chunk, cached: u32) {
        let work = work(&chunk, cached);
        self.tokens_left -= work.new_tokens;
        self.rows_left -= work.logit_rows;
        self.cost.add(&work);
    }

    /// Takes the work of a chunk out of the step again.
    pub(super) fn uncount(&mut self, chunk: Chunk, cached: u32) {
        let work = work(&chunk, cached);
        self.tokens_left += work.new_tokens;
        self.rows_left += work.logit_rows;
        self.cost.remove(&work);
    }
}

/// The tokens of a sequence that could be fed next.
#[derive(Clone, Copy)]
pub(super) struct Pending {
    /// Tokens before them in the KV cache.
    pub(super) cached: u32,
    pub(super) tokens: u32,
    pub(super) rows: Rows,
}

impl Pending {
    /// Returns the logit rows of a chunk of `tokens` tokens. A chunk that does not reach the last
    /// pending token has no last row.
    pub(super) fn rows_of(self, tokens: u32) -> Rows {
        match self.rows {
            Rows::Last if tokens < self.tokens => Rows::None,
            rows => rows,
        }
    }
}

/// Returns the largest value in `range` that fits. If a value fits, all smaller values must fit. The
/// first value is assumed to fit and is never tested.
pub(super) fn largest(range: RangeInclusive<u32>, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = range.into_inner();
    while low < high {
        // Rounding up keeps `middle` above `low`, so the loop ends.
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

pub(in super::super) fn row_count(rows: Rows, tokens: u32) -> u32 {
    match rows {
        Rows::None => 0,
        Rows::Last => 1,
        Rows::All => tokens,
    }
}

pub(in super::super) fn work(chunk: &Chunk, cached: u32) -> SequenceWork {
    let &Chunk { sequence, tokens, rows, .. } = chunk;
    SequenceWork {
        sequence,
        new_tokens: tokens,
        logit_rows: row_count(rows, tokens),
        context: cached,
    }
}

/// Returns a time that is [`LONGER_STEP_PERCENT`] longer.
fn longer(DeviceNanos(time): DeviceNanos) -> DeviceNanos {
    DeviceNanos(time.saturating_add(time / 100 * LONGER_STEP_PERCENT))
}

/// Smallest first chunk of a step. This chunk is read even if the time budget is used up,
/// so that prompts make progress beside any number of decoding sequences.
const LEAST_CHUNK: u32 = 16;
/// Percent by which a prompt that ends in a step, or the prompts beside sequences that decode,
/// may make the step longer.
const LONGER_STEP_PERCENT: u64 = 25;
