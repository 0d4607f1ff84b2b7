//! Many batches, lines and tenants at once.

use super::*;

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
        place: crate::JobsPlace::Own {
            folder: folder.path().to_owned(),
            before_open: std::sync::Arc::new(|_| Ok(())),
        },
        limits: crate::JobLimits { spare: 0, ..crate::JobLimits::default() },
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
