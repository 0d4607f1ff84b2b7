//! Since when a tenant has which plan: its prices go by that. The gateway says
//! at its start which plans are in force; what changed is kept, with its record.

use std::collections::BTreeMap;

use rusqlite::{Connection, params};
use serde_json::Value;
use tollgate_domain::{PlanName, TenantId, UtcDay};

use crate::LedgerError;
use crate::act::{AdminAction, PlansInForce, Posted};
use crate::audit::chain::{self, Chain};
use crate::audit::check::records_of;
use crate::audit::record::LONGEST_DETAIL;
use crate::post;
use crate::query::name;
use crate::statement::{PlanSpan, PricedAs, StatementError, StatementQuery};

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
    let mut news = Vec::new();
    for (tenant, plan) in &told.plans {
        let days = known.get(tenant.as_str());
        if days.and_then(|days| days.values().next_back()).is_some_and(|it| it == plan.as_str()) {
            continue;
        }
        let day = day_of_news(days, today);
        connection
            .prepare_cached("REPLACE INTO tenant_plans (tenant, day, plan) VALUES (?1, ?2, ?3)")?
            .execute(params![tenant.as_str(), day.0, plan.as_str()])?;
        news.push((tenant.to_string(), Value::from(plan.as_str())));
    }
    let from = serde_json::json!({ "from": today.to_string() });
    record(connection, chain, &AdminAction { detail: from, ..told.action.clone() }, "plans", news)
}

/// Records after the archive's own what is kept at the time, for the records
/// that said so are gone.
pub(crate) fn archive(
    connection: &Connection,
    chain: &mut Chain,
    archived: &AdminAction,
) -> Result<(), LedgerError> {
    let mut told = Vec::new();
    for (tenant, days) in kept(connection)? {
        let days: Vec<(u32, String)> = days.into_iter().collect();
        for some in days.chunks(DAYS_AT_ONCE) {
            let some: serde_json::Map<String, Value> =
                some.iter().map(|(day, plan)| (day.to_string(), plan.as_str().into())).collect();
            told.push((tenant.clone(), some.into()));
        }
    }
    let action = AdminAction {
        id: format!("{}.plans", archived.id),
        operation: "plans.in_force".to_owned(),
        detail: serde_json::json!({}),
        ..archived.clone()
    };
    record(connection, chain, &action, TENANT_PLANS, told)?;
    Ok(())
}

/// Records `action` with what is told of tenants as `key` in its detail: as
/// often as it takes, for a record holds no more than so many bytes of it.
fn record(
    connection: &Connection,
    chain: &mut Chain,
    action: &AdminAction,
    key: &str,
    told: Vec<(String, Value)>,
) -> Result<Posted, LedgerError> {
    let mut told = told.into_iter().peekable();
    let mut posted = Posted::Already;
    for number in 1.. {
        let (mut part, mut bytes) = (serde_json::Map::new(), 0);
        while let Some((tenant, plan)) = told
            .next_if(|(tenant, _)| bytes < BYTES_OF_A_PART && !part.contains_key(tenant.as_str()))
        {
            bytes += tenant.len() + plan.to_string().len();
            part.insert(tenant, plan);
        }
        if part.is_empty() {
            break;
        }
        let mut action = action.clone();
        if number > 1 {
            action.id = format!("{}.{number}", action.id);
        }
        action.detail[key] = part.into();
        posted = post::record_action(connection, chain, &action)?;
    }
    Ok(posted)
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

/// The key of a detail that tells every day's plan of a tenant.
const TENANT_PLANS: &str = "tenant_plans";

/// A part is full once names and plans in it take so many bytes: a quarter of
/// what a detail may have. With one more tenant, whose days are at most so many
/// at once, and as many quotes as letters, it is still no longer than that.
const BYTES_OF_A_PART: usize = LONGEST_DETAIL / 4;
const DAYS_AT_ONCE: usize = 16;

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

/// As the records say from the latest archive on, behind which stands what was
/// kept then. `None` where a record cannot be understood.
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
    let is_archive = record.get("operation.type")?.as_str()? == "ledger.archived";
    if is_archive {
        told.clear();
    }
    if let Some(kept) = detail.get(TENANT_PLANS) {
        for (tenant, mut days) in serde_json::from_value::<Told>(kept.clone()).ok()? {
            told.entry(tenant).or_default().append(&mut days);
        }
        return Some(told);
    }
    if is_archive {
        return Some(told);
    }
    let from: UtcDay = detail.get("from")?.as_str()?.parse().ok()?;
    for (tenant, plan) in detail.get("plans")?.as_object()? {
        let days = told.entry(tenant.clone()).or_default();
        days.insert(day_of_news(Some(days), from).0, plan.as_str()?.to_owned());
    }
    Some(told)
}
