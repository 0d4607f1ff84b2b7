//! Stop strings. Text that may still become part of a stop string is held back
//! until this is decided, so released text never belongs to a stop string.
//!
//! The result does not depend on the pieces in which the text arrives. The match
//! that ends first wins; among several with the same end, the longest wins.

/// A search for the first stop string in a text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The longest end of the text so far that begins a stop string. It is shorter
    /// than the longest stop string.
    held: String,
    stopped: bool,
}

/// The text that may go out now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// New text before any stop string.
    pub text: String,
    /// True if a stop string has occurred; nothing is released after it.
    pub stopped: bool,
}

impl StopMatcher {
    /// Makes a matcher for `stops`. Empty strings match nothing. The caller must
    /// bound the number and the length of the strings.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new(), stopped: false }
    }

    /// Takes the next piece of text; returns the text that may go out.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stopped {
            return Released { text: String::new(), stopped: true };
        }
        if self.stops.is_empty() {
            return Released { text: piece.to_owned(), stopped: false };
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some(start) = first_match(&self.stops, &text) {
            text.truncate(start);
            self.stopped = true;
            return Released { text, stopped: true };
        }
        // Only the longest such end is held: a shorter one is part of it.
        let keep = self.stops.iter().map(|stop| overlap(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - keep);
        Released { text, stopped: false }
    }

    /// Ends the text; returns the part that was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// True if a stop string has occurred.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// Returns the start of the match that ends first; the longest match, if several
/// end there.
fn first_match(stops: &[String], text: &str) -> Option<usize> {
    stops
        .iter()
        .filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)))
        .min()
        .map(|(_, start)| start)
}

/// Returns the number of bytes at the end of `text` that begin `stop` and do not
/// complete it. These bytes start at a character, because `stop` does.
pub(crate) fn overlap(text: &str, stop: &str) -> usize {
    // One byte less than the whole: a complete match is found elsewhere.
    let longest = text.len().min(stop.len() - 1);
    (1..=longest)
        .rev()
        .find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stops(list: &[&str]) -> StopMatcher {
        StopMatcher::new(list.iter().map(|&stop| stop.to_owned()))
    }

    fn run(list: &[String], pieces: &[String]) -> (String, bool) {
        let mut matcher = StopMatcher::new(list.iter().cloned());
        let mut out = String::new();
        for piece in pieces {
            out.push_str(&matcher.push(piece).text);
        }
        out.push_str(&matcher.finish());
        (out, matcher.is_stopped())
    }

    /// The same search, character by character, in the simplest form.
    fn naive(list: &[String], text: &str) -> (String, bool) {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        for end in ends {
            let found = list.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(*stop));
            if let Some(longest) = found.map(String::len).max() {
                return (text[..end - longest].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    #[test]
    fn stop_matcher_releases_decided_text() {
        let mut matcher = stops(&["END", "\n\n"]);
        for (piece, text, stopped) in [
            ("Hello E", "Hello ", false),
            ("N", "", false),
            ("x\n", "ENx", false),
            ("y", "\ny", false),
            ("é\n", "é", false),
            ("\nmore", "", true),
            ("nothing", "", true),
        ] {
            let expected = Released { text: text.to_owned(), stopped };
            assert_eq!(matcher.push(piece), expected, "after {piece:?}");
        }
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn stop_matcher_returns_held_text_at_end() {
        let mut matcher = stops(&["END"]);
        assert_eq!(matcher.push("the EN").text, "the ");
        assert_eq!(matcher.finish(), "EN");
    }

    proptest! {
        #[test]
        fn stop_matcher_agrees_with_naive_search(
            list in prop::collection::vec("[abé]{0,4}", 0..4),
            pieces in prop::collection::vec("[abcé]{0,5}", 0..12),
        ) {
            prop_assert_eq!(run(&list, &pieces), naive(&list, &pieces.concat()));
        }

        #[test]
        fn stop_matcher_never_releases_part_of_stop(
            list in prop::collection::vec("[ab]{1,4}", 1..4),
            pieces in prop::collection::vec("[ab]{0,3}", 0..12),
        ) {
            let whole = naive(&list, &pieces.concat()).0;
            let mut matcher = StopMatcher::new(list);
            let mut out = String::new();
            for piece in &pieces {
                out.push_str(&matcher.push(piece).text);
                prop_assert!(whole.starts_with(&out));
            }
        }
    }
}
