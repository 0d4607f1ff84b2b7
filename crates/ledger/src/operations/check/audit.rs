//! Check of the audit log: the chain holds, the checkpoints belong to this chain and
//! are signed by keys that it names, and each row is what its record states. A
//! verifier that has the keys from elsewhere judges if they are the right ones.

use std::borrow::Cow;

use serde_json::Value;

use super::Findings;
use crate::act::RefusedBlock;
use crate::error::LedgerError;
use crate::hex::hex;
use crate::operations::chain::frontier;
use crate::operations::migrate::describe_unrecorded;
use crate::operations::plans::recorded;
use crate::rows::records::{Hash, NodeRow, RecordRow};
use crate::rows::{
    Tables, actions, archives, checkpoints, fault_caps, plans, records, refused_blocks,
};
use crate::rules::note::{Signature, check_signature, root_of};
use crate::rules::record::{Body, body_of, rest_of, text_of};
use crate::rules::tree::{Frontier, is_kept, leaf};

/// Checks everything about the log itself.
pub(super) fn log(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    chain(tables, findings)?;
    signatures(tables, findings)?;
    one_record_each(tables, findings)?;
    check_actions(tables, findings)?;
    caps(tables, findings)?;
    refused(tables, findings)?;
    tenant_plans(tables, findings)?;
    rows_before_the_log(tables, findings)
}

/// Returns true if the record of number `seq` states `body`. Rows that are older
/// than the log have no record and nothing to disagree with.
pub(super) fn states(
    tables: Tables<'_>,
    seq: Option<u64>,
    body: &Body<'_>,
) -> Result<bool, LedgerError> {
    let Some(seq) = seq else { return Ok(true) };
    let Some(record) = records::text_of(tables, seq)? else { return Ok(false) };
    // Records of older formats are stored whole, so both sides are compared without their
    // beginning.
    Ok(rest_of(seq, &record) == body_of(body)?.strip_prefix('{'))
}

/// Walks the records from the first that is here and checks numbers, hashes, tree
/// and checkpoints.
pub(super) fn chain(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut walk = Walk::begin(tables, findings)?;
    records::each(tables, None, |row| walk.record(row, findings))?;
    // After a missing record this finding would only repeat the first one.
    if let Some((size, _)) = walk.next.filter(|_| !walk.is_cut_short) {
        let found = walk.frontier.size();
        findings.add("audit", format!("{size} records were signed, there are {found}"));
    }
    Ok(())
}

/// A walk along the chain.
struct Walk<'t> {
    tables: Tables<'t>,
    frontier: Frontier,
    /// The hash of the record before the next one.
    last: Hash,
    /// The next checkpoint.
    next: Option<SignedRoot>,
    /// True after a missing record: the records behind it cannot be judged.
    is_cut_short: bool,
}

/// Size and root of a checkpoint; no root where the note cannot be read.
type SignedRoot = (u64, Option<Hash>);

impl<'t> Walk<'t> {
    fn begin(tables: Tables<'t>, findings: &mut Findings) -> Result<Self, LedgerError> {
        let mut next = checkpoint_after(tables, None)?;
        let (frontier, last) = match archives::newest(tables)? {
            None => (Frontier::default(), [0; 32]),
            Some(archive) => (frontier(tables, archive.size)?, archive.last),
        };
        // The checkpoint of the last archived record is kept: it proves the place at
        // which the records here begin.
        let size = frontier.size();
        if size > 0 {
            match next.take_if(|(signed, _)| *signed == size) {
                Some((_, root)) if root == Some(frontier.root()) => {
                    next = checkpoint_after(tables, Some(size))?;
                }
                _ => {
                    let message = format!("records before {size} are not what was signed");
                    findings.add("audit", message);
                }
            }
        }
        Ok(Self { tables, frontier, last, next, is_cut_short: false })
    }

    /// Checks the next record. Returns false where the walk cannot go on.
    fn record(&mut self, row: RecordRow, findings: &mut Findings) -> Result<bool, LedgerError> {
        let RecordRow { seq, hash: stored, record } = row;
        let expected = self.frontier.size();
        if seq != expected {
            findings.add("audit", format!("record {expected} is missing"));
            self.is_cut_short = true;
            return Ok(false);
        }
        let text = text_of(seq, &self.last, &record);
        let hash = leaf(text.as_bytes());
        if stored != hash {
            findings.add("audit", format!("record {seq} or the hash before it was altered"));
        } else if matches!(text, Cow::Borrowed(whole)
            if !whole.starts_with(&format!("{{\"seq\":{seq},\"prev\":\"{}\",", hex(&self.last))))
        {
            findings.add("audit", format!("record {seq} does not follow the record before it"));
        }
        // The stored hash goes on: an alteration is reported once, not for every
        // record behind it.
        self.last = Hash::try_from(stored).unwrap_or(hash);
        let mut completed = Vec::new();
        self.frontier.push(hash, |node| completed.push(node));
        for node in completed.into_iter().filter(|node| is_kept(node.level)) {
            self.node(node, findings)?;
        }
        self.checkpoints(findings)?;
        Ok(true)
    }

    /// Checks a kept inner node.
    fn node(&self, node: NodeRow, findings: &mut Findings) -> Result<(), LedgerError> {
        let NodeRow { level, position, hash } = node;
        let kept = records::inner_node(self.tables, level, position)?;
        if kept.as_deref() != Some(&hash[..]) {
            let message = format!("hash {position} of level {level} is not that of the records");
            findings.add("audit", message);
        }
        Ok(())
    }

    /// Checks the checkpoints that cover no more than the records so far.
    fn checkpoints(&mut self, findings: &mut Findings) -> Result<(), LedgerError> {
        let here = self.frontier.size();
        while let Some((size, root)) = self.next.take_if(|(size, _)| *size <= here) {
            if size != here || root != Some(self.frontier.root()) {
                let message = format!("the checkpoint of {size} records is not of these records");
                findings.add("audit", message);
            }
            self.next = checkpoint_after(self.tables, Some(size))?;
        }
        Ok(())
    }
}

/// Returns the first checkpoint of more than `size` records, or the first of all.
fn checkpoint_after(
    tables: Tables<'_>,
    size: Option<u64>,
) -> Result<Option<SignedRoot>, LedgerError> {
    let next = checkpoints::next_after(tables, size)?;
    Ok(next.map(|(size, note)| (size, root_of(&note, size))))
}

/// The keys that the starts of gateways recorded.
#[derive(Default)]
pub(crate) struct StartKeys {
    /// The public keys, sorted.
    pub(crate) keys: Vec<String>,
    /// The record of the last start.
    last_start: u64,
}

/// Returns the keys that starts have recorded. An archive's record repeats the keys
/// of the starts that left with it.
pub(crate) fn start_keys(tables: Tables<'_>) -> Result<StartKeys, LedgerError> {
    let mut found = StartKeys::default();
    records::each_of_operation(tables, "config.loaded", |seq, record| {
        // The walk along the chain reports a record that is not what was written.
        let Ok(record) = serde_json::from_str::<Value>(record) else { return };
        if let Some(key) = record.pointer("/detail/audit_key").and_then(Value::as_str) {
            found.keys.push(key.to_owned());
            found.last_start = seq;
        }
        let archived = record.pointer("/detail/audit_keys").and_then(Value::as_array);
        let archived = archived.into_iter().flatten().filter_map(Value::as_str);
        found.keys.extend(archived.map(str::to_owned));
    })?;
    found.keys.sort();
    found.keys.dedup();
    Ok(found)
}

/// Checks that each checkpoint is signed by a key that a start has recorded. A log
/// without any recorded key, as in a test, is not judged.
fn signatures(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    let StartKeys { keys, last_start } = start_keys(tables)?;
    if keys.is_empty() {
        return Ok(());
    }
    checkpoints::each(tables, |size, note| {
        let is_signed = match check_signature(note, &keys) {
            Signature::Good => true,
            Signature::Bad => false,
            // A start may sign with a new key just before it records the key.
            Signature::UnknownKey => size > last_start,
        };
        if !is_signed {
            let message =
                format!("the checkpoint of {size} records is not signed by a key of this log");
            findings.add("audit", message);
        }
    })
}

/// Checks that every record belongs to a row, and every row has its own record.
fn one_record_each(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    let first = archives::first_record(tables)?;
    let (records, rows) = records::count_with_rows(tables, first)?;
    if records != rows {
        findings.add("audit", format!("there are {records} records, {rows} of them of a row"));
    }
    Ok(())
}

fn check_actions(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    let first = archives::first_record(tables)?;
    actions::each_from(tables, first, |id, record| {
        let record: Option<Value> = record.and_then(|text| serde_json::from_str(text).ok());
        if record.is_none_or(|record| record["id"] != id) {
            findings.add("audit", format!("action {id} is not what its record states"));
        }
    })
}

fn caps(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    fault_caps::each_recorded(tables, |cap, record| {
        if !states(tables, Some(record), &Body::cap(&cap))? {
            let request = &cap.attempt.request;
            findings.add("audit", format!("the cap on {request} is not what its record states"));
        }
        Ok(())
    })
}

fn refused(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for (refused, record) in refused_blocks::recorded(tables)? {
        if !states(tables, Some(record), &Body::refused(&refused))? {
            let RefusedBlock { epoch, number, .. } = refused;
            let message =
                format!("skipped block {number} of {epoch} is not what its record states");
            findings.add("audit", message);
        }
    }
    Ok(())
}

/// Checks the plans, because statements use their prices.
fn tenant_plans(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    let kept = plans::all(tables)?;
    let Some(recorded) = recorded(tables)? else {
        let message = "a record of plans in force cannot be understood";
        findings.add("audit", message.to_owned());
        return Ok(());
    };
    // Both sides are walked, because a tenant may be missing on either side.
    for tenant in kept.keys().chain(recorded.keys().filter(|it| !kept.contains_key(*it))) {
        if kept.get(tenant) != recorded.get(tenant) {
            let message = format!("the plans of tenant {tenant} are not what their records state");
            findings.add("audit", message);
        }
    }
    Ok(())
}

/// Checks that the rows that are older than the log are what its first record
/// states.
fn rows_before_the_log(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    if archives::newest(tables)?.is_some() {
        // Only rows with a record are archived, and the first record left with them.
        if !describe_unrecorded(tables, 0)?.is_nothing() {
            findings.add("audit", "a row has lost its record".to_owned());
        }
        return Ok(());
    }
    let first: Option<Value> =
        records::text_of(tables, 0)?.and_then(|text| serde_json::from_str(&text).ok());
    let Some(stated) = first.as_ref().and_then(|first| first.pointer("/detail/before")) else {
        findings.add("audit", "record 0 is not the beginning of a log".to_owned());
        return Ok(());
    };
    let format = stated["format"].as_u64().unwrap_or_default();
    // A number that the cast shortens differs from the stated one below and is found.
    let found = describe_unrecorded(tables, format as u32)?;
    let holds = match stated {
        Value::Null => found.is_nothing(),
        stated => serde_json::to_value(&found).is_ok_and(|found| found == *stated),
    };
    if !holds {
        let message = "rows that are older than the audit log are not what its first record states";
        findings.add("audit", message.to_owned());
    }
    Ok(())
}
