//! Tests of decisions over hand-made and random views, without a device.

use proptest::prelude::*;
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
        key: Tier::Interactive.root(),
        cached,
        computed: cached,
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
    Running { pending, blocks, exclusive: blocks, ..decoding(id, cached) }
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

#[test]
fn blocked_queue_head_is_never_overtaken() {
    for (followers, expected) in [(0, vec![7, 8]), (1, vec![7]), (2, vec![])] {
        let mut scene = Scene::default();
        for id in 1..=6 {
            scene.runs(&seat("a"), decoding(id, 10));
        }
        scene.waits(&seat("b"), Waiting { followers, ..waiting(7, 4) });
        scene.waits(&seat("c"), waiting(8, 4));
        scene.waits(&seat("d"), waiting(9, 4));
        assert_eq!(scene.admitted(100), expected, "{followers}");
    }
}

#[test]
fn prompt_starts_only_with_free_blocks() {
    // Four blocks for the prompt, and four that the running sequence needs for 64 more
    // tokens.
    for (free, expected) in [(100, vec![2, 3]), (7, vec![]), (8, vec![2])] {
        let mut scene = Scene::default();
        scene.runs(&seat("a"), decoding(1, 10));
        scene.waits(&seat("a"), waiting(2, 60));
        scene.waits(&seat("a"), waiting(3, 4));
        assert_eq!(scene.admitted(free), expected, "{free}");
    }
    // A lone request always fits: submission has checked that.
    let mut scene = Scene::default();
    scene.waits(&seat("a"), waiting(2, 60));
    assert_eq!(scene.admitted(4), [2]);
}

#[test]
fn blocks_are_reserved_ahead_within_the_maximum() {
    for (cached, most, free, expected) in [
        (10, 1_000, 100, 1),  // it has room
        (16, 1_000, 100, 16), // grown by a step
        (16, 1_000, 3, 4),    // by what there is
        (16, 40, 100, 3),     // by what it may need
        (256, 1_000, 100, 32),
    ] {
        let mut scene = Scene::default();
        let blocks = blocks_for(cached);
        let running = Running { most, blocks, exclusive: blocks, ..decoding(1, cached) };
        scene.runs(&seat("a"), running);
        let decisions = scene.decide(free, &bounds());
        assert_eq!(decisions.chunks[0].blocks, expected, "{cached} {most} {free}");
    }
}

#[test]
fn missing_blocks_come_from_tenant_furthest_ahead() {
    let full = |id, cached| Running { blocks: 4, exclusive: 4, ..decoding(id, cached) };
    for (ahead, expected) in [("a", 1), ("b", 3), ("c", 4)] {
        let mut scene = Scene::default();
        // Sequence 2 needs a fifth block.
        scene.runs(&seat("a"), full(1, 50));
        scene.runs(&seat("a"), full(2, 64));
        scene.runs(&seat("b"), full(3, 50));
        scene.runs(&seat("c"), full(4, 50));
        scene.runs(&seat("c"), full(5, 60));
        scene.charge(&seat(ahead), millis(100));
        let decisions = scene.decide(0, &bounds());
        assert_eq!(ids(&decisions.preempt), [expected], "{ahead}");
        assert!(chunks(&decisions).contains(&(2, 1)), "{ahead}");
    }
}

/// Returns a view in which `hog` holds all places but one of its own, is ahead of all
/// others by `lead`, and `polite` waits.
fn crowded(lead: DeviceNanos, preempted_at: Option<MonotonicTime>) -> Scene {
    let mut scene = Scene::default();
    for (id, cached) in [(1, 90), (2, 30), (3, 60), (4, 120), (5, 90), (6, 90), (7, 90), (8, 90)] {
        scene.runs(&seat("hog"), Running { preempted_at, ..decoding(id, cached) });
    }
    scene.waits(&seat("polite"), waiting(20, 10));
    scene.charge(&seat("hog"), lead);
    scene
}

#[test]
fn tenant_beyond_guard_loses_its_least_computed() {
    for (lead, expected) in
        [(GUARD, vec![]), (DeviceNanos(GUARD.nanos() + 1), vec![2]), (millis(9_000), vec![2])]
    {
        // Only places are scarce, not KV blocks.
        let decisions = crowded(lead, None).decide(100, &bounds());
        assert_eq!(ids(&decisions.preempt), expected, "{lead}");
        assert_eq!(admitted(&decisions).len(), expected.len(), "{lead}");
    }
}

#[test]
fn preempted_sequence_rests_before_next_preemption() {
    for (seconds, expected) in [(0, 0), (4, 0), (5, 1), (50, 1)] {
        let at = MonotonicTime(NOW.0 - seconds * 1_000_000_000);
        let decisions = crowded(millis(9_000), Some(at)).decide(100, &bounds());
        assert_eq!(decisions.preempt.len(), expected, "{seconds}");
    }
}

#[test]
fn preemption_frees_enough_or_nothing() {
    // The candidate needs 13 blocks; the sequences of the hog hold 52 in all.
    for (cached, rested, expected) in [(200, 8, 3), (200, 2, 0), (60, 1, 1)] {
        let mut scene = Scene::default();
        for id in 1..=8 {
            let at = if id <= rested { None } else { Some(NOW) };
            let running = Running { most: 100, preempted_at: at, ..decoding(id, 95) };
            scene.runs(&seat("hog"), Running { blocks: 7, exclusive: 6, ..running });
        }
        scene.waits(&seat("polite"), waiting(20, cached));
        scene.charge(&seat("hog"), millis(9_000));
        let bounds = Bounds { max_sequences: 9, ..bounds() };
        let decisions = scene.decide(0, &bounds);
        assert_eq!(decisions.preempt.len(), expected, "{cached} {rested}");
        assert_eq!(decisions.admit.len(), expected.min(1), "{cached} {rested}");
        // The step continues without the preempted sequences.
        assert_eq!(chunks(&decisions).len(), 8 - expected + expected.min(1));
    }
}

#[test]
fn tenant_never_preempts_itself_for_another_key() {
    let mut scene = Scene::default();
    for id in 1..=8 {
        scene.runs(&of_key("a", "greedy"), decoding(id, 20));
    }
    scene.charge(&of_key("a", "greedy"), millis(9_000));
    scene.waits(&of_key("a", "modest"), waiting(20, 10));
    let decisions = scene.decide(100, &bounds());
    assert_eq!((decisions.preempt.len(), decisions.admit.len()), (0, 0));
}

#[test]
fn interactive_work_preempts_batch_work_at_once() {
    let mut scene = Scene::default();
    for id in 1..=8 {
        scene.runs(&Seat { tier: Tier::Batch, ..seat("jobs") }, decoding(id, 20));
    }
    scene.waits(&seat("a"), waiting(20, 10));
    let decisions = scene.decide(100, &bounds());
    assert_eq!(ids(&decisions.preempt), [8]);
    assert_eq!(admitted(&decisions), [20]);
}

#[test]
fn headroom_is_for_tenants_near_smallest() {
    for (lead, expected) in [(GUARD, vec![20]), (millis(251), vec![])] {
        // 12 of 100 blocks are free. The candidate needs one, the running sequence four.
        let mut scene = Scene::default();
        scene.runs(&seat("behind"), decoding(1, 10));
        scene.waits(&seat("ahead"), waiting(20, 15));
        scene.charge(&seat("ahead"), lead);
        assert_eq!(scene.admitted(12), expected, "{lead}");
        // Growth follows the same rule: the tenant gives up a sequence of its own first.
        let mut scene = Scene::default();
        scene.runs(&seat("behind"), decoding(1, 10));
        scene.runs(&seat("ahead"), Running { blocks: 2, exclusive: 2, ..decoding(2, 32) });
        scene.charge(&seat("ahead"), lead);
        let grown = scene.decide(10, &bounds()).preempt.is_empty();
        assert_eq!(grown, !expected.is_empty(), "{lead}");
    }
}

#[test]
fn spare_capacity_is_for_smaller_share_owners() {
    let one_place = Spare { places: 1, blocks: 0 };
    let two_blocks = Spare { places: 0, blocks: 2 };
    for (spare, running, free, who, expected) in [
        (one_place, 7, 100, "hog", 0),
        (one_place, 6, 100, "hog", 1),
        (one_place, 7, 100, "other", 1),
        (one_place, 8, 100, "other", 0),
        // The six sequences of the hog hold 60 of 100 blocks; a candidate needs two.
        (two_blocks, 6, 3, "hog", 0),
        (two_blocks, 6, 4, "hog", 1),
        (two_blocks, 6, 3, "other", 1),
        (two_blocks, 6, 1, "other", 0),
    ] {
        let mut scene = Scene::default();
        for id in 1..=running {
            let running = Running { blocks: 10, exclusive: 10, most: 160, ..decoding(id, 90) };
            scene.runs(&seat("hog"), running);
        }
        scene.waits(&seat(who), waiting(20, 20));
        let decisions = scene.decide(free, &Bounds { spare, ..bounds() });
        assert_eq!(decisions.admit.len(), expected, "{spare:?} {running} {free} {who}");
    }
    // With any number of owners in the batch, the last place is for an owner without one.
    for (who, expected) in [("tenant-1", 0), ("tenant-8", 1)] {
        let mut scene = Scene::default();
        for id in 1..=7 {
            scene.runs(&seat(&format!("tenant-{id}")), decoding(id, 20));
        }
        scene.waits(&seat(who), waiting(20, 20));
        let decisions = scene.decide(50, &Bounds { spare: one_place, ..bounds() });
        assert_eq!(decisions.admit.len(), expected, "{who}");
    }
}

/// A possible state of the engine: sequences with the blocks that they need.
#[derive(Clone, Debug)]
struct State {
    running: Vec<(u32, Running)>,
    waiting: Vec<(u32, Waiting)>,
    leads: Vec<u64>,
    free: u32,
}

fn any_state() -> impl Strategy<Value = State> {
    let rows = || prop_oneof![Just(Rows::None), Just(Rows::Last), Just(Rows::All)];
    let running = (
        0u32..300,
        prop_oneof![3 => Just(1u32), 1 => 2u32..300],
        rows(),
        0u32..3,
        0u32..6,
        any::<bool>(),
    );
    let waiting = (1u32..300, rows(), 0u32..3, 0u64..3, 0u32..6, any::<bool>());
    (
        prop::collection::vec(running, 0..8),
        prop::collection::vec(waiting, 0..8),
        prop::collection::vec(0u64..1_000, 6),
        0u32..60,
    )
        .prop_map(|(running, waits, leads, free)| {
            let mut ids = 1..;
            let mut next = || ids.next().expect("endless");
            State {
                running: running
                    .into_iter()
                    .map(|(cached, pending, rows, followers, of, rested)| {
                        // A decoding sequence may lack the block of its next token.
                        let held = if pending == 1 { cached } else { cached + pending };
                        let blocks = blocks_for(held);
                        let running = Running {
                            pending,
                            rows,
                            most: cached + pending + 50,
                            blocks,
                            exclusive: blocks,
                            followers: if pending > 1 { followers } else { 0 },
                            preempted_at: (!rested).then_some(NOW),
                            ..decoding(next(), cached)
                        };
                        (of, running)
                    })
                    .collect(),
                waiting: waits
                    .into_iter()
                    .map(|(tokens, rows, followers, late, of, fresh)| {
                        let deadline = MonotonicTime(NOW.0 + late - 1);
                        let id = next();
                        let waits = Waiting { rows, followers, ..due(id, tokens, deadline) };
                        if fresh {
                            return (of, waits);
                        }
                        // Recomputed up to a point, on the platform's account.
                        let again =
                            Waiting { pending: tokens.div_ceil(2), ..preempted(id, tokens) };
                        (of, Waiting { rows: Rows::None, followers, ..again })
                    })
                    .collect(),
                leads,
                free,
            }
        })
}

/// Four tenants. The last one also has a seat in the batch tier, and one has two keys.
fn seat_of(number: u32) -> Seat {
    match number {
        4 => of_key("tenant-0", "other"),
        5 => Seat { tier: Tier::Batch, ..seat("tenant-3") },
        number => seat(&format!("tenant-{number}")),
    }
}

proptest! {
    #[test]
    fn decisions_keep_every_bound(state in any_state(), box_us in 0u64..3_000) {
        let State { running, waiting, leads, free } = state;
        let mut scene = Scene::default();
        for (of, running) in &running {
            scene.runs(&seat_of(*of), *running);
        }
        for (of, waits) in &waiting {
            let key = scene.shares.enter(&seat_of(*of));
            if !waits.rank.is_again() {
                scene.shares.expect_start(waits.request, waits.deadline);
            }
            scene.shares.push(key, waits.clone());
        }
        for (of, lead) in (0..).zip(&leads) {
            scene.charge(&seat_of(of), millis(*lead));
        }
        let running = scene.running.clone();
        let waiting: Vec<Waiting> = waiting.into_iter().map(|(_, waits)| waits).collect();
        let spare = Spare { places: free % 3, blocks: free % 5 };
        let bounds = Bounds { step_time_budget: Duration::from_micros(box_us), spare, ..bounds() };
        let decisions = scene.decide(free, &bounds);
        prop_assert_eq!(&scene.decide(free, &bounds), &decisions);
        let Decisions { refuse, preempt, chunks, .. } = &decisions;
        let admit = admitted(&decisions);

        // The step is within the limits of the device, and no sequence is in it twice.
        let tokens: u32 = chunks.iter().map(|chunk| chunk.tokens).sum();
        let rows: u32 = chunks.iter().map(|chunk| row_count(chunk.rows, chunk.tokens)).sum();
        prop_assert!(tokens <= bounds.limits.tokens && rows <= bounds.limits.logit_rows);
        let mut seen: Vec<SequenceId> = chunks.iter().map(|chunk| chunk.sequence).collect();
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen.len(), chunks.len());

        // Blocks come from the free ones and the released ones.
        let mut available = i64::from(free);
        for running in running.iter().filter(|running| preempt.contains(&running.sequence)) {
            available += i64::from(running.exclusive);
        }
        for chunk in chunks {
            let held = running.iter().find(|r| r.sequence == chunk.sequence);
            let held_blocks = held.map_or(0, |held| held.blocks);
            let cached = held.map_or(0, |held| held.cached);
            prop_assert!(!preempt.contains(&chunk.sequence));
            prop_assert!(held.is_some() || admit.contains(&chunk.sequence.0));
            prop_assert!(chunk.tokens > 0);
            prop_assert!(chunk.blocks >= blocks_for(cached + chunk.tokens));
            available -= i64::from(chunk.blocks) - i64::from(held_blocks);
        }
        prop_assert!(available >= 0);

        // An admitted entry is in the step, has its place and all the blocks that it needs,
        // and the running sequences stay.
        for waits in waiting.iter().filter(|waits| admit.contains(&waits.sequence.0)) {
            let chunk = chunks.iter().find(|chunk| chunk.sequence == waits.sequence);
            prop_assert!(chunk.is_some_and(|chunk| chunk.blocks >= blocks_for(waits.tokens)));
            prop_assert!(!refuse.contains(&waits.request));
        }
        let there: u32 = running
            .iter()
            .filter(|r| !preempt.contains(&r.sequence))
            .map(|r| 1 + r.followers)
            .sum();
        let come: u32 = waiting
            .iter()
            .filter(|waits| admit.contains(&waits.sequence.0))
            .map(|waits| 1 + waits.followers)
            .sum();
        prop_assert!(come == 0 || there + come <= bounds.max_sequences);

        // No sequence is preempted twice in a row unless a running sequence needs blocks.
        let grows = running.iter().any(|r| r.pending == 1 && blocks_for(r.cached + 1) > r.blocks);
        let spared = running.iter().filter(|r| preempt.contains(&r.sequence));
        prop_assert!(grows || spared.into_iter().all(|r| r.preempted_at.is_none()));

        // The decision makes progress: alone, the first entry always fits the pool.
        let pool = free + running.iter().map(|r| r.blocks).sum::<u32>();
        let fits = waiting.iter().all(|waits| {
            blocks_for(waits.tokens + 1) <= pool && waits.followers < bounds.max_sequences
        });
        let idle = running.is_empty() && waiting.is_empty();
        prop_assert!(
            idle || !fits || !chunks.is_empty() || !preempt.is_empty() || !refuse.is_empty()
        );
    }
}
