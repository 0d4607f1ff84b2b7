//! The move of a gateway's own files and batches to the store that it shares with others.

use tollgate_sql::{Connection, OwnedValue, SqlError, ToSql};

use super::{SqlStore, Tables};
use crate::error::JobError;

/// The tables and columns of a file, in the order of their rows. Leases are left out: they are of
/// a process that has ended.
const MOVED: [(&str, &str, &str); 8] = [
    ("blobs", "id, tenant, pool, kind, bytes, batch", ""),
    (
        "files",
        "id, tenant, pool, bytes, created, expires, filename, purpose, lines, sha256",
        "ORDER BY seq",
    ),
    ("ranges", "file, ordinal, blob, start, length", ""),
    (
        "batches",
        "id, tenant, pool, key, input, endpoint, metadata, created, expires, results_kept, kept,
         state, cause, model, models_differ, total, completed, failed, prompt_tokens,
         cached_tokens, completion_tokens, reasoning_tokens, errors, output, error, running_at,
         ending_at, ended_at, room, claim, claim_bits, claim_answers, barren",
        "ORDER BY seq",
    ),
    ("claims", "batch, number, bits, id_bits, begun", ""),
    ("tries", "batch, claim, line, number", ""),
    ("answers", "batch, line, kind, blob, start, length, paid_claim, paid_try", ""),
    ("spent", "day, tenant, class, reference_ns", ""),
];

impl SqlStore {
    /// Writes the rows of `own`, which has no uploads, and whose bytes are in the shared folder
    /// already. Returns false if
    /// that was done before: the rows may have changed since.
    ///
    /// # Errors
    /// A store failed; nothing was written.
    pub(crate) fn adopt(&mut self, own: &mut Self) -> Result<bool, JobError> {
        self.write(|tables| {
            let Some(home) = tables.home else { return Ok(false) };
            let first = "INSERT INTO adopted_homes (home) VALUES (?1) ON CONFLICT DO NOTHING";
            if tables.connection.execute(first, [home])? == 0 {
                return Ok(false);
            }
            own.read(|from| {
                for (table, columns, order) in MOVED {
                    copy(from, tables, (table, columns, order))?;
                }
                Ok(true)
            })
        })
    }
}

/// Copies the rows of one table.
fn copy(
    from: Tables<'_>,
    to: Tables<'_>,
    (table, columns, order): (&str, &str, &str),
) -> Result<(), SqlError> {
    let count = columns.split(',').count();
    // A cost is of the gateway that has spent it.
    let home = to.home.filter(|_| table == "spent");
    let mut places: Vec<String> = (1..=count).map(|place| format!("?{place}")).collect();
    let mut into = columns.to_owned();
    if home.is_some() {
        into.push_str(", home");
        places.push(format!("?{}", count + 1));
    }
    let insert = format!("INSERT INTO {table} ({into}) VALUES ({})", places.join(", "));
    let connection: &Connection = from.connection;
    let mut select = connection.prepare(&format!("SELECT {columns} FROM {table} {order}"))?;
    let mut rows = select.query(())?;
    let mut insert = to.connection.prepare(&insert)?;
    while let Some(row) = rows.next()? {
        let mut values =
            (0..count).map(|column| row.get(column)).collect::<Result<Vec<OwnedValue>, _>>()?;
        values.extend(home.map(|home| OwnedValue::Text(home.to_owned())));
        let values: Vec<&dyn ToSql> = values.iter().map(|value| value as &dyn ToSql).collect();
        insert.send(values.as_slice())?;
    }
    Ok(())
}
