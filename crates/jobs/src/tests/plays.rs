//! Batches from their creation to their end, in played time.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::world::{Process, World, input, new_batch, quotas_of, tenant};
use crate::batch::{BatchState, CancelReason, Cause, FailureCode};
use crate::service::Waiting;
use crate::{
    BatchRow, CallerState, DispatchOptions, JobError, LineOutcome, NewBatch, QuotaScope, Quotas,
};

const OPTIONS: DispatchOptions = DispatchOptions {
    line: Duration::from_secs(3_600),
    drain: Duration::from_secs(10),
    gateway: 0,
};

/// Runs a dispatcher while `act` runs.
pub(super) async fn beside<T>(process: &Process, act: impl Future<Output = T>) -> T {
    beside_with(process, OPTIONS, act).await
}

async fn beside_with<T>(
    process: &Process,
    options: DispatchOptions,
    act: impl Future<Output = T>,
) -> T {
    tokio::select! {
        biased;
        done = act => done,
        () = process.dispatcher(options).run(CancellationToken::new()) => panic!("it stopped"),
    }
}

pub(super) async fn sleep(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// Waits until a batch has ended, and returns the time that it took.
pub(super) async fn ended(world: &World, process: &Process, batch: &BatchRow) -> Duration {
    let start = world.elapsed();
    while !matches!(process.row(batch).await.state, BatchState::Ended(_)) {
        sleep(20).await;
    }
    world.elapsed() - start
}

/// Returns the codes of the lines without an answer.
async fn codes(process: &Process, row: &BatchRow) -> Vec<String> {
    let lines = process.lines(row.tenant.as_str(), row.error).await;
    let codes = lines.iter().filter_map(|line| line["error"]["code"].as_str());
    codes.map(str::to_owned).collect()
}

#[tokio::test(start_paused = true)]
async fn batch_runs_each_line_once() {
    let world = World::new(7);
    let process = world.start();
    let batch = process.batch("acme", &input(300, |_| "")).await;
    beside(&process, ended(&world, &process, &batch)).await;
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.state, BatchState::Ended(Cause::Done));
    assert_eq!(paid.row.counts.completed, 300);
    assert_eq!(paid.row.usage.completion_tokens, 300 * 8);
    assert_eq!(paid.row.model.as_ref().map(ToString::to_string), Some("m".to_owned()));
    assert_eq!(world.workers.paid(), paid.answered);
    assert!(paid.row.error.is_none(), "a file without lines is none");
    // The quota of the plan bounds the lines of one tenant.
    assert_eq!(world.workers.yard().most, 32);
    let figures = process.jobs.figures().await.expect("read");
    assert_eq!(figures.lines[&LineOutcome::Completed], 300);
    assert_eq!(figures.in_flight, 0);
    assert_eq!((figures.stored.ended, figures.stored.oldest), (1, None));
}

#[tokio::test(start_paused = true)]
async fn batch_with_an_invalid_input_fails() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", "no\n{}\n").await;
    beside(&process, ended(&world, &process, &batch)).await;
    let row = process.row(&batch).await;
    assert_eq!(row.state, BatchState::Ended(Cause::Failed(FailureCode::InvalidInput)));
    assert_eq!(row.errors[0].code, "invalid_json_line");
    assert_eq!(row.counts.total, 0);
    assert_eq!(world.workers.spent(), 0);
}

#[tokio::test(start_paused = true)]
async fn cancel_ends_a_batch_within_a_second() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(2_000, |_| "")).await;
    let took = beside(&process, async {
        sleep(1_000).await;
        let acme = tenant("acme");
        let row = process.jobs.cancel(acme.clone(), batch.id).await.expect("cancelled");
        assert_eq!(row.state, BatchState::Ending(Cause::Cancelled(CancelReason::Asked)));
        let took = ended(&world, &process, &batch).await;
        process.jobs.cancel(acme, batch.id).await.expect("a repeat changes nothing");
        took
    })
    .await;
    assert!(took <= Duration::from_secs(1), "{took:?}");
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.state, BatchState::Ended(Cause::Cancelled(CancelReason::Asked)));
    assert!(paid.row.counts.completed > 100, "answers are kept: {:?}", paid.row.counts);
    // Lines on workers are paid for what was done, and their rows name the tries.
    let of_cancelled = world.workers.paid().difference(&paid.answered).cloned().collect::<Vec<_>>();
    assert!(!of_cancelled.is_empty());
    assert!(of_cancelled.iter().all(|id| paid.failed.contains(id)));
    assert_eq!(paid.row.usage.completion_tokens, 8 * world.workers.paid().len() as u64);
    assert!(codes(&process, &paid.row).await.iter().all(|code| code == "batch_cancelled"));
}

#[tokio::test(start_paused = true)]
async fn cancel_waits_eleven_seconds_for_silent_workers() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(40, |_| ",\"x\":\"silent\"")).await;
    let took = beside(&process, async {
        sleep(1_000).await;
        process.jobs.cancel(tenant("acme"), batch.id).await.expect("cancelled");
        ended(&world, &process, &batch).await
    })
    .await;
    assert!(took <= Duration::from_secs(11), "{took:?}");
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.counts.failed, 40);
    assert!(world.workers.spent() > 0);
    assert!(world.workers.paid().is_empty(), "a try without figures is not billed");
}

#[tokio::test(start_paused = true)]
async fn cancel_before_the_check_leaves_no_lines() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(40, |_| "")).await;
    process.jobs.cancel(tenant("acme"), batch.id).await.expect("cancelled");
    beside(&process, ended(&world, &process, &batch)).await;
    let paid = process.check(&batch).await;
    assert_eq!((paid.row.counts.total, world.workers.spent()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn batch_expires_in_time_and_unbilled() {
    for silent in [",\"x\":\"slow\"", ",\"x\":\"silent\""] {
        let world = World::new(1);
        let process = world.start();
        let file = process.upload("acme", &input(40, |_| "")).await.id;
        let slow = process.upload("acme", &input(10, move |_| silent)).await.id;
        let window = Duration::from_secs(100);
        let mut batches = Vec::new();
        for input in [file, slow] {
            let new = NewBatch { window, ..new_batch("acme", input) };
            let quotas = quotas_of("acme", Quotas::default());
            batches.push(process.jobs.create_batch(new, quotas).await.expect("created"));
        }
        beside(&process, async {
            for batch in &batches {
                ended(&world, &process, batch).await;
            }
        })
        .await;
        assert!(world.elapsed() <= window + Duration::from_secs(5), "{:?}", world.elapsed());
        let (done, expired) = (process.check(&batches[0]).await, process.check(&batches[1]).await);
        assert_eq!(done.row.state, BatchState::Ended(Cause::Done));
        assert_eq!(expired.row.state, BatchState::Ended(Cause::Expired));
        assert_eq!(codes(&process, &expired.row).await, ["batch_expired"; 10]);
        assert_eq!(world.workers.paid(), done.answered, "an expired line names no try");
        assert!(world.workers.spent() > 40);
    }
}

/// J09: batches that no worker takes, and batches that are never claimed, end in time.
#[tokio::test(start_paused = true)]
async fn endless_batches_end_in_time() {
    let world = World::new(1);
    let process = world.start();
    let window = Duration::from_secs(3_600);
    let mut batches = Vec::new();
    let file = process.upload("acme", &input(3, |_| ",\"x\":\"slow\"")).await.id;
    for _ in 0..30 {
        let quotas = quotas_of("acme", Quotas::default());
        let new = NewBatch { window, ..new_batch("acme", file) };
        batches.push(process.jobs.create_batch(new, quotas).await.expect("created"));
    }
    world.workers.yard().capacity = 0;
    let start = world.elapsed();
    beside(&process, async {
        tokio::time::sleep(window + Duration::from_secs(5) - (world.elapsed() - start)).await;
    })
    .await;
    for batch in &batches {
        let row = process.row(batch).await;
        assert_eq!(row.state, BatchState::Ended(Cause::Expired));
    }
}

#[tokio::test(start_paused = true)]
async fn revoked_key_cancels_its_batch() {
    for (state, reason) in [
        (CallerState::KeyRevoked, CancelReason::KeyRevoked),
        (CallerState::TenantGone, CancelReason::TenantGone),
    ] {
        let world = World::new(1);
        let process = world.start();
        let batch = process.batch("acme", &input(2_000, |_| "")).await;
        beside(&process, async {
            sleep(1_000).await;
            world.workers.yard().caller = state;
            ended(&world, &process, &batch).await;
        })
        .await;
        let paid = process.check(&batch).await;
        let rows = paid.answered.union(&paid.failed).cloned().collect();
        assert!(world.workers.paid().is_subset(&rows));
        assert_eq!(paid.row.state, BatchState::Ended(Cause::Cancelled(reason)));
        assert!(paid.row.counts.completed > 0 && paid.row.counts.failed > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn line_that_kills_workers_runs_alone_and_fails() {
    let world = World::new(1);
    let process = world.start();
    let poison = |line| if line == 5 { ",\"x\":\"poison\"" } else { "" };
    let batch = process.batch("acme", &input(400, poison)).await;
    let other = process.batch("beta", &input(400, |_| "")).await;
    beside(&process, async {
        ended(&world, &process, &batch).await;
        ended(&world, &process, &other).await;
    })
    .await;
    let (paid, others) = (process.check(&batch).await, process.check(&other).await);
    assert_eq!((paid.row.counts.completed, paid.row.counts.failed), (399, 1));
    let failed = process.lines("acme", paid.row.error).await;
    assert_eq!(failed[0]["response"]["status_code"], 500);
    let tried = world.workers.yard().beside_poison.clone();
    assert_eq!(tried.len(), 3, "{tried:?}");
    assert!(tried[0] > 0 && tried[2] == 0, "lines ran beside the third try: {tried:?}");
    let both: std::collections::BTreeSet<_> =
        paid.answered.union(&others.answered).cloned().collect();
    assert_eq!(world.workers.paid(), both, "no lost try is billed");
}

#[tokio::test(start_paused = true)]
async fn line_that_takes_too_long_gets_an_answer() {
    let world = World::new(1);
    let process = world.start();
    let bodies = |line| match line {
        3 => ",\"x\":\"slow\"",
        4 => ",\"x\":\"silent\"",
        _ => "",
    };
    let batch = process.batch("acme", &input(20, bodies)).await;
    let options = DispatchOptions { line: Duration::from_secs(60), ..OPTIONS };
    beside_with(&process, options, ended(&world, &process, &batch)).await;
    let paid = process.check(&batch).await;
    assert_eq!((paid.row.counts.completed, paid.row.counts.failed), (18, 2));
    let failed = process.lines("acme", paid.row.error).await;
    assert!(failed.iter().all(|line| line["response"]["status_code"] == 504));
    // The slow one is paid for what was done; the silent one has no figures.
    let expected: std::collections::BTreeSet<_> = world.workers.paid();
    assert_eq!(expected.len(), 19);
    let slow: Vec<_> = expected.difference(&paid.answered).collect();
    assert!(paid.failed.contains(slow[0]));
}

#[tokio::test(start_paused = true)]
async fn waiting_batch_lets_the_next_one_run() {
    let world = World::new(1);
    let process = world.start();
    let wait =
        Waiting { reason: "no_worker", retry_after: Duration::from_secs(3_600), holds_batch: true };
    world.workers.yard().holds = Some(wait);
    // More than the tenant may hold: some of them must make room.
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(process.batch("acme", &input(3, |_| ",\"x\":\"no model\"")).await);
    }
    let next = process.batch("acme", &input(50, |_| "")).await;
    beside(&process, async {
        ended(&world, &process, &next).await;
        let wait = process.jobs.waiting(waiting[0].id).expect("it waits");
        assert_eq!(wait.reason, "no_worker");
        let figures = process.jobs.figures().await.expect("read");
        assert!(figures.waiting["no_worker"] >= 8, "{figures:?}");
        let took = world.elapsed();
        assert!(took < Duration::from_secs(60), "{took:?}");
        world.workers.yard().holds = None;
        for batch in &waiting {
            ended(&world, &process, batch).await;
            assert!(process.jobs.waiting(batch.id).is_none());
        }
    })
    .await;
    for batch in waiting.iter().chain([&next]) {
        assert_eq!(process.check(batch).await.row.state, BatchState::Ended(Cause::Done));
    }
}

#[tokio::test(start_paused = true)]
async fn batch_whose_input_is_lost_fails() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(3, |_| "")).await;
    world.disk.lose();
    beside(&process, ended(&world, &process, &batch)).await;
    let state = process.check(&batch).await.row.state;
    assert_eq!(state, BatchState::Ended(Cause::Failed(FailureCode::Internal)));
    let took = world.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// Two lines fit into a cap at once. The next one runs when one of them has ended.
#[tokio::test(start_paused = true)]
async fn held_back_line_runs_after_another_ends() {
    let world = World::new(1);
    let process = world.start();
    world.workers.yard().room = 2;
    let batch = process.batch("acme", &input(60, |_| "")).await;
    beside(&process, async {
        while world.workers.yard().sent.len() < 60 {
            sleep(50).await;
            let wait = process.jobs.waiting(batch.id);
            assert_eq!(wait, None, "its own lines hold the cap");
        }
        ended(&world, &process, &batch).await;
    })
    .await;
    assert_eq!(process.check(&batch).await.row.state, BatchState::Ended(Cause::Done));
    // Two lines at once, of 210 ms on average.
    let took = world.elapsed();
    assert!(took < Duration::from_secs(12), "{took:?}");
    let sent = world.workers.yard().sent.len();
    assert!(sent < 200, "{sent} tries of 60 lines");
    assert_eq!(world.workers.yard().most, 2);
}

/// Requests outside of the batch hold the cap.
#[tokio::test(start_paused = true)]
async fn held_back_batch_looks_again_each_second() {
    let world = World::new(1);
    let process = world.start();
    world.workers.yard().room = 0;
    let batch = process.batch("acme", &input(9, |_| "")).await;
    beside(&process, async {
        sleep(30_500).await;
        let wait = process.jobs.waiting(batch.id).expect("it waits");
        assert_eq!(wait.reason, "cap_held");
        let left = wait.until.0.saturating_sub(process.jobs.now().0);
        assert!(left <= 1_000_000_000, "{left} ns");
        let sent = world.workers.yard().sent.len();
        assert!(sent <= 9 + 31, "{sent} tries in 30 s");
        world.workers.yard().room = usize::MAX;
        let start = world.elapsed();
        ended(&world, &process, &batch).await;
        let took = world.elapsed() - start;
        assert!(took < Duration::from_secs(3), "{took:?}");
    })
    .await;
}

/// A wait of an hour ends at once: of a batch as a whole, of single lines, and of batches that
/// were parked. The control is not told, and looks again within a minute.
#[tokio::test(start_paused = true)]
async fn told_batches_end_their_waits_at_once() {
    let time = async |holds_batch: bool, batches: usize, is_told: bool| {
        let world = World::new(1);
        let process = world.start();
        let hour = Duration::from_secs(3_600);
        world.workers.yard().holds =
            Some(Waiting { reason: "cap_spent", retry_after: hour, holds_batch });
        let mut waiting = Vec::new();
        for _ in 0..batches {
            waiting.push(process.batch("acme", &input(3, |_| ",\"x\":\"no model\"")).await);
        }
        beside(&process, async {
            // Each batch has looked again a while ago.
            sleep(70_500).await;
            assert!(world.workers.spent() == 0 && world.workers.yard().sent.len() >= batches);
            let start = world.elapsed();
            world.workers.yard().holds = None;
            if is_told {
                process.jobs.end_waits();
            }
            for batch in &waiting {
                ended(&world, &process, batch).await;
                assert!(process.jobs.waiting(batch.id).is_none());
            }
            world.elapsed() - start
        })
        .await
    };
    for (holds_batch, batches) in [(true, 1), (false, 1), (true, 20)] {
        let (told, alone) =
            (time(holds_batch, batches, true).await, time(holds_batch, batches, false).await);
        assert!(told < Duration::from_secs(5), "{batches} batches, told: {told:?}");
        assert!(alone > Duration::from_secs(20), "the control, {batches} batches: {alone:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn batch_waits_for_room_for_its_results() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(200, |_| "")).await;
    world.disk.set_free(Some(1_000));
    beside(&process, async {
        sleep(30_000).await;
        assert_eq!(process.jobs.waiting(batch.id).map(|wait| wait.reason), Some("no_room"));
        assert_eq!(world.workers.spent(), 0, "nothing is sent without room");
        world.disk.set_free(None);
        batch_room(&world, 2_000);
        sleep(30_000).await;
        assert_eq!(world.workers.spent(), 0, "the quota has no room");
        // Room for one line at a time is enough to go on.
        batch_room(&world, 200 * 800 + 1_500);
        ended(&world, &process, &batch).await;
    })
    .await;
    assert_eq!(process.check(&batch).await.row.counts.completed, 200);
    let used = process.jobs.quota_use(QuotaScope::Tenant(tenant("acme"))).await.expect("read");
    assert!(used.results > 0 && used.results < 200 * 400, "only written bytes count: {used:?}");
}

fn batch_room(world: &World, results: u64) {
    world.workers.yard().quotas = Quotas { results, ..Quotas::default() };
}

#[tokio::test(start_paused = true)]
async fn batch_goes_on_when_store_is_back() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(400, |_| "")).await;
    beside(&process, async {
        sleep(500).await;
        world.fail_store(100);
        sleep(1_500).await;
        for _ in 0..30 {
            sleep(100).await;
            assert_eq!(process.jobs.waiting(batch.id).map(|wait| wait.reason), Some("fault"));
        }
        let spent = world.workers.spent();
        world.fail_store(0);
        // Far less than the lease of the claim that the store did not give up.
        sleep(2_500).await;
        assert!(world.workers.spent() > spent, "the claim was not given up");
        assert_eq!(process.jobs.waiting(batch.id), None, "lines run");
        ended(&world, &process, &batch).await;
    })
    .await;
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.counts.completed, 400);
    assert_eq!(world.workers.paid(), paid.answered);
}

#[tokio::test(start_paused = true)]
async fn drain_lets_lines_end_and_gives_claims_up() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(400, |_| "")).await;
    let silent = process.batch("beta", &input(3, |_| ",\"x\":\"silent\"")).await;
    let stop = CancellationToken::new();
    let dispatcher = process.dispatcher(OPTIONS);
    let stopping = async {
        sleep(1_000).await;
        stop.cancel();
    };
    let start = world.elapsed();
    tokio::join!(dispatcher.run(stop.clone()), stopping);
    assert!(world.elapsed() - start <= Duration::from_secs(12), "{:?}", world.elapsed());
    let before = process.row(&batch).await;
    assert!(before.counts.completed > 0 && before.counts.unanswered() > 0);
    let spent = world.workers.spent() as u64;
    assert_eq!(before.counts.completed + 3, spent, "each line on a worker got its answer");
    // Another run goes on at once, in the same process.
    beside(&process, async {
        sleep(300).await;
        assert!(world.workers.spent() as u64 > spent, "the claims were not given up");
        ended(&world, &process, &batch).await;
        process.jobs.cancel(tenant("beta"), silent.id).await.expect("cancelled");
        ended(&world, &process, &silent).await;
    })
    .await;
    assert_eq!(world.workers.paid(), process.check(&batch).await.answered);
}

#[tokio::test(start_paused = true)]
async fn batch_whose_task_panics_fails_alone() {
    let world = World::new(1);
    let process = world.start();
    let planted = |line| if line == 100 { ",\"x\":\"panic\"" } else { "" };
    let batch = process.batch("acme", &input(200, planted)).await;
    let other = process.batch("beta", &input(200, |_| "")).await;
    beside(&process, async {
        ended(&world, &process, &batch).await;
        ended(&world, &process, &other).await;
    })
    .await;
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.state, BatchState::Ended(Cause::Failed(FailureCode::Internal)));
    assert!(paid.row.counts.completed > 0, "answers are kept");
    assert_eq!(process.row(&other).await.state, BatchState::Ended(Cause::Done));
}

#[tokio::test(start_paused = true)]
async fn batch_fails_after_five_claims_without_answer() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(200, |_| "")).await;
    let slow = process.batch("beta", &input(2, |_| ",\"x\":\"slow\"")).await;
    drop(process);
    world.workers.yard().step = Duration::from_secs(10);
    for _ in 0..5 {
        let process = world.start();
        beside(&process, sleep(2_000)).await;
        // The dispatcher is dropped as a kill would drop it.
    }
    let process = world.start();
    beside(&process, ended(&world, &process, &batch)).await;
    let row = process.row(&batch).await;
    assert_eq!(row.state, BatchState::Ended(Cause::Failed(FailureCode::Internal)));
    assert_eq!(codes(&process, &row).await, ["batch_failed"; 200]);
    assert_eq!(process.row(&slow).await.state, row.state);
    assert!(world.workers.paid().is_empty());
}

#[tokio::test(start_paused = true)]
async fn line_waits_for_its_last_cap() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(1, |_| ",\"x\":\"poison\"")).await;
    world.workers.yard().ledger_fails = true;
    beside(&process, async {
        sleep(60_000).await;
        assert_eq!(world.workers.spent(), 1, "the line ran again without its cap");
        world.workers.yard().ledger_fails = false;
        ended(&world, &process, &batch).await;
    })
    .await;
    assert_eq!(world.workers.spent(), 3);
    assert!(world.workers.paid().is_empty());
}

#[tokio::test(start_paused = true)]
async fn restart_goes_on_within_a_second() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(1_000, |_| "")).await;
    beside(&process, sleep(2_000)).await;
    drop(process);
    let spent = world.workers.spent();
    let process = world.start();
    beside(&process, async {
        sleep(1_000).await;
        assert!(world.workers.spent() > spent);
        ended(&world, &process, &batch).await;
    })
    .await;
    assert_eq!(world.workers.paid(), process.check(&batch).await.answered);
}

#[tokio::test(start_paused = true)]
async fn dead_dispatcher_is_replaced_within_seventeen_seconds() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(1_000, |_| "")).await;
    beside(&process, sleep(2_000)).await;
    let spent = world.workers.spent();
    // The process lives, so that its lease is waited for.
    beside(&process, async {
        sleep(17_000).await;
        assert!(world.workers.spent() > spent);
        ended(&world, &process, &batch).await;
    })
    .await;
    assert_eq!(world.workers.paid(), process.check(&batch).await.answered);
}

/// Two dispatchers, of which one sleeps 30 s: the sleeper's claims are stale when it wakes.
#[tokio::test(start_paused = true)]
async fn sleeping_dispatcher_doubles_no_line() {
    Box::pin(play_sleepers(5)).await;
}

#[tokio::test(start_paused = true)]
#[ignore = "long: a hundred dispatchers that sleep"]
async fn sleeping_dispatchers_double_no_line() {
    Box::pin(play_sleepers(100)).await;
}

async fn play_sleepers(seeds: u64) {
    for seed in 0..seeds {
        let world = World::new(seed);
        // Lost workers: the sleeper may also sleep before a second try.
        world.workers.yard().troubles = [20, 5, 5, 0];
        let process = world.start();
        let mut batches = Vec::new();
        for name in ["acme", "beta"] {
            batches.push(process.batch(name, &input(1_500, |_| "")).await);
        }
        let sleeper = process.dispatcher(OPTIONS).run(CancellationToken::new());
        let asleep = async {
            let mut sleeper = std::pin::pin!(sleeper);
            let awake = 500 + seed * 137 % 3_000;
            tokio::select! {
                () = &mut sleeper => {}
                () = sleep(awake) => {}
            }
            sleep(30_000).await;
            sleeper.await;
        };
        let second = async {
            sleep(5_000).await;
            process.dispatcher(OPTIONS).run(CancellationToken::new()).await;
        };
        tokio::select! {
            () = asleep => panic!("it stopped"),
            () = second => panic!("it stopped"),
            () = async {
                for batch in &batches {
                    ended(&world, &process, batch).await;
                }
                // The sleeper wakes and finds its claims gone.
                sleep(40_000).await;
            } => {}
        }
        let mut answered = std::collections::BTreeSet::new();
        for batch in &batches {
            let paid = process.check(batch).await;
            assert_eq!(paid.row.state, BatchState::Ended(Cause::Done));
            answered.extend(paid.answered);
        }
        assert_eq!(world.workers.paid(), answered, "seed {seed}");
        assert!(world.workers.spent() > answered.len());
        assert_eq!(world.workers.yard().placed_late, 0, "the sleeper sent lines of a lost claim");
    }
}

/// J01, J02: a storm of one tenant delays another one by its share only.
#[tokio::test(start_paused = true)]
async fn storm_leaves_other_tenants_their_turn() {
    let world = World::new(1);
    let process = world.start();
    for _ in 0..20 {
        process.batch("acme", &input(500, |_| "")).await;
    }
    let (few, took) = beside(&process, async {
        sleep(5_000).await;
        let few = process.batch("beta", &input(320, |_| "")).await;
        let took = ended(&world, &process, &few).await;
        (few, took)
    })
    .await;
    assert_eq!(process.check(&few).await.row.counts.completed, 320);
    // Beta has half of the window: 32 lines at 210 ms.
    assert!(took < Duration::from_secs(4), "{took:?}");
}

/// J02: a tenant's many batches get the share of one tenant.
#[tokio::test(start_paused = true)]
async fn tenants_share_the_window_evenly() {
    let world = World::new(1);
    world.workers.yard().capacity = 8;
    let process = world.start();
    for _ in 0..20 {
        process.batch("acme", &input(1_000, |_| "")).await;
    }
    process.batch("beta", &input(5_000, |_| "")).await;
    beside(&process, sleep(100_000)).await;
    let yard = world.workers.yard();
    let of = |name: &str| yard.sent.iter().filter(|sent| sent.0.as_str() == name).count() as f64;
    let share = of("beta") / yard.sent.len() as f64;
    assert!(yard.sent.len() > 3_000 && (0.48..=0.52).contains(&share), "{share}");
}

/// A line leaves its place to the next one while the ledger records its work: with one place
/// and a record of a second, 40 lines take the time of their work and one second. The control
/// keeps the places.
#[tokio::test(start_paused = true)]
async fn next_line_runs_while_work_is_recorded() {
    let time = async |keeps_places: bool| {
        let world = World::new(3);
        {
            let mut yard = world.workers.yard();
            yard.capacity = 1;
            yard.record = Duration::from_secs(1);
            yard.keeps_places = keeps_places;
        }
        let process = world.start();
        let batch = process.batch("acme", &input(40, |_| "")).await;
        let time = beside(&process, ended(&world, &process, &batch)).await;
        assert_eq!(world.workers.yard().most, 1);
        assert_eq!(process.check(&batch).await.answered.len(), 40);
        time.as_secs()
    };
    let (given_back, kept) = (time(false).await, time(true).await);
    assert!((5..=15).contains(&given_back), "{given_back} s");
    assert!(kept >= 40, "the control: {kept} s");
}

/// J06: each try of a storm of cancels is paid in a row, or capped.
#[tokio::test(start_paused = true)]
async fn cancel_storm_leaves_no_try_unpaid() {
    let world = World::new(9);
    world.workers.yard().troubles = [5, 5, 5, 0];
    let process = world.start();
    let mut batches = Vec::new();
    beside(&process, async {
        for round in 0..60 {
            let batch = process.batch("acme", &input(200, |_| "")).await;
            sleep(50 + 37 * (round % 11)).await;
            // The batch may have ended meanwhile.
            let _ = process.jobs.cancel(tenant("acme"), batch.id).await;
            batches.push(batch);
        }
        for batch in &batches {
            ended(&world, &process, batch).await;
        }
    })
    .await;
    let (mut rows, mut tokens) = (std::collections::BTreeSet::new(), 0);
    for batch in &batches {
        let paid = process.check(batch).await;
        rows.extend(paid.answered);
        rows.extend(paid.failed);
        tokens += paid.row.usage.completion_tokens;
    }
    let paid = world.workers.paid();
    assert!(paid.is_subset(&rows), "a try is billed and no row names it");
    assert_eq!(tokens, 8 * paid.len() as u64);
    assert!(paid.len() > 100 && world.workers.spent() > paid.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_runs_on_the_host() {
    let folder = tempfile::tempdir().expect("a folder");
    let world = World::new(1);
    world.workers.yard().step = Duration::from_micros(100);
    let start = world.elapsed();
    let clock = world.clone();
    let options = crate::JobsOptions {
        folder: folder.path().to_owned(),
        limits: crate::JobLimits { spare: 0, ..crate::JobLimits::default() },
        before_open: std::sync::Arc::new(|_| Ok(())),
        utc: std::sync::Arc::new(move || {
            tollgate_domain::UtcTime((clock.elapsed() - start).as_nanos() as u64)
        }),
    };
    let process = world.start().over(crate::Jobs::open(options).expect("opens"));
    let batch = process.batch("acme", &input(300, |_| "")).await;
    let stop = CancellationToken::new();
    // Another thread runs the dispatcher, as in the product.
    let mut running = tokio::task::JoinSet::new();
    running.spawn(process.dispatcher(OPTIONS).run(stop.clone()));
    ended(&world, &process, &batch).await;
    stop.cancel();
    running.join_next().await.expect("a task").expect("no panic");
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.state, BatchState::Ended(Cause::Done));
    assert_eq!(world.workers.paid(), paid.answered);
}

#[tokio::test(start_paused = true)]
async fn quota_refuses_the_batch_beyond_it() {
    let world = World::new(1);
    let process = world.start();
    let input = process.upload("acme", &input(10, |_| "")).await.id;
    let quotas = || quotas_of("acme", Quotas { queued: 1, ..Quotas::default() });
    process.jobs.create_batch(new_batch("acme", input), quotas()).await.expect("allowed");
    let refused = process.jobs.create_batch(new_batch("acme", input), quotas()).await;
    assert!(matches!(refused, Err(JobError::Quota(_))));
}
