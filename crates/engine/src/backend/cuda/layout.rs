//! A step's plan as the kernels read it: one piece of words, one copy.
//!
//! Single tokens are decoded, longer spans are cut into tiles of prefill; each
//! kind is one launch a layer, whatever the mix. Where results may not depend on
//! it, single tokens are prefill, too.

use std::cmp::Reverse;

use super::choices::{ChoicePlaces, Choices};
use super::kernels::NONE;
use super::room::{Packer, Room};
use crate::backend::{BLOCK_TOKENS, BackendError, LogitRows, PlanFault, Span, StepPlan};

/// A step laid out: every list is of whole words, in the order of spans unless
/// it says otherwise.
pub(super) struct Layout {
    /// Draws of the step before that become tokens; empty where none does.
    pub(super) sources: Vec<u32>,
    pub(super) choices: Choices,
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// Where each token's keys and values go: block * 16 + token of the block.
    pub(super) slots: Vec<u32>,
    /// Rows of tokens whose logits are wanted.
    pub(super) logit_rows: Vec<u32>,
    /// How many of them the plan wants; the others are nobody's.
    pub(super) rows_wanted: usize,
    /// Spans of one token: row, tokens, position, place in `blocks`.
    pub(super) decodes: Vec<[u32; 4]>,
    /// Tiles of longer spans, the same, those with the longest context first.
    pub(super) prefills: Vec<[u32; 4]>,
    /// Block tables, one behind the other.
    pub(super) blocks: Vec<u32>,
    /// The longest context of a single token, tokens.
    pub(super) longest_decode: u32,
    tile: u32,
    decodes_apart: bool,
    most_blocks: usize,
    /// For each KV block the last step that wrote to it.
    written: Vec<u64>,
    step: u64,
}

/// Where each list begins in the packed words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) tokens: usize,
    pub(super) positions: usize,
    pub(super) slots: usize,
    pub(super) logit_rows: usize,
    pub(super) decodes: usize,
    pub(super) prefills: usize,
    pub(super) blocks: usize,
    pub(super) sources: usize,
    pub(super) choices: ChoicePlaces,
    /// Words in all.
    pub(super) end: usize,
}

impl Layout {
    pub(super) fn new(room: Room) -> Self {
        let list = || Vec::with_capacity(room.tokens);
        Self {
            sources: list(),
            choices: Choices::new(&room),
            tokens: list(),
            positions: list(),
            slots: list(),
            logit_rows: list(),
            rows_wanted: 0,
            decodes: Vec::with_capacity(room.tokens),
            prefills: Vec::with_capacity(room.tokens),
            blocks: Vec::with_capacity(room.blocks()),
            longest_decode: 0,
            tile: room.tile.max(1),
            decodes_apart: room.decodes_apart,
            most_blocks: room.blocks(),
            written: vec![0; room.kv_blocks as usize],
            step: 0,
        }
    }

    /// Lays out a plan whose spans and draws have been checked one by one.
    ///
    /// # Errors
    /// [`PlanFault::BlockShared`] when two would write to one place;
    /// [`BackendError::Device`] when the block tables, or the lists of draws,
    /// are longer than any batch of this pool could make them.
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
        self.choices.lay_out(plan.results.samples())
    }

    /// Whether it is one token of each sequence, and a row of logits of each or
    /// of none: then steps of as many look alike.
    pub(super) fn only_decodes(&self) -> bool {
        let rows = self.logit_rows.len();
        self.prefills.is_empty() && (rows == self.decodes.len() || rows == 0)
    }

    /// Adds tokens of nobody until there are `tokens`: they are computed,
    /// written nowhere, and nothing reads them.
    pub(super) fn pad(&mut self, tokens: usize) {
        let has_rows = !self.logit_rows.is_empty();
        for row in self.tokens.len() as u32..tokens as u32 {
            self.tokens.push(0);
            self.positions.push(0);
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
        if count == 1 && self.decodes_apart {
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

    /// A device begins tiles in this order and each takes as long as its context:
    /// with the longest first, little is left to wait for at the end. By rows
    /// where they are equal, so that a step is laid out the same each time.
    fn order_prefills(&mut self) {
        self.prefills
            .sort_unstable_by_key(|&[row, tokens, position, _]| (Reverse(position + tokens), row));
    }

    /// Writes every list into `to`, little endian, each at a place aligned for
    /// wide reads.
    pub(super) fn pack(&self, to: &mut [u8]) -> Places {
        let mut packer = Packer::new(to);
        let mut places = Places {
            tokens: packer.list(&self.tokens),
            positions: packer.list(&self.positions),
            slots: packer.list(&self.slots),
            logit_rows: packer.list(&self.logit_rows),
            decodes: packer.list(self.decodes.as_flattened()),
            prefills: packer.list(self.prefills.as_flattened()),
            blocks: packer.list(&self.blocks),
            sources: packer.list(&self.sources),
            choices: self.choices.pack(&mut packer),
            end: 0,
        };
        places.end = packer.words();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::room::ALIGNED_WORDS;

    fn layout() -> Layout {
        Layout::new(ROOM)
    }

    const ROOM: Room = Room {
        tokens: 64,
        logit_rows: 64,
        draws: 128,
        vocabulary: 500,
        context: 256,
        kv_blocks: 40,
        tile: 16,
        decodes_apart: true,
    };

    fn span<'a>(tokens: &'a [u32], start: u32, blocks: &'a [u32], logits: LogitRows) -> Span<'a> {
        Span { tokens, start, blocks, logits }
    }

    #[test]
    fn lays_out_a_mixed_step() {
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
        // A table holds the blocks that are read, not those taken for later.
        assert_eq!(layout.blocks, [5, 6, 9, 1, 2, 3, 4, 20]);
        assert_eq!(layout.logit_rows, [0, 20, 21, 22]);
        assert_eq!(layout.slots[..3], [9 * 16 + 1, 16 + 15, 2 * 16]);
        assert_eq!(layout.positions[20], 34);
        assert_eq!(layout.longest_decode, 34);
        let mut bytes = vec![0; 4 * ROOM.words()];
        let places = layout.pack(&mut bytes);
        let word = |at: usize| u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().unwrap());
        assert_eq!(word(places.tokens), 7);
        assert_eq!(word(places.slots + 1), 31);
        assert_eq!(word(places.prefills + 4), 1);
        assert_eq!(word(places.blocks + 7), 20);
        assert_eq!(places.sources, places.blocks + 8);
        for place in [places.positions, places.slots, places.decodes, places.blocks] {
            assert!(place.is_multiple_of(ALIGNED_WORDS));
        }
    }

    #[test]
    fn the_fullest_step_fits() {
        let room = Room { kv_blocks: 64 * 16, tile: 2, ..ROOM };
        let mut layout = Layout::new(room);
        let tables: Vec<Vec<u32>> = (0..64).map(|i| (i * 16..(i + 1) * 16).collect()).collect();
        let spans: Vec<Span<'_>> =
            tables.iter().map(|blocks| span(&[1], 255, blocks, LogitRows::Last)).collect();
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
        let mut bytes = vec![0; 4 * room.words()];
        assert!(layout.pack(&mut bytes).end <= room.words());
        let long: Vec<u32> = (0..64).collect();
        let spans = [span(&long, 0, &[0, 1, 2, 3], LogitRows::All)];
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
        assert_eq!(layout.prefills.len(), 32);
        assert!(layout.pack(&mut bytes).end <= room.words());
    }

    #[test]
    fn nobody_writes_where_another_does() {
        let mut layout = layout();
        let spans =
            [span(&[1], 0, &[3], LogitRows::Last), span(&[1], 16, &[2, 3], LogitRows::Last)];
        let fault = layout.lay_out(&StepPlan::logits(&spans)).unwrap_err();
        assert!(matches!(
            fault,
            BackendError::Plan { span: 1, reason: PlanFault::BlockShared { block: 3 } }
        ));
        // Reading what another wrote before is sharing, and allowed.
        let spans =
            [span(&[1], 16, &[3, 4], LogitRows::Last), span(&[1], 16, &[3, 5], LogitRows::Last)];
        layout.lay_out(&StepPlan::logits(&spans)).unwrap();
    }
}
