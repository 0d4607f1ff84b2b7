//! A tokenizer with two rules of its own: a caller's text never becomes a control
//! token, and decoding works on bytes.

use std::fmt;
use std::panic::catch_unwind;

use tokenizers::models::ModelWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{
    Encoding, Model, OffsetType, PreTokenizer, Tokenizer as HfTokenizer, TruncationDirection,
};

use crate::TextError;
use crate::control::{ControlToken, ControlTokens, Found};
use crate::pieces::Pieces;

/// The tokenizer that a model's `tokenizer.json` describes.
pub struct Tokenizer {
    inner: HfTokenizer,
    /// The pre-tokenizer of text that is not at the start of the input; `None` if
    /// the same one applies everywhere.
    inside: Option<PreTokenizerWrapper>,
    control: ControlTokens,
    // An array, because every decoded token is looked up.
    is_control: Vec<bool>,
    pieces: Pieces,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// The file is damaged, is not a tokenizer, or has a decoder that cannot be
    /// streamed.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        // The library panics at some malformed files, either while it reads them or
        // at the first text. The file comes from outside, so this must be an error
        // and not the end of a thread.
        let made = catch_unwind(|| {
            let tokenizer = Self::read(bytes)?;
            // An ordinary encoding error is fine here; requests report it.
            let _ = tokenizer.encode(PROBE);
            Ok(tokenizer)
        });
        made.unwrap_or_else(|_| Err(TextError::Tokenizer("it is malformed".to_owned())))
    }

    fn read(bytes: &[u8]) -> Result<Self, TextError> {
        let mut inner = HfTokenizer::from_bytes(bytes)
            .map_err(|error| TextError::Tokenizer(error.to_string()))?;
        // A prompt must not be cut or padded without the caller's knowledge.
        inner.with_truncation(None).map_err(|error| TextError::Tokenizer(error.to_string()))?;
        inner.with_padding(None);
        // From here on the library treats the text of a control token as plain text.
        inner.set_encode_special_tokens(true);
        // A word cache shared by all callers would reveal the words of one caller
        // to another by their timing.
        disable_word_cache(&mut inner);
        let pieces = Pieces::new(&inner)?;
        let control = ControlTokens::new(control_tokens(&inner));
        let mut is_control = vec![false; pieces.len()];
        for id in control.ids() {
            is_control[id as usize] = true;
        }
        let inside = inner.get_pre_tokenizer().and_then(inside_variant);
        Ok(Self { inner, inside, control, is_control, pieces })
    }

    /// Encodes a caller's text. No part of the text becomes a control token.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_marked(text, &[], usize::MAX)
    }

    /// Encodes a caller's text as a whole prompt: like [`encode`](Self::encode), and
    /// with the tokens that the tokenizer adds to every input, such as a begin
    /// token. Stops soon after `most` tokens.
    ///
    /// # Errors
    /// [`TextError::TooLong`] if the prompt has more than `most` tokens;
    /// [`TextError::Encode`] if the tokenizer fails.
    pub fn encode_prompt(&self, text: &str, most: usize) -> Result<Vec<u32>, TextError> {
        let encoding = self.encode_span(text, 0..text.len(), most)?;
        let encoding = self.inner.post_process(encoding, None, true).map_err(encode_error)?;
        within(encoding.get_ids().to_vec(), most)
    }

    /// Encodes `text` with control tokens exactly at `marks`. The marks must be in
    /// order and must not overlap. Stops soon after `most` tokens.
    pub(crate) fn encode_marked(
        &self,
        text: &str,
        marks: &[Found],
        most: usize,
    ) -> Result<Vec<u32>, TextError> {
        // Tokens of common text have three to four bytes.
        let mut ids = Vec::with_capacity((text.len() / 3 + marks.len()).min(most));
        let mut at = 0;
        for mark in marks {
            self.encode_piece(text, at..mark.span.start, (&mut ids, most))?;
            ids.push(mark.id);
            at = mark.span.end;
        }
        self.encode_piece(text, at..text.len(), (&mut ids, most))?;
        within(ids, most)
    }

    /// Encodes the text between two control tokens to the end of `ids`.
    fn encode_piece(
        &self,
        text: &str,
        span: std::ops::Range<usize>,
        (ids, most): (&mut Vec<u32>, usize),
    ) -> Result<(), TextError> {
        if ids.len() > most {
            return Err(TextError::TooLong { at_least: ids.len() });
        }
        if !span.is_empty() {
            let encoding = self.encode_span(text, span, most - ids.len())?;
            ids.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }

    /// Encodes a part of `text` as the library does it. The result has more than
    /// `most` tokens only if the part has; it may then lack the tokens after these.
    fn encode_span(
        &self,
        text: &str,
        span: std::ops::Range<usize>,
        most: usize,
    ) -> Result<Encoding, TextError> {
        let pre_tokenizer = match &self.inside {
            Some(inside) if span.start > 0 => Some(inside),
            _ => self.inner.get_pre_tokenizer(),
        };
        let mut piece = self
            .inner
            .get_added_vocabulary()
            .extract_and_normalize(self.inner.get_normalizer(), &text[span]);
        if let Some(pre_tokenizer) = pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut piece).map_err(encode_error)?;
        }
        // The library stops between two words once it has this many tokens. Every token
        // that it gives is one of the whole text, so the count is never too large.
        let limit = Some((most.saturating_add(1), TruncationDirection::Right));
        self.inner.get_model().tokenize_in_pretokenized(&mut piece, limit).map_err(encode_error)?;
        piece.into_encoding(None, 0, OffsetType::None).map_err(encode_error)
    }

    /// Returns the text of `ids`. Control tokens are left out; bytes that are not
    /// UTF-8 become U+FFFD. A [`TextStream`](crate::TextStream) gives the same text
    /// in pieces.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.text_bytes(id)).copied().collect();
        // Sentencepiece adds leading spaces that are not part of the text.
        let spaces = bytes.iter().take(self.pieces.strip_spaces).take_while(|&&b| b == b' ');
        String::from_utf8_lossy(&bytes[spaces.count()..]).into_owned()
    }

    /// Returns the bytes of token `id`, also of a control token; none for an id
    /// beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// Returns the bytes that `id` adds to a decoded text.
    pub(crate) fn text_bytes(&self, id: u32) -> &[u8] {
        if self.is_control(id) { &[] } else { self.pieces.bytes(id) }
    }

    pub(crate) fn leading_spaces(&self) -> usize {
        self.pieces.strip_spaces
    }

    /// True if `id` is a control token, which `tokenizer.json` calls `special`.
    pub fn is_control(&self, id: u32) -> bool {
        self.is_control.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns the id of the token with the text `text`, such as `<|im_end|>`.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Returns the largest token id plus one: the number of rows that a model's
    /// embedding needs.
    pub fn vocabulary_size(&self) -> usize {
        self.pieces.len()
    }

    pub(crate) fn control(&self) -> &ControlTokens {
        &self.control
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocabulary_size", &self.vocabulary_size()).finish()
    }
}

/// A text with letters, digits, spaces and characters of several bytes.
const PROBE: &str = "A probe, 1 of 2: \u{e9}\u{4e2d}\u{1f642}\n\n <s> end";

/// Returns `ids` unless there are more than `most`.
fn within(ids: Vec<u32>, most: usize) -> Result<Vec<u32>, TextError> {
    if ids.len() > most { Err(TextError::TooLong { at_least: ids.len() }) } else { Ok(ids) }
}

fn encode_error(error: tokenizers::Error) -> TextError {
    TextError::Encode(error.to_string())
}

fn control_tokens(tokenizer: &HfTokenizer) -> Vec<ControlToken> {
    tokenizer
        .get_added_vocabulary()
        .get_added_tokens_decoder()
        .iter()
        .filter(|(_, token)| token.special)
        .map(|(&id, token)| ControlToken {
            id,
            text: token.content.clone(),
            strip_left: token.lstrip,
            strip_right: token.rstrip,
            single_word: token.single_word,
        })
        .collect()
}

/// Returns the variant of a pre-tokenizer for text after a control token, or
/// `None` if there is no difference. A Metaspace that adds a space before the first
/// word alone must not add one there.
fn inside_variant(pre_tokenizer: &PreTokenizerWrapper) -> Option<PreTokenizerWrapper> {
    match pre_tokenizer {
        PreTokenizerWrapper::Metaspace(metaspace)
            if metaspace.prepend_scheme == PrependScheme::First =>
        {
            let mut metaspace = metaspace.clone();
            metaspace.set_prepend_scheme(PrependScheme::Never);
            Some(PreTokenizerWrapper::Metaspace(metaspace))
        }
        PreTokenizerWrapper::Sequence(sequence) => {
            let mut changed = false;
            let mut sequence = sequence.clone();
            for step in sequence.as_mut() {
                if let Some(variant) = inside_variant(step) {
                    *step = variant;
                    changed = true;
                }
            }
            changed.then_some(PreTokenizerWrapper::Sequence(sequence))
        }
        _ => None,
    }
}

fn disable_word_cache(tokenizer: &mut HfTokenizer) {
    // The library gives no mutable access to its model, so a changed copy replaces it.
    let mut model = tokenizer.get_model().clone();
    match &mut model {
        ModelWrapper::BPE(bpe) => bpe.resize_cache(0),
        ModelWrapper::Unigram(unigram) => unigram.resize_cache(0),
        ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => {}
    }
    tokenizer.with_model(model);
}
