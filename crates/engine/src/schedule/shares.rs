//! What each has had of the device, and what of each waits: a tree of tier,
//! holder of a share, tenant and key.
//!
//! A counter is device time over weight, in whole units, so that the same
//! events always give the same order. It holds what was attributed and what is
//! predicted of prompts that have started, nothing else. Whoever has nothing
//! here is kept only while forgetting would be a gift.

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map, btree_set};
use std::iter::Copied;

use tollgate_domain::{Caller, DeviceNanos, KeyId, MonotonicTime, PoolName, SequenceId, TenantId};

use super::{Rows, SchedulePolicy, Tier};

/// Whose share a request runs on, and whose within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    pub(crate) tier: Tier,
    pub(crate) holder: Name,
    pub(crate) tenant: Name,
    pub(crate) key: Name,
    pub(crate) weight: Weight,
}

/// A name at any level of the tree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Name {
    Everyone,
    Pool(PoolName),
    Tenant(TenantId),
    Key(KeyId),
}

impl Seat {
    /// The seat of a caller's requests under `policy`. `weight` is of the
    /// share's holder and above 0.
    pub fn new(
        policy: SchedulePolicy,
        tier: Tier,
        pool: Option<&PoolName>,
        caller: &Caller,
        weight: f64,
    ) -> Self {
        let weight = Weight::new(weight);
        let tenant = Name::Tenant(caller.tenant.clone());
        let key = Name::Key(caller.key.clone());
        match policy {
            SchedulePolicy::Fair | SchedulePolicy::TokenCounters => {
                let holder = pool.map_or_else(|| tenant.clone(), |pool| Name::Pool(pool.clone()));
                Self { tier, holder, tenant, key, weight }
            }
            SchedulePolicy::KeyCounters => Self { tier, holder: key.clone(), tenant, key, weight },
            SchedulePolicy::FirstComeFirstServed => Self {
                tier,
                holder: Name::Everyone,
                tenant: Name::Everyone,
                key: Name::Everyone,
                weight: Weight::ONE,
            },
        }
    }
}

/// How much of the device a holder is worth, in parts of 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weight(u64);

impl Weight {
    pub(crate) const ONE: Self = Self(1 << 32);

    /// Weights are config's, from 0.001 to 1,000; what a stranger sends is
    /// brought within reach of the arithmetic.
    fn new(weight: f64) -> Self {
        Self((weight.clamp(LEAST_WEIGHT, MOST_WEIGHT) * Self::ONE.0 as f64) as u64)
    }

    pub(crate) fn parts(self) -> u64 {
        self.0
    }
}

const LEAST_WEIGHT: f64 = 1.0 / (1 << 20) as f64;
const MOST_WEIGHT: f64 = (1 << 20) as f64;

/// Device time over weight, in parts of 2^24 of a nanosecond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Counter(u128);

impl Counter {
    /// What `time` counts for someone of this weight.
    pub(crate) fn of(time: DeviceNanos, weight: Weight) -> Self {
        // 2^64 ns over the least weight are 2^108 parts.
        Self((u128::from(time.nanos()) << 56) / u128::from(weight.0))
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// A place in the tree. Good while something of it is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId(u32);

/// What waits for a place in the batch: a prompt that has not started, or a
/// sequence that lost its place.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The sequence of its first choice.
    pub sequence: SequenceId,
    /// Its request, by that one's first sequence.
    pub request: SequenceId,
    /// Where it stands in its key's line.
    pub rank: Rank,
    /// When its request is refused if it has not started.
    pub deadline: MonotonicTime,
    /// Tokens that its cache will hold before it goes on.
    pub tokens: u32,
    /// Tokens that its first steps feed on one account.
    pub pending: u32,
    /// Tokens a sequence of it may come to.
    pub most: u32,
    /// Which rows of logits its pending tokens want.
    pub rows: Rows,
    /// Choices beside the first.
    pub followers: u32,
    /// What reading the rest of its prompt should cost its tenant.
    pub predicted: DeviceNanos,
}

/// A place in the line of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Who had started is first.
    fresh: bool,
    /// Then whose time is nearest its end.
    deadline: MonotonicTime,
    /// Then who came first.
    sequence: SequenceId,
}

impl Rank {
    /// Of a prompt that has to start by `deadline`.
    pub fn fresh(policy: SchedulePolicy, deadline: MonotonicTime, sequence: SequenceId) -> Self {
        let deadline = match policy {
            SchedulePolicy::FirstComeFirstServed => MonotonicTime(0),
            _ => deadline,
        };
        Self { fresh: true, deadline, sequence }
    }

    /// Of a sequence that lost its place.
    pub fn again(sequence: SequenceId) -> Self {
        Self { fresh: false, deadline: MonotonicTime(0), sequence }
    }

    /// The sequence whose place in the line it is.
    pub fn sequence(self) -> SequenceId {
        self.sequence
    }

    /// Whether it had started before.
    pub fn is_again(self) -> bool {
        !self.fresh
    }
}

/// The tree.
#[derive(Clone, Debug)]
pub struct Shares {
    /// The tiers' roots first.
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    /// Requests that have not started, by when they are refused.
    deadlines: BTreeSet<(MonotonicTime, SequenceId)>,
}

#[derive(Clone, Debug)]
struct Node {
    /// The roots are their own.
    parent: NodeId,
    name: Name,
    weight: Weight,
    /// The counter without what follows.
    base: Counter,
    attributed: DeviceNanos,
    predicted: DeviceNanos,
    counter: Counter,
    /// Requests that wait or run.
    requests: u32,
    /// Of a key.
    line: BTreeMap<Rank, Waiting>,
    /// Entries in the lines below, its own too.
    waiting: u32,
    children: HashMap<Name, NodeId>,
    /// Children with requests.
    present: BTreeSet<(Counter, NodeId)>,
    /// The same by what they have had, without what is predicted.
    served: BTreeSet<(Counter, NodeId)>,
    /// Those of them with something in a line.
    in_line: BTreeSet<(Counter, NodeId)>,
    /// Children without requests whose counter is worth remembering.
    gone: BTreeSet<(Counter, NodeId)>,
    /// The counter of the child that went last.
    last_gone: Counter,
}

pub(super) type ChildrenInLine<'a> = Copied<btree_set::Iter<'a, (Counter, NodeId)>>;
pub(super) type Line<'a> = btree_map::Values<'a, Rank, Waiting>;

/// Where a request stands: lower ones come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Standing {
    pub(crate) tier: Tier,
    pub(crate) holder: (Counter, NodeId),
    pub(crate) tenant: (Counter, NodeId),
    pub(crate) key: (Counter, NodeId),
}

impl Default for Shares {
    fn default() -> Self {
        let root = |tier: Tier| Node::new(tier.root(), Name::Everyone, Weight::ONE);
        Self {
            nodes: vec![root(Tier::Interactive), root(Tier::Batch)],
            unused: Vec::new(),
            deadlines: BTreeSet::new(),
        }
    }
}

impl Tier {
    pub(super) fn root(self) -> NodeId {
        NodeId(self as u32)
    }
}

impl Shares {
    /// A request comes: the key it waits under. Whoever had nothing here is
    /// lifted to where the others are, because idling saves no credit.
    pub fn enter(&mut self, seat: &Seat) -> NodeId {
        let Seat { tier, holder, tenant, key, weight } = seat;
        let mut at = tier.root();
        self.node_mut(at).requests += 1;
        for (name, weight) in [(holder, *weight), (tenant, Weight::ONE), (key, Weight::ONE)] {
            let child = self.child(at, name, weight);
            self.weigh(child, weight);
            if self.node(child).requests == 0 {
                self.lift(at, child);
            }
            self.node_mut(child).requests += 1;
            at = child;
        }
        at
    }

    /// A request is over.
    pub fn leave(&mut self, key: NodeId) {
        let mut at = key;
        while !self.is_root(at) {
            let parent = self.node(at).parent;
            let node = self.node_mut(at);
            node.requests -= 1;
            if node.requests == 0 {
                assert_eq!((node.waiting, node.predicted), (0, DeviceNanos::ZERO), "it left whole");
                self.depart(parent, at);
            }
            at = parent;
        }
        self.node_mut(at).requests -= 1;
    }

    /// Puts something into the line of a key.
    pub fn push(&mut self, key: NodeId, waiting: Waiting) {
        let replaced = self.node_mut(key).line.insert(waiting.rank, waiting);
        assert!(replaced.is_none(), "nothing waits twice");
        self.on_path(key, |parent, child, id| {
            if child.waiting == 0 {
                parent.in_line.insert((child.counter, id));
            }
            child.waiting += 1;
        });
    }

    /// Takes something out of the line of a key, if it is there.
    pub fn take(&mut self, key: NodeId, rank: Rank) -> Option<Waiting> {
        let waiting = self.node_mut(key).line.remove(&rank)?;
        self.on_path(key, |parent, child, id| {
            child.waiting -= 1;
            if child.waiting == 0 {
                parent.in_line.remove(&(child.counter, id));
            }
        });
        Some(waiting)
    }

    /// Books time on a key and on those above it: what was `attributed`, and
    /// what is still predicted where `from` was before.
    pub fn charge(
        &mut self,
        key: NodeId,
        attributed: DeviceNanos,
        from: DeviceNanos,
        to: DeviceNanos,
    ) {
        if attributed == DeviceNanos::ZERO && from == to {
            return;
        }
        self.on_path(key, |parent, child, id| {
            let served = child.served();
            child.attributed += attributed;
            child.predicted = child.predicted + to - from;
            if parent.served.remove(&(served, id)) {
                parent.served.insert((child.served(), id));
            }
            let counter = child.reckon();
            let before = std::mem::replace(&mut child.counter, counter);
            if before == counter {
                return;
            }
            if parent.present.remove(&(before, id)) {
                parent.present.insert((counter, id));
            }
            if parent.in_line.remove(&(before, id)) {
                parent.in_line.insert((counter, id));
            }
        });
    }

    /// A request has to start by `deadline`.
    pub fn expect_start(&mut self, request: SequenceId, deadline: MonotonicTime) {
        self.deadlines.insert((deadline, request));
    }

    /// A request has started, or is gone.
    pub fn forget_deadline(&mut self, request: SequenceId, deadline: MonotonicTime) {
        self.deadlines.remove(&(deadline, request));
    }

    /// Requests, by their first sequence, that waited past their deadline.
    pub fn expired(&self, now: MonotonicTime) -> impl Iterator<Item = SequenceId> {
        self.deadlines
            .iter()
            .take_while(move |(deadline, _)| *deadline < now)
            .map(|(_, request)| *request)
    }

    pub(super) fn is_expired(&self, waiting: &Waiting, now: MonotonicTime) -> bool {
        let &Waiting { deadline, request, .. } = waiting;
        deadline < now && self.deadlines.contains(&(deadline, request))
    }

    /// Where a key stands.
    pub(super) fn standing(&self, key: NodeId) -> Standing {
        let tenant = self.node(key).parent;
        let holder = self.node(tenant).parent;
        let root = self.node(holder).parent;
        let counter = |id: NodeId| (self.node(id).counter, id);
        Standing {
            tier: if root == Tier::Batch.root() { Tier::Batch } else { Tier::Interactive },
            holder: counter(holder),
            tenant: counter(tenant),
            key: counter(key),
        }
    }

    pub(super) fn weight(&self, id: NodeId) -> Weight {
        self.node(id).weight
    }

    pub(super) fn parent(&self, id: NodeId) -> NodeId {
        self.node(id).parent
    }

    pub(super) fn is_root(&self, id: NodeId) -> bool {
        id.0 <= Tier::Batch.root().0
    }

    pub(super) fn counter(&self, id: NodeId) -> Counter {
        self.node(id).counter
    }

    /// What a node's counter would be with `more` on it.
    pub(super) fn counter_with(&self, id: NodeId, more: DeviceNanos) -> Counter {
        let node = self.node(id);
        let time = node.attributed + node.predicted + more;
        node.base.plus(Counter::of(time, node.weight))
    }

    /// The smallest counter among those with requests, beside or at `id`, and
    /// whose it is.
    pub(super) fn smallest_beside(&self, id: NodeId) -> Option<(Counter, NodeId)> {
        self.node(self.node(id).parent).present.first().copied()
    }

    /// Whether anyone has requests in a tier.
    pub(super) fn has_requests(&self, tier: Tier) -> bool {
        self.node(tier.root()).requests > 0
    }

    /// Children with something in a line, smallest counter first.
    pub(super) fn in_line(&self, id: NodeId) -> ChildrenInLine<'_> {
        self.node(id).in_line.iter().copied()
    }

    /// The line of a key, whose turn it is first.
    pub(super) fn line(&self, key: NodeId) -> Line<'_> {
        self.node(key).line.values()
    }

    /// Device time attributed to a holder since it was made, and predicted now.
    #[cfg(test)]
    pub(crate) fn account(&self, seat: &Seat) -> Option<(DeviceNanos, DeviceNanos)> {
        let holder = *self.node(seat.tier.root()).children.get(&seat.holder)?;
        let node = self.node(holder);
        assert_eq!(node.counter, node.reckon());
        Some((node.attributed, node.predicted))
    }

    /// Nodes that are kept, the roots left out.
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

    /// Does something to each node from `key` up to its holder, with its parent.
    fn on_path(&mut self, key: NodeId, mut act: impl FnMut(&mut Node, &mut Node, NodeId)) {
        let mut at = key;
        while !self.is_root(at) {
            let above = self.node(at).parent;
            let [child, parent] = self
                .nodes
                .get_disjoint_mut([at.0 as usize, above.0 as usize])
                .expect("a node is not its own parent, but for the roots");
            act(parent, child, at);
            at = above;
        }
    }

    /// The child of `parent` that has this name, made if it is new.
    fn child(&mut self, parent: NodeId, name: &Name, weight: Weight) -> NodeId {
        if let Some(&child) = self.node(parent).children.get(name) {
            return child;
        }
        let node = Node::new(parent, name.clone(), weight);
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

    /// Another weight counts from now on; the counter stays as it was.
    fn weigh(&mut self, id: NodeId, weight: Weight) {
        let node = self.node_mut(id);
        if node.weight == weight {
            return;
        }
        let predicted = Counter::of(node.predicted, weight);
        let served = node.served();
        node.base = node.counter.minus(predicted);
        node.attributed = DeviceNanos::ZERO;
        node.weight = weight;
        let (before, after) = (node.counter, node.reckon());
        node.counter = after;
        let (parent, now_served) = (node.parent, node.served());
        let parent = self.node_mut(parent);
        if parent.served.remove(&(served, id)) {
            parent.served.insert((now_served, id));
        }
        for set in [&mut parent.present, &mut parent.in_line, &mut parent.gone] {
            if set.remove(&(before, id)) {
                set.insert((after, id));
            }
        }
    }

    /// Brings a child that had no requests to where the others are.
    fn lift(&mut self, parent: NodeId, child: NodeId) {
        let counter = self.node(child).counter;
        let above = self.node_mut(parent);
        above.gone.remove(&(counter, child));
        let floor = above.floor();
        let node = self.node_mut(child);
        if node.counter < floor {
            node.base = node.base.plus(floor.minus(node.counter));
            node.counter = node.reckon();
        }
        let (counter, served) = (node.counter, node.served());
        let above = self.node_mut(parent);
        above.present.insert((counter, child));
        above.served.insert((served, child));
    }

    /// A child has no requests any more. It is forgotten unless coming back
    /// would then give it what others have not had.
    fn depart(&mut self, parent: NodeId, child: NodeId) {
        let (counter, served) = (self.node(child).counter, self.node(child).served());
        let above = self.node_mut(parent);
        above.present.remove(&(counter, child));
        above.served.remove(&(served, child));
        above.last_gone = counter;
        above.gone.insert((counter, child));
        let floor = above.floor();
        while let Some(&(counter, id)) = self.node(parent).gone.first()
            && (counter <= floor || self.node(parent).gone.len() > MOST_REMEMBERED)
        {
            self.node_mut(parent).gone.remove(&(counter, id));
            self.drop_child(parent, id);
        }
    }

    fn drop_child(&mut self, parent: NodeId, child: NodeId) {
        let name = self.node(child).name.clone();
        self.node_mut(parent).children.remove(&name);
        let below: Vec<NodeId> = self.node(child).gone.iter().map(|&(_, id)| id).collect();
        for id in below {
            self.drop_child(child, id);
        }
        // What it held goes now, not when its place is taken again.
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
            base: Counter::default(),
            attributed: DeviceNanos::ZERO,
            predicted: DeviceNanos::ZERO,
            counter: Counter::default(),
            requests: 0,
            line: BTreeMap::new(),
            waiting: 0,
            children: HashMap::new(),
            present: BTreeSet::new(),
            served: BTreeSet::new(),
            in_line: BTreeSet::new(),
            gone: BTreeSet::new(),
            last_gone: Counter::default(),
        }
    }

    fn reckon(&self) -> Counter {
        self.base.plus(Counter::of(self.attributed + self.predicted, self.weight))
    }

    /// The counter without what is predicted.
    fn served(&self) -> Counter {
        self.base.plus(Counter::of(self.attributed, self.weight))
    }

    /// Where a child begins that comes now: beside whoever has had least. What
    /// is only predicted of others' prompts is no time that they have had, and
    /// a newcomer would stand behind it.
    fn floor(&self) -> Counter {
        self.served.first().map_or(self.last_gone, |&(counter, _)| counter)
    }
}

/// Children that a node remembers though they have nothing here.
const MOST_REMEMBERED: usize = 10_000;

#[cfg(test)]
mod tests;
