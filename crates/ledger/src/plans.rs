//! Since when a tenant has which plan: its prices go by that. The gateway says
//! at its start which plans are in force; what changed is kept, with its record.

use std::collections::BTreeMap;

use rusqlite::{Connection, params};
use serde_json::Value;
use tollgate_domain::{PlanName, TenantId, UtcDay};

use crate::LedgerError;
use crate::audit::chain::{self, Chain};
use crate::audit::check::records_of;
use crate::audit::record::AdminAction;
use crate::post::{self, Posted};
use crate::query::name;
use crate::statement::{PlanSpan, PricedAs, StatementError, StatementQuery};

/// What is in force from a start on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlansInForce {
    /// The record that is written where one of them is news; its detail is
    /// made of what is.
    pub action: AdminAction,
    /// The plan of each tenant that has one.
    pub plans: Vec<(TenantId, PlanName)>,
}

/// Keeps what is news, and records it; the caller rolls back on an error.
pub(crate) fn post(
    connection: &Connection,
    chain: &mut Chain,
    told: &PlansInForce,
) -> Result<Posted, LedgerError> {
    if chain::knows_action(connection, &told.action.id)? {
        return Ok(Posted::Already);
    }
    let known = kept(connection)?;
    let today = told.action.at.day();
    let mut news = serde_json::Map::new();
    for (tenant, plan) in &told.plans {
        let days = known.get(tenant.as_str());
        if days.and_then(|days| days.values().next_back()).is_some_and(|it| it == plan.as_str()) {
            continue;
        }
        let day = day_of_news(days, today);
        connection
            .prepare_cached("REPLACE INTO tenant_plans (tenant, day, plan) VALUES (?1, ?2, ?3)")?
            .execute(params![tenant.as_str(), day.0, plan.as_str()])?;
        news.insert(tenant.to_string(), plan.as_str().into());
    }
    if news.is_empty() {
        return Ok(Posted::Already);
    }
    let detail = serde_json::json!({ "from": today.to_string(), "plans": news });
    let action = AdminAction { detail, ..told.action.clone() };
    post::record_action(connection, chain, &action)
}

/// Which plan's prices hold on which days of the month. What was told first
/// holds for the days before as well: nothing else is known of them.
pub(crate) fn in_force(
    connection: &Connection,
    query: &StatementQuery<'_>,
) -> Result<Vec<PlanSpan>, StatementError> {
    let StatementQuery { tenant, month, priced_as, .. } = *query;
    let (from, to) = (month.first_day(), month.last_day());
    let whole = |plan: &PlanName| vec![PlanSpan { from, to, plan: plan.clone() }];
    let otherwise = match priced_as {
        PricedAs::Plan(plan) => return Ok(whole(plan)),
        PricedAs::Told(otherwise) => otherwise,
    };
    let mut spans: Vec<PlanSpan> = Vec::new();
    for (day, plan) in told(connection, tenant)? {
        match spans.last_mut() {
            Some(last) if day > to => {
                last.to = to;
                break;
            }
            Some(last) if day > from => {
                last.to = UtcDay(day.0 - 1);
                spans.push(PlanSpan { from: day, to, plan });
            }
            // The last one that began before the month holds at its first day.
            _ => spans = vec![PlanSpan { from, to, plan }],
        }
    }
    if spans.is_empty() {
        let plan =
            otherwise.ok_or_else(|| StatementError::NoPlan { tenant: tenant.to_string() })?;
        return Ok(whole(plan));
    }
    Ok(spans)
}

/// A tenant's plans in the order of their days.
fn told(
    connection: &Connection,
    tenant: &TenantId,
) -> Result<Vec<(UtcDay, PlanName)>, LedgerError> {
    let mut statement = connection
        .prepare_cached("SELECT day, plan FROM tenant_plans WHERE tenant = ?1 ORDER BY day")?;
    let mut rows = statement.query([tenant.as_str()])?;
    let mut told = Vec::new();
    while let Some(row) = rows.next()? {
        told.push((UtcDay(row.get(0)?), name(PlanName::new(&row.get::<_, String>(1)?))?));
    }
    Ok(told)
}

/// Every tenant's plans by day.
pub(crate) type Told = BTreeMap<String, Days>;
type Days = BTreeMap<u32, String>;

/// From when on news of `from` hold: a clock that was set back changes nothing
/// of days gone by.
fn day_of_news(days: Option<&Days>, from: UtcDay) -> UtcDay {
    let last = days.and_then(|days| days.keys().next_back());
    last.map_or(from, |last| UtcDay(*last).max(from))
}

/// As the ledger keeps them.
pub(crate) fn kept(connection: &Connection) -> Result<Told, LedgerError> {
    let mut statement = connection.prepare("SELECT tenant, day, plan FROM tenant_plans")?;
    let mut rows = statement.query([])?;
    let mut told = Told::new();
    while let Some(row) = rows.next()? {
        let (tenant, day, plan): (String, u32, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        told.entry(tenant).or_default().insert(day, plan);
    }
    Ok(told)
}

/// As the records say, the latest archive's first: it tells what was kept then.
/// `None` where a record cannot be understood.
pub(crate) fn recorded(connection: &Connection) -> Result<Option<Told>, LedgerError> {
    let mut told = Some(Told::new());
    records_of(connection, "plans.in_force", |_, record| {
        told = record.zip(told.take()).and_then(|(record, told)| after(told, &record));
    })?;
    Ok(told)
}

/// What is told once `record` is.
fn after(mut told: Told, record: &Value) -> Option<Told> {
    let detail = record.get("detail")?;
    if record.get("operation.type")?.as_str()? == "ledger.archived" {
        return serde_json::from_value(detail.get("tenant_plans")?.clone()).ok();
    }
    let from: UtcDay = detail.get("from")?.as_str()?.parse().ok()?;
    for (tenant, plan) in detail.get("plans")?.as_object()? {
        let days = told.entry(tenant.clone()).or_default();
        days.insert(day_of_news(Some(days), from).0, plan.as_str()?.to_owned());
    }
    Some(told)
}
