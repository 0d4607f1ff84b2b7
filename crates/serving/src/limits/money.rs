//! The money that usage costs, for budgets: a request has the prices of its tenant's plan on
//! the day of its admission, and usage in the ledger those of its day.

use tollgate_admission::{PastCost, Scope, ScopeLimits};
use tollgate_config::Config;
use tollgate_domain::{DeviceClass, ExactAmount, ModelName, PlanName, Tier, UnitPrices, UtcDay};
use tollgate_ledger::PricedRow;

use super::Limits;

/// Returns the prices of a model on devices of `class` under `plan` in a tier. All of them are
/// zero if the config has none.
pub(crate) fn prices(
    config: &Config,
    plan: Option<&PlanName>,
    (model, class, tier): (&ModelName, &DeviceClass, Tier),
    day: UtcDay,
) -> UnitPrices {
    let list = config.prices().zip(plan);
    let list = list.and_then(|(book, plan)| book.in_force(plan, Some(model), day));
    list.and_then(|list| list.on(class, tier)).unwrap_or_default()
}

impl Limits {
    /// Adds the cost of a day's usage to every scope that has a budget.
    pub(super) fn restore_cost(&self, config: &Config, row: &PricedRow) {
        let cost = cost(config, row);
        for ScopeLimits { scope, limits, .. } in self.scopes_of(config, &row.caller, &row.model) {
            // A scope without a budget would be remembered for nothing.
            if limits.budget_per_month.is_some() {
                self.admission.restore_cost(scope, row.day.month(), cost);
            }
        }
    }

    /// Returns the cost of usage in each of its scopes that `begins` to have a budget.
    pub(super) fn past_costs(
        &self,
        config: &Config,
        rows: &[PricedRow],
        begins: impl Fn(&Scope) -> bool,
    ) -> Vec<PastCost> {
        let mut costs = Vec::new();
        for row in rows {
            let (month, cost) = (row.day.month(), cost(config, row));
            let scopes = self.scopes_of(config, &row.caller, &row.model).into_iter();
            let scopes = scopes.map(|limited| limited.scope).filter(&begins);
            costs.extend(scopes.map(|scope| PastCost { scope, month, cost }));
        }
        costs
    }
}

fn cost(config: &Config, row: &PricedRow) -> ExactAmount {
    let PricedRow { caller, model, class, tier, day, plan, used } = row;
    let tenant = config.tenant(&caller.tenant);
    let now_has = || tenant.and_then(|tenant| tenant.priced_as()).map(|plan| &plan.name);
    let plan = plan.as_ref().or_else(now_has);
    prices(config, plan, (model, class, *tier), *day).exact_cost(*used)
}
