//! Table `keys` of the key database: one row for each API key.

use tollgate_domain::{InvalidName, KeyId, PlanName, TenantId, UtcTime};
use tollgate_sql::{Row, SqlError, SqlValue, ValueError, params};

use super::key_database::KeyTables;
use crate::error::StorageError;

/// The number of a change of keys. Each change has a higher number than all before
/// it; the default is before the first change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangeNumber(i64);

/// One key as the database holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// The facts that the check of a request needs.
    pub facts: KeyFacts,
    /// A name for people.
    pub label: String,
    /// The time when the key was created.
    pub created: UtcTime,
    /// The key that this key replaced.
    pub rotated_from: Option<KeyId>,
}

/// The facts of a key that the check of a request needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFacts {
    /// The public id of the key.
    pub id: KeyId,
    /// The tenant that the key belongs to.
    pub tenant: TenantId,
    /// The keyed hash of the whole key.
    pub mac: [u8; 32],
    /// The limits on the key's use, as JSON. The database does not read them.
    pub scopes: String,
    /// The plan that limits this key alone, in addition to its tenant's plan.
    pub plan: Option<PlanName>,
    /// The facts about the end of the key.
    pub end: KeyEnd,
}

/// The facts about the end of a key, the only ones that change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyEnd {
    /// The time when the key expires, if it does.
    pub expires: Option<UtcTime>,
    /// The time when the key was revoked, if it was.
    pub revoked: Option<UtcTime>,
    /// True if the running requests of the key must end.
    pub ends_requests: bool,
}

/// Reasons why a row of keys cannot be read or written.
#[derive(Debug)]
pub(crate) enum KeyRowError {
    /// The database failed.
    Storage(StorageError),
    /// A column holds a value that no version writes.
    Damaged { id: String, column: String },
    /// A time is later than the last that the database can hold.
    Time,
}

impl From<StorageError> for KeyRowError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl From<SqlError> for KeyRowError {
    fn from(error: SqlError) -> Self {
        Self::Storage(error.into())
    }
}

/// Returns the number of the latest change, or the default if there is no key.
pub(crate) fn latest_change(tables: KeyTables<'_>) -> Result<ChangeNumber, StorageError> {
    let query = "SELECT coalesce(max(changed), 0) FROM keys";
    Ok(ChangeNumber(tables.connection.query_row(query, (), |row| row.get(0))?))
}

/// Returns the number of the next change, which is above all existing numbers. If the
/// column cannot hold a higher number, that is an error: with an equal number the change
/// would stay hidden from other processes.
pub(crate) fn next_change(tables: KeyTables<'_>) -> Result<ChangeNumber, StorageError> {
    // SQLite gives a sum beyond its integers as a float, which `get` refuses. A server refuses
    // the sum.
    let query = "SELECT coalesce(max(changed), 0) + 1 FROM keys";
    Ok(ChangeNumber(tables.connection.query_row(query, (), |row| row.get(0))?))
}

/// Returns the number of keys.
pub(crate) fn count(tables: KeyTables<'_>) -> Result<usize, StorageError> {
    Ok(tables.connection.query_row("SELECT count(*) FROM keys", (), |row| row.get(0))?)
}

/// Calls `take` with the facts of each key that changed after `since`. The outer
/// result is the database's own failure; where `take` fails, no further row is read.
pub(crate) fn changed_since<E>(
    tables: KeyTables<'_>,
    since: ChangeNumber,
    mut take: impl FnMut(KeyFacts) -> Result<(), E>,
) -> Result<Result<(), E>, KeyRowError> {
    // For all rows, a scan of the table is faster than the index. A server knows that.
    let is_scan = since == ChangeNumber::default() && tables.are_in_file();
    let way = if is_scan { "NOT INDEXED" } else { "" };
    let sql = format!("SELECT {FACTS} FROM keys {way} WHERE changed > ?1");
    let mut statement = tables.connection.prepare(&sql)?;
    let mut rows = statement.stream([since.0])?;
    while let Some(row) = rows.next()? {
        if let Err(error) = take(Columns::of(&row)?.facts()?) {
            return Ok(Err(error));
        }
    }
    Ok(Ok(()))
}

/// Returns the keys of `tenant`, or of all tenants, ordered by tenant and age.
pub(crate) fn list(
    tables: KeyTables<'_>,
    tenant: Option<&TenantId>,
) -> Result<Vec<KeyRow>, KeyRowError> {
    let sql = format!(
        "SELECT {FACTS}, {OTHERS} FROM keys WHERE tenant = ?1 OR ?1 IS NULL
         ORDER BY tenant, created_at, id"
    );
    read_all(tables, &sql, params![tenant.map(TenantId::as_str)])
}

/// Returns up to `most` keys of `tenant`, or of all tenants, after the id `after`, ordered
/// by id.
pub(crate) fn page(
    tables: KeyTables<'_>,
    tenant: Option<&TenantId>,
    after: Option<&KeyId>,
    most: usize,
) -> Result<Vec<KeyRow>, KeyRowError> {
    let sql = format!(
        "SELECT {FACTS}, {OTHERS} FROM keys
         WHERE (tenant = ?1 OR ?1 IS NULL) AND (id > ?2 OR ?2 IS NULL) ORDER BY id LIMIT ?3"
    );
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    let (tenant, after) = (tenant.map(TenantId::as_str), after.map(KeyId::as_str));
    read_all(tables, &sql, params![tenant, after, most])
}

fn read_all(
    tables: KeyTables<'_>,
    sql: &str,
    params: &[&dyn tollgate_sql::ToSql],
) -> Result<Vec<KeyRow>, KeyRowError> {
    let mut statement = tables.connection.prepare(sql)?;
    let mut rows = statement.query(params)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(Columns::of(&row)?.key()?);
    }
    Ok(found)
}

/// Returns the key with the id `id`.
pub(crate) fn find(tables: KeyTables<'_>, id: &KeyId) -> Result<Option<KeyRow>, KeyRowError> {
    let sql = format!("SELECT {FACTS}, {OTHERS} FROM keys WHERE id = ?1");
    let found = read_all(tables, &sql, params![id.as_str()])?;
    Ok(found.into_iter().next())
}

/// Inserts a new key under the change number `change`.
pub(crate) fn insert(
    tables: KeyTables<'_>,
    key: &KeyRow,
    change: ChangeNumber,
) -> Result<(), KeyRowError> {
    let KeyRow { facts, label, created, rotated_from } = key;
    let KeyFacts { id, tenant, mac, scopes, plan, end } = facts;
    let sql = format!(
        "INSERT INTO keys ({FACTS}, {OTHERS}, changed)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)"
    );
    let values = params![
        id.as_str(),
        tenant.as_str(),
        mac,
        scopes,
        plan.as_ref().map(PlanName::as_str),
        end.expires.map(stored).transpose()?,
        end.revoked.map(stored).transpose()?,
        end.ends_requests,
        label,
        stored(*created)?,
        rotated_from.as_ref().map(KeyId::as_str),
        change.0,
    ];
    tables.connection.execute(&sql, values)?;
    Ok(())
}

/// Updates the columns about the end of a key, under the change number `change`.
pub(crate) fn update_end(
    tables: KeyTables<'_>,
    id: &KeyId,
    end: &KeyEnd,
    change: ChangeNumber,
) -> Result<(), KeyRowError> {
    let update = "UPDATE keys SET expires_at = ?2, revoked_at = ?3, ends_requests = ?4,
         changed = ?5 WHERE id = ?1";
    let values = params![
        id.as_str(),
        end.expires.map(stored).transpose()?,
        end.revoked.map(stored).transpose()?,
        end.ends_requests,
        change.0,
    ];
    tables.connection.execute(update, values)?;
    Ok(())
}

/// The columns of one row in the order of [`FACTS`] and [`OTHERS`], not checked yet.
struct Columns<'r> {
    row: &'r Row<'r>,
    id: &'r str,
}

impl<'r> Columns<'r> {
    fn of(row: &'r Row<'r>) -> Result<Self, KeyRowError> {
        let columns = Self { row, id: "" };
        let id = columns.text(0)?.unwrap_or_default();
        Ok(Self { row, id })
    }

    fn facts(&self) -> Result<KeyFacts, KeyRowError> {
        let mac: Vec<u8> = self.row.get(2)?;
        Ok(KeyFacts {
            id: self.required(0, KeyId::new)?,
            tenant: self.required(1, TenantId::new)?,
            mac: mac.try_into().map_err(|_| self.damaged(2))?,
            scopes: self.row.get(3)?,
            plan: self.name(4, PlanName::new)?,
            end: KeyEnd {
                expires: self.time(5)?,
                revoked: self.time(6)?,
                ends_requests: self.row.get(7)?,
            },
        })
    }

    fn key(&self) -> Result<KeyRow, KeyRowError> {
        Ok(KeyRow {
            facts: self.facts()?,
            label: self.row.get(8)?,
            created: self.time(9)?.ok_or_else(|| self.damaged(9))?,
            rotated_from: self.name(10, KeyId::new)?,
        })
    }

    fn required<T>(
        &self,
        column: usize,
        check: impl FnOnce(&str) -> Result<T, InvalidName>,
    ) -> Result<T, KeyRowError> {
        self.name(column, check)?.ok_or_else(|| self.damaged(column))
    }

    fn name<T>(
        &self,
        column: usize,
        check: impl FnOnce(&str) -> Result<T, InvalidName>,
    ) -> Result<Option<T>, KeyRowError> {
        self.text(column)?.map(check).transpose().map_err(|_| self.damaged(column))
    }

    /// Returns a text without a copy, because the names of a million keys are read at a start.
    fn text(&self, column: usize) -> Result<Option<&'r str>, KeyRowError> {
        match self.row.value(column)? {
            SqlValue::Null => Ok(None),
            SqlValue::Text(text) => Ok(Some(text)),
            other => {
                let source = ValueError::Type { expected: "a text", found: other.type_name() };
                Err(SqlError::Value { index: column, source }.into())
            }
        }
    }

    fn time(&self, column: usize) -> Result<Option<UtcTime>, KeyRowError> {
        let stored: Option<i64> = self.row.get(column)?;
        // No version writes a negative time, so such a row is damaged.
        let time = stored.map(|stored| u64::try_from(stored).map(UtcTime)).transpose();
        time.map_err(|_| self.damaged(column))
    }

    fn damaged(&self, column: usize) -> KeyRowError {
        let columns = [FACTS, OTHERS].join(", ");
        let column = columns.split(", ").nth(column).unwrap_or("unknown").to_owned();
        KeyRowError::Damaged { id: self.id.to_owned(), column }
    }
}

pub(super) fn stored(time: UtcTime) -> Result<i64, KeyRowError> {
    // The integers of both databases are signed.
    i64::try_from(time.0).map_err(|_| KeyRowError::Time)
}

const FACTS: &str = "id, tenant, mac, scopes, plan, expires_at, revoked_at, ends_requests";
const OTHERS: &str = "label, created_at, rotated_from";

/// The table in format 2. Times are Unix nanoseconds. `changed` is the number of the
/// row's latest change; a process that follows reads the rows with higher numbers
/// than it has seen.
pub(super) const DEFINITION: &str = "
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
/// The migration from format 1.
pub(super) const FROM_1: &str = "
ALTER TABLE keys ADD COLUMN ends_requests INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN changed INTEGER NOT NULL DEFAULT 1;
CREATE INDEX keys_changed ON keys (changed);
PRAGMA user_version = 2;
";
