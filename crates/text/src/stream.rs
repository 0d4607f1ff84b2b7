//! Decoding token by token. Only whole characters go out; a character that
//! several tokens spell waits for its last byte.

use std::sync::Arc;

use crate::Tokenizer;

/// The text of one sequence of tokens, as it grows.
///
/// What `push` and `finish` return, put together, is what
/// [`Tokenizer::decode`] says of all the tokens.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    /// The beginning of a character, at most 3 bytes.
    pending: Vec<u8>,
    /// Leading spaces still to drop; 0 once a character came.
    strip_spaces: usize,
}

impl TextStream {
    /// A stream at its beginning.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let strip_spaces = tokenizer.leading_spaces();
        Self { tokenizer, pending: Vec::new(), strip_spaces }
    }

    /// Takes the next token; returns the characters that are whole now. A
    /// control token adds nothing, nor does an id beyond the vocabulary.
    pub fn push(&mut self, id: u32) -> String {
        let mut bytes = self.tokenizer.text_bytes(id);
        while let (1.., Some((&first, rest))) = (self.strip_spaces, bytes.split_first()) {
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

    /// The sequence has ended: what a broken last character leaves.
    pub fn finish(&mut self) -> String {
        let pending = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&pending).into_owned()
    }
}

/// The text at the front of `bytes` up to where more bytes could change it,
/// and how many bytes that is. What can never be UTF-8 becomes U+FFFD.
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
    fn waits_for_whole_characters() {
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
        fn pieces_say_what_the_whole_says(
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
