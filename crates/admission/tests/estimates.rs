//! Estimates that are wrong, by accident or on purpose (T64). A property test bounds the
//! use of any window under any sequence of requests. Simulated clients teach an
//! expectation and then ask for long answers, with the rule and without it. Simulated
//! honest tenants at their limit must keep their rate.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use common::*;
use proptest::prelude::*;
use tollgate_admission::{
    Estimate, ExpectedOutput, Hold, HoldState, Limit, Refusal, ReserveError, Scope, ScopeLimits,
};
use tollgate_domain::{ByClass, DeviceNanos, ModelName, PlanLimits, Rate, TenantId};

const MINUTE: u64 = 60 * SECOND;

/// A request of the property test.
#[derive(Clone, Debug)]
struct Ask {
    tenant: usize,
    /// Time since the request before.
    gap: u64,
    expected: u64,
    most: u64,
    life: u64,
    /// Parts of the life and of `most`, in percent: times and amounts of use. Two uses are
    /// more than a minute apart if they exceed `most` together.
    uses: Vec<(u64, u64)>,
}

/// A request that ran, or runs, with all its use.
#[derive(Debug)]
struct Ran {
    tenant: usize,
    expected: u64,
    from: u64,
    until: u64,
    uses: Vec<(u64, u64)>,
}

fn ask() -> impl Strategy<Value = Ask> {
    let life = prop_oneof![4 => 0..2 * SECOND, 2 => 0..MINUTE, 1 => MINUTE..10 * MINUTE];
    let gap = prop_oneof![6 => Just(0), 3 => 0..2 * SECOND, 1 => 0..2 * MINUTE];
    let uses = prop::collection::vec((0_u64..=100, prop_oneof![Just(100_u64), 0..=100_u64]), 1..4);
    (0_usize..3, gap, 1_u64..120, 0_u64..300, life, uses).prop_map(
        |(tenant, gap, expected, more, life, uses)| Ask {
            tenant,
            gap,
            expected,
            most: expected + more,
            life,
            uses,
        },
    )
}

impl Ask {
    fn run(&self, from: u64) -> Ran {
        let mut uses: Vec<(u64, u64)> = Vec::new();
        let mut at: Vec<(u64, u64)> = self.uses.clone();
        at.sort_unstable();
        for (time, part) in at {
            let (time, amount) = (from + self.life / 100 * time, self.most * part / 100);
            // The device is no faster than `most` in a minute.
            let recent: u64 = uses.iter().filter(|(at, _)| at + MINUTE >= time).map(|u| u.1).sum();
            uses.push((time, amount.min(self.most - recent)));
        }
        let (tenant, expected) = (self.tenant, self.expected);
        Ran { tenant, expected, from, until: from + self.life, uses }
    }
}

impl Ran {
    fn cost(&self) -> u64 {
        self.uses.iter().map(|(_, amount)| amount).sum()
    }
}

fn device_time(rate: Rate) -> PlanLimits {
    PlanLimits { device_time: ByClass::all(rate), ..PlanLimits::default() }
}

/// Sends `asks` of three tenants of one pool and returns the requests that were admitted.
fn play(asks: &[Ask], own: Rate, shared: Rate, taught: bool) -> Vec<Ran> {
    let gate = Gate::new(Vec::new());
    let scopes: Vec<Vec<ScopeLimits>> = ["a", "b", "c"]
        .map(|name| {
            let own = scoped(tenant(name), device_time(own));
            vec![own, scoped(pool("trials"), device_time(shared))]
        })
        .to_vec();
    let mut open: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut holds: Vec<Option<Hold>> = Vec::new();
    let (mut now, mut ran): (u64, Vec<Ran>) = (0, Vec::new());
    for (number, ask) in asks.iter().enumerate() {
        now += ask.gap;
        while let Some(&Reverse((until, index))) = open.peek()
            && until <= now
        {
            open.pop();
            let hold = holds[index].take().expect("settled once");
            hold.settle(at(until), spent(0, ran[index].cost())).expect("open");
        }
        // Without the rule the most that a request may use is unknown.
        let most = if taught { ask.expected } else { ask.most };
        let estimate = Estimate { most: DeviceNanos(most), ..estimate(0, ask.expected, 1) };
        let asked = request(number as u64, now, &scopes[ask.tenant], estimate);
        let asked = tollgate_admission::Reserve { expires: at(u64::MAX), ..asked };
        if let Ok(hold) = gate.admission.reserve(at(now), utc(now), asked) {
            open.push(Reverse((now + ask.life, holds.len())));
            holds.push(Some(hold));
            ran.push(ask.run(now));
        }
    }
    ran
}

/// Returns the first window of at most a minute in which `ran` used more than
/// `1.5 burst + per_minute t / 60 s + held`, where `held` is the sum of the holds open at
/// the start of the window.
fn broken_window(ran: &[Ran], rate: Rate) -> Option<String> {
    let mut uses: Vec<(u64, u64)> = ran.iter().flat_map(|ran| ran.uses.clone()).collect();
    uses.sort_unstable();
    for (first, &(start, _)) in uses.iter().enumerate() {
        let open = ran.iter().filter(|ran| ran.from < start && ran.until >= start);
        let held: u64 = open.map(|ran| ran.expected).sum();
        let mut used = 0;
        for &(time, amount) in uses[first..].iter().take_while(|(time, _)| time - start <= MINUTE) {
            used += amount;
            // Both sides in halves of a 60-billionth, so that nothing is rounded.
            let refill = 2 * u128::from(rate.per_minute) * u128::from(time - start);
            let fixed = 3 * rate.burst + 2 * held;
            if u128::from(2 * used) * u128::from(MINUTE)
                > u128::from(fixed) * u128::from(MINUTE) + refill
            {
                return Some(format!("{used} used in {} ns, {held} held before", time - start));
            }
        }
    }
    None
}

/// Checks the bound for the tenants and for their pool. The expectations are arbitrary, as
/// if a client had chosen each of them.
fn check_windows(asks: &[Ask], own: (u64, u64), shared: (u64, u64)) -> Result<(), TestCaseError> {
    let rate = |(per_minute, burst)| Rate { per_minute, burst };
    let (own, shared) = (rate(own), rate(shared));
    let ran = play(asks, own, shared, false);
    prop_assert_eq!(broken_window(&ran, shared), None, "pool");
    let (mut of, mut ran) = (Vec::new(), ran);
    for tenant in 0..3 {
        (of, ran) = ran.into_iter().partition(|ran| ran.tenant == tenant);
        prop_assert_eq!(broken_window(&of, own), None, "tenant {}", tenant);
    }
    prop_assert!(ran.is_empty() && of.len() <= asks.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_024, ..ProptestConfig::default() })]

    #[test]
    fn no_window_exceeds_its_bound(
        asks in prop::collection::vec(ask(), 1..120),
        own in (1_u64..2_000, 100_u64..1_000),
        shared in (1_u64..4_000, 100_u64..2_000),
    ) {
        check_windows(&asks, own, shared)?;
    }
}

mod long {
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_240, ..ProptestConfig::default() })]

        #[test]
        #[ignore = "long: ten thousand random plays"]
        fn no_window_of_ten_thousand_exceeds_its_bound(
            asks in prop::collection::vec(ask(), 1..120),
            own in (1_u64..2_000, 1_u64..1_000),
            shared in (1_u64..4_000, 1_u64..2_000),
        ) {
            check_windows(&asks, own, shared)?;
        }
    }
}

/// A plan with one place to run and many to wait.
fn one_place() -> PlanLimits {
    PlanLimits { concurrent: Some(1), queued: Some(64), ..PlanLimits::default() }
}

/// Lets tenant `a` run one request without cost, and queue requests of the estimate `waits`
/// behind it. Returns how many wait, and the refusal of tenant `b`, if any, in the `common`
/// scope of both.
fn queue_against(common: Scope, waits: Estimate) -> (usize, Option<Box<Refusal>>) {
    let rate = Rate { per_minute: 1_000, burst: 1_000 };
    let both = scoped(common, device_time(rate));
    let gate = Gate::new(vec![scoped(tenant("a"), one_place()), both.clone()]);
    let _runs = gate.reserve(0, estimate(0, 0, 1)).expect("a place");
    let queued: Vec<Hold> = (0..64).map_while(|_| gate.reserve(0, waits).ok()).collect();
    assert!(queued.iter().all(|hold| hold.state() == HoldState::Queued));
    let asked = Estimate { most: DeviceNanos(700), ..estimate(0, 100, 1) };
    let asked = request(1_000, 0, &[scoped(tenant("b"), one_place()), both], asked);
    let refused = match gate.admission.reserve(at(0), utc(0), asked) {
        Ok(_) => None,
        Err(ReserveError::Refused(refusal)) => Some(refusal),
        Err(ReserveError::AlreadyHeld) => panic!("ids are numbered"),
    };
    (queued.len(), refused)
}

#[test]
fn queued_requests_leave_shared_rate_to_others() {
    let many = Estimate { most: DeviceNanos(101), ..estimate(0, 1, 1) };
    let large = Estimate { most: DeviceNanos(1_500), ..estimate(0, 1, 1) };
    let model = || Scope::Model(ModelName::new("m").expect("a name"));
    for shared in [pool("trials"), model(), Scope::Gateway] {
        // A quarter of the burst may be at risk: two requests of 100 each.
        assert_eq!(queue_against(shared.clone(), many), (2, None));
        assert_eq!(queue_against(shared.clone(), large), (0, None));
        // A request of a known cost waits as before.
        assert_eq!(queue_against(shared, estimate(0, 1, 1)), (64, None));
    }
    // The control: in a scope of one tenant the rule does not apply, and the queue blocks.
    for (waits, most) in [(many, 14), (large, 1)] {
        let (queued, refused) = queue_against(tenant("both"), waits);
        assert_eq!(queued, most);
        assert_eq!(refused.expect("blocked").limit, Limit::DeviceTime);
    }
}

#[test]
fn ended_wait_returns_its_risk() {
    let rate = Rate { per_minute: 1_000, burst: 1_000 };
    let gate = Gate::new(vec![
        scoped(tenant("a"), one_place()),
        scoped(pool("trials"), device_time(rate)),
    ]);
    let risky = Estimate { most: DeviceNanos(251), ..estimate(0, 1, 1) };
    let mut runs = gate.reserve(0, risky).expect("a place");
    for _ in 0..10 {
        let waits = gate.reserve(0, risky).expect("a quarter of the burst");
        let refusal = gate.reserve(0, risky).expect_err("no more risk may wait");
        assert_eq!((refusal.limit, refusal.scope), (Limit::DeviceTime, pool("trials")));
        assert_eq!((refusal.retry_after, refusal.permanent), (None, false));
        // The one that waits runs, and its risk is no longer counted as waiting.
        let settlement = runs.settle(at(0), spent(0, 0)).expect("open");
        assert_eq!(settlement.promoted.len(), 1);
        runs = waits;
        // A wait that is given up returns its risk, too.
        let gives_up = gate.reserve(0, risky).expect("a quarter of the burst");
        gives_up.void(at(0)).expect("open");
    }
}

/// A random generator of the simulations (splitmix64), the same on every machine.
struct Dice(u64);

impl Dice {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from `least` to `most`.
    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.draw() % (most - least + 1)
    }

    /// Returns a time to the next event, if events come at random `mean` apart.
    fn gap(&mut self, mean: f64) -> u64 {
        let uniform = (self.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        (-(1.0 - uniform).ln() * mean) as u64
    }
}

/// Lengths of a simulated tenant's answers, in tokens.
#[derive(Clone, Copy, Debug)]
enum Lengths {
    /// From three quarters to five quarters of the mean.
    Steady(u64),
    /// One of the two at random.
    Bimodal(u64, u64),
    /// From the first to the second mean within the simulated time.
    Drift(u64, u64),
    /// One token until the time, then as many as are allowed.
    Taught { until: u64 },
}

impl Lengths {
    fn draw(self, dice: &mut Dice, now: u64, longest: u64) -> u64 {
        let steady = |dice: &mut Dice, mean| dice.between(mean * 3 / 4, mean * 5 / 4);
        let length = match self {
            Self::Steady(mean) => steady(dice, mean),
            Self::Bimodal(short, long) => {
                let mean = if dice.draw().is_multiple_of(2) { short } else { long };
                steady(dice, mean)
            }
            Self::Drift(from, to) => {
                let part = now.min(SIMULATED) as f64 / SIMULATED as f64;
                steady(dice, (from as f64 + (to as f64 - from as f64) * part) as u64)
            }
            Self::Taught { until } if now < until => 1,
            Self::Taught { .. } => longest,
        };
        length.clamp(1, longest)
    }
}

/// A tenant and its device.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    lengths: Lengths,
    /// Largest answer that a request asks for.
    max_tokens: u64,
    prompt: u64,
    /// Tokens a second of one sequence, and on an idle device.
    speed: u64,
    fastest: u64,
    rate: Rate,
    /// Requests a second.
    offered: f64,
    /// Requests that come at once.
    together: u64,
}

/// Time that a simulation runs.
const SIMULATED: u64 = 10 * MINUTE;
/// Times that a client repeats a refused request.
const REPEATS: u64 = 10;

/// An event of a simulation. Ends come before requests of the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    Ends { hold: usize },
    Arrives,
    Repeats { times: u64 },
}

/// A simulated tenant between two events.
struct Simulation {
    traffic: Traffic,
    /// False to leave out the rule: the most of a request is then unknown.
    is_bounded: bool,
    gate: Gate,
    expected: ExpectedOutput,
    who: TenantId,
    model: ModelName,
    dice: Dice,
    events: BinaryHeap<Reverse<(u64, Happens)>>,
    holds: Vec<Option<(Hold, u64)>>,
    /// Time and tokens of each answer.
    answers: Vec<(u64, u64)>,
}

impl Simulation {
    fn new(traffic: Traffic, is_bounded: bool, seed: u64) -> Self {
        let limits = PlanLimits { tokens: Some(traffic.rate), ..PlanLimits::default() };
        Self {
            traffic,
            is_bounded,
            gate: Gate::of(limits),
            expected: ExpectedOutput::default(),
            who: TenantId::new("acme").expect("a name"),
            model: ModelName::new("m").expect("a name"),
            dice: Dice(seed),
            events: BinaryHeap::from([Reverse((0, Happens::Arrives))]),
            holds: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Runs to the end and returns the time and the tokens of each answer.
    fn run(mut self) -> Vec<(u64, u64)> {
        while let Some(Reverse((now, event))) = self.events.pop()
            && now < SIMULATED
        {
            match event {
                Happens::Ends { hold } => self.end(now, hold),
                Happens::Repeats { times } => self.ask(now, times),
                Happens::Arrives => {
                    for _ in 0..self.traffic.together {
                        self.ask(now, 0);
                    }
                    let gap = self.traffic.together as f64 * 1e9 / self.traffic.offered;
                    let next = now + self.dice.gap(gap);
                    self.events.push(Reverse((next, Happens::Arrives)));
                }
            }
        }
        self.answers
    }

    fn ask(&mut self, now: u64, times: u64) {
        let Traffic { lengths, max_tokens, prompt, speed, fastest, .. } = self.traffic;
        let guess = u64::from(self.expected.expect(&self.who, &self.model, max_tokens as u32));
        let most = if self.is_bounded { max_tokens.min(60 * fastest).max(guess) } else { guess };
        let asked = Estimate { most_tokens: prompt + most, ..estimate(prompt + guess, 1, 1) };
        match self.gate.reserve(now, asked) {
            Ok(hold) => {
                let length = lengths.draw(&mut self.dice, now, max_tokens);
                let until = now + length * SECOND / speed;
                self.events.push(Reverse((until, Happens::Ends { hold: self.holds.len() })));
                self.holds.push(Some((hold, length)));
            }
            Err(refusal) if times < REPEATS => {
                // Without a time the gateway says one second, which is also the least.
                let wait = refusal.retry_after.map_or(SECOND, |wait| wait.as_nanos() as u64);
                let later = now + wait.max(SECOND).next_multiple_of(SECOND);
                self.events.push(Reverse((later, Happens::Repeats { times: times + 1 })));
            }
            Err(_) => {}
        }
    }

    fn end(&mut self, now: u64, hold: usize) {
        let (hold, length) = self.holds[hold].take().expect("settled once");
        let tokens = self.traffic.prompt + length;
        hold.settle(at(now), spent(tokens, 0)).expect("open");
        self.expected.learn(&self.who, &self.model, length);
        self.answers.push((now, tokens));
    }
}

/// Returns the part of its rate that an honest tenant gets in the second half of the
/// simulation. The first half pays for the burst and teaches the expectation.
fn share(traffic: Traffic, is_bounded: bool, seed: u64) -> f64 {
    let answers = Simulation::new(traffic, is_bounded, seed).run();
    let late: u64 = answers.iter().filter(|(at, _)| *at >= SIMULATED / 2).map(|a| a.1).sum();
    let refill = traffic.rate.per_minute * (SIMULATED / 2 / SECOND) / 60;
    late as f64 / refill as f64
}

/// Checks that a tenant at its limit gets 95 % of what it would get without the bound, and
/// no more than its rate allows.
fn keeps_its_rate(name: &str, traffic: Traffic) {
    for seed in 0..2 {
        let (with, without) = (share(traffic, true, seed), share(traffic, false, seed));
        assert!(with >= 0.95 * without.min(1.0), "{name}: {with:.3}, without {without:.3}");
    }
}

/// A plan with far more tokens a minute than a request can use, and clients that send a
/// third more than it allows.
fn wide(lengths: Lengths, max_tokens: u64, per_minute: u64) -> Traffic {
    let (prompt, over) = (100, 1.3);
    let mean = match lengths {
        Lengths::Steady(mean) => mean,
        Lengths::Bimodal(from, to) | Lengths::Drift(from, to) => (from + to) / 2,
        Lengths::Taught { .. } => max_tokens,
    };
    Traffic {
        lengths,
        max_tokens,
        prompt,
        speed: 50,
        fastest: 75,
        rate: Rate::per_minute(per_minute),
        offered: over * per_minute as f64 / 60.0 / (mean + prompt) as f64,
        together: 1,
    }
}

#[test]
fn honest_tenant_keeps_its_rate() {
    use Lengths::{Bimodal, Drift, Steady};
    for (name, lengths, max_tokens, per_minute) in [
        ("2 s, exact", Steady(100), 125, 30_000),
        ("2 s, default max_tokens", Steady(100), 1_024, 30_000),
        ("2 s, whole context", Steady(100), 32_768, 60_000),
        ("6 s, whole context", Steady(300), 32_768, 100_000),
        ("20 s, default max_tokens", Steady(800), 1_024, 200_000),
        ("20 s, whole context", Steady(1_000), 32_768, 200_000),
        ("60 s, whole context", Steady(3_000), 32_768, 400_000),
        ("bimodal", Bimodal(20, 800), 1_024, 100_000),
        ("bimodal, whole context", Bimodal(20, 800), 32_768, 200_000),
        ("drift", Drift(50, 800), 1_024, 100_000),
    ] {
        let traffic = wide(lengths, max_tokens, per_minute);
        keeps_its_rate(name, traffic);
        keeps_its_rate(&format!("{name}, ten at once"), Traffic { together: 10, ..traffic });
    }
}

/// Checks plans of which one request may use a large part of a minute. Groups of requests
/// would be spread over time there.
#[test]
fn honest_tenant_of_small_plan_keeps_its_rate() {
    for (name, max_tokens, per_minute) in
        [("a tenth", 1_024, 10_000), ("a third", 1_024, 3_300), ("half", 1_024, 2_200)]
    {
        keeps_its_rate(name, wide(Lengths::Steady(100), max_tokens, per_minute));
    }
}

/// Teaches an expectation with one-token answers, then sends `flood` requests at once that
/// use all their tokens. The flood is repeated every ten seconds. Returns the part of the
/// burst that is used within five seconds of the first flood, and the part of
/// `1.5 burst + refill` that is used until the end.
fn attack(teach: u64, gap: u64, flood: u64, is_bounded: bool) -> (f64, f64) {
    let until = teach * gap + SECOND;
    let traffic =
        Traffic { speed: 1_000, prompt: 5, ..wide(Lengths::Taught { until }, 400, 5_000) };
    let mut attacker = Simulation::new(traffic, is_bounded, 1);
    let once = Happens::Repeats { times: REPEATS };
    attacker.events = (0..teach).map(|number| Reverse((number * gap, once))).collect();
    for second in (until..SIMULATED).step_by(10 * SECOND as usize) {
        attacker.events.extend((0..flood).map(|_| Reverse((second, once))));
    }
    let answers = attacker.run();
    let used = |to| {
        let flooded = answers.iter().filter(|(at, _)| (until..=to).contains(at));
        flooded.map(|(_, tokens)| *tokens as f64).sum::<f64>() / 5_000.0
    };
    let minutes = (SIMULATED - until) as f64 / MINUTE as f64;
    (used(until + 5 * SECOND), used(SIMULATED) / (1.5 + minutes))
}

#[test]
fn taught_expectation_uses_one_burst_and_half() {
    for (teach, gap) in [(1, SECOND), (30, SECOND / 100), (100, 2 * SECOND), (200, 2 * SECOND)] {
        let (at_once, in_all) = attack(teach, gap, 200, true);
        // The refill of five seconds is a twelfth.
        assert!((0.5..=1.5 + 1.0 / 12.0).contains(&at_once), "{teach}: {at_once}");
        assert!(in_all <= 1.0, "{teach}: {in_all}");
    }
    // The control: with holds alone the bound breaks.
    let (at_once, _) = attack(30, SECOND / 100, 200, false);
    assert!(at_once > 10.0, "{at_once}");
}

/// Checks that the bound of any window breaks without the rule, so that the property above
/// can fail.
#[test]
fn holds_alone_break_a_window() {
    let asks: Vec<Ask> = (0..50)
        .map(|number| Ask {
            tenant: number % 3,
            gap: 0,
            expected: 1,
            most: 100,
            life: SECOND,
            uses: vec![(50, 100)],
        })
        .collect();
    let (own, shared) = (Rate::per_minute(1_000), Rate::per_minute(1_500));
    assert_eq!(broken_window(&play(&asks, own, shared, false), shared), None);
    assert!(broken_window(&play(&asks, own, shared, true), shared).is_some());
}
