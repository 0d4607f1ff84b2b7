//! The tables, and how a connection is opened. The format version stands in
//! `meta`; a file with another one is refused, never guessed at.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension};

use crate::audit::chain::Chain;
use crate::audit::record::Before;
use crate::{LedgerError, WalRewriter};

/// What this version reads and writes.
pub(crate) const FORMAT: u32 = 5;

/// The format without an audit log, which is taken on.
const WITHOUT_RECORDS: u32 = 1;

/// The format without counts by day, likewise.
const WITHOUT_COUNTS: u32 = 2;

/// The format that stored records whole; those that it did stay as they are.
const WHOLE_RECORDS: u32 = 3;

/// The format without energy. It is taken on as well, and read as it is: no
/// version writes an archive again.
const WITHOUT_ENERGY: u32 = 4;

/// The formats that are taken on.
const OLDER: [u32; 4] = [WITHOUT_RECORDS, WITHOUT_COUNTS, WHOLE_RECORDS, WITHOUT_ENERGY];

/// Kinds of account, as `entries.account` has them.
pub(crate) mod account {
    /// The device's wall time; always a credit.
    pub(crate) const DEVICE: i64 = 0;
    /// The tenant of the entry's caller.
    pub(crate) const TENANT: i64 = 1;
    /// `platform.overhead`
    pub(crate) const OVERHEAD: i64 = 2;
    /// `platform.idle`
    pub(crate) const IDLE: i64 = 3;
    /// `platform.loss`
    pub(crate) const LOSS: i64 = 4;
}

/// `entries.kind` of what a worker measured.
pub(crate) const METERED: i64 = 0;
/// `entries.kind` of what "who pays" moved afterwards.
pub(crate) const CORRECTION: i64 = 1;
/// Ordinals below this are the block's device and platform entries.
pub(crate) const FIRST_SHARE: i64 = 4;

/// Memory that the writer keeps of the file, at most.
const WRITER_CACHE_KIB: i64 = 4 * 1_024;
/// Pages of 4 KiB in the log after which it is copied into the file: 16 MiB.
const LONGEST_LOG_PAGES: u32 = 4_096;

/// Opens for writing, creating the file and its tables where there are none,
/// and taking on what an earlier version wrote. `log` writes the log once more
/// before.
pub(crate) fn open_writer(
    path: &Path,
    max_pages: Option<u32>,
    log: &WalRewriter,
) -> Result<Connection, LedgerError> {
    log.rewrite(path)
        .map_err(|source| LedgerError::Log { path: path.to_owned(), source: Arc::new(source) })?;
    let open = || -> rusqlite::Result<Connection> {
        let connection = Connection::open(path)?;
        prepare(&connection)?;
        // A commit is acknowledged only once it is on the disk.
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        // What is written is read again soon, by the ids that came just before;
        // and a page that changes often goes into the file once.
        connection.pragma_update(None, "cache_size", -WRITER_CACHE_KIB)?;
        connection.pragma_update(None, "wal_autocheckpoint", LONGEST_LOG_PAGES)?;
        if let Some(pages) = max_pages {
            connection.pragma_update(None, "max_page_count", pages)?;
        }
        Ok(connection)
    };
    let failed = |source| LedgerError::Open { path: path.to_owned(), source: Arc::new(source) };
    let mut connection = open().map_err(failed)?;
    let found = format_of(&connection).map_err(failed)?;
    let is = |format: u32| found.as_deref() == Some(&format.to_string());
    if found.is_none() || OLDER.into_iter().any(is) {
        if let Some(found) = &found {
            let path = path.display();
            tracing::info!(%path, found, format = FORMAT, "the ledger is taken on: seconds, where it is large");
        }
        let transaction = connection.transaction().map_err(failed)?;
        if found.is_none() {
            transaction.execute_batch(TABLES).map_err(failed)?;
        }
        if found.is_none() || is(WITHOUT_RECORDS) {
            transaction.execute_batch(AUDIT_TABLES).map_err(failed)?;
            let before = is(WITHOUT_RECORDS)
                .then(|| Before::read(&transaction, WITHOUT_RECORDS))
                .transpose()?;
            Chain::begin(&transaction, before.as_ref())?;
        }
        if !is(WHOLE_RECORDS) && !is(WITHOUT_ENERGY) {
            transaction.execute_batch(COUNTS).map_err(failed)?;
        }
        transaction.execute_batch(ARCHIVES).map_err(failed)?;
        transaction.execute_batch(ENERGY).map_err(failed)?;
        transaction
            .execute("REPLACE INTO meta VALUES ('format', ?1)", [FORMAT.to_string()])
            .map_err(failed)?;
        transaction.commit().map_err(failed)?;
    }
    refuse_other_formats(path, &connection)?;
    connection.execute_batch(STRUCK).map_err(failed)?;
    // Of the same format with or without them; an older file gains them here.
    connection.execute_batch(INDEXES).map_err(failed)?;
    Ok(connection)
}

/// The tables as they are in `like`, with nothing in them.
pub(crate) fn in_memory(like: &Connection) -> Result<Connection, LedgerError> {
    let connection = Connection::open_in_memory()?;
    let energy = if is_without_energy(like)? { "" } else { ENERGY };
    for tables in [TABLES, AUDIT_TABLES, COUNTS, STRUCK, ARCHIVES, energy, INDEXES] {
        connection.execute_batch(tables)?;
    }
    Ok(connection)
}

/// Opens for reading, beside a writer in this or another process.
///
/// The last connection that closes a database copies its log into the file and
/// takes it away. This one does not: it does not know whether what it sees of the
/// log is on the disk ([`crate::relog`]).
pub(crate) fn open_reader(path: &Path) -> Result<Connection, LedgerError> {
    let failed = |source| LedgerError::Open { path: path.to_owned(), source: Arc::new(source) };
    // Read-write without create: a reader of a WAL database keeps its index
    // in the -shm file. `query_only` is what forbids writing.
    let connection = Connection::open_with_flags(
        path,
        // As the writer, which names its file in the same words.
        OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_URI,
    )
    .map_err(failed)?;
    prepare(&connection).map_err(failed)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(failed)?;
    if is_without_energy(&connection).map_err(failed)? {
        connection.execute_batch(SEEN_WITHOUT_ENERGY).map_err(failed)?;
    } else {
        refuse_other_formats(path, &connection)?;
    }
    connection.pragma_update(None, "query_only", true).map_err(failed)?;
    Ok(connection)
}

fn is_without_energy(connection: &Connection) -> rusqlite::Result<bool> {
    Ok(format_of(connection)? == Some(WITHOUT_ENERGY.to_string()))
}

fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(())
}

/// The format named in `meta`; `None` in an empty database.
fn format_of(connection: &Connection) -> rusqlite::Result<Option<String>> {
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables == 0 {
        return Ok(None);
    }
    let meta: Option<i64> = connection
        .query_row("SELECT 1 FROM sqlite_schema WHERE name = 'meta'", [], |row| row.get(0))
        .optional()?;
    if meta.is_none() {
        return Ok(Some("none".to_owned()));
    }
    let format = connection
        .query_row("SELECT value FROM meta WHERE name = 'format'", [], |row| row.get(0))
        .optional()?;
    Ok(Some(format.unwrap_or_else(|| "none".to_owned())))
}

fn refuse_other_formats(path: &Path, connection: &Connection) -> Result<(), LedgerError> {
    let found = format_of(connection)
        .map_err(|source| LedgerError::Open { path: path.to_owned(), source: Arc::new(source) })?;
    match found {
        Some(found) if found == FORMAT.to_string() => Ok(()),
        found => Err(LedgerError::Format {
            path: path.to_owned(),
            found: found.unwrap_or_else(|| "none".to_owned()),
            expected: FORMAT,
        }),
    }
}

/// What a worker said in blocks of which not all was believed: the digest of
/// its words, since `blocks` has that of what was posted. Added to format 1,
/// whose other tables do not change by it.
const STRUCK: &str = "
CREATE TABLE IF NOT EXISTS struck_blocks (
  epoch_id INTEGER NOT NULL REFERENCES epochs,
  block INTEGER NOT NULL,
  digest BLOB NOT NULL,
  reason TEXT NOT NULL,
  PRIMARY KEY (epoch_id, block)
) STRICT, WITHOUT ROWID;
";

/// Of format 5: what the device drew, mJ, beside its time. NULL where it was not
/// told; an entry's amounts of both are signed alike, and sum to zero alike.
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

/// What a reader sees of a ledger of format 4 in place of its tables.
const SEEN_WITHOUT_ENERGY: &str = "
CREATE TEMP VIEW entries AS SELECT *, NULL AS energy_mj FROM main.entries;
CREATE TEMP VIEW daily AS SELECT *, NULL AS energy_mj FROM main.daily;
CREATE TEMP VIEW archived_days AS SELECT *, NULL AS energy_mj FROM main.archived_days;
CREATE TEMP VIEW archived_epochs AS SELECT *, NULL AS energy_mj, NULL AS tenants_mj,
  NULL AS overhead_mj, NULL AS idle_mj, NULL AS loss_mj FROM main.archived_epochs;
";

/// What is kept of records that left the database, summed over all archives:
/// `daily` and the rest of the rows sum to it, `check` counts again.
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

/// What a tenant's month is found by.
const INDEXES: &str = "
CREATE INDEX IF NOT EXISTS blocks_by_day ON blocks (day);
CREATE INDEX IF NOT EXISTS daily_by_caller ON daily (caller_id, day);
CREATE INDEX IF NOT EXISTS requests_by_caller ON requests (caller_id, day);
CREATE INDEX IF NOT EXISTS entries_by_caller ON entries (caller_id, epoch_id, block)
  WHERE caller_id IS NOT NULL;
";

/// An entry's id is `epoch/first_step-last_step/sequence`. Amounts are signed
/// nanoseconds, a debit positive: a block's entries sum to zero, and so does
/// each pair of a correction. `daily` repeats what entries and requests say,
/// summed; `check` counts again.
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

/// The audit log of format 2, beside the tables of format 1: its records (of
/// format 4 without number and hash of the one before, which stand beside them),
/// the inner nodes of their tree that are kept, what was signed, and which record
/// tells of a row. `record_seq` is NULL in rows that are older than the log.
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

/// Of format 3: how many records a day's sums stand on, which only grows, and
/// since when a tenant has which plan, in force from that day on.
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
