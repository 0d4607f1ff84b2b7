//! Processes that die at and between durable steps, and power cuts.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::chance::Chance;
use super::disk::Moment;
use super::world::{Process, TODAY, World, input, tenant};
use crate::batch::{BatchState, Cause};
use crate::{BatchRow, DispatchOptions, FileId, QuotaScope};

/// Checks all files and bills of a world whose batches are done.
async fn check_done(world: &World, batches: &[BatchRow]) {
    let process = world.start();
    let mut answered = BTreeSet::new();
    let mut tokens = 0;
    for batch in batches {
        let paid = process.check(batch).await;
        assert_eq!(paid.row.state, BatchState::Ended(Cause::Done));
        assert_eq!(paid.row.usage.completion_tokens, paid.tokens);
        tokens += paid.tokens;
        answered.extend(paid.answered);
    }
    // The bill names the tries of answered lines and no others.
    assert_eq!(world.workers.paid(), answered);
    assert_eq!(world.workers.paid_tokens(), tokens);
    let spent = process.jobs.spent(TODAY).await.expect("memory");
    assert_eq!(spent.iter().map(|row| row.reference.nanos()).sum::<u64>(), tokens);
    for name in ["acme", "beta"] {
        let scope = QuotaScope::Tenant(tenant(name));
        let used = process.jobs.quota_use(scope).await.expect("memory");
        assert_eq!((used.queued, used.lines), (0, 0));
    }
}

fn body(line: u64) -> &'static str {
    match line % 7 {
        3 => ",\"x\":\"refused\"",
        _ => "",
    }
}

#[tokio::test(start_paused = true)]
async fn batch_survives_a_kill_at_each_step() {
    let mut step = 1;
    loop {
        let mut was_killed = false;
        for moment in [Moment::Before, Moment::After] {
            let world = World::new(step);
            world.workers.yard().troubles = [10, 10, 5, 5];
            let process = world.start();
            let batch = process.batch("acme", &input(9, body)).await;
            drop(process);
            let mut is_first = true;
            world
                .run_all(|process| {
                    if std::mem::take(&mut is_first) {
                        process.fuse.dies_at(step, moment);
                    } else {
                        was_killed = true;
                    }
                })
                .await;
            check_done(&world, &[batch]).await;
        }
        if !was_killed {
            break;
        }
        step += 1;
    }
    assert!(step > 30, "the play has only {step} durable steps");
}

/// Plays four batches with kills at random steps. Returns the number of kills.
async fn play_kills(seed: u64, (lines, most_kills): (u64, u64)) -> u64 {
    let mut chance = Chance::new(seed);
    let world = World::new(seed);
    world.workers.yard().troubles = [3, 3, 2, 1];
    let batches = create(&world, lines).await;
    let mut kills = 0;
    let mut is_first = true;
    world
        .run_all(|process| {
            kills += u64::from(!std::mem::take(&mut is_first));
            if kills < most_kills {
                // Each second process lives long enough for an answer of each batch: five
                // claims in turn without an answer would end a batch.
                let least = 1 + 450 * (kills % 2);
                let moment = if chance.percent(50) { Moment::Before } else { Moment::After };
                process.fuse.dies_at(least + chance.below(250), moment);
            }
        })
        .await;
    check_done(&world, &batches).await;
    let answered = world.workers.paid().len();
    assert!(world.workers.spent() > answered, "no kill met a line on a worker");
    kills
}

/// Creates four batches of two tenants.
async fn create(world: &World, lines: u64) -> Vec<BatchRow> {
    let process = world.start();
    let mut batches = Vec::new();
    for name in ["acme", "acme", "beta", "beta"] {
        batches.push(process.batch(name, &input(lines, body)).await);
    }
    batches
}

#[tokio::test(start_paused = true)]
async fn batches_survive_forty_kills() {
    assert_eq!(play_kills(1, (1_000, 40)).await, 40);
}

#[tokio::test(start_paused = true)]
#[ignore = "long: a thousand kills"]
async fn batches_survive_a_thousand_kills() {
    let mut kills = 0;
    for seed in 0..25 {
        kills += play_kills(seed, (1_000, 40)).await;
    }
    assert_eq!(kills, 1_000);
}

/// The control: the play finds tries that are billed and answer nothing.
#[tokio::test(start_paused = true)]
async fn kills_find_a_ledger_that_forgets_caps() {
    let world = World::new(1);
    world.workers.yard().forgets_caps = true;
    let batches = create(&world, 100).await;
    let mut is_first = true;
    world
        .run_all(|process| {
            if std::mem::take(&mut is_first) {
                process.fuse.dies_at(150, Moment::Before);
            }
        })
        .await;
    let (process, mut answered) = (world.start(), BTreeSet::new());
    for batch in &batches {
        answered.extend(process.check(batch).await.answered);
    }
    assert!(world.workers.paid().len() > answered.len());
}

/// Syncs of the simulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Syncs {
    Honest,
    /// A planted bug: syncs report success and do nothing.
    Lying,
}

/// Plays power cuts at random steps, and returns true if every file is whole.
async fn play_power_cuts(seed: u64, syncs: Syncs) -> bool {
    let mut chance = Chance::new(seed);
    let world = World::new(seed);
    world.workers.yard().troubles = [3, 3, 2, 1];
    let batches = create(&world, 60).await;
    if syncs == Syncs::Lying {
        world.disk.lie();
    }
    let (disk, mut cuts) = (world.disk.clone(), Chance::new(!seed));
    let mut left = 4;
    world
        .run_through(
            |process| {
                if left > 0 {
                    left -= 1;
                    let moment = if chance.percent(50) { Moment::Before } else { Moment::After };
                    process.fuse.dies_at(1 + chance.below(300), moment);
                }
            },
            || disk.cut_power(&mut cuts),
        )
        .await;
    if syncs == Syncs::Honest {
        check_done(&world, &batches).await;
        return true;
    }
    let process = world.start();
    let mut are_whole = true;
    for batch in &batches {
        let row = process.row(batch).await;
        for file in [row.output, row.error].into_iter().flatten() {
            are_whole &= is_whole(&process, &row, file).await;
        }
    }
    are_whole
}

/// Returns true if a result file can be read and each of its lines is JSON.
async fn is_whole(process: &Process, row: &BatchRow, file: FileId) -> bool {
    let mut content = process.jobs.read(row.tenant.clone(), file).await.expect("a row");
    let mut bytes = Vec::new();
    loop {
        match content.next().await {
            Ok(Some(part)) => bytes.extend(part),
            Ok(None) => break,
            Err(_) => return false,
        }
    }
    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
    lines.into_iter().all(|line| serde_json::from_slice::<serde_json::Value>(line).is_ok())
}

#[tokio::test(start_paused = true)]
async fn batches_survive_power_cuts() {
    for seed in 0..40 {
        assert!(play_power_cuts(seed, Syncs::Honest).await, "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
#[ignore = "long: power cuts over a thousand seeds"]
async fn batches_survive_power_cuts_over_many_seeds() {
    for seed in 0..1_000 {
        assert!(play_power_cuts(seed, Syncs::Honest).await, "seed {seed}");
    }
}

/// The control: the play finds answers that are lost.
#[tokio::test(start_paused = true)]
async fn power_cuts_find_syncs_that_lie() {
    let mut found = 0;
    for seed in 0..10 {
        found += u32::from(!play_power_cuts(seed, Syncs::Lying).await);
    }
    assert!(found >= 5, "only {found} of 10 plays found the planted bug");
}

#[tokio::test(start_paused = true)]
async fn batches_survive_a_store_that_fails() {
    for seed in 0..10 {
        let world = World::new(seed);
        world.workers.yard().troubles = [3, 3, 2, 1];
        let batches = create(&world, 100).await;
        let stopped = async {
            // The check at the end needs a store that works.
            while world.open_batches() > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let process = world.start();
        world.fail_store(2);
        let dispatcher = process.dispatcher(DispatchOptions::default());
        tokio::select! {
            () = dispatcher.run(CancellationToken::new()) => panic!("it stopped"),
            () = stopped => {}
        }
        world.fail_store(0);
        drop(process);
        check_done(&world, &batches).await;
    }
}

#[tokio::test(start_paused = true)]
async fn failed_sync_leads_to_a_new_segment() {
    let world = World::new(3);
    let batches = create(&world, 100).await;
    world.disk.fail_syncs(50);
    let (disk, mut cuts) = (world.disk.clone(), Chance::new(3));
    world.run_all(|_| {}).await;
    // The bytes of the failed syncs are not on the disk, and no row names them.
    disk.cut_power(&mut cuts);
    check_done(&world, &batches).await;
    // Input, answers and errors of each batch: failed segments do not gather.
    assert!(world.disk.sums().0 <= 12 + 4, "{:?}", world.disk.sums());
}
