//! What can be asked: statements, one request, what callers spent, a
//! worker's balance.

mod balance;
mod request;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};
use serde::{Serialize, Serializer};
use tollgate_domain::{
    Attempt, Caller, DeviceClass, DeviceNanos, KeyId, ModelName, RequestId, TenantId, UtcDay,
    WorkerEpoch,
};

pub use balance::{Balance, EnergyBalance};
pub(crate) use balance::{balance_of, energy_of};
use request::find_request;
pub use request::{EntryRow, RequestRow, RequestState};

use crate::{LedgerError, LedgerReader};

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
