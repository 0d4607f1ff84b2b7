//! Decisions over views made by hand and at random, without a device.

use proptest::prelude::*;
use tollgate_domain::TenantId;

use super::*;
use crate::testing::table;

fn bounds() -> Bounds {
    Bounds {
        table: table(),
        step_box: Duration::from_millis(80),
        max_sequences: 8,
        limits: StepLimits { tokens: 512, logit_rows: 64 },
    }
}

fn decoding(id: u64, cached: u32) -> Running {
    let blocks = blocks_for(cached + 1);
    Running {
        sequence: SequenceId(id),
        cached,
        pending: 1,
        rows: Rows::Last,
        most: 1_000,
        blocks,
        exclusive: blocks,
        followers: 0,
    }
}

fn reading(id: u64, cached: u32, pending: u32) -> Running {
    let blocks = blocks_for(cached + pending);
    Running { pending, blocks, exclusive: blocks, ..decoding(id, cached) }
}

fn waiting(id: u64, tenant: &str, prompt_tokens: u32) -> Waiting {
    Waiting {
        leader: SequenceId(id),
        request: SequenceId(id),
        tenant: TenantId::new(tenant).expect("a name"),
        prompt_tokens,
        most: prompt_tokens + 100,
        rows: Rows::Last,
        followers: 0,
        deadline: Some(MonotonicTime(1_000)),
    }
}

fn queues(all: impl IntoIterator<Item = Waiting>) -> Queues {
    let mut queues = Queues::default();
    for waiting in all {
        queues.push(waiting);
    }
    queues
}

fn view<'a>(running: &'a [Running], queues: &'a Queues, free_blocks: u32) -> View<'a> {
    View { now: MonotonicTime(0), running, preempted: &[], queues, free_blocks }
}

fn ids(sequences: &[SequenceId]) -> Vec<u64> {
    sequences.iter().map(|sequence| sequence.0).collect()
}

fn chunks(decisions: &Decisions) -> Vec<(u64, u32)> {
    decisions.chunks.iter().map(|chunk| (chunk.sequence.0, chunk.tokens)).collect()
}

#[test]
fn tenants_take_turns_and_keep_their_own_order() {
    let queues = queues([
        waiting(1, "a", 4),
        waiting(2, "a", 4),
        waiting(3, "a", 4),
        waiting(4, "b", 4),
        waiting(5, "c", 4),
        waiting(6, "b", 4),
    ]);
    let decisions = decide(&view(&[], &queues, 100), &bounds());
    assert_eq!(ids(&decisions.admit), [1, 4, 5, 2, 6, 3]);
}

#[test]
fn a_turn_that_was_taken_goes_to_the_back() {
    let mut queues =
        queues([waiting(1, "a", 4), waiting(2, "a", 4), waiting(3, "b", 4), waiting(4, "b", 4)]);
    let a = TenantId::new("a").expect("a name");
    assert!(queues.start(&a, SequenceId(2)).is_none(), "it is not its turn");
    assert_eq!(queues.start(&a, SequenceId(1)).expect("first").leader, SequenceId(1));
    let order: Vec<u64> = queues.in_turn().map(|waiting| waiting.leader.0).collect();
    assert_eq!(order, [3, 2, 4]);
    let b = TenantId::new("b").expect("a name");
    assert_eq!(queues.remove(&b, SequenceId(3)), 1);
    assert_eq!(queues.remove(&b, SequenceId(4)), 1);
    assert_eq!(queues.remove(&b, SequenceId(4)), 0);
    assert_eq!(queues.start(&a, SequenceId(2)).expect("first").leader, SequenceId(2));
    assert!(queues.is_empty());
    assert_eq!(queues.expired(MonotonicTime(u64::MAX)).count(), 0);
}

#[test]
fn who_decodes_comes_first_and_prefill_fills_the_box() {
    let running = [reading(1, 0, 400), decoding(2, 50), decoding(3, 60)];
    let empty = Queues::default();
    for (step_box, expected) in [
        (Duration::from_secs(1), vec![(2, 1), (3, 1), (1, 400)]),
        (Duration::from_millis(1), vec![(2, 1), (3, 1), (1, 144)]),
        // However small the box, a prompt is read a little further.
        (Duration::ZERO, vec![(2, 1), (3, 1), (1, 16)]),
    ] {
        let bounds = Bounds { step_box, ..bounds() };
        let decisions = decide(&view(&running, &empty, 100), &bounds);
        assert_eq!(chunks(&decisions), expected, "{step_box:?}");
        let works: Vec<SequenceWork> = decisions
            .chunks
            .iter()
            .map(|chunk| {
                let cached =
                    running.iter().find(|r| r.sequence == chunk.sequence).map(|r| r.cached);
                work(chunk.sequence, cached.unwrap_or(0), chunk.tokens, chunk.rows)
            })
            .collect();
        let predicted = bounds.table.predict_step(&works).nanos();
        assert!(step_box.is_zero() || u128::from(predicted) <= step_box.as_nanos());
    }
}

#[test]
fn only_the_end_of_a_prompt_wants_a_row() {
    let empty = Queues::default();
    for (pending, rows, expected) in [
        (100, Rows::Last, Rows::Last),
        (600, Rows::Last, Rows::None),
        (100, Rows::None, Rows::None),
        (60, Rows::All, Rows::All),
    ] {
        let running = [Running { rows, ..reading(1, 0, pending) }];
        let decisions = decide(&view(&running, &empty, 100), &bounds());
        assert_eq!(decisions.chunks[0].rows, expected, "{pending} {rows:?}");
    }
    // Rows are bounded, so a prompt that wants them all is read in smaller chunks.
    let running = [Running { rows: Rows::All, ..reading(1, 0, 300) }];
    assert_eq!(chunks(&decide(&view(&running, &empty, 100), &bounds())), [(1, 64)]);
}

#[test]
fn places_in_the_batch_are_bounded() {
    let running: Vec<Running> = (1..=6).map(|id| decoding(id, 10)).collect();
    for (followers, expected) in [(0, vec![7, 8]), (1, vec![7]), (2, vec![])] {
        let queues = queues([
            Waiting { followers, ..waiting(7, "a", 4) },
            waiting(8, "b", 4),
            waiting(9, "c", 4),
        ]);
        // The second does not slip past the first when that one is too large.
        let decisions = decide(&view(&running, &queues, 100), &bounds());
        assert_eq!(ids(&decisions.admit), expected, "{followers}");
    }
}

#[test]
fn a_prompt_starts_only_when_its_cache_is_free() {
    let running = [decoding(1, 10)];
    for (free, expected) in [(100, vec![2, 3]), (4, vec![]), (5, vec![2])] {
        let queues = queues([waiting(2, "a", 60), waiting(3, "b", 4)]);
        let decisions = decide(&view(&running, &queues, free), &bounds());
        assert_eq!(ids(&decisions.admit), expected, "{free}");
    }
    // Alone it always fits: the door has seen to that.
    let queues = queues([waiting(2, "a", 60)]);
    assert_eq!(ids(&decide(&view(&[], &queues, 4), &bounds()).admit), [2]);
}

#[test]
fn cache_is_reserved_ahead_and_never_beyond_what_can_be_used() {
    let empty = Queues::default();
    for (cached, most, free, expected) in [
        (10, 1_000, 100, 1),  // it has room
        (16, 1_000, 100, 16), // grown by a step
        (16, 1_000, 3, 4),    // by what there is
        (16, 40, 100, 3),     // by what it may need
        (256, 1_000, 100, 32),
    ] {
        let blocks = blocks_for(cached);
        let running = [Running { most, blocks, exclusive: blocks, ..decoding(1, cached) }];
        let decisions = decide(&view(&running, &empty, free), &bounds());
        assert_eq!(decisions.chunks[0].blocks, expected, "{cached} {most} {free}");
    }
}

#[test]
fn the_latest_arrival_gives_its_cache_back() {
    let full = |id| Running { blocks: 1, exclusive: 1, ..decoding(id, 16) };
    let queues = queues([waiting(9, "a", 4)]);
    let running = [full(1), full(2), full(3)];
    let decisions = decide(&view(&running, &queues, 0), &bounds());
    // 3 gives a block to 1; 2 finds none, but itself is the latest left.
    assert_eq!(ids(&decisions.preempt), [3, 2]);
    assert_eq!(chunks(&decisions), [(1, 1)]);
    assert!(decisions.admit.is_empty(), "nothing starts beside a preemption");
    // A place that was given in the same step is taken back with its blocks.
    let running = [Running { blocks: 3, exclusive: 3, ..reading(1, 32, 40) }, full(2)];
    let decisions = decide(&view(&running, &queues, 1), &bounds());
    assert_eq!(ids(&decisions.preempt), [2]);
    assert_eq!(chunks(&decisions), [(1, 40)]);
    assert_eq!(decisions.chunks[0].blocks, 5);
}

#[test]
fn what_was_preempted_comes_back_before_anything_new_starts() {
    let preempted = |id, tokens| Preempted {
        sequence: SequenceId(id),
        tokens,
        pending: tokens - 1,
        most: 1_000,
        rows: Rows::None,
        followers: 0,
    };
    let queues = queues([waiting(9, "a", 4)]);
    for (free, resumed, admitted) in
        [(2, vec![], vec![]), (40, vec![2], vec![]), (100, vec![2, 3], vec![9])]
    {
        let view =
            View { preempted: &[preempted(2, 50), preempted(3, 500)], ..view(&[], &queues, free) };
        let running = [decoding(1, 5)];
        let decisions = decide(&View { running: &running, ..view }, &bounds());
        assert_eq!(ids(&decisions.resume), resumed, "{free}");
        assert_eq!(ids(&decisions.admit), admitted, "{free}");
    }
}

#[test]
fn who_waited_too_long_is_refused_and_not_started() {
    let queues = queues([
        waiting(1, "a", 4),
        Waiting { deadline: None, ..waiting(2, "a", 4) },
        Waiting { deadline: Some(MonotonicTime(5_000)), ..waiting(3, "b", 4) },
    ]);
    for (now, refused, admitted) in
        [(1_000, vec![], vec![1, 3, 2]), (1_001, vec![1], vec![3, 2]), (9_000, vec![1, 3], vec![2])]
    {
        let view = View { now: MonotonicTime(now), ..view(&[], &queues, 100) };
        let decisions = decide(&view, &bounds());
        assert_eq!(ids(&decisions.refuse), refused, "{now}");
        assert_eq!(ids(&decisions.admit), admitted, "{now}");
    }
}

/// A state that the engine could be in: sequences with the blocks they need.
#[derive(Clone, Debug)]
struct State {
    running: Vec<Running>,
    preempted: Vec<Preempted>,
    waiting: Vec<Waiting>,
    free: u32,
}

fn any_state() -> impl Strategy<Value = State> {
    let rows = || prop_oneof![Just(Rows::None), Just(Rows::Last), Just(Rows::All)];
    let running = (0u32..300, prop_oneof![3 => Just(1u32), 1 => 2u32..300], rows(), 0u32..3);
    let preempted = (1u32..300, 0u32..300, rows(), 0u32..3);
    let waiting = (1u32..300, rows(), 0u32..3, 0u64..3, 0u32..4);
    (
        prop::collection::vec(running, 0..8),
        prop::collection::vec(preempted, 0..3),
        prop::collection::vec(waiting, 0..6),
        0u32..60,
    )
        .prop_map(|(running, preempted, waiting, free)| {
            let mut ids = 1..;
            let mut next = || ids.next().expect("endless");
            State {
                running: running
                    .into_iter()
                    .map(|(cached, pending, rows, followers)| {
                        // A decoder may lack the block of its next token.
                        let held = if pending == 1 { cached } else { cached + pending };
                        let blocks = blocks_for(held);
                        let most = cached + pending + 50;
                        Running {
                            pending,
                            rows,
                            most,
                            blocks,
                            exclusive: blocks,
                            followers: if pending > 1 { followers } else { 0 },
                            ..decoding(next(), cached)
                        }
                    })
                    .collect(),
                preempted: preempted
                    .into_iter()
                    .map(|(pending, more, rows, followers)| Preempted {
                        sequence: SequenceId(next()),
                        tokens: pending + more,
                        pending,
                        most: pending + more + 50,
                        rows,
                        followers,
                    })
                    .collect(),
                waiting: waiting
                    .into_iter()
                    .map(|(tokens, rows, followers, deadline, tenant)| Waiting {
                        rows,
                        followers,
                        deadline: Some(MonotonicTime(deadline)),
                        ..waiting_of(next(), tenant, tokens)
                    })
                    .collect(),
                free,
            }
        })
}

fn waiting_of(id: u64, tenant: u32, tokens: u32) -> Waiting {
    waiting(id, &format!("tenant-{tenant}"), tokens)
}

proptest! {
    #[test]
    fn decisions_keep_every_bound(state in any_state(), box_us in 0u64..3_000) {
        let State { running, preempted, waiting, free } = state;
        let queues = queues(waiting.clone());
        let view = View {
            now: MonotonicTime(1), running: &running, preempted: &preempted,
            queues: &queues, free_blocks: free,
        };
        let bounds = Bounds { step_box: Duration::from_micros(box_us), ..bounds() };
        let decisions = decide(&view, &bounds);
        let Decisions { refuse, preempt, resume, admit, chunks } = decisions.clone();
        prop_assert_eq!(&decide(&view, &bounds), &decisions);

        // The step is within the device's limits, and nobody is in it twice.
        let tokens: u32 = chunks.iter().map(|chunk| chunk.tokens).sum();
        let rows: u32 = chunks.iter().map(|chunk| row_count(chunk.rows, chunk.tokens)).sum();
        prop_assert!(tokens <= bounds.limits.tokens && rows <= bounds.limits.logit_rows);
        let mut seen: Vec<SequenceId> = chunks.iter().map(|chunk| chunk.sequence).collect();
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen.len(), chunks.len());

        // Blocks come from what is free and what is given back.
        let mut available = i64::from(free);
        for running in running.iter().filter(|running| preempt.contains(&running.sequence)) {
            available += i64::from(running.exclusive);
        }
        for chunk in &chunks {
            let held = running.iter().find(|r| r.sequence == chunk.sequence);
            let held_blocks = held.map_or(0, |held| held.blocks);
            let cached = held.map_or(0, |held| held.cached);
            prop_assert!(!preempt.contains(&chunk.sequence));
            prop_assert!(chunk.tokens > 0);
            prop_assert!(chunk.blocks >= blocks_for(cached + chunk.tokens));
            available -= i64::from(chunk.blocks) - i64::from(held_blocks);
        }
        prop_assert!(available >= 0);

        // Places in the batch are for those who come; those who are there stay.
        let there: u32 = running.iter().map(|r| 1 + r.followers).sum();
        let come: u32 = preempted.iter().filter(|p| resume.contains(&p.sequence)).map(|p| 1 + p.followers)
            .chain(waiting.iter().filter(|w| admit.contains(&w.leader)).map(|w| 1 + w.followers))
            .sum();
        prop_assert!(come == 0 || there + come <= bounds.max_sequences);

        // Nothing new starts while someone else waits to be computed again.
        prop_assert!(admit.is_empty() || resume.len() == preempted.len());
        prop_assert!(admit.iter().all(|leader| !refuse.contains(leader)));
        prop_assert!(preempt.is_empty() || (resume.is_empty() && admit.is_empty()));

        // It gets somewhere: alone, whatever comes first always fits the pool.
        let pool = free + running.iter().map(|r| r.blocks).sum::<u32>();
        let fits = preempted.first().is_none_or(|p| blocks_for(p.tokens) <= pool)
            && waiting.iter().all(|w| blocks_for(w.prompt_tokens) <= pool);
        let idle = running.is_empty() && preempted.is_empty() && waiting.is_empty();
        prop_assert!(
            idle || !fits || !chunks.is_empty() || !preempt.is_empty() || !refuse.is_empty()
        );
    }
}
