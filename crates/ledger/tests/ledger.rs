//! The embedded ledger as a file: restarts, full disks, other processes, tampering.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use std::time::Duration;

use common::*;
use tollgate_ledger::{Health, Ledger, LedgerError, LedgerHandle, LedgerOptions, Posted};

fn ledger() -> (tempfile::TempDir, LedgerHandle) {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    (folder, ledger)
}

#[test]
fn restart_changes_nothing_and_refuses_other_files() {
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

/// C05: no acknowledgement without the disk; nothing is lost once it has room.
#[test]
fn full_disk_refuses_and_recovers() {
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
    // With room again the same block is posted, once.
    let options = LedgerOptions { max_pages: Some(4_096), ..options };
    let ledger = Ledger::open_with(options).expect("opens");
    assert_eq!(post(&ledger, fat(posted + 1)).expect("posts"), Posted::New);
    assert_eq!(ledger.health(), Health::Healthy);
    assert_eq!(ledger.reader().balance(EPOCH).expect("reads").tenants_ns, (posted as i64 + 1) * 40);
}

/// After a gateway was killed: a reader cannot know which part of the log is on the
/// disk, and leaves the log as it is. A writer rewrites the log.
#[test]
fn reader_leaves_write_ahead_log() {
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

/// After a stop a copy of the file alone, without its log, is complete.
#[test]
fn sign_act_makes_the_file_whole() {
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
fn degraded_ledger_recovers_by_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let options = LedgerOptions { retry: Duration::from_millis(5), ..LedgerOptions::new(&path) };
    let ledger = Ledger::open_with(options).expect("opens");
    post(&ledger, block(1, vec![share("acme", 1, 100)], vec![])).expect("posts");
    // Another connection holds the write lock for longer than the writer waits.
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

/// C04: the check finds a changed value in any row of a posted block.
#[test]
fn check_finds_tampering() {
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
fn reader_works_beside_another_process() {
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
#[ignore = "the other process of reader_works_beside_another_process"]
fn reads_until_the_tenth_block() {
    let reader = Ledger::open_read_only(std::path::Path::new("ledger.db")).expect("opens");
    while reader.last_block(EPOCH).expect("reads") < 10 {
        assert!(reader.balance(EPOCH).expect("reads").is_exact());
        std::thread::yield_now();
    }
}
