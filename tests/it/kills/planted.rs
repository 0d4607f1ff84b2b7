//! A test of the checker itself: each planted loss, duplicate or change is found under
//! its kind.

use std::fs;
use std::path::Path;

use rusqlite::Connection;

use super::checker::{Checker, ClientRecord, End, Finding, journals};
use super::{KillRun, copy, seed};

/// Returns the name of a finding's kind.
fn kind(finding: &Finding) -> &'static str {
    match finding {
        Finding::Lost(_) => "lost",
        Finding::Double(_) => "double",
        Finding::Altered(_) => "altered",
        Finding::OverCap(_) => "over its cap",
        Finding::Client(_) => "client",
    }
}

/// Changes to the ledger, each with a finding that must follow.
const IN_THE_LEDGER: [(&str, &str); 17] = [
    ("DELETE FROM requests WHERE request_id = ?1", "lost"),
    ("DELETE FROM attempts WHERE request_id = ?1", "lost"),
    ("DELETE FROM entries WHERE request_id = ?1", "altered"),
    (
        "DELETE FROM blocks WHERE (epoch_id, block) =
        (SELECT epoch_id, block FROM attempts WHERE request_id = ?1)",
        "lost",
    ),
    ("DELETE FROM epochs WHERE id = (SELECT epoch_id FROM attempts WHERE request_id = ?1)", "lost"),
    (
        "UPDATE epochs SET ended = 0
        WHERE id = (SELECT epoch_id FROM attempts WHERE request_id = ?1)",
        "lost",
    ),
    (
        "INSERT INTO requests SELECT request_id, caller_id, attempt + 9, model, device_class, day,
        finished_utc_ns, counted, prompt_tokens, cached_tokens, completion_tokens, reference_ns,
        queue_ns, prefill_ns, decode_ns, reason, tier FROM requests WHERE request_id = ?1",
        "double",
    ),
    ("UPDATE requests SET request_id = 'req-x' WHERE request_id = ?1", "double"),
    ("UPDATE requests SET reference_ns = reference_ns - 1 WHERE request_id = ?1", "altered"),
    (
        "UPDATE requests SET completion_tokens = completion_tokens + 1 WHERE request_id = ?1",
        "altered",
    ),
    ("UPDATE entries SET amount_ns = amount_ns + 1 WHERE request_id = ?1", "altered"),
    (
        "UPDATE entries SET amount_ns = amount_ns + iif(request_id = ?1, -1, 1)
        WHERE request_id = ?1 OR (epoch_id, block, account) IN
          (SELECT epoch_id, block, 3 FROM entries WHERE request_id = ?1)",
        "altered",
    ),
    (
        "UPDATE daily SET attributed_ns = attributed_ns + 1
        WHERE caller_id = (SELECT caller_id FROM requests WHERE request_id = ?1)",
        "altered",
    ),
    (
        "UPDATE callers SET tenant = 'acme-2'
        WHERE id = (SELECT caller_id FROM requests WHERE request_id = ?1)",
        "altered",
    ),
    (
        "UPDATE records SET record = replace(record, ?1, 'req-x') WHERE record LIKE '%' || ?1 || '%'",
        "altered",
    ),
    ("DELETE FROM records WHERE record LIKE '%' || ?1 || '%'", "altered"),
    (
        "DELETE FROM records WHERE seq = (SELECT max(seq) FROM records) AND ?1 IS NOT NULL
        OR record LIKE '%\"operation.type\":\"metering\"%'",
        "altered",
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checker_finds_each_planted_fault() {
    let mut field = KillRun::start(seed(), 30).await;
    field.kill_worker().await;
    let mut field = field.kill_gateway().await.end().await;
    let records = field.load.records();
    assert_eq!(field.findings(&records), vec![]);
    let answered =
        records.iter().find(|it| matches!(it.end, End::Whole { .. })).expect("an answer");
    let id = answered.id.clone().expect("an id");
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = field.gateway.data().join("ledger.db");
    let open = Connection::open(&ledger).expect("opens");
    open.pragma_update(None, "wal_checkpoint", "TRUNCATE").expect("one file");
    drop(open);

    for (change, wanted) in IN_THE_LEDGER {
        let changed = folder.path().join("ledger.db");
        fs::copy(&ledger, &changed).expect("copies");
        let open = Connection::open(&changed).expect("opens");
        open.pragma_update(None, "foreign_keys", false).expect("as a vandal would");
        let rows = open.execute(change, [&id]).expect("changes");
        assert!(rows > 0, "{change} changes nothing");
        drop(open);
        expect(&mut field, &changed, None, &records, wanted, change);
    }

    // A changed journal, or one with more blocks than the ledger.
    let names = fs::read_dir(&field.witness.folder).expect("reads").map_while(Result::ok);
    let longest = names.max_by_key(|it| it.metadata().map_or(0, |it| it.len())).expect("a file");
    let bytes = fs::read(longest.path()).expect("reads");
    let mut flipped = bytes.clone();
    flipped[payload_near(&bytes, bytes.len() / 2)] ^= 4;
    let mut torn = bytes.clone();
    torn.truncate(bytes.len() / 2);
    let mut more = bytes.clone();
    more.extend(frame(&[4, 0, 9])); // nine more ns of loss,
    more.extend(frame(&[6, 1, 1])); // and the end of a block
    for (bytes, wanted) in [(flipped, "altered"), (torn, "double"), (more, "lost")] {
        let journals = folder.path().join("journals");
        copy(&field.witness.folder, &journals);
        fs::write(journals.join(longest.file_name()), bytes).expect("writes");
        expect(&mut field, &ledger, Some(&journals), &records, wanted, "a journal");
    }

    // Clients with other records than the ledger's.
    let with = |end: End, id: &str| {
        let mut records = records.clone();
        records.push(ClientRecord { id: Some(id.to_owned()), tenant: "acme", content: 0, end });
        records
    };
    let whole = |prompt, completion| End::Whole { prompt, completion };
    for (records, wanted) in [
        (with(whole(1, 1), "req-never"), "lost"),
        (with(End::Wrong("no end".to_owned()), "req-odd"), "client"),
        (records.iter().filter(|it| it.id.is_none()).cloned().collect(), "double"),
        (changed(&records, &id, |record| record.end = whole(1, 1)), "altered"),
        (changed(&records, &id, |record| record.end = End::Refused(429)), "double"),
        (changed(&records, &id, |record| record.tenant = "other"), "altered"),
    ] {
        expect(&mut field, &ledger, None, &records, wanted, "a client");
    }
    field.cap_ns = 1;
    expect(&mut field, &ledger, None, &records, "over its cap", "a cap");
    field.cap_ns = i64::MAX;
    field.posted.insert(id, (1, 1));
    expect(&mut field, &ledger, None, &records, "altered", "a final figure");
}

fn changed(
    records: &[ClientRecord],
    id: &str,
    change: impl Fn(&mut ClientRecord),
) -> Vec<ClientRecord> {
    let mut records = records.to_vec();
    records.iter_mut().filter(|it| it.id.as_deref() == Some(id)).for_each(change);
    records
}

/// Returns the place of a payload's first byte, in the first frame that ends behind `place`. A
/// change of a frame's length could make the rest look like a torn end.
fn payload_near(journal: &[u8], place: usize) -> usize {
    let mut at = journals::MAGIC.len();
    loop {
        let length: [u8; 4] = journal[at..at + 4].try_into().expect("four bytes");
        let end = at + 8 + u32::from_le_bytes(length) as usize;
        if end > place {
            return at + 8;
        }
        at = end;
    }
}

fn frame(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_le_bytes();
    let sum = journals::crc32(&[&length, payload]).to_le_bytes();
    [&length, &sum, payload].concat()
}

fn expect(
    field: &mut KillRun,
    ledger: &Path,
    journals: Option<&Path>,
    records: &[ClientRecord],
    wanted: &str,
    planted: &str,
) {
    // A new checker has no memory of unchanged journals.
    field.checker = Checker::default();
    // Every request without an id may be in the ledger, and so may the first ones.
    let sent = super::FIRST_REQUESTS + records.iter().filter(|it| it.id.is_none()).count();
    let found = field.checker.findings(&super::Evidence {
        ledger,
        journals: journals.unwrap_or(&field.witness.folder),
        clients: records,
        unnamed: sent,
        caps: &[("capped", field.cap_ns)],
        posted: &field.posted,
    });
    assert!(found.iter().any(|it| kind(it) == wanted), "{planted}: {wanted}: {found:#?}");
}
