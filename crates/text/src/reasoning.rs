//! Reasoning at the start of an answer, between `<think>` and `</think>`. The parser gives
//! the same parts for pieces of any size.

use crate::stop::overlap;

/// The marker that begins reasoning.
pub(crate) const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReasoningPiece {
    /// Reasoning.
    Reasoning(String),
    /// The answer proper.
    Content(String),
}

/// A parser of one answer.
#[derive(Clone, Debug)]
pub(crate) struct ReasoningParser {
    state: ReasoningState,
    /// Text that is not decided yet.
    held: String,
    /// Tokens of reasoning so far.
    tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReasoningState {
    /// Before the first word.
    Start,
    /// After the first marker, before the first word.
    Opened,
    Reasoning,
    /// After the last marker, before the first word.
    Closed,
    Content,
}

impl ReasoningParser {
    /// Makes a parser. `is_open` is true if the prompt ends with the first marker.
    pub(crate) fn new(is_open: bool) -> Self {
        let state = if is_open { ReasoningState::Opened } else { ReasoningState::Start };
        Self { state, held: String::new(), tokens: 0 }
    }

    /// Takes the next piece of the answer, which has `tokens` tokens; returns what is decided by
    /// it.
    pub(crate) fn push(&mut self, piece: &str, tokens: u32) -> Vec<ReasoningPiece> {
        let was_reasoning = self.is_reasoning();
        self.held.push_str(piece);
        let mut out = Vec::new();
        while self.step(&mut out) {}
        self.tokens += match (was_reasoning && self.is_reasoning(), piece.len() as u64) {
            (true, _) => u64::from(tokens),
            (false, 0) => 0,
            (false, length) => u64::from(tokens) * reasoning_bytes(&out).min(length) / length,
        };
        out
    }

    /// Returns the number of tokens of reasoning so far, without its markers. If one piece of
    /// several tokens has reasoning and a marker, its tokens are shared by bytes: a worker of
    /// an older version does not report the bytes of each token.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    fn is_reasoning(&self) -> bool {
        matches!(self.state, ReasoningState::Opened | ReasoningState::Reasoning)
    }

    /// Ends the answer; returns the text that was held back.
    pub(crate) fn finish(&mut self) -> Option<ReasoningPiece> {
        let held = std::mem::take(&mut self.held);
        match self.state {
            _ if held.is_empty() => None,
            // Line breaks around the markers belong to them.
            ReasoningState::Opened | ReasoningState::Closed => None,
            ReasoningState::Reasoning => {
                let text = held.trim_end_matches('\n');
                (!text.is_empty()).then(|| ReasoningPiece::Reasoning(text.to_owned()))
            }
            ReasoningState::Start | ReasoningState::Content => Some(ReasoningPiece::Content(held)),
        }
    }

    fn step(&mut self, out: &mut Vec<ReasoningPiece>) -> bool {
        if self.held.is_empty() {
            return false;
        }
        match self.state {
            ReasoningState::Start => {
                let word = self.held.trim_start();
                let space = self.held.len() - word.len();
                if word.starts_with(OPEN) {
                    self.held.drain(..space + OPEN.len());
                    self.state = ReasoningState::Opened;
                    return true;
                }
                // The rest of the marker may be on its way.
                if OPEN.starts_with(word) {
                    return false;
                }
                self.state = ReasoningState::Content;
                true
            }
            ReasoningState::Opened | ReasoningState::Closed => {
                let breaks = self.held.len() - self.held.trim_start_matches('\n').len();
                self.held.drain(..breaks);
                if self.held.is_empty() {
                    return false;
                }
                self.state = if self.state == ReasoningState::Opened {
                    ReasoningState::Reasoning
                } else {
                    ReasoningState::Content
                };
                true
            }
            ReasoningState::Reasoning => self.reasoning(out),
            ReasoningState::Content => {
                out.push(ReasoningPiece::Content(std::mem::take(&mut self.held)));
                false
            }
        }
    }

    fn reasoning(&mut self, out: &mut Vec<ReasoningPiece>) -> bool {
        let found = self.held.find(CLOSE);
        let end = found.unwrap_or_else(|| self.held.len() - overlap(&self.held, CLOSE));
        // The line breaks before a marker belong to it.
        let decided = self.held[..end].trim_end_matches('\n').len();
        if decided > 0 {
            out.push(ReasoningPiece::Reasoning(self.held[..decided].to_owned()));
        }
        match found {
            Some(at) => {
                self.held.drain(..at + CLOSE.len());
                self.state = ReasoningState::Closed;
                true
            }
            None => {
                self.held.drain(..decided);
                false
            }
        }
    }
}

/// Returns the bytes of reasoning in `pieces`.
fn reasoning_bytes(pieces: &[ReasoningPiece]) -> u64 {
    let bytes = pieces.iter().map(|piece| match piece {
        ReasoningPiece::Reasoning(text) => text.len() as u64,
        ReasoningPiece::Content(_) => 0,
    });
    bytes.sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns reasoning and content of an answer that comes in `pieces`.
    fn parts(is_open: bool, pieces: &[&str]) -> (String, String) {
        let mut parser = ReasoningParser::new(is_open);
        let mut found: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece, 1)).collect();
        found.extend(parser.finish());
        let (mut reasoning, mut content) = (String::new(), String::new());
        for piece in found {
            match piece {
                ReasoningPiece::Reasoning(text) => {
                    assert!(content.is_empty(), "reasoning comes first");
                    reasoning.push_str(&text);
                }
                ReasoningPiece::Content(text) => content.push_str(&text),
            }
        }
        (reasoning, content)
    }

    #[test]
    fn reasoning_stands_between_its_markers() {
        for (is_open, text, reasoning, content) in [
            (false, "Hello", "", "Hello"),
            (false, "<think>\nWhy?\n\nSo.\n</think>\n\nHello", "Why?\n\nSo.", "Hello"),
            (false, "\n<think></think>Hello", "", "Hello"),
            (false, "Say <think>x</think>", "", "Say <think>x</think>"),
            (false, "  <thin", "", "  <thin"),
            (false, "<think>cut off</thi", "cut off</thi", ""),
            (true, "Why?\n</think>\n\n a <think>", "Why?", " a <think>"),
            (true, "\nWhy? <think> </think>", "Why? <think> ", ""),
        ] {
            let expected = (reasoning.to_owned(), content.to_owned());
            assert_eq!(parts(is_open, &[text]), expected, "{text:?}");
        }
    }

    #[test]
    fn tokens_between_the_markers_are_counted() {
        for (is_open, pieces, expected) in [
            (false, &["<think>", "\n", "Why", "?", "\n", "</think>", "\n\n", "So", "."][..], 4),
            (false, &["<th", "ink>", "Why", "</", "think>", "So"], 2),
            (true, &["\n", "Why", "?", "</think>", "So"], 3),
            (true, &["cut", " off"], 2),
            (false, &["Hello", "<think>", "x"], 0),
            (false, &["<think>", "</think>", "Hello"], 0),
        ] {
            let mut parser = ReasoningParser::new(is_open);
            pieces.iter().for_each(|piece| drop(parser.push(piece, 1)));
            assert_eq!(parser.tokens(), expected, "{pieces:?}");
        }
        // A slow reader gets many tokens at once.
        let mut parser = ReasoningParser::new(false);
        parser.push("<think>Why? Why?</think>Because.", 8);
        assert_eq!(parser.tokens(), 2, "9 of 32 bytes");
    }

    proptest! {
        #[test]
        fn reasoning_does_not_depend_on_pieces(
            pieces in prop::collection::vec("(<think>|</think>|<|th|ink>|/|\n|[aé ]){0,4}", 0..8),
            is_open in any::<bool>(),
        ) {
            let whole = pieces.concat();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(parts(is_open, &pieces), parts(is_open, &[&whole]));
        }
    }
}
