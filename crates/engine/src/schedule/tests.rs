//! Tests of decisions over hand-made and random views, without a device.

mod bounds;
mod capacity;
mod parts;

use tollgate_domain::{Caller, KeyId, PoolName, SequenceWork, TenantId};

use super::plan::{row_count, work};
use super::*;
use crate::backend::synthetic::StepCost;
use crate::kv::blocks_for;
use crate::testing::table;

fn bounds() -> Bounds {
    Bounds {
        table: table(),
        step_time_budget: Duration::from_millis(80),
        batch_step: 25,
        max_sequences: 8,
        limits: StepLimits { tokens: 512, logit_rows: 64 },
        total_blocks: 100,
        guard: GUARD,
        rest: Duration::from_secs(5),
        spare: Spare::default(),
    }
}

const GUARD: DeviceNanos = DeviceNanos(250_000_000);
const NOW: MonotonicTime = MonotonicTime(100_000_000_000);

/// A hand-made view: running sequences and waiting entries.
#[derive(Default)]
struct Scene {
    shares: Shares,
    running: Vec<Running>,
}

fn seat(name: &str) -> Seat {
    of_key(name, "key")
}

fn of_key(tenant: &str, key: &str) -> Seat {
    Seat::new(SchedulePolicy::Fair, Tier::Interactive, None, &caller(tenant, key), 1.0)
}

fn caller(tenant: &str, key: &str) -> Caller {
    Caller { tenant: TenantId::new(tenant).expect("a name"), key: KeyId::new(key).expect("a name") }
}

impl Scene {
    fn runs(&mut self, seat: &Seat, running: Running) {
        let key = self.shares.enter(seat);
        self.running.push(Running { key, ..running });
    }

    fn waits(&mut self, seat: &Seat, waiting: Waiting) {
        let key = self.shares.enter(seat);
        self.shares.expect_start(waiting.request, waiting.deadline);
        self.shares.push(key, waiting);
    }

    fn charge(&mut self, seat: &Seat, time: DeviceNanos) {
        let key = self.shares.enter(seat);
        self.shares.charge(key, time, DeviceNanos::ZERO, DeviceNanos::ZERO);
        self.shares.leave(key);
    }

    fn decide(&self, free_blocks: u32, bounds: &Bounds) -> Decisions {
        let Self { shares, running } = self;
        decide(&View { now: NOW, running, shares, free_blocks }, bounds)
    }

    fn admitted(&self, free_blocks: u32) -> Vec<u64> {
        admitted(&self.decide(free_blocks, &bounds()))
    }
}

fn decoding(id: u64, cached: u32) -> Running {
    let blocks = blocks_for(cached + 1);
    Running {
        sequence: SequenceId(id),
        key: shares::root(Tier::Interactive),
        cached,
        computed: cached,
        known: cached + 1,
        pending: 1,
        rows: Rows::Last,
        most: 1_000,
        blocks,
        exclusive: blocks,
        followers: 0,
        preempted_at: None,
    }
}

fn reading(id: u64, cached: u32, pending: u32) -> Running {
    let blocks = blocks_for(cached + pending);
    Running { known: cached + pending, pending, blocks, exclusive: blocks, ..decoding(id, cached) }
}

fn waiting(id: u64, tokens: u32) -> Waiting {
    due(id, tokens, NOW.after(Duration::from_secs(1)))
}

fn due(id: u64, tokens: u32, deadline: MonotonicTime) -> Waiting {
    Waiting {
        sequence: SequenceId(id),
        request: SequenceId(id),
        rank: Rank::fresh(SchedulePolicy::Fair, deadline, SequenceId(id)),
        deadline,
        tokens,
        pending: tokens,
        most: tokens + 100,
        rows: Rows::Last,
        followers: 0,
        predicted: DeviceNanos(u64::from(tokens) * 1_000),
    }
}

fn preempted(id: u64, tokens: u32) -> Waiting {
    Waiting { rank: Rank::again(SequenceId(id)), ..waiting(id, tokens) }
}

fn ids(sequences: &[SequenceId]) -> Vec<u64> {
    sequences.iter().map(|sequence| sequence.0).collect()
}

fn admitted(decisions: &Decisions) -> Vec<u64> {
    decisions.admit.iter().map(|(_, rank)| rank.sequence().0).collect()
}

fn chunks(decisions: &Decisions) -> Vec<(u64, u32)> {
    decisions.chunks.iter().map(|chunk| (chunk.sequence.0, chunk.tokens)).collect()
}

const fn millis(time: u64) -> DeviceNanos {
    DeviceNanos(time * 1_000_000)
}

/// Checks that a fast model gets short steps, a slow one the configured time, and that a
/// shorter configured time wins.
#[test]
fn step_time_budget_follows_the_model() {
    for (speed, most_ms, expected_us) in [
        (1.0, 80, 80_000..=80_000),
        (28.0, 80, 16_000..=16_400),
        (1_000.0, 80, 1_000..=1_000),
        (1_000.0, 0, 0..=0),
    ] {
        let table = StepCost { speed, ..StepCost::default() }.table().expect("valid");
        let found = step_time_budget(&table, Duration::from_millis(most_ms)).as_micros();
        assert!(expected_us.contains(&found), "{speed} {most_ms}: {found}");
    }
}

#[test]
fn admitted_prompt_counts_before_next_choice() {
    let mut scene = Scene::default();
    for (id, tenant) in [(1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "c"), (6, "b")] {
        scene.waits(&seat(tenant), waiting(id, 4));
    }
    assert_eq!(scene.admitted(100), [1, 4, 5, 2, 6, 3]);
}

#[test]
fn smallest_virtual_time_is_served_by_weight() {
    let mut scene = Scene::default();
    let heavy = Seat::new(SchedulePolicy::Fair, Tier::Interactive, None, &caller("b", "k"), 3.0);
    for id in 0..4 {
        scene.waits(&seat("a"), waiting(10 + id, 30));
        scene.waits(&heavy, waiting(20 + id, 30));
    }
    // Three of b for one of a, after each had one.
    assert_eq!(scene.admitted(100), [10, 20, 21, 22, 11, 23, 12, 13]);
}

#[test]
fn keys_divide_only_the_share_of_tenant() {
    let mut scene = Scene::default();
    for (id, key) in [(1, "one"), (2, "one"), (3, "two"), (4, "three")] {
        scene.waits(&of_key("a", key), waiting(id, 4));
    }
    scene.waits(&seat("b"), waiting(5, 4));
    scene.waits(&seat("b"), waiting(6, 4));
    assert_eq!(scene.admitted(100), [1, 5, 3, 6, 4, 2]);
}

#[test]
fn pool_is_one_share_owner() {
    let pool = PoolName::new("trial").expect("a name");
    let trial = |tenant| {
        let caller = caller(tenant, "key");
        Seat::new(SchedulePolicy::Fair, Tier::Interactive, Some(&pool), &caller, 1.0)
    };
    let mut scene = Scene::default();
    for (id, tenant) in [(1, "t1"), (2, "t2"), (3, "t3")] {
        scene.waits(&trial(tenant), waiting(id, 4));
    }
    for id in 4..7 {
        scene.waits(&seat("paid"), waiting(id, 4));
    }
    assert_eq!(scene.admitted(100), [1, 4, 2, 5, 3, 6]);
}

#[test]
fn key_queue_orders_by_start_deadline_arrival() {
    let mut scene = Scene::default();
    let late = NOW.after(Duration::from_secs(9));
    for waits in [due(1, 4, late), waiting(2, 4), waiting(3, 4), preempted(4, 20)] {
        scene.waits(&seat("a"), waits);
    }
    assert_eq!(scene.admitted(100), [4, 2, 3, 1]);
}

#[test]
fn batch_work_comes_after_interactive_work() {
    let batch = Seat { tier: Tier::Batch, ..seat("a") };
    let mut scene = Scene::default();
    scene.waits(&batch, waiting(1, 4));
    scene.waits(&seat("b"), waiting(2, 4));
    scene.waits(&seat("b"), waiting(3, 4));
    scene.charge(&seat("b"), millis(60_000));
    assert_eq!(scene.admitted(100), [2, 3, 1]);
}

#[test]
fn control_policies_ignore_tenants_and_keys() {
    for (policy, expected) in [
        (SchedulePolicy::FirstComeFirstServed, [1, 2, 3, 4, 5]),
        (SchedulePolicy::KeyCounters, [2, 3, 4, 5, 1]),
        (SchedulePolicy::Fair, [2, 5, 3, 4, 1]),
    ] {
        let mut scene = Scene::default();
        for (id, tenant, key) in
            [(1, "a", "1"), (2, "a", "1"), (3, "a", "2"), (4, "a", "3"), (5, "b", "4")]
        {
            let seat = Seat::new(policy, Tier::Interactive, None, &caller(tenant, key), 1.0);
            let deadline = NOW.after(Duration::from_secs(20 - id));
            let rank = Rank::fresh(policy, deadline, SequenceId(id));
            scene.waits(&seat, Waiting { rank, ..due(id, 4, deadline) });
        }
        assert_eq!(scene.admitted(100), expected, "{policy:?}");
    }
}

#[test]
fn expired_requests_are_refused() {
    for (late, refused, expected) in
        [(0, vec![], vec![1, 3, 2]), (1, vec![1], vec![3, 2]), (9_000, vec![1, 3], vec![2])]
    {
        let mut scene = Scene::default();
        let later = |nanos: u64| MonotonicTime(NOW.0 + nanos);
        for (id, deadline) in [(1, NOW), (2, later(10_000)), (3, later(1_000))] {
            scene.waits(&seat("a"), due(id, 4, deadline));
        }
        let Scene { shares, running } = &scene;
        let view = View { now: later(late), running, shares, free_blocks: 100 };
        let decisions = decide(&view, &bounds());
        assert_eq!(ids(&decisions.refuse), refused, "{late}");
        assert_eq!(admitted(&decisions), expected, "{late}");
    }
}

#[test]
fn prompt_that_ends_may_lengthen_its_step() {
    let whole =
        SequenceWork { sequence: SequenceId(1), new_tokens: 400, logit_rows: 1, context: 0 };
    let time = bounds().table.predict_step(&[whole]).nanos();
    for (longer_percent, is_whole) in [(24, true), (27, false)] {
        let step_time_budget = Duration::from_nanos(time * 100 / (100 + longer_percent));
        let bounds = Bounds { step_time_budget, ..bounds() };
        let mut scene = Scene::default();
        scene.runs(&seat("a"), reading(1, 0, 400));
        scene.runs(&seat("b"), reading(2, 0, 400));
        let read = chunks(&scene.decide(100, &bounds));
        assert_eq!(read[0].1 == 400, is_whole, "{longer_percent} percent: {read:?}");
        // A step that is longer already reads nothing else.
        assert!(!is_whole || read.len() == 1, "{longer_percent} percent: {read:?}");
    }
}

#[test]
fn prompts_lengthen_step_of_costly_decoding() {
    let mut scene = Scene::default();
    (0..4).for_each(|id| scene.runs(&seat("a"), decoding(id, 400)));
    (4..8).for_each(|id| scene.waits(&seat("b"), waiting(id, 2)));
    let decodes: Vec<SequenceWork> = (0..4)
        .map(|id| SequenceWork {
            sequence: SequenceId(id),
            new_tokens: 1,
            logit_rows: 1,
            context: 400,
        })
        .collect();
    // Decoding alone takes the whole time budget.
    let decoding = bounds().table.predict_step(&decodes).nanos();
    let budget = Duration::from_nanos(decoding / 2);
    let decisions = scene.decide(100, &Bounds { step_time_budget: budget, ..bounds() });
    assert!(admitted(&decisions).len() > 1, "{decisions:?}");
    let works: Vec<SequenceWork> = decisions
        .chunks
        .iter()
        .map(|chunk| work(chunk, if chunk.sequence.0 < 4 { 400 } else { 0 }))
        .collect();
    let predicted = bounds().table.predict_step(&works).nanos();
    assert!(predicted <= decoding + decoding / 4, "{predicted} beside {decoding}");
}

#[test]
fn spare_places_follow_the_batch_size() {
    for (places, spare) in [(1, 0), (8, 1), (32, 4), (64, 8), (256, 8), (512, 16)] {
        assert_eq!(Spare::of(places, 64), Spare { places: spare, blocks: 2 }, "{places}");
    }
}

#[test]
fn decoding_comes_first_and_prompts_fill_budget() {
    let mut scene = Scene::default();
    for running in [reading(1, 0, 400), decoding(2, 50), decoding(3, 60)] {
        scene.runs(&seat("a"), running);
    }
    for (step_time_budget, expected) in [
        (Duration::from_secs(1), vec![(2, 1), (3, 1), (1, 400)]),
        (Duration::from_millis(1), vec![(2, 1), (3, 1), (1, 144)]),
        // A prompt makes progress under any time budget.
        (Duration::ZERO, vec![(2, 1), (3, 1), (1, 16)]),
    ] {
        let bounds = Bounds { step_time_budget, ..bounds() };
        let decisions = scene.decide(100, &bounds);
        assert_eq!(chunks(&decisions), expected, "{step_time_budget:?}");
        let cached = |id| scene.running.iter().find(|it| it.sequence == id).map(|it| it.cached);
        let works: Vec<SequenceWork> = decisions
            .chunks
            .iter()
            .map(|chunk| work(chunk, cached(chunk.sequence).unwrap_or(0)))
            .collect();
        let predicted = bounds.table.predict_step(&works).nanos();
        assert!(step_time_budget.is_zero() || u128::from(predicted) <= step_time_budget.as_nanos());
    }
}

#[test]
fn prompts_are_read_by_virtual_time() {
    let mut scene = Scene::default();
    scene.runs(&seat("ahead"), reading(1, 0, 400));
    scene.runs(&seat("behind"), reading(2, 0, 100));
    scene.waits(&seat("between"), waiting(3, 100));
    scene.charge(&seat("ahead"), millis(20));
    scene.charge(&seat("between"), millis(10));
    // The rest of the budget goes to sequences further ahead.
    let bounds = Bounds { step_time_budget: Duration::from_millis(2), ..bounds() };
    let mut read = chunks(&scene.decide(100, &bounds));
    read.sort_unstable();
    assert_eq!(read, [(1, 112), (2, 100), (3, 100)]);
}

#[test]
fn only_last_chunk_of_prompt_has_row() {
    for (pending, rows, expected) in [
        (100, Rows::Last, Rows::Last),
        (600, Rows::Last, Rows::None),
        (100, Rows::None, Rows::None),
        (60, Rows::All, Rows::All),
    ] {
        let mut scene = Scene::default();
        scene.runs(&seat("a"), Running { rows, ..reading(1, 0, pending) });
        assert_eq!(scene.decide(100, &bounds()).chunks[0].rows, expected, "{pending} {rows:?}");
    }
    // Rows are limited, so a prompt that needs all rows is read in smaller chunks.
    let mut scene = Scene::default();
    scene.runs(&seat("a"), Running { rows: Rows::All, ..reading(1, 0, 300) });
    assert_eq!(chunks(&scene.decide(100, &bounds())), [(1, 64)]);
}
