//! Ledgers that older programs wrote.

use super::*;

/// Turns entries and days into those of the format without energy.
const WITHOUT_ENERGY: &str = "ALTER TABLE entries DROP COLUMN energy_mj; \
                              ALTER TABLE daily DROP COLUMN energy_mj";
const WITHOUT_ARCHIVES: &str = "DROP TABLE archived_days; DROP TABLE archived_epochs";
/// A ledger that a program of format 5 wrote: twelve blocks with energy, of which four are
/// archived, and two fault caps.
const FORMAT_5: &str = include_str!("../fixtures/ledger-5.sql");

/// Makes a ledger of format 5 with fifty blocks, for a test to make older.
fn filled(path: &Path) {
    let ledger = Ledger::open_with(options(path, 7)).expect("opens");
    fill(&ledger, 50);
    end(ledger);
    to_format_5(path);
}

/// Turns a ledger of the current format into one of format 5.
fn to_format_5(path: &Path) {
    let made = |table: &str| -> &str {
        let begin = format!("CREATE TABLE {table} (");
        let from = FORMAT_5.find(&begin).expect("the fixture has the table");
        let length = FORMAT_5[from..].find(";\n").expect("it ends");
        &FORMAT_5[from..from + length]
    };
    let without = |table: &str| {
        let columns = "day, caller_id, model, device_class, charges, entries, requests, \
                       prompt_tokens, cached_tokens, completion_tokens, attributed_ns, \
                       reference_ns, energy_mj";
        format!(
            "ALTER TABLE {table} RENAME TO newer; {};
             INSERT INTO {table} ({columns}) SELECT {columns} FROM newer; DROP TABLE newer;",
            made(table)
        )
    };
    change_in(
        path,
        &format!(
            "{} {} CREATE INDEX daily_by_caller ON daily (caller_id, day);
             ALTER TABLE entries DROP COLUMN tier; ALTER TABLE attempts DROP COLUMN tier;
             ALTER TABLE requests DROP COLUMN tier; ALTER TABLE fault_caps DROP COLUMN tier;
             UPDATE meta SET value = '5' WHERE name = 'format'",
            without("daily"),
            without("archived_days")
        ),
    );
}

/// Opens an old ledger: a reader refuses it, a writer migrates it.
fn migrated(path: &Path) -> LedgerHandle {
    let error = Ledger::open_read_only(path).err().expect("it is older").to_string();
    assert!(error.contains("format"), "{error}");
    Ledger::open_with(options(path, 7)).expect("migrates")
}

/// Format 1 has no audit log: after the migration the first record describes the old
/// rows, and new rows are recorded.
#[test]
fn format_1_is_migrated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    rusqlite::Connection::open(&path)
        .and_then(|it| it.execute_batch(include_str!("../fixtures/ledger-1.sql")))
        .expect("makes the old ledger");
    let error = Ledger::open_read_only(&path).err().expect("it is older").to_string();
    assert!(error.contains("format") && error.contains("tollgate up"), "{error}");
    let ledger = Ledger::open_with(options(&path, 1)).expect("migrates");
    let kinds = |reader: &LedgerReader| -> Vec<&str> {
        reader.check().into_iter().map(|it| it.kind).collect()
    };
    assert_eq!(kinds(ledger.reader()), ["refused"], "as it was before");
    assert_eq!(ledger.reader().balance(EPOCH).expect("reads").tenants_ns, 171);
    let end = finished("acme", 4, usage(22, 20));
    post(&ledger, block(5, vec![share("acme", 4, 11)], vec![end])).expect("posts");
    post_cap(&ledger, cap("beta", 2, usage(60, 40))).expect("it is there already");
    assert_eq!(kinds(ledger.reader()), ["refused"]);
    let (export, exported) = export(ledger.reader(), Range::default()).expect("exports");
    judge(&[&export], &[]).expect("sound");
    assert_eq!(exported.end, 3, "the first record, a block, an attempt");
    let first = String::from_utf8(export.records[0].clone()).expect("UTF-8");
    let expected = r#""before":{"attempts":2,"blocks":3,"blocks_sha256":""#;
    assert!(first.contains(expected) && first.contains(r#""fault_caps":2"#), "{first}");
    drop(ledger);
    let again = Ledger::open_with(options(&path, 1)).expect("opens as one of today");
    for change in [
        "DELETE FROM fault_caps WHERE record_seq IS NULL AND attributed_ns = 0",
        "UPDATE fault_caps SET reference_ns = 1 WHERE record_seq IS NULL",
        "UPDATE blocks SET record_seq = NULL",
    ] {
        let found = found_after(&path, change);
        assert!(found.iter().any(|it| it.kind == "audit"), "{change}: {found:?}");
    }
    drop(again);
}

/// Format 2 has no counts by day: the migration counts.
#[test]
fn format_2_is_migrated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    filled(&path);
    change_in(
        &path,
        &format!(
            "ALTER TABLE daily DROP COLUMN charges; ALTER TABLE daily DROP COLUMN entries;
             DROP TABLE tenant_plans; UPDATE meta SET value = '2' WHERE name = 'format';
             {WITHOUT_ENERGY}; {WITHOUT_ARCHIVES}"
        ),
    );
    let ledger = migrated(&path);
    let found = ledger.reader().check();
    assert_eq!(found.iter().filter(|it| it.kind != "refused").count(), 0, "{found:?}");
    change_in(&path, "UPDATE daily SET entries = entries - 1");
    assert!(ledger.reader().check().iter().any(|it| it.kind == "daily"), "they are counted");
}

/// Format 3 stored records whole: old records stay whole, new ones do not.
#[test]
fn format_3_is_migrated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 7)).expect("opens");
    fill(&ledger, 50);
    let before = export(ledger.reader(), Range::default()).expect("exports").0;
    end(ledger);
    to_format_5(&path);
    change_in(
        &path,
        &format!(
            "UPDATE records SET record = '{{\"seq\":' || seq || ',\"prev\":\"' || coalesce(
               (SELECT lower(hex(hash)) FROM records AS last WHERE last.seq = records.seq - 1),
               lower(hex(zeroblob(32)))) || '\",' || substr(record, 2);
             UPDATE meta SET value = '3' WHERE name = 'format';
             {WITHOUT_ENERGY}; {WITHOUT_ARCHIVES}"
        ),
    );
    let ledger = migrated(&path);
    for number in 0..20 {
        record(&ledger, &format!("later-{number}"), "key.revoked").expect("records");
    }
    let found = ledger.reader().check();
    assert_eq!(found.iter().filter(|it| it.kind != "refused").count(), 0, "{found:?}");
    let (after, _) = export(ledger.reader(), Range::default()).expect("exports");
    judge(&[&after], &[]).expect("sound");
    assert_eq!(after.records[..before.records.len()], before.records);
    assert!(after.records.len() > before.records.len());
    end(ledger);
    for change in [
        "UPDATE records SET record = replace(record, 'prev\":\"', 'prev\":\"f') WHERE seq = 6",
        "UPDATE records SET record = '{' || substr(record, instr(record, '\",') + 2) WHERE seq = 6;
         UPDATE records SET hash = zeroblob(32) WHERE seq = 5",
        "UPDATE records SET record = substr(record, 2) WHERE seq = (SELECT max(seq) FROM records)",
        "UPDATE records SET record = '' WHERE seq = (SELECT max(seq) FROM records)",
    ] {
        let found = found_after(&path, change);
        assert!(found.iter().any(|it| it.kind == "audit"), "{change}: {found:?}");
    }
}

/// Format 4 has no energy: a reader reads it as it is, because archives stay forever,
/// and a writer migrates it.
#[test]
#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
fn format_4_is_read_and_migrated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    filled(&path);
    change_in(
        &path,
        &format!(
            "{WITHOUT_ENERGY}; ALTER TABLE archived_days DROP COLUMN energy_mj;
         ALTER TABLE archived_epochs DROP COLUMN energy_mj;
         ALTER TABLE archived_epochs DROP COLUMN tenants_mj;
         ALTER TABLE archived_epochs DROP COLUMN overhead_mj;
         ALTER TABLE archived_epochs DROP COLUMN idle_mj;
         ALTER TABLE archived_epochs DROP COLUMN loss_mj;
         UPDATE meta SET value = '4' WHERE name = 'format'"
        ),
    );
    let told = |reader: &LedgerReader| {
        let found = reader.check();
        assert_eq!(found.iter().filter(|it| it.kind != "refused").count(), 0, "{found:?}");
        let usage = reader.usage(&UsageQuery::default()).expect("reads");
        (usage, reader.energy(EPOCH).expect("reads"))
    };
    let (before, none) = told(&Ledger::open_read_only(&path).expect("reads it as it is"));
    assert!(before[0].attributed_ns > 0 && before[0].energy_mj.is_none() && none.is_none());
    Ledger::check_start(&path).expect("sound");
    Ledger::backup(&path, &folder.path().join("copy.db")).expect("copies");
    let ledger = Ledger::open_with(options(&path, 7)).expect("migrates");
    assert_eq!(told(ledger.reader()), (before.clone(), None));
    let mut drew = parts(52, vec![share("acme", 9_999, 65)], vec![]);
    drew.energy = Some(Millijoules(1_000));
    post(&ledger, Block::try_from(drew).expect("it balances")).expect("posts");
    // 65 of 100 ns.
    let (usage, energy) = told(ledger.reader());
    assert_eq!(usage.iter().filter_map(|row| row.energy_mj).sum::<u64>(), 650, "{usage:?}");
    let expected = EnergyBalance {
        energy_mj: 1_000,
        tenants_mj: 650,
        overhead_mj: 100,
        idle_mj: 200,
        loss_mj: 50,
    };
    assert_eq!(energy, Some(expected));
    post_cap(&ledger, cap("acme", 9_999, common::usage(13, 10))).expect("posts");
    let untold = parts(53, vec![share("quiet", 9_998, 65)], vec![]);
    post(&ledger, Block::try_from(untold).expect("it balances")).expect("posts");
    assert_eq!(told(ledger.reader()).1.expect("told").tenants_mj, 130);
    end(ledger);
    let records = export(&Ledger::open_read_only(&path).expect("reads"), Range::default())
        .expect("exports")
        .0
        .records;
    let says = |text: &str| records.iter().any(|line| String::from_utf8_lossy(line).contains(text));
    assert!(says(r#""idle_ns":20,"loss_ns":5,"energy_mj":1000}"#) && says(r#""loss_ns":5},"#));
    for (change, kind) in [
        (
            "UPDATE entries SET energy_mj = energy_mj + 1 WHERE account = 1 AND energy_mj > 0",
            "block",
        ),
        ("UPDATE entries SET energy_mj = energy_mj * 2", "block"),
        ("UPDATE entries SET energy_mj = NULL", "block"),
        ("UPDATE entries SET energy_mj = -9223372036854775807 - 1 WHERE energy_mj < 0", "block"),
        (
            "UPDATE entries SET energy_mj = energy_mj + iif(account = 3, 1, -1)
           WHERE account IN (3, 4) AND energy_mj > 0",
            "block",
        ),
        ("UPDATE daily SET energy_mj = energy_mj + 1", "daily"),
        ("UPDATE daily SET energy_mj = 0 WHERE energy_mj IS NULL", "daily"),
        // The change includes all sums.
        (
            "UPDATE entries SET energy_mj = energy_mj + iif(account = 1, 1, -1) WHERE kind <> 0;
             UPDATE daily SET energy_mj = energy_mj + 1 WHERE energy_mj IS NOT NULL",
            "cap",
        ),
    ] {
        let found = found_after(&path, change);
        assert!(found.iter().any(|it| it.kind == kind), "{change}: {found:?}");
    }
}

/// Format 5 has no tiers: a reader reads it as it is, because archives stay forever, and
/// in a migrated ledger all of its usage is interactive.
#[test]
fn format_5_is_read_and_migrated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    rusqlite::Connection::open(&path)
        .and_then(|it| it.execute_batch(FORMAT_5))
        .expect("makes the old ledger");
    let told = |reader: &LedgerReader| {
        assert_eq!(reader.check(), vec![]);
        let group = vec![GroupBy::Tenant, GroupBy::Day];
        reader.usage(&UsageQuery { group, ..UsageQuery::default() }).expect("reads")
    };
    let before = told(&Ledger::open_read_only(&path).expect("reads it as it is"));
    assert_eq!(before.len(), 12, "two tenants on six days");
    Ledger::check_start(&path).expect("sound");
    Ledger::backup(&path, &folder.path().join("copy.db")).expect("copies");
    let ledger = Ledger::open_with(options(&path, 7)).expect("migrates");
    assert_eq!(told(ledger.reader()), before);
    let here = Range { from: 15, to: None };
    let old = export(ledger.reader(), here).expect("exports").0.records;
    // The attempt began before the migration; what comes later may be of the batch tier.
    let work = Share { tier: Tier::Batch, ..share("acme", 77, 65) };
    let done = FinishedAttempt { tier: Tier::Batch, ..finished("acme", 77, usage(65, 40)) };
    let capped = Share { tier: Tier::Batch, ..share("acme", 78, 50) };
    let last = ledger.reader().last_block(EPOCH).expect("reads");
    post(&ledger, block(last + 1, vec![work, capped], vec![done])).expect("posts");
    let payable = usage(20, 10);
    post_cap(&ledger, FaultCap { tier: Tier::Batch, ..cap("acme", 78, payable) }).expect("posts");
    assert_eq!(ledger.reader().check(), vec![]);
    sign(&ledger);
    close(ledger, &path);
    let reader = Ledger::open_read_only(&path).expect("reads");
    let new = export(&reader, here).expect("exports").0.records;
    assert_eq!(new[..old.len()], old);
    let named = |line: &&Vec<u8>| String::from_utf8_lossy(line).contains(r#","tier":"batch"}"#);
    assert_eq!(new.iter().filter(named).count(), 2, "an attempt and a cap");
    assert!(!old.iter().any(|line| String::from_utf8_lossy(line).contains("tier")));
}

/// Checks that every row's tier is checked: it decides the price.
#[test]
fn changed_tier_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 7)).expect("opens");
    for (request, tier) in [(1, Tier::Interactive), (2, Tier::Batch)] {
        let work = Share { tier, ..share("acme", request, 65) };
        let done = FinishedAttempt { tier, ..finished("acme", request, usage(65, 40)) };
        post(&ledger, block(request as u64, vec![work], vec![done])).expect("posts");
        post_cap(&ledger, FaultCap { tier, ..cap("acme", request, usage(20, 10)) }).expect("posts");
    }
    assert_eq!(ledger.reader().check(), vec![]);
    end(ledger);
    for (change, kind) in [
        ("UPDATE entries SET tier = 1 - tier WHERE account = 1 AND kind = 0", "block"),
        ("UPDATE entries SET tier = 1 - tier WHERE kind <> 0", "cap"),
        ("UPDATE attempts SET tier = 1 - tier", "block"),
        ("UPDATE requests SET tier = 1 - tier", "charge"),
        ("UPDATE fault_caps SET tier = 1 - tier", "audit"),
        ("UPDATE daily SET reference_ns = iif(tier = 1, 11, 9)", "daily"),
    ] {
        let found = found_after(&path, change);
        assert!(found.iter().any(|it| it.kind == kind), "{change}: {found:?}");
    }
}
