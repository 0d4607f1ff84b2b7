//! Steps that look alike are given to the device as one graph, which takes a
//! few launches' time in place of some hundred.
//!
//! Where only decoding is done, a step is rounded up to one of few numbers of
//! tokens. What differs between two such steps stands in the plan's words, at
//! the same places, so that what was captured of one runs the other.

use std::collections::BTreeMap;

use super::driver::Graph;

/// What one graph stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Alike {
    /// Tokens, those of nobody among them.
    pub(super) tokens: u32,
    /// Parts of attention.
    pub(super) splits: u32,
}

/// How a step is to be given to the device.
pub(super) enum Way<'a> {
    /// Launch by launch.
    Launches,
    /// As a graph that is to be captured first.
    Capture,
    /// As this graph.
    Replay(&'a Graph),
}

/// The graphs so far.
#[derive(Default)]
pub(super) struct Graphs {
    /// None: such a step ran once, launch by launch.
    seen: BTreeMap<Alike, Option<Graph>>,
}

impl Graphs {
    /// The way for a step. The first of its kind goes launch by launch, which
    /// also searches the products that it needs; a kind that comes again is
    /// worth a graph.
    pub(super) fn way(&mut self, alike: Alike) -> Way<'_> {
        if !self.seen.contains_key(&alike) {
            if self.seen.len() < MOST_GRAPHS {
                self.seen.insert(alike, None);
            }
            return Way::Launches;
        }
        match &self.seen[&alike] {
            None => Way::Capture,
            Some(graph) => Way::Replay(graph),
        }
    }

    /// Keeps what was captured.
    pub(super) fn keep(&mut self, alike: Alike, graph: Graph) -> &Graph {
        let kept = self.seen.entry(alike).or_insert(None);
        kept.insert(graph)
    }

    /// Graphs that were captured.
    pub(super) fn len(&self) -> usize {
        self.seen.values().flatten().count()
    }
}

/// Tokens that a step of `tokens` single ones is rounded up to: few numbers,
/// each little more, as weights are read whole anyway.
pub(super) fn rounded(tokens: u32) -> u32 {
    let step = match tokens {
        0..=2 => 1,
        3..=8 => 2,
        9..=32 => 4,
        33..=256 => 16,
        _ => 64,
    };
    tokens.next_multiple_of(step)
}

/// More kinds of steps than these run launch by launch.
const MOST_GRAPHS: usize = 96;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_numbers_stand_for_all() {
        let mut all = std::collections::BTreeSet::new();
        for tokens in 1..=512 {
            let many = rounded(tokens);
            assert!(many >= tokens && many <= tokens + tokens / 2 && rounded(many) == many);
            all.insert(many);
        }
        assert_eq!(all.len(), 2 + 3 + 6 + 14 + 4);
    }

    #[test]
    fn a_kind_that_comes_again_is_captured() {
        let mut graphs = Graphs::default();
        let alike = Alike { tokens: 4, splits: 2 };
        assert!(matches!(graphs.way(alike), Way::Launches));
        assert!(matches!(graphs.way(alike), Way::Capture));
        assert!(matches!(graphs.way(Alike { splits: 1, ..alike }), Way::Launches));
        for tokens in 0..2 * MOST_GRAPHS as u32 {
            graphs.way(Alike { tokens, splits: 64 });
        }
        assert_eq!(graphs.seen.len(), MOST_GRAPHS);
        assert!(matches!(graphs.way(Alike { tokens: 1_000, splits: 64 }), Way::Launches));
        assert!(matches!(graphs.way(Alike { tokens: 1_000, splits: 64 }), Way::Launches));
        assert_eq!(graphs.len(), 0);
    }
}
