//! Virtual times and queues, as a tree of tier, share owner, tenant and key.
//!
//! A virtual time is device time over weight. Virtual times are integers, so the same
//! events always give the same order. A virtual time contains the attributed time and the
//! predicted time of prompts that have started, and nothing else. A node without requests
//! is kept only while forgetting the node would give it an advantage.

mod seat;
mod virtual_time;
mod waiting;

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map, btree_set};
use std::iter::Copied;

use tollgate_domain::{DeviceNanos, MonotonicTime, SequenceId};

pub(crate) use self::seat::Name;
pub use self::seat::Seat;
pub(crate) use self::virtual_time::{VirtualTime, Weight};
pub use self::waiting::{Rank, Waiting};
use super::Tier;

/// The index of a node in the tree. Valid while the node has requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId(u32);

/// The tree of shares.
#[derive(Clone, Debug)]
pub struct Shares {
    /// All nodes. The roots of the tiers come first.
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    /// Requests that have not started, by the time at which they are refused.
    deadlines: BTreeSet<(MonotonicTime, SequenceId)>,
}

#[derive(Clone, Debug)]
struct Node {
    /// Parent of the node. A root is its own parent.
    parent: NodeId,
    name: Name,
    weight: Weight,
    /// Virtual time before the times in the next two fields were added.
    base: VirtualTime,
    attributed: DeviceNanos,
    predicted: DeviceNanos,
    virtual_time: VirtualTime,
    /// Number of requests that wait or run.
    requests: u32,
    /// Largest number of requests since the node had none.
    most_requests: u32,
    /// Queue of the entries. Only nodes of keys have entries.
    queue: BTreeMap<Rank, Waiting>,
    /// Number of entries in all queues below the node, its own included.
    waiting: u32,
    children: HashMap<Name, NodeId>,
    /// Children with requests, by virtual time.
    present: BTreeSet<(VirtualTime, NodeId)>,
    /// Sum of the weights of `present`.
    present_weight: u128,
    /// The same children by virtual time without predicted time.
    served: BTreeSet<(VirtualTime, NodeId)>,
    /// The children of `present` that have entries in a queue.
    queued: BTreeSet<(VirtualTime, NodeId)>,
    /// Children without requests that must be remembered, by virtual time.
    gone: BTreeSet<(VirtualTime, NodeId)>,
    /// Virtual time of the child that left last.
    last_gone: VirtualTime,
    /// Largest virtual time, without predicted time, that a child had when an entry came, or
    /// a child left, and no entry waited below the node.
    progress: VirtualTime,
}

pub(super) type QueuedChildren<'a> = Copied<btree_set::Iter<'a, (VirtualTime, NodeId)>>;
pub(super) type KeyQueue<'a> = btree_map::Values<'a, Rank, Waiting>;

/// Scheduling priority of a request: smaller values run first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Priority {
    pub(crate) tier: Tier,
    pub(crate) share_owner: (VirtualTime, NodeId),
    pub(crate) tenant: (VirtualTime, NodeId),
    pub(crate) key: (VirtualTime, NodeId),
}

impl Default for Shares {
    fn default() -> Self {
        let node = |tier: Tier| Node::new(root(tier), Name::Everyone, Weight::ONE);
        Self {
            nodes: vec![node(Tier::Interactive), node(Tier::Batch)],
            unused: Vec::new(),
            deadlines: BTreeSet::new(),
        }
    }
}

/// Returns the root of the tier's nodes.
pub(super) fn root(tier: Tier) -> NodeId {
    NodeId(tier as u32)
}

impl Shares {
    /// Adds a request and returns the node of its key. A node without other requests is
    /// lifted to the virtual time of its siblings, because idle time earns no credit.
    pub fn enter(&mut self, seat: &Seat) -> NodeId {
        let Seat { tier, share_owner, tenant, key, weight } = seat;
        let mut at = root(*tier);
        self.node_mut(at).requests += 1;
        for (name, weight) in [(share_owner, *weight), (tenant, Weight::ONE), (key, Weight::ONE)] {
            let child = self.child(at, name, weight);
            // The weight may have changed in config since the last request.
            self.weigh(child, weight);
            // Only the first request lifts: later ones must not erase the lead of a busy
            // node.
            if self.node(child).requests == 0 {
                self.lift(at, child);
            }
            let node = self.node_mut(child);
            node.requests += 1;
            node.most_requests = node.most_requests.max(node.requests);
            at = child;
        }
        at
    }

    /// Removes a request that has ended.
    pub fn leave(&mut self, key: NodeId) {
        let mut at = key;
        while !self.is_root(at) {
            let parent = self.node(at).parent;
            let node = self.node_mut(at);
            node.requests -= 1;
            if node.requests == 0 {
                // A leak here would distort every later decision, so it must stop the
                // engine.
                assert_eq!(
                    (node.waiting, node.predicted),
                    (0, DeviceNanos::ZERO),
                    "a node without requests has no entries and no predicted time"
                );
                node.most_requests = 0;
                self.depart(parent, at);
            }
            at = parent;
        }
        self.node_mut(at).requests -= 1;
    }

    /// Adds an entry to the queue of a key.
    pub fn push(&mut self, key: NodeId, waiting: Waiting) {
        // A replaced entry would be lost, and its request would wait forever.
        let replaced = self.node_mut(key).queue.insert(waiting.rank, waiting);
        assert!(replaced.is_none(), "an entry is queued only once");
        self.on_path(key, |parent, child, id| {
            if child.waiting == 0 {
                parent.queued.insert((child.virtual_time, id));
            }
            child.waiting += 1;
        });
    }

    /// Removes an entry from the queue of a key and returns it, if present.
    pub fn take(&mut self, key: NodeId, rank: Rank) -> Option<Waiting> {
        let waiting = self.node_mut(key).queue.remove(&rank)?;
        self.on_path(key, |parent, child, id| {
            child.waiting -= 1;
            if child.waiting == 0 {
                parent.queued.remove(&(child.virtual_time, id));
            }
        });
        Some(waiting)
    }

    /// Books device time on a key and its ancestors: adds `attributed`, and replaces the
    /// predicted time `from` by `to`.
    pub fn charge(
        &mut self,
        key: NodeId,
        attributed: DeviceNanos,
        from: DeviceNanos,
        to: DeviceNanos,
    ) {
        // Most calls change nothing; the walk to the root is skipped.
        if attributed == DeviceNanos::ZERO && from == to {
            return;
        }
        self.on_path(key, |parent, child, id| {
            let served = child.served();
            child.attributed += attributed;
            child.predicted = child.predicted + to - from;
            // The sets are ordered by virtual time, so an entry must be removed before its
            // key changes.
            if parent.served.remove(&(served, id)) {
                parent.served.insert((child.served(), id));
            }
            let virtual_time = child.reckon();
            let before = std::mem::replace(&mut child.virtual_time, virtual_time);
            if before == virtual_time {
                return;
            }
            if parent.present.remove(&(before, id)) {
                parent.present.insert((virtual_time, id));
            }
            if parent.queued.remove(&(before, id)) {
                parent.queued.insert((virtual_time, id));
            }
        });
    }

    /// Records that a request must start by `deadline`.
    pub fn expect_start(&mut self, request: SequenceId, deadline: MonotonicTime) {
        self.deadlines.insert((deadline, request));
    }

    /// Removes the deadline of a request that has started or ended.
    pub fn forget_deadline(&mut self, request: SequenceId, deadline: MonotonicTime) {
        self.deadlines.remove(&(deadline, request));
    }

    /// Returns the requests that waited past their deadline, by their first sequence.
    pub fn expired(&self, now: MonotonicTime) -> impl Iterator<Item = SequenceId> {
        self.deadlines
            .iter()
            .take_while(move |(deadline, _)| *deadline < now)
            .map(|(_, request)| *request)
    }

    pub(super) fn is_expired(&self, waiting: &Waiting, now: MonotonicTime) -> bool {
        let &Waiting { deadline, request, .. } = waiting;
        // A request that has started is not in `deadlines`, even if an entry of it waits
        // after a preemption.
        deadline < now && self.deadlines.contains(&(deadline, request))
    }

    /// Returns the priority of a key.
    pub(super) fn priority(&self, key: NodeId) -> Priority {
        let tenant = self.node(key).parent;
        let share_owner = self.node(tenant).parent;
        let of_tier = self.node(share_owner).parent;
        let virtual_time = |id: NodeId| (self.node(id).virtual_time, id);
        Priority {
            tier: if of_tier == root(Tier::Batch) { Tier::Batch } else { Tier::Interactive },
            share_owner: virtual_time(share_owner),
            tenant: virtual_time(tenant),
            key: virtual_time(key),
        }
    }

    pub(super) fn weight(&self, id: NodeId) -> Weight {
        self.node(id).weight
    }

    /// Returns the part of `whole` that belongs to a node beside its siblings with requests.
    pub(super) fn part(&self, id: NodeId, whole: u32) -> u32 {
        let node = self.node(id);
        let sum = self.node(node.parent).present_weight.max(1);
        (u128::from(whole) * u128::from(node.weight.parts()) / sum).min(whole.into()) as u32
    }

    /// Returns the smallest virtual time among the siblings of a node with requests.
    fn smallest_other(&self, id: NodeId) -> Option<VirtualTime> {
        let present = &self.node(self.node(id).parent).present;
        present.iter().find(|&&(_, other)| other != id).map(|&(virtual_time, _)| virtual_time)
    }

    /// Returns the largest number of requests, waiting ones included, that a node has had at one
    /// time since it had none.
    pub(super) fn most_requests(&self, id: NodeId) -> u32 {
        self.node(id).most_requests
    }

    /// Returns true if a node is behind all its siblings with requests.
    pub(super) fn is_behind(&self, id: NodeId) -> bool {
        self.smallest_other(id).is_some_and(|smallest| self.node(id).virtual_time < smallest)
    }

    /// Lifts a node with requests to the smallest virtual time of its siblings.
    pub fn catch_up(&mut self, id: NodeId) {
        if let Some(smallest) = self.smallest_other(id) {
            self.lift_to(id, smallest);
        }
    }

    /// Lifts a node to `least`, if its virtual time is smaller.
    fn lift_to(&mut self, id: NodeId, least: VirtualTime) {
        let node = self.node_mut(id);
        let (before, served) = (node.virtual_time, node.served());
        if before >= least {
            return;
        }
        node.base = node.base.plus(least.minus(before));
        node.virtual_time = node.reckon();
        let (after, now_served, parent) = (node.virtual_time, node.served(), node.parent);
        let parent = self.node_mut(parent);
        if parent.served.remove(&(served, id)) {
            parent.served.insert((now_served, id));
        }
        for set in [&mut parent.present, &mut parent.queued] {
            if set.remove(&(before, id)) {
                set.insert((after, id));
            }
        }
    }

    /// Prepares a key for a new entry: bounds the credit of the key, and of its ancestors,
    /// where nothing waits. Call it before [`Shares::push`].
    ///
    /// While nothing waits, the device serves every node as fast as it can, so a node with a
    /// smaller virtual time is owed nothing. The node is lifted to at most `most` of device
    /// time below the largest virtual time that a sibling had reached at such a moment.
    pub fn bound_credit(&mut self, key: NodeId, most: DeviceNanos) {
        let mut at = key;
        while !self.is_root(at) {
            let &Node { parent, waiting, weight, .. } = self.node(at);
            if waiting == 0 {
                self.record_progress(parent);
                let most = VirtualTime::of(most, weight);
                self.lift_to(at, self.node(parent).progress.minus(most));
            }
            at = parent;
        }
    }

    /// Records the largest virtual time of the children of a node if no entry waits below it.
    /// Predicted time is excluded: a prompt that is cancelled never uses it.
    fn record_progress(&mut self, parent: NodeId) {
        let node = self.node_mut(parent);
        if node.queued.is_empty()
            && let Some(&(furthest, _)) = node.served.last()
        {
            node.progress = node.progress.max(furthest);
        }
    }

    pub(super) fn parent(&self, id: NodeId) -> NodeId {
        self.node(id).parent
    }

    pub(super) fn is_root(&self, id: NodeId) -> bool {
        id.0 <= root(Tier::Batch).0
    }

    pub(super) fn virtual_time(&self, id: NodeId) -> VirtualTime {
        self.node(id).virtual_time
    }

    /// Returns the virtual time that a node would have with `more` added.
    pub(super) fn virtual_time_with(&self, id: NodeId, more: DeviceNanos) -> VirtualTime {
        let node = self.node(id);
        let time = node.attributed + node.predicted + more;
        node.base.plus(VirtualTime::of(time, node.weight))
    }

    /// Returns the smallest virtual time among the siblings of `id` that have requests,
    /// `id` included, and the node that has it.
    pub(super) fn smallest_beside(&self, id: NodeId) -> Option<(VirtualTime, NodeId)> {
        self.node(self.node(id).parent).present.first().copied()
    }

    /// Returns true if at most one share owner has requests.
    pub(super) fn has_one_owner(&self) -> bool {
        let owners = |tier: Tier| self.node(root(tier)).present.len();
        owners(Tier::Interactive) + owners(Tier::Batch) <= 1
    }

    /// Returns true if the tier has requests.
    pub(super) fn has_requests(&self, tier: Tier) -> bool {
        self.node(root(tier)).requests > 0
    }

    /// Returns the children that have queue entries, smallest virtual time first.
    pub(super) fn queued(&self, id: NodeId) -> QueuedChildren<'_> {
        self.node(id).queued.iter().copied()
    }

    /// Returns the queue of a key, next entry first.
    pub(super) fn queue(&self, key: NodeId) -> KeyQueue<'_> {
        self.node(key).queue.values()
    }

    /// Returns the device time attributed to a share owner since its node was made, and the
    /// time predicted now.
    #[cfg(test)]
    pub(crate) fn account(&self, seat: &Seat) -> Option<(DeviceNanos, DeviceNanos)> {
        let share_owner = *self.node(root(seat.tier)).children.get(&seat.share_owner)?;
        let node = self.node(share_owner);
        assert_eq!(node.virtual_time, node.reckon());
        Some((node.attributed, node.predicted))
    }

    /// Returns the number of nodes in use, without the roots.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.nodes.len() - self.unused.len() - 2
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    /// Calls `act` with (parent, child, id) for each node from `key` up to its share owner.
    #[expect(
        clippy::expect_used,
        reason = "only a root is its own parent, and the loop ends at the root"
    )]
    fn on_path(&mut self, key: NodeId, mut act: impl FnMut(&mut Node, &mut Node, NodeId)) {
        let mut at = key;
        while !self.is_root(at) {
            let above = self.node(at).parent;
            let [child, parent] = self
                .nodes
                .get_disjoint_mut([at.0 as usize, above.0 as usize])
                .expect("only a root is its own parent");
            act(parent, child, at);
            at = above;
        }
    }

    /// Returns the child of `parent` with this name. Creates the child if it does not
    /// exist.
    fn child(&mut self, parent: NodeId, name: &Name, weight: Weight) -> NodeId {
        if let Some(&child) = self.node(parent).children.get(name) {
            return child;
        }
        let node = Node::new(parent, name.clone(), weight);
        // Freed slots are reused, so the vector does not grow with the number of tenants
        // ever seen.
        let id = match self.unused.pop() {
            Some(id) => {
                *self.node_mut(id) = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId(self.nodes.len() as u32 - 1)
            }
        };
        self.node_mut(parent).children.insert(name.clone(), id);
        id
    }

    /// Changes the weight of a node from now on. The virtual time stays the same.
    fn weigh(&mut self, id: NodeId, weight: Weight) {
        let node = self.node_mut(id);
        if node.weight == weight {
            return;
        }
        // `base` absorbs the attributed time, so that past use keeps its old weight.
        let predicted = VirtualTime::of(node.predicted, weight);
        let served = node.served();
        node.base = node.virtual_time.minus(predicted);
        node.attributed = DeviceNanos::ZERO;
        let weight_before = std::mem::replace(&mut node.weight, weight);
        let (before, after) = (node.virtual_time, node.reckon());
        node.virtual_time = after;
        let (parent, now_served) = (node.parent, node.served());
        let parent = self.node_mut(parent);
        if parent.served.remove(&(served, id)) {
            parent.served.insert((now_served, id));
        }
        if parent.present.contains(&(before, id)) {
            parent.present_weight += u128::from(weight.parts());
            parent.present_weight -= u128::from(weight_before.parts());
        }
        for set in [&mut parent.present, &mut parent.queued, &mut parent.gone] {
            if set.remove(&(before, id)) {
                set.insert((after, id));
            }
        }
    }

    /// Lifts a child that had no requests to the virtual time of its siblings.
    fn lift(&mut self, parent: NodeId, child: NodeId) {
        let virtual_time = self.node(child).virtual_time;
        let above = self.node_mut(parent);
        above.gone.remove(&(virtual_time, child));
        let floor = above.floor();
        let node = self.node_mut(child);
        // A node that is ahead keeps its debt: leaving and coming back erases nothing.
        if node.virtual_time < floor {
            node.base = node.base.plus(floor.minus(node.virtual_time));
            node.virtual_time = node.reckon();
        }
        let (virtual_time, served, weight) = (node.virtual_time, node.served(), node.weight);
        let above = self.node_mut(parent);
        above.present.insert((virtual_time, child));
        above.present_weight += u128::from(weight.parts());
        above.served.insert((served, child));
    }

    /// Handles a child that has no more requests. The child is forgotten, unless a fresh
    /// start would later put it ahead of where it is now.
    fn depart(&mut self, parent: NodeId, child: NodeId) {
        let &Node { virtual_time, weight, .. } = self.node(child);
        let served = self.node(child).served();
        self.record_progress(parent);
        let above = self.node_mut(parent);
        above.present.remove(&(virtual_time, child));
        above.present_weight -= u128::from(weight.parts());
        above.served.remove(&(served, child));
        // Remembered for the case that no child is left: then the next child starts here.
        above.last_gone = virtual_time;
        above.gone.insert((virtual_time, child));
        let floor = above.floor();
        while let Some(&(virtual_time, id)) = self.node(parent).gone.first()
            // A node at or below the floor would be lifted to the floor anyway, so
            // forgetting it changes nothing.
            && (virtual_time <= floor || self.node(parent).gone.len() > MOST_REMEMBERED)
        {
            self.node_mut(parent).gone.remove(&(virtual_time, id));
            self.drop_child(parent, id);
        }
    }

    fn drop_child(&mut self, parent: NodeId, child: NodeId) {
        let name = self.node(child).name.clone();
        self.node_mut(parent).children.remove(&name);
        // The remembered children of the child go too; nothing else could reach them.
        let below: Vec<NodeId> = self.node(child).gone.iter().map(|&(_, id)| id).collect();
        for id in below {
            self.drop_child(child, id);
        }
        // The names and maps of the node are freed now, not when its slot is used again.
        *self.node_mut(child) = Node::new(parent, Name::Everyone, Weight::ONE);
        self.unused.push(child);
    }
}

impl Node {
    fn new(parent: NodeId, name: Name, weight: Weight) -> Self {
        Self {
            parent,
            name,
            weight,
            base: VirtualTime::default(),
            attributed: DeviceNanos::ZERO,
            predicted: DeviceNanos::ZERO,
            virtual_time: VirtualTime::default(),
            requests: 0,
            most_requests: 0,
            queue: BTreeMap::new(),
            waiting: 0,
            children: HashMap::new(),
            present: BTreeSet::new(),
            present_weight: 0,
            served: BTreeSet::new(),
            queued: BTreeSet::new(),
            gone: BTreeSet::new(),
            last_gone: VirtualTime::default(),
            progress: VirtualTime::default(),
        }
    }

    fn reckon(&self) -> VirtualTime {
        self.base.plus(VirtualTime::of(self.attributed + self.predicted, self.weight))
    }

    /// Returns the virtual time without predicted time.
    fn served(&self) -> VirtualTime {
        self.base.plus(VirtualTime::of(self.attributed, self.weight))
    }

    /// Returns the virtual time at which a new child starts: the smallest one among the
    /// served children. Predicted time is excluded, because it is not used yet. A new child
    /// would otherwise start behind siblings that have used less.
    fn floor(&self) -> VirtualTime {
        self.served.first().map_or(self.last_gone, |&(virtual_time, _)| virtual_time)
    }
}

/// Largest number of children without requests that one node remembers.
const MOST_REMEMBERED: usize = 10_000;

#[cfg(test)]
mod tests;
