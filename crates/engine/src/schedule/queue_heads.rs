//! What waits, in the order in which its turn comes, as far as one decision
//! follows it. What is taken counts at once, so a tenant's second request
//! stands behind the first of others. Nothing in the tree changes.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;

use tollgate_domain::{DeviceNanos, MonotonicTime};

use super::Tier;
use super::shares::{ChildrenInLine, Counter, Line, NodeId, Shares, Standing, Waiting};

/// A walk along the heads of the lines.
pub(super) struct Heads<'a> {
    shares: &'a Shares,
    now: MonotonicTime,
    levels: BTreeMap<NodeId, Level<'a>>,
    lines: BTreeMap<NodeId, Peekable<Line<'a>>>,
    /// What was taken so far counts, by node.
    taken: BTreeMap<NodeId, DeviceNanos>,
}

/// Children of one node that may have something in a line.
struct Level<'a> {
    untouched: Peekable<ChildrenInLine<'a>>,
    /// Those that something was taken of, by their counters since.
    touched: BTreeSet<(Counter, NodeId)>,
}

/// Whose turn it is.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) key: NodeId,
    pub(super) waiting: &'a Waiting,
    pub(super) standing: Standing,
}

impl<'a> Heads<'a> {
    pub(super) fn new(shares: &'a Shares, now: MonotonicTime) -> Self {
        Self {
            shares,
            now,
            levels: BTreeMap::new(),
            lines: BTreeMap::new(),
            taken: BTreeMap::new(),
        }
    }

    /// Whose turn it is, if anyone waits.
    pub(super) fn first(&mut self) -> Option<Head<'a>> {
        [Tier::Interactive, Tier::Batch].into_iter().find_map(|tier| {
            let (holder, (tenant, (key, waiting))) =
                self.first_below(tier.root(), |heads, holder| {
                    heads.first_below(holder, |heads, tenant| {
                        heads.first_below(tenant, |heads, key| heads.first_in_line(key))
                    })
                })?;
            let standing = Standing {
                tier,
                holder: (self.counter(holder), holder),
                tenant: (self.counter(tenant), tenant),
                key: (self.counter(key), key),
            };
            Some(Head { key, waiting, standing })
        })
    }

    /// Takes the first in the line of `key`.
    pub(super) fn take(&mut self, key: NodeId) {
        let Some(waiting) = self.lines.get_mut(&key).and_then(Iterator::next) else { return };
        let mut at = key;
        while !self.shares.is_root(at) {
            let parent = self.shares.parent(at);
            let before = self.counter(at);
            *self.taken.entry(at).or_default() += waiting.predicted;
            let after = self.counter(at);
            if let Some(level) = self.levels.get_mut(&parent) {
                level.drop((before, at));
                level.touched.insert((after, at));
            }
            at = parent;
        }
    }

    /// The first child of `node` in which `find` finds something.
    fn first_below<T>(
        &mut self,
        node: NodeId,
        find: impl Fn(&mut Self, NodeId) -> Option<T>,
    ) -> Option<(NodeId, T)> {
        loop {
            let child = self.level(node).first()?;
            if let Some(found) = find(self, child.1) {
                return Some((child.1, found));
            }
            self.level(node).drop(child);
        }
    }

    fn first_in_line(&mut self, key: NodeId) -> Option<&'a Waiting> {
        let (shares, now) = (self.shares, self.now);
        let line = self.lines.entry(key).or_insert_with(|| shares.line(key).peekable());
        while line.next_if(|waiting| shares.is_expired(waiting, now)).is_some() {}
        line.peek().copied()
    }

    fn level(&mut self, node: NodeId) -> &mut Level<'a> {
        let shares = self.shares;
        self.levels.entry(node).or_insert_with(|| Level {
            untouched: shares.in_line(node).peekable(),
            touched: BTreeSet::new(),
        })
    }

    fn counter(&self, id: NodeId) -> Counter {
        match self.taken.get(&id) {
            Some(&more) => self.shares.counter_with(id, more),
            None => self.shares.counter(id),
        }
    }
}

impl Level<'_> {
    fn first(&mut self) -> Option<(Counter, NodeId)> {
        match (self.untouched.peek().copied(), self.touched.first().copied()) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Takes out a child that is first.
    fn drop(&mut self, child: (Counter, NodeId)) {
        if self.untouched.next_if_eq(&child).is_none() {
            self.touched.remove(&child);
        }
    }
}
