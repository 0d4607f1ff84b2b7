//! The rows of the key table: SQL statements and conversions.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use tollgate_domain::{KeyId, PlanName, TenantId, UtcTime};

use super::{KeyRecord, KeyStoreError};

/// Opens the database. Creates it with mode 0600 if there is none, and migrates an
/// older format.
pub(super) fn open(path: &Path) -> Result<Connection, KeyStoreError> {
    // SQLite would give a new file the mode of the umask, which may let other users read it.
    // `append` leaves an existing file as it is.
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| KeyStoreError::File { path: path.to_owned(), source })?;
    let fault = |source| KeyStoreError::Database { path: path.to_owned(), source };
    let mut connection = Connection::open(path).map_err(fault)?;
    // Another process may be in a commit, which takes far less than this time.
    connection.busy_timeout(Duration::from_secs(5)).map_err(fault)?;
    connection.execute_batch(SETTINGS).map_err(fault)?;
    // Asked without a lock first, because nearly every start finds the right format.
    if format(&connection).map_err(fault)? != FORMAT {
        // Several processes may be here at the same time; the first migrates.
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(fault)?;
        match format(&transaction).map_err(fault)? {
            FORMAT => {}
            0 => transaction.execute_batch(SCHEMA).map_err(fault)?,
            1 => transaction.execute_batch(FROM_1).map_err(fault)?,
            found => {
                let (path, expected) = (path.to_owned(), FORMAT);
                return Err(KeyStoreError::Format { path, found, expected });
            }
        }
        transaction.commit().map_err(fault)?;
    }
    Ok(connection)
}

fn format(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Returns a number that changes when another connection changes the database.
pub(super) fn data_version(connection: &Connection) -> Result<i64, KeyStoreError> {
    connection.query_row("PRAGMA data_version", [], |row| row.get(0)).map_err(fault_at(connection))
}

/// Returns the number of the next change, which is above all existing numbers.
pub(super) fn next_change(connection: &Connection) -> Result<i64, KeyStoreError> {
    connection
        .query_row("SELECT COALESCE(MAX(changed), 0) + 1 FROM keys", [], |row| row.get(0))
        .map_err(fault_at(connection))
}

/// Returns the number of keys.
pub(super) fn count(connection: &Connection) -> Result<usize, KeyStoreError> {
    let count: i64 = connection
        .query_row("SELECT COUNT(*) FROM keys", [], |row| row.get(0))
        .map_err(fault_at(connection))?;
    // A count is never negative, so the default is never used.
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Calls `take` with each key that changed after change number `since`.
pub(super) fn changed_since(
    connection: &Connection,
    since: i64,
    mut take: impl FnMut(Stored) -> Result<(), KeyStoreError>,
) -> Result<(), KeyStoreError> {
    let fault = fault_at(connection);
    // For all rows, a scan of the table is faster than the index.
    let way = if since == 0 { "NOT INDEXED" } else { "" };
    let sql = format!("SELECT {COLUMNS} FROM keys {way} WHERE changed > ?1");
    let mut statement = connection.prepare_cached(&sql).map_err(&fault)?;
    let mut rows = statement.query([since]).map_err(&fault)?;
    while let Some(row) = rows.next().map_err(&fault)? {
        take(Stored::read(row).map_err(&fault)?)?;
    }
    Ok(())
}

/// Returns the keys of `tenant`, or of all tenants, ordered by tenant and age.
pub(super) fn list(
    connection: &Connection,
    tenant: Option<&TenantId>,
) -> Result<Vec<KeyRecord>, KeyStoreError> {
    let fault = fault_at(connection);
    let sql = format!(
        "SELECT {COLUMNS} FROM keys WHERE ?1 IS NULL OR tenant = ?1 ORDER BY tenant, created_at, id"
    );
    let mut statement = connection.prepare_cached(&sql).map_err(&fault)?;
    let mut rows = statement.query([tenant.map(TenantId::as_str)]).map_err(&fault)?;
    let mut records = Vec::new();
    while let Some(row) = rows.next().map_err(&fault)? {
        records.push(Stored::read(row).map_err(&fault)?.record()?);
    }
    Ok(records)
}

/// Returns the key with the id `id`.
pub(super) fn find(connection: &Connection, id: &KeyId) -> Result<KeyRecord, KeyStoreError> {
    let stored = connection
        .query_row(
            &format!("SELECT {COLUMNS} FROM keys WHERE id = ?1"),
            [id.as_str()],
            Stored::read,
        )
        .optional()
        .map_err(fault_at(connection))?;
    stored.ok_or_else(|| KeyStoreError::Unknown(id.clone()))?.record()
}

/// Inserts a new key with the HMAC `mac`, under the change number `change`.
pub(super) fn insert(
    connection: &Connection,
    record: &KeyRecord,
    mac: &[u8],
    change: i64,
) -> Result<(), KeyStoreError> {
    let KeyRecord {
        id,
        tenant,
        label,
        scopes,
        created,
        expires,
        revoked,
        ends_requests,
        rotated_from,
        plan,
    } = record;
    let scopes = serde_json::to_string(scopes).expect("names and words serialise");
    let values = params![
        id.as_str(),
        tenant.as_str(),
        mac,
        label,
        scopes,
        stored_time(*created)?,
        expires.map(stored_time).transpose()?,
        revoked.map(stored_time).transpose()?,
        ends_requests,
        rotated_from.as_ref().map(KeyId::as_str),
        plan.as_ref().map(PlanName::as_str),
        change,
    ];
    let sql = format!(
        "INSERT INTO keys ({COLUMNS}, changed)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)"
    );
    let fault = fault_at(connection);
    connection.prepare_cached(&sql).map_err(&fault)?.execute(values).map_err(&fault)?;
    Ok(())
}

/// Updates the columns of a key that may change: those about its end.
pub(super) fn update(
    connection: &Connection,
    record: &KeyRecord,
    change: i64,
) -> Result<(), KeyStoreError> {
    let values = params![
        record.id.as_str(),
        record.expires.map(stored_time).transpose()?,
        record.revoked.map(stored_time).transpose()?,
        record.ends_requests,
        change,
    ];
    let sql = "UPDATE keys SET expires_at = ?2, revoked_at = ?3, ends_requests = ?4, changed = ?5
               WHERE id = ?1";
    connection.execute(sql, values).map_err(fault_at(connection))?;
    Ok(())
}

/// Returns a function that adds the path of the database to an error.
pub(super) fn fault_at(
    connection: &Connection,
) -> impl Fn(rusqlite::Error) -> KeyStoreError + use<> {
    // The path is copied, because a transaction borrows the connection meanwhile.
    let path = PathBuf::from(connection.path().unwrap_or_default());
    move |source| KeyStoreError::Database { path: path.clone(), source }
}

/// Returns the error that `column` of a row holds a value that no version writes.
pub(super) fn damaged(id: &str, column: &'static str) -> KeyStoreError {
    KeyStoreError::Row { id: id.to_owned(), column }
}

/// A row of the database, not checked yet.
pub(super) struct Stored {
    pub(super) id: String,
    tenant: String,
    mac: Vec<u8>,
    label: String,
    pub(super) scopes: String,
    created: i64,
    expires: Option<i64>,
    revoked: Option<i64>,
    ends_requests: bool,
    rotated_from: Option<String>,
    plan: Option<String>,
}

/// The checked values of a row that the check of a request needs.
pub(super) struct Checked {
    pub(super) tenant: TenantId,
    pub(super) mac: [u8; 32],
    pub(super) expires: Option<UtcTime>,
    pub(super) revoked: Option<UtcTime>,
    pub(super) ends_requests: bool,
    pub(super) plan: Option<PlanName>,
}

impl Stored {
    /// Reads a row with the columns in the order of [`COLUMNS`].
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get(0)?,
            tenant: row.get(1)?,
            mac: row.get(2)?,
            label: row.get(3)?,
            scopes: row.get(4)?,
            created: row.get(5)?,
            expires: row.get(6)?,
            revoked: row.get(7)?,
            ends_requests: row.get(8)?,
            rotated_from: row.get(9)?,
            plan: row.get(10)?,
        })
    }

    pub(super) fn check(&self) -> Result<Checked, KeyStoreError> {
        let damaged = |column| damaged(&self.id, column);
        let plan = self.plan.as_deref().map(PlanName::new).transpose();
        Ok(Checked {
            tenant: TenantId::new(&self.tenant).map_err(|_| damaged("tenant"))?,
            mac: self.mac.as_slice().try_into().map_err(|_| damaged("mac"))?,
            expires: self.time("expires_at", self.expires)?,
            revoked: self.time("revoked_at", self.revoked)?,
            ends_requests: self.ends_requests,
            plan: plan.map_err(|_| damaged("plan"))?,
        })
    }

    fn record(self) -> Result<KeyRecord, KeyStoreError> {
        let damaged = |column| damaged(&self.id, column);
        let Checked { tenant, mac: _, expires, revoked, ends_requests, plan } = self.check()?;
        let created = self.time("created_at", Some(self.created))?;
        let rotated_from = self.rotated_from.as_deref().map(KeyId::new).transpose();
        Ok(KeyRecord {
            id: KeyId::new(&self.id).map_err(|_| damaged("id"))?,
            tenant,
            label: self.label.clone(),
            scopes: serde_json::from_str(&self.scopes).map_err(|_| damaged("scopes"))?,
            // The column is never NULL, so the default is never used.
            created: created.unwrap_or_default(),
            expires,
            revoked,
            ends_requests,
            rotated_from: rotated_from.map_err(|_| damaged("rotated_from"))?,
            plan,
        })
    }

    fn time(
        &self,
        column: &'static str,
        stored: Option<i64>,
    ) -> Result<Option<UtcTime>, KeyStoreError> {
        let time = stored.map(|stored| u64::try_from(stored).map(UtcTime)).transpose();
        // No version writes a negative time, so such a row is damaged.
        time.map_err(|_| damaged(&self.id, column))
    }
}

fn stored_time(time: UtcTime) -> Result<i64, KeyStoreError> {
    // SQLite's integers are signed.
    i64::try_from(time.0).map_err(|_| KeyStoreError::Time)
}

const FORMAT: i64 = 2;
const COLUMNS: &str = "id, tenant, mac, label, scopes, created_at, expires_at, revoked_at, \
                       ends_requests, rotated_from, plan";
// WAL lets other processes read during a commit. FULL keeps a revocation over a power
// cut.
const SETTINGS: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";
/// The table of keys. Times are Unix nanoseconds. `changed` is the number of the
/// row's latest change; a process that follows reads the rows with higher numbers
/// than it has seen.
const SCHEMA: &str = "
CREATE TABLE keys (
    id            TEXT PRIMARY KEY,
    tenant        TEXT NOT NULL,
    mac           BLOB NOT NULL,
    label         TEXT NOT NULL,
    scopes        TEXT NOT NULL,
    created_at    INTEGER NOT NULL,
    expires_at    INTEGER,
    revoked_at    INTEGER,
    ends_requests INTEGER NOT NULL DEFAULT 0,
    rotated_from  TEXT,
    plan          TEXT,
    changed       INTEGER NOT NULL DEFAULT 1
) STRICT;
CREATE INDEX keys_changed ON keys (changed);
PRAGMA user_version = 2;
";
const FROM_1: &str = "
ALTER TABLE keys ADD COLUMN ends_requests INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN changed INTEGER NOT NULL DEFAULT 1;
CREATE INDEX keys_changed ON keys (changed);
PRAGMA user_version = 2;
";
