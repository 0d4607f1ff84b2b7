//! The durable record of the request that each key stands for: a database of its
//! own, written once for each request that brings a key. The database holds no
//! key, prompt or answer.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use tollgate_domain::{RequestId, TenantId, UtcTime};
use tollgate_ledger::WalRewriter;

use super::KeyDigest;

/// The format that this version reads and writes.
const FORMAT: i64 = 1;

/// Reasons why the records cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum IdempotencyStoreError {
    /// The database failed.
    #[error("{path}: the database of idempotency keys failed")]
    Database {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rusqlite::Error,
    },
    /// The database's write-ahead log cannot be rewritten.
    #[error("{path}: the log of the idempotency keys cannot be rewritten")]
    Log {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The database is damaged, or of a format that this version does not know.
    #[error("{path}: not a database of idempotency keys of format {FORMAT}")]
    Format {
        /// The file.
        path: PathBuf,
    },
}

/// The request that a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IdempotencyRecord {
    pub(super) fingerprint: [u8; 32],
    pub(super) request: RequestId,
}

/// The database of records.
pub(super) struct IdempotencyStore {
    path: PathBuf,
    rows: Mutex<RecordRows>,
}

struct RecordRows {
    connection: Connection,
    /// Nanoseconds for which a record holds.
    kept_ns: u64,
    keys_per_tenant: u32,
    /// The number of rows of each tenant.
    counts: HashMap<String, u32>,
}

impl IdempotencyStore {
    pub(super) fn open(
        data: &Path,
        kept: Duration,
        keys_per_tenant: u32,
    ) -> Result<Self, IdempotencyStoreError> {
        let path = data.join("idempotency.db");
        // An earlier process may have acknowledged commits whose log pages never
        // reached the disk. As for the ledger, the log is written again before use.
        WalRewriter::default()
            .rewrite(&path)
            .map_err(|source| IdempotencyStoreError::Log { path: path.clone(), source })?;
        let kept_ns = u64::try_from(kept.as_nanos()).unwrap_or(u64::MAX);
        let opened = || -> rusqlite::Result<(RecordRows, i64)> {
            let connection = Connection::open(&path)?;
            connection.busy_timeout(Duration::from_secs(5))?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            // A recorded key must survive a power cut, so each commit is synced.
            connection.pragma_update(None, "synchronous", "FULL")?;
            let mut format =
                connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
            let tables: i64 =
                connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
            // Only an empty file is made a database: a file of another program must not
            // be written.
            if (format, tables) == (0, 0) {
                connection.execute_batch(TABLES)?;
                format = FORMAT;
            }
            let mut rows =
                RecordRows { connection, kept_ns, keys_per_tenant, counts: HashMap::new() };
            if format == FORMAT {
                rows.count()?;
            }
            Ok((rows, format))
        };
        let (rows, format) = opened()
            .map_err(|source| IdempotencyStoreError::Database { path: path.clone(), source })?;
        if format != FORMAT {
            return Err(IdempotencyStoreError::Format { path });
        }
        Ok(Self { path, rows: Mutex::new(rows) })
    }

    /// Returns the record of a key, unless it was made too long before `now`.
    pub(super) fn find(
        &self,
        digest: &KeyDigest,
        now: UtcTime,
    ) -> Result<Option<IdempotencyRecord>, IdempotencyStoreError> {
        let rows = self.lock();
        let found = rows
            .connection
            .prepare_cached(
                "SELECT fingerprint, request_id FROM intents WHERE scope = ?1 AND began_utc_ns >= ?2",
            )
            .and_then(|mut statement| {
                statement
                    .query_row(params![digest, rows.oldest(now)], |row| {
                        Ok((row.get::<_, [u8; 32]>(0)?, row.get::<_, String>(1)?))
                    })
                    .optional()
            })
            .map_err(|source| self.failed(source))?;
        let Some((fingerprint, request)) = found else { return Ok(None) };
        let request = RequestId::new(&request)
            .map_err(|_| IdempotencyStoreError::Format { path: self.path.clone() })?;
        Ok(Some(IdempotencyRecord { fingerprint, request }))
    }

    /// Records the request that a key stands for from now on. Returns false if the
    /// tenant has as many keys as it may.
    pub(super) fn put(
        &self,
        digest: &KeyDigest,
        tenant: &TenantId,
        record: &IdempotencyRecord,
        now: UtcTime,
    ) -> Result<bool, IdempotencyStoreError> {
        let mut rows = self.lock();
        rows.put(digest, tenant, record, now).map_err(|source| self.failed(source))
    }

    /// Deletes the record of a key if the key stands for `request`.
    pub(super) fn remove(
        &self,
        digest: &KeyDigest,
        request: &RequestId,
    ) -> Result<(), IdempotencyStoreError> {
        let mut rows = self.lock();
        rows.remove(digest, request).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: rusqlite::Error) -> IdempotencyStoreError {
        IdempotencyStoreError::Database { path: self.path.clone(), source }
    }

    fn lock(&self) -> MutexGuard<'_, RecordRows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RecordRows {
    /// Returns the start of the oldest record that still holds, in nanoseconds as
    /// the database keeps them.
    fn oldest(&self, now: UtcTime) -> i64 {
        i64::try_from(now.0.saturating_sub(self.kept_ns)).unwrap_or(i64::MAX)
    }

    fn count(&mut self) -> rusqlite::Result<()> {
        let mut statement =
            self.connection.prepare("SELECT tenant, count(*) FROM intents GROUP BY tenant")?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        self.counts = rows.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn put(
        &mut self,
        digest: &KeyDigest,
        tenant: &TenantId,
        record: &IdempotencyRecord,
        now: UtcTime,
    ) -> rusqlite::Result<bool> {
        let oldest = self.oldest(now);
        let transaction = self.connection.transaction()?;
        let mut gone = Vec::new();
        {
            // Old rows go a few at a time, so that no request waits for a large delete.
            // Each insert deletes up to 64 rows, so old rows cannot pile up.
            let mut statement = transaction.prepare_cached(
                "DELETE FROM intents WHERE scope = ?1 OR scope IN (
                   SELECT scope FROM intents WHERE began_utc_ns < ?2
                   ORDER BY began_utc_ns LIMIT 64)
                 RETURNING tenant",
            )?;
            let rows = statement.query_map(params![digest, oldest], |row| row.get(0))?;
            for tenant in rows {
                let tenant: String = tenant?;
                gone.push(tenant);
            }
        }
        let mine = gone.iter().filter(|gone| *gone == tenant.as_str()).count() as u32;
        let held = self.counts.get(tenant.as_str()).copied().unwrap_or(0).saturating_sub(mine);
        let fits = held < self.keys_per_tenant;
        if fits {
            transaction
                .prepare_cached(
                    "INSERT INTO intents (scope, fingerprint, tenant, request_id, began_utc_ns)
                     VALUES (?1, ?2, ?3, ?4, ?5)",
                )?
                .execute(params![
                    digest,
                    record.fingerprint,
                    tenant.as_str(),
                    record.request.as_str(),
                    i64::try_from(now.0).unwrap_or(i64::MAX)
                ])?;
        }
        transaction.commit()?;
        // After the commit: a failed transaction must not change the counts.
        for tenant in gone {
            self.less(&tenant);
        }
        if fits {
            *self.counts.entry(tenant.as_str().to_owned()).or_default() += 1;
        }
        Ok(fits)
    }

    fn remove(&mut self, digest: &KeyDigest, request: &RequestId) -> rusqlite::Result<()> {
        let tenant: Option<String> = self
            .connection
            .prepare_cached(
                "DELETE FROM intents WHERE scope = ?1 AND request_id = ?2 RETURNING tenant",
            )?
            .query_row(params![digest, request.as_str()], |row| row.get(0))
            .optional()?;
        if let Some(tenant) = tenant {
            self.less(&tenant);
        }
        Ok(())
    }

    fn less(&mut self, tenant: &str) {
        if let Some(count) = self.counts.get_mut(tenant) {
            *count = count.saturating_sub(1);
            // Bounds the map by the tenants with records.
            if *count == 0 {
                self.counts.remove(tenant);
            }
        }
    }
}

const TABLES: &str = "
BEGIN;
CREATE TABLE intents (
  scope BLOB PRIMARY KEY,
  fingerprint BLOB NOT NULL,
  tenant TEXT NOT NULL,
  request_id TEXT NOT NULL,
  began_utc_ns INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX intents_by_age ON intents (began_utc_ns);
PRAGMA user_version = 1;
COMMIT;
";
