//! Table `gateway_days` of a server: the charges of `daily` by the data folder of the gateway
//! that posted them. A gateway that starts reads what it has itself spent of the caps.

use tollgate_sql::{params, server_has_table};

use super::daily::{DailyChange, DailyKey};
use super::{Tables, TierColumn};
use crate::error::LedgerError;

/// Makes the table if there is none, in the caller's transaction, or deletes what `home` needs
/// no more. What was charged before there was a table counts for `home`: a ledger that was
/// moved to the server is of one gateway.
pub(crate) fn prepare(tables: Tables<'_>, home: &str) -> Result<(), LedgerError> {
    if server_has_table(tables.connection, "gateway_days")? {
        let old = "DELETE FROM gateway_days
             WHERE home = ?1 AND day < (SELECT coalesce(max(day), 0) FROM daily) - 62";
        tables.connection.execute(old, [home])?;
        return Ok(());
    }
    tables.connection.execute_batch(DEFINITION)?;
    let adopt =
        "INSERT INTO gateway_days (home, day, caller_id, model, device_class, tier, charges,
           reference_ns, prompt_tokens, completion_tokens)
         SELECT ?1, day, caller_id, model, device_class, tier, charges, reference_ns,
           prompt_tokens, completion_tokens
         FROM daily WHERE charges > 0 AND day >= (SELECT coalesce(max(day), 0) FROM daily) - 62";
    tables.connection.execute(adopt, [home])?;
    Ok(())
}

/// Adds the charges of a change to the day of this gateway.
pub(crate) fn add(
    tables: Tables<'_>,
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
        completion_tokens
    ])?;
    Ok(())
}

const ADD: &str = "
INSERT INTO gateway_days (home, day, caller_id, model, device_class, tier, charges,
  reference_ns, prompt_tokens, completion_tokens)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (home, day, caller_id, model, device_class, tier) DO UPDATE SET
  charges = gateway_days.charges + excluded.charges,
  reference_ns = gateway_days.reference_ns + excluded.reference_ns,
  prompt_tokens = gateway_days.prompt_tokens + excluded.prompt_tokens,
  completion_tokens = gateway_days.completion_tokens + excluded.completion_tokens
";

const DEFINITION: &str = r#"
CREATE TABLE gateway_days (
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
