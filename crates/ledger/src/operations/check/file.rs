//! Check of the database as a file: SQLite's own check, and the tables' definitions
//! as this version makes them. A table that is defined otherwise would be read
//! otherwise.

use super::Findings;
use crate::error::LedgerError;
use crate::rows::Tables;
use crate::rows::database::Database;
use crate::rows::schema::{self, Depth, definitions};

/// Checks the file. A server checks its own files.
pub(super) fn check(
    tables: Tables<'_>,
    depth: Depth,
    findings: &mut Findings,
) -> Result<(), LedgerError> {
    if !tables.are_in_file() {
        return Ok(());
    }
    for line in schema::check_file(tables, depth)? {
        findings.add("file", line);
    }
    let found = definitions(tables)?;
    // The same statements made the file, so the texts are equal byte for byte.
    let expected = definitions(Database::in_memory(tables)?.tables())?;
    for (name, text) in &expected {
        match found.get(name) {
            None => findings.add("file", format!("{name} is missing")),
            Some(found) if found != text => {
                findings.add("file", format!("{name} is not defined as this version defines it"));
            }
            Some(_) => {}
        }
    }
    for name in found.keys().filter(|name| !expected.contains_key(*name)) {
        findings.add("file", format!("{name} does not belong to the ledger"));
    }
    Ok(())
}
