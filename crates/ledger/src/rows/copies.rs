//! Copies of all tables from a file to a server, row by row and unchanged.

use tollgate_sql::{Connection, OwnedValue, SqlError};

use super::Tables;
use super::key_database::KeyTables;
use crate::error::{LedgerError, StorageError};

/// Copies every row into the empty tables of `to`, in the caller's transaction.
pub(crate) fn run(from: Tables<'_>, to: Tables<'_>) -> Result<(), LedgerError> {
    refuse_unknown_tables(from)?;
    for table in TABLES {
        copy(from.connection, to.connection, table)?;
    }
    // The next epoch and the next caller get numbers above the copied ones.
    for table in ["epochs", "callers"] {
        go_on_after_copy(to.connection, table, "id")?;
    }
    Ok(())
}

/// Copies every key, every admin and the queue for the audit log into the empty tables of
/// `to`, in the caller's transaction.
pub(crate) fn run_keys(from: KeyTables<'_>, to: KeyTables<'_>) -> Result<(), StorageError> {
    // The triggers would queue an action for each row, which is no change.
    to.connection.execute_batch(
        "ALTER TABLE keys DISABLE TRIGGER USER; ALTER TABLE admins DISABLE TRIGGER USER",
    )?;
    for table in KEY_TABLES {
        copy(from.connection, to.connection, table)?;
    }
    go_on_after_copy(to.connection, "actions", "number")?;
    to.connection.execute_batch(
        "ALTER TABLE keys ENABLE TRIGGER USER; ALTER TABLE admins ENABLE TRIGGER USER;
         UPDATE key_meta SET generation = generation + 1",
    )?;
    Ok(())
}

/// Sets the sequence of a column above the copied numbers.
fn go_on_after_copy(to: &Connection, table: &str, column: &str) -> Result<(), SqlError> {
    let next = format!(
        "SELECT setval(pg_get_serial_sequence('{table}', '{column}'),
           (SELECT coalesce(max({column}), 0) + 1 FROM {table}), false)"
    );
    to.query_row(&next, (), |_| Ok(()))
}

/// Every table but `probe`, which is always empty. A table stands behind those that it refers to.
const TABLES: [&str; 21] = [
    "meta",
    "epochs",
    "callers",
    "blocks",
    "struck_blocks",
    "refused_blocks",
    "entries",
    "attempts",
    "requests",
    "fault_caps",
    "daily",
    "tenant_plans",
    "records",
    "record_nodes",
    "checkpoints",
    "recorded_actions",
    "archives",
    "archived_epochs",
    "archived_days",
    "archived_attempts",
    "archived_shares",
];

/// Every table of the key database.
const KEY_TABLES: [&str; 3] = ["keys", "admins", "actions"];

/// Values in one statement. The protocol allows 65,535.
const VALUES_AT_ONCE: usize = 4_000;

/// A table that is added to a file must be added here, too, or its rows would be lost.
fn refuse_unknown_tables(from: Tables<'_>) -> Result<(), LedgerError> {
    let mut statement =
        from.connection.prepare("SELECT name FROM sqlite_schema WHERE type = 'table'")?;
    for name in statement.query_map((), |row| row.get::<String>(0))? {
        let name = name?;
        if name != "probe" && !TABLES.contains(&name.as_str()) {
            return Err(LedgerError::Damaged(format!("an unknown table, {name}")));
        }
    }
    Ok(())
}

fn copy(from: &Connection, to: &Connection, table: &str) -> Result<(), SqlError> {
    let mut statement = from.prepare("SELECT name FROM pragma_table_info(?1)")?;
    let columns = statement.query_map([table], |row| row.get(0))?;
    let columns: Vec<String> = columns.collect::<Result<_, _>>()?;
    let (count, names) = (columns.len(), columns.join(", "));
    // The server's tables have a format already.
    let which = if table == "meta" { "WHERE name <> 'format'" } else { "" };
    let mut statement = from.prepare(&format!("SELECT {names} FROM {table} {which}"))?;
    let mut rows = statement.query(())?;
    let mut values = Vec::new();
    loop {
        let row = rows.next()?;
        let is_last = row.is_none();
        if let Some(row) = row {
            for column in 0..count {
                values.push(row.get::<OwnedValue>(column)?);
            }
        }
        let is_full = values.len() + count > VALUES_AT_ONCE;
        if !values.is_empty() && (is_full || is_last) {
            insert(to, (table, &names), count, std::mem::take(&mut values))?;
        }
        if is_last {
            return Ok(());
        }
    }
}

fn insert(
    to: &Connection,
    (table, names): (&str, &str),
    columns: usize,
    values: Vec<OwnedValue>,
) -> Result<(), SqlError> {
    let rows: Vec<String> = (0..values.len() / columns)
        .map(|row| {
            let first = row * columns + 1;
            let numbers: Vec<String> =
                (first..first + columns).map(|number| format!("?{number}")).collect();
            format!("({})", numbers.join(", "))
        })
        .collect();
    let sql = format!("INSERT INTO {table} ({names}) VALUES {}", rows.join(", "));
    to.execute(&sql, values)?;
    Ok(())
}
