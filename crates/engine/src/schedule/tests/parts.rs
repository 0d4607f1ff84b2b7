//! Tests of large sequences that hold only a part of their blocks.

use super::*;

/// Returns a large prompt of which `cached` tokens are read, with only the blocks for them.
fn part(id: u64, cached: u32, known: u32) -> Running {
    let blocks = blocks_for(cached);
    Running { known, blocks, exclusive: blocks, ..reading(id, cached, known - cached) }
}

fn shrunk(decisions: &Decisions) -> Vec<(u64, u32)> {
    decisions.shrink.iter().map(|shrink| (shrink.sequence.0, shrink.blocks)).collect()
}

fn blocks_of(decisions: &Decisions, id: u64) -> Option<u32> {
    let chunk = decisions.chunks.iter().find(|chunk| chunk.sequence.0 == id);
    chunk.map(|chunk| chunk.blocks)
}

#[test]
fn large_request_starts_with_free_blocks() {
    // Four blocks are kept for the running sequence. The prompt needs 61, and the step has
    // tokens for 31.
    for (free, expected) in [(60, Some(31)), (30, Some(26)), (20, Some(16)), (19, None)] {
        let mut scene = Scene::default();
        scene.runs(&seat("small"), decoding(1, 300));
        scene.waits(&seat("large"), waiting(2, 960));
        scene.charge(&seat("small"), millis(100));
        let decisions = scene.decide(free, &bounds());
        assert_eq!(blocks_of(&decisions, 2), expected, "{free}");
        assert_eq!(decisions.passed.is_empty(), expected.is_some(), "{free}");
    }
}

#[test]
fn only_one_sequence_has_a_part() {
    let mut scene = Scene::default();
    scene.runs(&seat("one"), part(1, 480, 960));
    scene.waits(&seat("two"), waiting(2, 960));
    scene.waits(&seat("small"), waiting(3, 40));
    let decisions = scene.decide(25, &bounds());
    assert_eq!(admitted(&decisions), [3]);
}

#[test]
fn large_sequence_gives_up_only_its_last_blocks() {
    // The small request needs 13 blocks, and five are free.
    let mut scene = Scene::default();
    scene.runs(&seat("large"), reading(1, 640, 320));
    scene.waits(&seat("small"), waiting(2, 200));
    let decisions = scene.decide(5, &bounds());
    assert_eq!((admitted(&decisions), shrunk(&decisions)), (vec![2], vec![(1, 52)]));
    // The blocks without tokens go first, so the sequence goes on.
    assert_eq!(chunks(&decisions), [(1, 192), (2, 200)]);
    assert_eq!(blocks_of(&decisions, 1), Some(52));
}

#[test]
fn sequence_without_read_tokens_rests_in_that_step() {
    let mut scene = Scene::default();
    scene.runs(&seat("large"), part(1, 640, 960));
    scene.waits(&seat("small"), waiting(2, 200));
    let decisions = scene.decide(0, &bounds());
    assert_eq!((shrunk(&decisions), chunks(&decisions)), (vec![(1, 27)], vec![(2, 200)]));
}

#[test]
fn sequence_that_lost_blocks_leaves_the_headroom() {
    // The headroom is 10 blocks. The sequence lacks 20, 8 of which were computed.
    let lost = Running { computed: 768, ..part(1, 640, 960) };
    for (free, expected) in [(14, None), (15, Some(45)), (19, Some(49)), (20, Some(60))] {
        let mut scene = Scene::default();
        scene.runs(&seat("large"), lost);
        scene.runs(&seat("small"), decoding(2, 10));
        assert_eq!(blocks_of(&scene.decide(free, &bounds()), 1), expected, "{free}");
    }
    // Alone it takes what there is.
    let mut scene = Scene::default();
    scene.runs(&seat("large"), lost);
    scene.waits(&seat("other"), waiting(3, 960));
    assert_eq!(blocks_of(&scene.decide(14, &bounds()), 1), Some(54));
}

#[test]
fn large_sequence_waits_for_its_next_block() {
    let full = |id, tokens: u32| {
        let blocks = blocks_for(tokens);
        Running { blocks, exclusive: blocks, ..decoding(id, tokens) }
    };
    let mut scene = Scene::default();
    scene.runs(&seat("large"), full(1, 960));
    scene.runs(&seat("small"), decoding(2, 10));
    scene.charge(&seat("large"), millis(9_000));
    let decisions = scene.decide(0, &bounds());
    assert_eq!((decisions.preempt.len(), chunks(&decisions)), (0, vec![(2, 1)]));
    // It does not wait for a sequence that waits itself.
    scene.runs(&seat("other"), part(3, 480, 960));
    let decisions = scene.decide(0, &bounds());
    assert_eq!(shrunk(&decisions), [(3, 29)]);
    assert!(chunks(&decisions).contains(&(1, 1)));
}

#[test]
fn requests_wait_for_their_owners_large_one() {
    let mut scene = Scene::default();
    scene.runs(&seat("large"), part(1, 480, 960));
    scene.runs(&seat("small"), decoding(2, 10));
    scene.waits(&of_key("large", "other"), waiting(3, 40));
    scene.waits(&seat("small"), waiting(4, 40));
    assert_eq!(scene.admitted(20), [4]);
}

#[test]
fn part_gives_way_whatever_others_hold() {
    for (known, expected) in [(960, vec![2]), (480, vec![])] {
        let mut scene = Scene::default();
        scene.runs(&seat("large"), part(1, 480, known));
        scene.runs(&seat("small"), Running { most: 900, ..decoding(3, 800) });
        scene.waits(&seat("small"), waiting(2, 200));
        assert_eq!(scene.admitted(12), expected, "{known}");
    }
}
