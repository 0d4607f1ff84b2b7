//! Property test: decisions over random views keep every bound and make progress.

use proptest::prelude::*;

use super::*;

/// A possible state of the engine: sequences with the blocks that they need.
#[derive(Clone, Debug)]
struct State {
    running: Vec<(u32, Running)>,
    waiting: Vec<(u32, Waiting)>,
    leads: Vec<u64>,
    free: u32,
    /// Blocks beyond its cached tokens that the first reader holds, if it lacks some.
    part: Option<u32>,
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
        proptest::option::of(0u32..10),
    )
        .prop_map(|(running, waits, leads, free, part)| {
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
                            known: cached + pending,
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
                part,
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
        let State { mut running, waiting, leads, free, part } = state;
        let reader = running.iter_mut().find(|(_, running)| running.pending > 1);
        if let (Some((_, reader)), Some(part)) = (reader, part) {
            reader.blocks = reader.blocks.min(blocks_for(reader.cached) + part);
            reader.exclusive = reader.blocks;
        }
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
        let Decisions { refuse, preempt, shrink, chunks, .. } = &decisions;
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
        let kept = |r: &Running| {
            let shrunk = shrink.iter().find(|shrink| shrink.sequence == r.sequence);
            shrunk.map_or(r.blocks, |shrink| shrink.blocks)
        };
        for running in &running {
            prop_assert!(kept(running) == running.blocks || !preempt.contains(&running.sequence));
            prop_assert!(kept(running) <= running.blocks);
            available += i64::from(running.blocks - kept(running));
        }
        for chunk in chunks {
            let held = running.iter().find(|r| r.sequence == chunk.sequence);
            let held_blocks = held.map_or(0, kept);
            // A sequence that lost read tokens is not in the step.
            prop_assert!(held.is_none_or(|held| blocks_for(held.cached) <= held_blocks));
            let cached = held.map_or(0, |held| held.cached);
            prop_assert!(!preempt.contains(&chunk.sequence));
            prop_assert!(held.is_some() || admit.contains(&chunk.sequence.0));
            prop_assert!(chunk.tokens > 0);
            prop_assert!(chunk.blocks >= blocks_for(cached + chunk.tokens));
            available -= i64::from(chunk.blocks) - i64::from(held_blocks);
        }
        prop_assert!(available >= 0);

        // An admitted entry is in the step and has its place, and the running sequences stay.
        for waits in waiting.iter().filter(|waits| admit.contains(&waits.sequence.0)) {
            let chunk = chunks.iter().find(|chunk| chunk.sequence == waits.sequence);
            prop_assert!(chunk.is_some());
            prop_assert!(!refuse.contains(&waits.request));
        }
        // At most one sequence of the batch lacks blocks: two could wait for each other.
        let blocks = |id, held| {
            chunks.iter().find(|chunk| chunk.sequence == id).map_or(held, |chunk| chunk.blocks)
        };
        let stay = running.iter().filter(|r| !preempt.contains(&r.sequence));
        let stay = stay.filter(|r| r.pending > 1 || kept(r) < r.blocks);
        let lacking = stay.filter(|r| blocks(r.sequence, kept(r)) < blocks_for(r.known)).count();
        let comes = waiting.iter().filter(|waits| admit.contains(&waits.sequence.0));
        let parts = comes.filter(|waits| blocks(waits.sequence, 0) < blocks_for(waits.tokens));
        prop_assert!(lacking + parts.count() <= 1);
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

        // No sequence is preempted twice in a row unless a running sequence needs blocks, or
        // the sequence is large.
        let grows = running.iter().any(|r| r.pending == 1 && blocks_for(r.cached + 1) > r.blocks);
        let spared = running.iter().filter(|r| preempt.contains(&r.sequence));
        let large = |r: &Running| {
            is_large(blocks_for(r.known), bounds.total_blocks)
        };
        prop_assert!(grows || spared.into_iter().all(|r| r.preempted_at.is_none() || large(r)));

        // The decision makes progress: alone, the first entry always fits the pool.
        let pool = free + running.iter().map(|r| r.blocks).sum::<u32>();
        let fits = waiting.iter().all(|waits| {
            blocks_for(waits.tokens + 1) <= pool && waits.followers < bounds.max_sequences
        });
        let idle = running.is_empty() && waiting.is_empty();
        prop_assert!(
            idle || !fits
                || !(chunks.is_empty() && preempt.is_empty() && shrink.is_empty() && refuse.is_empty())
        );
    }
}
