//! Reads of one request, over `requests`, `entries` and `archived_shares`.

use serde::Serialize;
use tollgate_domain::{
    Attempt, Caller, DeviceClass, DeviceNanos, FinishReason, ModelName, RequestId, Stages,
    TenantId, Tier, Usage, UtcTime, WorkerEpoch,
};
use tollgate_sql::{OptionalRow, params};

use super::attempts::reason_named;
use super::entries::account;
use super::{Tables, TierColumn, caller_at, name};
use crate::error::LedgerError;

/// An attempt with device time but no end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenAttempt {
    /// The payer so far.
    pub caller: Caller,
    /// The attempt.
    pub attempt: Attempt,
    /// The model.
    pub model: ModelName,
    /// The class of the device.
    pub class: DeviceClass,
    /// The tier of its device time.
    pub tier: Tier,
}

/// An entry behind a charge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EntryRow {
    /// `epoch/first_step-last_step/sequence`
    pub id: String,
    /// `tenant` or `loss`
    pub account: &'static str,
    /// Nanoseconds received; negative where a correction took them.
    pub amount_ns: i64,
}

/// Key, model and device class of a request, as they are stored.
#[derive(Clone)]
pub(crate) struct Placement {
    pub(crate) key: String,
    pub(crate) model: String,
    pub(crate) class: String,
}

/// An attempt that ended, with its charge. `usage.attributed` is zero here.
pub(crate) struct EndedAttempt {
    pub(crate) placement: Placement,
    pub(crate) usage: Usage,
    pub(crate) stages: Stages,
    pub(crate) reason: String,
    pub(crate) finished: UtcTime,
}

impl EndedAttempt {
    /// Returns the reason of the end.
    pub(crate) fn finish_reason(&self) -> Result<FinishReason, LedgerError> {
        reason_named(&self.reason)
    }
}

/// Sums over the entries of a request.
pub(crate) struct RequestTotals {
    /// The number of attempts with entries.
    pub(crate) attempts: u32,
    /// The time that the tenant pays, archived time included.
    pub(crate) attributed: DeviceNanos,
    /// True while an attempt with entries has no end.
    pub(crate) is_open: bool,
}

/// A request of a tenant.
#[derive(Clone, Copy)]
pub(crate) struct RequestKey<'a> {
    pub(crate) tenant: &'a TenantId,
    pub(crate) request: &'a RequestId,
}

/// Returns the attempts of a request that ended, by attempt.
pub(crate) fn ended_attempts(
    tables: Tables<'_>,
    of: RequestKey<'_>,
) -> Result<Vec<EndedAttempt>, LedgerError> {
    // The tenant is part of the condition: the id of another tenant's request must find nothing.
    let mut statement = tables.connection.prepare(
        "SELECT key, model, device_class, prompt_tokens, cached_tokens, completion_tokens,
           reference_ns, queue_ns, prefill_ns, decode_ns, reason, finished_utc_ns
         FROM requests JOIN callers ON callers.id = caller_id
         WHERE request_id = ?1 AND tenant = ?2 ORDER BY attempt",
    )?;
    let rows = statement.query_map([of.request.as_str(), of.tenant.as_str()], |row| {
        Ok(EndedAttempt {
            placement: Placement { key: row.get(0)?, model: row.get(1)?, class: row.get(2)? },
            usage: Usage {
                prompt_tokens: row.get(3)?,
                cached_tokens: row.get(4)?,
                completion_tokens: row.get(5)?,
                // A charge holds no device time; the caller adds the sum of the entries.
                attributed: DeviceNanos::ZERO,
                reference: DeviceNanos(row.get(6)?),
            },
            stages: Stages {
                queue_ns: row.get(7)?,
                prefill_ns: row.get(8)?,
                decode_ns: row.get(9)?,
            },
            reason: row.get(10)?,
            finished: UtcTime(row.get(11)?),
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the placement of a request that has entries but no end yet.
pub(crate) fn placement_of_running(
    tables: Tables<'_>,
    of: RequestKey<'_>,
) -> Result<Option<Placement>, LedgerError> {
    Ok(tables
        .connection
        .prepare(
            // Several attempts may have entries and no end; only the last one can still run.
            "SELECT key, model, device_class FROM entries
             JOIN blocks USING (epoch_id, block)
             JOIN epochs ON epochs.id = entries.epoch_id
             JOIN callers ON callers.id = caller_id
             WHERE request_id = ?1 AND tenant = ?2
             ORDER BY attempt DESC LIMIT 1",
        )?
        .query_row([of.request.as_str(), of.tenant.as_str()], |row| {
            Ok(Placement { key: row.get(0)?, model: row.get(1)?, class: row.get(2)? })
        })
        .optional()?)
}

/// Returns the sums over a request's entries.
pub(crate) fn totals(tables: Tables<'_>, of: RequestKey<'_>) -> Result<RequestTotals, LedgerError> {
    let archived: u64 = tables
        .connection
        .prepare(
            "SELECT coalesce(sum(attributed_ns), 0) FROM archived_shares
             JOIN callers ON callers.id = caller_id WHERE request_id = ?1 AND tenant = ?2",
        )?
        .query_row([of.request.as_str(), of.tenant.as_str()], |row| row.get(0))?;
    Ok(tables
        .connection
        .prepare(
            "SELECT count(DISTINCT entries.attempt),
               coalesce(sum(CASE account WHEN ?3 THEN amount_ns ELSE 0 END), 0),
               coalesce(max(CASE WHEN requests.request_id IS NULL THEN 1 ELSE 0 END), 0)
             FROM entries
             JOIN callers ON callers.id = entries.caller_id
             LEFT JOIN requests ON requests.request_id = entries.request_id
               AND requests.caller_id = entries.caller_id
               AND requests.attempt = entries.attempt
             WHERE entries.request_id = ?1 AND tenant = ?2",
        )?
        .query_row(params![of.request.as_str(), of.tenant.as_str(), account::TENANT], |row| {
            Ok(RequestTotals {
                attempts: row.get(0)?,
                // Saturating, because sums of a damaged file may be anything.
                attributed: DeviceNanos(row.get::<u64>(1)?.saturating_add(archived)),
                is_open: row.get(2)?,
            })
        })?)
}

/// Returns the first `limit` entries of a request.
pub(crate) fn entries(
    tables: Tables<'_>,
    of: RequestKey<'_>,
    limit: i64,
) -> Result<Vec<EntryRow>, LedgerError> {
    // A long request has an entry in every block that served it, so the list needs a bound.
    let mut statement = tables.connection.prepare(
        "SELECT epoch, blocks.first_step, blocks.last_step, sequence, account, amount_ns
         FROM entries
         JOIN blocks USING (epoch_id, block)
         JOIN epochs ON epochs.id = entries.epoch_id
         JOIN callers ON callers.id = caller_id
         WHERE request_id = ?1 AND tenant = ?2
         ORDER BY entries.epoch_id, entries.block, ordinal LIMIT ?3",
    )?;
    let rows =
        statement.query_map(params![of.request.as_str(), of.tenant.as_str(), limit], |row| {
            let (epoch, first, last): (String, u64, u64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let sequence: u64 = row.get(3)?;
            let is_tenant = row.get::<i64>(4)? == account::TENANT;
            Ok(EntryRow {
                id: format!("{epoch}/{first}-{last}/{sequence}"),
                // An entry with a request is the tenant's or a correction to loss; no other
                // account has one.
                account: if is_tenant { "tenant" } else { "loss" },
                amount_ns: row.get(5)?,
            })
        })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the attempts of an ended epoch that have entries but no end.
pub(crate) fn open_attempts(
    tables: Tables<'_>,
    epoch: WorkerEpoch,
) -> Result<Vec<OpenAttempt>, LedgerError> {
    // An epoch that has not ended may still report the ends of its attempts.
    let mut statement = tables.connection.prepare(
        "SELECT tenant, key, entries.request_id, entries.attempt, blocks.model,
           epochs.device_class, min(entries.tier)
         FROM entries
         JOIN blocks USING (epoch_id, block)
         JOIN epochs ON epochs.id = entries.epoch_id
         JOIN callers ON callers.id = entries.caller_id
         LEFT JOIN requests ON requests.request_id = entries.request_id
           AND requests.caller_id = entries.caller_id AND requests.attempt = entries.attempt
         WHERE epochs.epoch = ?1 AND epochs.ended <> 0 AND requests.request_id IS NULL
         GROUP BY 1, 2, 3, 4, 5, 6
         ORDER BY 1, 2, 3, 4",
    )?;
    let mut rows = statement.query([epoch.to_string()])?;
    let mut open = Vec::new();
    while let Some(row) = rows.next()? {
        let request = name(RequestId::new(&row.get::<String>(2)?))?;
        open.push(OpenAttempt {
            caller: caller_at(&row, 0)?,
            attempt: Attempt { request, attempt: row.get(3)? },
            model: name(ModelName::new(&row.get::<String>(4)?))?,
            class: name(DeviceClass::new(&row.get::<String>(5)?))?,
            tier: row.get::<TierColumn>(6)?.0,
        });
    }
    Ok(open)
}
