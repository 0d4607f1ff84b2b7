//! Plans of tenants: a change is kept and recorded, and an archive records them all
//! again.

use super::chain::Chain;
use super::post::record_action;
use crate::act::{AdminAction, PlansInForce, Posted};
use crate::error::LedgerError;
use crate::rows::plans::PlansByTenant;
use crate::rows::{Tables, actions, plans, records};
use crate::rules::plans::{after_record, changes, records_after_archive, records_of_changes};

/// Keeps and records the plans that changed.
pub(crate) fn put_in_force(
    tables: Tables<'_>,
    chain: &mut Chain,
    in_force: &PlansInForce,
) -> Result<Posted, LedgerError> {
    // A caller that lost its answer submits the plans again.
    if actions::is_known(tables, &in_force.action.id)? {
        return Ok(Posted::Already);
    }
    // Few rows: one for each change of a tenant's plan.
    let known = plans::all(tables)?;
    let changes = changes(&known, in_force);
    for (tenant, day, plan) in &changes {
        plans::put(tables, tenant, *day, plan)?;
    }
    record_all(tables, chain, &records_of_changes(in_force, &changes))
}

/// Records all plans behind the record of an archive, because the records of their
/// changes are gone.
pub(crate) fn record_after_archive(
    tables: Tables<'_>,
    chain: &mut Chain,
    archived: &AdminAction,
) -> Result<(), LedgerError> {
    let actions = records_after_archive(archived, plans::all(tables)?);
    record_all(tables, chain, &actions).map(|_| ())
}

fn record_all(
    tables: Tables<'_>,
    chain: &mut Chain,
    actions: &[AdminAction],
) -> Result<Posted, LedgerError> {
    let mut posted = Posted::Already;
    for action in actions {
        posted = record_action(tables, chain, action)?;
    }
    Ok(posted)
}

/// Returns the plans as the records state them, from the newest archive on; `None`
/// where a record cannot be understood.
pub(crate) fn recorded(tables: Tables<'_>) -> Result<Option<PlansByTenant>, LedgerError> {
    let mut plans = Some(PlansByTenant::new());
    records::each_of_operation(tables, "plans.in_force", |_, record| {
        let record = serde_json::from_str(record).ok();
        // One record that cannot be understood makes the rest meaningless.
        plans = record.zip(plans.take()).and_then(|(record, plans)| after_record(plans, &record));
    })?;
    Ok(plans)
}
