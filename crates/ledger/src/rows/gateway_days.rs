//! Tables `gateway_days` and `gateway_lives` of a server: the charges of `daily` by the gateway
//! that ordered the work. A gateway that starts reads what it has itself spent of the caps.
//!
//! Several gateways share workers, and any of them may record a block. The id of a request has
//! the number of its gateway's start, and `gateway_lives` the data folder and the life of each
//! number.

use tollgate_domain::WorkerName;
use tollgate_sql::{Connection, SqlError, make_once, params, server_has_table};

use super::daily::{DailyChange, DailyKey};
use super::{Tables, TierColumn};
use crate::error::LedgerError;

/// One start of a gateway in its data folder.
#[derive(Clone, Copy, Debug)]
pub struct GatewayStart<'a> {
    /// The id of the data folder.
    pub home: &'a str,
    /// The number of the start, from 1.
    pub life: u64,
    /// The workers of the gateway if other gateways may use all of them. Only then another one can
    /// settle for it.
    pub workers: Option<&'a [WorkerName]>,
}

/// Makes the tables if there are none, in the caller's transaction, or deletes what `home` needs
/// no more. What was charged before there was a table counts for `home`: a ledger that was
/// moved to the server is of one gateway.
pub(crate) fn prepare(tables: Tables<'_>, home: &str) -> Result<(), LedgerError> {
    if !server_has_table(tables.connection, "gateway_lives")? {
        tables.connection.execute_batch(LIVES)?;
    }
    if server_has_table(tables.connection, "gateway_days")? {
        let old = format!(
            "DELETE FROM gateway_days
             WHERE {OF_HOME} AND day < (SELECT coalesce(max(day), 0) FROM daily) - 62"
        );
        tables.connection.execute(&old, [home])?;
        return Ok(());
    }
    tables.connection.execute_batch(DAYS)?;
    let adopt =
        "INSERT INTO gateway_days (home, day, caller_id, model, device_class, tier, charges,
           reference_ns, prompt_tokens, completion_tokens)
         SELECT ?1, day, caller_id, model, device_class, tier, charges, reference_ns,
           prompt_tokens, completion_tokens
         FROM daily WHERE charges > 0 AND day >= (SELECT coalesce(max(day), 0) FROM daily) - 62";
    tables.connection.execute(adopt, [home])?;
    Ok(())
}

/// Makes the table of numbers if the ledger has not made it.
pub(crate) fn make_lives(connection: &mut Connection) -> Result<(), SqlError> {
    make_once(connection, ("gateway_lives", MAKER_LOCK), &[LIVES])
}

/// Notes the data folder and the life of a gateway's number. The numbers of lives that ended
/// long ago are deleted.
pub(crate) fn note_number(
    connection: &Connection,
    number: u32,
    start: &GatewayStart<'_>,
) -> Result<(), SqlError> {
    let GatewayStart { home, life, workers } = start;
    let old = "DELETE FROM gateway_lives WHERE number = ?1 OR (home = ?2 AND life < ?3)";
    connection.execute(old, params![number, *home, life.saturating_sub(KEPT_LIVES)])?;
    let workers = workers.map(|workers| {
        let names: Vec<&str> = workers.iter().map(WorkerName::as_str).collect();
        names.join(",")
    });
    let note = "INSERT INTO gateway_lives (number, home, life, workers) VALUES (?1, ?2, ?3, ?4)";
    connection.execute(note, params![number, *home, *life, workers.as_deref()])?;
    Ok(())
}

/// Returns the numbers of the lives of `home` before `life`.
pub(crate) fn numbers_before(
    connection: &Connection,
    (home, life): (&str, u64),
) -> Result<Vec<u32>, SqlError> {
    let query = "SELECT number FROM gateway_lives WHERE home = ?1 AND life < ?2 ORDER BY number";
    let mut statement = connection.prepare(query)?;
    statement.query_map(params![home, life], |row| row.get(0))?.collect()
}

/// Adds the charges of a change to the day of the gateway with the number `maker`, which ordered
/// the work. Without a known number they count for the gateway that records it.
pub(crate) fn add(
    tables: Tables<'_>,
    maker: Option<u32>,
    key: &DailyKey<'_>,
    change: &DailyChange,
) -> Result<(), LedgerError> {
    let Some(home) = tables.home else { return Ok(()) };
    let DailyKey { day, caller, model, class, tier } = key;
    let DailyChange { charges, reference_ns, prompt_tokens, completion_tokens, .. } = change;
    if [charges, reference_ns, prompt_tokens, completion_tokens].iter().all(|sum| **sum == 0) {
        return Ok(());
    }
    tables.connection.prepare(ADD)?.send(params![
        home,
        day,
        caller,
        model,
        class,
        TierColumn(*tier),
        charges,
        reference_ns,
        prompt_tokens,
        completion_tokens,
        maker.unwrap_or(0)
    ])?;
    Ok(())
}

/// Returns true if charges are counted by gateway.
pub(crate) fn are_counted(tables: Tables<'_>) -> bool {
    tables.home.is_some()
}

/// The condition for the rows of a data folder `?1`: those of its lives, and of versions that did
/// not tell them apart. A zero is the character after a slash.
const OF_HOME: &str = "(home = ?1 OR (home > ?1 || '/' AND home < ?1 || '0'))";

/// The lock of the gateway that makes the table of numbers.
const MAKER_LOCK: i64 = 0x746f_6c6c_6c69_7665;

/// Lives of a data folder whose numbers are kept.
const KEPT_LIVES: u64 = 200;

const ADD: &str = "
INSERT INTO gateway_days (home, day, caller_id, model, device_class, tier, charges,
  reference_ns, prompt_tokens, completion_tokens)
VALUES (coalesce(
    (SELECT home || '/' || life FROM gateway_lives WHERE number = ?11 AND number > 0), ?1),
  ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (home, day, caller_id, model, device_class, tier) DO UPDATE SET
  charges = gateway_days.charges + excluded.charges,
  reference_ns = gateway_days.reference_ns + excluded.reference_ns,
  prompt_tokens = gateway_days.prompt_tokens + excluded.prompt_tokens,
  completion_tokens = gateway_days.completion_tokens + excluded.completion_tokens
";

const DAYS: &str = r#"
CREATE TABLE gateway_days (
  -- The id of a data folder, a slash and the life.
  home TEXT COLLATE "C" NOT NULL,
  day BIGINT NOT NULL,
  caller_id BIGINT NOT NULL REFERENCES callers,
  model TEXT COLLATE "C" NOT NULL,
  device_class TEXT COLLATE "C" NOT NULL,
  tier BIGINT NOT NULL,
  charges BIGINT NOT NULL,
  reference_ns BIGINT NOT NULL,
  prompt_tokens BIGINT NOT NULL,
  completion_tokens BIGINT NOT NULL,
  PRIMARY KEY (home, day, caller_id, model, device_class, tier)
);
"#;

const LIVES: &str = r#"
CREATE TABLE gateway_lives (
  number BIGINT PRIMARY KEY,
  home TEXT COLLATE "C" NOT NULL,
  life BIGINT NOT NULL,
  -- The names of its workers, with commas; NULL if they are of this gateway alone.
  workers TEXT COLLATE "C",
  -- True once another gateway has taken this one for lost: no worker takes its work any more.
  is_retired BOOLEAN NOT NULL DEFAULT false
);
CREATE INDEX gateway_lives_by_home ON gateway_lives (home, life);
"#;
