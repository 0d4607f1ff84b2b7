//! The bytes of each token, computed once when a tokenizer is loaded. Decoding is
//! then a concatenation, so a stream never decodes a token twice.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::Tokenizer as HfTokenizer;

use crate::TextError;

/// The bytes of all tokens in one allocation.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// The end of each token in `bytes`. A token begins where the one before ends.
    ends: Vec<u32>,
    /// The number of spaces to drop from the front of a decoded text. Sentencepiece
    /// adds one there that is not part of the text.
    pub(crate) strip_spaces: usize,
}

/// The way in which a tokenizer writes bytes as the text of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Alphabet {
    /// True if every byte is a printable character, as in GPT-2.
    byte_level: bool,
    /// The character that stands for a space, as in sentencepiece.
    space: Option<char>,
    /// True if a text such as `<0x0A>` stands for a byte.
    byte_fallback: bool,
    strip_spaces: usize,
}

impl Pieces {
    /// Computes the bytes of all tokens.
    ///
    /// # Errors
    /// The decoder is of a kind that cannot be streamed.
    pub(crate) fn new(tokenizer: &HfTokenizer) -> Result<Self, TextError> {
        let decoder = serde_json::to_value(tokenizer.get_decoder())
            .map_err(|error| TextError::Tokenizer(error.to_string()))?;
        let mut alphabet = Alphabet::default();
        alphabet.read(&decoder)?;
        let unprintable = byte_level_alphabet();
        let vocabulary = tokenizer.get_vocab(true);
        // Ids may have gaps; a missing id stands for no bytes.
        let size = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        let mut texts: Vec<&str> = vec![""; size];
        for (text, &id) in &vocabulary {
            texts[id as usize] = text;
        }
        let mut pieces = Self {
            bytes: Vec::with_capacity(texts.iter().map(|text| text.len()).sum()),
            ends: Vec::with_capacity(size),
            strip_spaces: alphabet.strip_spaces,
        };
        for text in texts {
            alphabet.write(text, &unprintable, &mut pieces.bytes);
            let end = u32::try_from(pieces.bytes.len())
                .map_err(|_| TextError::Tokenizer("the vocabulary is larger than 4 GiB".into()))?;
            pieces.ends.push(end);
        }
        Ok(pieces)
    }

    /// Returns the bytes of `id`; none for an id beyond the vocabulary.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..end as usize]
    }

    /// Returns the largest id plus one.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }
}

impl Alphabet {
    fn read(&mut self, decoder: &Value) -> Result<(), TextError> {
        let kind = decoder.get("type").and_then(Value::as_str).unwrap_or("null");
        match kind {
            "ByteLevel" => self.byte_level = true,
            "Metaspace" => {
                let replacement = decoder.get("replacement").and_then(Value::as_str);
                // U+2581 is the replacement that sentencepiece uses.
                self.space = Some(replacement.and_then(|r| r.chars().next()).unwrap_or('\u{2581}'));
                if decoder.get("prepend_scheme").and_then(Value::as_str) != Some("never") {
                    self.strip_spaces = 1;
                }
            }
            "Replace" => {
                let pattern = decoder.pointer("/pattern/String").and_then(Value::as_str);
                let mut characters = pattern.unwrap_or_default().chars();
                match (characters.next(), characters.next(), decoder.get("content")) {
                    (Some(c), None, Some(content)) if content == " " => self.space = Some(c),
                    _ => {
                        return Err(TextError::Decoder(
                            "Replace of anything but one character by a space".into(),
                        ));
                    }
                }
            }
            "ByteFallback" => self.byte_fallback = true,
            // Fuse joins pieces, which concatenation of bytes does anyway.
            "Fuse" => {}
            "Strip" => {
                let number = |name| decoder.get(name).and_then(Value::as_u64).unwrap_or(0);
                // A stream cannot strip the end of a text that it does not know yet.
                if decoder.get("content").is_none_or(|c| c != " ") || number("stop") != 0 {
                    return Err(TextError::Decoder("Strip of anything but leading spaces".into()));
                }
                // Bounded, because the file comes from outside.
                self.strip_spaces = number("start").min(64) as usize;
            }
            "Sequence" => {
                let steps = decoder.get("decoders").and_then(Value::as_array);
                for step in steps.into_iter().flatten() {
                    self.read(step)?;
                }
            }
            other => return Err(TextError::Decoder(other.to_owned())),
        }
        Ok(())
    }

    fn write(&self, text: &str, unprintable: &HashMap<char, u8>, out: &mut Vec<u8>) {
        if self.byte_level {
            let start = out.len();
            for c in text.chars() {
                let Some(&byte) = unprintable.get(&c) else {
                    // An added token is plain text and not in the alphabet.
                    out.truncate(start);
                    out.extend_from_slice(text.as_bytes());
                    return;
                };
                out.push(byte);
            }
            return;
        }
        if let Some(byte) = fallback_byte(text).filter(|_| self.byte_fallback) {
            out.push(byte);
            return;
        }
        let mut utf8 = [0; 4];
        for c in text.chars() {
            let c = if Some(c) == self.space { ' ' } else { c };
            out.extend_from_slice(c.encode_utf8(&mut utf8).as_bytes());
        }
    }
}

/// Returns the byte that the text `<0xNN>` stands for.
fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Returns GPT-2's alphabet: a printable byte is its own character, and the other
/// bytes are the characters from U+0100 on, in order.
#[expect(
    clippy::expect_used,
    reason = "fewer than 256 letters from 256 on are below the surrogates"
)]
fn byte_level_alphabet() -> HashMap<char, u8> {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    (0..=u8::MAX)
        .map(|byte| {
            if prints(byte) {
                return (char::from(byte), byte);
            }
            let c = char::from_u32(next).expect("below the surrogates");
            next += 1;
            (c, byte)
        })
        .collect()
}
