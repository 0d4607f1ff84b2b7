//! Table `daily`: sums by day, caller, model, device class and tier. The writer keeps
//! them in the transaction of the records that they sum.

use serde::{Serialize, Serializer};
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, KeyId, ModelName, PlanName, Priced, TenantId, Tier, UtcDay,
};
use tollgate_sql::{SqlValue, params};

use super::{CallerId, Tables, TierColumn, caller_at, name};
use crate::error::LedgerError;

/// Key of a day's sums.
pub(crate) struct DailyKey<'a> {
    pub(crate) day: u32,
    pub(crate) caller: CallerId,
    pub(crate) model: &'a str,
    pub(crate) class: &'a str,
    pub(crate) tier: Tier,
}

/// A change of a day's sums. Negative figures are taken from the day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DailyChange {
    /// Rows of `requests`; only grows.
    pub(crate) charges: i64,
    /// Rows of `entries` that a tenant pays; only grows.
    pub(crate) entries: i64,
    pub(crate) requests: i64,
    pub(crate) prompt_tokens: i64,
    pub(crate) cached_tokens: i64,
    pub(crate) completion_tokens: i64,
    pub(crate) attributed_ns: i64,
    pub(crate) reference_ns: i64,
    /// `None` where no device reported energy.
    pub(crate) energy_mj: Option<i64>,
}

/// A day's sums of one model, device class and tier.
pub(crate) struct DailyRow {
    pub(crate) model: String,
    pub(crate) class: String,
    pub(crate) tier: Tier,
    pub(crate) day: UtcDay,
    pub(crate) sums: DailyChange,
}

/// A column by which usage can be grouped. Usage is always grouped by device
/// class too: classes are never summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupBy {
    /// The payer.
    Tenant,
    /// The credential.
    Key,
    /// The model.
    Model,
    /// The UTC day.
    Day,
    /// The tier of the requests.
    Tier,
}

/// A filter of usage and its grouping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageQuery {
    /// Only this tenant's usage.
    pub tenant: Option<TenantId>,
    /// Only this key's usage.
    pub key: Option<KeyId>,
    /// Only this model's usage.
    pub model: Option<ModelName>,
    /// Only usage on devices of this class.
    pub class: Option<DeviceClass>,
    /// The first day.
    pub from: Option<UtcDay>,
    /// The last day.
    pub to: Option<UtcDay>,
    /// One row for each combination of these columns; one row for each class if
    /// empty.
    pub group: Vec<GroupBy>,
}

/// A row of usage, in the shape of `usage --json`. Columns by which the rows are
/// not grouped are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    /// The payer.
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
    /// The tier of the requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// The class of the devices.
    pub device_class: String,
    /// Requests that ended. Requests that failed without charge are left out.
    pub requests: u64,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Attributed device time in ns, by the day of the work.
    pub attributed_ns: u64,
    /// Reference cost in ns, by the day on which the request ended.
    pub reference_ns: u64,
    /// `attributed_ns` where the class is a GPU, else 0.
    pub gpu_ns: u64,
    /// Energy in mJ of the devices that reported it; `None` where none did.
    pub energy_mj: Option<u64>,
}

/// Reference cost of a caller on one model and device class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpendRow {
    /// The tenant and the key.
    pub caller: Caller,
    /// The model.
    pub model: ModelName,
    /// The device class.
    pub class: DeviceClass,
    /// The reference cost.
    pub reference: DeviceNanos,
}

/// Usage of a caller on one day, on one model and device class in one tier, with its figures
/// that have a price.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PricedRow {
    /// The tenant and the key.
    pub caller: Caller,
    /// The model.
    pub model: ModelName,
    /// The device class.
    pub class: DeviceClass,
    /// The tier.
    pub tier: Tier,
    /// The day.
    pub day: UtcDay,
    /// The plan that the tenant had on that day, as far as the ledger knows.
    pub plan: Option<PlanName>,
    /// The usage.
    pub used: Priced,
}

/// Adds a change to a day.
pub(crate) fn add(
    tables: Tables<'_>,
    key: &DailyKey<'_>,
    change: &DailyChange,
) -> Result<(), LedgerError> {
    let DailyKey { day, caller, model, class, tier } = key;
    tables.connection.prepare(ADD)?.send(params![
        day,
        caller,
        model,
        class,
        change.requests,
        change.prompt_tokens,
        change.cached_tokens,
        change.completion_tokens,
        change.attributed_ns,
        change.reference_ns,
        change.charges,
        change.entries,
        change.energy_mj,
        TierColumn(*tier)
    ])?;
    Ok(())
}

// In SQL a sum with NULL is NULL, so energy that only one side knows needs its own terms.
const ADD: &str = "
INSERT INTO daily (day, caller_id, model, device_class, requests, prompt_tokens,
  cached_tokens, completion_tokens, attributed_ns, reference_ns, charges, entries, energy_mj, tier)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)
ON CONFLICT (day, caller_id, model, device_class, tier) DO UPDATE SET
  requests = daily.requests + excluded.requests,
  prompt_tokens = daily.prompt_tokens + excluded.prompt_tokens,
  cached_tokens = daily.cached_tokens + excluded.cached_tokens,
  completion_tokens = daily.completion_tokens + excluded.completion_tokens,
  attributed_ns = daily.attributed_ns + excluded.attributed_ns,
  reference_ns = daily.reference_ns + excluded.reference_ns,
  charges = daily.charges + excluded.charges,
  entries = daily.entries + excluded.entries,
  energy_mj = coalesce(daily.energy_mj + excluded.energy_mj, daily.energy_mj, excluded.energy_mj)
";

/// Returns a caller's sums on the days from `first` to `last`, by day.
pub(crate) fn of_caller(
    tables: Tables<'_>,
    caller: CallerId,
    (first, last): (u32, u32),
) -> Result<Vec<DailyRow>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT model, device_class, day, charges, entries, requests, prompt_tokens,
           cached_tokens, completion_tokens, reference_ns, attributed_ns, energy_mj, tier
         FROM daily WHERE caller_id = ?1 AND day BETWEEN ?2 AND ?3 ORDER BY day",
    )?;
    let rows = statement.query_map(params![caller, first, last], |row| {
        Ok(DailyRow {
            model: row.get(0)?,
            class: row.get(1)?,
            tier: row.get::<TierColumn>(12)?.0,
            day: UtcDay(row.get(2)?),
            sums: DailyChange {
                charges: row.get(3)?,
                entries: row.get(4)?,
                requests: row.get(5)?,
                prompt_tokens: row.get(6)?,
                cached_tokens: row.get(7)?,
                completion_tokens: row.get(8)?,
                reference_ns: row.get(9)?,
                attributed_ns: row.get(10)?,
                energy_mj: row.get(11)?,
            },
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns usage by group, ordered by the columns of the group. Groups of attempts that
/// nobody pays for are left out.
pub(crate) fn usage(tables: Tables<'_>, query: &UsageQuery) -> Result<Vec<UsageRow>, LedgerError> {
    let (conditions, values) = conditions(query);
    // A column that is not asked for is the same NULL in each row, so it groups nothing.
    let column = |by: GroupBy, name: &'static str| {
        if query.group.contains(&by) { name } else { "NULL" }
    };
    let sql = format!(
        "SELECT {} AS by_tenant, {} AS by_key, {} AS by_model, {} AS by_day, device_class,
           sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),
           sum(attributed_ns), sum(reference_ns), sum(energy_mj), {} AS by_tier
         FROM daily JOIN callers ON callers.id = caller_id
         WHERE {conditions}
         GROUP BY 1, 2, 3, 4, 5, 13
         HAVING sum(requests) + sum(attributed_ns) + sum(reference_ns) > 0
         ORDER BY 4, 1, 2, 3, 13, 5",
        column(GroupBy::Tenant, "tenant"),
        column(GroupBy::Key, "key"),
        column(GroupBy::Model, "model"),
        column(GroupBy::Day, "day"),
        column(GroupBy::Tier, "tier"),
    );
    // Only names of columns are formatted in; values are parameters.
    let mut statement = tables.connection.prepare(&sql)?;
    let rows = statement.query_map(values, |row| {
        let device_class: String = row.get(4)?;
        let attributed_ns: u64 = row.get(9)?;
        // A class that cannot be read counts as no GPU: a report must not fail on one row.
        let is_gpu = DeviceClass::new(&device_class).is_ok_and(|class| class.is_gpu());
        Ok(UsageRow {
            tenant: row.get(0)?,
            key: row.get(1)?,
            model: row.get(2)?,
            day: row.get::<Option<u32>>(3)?.map(UtcDay),
            tier: row.get::<Option<TierColumn>>(12)?.map(|tier| tier.0),
            requests: row.get(5)?,
            prompt_tokens: row.get(6)?,
            cached_tokens: row.get(7)?,
            completion_tokens: row.get(8)?,
            attributed_ns,
            reference_ns: row.get(10)?,
            gpu_ns: if is_gpu { attributed_ns } else { 0 },
            energy_mj: row.get(11)?,
            device_class,
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the conditions of a query with numbered parameters, and their values.
fn conditions<'q>(query: &'q UsageQuery) -> (String, Vec<SqlValue<'q>>) {
    let UsageQuery { tenant, key, model, class, from, to, group: _ } = query;
    let mut values = Vec::new();
    // A query without a filter still has a condition.
    let mut conditions = vec!["1 = 1".to_owned()];
    let mut only = |condition: &str, value: Option<SqlValue<'q>>| {
        if let Some(value) = value {
            values.push(value);
            // Parameters count from 1: after the push the length is the number of this value.
            conditions.push(format!("{condition} ?{}", values.len()));
        }
    };
    only("tenant =", tenant.as_ref().map(|tenant| SqlValue::Text(tenant.as_str())));
    only("key =", key.as_ref().map(|key| SqlValue::Text(key.as_str())));
    only("model =", model.as_ref().map(|model| SqlValue::Text(model.as_str())));
    only("device_class =", class.as_ref().map(|class| SqlValue::Text(class.as_str())));
    only("day >=", from.map(|day| SqlValue::Integer(day.0.into())));
    only("day <=", to.map(|day| SqlValue::Integer(day.0.into())));
    (conditions.join(" AND "), values)
}

/// The sums to read.
#[derive(Clone, Copy)]
pub(crate) enum Spender<'a> {
    /// The sums of all gateways.
    All,
    /// Those of the gateway with this data folder.
    Home(&'a str),
    /// Those of its lives before this one.
    Before(&'a str, u64),
}

impl<'a> Spender<'a> {
    /// Returns the table, and a condition that selects its rows.
    fn source(self) -> (&'static str, &'static str) {
        match self {
            Self::All => ("daily", "?3 = '' AND ?4 = ''"),
            // The rows of a data folder and of its lives: a zero is the character after a slash.
            Self::Home(_) | Self::Before(..) => (
                "gateway_days",
                "(home = ?3 OR (home > ?3 || '/' AND home < ?3 || '0')) AND home <> ?4",
            ),
        }
    }

    /// Returns the values of the condition: the data folder, and the life that is left out.
    fn values(self) -> (&'a str, String) {
        match self {
            Self::All => ("", String::new()),
            Self::Home(home) => (home, String::new()),
            Self::Before(home, life) => (home, format!("{home}/{life}")),
        }
    }
}

/// Returns the reference cost of every caller from day `from` to day `to`.
pub(crate) fn spent(
    tables: Tables<'_>,
    spender: Spender<'_>,
    (from, to): (UtcDay, UtcDay),
) -> Result<Vec<SpendRow>, LedgerError> {
    let (table, condition) = spender.source();
    let mut statement = tables.connection.prepare(&format!(
        "SELECT tenant, key, model, device_class, sum(reference_ns)
         FROM {table} JOIN callers ON callers.id = caller_id
         WHERE day BETWEEN ?1 AND ?2 AND {condition}
         GROUP BY 1, 2, 3, 4 HAVING sum(reference_ns) > 0 ORDER BY 1, 2, 3, 4",
    ))?;
    // Rows are read one by one, because a name of a damaged file fails with our own error.
    let (home, life) = spender.values();
    let mut rows = statement.query(params![from.0, to.0, home, life])?;
    let mut spent = Vec::new();
    while let Some(row) = rows.next()? {
        spent.push(SpendRow {
            caller: caller_at(&row, 0)?,
            model: name(ModelName::new(&row.get::<String>(2)?))?,
            class: name(DeviceClass::new(&row.get::<String>(3)?))?,
            reference: DeviceNanos(row.get(4)?),
        });
    }
    Ok(spent)
}

/// Returns the usage of every caller from day `from` to day `to` by day, without plans.
pub(crate) fn priced(
    tables: Tables<'_>,
    spender: Spender<'_>,
    (from, to): (UtcDay, UtcDay),
) -> Result<Vec<PricedRow>, LedgerError> {
    let (table, condition) = spender.source();
    let mut statement = tables.connection.prepare(&format!(
        // Days with entries alone are left out: only charges have a price.
        "SELECT tenant, key, model, device_class, day,
           sum(reference_ns), sum(prompt_tokens), sum(completion_tokens), tier
         FROM {table} JOIN callers ON callers.id = caller_id
         WHERE day BETWEEN ?1 AND ?2 AND {condition}
         GROUP BY 1, 2, 3, 4, 5, tier HAVING sum(charges) > 0 ORDER BY 1, 2, 3, 4, 5, tier",
    ))?;
    let (home, life) = spender.values();
    let mut rows = statement.query(params![from.0, to.0, home, life])?;
    let mut priced = Vec::new();
    while let Some(row) = rows.next()? {
        priced.push(PricedRow {
            caller: caller_at(&row, 0)?,
            model: name(ModelName::new(&row.get::<String>(2)?))?,
            class: name(DeviceClass::new(&row.get::<String>(3)?))?,
            tier: row.get::<TierColumn>(8)?.0,
            day: UtcDay(row.get(4)?),
            plan: None,
            used: Priced {
                reference_ns: row.get(5)?,
                prompt_tokens: row.get(6)?,
                completion_tokens: row.get(7)?,
            },
        });
    }
    Ok(priced)
}

fn day_as_text<S: Serializer>(day: &Option<UtcDay>, serializer: S) -> Result<S::Ok, S::Error> {
    match day {
        Some(day) => serializer.collect_str(day),
        None => serializer.serialize_none(),
    }
}
