//! Tables `caps`, `slices` and `cap_timeline` of a server: the parts of caps that each of several
//! gateways may use.

use tollgate_cluster::{Order, SliceRow};
use tollgate_sql::{Connection, OptionalRow, Row, SqlError, make_once, params};

use super::{homes, intents};
use crate::caps::CapKey;

/// The row of a cap.
#[derive(Clone, Copy)]
pub(crate) struct CapId(i64);

/// A slice of one gateway in one period.
pub(crate) struct FoundSlice {
    pub(crate) first_day: u32,
    pub(crate) home: String,
    pub(crate) row: SliceRow,
}

/// Makes the tables if there are none.
pub(crate) fn make_tables(connection: &mut Connection) -> Result<(), SqlError> {
    make_once(
        connection,
        ("slices", MAKER_LOCK),
        &[DEFINITION, homes::DEFINITION, intents::DEFINITION],
    )?;
    homes::add_columns(connection, MAKER_LOCK)
}

/// Returns true if nothing may be granted, because the database has lost commits not long ago:
/// its timeline is another one than at the last call. Each gateway must tell first what it has.
pub(crate) fn is_paused(connection: &Connection) -> Result<bool, SqlError> {
    let now = "('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint";
    let known =
        format!("SELECT timeline = {now}, paused_until > clock_timestamp() FROM cap_timeline");
    let found =
        connection.query_row(&known, (), |row| Ok((row.get::<bool>(0)?, row.get::<bool>(1)?)));
    match found.optional()? {
        Some((true, is_paused)) => Ok(is_paused),
        Some((false, _)) => {
            let changed = format!(
                "UPDATE cap_timeline SET timeline = {now},
                   paused_until = clock_timestamp() + interval '100 s'
                 WHERE timeline <> {now}"
            );
            connection.execute(&changed, ())?;
            Ok(true)
        }
        None => {
            let first = format!(
                "INSERT INTO cap_timeline (one, timeline, paused_until)
                 VALUES (1, {now}, clock_timestamp()) ON CONFLICT (one) DO NOTHING"
            );
            connection.execute(&first, ())?;
            Ok(false)
        }
    }
}

/// Locks a cap until the end of the transaction. The row is made if there is none.
pub(crate) fn lock(connection: &Connection, cap: &CapKey) -> Result<CapId, SqlError> {
    let CapKey { limit, kind, scope, class } = cap;
    // The update changes nothing, but it locks the row and returns it.
    let lock = "INSERT INTO caps (cap_limit, scope_kind, scope, device_class)
         VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (cap_limit, scope_kind, scope, device_class)
           DO UPDATE SET scope = excluded.scope
         RETURNING id";
    connection.query_row(lock, [&**limit, kind, scope, class], |row| row.get(0).map(CapId))
}

/// Returns the slices of a cap in the periods from the day `from` on.
pub(crate) fn of_cap(
    connection: &Connection,
    cap: CapId,
    from: u32,
) -> Result<Vec<FoundSlice>, SqlError> {
    let query = "SELECT first_day, home, life, call, granted, used FROM slices
         WHERE cap_id = ?1 AND first_day >= ?2";
    let mut statement = connection.prepare(query)?;
    let found = statement.query_map(params![cap.0, from], |row| {
        let order = Order { life: row.get(2)?, call: row.get(3)? };
        let row_of_slice = SliceRow { order, granted: row.get(4)?, used: row.get(5)? };
        Ok(FoundSlice { first_day: row.get(0)?, home: row.get(1)?, row: row_of_slice })
    })?;
    found.collect()
}

/// Writes the slice of a gateway in the period that begins on `first_day`.
pub(crate) fn put(
    connection: &Connection,
    (cap, first_day, home): (CapId, u32, &str),
    slice: &SliceRow,
) -> Result<(), SqlError> {
    let SliceRow { order, granted, used } = slice;
    let put = "INSERT INTO slices (cap_id, first_day, home, life, call, granted, used)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT (cap_id, first_day, home) DO UPDATE SET life = excluded.life,
           call = excluded.call, granted = excluded.granted, used = excluded.used";
    let values = params![
        cap.0,
        first_day,
        home,
        stored(order.life),
        stored(order.call),
        stored(*granted),
        stored(*used)
    ];
    connection.prepare(put)?.send(values)
}

/// Notes that a gateway lacks some of the cap.
pub(crate) fn mark_hungry(connection: &Connection, cap: CapId) -> Result<(), SqlError> {
    let mark = "UPDATE caps SET hungry_at = clock_timestamp() WHERE id = ?1";
    connection.prepare(mark)?.send([cap.0])
}

/// Returns the caps of which some gateway lacked some within the last three seconds.
pub(crate) fn hungry(connection: &Connection) -> Result<Vec<CapKey>, SqlError> {
    let query = "SELECT cap_limit, scope_kind, scope, device_class FROM caps
         WHERE hungry_at > clock_timestamp() - interval '3 s'";
    let mut statement = connection.prepare(query)?;
    let found = statement.query_map((), |row| key_at(row, 0))?;
    found.collect()
}

/// Returns the caps of which a gateway has an unspent slice in a period that begins on one of
/// these days: the day itself, or the first of its month.
pub(crate) fn unspent_of(
    connection: &Connection,
    home: &str,
    (day, first_of_month): (u32, u32),
) -> Result<Vec<CapKey>, SqlError> {
    let query = "SELECT cap_limit, scope_kind, scope, device_class
         FROM slices JOIN caps ON caps.id = cap_id
         WHERE home = ?1 AND first_day IN (?2, ?3) AND granted > used";
    let mut statement = connection.prepare(query)?;
    let found = statement.query_map(params![home, day, first_of_month], |row| key_at(row, 0))?;
    found.collect()
}

/// Returns the caps of which a gateway has an unspent slice of any period.
pub(crate) fn all_unspent_of(connection: &Connection, home: &str) -> Result<Vec<CapKey>, SqlError> {
    let query = "SELECT DISTINCT cap_limit, scope_kind, scope, device_class
         FROM slices JOIN caps ON caps.id = cap_id WHERE home = ?1 AND granted > used";
    let mut statement = connection.prepare(query)?;
    let found = statement.query_map([home], |row| key_at(row, 0))?;
    found.collect()
}

/// Takes the unspent parts of a gateway's slices away and returns the number of their caps. A call
/// of the life that had them changes nothing any more.
pub(crate) fn free(connection: &Connection, home: &str) -> Result<u32, SqlError> {
    let mut caps = all_unspent_of(connection, home)?;
    // In the order of all transactions, so that no two wait for each other.
    caps.sort();
    for cap in &caps {
        let cap = lock(connection, cap)?;
        let free = "UPDATE slices SET granted = used, life = life + 1, call = 0
             WHERE cap_id = ?1 AND home = ?2 AND granted > used";
        connection.execute(free, params![cap.0, home])?;
    }
    Ok(u32::try_from(caps.len()).unwrap_or(u32::MAX))
}

/// Deletes the slices of periods that began before a day.
pub(crate) fn forget(connection: &Connection, before: u32) -> Result<(), SqlError> {
    connection.execute("DELETE FROM slices WHERE first_day < ?1", [before])?;
    Ok(())
}

/// Returns the newest life of a gateway that has slices.
pub(crate) fn newest_life(connection: &Connection, home: &str) -> Result<Option<u64>, SqlError> {
    let query = "SELECT max(life) FROM slices WHERE home = ?1";
    connection.query_row(query, [home], |row| row.get(0))
}

fn key_at(row: &Row<'_>, at: usize) -> Result<CapKey, SqlError> {
    let text = |column| row.get::<String>(at + column);
    Ok(CapKey { limit: text(0)?, kind: text(1)?, scope: text(2)?, class: text(3)? })
}

/// Returns an amount as a column holds it. A cap has at most 63 bits here, so what is larger is
/// beyond every cap.
fn stored(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

/// The lock of the gateway that makes the tables.
const MAKER_LOCK: i64 = 0x746f_6c6c_6361_7073;

const DEFINITION: &str = r#"
CREATE TABLE caps (
  id BIGSERIAL PRIMARY KEY,
  cap_limit TEXT COLLATE "C" NOT NULL,
  scope_kind TEXT COLLATE "C" NOT NULL,
  scope TEXT COLLATE "C" NOT NULL,
  device_class TEXT COLLATE "C" NOT NULL,
  -- The last time at which a gateway lacked some of the cap.
  hungry_at TIMESTAMPTZ,
  UNIQUE (cap_limit, scope_kind, scope, device_class)
);
CREATE INDEX caps_hungry ON caps (hungry_at) WHERE hungry_at IS NOT NULL;
CREATE TABLE slices (
  cap_id BIGINT NOT NULL REFERENCES caps,
  -- The first day of the day or month of the cap.
  first_day BIGINT NOT NULL,
  home TEXT COLLATE "C" NOT NULL,
  life BIGINT NOT NULL,
  call BIGINT NOT NULL,
  granted BIGINT NOT NULL,
  used BIGINT NOT NULL,
  PRIMARY KEY (cap_id, first_day, home)
);
CREATE INDEX slices_of_home ON slices (home, first_day);
CREATE TABLE cap_timeline (
  one BIGINT PRIMARY KEY,
  timeline BIGINT NOT NULL,
  paused_until TIMESTAMPTZ NOT NULL
);
"#;
