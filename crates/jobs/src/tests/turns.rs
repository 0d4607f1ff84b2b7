//! The order in which tenants get their turns, and what a batch may do before its own, in
//! played time.

use std::collections::BTreeSet;

use super::plays::{beside, ended, sleep};
use super::world::{World, input, tenant};
use crate::QuotaScope;
use crate::batch::{BatchState, Cause};

/// A batch that only waits for its turn reserves no room for answers, and deaths of the process
/// do not count against it: a batch fails after five claims that began lines and died.
#[tokio::test(start_paused = true)]
async fn batch_begins_nothing_before_its_turn() {
    let world = World::new(1);
    world.workers.yard().capacity = 0;
    let process = world.start();
    let batch = process.batch("acme", &input(200, |_| "")).await;
    let results = async |world: &World| {
        let used = world.start().jobs.quota_use(QuotaScope::Tenant(tenant("acme"))).await;
        used.expect("memory").results
    };
    drop(process);
    let before = results(&world).await;
    for _ in 0..7 {
        let process = world.start();
        beside(&process, sleep(2_000)).await;
        // The dispatcher is dropped as a kill would drop it.
        drop(process);
        assert_eq!(results(&world).await, before, "room is reserved");
    }
    world.workers.yard().capacity = 64;
    let process = world.start();
    beside(&process, ended(&world, &process, &batch)).await;
    let paid = process.check(&batch).await;
    assert_eq!(paid.row.state, BatchState::Ended(Cause::Done));
    assert_eq!(paid.answered.len(), 200);
}

/// With one place and three tenants that wait, a new tenant comes after two of them at least:
/// the third may have had its turn just before. Each new tenant has the least name, which
/// decides between equals.
#[tokio::test(start_paused = true)]
async fn new_tenant_comes_after_waiting_ones() {
    let world = World::new(5);
    world.workers.yard().capacity = 1;
    let process = world.start();
    for name in ["beta", "gamma", "delta"] {
        process.batch(name, &input(1_000, |_| "")).await;
    }
    beside(&process, async {
        sleep(5_000).await;
        for number in 0..20 {
            let name = format!("acme-{number}");
            let sent = world.workers.yard().sent.len();
            let batch = process.batch(&name, &input(1, |_| "")).await;
            ended(&world, &process, &batch).await;
            // The runs need the lock while a failed assertion unwinds.
            let since = world.workers.yard().sent[sent..].to_vec();
            let since = since.iter().map(|(tenant, _)| tenant.as_str());
            let before: BTreeSet<&str> = since.take_while(|other| *other != name).collect();
            assert!((2..=3).contains(&before.len()), "{name} came after {before:?}");
        }
    })
    .await;
}
