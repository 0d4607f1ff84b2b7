//! Exhaustive test of duplicate, late and reordered resolutions (C10): all orders of
//! settlement, void, expiry and crash of two requests, compared with a small model.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use common::*;
use tollgate_admission::{
    Admission, AdmissionOptions, Period, ReserveError, ResolveError, Resolved, ScopeLimits,
};
use tollgate_domain::{DeviceClass, DeviceNanos};

const CAP: u64 = 100;
/// Largest spend of each request, and its possible acts.
const BUDGETS: [u64; 2] = [30, 40];
const COSTS: [u64; 2] = [20, 35];

#[derive(Clone, Copy, Debug)]
enum Act {
    Reserve(usize),
    Settle(usize),
    Void(usize),
    /// Enough time for every open hold to expire.
    Delay,
    /// The gateway crashes. The next one restores the posted spend from the ledger.
    Crash,
}

const ACTS: [Act; 7] = [
    Act::Reserve(0),
    Act::Settle(0),
    Act::Settle(1),
    Act::Void(0),
    Act::Void(1),
    Act::Delay,
    Act::Crash,
];

/// A model of the state of each hold and the posted spend.
struct Model {
    holds: [State; 2],
    posted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Unknown,
    Held,
    Ended(Resolved),
}

impl Model {
    fn settle(&mut self, which: usize) -> Result<bool, ResolveError> {
        let late = match self.holds[which] {
            State::Held => false,
            State::Ended(Resolved::Expired) => true,
            State::Ended(how) => return Err(ResolveError::AlreadySettled(how)),
            State::Unknown => return Err(ResolveError::Unknown),
        };
        self.holds[which] = State::Ended(Resolved::Posted);
        self.posted += COSTS[which];
        Ok(late)
    }

    fn void(&mut self, which: usize) -> Result<(), ResolveError> {
        match self.holds[which] {
            State::Held => self.holds[which] = State::Ended(Resolved::Voided),
            State::Ended(how) => return Err(ResolveError::AlreadySettled(how)),
            State::Unknown => return Err(ResolveError::Unknown),
        }
        Ok(())
    }

    fn is_held(&self, which: usize) -> bool {
        self.holds[which] == State::Held
    }

    fn left(&self) -> u64 {
        let held: u64 = (0..2).filter(|&which| self.is_held(which)).map(|it| BUDGETS[it]).sum();
        CAP.saturating_sub(self.posted + held)
    }
}

struct Play {
    admission: Admission,
    scopes: Vec<ScopeLimits>,
    model: Model,
    now: u64,
}

impl Play {
    fn new() -> Self {
        let mut play = Self {
            admission: Admission::new(AdmissionOptions::default()),
            scopes: vec![scoped(tenant("acme"), day_cap(CAP))],
            model: Model { holds: [State::Unknown; 2], posted: 0 },
            now: 0,
        };
        (0..2).for_each(|which| play.act(Act::Reserve(which)));
        play
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Reserve(which) => self.reserve(which),
            Act::Settle(which) => {
                let spent = spent(1, COSTS[which]);
                let settled = self.admission.settle(at(self.now), &id(which as u64), spent);
                let late = settled.map(|settled| settled.late);
                assert_eq!(late, self.model.settle(which));
            }
            Act::Void(which) => {
                let voided = self.admission.void(at(self.now), &id(which as u64));
                assert_eq!(voided.map(drop), self.model.void(which));
            }
            Act::Delay => {
                self.now += 700 * SECOND;
                let mut expired = self.admission.expire(at(self.now)).expired;
                expired.sort();
                let held: Vec<_> = (0..2).filter(|&which| self.model.is_held(which)).collect();
                assert_eq!(expired, held.iter().map(|&it| id(it as u64)).collect::<Vec<_>>());
                held.iter().for_each(|&it| self.model.holds[it] = State::Ended(Resolved::Expired));
            }
            Act::Crash => {
                self.admission = Admission::new(AdmissionOptions::default());
                let (today, posted) = (Period::Day(utc(0).day()), DeviceNanos(self.model.posted));
                self.admission.restore_spend(tenant("acme"), &DeviceClass::cpu(), today, posted);
                self.model.holds = [State::Unknown; 2];
            }
        }
    }

    fn reserve(&mut self, which: usize) {
        let left = self.model.left();
        let asked = request(which as u64, self.now, &self.scopes, estimate(1, 1, BUDGETS[which]));
        match self.admission.reserve(at(self.now), utc(self.now), asked) {
            Ok(hold) => {
                assert_eq!(self.model.holds[which], State::Unknown);
                assert_eq!(hold.budget(), Some(DeviceNanos(BUDGETS[which].min(left))));
                self.model.holds[which] = State::Held;
                std::mem::forget(hold); // it is resolved by its id
            }
            Err(ReserveError::AlreadyHeld) => {
                assert_ne!(self.model.holds[which], State::Unknown);
            }
            Err(ReserveError::Refused(refusal)) => panic!("{left} are left: {refusal:?}"),
        }
    }

    /// Checks that held and posted amounts equal the model's, to the nanosecond.
    fn check(&mut self) {
        let status = self.admission.status();
        let held = (0..2).filter(|&which| self.model.is_held(which)).count();
        assert_eq!((status.running, status.queued), (held, 0));
        let rest = estimate(1, 1, CAP);
        let asked = request(1_000, self.now, &self.scopes, rest);
        match self.admission.reserve(at(self.now), utc(self.now), asked) {
            Ok(hold) => {
                assert_eq!(hold.budget(), Some(DeviceNanos(self.model.left())));
                hold.void(at(self.now)).expect("it is open");
            }
            Err(_) => assert_eq!(self.model.left(), 0),
        }
    }
}

/// Runs every sequence of `length` acts. Returns the number of sequences.
fn all(length: u32) -> u64 {
    let count = (ACTS.len() as u64).pow(length);
    for number in 0..count {
        let (mut rest, mut acts) = (number, Vec::with_capacity(length as usize));
        for _ in 0..length {
            acts.push(ACTS[(rest % ACTS.len() as u64) as usize]);
            rest /= ACTS.len() as u64;
        }
        let played = std::panic::catch_unwind(|| {
            let mut play = Play::new();
            acts.iter().for_each(|&act| play.act(act));
            play.check();
        });
        assert!(played.is_ok(), "{acts:?}");
    }
    count
}

#[test]
fn all_orders_of_five_acts_match_model() {
    let played: u64 = (0..=5).map(all).sum();
    assert_eq!(played, 19_608);
}

mod long {
    #[test]
    #[ignore = "long: every order of seven acts"]
    fn interleavings_of_seven_acts_agree_with_the_model() {
        assert_eq!(super::all(7), 823_543);
    }
}
