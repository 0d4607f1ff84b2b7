//! An attacker with random plans: rates, bursts, caps and places of keys, tenants, a pool
//! and a model, for two classes of devices. The requests of three tenants come, wait, end
//! and are cancelled at random. After each act the sums of the open requests must keep
//! every limit, and in the end every window must keep its bound and no state may be left.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::*;
use proptest::prelude::*;
use tollgate_admission::{
    Estimate, Hold, HoldState, MoneyEstimate, Requester, Reserve, Scope, ScopeLimits, Spent,
};
use tollgate_domain::{
    ByClass, DeviceClass, DeviceNanos, ModelName, PlanLimits, PoolName, Rate, RequestId,
};

const MINUTE: u64 = 60 * SECOND;
const TENANTS: [&str; 3] = ["a", "b", "c"];
const KEYS: [&str; 2] = ["k", "l"];

fn rate() -> impl Strategy<Value = Option<Rate>> {
    let burst = prop_oneof![1 => 0_u64..3, 4 => 3_u64..400];
    prop::option::of(
        (1_u64..3_000, burst).prop_map(|(per_minute, burst)| Rate { per_minute, burst }),
    )
}

fn cap() -> impl Strategy<Value = Option<DeviceNanos>> {
    prop::option::weighted(0.3, (1_u64..3_000).prop_map(DeviceNanos))
}

fn classes() -> [DeviceClass; 2] {
    [DeviceClass::cpu(), DeviceClass::new("h200").expect("a class")]
}

/// Returns a limit for each of the two classes, or for none.
fn by_class<T: Clone>(limits: [Option<T>; 2]) -> ByClass<T> {
    let mut by_class = ByClass { classes: BTreeMap::new(), default: None };
    for (class, limit) in classes().into_iter().zip(limits) {
        by_class.classes.extend(limit.map(|limit| (class, limit)));
    }
    by_class
}

fn plan() -> impl Strategy<Value = PlanLimits> {
    let rates = (rate(), rate(), rate(), rate());
    let caps = (cap(), cap(), cap());
    let places = (prop::option::of(1_u32..5), 0_u32..6);
    (rates, caps, places).prop_map(|(rates, caps, (concurrent, queued))| {
        let (requests, tokens, cpu, h200) = rates;
        PlanLimits {
            requests,
            tokens,
            device_time: by_class([cpu, h200]),
            device_time_per_day: by_class([caps.0, caps.1]),
            device_time_per_month: by_class([caps.2, None]),
            concurrent,
            queued: Some(queued),
            ..PlanLimits::default()
        }
    })
}

/// The plans of all scopes.
#[derive(Clone, Debug)]
struct Plans {
    keys: Vec<PlanLimits>,
    tenants: Vec<PlanLimits>,
    pool: PlanLimits,
    model: PlanLimits,
}

fn plans() -> impl Strategy<Value = Plans> {
    let keys = prop::collection::vec(plan(), KEYS.len());
    let tenants = prop::collection::vec(plan(), TENANTS.len());
    (keys, tenants, plan(), plan()).prop_map(|(keys, tenants, pool, model)| Plans {
        keys,
        tenants,
        pool,
        model,
    })
}

impl Plans {
    /// Returns the scopes of a request. The last tenant has no pool, and the first key of
    /// each has no plan.
    fn scopes(&self, tenant: usize, key: Option<usize>) -> Vec<ScopeLimits> {
        let name = TENANTS[tenant];
        let of_key = key.map(|key| scoped(super_key(name, KEYS[key]), self.keys[key].clone()));
        let own = scoped(crate::tenant(name), self.tenants[tenant].clone());
        let shared = (tenant < 2).then(|| scoped(pool("trials"), self.pool.clone()));
        let model = Scope::Model(ModelName::new("m").expect("a name"));
        let mut scopes: Vec<ScopeLimits> = of_key.into_iter().chain([own]).chain(shared).collect();
        scopes.push(scoped(model, self.model.clone()));
        scopes
    }
}

fn super_key(tenant: &str, key: &str) -> Scope {
    crate::key(&format!("{tenant}-{key}"))
}

/// An act of the attacker.
#[derive(Clone, Debug)]
enum Act {
    Ask {
        tenant: usize,
        key: Option<usize>,
        class: usize,
        cost: [u64; 4],
    },
    /// Ends an open request with a part of its most, in percent; a waiting one is cancelled.
    End {
        which: usize,
        part: u64,
    },
    Cancel {
        which: usize,
    },
    Pass {
        nanos: u64,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let cost = [1_u64..80, 0..160, 1..80, 0..160];
    let which = 0_usize..40;
    prop_oneof![
        5 => (0_usize..3, prop::option::of(0_usize..2), 0_usize..2, cost)
            .prop_map(|(tenant, key, class, cost)| Act::Ask { tenant, key, class, cost }),
        2 => (which.clone(), prop_oneof![Just(100_u64), 0..=100_u64])
            .prop_map(|(which, part)| Act::End { which, part }),
        1 => which.prop_map(|which| Act::Cancel { which }),
        2 => prop_oneof![4 => 0..SECOND, 2 => 0..20 * SECOND, 1 => 0..5 * MINUTE]
            .prop_map(|nanos| Act::Pass { nanos }),
    ]
}

/// A request that was admitted.
struct Admitted {
    hold: Option<Hold>,
    id: RequestId,
    scopes: Vec<ScopeLimits>,
    class: DeviceClass,
    estimate: Estimate,
    /// Time of the reservation, and of the end.
    open: (u64, Option<u64>),
    spent: Spent,
}

impl Admitted {
    fn is_in(&self, scope: &Scope) -> bool {
        self.scopes.iter().any(|limited| limited.scope == *scope)
    }

    /// Returns the expected cost and the true cost in a unit: tokens, or time of a class.
    fn costs(&self, class: Option<&DeviceClass>) -> (u64, u64) {
        match class {
            None => (self.estimate.tokens, self.spent.tokens),
            Some(class) if *class == self.class => {
                (self.estimate.expected.nanos(), self.spent.reference.nanos())
            }
            Some(_) => (0, 0),
        }
    }
}

struct Play {
    gate: Gate,
    plans: Plans,
    now: u64,
    admitted: Vec<Admitted>,
    next: u64,
}

impl Play {
    fn new(plans: Plans) -> Self {
        Self { gate: Gate::new(Vec::new()), plans, now: 0, admitted: Vec::new(), next: 0 }
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Pass { nanos } => self.now += nanos,
            Act::Ask { tenant, key, class, cost } => self.ask(tenant, key, class, cost),
            Act::End { which, part } => self.end(which, Some(part)),
            Act::Cancel { which } => self.end(which, None),
        }
        self.forget_lost();
    }

    fn ask(&mut self, tenant: usize, key: Option<usize>, class: usize, cost: [u64; 4]) {
        let scopes = self.plans.scopes(tenant, key);
        let [tokens, more_tokens, expected, more] = cost;
        let estimate = Estimate {
            tokens,
            most_tokens: tokens + more_tokens,
            expected: DeviceNanos(expected),
            most: DeviceNanos(expected + more),
            worst: DeviceNanos(expected + more),
            least: DeviceNanos(1),
            grammar_time: Duration::ZERO,
            money: MoneyEstimate::default(),
        };
        self.next += 1;
        let class = classes()[class].clone();
        let pool = (tenant == 0).then(|| PoolName::new("trials").expect("a name"));
        let asked = Reserve {
            requester: Requester { pool, ..requester(TENANTS[tenant]) },
            class: class.clone(),
            queue_deadline: at(u64::MAX),
            expires: at(u64::MAX),
            ..request(self.next, self.now, &scopes, estimate)
        };
        let id = asked.id.clone();
        // The wall clock stands still, so that a cap counts the whole play.
        if let Ok(hold) = self.gate.admission.reserve(at(self.now), utc(0), asked) {
            let (open, spent) = ((self.now, None), Spent::default());
            let hold = Some(hold);
            self.admitted.push(Admitted { hold, id, scopes, class, estimate, open, spent });
        }
    }

    /// Ends an open request: with a part of its cost, or without any.
    fn end(&mut self, which: usize, part: Option<u64>) {
        let now = self.now;
        let mut open = self.admitted.iter_mut().filter(|request| request.hold.is_some());
        let Some(request) = open.nth(which) else { return };
        let hold = request.hold.take().expect("it is open");
        request.open.1 = Some(now);
        let status = is_waiting(&hold);
        match part.filter(|_| !status) {
            None => drop(hold.void(at(now)).expect("open")),
            Some(part) => {
                let most = request.estimate.most.nanos() * part / 100;
                let budget = hold.budget().map_or(u64::MAX, DeviceNanos::nanos);
                let reference = DeviceNanos(most.min(budget));
                let tokens = request.estimate.most_tokens * part / 100;
                request.spent = Spent { tokens, reference, ..Spent::default() };
                let settled = hold.settle(at(now), request.spent).expect("open");
                assert_eq!(settled.overrun, DeviceNanos::ZERO);
            }
        }
    }

    /// Ends the requests that gave way in a queue.
    fn forget_lost(&mut self) {
        for request in &mut self.admitted {
            if request.hold.as_ref().is_some_and(|hold| poll(hold).is_ready_err()) {
                request.hold = None;
                request.open.1 = Some(self.now);
            }
        }
    }

    fn scopes(&self) -> BTreeMap<Scope, PlanLimits> {
        let all = self.admitted.iter().flat_map(|request| &request.scopes);
        all.map(|limited| (limited.scope.clone(), (*limited.limits).clone())).collect()
    }

    /// Checks places and caps against the sums of the open requests.
    fn check_now(&self) -> Result<(), TestCaseError> {
        let open = || self.admitted.iter().filter_map(|it| Some((it, it.hold.as_ref()?)));
        let running = |scope: &Scope| {
            open().filter(|(it, hold)| it.is_in(scope) && !is_waiting(hold)).count() as u32
        };
        for (scope, limits) in self.scopes() {
            let most = limits.concurrent.unwrap_or(u32::MAX);
            prop_assert!(running(&scope) <= most, "{scope}: more than {most} run");
            for class in classes() {
                let in_it = self.admitted.iter().filter(|it| it.is_in(&scope) && it.class == class);
                let amount = |it: &Admitted| match &it.hold {
                    Some(hold) => hold.budget().map_or(0, DeviceNanos::nanos),
                    None => it.spent.reference.nanos(),
                };
                let sum: u64 = in_it.map(amount).sum();
                let caps = [&limits.device_time_per_day, &limits.device_time_per_month];
                for cap in caps.into_iter().filter_map(|cap| cap.limit(&class)) {
                    prop_assert!(sum <= cap.nanos(), "{scope}: {sum} of {cap:?}");
                }
            }
        }
        for (request, _) in open().filter(|(_, hold)| is_waiting(hold)) {
            let is_full = |limited: &ScopeLimits| {
                limited.limits.concurrent.is_some_and(|most| running(&limited.scope) >= most)
            };
            let id = &request.id;
            prop_assert!(request.scopes.iter().any(is_full), "{id} waits and could run");
        }
        Ok(())
    }

    /// Checks every window of at most a minute in every scope.
    fn check_windows(&self) -> Result<(), TestCaseError> {
        for (scope, limits) in self.scopes() {
            let of_scope: Vec<&Admitted> =
                self.admitted.iter().filter(|it| it.is_in(&scope)).collect();
            let [cpu, h200] = classes();
            for (rate, class) in [
                (limits.tokens, None),
                (limits.device_time.limit(&cpu), Some(&cpu)),
                (limits.device_time.limit(&h200), Some(&h200)),
            ] {
                let Some(rate) = rate else { continue };
                let broken = broken_window(&of_scope, rate, class);
                prop_assert_eq!(broken, None, "{}: {:?}", scope, rate);
            }
        }
        Ok(())
    }
}

/// Returns the first window with more use than 1.5 bursts, the refill and what was held at
/// its start. The use of a request is at its end.
fn broken_window(all: &[&Admitted], rate: Rate, class: Option<&DeviceClass>) -> Option<String> {
    let mut uses: Vec<(u64, u64)> =
        all.iter().filter_map(|it| Some((it.open.1?, it.costs(class).1))).collect();
    uses.sort_unstable();
    for (first, &(start, _)) in uses.iter().enumerate() {
        let open = all
            .iter()
            .filter(|it| it.open.0 < start && it.open.1.is_none_or(|until| until >= start));
        let held: u64 = open.map(|it| it.costs(class).0).sum();
        let mut used = 0;
        for &(time, amount) in uses[first..].iter().take_while(|(at, _)| at - start <= MINUTE) {
            used += amount;
            // Both sides in halves of a 60-billionth, so that nothing is rounded.
            let refill = 2 * u128::from(rate.per_minute) * u128::from(time - start);
            let fixed = u128::from(3 * rate.burst + 2 * held) * u128::from(MINUTE);
            if u128::from(2 * used) * u128::from(MINUTE) > fixed + refill {
                return Some(format!("{used} used in {} ns, {held} held before", time - start));
            }
        }
    }
    None
}

/// The state of a hold that was polled once.
enum Polled {
    Runs,
    Waits,
    Lost,
}

impl Polled {
    fn is_ready_err(&self) -> bool {
        matches!(self, Self::Lost)
    }
}

fn poll(hold: &Hold) -> Polled {
    use std::future::Future as _;
    use std::task::{Context, Poll, Waker};
    if hold.state() == HoldState::Running {
        return Polled::Runs;
    }
    match std::pin::pin!(hold.queue_ticket()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(())) => Polled::Runs,
        Poll::Ready(Err(_)) => Polled::Lost,
        Poll::Pending => Polled::Waits,
    }
}

fn is_waiting(hold: &Hold) -> bool {
    matches!(poll(hold), Polled::Waits)
}

/// Plays `acts` under `plans` and checks all limits. In the end all requests end, and after
/// enough time nothing is left.
fn play(plans: Plans, acts: &[Act]) -> Result<(), TestCaseError> {
    let mut play = Play::new(plans);
    for act in acts {
        play.act(act);
        play.check_now()?;
    }
    while play.admitted.iter().any(|request| request.hold.is_some()) {
        play.end(0, Some(100));
        play.forget_lost();
        play.check_now()?;
    }
    play.check_windows()?;
    let status = play.gate.admission.status();
    prop_assert_eq!((status.running, status.queued), (0, 0));
    // The debt of the slowest rate and the caps of a month are over by then.
    let later = play.now + 60 * DAY;
    play.gate.admission.expire(at(later));
    prop_assert_eq!(play.gate.admission.status().scopes, 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn random_plans_keep_every_limit(
        plans in plans(),
        acts in prop::collection::vec(act(), 1..150),
    ) {
        play(plans, &acts)?;
    }
}

mod long {
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_240, ..ProptestConfig::default() })]

        #[test]
        #[ignore = "long: ten thousand random plans"]
        fn ten_thousand_random_plans_keep_every_limit(
            plans in plans(),
            acts in prop::collection::vec(act(), 1..300),
        ) {
            play(plans, &acts)?;
        }
    }
}
