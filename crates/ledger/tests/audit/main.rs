//! The audit log as an auditor meets it: exported by the ledger, verified by a crate
//! that shares no code with the ledger (T53).
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;
mod upgrades;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use futures_executor::block_on;
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use tollgate_auditor::{Checkpoint, Fault, Folder, LogError, Proof, Sound, VerifierKey, verify};
use tollgate_domain::{
    Block, FinishedAttempt, Millijoules, RequestId, Share, Tier, Usage, UtcTime,
};
use tollgate_ledger::{
    AuditKey, EnergyBalance, ExportError, Exported, FaultCap, Finding, GroupBy, Ledger,
    LedgerHandle, LedgerOptions, LedgerReader, Posted, Range, UsageQuery,
};

/// An export in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Export {
    start: String,
    records: Vec<Vec<u8>>,
    checkpoints: Vec<Vec<u8>>,
}

fn key(seed: u8) -> Arc<AuditKey> {
    Arc::new(AuditKey::from_seed("tollgate/test", &[seed; 32]).expect("a good name"))
}

fn public(key: &AuditKey) -> VerifierKey {
    key.verifier().parse().expect("a verifier key")
}

/// Returns options that sign whenever `every` records wait, and at the end.
fn options(path: &Path, every: u64) -> LedgerOptions {
    LedgerOptions {
        key: Some(key(1)),
        checkpoint_records: every,
        checkpoint_every: Duration::from_secs(3_600),
        group: 1, // each command its own commit, so that sizes are exact
        ..LedgerOptions::new(path)
    }
}

/// Posts blocks with one attempt each, a cap, admin actions and a skipped block.
fn fill(ledger: &LedgerHandle, blocks: u64) {
    let first = ledger.reader().last_block(EPOCH).expect("reads") + 1;
    for number in first..first + blocks {
        let request = u128::from(number);
        let ends = vec![finished("acme", request, usage(number, number))];
        post(ledger, block(number, vec![share("acme", request, number)], ends)).expect("posts");
        if number % 5 == 0 {
            post_cap(ledger, cap("acme", request, Usage::default())).expect("posts");
            record(ledger, &format!("action-{number}"), "key.revoked").expect("records");
        }
    }
    skip(ledger, first + blocks).expect("passes");
}

fn export(reader: &LedgerReader, range: Range) -> Result<(Export, Exported), ExportError> {
    let (mut records, mut checkpoints) = (Vec::new(), Vec::new());
    let exported = reader.export(range, &mut records, &mut checkpoints)?;
    let lines =
        |bytes: Vec<u8>| bytes.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    let start = serde_json::to_string(&exported.start).expect("serialises");
    Ok((Export { start, records: lines(records), checkpoints: lines(checkpoints) }, exported))
}

/// Exports a whole log of 60 blocks, signed at every tenth record and at its end.
fn exported() -> Export {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 10)).expect("opens");
    fill(&ledger, 60);
    end(ledger);
    let reader = Ledger::open_read_only(&path).expect("opens");
    assert_eq!(reader.check().iter().filter(|it| it.kind != "refused").count(), 0);
    export(&reader, Range::default()).expect("exports").0
}

/// Ends the writer and waits until it has signed every record.
fn end(ledger: LedgerHandle) {
    let reader = ledger.reader().clone();
    drop(ledger);
    loop {
        match export(&reader, Range::default()) {
            Ok((_, exported)) if exported.unsigned == 0 => return,
            Ok(_) | Err(ExportError::Unsigned { .. }) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn judge(exports: &[&Export], kept: &[Checkpoint]) -> Result<Sound, LogError> {
    judge_with(exports, &[public(&key(1))], kept)
}

fn judge_with(
    exports: &[&Export],
    keys: &[VerifierKey],
    kept: &[Checkpoint],
) -> Result<Sound, LogError> {
    let files: Vec<_> = exports
        .iter()
        .map(|export| (export.start.clone(), export.records.concat(), export.checkpoints.concat()))
        .collect();
    let folders = files.iter().enumerate().map(|(index, (start, records, checkpoints))| {
        Ok(Folder {
            name: format!("export {index}"),
            start: start.clone(),
            records: &records[..],
            checkpoints: &checkpoints[..],
        })
    });
    verify(folders, keys, kept)
}

fn open(line: &[u8]) -> Checkpoint {
    let line: serde_json::Value = serde_json::from_slice(line).expect("JSON");
    let note = line["note"].as_str().expect("a note");
    Checkpoint::open(note, &[public(&key(1))]).expect("well signed")
}

fn named(result: Result<Sound, LogError>) -> Option<u64> {
    match result {
        Err(LogError::Record { record, .. }) => Some(record),
        _ => None,
    }
}

#[test]
fn export_is_sound_and_names_actors() {
    let export = exported();
    let sound = judge(&[&export], &[]).expect("sound");
    assert_eq!(sound.newest.size(), export.records.len() as u64);
    assert_eq!(sound.checkpoints, export.checkpoints.len() as u64);
    assert!(sound.checkpoints > 10 && sound.first == 0, "{sound:?}");
    let kept: Vec<Checkpoint> = export.checkpoints.iter().map(|line| open(line)).collect();
    judge(&[&export], &kept).expect("each of its own checkpoints is of it");

    let zeros = "0".repeat(64);
    let line = |index: usize| String::from_utf8(export.records[index].clone()).expect("UTF-8");
    let record = |index: usize| line(index)[84..].strip_suffix("}\n").expect("a line").to_owned();
    assert_eq!(
        record(0),
        format!(
            r#"{{"seq":0,"prev":"{zeros}","operation.type":"ledger.genesis","outcome":"done","id":"ledger.genesis","detail":{{"before":null,"format":6}}}}"#
        )
    );
    let prev = |index: usize| line(index)[9..73].to_owned();
    let digest =
        serde_json::from_str::<serde_json::Value>(&record(1)).expect("JSON")["block"]["sha256"]
            .clone();
    assert_eq!(digest.as_str().map(str::len), Some(64));
    assert_eq!(
        record(1),
        format!(
            r#"{{"seq":1,"prev":"{}","time":"2026-11-20T12:00:00.000000036Z","operation.type":"metering","outcome":"posted","gpu.id":"worker/0","resource.consumption":{{"wall_ns":36,"tenants_ns":1,"overhead_ns":10,"idle_ns":20,"loss_ns":5}},"model":"m","device_class":"cpu","block":{{"epoch":"{EPOCH}","number":1,"first_step":10,"last_step":19,"sha256":{digest}}}}}"#,
            prev(0)
        )
    );
    let request = RequestId::from_random(1);
    assert_eq!(
        record(2),
        format!(
            r#"{{"seq":2,"prev":"{}","time":"2026-11-20T12:00:00.000000000Z","operation.type":"inference","outcome":"stop","gpu.id":"worker/0","user.id":{{"tenant":"acme","key":"k1"}},"resource.consumption":{{"attributed_ns":1,"reference_ns":1,"prompt_tokens":10,"cached_tokens":2,"completion_tokens":5}},"request":"{request}","attempt":0,"model":"m","device_class":"cpu","block":{{"epoch":"{EPOCH}","number":1}}}}"#,
            prev(1)
        )
    );
    let words = |index: usize| record(index).split_once(",\"time\"").expect("a time").1.to_owned();
    let request = RequestId::from_random(5);
    assert_eq!(
        words(11),
        format!(
            r#":"2026-11-20T12:00:00.000000000Z","operation.type":"correction","outcome":"fault","user.id":{{"tenant":"acme","key":"k1"}},"resource.consumption":{{"attributed_ns":0,"reference_ns":0,"prompt_tokens":0,"cached_tokens":0,"completion_tokens":0}},"request":"{request}","attempt":0,"model":"m","device_class":"cpu"}}"#
        )
    );
    assert_eq!(
        words(12),
        r#":"2026-11-20T12:00:00.000000000Z","operation.type":"key.revoked","outcome":"done","user.id":{"tenant":"acme","key":"k1"},"actor":"uid 0","id":"action-5"}"#
    );
    assert_eq!(
        words(export.records.len() - 1),
        format!(
            r#":"2026-11-20T12:00:00.000000000Z","operation.type":"metering","outcome":"refused","gpu.id":"worker/0","block":{{"epoch":"{EPOCH}","number":61}},"detail":{{"reason":"a lie"}}}}"#
        )
    );
}

/// A change of the exported lines, drawn at random.
fn mutate(export: &Export, random: &mut TestRng) -> (Export, &'static str) {
    let mut changed = export.clone();
    let mut below = |bound: usize| random.next_u64() as usize % bound;
    let count = changed.records.len();
    let at = below(count);
    let kind = match below(8) {
        0 | 1 => {
            let place = below(changed.records[at].len());
            changed.records[at][place] ^= 1 << below(8);
            "flip"
        }
        2 => {
            changed.records.remove(at);
            "delete"
        }
        3 => {
            let other = (at + 1 + below(count - 1)) % count;
            changed.records.swap(at, other);
            "reorder"
        }
        4 => {
            let copy = changed.records[below(count)].clone();
            changed.records.insert(at, copy);
            "insert"
        }
        5 => {
            changed.records.truncate(at);
            "truncate"
        }
        6 => {
            // Cut in the middle of a line, like a torn copy.
            changed.records.truncate(at + 1);
            let keep = below(changed.records[at].len());
            changed.records[at].truncate(keep);
            "tear"
        }
        _ => {
            let count = changed.checkpoints.len();
            let at = below(count);
            match below(3) {
                0 => changed.checkpoints.swap(at, (at + 1 + below(count - 1)) % count),
                1 => {
                    let place = below(changed.checkpoints[at].len());
                    changed.checkpoints[at][place] ^= 1 << below(8);
                }
                _ => {
                    let copy = changed.checkpoints[below(count)].clone();
                    changed.checkpoints[at] = copy;
                }
            }
            "checkpoint"
        }
    };
    (changed, kind)
}

/// Returns the first record that differs.
fn first_difference(export: &Export, changed: &Export) -> Option<u64> {
    let (before, after) = (export.records.concat(), changed.records.concat());
    if before == after {
        return None;
    }
    let same = before.iter().zip(&after).take_while(|(a, b)| a == b).count();
    // A line that is inserted before an equal one shows behind it.
    let whole = before[..same].iter().filter(|&&byte| byte == b'\n').count();
    Some(whole as u64)
}

/// T53: the auditor finds every change of the files and names the first record that
/// differs.
#[test]
fn auditor_finds_every_mutation() {
    let export = exported();
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[53; 32]);
    let mut found = std::collections::BTreeMap::<&str, usize>::new();
    while found.values().sum::<usize>() < 1_000 {
        let (changed, kind) = mutate(&export, &mut random);
        if changed == export {
            continue; // a copy of a line over itself
        }
        let result = judge(&[&changed], &[]);
        match first_difference(&export, &changed) {
            Some(record) => assert_eq!(named(result.clone()), Some(record), "{kind}: {result:?}"),
            None => assert!(result.is_err(), "{kind}: {result:?}"),
        }
        *found.entry(kind).or_default() += 1;
    }
    assert!(found.len() == 7 && found.values().all(|&count| count > 50), "{found:?}");
}

/// Rewrites the records from `first` on with their hashes, as an attacker with the
/// database but without the key can.
fn rehash(export: &Export, first: usize, change: impl Fn(&str) -> String) -> Export {
    let mut changed = export.clone();
    let mut prev = String::from_utf8(export.records[first - 1][9..73].to_vec()).expect("hex");
    for (index, line) in changed.records.iter_mut().enumerate().skip(first) {
        let text = String::from_utf8(line.clone()).expect("UTF-8");
        let record = text[84..].strip_suffix("}\n").expect("a line");
        let (head, rest) = record.split_once("\"prev\":\"").expect("a record");
        let mut record = format!("{head}\"prev\":\"{prev}{}", &rest[64..]);
        if index == first {
            record = change(&record);
        }
        prev = leaf_hash(record.as_bytes());
        *line = format!("{{\"hash\":\"{prev}\",\"record\":{record}}}\n").into_bytes();
    }
    changed
}

fn leaf_hash(bytes: &[u8]) -> String {
    use aws_lc_rs::digest::{SHA256, digest};
    let hash = digest(&SHA256, &[&[0], bytes].concat());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A rewritten chain is consistent; the checkpoints show where it differs.
#[test]
fn auditor_finds_rewritten_chain() {
    let export = exported();
    let sizes: Vec<u64> = export.checkpoints.iter().map(|line| open(line).size()).collect();
    let dearer = |record: &str| record.replacen("\"attributed_ns\":", "\"attributed_ns\":9", 1);
    for first in [2, 14, 44, 100] {
        let changed = rehash(&export, first, dearer);
        assert_ne!(changed, export);
        let Err(LogError::Rewritten { first: from, last: to }) = judge(&[&changed], &[]) else {
            panic!("record {first} was made anew and that was not found");
        };
        assert!((from..=to).contains(&(first as u64)), "{from} to {to}, not {first}");
        // The named range is no wider than one checkpoint to the next.
        assert!(sizes.contains(&(to + 1)) && (from == 0 || sizes.contains(&from)));
        assert!(sizes.iter().all(|&size| size <= from || size > to));
    }
    // Signed with another key, the log is not accepted.
    let stranger = public(&key(2));
    let result = judge_with(&[&export], &[stranger], &[]);
    assert!(matches!(result, Err(LogError::Checkpoint { line: 1, .. })), "{result:?}");
}

#[test]
fn kept_checkpoint_finds_cut_tail_and_fork() {
    let export = exported();
    // A log cut back to an older checkpoint: only a kept newer checkpoint shows it.
    let older = export.checkpoints.len() - 3;
    let size = open(&export.checkpoints[older]).size();
    let mut cut = export.clone();
    cut.checkpoints.truncate(older + 1);
    cut.records.truncate(size as usize);
    judge(&[&cut], &[]).expect("in itself it is whole");
    let newest = open(export.checkpoints.last().expect("some"));
    let signed = newest.size();
    let expected = LogError::Record { record: size, fault: Fault::Missing { signed } };
    assert_eq!(judge(&[&cut], std::slice::from_ref(&newest)), Err(expected));

    // Two histories signed with one key: a fork by the operator.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 10)).expect("opens");
    record(&ledger, "another beginning", "config.loaded").expect("records");
    fill(&ledger, 80);
    end(ledger);
    let reader = Ledger::open_read_only(&path).expect("opens");
    let (fork, _) = self::export(&reader, Range::default()).expect("exports");
    judge(&[&fork], &[]).expect("in itself it is whole");
    for kept in &export.checkpoints {
        let kept = open(kept);
        let size = kept.size();
        if size == 1 {
            continue; // both begin with the same record
        }
        let result = judge(&[&fork], &[kept]);
        assert!(
            matches!(result, Err(LogError::Forked { size: found, .. }) if found == size),
            "{result:?}"
        );
    }
}

#[test]
fn exports_of_ranges_follow_one_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 10)).expect("opens");
    fill(&ledger, 20);
    end(ledger);
    let ledger = Ledger::open_with(options(&path, 10)).expect("opens again");
    fill(&ledger, 20);
    end(ledger);
    let reader = Ledger::open_read_only(&path).expect("opens");
    let part = |from, to| export(&reader, Range { from, to }).expect("exports");
    let (first, until) = part(0, Some(33));
    assert!(until.end > 33 && until.end <= 44, "{until:?}");
    let (second, exported) = part(until.end, None);
    assert_eq!(exported.start.size, until.end);
    judge(&[&first, &second], &[]).expect("sound together");
    judge(&[&second], &[]).expect("sound alone");

    let early = open(&first.checkpoints[0]);
    let result = judge(&[&second], std::slice::from_ref(&early));
    assert!(matches!(result, Err(LogError::NotCovered { .. })), "{result:?}");
    judge(&[&first, &second], &[early]).expect("it is covered by the first");
    let (third, _) = part(until.end + 1, None);
    let result = judge(&[&first, &third], &[]);
    assert!(matches!(result, Err(LogError::Gap { .. })), "{result:?}");
    // A range can begin at every record, and a false start is found.
    for from in 0..exported.end {
        let (part, _) = part(from, None);
        judge(&[&part], &[]).expect("sound");
        for (place, byte) in part.start.bytes().enumerate().filter(|it| it.1.is_ascii_hexdigit()) {
            if place % 7 != 0 {
                continue;
            }
            let mut lie = part.clone();
            let other = if byte == b'1' { "2" } else { "1" };
            lie.start.replace_range(place..=place, other);
            assert!(judge(&[&lie], &[]).is_err(), "{}", lie.start);
        }
    }
    assert!(matches!(
        export(&reader, Range { from: exported.end, to: None }),
        Err(ExportError::Unsigned { signed }) if signed == exported.end
    ));
}

#[test]
fn proof_covers_one_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 1_000)).expect("opens");
    fill(&ledger, 400); // beyond the first level of nodes that is kept
    let request = RequestId::from_random(5);
    assert!(
        matches!(ledger.reader().prove(&request), Err(ExportError::Unsigned { .. })),
        "nothing signs it yet"
    );
    end(ledger);
    let reader = Ledger::open_read_only(&path).expect("opens");
    for (number, records) in [(1, 1), (5, 2), (200, 2), (399, 1)] {
        let proof = reader.prove(&RequestId::from_random(number)).expect("proves");
        assert_eq!(proof.records.len(), records, "an attempt, and the cap on it");
        let text = serde_json::to_string(&proof).expect("serialises");
        let keys = [public(&key(1))];
        let (checkpoint, proved) = Proof::read(&text).expect("reads").verify(&keys).expect("holds");
        assert_eq!(checkpoint.size(), 962);
        assert!(
            proved.iter().all(|it| it.record.contains(&RequestId::from_random(number).to_string()))
        );
        for change in [
            text.replace("\\\"attributed_ns\\\":", "\\\"attributed_ns\\\":1"),
            text.replace("\"index\":", "\"index\":1"),
            text.replacen("\\n962\\n", "\\n963\\n", 1),
            text.replacen("\"path\":[\"", "\"path\":[\"00", 1),
        ] {
            assert_ne!(change, text);
            let result = Proof::read(&change).and_then(|proof| proof.verify(&keys));
            assert!(result.is_err(), "{change}");
        }
        let other = Proof::read(&text).expect("reads").verify(&[public(&key(2))]);
        assert!(other.is_err(), "{other:?}");
    }
    let unknown = RequestId::from_random(9_999);
    assert!(matches!(reader.prove(&unknown), Err(ExportError::Unknown(id)) if id == unknown));
}

#[test]
fn action_is_recorded_once_and_refusal_never() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let options = LedgerOptions { group: 256, ..options(&path, 10_000) };
    let ledger = Ledger::open_with(options.clone()).expect("opens");
    assert_eq!(record(&ledger, "a", "key.created").expect("records"), Posted::New);
    assert_eq!(record(&ledger, "a", "key.created").expect("records"), Posted::Already);
    post(&ledger, block(1, vec![share("acme", 1, 5)], vec![])).expect("posts");
    // A refused act of a group leaves the chain as it was for the next act.
    let done = finished("acme", 2, usage(7, 7));
    let replayed = block(2, vec![share("acme", 2, 7)], vec![done.clone(), done]);
    let blocks = [replayed, block(2, vec![], vec![])];
    let [refused, posted] = blocks.map(|block| ledger.submit(block)).map(block_on);
    assert!(refused.is_err());
    assert_eq!(posted.expect("posts"), Posted::New);
    assert_eq!(ledger.reader().check(), vec![]);
    end(ledger);
    let again = Ledger::open_with(options).expect("opens");
    assert_eq!(record(&again, "a", "key.created").expect("records"), Posted::Already);
    end(again);
    let reader = Ledger::open_read_only(&path).expect("opens");
    let (export, exported) = export(&reader, Range::default()).expect("exports");
    assert_eq!(exported.end, 4, "the first record, an action, two blocks");
    judge(&[&export], &[]).expect("sound");
}

#[test]
fn waiting_records_are_signed_in_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let options =
        LedgerOptions { checkpoint_every: Duration::from_millis(20), ..options(&path, 10_000) };
    let ledger = Ledger::open_with(options).expect("opens");
    for number in 1..4 {
        post(&ledger, block(number, vec![], vec![])).expect("posts");
        // No act comes, and the records are signed all the same.
        loop {
            let exported = export(ledger.reader(), Range::default());
            if exported.is_ok_and(|(_, exported)| exported.end == number + 1) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // Without new records there is no new checkpoint.
    std::thread::sleep(Duration::from_millis(100));
    let (whole, _) = export(ledger.reader(), Range::default()).expect("exports");
    assert!(whole.checkpoints.len() <= 4, "{}", whole.checkpoints.len());
    judge(&[&whole], &[]).expect("sound");
}

#[test]
fn age_of_unsigned_records_ends_with_their_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open_with(options(&folder.path().join("a.db"), 10_000)).expect("opens");
    let block_of = |number| block(number, vec![], vec![]);
    sign(&ledger);
    assert_eq!(ledger.unsigned_for(), Duration::ZERO, "the first record is signed");
    post(&ledger, block_of(1)).expect("posts");
    let first = ledger.unsigned_for();
    std::thread::sleep(Duration::from_millis(5));
    post(&ledger, block_of(2)).expect("posts");
    let second = ledger.unsigned_for();
    // A later record does not make the oldest one younger.
    assert!(second >= first + Duration::from_millis(5), "{first:?} {second:?}");
    sign(&ledger);
    assert_eq!(ledger.unsigned_for(), Duration::ZERO);

    let unsigned = LedgerOptions { key: None, ..options(&folder.path().join("b.db"), 10_000) };
    let ledger = Ledger::open_with(unsigned).expect("opens");
    post(&ledger, block_of(1)).expect("posts");
    assert_eq!(ledger.unsigned_for(), Duration::ZERO, "without a key nothing is ever signed");
}

/// A long detail is replaced by its hash, so every record is bounded.
#[test]
fn long_detail_is_bounded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 1)).expect("opens");
    let action = tollgate_ledger::AdminAction {
        id: "long".into(),
        at: NOON,
        operation: "key.created".into(),
        actor: "uid 0".into(),
        user: None,
        detail: serde_json::json!({ "models": vec!["m"; 10_000] }),
    };
    assert_eq!(record_action(&ledger, action).expect("records"), Posted::New);
    let (export, _) = export(ledger.reader(), Range::default()).expect("exports");
    assert!(export.records.iter().all(|line| line.len() < 1_000));
    judge(&[&export], &[]).expect("sound");
}

/// C04: the check finds a change of the log's own tables, and of a row with all its
/// sums.
#[test]
fn check_finds_tampering_with_audit_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open_with(options(&path, 7)).expect("opens");
    fill(&ledger, 300);
    for (day, plan) in [(0, "team"), (1, "gold"), (1, "team"), (2, "gold")] {
        tell_plan(&ledger, UtcTime(NOON.0 + day * 86_400_000_000_000), plan);
    }
    end(ledger);
    for change in [
        "UPDATE records SET record = replace(record, '\"outcome\":\"stop\"', '\"outcome\":\"length\"') WHERE seq = 6",
        "UPDATE records SET hash = zeroblob(32) WHERE seq = 6",
        "DELETE FROM records WHERE seq = 6",
        "DELETE FROM records WHERE seq > 600",
        "UPDATE record_nodes SET hash = zeroblob(32)",
        "DELETE FROM record_nodes",
        "DELETE FROM recorded_actions WHERE id = 'action-5'",
        "UPDATE recorded_actions SET id = 'action-6' WHERE id = 'action-5'",
        "UPDATE checkpoints SET note = replace(note, char(10), char(10) || 'A')
           WHERE size = (SELECT min(size) FROM checkpoints)",
        "UPDATE checkpoints SET size = size + 1
           WHERE size = (SELECT min(size) FROM checkpoints)",
        "UPDATE refused_blocks SET reason = 'none'",
        "UPDATE refused_blocks SET at_utc_ns = 1",
        "UPDATE fault_caps SET model = 'other'",
        "DELETE FROM fault_caps WHERE record_seq = 11",
        "UPDATE attempts SET record_seq = NULL WHERE record_seq = 2",
        "UPDATE attempts SET record_seq = record_seq + 2 WHERE record_seq = 2",
        // The plans, which set the prices of statements.
        "UPDATE tenant_plans SET plan = 'trial' WHERE day = (SELECT min(day) FROM tenant_plans)",
        "UPDATE tenant_plans SET day = day - 9",
        "UPDATE tenant_plans SET tenant = 'other'",
        "DELETE FROM tenant_plans",
        "INSERT INTO tenant_plans SELECT 'other', day, plan FROM tenant_plans",
        // An attempt pays less, and every sum agrees.
        "INSERT INTO entries SELECT epoch_id, block, 100000 + account, 1,
           account, CASE account WHEN 1 THEN -3 ELSE 3 END, caller_id, sequence, request_id, attempt, NULL, 0
           FROM (SELECT epoch_id, block, caller_id, sequence, request_id, attempt FROM entries
             WHERE block = 4 AND account = 1), (SELECT 1 AS account UNION SELECT 4);
         UPDATE daily SET attributed_ns = attributed_ns - 3, entries = entries + 1",
        "UPDATE requests SET reference_ns = reference_ns - 3 WHERE reference_ns = 4;
         UPDATE daily SET reference_ns = reference_ns - 3",
    ] {
        let found = found_after(&path, change);
        assert!(found.iter().any(|it| it.kind != "refused"), "{change}: {found:?}");
    }
    let sound = Ledger::open_read_only(&path).expect("opens").check();
    assert_eq!(sound.iter().filter(|it| it.kind != "refused").count(), 0, "{sound:?}");
}

/// Returns the findings in a copy of the ledger at `path` after `change`.
fn found_after(path: &Path, change: &str) -> Vec<Finding> {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("copy.db");
    let from = rusqlite::Connection::open(path).expect("opens");
    from.execute("VACUUM INTO ?1", [copy.to_str().expect("UTF-8")]).expect("copies");
    change_in(&copy, change);
    Ledger::open_read_only(&copy).expect("opens").check()
}

fn change_in(path: &Path, change: &str) {
    let changed = rusqlite::Connection::open(path).and_then(|it| {
        it.execute_batch(change)?;
        Ok(it.total_changes())
    });
    assert!(changed.expect(change) > 0, "{change} changed nothing");
}
