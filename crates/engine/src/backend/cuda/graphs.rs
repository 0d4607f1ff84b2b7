//! CUDA graphs for steps that only decode. One graph launch replaces some hundred
//! kernel launches.
//!
//! Such a step is padded to one of few token counts. Two steps with the same count
//! differ only in the words of the plan, which lie at the same addresses, so a graph
//! that was captured from one step runs the other.

use std::collections::BTreeMap;

use super::driver::{DriverFault, Graph};

/// The properties that two steps must share to run the same graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GraphKey {
    /// Tokens of the step, padding included.
    pub(super) tokens: u32,
    /// Parts that attention is split into.
    pub(super) splits: u32,
    /// True if each token has a row of logits; otherwise no token has one.
    pub(super) has_rows: bool,
}

/// The state of a graph key.
enum GraphState<G> {
    /// One step ran launch by launch; the next one is captured.
    Once,
    /// All further steps run this graph.
    Graph(G),
    /// The driver refused to build a graph.
    Refused,
}

/// The graphs captured so far. No graph is freed while the backend lives, because a
/// running step may use it.
pub(super) struct Graphs<G = Graph> {
    kinds: BTreeMap<GraphKey, GraphState<G>>,
}

impl<G> Default for Graphs<G> {
    fn default() -> Self {
        Self { kinds: BTreeMap::new() }
    }
}

impl<G> Graphs<G> {
    /// Returns the graph for a step, or `None` if the step must launch its kernels one
    /// by one. The first step of each key does so, which also searches the matrix
    /// products that it needs. The second step of a key is captured.
    pub(super) fn of(
        &mut self,
        key: GraphKey,
        capture: impl FnOnce() -> Result<G, DriverFault>,
    ) -> Option<&G> {
        let has_room = self.kinds.len() < MOST_GRAPHS;
        match self.kinds.get_mut(&key) {
            None if has_room => drop(self.kinds.insert(key, GraphState::Once)),
            None => {}
            Some(kind @ GraphState::Once) => {
                // Any other fault will show when the kernels are launched one by one.
                *kind = capture().map_or(GraphState::Refused, GraphState::Graph);
            }
            Some(GraphState::Graph(_) | GraphState::Refused) => {}
        }
        match self.kinds.get(&key) {
            Some(GraphState::Graph(graph)) => Some(graph),
            _ => None,
        }
    }

    /// Returns the number of keys that run as graphs.
    pub(super) fn len(&self) -> usize {
        self.kinds.values().filter(|kind| matches!(kind, GraphState::Graph(_))).count()
    }
}

/// Returns the token count that a step of `tokens` single tokens is padded to. There
/// are few such counts, and each is little larger: a step reads all weights anyway, so
/// a few more tokens cost almost nothing.
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

/// The most keys that are remembered; steps with further keys launch their kernels one
/// by one.
const MOST_GRAPHS: usize = 96;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_gives_few_token_counts() {
        let mut all = std::collections::BTreeSet::new();
        for tokens in 1..=512 {
            let many = rounded(tokens);
            assert!(many >= tokens && many <= tokens + tokens / 2 && rounded(many) == many);
            all.insert(many);
        }
        assert_eq!(all.len(), 2 + 3 + 6 + 14 + 4);
    }

    #[test]
    fn repeated_step_shape_is_captured_once() {
        let mut graphs = Graphs::<u32>::default();
        let key = GraphKey { tokens: 4, splits: 2, has_rows: true };
        let never = || panic!("nothing is captured");
        assert_eq!(graphs.of(key, never), None);
        assert_eq!(graphs.of(key, || Ok(7)), Some(&7));
        assert_eq!(graphs.of(key, never), Some(&7));
        assert_eq!(graphs.of(GraphKey { has_rows: false, ..key }, never), None);
        for tokens in 0..2 * MOST_GRAPHS as u32 {
            assert_eq!(graphs.of(GraphKey { tokens, splits: 64, ..key }, never), None);
        }
        assert_eq!(graphs.kinds.len(), MOST_GRAPHS);
        let late = GraphKey { tokens: 1_000, ..key };
        assert_eq!(graphs.of(late, never), None);
        assert_eq!(graphs.of(late, never), None);
        assert_eq!(graphs.len(), 1);
    }
}
