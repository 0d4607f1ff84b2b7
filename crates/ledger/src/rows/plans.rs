//! Table `tenant_plans`: the plans of tenants, each from its first day on.

use std::collections::BTreeMap;

use tollgate_domain::{PlanName, TenantId, UtcDay};
use tollgate_sql::params;

use super::{Tables, name};
use crate::error::LedgerError;

/// A tenant's plans by the first day of each.
pub(crate) type PlansByDay = BTreeMap<u32, String>;
/// The plans of every tenant.
pub(crate) type PlansByTenant = BTreeMap<String, PlansByDay>;

/// Sets a tenant's plan from `day` on.
pub(crate) fn put(
    tables: Tables<'_>,
    tenant: &TenantId,
    day: UtcDay,
    plan: &PlanName,
) -> Result<(), LedgerError> {
    tables
        .connection
        // A plan may change twice on one day; the last change of the day holds.
        .prepare(
            "INSERT INTO tenant_plans (tenant, day, plan) VALUES (?1, ?2, ?3)
             ON CONFLICT (tenant, day) DO UPDATE SET plan = excluded.plan",
        )?
        .send(params![tenant.as_str(), day.0, plan.as_str()])?;
    Ok(())
}

/// Returns a tenant's plans in the order of their days.
pub(crate) fn of_tenant(
    tables: Tables<'_>,
    tenant: &TenantId,
) -> Result<Vec<(UtcDay, PlanName)>, LedgerError> {
    let mut statement = tables
        .connection
        .prepare("SELECT day, plan FROM tenant_plans WHERE tenant = ?1 ORDER BY day")?;
    let mut rows = statement.query([tenant.as_str()])?;
    let mut plans = Vec::new();
    while let Some(row) = rows.next()? {
        plans.push((UtcDay(row.get(0)?), name(PlanName::new(&row.get::<String>(1)?))?));
    }
    Ok(plans)
}

/// Returns every tenant's plans.
pub(crate) fn all(tables: Tables<'_>) -> Result<PlansByTenant, LedgerError> {
    let mut statement = tables.connection.prepare("SELECT tenant, day, plan FROM tenant_plans")?;
    let mut rows = statement.query(())?;
    let mut plans = PlansByTenant::new();
    while let Some(row) = rows.next()? {
        let (tenant, day, plan): (String, u32, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        plans.entry(tenant).or_default().insert(day, plan);
    }
    Ok(plans)
}
