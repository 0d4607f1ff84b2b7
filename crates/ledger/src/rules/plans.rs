//! Rules for plans: from which day a change holds, which plan's prices hold on
//! which days, and how the plans are recorded.

use serde_json::{Map, Value};
use tollgate_domain::{PlanName, TenantId, UtcDay};

use super::record::LONGEST_DETAIL;
use crate::act::{AdminAction, PlansInForce};
use crate::rows::plans::{PlansByDay, PlansByTenant};

/// Days of a month on which one plan's prices hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanSpan {
    /// The first day.
    pub from: UtcDay,
    /// The last day.
    pub to: UtcDay,
    /// The plan.
    pub plan: PlanName,
}

/// The key in a record's detail that holds every day's plan of a tenant.
const TENANT_PLANS: &str = "tenant_plans";

/// Bytes of names and plans after which a record is full: a quarter of the longest
/// detail. One more tenant, with at most [`DAYS_AT_ONCE`] days and as many quotes
/// as letters, still fits.
const BYTES_OF_A_PART: usize = LONGEST_DETAIL / 4;
/// Most days of one tenant in one record.
const DAYS_AT_ONCE: usize = 16;

/// Returns the plans that changed, each with the first day of the change.
pub(crate) fn changes<'a>(
    known: &PlansByTenant,
    in_force: &'a PlansInForce,
) -> Vec<(&'a TenantId, UtcDay, &'a PlanName)> {
    let today = in_force.action.at.day();
    let mut changes = Vec::new();
    for (tenant, plan) in &in_force.plans {
        let days = known.get(tenant.as_str());
        // The last known plan is compared, whatever its day: a plan may return.
        let newest = days.and_then(|days| days.values().next_back());
        if newest.is_none_or(|newest| newest != plan.as_str()) {
            changes.push((tenant, day_of_change(days, today), plan));
        }
    }
    changes
}

/// Returns the day from which a change holds: a clock that was set back changes
/// nothing of past days.
fn day_of_change(days: Option<&PlansByDay>, today: UtcDay) -> UtcDay {
    let last = days.and_then(|days| days.keys().next_back());
    last.map_or(today, |last| UtcDay(*last).max(today))
}

/// Returns the actions that record changed plans.
pub(crate) fn records_of_changes(
    in_force: &PlansInForce,
    changes: &[(&TenantId, UtcDay, &PlanName)],
) -> Vec<AdminAction> {
    let from = in_force.action.at.day();
    let detail = serde_json::json!({ "from": from.to_string() });
    let plans =
        changes.iter().map(|(tenant, _, plan)| (tenant.to_string(), Value::from(plan.as_str())));
    split(&AdminAction { detail, ..in_force.action.clone() }, "plans", plans)
}

/// Returns the actions that record all plans after an archive took the records of
/// their changes away.
pub(crate) fn records_after_archive(
    archived: &AdminAction,
    plans: PlansByTenant,
) -> Vec<AdminAction> {
    let mut parts = Vec::new();
    for (tenant, days) in plans {
        let days: Vec<(u32, String)> = days.into_iter().collect();
        // A tenant with many changes must not make a record longer than the longest detail.
        for some in days.chunks(DAYS_AT_ONCE) {
            let some: Map<String, Value> =
                some.iter().map(|(day, plan)| (day.to_string(), plan.as_str().into())).collect();
            parts.push((tenant.clone(), Value::from(some)));
        }
    }
    let action = AdminAction {
        id: format!("{}.plans", archived.id),
        operation: "plans.in_force".to_owned(),
        detail: serde_json::json!({}),
        ..archived.clone()
    };
    split(&action, TENANT_PLANS, parts.into_iter())
}

/// Splits plans over as many actions as it takes, because a record's detail is
/// bounded. The plans stand under `key` in the detail.
fn split(
    action: &AdminAction,
    key: &str,
    plans: impl Iterator<Item = (String, Value)>,
) -> Vec<AdminAction> {
    let mut plans = plans.peekable();
    let mut actions = Vec::new();
    for number in 1.. {
        let (mut part, mut bytes) = (Map::new(), 0);
        while let Some((tenant, plan)) = plans
            // A tenant may come twice after an archive; its parts go into different records.
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
            // The first record keeps the id, by which a repeated act is recognised.
            action.id = format!("{}.{number}", action.id);
        }
        action.detail[key] = part.into();
        actions.push(action);
    }
    actions
}

/// Returns the plan on `day`. The first known plan also holds for the days before it.
pub(crate) fn on(plans: &PlansByDay, day: UtcDay) -> Option<&str> {
    let begun = plans.range(..=day.0).next_back().or_else(|| plans.first_key_value());
    begun.map(|(_, plan)| plan.as_str())
}

/// Returns the spans of the days from `from` to `to` by plan; empty where no plan
/// is known. The first known plan also holds for the days before it, because
/// nothing else is known of them.
pub(crate) fn spans(plans: Vec<(UtcDay, PlanName)>, from: UtcDay, to: UtcDay) -> Vec<PlanSpan> {
    let mut spans: Vec<PlanSpan> = Vec::new();
    for (day, plan) in plans {
        match spans.last_mut() {
            Some(last) if day > to => {
                last.to = to;
                break;
            }
            Some(last) if day > from => {
                // The subtraction is safe: `day` is after `from`.
                last.to = UtcDay(day.0 - 1);
                spans.push(PlanSpan { from: day, to, plan });
            }
            // The last plan that began before the month holds on its first day.
            _ => spans = vec![PlanSpan { from, to, plan }],
        }
    }
    spans
}

/// Returns the plans after a record of plans or of an archive; `None` where the
/// record cannot be understood.
pub(crate) fn after_record(mut plans: PlansByTenant, record: &Value) -> Option<PlansByTenant> {
    let detail = record.get("detail")?;
    let is_archive = record.get("operation.type")?.as_str()? == "ledger.archived";
    if is_archive {
        // The records behind an archive repeat all plans.
        plans.clear();
    }
    if let Some(kept) = detail.get(TENANT_PLANS) {
        for (tenant, mut days) in serde_json::from_value::<PlansByTenant>(kept.clone()).ok()? {
            plans.entry(tenant).or_default().append(&mut days);
        }
        return Some(plans);
    }
    if is_archive {
        return Some(plans);
    }
    let from: UtcDay = detail.get("from")?.as_str()?.parse().ok()?;
    for (tenant, plan) in detail.get("plans")?.as_object()? {
        let days = plans.entry(tenant.clone()).or_default();
        days.insert(day_of_change(Some(days), from).0, plan.as_str()?.to_owned());
    }
    Some(plans)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(name: &str) -> PlanName {
        PlanName::new(name).expect("a name")
    }

    #[test]
    fn spans_cover_the_month_without_gaps() {
        let spans = |days: &[u32]| -> Vec<(u32, u32)> {
            let plans = days.iter().map(|day| (UtcDay(*day), plan("a"))).collect();
            let spans = spans(plans, UtcDay(10), UtcDay(20));
            spans.into_iter().map(|span| (span.from.0, span.to.0)).collect()
        };
        assert_eq!(spans(&[]), []);
        assert_eq!(spans(&[5]), [(10, 20)]);
        assert_eq!(spans(&[15]), [(10, 20)], "the first plan holds for the days before");
        assert_eq!(spans(&[5, 15]), [(10, 14), (15, 20)]);
        assert_eq!(spans(&[5, 8, 12, 30]), [(10, 11), (12, 20)]);
    }

    #[test]
    fn change_never_precedes_a_known_day() {
        let known = PlansByDay::from([(12, "a".to_owned())]);
        assert_eq!(day_of_change(Some(&known), UtcDay(11)), UtcDay(12));
        assert_eq!(day_of_change(Some(&known), UtcDay(13)), UtcDay(13));
        assert_eq!(day_of_change(None, UtcDay(11)), UtcDay(11));
    }
}
