//! Decoding token by token. Only whole characters go out: a character of several
//! tokens waits for its last byte.

use std::sync::Arc;

use crate::Tokenizer;

/// A decoder of one growing sequence of tokens.
///
/// The results of `push` and `finish` together are the text that
/// [`Tokenizer::decode`] returns for all the tokens.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    /// The first bytes of an incomplete character, at most 3.
    pending: Vec<u8>,
    /// The number of leading spaces to drop; 0 after the first other character.
    strip_spaces: usize,
    /// Control tokens that count as text.
    shown: Arc<[u32]>,
}

impl TextStream {
    /// Makes a stream that has no tokens yet.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self::showing(tokenizer, Arc::default())
    }

    /// Makes a stream that has no tokens yet. The control tokens `shown` become their text,
    /// because they mark the parts of an answer.
    pub fn showing(tokenizer: Arc<Tokenizer>, shown: Arc<[u32]>) -> Self {
        let strip_spaces = tokenizer.leading_spaces();
        Self { tokenizer, pending: Vec::new(), strip_spaces, shown }
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Takes the next token; returns the characters that are complete now. A
    /// control token that is not shown and an id beyond the vocabulary add nothing.
    pub fn push(&mut self, id: u32) -> String {
        let mut bytes = match self.shown.contains(&id) {
            true => self.tokenizer.token_bytes(id),
            false => self.tokenizer.text_bytes(id),
        };
        while let (1.., Some((&first, rest))) = (self.strip_spaces, bytes.split_first()) {
            // After the first other character, spaces belong to the text.
            if first != b' ' {
                self.strip_spaces = 0;
                break;
            }
            bytes = rest;
            self.strip_spaces -= 1;
        }
        self.pending.extend_from_slice(bytes);
        let (text, whole) = whole_characters(&self.pending);
        self.pending.drain(..whole);
        text
    }

    /// Ends the sequence; returns what an incomplete last character leaves.
    pub fn finish(&mut self) -> String {
        let pending = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&pending).into_owned()
    }
}

/// Returns the text at the front of `bytes` that later bytes cannot change, and its
/// length in bytes. Bytes that cannot be UTF-8 become U+FFFD.
fn whole_characters(bytes: &[u8]) -> (String, usize) {
    let (mut text, mut at) = (String::new(), 0);
    while at < bytes.len() {
        match std::str::from_utf8(&bytes[at..]) {
            Ok(rest) => {
                text.push_str(rest);
                at = bytes.len();
            }
            Err(error) => {
                let valid = &bytes[at..at + error.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                at += valid.len();
                // Without a length, the error is an incomplete character at the end.
                let Some(broken) = error.error_len() else { break };
                text.push(char::REPLACEMENT_CHARACTER);
                at += broken;
            }
        }
    }
    (text, at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::whole_characters;

    #[test]
    fn text_stream_waits_for_whole_characters() {
        for (bytes, text, whole) in [
            (&b""[..], "", 0),
            (b"ab", "ab", 2),
            ("aé".as_bytes(), "aé", 3),
            (b"a\xc3", "a", 1),
            (b"\xf0\x9f\x99", "", 0),
            (b"\xf0\x9fx", "\u{fffd}x", 3),
            (b"\x80\x80", "\u{fffd}\u{fffd}", 2),
        ] {
            assert_eq!(whole_characters(bytes), (text.to_owned(), whole), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn whole_characters_do_not_depend_on_pieces(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..20),
        ) {
            let (mut pending, mut out) = (Vec::new(), String::new());
            for piece in &pieces {
                pending.extend_from_slice(piece);
                let (text, whole) = whole_characters(&pending);
                pending.drain(..whole);
                prop_assert!(pending.len() <= 3);
                out.push_str(&text);
            }
            out.push_str(&String::from_utf8_lossy(&pending));
            let whole = pieces.concat();
            prop_assert_eq!(out, String::from_utf8_lossy(&whole));
        }
    }
}
