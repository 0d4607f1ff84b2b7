//! The manifest notices each way in which a database of a data folder can be lost.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use tollgate_domain::UtcTime;
use tollgate_ledger::idempotency::IdempotencyStore;
use tollgate_ledger::{Act, AdminAction, AuditKey, DatabasePlace, Ledger, LedgerOptions, Manifest};

const FILES: [&str; 3] = ["ledger.db", "keys.db", "idempotency.db"];

/// Does what a run of the gateway does with its databases: the ledger gets a signed
/// record, and the keys get a change.
fn run(data: &Path, number: u64) {
    let mut options = LedgerOptions::new(&data.join("ledger.db"));
    options.key = Some(Arc::new(AuditKey::from_seed("log", &[7; 32]).expect("a name")));
    let ledger = Ledger::open_with(options).expect("a ledger");
    let keys = Connection::open(data.join("keys.db")).expect("a database");
    keys.execute_batch("CREATE TABLE IF NOT EXISTS keys (changed INTEGER)").expect("runs");
    let _idempotency =
        IdempotencyStore::open(data, Duration::from_secs(60), 10).expect("a database");
    Manifest::begin(data, &ledger_in(data)).expect("writes");
    keys.execute("INSERT INTO keys VALUES (?1)", [number]).expect("runs");
    let action = AdminAction {
        id: format!("action-{number}"),
        at: UtcTime(number),
        operation: "test".to_owned(),
        actor: "test".to_owned(),
        user: None,
        detail: serde_json::Value::Null,
    };
    for act in [Act::from(action), Act::Sign] {
        futures_executor::block_on(ledger.submit(act)).expect("commits");
    }
    Manifest::refresh(data, &ledger_in(data)).expect("writes");
    common::close(ledger, &data.join("ledger.db"));
}

fn ledger_in(data: &Path) -> DatabasePlace {
    DatabasePlace::File(data.join("ledger.db"))
}

/// Returns the losses as text.
fn losses(data: &Path) -> Vec<String> {
    let manifest = Manifest::load(data).expect("reads").expect("was written");
    manifest.losses(data, &ledger_in(data)).iter().map(ToString::to_string).collect()
}

fn copy(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(status.expect("cp runs").success());
}

/// Applies `change` to a database and to its log and index.
fn change(data: &Path, file: &str, change: impl Fn(&Path)) {
    for end in ["", "-wal", "-shm"] {
        let path = data.join(format!("{file}{end}"));
        if path.exists() {
            change(&path);
        }
    }
}

#[test]
fn manifest_notices_lost_databases() {
    let parent = tempfile::tempdir().expect("a folder");
    let (data, older) = (parent.path().join("data"), parent.path().join("older"));
    fs::create_dir_all(data.join("audit")).expect("a folder");
    assert!(Manifest::load(&data).expect("reads").is_none(), "before the first start");
    run(&data, 1);
    copy(&data, &older);
    run(&data, 2);
    assert_eq!(losses(&data), Vec::<String>::new(), "the control");
    for (at, file) in FILES.into_iter().enumerate() {
        let words = [
            [
                "ledger.db is missing",
                "ledger.db is empty",
                "ledger.db is another or an older ledger",
            ],
            ["keys.db is missing", "keys.db is empty", "keys.db is older: its last 1 changes"],
            [
                "idempotency.db is missing",
                "idempotency.db is empty",
                "idempotency.db is another or an older database",
            ],
        ][at];
        for (how, word) in words.into_iter().enumerate() {
            let lost = parent.path().join(format!("{file}-{how}"));
            copy(&data, &lost);
            match how {
                0 => change(&lost, file, |path| fs::remove_file(path).expect("removes")),
                1 => change(&lost, file, |path| fs::write(path, "").expect("empties")),
                _ => {
                    change(&lost, file, |path| fs::remove_file(path).expect("removes"));
                    change(&older, file, |path| copy(path, &lost));
                }
            }
            let found = losses(&lost);
            assert!(found.len() == 1 && found[0].starts_with(word), "{word}: {found:?}");
        }
    }
    // Another installation's databases are noticed, too.
    let other = parent.path().join("other");
    fs::create_dir_all(other.join("audit")).expect("a folder");
    for number in 11..=15 {
        run(&other, number);
    }
    fs::copy(data.join("audit/manifest.json"), other.join("audit/manifest.json")).expect("copies");
    assert_eq!(losses(&other).len(), 3);
}

#[test]
fn manifest_survives_crash_between_its_files() {
    let parent = tempfile::tempdir().expect("a folder");
    let data = parent.path().join("data");
    fs::create_dir_all(data.join("audit")).expect("a folder");
    run(&data, 1);
    let path = data.join("audit/manifest.json");
    let before = fs::read_to_string(&path).expect("reads");
    run(&data, 2);
    // Killed after the database got its new id: the manifest has both ids.
    let json = |text: &str| -> serde_json::Value { serde_json::from_str(text).expect("JSON") };
    let after = json(&fs::read_to_string(&path).expect("reads"));
    let mut both = json(&before);
    assert_ne!(both["idempotency"], after["idempotency"]);
    both["idempotency"].as_array_mut().expect("ids").push(after["idempotency"][0].clone());
    fs::write(&path, both.to_string()).expect("writes");
    assert_eq!(losses(&data), Vec::<String>::new());
    // The control: the manifest from before does not know the new id.
    fs::write(&path, before).expect("writes");
    assert_eq!(losses(&data).len(), 1);
    for torn in ["", "{}", "{"] {
        fs::write(&path, torn).expect("writes");
        let error = Manifest::load(&data).expect_err("refuses").to_string();
        assert!(error.contains("manifest.json: not a manifest"), "{error}");
    }
}

#[test]
fn manifest_follows_a_restored_ledger() {
    let parent = tempfile::tempdir().expect("a folder");
    let data = parent.path().join("data");
    fs::create_dir_all(data.join("audit")).expect("a folder");
    run(&data, 1);
    let (ledger, backup) = (data.join("ledger.db"), parent.path().join("backup.db"));
    Ledger::backup(&ledger, &backup).expect("copies");
    run(&data, 2);
    // With the log left in place, SQLite would apply it to the backup.
    change(&data, "ledger.db", |path| fs::remove_file(path).expect("removes"));
    fs::copy(&backup, &ledger).expect("copies");
    assert_eq!(losses(&data).len(), 1);
    Manifest::replace_ledger(&data).expect("writes");
    assert_eq!(losses(&data), Vec::<String>::new());
}
