//! A refusal as a value: the limit, its scope, its size and the time of the next try. The
//! text and the status code for the client are made elsewhere, from these facts alone.

use std::time::Duration;

use tollgate_domain::{Currency, DeviceClass, UtcTime};

use crate::figures::Figures;
use crate::scope::Scope;

/// The limit that refused. Also the label of the refusals metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Limit {
    /// Requests per minute.
    Requests,
    /// Tokens per minute.
    Tokens,
    /// Device time per minute.
    DeviceTime,
    /// Host time for the forms of answers per minute.
    GrammarTime,
    /// Device time per calendar day.
    DeviceTimePerDay,
    /// Device time per calendar month.
    DeviceTimePerMonth,
    /// Money per calendar month.
    BudgetPerMonth,
    /// Requests running at once, where none may wait.
    Concurrent,
    /// Requests waiting at once.
    Queued,
    /// The largest single request.
    LargestJob,
    /// The gateway's own bound on open holds or scopes. No plan sets it.
    Capacity,
}

impl Limit {
    /// Returns the key of the limit in a plan, which is also its metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests_per_minute",
            Self::Tokens => "tokens_per_minute",
            Self::DeviceTime => "device_time_per_minute",
            Self::GrammarTime => "grammar_time_per_minute",
            Self::DeviceTimePerDay => "device_time_per_day",
            Self::DeviceTimePerMonth => "device_time_per_month",
            Self::BudgetPerMonth => "budget_per_month",
            Self::Concurrent => "concurrent",
            Self::Queued => "queued",
            Self::LargestJob => "largest_job",
            Self::Capacity => "capacity",
        }
    }

    /// Returns true if the amounts are device nanoseconds.
    pub fn is_device_time(self) -> bool {
        matches!(
            self,
            Self::DeviceTime | Self::DeviceTimePerDay | Self::DeviceTimePerMonth | Self::LargestJob
        )
    }

    /// Returns true for a calendar cap. Such a refusal is an exhausted quota.
    pub fn is_cap(self) -> bool {
        matches!(self, Self::DeviceTimePerDay | Self::DeviceTimePerMonth | Self::BudgetPerMonth)
    }
}

/// The refusal of a reservation. If several limits refuse, this is the one that binds
/// longest, and on a tie the narrowest. So `retry_after` holds for all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Limit that refused.
    pub limit: Limit,
    /// Scope that the limit belongs to.
    pub scope: Scope,
    /// Device class, for limits by device class.
    pub class: Option<DeviceClass>,
    /// Currency, for budgets.
    pub currency: Option<Currency>,
    /// Value of the limit, in its unit: requests, tokens, nanoseconds of the device or the
    /// host, or nano-units of the currency.
    pub value: u64,
    /// Largest amount that one request may have, in the same unit: for a rate the burst, or
    /// 1.5 bursts if `asked` is the most of a request; otherwise `value`.
    pub largest: u64,
    /// Amount that the request asked for, in the same unit: its expected cost, or the most
    /// that it can use within a minute if that alone is too large.
    pub asked: u64,
    /// Rest of the limit now, in the same unit.
    pub remaining: u64,
    /// Time after which the same request passes, if nothing else is taken. If another request
    /// must end first, too, a time before which it cannot pass. `None` if time alone does not
    /// help.
    pub retry_after: Option<Duration>,
    /// Start of the next period, if the limit is a cap.
    pub resets: Option<UtcTime>,
    /// True if a retry is useless: the request never fits, or not before the next period of
    /// the cap.
    pub permanent: bool,
    /// Figures of all limits. The refused request took nothing.
    pub figures: Figures,
}

impl Refusal {
    /// Returns true if a calendar cap refused that may have room again within its period: others
    /// hold the rest of it.
    pub fn is_held_cap(&self) -> bool {
        self.limit.is_cap() && !self.permanent
    }

    /// Returns the strength of the refusal: permanent first, then a calendar period, then
    /// the wait.
    pub(crate) fn weight(&self) -> (u8, Duration) {
        let strength = match (self.permanent, self.retry_after) {
            // Never: no wait helps.
            (true, None) => 2,
            (true, Some(_)) => 1,
            (false, _) => 0,
        };
        (strength, self.retry_after.unwrap_or_default())
    }
}
