//! The suite that every store of the ledger must pass: a file, and a database of a
//! PostgreSQL server. It posts, corrects and asks through the façade only. `Place` is the
//! one thing here that names a store.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;
#[path = "common/place.rs"]
#[macro_use]
mod place;

use common::*;
use futures_executor::block_on;
use tollgate_domain::block::LONGEST_ATTEMPT;
use tollgate_domain::{
    Block, Caller, DeviceClass, DeviceNanos, FinishReason, KeyId, Millijoules, RequestId, TenantId,
    Tier, Usage, UtcDay, UtcTime, WorkerName,
};
use tollgate_ledger::{
    Balance, BlockRefusal, EnergyBalance, GroupBy, Health, Ledger, LedgerError, LedgerHandle,
    LedgerOptions, PartiallyRejectedBlock, Posted, RequestState, UsageQuery,
};
use tollgate_sql::testing::TestServer;

use crate::place::Place;

impl Place {
    /// Opens the ledger. A second handle sees what the first one posted.
    fn open(&self) -> LedgerHandle {
        Ledger::open_with(LedgerOptions::at(self.of("ledger.db"))).expect("opens")
    }
}

for_every_store!(
    block_is_posted_once_and_balances,
    refused_block_leaves_no_trace,
    epoch_refuses_other_workers,
    energy_follows_its_time,
    rejected_part_is_loss_and_posted_once,
    cap_moves_undelivered_work_to_loss,
    cap_after_report_lowers_charge,
    usage_groups_and_filters,
    request_is_traceable_by_its_tenant_only,
    attempts_of_dead_workers_are_open,
    overflow_refuses_only_its_block,
);

fn refusal(result: Result<Posted, LedgerError>) -> Option<BlockRefusal> {
    match result {
        Err(LedgerError::Refused { refusal, .. }) => Some(refusal),
        _ => None,
    }
}

fn block_is_posted_once_and_balances(place: &Place) {
    let ledger = place.open();
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

fn refused_block_leaves_no_trace(place: &Place) {
    let ledger = place.open();
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

    // After a skip the next blocks can be posted, and the check reports the skip.
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

/// T56: a worker cannot post to the epoch of another worker.
fn epoch_refuses_other_workers(place: &Place) {
    let ledger = place.open();
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    assert_eq!(refusal(skip_as(&ledger, "1", 2)), Some(BlockRefusal::Identity));
    post(&ledger, block(2, vec![], vec![])).expect("its own worker's is posted");
    assert_eq!(ledger.reader().check(), vec![]);

    // Also if the epoch began with a skipped block.
    let place = place.another();
    let ledger = place.open();
    assert_eq!(skip_as(&ledger, "1", 1).expect("passes"), Posted::New);
    assert_eq!(refusal(post(&ledger, block(2, vec![], vec![]))), Some(BlockRefusal::Identity));
    let mut own = parts(2, vec![], vec![]);
    own.worker = WorkerName::new("1").expect("a name");
    let own = Block::try_from(own).expect("it balances");
    assert_eq!(post(&ledger, own).expect("posts"), Posted::New);
}

/// Time that moves to loss takes its energy along, to the last millijoule, whether the
/// cap comes before the block or after it.
fn energy_follows_its_time(place: &Place) {
    for cap_first in [false, true] {
        let place = place.another();
        let ledger = place.open();
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

/// T56: the rejected part is loss, and stays loss when the worker reports it again.
fn rejected_part_is_loss_and_posted_once(place: &Place) {
    let ledger = place.open();
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
    // Submitted again, in either form, before and after a restart.
    for ledger in [&ledger, &place.open()] {
        assert_eq!(post_partly(ledger, struck.clone()).expect("posts"), Posted::Already);
        assert_eq!(post(ledger, said.clone()).expect("posts"), Posted::Already);
        assert_eq!(refusal(post(ledger, believed.clone())), Some(BlockRefusal::Conflict));
        assert_eq!(ledger.reader().balance(EPOCH).expect("reads"), expected);
        let remarks = ledger.reader().check();
        let found = remarks.iter().map(|it| (it.is_remark(), it.message.clone()));
        let remark = format!("block 1 of {EPOCH} was posted in part: a lie");
        assert_eq!(found.collect::<Vec<_>>(), [(true, remark)]);
    }
    let beta = TenantId::new("beta").expect("a name");
    let id = RequestId::from_random(2);
    assert_eq!(ledger.reader().request(&beta, &id).expect("reads"), None);
    post(&ledger, block(2, vec![], vec![])).expect("the next one follows it");
}

fn cap_moves_undelivered_work_to_loss(place: &Place) {
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
        let place = place.another();
        let ledger = place.open();
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

fn cap_after_report_lowers_charge(place: &Place) {
    let ledger = place.open();
    let done = finished("acme", 1, usage(100, 90));
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![done])).expect("posts");
    post_cap(&ledger, cap("acme", 1, Usage::default())).expect("posts");
    let rows = ledger.reader().usage(&UsageQuery::default()).expect("reads");
    assert_eq!(rows, [], "what nobody pays for is no usage");
    assert_eq!(ledger.reader().check(), vec![]);
}

fn usage_groups_and_filters(place: &Place) {
    let ledger = place.open();
    let next_day = UtcTime(NOON.0 + 86_400_000_000_000);
    let mut tomorrow = parts(2, vec![share("acme", 3, 7)], vec![]);
    tomorrow.started = next_day;
    let mut late = finished("acme", 3, usage(7, 6));
    late.finished = next_day;
    late.tier = Tier::Batch;
    tomorrow.finished = vec![late];
    tomorrow.shares[0].tier = Tier::Batch;
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
        (by(&[GroupBy::Tier]), vec![(2, 150, 135), (1, 7, 6)]),
        (by(&[GroupBy::Tier, GroupBy::Tenant]), vec![(1, 100, 90), (1, 7, 6), (1, 50, 45)]),
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
    let rows = ledger.reader().usage(&by(&[GroupBy::Tier])).expect("reads");
    let tiers: Vec<_> = rows.iter().map(|row| row.tier).collect();
    assert_eq!(tiers, [Some(Tier::Interactive), Some(Tier::Batch)]);
    let json = serde_json::to_string(&rows[1]).expect("serialises");
    assert!(json.starts_with(r#"{"tier":"batch","device_class":"cpu","requests":1,"#), "{json}");
    let spending = ledger.reader().spending(next_day.day()).expect("reads");
    let refs = |rows: &[tollgate_ledger::SpendRow]| -> Vec<(String, u64)> {
        rows.iter().map(|row| (row.caller.tenant.to_string(), row.reference.nanos())).collect()
    };
    assert_eq!(refs(&spending.day), [("acme".to_owned(), 6)]);
    assert_eq!(refs(&spending.month), [("acme".to_owned(), 96), ("beta".to_owned(), 45)]);
}

fn request_is_traceable_by_its_tenant_only(place: &Place) {
    let ledger = place.open();
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

fn attempts_of_dead_workers_are_open(place: &Place) {
    let ledger = place.open();
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

/// Each figure is as large as a block may state, and their sum fits no column: that
/// block is refused, the ledger stays healthy and the others are posted.
fn overflow_refuses_only_its_block(place: &Place) {
    let ledger = place.open();
    let most = LONGEST_ATTEMPT.nanos();
    let enough = u128::from(i64::MAX as u64 / most) + 1;
    let absurd = (0..enough).map(|request| finished("acme", request, usage(1, most))).collect();
    let result = post(&ledger, block(1, vec![], absurd));
    assert!(matches!(refusal(result), Some(BlockRefusal::Unfit { .. })));
    assert_eq!(ledger.health(), Health::Healthy);
    assert_eq!(skip(&ledger, 1).expect("passes"), Posted::New);

    // Within one group only the block that does not fit is refused.
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
