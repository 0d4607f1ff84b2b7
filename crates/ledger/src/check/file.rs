//! The database as a file: SQLite's own check, and the tables as this version
//! makes them. A table that says otherwise would be read otherwise.

use std::collections::BTreeMap;

use rusqlite::Connection;

use crate::{LedgerError, schema};

/// Tells `add` of all that is wrong with the file.
pub(super) fn check(
    connection: &Connection,
    add: &mut dyn FnMut(String),
) -> Result<(), LedgerError> {
    pragma(connection, "PRAGMA integrity_check(10)", add)?;
    tables(connection, add)
}

/// As [`check`], without comparing every index with its table.
pub(super) fn quick_check(
    connection: &Connection,
    add: &mut dyn FnMut(String),
) -> Result<(), LedgerError> {
    pragma(connection, "PRAGMA quick_check(10)", add)?;
    tables(connection, add)
}

fn pragma(
    connection: &Connection,
    query: &str,
    add: &mut dyn FnMut(String),
) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(query)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let line: String = row.get(0)?;
        if line != "ok" {
            add(line);
        }
    }
    Ok(())
}

fn tables(connection: &Connection, add: &mut dyn FnMut(String)) -> Result<(), LedgerError> {
    let (found, expected) =
        (definitions(connection)?, definitions(&schema::in_memory(connection)?)?);
    for (name, text) in &expected {
        match found.get(name) {
            None => add(format!("{name} is missing")),
            Some(found) if found != text => add(format!("{name} is not defined as it was made")),
            Some(_) => {}
        }
    }
    for name in found.keys().filter(|name| !expected.contains_key(*name)) {
        add(format!("{name} is none of the ledger's"));
    }
    Ok(())
}

/// What each table, index, view and trigger is, by kind and name.
fn definitions(connection: &Connection) -> Result<BTreeMap<String, String>, LedgerError> {
    let mut statement = connection.prepare(
        "SELECT type || ' ' || name, tbl_name || ': ' || coalesce(sql, '') FROM sqlite_schema",
    )?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}
