//! Batches that wait: for workers, caps, room, or the store.

use super::*;

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
