//! Tables `archives` and `archived_*`: sums over the records that left the
//! database, and the ids of the attempts that ended in them.

use serde_json::Value;
use tollgate_sql::{OptionalRow, Row, SqlError, params};

use super::entries::account;
use super::records::{Hash, each_line, hash_from, json_line};
use super::{AttemptKey, CallerId, EpochId, Tables, records};
use crate::error::LedgerError;

/// The newest archive.
pub(crate) struct ArchiveRow {
    /// Number of the first record that is still in the database.
    pub(crate) size: u64,
    /// Hash of the last archived record.
    pub(crate) last: Hash,
    /// The record that tells of the archive.
    pub(crate) record: u64,
}

/// Wall time of an epoch's archived blocks and its split by account, ns.
#[derive(Default)]
pub(crate) struct ArchivedTime {
    pub(crate) wall_ns: i64,
    pub(crate) tenants_ns: i64,
    pub(crate) overhead_ns: i64,
    pub(crate) idle_ns: i64,
    pub(crate) loss_ns: i64,
}

/// Energy of an epoch's archived blocks and its split by account, mJ.
pub(crate) struct ArchivedEnergy {
    pub(crate) energy_mj: i64,
    pub(crate) tenants_mj: i64,
    pub(crate) overhead_mj: i64,
    pub(crate) idle_mj: i64,
    pub(crate) loss_mj: i64,
}

/// Returns the newest archive; `None` where nothing was archived.
pub(crate) fn newest(tables: Tables<'_>) -> Result<Option<ArchiveRow>, LedgerError> {
    let row: Option<(u64, Vec<u8>, u64)> = tables
        .connection
        .prepare("SELECT size, last_hash, record_seq FROM archives ORDER BY size DESC LIMIT 1")?
        .query_row((), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((size, last, record)) = row else { return Ok(None) };
    let last = hash_from(last, "the last archived record's hash")?;
    Ok(Some(ArchiveRow { size, last, record }))
}

/// Returns the number of the first record that is still in the database.
pub(crate) fn first_record(tables: Tables<'_>) -> Result<u64, LedgerError> {
    Ok(newest(tables)?.map_or(0, |archive| archive.size))
}

/// Inserts an archive.
pub(crate) fn insert(tables: Tables<'_>, archive: &ArchiveRow) -> Result<(), LedgerError> {
    let ArchiveRow { size, last, record } = archive;
    tables.connection.execute(
        "INSERT INTO archives (size, last_hash, record_seq) VALUES (?1, ?2, ?3)",
        params![size, &last[..], record],
    )?;
    Ok(())
}

/// Finds an archived attempt. True if its worker had recorded the attempt's end.
pub(crate) fn attempt_ended(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
) -> Result<Option<bool>, LedgerError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT ended FROM archived_attempts
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .query_row(params![key.attempt.request.as_str(), key.caller, key.attempt.attempt], |row| {
            row.get(0)
        })
        .optional()?)
}

/// Returns true if block `number` of an epoch is archived.
pub(crate) fn has_block(
    tables: Tables<'_>,
    epoch: EpochId,
    number: u64,
) -> Result<bool, LedgerError> {
    let last: Option<u64> = tables
        .connection
        .prepare("SELECT last_block FROM archived_epochs WHERE epoch_id = ?1")?
        .query_row([epoch], |row| row.get(0))
        .optional()?;
    // An archive takes a prefix of the log, so every block up to the last is archived.
    Ok(last.is_some_and(|last| number <= last))
}

/// Returns true if records of a caller on the days from `first` to `last` are
/// archived.
pub(crate) fn has_days(
    tables: Tables<'_>,
    caller: CallerId,
    (first, last): (u32, u32),
) -> Result<bool, LedgerError> {
    Ok(tables
        .connection
        .prepare("SELECT 1 FROM archived_days WHERE caller_id = ?1 AND day BETWEEN ?2 AND ?3")?
        .exists(params![caller, first, last])?)
}

/// Returns the archived time of an epoch.
pub(crate) fn time_of(tables: Tables<'_>, epoch: EpochId) -> Result<ArchivedTime, LedgerError> {
    let archived = tables
        .connection
        .prepare(
            "SELECT wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns
             FROM archived_epochs WHERE epoch_id = ?1",
        )?
        .query_row([epoch], |row| {
            Ok(ArchivedTime {
                wall_ns: row.get(0)?,
                tenants_ns: row.get(1)?,
                overhead_ns: row.get(2)?,
                idle_ns: row.get(3)?,
                loss_ns: row.get(4)?,
            })
        })
        .optional()?;
    Ok(archived.unwrap_or_default())
}

/// Returns the archived energy of an epoch; `None` where none was reported.
pub(crate) fn energy_of(
    tables: Tables<'_>,
    epoch: EpochId,
) -> Result<Option<ArchivedEnergy>, LedgerError> {
    Ok(tables
        .connection
        .prepare(
            // An account without an entry has no energy. Beside known energy that counts as zero.
            "SELECT energy_mj, coalesce(tenants_mj, 0), coalesce(overhead_mj, 0),
               coalesce(idle_mj, 0), coalesce(loss_mj, 0)
             FROM archived_epochs WHERE epoch_id = ?1 AND energy_mj IS NOT NULL",
        )?
        .query_row([epoch], |row| {
            Ok(ArchivedEnergy {
                energy_mj: row.get(0)?,
                tenants_mj: row.get(1)?,
                overhead_mj: row.get(2)?,
                idle_mj: row.get(3)?,
                loss_mj: row.get(4)?,
            })
        })
        .optional()?)
}

/// Returns the SHA-256 that record `seq` states of the archives' sums.
pub(crate) fn stated_sums(tables: Tables<'_>, seq: u64) -> Result<Option<String>, LedgerError> {
    // A missing record and a record without the field both state nothing.
    let Some(record) = records::text_of(tables, seq)? else { return Ok(None) };
    let record: Option<Value> = serde_json::from_str(&record).ok();
    let stated = record.as_ref().and_then(|record| record.pointer("/detail/sums_sha256"));
    Ok(stated.and_then(Value::as_str).map(str::to_owned))
}

/// Calls `each` with one line for each row of the archives' tables. A row without
/// energy has the line that it had before energy was known, and a row of the interactive
/// tier the line that it had before tiers were recorded.
pub(crate) fn each_sum(tables: Tables<'_>, mut each: impl FnMut(&str)) -> Result<(), LedgerError> {
    // The hash over these lines is in the audit log, so their order and form never change.
    for SumTable { of, query } in SUMS {
        let line = |row: &Row<'_>| json_line(row, 0..of.columns(row)?, Some(of.name));
        each_line(tables, query, line, &mut each)?;
    }
    Ok(())
}

/// The lines of one table of sums.
struct SumTable {
    of: Lines,
    query: &'static str,
}

/// The form of the lines of a table. A column that came later is left out of the lines of
/// rows that could have been written before it.
struct Lines {
    name: &'static str,
    /// The columns that every line has.
    always: usize,
    /// The first column of energy, and the columns up to the last of energy.
    energy: Option<(usize, usize)>,
    /// The column of the tier, the last one.
    tier: Option<usize>,
}

impl Lines {
    /// The lines of a table whose columns are all in every line.
    const fn plain(name: &'static str, columns: usize) -> Self {
        Self { name, always: columns, energy: None, tier: None }
    }

    /// Returns the number of columns in the line of a row.
    fn columns(&self, row: &Row<'_>) -> Result<usize, SqlError> {
        if let Some(tier) = self.tier
            && row.get::<i64>(tier)? != 0
        {
            return Ok(tier + 1);
        }
        match self.energy {
            Some((first, end)) if row.get::<Option<i64>>(first)?.is_some() => Ok(end),
            _ => Ok(self.always),
        }
    }
}

const SUMS: [SumTable; 5] = [
    SumTable {
        of: Lines::plain("archive", 3),
        query: "SELECT size, last_hash, record_seq FROM archives ORDER BY size",
    },
    SumTable {
        of: Lines { name: "epoch", always: 10, energy: Some((10, 15)), tier: None },
        query: "SELECT epoch_id, blocks, last_block, last_step, ended, wall_ns, tenants_ns,
             overhead_ns, idle_ns, loss_ns, energy_mj, tenants_mj, overhead_mj, idle_mj, loss_mj
           FROM archived_epochs ORDER BY epoch_id",
    },
    SumTable {
        of: Lines { name: "day", always: 12, energy: Some((12, 13)), tier: Some(13) },
        query: "SELECT day, caller_id, model, device_class, charges, entries, requests,
             prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns,
             energy_mj, tier
           FROM archived_days ORDER BY day, caller_id, model, device_class, tier",
    },
    SumTable {
        of: Lines::plain("attempt", 4),
        query: "SELECT request_id, caller_id, attempt, ended
           FROM archived_attempts ORDER BY request_id, caller_id, attempt",
    },
    SumTable {
        of: Lines::plain("share", 4),
        query: "SELECT request_id, caller_id, attempt, attributed_ns
           FROM archived_shares ORDER BY request_id, caller_id, attempt",
    },
];

/// Returns the number of the first record of `day` or later, or of an attempt
/// that has not ended, or the size of the newest checkpoint if that is less.
pub(crate) fn first_record_that_stays(
    tables: Tables<'_>,
    day: u32,
    start_ns: u64,
) -> Result<u64, LedgerError> {
    // A table without such rows counts as `i64::MAX`, so the other terms decide.
    Ok(tables.connection.query_row(
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
        params![day, start_ns as i64, i64::MAX, account::TENANT],
        |row| row.get(0),
    )?)
}

/// Returns the size of the largest checkpoint of at most `bound` records.
pub(crate) fn checkpoint_up_to(tables: Tables<'_>, bound: u64) -> Result<Option<u64>, LedgerError> {
    let query = "SELECT max(size) FROM checkpoints WHERE size <= ?1";
    Ok(tables.connection.query_row(query, [bound], |row| row.get(0))?)
}

/// Returns the first record of the corrections that a cut before record `size`
/// would split; `None` where the cut splits none.
pub(crate) fn first_split_by(tables: Tables<'_>, size: u64) -> Result<Option<u64>, LedgerError> {
    Ok(tables.connection.query_row(
        "SELECT min(first) FROM (
           SELECT min(cap.record_seq, coalesce(min(blocks.record_seq), cap.record_seq),
               coalesce(min(done.record_seq), cap.record_seq)) AS first,
             max(cap.record_seq, coalesce(max(blocks.record_seq), 0),
               coalesce(max(done.record_seq), 0)) AS last
           FROM fault_caps AS cap
           LEFT JOIN entries ON entries.request_id = cap.request_id
             AND +entries.caller_id = cap.caller_id AND entries.attempt = cap.attempt
           LEFT JOIN blocks USING (epoch_id, block)
           LEFT JOIN attempts AS done ON done.request_id = cap.request_id
             AND done.caller_id = cap.caller_id AND done.attempt = cap.attempt
           GROUP BY cap.request_id, cap.caller_id, cap.attempt)
         WHERE first < ?1 AND last >= ?1",
        [size],
        |row| row.get(0),
    )?)
}
