//! Archives: usage, caps and balances stay as they were, archive and remaining
//! records form one log, and archived blocks are never posted again.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use tollgate_auditor::{Folder, LogError, Sound, verify};
use tollgate_domain::{
    Amount, Block, ByClass, DeviceNanos, FinishReason, Millijoules, PlanName, PriceBook, PriceList,
    PriceListName, RequestId, TenantId, Tier, Usage, UtcDay, UtcMonth, UtcTime,
};
use tollgate_ledger::{
    AdminAction, ArchiveError, AuditKey, BlockRefusal, ExportError, FaultCap, GroupBy, Ledger,
    LedgerError, LedgerHandle, LedgerOptions, LedgerReader, PlansInForce, Posted, PricedAs, Range,
    Spending, Statement, StatementError, StatementQuery, UsageQuery, UsageRow,
};

const DAY: u64 = 24 * 3_600 * 1_000_000_000;
/// The first of November, midnight.
const NOVEMBER: u64 = NOON.0 - DAY / 2 - 19 * DAY;

fn key() -> Arc<AuditKey> {
    Arc::new(AuditKey::from_seed("tollgate/test", &[1; 32]).expect("a good name"))
}

fn open(path: &Path) -> LedgerHandle {
    let options = LedgerOptions {
        key: Some(key()),
        checkpoint_records: 7,
        checkpoint_every: Duration::from_secs(3_600),
        group: 1,
        ..LedgerOptions::new(path)
    };
    Ledger::open_with(options).expect("opens")
}

/// Returns the start of block `number`: a block every quarter of a day, block 101 at
/// midnight.
fn begins(number: u64) -> UtcTime {
    UtcTime(NOVEMBER - 25 * DAY + (number - 1) * DAY / 4)
}

/// Returns the tier of a request: every third one is of the batch tier.
fn tier_of(request: u128) -> Tier {
    if request.is_multiple_of(3) { Tier::Batch } else { Tier::Interactive }
}

/// Returns a block with two attempts: one ends in the next block, one in this block.
/// Every seventh attempt ends by our fault.
fn numbered(number: u64) -> Block {
    let (own, before) = (u128::from(number), u128::from(number) + 9_999);
    let mut shares =
        vec![share("acme", own, number), share("beta", before, 20), share("beta", before + 1, 30)];
    for (share, request) in shares.iter_mut().zip([own, before, before + 1]) {
        share.tier = tier_of(request);
    }
    let mut ends = vec![
        finished("acme", own, usage(number, number * 2)),
        finished("beta", before, usage(if number == 1 { 20 } else { 50 }, 40)),
    ];
    for (end, request) in ends.iter_mut().zip([own, before]) {
        end.tier = tier_of(request);
        end.finished = UtcTime(begins(number).0 + 5);
        if number.is_multiple_of(7) {
            end.reason = FinishReason::Fault;
        }
    }
    let mut parts = parts(number, shares, ends);
    parts.started = begins(number);
    // Some blocks have no energy.
    parts.energy = (!number.is_multiple_of(5)).then_some(Millijoules(number * 1_001));
    Block::try_from(parts).expect("it balances")
}

fn fill(ledger: &LedgerHandle, first: u64, last: u64) {
    let loaded = AdminAction {
        id: format!("config-{first}"),
        at: begins(first),
        operation: "config.loaded".to_owned(),
        actor: "uid 0".to_owned(),
        user: None,
        detail: serde_json::json!({ "audit_key": key().verifier() }),
    };
    record_action(ledger, loaded).expect("records");
    tell_plan(ledger, begins(first), if first == 1 { "team" } else { "gold" });
    for number in first..=last {
        post(ledger, numbered(number)).expect("posts");
        if number.is_multiple_of(7) {
            let at = begins(number);
            let payable = usage(3, 3);
            post_cap(
                ledger,
                FaultCap {
                    at,
                    tier: tier_of(number.into()),
                    ..cap("acme", number.into(), payable)
                },
            )
            .expect("posts");
        }
    }
}

/// Signs the log and closes the ledger.
fn end(ledger: LedgerHandle) {
    sign(&ledger);
}

fn action() -> AdminAction {
    AdminAction {
        id: format!("archive-{}", NOON.0),
        at: NOON,
        operation: "ledger.archived".to_owned(),
        actor: "uid 0".to_owned(),
        user: None,
        detail: serde_json::json!({ "before": "2026-11" }),
    }
}

fn november() -> UtcMonth {
    UtcDay((NOVEMBER / DAY) as u32).month()
}

fn usage_of(reader: &LedgerReader) -> (Vec<UsageRow>, Spending) {
    let by = vec![GroupBy::Tenant, GroupBy::Key, GroupBy::Model, GroupBy::Day];
    let query = UsageQuery { group: by, ..UsageQuery::default() };
    let spending = reader.spending(UtcDay((NOVEMBER / DAY) as u32 + 3)).expect("reads");
    (reader.usage(&query).expect("reads"), spending)
}

fn prices() -> PriceBook {
    let price = |text: &str| text.parse().expect("a price");
    PriceBook {
        currency: "EUR".parse().expect("one"),
        lists: vec![PriceList {
            name: PriceListName::new("list").expect("a name"),
            plan: None,
            model: None,
            from: "2026-01-01".parse().expect("a day"),
            device_second: ByClass::all(price("25000")),
            million_prompt_tokens: price("0.15"),
            million_completion_tokens: price("0.6"),
            batch: "0.5".parse().expect("a factor"),
        }],
    }
}

fn stated(reader: &LedgerReader, tenant: &str, month: &str) -> Statement {
    with_query(tenant, month, |query| reader.statement(query).expect("states"))
}

/// Counts the records behind a month.
fn listed(reader: &LedgerReader, tenant: &str, month: &str) -> Result<u32, StatementError> {
    let mut count = 0;
    with_query(tenant, month, |query| reader.statement_records(query, &mut |_, _| count += 1))?;
    Ok(count)
}

fn with_query<T>(tenant: &str, month: &str, ask: impl FnOnce(StatementQuery<'_>) -> T) -> T {
    let tenant = TenantId::new(tenant).expect("a name");
    let (plan, prices) = (PlanName::new("team").expect("a name"), prices());
    let (month, priced_as) = (month.parse().expect("a month"), PricedAs::Plan(&plan));
    ask(StatementQuery { tenant: &tenant, month, priced_as, prices: &prices, now: NOON })
}

struct Export {
    records: Vec<u8>,
    checkpoints: Vec<u8>,
    start: String,
}

fn export(reader: &LedgerReader, range: Range) -> Result<Export, ExportError> {
    let (mut records, mut checkpoints) = (Vec::new(), Vec::new());
    let exported = reader.export(range, &mut records, &mut checkpoints)?;
    let start = serde_json::to_string(&exported.start).expect("serialises");
    Ok(Export { records, checkpoints, start })
}

fn judge(exports: &[&Export]) -> Result<Sound, LogError> {
    let folder = tempfile::tempdir().expect("a folder");
    let folders = exports.iter().enumerate().map(|(index, export)| {
        let at = folder.path().join(index.to_string());
        std::fs::create_dir(&at).expect("makes");
        std::fs::write(at.join("records.jsonl"), &export.records).expect("writes");
        std::fs::write(at.join("checkpoints.jsonl"), &export.checkpoints).expect("writes");
        std::fs::write(at.join("start.json"), &export.start).expect("writes");
        Folder::open(&at)
    });
    verify(folders, &[key().verifier().parse().expect("a key")], &[])
}

/// Makes a ledger of 120 blocks, the last fifth in November, and a copy of it.
fn archived() -> (tempfile::TempDir, Export, u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = open(&path);
    fill(&ledger, 1, 120);
    end(ledger.clone());
    assert_eq!(ledger.reader().check(), vec![]);
    let found = ledger.reader().archivable(november(), NOON).expect("there is something");
    let range = Range { from: found.from, to: Some(found.to - 1) };
    let archive = export(ledger.reader(), range).expect("exports");
    close(ledger, &path);
    Ledger::backup(&path, &folder.path().join("archive.db")).expect("copies");
    Ledger::compact(&path, found.to, action()).expect("archives");
    (folder, archive, found.to)
}

#[test]
fn archive_changes_no_sum_and_no_log() {
    let (folder, archive, size) = archived();
    let (path, copy) = (folder.path().join("ledger.db"), folder.path().join("archive.db"));
    let before = Ledger::open_read_only(&copy).expect("opens");
    let ledger = open(&path);
    let reader = ledger.reader();
    assert_eq!(reader.check(), vec![]);
    assert_eq!(usage_of(reader), usage_of(&before));
    assert_eq!(reader.balance(EPOCH).expect("reads"), before.balance(EPOCH).expect("reads"));
    let (drew, here) = (before.energy(EPOCH), reader.energy(EPOCH).expect("reads"));
    assert_eq!(here, drew.expect("reads"));
    assert!(here.is_some_and(|energy| energy.is_exact() && energy.loss_mj > 0), "{here:?}");
    assert_eq!(reader.first_record().expect("reads"), size);
    let bytes = |path: &Path| std::fs::metadata(path).expect("is there").len();
    assert!(bytes(&path) < bytes(&copy) * 2 / 3, "{} of {}", bytes(&path), bytes(&copy));

    for tenant in ["acme", "beta"] {
        for month in ["2026-10", "2026-11"] {
            let (here, there) = (stated(reader, tenant, month), stated(&before, tenant, month));
            assert!(!here.lines.is_empty() && here.total.amount > Amount(0), "{here:?}");
            assert_eq!(here, there, "{tenant} in {month}: to the digit and the digest");
        }
    }
    let asked = listed(reader, "acme", "2026-10");
    assert!(matches!(asked, Err(StatementError::Archived { .. })), "{asked:?}");
    assert!(listed(&before, "acme", "2026-10").expect("the archive has them") > 90);

    // Only October left: the request at midnight is here, with all its time.
    let acme = TenantId::new("acme").expect("a name");
    let beta = TenantId::new("beta").expect("a name");
    for request in [101_u128, 120] {
        let id = RequestId::from_random(request);
        let (here, there) = (reader.request(&acme, &id), before.request(&acme, &id));
        assert_eq!(here.expect("reads"), there.expect("reads"), "{request}");
    }
    for block in 95_u128..=120 {
        let id = RequestId::from_random(block + 9_999);
        let there = before.request(&beta, &id).expect("reads").expect("it is there");
        if let Some(here) = reader.request(&beta, &id).expect("reads") {
            assert_eq!(here.usage, there.usage, "block {block}");
        }
    }
    let old = RequestId::from_random(3);
    assert_eq!(reader.request(&acme, &old).expect("reads"), None);
    assert!(before.request(&acme, &old).expect("reads").is_some(), "the archive has it");
    before.prove(&old).expect("and proves it");

    // Archive and database form one log, and the ledger continues.
    fill(&ledger, 121, 140);
    end(ledger.clone());
    assert_eq!(ledger.reader().check(), vec![]);
    let refused = export(ledger.reader(), Range::default());
    assert!(matches!(refused, Err(ExportError::Archived { first }) if first == size));
    let rest = export(ledger.reader(), Range { from: size, to: None }).expect("exports");
    let sound = judge(&[&archive, &rest]).expect("one log");
    assert_eq!(sound.first, 0);
    judge(&[&rest]).expect("the rest alone");
    ledger.reader().prove(&RequestId::from_random(115)).expect("proves what is here");
    for (at, bit) in [(archive.records.len() / 3, 1), (archive.records.len() - 40, 4)] {
        let mut records = archive.records.clone();
        records[at] ^= bit;
        let Export { checkpoints, start, .. } = &archive;
        let (checkpoints, start) = (checkpoints.clone(), start.clone());
        let changed = Export { records, checkpoints, start };
        judge(&[&changed, &rest]).expect_err("a changed archive is found");
    }
}

/// Plans that need more than one record: each record keeps its bound.
#[test]
fn plans_of_thousands_are_recorded_and_archived() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = open(&path);
    fill(&ledger, 1, 120);
    let tell = |ledger: &LedgerHandle, number: u64, plan_of: &dyn Fn(usize) -> &'static str| {
        let plan = |it: usize| PlanName::new(plan_of(it)).expect("a plan");
        let tenant = |it: usize| TenantId::new(&format!("tenant-{it:05}")).expect("a name");
        let action = AdminAction {
            id: format!("start-{number}"),
            at: begins(number),
            operation: "plans.in_force".to_owned(),
            ..action()
        };
        let plans = (0..5_000).map(|it| (tenant(it), plan(it))).collect();
        post_plans(ledger, PlansInForce { action, plans }).expect("posts")
    };
    let gold_for_few = |it: usize| if it.is_multiple_of(9) { "gold" } else { "team" };
    assert_eq!(tell(&ledger, 90, &|_| "team"), Posted::New);
    assert_eq!(tell(&ledger, 110, &gold_for_few), Posted::New);
    assert_eq!(tell(&ledger, 111, &gold_for_few), Posted::Already);
    // One tenant with a new plan each day, more days than one record holds.
    let long = "a-plan-with-a-name-as-long-as-names-may-be-".repeat(3);
    for day in 0..200 {
        let at = UtcTime(begins(111).0 + day * DAY);
        let plan = PlanName::new(&long[..100 + usize::from(day % 2 == 0)]).expect("a plan");
        let plans = vec![(TenantId::new("fickle").expect("a name"), plan)];
        let (id, operation) = (format!("day-{day}"), "plans.in_force".to_owned());
        let action = AdminAction { id, at, operation, ..action() };
        post_plans(&ledger, PlansInForce { action, plans }).expect("posts");
    }
    end(ledger.clone());
    assert_eq!(ledger.reader().check(), vec![]);
    let found = ledger.reader().archivable(november(), NOON).expect("there is something");
    close(ledger, &path);
    Ledger::compact(&path, found.to, action()).expect("archives");

    let ledger = open(&path);
    assert_eq!(ledger.reader().check(), vec![]);
    assert_eq!(tell(&ledger, 112, &gold_for_few), Posted::Already);
    assert_eq!(tell(&ledger, 113, &|_| "team"), Posted::New);
    end(ledger.clone());
    assert_eq!(ledger.reader().check(), vec![]);
    let rest = export(ledger.reader(), Range { from: found.to, to: None }).expect("exports");
    judge(&[&rest]).expect("a log");
    let longest = rest.records.split(|byte| *byte == b'\n').map(<[u8]>::len).max();
    assert!(longest < Some(20_000), "{longest:?}");
    drop(ledger);
    let changed = rusqlite::Connection::open(&path).expect("opens");
    let rename = "UPDATE tenant_plans SET plan = 'trial' WHERE tenant = 'tenant-04999'";
    assert!(changed.execute(rename, []).expect("changes") > 0);
    drop(changed);
    let found = Ledger::check_file(&path).expect("opens");
    assert!(!found.is_sound(), "a plan in the last of its records was changed");
}

#[test]
fn archived_blocks_are_never_posted_again() {
    let (folder, _, _) = archived();
    let ledger = open(&folder.path().join("ledger.db"));
    let before = usage_of(ledger.reader());
    // An archived block, another block of that number, and a block that is here.
    let mut other = numbered(5).parts().clone();
    other.overhead += DeviceNanos(1);
    other.wall += DeviceNanos(1);
    for block in [numbered(5), Block::try_from(other).expect("it balances")] {
        let refused = post(&ledger, block);
        let expected = BlockRefusal::Archived;
        assert!(
            matches!(refused, Err(LedgerError::Refused { refusal, .. }) if refusal == expected)
        );
    }
    assert_eq!(post(&ledger, numbered(110)).expect("is known"), Posted::Already);
    // An archived attempt cannot end again, in no block; its cap is zero.
    let mut replayed = parts(121, vec![], vec![finished("acme", 5, usage(5, 10))]);
    replayed.started = begins(121);
    let refused = post(&ledger, Block::try_from(replayed).expect("it balances"));
    assert!(matches!(
        refused,
        Err(LedgerError::Refused { refusal: BlockRefusal::Replayed { .. }, .. })
    ));
    let refused = post_cap(&ledger, cap("acme", 5, usage(1, 1)));
    assert!(matches!(refused, Err(LedgerError::AlreadySettled)));
    assert_eq!(
        post_cap(&ledger, cap("acme", 5, Usage::default())).expect("no-op"),
        Posted::Already
    );
    assert_eq!(usage_of(ledger.reader()), before);
    // Device time that still arrives for the attempt is loss.
    let mut late = parts(121, vec![share("acme", 5, 100)], vec![]);
    late.started = begins(121);
    post(&ledger, Block::try_from(late).expect("it balances")).expect("posts");
    let balance = ledger.reader().balance(EPOCH).expect("reads");
    assert!(balance.is_exact());
    let paid = |rows: &[UsageRow]| rows.iter().map(|row| row.attributed_ns).sum::<u64>();
    assert_eq!(paid(&usage_of(ledger.reader()).0), paid(&before.0));
    assert_eq!(ledger.reader().check(), vec![]);
}

#[test]
fn archives_follow_one_another_and_are_guarded() {
    let (folder, first, size) = archived();
    let path = folder.path().join("ledger.db");
    let ledger = open(&path);
    fill(&ledger, 121, 300);
    end(ledger.clone());
    let december = UtcDay((NOVEMBER / DAY) as u32 + 30).month();
    let early = ledger.reader().archivable(december, NOON);
    assert!(matches!(early, Err(ArchiveError::Unsettled { .. })), "{early:?}");
    let again = ledger.reader().archivable(november(), NOON);
    assert!(matches!(again, Err(ArchiveError::Nothing)), "{again:?}");
    let later = UtcTime(NOVEMBER + 40 * DAY);
    let found = ledger.reader().archivable(december, later).expect("there is something");
    assert_eq!(found.from, size);
    let range = Range { from: found.from, to: Some(found.to - 1) };
    let second = export(ledger.reader(), range).expect("exports");
    let usage = usage_of(ledger.reader());
    close(ledger, &path);
    let again = AdminAction { id: "archive-2".to_owned(), ..action() };
    Ledger::compact(&path, found.to, again).expect("archives");
    let ledger = open(&path);
    assert_eq!(ledger.reader().check(), vec![]);
    assert_eq!(usage_of(ledger.reader()), usage);
    end(ledger.clone());
    let rest = export(ledger.reader(), Range { from: found.to, to: None }).expect("exports");
    judge(&[&first, &second, &rest]).expect("one log");
    drop(ledger);
    // C04: the sums that stand for the archived records.
    for change in [
        "UPDATE archived_epochs SET idle_ns = idle_ns + 1, wall_ns = wall_ns + 1",
        "UPDATE archived_days SET reference_ns = reference_ns + 1; UPDATE daily SET reference_ns = reference_ns + 1",
        "DELETE FROM archived_attempts WHERE attempt = 0 AND caller_id = 1",
        "UPDATE archived_attempts SET ended = 0",
        "UPDATE archived_days SET tier = 2 WHERE tier = 1",
        "DELETE FROM archived_shares",
        "UPDATE archives SET last_hash = zeroblob(32)",
        "UPDATE record_nodes SET hash = zeroblob(32)",
        "DELETE FROM archives",
    ] {
        let copy = folder.path().join("copy.db");
        let _ = std::fs::remove_file(&copy);
        let source = rusqlite::Connection::open(&path).expect("opens");
        source.execute("VACUUM INTO ?1", [copy.to_str().expect("UTF-8")]).expect("copies");
        let changed = rusqlite::Connection::open(&copy).expect("opens");
        changed.execute_batch(change).expect(change);
        assert!(changed.total_changes() > 0, "{change} changed nothing");
        drop(changed);
        let found = Ledger::check_file(&copy).expect("opens");
        assert!(!found.is_sound(), "{change}");
    }
}
