//! The plan of a step in the layout that the kernels read: one piece of words, uploaded
//! by one copy.
//!
//! Spans of one token go to the decode kernel; longer spans are cut into tiles for the
//! prefill kernel. Each kernel is launched once a layer, whatever the mix. With
//! deterministic kernels, spans of one token are prefill tiles too.

use std::cmp::Reverse;

use super::capacity::{Packer, StepCapacity};
use super::kernels::NONE;
use super::samples::{SampleList, SampleOffsets};
use crate::backend::{BLOCK_TOKENS, BackendError, LogitRows, PlanFault, Span, StepPlan};

/// A step that was laid out. Every list holds 32-bit words in the order of the spans,
/// unless its comment names another order.
pub(super) struct PlanLayout {
    /// Indexes of the previous step's samples that become tokens; empty without token
    /// feedback.
    pub(super) sources: Vec<u32>,
    pub(super) samples: SampleList,
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// The cache slot for each token's keys and values: block * 16 + token of the
    /// block.
    pub(super) slots: Vec<u32>,
    /// Rows of tokens that produce logits.
    pub(super) logit_rows: Vec<u32>,
    /// Number of rows that the plan asked for. Rows after these are padding.
    pub(super) rows_wanted: usize,
    /// Spans of one token: row, tokens, position, offset in `blocks`.
    pub(super) decodes: Vec<[u32; 4]>,
    /// Tiles of longer spans with the same fields, the longest context first.
    pub(super) prefills: Vec<[u32; 4]>,
    /// The block tables of all spans, one after the other.
    pub(super) blocks: Vec<u32>,
    /// The longest context of a single token, tokens.
    pub(super) longest_decode: u32,
    tile: u32,
    has_decode_kernel: bool,
    most_blocks: usize,
    /// The last step that wrote to each KV block.
    written: Vec<u64>,
    step: u64,
}

/// The offset of each list in the packed words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PlanOffsets {
    pub(super) tokens: usize,
    pub(super) positions: usize,
    pub(super) slots: usize,
    pub(super) logit_rows: usize,
    pub(super) decodes: usize,
    pub(super) prefills: usize,
    pub(super) blocks: usize,
    pub(super) sources: usize,
    pub(super) samples: SampleOffsets,
    /// Total number of words.
    pub(super) end: usize,
}

impl PlanLayout {
    pub(super) fn new(capacity: StepCapacity) -> Self {
        let list = || Vec::with_capacity(capacity.tokens);
        Self {
            sources: list(),
            samples: SampleList::new(&capacity),
            tokens: list(),
            positions: list(),
            slots: list(),
            logit_rows: list(),
            rows_wanted: 0,
            decodes: Vec::with_capacity(capacity.tokens),
            prefills: Vec::with_capacity(capacity.tokens),
            blocks: Vec::with_capacity(capacity.blocks()),
            longest_decode: 0,
            tile: capacity.tile.max(1),
            has_decode_kernel: capacity.has_decode_kernel,
            most_blocks: capacity.blocks(),
            written: vec![0; capacity.kv_blocks as usize],
            step: 0,
        }
    }

    /// Lays out a plan that [`StepPlan::check`] accepted.
    ///
    /// # Errors
    /// [`PlanFault::BlockShared`] if two spans would write to one block.
    /// [`BackendError::Device`] if the block tables or the sample lists are longer than
    /// any batch of this pool needs.
    pub(super) fn lay_out(&mut self, plan: &StepPlan<'_>) -> Result<(), BackendError> {
        self.clear();
        self.step += 1;
        for (index, span) in plan.spans.iter().enumerate() {
            self.claim_blocks(span).map_err(|reason| BackendError::Plan { span: index, reason })?;
            self.lay_out_span(span)?;
        }
        self.order_prefills();
        self.rows_wanted = self.logit_rows.len();
        self.sources.extend_from_slice(plan.token_feedback);
        self.samples.lay_out(plan.results.samples())
    }

    /// Returns true if every span has one token and either all or none have a row of
    /// logits. Steps with as many tokens then have the same shape.
    pub(super) fn only_decodes(&self) -> bool {
        let rows = self.logit_rows.len();
        self.prefills.is_empty() && (rows == self.decodes.len() || rows == 0)
    }

    /// Adds padding tokens until there are `tokens`. The kernels compute them, but do
    /// not write their keys and values, and nothing reads their results.
    pub(super) fn pad(&mut self, tokens: usize) {
        let has_rows = !self.logit_rows.is_empty();
        for row in self.tokens.len() as u32..tokens as u32 {
            self.tokens.push(0);
            self.positions.push(0);
            // No slot, so padding never writes to the cache.
            self.slots.push(NONE);
            self.decodes.push([row, 0, 0, 0]);
            if has_rows {
                self.logit_rows.push(row);
            }
            if !self.sources.is_empty() {
                self.sources.push(NONE);
            }
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.logit_rows.clear();
        self.decodes.clear();
        self.prefills.clear();
        self.blocks.clear();
        self.sources.clear();
        self.longest_decode = 0;
    }

    fn claim_blocks(&mut self, span: &Span<'_>) -> Result<(), PlanFault> {
        let last = ((span.end() - 1) / u64::from(BLOCK_TOKENS)) as usize;
        for &block in &span.blocks[(span.start / BLOCK_TOKENS) as usize..=last] {
            // Marking blocks with the step's number needs no clearing between steps.
            let written = std::mem::replace(&mut self.written[block as usize], self.step);
            if written == self.step {
                return Err(PlanFault::BlockShared { block });
            }
        }
        Ok(())
    }

    fn lay_out_span(&mut self, span: &Span<'_>) -> Result<(), BackendError> {
        let first = self.tokens.len() as u32;
        let count = span.tokens.len() as u32;
        // Blocks that the sequence reserved for later are not uploaded.
        let read = span.end().div_ceil(u64::from(BLOCK_TOKENS)) as usize;
        if self.blocks.len() + read > self.most_blocks {
            let most = self.most_blocks;
            return Err(BackendError::Device(format!(
                "the block tables of one step have more than {most} entries"
            )));
        }
        let table = self.blocks.len() as u32;
        self.blocks.extend_from_slice(&span.blocks[..read]);
        for (position, &id) in (span.start..).zip(span.tokens) {
            let block = span.blocks[(position / BLOCK_TOKENS) as usize];
            self.tokens.push(id);
            self.positions.push(position);
            self.slots.push(block * BLOCK_TOKENS + position % BLOCK_TOKENS);
        }
        // Prefill tiles have room for 64 rows; a single token would waste most of them.
        if count == 1 && self.has_decode_kernel {
            self.decodes.push([first, 1, span.start, table]);
            self.longest_decode = self.longest_decode.max(span.start + 1);
        } else {
            for offset in (0..count).step_by(self.tile as usize) {
                let tokens = (count - offset).min(self.tile);
                self.prefills.push([first + offset, tokens, span.start + offset, table]);
            }
        }
        match span.logits {
            LogitRows::None => {}
            LogitRows::Last => self.logit_rows.push(first + count - 1),
            LogitRows::All => self.logit_rows.extend(first..first + count),
        }
        Ok(())
    }

    /// Orders the tiles, longest context first. The device starts tiles in this order,
    /// and a tile's time grows with its context; starting with the longest leaves
    /// little to wait for at the end. Ties are ordered by row, so that a step is always
    /// laid out the same.
    fn order_prefills(&mut self) {
        self.prefills
            .sort_unstable_by_key(|&[row, tokens, position, _]| (Reverse(position + tokens), row));
    }

    /// Writes every list into `to`, little endian, each at an offset that is aligned
    /// for wide loads.
    pub(super) fn pack(&self, to: &mut [u8]) -> PlanOffsets {
        let mut packer = Packer::new(to);
        let mut offsets = PlanOffsets {
            tokens: packer.list(&self.tokens),
            positions: packer.list(&self.positions),
            slots: packer.list(&self.slots),
            logit_rows: packer.list(&self.logit_rows),
            decodes: packer.list(self.decodes.as_flattened()),
            prefills: packer.list(self.prefills.as_flattened()),
            blocks: packer.list(&self.blocks),
            sources: packer.list(&self.sources),
            samples: self.samples.pack(&mut packer),
            end: 0,
        };
        offsets.end = packer.words();
        offsets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::capacity::ALIGNED_WORDS;

    fn layout() -> PlanLayout {
        PlanLayout::new(ROOM)
    }

    const ROOM: StepCapacity = StepCapacity {
        tokens: 64,
        logit_rows: 64,
        samples: 128,
        vocabulary: 500,
        context: 256,
        kv_blocks: 40,
        tile: 16,
        has_decode_kernel: true,
    };

    fn span<'a>(tokens: &'a [u32], start: u32, blocks: &'a [u32], logits: LogitRows) -> Span<'a> {
        Span { tokens, start, blocks, logits }
    }

    #[test]
    fn layout_holds_a_mixed_step() {
        let mut layout = layout();
        let prompt: Vec<u32> = (100..120).collect();
        let spans = [
            span(&[7], 33, &[5, 6, 9, 11], LogitRows::Last),
            span(&prompt, 15, &[1, 2, 3], LogitRows::Last),
            span(&[8, 9], 0, &[4], LogitRows::All),
            span(&[3], 0, &[20], LogitRows::None),
        ];
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
        assert_eq!(layout.decodes, [[0, 1, 33, 0], [23, 1, 0, 7]]);
        assert_eq!(layout.prefills, [[17, 4, 31, 3], [1, 16, 15, 3], [21, 2, 0, 6]]);
        // A table holds the blocks that are read, not blocks that are reserved for
        // later.
        assert_eq!(layout.blocks, [5, 6, 9, 1, 2, 3, 4, 20]);
        assert_eq!(layout.logit_rows, [0, 20, 21, 22]);
        assert_eq!(layout.slots[..3], [9 * 16 + 1, 16 + 15, 2 * 16]);
        assert_eq!(layout.positions[20], 34);
        assert_eq!(layout.longest_decode, 34);
        let mut bytes = vec![0; 4 * ROOM.words()];
        let offsets = layout.pack(&mut bytes);
        let word = |at: usize| u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().unwrap());
        assert_eq!(word(offsets.tokens), 7);
        assert_eq!(word(offsets.slots + 1), 31);
        assert_eq!(word(offsets.prefills + 4), 1);
        assert_eq!(word(offsets.blocks + 7), 20);
        assert_eq!(offsets.sources, offsets.blocks + 8);
        for place in [offsets.positions, offsets.slots, offsets.decodes, offsets.blocks] {
            assert!(place.is_multiple_of(ALIGNED_WORDS));
        }
    }

    #[test]
    fn layout_holds_the_largest_step() {
        let capacity = StepCapacity { kv_blocks: 64 * 16, tile: 2, ..ROOM };
        let mut layout = PlanLayout::new(capacity);
        let tables: Vec<Vec<u32>> = (0..64).map(|i| (i * 16..(i + 1) * 16).collect()).collect();
        let spans: Vec<Span<'_>> =
            tables.iter().map(|blocks| span(&[1], 255, blocks, LogitRows::Last)).collect();
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
        let mut bytes = vec![0; 4 * capacity.words()];
        assert!(layout.pack(&mut bytes).end <= capacity.words());
        let long: Vec<u32> = (0..64).collect();
        let spans = [span(&long, 0, &[0, 1, 2, 3], LogitRows::All)];
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
        assert_eq!(layout.prefills.len(), 32);
        assert!(layout.pack(&mut bytes).end <= capacity.words());
    }

    #[test]
    fn blocks_written_twice_are_refused() {
        let mut layout = layout();
        let spans =
            [span(&[1], 0, &[3], LogitRows::Last), span(&[1], 16, &[2, 3], LogitRows::Last)];
        let fault = layout.lay_out(&StepPlan::logits(&spans)).unwrap_err();
        assert!(matches!(
            fault,
            BackendError::Plan { span: 1, reason: PlanFault::BlockShared { block: 3 } }
        ));
        // Two sequences may read the same block: it was written before this step.
        let spans =
            [span(&[1], 16, &[3, 4], LogitRows::Last), span(&[1], 16, &[3, 5], LogitRows::Last)];
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
    }
}
