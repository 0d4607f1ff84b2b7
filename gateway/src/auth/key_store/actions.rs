//! The queue of key changes for the audit log.
//!
//! Triggers of the key database write a row for each change, in the transaction
//! of the change. So no program, and no person at a SQL prompt, changes a key
//! without a row. The gateway hands the rows to the ledger, which accepts each id
//! once, and then deletes them here. After a crash in between, the rows are
//! handed over again.

use rusqlite::{Connection, TransactionBehavior, params};
use tollgate_domain::UtcTime;
use tollgate_ledger::AdminAction;

use super::KeyStoreError;
use super::rows::fault_at;

/// Creates the table and its triggers if there are none. Keys that exist at that
/// time get an action `key.found`.
pub(super) fn open(connection: &mut Connection) -> Result<(), KeyStoreError> {
    let fault = fault_at(connection);
    let known = |connection: &Connection| -> rusqlite::Result<i64> {
        connection.query_row(
            "SELECT count(*) FROM sqlite_schema WHERE name = 'actions'",
            [],
            |row| row.get(0),
        )
    };
    if known(connection).map_err(&fault)? > 0 {
        return Ok(());
    }
    // Several processes may be here at the same time; the first creates the table.
    let transaction =
        connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(&fault)?;
    if known(&transaction).map_err(&fault)? == 0 {
        transaction.execute_batch(TABLES).map_err(&fault)?;
    }
    transaction.commit().map_err(&fault)
}

/// Returns the number of the latest action, also if that action is deleted.
pub(super) fn latest(connection: &Connection) -> Result<i64, KeyStoreError> {
    connection
        .prepare_cached("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'actions'")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .map_err(fault_at(connection))
}

/// Names this process as the actor of the actions after `latest`. A row without an
/// actor was caused by another program.
pub(super) fn sign(connection: &Connection, latest: i64) -> Result<(), KeyStoreError> {
    let actor = format!("uid {}", rustix::process::getuid().as_raw());
    connection
        .prepare_cached("UPDATE actions SET actor = ?1 WHERE number > ?2")
        .and_then(|mut statement| statement.execute(params![actor, latest]))
        .map_err(fault_at(connection))?;
    Ok(())
}

/// Returns up to `max` of the oldest actions, each with its number.
pub(super) fn oldest(
    connection: &Connection,
    max: usize,
) -> Result<Vec<(i64, AdminAction)>, KeyStoreError> {
    let fault = fault_at(connection);
    let mut statement = connection
        .prepare_cached(
            "SELECT number, id, at_utc_ms, operation, tenant, key, actor, detail
             FROM actions ORDER BY number LIMIT ?1",
        )
        .map_err(&fault)?;
    let rows = statement.query_map([i64::try_from(max).unwrap_or(i64::MAX)], |row| {
        let at: i64 = row.get(2)?;
        let detail: String = row.get(7)?;
        let actor: Option<String> = row.get(6)?;
        let action = AdminAction {
            id: row.get(1)?,
            // A damaged time or detail gets a default: a row that fails here would hold back every
            // later action.
            at: UtcTime(u64::try_from(at).unwrap_or(0).saturating_mul(1_000_000)),
            operation: row.get(3)?,
            actor: actor.unwrap_or_else(|| "unknown".to_owned()),
            user: Some((row.get(4)?, Some(row.get(5)?))),
            detail: serde_json::from_str(&detail).unwrap_or_default(),
        };
        Ok((row.get(0)?, action))
    });
    rows.and_then(Iterator::collect).map_err(&fault)
}

/// Deletes the actions with these numbers.
pub(super) fn forget(connection: &mut Connection, numbers: &[i64]) -> Result<(), KeyStoreError> {
    let fault = fault_at(connection);
    // One transaction, so that a batch costs one sync of the disk.
    let transaction =
        connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(&fault)?;
    for number in numbers {
        transaction
            .prepare_cached("DELETE FROM actions WHERE number = ?1")
            .and_then(|mut statement| statement.execute([number]))
            .map_err(&fault)?;
    }
    transaction.commit().map_err(&fault)
}

/// The table of actions and its triggers. Ids are random, so that a key database
/// that was restored from a copy neither repeats nor loses an action. A label is
/// free text of a person, so it stays out of the log, which cannot be redacted.
const TABLES: &str = "
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
