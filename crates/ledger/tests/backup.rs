//! Copies of a ledger: taken while it is written, restored, and continued.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use tollgate_domain::UtcTime;
use tollgate_ledger::{
    AdminAction, BackupError, BlockRefusal, Finding, Ledger, LedgerError, Posted,
};

fn restored_at(at: UtcTime) -> AdminAction {
    AdminAction {
        id: format!("restore-{}", at.0),
        at,
        operation: "ledger.restored".to_owned(),
        actor: "uid 0".to_owned(),
        user: None,
        detail: serde_json::json!({}),
    }
}

fn numbered(number: u64) -> tollgate_domain::Block {
    let request = u128::from(number);
    let ends = vec![finished("acme", request, usage(number, number))];
    block(number, vec![share("acme", request, number)], ends)
}

/// Copies taken beside a writer hold whole commits, each a prefix of the later ones.
#[test]
fn backup_beside_writer_is_sound() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open(&path).expect("opens");
    let over = Arc::new(AtomicBool::new(false));
    let (writing, stop) = (ledger.clone(), Arc::clone(&over));
    let writer = std::thread::spawn(move || {
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            post(&writing, numbered(number)).expect("posts");
        }
        number
    });
    let mut last = 0;
    for round in 0..5 {
        while ledger.reader().last_block(EPOCH).expect("reads") < last + 3 {
            std::thread::yield_now();
        }
        let copy = folder.path().join(format!("copy-{round}.db"));
        let checked = Ledger::backup(&path, &copy).expect("copies");
        assert_eq!(checked.findings, vec![]);
        let blocks = Ledger::open_read_only(&copy).expect("opens").last_block(EPOCH);
        let blocks = blocks.expect("reads");
        assert_eq!(blocks, checked.blocks, "what was checked is what is there");
        assert!(blocks >= last + 3, "what was acknowledged before is in it");
        last = blocks;
        assert!(!folder.path().join(format!("copy-{round}.db.unfinished")).exists());
    }
    over.store(true, Ordering::Relaxed);
    assert!(writer.join().expect("it wrote") >= last);
}

#[test]
fn backup_refuses_damaged_ledger() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, copy) = (folder.path().join("ledger.db"), folder.path().join("copy.db"));
    let ledger = Ledger::open(&path).expect("opens");
    post(&ledger, numbered(1)).expect("posts");
    fs::write(&copy, "an older one").expect("writes");
    let connection = rusqlite::Connection::open(&path).expect("opens");
    connection.execute("UPDATE daily SET reference_ns = 7", []).expect("changes");
    let error = Ledger::backup(&path, &copy).expect_err("it is damaged");
    assert!(matches!(&error, BackupError::Damaged { finding, .. } if finding.contains("sums of")));
    assert_eq!(fs::read(&copy).expect("reads"), b"an older one", "nothing was replaced");
    let names: Vec<_> = fs::read_dir(folder.path()).expect("lists").flatten().collect();
    assert!(!names.iter().any(|it| it.file_name().to_string_lossy().contains("unfinished")));
}

/// The journal sends again what was acknowledged after the backup. Blocks that the
/// journal no longer has are skipped, and the check reports them.
#[test]
fn restored_ledger_continues() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, copy) = (folder.path().join("ledger.db"), folder.path().join("copy.db"));
    let ledger = Ledger::open(&path).expect("opens");
    for number in 1..=3 {
        post(&ledger, numbered(number)).expect("posts");
    }
    Ledger::backup(&path, &copy).expect("copies");
    for number in 4..=9 {
        post(&ledger, numbered(number)).expect("posts");
    }
    close(ledger, &path);

    // A damaged backup is not restored.
    let torn = folder.path().join("torn.db");
    let mut bytes = fs::read(&copy).expect("reads");
    bytes.truncate(bytes.len() / 2);
    fs::write(&torn, bytes).expect("writes");
    let later = restored_at(UtcTime(NOON.0 + 1));
    Ledger::restore(&torn, &path, &later).expect_err("it is torn");
    let reader = Ledger::open_read_only(&path).expect("opens");
    assert_eq!(reader.last_block(EPOCH).expect("reads"), 9, "the ledger is as it was");
    drop(reader);

    let aside = Ledger::restore(&copy, &path, &later).expect("restores").expect("one was there");
    let before = Ledger::open_read_only(&aside).expect("opens");
    assert_eq!(before.last_block(EPOCH).expect("reads"), 9, "nothing is thrown away");
    let ledger = Ledger::open(&path).expect("opens");
    assert_eq!(ledger.reader().last_block(EPOCH).expect("reads"), 3);
    assert_eq!(ledger.reader().check(), vec![]);
    // The journal's first file is gone: it begins with block 6.
    for number in 6..=9 {
        assert_eq!(post(&ledger, numbered(number)).expect("posts"), Posted::New);
        assert_eq!(post(&ledger, numbered(number)).expect("posts"), Posted::Already);
    }
    let findings: Vec<Finding> = ledger.reader().check();
    let lost = |block| {
        format!(
            "block {block} of {EPOCH} was skipped: lost: the ledger was restored from an older backup"
        )
    };
    let said: Vec<_> = findings.iter().map(|it| (it.is_remark(), it.message.clone())).collect();
    assert_eq!(said, [(true, lost(4)), (true, lost(5))]);
    // A block that began after the restore finds a gap.
    let mut parts = parts(11, vec![], vec![]);
    parts.started = UtcTime(NOON.0 + 2);
    let gap = post(&ledger, parts.try_into().expect("it balances"));
    let expected = BlockRefusal::Gap { expected: 10 };
    assert!(matches!(gap, Err(LedgerError::Refused { refusal, .. }) if refusal == expected));
}
