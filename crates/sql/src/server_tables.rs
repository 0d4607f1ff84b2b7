//! Making tables on a server, which several processes may do at the same time.

use crate::connection::{Begin, Connection};
use crate::error::SqlError;

/// Returns true if a server's database has a table of this name.
///
/// # Errors
/// [`SqlError`].
pub fn server_has_table(connection: &Connection, name: &str) -> Result<bool, SqlError> {
    // A query of the catalog, and not `to_regclass`: that one may answer from a session's cache,
    // which does not hear of a table that another session made during this transaction.
    let query = "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_tables
         WHERE tablename = ?1 AND schemaname = ANY (current_schemas(false)))";
    connection.query_row(query, [name], |row| row.get(0))
}

/// Makes tables on a server if there is none of the name `table`, which is one of them. `lock` is
/// the lock of the process that makes them.
///
/// # Errors
/// [`SqlError`].
pub fn make_once(
    connection: &mut Connection,
    (table, lock): (&str, i64),
    definitions: &[&str],
) -> Result<(), SqlError> {
    change_once(connection, lock, |connection| server_has_table(connection, table), definitions)
}

/// Changes the tables of a server unless `is_done` says that it was done. `lock` is the lock of the
/// process that does it.
///
/// # Errors
/// [`SqlError`].
pub fn change_once(
    connection: &mut Connection,
    lock: i64,
    is_done: impl Fn(&Connection) -> Result<bool, SqlError>,
    changes: &[&str],
) -> Result<(), SqlError> {
    if is_done(connection)? {
        return Ok(());
    }
    let transaction = connection.begin(Begin::Write)?;
    // Several processes may be here at the same time.
    take_server_lock(transaction.connection(), lock)?;
    if !is_done(transaction.connection())? {
        for change in changes {
            transaction.connection().execute_batch(change)?;
        }
    }
    transaction.commit()
}

/// Waits until no other transaction of the server's database has the lock, and takes it until
/// the end of the caller's transaction.
///
/// # Errors
/// [`SqlError`].
pub fn take_server_lock(connection: &Connection, lock: i64) -> Result<(), SqlError> {
    // The lock's own result has no type that this program reads.
    connection.query_row("SELECT pg_advisory_xact_lock(?1) IS NULL", [lock], |_| Ok(()))
}
