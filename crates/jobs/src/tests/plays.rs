//! Batches from their creation to their end, in played time.

mod claims;
mod many;
mod waits;

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
    renewal: Duration::from_secs(5),
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

/// A gateway that does not know a caller leaves the batch to others, and runs it once it knows.
#[tokio::test(start_paused = true)]
async fn batch_of_unknown_caller_waits() {
    let world = World::new(1);
    let process = world.start();
    world.workers.yard().caller = CallerState::Unknown;
    let batch = process.batch("acme", &input(10, |_| "")).await;
    beside(&process, async {
        sleep(60_000).await;
        let row = process.row(&batch).await;
        assert_eq!((row.state, row.is_claimed), (BatchState::Validating, false));
        world.workers.yard().caller = CallerState::Active;
        ended(&world, &process, &batch).await;
    })
    .await;
    assert_eq!(process.check(&batch).await.row.counts.completed, 10);
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
