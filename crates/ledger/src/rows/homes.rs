//! Table `homes` of a server: the data folders of the gateways that share it, with their newest
//! starts.

use tollgate_sql::{Connection, OptionalRow, Row, SqlError, change_once, params, server_has_table};

use super::Tables;
use crate::error::LedgerError;

/// A data folder, as admins see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayHome {
    /// The id in its `gateway.id`.
    pub home: String,
    /// The name of its machine, and its address for callers; `None` before its first beat.
    pub name: Option<String>,
    /// The state of the gateway on it.
    pub state: HomeState,
    /// The time since its last beat, in milliseconds of the server's clock.
    pub silent_ms: Option<u64>,
    /// The number of caps of which it has an unspent part.
    pub caps: u32,
}

/// The state of the gateway on a data folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HomeState {
    /// It has beaten within the last ten seconds.
    Running,
    /// It has stopped, and has given everything back.
    Stopped,
    /// It was killed, or does not reach the server.
    Silent,
}

/// The silence after which a gateway certainly uses nothing of its slices any more, in
/// milliseconds: they serve for 90 s after the server's last answer.
const SURELY_SILENT_MS: u64 = 100_000;

impl GatewayHome {
    /// Returns true if the gateway may run, and may still use what it has.
    pub fn may_run(&self) -> bool {
        let is_silent = self.silent_ms.is_none_or(|silent| silent >= SURELY_SILENT_MS);
        self.state != HomeState::Stopped && !is_silent
    }
}

impl HomeState {
    /// Returns the state in a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Silent => "silent",
        }
    }
}

/// Notes the newest life of a data folder. Work of its earlier lives may not be in the ledger
/// yet.
pub(crate) fn begin(connection: &Connection, home: &str, life: u64) -> Result<(), SqlError> {
    let begin = "INSERT INTO homes (home, life, is_settled) VALUES (?1, ?2, false)
         ON CONFLICT (home) DO UPDATE SET life = excluded.life, is_settled = false";
    connection.execute(begin, params![home, life])?;
    Ok(())
}

/// Notes that all work of the lives before `life` is in the ledger.
pub(crate) fn settle(connection: &Connection, home: &str, life: u64) -> Result<(), SqlError> {
    let settle = "UPDATE homes SET is_settled = true WHERE home = ?1 AND life = ?2";
    connection.execute(settle, params![home, life])?;
    Ok(())
}

/// Notes that all work of a data folder that is in no ledger is given up: a later life has nothing
/// of it.
pub(crate) fn give_up(connection: &Connection, home: &str) -> Result<(), SqlError> {
    let give_up = "UPDATE homes SET life = life + 1, is_settled = true WHERE home = ?1";
    connection.execute(give_up, [home])?;
    Ok(())
}

/// Returns the newest life of a data folder that the server knows.
pub(crate) fn newest_life(connection: &Connection, home: &str) -> Result<Option<u64>, SqlError> {
    let query = "SELECT life FROM homes WHERE home = ?1";
    connection.query_row(query, [home], |row| row.get(0)).optional()
}

/// Notes that the gateway on a data folder runs.
pub(crate) fn see(
    connection: &Connection,
    home: &str,
    (name, number): (&str, u32),
) -> Result<(), SqlError> {
    let see = "UPDATE homes SET name = ?2, number = ?3, seen_at = clock_timestamp(),
           has_stopped = false WHERE home = ?1";
    connection.execute(see, params![home, name, number])?;
    Ok(())
}

/// Notes that the gateway on a data folder has stopped.
pub(crate) fn stop(connection: &Connection, home: &str) -> Result<(), SqlError> {
    connection.execute("UPDATE homes SET has_stopped = true WHERE home = ?1", [home])?;
    Ok(())
}

/// Returns the numbers of the gateways that may still settle what their requests left open. None
/// where the ledger is a file. Of each data folder only the newest start counts.
pub(crate) fn live_numbers(tables: Tables<'_>) -> Result<Vec<u32>, LedgerError> {
    let connection = tables.connection;
    if connection.server().is_none() || !server_has_table(connection, "homes")? {
        return Ok(Vec::new());
    }
    let query = "SELECT number FROM homes WHERE number IS NOT NULL AND NOT has_stopped
           AND seen_at > clock_timestamp() - interval '100 s' ORDER BY number";
    let mut statement = connection.prepare(query)?;
    let numbers = statement.query_map((), |row| row.get(0))?;
    Ok(numbers.collect::<Result<_, _>>()?)
}

/// A gateway beside this one that has not stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherGateway {
    /// The id of its data folder.
    pub home: String,
    /// The number of its newest start, and of its life there.
    pub number: u32,
    /// The number of its start in the data folder.
    pub life: u64,
    /// Its newest beat, in microseconds of the server's clock.
    pub beat: u64,
    /// The names of its workers. Other gateways may use all of them.
    pub workers: Vec<String>,
    /// True if a gateway has begun to retire it.
    pub is_retired: bool,
}

/// Returns the gateways but `own` that have not stopped. Those for which no other one can settle are
/// left out: they have workers of their own, or are of an earlier version.
pub(crate) fn others(connection: &Connection, own: &str) -> Result<Vec<OtherGateway>, SqlError> {
    let query = format!("{OTHERS} AND homes.home <> ?1 ORDER BY number");
    let mut statement = connection.prepare(&query)?;
    let others = statement.query_map([own], other_of)?;
    others.collect()
}

/// Begins to retire a gateway, if it has not beaten since it was read. Returns false if it has, or
/// if its data folder has a later life.
pub(crate) fn retire(connection: &Connection, lost: &OtherGateway) -> Result<bool, SqlError> {
    let OtherGateway { home, number, beat, .. } = lost;
    let query = format!("{OTHERS} AND homes.home = ?1 FOR UPDATE OF homes");
    let found = connection.query_row(&query, [&**home], other_of).optional()?;
    if !found.is_some_and(|found| found.number == *number && found.beat == *beat) {
        return Ok(false);
    }
    let retire = "UPDATE gateway_lives SET is_retired = true WHERE number = ?1";
    connection.execute(retire, [*number])?;
    Ok(true)
}

/// Begins a life in the data folder of a retired gateway whose work is all in the ledger, and
/// returns its number. `None` if the gateway has begun a later life itself.
pub(crate) fn take_over(
    connection: &Connection,
    lost: &OtherGateway,
) -> Result<Option<u64>, SqlError> {
    let OtherGateway { home, number, life, .. } = lost;
    // A life of the gateway itself is not settled before its first beat, which changes the number.
    let take = "UPDATE homes SET life = life + 1, is_settled = true
         WHERE home = ?1 AND number = ?2 AND NOT has_stopped AND (life = ?3 OR is_settled)
         RETURNING life";
    let values = params![&**home, *number, *life];
    connection.query_row(take, values, |row| row.get(0)).optional()
}

/// Notes that a retired gateway has nothing any more, if it has not started again.
pub(crate) fn stop_retired(connection: &Connection, lost: &OtherGateway) -> Result<(), SqlError> {
    let stop = "UPDATE homes SET has_stopped = true WHERE home = ?1 AND number = ?2";
    connection.execute(stop, params![&*lost.home, lost.number])?;
    Ok(())
}

const OTHERS: &str = "SELECT homes.home, homes.number, lives.life,
  (extract(epoch FROM seen_at) * 1000000)::bigint, lives.is_retired, lives.workers
FROM homes JOIN gateway_lives AS lives ON lives.number = homes.number
WHERE NOT has_stopped AND seen_at IS NOT NULL AND lives.workers IS NOT NULL";

fn other_of(row: &Row<'_>) -> Result<OtherGateway, SqlError> {
    let workers: String = row.get(5)?;
    Ok(OtherGateway {
        workers: workers.split(',').map(str::to_owned).collect(),
        home: row.get(0)?,
        number: row.get(1)?,
        life: row.get(2)?,
        beat: row.get(3)?,
        is_retired: row.get(4)?,
    })
}

/// Returns all data folders, by the names of their gateways.
pub(crate) fn list(connection: &Connection) -> Result<Vec<GatewayHome>, SqlError> {
    let query = format!("SELECT {COLUMNS} FROM homes ORDER BY name, home");
    let mut statement = connection.prepare(&query)?;
    statement.query_map((), home_of)?.collect()
}

/// Returns a data folder, locked until the end of the transaction.
pub(crate) fn lock(connection: &Connection, home: &str) -> Result<Option<GatewayHome>, SqlError> {
    let query = format!("SELECT {COLUMNS} FROM homes WHERE home = ?1 FOR UPDATE");
    connection.query_row(&query, [home], home_of).optional()
}

const COLUMNS: &str = "home, name, has_stopped,
  greatest(0, floor(extract(epoch FROM clock_timestamp() - seen_at) * 1000))::bigint,
  (SELECT count(DISTINCT cap_id) FROM slices
   WHERE slices.home = homes.home AND granted > used)";

fn home_of(row: &Row<'_>) -> Result<GatewayHome, SqlError> {
    // `greatest` leaves out NULL, so a gateway without a beat has silence 0 there.
    let (name, has_stopped): (Option<String>, bool) = (row.get(1)?, row.get(2)?);
    let silent_ms = name.is_some().then(|| row.get::<u64>(3)).transpose()?;
    let state = match silent_ms {
        _ if has_stopped => HomeState::Stopped,
        Some(silent) if silent < RUNNING_MS => HomeState::Running,
        _ => HomeState::Silent,
    };
    Ok(GatewayHome { home: row.get(0)?, name, state, silent_ms, caps: row.get(4)? })
}

/// The time after a beat in which a gateway counts as running, in milliseconds.
const RUNNING_MS: u64 = 10_000;

/// Adds the columns that tables of an earlier version lack. `lock` is the lock of the gateway that
/// does it.
pub(crate) fn add_columns(connection: &mut Connection, lock: i64) -> Result<(), SqlError> {
    let has_columns = |connection: &Connection| -> Result<bool, SqlError> {
        let query = "SELECT EXISTS (SELECT 1 FROM information_schema.columns
             WHERE table_name = 'homes' AND column_name = 'has_stopped'
               AND table_schema = ANY (current_schemas(false)))";
        connection.query_row(query, (), |row| row.get(0))
    };
    change_once(connection, lock, has_columns, &[ADDED])
}

/// The table. A life of a home is settled if a later one is, with all before it.
pub(crate) const DEFINITION: &str = r#"
CREATE TABLE homes (
  home TEXT COLLATE "C" PRIMARY KEY,
  life BIGINT NOT NULL,
  is_settled BOOLEAN NOT NULL
);
"#;

/// The columns that were added later: the name, the number and the last beat of the gateway, by
/// the server's clock, and whether it has stopped since.
const ADDED: &str = r#"
ALTER TABLE homes ADD COLUMN name TEXT COLLATE "C";
ALTER TABLE homes ADD COLUMN number BIGINT;
ALTER TABLE homes ADD COLUMN seen_at TIMESTAMPTZ;
ALTER TABLE homes ADD COLUMN has_stopped BOOLEAN NOT NULL DEFAULT false;
"#;
