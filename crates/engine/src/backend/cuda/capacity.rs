//! The largest plan of a step, and the packing of its lists into words. Both are known
//! before the first plan.

use super::kernels::SampleRow;
use crate::backend::BLOCK_TOKENS;
use crate::sample::MAX_LOGIT_BIAS;

/// The most that a step's plan can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCapacity {
    /// Tokens of a step.
    pub(super) tokens: usize,
    /// Rows of logits of a step.
    pub(super) logit_rows: usize,
    /// Samples of a step.
    pub(super) samples: usize,
    /// Tokens of the vocabulary.
    pub(super) vocabulary: u32,
    /// Tokens of a sequence.
    pub(super) context: u32,
    /// KV blocks of the pool.
    pub(super) kv_blocks: u32,
    /// Tokens of a prefill tile.
    pub(super) tile: u32,
    /// True if single tokens have an attention kernel of their own.
    pub(super) has_decode_kernel: bool,
}

impl StepCapacity {
    /// Returns the entries of all block tables of one step.
    pub(super) fn blocks(&self) -> usize {
        let longest = self.context.div_ceil(BLOCK_TOKENS) as usize;
        self.tokens.saturating_mul(longest).min(MOST_BLOCKS)
    }

    /// Returns the words of a packed step.
    pub(super) fn words(&self) -> usize {
        // Five lists have a word for each token, and two have four words.
        let lists = 5 * self.tokens + 2 * 4 * self.tokens;
        let samples = SAMPLE_WORDS * self.samples
            + 2 * self.biases()
            + 2 * self.counts()
            + self.prompt_tokens()
            + self.mask_words();
        // Each of the 15 lists may begin behind a gap.
        lists + self.blocks() + samples + 15 * ALIGNED_WORDS
    }

    /// Returns the entries of `logit_bias` over all requests of a step.
    pub(super) fn biases(&self) -> usize {
        MAX_LOGIT_BIAS * self.logit_rows
    }

    /// Returns the counted tokens over all choices: those in the cache, and one more
    /// for each sample.
    pub(super) fn counts(&self) -> usize {
        (self.kv_blocks * BLOCK_TOKENS) as usize + self.samples
    }

    /// Returns the words of the masks of all samples.
    pub(super) fn mask_words(&self) -> usize {
        self.words_of_mask() * self.samples
    }

    /// Returns the words of one mask: a bit for each token.
    pub(super) fn words_of_mask(&self) -> usize {
        self.vocabulary.div_ceil(u32::BITS) as usize
    }

    /// Distinct tokens of all prompts, each prompt's counted once for all its
    /// choices: at most the tokens in the cache.
    pub(super) fn prompt_tokens(&self) -> usize {
        (self.kv_blocks * BLOCK_TOKENS) as usize
    }
}

/// A writer of lists of words, one list after the other.
pub(super) struct Packer<'a> {
    to: &'a mut [u8],
    words: usize,
}

impl<'a> Packer<'a> {
    pub(super) fn new(to: &'a mut [u8]) -> Self {
        Self { to, words: 0 }
    }

    /// Returns the number of words written so far.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Writes a list and returns its offset, words.
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

/// The alignment of a list: 16 bytes, the most that one thread moves at once.
pub(super) const ALIGNED_WORDS: usize = 4;
/// The most entries of block tables in one step, which take 64 MiB.
const MOST_BLOCKS: usize = 16 << 20;
/// Words of a [`SampleRow`].
pub(super) const SAMPLE_WORDS: usize = size_of::<SampleRow>() / 4;
