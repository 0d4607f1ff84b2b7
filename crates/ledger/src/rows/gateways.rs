//! Table `gateways` of a database server: one row for each gateway that uses it.

use tollgate_domain::UtcTime;
use tollgate_sql::{Connection, Row, SqlError, make_once, params, server_has_table};

/// A gateway, as the others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayRow {
    /// The name of its machine, and its address for callers.
    pub name: String,
    /// True if it has read the generation of the keys that was asked for.
    pub has_seen: bool,
    /// The time since its last beat, in milliseconds of the server's clock.
    pub silent_ms: u64,
}

/// Makes the table and the sequence of numbers if there are none.
pub(crate) fn make_table(connection: &mut Connection) -> Result<(), SqlError> {
    make_once(connection, ("gateways", MAKER_LOCK), &[DEFINITION])
}

/// Draws a number that no earlier gateway had: 24 bits, which repeat after 16 million starts.
pub(crate) fn next_number(connection: &Connection) -> Result<u32, SqlError> {
    connection.query_row("SELECT nextval('gateway_numbers')", (), |row| row.get(0))
}

/// Inserts a gateway, and deletes the rows of gateways that ended long ago. `life` is a random
/// number that tells this gateway from another one with its number.
pub(crate) fn insert(
    connection: &Connection,
    (number, life): (u32, i64),
    name: &str,
) -> Result<(), SqlError> {
    let ended = "DELETE FROM gateways
         WHERE number = ?1 OR beat_at < clock_timestamp() - interval '1 day'";
    connection.execute(ended, [number])?;
    let insert = "INSERT INTO gateways (number, life, name, keys_seen, beat_at)
         VALUES (?1, ?2, ?3, 0, clock_timestamp())";
    connection.execute(insert, params![number, life, name])?;
    Ok(())
}

/// The server's answer to a beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// The number of gateways that run, this one included.
    pub gateways: u32,
    /// The server's clock.
    pub time: UtcTime,
    /// True if another gateway has taken this one for lost. It must end: no worker takes its work.
    pub is_retired: bool,
}

/// Notes that a gateway runs and has read the keys up to a generation. Returns `None` if it has
/// no row.
pub(crate) fn beat(
    connection: &Connection,
    (number, life): (u32, i64),
    keys_seen: i64,
) -> Result<Option<Beat>, SqlError> {
    // One statement, so that a beat costs one round trip. The count sees the rows before it.
    let beat = "WITH own AS (
           UPDATE gateways SET beat_at = clock_timestamp(), keys_seen = ?3
           WHERE number = ?1 AND life = ?2 RETURNING number
         )
         SELECT (SELECT count(*) FROM own), count(*),
           (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
           coalesce((SELECT is_retired FROM gateway_lives AS lives WHERE lives.number = ?1), false)
         FROM gateways
         WHERE number <> ?1 AND beat_at > clock_timestamp() - interval '10 s'";
    let answer = |row: &Row<'_>| {
        let (own, others, micros): (u32, u32, u64) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let (gateways, time) = (others.saturating_add(1), UtcTime(micros.saturating_mul(1_000)));
        Ok((own > 0).then_some(Beat { gateways, time, is_retired: row.get(3)? }))
    };
    connection.query_row(beat, params![number, life, keys_seen], answer)
}

/// Deletes a gateway that stops.
pub(crate) fn delete(connection: &Connection, (number, life): (u32, i64)) -> Result<(), SqlError> {
    let delete = "DELETE FROM gateways WHERE number = ?1 AND life = ?2";
    connection.execute(delete, params![number, life])?;
    Ok(())
}

/// Returns the gateways that may use keys of before `generation` or have read it, ordered by
/// name. None where no gateway has ever joined.
pub(crate) fn list(connection: &Connection, generation: i64) -> Result<Vec<GatewayRow>, SqlError> {
    if !server_has_table(connection, "gateways")? {
        return Ok(Vec::new());
    }
    // Keys may be used for 90 s after the last answer. A beat is sent after that answer.
    let query = "SELECT name, keys_seen >= ?1,
           greatest(0, floor(extract(epoch FROM clock_timestamp() - beat_at) * 1000))::bigint
         FROM gateways WHERE beat_at > clock_timestamp() - interval '95 s'
         ORDER BY name, number";
    let mut statement = connection.prepare(query)?;
    let rows = statement.query_map([generation], |row| {
        Ok(GatewayRow { name: row.get(0)?, has_seen: row.get(1)?, silent_ms: row.get(2)? })
    })?;
    rows.collect()
}

/// The lock of the gateway that makes the table.
const MAKER_LOCK: i64 = 0x746f_6c6c_6761_7465;

/// The times are of the server's clock, so that no two machines' clocks are compared.
const DEFINITION: &str = r#"
CREATE SEQUENCE gateway_numbers MINVALUE 1 MAXVALUE 16777215 CYCLE;
CREATE TABLE gateways (
  number BIGINT PRIMARY KEY,
  life BIGINT NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  -- The generation of the keys that the gateway has read.
  keys_seen BIGINT NOT NULL,
  beat_at TIMESTAMPTZ NOT NULL
);
"#;
