//! The definitions of a file's tables, by the format that brought them. The format's
//! number stands in `meta`; a file of an unknown format is refused, never guessed at.

use std::collections::BTreeMap;
use std::path::Path;

use tollgate_sql::{OptionalRow, SqlError};

use super::Tables;
use crate::error::LedgerError;

/// The format that this version writes and reads.
pub(crate) const FORMAT: u32 = 6;
/// The format without an audit log.
pub(crate) const WITHOUT_RECORDS: u32 = 1;
/// The format without counts by day.
const WITHOUT_COUNTS: u32 = 2;
/// The format that stored records whole. Its records stay as they are.
const WHOLE_RECORDS: u32 = 3;
/// The format without energy. It is also read as it is, because no version
/// rewrites an archive.
const WITHOUT_ENERGY: u32 = 4;
/// The format without tiers, which is also read as it is.
const WITHOUT_TIERS: u32 = 5;
/// The formats that this version migrates.
const OLDER: [u32; 5] =
    [WITHOUT_RECORDS, WITHOUT_COUNTS, WHOLE_RECORDS, WITHOUT_ENERGY, WITHOUT_TIERS];

/// State of a database file before it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FoundFormat {
    /// The file has no tables.
    Empty,
    /// A format that this version migrates.
    Older(u32),
    /// The current format, or a text that names none of ours.
    Other(String),
}

/// Reads the format of the file.
pub(crate) fn find_format(tables: Tables<'_>) -> Result<FoundFormat, LedgerError> {
    // A file without tables is new: SQLite makes the file before the first table.
    let Some(found) = format_of(tables)? else { return Ok(FoundFormat::Empty) };
    let older = OLDER.into_iter().find(|older| older.to_string() == found);
    Ok(older.map_or(FoundFormat::Other(found), FoundFormat::Older))
}

/// Makes the tables of a new ledger that are not an audit log's.
pub(crate) fn make_tables(tables: Tables<'_>) -> Result<(), LedgerError> {
    Ok(tables.connection.execute_batch(TABLES)?)
}

/// Adds the tables of the audit log.
pub(crate) fn add_audit_tables(tables: Tables<'_>) -> Result<(), LedgerError> {
    Ok(tables.connection.execute_batch(AUDIT_TABLES)?)
}

/// Adds the columns and tables that a ledger of format `found` lacks, and
/// writes the current format's number. The audit log's tables are there already.
pub(crate) fn bring_up_to_date(tables: Tables<'_>, found: Option<u32>) -> Result<(), LedgerError> {
    let connection = tables.connection;
    // Formats 3 to 5 have these columns, and adding a column twice fails.
    if !matches!(found, Some(WHOLE_RECORDS | WITHOUT_ENERGY | WITHOUT_TIERS)) {
        connection.execute_batch(COUNTS)?;
    }
    connection.execute_batch(ARCHIVES)?;
    if found != Some(WITHOUT_TIERS) {
        connection.execute_batch(ENERGY)?;
    }
    connection.execute_batch(TIERS)?;
    // The number comes last: it vouches for all changes before it.
    connection.execute("REPLACE INTO meta VALUES ('format', ?1)", [FORMAT.to_string()])?;
    Ok(())
}

/// Adds tables and indexes that came without a new format: a file of the
/// current format may lack them.
pub(crate) fn add_unnumbered(tables: Tables<'_>) -> Result<(), LedgerError> {
    // Both batches say `IF NOT EXISTS`, so a file that has the tables stays as it is.
    tables.connection.execute_batch(STRUCK)?;
    Ok(tables.connection.execute_batch(INDEXES)?)
}

/// Refuses a file of another format.
pub(crate) fn refuse_other_formats(path: &Path, tables: Tables<'_>) -> Result<(), LedgerError> {
    let found = format_of(tables)
        .map_err(|source| LedgerError::Open { path: path.to_owned(), source: source.into() })?;
    match found {
        Some(found) if found == FORMAT.to_string() => Ok(()),
        found => Err(LedgerError::Format {
            path: path.to_owned(),
            found: found.unwrap_or_else(|| "none".to_owned()),
            expected: FORMAT,
        }),
    }
}

/// Returns the views with which a ledger of an older format is read as it is; `None` for
/// every other format.
pub(super) fn views_of_older(
    tables: Tables<'_>,
) -> Result<Option<&'static [&'static str]>, SqlError> {
    Ok(match older_that_is_read(tables)? {
        Some(WITHOUT_ENERGY) => Some(&[VIEWS_WITHOUT_ENERGY, VIEWS_WITHOUT_TIERS]),
        Some(_) => Some(&[SUMS_WITHOUT_TIERS, VIEWS_WITHOUT_TIERS]),
        None => None,
    })
}

/// Returns the format of a ledger of an older format that is read as it is.
fn older_that_is_read(tables: Tables<'_>) -> Result<Option<u32>, SqlError> {
    let found = format_of(tables)?;
    let older = [WITHOUT_ENERGY, WITHOUT_TIERS].into_iter();
    Ok(found.and_then(|found| older.into_iter().find(|older| older.to_string() == found)))
}

/// Returns the definitions that make the tables as they are in `like`.
pub(super) fn definitions_of_format(like: Tables<'_>) -> Result<[&'static str; 8], LedgerError> {
    // An archive keeps its format for ever, so its tables are compared with those of that format.
    let (energy, tiers) = match older_that_is_read(like)? {
        Some(WITHOUT_ENERGY) => ("", ""),
        Some(_) => (ENERGY, ""),
        None => (ENERGY, TIERS),
    };
    Ok([TABLES, AUDIT_TABLES, COUNTS, STRUCK, ARCHIVES, energy, tiers, INDEXES])
}

/// Returns the definition of each table, index, view and trigger, by kind and
/// name.
pub(crate) fn definitions(tables: Tables<'_>) -> Result<BTreeMap<String, String>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT type || ' ' || name, tbl_name || ': ' || coalesce(sql, '') FROM sqlite_schema",
    )?;
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Runs SQLite's own check of the file. Returns at most ten lines that say what is
/// wrong.
pub(crate) fn check_file(tables: Tables<'_>, depth: Depth) -> Result<Vec<String>, LedgerError> {
    let query = match depth {
        Depth::Full => "PRAGMA integrity_check(10)",
        Depth::Quick => "PRAGMA quick_check(10)",
    };
    let mut statement = tables.connection.prepare(query)?;
    let rows = statement.query_map((), |row| row.get(0))?;
    let lines = rows.collect::<Result<Vec<String>, _>>()?;
    // SQLite answers a sound file with the single line `ok`.
    Ok(lines.into_iter().filter(|line| line != "ok").collect())
}

/// Depth of SQLite's check of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Compares every index with its table.
    Full,
    /// Leaves that comparison out.
    Quick,
}

/// Returns the format named in `meta`; `None` in an empty database, and `none`
/// where there are tables but no format.
fn format_of(tables: Tables<'_>) -> Result<Option<String>, SqlError> {
    let connection = tables.connection;
    let count: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", (), |row| row.get(0))?;
    if count == 0 {
        return Ok(None);
    }
    let meta: Option<i64> = connection
        .query_row("SELECT 1 FROM sqlite_schema WHERE name = 'meta'", (), |row| row.get(0))
        .optional()?;
    // A database of another program has tables but no `meta`, and must not be written.
    if meta.is_none() {
        return Ok(Some("none".to_owned()));
    }
    let format = connection
        .query_row("SELECT value FROM meta WHERE name = 'format'", (), |row| row.get(0))
        .optional()?;
    Ok(Some(format.unwrap_or_else(|| "none".to_owned())))
}

/// The reported form of blocks that were accepted only in part: its digest, since
/// `blocks` has the digest of the accepted part. Added to format 1 without a new
/// number.
const STRUCK: &str = "
CREATE TABLE IF NOT EXISTS struck_blocks (
  epoch_id INTEGER NOT NULL REFERENCES epochs,
  block INTEGER NOT NULL,
  digest BLOB NOT NULL,
  reason TEXT NOT NULL,
  PRIMARY KEY (epoch_id, block)
) STRICT, WITHOUT ROWID;
";

/// Columns of format 5: the energy in mJ beside each time. NULL where the device
/// reported none. An entry's time and energy have the same sign, and the energy
/// of a block's entries sums to zero as their time does.
const ENERGY: &str = "
ALTER TABLE entries ADD COLUMN energy_mj INTEGER;
ALTER TABLE daily ADD COLUMN energy_mj INTEGER;
ALTER TABLE archived_days ADD COLUMN energy_mj INTEGER;
ALTER TABLE archived_epochs ADD COLUMN energy_mj INTEGER;
ALTER TABLE archived_epochs ADD COLUMN tenants_mj INTEGER;
ALTER TABLE archived_epochs ADD COLUMN overhead_mj INTEGER;
ALTER TABLE archived_epochs ADD COLUMN idle_mj INTEGER;
ALTER TABLE archived_epochs ADD COLUMN loss_mj INTEGER;
";

/// Columns of format 6: the tier, 0 for interactive and 1 for batch. In the sums by day
/// it is a part of the key, so these tables are made again. Older usage is interactive.
const TIERS: &str = "
ALTER TABLE entries ADD COLUMN tier INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN tier INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN tier INTEGER NOT NULL DEFAULT 0;
ALTER TABLE fault_caps ADD COLUMN tier INTEGER NOT NULL DEFAULT 0;

ALTER TABLE daily RENAME TO daily_without_tiers;
CREATE TABLE daily (
  day INTEGER NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  model TEXT NOT NULL,
  device_class TEXT NOT NULL,
  tier INTEGER NOT NULL,
  charges INTEGER NOT NULL,
  entries INTEGER NOT NULL,
  requests INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  energy_mj INTEGER,
  PRIMARY KEY (day, caller_id, model, device_class, tier)
) STRICT, WITHOUT ROWID;
INSERT INTO daily
SELECT day, caller_id, model, device_class, 0, charges, entries, requests, prompt_tokens,
  cached_tokens, completion_tokens, attributed_ns, reference_ns, energy_mj
FROM daily_without_tiers;
DROP TABLE daily_without_tiers;

ALTER TABLE archived_days RENAME TO archived_days_without_tiers;
CREATE TABLE archived_days (
  day INTEGER NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  model TEXT NOT NULL,
  device_class TEXT NOT NULL,
  tier INTEGER NOT NULL,
  charges INTEGER NOT NULL,
  entries INTEGER NOT NULL,
  requests INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  energy_mj INTEGER,
  PRIMARY KEY (day, caller_id, model, device_class, tier)
) STRICT, WITHOUT ROWID;
INSERT INTO archived_days
SELECT day, caller_id, model, device_class, 0, charges, entries, requests, prompt_tokens,
  cached_tokens, completion_tokens, attributed_ns, reference_ns, energy_mj
FROM archived_days_without_tiers;
DROP TABLE archived_days_without_tiers;
";

/// Views that a reader of a ledger of format 4 or 5 sees in place of tables without tiers.
const VIEWS_WITHOUT_TIERS: &str = "
CREATE TEMP VIEW attempts AS SELECT *, 0 AS tier FROM main.attempts;
CREATE TEMP VIEW requests AS SELECT *, 0 AS tier FROM main.requests;
CREATE TEMP VIEW fault_caps AS SELECT *, 0 AS tier FROM main.fault_caps;
";

/// Views that a reader of a format 5 ledger sees in place of its tables with energy.
const SUMS_WITHOUT_TIERS: &str = "
CREATE TEMP VIEW entries AS SELECT *, 0 AS tier FROM main.entries;
CREATE TEMP VIEW daily AS SELECT *, 0 AS tier FROM main.daily;
CREATE TEMP VIEW archived_days AS SELECT *, 0 AS tier FROM main.archived_days;
";

/// Views that a reader of a format 4 ledger sees in place of its tables without energy.
const VIEWS_WITHOUT_ENERGY: &str = "
CREATE TEMP VIEW entries AS SELECT *, NULL AS energy_mj, 0 AS tier FROM main.entries;
CREATE TEMP VIEW daily AS SELECT *, NULL AS energy_mj, 0 AS tier FROM main.daily;
CREATE TEMP VIEW archived_days AS
  SELECT *, NULL AS energy_mj, 0 AS tier FROM main.archived_days;
CREATE TEMP VIEW archived_epochs AS SELECT *, NULL AS energy_mj, NULL AS tenants_mj,
  NULL AS overhead_mj, NULL AS idle_mj, NULL AS loss_mj FROM main.archived_epochs;
";

/// Sums that are kept of archived records, over all archives. `daily` equals
/// these sums plus the remaining rows; `check` counts again.
const ARCHIVES: &str = "
CREATE TABLE IF NOT EXISTS archives (
  size INTEGER PRIMARY KEY,
  last_hash BLOB NOT NULL,
  record_seq INTEGER NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS archived_epochs (
  epoch_id INTEGER PRIMARY KEY REFERENCES epochs,
  blocks INTEGER NOT NULL,
  last_block INTEGER NOT NULL,
  last_step INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  wall_ns INTEGER NOT NULL,
  tenants_ns INTEGER NOT NULL,
  overhead_ns INTEGER NOT NULL,
  idle_ns INTEGER NOT NULL,
  loss_ns INTEGER NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS archived_days (
  day INTEGER NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  model TEXT NOT NULL,
  device_class TEXT NOT NULL,
  charges INTEGER NOT NULL,
  entries INTEGER NOT NULL,
  requests INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  PRIMARY KEY (day, caller_id, model, device_class)
) STRICT, WITHOUT ROWID;

-- For ever: what ended once never ends again, whoever says so.
CREATE TABLE IF NOT EXISTS archived_attempts (
  request_id TEXT NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  attempt INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (request_id, caller_id, attempt)
) STRICT, WITHOUT ROWID;

-- Device time of attempts that ended later than the archive does.
CREATE TABLE IF NOT EXISTS archived_shares (
  request_id TEXT NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  attempt INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  PRIMARY KEY (request_id, caller_id, attempt)
) STRICT, WITHOUT ROWID;
";

/// Indexes that find a tenant's month.
const INDEXES: &str = "
CREATE INDEX IF NOT EXISTS blocks_by_day ON blocks (day);
CREATE INDEX IF NOT EXISTS daily_by_caller ON daily (caller_id, day);
CREATE INDEX IF NOT EXISTS requests_by_caller ON requests (caller_id, day);
CREATE INDEX IF NOT EXISTS entries_by_caller ON entries (caller_id, epoch_id, block)
  WHERE caller_id IS NOT NULL;
";

/// Tables of format 1. An entry's id is `epoch/first_step-last_step/sequence`.
/// Amounts are signed nanoseconds, a debit positive: a block's entries sum to
/// zero, and so does each pair of a correction. `daily` holds the sums of
/// `entries` and `requests`; `check` counts again.
const TABLES: &str = "
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;

CREATE TABLE epochs (
  id INTEGER PRIMARY KEY,
  epoch TEXT NOT NULL UNIQUE,
  worker TEXT NOT NULL,
  device_class TEXT NOT NULL,
  device_name TEXT NOT NULL,
  device_uuid TEXT NOT NULL,
  last_block INTEGER NOT NULL,
  last_step INTEGER NOT NULL,
  ended INTEGER NOT NULL
) STRICT;

CREATE TABLE callers (
  id INTEGER PRIMARY KEY,
  tenant TEXT NOT NULL,
  key TEXT NOT NULL,
  UNIQUE (tenant, key)
) STRICT;

CREATE TABLE blocks (
  epoch_id INTEGER NOT NULL REFERENCES epochs,
  block INTEGER NOT NULL,
  model TEXT NOT NULL,
  calibration TEXT NOT NULL,
  first_step INTEGER NOT NULL,
  last_step INTEGER NOT NULL,
  started_utc_ns INTEGER NOT NULL,
  day INTEGER NOT NULL,
  last_of_epoch INTEGER NOT NULL,
  digest BLOB NOT NULL,
  PRIMARY KEY (epoch_id, block)
) STRICT, WITHOUT ROWID;

CREATE TABLE refused_blocks (
  epoch_id INTEGER NOT NULL REFERENCES epochs,
  block INTEGER NOT NULL,
  reason TEXT NOT NULL,
  PRIMARY KEY (epoch_id, block)
) STRICT, WITHOUT ROWID;

CREATE TABLE entries (
  epoch_id INTEGER NOT NULL,
  block INTEGER NOT NULL,
  ordinal INTEGER NOT NULL,
  kind INTEGER NOT NULL,
  account INTEGER NOT NULL,
  amount_ns INTEGER NOT NULL,
  caller_id INTEGER REFERENCES callers,
  sequence INTEGER,
  request_id TEXT,
  attempt INTEGER,
  PRIMARY KEY (epoch_id, block, ordinal),
  FOREIGN KEY (epoch_id, block) REFERENCES blocks,
  CHECK ((account = 1) <= (caller_id IS NOT NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX entries_by_request ON entries (request_id) WHERE request_id IS NOT NULL;

-- What the worker recorded of an attempt that ended, as it came.
CREATE TABLE attempts (
  epoch_id INTEGER NOT NULL,
  block INTEGER NOT NULL,
  ordinal INTEGER NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  request_id TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  queue_ns INTEGER NOT NULL,
  prefill_ns INTEGER NOT NULL,
  decode_ns INTEGER NOT NULL,
  reason TEXT NOT NULL,
  finished_utc_ns INTEGER NOT NULL,
  PRIMARY KEY (epoch_id, block, ordinal),
  FOREIGN KEY (epoch_id, block) REFERENCES blocks
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX attempts_once ON attempts (request_id, caller_id, attempt);

-- What an attempt is charged: the worker's record, or less after a fault.
CREATE TABLE requests (
  request_id TEXT NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  attempt INTEGER NOT NULL,
  model TEXT NOT NULL,
  device_class TEXT NOT NULL,
  day INTEGER NOT NULL,
  finished_utc_ns INTEGER NOT NULL,
  counted INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  queue_ns INTEGER NOT NULL,
  prefill_ns INTEGER NOT NULL,
  decode_ns INTEGER NOT NULL,
  reason TEXT NOT NULL,
  PRIMARY KEY (request_id, caller_id, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE fault_caps (
  request_id TEXT NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  attempt INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  PRIMARY KEY (request_id, caller_id, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE daily (
  day INTEGER NOT NULL,
  caller_id INTEGER NOT NULL REFERENCES callers,
  model TEXT NOT NULL,
  device_class TEXT NOT NULL,
  requests INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  attributed_ns INTEGER NOT NULL,
  reference_ns INTEGER NOT NULL,
  PRIMARY KEY (day, caller_id, model, device_class)
) STRICT, WITHOUT ROWID;

-- Taken and given back by the writer to learn whether the disk has room again.
CREATE TABLE probe (filler BLOB NOT NULL) STRICT;

-- For people with a SQL prompt.
CREATE VIEW named_entries AS
SELECT epochs.epoch, entries.block, entries.ordinal,
  CASE entries.kind WHEN 0 THEN 'metered' ELSE 'correction' END AS kind,
  CASE entries.account
    WHEN 0 THEN 'device:' || epochs.epoch
    WHEN 1 THEN 'tenant:' || callers.tenant
    WHEN 2 THEN 'platform.overhead'
    WHEN 3 THEN 'platform.idle'
    ELSE 'platform.loss' END AS account,
  entries.amount_ns, callers.key, entries.request_id, entries.attempt,
  epochs.epoch || '/' || blocks.first_step || '-' || blocks.last_step || '/'
    || coalesce(entries.sequence, 'platform') AS id
FROM entries
JOIN blocks USING (epoch_id, block)
JOIN epochs ON epochs.id = entries.epoch_id
LEFT JOIN callers ON callers.id = entries.caller_id;
";

/// Tables of format 2, the audit log: its records (since format 4 without number
/// and previous hash, which other columns hold), the kept inner nodes of their
/// Merkle tree, the signed checkpoints, and each row's record. `record_seq` is
/// NULL in rows that are older than the log.
const AUDIT_TABLES: &str = "
CREATE TABLE records (
  seq INTEGER PRIMARY KEY,
  hash BLOB NOT NULL,
  record TEXT NOT NULL
) STRICT;

CREATE TABLE record_nodes (
  level INTEGER NOT NULL,
  position INTEGER NOT NULL,
  hash BLOB NOT NULL,
  PRIMARY KEY (level, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
  size INTEGER PRIMARY KEY,
  note TEXT NOT NULL
) STRICT;

CREATE TABLE recorded_actions (
  id TEXT PRIMARY KEY,
  record_seq INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

ALTER TABLE blocks ADD COLUMN record_seq INTEGER;
ALTER TABLE attempts ADD COLUMN record_seq INTEGER;
ALTER TABLE fault_caps ADD COLUMN record_seq INTEGER;
ALTER TABLE fault_caps ADD COLUMN model TEXT;
ALTER TABLE fault_caps ADD COLUMN device_class TEXT;
ALTER TABLE fault_caps ADD COLUMN at_utc_ns INTEGER;
ALTER TABLE refused_blocks ADD COLUMN record_seq INTEGER;
ALTER TABLE refused_blocks ADD COLUMN at_utc_ns INTEGER;
";

/// Columns and tables of format 3: the number of records behind a day's sums,
/// which only grows, and each tenant's plans by the first day of each.
const COUNTS: &str = "
ALTER TABLE daily ADD COLUMN charges INTEGER NOT NULL DEFAULT 0;
ALTER TABLE daily ADD COLUMN entries INTEGER NOT NULL DEFAULT 0;

UPDATE daily SET charges = counted.records FROM (
  SELECT day, caller_id, model, device_class, count(*) AS records FROM requests
  GROUP BY 1, 2, 3, 4) AS counted
WHERE daily.day = counted.day AND daily.caller_id = counted.caller_id
  AND daily.model = counted.model AND daily.device_class = counted.device_class;

UPDATE daily SET entries = counted.records FROM (
  SELECT blocks.day AS day, caller_id, model, device_class, count(*) AS records
  FROM entries JOIN blocks USING (epoch_id, block) JOIN epochs ON epochs.id = entries.epoch_id
  WHERE account = 1 GROUP BY 1, 2, 3, 4) AS counted
WHERE daily.day = counted.day AND daily.caller_id = counted.caller_id
  AND daily.model = counted.model AND daily.device_class = counted.device_class;

CREATE TABLE tenant_plans (
  tenant TEXT NOT NULL,
  day INTEGER NOT NULL,
  plan TEXT NOT NULL,
  PRIMARY KEY (tenant, day)
) STRICT, WITHOUT ROWID;
";
