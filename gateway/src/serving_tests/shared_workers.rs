//! A worker that several gateways share. The test plays the other gateway: it records blocks in
//! the ledger by itself, and sends this gateway the copies that a worker would send.

use tokio::join;
use tollgate_domain::{Block, RequestId};
use tollgate_ledger::{Posted, RequestState};
use tollgate_wire::v1::*;

use super::untrusted_workers::{FIGURE, answered, assert_balanced, bill, block, honest, journal};
use crate::api::tests::test_gateway::{PLAIN, TestGateway};
use tollgate_serving::settlement::BlockOutcome;
use tollgate_serving::test_support::FakeWorker;

async fn shared() -> (FakeWorker, TestGateway) {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    worker.endpoint.is_shareable = true;
    let gateway = TestGateway::open_shared(folder, PLAIN, &[&worker]).await;
    (worker, gateway)
}

/// Records a block as another gateway does, and sends the copy.
async fn record_elsewhere(gateway: &TestGateway, worker: &FakeWorker, block: JournalBlock) {
    let recorded = Block::try_from(block.clone()).expect("a block");
    let posted = gateway.ledger.submit(recorded).await.expect("posts");
    assert_eq!(posted, Posted::New);
    let copy = JournalBlock { recorded: true, ..block };
    worker.journal.send(copy).await.expect("followed");
}

/// Waits until this gateway has seen so many copies.
async fn until_seen(gateway: &TestGateway, copies: u64) {
    let books = gateway.api.serving.settlement().books();
    while books.report().blocks.get(&BlockOutcome::Elsewhere).copied().unwrap_or(0) < copies {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// The id of a request of another gateway.
fn of_other(number: u128) -> String {
    RequestId::from_random(7 << 56 | number).to_string()
}

/// Makes `block` one of another gateway's request.
fn ordered_elsewhere(mut block: JournalBlock, number: u128, reason: FinishReason) -> JournalBlock {
    block.shares[0].request_id = of_other(number);
    block.finished[0].request_id = of_other(number);
    block.finished[0].reason = reason.into();
    block
}

#[tokio::test]
async fn copy_of_a_block_ends_its_requests() {
    let (mut worker, gateway) = shared().await;
    let order = answered(&gateway, &mut worker).await;
    let in_flight = gateway.api.serving.in_flight();
    assert_eq!(in_flight.len(), 1, "its record is awaited");
    let block = honest(&worker, &order);
    record_elsewhere(&gateway, &worker, block.clone()).await;
    until_seen(&gateway, 1).await;
    while !in_flight.is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    // The same block comes again, as it does after a change of the gateway that records.
    journal(&mut worker, vec![block.clone()]).await;
    let copy = JournalBlock { recorded: true, ..block };
    worker.journal.send(copy).await.expect("followed");
    let order = answered(&gateway, &mut worker).await;
    let next = JournalBlock { block: 2, first_step: 2, last_step: 2, ..honest(&worker, &order) };
    journal(&mut worker, vec![next]).await;
    assert_eq!(bill(&gateway, "acme").0, 2 * FIGURE);
    assert_eq!(gateway.api.serving.workers().protocol_violations(), 0);
    assert!(worker.acks.try_recv().is_err(), "a copy needs no acknowledgement");
    assert_balanced(&gateway, &worker, "copies");
}

#[tokio::test]
async fn block_recorded_here_needs_no_second_check() {
    let (mut worker, gateway) = shared().await;
    let order = answered(&gateway, &mut worker).await;
    let block = honest(&worker, &order);
    journal(&mut worker, vec![block.clone()]).await;
    let bill_before = bill(&gateway, "acme");
    let copy = JournalBlock { recorded: true, ..block };
    worker.journal.send(copy).await.expect("followed");
    // The next block shows that the copy was read.
    let next = JournalBlock { block: 2, first_step: 2, last_step: 2, ..block_of(&worker) };
    journal(&mut worker, vec![next]).await;
    assert_eq!(bill(&gateway, "acme"), bill_before);
    assert_eq!(gateway.api.serving.workers().protocol_violations(), 0);
}

fn block_of(worker: &FakeWorker) -> JournalBlock {
    block(worker, 2, Vec::new())
}

/// Another gateway cannot know what this one ordered. What it has recorded of lies is taken back.
#[tokio::test]
async fn lies_recorded_elsewhere_cost_nothing() {
    type Lie = fn(&mut JournalBlock);
    let lies: [(&str, Lie); 4] = [
        ("more tokens", |block| {
            block.finished[0].usage.as_mut().expect("set").completion_tokens = 2;
        }),
        ("more cost", |block| {
            block.finished[0].usage.as_mut().expect("set").reference_ns += 1;
        }),
        ("an attempt that was never ordered", |block| {
            block.shares[0].attempt = 3;
            block.finished[0].attempt = 3;
        }),
        ("another tier", |block| {
            block.shares[0].tier = Tier::Batch.into();
            block.finished[0].tier = Tier::Batch.into();
        }),
    ];
    for (what, lie) in lies {
        let (mut worker, gateway) = shared().await;
        let order = answered(&gateway, &mut worker).await;
        let mut block = honest(&worker, &order);
        lie(&mut block);
        record_elsewhere(&gateway, &worker, block).await;
        let workers = gateway.api.serving.workers();
        while workers.is_ready() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        while bill(&gateway, "acme") != (0, 0, 0) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert!(workers.protocol_violations() > 0, "{what}");
        assert_balanced(&gateway, &worker, what);
    }
}

/// A second end of an attempt, which the ledger refuses, does not take back the first one.
#[tokio::test]
async fn end_repeated_elsewhere_leaves_the_first_paid() {
    let (mut worker, gateway) = shared().await;
    // The request still runs, so that its order is known when the ends come.
    let (response, ()) = join!(gateway.chat(r#""max_tokens":8"#), async {
        let run = worker.run().await;
        run.token(0, "Hi.", FIGURE).await;
        let block = honest(&worker, &run.assignment);
        record_elsewhere(&gateway, &worker, block.clone()).await;
        let mut again = JournalBlock { block: 2, first_step: 2, last_step: 2, ..block };
        again.shares.clear();
        again.wall_ns = again.idle_ns;
        // Its recorder left the second end out.
        let kept = JournalBlock { finished: Vec::new(), ..again.clone() };
        gateway.ledger.submit(Block::try_from(kept).expect("a block")).await.expect("posts");
        worker.journal.send(JournalBlock { recorded: true, ..again }).await.expect("followed");
        until_seen(&gateway, 2).await;
        run.end_choice(0, FinishReason::Stop).await;
        run.end(1, FIGURE).await;
    });
    assert_eq!(response.status(), http::StatusCode::OK);
    gateway.settled().await;
    assert_eq!(bill(&gateway, "acme").0, FIGURE);
    assert!(gateway.api.serving.workers().protocol_violations() > 0, "it lied");
    assert_balanced(&gateway, &worker, "a second end");
}

/// Blocks that another gateway has recorded are no gap in what comes to this one.
#[tokio::test]
async fn journal_goes_on_behind_blocks_recorded_elsewhere() {
    let (mut worker, gateway) = shared().await;
    let [first, fourth] = [1, 4].map(|number| block(&worker, number, Vec::new()));
    journal(&mut worker, vec![first]).await;
    for number in [2, 3] {
        let recorded = Block::try_from(block(&worker, number, Vec::new())).expect("a block");
        gateway.ledger.submit(recorded).await.expect("posts");
    }
    journal(&mut worker, vec![fourth]).await;
    assert_eq!(gateway.api.serving.workers().protocol_violations(), 0);
    // The control: a block that nobody has recorded is missing.
    worker.journal.send(block(&worker, 6, Vec::new())).await.expect("followed");
    while gateway.api.serving.workers().protocol_violations() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_balanced(&gateway, &worker, "a gap");
}

/// The requests of another gateway are judged by their key and their price. What ended by a fault
/// is left to the gateway that knows what reached its client.
#[tokio::test]
async fn requests_of_another_gateway_are_recorded_for_it() {
    let (mut worker, gateway) = shared().await;
    let order = answered(&gateway, &mut worker).await;
    let first = honest(&worker, &order);
    let of = |number: u64, reason| {
        let block =
            JournalBlock { block: number, first_step: number, last_step: number, ..first.clone() };
        ordered_elsewhere(block, number.into(), reason)
    };
    let fault = of(3, FinishReason::Fault);
    journal(&mut worker, vec![first.clone(), of(2, FinishReason::Stop), fault.clone()]).await;
    assert_eq!(bill(&gateway, "acme").0, 3 * FIGURE, "the faulted one is not taken back here");
    let request = RequestId::new(&fault.finished[0].request_id).expect("an id");
    let tenant = tollgate_domain::TenantId::new("acme").expect("a name");
    let row = gateway.ledger.reader().request(&tenant, &request).expect("reads").expect("posted");
    assert_eq!(row.state, RequestState::Posted);
    // A key that nobody has is refused, whoever ordered.
    let mut stranger = of(4, FinishReason::Stop);
    stranger.shares[0].key = "nobody0000".into();
    stranger.finished[0].key = "nobody0000".into();
    journal(&mut worker, vec![stranger]).await;
    assert_eq!(bill(&gateway, "acme").0, 3 * FIGURE);
    assert!(gateway.api.serving.workers().protocol_violations() > 0);
    assert_balanced(&gateway, &worker, "another gateway's");
}

/// A worker of this machine serves this gateway alone, whoever shares the ledger.
#[tokio::test]
async fn own_worker_bills_no_other_gateway() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open_shared(folder, PLAIN, &[&worker]).await;
    let order = answered(&gateway, &mut worker).await;
    let first = honest(&worker, &order);
    let invented = JournalBlock { block: 2, first_step: 2, last_step: 2, ..first.clone() };
    let invented = ordered_elsewhere(invented, 2, FinishReason::Stop);
    journal(&mut worker, vec![first, invented]).await;
    assert_eq!(bill(&gateway, "acme").0, FIGURE);
    assert!(gateway.api.serving.workers().protocol_violations() > 0);
}

/// A block that comes again before it is in the ledger is checked again.
#[tokio::test]
async fn block_that_comes_twice_is_checked_twice() {
    let (mut worker, gateway) = shared().await;
    let order = answered(&gateway, &mut worker).await;
    let mut lie = honest(&worker, &order);
    lie.finished[0].usage.as_mut().expect("set").completion_tokens = 5;
    // Both arrive before the first one is posted.
    worker.journal.send(lie.clone()).await.expect("followed");
    worker.journal.send(lie.clone()).await.expect("followed");
    for _ in 0..2 {
        assert_eq!(worker.acks.recv().await.map(|ack| ack.block), Some(1));
    }
    assert_eq!(bill(&gateway, "acme"), (0, 0, 0));
    assert_balanced(&gateway, &worker, "a block that comes twice");
}

/// A worker invents a block that was never recorded, with a request that runs elsewhere.
#[tokio::test]
async fn invented_copy_takes_nothing_back() {
    let folder = TestGateway::folder();
    let mut workers = ["w0", "x1"].map(|name| FakeWorker::start(folder.path(), name));
    workers.iter_mut().for_each(|worker| worker.endpoint.is_shareable = true);
    let [mut honest_one, mut liar] = workers;
    let gateway = TestGateway::open_shared(folder, PLAIN, &[&honest_one, &liar]).await;
    let (response, order) = join!(gateway.chat(r#""max_tokens":8"#), async {
        let run = tokio::select! {
            run = honest_one.run() => run,
            // The two change their parts if the request goes to the other one.
            run = liar.run() => {
                std::mem::swap(&mut honest_one, &mut liar);
                run
            }
        };
        let order = run.assignment.clone();
        run.answer("Hi.").await;
        order
    });
    assert_eq!(response.status(), http::StatusCode::OK);
    gateway.settled().await;
    let copy = JournalBlock { recorded: true, ..honest(&liar, &order) };
    liar.journal.send(copy).await.expect("followed");
    until_seen(&gateway, 1).await;
    let block = honest(&honest_one, &order);
    journal(&mut honest_one, vec![block]).await;
    assert_eq!(bill(&gateway, "acme").0, FIGURE, "the request is billed where it ran");
    assert!(gateway.api.serving.workers().protocol_violations() > 0, "it lied");
}
