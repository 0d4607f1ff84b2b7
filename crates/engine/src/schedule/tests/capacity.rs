//! Tests of decisions where the slots of the batch or the blocks of the cache are short.

use super::*;

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

/// A scene of three tenants. The prompt of "large" needs 61 of 100 blocks.
fn beside_large_prompt() -> Scene {
    let mut scene = Scene::default();
    scene.runs(&seat("small"), decoding(1, 300));
    scene.waits(&seat("large"), waiting(2, 960));
    scene.waits(&seat("other"), waiting(3, 40));
    // The large request is first in the order.
    scene.charge(&seat("small"), millis(400));
    scene.charge(&seat("other"), millis(100));
    scene
}

#[test]
fn large_request_without_room_is_passed() {
    let scene = beside_large_prompt();
    let decisions = scene.decide(15, &bounds());
    assert_eq!((admitted(&decisions), decisions.preempt.len()), (vec![3], 0));
    // Its owner is behind the others, so it is lifted.
    assert_eq!(decisions.passed.len(), 1);
    // With room it comes first.
    let decisions = scene.decide(90, &bounds());
    assert_eq!((admitted(&decisions)[0], decisions.passed.len()), (2, 0));
}

#[test]
fn large_request_preempts_only_owners_beyond_their_part() {
    for (sequences, expected) in [(1, 0), (3, 1)] {
        let mut scene = Scene::default();
        for id in 1..=sequences {
            scene.runs(&seat("hog"), Running { most: 300, ..decoding(id, 300) });
        }
        scene.waits(&seat("large"), waiting(9, 900));
        scene.charge(&seat("hog"), millis(9_000));
        let decisions = scene.decide(56, &bounds());
        assert_eq!(decisions.preempt.len(), expected, "{sequences}");
    }
}

#[test]
fn large_sequence_gives_way_without_rest() {
    // The large sequence is behind, and was preempted a moment ago.
    for (cached, lead, expected) in
        [(1_000, 250, vec![2]), (300, 250, vec![]), (1_000, 9_000, vec![2])]
    {
        let mut scene = Scene::default();
        let preempted_at = Some(NOW);
        scene.runs(&seat("large"), Running { preempted_at, ..reading(1, cached, 40) });
        scene.waits(&seat("small"), waiting(2, 200));
        scene.charge(&seat("small"), millis(lead));
        assert_eq!(scene.admitted(5), expected, "{cached} {lead}");
    }
    // The small request would take its owner beyond its part, half of the cache.
    for (lead, expected) in [(250, vec![2]), (251, vec![])] {
        let mut scene = Scene::default();
        scene.runs(&seat("large"), reading(1, 840, 40));
        scene.runs(&seat("small"), Running { most: 700, ..decoding(3, 690) });
        scene.waits(&seat("small"), waiting(2, 200));
        scene.charge(&seat("small"), millis(lead));
        assert_eq!(scene.admitted(1), expected, "{lead}");
    }
}

#[test]
fn lone_tenant_has_no_large_request() {
    let mut scene = Scene::default();
    scene.runs(&seat("a"), decoding(1, 600));
    scene.waits(&seat("a"), waiting(2, 960));
    scene.waits(&of_key("a", "other"), waiting(3, 40));
    assert_eq!(scene.admitted(60), [0; 0]);
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

/// Returns the predicted time of the decided step without the sequences in `without`.
fn predicted(decisions: &Decisions, scene: &Scene, without: &[u64]) -> DeviceNanos {
    let table = table();
    let mut cost = table.step_cost();
    for chunk in decisions.chunks.iter().filter(|chunk| !without.contains(&chunk.sequence.0)) {
        let running = scene.running.iter().find(|running| running.sequence == chunk.sequence);
        cost.add(&work(chunk, running.map_or(0, |running| running.cached)));
    }
    cost.predicted()
}

#[test]
fn batch_rows_lengthen_a_step_by_the_bound() {
    let jobs = |number: u64| Seat { tier: Tier::Batch, ..seat(&format!("jobs-{}", number % 3)) };
    let batch: Vec<u64> = (100..150).collect();
    for percent in [1, 10, 25, 1_000] {
        let bounds = Bounds { batch_step: percent, max_sequences: 64, ..bounds() };
        let mut scene = Scene::default();
        scene.runs(&seat("a"), decoding(1, 20));
        for &id in &batch {
            scene.runs(&jobs(id), decoding(id, 60));
        }
        let beside = scene.decide(100, &bounds);
        let alone = predicted(&beside, &scene, &batch).nanos();
        let all = predicted(&beside, &scene, &[]).nanos();
        assert!(all <= alone + alone * u64::from(percent) / 100, "{percent} %: {alone} -> {all}");
        let rows = beside.chunks.len() - 1;
        assert!(rows > 0 || percent == 1, "{percent} %: batch work runs on spare capacity");
        // The control: without interactive work every row is in the step.
        let mut scene = Scene::default();
        for &id in &batch {
            scene.runs(&jobs(id), decoding(id, 60));
        }
        assert_eq!(scene.decide(100, &bounds).chunks.len(), batch.len());
    }
}

#[test]
fn batch_prompts_lengthen_a_step_by_the_bound() {
    let jobs = Seat { tier: Tier::Batch, ..seat("jobs") };
    let mut scene = Scene::default();
    scene.runs(&seat("a"), decoding(1, 20));
    scene.waits(&jobs, waiting(100, 900));
    let beside = scene.decide(100, &bounds());
    let alone = predicted(&beside, &scene, &[100]).nanos();
    assert!(predicted(&beside, &scene, &[]).nanos() <= alone + alone / 4, "{beside:?}");
    // The control: alone, the prompt is read by the time budget of a step.
    let mut scene = Scene::default();
    scene.waits(&jobs, waiting(100, 900));
    let control = scene.decide(100, &bounds());
    assert!(predicted(&control, &scene, &[]).nanos() > alone + alone / 4, "{control:?}");
}

#[test]
fn interactive_prompts_come_before_batch_rows() {
    let jobs = Seat { tier: Tier::Batch, ..seat("jobs") };
    let bounds = Bounds { limits: StepLimits { tokens: 40, logit_rows: 64 }, ..bounds() };
    let mut scene = Scene::default();
    for id in 100..104 {
        scene.runs(&jobs, decoding(id, 20));
    }
    scene.waits(&seat("a"), waiting(1, 400));
    let chunks = scene.decide(100, &bounds).chunks;
    let read = chunks.iter().find(|chunk| chunk.sequence == SequenceId(1)).expect("it starts");
    assert!(read.tokens >= 32, "the prompt has the step: {chunks:?}");
}

#[test]
fn headroom_is_for_tenants_near_smallest() {
    for (lead, expected) in [(GUARD, vec![20]), (millis(251), vec![])] {
        // 12 of 100 blocks are free. The candidate needs one, the running sequence four. Its
        // owner holds half of all blocks, which is its part.
        let mut scene = Scene::default();
        scene.runs(&seat("behind"), decoding(1, 10));
        scene.runs(&seat("ahead"), Running { most: 800, ..decoding(30, 799) });
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
fn headroom_is_for_tenants_within_their_part() {
    for (held, expected) in [(48, vec![20]), (50, vec![])] {
        let mut scene = Scene::default();
        scene.runs(&seat("behind"), decoding(1, 10));
        scene.runs(&seat("ahead"), Running { most: 16 * held, ..decoding(30, 16 * held - 1) });
        scene.waits(&seat("ahead"), waiting(20, 15));
        scene.charge(&seat("ahead"), millis(9_000));
        assert_eq!(scene.admitted(12), expected, "{held} blocks of 100, and one more");
    }
}

/// Returns a scene with `running` sequences of one tenant that hold ten blocks each.
fn hog_with(running: u64) -> Scene {
    let mut scene = Scene::default();
    for id in 1..=running {
        let running = Running { blocks: 10, exclusive: 10, most: 160, ..decoding(id, 90) };
        scene.runs(&seat("hog"), running);
    }
    scene
}

#[test]
fn spare_capacity_is_for_smaller_share_owners() {
    let one_place = Spare { places: 1, blocks: 0 };
    let two_blocks = Spare { places: 0, blocks: 2 };
    for (spare, running, free, who, expected) in [
        (one_place, 7, 100, "hog", 0),
        (one_place, 6, 100, "hog", 1),
        (one_place, 7, 100, "other", 1),
        // The six sequences of the hog hold 60 of 100 blocks; a candidate needs two.
        (two_blocks, 6, 3, "hog", 0),
        (two_blocks, 6, 4, "hog", 1),
        (two_blocks, 6, 3, "other", 1),
        (two_blocks, 6, 1, "other", 0),
    ] {
        let mut scene = hog_with(running);
        // Another tenant has a request, and no room for it is asked for here.
        scene.shares.enter(&seat("third"));
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

/// An owner with many waiting requests leaves the spare slots to others, also if it runs none.
#[test]
fn spare_slots_are_for_owners_with_few_requests() {
    let spare = Spare { places: 4, blocks: 0 };
    // A part is six of the twelve slots that are not spare, so six requests are few.
    for (requests, expected) in [(1, 1), (4, 4), (6, 4), (7, 0), (9, 0)] {
        let mut scene = hog_with(12);
        (0..requests).for_each(|id| scene.waits(&seat("other"), waiting(20 + id, 20)));
        let bounds = Bounds { max_sequences: 16, total_blocks: 1_000, spare, ..bounds() };
        let decisions = scene.decide(800, &bounds);
        assert_eq!(decisions.admit.len(), expected, "{requests} requests");
    }
}

/// Answers that end together do not open the spare slots to an owner that keeps many requests.
#[test]
fn spare_slots_stay_closed_until_owner_is_idle() {
    let spare = Spare { places: 4, blocks: 0 };
    let bounds = Bounds { max_sequences: 16, total_blocks: 1_000, spare, ..bounds() };
    // A part is six slots. The owner has had nine requests; one waits and the others end.
    for (ended_first, expected) in [(8, 0), (9, 1)] {
        let mut scene = hog_with(12);
        let keys: Vec<NodeId> = (0..9).map(|_| scene.shares.enter(&seat("other"))).collect();
        keys[..ended_first].iter().for_each(|&key| scene.shares.leave(key));
        scene.waits(&seat("other"), waiting(20, 20));
        keys[ended_first..].iter().for_each(|&key| scene.shares.leave(key));
        assert_eq!(scene.decide(800, &bounds).admit.len(), expected, "{ended_first} ended");
    }
}

#[test]
fn spare_slots_stay_closed_to_batch_work() {
    let spare = Spare { places: 4, blocks: 0 };
    let bounds = Bounds { max_sequences: 16, total_blocks: 1_000, spare, ..bounds() };
    for (tier, expected) in [(Tier::Interactive, 0), (Tier::Batch, 1)] {
        let mut scene = Scene::default();
        for id in 1..=12 {
            scene.runs(&Seat { tier, ..seat("hog") }, decoding(id, 20));
        }
        scene.waits(&Seat { tier: Tier::Batch, ..seat("jobs") }, waiting(20, 20));
        assert_eq!(scene.decide(800, &bounds).admit.len(), expected, "beside {tier:?}");
    }
}

/// A head counts with all its choices in the step that admits it, too.
#[test]
fn spare_capacity_counts_choices_of_admitted_head() {
    let spare = Spare { places: 2, blocks: 20 };
    for (who, expected) in [("many", vec![20]), ("other", vec![20, 30])] {
        let mut scene = Scene::default();
        // Six of eight places, which leaves the spare ones free.
        scene.waits(&seat("many"), Waiting { followers: 5, ..waiting(20, 20) });
        scene.waits(&seat(who), waiting(30, 20));
        // Another tenant has a request, and no room for it is asked for here.
        scene.shares.enter(&seat("third"));
        let decisions = scene.decide(100, &Bounds { spare, ..bounds() });
        assert_eq!(admitted(&decisions), expected, "{who}");
    }
}

#[test]
fn spare_capacity_is_open_behind_a_blocked_head() {
    let spare = Spare { places: 2, blocks: 20 };
    for (running, followers, tokens, expected) in [
        // Six choices do not fit beside six sequences.
        (6, 0, 20, vec![30]),
        (7, 0, 20, vec![30]),
        (8, 0, 20, vec![]),
        (6, 1, 20, vec![30]),
        // More than the spare places, or more than the spare blocks.
        (5, 2, 20, vec![]),
        (6, 0, 400, vec![]),
    ] {
        let mut scene = hog_with(running);
        scene.waits(&seat("choices"), Waiting { followers: 5, ..waiting(20, 20) });
        scene.waits(&seat("hog"), waiting(25, 20));
        scene.waits(&seat("small"), Waiting { followers, ..waiting(30, tokens) });
        scene.charge(&seat("hog"), millis(1));
        scene.charge(&seat("small"), millis(2));
        let decisions = scene.decide(60, &Bounds { spare, ..bounds() });
        assert_eq!(admitted(&decisions), expected, "{running} {followers} {tokens}");
    }
    // The work of a decision is bounded, however many owners wait.
    let mut scene = hog_with(6);
    scene.waits(&seat("choices"), Waiting { followers: 5, ..waiting(20, 20) });
    for id in 0..30 {
        let large = seat(&format!("large-{id}"));
        scene.waits(&large, waiting(100 + id, 400));
        scene.charge(&large, millis(1));
    }
    scene.waits(&seat("small"), waiting(30, 20));
    scene.charge(&seat("small"), millis(2));
    let decisions = scene.decide(60, &Bounds { spare, ..bounds() });
    assert_eq!(admitted(&decisions), Vec::<u64>::new());
}

#[test]
fn lone_share_owner_uses_the_spare_capacity() {
    let spare = Spare { places: 1, blocks: 2 };
    for (running, free, others, expected) in
        [(7, 30, 0, 1), (7, 30, 1, 0), (8, 30, 0, 0), (6, 2, 0, 1), (6, 2, 1, 0), (6, 1, 0, 0)]
    {
        let mut scene = hog_with(running);
        (0..others).for_each(|_| _ = scene.shares.enter(&seat("other")));
        scene.waits(&seat("hog"), waiting(20, 20));
        let decisions = scene.decide(free, &Bounds { spare, ..bounds() });
        assert_eq!(decisions.admit.len(), expected, "{running} {free} {others}");
    }
}

#[test]
fn newcomer_takes_borrowed_spare_capacity_back() {
    let spare = Spare { places: 1, blocks: 3 };
    for (running, free, asked, lead, expected) in [
        // All eight places, and all but two blocks of the cache.
        (8, 20, 20, 0, true),
        (8, 20, 20, 1, true),
        (10, 0, 20, 0, true),
        // The hog holds no more than all but the spare capacity.
        (7, 0, 20, 0, false),
        // The request needs more than the spare capacity.
        (10, 0, 60, 0, false),
    ] {
        let mut scene = hog_with(running);
        scene.charge(&seat("hog"), millis(lead));
        scene.waits(&seat("other"), waiting(20, asked));
        let max_sequences = if running == 10 { 16 } else { 8 };
        let bounds = Bounds { spare, max_sequences, ..bounds() };
        let decisions = scene.decide(free, &bounds);
        assert_eq!(decisions.preempt.len(), usize::from(expected), "{running} {free} {asked}");
        assert_eq!(decisions.admit.len(), usize::from(expected), "{running} {free} {asked}");
    }
    // A newcomer that has used more of the device waits.
    let mut scene = hog_with(8);
    scene.charge(&seat("hog"), millis(1));
    scene.waits(&seat("other"), waiting(20, 20));
    scene.charge(&seat("other"), millis(2));
    let decisions = scene.decide(20, &Bounds { spare, ..bounds() });
    assert_eq!(decisions, Decisions { chunks: decisions.chunks.clone(), ..Decisions::default() });
}
