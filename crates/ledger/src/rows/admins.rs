//! Table `admins` of the key database: one row for each named admin.
//!
//! Triggers queue each change for the audit log, as they do for keys.

use tollgate_domain::{AdminName, UtcTime};
use tollgate_sql::{Row, params};

use super::key_database::KeyTables;
use super::keys::{KeyRowError, stored};
use crate::error::StorageError;

/// One named admin as the database holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminRow {
    /// The name, which no other admin has.
    pub name: AdminName,
    /// The role. The database does not read it.
    pub role: String,
    /// The keyed hash of the admin's whole key.
    pub mac: [u8; 32],
    /// The time when the admin was created.
    pub created: UtcTime,
}

/// Returns true if the table and its triggers exist in a file.
pub(crate) fn exist(tables: KeyTables<'_>) -> Result<bool, StorageError> {
    let sql = "SELECT count(*) > 0 FROM sqlite_schema WHERE name = 'admins'";
    Ok(tables.connection.query_row(sql, (), |row| row.get(0))?)
}

/// Returns all admins, ordered by name.
pub(crate) fn list(tables: KeyTables<'_>) -> Result<Vec<AdminRow>, KeyRowError> {
    let sql = format!("SELECT {COLUMNS} FROM admins ORDER BY name");
    let mut statement = tables.connection.prepare(&sql)?;
    let mut rows = statement.query(())?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(read(&row)?);
    }
    Ok(found)
}

/// Inserts a new admin.
pub(crate) fn insert(tables: KeyTables<'_>, admin: &AdminRow) -> Result<(), KeyRowError> {
    let AdminRow { name, role, mac, created } = admin;
    let sql = format!("INSERT INTO admins ({COLUMNS}) VALUES (?1, ?2, ?3, ?4)");
    let values = params![name.as_str(), role, mac, stored(*created)?];
    tables.connection.execute(&sql, values)?;
    Ok(())
}

/// Deletes the admin `name`.
pub(crate) fn delete(tables: KeyTables<'_>, name: &AdminName) -> Result<(), StorageError> {
    tables.connection.execute("DELETE FROM admins WHERE name = ?1", [name.as_str()])?;
    Ok(())
}

fn read(row: &Row<'_>) -> Result<AdminRow, KeyRowError> {
    let name: String = row.get(0)?;
    let damaged = |column: &str| KeyRowError::Damaged {
        id: format!("of admin {name}"),
        column: column.to_owned(),
    };
    let mac: Vec<u8> = row.get(2)?;
    let created: i64 = row.get(3)?;
    Ok(AdminRow {
        role: row.get(1)?,
        mac: mac.try_into().map_err(|_| damaged("mac"))?,
        // No version writes a negative time, so such a row is damaged.
        created: u64::try_from(created).map(UtcTime).map_err(|_| damaged("created_at"))?,
        name: AdminName::new(&name).map_err(|_| damaged("name"))?,
    })
}

const COLUMNS: &str = "name, role, mac, created_at";

/// The table and its triggers. An action on an admin has neither tenant nor key; both are
/// empty in the queue.
pub(super) const DEFINITION: &str = "
CREATE TABLE admins (
    name       TEXT PRIMARY KEY,
    role       TEXT NOT NULL,
    mac        BLOB NOT NULL UNIQUE,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TRIGGER admin_made AFTER INSERT ON admins BEGIN
    INSERT INTO actions (operation, tenant, key, detail) VALUES (
        'admin.created', '', '', json_object('admin', NEW.name, 'role', NEW.role));
END;

CREATE TRIGGER admin_changed AFTER UPDATE ON admins BEGIN
    INSERT INTO actions (operation, tenant, key, detail) VALUES (
        'admin.changed', '', '',
        json_object('admin', NEW.name, 'role', NEW.role,
            'secret_changed', json(iif(OLD.mac IS NEW.mac, 'false', 'true')),
            'was_admin', OLD.name, 'was_role', OLD.role));
END;

CREATE TRIGGER admin_deleted AFTER DELETE ON admins BEGIN
    INSERT INTO actions (operation, tenant, key, detail) VALUES (
        'admin.revoked', '', '', json_object('admin', OLD.name, 'role', OLD.role));
END;
";
