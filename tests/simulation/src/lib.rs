//! A simulated gateway and worker on one machine, in one thread and in simulated
//! time. Journal, settlement, ledger and admission are the real ones; the disk and
//! the wire between them are simulated, with their failures. A seed determines a
//! run completely.
//!
//! In each run clients send requests and leave, and failures happen: one or both
//! processes are killed, the power fails in the middle of a write, syncs fail, the
//! disk is full, the wire is cut, the worker is told to stop. Messages are late,
//! blocks come twice or too early. At the end, without further failures, every
//! block reaches the ledger, and the ledger is compared with the events.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
#![cfg(test)]

mod chance;
mod disk;
mod facts;
mod gateway;
mod sqlite;
mod worker;
mod world;

use futures_util::FutureExt as _;
use tollgate_domain::UtcTime;
use tollgate_ledger::{AdminAction, Ledger, LedgerError, LedgerHandle, ManualLedger, Posted};

use self::chance::Chance;
use self::disk::SimDisk;
use self::sqlite::Mounted;
use self::world::{Outcome, PlantedBug, Seen, World};

/// Runs one seed.
fn run(seed: u64, plant: PlantedBug) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async { World::new(seed, plant).run().await })
}

/// Runs `seeds` and fails if a check fails in any of them.
fn run_all(seeds: std::ops::Range<u64>) {
    let began = std::time::Instant::now();
    let (mut sum, mut cuts, mut lost, mut failed) = (Seen::default(), 0, 0, 0);
    let mut trace = 0_u64;
    let mut bad = Vec::new();
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let Outcome { trace: one, wrong, seen, disk, diary } = run(seed, PlantedBug::None);
        if !wrong.is_empty() {
            bad.push(seed);
            if bad.len() <= MOST_TOLD {
                println!("seed {seed}: {wrong:#?}\n{seen:?}\n{disk:?}\n{}", diary.join("\n"));
            }
        }
        trace = trace.rotate_left(7) ^ one;
        sum.add(&seen);
        cuts += disk.power_cuts;
        lost += disk.lost_sectors;
        failed += disk.failed_syncs + disk.refused;
    }
    println!(
        "{count} runs in {:?}, trace {trace:016x}: {sum:?}, {cuts} power cuts that took {lost} \
         sectors back, {failed} refusals of the disk",
        began.elapsed()
    );
    assert!(bad.is_empty(), "seeds in which something is wrong: {bad:?}");
    // A simulation without failures would prove nothing.
    assert!(sum.worker_deaths > count / 2 && sum.gateway_deaths > count / 2, "{sum:?}");
    assert!(cuts > count / 4 && lost > count && failed > count / 4, "{cuts} {lost} {failed}");
    assert!(sum.answered > count && sum.repeated > count / 2, "{sum:?}");
}

/// Failing seeds that are printed in full.
const MOST_TOLD: usize = 8;

#[test]
fn thousand_runs_lose_and_double_nothing() {
    run_all(0..1_000);
}

#[test]
fn same_seed_gives_same_run() {
    for seed in 0..10 {
        let (first, second) = (run(seed, PlantedBug::None), run(seed, PlantedBug::None));
        assert_eq!((first.trace, first.seen), (second.trace, second.seen), "seed {seed}");
        assert_ne!(first.trace, run(seed + 1, PlantedBug::None).trace);
    }
}

/// A simulation that misses these bugs would miss real ones too.
#[test]
fn planted_bugs_are_found() {
    for plant in [
        PlantedBug::NoSync,
        PlantedBug::AcknowledgedTooEarly,
        PlantedBug::PostedTwice,
        PlantedBug::CutTooEarly,
    ] {
        let found = (0..1_000).find_map(|seed| {
            let wrong = run(seed, plant).wrong;
            wrong.first().map(|wrong| (seed, wrong.clone()))
        });
        let (seed, wrong) = found.unwrap_or_else(|| panic!("{plant:?} is not found"));
        println!("{plant:?}: seed {seed}: {wrong}");
    }
}

/// A process writes, its syncs fail, and it dies before it repairs that. The next
/// process does not know, and its acknowledged commits survive a power cut.
#[test]
fn unsynced_pages_never_precede_acknowledged_commits() {
    for seed in 0..100 {
        let mut chance = Chance::new(seed);
        let disk = SimDisk::new(chance.fork());
        let mounted = Mounted::new(&disk, chance.fork());
        let start = |process| {
            mounted.remount(disk.of(process));
            Ledger::open_manual(mounted.ledger("/ledger.db")).expect("opens")
        };
        let kill = |process, life: (LedgerHandle, ManualLedger)| {
            disk.kill(process);
            disk.forget_shared();
            drop(life);
        };
        let mut first = start(1);
        assert_eq!(record(&mut first, "before").expect("posts"), Posted::New);
        disk.faults(|faults| faults.failing_syncs = Some(1));
        for _ in 0..3 {
            // The caller would try again later.
            let error = record(&mut first, "lost").expect_err("nothing is synced");
            assert!(error.is_of_the_disk(), "{error}");
        }
        kill(1, first);
        disk.faults(|faults| faults.failing_syncs = None);
        let mut second = start(2);
        record(&mut second, "after").expect("posts");
        kill(2, second);
        disk.cut_power();
        let mut third = start(3);
        for name in ["before", "after"] {
            let posted = record(&mut third, name).expect("posts");
            assert_eq!(posted, Posted::Already, "seed {seed}: {name}");
        }
        kill(3, third);
    }
}

/// Records an admin action with this name.
fn record(
    (handle, ledger): &mut (LedgerHandle, ManualLedger),
    name: &str,
) -> Result<Posted, LedgerError> {
    let action = AdminAction {
        id: name.to_owned(),
        at: UtcTime(1),
        operation: "key.revoked".to_owned(),
        actor: "uid 0".to_owned(),
        user: None,
        detail: serde_json::Value::Null,
    };
    let recorded = handle.submit(action);
    ledger.tick();
    recorded.now_or_never().expect("an answer")
}

mod long {
    use super::*;

    #[test]
    #[ignore = "long: ten thousand plays"]
    fn ten_thousand_runs() {
        run_all(1_000..11_000);
    }
}
