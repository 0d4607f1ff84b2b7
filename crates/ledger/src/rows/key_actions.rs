//! Table `actions` of the key database: the queue of key changes for the audit log.
//!
//! Triggers write a row for each change, in the transaction of the change. So no
//! program, and no person at a SQL prompt, changes a key without a row.

use tollgate_sql::params;

use super::key_database::KeyTables;
use crate::error::StorageError;

/// One change of a key.
pub(crate) struct KeyActionRow {
    /// The position in the queue. A number is never used again.
    pub(crate) number: i64,
    pub(crate) id: String,
    /// Unix milliseconds.
    pub(crate) at_utc_ms: i64,
    pub(crate) operation: String,
    pub(crate) tenant: String,
    pub(crate) key: String,
    /// `None` if another program made the change.
    pub(crate) actor: Option<String>,
    /// JSON.
    pub(crate) detail: String,
}

/// Returns true if the table and its triggers exist in a file.
pub(crate) fn exist(tables: KeyTables<'_>) -> Result<bool, StorageError> {
    let sql = "SELECT count(*) > 0 FROM sqlite_schema WHERE name = 'actions'";
    Ok(tables.connection.query_row(sql, (), |row| row.get(0))?)
}

/// Returns the number of the latest waiting action. A later action has a higher number.
pub(crate) fn latest(tables: KeyTables<'_>) -> Result<i64, StorageError> {
    let query = "SELECT coalesce(max(number), 0) FROM actions";
    Ok(tables.connection.query_row(query, (), |row| row.get(0))?)
}

/// Sets the actor of the actions after `latest`.
pub(crate) fn set_actor(
    tables: KeyTables<'_>,
    latest: i64,
    actor: &str,
) -> Result<(), StorageError> {
    let set = "UPDATE actions SET actor = ?1 WHERE number > ?2";
    tables.connection.execute(set, params![actor, latest])?;
    Ok(())
}

/// Returns up to `max` of the oldest actions.
pub(crate) fn oldest(tables: KeyTables<'_>, max: usize) -> Result<Vec<KeyActionRow>, StorageError> {
    let mut statement = tables.connection.prepare(
        "SELECT number, id, at_utc_ms, operation, tenant, key, actor, detail
         FROM actions ORDER BY number LIMIT ?1",
    )?;
    let rows = statement.query_map([i64::try_from(max).unwrap_or(i64::MAX)], |row| {
        Ok(KeyActionRow {
            number: row.get(0)?,
            id: row.get(1)?,
            at_utc_ms: row.get(2)?,
            operation: row.get(3)?,
            tenant: row.get(4)?,
            key: row.get(5)?,
            actor: row.get(6)?,
            detail: row.get(7)?,
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Deletes the actions with these numbers.
pub(crate) fn delete(tables: KeyTables<'_>, numbers: &[i64]) -> Result<(), StorageError> {
    let mut statement = tables.connection.prepare("DELETE FROM actions WHERE number = ?1")?;
    for number in numbers {
        statement.send([number])?;
    }
    Ok(tables.connection.flush()?)
}

/// The table and its triggers. Keys that exist already get an action `key.found`. Ids
/// are random, so that a key database that was restored from a copy neither repeats nor
/// loses an action. A label is free text of a person, so it stays out of the log, which
/// cannot be redacted.
pub(super) const DEFINITION: &str = "
CREATE TABLE actions (
    number    INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT NOT NULL UNIQUE DEFAULT (lower(hex(randomblob(16)))),
    at_utc_ms INTEGER NOT NULL
      DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    operation TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    key       TEXT NOT NULL,
    actor     TEXT,
    detail    TEXT NOT NULL
) STRICT;

INSERT INTO actions (operation, tenant, key, detail)
SELECT 'key.found', tenant, id, json_object('expires_utc_ns', expires_at, 'plan', plan,
    'revoked_utc_ns', revoked_at, 'scopes', json(iif(json_valid(scopes), scopes, 'null')))
FROM keys ORDER BY created_at, id;

CREATE TRIGGER key_made AFTER INSERT ON keys BEGIN
    INSERT INTO actions (operation, tenant, key, detail) VALUES (
        iif(NEW.rotated_from IS NULL, 'key.created', 'key.rotated'), NEW.tenant, NEW.id,
        json_object('expires_utc_ns', NEW.expires_at, 'plan', NEW.plan,
            'rotated_from', NEW.rotated_from,
            'scopes', json(iif(json_valid(NEW.scopes), NEW.scopes, 'null'))));
END;

CREATE TRIGGER key_changed AFTER UPDATE ON keys BEGIN
    INSERT INTO actions (operation, tenant, key, detail) VALUES (
        iif(OLD.revoked_at IS NULL AND NEW.revoked_at IS NOT NULL, 'key.revoked', 'key.changed'),
        NEW.tenant, NEW.id,
        json_object('ends_requests', json(iif(NEW.ends_requests, 'true', 'false')),
            'expires_utc_ns', NEW.expires_at, 'plan', NEW.plan,
            'revoked_utc_ns', NEW.revoked_at,
            'scopes', json(iif(json_valid(NEW.scopes), NEW.scopes, 'null')),
            'secret_changed', json(iif(OLD.mac IS NEW.mac, 'false', 'true')),
            'was_key', OLD.id, 'was_tenant', OLD.tenant));
END;

CREATE TRIGGER key_deleted AFTER DELETE ON keys BEGIN
    INSERT INTO actions (operation, tenant, key, detail)
    VALUES ('key.deleted', OLD.tenant, OLD.id, 'null');
END;
";
