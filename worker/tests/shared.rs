//! Tests of a worker that several gateways use: who gets the journal, and what is waited for when
//! a gateway is gone.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod support;

use std::time::Duration;

use support::*;
use tollgate_wire::v1;
use tollgate_worker::{EngineChoice, SchedulePolicy, StepCost, SyntheticDevice};

/// The id of a request of the gateway with this number.
fn request(gateway: u32, number: u8) -> String {
    format!("req-000000000001{gateway:06x}{number:014x}")
}

async fn run(bench: &Bench, request: &str) {
    let outcome = bench.run(assignment(request, "acme", vec![9; 20])).await.outcome().await;
    assert!(outcome.usage.is_some(), "{outcome:?}");
}

/// Reads until a block has the end of `request`. Returns that block.
async fn until_ended(
    reader: &mut BlockReader,
    request: &str,
    acknowledge: bool,
) -> v1::JournalBlock {
    loop {
        let block = reader.peek().await.expect("a block");
        if acknowledge {
            reader.acknowledge(&block).await;
        }
        if block.finished.iter().any(|finished| finished.request_id == request) {
            return block;
        }
    }
}

async fn settle(bench: &Bench, gateways: &[u32]) {
    let request = v1::SettleRequest { gateways: gateways.to_vec() };
    bench.client.clone().settle(request).await.expect("settles");
}

/// The gateway that connected last records the journal. The other one gets copies of what is
/// acknowledged, and records when that one is gone.
#[tokio::test(flavor = "multi_thread")]
async fn shared_worker_sends_its_journal_to_one_gateway() {
    let data = tempfile::tempdir().expect("a folder");
    let first = start(data.path(), |_| ()).await;
    let second = first.another(data.path()).await;
    let mut observer = first.blocks().await;
    // The first stream gets what is there, as long as it is alone.
    assert!(!observer.peek().await.expect("the calibration").recorded);
    let mut recorder = second.blocks().await;
    let one = request(1, 1);
    run(&first, &one).await;
    let block = until_ended(&mut recorder, &one, true).await;
    assert!(!block.recorded);
    let copy = until_ended(&mut observer, &one, false).await;
    assert!(copy.recorded);
    assert_eq!(v1::JournalBlock { recorded: false, ..copy }, block);
    drop((recorder, second));
    let two = request(1, 2);
    run(&first, &two).await;
    assert!(!until_ended(&mut observer, &two, true).await.recorded);
    drop(observer);
    first.end().await.expect("ends");
}

/// A gateway that acknowledges nothing is replaced.
#[tokio::test(flavor = "multi_thread")]
async fn shared_worker_leaves_gateway_that_acknowledges_nothing() {
    let data = tempfile::tempdir().expect("a folder");
    let first = start(data.path(), |_| ()).await;
    let second = first.another(data.path()).await;
    let mut other = first.blocks().await;
    let mut silent = second.blocks().await;
    let one = request(1, 1);
    run(&first, &one).await;
    assert!(!until_ended(&mut silent, &one, false).await.recorded);
    // The test's limit is the time of a test; the worker waits for 5 s.
    let block = tokio::time::timeout(Duration::from_secs(60), until_ended(&mut other, &one, true));
    assert!(!block.await.expect("another gateway gets it").recorded);
    // What comes late is a copy there.
    assert!(until_ended(&mut silent, &one, false).await.recorded);
    first.end().await.expect("ends");
}

/// A gateway is settled when its last attempt is in the ledger, and gets no more work.
#[tokio::test(flavor = "multi_thread")]
async fn shared_worker_settles_gateway_that_is_gone() {
    let data = tempfile::tempdir().expect("a folder");
    // About 3 ms for each token, so that the long answer outlasts what happens beside it.
    let device = SyntheticDevice {
        cost: StepCost { speed: 10.0, ..StepCost::default() },
        kv_tokens: 8_192,
        context: 4_096,
        policy: SchedulePolicy::Fair,
        faults: None,
    };
    let bench =
        start(data.path(), |options| options.engine = EngineChoice::Synthetic(device)).await;
    let gone = bench.another(data.path()).await;
    let mut reader = bench.blocks().await;
    let (long, own) = (request(1, 1), request(2, 1));
    let mut left = v1::Assignment { max_tokens: 3_000, ..assignment(&long, "acme", vec![9; 20]) };
    left.sampling.as_mut().expect("set").ignores_end = true;
    let running = gone.run(left).await;
    run(&bench, &own).await;
    let mut settled = Box::pin(settle(&bench, &[1]));
    let early = tokio::time::timeout(Duration::from_millis(200), &mut settled).await;
    assert!(early.is_err(), "its attempt runs");
    // The connection of a gateway that is gone ends, and its requests with it.
    drop((running, gone));
    let ended = until_ended(&mut reader, &long, false);
    let (early, last) =
        tokio::join!(tokio::time::timeout(Duration::from_millis(300), &mut settled), ended);
    assert!(early.is_err(), "nothing is acknowledged");
    let end = last.finished.iter().find(|finished| finished.request_id == long).expect("its end");
    assert_eq!(end.reason(), v1::FinishReason::Fault);
    reader.acknowledge(&last).await;
    settled.await;
    let refused = bench.run(assignment(&request(1, 2), "acme", vec![9; 20])).await.outcome().await;
    let refused = refused.refused.expect("retired");
    assert_eq!(refused.reason(), v1::RefusedReason::Draining, "{refused:?}");
    run(&bench, &request(2, 2)).await;
    let read = async { while reader.next().await.is_some() {} };
    let ended = async {
        settle(&bench, &[1, 3]).await;
        bench.end().await.expect("ends");
    };
    tokio::join!(read, ended);
}
