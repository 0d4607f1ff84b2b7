//! Filling in the middle: a text with a gap as tokens, for models that were trained on it.

use crate::prompt::TextWithGap;
use crate::{TextError, Tokenizer};

/// The tokens of a model around the text before a gap and the text after the gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfillTokens {
    /// The token before the text that stands before the gap.
    prefix: u32,
    /// The token before the text that stands after the gap.
    suffix: u32,
    /// The token after which the model writes the text of the gap.
    middle: u32,
}

impl InfillTokens {
    /// Finds the tokens; `None` if the tokenizer has none, so its model cannot fill a gap.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        SPELLINGS.iter().find_map(|[prefix, suffix, middle]| {
            Some(Self {
                prefix: tokenizer.token_id(prefix)?,
                suffix: tokenizer.token_id(suffix)?,
                middle: tokenizer.token_id(middle)?,
            })
        })
    }

    /// Encodes a text with a gap as a prompt. The answer is the text of the gap. Stops soon
    /// after `most` tokens.
    ///
    /// # Errors
    /// [`TextError::TooLong`] if the prompt has more than `most` tokens;
    /// [`TextError::Encode`] if the tokenizer fails.
    pub fn encode(
        self,
        tokenizer: &Tokenizer,
        text: TextWithGap<'_>,
        most: usize,
    ) -> Result<Vec<u32>, TextError> {
        let TextWithGap { before, after } = text;
        let mut ids = vec![self.prefix];
        // Without marks, so that the caller's text never becomes a control token.
        ids.extend(tokenizer.encode_marked(before, &[], most)?);
        ids.push(self.suffix);
        ids.extend(tokenizer.encode_marked(after, &[], most)?);
        ids.push(self.middle);
        if ids.len() > most { Err(TextError::TooLong { at_least: ids.len() }) } else { Ok(ids) }
    }
}

/// The spellings of the three tokens: those of Qwen's models, and those of StarCoder's, which
/// other models use, too.
const SPELLINGS: [[&str; 3]; 2] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
];
