//! Steps that look alike are given to the device as one graph, which takes a
//! few launches' time in place of some hundred.
//!
//! Where only decoding is done, a step is rounded up to one of few numbers of
//! tokens. What differs between two such steps stands in the plan's words, at
//! the same places, so that what was captured of one runs the other.

use std::collections::BTreeMap;

use super::driver::{DriverFault, Graph};

/// What one graph stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Alike {
    /// Tokens, those of nobody among them.
    pub(super) tokens: u32,
    /// Parts of attention.
    pub(super) splits: u32,
    /// Whether each token has a row of logits; else none has.
    pub(super) has_rows: bool,
}

/// What is known of a kind of step.
enum Known<G> {
    /// One ran, launch by launch.
    Once,
    /// All run as this.
    Graph(G),
    /// The driver made no graph of it.
    Refused,
}

/// The graphs so far. None is given up while the backend lives: a step that is
/// under way may be one.
pub(super) struct Graphs<G = Graph> {
    kinds: BTreeMap<Alike, Known<G>>,
}

impl<G> Default for Graphs<G> {
    fn default() -> Self {
        Self { kinds: BTreeMap::new() }
    }
}

impl<G> Graphs<G> {
    /// The graph for a step; none where it goes launch by launch. The first of
    /// its kind does, which also searches the products that it needs; a kind
    /// that comes again is worth a graph.
    pub(super) fn of(
        &mut self,
        alike: Alike,
        capture: impl FnOnce() -> Result<G, DriverFault>,
    ) -> Option<&G> {
        let has_room = self.kinds.len() < MOST_GRAPHS;
        match self.kinds.get_mut(&alike) {
            None if has_room => drop(self.kinds.insert(alike, Known::Once)),
            None => {}
            Some(kind @ Known::Once) => {
                // What else may be wrong shows when it goes launch by launch.
                *kind = capture().map_or(Known::Refused, Known::Graph);
            }
            Some(Known::Graph(_) | Known::Refused) => {}
        }
        match self.kinds.get(&alike) {
            Some(Known::Graph(graph)) => Some(graph),
            _ => None,
        }
    }

    /// Kinds that run as graphs.
    pub(super) fn len(&self) -> usize {
        self.kinds.values().filter(|kind| matches!(kind, Known::Graph(_))).count()
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
    fn a_kind_that_comes_again_is_captured_once() {
        let mut graphs = Graphs::<u32>::default();
        let alike = Alike { tokens: 4, splits: 2, has_rows: true };
        let never = || panic!("nothing is captured");
        assert_eq!(graphs.of(alike, never), None);
        assert_eq!(graphs.of(alike, || Ok(7)), Some(&7));
        assert_eq!(graphs.of(alike, never), Some(&7));
        assert_eq!(graphs.of(Alike { has_rows: false, ..alike }, never), None);
        for tokens in 0..2 * MOST_GRAPHS as u32 {
            assert_eq!(graphs.of(Alike { tokens, splits: 64, ..alike }, never), None);
        }
        assert_eq!(graphs.kinds.len(), MOST_GRAPHS);
        let late = Alike { tokens: 1_000, ..alike };
        assert_eq!(graphs.of(late, never), None);
        assert_eq!(graphs.of(late, never), None);
        assert_eq!(graphs.len(), 1);
    }
}
