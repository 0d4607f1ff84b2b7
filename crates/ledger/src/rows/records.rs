//! Tables `records` and `record_nodes`: the audit log's records, and the kept
//! inner nodes of their Merkle tree.

use std::ops::Range;

use serde_json::Value;
use tollgate_domain::RequestId;
use tollgate_sql::{OptionalRow, Row, SqlError, SqlValue, params};

use super::Tables;
use crate::error::LedgerError;
use crate::hex::hex;

/// A SHA-256 hash of a record or of an inner node.
pub(crate) type Hash = [u8; 32];

/// A kept inner node of the Merkle tree.
#[derive(Clone, Copy)]
pub(crate) struct NodeRow {
    pub(crate) level: u32,
    pub(crate) position: u64,
    pub(crate) hash: Hash,
}

/// A record as it is kept.
pub(crate) struct RecordRow {
    /// The record's number, from 0.
    pub(crate) seq: u64,
    /// The stored hash; its length is not checked.
    pub(crate) hash: Vec<u8>,
    pub(crate) record: String,
}

/// Rows that are older than the audit log, by table.
pub(crate) struct UnrecordedCounts {
    pub(crate) blocks: u64,
    pub(crate) attempts: u64,
    pub(crate) fault_caps: u64,
    pub(crate) refused_blocks: u64,
}

/// Inserts a record.
pub(crate) fn insert(
    tables: Tables<'_>,
    seq: u64,
    hash: &Hash,
    record: &str,
) -> Result<(), LedgerError> {
    tables
        .connection
        .prepare("INSERT INTO records (seq, hash, record) VALUES (?1, ?2, ?3)")?
        .send(params![seq, &hash[..], record])?;
    Ok(())
}

/// Inserts an inner node.
pub(crate) fn insert_node(tables: Tables<'_>, node: &NodeRow) -> Result<(), LedgerError> {
    let NodeRow { level, position, hash } = node;
    tables
        .connection
        .prepare("INSERT INTO record_nodes (level, position, hash) VALUES (?1, ?2, ?3)")?
        .send(params![level, position, &hash[..]])?;
    Ok(())
}

/// Returns the number of records, archived ones included, and the last hash.
pub(crate) fn end(tables: Tables<'_>) -> Result<(u64, Hash), LedgerError> {
    // A ledger always has a record: the genesis record, or that of its newest archive.
    let (size, hash): (u64, Vec<u8>) = tables.connection.query_row(
        "SELECT seq + 1, hash FROM records ORDER BY seq DESC LIMIT 1",
        (),
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    Ok((size, hash_from(hash, "the last record's hash")?))
}

/// Returns the hash of record `seq`.
pub(crate) fn hash_of(tables: Tables<'_>, seq: u64) -> Result<Hash, LedgerError> {
    let query = "SELECT hash FROM records WHERE seq = ?1";
    let hash = tables.connection.query_row(query, [seq], |row| row.get(0))?;
    hash_from(hash, &format!("the hash of record {seq}"))
}

/// Finds the text of record `seq`.
pub(crate) fn text_of(tables: Tables<'_>, seq: u64) -> Result<Option<String>, LedgerError> {
    Ok(tables
        .connection
        .prepare("SELECT record FROM records WHERE seq = ?1")?
        .query_row([seq], |row| row.get(0))
        .optional()?)
}

/// Finds a kept node. Level 0 are the records themselves, of which an archive may
/// have left a single hash.
pub(crate) fn node(
    tables: Tables<'_>,
    level: u32,
    position: u64,
) -> Result<Option<Hash>, LedgerError> {
    // The first branch finds a record's hash; the second finds the peak that an archive left.
    let query = if level == 0 {
        "SELECT hash FROM records WHERE seq = ?2
         UNION ALL SELECT hash FROM record_nodes WHERE level = ?1 AND position = ?2"
    } else {
        "SELECT hash FROM record_nodes WHERE level = ?1 AND position = ?2"
    };
    let found: Option<Vec<u8>> = tables
        .connection
        .prepare(query)?
        .query_row(params![level, position], |row| row.get(0))
        .optional()?;
    // A hash of another length means a damaged file.
    found.map(|found| hash_from(found, "a hash of the audit log")).transpose()
}

/// Finds a kept inner node as it is stored.
pub(crate) fn inner_node(
    tables: Tables<'_>,
    level: u32,
    position: u64,
) -> Result<Option<Vec<u8>>, LedgerError> {
    Ok(tables
        .connection
        .prepare("SELECT hash FROM record_nodes WHERE level = ?1 AND position = ?2")?
        .query_row(params![level, position], |row| row.get(0))
        .optional()?)
}

/// Calls `each` with the records of `range`, or with all records, in their order,
/// until `each` returns false.
pub(crate) fn each<E: From<LedgerError>>(
    tables: Tables<'_>,
    range: Option<Range<u64>>,
    mut each: impl FnMut(RecordRow) -> Result<bool, E>,
) -> Result<(), E> {
    let storage = |error: SqlError| E::from(LedgerError::from(error));
    // Two queries: a condition that may be absent would keep SQLite from seeking.
    let (query, bounds) = match range {
        None => ("SELECT seq, hash, record FROM records ORDER BY seq", Vec::new()),
        Some(Range { start, end }) => (
            "SELECT seq, hash, record FROM records WHERE seq >= ?1 AND seq < ?2 ORDER BY seq",
            vec![start, end],
        ),
    };
    let mut statement = tables.connection.prepare(query).map_err(storage)?;
    let rows = statement
        .query_map(bounds, |row| {
            Ok(RecordRow { seq: row.get(0)?, hash: row.get(1)?, record: row.get(2)? })
        })
        .map_err(storage)?;
    for row in rows {
        if !each(row.map_err(storage)?)? {
            break;
        }
    }
    Ok(())
}

/// Calls `each` with number and text of every record of `operation` and of every
/// archive, in their order.
pub(crate) fn each_of_operation(
    tables: Tables<'_>,
    operation: &str,
    mut each: impl FnMut(u64, &str),
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(
        // The operation has no column: only checks and archives search for it.
        "SELECT seq, record FROM records
         WHERE record LIKE '%\"operation.type\":\"%' ORDER BY seq",
    )?;
    let of = |operation| format!("\"operation.type\":\"{operation}\"");
    let sought = [of(operation), of("ledger.archived")];
    let mut rows = statement.stream(())?;
    while let Some(row) = rows.next()? {
        let record: String = row.get(1)?;
        if sought.iter().any(|sought| record.contains(sought)) {
            each(row.get(0)?, &record);
        }
    }
    Ok(())
}

/// Returns the records of a request's attempts and of their fault caps.
pub(crate) fn of_request(tables: Tables<'_>, request: &RequestId) -> Result<Vec<u64>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT record_seq FROM attempts WHERE request_id = ?1 AND record_seq IS NOT NULL
         UNION ALL
         SELECT record_seq FROM fault_caps WHERE request_id = ?1 AND record_seq IS NOT NULL
         ORDER BY 1",
    )?;
    let rows = statement.query_map([request.as_str()], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the number of records, and of distinct records from `first` on that a
/// row of another table refers to.
pub(crate) fn count_with_rows(tables: Tables<'_>, first: u64) -> Result<(u64, u64), LedgerError> {
    // DISTINCT: two rows with the same record must not stand for two records.
    Ok(tables.connection.query_row(
        "SELECT (SELECT count(*) FROM records),
           (SELECT count(DISTINCT record_seq) FROM (
             SELECT record_seq FROM blocks
             UNION ALL SELECT record_seq FROM attempts
             UNION ALL SELECT record_seq FROM fault_caps
             UNION ALL SELECT record_seq FROM refused_blocks
             UNION ALL SELECT record_seq FROM recorded_actions) AS rows
           WHERE record_seq >= ?1)",
        [first],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?)
}

/// Returns the number of records after the last, i.e. the size of the log.
pub(crate) fn size(tables: Tables<'_>) -> Result<u64, LedgerError> {
    // The maximum and not the count, because archived records are part of the log.
    let query = "SELECT max(seq) + 1 FROM records";
    Ok(tables.connection.query_row(query, (), |row| row.get(0))?)
}

/// Counts the rows without an audit record.
pub(crate) fn count_unrecorded(tables: Tables<'_>) -> Result<UnrecordedCounts, LedgerError> {
    let count = |table: &str| -> Result<u64, LedgerError> {
        // Only the names below are formatted in, so no text from outside is SQL.
        let sql = format!("SELECT count(*) FROM {table} WHERE record_seq IS NULL");
        Ok(tables.connection.query_row(&sql, (), |row| row.get(0))?)
    };
    Ok(UnrecordedCounts {
        blocks: count("blocks")?,
        attempts: count("attempts")?,
        fault_caps: count("fault_caps")?,
        refused_blocks: count("refused_blocks")?,
    })
}

/// Calls `each` with the digest, in hex, of every block without a record.
pub(crate) fn each_unrecorded_block(
    tables: Tables<'_>,
    each: impl FnMut(&str),
) -> Result<(), LedgerError> {
    each_line(
        tables,
        "SELECT digest FROM blocks WHERE record_seq IS NULL ORDER BY epoch_id, block",
        |row| Ok(hex(&row.get::<Vec<u8>>(0)?)),
        each,
    )
}

/// Calls `each` with a JSON line of every fault cap without a record.
pub(crate) fn each_unrecorded_cap(
    tables: Tables<'_>,
    each: impl FnMut(&str),
) -> Result<(), LedgerError> {
    each_line(
        tables,
        "SELECT request_id, tenant, key, attempt, prompt_tokens, cached_tokens,
           completion_tokens, attributed_ns, reference_ns
         FROM fault_caps JOIN callers ON callers.id = caller_id WHERE record_seq IS NULL
         ORDER BY request_id, caller_id, attempt",
        |row| json_line(row, 0..9, None),
        each,
    )
}

/// Calls `each` with the line that `line` makes of every row of a query.
pub(super) fn each_line(
    tables: Tables<'_>,
    query: &str,
    line: impl Fn(&Row<'_>) -> Result<String, SqlError>,
    mut each: impl FnMut(&str),
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(query)?;
    let mut rows = statement.stream(())?;
    while let Some(row) = rows.next()? {
        each(&line(&row)?);
    }
    Ok(())
}

/// Writes `columns` of a row as a JSON array, behind `first` if there is one. Bytes are
/// written in hex.
pub(super) fn json_line(
    row: &Row<'_>,
    columns: Range<usize>,
    first: Option<&str>,
) -> Result<String, SqlError> {
    let mut values: Vec<Value> = first.map(Value::from).into_iter().collect();
    for column in columns {
        values.push(match row.value(column)? {
            SqlValue::Null | SqlValue::Other(_) => Value::Null,
            SqlValue::Integer(number) => number.into(),
            SqlValue::Text(text) => text.into(),
            SqlValue::Blob(bytes) => hex(bytes).into(),
        });
    }
    Ok(Value::from(values).to_string())
}

/// Converts a stored hash; `what` names it in the error.
pub(super) fn hash_from(stored: Vec<u8>, what: &str) -> Result<Hash, LedgerError> {
    // The column takes any blob; another length than 32 bytes means a damaged file.
    Hash::try_from(stored).map_err(|_| LedgerError::Damaged(what.to_owned()))
}
