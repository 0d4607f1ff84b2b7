//! Walk over the heads of all queues, in scheduling order, for the length of one decision.
//! An entry that is taken counts at once, so a second request of a tenant comes after the
//! first requests of other tenants. The tree itself does not change.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;

use tollgate_domain::{DeviceNanos, MonotonicTime};

use super::Tier;
use super::shares::{
    KeyQueue, NodeId, Priority, QueuedChildren, Shares, VirtualTime, Waiting, root,
};

/// Iterator state over the heads of all queues.
pub(super) struct QueueHeads<'a> {
    shares: &'a Shares,
    now: MonotonicTime,
    levels: BTreeMap<NodeId, Level<'a>>,
    queues: BTreeMap<NodeId, Peekable<KeyQueue<'a>>>,
    /// Predicted device time of the entries taken so far, by node.
    taken: BTreeMap<NodeId, DeviceNanos>,
    /// Share owners that the walk leaves out.
    passed: BTreeSet<NodeId>,
}

/// Children of one node that may have entries in a queue.
struct Level<'a> {
    untouched: Peekable<QueuedChildren<'a>>,
    /// Children from which an entry was taken, with their virtual times after that.
    touched: BTreeSet<(VirtualTime, NodeId)>,
}

/// The first entry of the queue that is served next.
#[derive(Clone, Copy)]
pub(super) struct QueueHead<'a> {
    pub(super) key: NodeId,
    pub(super) waiting: &'a Waiting,
    pub(super) priority: Priority,
}

impl<'a> QueueHeads<'a> {
    pub(super) fn new(shares: &'a Shares, now: MonotonicTime) -> Self {
        Self {
            shares,
            now,
            levels: BTreeMap::new(),
            queues: BTreeMap::new(),
            taken: BTreeMap::new(),
            passed: BTreeSet::new(),
        }
    }

    /// Returns the entry that is served next, or `None` if nothing waits.
    pub(super) fn first(&mut self) -> Option<QueueHead<'a>> {
        // Batch work is only considered if no interactive entry waits.
        [Tier::Interactive, Tier::Batch].into_iter().find_map(|tier| {
            let (share_owner, (tenant, (key, waiting))) =
                self.first_below(root(tier), |queue_heads, share_owner| {
                    if queue_heads.passed.contains(&share_owner) {
                        return None;
                    }
                    queue_heads.first_below(share_owner, |queue_heads, tenant| {
                        queue_heads
                            .first_below(tenant, |queue_heads, key| queue_heads.first_queued(key))
                    })
                })?;
            let priority = Priority {
                tier,
                share_owner: (self.virtual_time(share_owner), share_owner),
                tenant: (self.virtual_time(tenant), tenant),
                key: (self.virtual_time(key), key),
            };
            Some(QueueHead { key, waiting, priority })
        })
    }

    /// Leaves out the entries of a share owner from now on.
    pub(super) fn pass(&mut self, share_owner: NodeId) {
        self.passed.insert(share_owner);
    }

    /// Takes the first entry of the queue of `key`.
    pub(super) fn take(&mut self, key: NodeId) {
        let Some(waiting) = self.queues.get_mut(&key).and_then(Iterator::next) else { return };
        let mut at = key;
        // Every node on the path moves back, so the order is right on all levels.
        while !self.shares.is_root(at) {
            let parent = self.shares.parent(at);
            let before = self.virtual_time(at);
            *self.taken.entry(at).or_default() += waiting.predicted;
            let after = self.virtual_time(at);
            if let Some(level) = self.levels.get_mut(&parent) {
                // The child moves to the touched set, whose order can change during the
                // walk.
                level.drop((before, at));
                level.touched.insert((after, at));
            }
            at = parent;
        }
    }

    /// Returns the first child of `node` for which `find` returns a value. Children without
    /// one are dropped from the level.
    fn first_below<T>(
        &mut self,
        node: NodeId,
        find: impl Fn(&mut Self, NodeId) -> Option<T>,
    ) -> Option<(NodeId, T)> {
        loop {
            // Each round drops one child, so the loop ends.
            let child = self.level(node).first()?;
            if let Some(found) = find(self, child.1) {
                return Some((child.1, found));
            }
            self.level(node).drop(child);
        }
    }

    fn first_queued(&mut self, key: NodeId) -> Option<&'a Waiting> {
        let (shares, now) = (self.shares, self.now);
        let queue = self.queues.entry(key).or_insert_with(|| shares.queue(key).peekable());
        // Expired entries are still in the tree: the decision that refuses them is not
        // applied yet.
        while queue.next_if(|waiting| shares.is_expired(waiting, now)).is_some() {}
        queue.peek().copied()
    }

    fn level(&mut self, node: NodeId) -> &mut Level<'a> {
        let shares = self.shares;
        self.levels.entry(node).or_insert_with(|| Level {
            untouched: shares.queued(node).peekable(),
            touched: BTreeSet::new(),
        })
    }

    fn virtual_time(&self, id: NodeId) -> VirtualTime {
        match self.taken.get(&id) {
            Some(&more) => self.shares.virtual_time_with(id, more),
            None => self.shares.virtual_time(id),
        }
    }
}

impl Level<'_> {
    fn first(&mut self) -> Option<(VirtualTime, NodeId)> {
        match (self.untouched.peek().copied(), self.touched.first().copied()) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Removes a child that [`Level::first`] returned.
    fn drop(&mut self, child: (VirtualTime, NodeId)) {
        // A child stands in one of the two. The tree does not change, so it is passed over there.
        if self.untouched.next_if_eq(&child).is_none() {
            self.touched.remove(&child);
        }
    }
}
