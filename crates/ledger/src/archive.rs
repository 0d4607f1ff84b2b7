//! What has left the database: all that the first records of the log told of,
//! once it is copied elsewhere. The sums by day stay as they are, so usage,
//! caps and statements do not change. What else is needed of it is kept in sums:
//! where a device's time went, what a day's records summed to, which attempts
//! ended, and the tree over its records, from which the log goes on.
//!
//! A prefix of the log goes, up to a checkpoint, never rows by their date: so
//! each record is either in the archive or here, and the two follow one another.

use std::path::Path;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use sha2::{Digest, Sha256};
use tollgate_domain::{Attempt, UtcMonth, UtcTime};

use crate::audit::chain::{Chain, hash_before};
use crate::audit::note::hex;
use crate::audit::record::Before;
use crate::audit::tree::{Frontier, Hash};
use crate::schema::{FORMAT, account};
use crate::{AdminAction, Ledger, LedgerError, LedgerReader, WalRewriter, plans, post, schema};

/// Which records can leave the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Archivable {
    /// The first that is still here.
    pub from: u64,
    /// The first that stays: the size of a checkpoint.
    pub to: u64,
}

/// Why nothing can be archived.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The ledger cannot be read or written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// Usage of these months may still come in.
    #[error("{month} and the months before it are settled a day after their end, and no sooner")]
    Unsettled {
        /// The last of them.
        month: UtcMonth,
    },
    /// No checkpoint covers old records only.
    #[error(
        "nothing to archive: no checkpoint covers records of earlier months alone, all of them settled, that are not archived yet"
    )]
    Nothing,
    /// What is older than the log has no records that could follow one another.
    #[error("what is older than the audit log cannot be archived")]
    OlderThanTheLog,
}

impl LedgerReader {
    /// What can leave the database of the months before `before`: the records
    /// up to the last checkpoint that covers nothing later, nothing that has
    /// not ended, and no attempt at whose correction it would cut.
    ///
    /// # Errors
    /// [`ArchiveError`].
    pub fn archivable(&self, before: UtcMonth, now: UtcTime) -> Result<Archivable, ArchiveError> {
        let first = before.first_day();
        if now.0 < first.start().0.saturating_add(SETTLING_NS) {
            let last = tollgate_domain::UtcDay(first.0.saturating_sub(1));
            return Err(ArchiveError::Unsettled { month: last.month() });
        }
        self.read(|connection| {
            if !Before::read(connection, FORMAT)?.is_nothing() {
                return Ok(Err(ArchiveError::OlderThanTheLog));
            }
            let from = base(connection)?.map_or(0, |base| base.size);
            let to = last_checkpoint(connection, first.0, first.start().0)?;
            Ok(to
                .filter(|to| *to > from)
                .map(|to| Archivable { from, to })
                .ok_or(ArchiveError::Nothing))
        })?
    }

    /// The number of the first record that is not archived.
    ///
    /// # Errors
    /// Storage errors.
    pub fn first_record(&self) -> Result<u64, LedgerError> {
        self.read(|connection| Ok(base(connection)?.map_or(0, |base| base.size)))
    }
}

impl Ledger {
    /// Takes the records before `to` and all that they tell of out of the
    /// ledger at `path`, and records that with `action`, whose detail is added
    /// to. Whoever calls has a copy, and sees to it that nobody else writes. The
    /// file is as small as what is left.
    ///
    /// # Errors
    /// [`LedgerError`]; nothing has changed then.
    pub fn compact(path: &Path, to: u64, mut action: AdminAction) -> Result<(), LedgerError> {
        let mut connection = schema::open_writer(path, None, &WalRewriter::default())?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut chain = Chain::load(&transaction, false)?;
        let last = hash_before(&transaction, to)?;
        let frontier = Frontier::load(&transaction, to)?;
        let keys = crate::audit::check::keys(&transaction)?.0;
        transaction.execute_batch(&moves(to))?;
        let mut level = u64::BITS;
        for peak in frontier.peaks() {
            level = (0..level).rev().find(|level| to >> level & 1 == 1).unwrap_or_default();
            transaction.execute(
                "INSERT INTO record_nodes (level, position, hash) VALUES (?1, ?2, ?3)",
                params![level, (to >> level) - 1, &peak[..]],
            )?;
        }
        transaction.execute(
            "INSERT INTO archives (size, last_hash, record_seq) VALUES (?1, ?2, ?3)",
            params![to, &last[..], chain.size()],
        )?;
        action.detail["to"] = to.into();
        action.detail["audit_keys"] = keys.into();
        action.detail["sums_sha256"] = sums_sha256(&transaction)?.into();
        post::record_action(&transaction, &mut chain, &action)?;
        plans::archive(&transaction, &mut chain, &action)?;
        transaction.commit()?;
        connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE);")?;
        Ok(())
    }
}

/// Where the log in the database begins.
pub(crate) struct Base {
    /// The number of its first record.
    pub(crate) size: u64,
    /// The hash of the record before it.
    pub(crate) last: Hash,
    /// The record that tells of it.
    record_seq: u64,
}

/// The newest archive; `None` where nothing was archived.
pub(crate) fn base(connection: &Connection) -> Result<Option<Base>, LedgerError> {
    let row: Option<(u64, Vec<u8>, u64)> = connection
        .prepare_cached(
            "SELECT size, last_hash, record_seq FROM archives ORDER BY size DESC LIMIT 1",
        )?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((size, last, record_seq)) = row else { return Ok(None) };
    let last = Hash::try_from(last)
        .map_err(|_| LedgerError::Damaged("the last archived record's hash".to_owned()))?;
    Ok(Some(Base { size, last, record_seq }))
}

/// Whether an attempt is archived, and whether its worker had recorded its end.
pub(crate) fn ended(
    connection: &Connection,
    caller: i64,
    attempt: &Attempt,
) -> Result<Option<bool>, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT ended FROM archived_attempts
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .query_row(params![attempt.request.as_str(), caller, attempt.attempt], |row| row.get(0))
        .optional()?)
}

/// Whether block `number` of an epoch is archived.
pub(crate) fn has_block(
    connection: &Connection,
    epoch_id: i64,
    number: u64,
) -> Result<bool, LedgerError> {
    let last: Option<u64> = connection
        .prepare_cached("SELECT last_block FROM archived_epochs WHERE epoch_id = ?1")?
        .query_row([epoch_id], |row| row.get(0))
        .optional()?;
    Ok(last.is_some_and(|last| number <= last))
}

/// Whether records of one of the `callers` on these days are archived.
pub(crate) fn has_days(
    connection: &Connection,
    callers: &[(i64, String)],
    (first, last): (u32, u32),
) -> Result<bool, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT 1 FROM archived_days WHERE caller_id = ?1 AND day BETWEEN ?2 AND ?3",
    )?;
    for (caller, _) in callers {
        if statement.exists(params![caller, first, last])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The sums are what the record of the newest archive says of them.
pub(crate) fn check(
    connection: &Connection,
    add: &mut dyn FnMut(String),
) -> Result<(), LedgerError> {
    let stated: Option<String> = match base(connection)? {
        None => None,
        Some(Base { record_seq, .. }) => connection
            .query_row(
                "SELECT record ->> '$.detail.sums_sha256' FROM records WHERE seq = ?1",
                [record_seq],
                |row| row.get(0),
            )
            .optional()?
            .flatten(),
    };
    let found = sums_sha256(connection)?;
    let nothing = hex(&Sha256::digest(b""));
    if found != stated.unwrap_or(nothing) {
        add("the sums of what was archived are not those that were recorded".to_owned());
    }
    Ok(())
}

/// SHA-256 over what is kept of archives, a line a row. Of energy that nobody
/// told, no line says anything, as before any was known.
fn sums_sha256(connection: &Connection) -> Result<String, LedgerError> {
    let mut hash = Sha256::new();
    for query in SUMS {
        let mut statement = connection.prepare(query)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let text: String = row.get(0)?;
            hash.update(text.as_bytes());
            hash.update(b"\n");
        }
    }
    Ok(hex(&hash.finalize()))
}

const SUMS: [&str; 5] = [
    "SELECT json_array('archive', size, lower(hex(last_hash)), record_seq)
     FROM archives ORDER BY size",
    "SELECT iif(energy_mj IS NULL,
       json_array('epoch', epoch_id, blocks, last_block, last_step, ended, wall_ns, tenants_ns,
         overhead_ns, idle_ns, loss_ns),
       json_array('epoch', epoch_id, blocks, last_block, last_step, ended, wall_ns, tenants_ns,
         overhead_ns, idle_ns, loss_ns, energy_mj, tenants_mj, overhead_mj, idle_mj, loss_mj))
     FROM archived_epochs ORDER BY epoch_id",
    "SELECT iif(energy_mj IS NULL,
       json_array('day', day, caller_id, model, device_class, charges, entries, requests,
         prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns),
       json_array('day', day, caller_id, model, device_class, charges, entries, requests,
         prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns, energy_mj))
     FROM archived_days ORDER BY day, caller_id, model, device_class",
    "SELECT json_array('attempt', request_id, caller_id, attempt, ended)
     FROM archived_attempts ORDER BY request_id, caller_id, attempt",
    "SELECT json_array('share', request_id, caller_id, attempt, attributed_ns)
     FROM archived_shares ORDER BY request_id, caller_id, attempt",
];

/// The last checkpoint before anything of `day` or later, or open.
fn last_checkpoint(
    connection: &Connection,
    day: u32,
    start_ns: u64,
) -> Result<Option<u64>, LedgerError> {
    let start = start_ns as i64;
    let mut bound: u64 = connection.query_row(
        "SELECT min(
           (SELECT coalesce(max(size), 0) FROM checkpoints),
           (SELECT coalesce(min(record_seq), ?3) FROM blocks WHERE day >= ?1),
           (SELECT coalesce(min(record_seq), ?3) FROM attempts WHERE finished_utc_ns >= ?2),
           (SELECT coalesce(min(record_seq), ?3) FROM fault_caps WHERE at_utc_ns >= ?2),
           (SELECT coalesce(min(record_seq), ?3) FROM refused_blocks WHERE at_utc_ns >= ?2),
           (SELECT coalesce(min(blocks.record_seq), ?3) FROM entries
              JOIN blocks USING (epoch_id, block)
              LEFT JOIN requests ON requests.request_id = entries.request_id
                AND requests.caller_id = entries.caller_id
                AND requests.attempt = entries.attempt
              WHERE account = ?4 AND requests.request_id IS NULL
                AND NOT EXISTS (SELECT 1 FROM archived_attempts AS gone
                  WHERE gone.request_id = entries.request_id
                    AND gone.caller_id = entries.caller_id AND gone.attempt = entries.attempt)))",
        params![day, start, i64::MAX, account::TENANT],
        |row| row.get(0),
    )?;
    loop {
        let size: Option<u64> = connection.query_row(
            "SELECT max(size) FROM checkpoints WHERE size <= ?1",
            [bound],
            |row| row.get(0),
        )?;
        let Some(size) = size else { return Ok(None) };
        // A cap, what it corrects and what it charges go together or stay.
        let cut: Option<u64> = connection.query_row(
            "SELECT min(first) FROM (
               SELECT min(cap.record_seq, coalesce(min(blocks.record_seq), cap.record_seq),
                   coalesce(min(done.record_seq), cap.record_seq)) AS first,
                 max(cap.record_seq, coalesce(max(blocks.record_seq), 0),
                   coalesce(max(done.record_seq), 0)) AS last
               FROM fault_caps AS cap
               LEFT JOIN entries ON entries.request_id = cap.request_id
                 AND entries.caller_id = cap.caller_id AND entries.attempt = cap.attempt
               LEFT JOIN blocks USING (epoch_id, block)
               LEFT JOIN attempts AS done ON done.request_id = cap.request_id
                 AND done.caller_id = cap.caller_id AND done.attempt = cap.attempt
               GROUP BY cap.request_id, cap.caller_id, cap.attempt)
             WHERE first < ?1 AND last >= ?1",
            [size],
            |row| row.get(0),
        )?;
        match cut {
            None => return Ok(Some(size)),
            Some(first) => bound = first,
        }
    }
}

/// Sums up what the records before `to` tell of, and takes it away.
fn moves(to: u64) -> String {
    format!(
        "
CREATE TEMP TABLE gone AS
  SELECT request_id, caller_id, attempt, 1 AS ended FROM attempts WHERE record_seq < {to}
  UNION ALL
  SELECT request_id, caller_id, attempt, 0 FROM fault_caps AS cap WHERE record_seq < {to}
    AND NOT EXISTS (SELECT 1 FROM attempts AS done WHERE done.request_id = cap.request_id
      AND done.caller_id = cap.caller_id AND done.attempt = cap.attempt);
CREATE UNIQUE INDEX temp.gone_ids ON gone (request_id, caller_id, attempt);

INSERT INTO archived_days
SELECT day, caller_id, model, device_class, sum(charges), sum(entries), sum(requests),
  sum(prompt), sum(cached), sum(completion), sum(attributed), sum(reference), sum(energy)
FROM (
  SELECT blocks.day AS day, caller_id, model, device_class, 0 AS charges, 1 AS entries,
    0 AS requests, 0 AS prompt, 0 AS cached, 0 AS completion, amount_ns AS attributed,
    0 AS reference, energy_mj AS energy
  FROM blocks JOIN entries USING (epoch_id, block) JOIN epochs ON epochs.id = blocks.epoch_id
  WHERE record_seq < {to} AND account = 1
  UNION ALL
  SELECT day, caller_id, model, device_class, 1, 0, counted, prompt_tokens, cached_tokens,
    completion_tokens, 0, reference_ns, NULL
  FROM gone JOIN requests USING (request_id, caller_id, attempt))
WHERE true GROUP BY 1, 2, 3, 4
ON CONFLICT DO UPDATE SET charges = charges + excluded.charges,
  entries = entries + excluded.entries, requests = requests + excluded.requests,
  prompt_tokens = prompt_tokens + excluded.prompt_tokens,
  cached_tokens = cached_tokens + excluded.cached_tokens,
  completion_tokens = completion_tokens + excluded.completion_tokens,
  attributed_ns = attributed_ns + excluded.attributed_ns,
  reference_ns = reference_ns + excluded.reference_ns,
  energy_mj = coalesce(energy_mj + excluded.energy_mj, energy_mj, excluded.energy_mj);

INSERT INTO archived_epochs
SELECT epoch_id, sum(blocks), max(last_block), max(last_step), max(ended), sum(wall),
  sum(tenants), sum(overhead), sum(idle), sum(loss), -sum(energy) FILTER (WHERE account = 0),
  sum(energy) FILTER (WHERE account = 1), sum(energy) FILTER (WHERE account = 2),
  sum(energy) FILTER (WHERE account = 3), sum(energy) FILTER (WHERE account = 4)
FROM (
  SELECT epoch_id, 1 AS blocks, block AS last_block, last_step, last_of_epoch AS ended, 0 AS wall,
    0 AS tenants, 0 AS overhead, 0 AS idle, 0 AS loss, NULL AS account, NULL AS energy
  FROM blocks WHERE record_seq < {to}
  UNION ALL
  SELECT epoch_id, 1, block, 0, 0, 0, 0, 0, 0, 0, NULL, NULL FROM refused_blocks
  WHERE record_seq < {to}
  UNION ALL
  SELECT epoch_id, 0, 0, 0, 0, iif(account = 0, -amount_ns, 0), iif(account = 1, amount_ns, 0),
    iif(account = 2, amount_ns, 0), iif(account = 3, amount_ns, 0), iif(account = 4, amount_ns, 0),
    account, energy_mj
  FROM blocks JOIN entries USING (epoch_id, block) WHERE record_seq < {to})
WHERE true GROUP BY 1
ON CONFLICT DO UPDATE SET blocks = blocks + excluded.blocks,
  last_block = max(last_block, excluded.last_block),
  last_step = max(last_step, excluded.last_step), ended = max(ended, excluded.ended),
  wall_ns = wall_ns + excluded.wall_ns, tenants_ns = tenants_ns + excluded.tenants_ns,
  overhead_ns = overhead_ns + excluded.overhead_ns, idle_ns = idle_ns + excluded.idle_ns,
  loss_ns = loss_ns + excluded.loss_ns,
  energy_mj = coalesce(energy_mj + excluded.energy_mj, energy_mj, excluded.energy_mj),
  tenants_mj = coalesce(tenants_mj + excluded.tenants_mj, tenants_mj, excluded.tenants_mj),
  overhead_mj = coalesce(overhead_mj + excluded.overhead_mj, overhead_mj, excluded.overhead_mj),
  idle_mj = coalesce(idle_mj + excluded.idle_mj, idle_mj, excluded.idle_mj),
  loss_mj = coalesce(loss_mj + excluded.loss_mj, loss_mj, excluded.loss_mj);

INSERT INTO archived_attempts SELECT request_id, caller_id, attempt, ended FROM gone;

DELETE FROM archived_shares WHERE (request_id, caller_id, attempt)
  IN (SELECT request_id, caller_id, attempt FROM gone);
INSERT INTO archived_shares
SELECT request_id, caller_id, attempt, sum(amount_ns)
FROM blocks JOIN entries USING (epoch_id, block)
WHERE record_seq < {to} AND account = 1 AND (request_id, caller_id, attempt)
  NOT IN (SELECT request_id, caller_id, attempt FROM archived_attempts)
GROUP BY 1, 2, 3
ON CONFLICT DO UPDATE SET attributed_ns = attributed_ns + excluded.attributed_ns;

DELETE FROM requests WHERE (request_id, caller_id, attempt)
  IN (SELECT request_id, caller_id, attempt FROM gone);
DELETE FROM attempts WHERE record_seq < {to};
DELETE FROM fault_caps WHERE record_seq < {to};
CREATE TEMP TABLE gone_blocks AS SELECT epoch_id, block FROM blocks WHERE record_seq < {to};
DELETE FROM entries WHERE (epoch_id, block) IN (SELECT epoch_id, block FROM gone_blocks);
DELETE FROM struck_blocks WHERE (epoch_id, block) IN (SELECT epoch_id, block FROM gone_blocks);
DELETE FROM blocks WHERE record_seq < {to};
DELETE FROM refused_blocks WHERE record_seq < {to};
DELETE FROM records WHERE seq < {to};
DELETE FROM checkpoints WHERE size < {to};
DELETE FROM record_nodes WHERE ((position + 1) << level) <= {to};
DROP TABLE temp.gone;
DROP TABLE temp.gone_blocks;
"
    )
}

/// How long after its end a month may still gain usage as a matter of course.
const SETTLING_NS: u64 = 24 * 3_600 * 1_000_000_000;
