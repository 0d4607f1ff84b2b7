//! The beginnings of calls as patterns, matched against text that may not be complete.

use std::ops::Range;

/// The most white space that a pattern takes at one place, in bytes. A longer run is
/// text: the match, and so the text that is held back, must stay short.
const MOST_SPACE: usize = 16;

/// The longest id of a call, in bytes.
const MOST_ID: usize = 64;

/// One part of a pattern.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// This text.
    Text(&'static str),
    /// One of these texts.
    Either(&'static [&'static str]),
    /// This text or nothing.
    Maybe(&'static str),
    /// White space or nothing.
    Space,
    /// A name that the caller of the match accepts.
    Name,
    /// An id of letters, digits, `_` and `-`.
    Id,
    /// This text, which stays in the input.
    Before(&'static str),
}

/// The result of a match at the start of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Match {
    /// The pattern matches.
    Whole {
        /// Bytes that the pattern takes.
        length: usize,
        /// The place of the name; empty if the pattern has none.
        name: Range<usize>,
    },
    /// The text ends before the pattern does, and may still match.
    Partial,
    /// The pattern does not match, whatever follows.
    Not,
}

/// Tests a name, or the beginning of one.
pub(super) trait Names {
    /// True if `name` is one of the names.
    fn is_name(&self, name: &str) -> bool;
    /// True if one of the names begins with `start`.
    fn may_begin(&self, start: &str) -> bool;
}

/// Matches `pattern` at the start of `text`.
pub(super) fn matches(pattern: &[Part], text: &str, names: &impl Names) -> Match {
    let (mut at, mut name) = (0, 0..0);
    for part in pattern {
        let rest = &text[at..];
        let taken = match part {
            Part::Text(wanted) => literal(wanted, rest),
            Part::Either(wanted) => {
                let all = wanted.iter().map(|wanted| literal(wanted, rest));
                // A text that matches decides before one that may still match.
                all.min_by_key(|taken| match taken {
                    Taken::Bytes(_) => 0,
                    Taken::Partial => 1,
                    Taken::Not => 2,
                })
                .unwrap_or(Taken::Not)
            }
            Part::Maybe(wanted) => match literal(wanted, rest) {
                Taken::Not => Taken::Bytes(0),
                // An empty rest decides nothing yet; the next part says that as well.
                taken => taken,
            },
            Part::Space => space(rest),
            Part::Id => id(rest),
            Part::Before(wanted) => match literal(wanted, rest) {
                Taken::Bytes(_) => Taken::Bytes(0),
                taken => taken,
            },
            Part::Name => {
                let length = name_length(rest);
                name = at..at + length;
                match (&rest[..length], length == rest.len()) {
                    // At the end of the text, the name may still go on.
                    (start, true) if names.may_begin(start) => Taken::Partial,
                    (found, false) if names.is_name(found) => Taken::Bytes(length),
                    _ => Taken::Not,
                }
            }
        };
        match taken {
            Taken::Bytes(bytes) => at += bytes,
            Taken::Partial => return Match::Partial,
            Taken::Not => return Match::Not,
        }
    }
    Match::Whole { length: at, name }
}

enum Taken {
    Bytes(usize),
    Partial,
    Not,
}

fn literal(wanted: &str, rest: &str) -> Taken {
    if rest.starts_with(wanted) {
        Taken::Bytes(wanted.len())
    } else if wanted.starts_with(rest) {
        Taken::Partial
    } else {
        Taken::Not
    }
}

fn space(rest: &str) -> Taken {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    match rest.bytes().take_while(is_space).count() {
        length if length > MOST_SPACE => Taken::Not,
        // More space may follow; the part after it finds that the text ends.
        length => Taken::Bytes(length),
    }
}

fn id(rest: &str) -> Taken {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    match rest.bytes().take_while(is_part).count() {
        length if length > MOST_ID => Taken::Not,
        // The id may go on in the next piece.
        length if length == rest.len() => Taken::Partial,
        length => Taken::Bytes(length),
    }
}

/// Returns the bytes of a tool's or parameter's name at the start of `rest`.
fn name_length(rest: &str) -> usize {
    rest.find(['"', '>', '[', '{', '\n']).unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Only(&'static str);

    impl Names for Only {
        fn is_name(&self, name: &str) -> bool {
            name == self.0
        }

        fn may_begin(&self, start: &str) -> bool {
            self.0.starts_with(start)
        }
    }

    #[test]
    fn pattern_match_says_what_is_still_possible() {
        use Part::{Before, Either, Maybe, Name, Space, Text};
        let pattern = [
            Text("<t>"),
            Space,
            Maybe("x"),
            Text("\""),
            Name,
            Text("\""),
            Either(&["a", "bc"]),
            Before("{"),
        ];
        for (text, expected) in [
            ("", Match::Partial),
            ("<", Match::Partial),
            ("<t", Match::Partial),
            ("<u", Match::Not),
            ("<t> \n", Match::Partial),
            ("<t>x", Match::Partial),
            ("<t> \"", Match::Partial),
            ("<t> \"fo", Match::Partial),
            ("<t> \"fa", Match::Not),
            ("<t> \"foo", Match::Partial),
            ("<t> \"fooo", Match::Not),
            ("<t> \"fo\"", Match::Not),
            ("<t> \"foo\"b", Match::Partial),
            ("<t> \"foo\"bd", Match::Not),
            ("<t> \"foo\"bc", Match::Partial),
            ("<t> \"foo\"bc{", Match::Whole { length: 11, name: 5..8 }),
            ("<t>\"foo\"a[", Match::Not),
            ("<t>                    \"", Match::Not),
        ] {
            assert_eq!(matches(&pattern, text, &Only("foo")), expected, "{text:?}");
        }
    }
}
