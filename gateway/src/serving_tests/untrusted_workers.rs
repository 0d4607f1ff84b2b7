//! A worker that journals invalid records. Whatever the worker reports, no tenant
//! pays for work that this gateway did not order or whose stream it did not see.
//! The time becomes loss, the ledger balances, and the worker gets no more
//! requests.

use tokio::join;
use tollgate_domain::{STEP_NANOS, STEP_SEQUENCES, TenantId, WorkerEpoch};
use tollgate_ledger::UsageQuery;
use tollgate_wire::v1::*;

use crate::api::tests::test_gateway::{PLAIN, TestGateway, text};
use tollgate_serving::test_support::{FakeWorker, MODEL};

/// The cost of the one token of an honest answer, by both meters.
pub(super) const FIGURE: u64 = 100;

/// Makes a block of an epoch that began with this gateway: one step, one sequence.
pub(super) fn block(worker: &FakeWorker, number: u64, shares: Vec<Share>) -> JournalBlock {
    let tenants: u64 = shares.iter().map(|share| share.attributed_ns).sum();
    JournalBlock {
        format: 1,
        epoch: worker.epoch.clone(),
        block: number,
        worker: worker.endpoint.name.as_str().into(),
        device: Some(Device { class: "cpu".into(), name: "fake".into(), ..Device::default() }),
        model: MODEL.into(),
        calibration: "test".into(),
        first_step: number,
        last_step: number,
        started_utc_ns: crate::Clock::system().utc().0,
        wall_ns: tenants + 10,
        idle_ns: 10,
        shares,
        ..JournalBlock::default()
    }
}

/// Makes the block that an honest worker journals for `assignment` after one token.
pub(super) fn honest(worker: &FakeWorker, assignment: &Assignment) -> JournalBlock {
    let share = Share {
        sequence: 1,
        request_id: assignment.request_id.clone(),
        attempt: assignment.attempt,
        tenant: assignment.tenant.clone(),
        key: assignment.key.clone(),
        attributed_ns: FIGURE,
        tier: assignment.tier,
    };
    let record = RequestRecord {
        request_id: assignment.request_id.clone(),
        attempt: assignment.attempt,
        tenant: assignment.tenant.clone(),
        key: assignment.key.clone(),
        usage: Some(Usage {
            prompt_tokens: assignment.prompts[0].tokens.len() as u64,
            cached_tokens: 0,
            completion_tokens: 1,
            attributed_ns: FIGURE,
            reference_ns: FIGURE,
        }),
        stages: Some(Stages::default()),
        reason: FinishReason::Stop.into(),
        finished_utc_ns: crate::Clock::system().utc().0,
        tier: assignment.tier,
    };
    let mut block = block(worker, 1, vec![share]);
    block.finished.push(record);
    block
}

/// Sends blocks and waits until each is acknowledged.
pub(super) async fn journal(worker: &mut FakeWorker, blocks: Vec<JournalBlock>) {
    for block in blocks {
        let number = block.block;
        worker.journal.send(block).await.expect("followed");
        assert_eq!(worker.acks.recv().await.map(|ack| ack.block), Some(number));
    }
}

/// Returns a tenant's bill: device time, reference cost, and tokens of both kinds.
pub(super) fn bill(gateway: &TestGateway, tenant: &str) -> (u64, u64, u64) {
    let query = UsageQuery {
        tenant: Some(TenantId::new(tenant).expect("a name")),
        ..UsageQuery::default()
    };
    let rows = gateway.ledger.reader().usage(&query).expect("a ledger");
    rows.iter().fold((0, 0, 0), |(attributed, reference, tokens), row| {
        let more = row.prompt_tokens + row.completion_tokens;
        (attributed + row.attributed_ns, reference + row.reference_ns, tokens + more)
    })
}

/// Returns the damage of the ledger. Blocks that were posted in part are remarks.
fn damage(gateway: &TestGateway) -> Vec<String> {
    let findings = gateway.ledger.reader().check().into_iter();
    findings.filter(|it| !it.is_remark()).map(|it| it.message).collect()
}

/// Checks that the ledger balances.
pub(super) fn assert_balanced(gateway: &TestGateway, worker: &FakeWorker, what: &str) {
    let epoch = WorkerEpoch::try_from(worker.epoch.clone()).expect("an epoch");
    let balance = gateway.ledger.reader().balance(epoch).expect("a ledger");
    assert!(balance.is_exact(), "{what}: {balance:?}");
    assert_eq!(damage(gateway), Vec::<String>::new(), "{what}");
}

/// Sends one request, which the worker answers honestly, and returns its order.
pub(super) async fn answered(gateway: &TestGateway, worker: &mut FakeWorker) -> Assignment {
    let (response, assignment) = join!(gateway.chat(r#""max_tokens":8"#), async {
        let run = worker.run().await;
        let assignment = run.assignment.clone();
        run.answer("Hi.").await;
        assignment
    });
    assert_eq!(response.status(), http::StatusCode::OK);
    gateway.settled().await;
    assignment
}

fn usage_of(block: &mut JournalBlock) -> &mut Usage {
    block.finished[0].usage.as_mut().expect("an honest block has a usage")
}

/// Adds device time to the block's share and keeps the block balanced.
fn more_time(block: &mut JournalBlock, nanos: u64) {
    block.shares[0].attributed_ns += nanos;
    block.wall_ns += nanos;
}

type Change = fn(&mut JournalBlock, &TestGateway);

#[tokio::test]
async fn honest_block_is_billed_once() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let assignment = answered(&gateway, &mut worker).await;
    let block = honest(&worker, &assignment);
    let tokens = assignment.prompts[0].tokens.len() as u64 + 1;
    for _ in 0..3 {
        journal(&mut worker, vec![block.clone()]).await;
        assert_eq!(bill(&gateway, "acme"), (FIGURE, FIGURE, tokens));
        assert_balanced(&gateway, &worker, "honest");
    }
    let workers = gateway.api.serving.workers();
    assert!(workers.protocol_violations() == 0 && workers.is_ready());
    // The same block with other figures is invalid, and still changes nothing.
    let mut other = block;
    more_time(&mut other, 1);
    usage_of(&mut other).attributed_ns += 1;
    journal(&mut worker, vec![other]).await;
    assert_eq!(bill(&gateway, "acme"), (FIGURE, FIGURE, tokens));
    assert!(workers.protocol_violations() == 1 && !workers.is_ready());
    let report = workers.report();
    assert!(report[0].distrusted && !report[0].ready);
    // A distrusted worker gets no more requests.
    assert_eq!(gateway.chat("").await.status(), http::StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn wrong_counts_of_steps_end_trust() {
    let counts = |by_time: u64, by_sequences: u64| {
        let list = |first: u64, length: usize| [vec![first], vec![0; length]].concat();
        let by_time = list(by_time, STEP_NANOS.len());
        Some(StepCounts {
            by_time,
            by_sequences: list(by_sequences, STEP_SEQUENCES.len()),
            sequences: 1,
        })
    };
    // The first two are right: a worker may also report no counts.
    for (steps, counts, is_trusted) in [
        (1, counts(1, 1), true),
        (1, None, true),
        (2, counts(1, 1), false),
        (1, counts(1, 0), false),
        (1, Some(StepCounts::default()), false),
    ] {
        let folder = TestGateway::folder();
        let worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let workers = gateway.api.serving.workers();
        let what = format!("{counts:?}");
        let beats = || workers.report()[0].heartbeat.map_or(0, |beat| beat.times);
        let before = beats();
        worker.status.send_modify(|status| {
            (status.steps, status.step_counts) = (steps, counts);
        });
        while beats() == before && workers.protocol_violations() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(workers.protocol_violations() == 0, is_trusted, "{what}");
    }
}

#[tokio::test]
async fn records_without_order_or_stream_are_never_billed() {
    let changes: &[(&str, Change)] = &[
        ("a request that never was", |block, _| {
            block.shares[0].request_id = "req-ffffffffffffffffffffffffffffffff".into();
            block.finished[0].request_id = block.shares[0].request_id.clone();
        }),
        ("an attempt that never was", |block, _| {
            (block.shares[0].attempt, block.finished[0].attempt) = (1, 1);
        }),
        ("another tenant", |block, gateway| {
            let key = gateway.key_id("other");
            (block.shares[0].tenant, block.shares[0].key) = ("other".into(), key.clone());
            (block.finished[0].tenant, block.finished[0].key) = ("other".into(), key);
        }),
        ("another tenant, the share alone", |block, _| block.shares[0].tenant = "other".into()),
        ("another tenant, the end alone", |block, _| block.finished[0].tenant = "other".into()),
        ("another key", |block, gateway| {
            block.shares[0].key = gateway.key_id("other");
            block.finished[0].key = gateway.key_id("other");
        }),
        ("another model", |block, _| block.model = "other-model".into()),
        ("another class", |block, _| {
            block.device = Some(Device { class: "h200".into(), ..Device::default() });
        }),
        ("another tier", |block, _| {
            block.shares[0].tier = Tier::Batch.into();
            block.finished[0].tier = Tier::Batch.into();
        }),
        ("another tier, the share alone", |block, _| block.shares[0].tier = Tier::Batch.into()),
        ("another tier, the end alone", |block, _| block.finished[0].tier = Tier::Batch.into()),
        ("more prompt than was sent", |block, _| usage_of(block).prompt_tokens += 1),
        ("more tokens than were streamed", |block, _| usage_of(block).completion_tokens += 1),
        ("more tokens than were ordered", |block, _| usage_of(block).completion_tokens = 9),
        ("fewer tokens than were streamed", |block, _| usage_of(block).completion_tokens = 0),
        ("more reference cost", |block, _| usage_of(block).reference_ns += 1),
        ("a day of reference cost", |block, _| usage_of(block).reference_ns = 86_400_000_000_000),
        ("an hour of device time", |block, _| {
            more_time(block, 3_600_000_000_000);
            usage_of(block).attributed_ns += 3_600_000_000_000;
        }),
        ("an hour of device time, the share alone", |block, _| {
            block.finished.clear();
            more_time(block, 3_600_000_000_000);
        }),
        ("an end reported twice at once", |block, _| {
            block.finished.push(block.finished[0].clone())
        }),
    ];
    for (what, change) in changes {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let assignment = answered(&gateway, &mut worker).await;
        let mut block = honest(&worker, &assignment);
        change(&mut block, &gateway);
        // The valid part of the block's own attempt may be billed.
        let own = (FIGURE, FIGURE, assignment.prompts[0].tokens.len() as u64 + 1);
        let partly = what.ends_with("alone");
        journal(&mut worker, vec![block.clone(), block]).await;
        let found = bill(&gateway, "acme");
        assert!(found == (0, 0, 0) || partly && found <= own, "{what}: {found:?}");
        assert_eq!(bill(&gateway, "other"), (0, 0, 0), "{what}");
        assert_balanced(&gateway, &worker, what);
        let workers = gateway.api.serving.workers();
        assert!(workers.protocol_violations() == 1 && !workers.is_ready(), "{what}");
    }
}

#[tokio::test]
async fn records_after_the_end_are_rejected() {
    let changes: &[(&str, Change)] = &[
        ("its end again", |block, _| block.shares.clear()),
        ("more device time", |block, _| block.finished.clear()),
        ("all of it again", |_, _| ()),
    ];
    for (what, change) in changes {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let assignment = answered(&gateway, &mut worker).await;
        let first = honest(&worker, &assignment);
        let mut second = first.clone();
        (second.block, second.first_step, second.last_step) = (2, 2, 2);
        change(&mut second, &gateway);
        second.wall_ns = second.shares.iter().map(|share| share.attributed_ns).sum::<u64>() + 10;
        journal(&mut worker, vec![first, second]).await;
        let tokens = assignment.prompts[0].tokens.len() as u64 + 1;
        assert_eq!(bill(&gateway, "acme"), (FIGURE, FIGURE, tokens), "{what}");
        assert_balanced(&gateway, &worker, what);
        assert_eq!(gateway.api.serving.workers().protocol_violations(), 1, "{what}");
    }
}

/// An accepted early block would let the skipped block come later without review.
#[tokio::test]
async fn early_block_hides_no_invalid_record() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let assignment = answered(&gateway, &mut worker).await;
    let mut first = honest(&worker, &assignment);
    more_time(&mut first, 3_600_000_000_000);
    usage_of(&mut first).attributed_ns += 3_600_000_000_000;
    let second = block(&worker, 2, Vec::new());
    worker.journal.send(second).await.expect("followed");
    // The gateway may drop the connection before this block is read.
    let _ = worker.journal.send(first).await;
    while !worker.journal.is_closed() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(bill(&gateway, "acme"), (0, 0, 0));
    assert_balanced(&gateway, &worker, "before its turn");
}

/// A worker need not send the blocks that a restored ledger lost. It may leave out
/// no other block.
#[tokio::test]
async fn restored_ledger_accepts_later_journal() {
    let folder = TestGateway::folder();
    let path = folder.path().join("ledger.db");
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let restored = crate::Clock::system().utc().0 + 3_600_000_000_000;
    rusqlite::Connection::open(path)
        .and_then(|it| it.execute("REPLACE INTO meta VALUES ('restored', ?1)", [restored as i64]))
        .expect("marks it");
    let (third, fifth) = (block(&worker, 3, Vec::new()), block(&worker, 5, Vec::new()));
    journal(&mut worker, vec![third.clone(), third]).await;
    let found = gateway.ledger.reader().check();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(tollgate_ledger::Finding::is_remark), "{found:?}");
    assert_eq!(gateway.api.serving.workers().protocol_violations(), 0);
    worker.journal.send(fifth).await.expect("followed");
    while !worker.journal.is_closed() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let epoch = WorkerEpoch::try_from(worker.epoch.clone()).expect("an epoch");
    assert_eq!(gateway.ledger.reader().last_block(epoch).expect("a ledger"), 3);
}

/// A broken stream has no last event, so the journal is compared with the order and
/// with the tokens that had come.
#[tokio::test]
async fn broken_stream_still_bounds_the_bill() {
    let changes: &[(&str, Change)] = &[
        ("more tokens than were ordered", |block, _| usage_of(block).completion_tokens = 9),
        ("fewer tokens than were streamed", |block, _| usage_of(block).completion_tokens = 0),
        ("more prompt than was sent", |block, _| usage_of(block).prompt_tokens += 1),
        ("more than the table gives", |block, _| usage_of(block).reference_ns = 100_000_000),
        ("another tenant", |block, _| block.finished[0].tenant = "other".into()),
    ];
    for (what, change) in changes {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let (response, assignment) =
            join!(gateway.chat(r#""stream":true,"max_tokens":8"#), async {
                let run = worker.run().await;
                run.token(0, "Hi", FIGURE).await;
                run.assignment.clone()
            });
        assert!(text(response).await.1.contains("worker_lost"), "{what}");
        gateway.settled().await;
        let mut block = honest(&worker, &assignment);
        change(&mut block, &gateway);
        journal(&mut worker, vec![block]).await;
        let (attributed, reference, tokens) = bill(&gateway, "acme");
        // The tenant pays the content that went out, whatever the journal reports.
        let delivered = assignment.prompts[0].tokens.len() as u64 + 1;
        assert!(attributed <= FIGURE && reference <= FIGURE && tokens <= delivered, "{what}");
        assert_eq!(bill(&gateway, "other"), (0, 0, 0), "{what}");
        assert_balanced(&gateway, &worker, what);
        assert_eq!(gateway.api.serving.workers().protocol_violations(), 1, "{what}");
    }
}

/// A request that its worker refused cost nothing, so no record of it is valid.
#[tokio::test]
async fn refused_order_is_never_billed() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let (_, assignment) = join!(gateway.chat(""), async {
        let run = worker.run().await;
        let assignment = run.assignment.clone();
        run.refuse(RefusedReason::Overloaded).await;
        assignment
    });
    gateway.settled().await;
    let block = honest(&worker, &assignment);
    journal(&mut worker, vec![block]).await;
    assert_eq!(bill(&gateway, "acme"), (0, 0, 0));
    assert_balanced(&gateway, &worker, "refused");
    assert_eq!(gateway.api.serving.workers().protocol_violations(), 1);
}

/// A worker that journals in another worker's epoch loses its connection, and the
/// other worker's journal is not disturbed.
#[tokio::test]
async fn worker_cannot_use_epoch_of_another() {
    let folder = TestGateway::folder();
    let mut owner = FakeWorker::start(folder.path(), "a");
    let intruder = FakeWorker::start(folder.path(), "b");
    let gateway = TestGateway::open(folder, PLAIN, &[&owner, &intruder]).await;
    let mut forged = block(&intruder, 1, Vec::new());
    forged.epoch = owner.epoch.clone();
    intruder.journal.send(forged).await.expect("followed");
    let workers = gateway.api.serving.workers();
    while workers.protocol_violations() == 0 {
        tokio::task::yield_now().await;
    }
    while workers.connected().count() > 1 {
        workers.changed().await;
    }
    let mut first = block(&owner, 1, Vec::new());
    (first.first_step, first.last_step) = (0, 0);
    journal(&mut owner, vec![first]).await;
    assert_balanced(&gateway, &owner, "its own blocks are posted");
    assert!(workers.is_ready());
}

/// Records of an earlier gateway's requests are checked against the keys, the
/// ledger and the price.
#[tokio::test]
async fn earlier_epoch_is_accepted_within_bounds() {
    const EARLIER: &str = "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee";
    let cases: &[(&str, Change, bool, u64)] = &[
        ("as it was", |_, _| (), true, 0),
        ("a key that never was", |block, _| block.finished[0].key = "k0".into(), false, 1),
        ("another tenant's key", |block, _| block.finished[0].tenant = "other".into(), false, 1),
        ("too dear", |block, _| usage_of(block).reference_ns = 1 << 40, false, 1),
        ("too many tokens", |block, _| usage_of(block).completion_tokens = 1 << 20, false, 1),
        ("an unknown price", |block, _| block.calibration = "older".into(), false, 0),
    ];
    for (what, change, accepted, violations) in cases {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
        let assignment = Assignment {
            request_id: "req-00000000000000000000000000000777".into(),
            tenant: "acme".into(),
            key: gateway.key_id("acme"),
            prompts: vec![Prompt { tokens: vec![1, 2, 3] }],
            ..Assignment::default()
        };
        let mut first = honest(&worker, &assignment);
        first.epoch = EARLIER.into();
        change(&mut first, &gateway);
        let (key, tenant) = (first.finished[0].key.clone(), first.finished[0].tenant.clone());
        (first.shares[0].key, first.shares[0].tenant) = (key, tenant);
        let mut again = first.clone();
        (again.block, again.first_step, again.last_step) = (2, 2, 2);
        journal(&mut worker, vec![first]).await;
        let expected = if *accepted { (FIGURE, FIGURE, 4) } else { (0, 0, 0) };
        assert_eq!(bill(&gateway, "acme"), expected, "{what}");
        assert_eq!(bill(&gateway, "other"), (0, 0, 0), "{what}");
        assert_eq!(gateway.api.serving.workers().protocol_violations(), *violations, "{what}");
        assert_eq!(damage(&gateway), Vec::<String>::new(), "{what}");
        // The ledger remembers ended attempts.
        journal(&mut worker, vec![again]).await;
        let (attributed, reference, tokens) = bill(&gateway, "acme");
        assert_eq!((attributed, reference, tokens), expected, "{what}, sent twice");
        assert_eq!(damage(&gateway), Vec::<String>::new(), "{what}, sent twice");
        // An unknown epoch after the present one cannot be an earlier gateway's.
        let mut present = block(&worker, 1, Vec::new());
        (present.first_step, present.last_step) = (0, 0);
        let mut invented = honest(
            &worker,
            &Assignment {
                request_id: "req-00000000000000000000000000000778".into(),
                ..assignment.clone()
            },
        );
        invented.epoch = EARLIER.replace('e', "d");
        journal(&mut worker, vec![present, invented]).await;
        assert_eq!(bill(&gateway, "acme"), expected, "{what}, invented late");
    }
}

/// Each block alone is within the power of a device; together they are not.
#[tokio::test]
async fn energy_of_epoch_is_bounded_by_time() {
    const MOST_AT_ONCE: u64 = 200_000_000; // 100 kW for two seconds
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let of = |number, energy_mj| JournalBlock { energy_mj, ..block(&worker, number, Vec::new()) };
    let blocks =
        [of(1, Some(1)), of(2, None), of(3, Some(MOST_AT_ONCE - 1)), of(4, Some(1)), of(5, None)];
    // A block of more time than has passed since the gateway started.
    let hours = JournalBlock {
        wall_ns: 3_600_000_000_000,
        idle_ns: 3_600_000_000_000,
        ..of(6, Some(70_000_000_000))
    };
    journal(&mut worker, blocks.into_iter().chain([hours]).collect()).await;
    let refused: Vec<_> = gateway
        .ledger
        .reader()
        .check()
        .into_iter()
        .map(|found| (found.kind, found.message))
        .collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    for ((kind, what), number) in refused.iter().zip([4, 6]) {
        assert_eq!(*kind, "refused");
        assert!(
            what.starts_with(&format!("block {number} of ")) && what.contains("drew"),
            "{what}"
        );
    }
    let epoch = WorkerEpoch::try_from(worker.epoch.clone()).expect("an epoch");
    let energy =
        gateway.ledger.reader().energy(epoch).expect("reads").expect("blocks reported energy");
    assert_eq!(energy.energy_mj as u64, MOST_AT_ONCE);
}

/// Makes a block of an epoch before the worker's present one.
fn earlier(worker: &FakeWorker, number: u64) -> JournalBlock {
    JournalBlock { epoch: format!("{:032x}", 0xe), ..block(worker, number, Vec::new()) }
}

/// A worker closes a damaged journal at the damage, which may be before the last
/// block that the ledger has.
#[tokio::test]
async fn damaged_end_of_earlier_epoch_is_no_violation() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let blocks: Vec<_> = (1..=4).map(|number| earlier(&worker, number)).collect();
    journal(&mut worker, blocks).await;
    let mut closed =
        JournalBlock { last_of_epoch: true, wall_ns: 15, idle_ns: 15, ..earlier(&worker, 2) };
    journal(&mut worker, vec![closed.clone(), closed.clone()]).await;
    let workers = gateway.api.serving.workers();
    assert!(workers.protocol_violations() == 0 && workers.is_ready());
    let epoch = WorkerEpoch::try_from(closed.epoch.clone()).expect("an epoch");
    let reader = gateway.ledger.reader();
    assert_eq!(reader.last_block(epoch).expect("a ledger"), 4);
    assert_eq!(reader.balance(epoch).expect("a ledger").idle_ns, 40);
    assert_eq!(reader.check(), vec![]);
    // The control: another block of a known number that ends no epoch.
    closed.last_of_epoch = false;
    journal(&mut worker, vec![closed]).await;
    assert!(workers.protocol_violations() == 1 && !workers.is_ready());
}
