//! Posting, correcting and asking, as the gateway does it.
#![allow(missing_docs)]

mod common;

use std::time::Duration;

use common::*;
use futures_executor::block_on;
use tollgate_domain::block::LONGEST_ATTEMPT;
use tollgate_domain::{
    Block, Caller, DeviceClass, DeviceNanos, FinishReason, KeyId, Millijoules, RequestId, TenantId,
    Usage, UtcDay, UtcTime, WorkerName,
};
use tollgate_ledger::{
    Balance, BlockRefusal, EnergyBalance, GroupBy, Health, Ledger, LedgerError, LedgerHandle,
    LedgerOptions, PartiallyRejectedBlock, Posted, RequestState, UsageQuery,
};

fn ledger() -> (tempfile::TempDir, LedgerHandle) {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    (folder, ledger)
}

fn refusal(result: Result<Posted, LedgerError>) -> Option<BlockRefusal> {
    match result {
        Err(LedgerError::Refused { refusal, .. }) => Some(refusal),
        _ => None,
    }
}

#[test]
fn a_block_is_posted_once_and_balances() {
    let (_folder, ledger) = ledger();
    let first = block(1, vec![share("acme", 1, 100), share("beta", 2, 50)], vec![]);
    assert_eq!(post(&ledger, first.clone()).expect("posts"), Posted::New);
    assert_eq!(post(&ledger, first).expect("posts"), Posted::Already);
    let balance = ledger.reader().balance(EPOCH).expect("reads");
    let expected =
        Balance { wall_ns: 185, tenants_ns: 150, overhead_ns: 10, idle_ns: 20, loss_ns: 5 };
    assert_eq!(balance, expected);
    assert!(balance.is_exact());
    assert_eq!(ledger.reader().last_block(EPOCH).expect("reads"), 1);
    assert_eq!(ledger.reader().check(), vec![]);
}

#[test]
fn what_contradicts_the_ledger_is_refused_and_leaves_no_trace() {
    let (_folder, ledger) = ledger();
    let done = finished("acme", 1, usage(100, 90));
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![done.clone()])).expect("posts");
    let before = ledger.reader().balance(EPOCH).expect("reads");

    let conflict = block(1, vec![share("acme", 1, 101)], vec![]);
    assert_eq!(refusal(post(&ledger, conflict)), Some(BlockRefusal::Conflict));

    let gap = block(3, vec![], vec![]);
    assert_eq!(refusal(post(&ledger, gap)), Some(BlockRefusal::Gap { expected: 2 }));

    let mut other = parts(2, vec![], vec![]);
    other.worker = WorkerName::new("1").expect("a name");
    let other = Block::try_from(other).expect("it balances");
    assert_eq!(refusal(post(&ledger, other)), Some(BlockRefusal::Identity));

    let mut steps = parts(2, vec![], vec![]);
    steps.first_step = 19;
    let steps = Block::try_from(steps).expect("it balances");
    assert_eq!(refusal(post(&ledger, steps)), Some(BlockRefusal::Steps { after: 19 }));

    let replayed = block(2, vec![share("acme", 1, 100)], vec![done]);
    assert!(matches!(refusal(post(&ledger, replayed)), Some(BlockRefusal::Replayed { .. })));

    assert_eq!(ledger.reader().balance(EPOCH).expect("reads"), before);
    assert_eq!(ledger.reader().check(), vec![]);

    // Passed over, the ones after it can be posted, and the check says so.
    assert_eq!(skip(&ledger, 2).expect("passes"), Posted::New);
    assert_eq!(skip(&ledger, 2).expect("passes"), Posted::Already);
    let late = block(2, vec![], vec![]);
    assert_eq!(refusal(post(&ledger, late)), Some(BlockRefusal::Skipped));
    post(&ledger, block(3, vec![], vec![])).expect("posts");
    let findings: Vec<_> = ledger.reader().check().into_iter().map(|it| it.kind).collect();
    assert_eq!(findings, ["refused"]);

    let mut last = parts(4, vec![], vec![]);
    last.last_of_epoch = true;
    post(&ledger, Block::try_from(last).expect("it balances")).expect("posts");
    assert_eq!(refusal(post(&ledger, block(5, vec![], vec![]))), Some(BlockRefusal::Ended));
}

/// T56: a worker says nothing in another one's name.
#[test]
fn an_epoch_is_its_workers_alone() {
    let (_folder, ledger) = ledger();
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    assert_eq!(refusal(skip_as(&ledger, "1", 2)), Some(BlockRefusal::Identity));
    post(&ledger, block(2, vec![], vec![])).expect("its own worker's is posted");
    assert_eq!(ledger.reader().check(), vec![]);

    // Also where it began with a block that was passed over.
    let (_folder, ledger) = self::ledger();
    assert_eq!(skip_as(&ledger, "1", 1).expect("passes"), Posted::New);
    assert_eq!(refusal(post(&ledger, block(2, vec![], vec![]))), Some(BlockRefusal::Identity));
    let mut own = parts(2, vec![], vec![]);
    own.worker = WorkerName::new("1").expect("a name");
    let own = Block::try_from(own).expect("it balances");
    assert_eq!(post(&ledger, own).expect("posts"), Posted::New);
}

/// What a tenant need not pay for takes its energy along, to the last
/// millijoule, whether the cap comes before the block or after it.
#[test]
fn energy_goes_where_its_time_goes() {
    for cap_first in [false, true] {
        let (_folder, ledger) = ledger();
        let mut drew = parts(1, vec![share("acme", 1, 100), share("beta", 2, 65)], vec![]);
        drew.energy = Some(Millijoules(2_003));
        let drew = Block::try_from(drew).expect("it balances");
        let cap = cap("acme", 1, usage(33, 20));
        if cap_first {
            post_cap(&ledger, cap).expect("posts");
            post(&ledger, drew).expect("posts");
        } else {
            post(&ledger, drew).expect("posts");
            post_cap(&ledger, cap).expect("posts");
        }
        // By 100, 65, 10, 20 and 5 of 200 ns: 1001.5, 650.975, 100.15, 200.3 and
        // 50.075; the two left over go to the first two.
        let energy = ledger.reader().energy(EPOCH).expect("reads").expect("it was told");
        let (kept, moved) = (1_002 - 671, 671); // of 1002 mJ 67 %, rounded down
        let expected = EnergyBalance {
            energy_mj: 2_003,
            tenants_mj: kept + 651,
            overhead_mj: 100,
            idle_mj: 200,
            loss_mj: 50 + moved,
        };
        assert_eq!(energy, expected);
        assert!(energy.is_exact());
        let query = UsageQuery { group: vec![GroupBy::Tenant], ..UsageQuery::default() };
        let usage = ledger.reader().usage(&query).expect("reads");
        let told: Vec<_> = usage.iter().map(|row| row.energy_mj).collect();
        assert_eq!(told, [Some(kept as u64), Some(651)]);
        assert_eq!(ledger.reader().check(), vec![]);
    }
}

/// T56: what is not believed is loss, and stays so when the worker says it again.
#[test]
fn what_is_struck_is_loss_and_comes_only_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    let said = block(
        1,
        vec![share("acme", 1, 100), share("beta", 2, 50)],
        vec![finished("acme", 1, usage(100, 90)), finished("beta", 2, usage(50, 40))],
    );
    let believed = said.without(|owner, _| *owner == caller("beta"));
    let struck = PartiallyRejectedBlock {
        reported: said.clone(),
        accepted: believed.clone(),
        reason: "a lie".into(),
    };
    assert_eq!(post_partly(&ledger, struck.clone()).expect("posts"), Posted::New);
    let expected =
        Balance { wall_ns: 185, tenants_ns: 100, overhead_ns: 10, idle_ns: 20, loss_ns: 55 };
    assert_eq!(ledger.reader().balance(EPOCH).expect("reads"), expected);
    // Again, judged or not, before and after a restart.
    for ledger in [&ledger, &Ledger::open(&folder.path().join("ledger.db")).expect("opens")] {
        assert_eq!(post_partly(ledger, struck.clone()).expect("posts"), Posted::Already);
        assert_eq!(post(ledger, said.clone()).expect("posts"), Posted::Already);
        assert_eq!(refusal(post(ledger, believed.clone())), Some(BlockRefusal::Conflict));
        assert_eq!(ledger.reader().balance(EPOCH).expect("reads"), expected);
        assert_eq!(ledger.reader().check(), vec![]);
    }
    let beta = TenantId::new("beta").expect("a name");
    let id = RequestId::from_random(2);
    assert_eq!(ledger.reader().request(&beta, &id).expect("reads"), None);
    post(&ledger, block(2, vec![], vec![])).expect("the next one follows it");
}

#[test]
fn a_cap_moves_to_loss_what_the_client_never_got() {
    // (posted before the cap, after it, payable) -> what the tenant pays
    let cases: &[(&[u64], &[u64], u64, u64)] = &[
        (&[100, 50], &[], 0, 0),
        (&[100, 50], &[], 120, 120),
        (&[100, 50], &[30], 120, 120),
        (&[100], &[50, 30], 120, 120),
        (&[], &[50, 30], 60, 60),
        (&[100], &[], 1_000, 100),
        (&[], &[50, 30], 0, 0),
    ];
    for &(before, after, payable, pays) in cases {
        let (_folder, ledger) = ledger();
        let payable = usage(payable, 40);
        for (index, &ns) in before.iter().enumerate() {
            post(&ledger, block(index as u64 + 1, vec![share("acme", 1, ns)], vec![]))
                .expect("posts");
        }
        assert_eq!(post_cap(&ledger, cap("acme", 1, payable)).expect("posts"), Posted::New);
        assert_eq!(post_cap(&ledger, cap("acme", 1, payable)).expect("posts"), Posted::Already);
        let other = cap("acme", 1, usage(payable.attributed.nanos() + 1, 40));
        assert!(matches!(post_cap(&ledger, other), Err(LedgerError::AlreadySettled)));
        for (index, &ns) in after.iter().enumerate() {
            let number = (before.len() + index) as u64 + 1;
            let ends = if index + 1 == after.len() {
                vec![finished("acme", 1, usage(before.iter().chain(after).sum(), 90))]
            } else {
                vec![]
            };
            post(&ledger, block(number, vec![share("acme", 1, ns)], ends)).expect("posts");
        }
        let balance = ledger.reader().balance(EPOCH).expect("reads");
        let total: u64 = before.iter().chain(after).sum();
        let blocks = (before.len() + after.len()) as i64;
        assert_eq!(balance.tenants_ns, pays as i64, "{before:?} {after:?} {payable:?}");
        assert_eq!(balance.loss_ns, (total - pays) as i64 + 5 * blocks);
        assert!(balance.is_exact());
        assert_eq!(ledger.reader().check(), vec![]);
        let row = ledger
            .reader()
            .request(&TenantId::new("acme").expect("a name"), &RequestId::from_random(1))
            .expect("reads")
            .expect("it is known");
        assert_eq!(row.usage.attributed, DeviceNanos(pays));
        assert_eq!(row.usage.reference, DeviceNanos(40));
        assert_eq!(row.reason, Some(FinishReason::Fault));
    }
}

#[test]
fn a_cap_after_the_record_lowers_the_charge() {
    let (_folder, ledger) = ledger();
    let done = finished("acme", 1, usage(100, 90));
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![done])).expect("posts");
    post_cap(&ledger, cap("acme", 1, Usage::default())).expect("posts");
    let rows = ledger.reader().usage(&UsageQuery::default()).expect("reads");
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].requests, rows[0].attributed_ns, rows[0].reference_ns), (0, 0, 0));
    assert_eq!((rows[0].prompt_tokens, rows[0].completion_tokens), (0, 0));
    assert_eq!(ledger.reader().check(), vec![]);
}

#[test]
fn statements_group_and_filter() {
    let (_folder, ledger) = ledger();
    let next_day = UtcTime(NOON.0 + 86_400_000_000_000);
    let mut tomorrow = parts(2, vec![share("acme", 3, 7)], vec![]);
    tomorrow.started = next_day;
    let mut late = finished("acme", 3, usage(7, 6));
    late.finished = next_day;
    tomorrow.finished = vec![late];
    let today = block(
        1,
        vec![share("acme", 1, 100), share("beta", 2, 50)],
        vec![finished("acme", 1, usage(100, 90)), finished("beta", 2, usage(50, 45))],
    );
    post(&ledger, today).expect("posts");
    post(&ledger, Block::try_from(tomorrow).expect("it balances")).expect("posts");
    let day = NOON.day();
    let acme = TenantId::new("acme").expect("a name");
    let sums = |query: UsageQuery| -> Vec<(u64, u64, u64)> {
        let rows = ledger.reader().usage(&query).expect("reads");
        rows.iter().map(|row| (row.requests, row.attributed_ns, row.reference_ns)).collect()
    };
    let by = |group: &[GroupBy]| UsageQuery { group: group.to_vec(), ..UsageQuery::default() };
    for (query, expected) in [
        (by(&[]), vec![(3, 157, 141)]),
        (by(&[GroupBy::Tenant]), vec![(2, 107, 96), (1, 50, 45)]),
        (by(&[GroupBy::Day]), vec![(2, 150, 135), (1, 7, 6)]),
        (
            by(&[GroupBy::Tenant, GroupBy::Key, GroupBy::Model, GroupBy::Day]),
            vec![(1, 100, 90), (1, 50, 45), (1, 7, 6)],
        ),
        (UsageQuery { tenant: Some(acme.clone()), ..by(&[]) }, vec![(2, 107, 96)]),
        (UsageQuery { to: Some(day), ..by(&[]) }, vec![(2, 150, 135)]),
        (UsageQuery { from: Some(UtcDay(day.0 + 1)), ..by(&[]) }, vec![(1, 7, 6)]),
        (UsageQuery { class: DeviceClass::new("h200").ok(), ..by(&[]) }, vec![]),
        (UsageQuery { key: KeyId::new("k2").ok(), ..by(&[]) }, vec![]),
    ] {
        assert_eq!(sums(query.clone()), expected, "{query:?}");
    }
    let rows = ledger.reader().usage(&by(&[GroupBy::Tenant, GroupBy::Day])).expect("reads");
    assert_eq!(
        serde_json::to_string(&rows[0]).expect("serialises"),
        r#"{"tenant":"acme","day":"2026-11-20","device_class":"cpu","requests":1,"prompt_tokens":10,"cached_tokens":2,"completion_tokens":5,"attributed_ns":100,"reference_ns":90,"gpu_ns":0,"energy_mj":null}"#
    );
    let spending = ledger.reader().spending(next_day.day()).expect("reads");
    let refs = |rows: &[tollgate_ledger::SpendRow]| -> Vec<(String, u64)> {
        rows.iter().map(|row| (row.caller.tenant.to_string(), row.reference.nanos())).collect()
    };
    assert_eq!(refs(&spending.day), [("acme".to_owned(), 6)]);
    assert_eq!(refs(&spending.month), [("acme".to_owned(), 96), ("beta".to_owned(), 45)]);
}

#[test]
fn a_request_is_its_tenants_alone_and_traceable() {
    let (_folder, ledger) = ledger();
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    let (acme, beta) =
        (TenantId::new("acme").expect("a name"), TenantId::new("beta").expect("a name"));
    let id = RequestId::from_random(1);
    let running = ledger.reader().request(&acme, &id).expect("reads").expect("it is known");
    assert_eq!(running.state, RequestState::Running);
    assert_eq!(running.usage.attributed, DeviceNanos(100));
    let end = finished("acme", 1, usage(130, 90));
    post(&ledger, block(2, vec![share("acme", 1, 30)], vec![end])).expect("posts");
    let posted = ledger.reader().request(&acme, &id).expect("reads").expect("it is known");
    assert_eq!(posted.state, RequestState::Posted);
    assert_eq!(posted.usage, usage(130, 90));
    assert_eq!(posted.caller, Caller { ..caller("acme") });
    let ids: Vec<&str> = posted.entries.iter().map(|entry| entry.id.as_str()).collect();
    assert_eq!(ids, [format!("{EPOCH}/10-19/1"), format!("{EPOCH}/20-29/1")]);
    assert_eq!(ledger.reader().request(&beta, &id).expect("reads"), None);
    let unknown = RequestId::from_random(9);
    assert_eq!(ledger.reader().request(&acme, &unknown).expect("reads"), None);
}

#[test]
fn attempts_that_died_with_their_worker_are_found() {
    let (_folder, ledger) = ledger();
    let mut last = parts(
        1,
        vec![share("acme", 1, 100), share("acme", 2, 50)],
        vec![finished("acme", 2, usage(50, 40))],
    );
    last.last_of_epoch = true;
    post(&ledger, Block::try_from(last).expect("it balances")).expect("posts");
    let open = ledger.reader().open_attempts(EPOCH).expect("reads");
    assert_eq!(open.len(), 1);
    assert_eq!(open[0].attempt, attempt(1, 0));
    post_cap(&ledger, cap("acme", 1, Usage::default())).expect("posts");
    assert_eq!(ledger.reader().open_attempts(EPOCH).expect("reads"), vec![]);
    assert_eq!(ledger.reader().balance(EPOCH).expect("reads").loss_ns, 105);
}

#[test]
fn a_restart_changes_nothing_and_other_files_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let first = Ledger::open(&path).expect("opens");
    post(&first, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    drop(first);
    let again = Ledger::open(&path).expect("opens");
    assert_eq!(
        post(&again, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts"),
        Posted::Already
    );
    post(&again, block(2, vec![share("acme", 1, 11)], vec![])).expect("posts");
    assert_eq!(again.reader().balance(EPOCH).expect("reads").tenants_ns, 111);

    let other = folder.path().join("other.db");
    rusqlite::Connection::open(&other)
        .and_then(|it| it.execute_batch("CREATE TABLE things (x)"))
        .expect("makes another database");
    assert!(matches!(Ledger::open(&other), Err(LedgerError::Format { .. })));
    let garbage = folder.path().join("garbage.db");
    std::fs::write(&garbage, vec![7; 8_192]).expect("writes");
    assert!(matches!(Ledger::open(&garbage), Err(LedgerError::Open { .. })));
    let missing = folder.path().join("missing.db");
    assert!(matches!(Ledger::open_read_only(&missing), Err(LedgerError::Open { .. })));
}

/// Each figure is as large as a block may say, and their sum fits no column:
/// that block is refused, the disk is well and the others are posted.
#[test]
fn a_sum_that_does_not_fit_refuses_its_block_alone() {
    let (_folder, ledger) = ledger();
    let most = LONGEST_ATTEMPT.nanos();
    let enough = u128::from(i64::MAX as u64 / most) + 1;
    let absurd = (0..enough).map(|request| finished("acme", request, usage(1, most))).collect();
    let result = post(&ledger, block(1, vec![], absurd));
    assert!(matches!(refusal(result), Some(BlockRefusal::Unfit { .. })));
    assert_eq!(ledger.health(), Health::Healthy);
    assert_eq!(skip(&ledger, 1).expect("passes"), Posted::New);

    // Of one group, only the one that does not fit is refused.
    let nearly = (0..enough - 1).map(|request| finished("acme", request, usage(1, most)));
    let beyond = finished("acme", enough, usage(1, most));
    let blocks = [block(2, vec![], nearly.collect()), block(3, vec![], vec![beyond])];
    let [first, last] = blocks.map(|block| ledger.submit(block)).map(block_on);
    assert_eq!(first.expect("posts"), Posted::New);
    assert!(matches!(refusal(last), Some(BlockRefusal::Unfit { .. })));
    assert_eq!(ledger.health(), Health::Healthy);
    let faulted = post_cap(&ledger, cap("acme", enough + 1, usage(0, i64::MAX as u64)));
    assert!(matches!(faulted, Err(LedgerError::Damaged(_))));
    assert_eq!(ledger.health(), Health::Healthy);
}

/// C05: no acknowledgement without the disk; nothing is lost once it has room.
#[test]
fn a_full_disk_refuses_and_recovers() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let options = LedgerOptions {
        max_pages: Some(48),
        retry: Duration::from_millis(5),
        ..LedgerOptions::new(&path)
    };
    let ledger = Ledger::open_with(options.clone()).expect("opens");
    let fat = |number: u64| {
        let shares = (0..40).map(|n| share("acme", u128::from(number) * 100 + n, 1)).collect();
        block(number, shares, vec![])
    };
    let mut posted = 0;
    let error = loop {
        match post(&ledger, fat(posted + 1)) {
            Ok(_) => posted += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LedgerError::Storage(_)), "{error}");
    assert!(matches!(ledger.health(), Health::Degraded { .. }));
    let balance = ledger.reader().balance(EPOCH).expect("reads");
    assert_eq!(balance.tenants_ns, posted as i64 * 40, "nothing of the failed block");
    assert_eq!(ledger.reader().check(), vec![]);
    drop(ledger);
    // Room again: the same block goes in, once.
    let options = LedgerOptions { max_pages: Some(4_096), ..options };
    let ledger = Ledger::open_with(options).expect("opens");
    assert_eq!(post(&ledger, fat(posted + 1)).expect("posts"), Posted::New);
    assert_eq!(ledger.health(), Health::Healthy);
    assert_eq!(ledger.reader().balance(EPOCH).expect("reads").tenants_ns, (posted as i64 + 1) * 40);
}

/// After a gateway was killed: whoever only reads does not know what of the log
/// is on the disk, and leaves it as it is; who writes takes it over.
#[test]
fn who_only_reads_leaves_the_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, copy) = (folder.path().join("ledger.db"), folder.path().join("killed.db"));
    let log = folder.path().join("killed.db-wal");
    let ledger = Ledger::open(&path).expect("opens");
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    std::fs::copy(&path, &copy).expect("copies");
    std::fs::copy(folder.path().join("ledger.db-wal"), &log).expect("copies");
    let left = std::fs::read(&log).expect("reads");
    let reader = Ledger::open_read_only(&copy).expect("opens");
    assert_eq!(reader.last_block(EPOCH).expect("reads"), 1);
    assert_eq!(reader.check(), vec![]);
    drop(reader);
    Ledger::check_start(&copy).expect("sound");
    assert_eq!(std::fs::read(&log).expect("reads"), left);
    let writer = Ledger::open(&copy).expect("opens");
    assert_eq!(std::fs::read(&log).expect("reads")[..left.len()], left, "the same once more");
    assert_eq!(post(&writer, block(2, vec![], vec![])).expect("posts"), Posted::New);
    assert_eq!(writer.reader().check(), vec![]);
}

/// As at a stop: whoever then takes the file and leaves its log has all of it.
#[test]
fn signed_for_a_stop_the_file_alone_is_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, copy) = (folder.path().join("ledger.db"), folder.path().join("alone.db"));
    let ledger = Ledger::open(&path).expect("opens");
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    sign(&ledger);
    std::fs::copy(&path, &copy).expect("copies");
    let reader = Ledger::open_read_only(&copy).expect("opens");
    assert_eq!(reader.last_block(EPOCH).expect("reads"), 1);
    assert_eq!(reader.check(), vec![]);
}

#[test]
fn an_unwell_ledger_gets_well_by_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let options = LedgerOptions { retry: Duration::from_millis(5), ..LedgerOptions::new(&path) };
    let ledger = Ledger::open_with(options).expect("opens");
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    // Somebody else holds the write lock for longer than the writer waits.
    let blocker = rusqlite::Connection::open(&path).expect("opens");
    blocker.execute_batch("BEGIN IMMEDIATE").expect("locks");
    let error = post(&ledger, block(2, vec![], vec![])).expect_err("it is locked");
    assert!(matches!(error, LedgerError::Storage(_)), "{error}");
    assert!(matches!(ledger.health(), Health::Degraded { .. }));
    blocker.execute_batch("ROLLBACK").expect("unlocks");
    drop(blocker);
    while ledger.health() != Health::Healthy {
        std::thread::yield_now();
    }
    assert_eq!(post(&ledger, block(2, vec![], vec![])).expect("posts"), Posted::New);
}

/// C04: a flipped bit in any row of what was posted is found.
#[test]
fn tampering_is_found() {
    for change in [
        "UPDATE entries SET amount_ns = amount_ns + 1 WHERE ordinal = 4",
        "UPDATE entries SET amount_ns = amount_ns + CASE ordinal WHEN 4 THEN 1 ELSE -1 END WHERE ordinal >= 4",
        "UPDATE entries SET caller_id = 2 WHERE ordinal = 4",
        "UPDATE entries SET request_id = 'req-x' WHERE ordinal = 4",
        "DELETE FROM entries WHERE ordinal = 4",
        "UPDATE attempts SET completion_tokens = 1",
        "DELETE FROM attempts",
        "UPDATE requests SET reference_ns = 1",
        "UPDATE daily SET attributed_ns = 1",
        "UPDATE blocks SET calibration = 'v2'",
        "UPDATE blocks SET day = day + 1",
        "PRAGMA foreign_keys = OFF; DELETE FROM blocks WHERE block = 2",
        "UPDATE epochs SET last_block = 9",
        "UPDATE epochs SET worker = '1'",
    ] {
        let (folder, ledger) = ledger();
        let shares = vec![share("acme", 1, 100), share("beta", 2, 50)];
        let ends = vec![finished("acme", 1, usage(100, 90))];
        post(&ledger, block(1, shares, ends)).expect("posts");
        post(&ledger, block(2, vec![share("beta", 2, 50)], vec![])).expect("posts");
        assert_eq!(ledger.reader().check(), vec![]);
        rusqlite::Connection::open(folder.path().join("ledger.db"))
            .and_then(|it| it.execute_batch(change))
            .expect(change);
        assert_ne!(ledger.reader().check(), vec![], "{change}");
    }
}

/// `tollgate usage` beside a running `up`: another process reads while this
/// one writes, and sees whole commits only.
#[test]
fn another_process_reads_beside_the_writer() {
    let (folder, ledger) = ledger();
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    let mut child = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "reads_until_the_tenth_block", "--ignored"])
        .current_dir(folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("starts");
    for number in 2..=10 {
        post(&ledger, block(number, vec![share("acme", 1, 100)], vec![])).expect("posts");
    }
    assert!(child.wait().expect("ends").success());
    assert_eq!(ledger.reader().check(), vec![]);
}

#[test]
#[ignore = "the other process of another_process_reads_beside_the_writer"]
fn reads_until_the_tenth_block() {
    let reader = Ledger::open_read_only(std::path::Path::new("ledger.db")).expect("opens");
    while reader.last_block(EPOCH).expect("reads") < 10 {
        assert!(reader.balance(EPOCH).expect("reads").is_exact());
        std::thread::yield_now();
    }
}
