//! Tests of virtual times and queues, by hand and at random.

use proptest::prelude::*;

use tollgate_domain::{Caller, KeyId, PoolName, TenantId};

use super::*;
use crate::schedule::queue_heads::QueueHeads;
use crate::schedule::{Rows, SchedulePolicy};

fn seat(tier: Tier, pool: Option<u8>, tenant: u8, key: u8, weight: f64) -> Seat {
    let name = |what: &str, number: u8| format!("{what}-{number}");
    let pool = pool.map(|number| PoolName::new(&name("pool", number)).expect("a name"));
    let caller = Caller {
        tenant: TenantId::new(&name("tenant", tenant)).expect("a name"),
        key: KeyId::new(&name("key", key)).expect("a name"),
    };
    Seat::new(SchedulePolicy::Fair, tier, pool.as_ref(), &caller, weight)
}

fn of(tenant: u8) -> Seat {
    seat(Tier::Interactive, None, tenant, 0, 1.0)
}

const fn millis(time: u64) -> DeviceNanos {
    DeviceNanos(time * 1_000_000)
}

impl Shares {
    fn book(&mut self, key: NodeId, time: DeviceNanos) {
        self.charge(key, time, DeviceNanos::ZERO, DeviceNanos::ZERO);
    }

    fn holder_counter(&self, key: NodeId) -> VirtualTime {
        self.priority(key).share_owner.0
    }
}

fn counted(time: DeviceNanos) -> VirtualTime {
    VirtualTime::of(time, Weight::ONE)
}

#[test]
fn idle_time_earns_no_credit() {
    let mut shares = Shares::default();
    let (busy, slow) = (shares.enter(&of(0)), shares.enter(&of(1)));
    shares.book(busy, millis(900));
    shares.book(slow, millis(300));
    // A new tenant starts at the smallest virtual time, and so does one that was away.
    let fresh = shares.enter(&of(2));
    assert_eq!(shares.holder_counter(fresh), counted(millis(300)));
    shares.leave(fresh);
    shares.book(slow, millis(500));
    let back = shares.enter(&of(2));
    assert_eq!(shares.holder_counter(back), counted(millis(800)));
}

/// Returns an entry of a queue.
fn entry(number: u64) -> Waiting {
    let sequence = SequenceId(number);
    Waiting {
        sequence,
        request: sequence,
        rank: Rank::again(sequence),
        deadline: MonotonicTime(0),
        tokens: 1,
        pending: 1,
        most: 2,
        rows: Rows::Last,
        followers: 0,
        predicted: DeviceNanos::ZERO,
    }
}

#[test]
fn credit_of_node_without_queue_is_bounded() {
    // (an entry of the slow tenant waits, its virtual time in milliseconds at the end)
    for (waits, expected) in [(false, 650), (true, 300)] {
        let mut shares = Shares::default();
        let (busy, slow) = (shares.enter(&of(0)), shares.enter(&of(1)));
        shares.book(busy, millis(900));
        shares.book(slow, millis(300));
        if waits {
            shares.push(slow, entry(1));
        }
        shares.bound_credit(slow, millis(250));
        assert_eq!(shares.holder_counter(slow), counted(millis(expected)), "{waits}");
        assert_eq!(shares.holder_counter(busy), counted(millis(900)), "{waits}");
    }
}

#[test]
fn credit_is_kept_while_another_node_waits() {
    // (an entry of a third tenant waits, the virtual time of the slow one in milliseconds)
    for (waits, expected) in [(false, 650), (true, 0)] {
        let mut shares = Shares::default();
        let (busy, third) = (shares.enter(&of(0)), shares.enter(&of(2)));
        let slow = shares.enter(&of(1));
        shares.book(busy, millis(900));
        if waits {
            shares.push(third, entry(1));
        }
        shares.bound_credit(slow, millis(250));
        assert_eq!(shares.holder_counter(slow), counted(millis(expected)), "{waits}");
    }
}

#[test]
fn predicted_time_of_others_ends_no_credit() {
    let mut shares = Shares::default();
    let (reader, slow) = (shares.enter(&of(0)), shares.enter(&of(1)));
    shares.charge(reader, millis(100), DeviceNanos::ZERO, millis(800));
    shares.bound_credit(slow, millis(250));
    assert_eq!(shares.holder_counter(slow), counted(millis(0)));
}

#[test]
fn debt_of_node_that_left_is_bounded() {
    let mut shares = Shares::default();
    let (busy, slow) = (shares.enter(&of(0)), shares.enter(&of(1)));
    shares.book(busy, millis(900));
    shares.leave(busy);
    shares.bound_credit(slow, millis(250));
    assert_eq!(shares.holder_counter(slow), counted(millis(650)));
    // The one that left keeps the rest of its debt.
    let back = shares.enter(&of(0));
    assert_eq!(shares.holder_counter(back), counted(millis(900)));
}

#[test]
fn predicted_time_of_others_lifts_no_child() {
    let mut shares = Shares::default();
    let reader = shares.enter(&of(0));
    shares.charge(reader, millis(100), DeviceNanos::ZERO, millis(840));
    assert_eq!(shares.holder_counter(reader), counted(millis(940)));
    let fresh = shares.enter(&of(1));
    assert_eq!(shares.holder_counter(fresh), counted(millis(100)));
}

#[test]
fn empty_node_starts_children_at_last_departure() {
    let mut shares = Shares::default();
    let (one, other) = (shares.enter(&of(0)), shares.enter(&of(1)));
    shares.book(one, millis(900));
    shares.book(other, millis(300));
    shares.leave(one);
    shares.leave(other);
    let fresh = shares.enter(&of(2));
    assert_eq!(shares.holder_counter(fresh), counted(millis(300)));
    // A tenant with more keeps it: leaving erases nothing.
    let back = shares.enter(&of(0));
    assert_eq!(shares.holder_counter(back), counted(millis(900)));
}

#[test]
fn virtual_time_is_time_over_weight() {
    for (weight, time, expected) in [(1.0, 700, 700), (2.0, 700, 350), (0.5, 700, 1_400)] {
        let mut shares = Shares::default();
        let key = shares.enter(&seat(Tier::Interactive, None, 0, 0, weight));
        shares.book(key, millis(time));
        assert_eq!(shares.holder_counter(key), counted(millis(expected)), "{weight}");
        // Keys and tenants within a share owner have no weights.
        assert_eq!(shares.priority(key).key.0, counted(millis(time)), "{weight}");
    }
}

#[test]
fn changed_weight_counts_from_then_on() {
    let mut shares = Shares::default();
    let weighing = |weight| seat(Tier::Interactive, None, 0, 0, weight);
    let key = shares.enter(&weighing(1.0));
    shares.book(key, millis(600));
    shares.enter(&weighing(2.0));
    assert_eq!(shares.holder_counter(key), counted(millis(600)));
    shares.book(key, millis(600));
    assert_eq!(shares.holder_counter(key), counted(millis(900)));
}

#[test]
fn extreme_weights_are_clamped() {
    for weight in [f64::MIN_POSITIVE, 1e300] {
        let mut shares = Shares::default();
        let key = shares.enter(&seat(Tier::Interactive, None, 0, 0, weight));
        shares.book(key, DeviceNanos(u64::MAX / 2));
        assert!(shares.holder_counter(key) > VirtualTime::default(), "{weight}");
    }
}

#[test]
fn finished_requests_leave_no_nodes() {
    let mut shares = Shares::default();
    for number in 0..40_000u32 {
        let caller = Caller {
            tenant: TenantId::new(&format!("tenant-{number}")).expect("a name"),
            key: KeyId::new(&format!("key-{number}")).expect("a name"),
        };
        let seat = Seat::new(SchedulePolicy::Fair, Tier::Interactive, None, &caller, 1.0);
        let key = shares.enter(&seat);
        // Each has more than the next, so none can be forgotten without an advantage.
        shares.book(key, millis(100_000 - u64::from(number)));
        if number % 2 == 0 {
            shares.enter(&of(0));
        }
        shares.leave(key);
    }
    assert!(shares.kept() <= 2 * MOST_REMEMBERED + 3, "{}", shares.kept());
}

/// An event in the tree.
#[derive(Clone, Debug)]
enum Act {
    Enter { seat: usize },
    Leave { at: usize },
    Push { at: usize, fresh: bool, predicted: u64 },
    Take { at: usize },
    Charge { at: usize, time: u64, predicted: u64 },
    BoundCredit { at: usize, most: u64 },
}

fn any_act() -> impl Strategy<Value = Act> {
    let at = || 0usize..12;
    prop_oneof![
        3 => at().prop_map(|seat| Act::Enter { seat }),
        2 => at().prop_map(|at| Act::Leave { at }),
        4 => (at(), any::<bool>(), 0u64..1_000_000)
            .prop_map(|(at, fresh, predicted)| Act::Push { at, fresh, predicted }),
        2 => at().prop_map(|at| Act::Take { at }),
        4 => (at(), 0u64..1_000_000, 0u64..1_000_000)
            .prop_map(|(at, time, predicted)| Act::Charge { at, time, predicted }),
        2 => (at(), 0u64..1_000_000).prop_map(|(at, most)| Act::BoundCredit { at, most }),
    ]
}

fn seats() -> Vec<Seat> {
    let mut seats = Vec::new();
    for (number, weight) in (0u8..).zip([1.0, 0.3, 3.0]) {
        seats.push(seat(Tier::Interactive, None, number, 0, weight));
        seats.push(seat(Tier::Interactive, None, number, 1, weight));
        seats.push(seat(Tier::Interactive, Some(number / 2), 10 + number, 0, 2.0));
        seats.push(seat(Tier::Batch, None, number, 0, weight));
    }
    seats
}

/// A request in the tree.
struct Here {
    key: NodeId,
    queues: Vec<Rank>,
    predicted: DeviceNanos,
}

fn play(acts: &[Act]) -> Shares {
    let seats = seats();
    let mut shares = Shares::default();
    let mut here: Vec<Here> = Vec::new();
    for (number, act) in (1u64..).zip(acts) {
        match *act {
            Act::Enter { seat } => {
                let key = shares.enter(&seats[seat]);
                here.push(Here { key, queues: Vec::new(), predicted: DeviceNanos::ZERO });
            }
            Act::Leave { at } if at < here.len() => {
                let Here { key, queues, predicted } = here.swap_remove(at);
                for rank in queues {
                    assert!(shares.take(key, rank).is_some());
                }
                shares.charge(key, DeviceNanos::ZERO, predicted, DeviceNanos::ZERO);
                shares.leave(key);
            }
            Act::Push { at, fresh, predicted } if at < here.len() => {
                let sequence = SequenceId(number);
                let deadline = MonotonicTime(number % 7);
                let rank = if fresh {
                    Rank::fresh(SchedulePolicy::Fair, deadline, sequence)
                } else {
                    Rank::again(sequence)
                };
                let predicted = DeviceNanos(predicted);
                let waiting = Waiting { rank, deadline, predicted, ..entry(number) };
                shares.push(here[at].key, waiting);
                here[at].queues.push(rank);
            }
            Act::Take { at } => {
                if let Some(Here { key, queues, .. }) = here.get_mut(at)
                    && let Some(rank) = queues.pop()
                {
                    assert!(shares.take(*key, rank).is_some());
                    assert!(shares.take(*key, rank).is_none());
                }
            }
            Act::Charge { at, time, predicted } => {
                if let Some(Here { key, predicted: before, .. }) = here.get_mut(at) {
                    let after = DeviceNanos(predicted);
                    let before = std::mem::replace(before, after);
                    shares.charge(*key, DeviceNanos(time), before, after);
                }
            }
            Act::BoundCredit { at, most } => {
                if let Some(Here { key, .. }) = here.get(at) {
                    shares.bound_credit(*key, DeviceNanos(most));
                }
            }
            Act::Leave { .. } | Act::Push { .. } => {}
        }
        check_invariants(&shares);
    }
    shares
}

/// Checks that the sums of each node equal its children's, and that each set holds the
/// right nodes.
fn check_invariants(shares: &Shares) {
    for (index, node) in shares.nodes.iter().enumerate() {
        let id = NodeId(index as u32);
        if shares.unused.contains(&id) {
            continue;
        }
        assert_eq!(node.virtual_time, node.reckon());
        let children: Vec<(NodeId, &Node)> =
            node.children.values().map(|&child| (child, shares.node(child))).collect();
        if !children.is_empty() {
            let requests: u32 = children.iter().map(|(_, child)| child.requests).sum();
            let waiting: u32 = children.iter().map(|(_, child)| child.waiting).sum();
            assert_eq!(node.requests, requests);
            assert!(shares.is_root(id) || node.waiting == waiting);
        }
        let those = |is: fn(&Node) -> bool| -> BTreeSet<(VirtualTime, NodeId)> {
            let those = children.iter().filter(|(_, child)| is(child));
            those.map(|&(id, child)| (child.virtual_time, id)).collect()
        };
        assert_eq!(node.present, those(|child| child.requests > 0));
        let served = children.iter().filter(|(_, child)| child.requests > 0);
        let served: BTreeSet<_> = served.map(|&(id, child)| (child.served(), id)).collect();
        assert_eq!(node.served, served);
        assert_eq!(node.queued, those(|child| child.waiting > 0));
        assert_eq!(node.gone, those(|child| child.requests == 0));
    }
}

proptest! {
    #[test]
    fn tree_invariants_hold_for_random_acts(acts in prop::collection::vec(any_act(), 0..120)) {
        play(&acts);
    }

    /// Checks that the read-only walk gives the same order as taking entries from the tree.
    #[test]
    fn queue_heads_match_taking_from_the_tree(acts in prop::collection::vec(any_act(), 0..120)) {
        let shares = play(&acts);
        let mut queue_heads = QueueHeads::new(&shares, MonotonicTime(0));
        let mut taken = shares.clone();
        loop {
            let head = queue_heads.first();
            let first = QueueHeads::new(&taken, MonotonicTime(0)).first();
            let (Some(head), Some(first)) = (head, first) else {
                prop_assert!(head.is_none() && first.is_none());
                break;
            };
            prop_assert_eq!(head.waiting.rank, first.waiting.rank);
            prop_assert_eq!(head.priority, first.priority);
            let (key, rank) = (head.key, head.waiting.rank);
            queue_heads.take(key);
            let waiting = taken.take(key, rank).expect("it waits");
            taken.charge(key, DeviceNanos::ZERO, DeviceNanos::ZERO, waiting.predicted);
        }
    }

    /// Checks that a new or returning node starts no lower than its siblings and no lower
    /// than it left.
    #[test]
    fn absence_never_lowers_virtual_time(acts in prop::collection::vec(any_act(), 0..120), who in 0usize..12) {
        let mut shares = play(&acts);
        let seat = &seats()[who];
        let root = shares.node(root(seat.tier));
        let floor = root.floor();
        let before = root.children.get(&seat.share_owner).map(|&id| shares.node(id));
        let (here, left) = before.map_or((false, floor), |it| (it.requests > 0, it.virtual_time));
        let key = shares.enter(seat);
        let after = shares.holder_counter(key);
        prop_assert_eq!(after, if here { left } else { left.max(floor) });
    }
}
