//! Table `faults` of a server: the attempts that ended by a fault and have no cap yet. The gateway
//! that ordered an attempt posts the cap; if it is gone, another one does.

use tollgate_domain::{
    Attempt, DeviceClass, FinishedAttempt, ModelName, RequestId, Usage, UtcTime,
};
use tollgate_sql::{params, server_has_table};

use super::{AttemptKey, CallerId, Tables, TierColumn, caller_at, name};
use crate::act::FaultCap;
use crate::error::LedgerError;

/// Makes the table if there is none, in the caller's transaction.
pub(crate) fn prepare(tables: Tables<'_>) -> Result<(), LedgerError> {
    if !server_has_table(tables.connection, "faults")? {
        tables.connection.execute_batch(DEFINITION)?;
    }
    Ok(())
}

/// Notes an attempt that ended by a fault and was charged, where gateways share the ledger.
pub(crate) fn insert(
    tables: Tables<'_>,
    caller: CallerId,
    finished: &FinishedAttempt,
) -> Result<(), LedgerError> {
    if tables.home.is_none() {
        return Ok(());
    }
    let Attempt { request, attempt } = &finished.attempt;
    let insert = "INSERT INTO faults (request_id, caller_id, attempt) VALUES (?1, ?2, ?3)
         ON CONFLICT (request_id, caller_id, attempt) DO NOTHING";
    tables.connection.prepare(insert)?.send(params![request.as_str(), caller, attempt])?;
    Ok(())
}

/// Forgets an attempt that has its cap.
pub(crate) fn delete(tables: Tables<'_>, key: AttemptKey<'_>) -> Result<(), LedgerError> {
    if tables.home.is_none() {
        return Ok(());
    }
    let delete = "DELETE FROM faults WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3";
    let Attempt { request, attempt } = key.attempt;
    tables.connection.prepare(delete)?.send(params![request.as_str(), key.caller, attempt])?;
    Ok(())
}

/// Returns a cap of nothing for each attempt of the table. None where the ledger is a file.
pub(crate) fn caps_of_nothing(tables: Tables<'_>) -> Result<Vec<FaultCap>, LedgerError> {
    let connection = tables.connection;
    if connection.server().is_none() || !server_has_table(connection, "faults")? {
        return Ok(Vec::new());
    }
    let mut statement = connection.prepare(
        "SELECT tenant, key, request_id, attempt, model, device_class, finished_utc_ns, tier
         FROM faults JOIN requests USING (request_id, caller_id, attempt)
         JOIN callers ON callers.id = caller_id ORDER BY request_id, attempt",
    )?;
    let mut rows = statement.query(())?;
    let mut caps = Vec::new();
    while let Some(row) = rows.next()? {
        caps.push(FaultCap {
            caller: caller_at(&row, 0)?,
            attempt: Attempt {
                request: name(RequestId::new(&row.get::<String>(2)?))?,
                attempt: row.get(3)?,
            },
            model: name(ModelName::new(&row.get::<String>(4)?))?,
            class: name(DeviceClass::new(&row.get::<String>(5)?))?,
            payable: Usage::default(),
            at: UtcTime(row.get(6)?),
            tier: row.get::<TierColumn>(7)?.0,
        });
    }
    Ok(caps)
}

const DEFINITION: &str = r#"
CREATE TABLE faults (
  request_id TEXT COLLATE "C" NOT NULL,
  caller_id BIGINT NOT NULL REFERENCES callers,
  attempt BIGINT NOT NULL,
  PRIMARY KEY (request_id, caller_id, attempt)
);
"#;
