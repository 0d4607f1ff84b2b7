//! The queue of a scope that several tenants share: each tenant keeps its part of the
//! places to wait, and the tenant that runs least gets the next free place. Each rule has
//! its control: the same load of one tenant, or without the rule.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use common::*;
use proptest::prelude::*;
use tollgate_admission::{
    Arrival, Hold, HoldState, Limit, QueueTicketLost, Refusal, Requester, Reserve, ReserveError,
    Scope, ScopeLimits,
};
use tollgate_domain::{ModelName, PlanLimits, PoolName};

fn places(concurrent: u32, queued: u32) -> PlanLimits {
    PlanLimits { concurrent: Some(concurrent), queued: Some(queued), ..PlanLimits::default() }
}

fn model(name: &str) -> Scope {
    Scope::Model(ModelName::new(name).expect("a name"))
}

/// A gateway with one shared scope, whose requests are numbered.
struct Shared {
    gate: Gate,
    next: u64,
}

impl Shared {
    fn new(scopes: Vec<ScopeLimits>) -> Self {
        Self { gate: Gate::new(scopes), next: 0 }
    }

    fn reserve(&mut self, of: Requester, scopes: &[ScopeLimits]) -> Result<Hold, Box<Refusal>> {
        self.next += 1;
        let asked = request(self.next, 0, scopes, estimate(1, 1, 1));
        match self.gate.admission.reserve(at(0), utc(0), Reserve { requester: of, ..asked }) {
            Ok(hold) => Ok(hold),
            Err(ReserveError::Refused(refusal)) => Err(refusal),
            Err(ReserveError::AlreadyHeld) => panic!("ids are numbered"),
        }
    }

    fn ask(&mut self, name: &str) -> Result<Hold, Box<Refusal>> {
        let scopes = self.gate.scopes.clone();
        self.reserve(requester(name), &scopes)
    }

    fn arrive(&self, name: &str) -> Result<Arrival, Box<Refusal>> {
        self.gate.admission.arrive(at(0), &requester(name), &self.gate.scopes)
    }
}

fn lost(hold: &Hold) -> Option<QueueTicketLost> {
    match pin!(hold.queue_ticket()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Err(lost)) => Some(lost),
        Poll::Ready(Ok(())) | Poll::Pending => None,
    }
}

/// Returns the requests that still hold their limits, and how many have lost their place.
fn kept(holds: Vec<Hold>) -> (Vec<Hold>, usize) {
    let before = holds.len();
    let kept: Vec<Hold> = holds.into_iter().filter(|hold| lost(hold).is_none()).collect();
    let lost = before - kept.len();
    (kept, lost)
}

#[test]
fn full_queue_makes_room_for_other_tenants() {
    for scope in [pool("trials"), model("m"), Scope::Gateway] {
        let mut shared = Shared::new(vec![scoped(scope.clone(), places(1, 8))]);
        let _runs = shared.ask("greedy").expect("a place");
        let greedy: Vec<Hold> = (0..8).map(|_| shared.ask("greedy").expect("room")).collect();
        // The control: the tenant with all the places gets no more, and nothing gives way.
        let refusal = shared.ask("greedy").expect_err("the queue is full");
        assert_eq!((refusal.limit, refusal.value), (Limit::Queued, 8));
        assert!(greedy.iter().all(|hold| lost(hold).is_none()));
        // Half of the places go to the second tenant, one by one.
        let late: Vec<Hold> = (0..4).map(|_| shared.ask("late").expect("its half")).collect();
        assert!(late.iter().all(|hold| hold.state() == HoldState::Queued));
        assert!(shared.ask("late").is_err(), "no more than half");
        // The latest requests of the first tenant gave way, and their clients are told so.
        for (number, hold) in greedy.iter().enumerate() {
            match lost(hold) {
                None => assert!(number < 4, "{number} kept its place"),
                Some(QueueTicketLost::GaveWay(refusal)) => {
                    assert!(number >= 4, "{number} lost its place");
                    let seen = (refusal.limit, refusal.scope, refusal.value, refusal.permanent);
                    assert_eq!(seen, (Limit::Queued, scope.clone(), 8, false));
                }
                Some(QueueTicketLost::Ended) => panic!("{number} ended"),
            }
        }
        let status = shared.gate.admission.status();
        assert_eq!((status.running, status.queued), (1, 8));
        // A third tenant gets two places, and the others keep three each.
        let third: Vec<Hold> = (0..2).map(|_| shared.ask("third").expect("its third")).collect();
        assert!(shared.ask("third").is_err());
        assert_eq!([greedy, late, third].map(|holds| kept(holds).0.len()), [3, 3, 2]);
    }
}

#[test]
fn queue_of_one_tenant_never_gives_way() {
    let mut shared = Shared::new(vec![scoped(tenant("acme"), places(1, 4))]);
    let holds: Vec<Hold> = (0..5).map(|_| shared.ask("acme").expect("room")).collect();
    assert!(shared.ask("acme").is_err());
    assert_eq!(kept(holds).1, 0);
}

#[test]
fn tenants_of_pool_share_one_part_of_model() {
    let mut shared = Shared::new(vec![scoped(model("m"), places(1, 4))]);
    let scopes = shared.gate.scopes.clone();
    let trial = |name: &str| Requester {
        pool: Some(PoolName::new("trials").expect("a name")),
        ..requester(name)
    };
    let _runs = shared.reserve(trial("t0"), &scopes).expect("a place");
    let trials: Vec<Hold> = (0..4)
        .map(|number| shared.reserve(trial(&format!("t{number}")), &scopes).expect("room"))
        .collect();
    // Four trial tenants with one request each count as one member with four.
    let paid = [shared.ask("paid").expect("half"), shared.ask("paid").expect("half")];
    assert!(shared.ask("paid").is_err(), "the pool keeps its half");
    let (trials, ended) = kept(trials);
    assert_eq!((trials.len(), ended, kept(paid.into()).1), (2, 2, 0));
    // The control: as members of their own they would all be even, and nothing gives way.
    let mut alone = Shared::new(scopes);
    let _runs = alone.ask("t0").expect("a place");
    let four = ["t0", "t1", "t2", "t3"].map(|name| alone.ask(name).expect("room"));
    assert!(alone.ask("paid").is_err());
    assert_eq!(kept(four.into()).1, 0);
}

#[test]
fn free_place_goes_to_tenant_that_runs_least() {
    let mut shared = Shared::new(vec![scoped(pool("trials"), places(4, 8))]);
    let running = [(); 4].map(|()| shared.ask("greedy").expect("a place"));
    let greedy = [(); 3].map(|()| shared.ask("greedy").expect("room"));
    let late = [(); 2].map(|()| shared.ask("late").expect("room"));
    let mut ends = running.into_iter();
    let mut promoted = || {
        let end = ends.next().expect("four ran").void(at(0)).expect("open");
        let [id] = &end.promoted[..] else { panic!("{end:?}") };
        id.clone()
    };
    // Three of greedy run and none of late; then two and one; then one and two.
    assert_eq!(promoted(), *late[0].id());
    assert_eq!(promoted(), *late[1].id());
    assert_eq!(promoted(), *greedy[0].id());
    // The control: requests of one tenant keep their order, as in the scope of one tenant.
    let mut one = Shared::new(vec![scoped(pool("trials"), places(1, 8))]);
    let runs = one.ask("greedy").expect("a place");
    let waits = [(); 3].map(|()| one.ask("greedy").expect("room"));
    assert_eq!(runs.void(at(0)).expect("open").promoted, [waits[0].id().clone()]);
}

/// Checks that one request gives way for a newcomer that two full queues would refuse.
#[test]
fn request_makes_room_in_two_queues() {
    let common = [scoped(pool("trials"), places(1, 4)), scoped(model("m"), places(1, 4))];
    let mut shared = Shared::new(common.to_vec());
    let _runs = shared.ask("greedy").expect("a place");
    let greedy: Vec<Hold> = (0..4).map(|_| shared.ask("greedy").expect("room")).collect();
    let late = shared.ask("late").expect("its part of both");
    assert_eq!((late.state(), kept(greedy).1), (HoldState::Queued, 1));
}

/// Checks that nothing gives way to a request that another limit refuses.
#[test]
fn refused_newcomer_takes_no_place() {
    let common = scoped(pool("trials"), places(1, 4));
    let mut shared = Shared::new(vec![common.clone()]);
    let _runs = shared.ask("greedy").expect("a place");
    let greedy: Vec<Hold> = (0..4).map(|_| shared.ask("greedy").expect("room")).collect();
    let none = PlanLimits {
        requests: Some(tollgate_domain::Rate { per_minute: 1, burst: 0 }),
        ..PlanLimits::default()
    };
    let scopes = [scoped(tenant("late"), none), common];
    let refusal = shared.reserve(requester("late"), &scopes).expect_err("no request is allowed");
    assert_eq!(refusal.limit, Limit::Requests);
    assert_eq!(kept(greedy).1, 0);
}

#[test]
fn slow_bodies_leave_places_to_other_tenants() {
    let shared = Shared::new(vec![scoped(pool("trials"), places(2, 4))]);
    let slow: Vec<Arrival> = (0..6).map(|_| shared.arrive("slow").expect("a place")).collect();
    // The control: the tenant that has all places gets no more.
    assert_eq!(shared.arrive("slow").expect_err("every place is taken").limit, Limit::Queued);
    // Another tenant may arrive until it has as many, and it runs when it has arrived.
    let late: Vec<Arrival> = (0..5).map(|_| shared.arrive("late").expect("its part")).collect();
    assert!(shared.arrive("late").is_err());
    let scopes = shared.gate.scopes.clone();
    let mut number = 100;
    let mut reserve = |name: &str, arrival| {
        number += 1;
        let asked = request(number, 0, &scopes, estimate(1, 1, 1));
        let asked = Reserve { requester: requester(name), ..asked };
        shared.gate.admission.reserve_arrived(at(0), utc(0), asked, arrival)
    };
    let late: Vec<Hold> =
        late.into_iter().map(|arrival| reserve("late", arrival).expect("a place")).collect();
    let running = late.iter().filter(|hold| hold.state() == HoldState::Running).count();
    assert_eq!(running, 2);
    // The slow bodies arrive at last. Their tenant waits with as many as the other.
    let (slow, refused): (Vec<_>, Vec<_>) =
        slow.into_iter().map(|arrival| reserve("slow", arrival)).partition(Result::is_ok);
    let slow: Vec<Hold> = slow.into_iter().map(|hold| hold.expect("partitioned")).collect();
    assert_eq!((slow.len(), refused.len()), (2, 4));
    // Of the five, two run, two wait, and the latest gave way.
    assert_eq!((kept(late).0.len(), kept(slow).0.len()), (4, 2));
}

/// An act on a shared queue.
#[derive(Clone, Copy, Debug)]
enum Act {
    Ask {
        tenant: usize,
    },
    /// Ends the request with this position among the open ones.
    End {
        which: usize,
    },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0_usize..4).prop_map(|tenant| Act::Ask { tenant }),
        1 => (0_usize..64).prop_map(|which| Act::End { which }),
    ]
}

/// The open requests of the random test: tenant, ticket in order of arrival, and state.
#[derive(Default)]
struct Play {
    open: BTreeMap<u64, (usize, Hold)>,
    asked: u64,
}

impl Play {
    fn waiting(&self) -> [usize; 4] {
        let mut waiting = [0; 4];
        for (tenant, hold) in self.open.values() {
            let is_pending = pin!(hold.queue_ticket())
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending();
            waiting[*tenant] += usize::from(is_pending);
        }
        waiting
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Checks against a count of the open requests: a tenant with fewer waiting requests than
    /// its part of the queue is never refused, no tenant loses a request of its part, and no
    /// place stays free while a request waits.
    #[test]
    fn tenants_keep_their_part_of_queue(
        acts in prop::collection::vec(act(), 1..120),
        (concurrent, queued) in (1_u32..5, 0_u32..12),
    ) {
        let names = ["a", "b", "c", "d"];
        let mut shared = Shared::new(vec![scoped(pool("trials"), places(concurrent, queued))]);
        let mut play = Play::default();
        for act in acts {
            let before = play.waiting();
            match act {
                Act::Ask { tenant } => {
                    let asked = shared.ask(names[tenant]);
                    let among = (0..4).filter(|it| before[*it] > 0 || *it == tenant).count();
                    let part = queued as usize / among;
                    match asked {
                        Ok(hold) => {
                            play.open.insert(play.asked, (tenant, hold));
                            play.asked += 1;
                        }
                        Err(refusal) => {
                            prop_assert!(before[tenant] >= part, "{before:?}: {refusal:?}");
                        }
                    }
                    let after = play.waiting();
                    for other in (0..4).filter(|other| *other != tenant) {
                        let kept = after[other] == before[other]
                            || after[other] + 1 == before[other] && after[other] >= part;
                        prop_assert!(kept, "{before:?}, then {after:?}");
                    }
                    play.open.retain(|_, (_, hold)| lost(hold).is_none());
                }
                Act::End { which } => {
                    let Some(number) = play.open.keys().nth(which).copied() else { continue };
                    let (_, hold) = play.open.remove(&number).expect("it is open");
                    hold.void(at(0)).expect("open");
                }
            }
            let (status, waiting) = (shared.gate.admission.status(), play.waiting());
            prop_assert_eq!(status.queued, waiting.iter().sum::<usize>());
            prop_assert_eq!(status.running + status.queued, play.open.len());
            prop_assert!(status.running <= concurrent as usize && status.queued <= queued as usize);
            prop_assert!(status.queued == 0 || status.running == concurrent as usize);
        }
        drop(play);
    }
}
