//! A refusal as a value: which limit, whose, how large, and when to come back.
//! The words and the status code are made elsewhere, from these facts alone.

use std::time::Duration;

use tollgate_domain::{DeviceClass, UtcTime};

use crate::figures::Figures;
use crate::scope::Scope;

/// Which limit said no. Also the label of the refusal's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Limit {
    /// Requests a minute.
    Requests,
    /// Tokens a minute.
    Tokens,
    /// Device time a minute.
    DeviceTime,
    /// Device time a calendar day.
    DeviceTimePerDay,
    /// Device time a calendar month.
    DeviceTimePerMonth,
    /// Requests running at once, where none may wait.
    Concurrent,
    /// Requests waiting at once.
    Queued,
    /// The largest single request.
    LargestJob,
    /// The gateway's own bound on open holds or scopes: nobody's plan.
    Capacity,
}

impl Limit {
    /// The limit's key in a plan, which is its metric label too.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests_per_minute",
            Self::Tokens => "tokens_per_minute",
            Self::DeviceTime => "device_time_per_minute",
            Self::DeviceTimePerDay => "device_time_per_day",
            Self::DeviceTimePerMonth => "device_time_per_month",
            Self::Concurrent => "concurrent",
            Self::Queued => "queued",
            Self::LargestJob => "largest_job",
            Self::Capacity => "capacity",
        }
    }

    /// Whether its amounts are device nanoseconds.
    pub fn is_device_time(self) -> bool {
        matches!(
            self,
            Self::DeviceTime | Self::DeviceTimePerDay | Self::DeviceTimePerMonth | Self::LargestJob
        )
    }

    /// Whether it is a calendar cap, so that the refusal is an exhausted quota.
    pub fn is_cap(self) -> bool {
        matches!(self, Self::DeviceTimePerDay | Self::DeviceTimePerMonth)
    }
}

/// Why nothing was taken. Where several limits refuse, this is the one that
/// binds longest, so that `retry_after` is true of all of them; the narrowest
/// on a tie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Which limit.
    pub limit: Limit,
    /// Whose.
    pub scope: Scope,
    /// For limits by device class, which class.
    pub class: Option<DeviceClass>,
    /// The limit's value, in its unit: requests, tokens or device nanoseconds.
    pub value: u64,
    /// The most that could ever be taken at once, in the same unit: a rate's
    /// burst, else `value`.
    pub largest: u64,
    /// What this request asked for, in the same unit.
    pub asked: u64,
    /// What is left of the limit now, in the same unit.
    pub remaining: u64,
    /// The same request passes after this time if nothing else is taken, and
    /// not before; `None` where time alone does not help.
    pub retry_after: Option<Duration>,
    /// Where the limit is a cap, when its next period begins.
    pub resets: Option<UtcTime>,
    /// Whether trying again is of no use: it can never fit, or not before the
    /// cap's next period.
    pub permanent: bool,
    /// Where all limits stand; the refused request took nothing.
    pub figures: Figures,
}

impl Refusal {
    /// How strongly it binds: never, then until another calendar period, then
    /// by the wait.
    pub(crate) fn weight(&self) -> (u8, Duration) {
        let strength = match (self.permanent, self.retry_after) {
            (true, None) => 2,
            (true, Some(_)) => 1,
            (false, _) => 0,
        };
        (strength, self.retry_after.unwrap_or_default())
    }
}
