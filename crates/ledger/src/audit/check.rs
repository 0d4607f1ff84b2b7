//! The audit log as a part of the ledger's check: the chain holds, the
//! checkpoints are of this chain and signed by keys that it names, and each row
//! says what its record says. Whether those keys are the right ones is for who
//! has them from elsewhere to judge.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rusqlite::{Connection, OptionalExtension};
use serde_json::Value;
use tollgate_domain::{
    Attempt, Caller, DeviceClass, DeviceNanos, ModelName, RequestId, Usage, UtcTime, WorkerEpoch,
    WorkerName,
};

use super::note::{hex, is_signed};
use super::record::{Before, Body, body_of, rest_of, text_of};
use super::tree::{Frontier, Hash, is_kept, leaf};
use crate::act::{FaultCap, RefusedBlock};
use crate::query::{caller, name};
use crate::{LedgerError, archive, plans};

/// Tells `add` of everything about the log itself that does not hold.
pub(crate) fn log(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    chain(connection, add)?;
    signatures(connection, add)?;
    one_record_each(connection, add)?;
    actions(connection, add)?;
    caps(connection, add)?;
    refused(connection, add)?;
    tenant_plans(connection, add)?;
    before(connection, add)
}

/// Whether the record of number `seq` says `body`. What is older than the log
/// has no record.
pub(crate) fn says(
    connection: &Connection,
    seq: Option<u64>,
    body: &Body<'_>,
) -> Result<bool, LedgerError> {
    let Some(seq) = seq else { return Ok(true) };
    let record: Option<String> = connection
        .prepare_cached("SELECT record FROM records WHERE seq = ?1")?
        .query_row([seq], |row| row.get(0))
        .optional()?;
    let Some(record) = record else { return Ok(false) };
    Ok(rest_of(seq, &record) == body_of(body)?.strip_prefix('{'))
}

/// Walks the records from the first that is here: numbers, hashes, tree and checkpoints.
pub(crate) fn chain(
    connection: &Connection,
    add: &mut dyn FnMut(String),
) -> Result<(), LedgerError> {
    let mut signed = connection.prepare("SELECT size, note FROM checkpoints ORDER BY size")?;
    let mut signed = signed.query([])?;
    let mut next = checkpoint(&mut signed)?;
    let (mut frontier, mut last) = match archive::base(connection)? {
        None => (Frontier::default(), [0; 32]),
        Some(base) => (Frontier::load(connection, base.size)?, base.last),
    };
    // The last archived record's checkpoint is kept: it proves where this begins.
    if frontier.size() > 0 {
        match next.take_if(|(size, _)| *size == frontier.size()) {
            Some((_, root)) if root == Some(frontier.root()) => next = checkpoint(&mut signed)?,
            _ => add(format!("records before {} are not what was signed", frontier.size())),
        }
    }
    let mut statement = connection.prepare("SELECT seq, hash, record FROM records ORDER BY seq")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (seq, stored, record): (u64, Vec<u8>, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let expected = frontier.size();
        if seq != expected {
            add(format!("record {expected} is missing"));
            return Ok(());
        }
        let text = text_of(seq, &last, &record);
        let hash = leaf(text.as_bytes());
        if stored != hash {
            add(format!("record {seq} or the hash before it was altered"));
        } else if matches!(text, Cow::Borrowed(whole)
            if !whole.starts_with(&format!("{{\"seq\":{seq},\"prev\":\"{}\",", hex(&last))))
        {
            add(format!("record {seq} does not follow the one before it"));
        }
        // As it stands: what was altered here is told once, and not of all that follow.
        last = Hash::try_from(stored).unwrap_or(hash);
        let mut nodes = Vec::new();
        frontier.push(hash, |level, position, hash| nodes.push((level, position, *hash)));
        for (level, position, hash) in nodes.into_iter().filter(|node| is_kept(node.0)) {
            let kept: Option<Vec<u8>> = connection
                .prepare_cached("SELECT hash FROM record_nodes WHERE level = ?1 AND position = ?2")?
                .query_row((level, position), |row| row.get(0))
                .optional()?;
            if kept.as_deref() != Some(&hash[..]) {
                add(format!("hash {position} of level {level} is not that of the records"));
            }
        }
        while let Some((size, root)) = next.take_if(|(size, _)| *size <= frontier.size()) {
            if size != frontier.size() || root != Some(frontier.root()) {
                add(format!("the checkpoint of {size} records is not of these"));
            }
            next = checkpoint(&mut signed)?;
        }
    }
    if let Some((size, _)) = next {
        add(format!("{size} records were signed, there are {}", frontier.size()));
    }
    Ok(())
}

/// The keys that starts have recorded, and the last start. An archive's record
/// names those of the starts that it holds.
pub(crate) fn keys(connection: &Connection) -> Result<(Vec<String>, u64), LedgerError> {
    let (mut keys, mut last_start) = (Vec::new(), 0);
    records_of(connection, "config.loaded", |seq, record| {
        if let Some(key) = record.as_ref().and_then(|it| it.pointer("/detail/audit_key")?.as_str())
        {
            keys.push(key.to_owned());
            last_start = seq;
        }
        let archived = record.as_ref().and_then(|it| it.pointer("/detail/audit_keys")?.as_array());
        let archived = archived.into_iter().flatten().filter_map(Value::as_str);
        keys.extend(archived.map(str::to_owned));
    })?;
    keys.sort();
    keys.dedup();
    Ok((keys, last_start))
}

/// Calls `each` with number and content of every record of `operation` and of
/// every archive, which tells what those said that left with it; no content
/// where it is no JSON.
pub(crate) fn records_of(
    connection: &Connection,
    operation: &str,
    mut each: impl FnMut(u64, Option<Value>),
) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT seq, record FROM records
         WHERE instr(record, '\"operation.type\":\"' || ?1 || '\"') > 0
           OR instr(record, '\"operation.type\":\"ledger.archived\"') > 0 ORDER BY seq",
    )?;
    let mut rows = statement.query([operation])?;
    while let Some(row) = rows.next()? {
        each(row.get(0)?, serde_json::from_str(&row.get::<_, String>(1)?).ok());
    }
    Ok(())
}

/// Each checkpoint is signed by a key that a start has recorded. A log none
/// of whose starts did so (a test's) says nothing of its keys.
fn signatures(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    let (keys, last_start) = keys(connection)?;
    if keys.is_empty() {
        return Ok(());
    }
    let mut notes = connection.prepare("SELECT size, note FROM checkpoints ORDER BY size")?;
    let mut rows = notes.query([])?;
    while let Some(row) = rows.next()? {
        let (size, note): (u64, String) = (row.get(0)?, row.get(1)?);
        // A start may sign with a new key just before it says so.
        if !is_signed(&note, &keys).unwrap_or(size > last_start) {
            add(format!("the checkpoint of {size} records is not signed by a key of this log"));
        }
    }
    Ok(())
}

/// Size and root of the next checkpoint; no root where it cannot be read.
fn checkpoint(rows: &mut rusqlite::Rows<'_>) -> Result<Option<(u64, Option<Hash>)>, LedgerError> {
    let Some(row) = rows.next()? else { return Ok(None) };
    let (size, note): (u64, String) = (row.get(0)?, row.get(1)?);
    let mut lines = note.lines().skip(1);
    let stated = lines.next().and_then(|size| size.parse::<u64>().ok());
    let root = lines.next().and_then(|root| STANDARD.decode(root).ok());
    let root = root.and_then(|root| Hash::try_from(root).ok());
    Ok(Some((size, root.filter(|_| stated == Some(size)))))
}

/// Every record is some row's, every row's record is its own.
fn one_record_each(
    connection: &Connection,
    add: &mut dyn FnMut(String),
) -> Result<(), LedgerError> {
    let first = archive::base(connection)?.map_or(0, |base| base.size);
    let (records, rows): (u64, u64) = connection.query_row(
        &format!(
            "SELECT (SELECT count(*) FROM records),
               (SELECT count(DISTINCT record_seq) FROM ({}) WHERE record_seq >= ?1)",
            OF_ROWS.join(" UNION ALL ")
        ),
        [first],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    if records != rows {
        add(format!("there are {records} records, {rows} of them of a row"));
    }
    Ok(())
}

fn actions(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    let first = archive::base(connection)?.map_or(0, |base| base.size);
    let mut statement = connection.prepare(
        "SELECT id, record FROM recorded_actions LEFT JOIN records ON seq = record_seq
         WHERE record_seq >= ?1",
    )?;
    let mut rows = statement.query([first])?;
    while let Some(row) = rows.next()? {
        let (id, record): (String, Option<String>) = (row.get(0)?, row.get(1)?);
        let record: Option<Value> = record.and_then(|text| serde_json::from_str(&text).ok());
        if record.is_none_or(|record| record["id"] != id.as_str()) {
            add(format!("action {id} is not what its record says"));
        }
    }
    Ok(())
}

fn caps(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT tenant, key, request_id, attempt, model, device_class, at_utc_ns, prompt_tokens,
           cached_tokens, completion_tokens, attributed_ns, reference_ns, record_seq
         FROM fault_caps JOIN callers ON callers.id = caller_id WHERE record_seq IS NOT NULL",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let Caller { tenant, key } = caller(row, 0)?;
        let cap = FaultCap {
            caller: Caller { tenant, key },
            attempt: Attempt {
                request: name(RequestId::new(&row.get::<_, String>(2)?))?,
                attempt: row.get(3)?,
            },
            model: name(ModelName::new(&row.get::<_, String>(4)?))?,
            class: name(DeviceClass::new(&row.get::<_, String>(5)?))?,
            at: UtcTime(row.get(6)?),
            payable: Usage {
                prompt_tokens: row.get(7)?,
                cached_tokens: row.get(8)?,
                completion_tokens: row.get(9)?,
                attributed: DeviceNanos(row.get(10)?),
                reference: DeviceNanos(row.get(11)?),
            },
        };
        if !says(connection, row.get(12)?, &Body::cap(&cap))? {
            add(format!("the cap on {} is not what its record says", cap.attempt.request));
        }
    }
    Ok(())
}

fn refused(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT worker, epoch, block, reason, at_utc_ns, record_seq
         FROM refused_blocks JOIN epochs ON epochs.id = epoch_id WHERE record_seq IS NOT NULL",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let refused = RefusedBlock {
            worker: name(WorkerName::new(&row.get::<_, String>(0)?))?,
            epoch: name(WorkerEpoch::try_from(row.get::<_, String>(1)?))?,
            number: row.get(2)?,
            reason: row.get(3)?,
            at: UtcTime(row.get(4)?),
        };
        if !says(connection, row.get(5)?, &Body::refused(&refused))? {
            let RefusedBlock { epoch, number, .. } = refused;
            add(format!("refused block {number} of {epoch} is not what its record says"));
        }
    }
    Ok(())
}

/// Statements are priced by them.
fn tenant_plans(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    let (kept, recorded) = (plans::kept(connection)?, plans::recorded(connection)?);
    let Some(recorded) = recorded else {
        add("a record of plans in force cannot be understood".to_owned());
        return Ok(());
    };
    for tenant in kept.keys().chain(recorded.keys().filter(|it| !kept.contains_key(*it))) {
        if kept.get(tenant) != recorded.get(tenant) {
            add(format!("the plans of tenant {tenant} are not what their records say"));
        }
    }
    Ok(())
}

/// What is older than the log is still what its first record says of it.
fn before(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    if archive::base(connection)?.is_some() {
        // Only what has a record is archived, and the first record with it.
        if !Before::read(connection, 0)?.is_nothing() {
            add("a row has lost its record".to_owned());
        }
        return Ok(());
    }
    let first: Option<String> = connection
        .query_row("SELECT record FROM records WHERE seq = 0", [], |row| row.get(0))
        .optional()?;
    let first: Option<Value> = first.and_then(|text| serde_json::from_str(&text).ok());
    let Some(stated) = first.as_ref().and_then(|first| first.pointer("/detail/before")) else {
        add("record 0 is not the beginning of a log".to_owned());
        return Ok(());
    };
    let format = stated["format"].as_u64().unwrap_or_default();
    let found = Before::read(connection, format as u32)?;
    let holds = match stated {
        Value::Null => found.is_nothing(),
        stated => serde_json::to_value(&found).is_ok_and(|found| found == *stated),
    };
    if !holds {
        add("what is older than the audit log is not what its first record says".to_owned());
    }
    Ok(())
}

/// Where the numbers of records stand.
const OF_ROWS: [&str; 5] = [
    "SELECT record_seq FROM blocks",
    "SELECT record_seq FROM attempts",
    "SELECT record_seq FROM fault_caps",
    "SELECT record_seq FROM refused_blocks",
    "SELECT record_seq FROM recorded_actions",
];
