//! How much a step's plan may be, and how its lists become words: what is known
//! of a plan before there is one.

use super::kernels::SampleRow;
use crate::backend::BLOCK_TOKENS;
use crate::sample::MAX_LOGIT_BIAS;

/// The most that a layout must hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Tokens of a step.
    pub(super) tokens: usize,
    /// Rows of logits of a step.
    pub(super) logit_rows: usize,
    /// Draws of a step.
    pub(super) draws: usize,
    /// Tokens that a row of logits speaks of.
    pub(super) vocabulary: u32,
    /// Tokens of a sequence.
    pub(super) context: u32,
    /// KV blocks of the pool.
    pub(super) kv_blocks: u32,
    /// Tokens of a tile of prefill.
    pub(super) tile: u32,
    /// Whether single tokens are attended to by a kernel of their own.
    pub(super) decodes_apart: bool,
}

impl Room {
    /// Entries of all block tables of one step.
    pub(super) fn blocks(&self) -> usize {
        let longest = self.context.div_ceil(BLOCK_TOKENS) as usize;
        self.tokens.saturating_mul(longest).min(MOST_BLOCKS)
    }

    /// Words of a packed step.
    pub(super) fn words(&self) -> usize {
        let lists = 5 * self.tokens + 2 * 4 * self.tokens;
        let choices = CHOICE_WORDS * self.draws + 2 * self.biases() + 2 * self.counts();
        lists + self.blocks() + choices + 13 * ALIGNED_WORDS
    }

    /// Entries of `logit_bias` of all requests in one step.
    pub(super) fn biases(&self) -> usize {
        MAX_LOGIT_BIAS * self.logit_rows
    }

    /// Tokens generated before, over all choices: those in the cache, and one
    /// more of each.
    pub(super) fn counts(&self) -> usize {
        (self.kv_blocks * BLOCK_TOKENS) as usize + self.draws
    }
}

/// Lists, one behind the other.
pub(super) struct Packer<'a> {
    to: &'a mut [u8],
    words: usize,
}

impl<'a> Packer<'a> {
    pub(super) fn new(to: &'a mut [u8]) -> Self {
        Self { to, words: 0 }
    }

    /// How many there are so far.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Writes a list, and says where it begins.
    pub(super) fn list(&mut self, list: &[u32]) -> usize {
        let start = self.words.next_multiple_of(ALIGNED_WORDS);
        let bytes = &mut self.to[4 * start..4 * (start + list.len())];
        for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(list) {
            *to = word.to_le_bytes();
        }
        self.words = start + list.len();
        start
    }
}

/// 16 bytes: what one thread moves at once.
pub(super) const ALIGNED_WORDS: usize = 4;
/// 64 MiB of block tables in one step.
const MOST_BLOCKS: usize = 16 << 20;
/// Words of a [`SampleRow`].
pub(super) const CHOICE_WORDS: usize = size_of::<SampleRow>() / 4;
