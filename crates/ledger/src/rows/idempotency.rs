//! The file of idempotency records: one table, one row for each key. It stands beside the
//! ledger.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use tollgate_domain::{RequestId, TenantId, UtcTime};

use crate::error::StorageError;

/// The format that this version reads and writes.
pub(crate) const FORMAT: i64 = 1;

/// A digest of tenant, credential and key. It names one use of one key.
pub type KeyDigest = [u8; 32];

/// The request that a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyRecord {
    /// Hash of the request's content: another content under the same key is an error.
    pub fingerprint: [u8; 32],
    /// The request's id.
    pub request: RequestId,
}

/// A record with all its columns.
pub(crate) struct StoredIntent {
    pub(crate) digest: KeyDigest,
    pub(crate) fingerprint: [u8; 32],
    pub(crate) tenant: TenantId,
    pub(crate) request: String,
    /// The time at which the request began, in nanoseconds.
    pub(crate) began: i64,
}

/// Bounds of the records.
#[derive(Clone, Copy)]
pub(crate) struct IdempotencyLimits {
    /// Nanoseconds for which a record holds.
    pub(crate) kept_ns: u64,
    pub(crate) keys_per_tenant: u32,
}

impl IdempotencyLimits {
    /// Returns the start of the oldest record that still holds, in nanoseconds as
    /// the database keeps them.
    pub(crate) fn oldest(&self, now: UtcTime) -> i64 {
        // A database holds signed integers only.
        i64::try_from(now.0.saturating_sub(self.kept_ns)).unwrap_or(i64::MAX)
    }
}

/// The open database.
pub(crate) struct IdempotencyRows {
    connection: Connection,
    limits: IdempotencyLimits,
    /// The number of rows of each tenant.
    counts: HashMap<String, u32>,
}

impl IdempotencyRows {
    /// Opens the database at `path` or makes it in an empty file. Returns `None` for a
    /// database of another format.
    pub(crate) fn open(
        path: &Path,
        limits: IdempotencyLimits,
    ) -> Result<Option<Self>, StorageError> {
        let connection = Connection::open(path)?;
        // Another process that reads the file may hold a lock for a moment.
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        // A recorded key must survive a power cut, so each commit is synced.
        connection.pragma_update(None, "synchronous", "FULL")?;
        let mut format: i64 =
            connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
        let tables: i64 =
            connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        // Only an empty file is made a database: a file of another program must not
        // be written.
        if (format, tables) == (0, 0) {
            connection.execute_batch(TABLES)?;
            format = FORMAT;
        }
        if format != FORMAT {
            return Ok(None);
        }
        let mut rows = Self { connection, limits, counts: HashMap::new() };
        // The counts live in memory only, so they are made anew from the rows.
        rows.count()?;
        Ok(Some(rows))
    }

    /// Finds fingerprint and request id of a key, unless its record was made too long
    /// before `now`.
    pub(crate) fn find(
        &self,
        digest: &KeyDigest,
        now: UtcTime,
    ) -> Result<Option<([u8; 32], String)>, StorageError> {
        let mut statement = self.connection.prepare_cached(
            "SELECT fingerprint, request_id FROM intents WHERE scope = ?1 AND began_utc_ns >= ?2",
        )?;
        let found = statement.query_row(params![digest, self.limits.oldest(now)], |row| {
            Ok((row.get(0)?, row.get(1)?))
        });
        Ok(found.optional()?)
    }

    /// Returns every record. One with an invalid tenant is left out; no version writes one.
    pub(crate) fn all(&self) -> Result<Vec<StoredIntent>, StorageError> {
        let query = "SELECT scope, fingerprint, tenant, request_id, began_utc_ns FROM intents";
        let mut statement = self.connection.prepare(query)?;
        let mut rows = statement.query([])?;
        let mut all = Vec::new();
        while let Some(row) = rows.next()? {
            let Ok(tenant) = TenantId::new(&row.get::<_, String>(2)?) else { continue };
            let (digest, fingerprint) = (row.get(0)?, row.get(1)?);
            let (request, began) = (row.get(3)?, row.get(4)?);
            all.push(StoredIntent { digest, fingerprint, tenant, request, began });
        }
        Ok(all)
    }

    /// Counts the rows of each tenant.
    fn count(&mut self) -> Result<(), StorageError> {
        let mut statement =
            self.connection.prepare("SELECT tenant, count(*) FROM intents GROUP BY tenant")?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        self.counts = rows.collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Inserts a record, and deletes a few old ones. Returns false if the tenant has as
    /// many keys as it may.
    pub(crate) fn put(
        &mut self,
        digest: &KeyDigest,
        tenant: &TenantId,
        record: &IdempotencyRecord,
        now: UtcTime,
    ) -> Result<bool, StorageError> {
        let oldest = self.limits.oldest(now);
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
        // Rows that this call deletes no longer count against the tenant.
        let mine = gone.iter().filter(|gone| *gone == tenant.as_str()).count() as u32;
        let held = self.counts.get(tenant.as_str()).copied().unwrap_or(0).saturating_sub(mine);
        let fits = held < self.limits.keys_per_tenant;
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
        // Committed even if the record does not fit, because old rows should go in any case.
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

    /// Deletes the record of a key if the key stands for `request`.
    pub(crate) fn remove(
        &mut self,
        digest: &KeyDigest,
        request: &RequestId,
    ) -> Result<(), StorageError> {
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

    /// Counts one row less of a tenant.
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

/// The tables of format 1.
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
