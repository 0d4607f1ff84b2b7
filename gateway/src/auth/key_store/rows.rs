//! The key table: statements and conversions, nothing else.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};
use tollgate_domain::{KeyId, PlanName, TenantId, UtcTime};

use super::{Entry, KeyRecord, KeyStoreError};

/// Opens the database, making it with mode 0600 if there is none.
pub(super) fn open(path: &Path) -> Result<Connection, KeyStoreError> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| KeyStoreError::File { path: path.to_owned(), source })?;
    let fault = |source| KeyStoreError::Database { path: path.to_owned(), source };
    let connection = Connection::open(path).map_err(fault)?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(fault)?;
    connection.execute_batch(SETTINGS).map_err(fault)?;
    let found: i64 =
        connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(fault)?;
    match found {
        FORMAT => {}
        0 => connection.execute_batch(SCHEMA).map_err(fault)?,
        found => {
            return Err(KeyStoreError::Format { path: path.to_owned(), found, expected: FORMAT });
        }
    }
    Ok(connection)
}

/// A number that changes when another connection changes the database.
pub(super) fn data_version(connection: &Connection) -> Result<i64, KeyStoreError> {
    connection.query_row("PRAGMA data_version", [], |row| row.get(0)).map_err(fault_at(connection))
}

/// All keys, by id.
pub(super) fn load(connection: &Connection) -> Result<HashMap<String, Entry>, KeyStoreError> {
    let fault = fault_at(connection);
    let mut statement =
        connection.prepare_cached(&format!("SELECT {COLUMNS} FROM keys")).map_err(&fault)?;
    let mut rows = statement.query([]).map_err(&fault)?;
    let mut entries = HashMap::new();
    while let Some(row) = rows.next().map_err(&fault)? {
        let stored = Stored::read(row).map_err(&fault)?;
        entries.insert(stored.id.clone(), stored.entry()?);
    }
    Ok(entries)
}

pub(super) fn find(connection: &Connection, id: &KeyId) -> Result<KeyRecord, KeyStoreError> {
    let stored = connection
        .query_row(
            &format!("SELECT {COLUMNS} FROM keys WHERE id = ?1"),
            [id.as_str()],
            Stored::read,
        )
        .optional()
        .map_err(fault_at(connection))?;
    let stored = stored.ok_or_else(|| KeyStoreError::Unknown(id.clone()))?;
    Ok(stored.entry()?.record)
}

pub(super) fn insert(
    connection: &Connection,
    record: &KeyRecord,
    mac: &[u8],
) -> Result<(), KeyStoreError> {
    let KeyRecord { id, tenant, label, scopes, created, expires, revoked, rotated_from, plan } =
        record;
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
        rotated_from.as_ref().map(KeyId::as_str),
        plan.as_ref().map(PlanName::as_str),
    ];
    let statement =
        format!("INSERT INTO keys ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)");
    connection.execute(&statement, values).map_err(fault_at(connection))?;
    Ok(())
}

/// Writes what may change in a key: its end.
pub(super) fn update(connection: &Connection, record: &KeyRecord) -> Result<(), KeyStoreError> {
    let values = params![
        record.id.as_str(),
        record.expires.map(stored_time).transpose()?,
        record.revoked.map(stored_time).transpose()?,
    ];
    connection
        .execute("UPDATE keys SET expires_at = ?2, revoked_at = ?3 WHERE id = ?1", values)
        .map_err(fault_at(connection))?;
    Ok(())
}

/// Names the file in an error.
pub(super) fn fault_at(
    connection: &Connection,
) -> impl Fn(rusqlite::Error) -> KeyStoreError + use<> {
    let path = PathBuf::from(connection.path().unwrap_or_default());
    move |source| KeyStoreError::Database { path: path.clone(), source }
}

/// A row as the database gives it.
struct Stored {
    id: String,
    tenant: String,
    mac: Vec<u8>,
    label: String,
    scopes: String,
    created: i64,
    expires: Option<i64>,
    revoked: Option<i64>,
    rotated_from: Option<String>,
    plan: Option<String>,
}

impl Stored {
    /// In the order of [`COLUMNS`].
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
            rotated_from: row.get(8)?,
            plan: row.get(9)?,
        })
    }

    fn entry(self) -> Result<Entry, KeyStoreError> {
        let damaged = |column| KeyStoreError::Row { id: self.id.clone(), column };
        let time =
            |column, stored: i64| u64::try_from(stored).map(UtcTime).map_err(|_| damaged(column));
        let rotated_from = self.rotated_from.as_deref().map(KeyId::new).transpose();
        let plan = self.plan.as_deref().map(PlanName::new).transpose();
        let record = KeyRecord {
            id: KeyId::new(&self.id).map_err(|_| damaged("id"))?,
            tenant: TenantId::new(&self.tenant).map_err(|_| damaged("tenant"))?,
            label: self.label.clone(),
            scopes: serde_json::from_str(&self.scopes).map_err(|_| damaged("scopes"))?,
            created: time("created_at", self.created)?,
            expires: self.expires.map(|stored| time("expires_at", stored)).transpose()?,
            revoked: self.revoked.map(|stored| time("revoked_at", stored)).transpose()?,
            rotated_from: rotated_from.map_err(|_| damaged("rotated_from"))?,
            plan: plan.map_err(|_| damaged("plan"))?,
        };
        if self.mac.len() != 32 {
            return Err(damaged("mac"));
        }
        Ok(Entry { mac: self.mac, record })
    }
}

fn stored_time(time: UtcTime) -> Result<i64, KeyStoreError> {
    i64::try_from(time.0).map_err(|_| KeyStoreError::Time)
}

const FORMAT: i64 = 1;
const COLUMNS: &str =
    "id, tenant, mac, label, scopes, created_at, expires_at, revoked_at, rotated_from, plan";
const SETTINGS: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";
/// Times are nanoseconds since 1970 in UTC. `IF NOT EXISTS` because two
/// processes may make it at once.
const SCHEMA: &str = "
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS keys (
    id           TEXT PRIMARY KEY,
    tenant       TEXT NOT NULL,
    mac          BLOB NOT NULL,
    label        TEXT NOT NULL,
    scopes       TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER,
    revoked_at   INTEGER,
    rotated_from TEXT,
    plan         TEXT
) STRICT;
PRAGMA user_version = 1;
COMMIT;
";
