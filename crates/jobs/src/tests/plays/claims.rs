//! Claims of dispatchers that panic, die, sleep or start again.

use super::*;

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

/// Checks that a batch whose workers have `spent` so much goes on within `millis`, and that each
/// answer is paid once at its end.
async fn goes_on_within(
    millis: u64,
    spent: usize,
    world: &World,
    process: &Process,
    batch: &BatchRow,
) {
    beside(process, async {
        sleep(millis).await;
        assert!(world.workers.spent() > spent);
        ended(world, process, batch).await;
    })
    .await;
    assert_eq!(world.workers.paid(), process.check(batch).await.answered);
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
    goes_on_within(1_000, spent, &world, &process, &batch).await;
}

#[tokio::test(start_paused = true)]
async fn dead_dispatcher_is_replaced_within_seventeen_seconds() {
    let world = World::new(1);
    let process = world.start();
    let batch = process.batch("acme", &input(1_000, |_| "")).await;
    beside(&process, sleep(2_000)).await;
    let spent = world.workers.spent();
    // The process lives, so that its lease is waited for.
    goes_on_within(17_000, spent, &world, &process, &batch).await;
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
