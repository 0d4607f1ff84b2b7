//! The control tokens of a tokenizer, and the search for them in a text.
//!
//! The tokenizer itself does not do this search, because the text of a control
//! token counts as one only if the template wrote it.

use std::ops::Range;

/// A control token as the tokenizer declares it.
#[derive(Clone, Debug)]
pub(crate) struct ControlToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    /// True if the token includes the white space before it.
    pub(crate) strip_left: bool,
    /// True if the token includes the white space after it.
    pub(crate) strip_right: bool,
    /// True if the token is found only where no letter or digit touches it.
    pub(crate) single_word: bool,
}

/// The place of a control token in a text, with the white space it includes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) id: u32,
    pub(crate) span: Range<usize>,
}

/// All control tokens as a trie over bytes. The search takes linear time in the
/// text; the longest token at a place wins.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControlTokens {
    tokens: Vec<ControlToken>,
    nodes: Vec<Node>,
    /// The distinct first characters of all tokens; there are only a few.
    first: Vec<char>,
    /// The texts of all tokens, with a character between them that no word has.
    joined: String,
    /// True if a token begins or ends with a character of a word.
    has_open_end: bool,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// The children, sorted by byte.
    next: Vec<(u8, u32)>,
    token: Option<u32>,
}

impl ControlTokens {
    pub(crate) fn new(tokens: Vec<ControlToken>) -> Self {
        let mut nodes = vec![Node::default()];
        for (index, token) in tokens.iter().enumerate() {
            let mut at = 0;
            for &byte in token.text.as_bytes() {
                at = match nodes[at].next.binary_search_by_key(&byte, |&(b, _)| b) {
                    Ok(found) => nodes[at].next[found].1 as usize,
                    Err(place) => {
                        let new = nodes.len();
                        nodes[at].next.insert(place, (byte, new as u32));
                        nodes.push(Node::default());
                        new
                    }
                };
            }
            // An empty text would match everywhere.
            if at != 0 {
                nodes[at].token = Some(index as u32);
            }
        }
        let mut first: Vec<char> = tokens.iter().filter_map(|t| t.text.chars().next()).collect();
        first.sort_unstable();
        first.dedup();
        let joined = tokens.iter().flat_map(|token| [token.text.as_str(), "\n"]).collect();
        let is_open = |t: &ControlToken| t.text.starts_with(is_word) || t.text.ends_with(is_word);
        let has_open_end = tokens.iter().any(is_open);
        Self { tokens, nodes, first, joined, has_open_end }
    }

    /// Returns every control token in `text` from left to right, without overlaps.
    pub(crate) fn find(&self, text: &str) -> Vec<Found> {
        let mut found: Vec<Found> = Vec::new();
        let (mut at, mut free) = (0, 0);
        while at < text.len() {
            let Some(token) = self.longest_at(text.as_bytes(), at) else {
                at += 1;
                continue;
            };
            let end = at + token.text.len();

            if token.single_word && touches_word(text, at..end) {
                // Only one byte on, because another token may begin inside this one.
                at += 1;
                continue;
            }
            // The white space before this token may belong to the token before it.
            let start = if token.strip_left { free.max(text[..at].trim_end().len()) } else { at };
            let stop =
                if token.strip_right { text.len() - text[end..].trim_start().len() } else { end };
            found.push(Found { id: token.id, span: start..stop });
            (at, free) = (stop, stop);
        }
        found
    }

    /// True if a control token begins with this character.
    pub(crate) fn may_begin_with(&self, c: char) -> bool {
        self.first.contains(&c)
    }

    /// True if `word` is a word of letters, digits, `_` and `-`, and no control token in
    /// any text can have a part of it.
    pub(crate) fn cannot_contain(&self, word: &str) -> bool {
        // A token with a part of the word has the whole word, or begins or ends in it.
        !word.is_empty()
            && word.chars().all(is_word)
            && !self.has_open_end
            && !self.joined.contains(word)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the ids of all control tokens.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        self.tokens.iter().map(|token| token.id)
    }

    fn longest_at(&self, text: &[u8], start: usize) -> Option<&ControlToken> {
        let (mut node, mut longest) = (self.nodes.first()?, None);
        for byte in &text[start..] {
            let Ok(place) = node.next.binary_search_by_key(byte, |&(b, _)| b) else { break };
            node = &self.nodes[node.next[place].1 as usize];
            // A later match is longer, so it replaces an earlier one.
            longest = node.token.or(longest);
        }
        longest.map(|index| &self.tokens[index as usize])
    }
}

/// True for the characters of names and ids.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// True if a word character stands directly before or after `range` of `text`.
fn touches_word(text: &str, range: Range<usize>) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text[..range.start].chars().next_back().is_some_and(is_word)
        || text[range.end..].chars().next().is_some_and(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, text: &str) -> ControlToken {
        ControlToken {
            id,
            text: text.to_owned(),
            strip_left: false,
            strip_right: false,
            single_word: false,
        }
    }

    #[test]
    fn control_tokens_longest_match_wins() {
        let tokens = ControlTokens::new(vec![
            token(1, "<s>"),
            token(2, "<s>>"),
            ControlToken { strip_right: true, ..token(3, "<user>") },
            ControlToken { strip_left: true, ..token(4, "<end>") },
            ControlToken { single_word: true, ..token(5, "stop") },
        ]);
        for (text, expected) in [
            ("", vec![]),
            ("<s", vec![]),
            ("a<s>b", vec![(1, 1..4)]),
            ("<s>>", vec![(2, 0..4)]),
            ("<<s>é<s>", vec![(1, 1..4), (1, 6..9)]),
            ("<user> \n hi <end>", vec![(3, 0..9), (4, 11..17)]),
            ("<user> <end>", vec![(3, 0..7), (4, 7..12)]),
            ("stop nonstop stop!", vec![(5, 0..4), (5, 13..17)]),
        ] {
            let found: Vec<_> = tokens.find(text).into_iter().map(|f| (f.id, f.span)).collect();
            assert_eq!(found, expected, "{text:?}");
        }
    }
}
