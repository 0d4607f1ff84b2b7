//! Stop strings. What has been released can never turn out to belong to one:
//! text that might still become a stop string is held back until it cannot.
//!
//! The result does not depend on how the text was cut into pieces: the match
//! that ends first wins, and of several ending together the longest.

/// Finds the first stop string in a text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The longest end of what came that begins a stop string. Shorter than
    /// the longest stop string.
    held: String,
    stopped: bool,
}

/// What may go out now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Text before any stop string, not released before.
    pub text: String,
    /// Whether a stop string was met; nothing is released after it.
    pub stopped: bool,
}

impl StopMatcher {
    /// A matcher for `stops`. Empty strings match nothing. How many and how
    /// long they may be is the caller's business.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new(), stopped: false }
    }

    /// Takes the next piece.
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
        let keep = self.stops.iter().map(|stop| overlap(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - keep);
        Released { text, stopped: false }
    }

    /// The text has ended: what was held back is no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was met.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// Where the match that ends first begins; the longest, if several end there.
fn first_match(stops: &[String], text: &str) -> Option<usize> {
    stops
        .iter()
        .filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)))
        .min()
        .map(|(_, start)| start)
}

/// Bytes at the end of `text` that begin `stop` without completing it. They
/// start on a character, because `stop` does.
fn overlap(text: &str, stop: &str) -> usize {
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

    /// Character by character, as plainly as it can be said.
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
    fn releases_what_can_no_longer_stop() {
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
    fn what_is_held_at_the_end_is_text() {
        let mut matcher = stops(&["END"]);
        assert_eq!(matcher.push("the EN").text, "the ");
        assert_eq!(matcher.finish(), "EN");
    }

    proptest! {
        #[test]
        fn agrees_with_naive_search(
            list in prop::collection::vec("[abé]{0,4}", 0..4),
            pieces in prop::collection::vec("[abcé]{0,5}", 0..12),
        ) {
            prop_assert_eq!(run(&list, &pieces), naive(&list, &pieces.concat()));
        }

        #[test]
        fn never_releases_part_of_a_stop(
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
