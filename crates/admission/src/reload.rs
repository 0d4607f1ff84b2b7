//! The limits of a new config, on their way into admission.

use std::fmt;
use std::sync::Arc;

use tollgate_domain::{DeviceClass, DeviceNanos, ExactAmount, PlanLimits, UtcMonth};

use crate::core::is_capped;
use crate::scope::{Period, Scope};

/// The limits of a new config.
pub struct NewLimits<'a> {
    /// Number of the config, larger than that of every earlier one.
    pub revision: u64,
    /// Returns the limits of a scope before and after, or `None` for a scope that the new
    /// config does not limit. Such a scope keeps its limits for the requests that still run.
    pub limits_of: &'a dyn Fn(&Scope) -> Option<LimitChange>,
    /// Spend of the current day and month in the scopes and classes that begin to have a cap.
    pub spent: Vec<PastSpend>,
    /// Money spent this month in the scopes that begin to have a budget.
    pub costs: Vec<PastCost>,
}

/// The limits of one scope before and after a reload.
#[derive(Clone, Debug)]
pub struct LimitChange {
    /// Limits of the earlier config, if it limited the scope.
    pub old: Option<Arc<PlanLimits>>,
    /// Limits of the new config.
    pub new: Arc<PlanLimits>,
}

/// Spend that the ledger knows.
#[derive(Clone, Debug)]
pub struct PastSpend {
    /// Scope that spent.
    pub scope: Scope,
    /// Class of the devices.
    pub class: DeviceClass,
    /// Period of the spend.
    pub period: Period,
    /// Reference cost.
    pub spent: DeviceNanos,
}

/// Money that was spent in a month.
#[derive(Clone, Debug)]
pub struct PastCost {
    /// Scope that spent.
    pub scope: Scope,
    /// Month of the spend.
    pub month: UtcMonth,
    /// Money.
    pub cost: ExactAmount,
}

impl LimitChange {
    /// Returns true if the new limits have a budget and the old ones have none. The scope has
    /// then not counted its money.
    pub fn begins_budget(&self) -> bool {
        let had_budget = self.old.as_ref().is_some_and(|old| old.budget_per_month.is_some());
        self.new.budget_per_month.is_some() && !had_budget
    }

    /// Returns true if the new limits cap devices of `class` and the old ones do not. The
    /// scope has then not counted its spend.
    pub fn begins_cap(&self, class: &DeviceClass) -> bool {
        is_capped(&self.new, class) && !self.old.as_ref().is_some_and(|old| is_capped(old, class))
    }
}

impl fmt::Debug for NewLimits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewLimits").field("revision", &self.revision).finish_non_exhaustive()
    }
}
