//! What can be asked: statements, one request, what callers spent, a
//! worker's balance.

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};
use serde::{Serialize, Serializer};
use tollgate_domain::{
    Attempt, Caller, DeviceClass, DeviceNanos, FinishReason, KeyId, ModelName, RequestId, Stages,
    TenantId, Usage, UtcDay, UtcTime, WorkerEpoch,
};

use crate::charge::reason_named;
use crate::schema::account;
use crate::{LedgerError, LedgerReader};

/// The most entries that [`LedgerReader::request`] lists.
const LISTED_ENTRIES: i64 = 1_000;

/// A column that a statement can be grouped by. The device class always is:
/// classes are never summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupBy {
    /// Who pays.
    Tenant,
    /// The credential.
    Key,
    /// The model.
    Model,
    /// The UTC day.
    Day,
}

/// Which usage, and how it is grouped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageQuery {
    /// Only this tenant's.
    pub tenant: Option<TenantId>,
    /// Only this key's.
    pub key: Option<KeyId>,
    /// Only this model's.
    pub model: Option<ModelName>,
    /// Only on devices of this class.
    pub class: Option<DeviceClass>,
    /// From this day on.
    pub from: Option<UtcDay>,
    /// Up to this day, itself included.
    pub to: Option<UtcDay>,
    /// One row for each combination of these; none: one row for each class.
    pub group: Vec<GroupBy>,
}

/// A line of a statement, in the shape of `usage --json`. Columns that it is
/// not grouped by are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    /// Who pays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The day, as `2026-11-20`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "day_as_text")]
    pub day: Option<UtcDay>,
    /// The class of the devices.
    pub device_class: String,
    /// Requests that ended, those that failed without charge left out.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Those found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Exact device time, by the day it was done.
    pub attributed_ns: u64,
    /// Reference cost, by the day the request ended.
    pub reference_ns: u64,
    /// `attributed_ns` where the class is a GPU, else 0.
    pub gpu_ns: u64,
    /// What the devices drew in that time, as far as they told; `None` where
    /// none did.
    pub energy_mj: Option<u64>,
}

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

/// What a caller spent in a span of days on one class, at reference cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpendRow {
    /// Who, with which key.
    pub caller: Caller,
    /// On which model.
    pub model: ModelName,
    /// On which class.
    pub class: DeviceClass,
    /// Reference cost.
    pub reference: DeviceNanos,
}

/// What admission needs to know at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spending {
    /// Spent on the day asked for.
    pub day: Vec<SpendRow>,
    /// Spent from the first of its month up to it.
    pub month: Vec<SpendRow>,
}

/// Where a device's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Balance {
    /// What was measured.
    pub wall_ns: i64,
    /// What tenants pay.
    pub tenants_ns: i64,
    /// `platform.overhead`
    pub overhead_ns: i64,
    /// `platform.idle`
    pub idle_ns: i64,
    /// `platform.loss`
    pub loss_ns: i64,
}

/// Where a device's energy went, as far as it told what it drew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EnergyBalance {
    /// What was measured.
    pub energy_mj: i64,
    /// What was drawn for tenants.
    pub tenants_mj: i64,
    /// In the time of `platform.overhead`.
    pub overhead_mj: i64,
    /// In that of `platform.idle`.
    pub idle_mj: i64,
    /// In that of `platform.loss`.
    pub loss_mj: i64,
}

/// An attempt with device time but no end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenAttempt {
    /// Who pays so far.
    pub caller: Caller,
    /// Which attempt.
    pub attempt: Attempt,
    /// The model.
    pub model: ModelName,
    /// The class of the device.
    pub class: DeviceClass,
}

impl LedgerReader {
    /// Usage by group, ordered by the columns of the group.
    ///
    /// # Errors
    /// Storage errors.
    pub fn usage(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, LedgerError> {
        self.read(|connection| usage(connection, query))
    }

    /// One request of one tenant; `None` where that tenant has none of that
    /// id, whoever else may.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn request(
        &self,
        tenant: &TenantId,
        request: &RequestId,
    ) -> Result<Option<RequestRow>, LedgerError> {
        self.read(|connection| find_request(connection, tenant, request))
    }

    /// Reference cost spent on `day` and in its month up to it.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn spending(&self, day: UtcDay) -> Result<Spending, LedgerError> {
        let (_, _, of_month) = day.civil();
        let first = UtcDay(day.0.saturating_sub(of_month - 1));
        self.read(|connection| {
            Ok(Spending {
                day: spent(connection, day, day)?,
                month: spent(connection, first, day)?,
            })
        })
    }

    /// Where the time of one epoch went; all zero for one that is unknown.
    ///
    /// # Errors
    /// Storage errors.
    pub fn balance(&self, epoch: WorkerEpoch) -> Result<Balance, LedgerError> {
        self.read(|connection| {
            let id: Option<i64> = connection
                .query_row("SELECT id FROM epochs WHERE epoch = ?1", [epoch.to_string()], |row| {
                    row.get(0)
                })
                .optional()?;
            id.map_or(Ok(Balance::default()), |id| balance_of(connection, id))
        })
    }

    /// Where the energy of one epoch went; `None` where its device told none.
    ///
    /// # Errors
    /// Storage errors.
    pub fn energy(&self, epoch: WorkerEpoch) -> Result<Option<EnergyBalance>, LedgerError> {
        self.read(|connection| {
            let id: Option<i64> = connection
                .query_row("SELECT id FROM epochs WHERE epoch = ?1", [epoch.to_string()], |row| {
                    row.get(0)
                })
                .optional()?;
            id.map_or(Ok(None), |id| energy_of(connection, id))
        })
    }

    /// Every life of every worker that has reported, in the order in which it
    /// was first heard of.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn epochs(&self) -> Result<Vec<WorkerEpoch>, LedgerError> {
        let texts: Vec<String> = self.read(|connection| {
            let mut statement = connection.prepare("SELECT epoch FROM epochs ORDER BY id")?;
            let rows = statement.query_map([], |row| row.get(0))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })?;
        texts.into_iter().map(epoch_of).collect()
    }

    /// The last block of an epoch that is in the ledger (or was passed over);
    /// 0 for an epoch that is unknown.
    ///
    /// # Errors
    /// Storage errors.
    pub fn last_block(&self, epoch: WorkerEpoch) -> Result<u64, LedgerError> {
        self.read(|connection| {
            let last: Option<u64> = connection
                .query_row(
                    "SELECT last_block FROM epochs WHERE epoch = ?1",
                    [epoch.to_string()],
                    |row| row.get(0),
                )
                .optional()?;
            Ok(last.unwrap_or(0))
        })
    }

    /// Attempts of an ended epoch whose end nobody recorded: the worker died
    /// with them. Who has forgotten them too posts a cap of zero for each.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn open_attempts(&self, epoch: WorkerEpoch) -> Result<Vec<OpenAttempt>, LedgerError> {
        self.read(|connection| open_attempts(connection, epoch))
    }

    /// Epochs that ended in the last days of which the ledger knows: what a
    /// gateway that was killed may have left open stands in these.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn lately_ended(&self) -> Result<Vec<WorkerEpoch>, LedgerError> {
        let texts: Vec<String> = self.read(|connection| {
            let mut statement = connection.prepare(
                "SELECT DISTINCT epoch FROM blocks JOIN epochs ON epochs.id = epoch_id
                 WHERE day >= (SELECT max(day) FROM blocks) - ?1 AND last_of_epoch AND ended
                 ORDER BY epoch_id",
            )?;
            let rows = statement.query_map([LATELY_DAYS], |row| row.get(0))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })?;
        texts.into_iter().map(epoch_of).collect()
    }
}

impl Balance {
    /// Whether tenants, overhead, idle and loss are the wall time exactly.
    pub fn is_exact(&self) -> bool {
        // Sums of a damaged file may be anything.
        let parts = [self.tenants_ns, self.overhead_ns, self.idle_ns, self.loss_ns];
        i128::from(self.wall_ns) == parts.into_iter().map(i128::from).sum()
    }
}

impl EnergyBalance {
    /// Whether tenants, overhead, idle and loss are what was measured exactly.
    pub fn is_exact(&self) -> bool {
        let parts = [self.tenants_mj, self.overhead_mj, self.idle_mj, self.loss_mj];
        i128::from(self.energy_mj) == parts.into_iter().map(i128::from).sum()
    }
}

fn usage(connection: &Connection, query: &UsageQuery) -> Result<Vec<UsageRow>, LedgerError> {
    let UsageQuery { tenant, key, model, class, from, to, group } = query;
    let column = |by: GroupBy, name: &'static str| {
        if group.contains(&by) { name } else { "NULL" }
    };
    let mut values: Vec<Value> = Vec::new();
    let mut conditions = vec!["1".to_owned()];
    let mut only = |condition: &str, value: Option<Value>| {
        if let Some(value) = value {
            values.push(value);
            conditions.push(format!("{condition} ?{}", values.len()));
        }
    };
    let text = |text: &str| Value::Text(text.to_owned());
    only("tenant =", tenant.as_ref().map(|tenant| text(tenant.as_str())));
    only("key =", key.as_ref().map(|key| text(key.as_str())));
    only("model =", model.as_ref().map(|model| text(model.as_str())));
    only("device_class =", class.as_ref().map(|class| text(class.as_str())));
    only("day >=", from.map(|day| Value::Integer(day.0.into())));
    only("day <=", to.map(|day| Value::Integer(day.0.into())));
    let sql = format!(
        "SELECT {} AS by_tenant, {} AS by_key, {} AS by_model, {} AS by_day, device_class,
           sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),
           sum(attributed_ns), sum(reference_ns), sum(energy_mj)
         FROM daily JOIN callers ON callers.id = caller_id
         WHERE {}
         GROUP BY 1, 2, 3, 4, 5 ORDER BY 4, 1, 2, 3, 5",
        column(GroupBy::Tenant, "tenant"),
        column(GroupBy::Key, "key"),
        column(GroupBy::Model, "model"),
        column(GroupBy::Day, "day"),
        conditions.join(" AND "),
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let rows = statement.query_map(params_from_iter(values), |row| {
        let device_class: String = row.get(4)?;
        let attributed_ns: u64 = row.get(9)?;
        let gpu = DeviceClass::new(&device_class).is_ok_and(|class| class.is_gpu());
        Ok(UsageRow {
            tenant: row.get(0)?,
            key: row.get(1)?,
            model: row.get(2)?,
            day: row.get::<_, Option<u32>>(3)?.map(UtcDay),
            requests: row.get(5)?,
            prompt_tokens: row.get(6)?,
            cached_tokens: row.get(7)?,
            completion_tokens: row.get(8)?,
            attributed_ns,
            reference_ns: row.get(10)?,
            gpu_ns: if gpu { attributed_ns } else { 0 },
            energy_mj: row.get(11)?,
            device_class,
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

fn day_as_text<S: Serializer>(day: &Option<UtcDay>, serializer: S) -> Result<S::Ok, S::Error> {
    match day {
        Some(day) => serializer.collect_str(day),
        None => serializer.serialize_none(),
    }
}

fn find_request(
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

fn spent(connection: &Connection, from: UtcDay, to: UtcDay) -> Result<Vec<SpendRow>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT tenant, key, model, device_class, sum(reference_ns)
         FROM daily JOIN callers ON callers.id = caller_id
         WHERE day BETWEEN ?1 AND ?2
         GROUP BY 1, 2, 3, 4 HAVING sum(reference_ns) > 0 ORDER BY 1, 2, 3, 4",
    )?;
    let mut rows = statement.query([from.0, to.0])?;
    let mut spent = Vec::new();
    while let Some(row) = rows.next()? {
        spent.push(SpendRow {
            caller: caller(row, 0)?,
            model: name(ModelName::new(&row.get::<_, String>(2)?))?,
            class: name(DeviceClass::new(&row.get::<_, String>(3)?))?,
            reference: DeviceNanos(row.get(4)?),
        });
    }
    Ok(spent)
}

/// Tenant and key from two columns, the first of them `column`.
pub(crate) fn caller(row: &Row<'_>, column: usize) -> Result<Caller, LedgerError> {
    Ok(Caller {
        tenant: name(TenantId::new(&row.get::<_, String>(column)?))?,
        key: name(KeyId::new(&row.get::<_, String>(column + 1)?))?,
    })
}

pub(crate) fn balance_of(connection: &Connection, epoch_id: i64) -> Result<Balance, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT account, sum(amount_ns) FROM entries WHERE epoch_id = ?1 GROUP BY account",
    )?;
    let mut rows = statement.query([epoch_id])?;
    let mut balance = archived_balance(connection, epoch_id)?;
    while let Some(row) = rows.next()? {
        let amount: i64 = row.get(1)?;
        let (account, amount) = match row.get(0)? {
            account::DEVICE => (&mut balance.wall_ns, amount.wrapping_neg()),
            account::TENANT => (&mut balance.tenants_ns, amount),
            account::OVERHEAD => (&mut balance.overhead_ns, amount),
            account::IDLE => (&mut balance.idle_ns, amount),
            account::LOSS => (&mut balance.loss_ns, amount),
            other => return Err(LedgerError::Damaged(format!("unknown account {other}"))),
        };
        // Only a damaged file's sums do not fit.
        *account = account.wrapping_add(amount);
    }
    Ok(balance)
}

/// Where the time of an epoch's archived blocks went.
fn archived_balance(connection: &Connection, epoch_id: i64) -> Result<Balance, LedgerError> {
    let archived = connection
        .prepare_cached(
            "SELECT wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns
             FROM archived_epochs WHERE epoch_id = ?1",
        )?
        .query_row([epoch_id], |row| {
            Ok(Balance {
                wall_ns: row.get(0)?,
                tenants_ns: row.get(1)?,
                overhead_ns: row.get(2)?,
                idle_ns: row.get(3)?,
                loss_ns: row.get(4)?,
            })
        })
        .optional()?;
    Ok(archived.unwrap_or_default())
}

pub(crate) fn energy_of(
    connection: &Connection,
    epoch_id: i64,
) -> Result<Option<EnergyBalance>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT account, sum(energy_mj) FROM entries
         WHERE epoch_id = ?1 AND energy_mj IS NOT NULL GROUP BY account",
    )?;
    let mut rows = statement.query([epoch_id])?;
    let mut balance = archived_energy(connection, epoch_id)?;
    while let Some(row) = rows.next()? {
        let (account, amount): (i64, i64) = (row.get(0)?, row.get(1)?);
        let balance = balance.get_or_insert_default();
        let (account, amount) = match account {
            account::DEVICE => (&mut balance.energy_mj, amount.wrapping_neg()),
            account::TENANT => (&mut balance.tenants_mj, amount),
            account::OVERHEAD => (&mut balance.overhead_mj, amount),
            account::IDLE => (&mut balance.idle_mj, amount),
            account::LOSS => (&mut balance.loss_mj, amount),
            other => return Err(LedgerError::Damaged(format!("unknown account {other}"))),
        };
        // Only a damaged file's sums do not fit.
        *account = account.wrapping_add(amount);
    }
    Ok(balance)
}

/// Where the energy of an epoch's archived blocks went.
fn archived_energy(
    connection: &Connection,
    epoch_id: i64,
) -> Result<Option<EnergyBalance>, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT energy_mj, coalesce(tenants_mj, 0), coalesce(overhead_mj, 0),
               coalesce(idle_mj, 0), coalesce(loss_mj, 0)
             FROM archived_epochs WHERE epoch_id = ?1 AND energy_mj IS NOT NULL",
        )?
        .query_row([epoch_id], |row| {
            Ok(EnergyBalance {
                energy_mj: row.get(0)?,
                tenants_mj: row.get(1)?,
                overhead_mj: row.get(2)?,
                idle_mj: row.get(3)?,
                loss_mj: row.get(4)?,
            })
        })
        .optional()?)
}

fn open_attempts(
    connection: &Connection,
    epoch: WorkerEpoch,
) -> Result<Vec<OpenAttempt>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT DISTINCT tenant, key, entries.request_id, entries.attempt, blocks.model,
           epochs.device_class
         FROM entries
         JOIN blocks USING (epoch_id, block)
         JOIN epochs ON epochs.id = entries.epoch_id
         JOIN callers ON callers.id = entries.caller_id
         LEFT JOIN requests ON requests.request_id = entries.request_id
           AND requests.caller_id = entries.caller_id AND requests.attempt = entries.attempt
         WHERE epochs.epoch = ?1 AND epochs.ended AND requests.request_id IS NULL
         ORDER BY 1, 2, 3, 4",
    )?;
    let mut rows = statement.query([epoch.to_string()])?;
    let mut open = Vec::new();
    while let Some(row) = rows.next()? {
        let request = name(RequestId::new(&row.get::<_, String>(2)?))?;
        open.push(OpenAttempt {
            caller: caller(row, 0)?,
            attempt: Attempt { request, attempt: row.get(3)? },
            model: name(ModelName::new(&row.get::<_, String>(4)?))?,
            class: name(DeviceClass::new(&row.get::<_, String>(5)?))?,
        });
    }
    Ok(open)
}

fn epoch_of(text: String) -> Result<WorkerEpoch, LedgerError> {
    let damaged = |_| LedgerError::Damaged("epochs.epoch is not 32 hex digits".to_owned());
    WorkerEpoch::try_from(text).map_err(damaged)
}

/// How many days back epochs count as lately ended.
const LATELY_DAYS: i64 = 1;

/// A name was checked before it was written.
pub(crate) fn name<T>(name: Result<T, tollgate_domain::InvalidName>) -> Result<T, LedgerError> {
    name.map_err(|error| LedgerError::Damaged(error.to_string()))
}
