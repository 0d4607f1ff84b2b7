//! One request, over its attempts: what its tenant may ask about it, while it
//! runs and after.

use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, FinishReason, KeyId, ModelName, RequestId, Stages, TenantId,
    Usage, UtcTime,
};

use super::name;
use crate::LedgerError;
use crate::charge::reason_named;
use crate::schema::account;

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    /// Some of it is in the ledger, its end is not.
    Running,
    /// It ended; its figures are final.
    Posted,
}

/// All that is known of one request, over its attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRow {
    /// Its id.
    pub request: RequestId,
    /// Who pays, with which key.
    pub caller: Caller,
    /// The model.
    pub model: ModelName,
    /// The class of the device that served it last.
    pub class: DeviceClass,
    /// How far it is.
    pub state: RequestState,
    /// How many attempts left a trace.
    pub attempts: u32,
    /// What is charged; `attributed` is the sum of its entries.
    pub usage: Usage,
    /// Where the last attempt's time went.
    pub stages: Stages,
    /// Why the last attempt ended.
    pub reason: Option<FinishReason>,
    /// When.
    pub finished: Option<UtcTime>,
    /// The entries behind it, the first 1,000.
    pub entries: Vec<EntryRow>,
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

pub(super) fn find_request(
    connection: &Connection,
    tenant: &TenantId,
    request: &RequestId,
) -> Result<Option<RequestRow>, LedgerError> {
    let ended = ended_attempts(connection, tenant, request)?;
    let entries = entries_of(connection, tenant, request)?;
    let last = ended.last().map(|last| (last.key.clone(), last.model.clone(), last.class.clone()));
    let (key, model, class) = match last {
        Some(known) => known,
        None => match place_of_running(connection, tenant, request)? {
            Some(known) => known,
            None => return Ok(None),
        },
    };
    let (attempts, attributed, open) = totals_of(connection, tenant, request)?;
    let mut usage = Usage { attributed, ..Usage::default() };
    for attempt in &ended {
        usage.prompt_tokens += attempt.usage.prompt_tokens;
        usage.cached_tokens += attempt.usage.cached_tokens;
        usage.completion_tokens += attempt.usage.completion_tokens;
        usage.reference += attempt.usage.reference;
    }
    let last = ended.last();
    Ok(Some(RequestRow {
        request: request.clone(),
        caller: Caller { tenant: tenant.clone(), key: name(KeyId::new(&key))? },
        model: name(ModelName::new(&model))?,
        class: name(DeviceClass::new(&class))?,
        state: if open { RequestState::Running } else { RequestState::Posted },
        attempts: attempts.max(ended.len() as u32),
        usage,
        stages: last.map(|last| last.stages).unwrap_or_default(),
        reason: last.map(|last| reason_named(&last.reason)).transpose()?,
        finished: last.map(|last| last.finished),
        entries,
    }))
}

/// A row of `requests`.
struct Ended {
    key: String,
    model: String,
    class: String,
    usage: Usage,
    stages: Stages,
    reason: String,
    finished: UtcTime,
}

fn ended_attempts(
    connection: &Connection,
    tenant: &TenantId,
    request: &RequestId,
) -> Result<Vec<Ended>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT key, model, device_class, prompt_tokens, cached_tokens, completion_tokens,
           reference_ns, queue_ns, prefill_ns, decode_ns, reason, finished_utc_ns
         FROM requests JOIN callers ON callers.id = caller_id
         WHERE request_id = ?1 AND tenant = ?2 ORDER BY attempt",
    )?;
    let rows = statement.query_map([request.as_str(), tenant.as_str()], |row| {
        Ok(Ended {
            key: row.get(0)?,
            model: row.get(1)?,
            class: row.get(2)?,
            usage: Usage {
                prompt_tokens: row.get(3)?,
                cached_tokens: row.get(4)?,
                completion_tokens: row.get(5)?,
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

/// Key, model and class of a request that has entries but no end yet.
fn place_of_running(
    connection: &Connection,
    tenant: &TenantId,
    request: &RequestId,
) -> Result<Option<(String, String, String)>, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT key, model, device_class FROM entries
             JOIN blocks USING (epoch_id, block)
             JOIN epochs ON epochs.id = entries.epoch_id
             JOIN callers ON callers.id = caller_id
             WHERE request_id = ?1 AND tenant = ?2
             ORDER BY attempt DESC LIMIT 1",
        )?
        .query_row([request.as_str(), tenant.as_str()], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })
        .optional()?)
}

/// How many attempts have entries, what they sum to, and whether one of them
/// has no end.
fn totals_of(
    connection: &Connection,
    tenant: &TenantId,
    request: &RequestId,
) -> Result<(u32, DeviceNanos, bool), LedgerError> {
    let archived: u64 = connection
        .prepare_cached(
            "SELECT coalesce(sum(attributed_ns), 0) FROM archived_shares
             JOIN callers ON callers.id = caller_id WHERE request_id = ?1 AND tenant = ?2",
        )?
        .query_row([request.as_str(), tenant.as_str()], |row| row.get(0))?;
    Ok(connection
        .prepare_cached(
            "SELECT count(DISTINCT entries.attempt),
               coalesce(sum(CASE account WHEN ?3 THEN amount_ns ELSE 0 END), 0),
               coalesce(max(requests.request_id IS NULL), 0)
             FROM entries
             JOIN callers ON callers.id = entries.caller_id
             LEFT JOIN requests ON requests.request_id = entries.request_id
               AND requests.caller_id = entries.caller_id
               AND requests.attempt = entries.attempt
             WHERE entries.request_id = ?1 AND tenant = ?2",
        )?
        .query_row(params![request.as_str(), tenant.as_str(), account::TENANT], |row| {
            Ok((
                row.get(0)?,
                DeviceNanos(row.get::<_, u64>(1)?.saturating_add(archived)),
                row.get(2)?,
            ))
        })?)
}

fn entries_of(
    connection: &Connection,
    tenant: &TenantId,
    request: &RequestId,
) -> Result<Vec<EntryRow>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT epoch, blocks.first_step, blocks.last_step, sequence, account, amount_ns
         FROM entries
         JOIN blocks USING (epoch_id, block)
         JOIN epochs ON epochs.id = entries.epoch_id
         JOIN callers ON callers.id = caller_id
         WHERE request_id = ?1 AND tenant = ?2
         ORDER BY entries.epoch_id, entries.block, ordinal LIMIT ?3",
    )?;
    let rows =
        statement.query_map(params![request.as_str(), tenant.as_str(), LISTED_ENTRIES], |row| {
            let (epoch, first, last): (String, u64, u64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let sequence: u64 = row.get(3)?;
            let is_tenant = row.get::<_, i64>(4)? == account::TENANT;
            Ok(EntryRow {
                id: format!("{epoch}/{first}-{last}/{sequence}"),
                account: if is_tenant { "tenant" } else { "loss" },
                amount_ns: row.get(5)?,
            })
        })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// The most entries that [`LedgerReader::request`] lists.
const LISTED_ENTRIES: i64 = 1_000;
