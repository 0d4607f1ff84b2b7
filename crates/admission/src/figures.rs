//! Figures for headers and metrics: for each kind of limit the tightest one over all scopes
//! of a request.

use std::time::Duration;

use tollgate_domain::{DeviceNanos, Rate};

use crate::bucket::Bucket;
use crate::terms::Estimate;

/// The rest of each kind of limit after a request. A `remaining` of zero means that the
/// next request of the same size would be refused now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Requests per minute.
    pub requests: Option<RateFigures>,
    /// Tokens per minute.
    pub tokens: Option<RateFigures>,
    /// Device nanoseconds per minute, for the request's class.
    pub device_time: Option<RateFigures>,
    /// Host nanoseconds per minute, if the answer of the request has a form.
    pub grammar_time: Option<RateFigures>,
    /// Device time of this calendar day, for the request's class.
    pub day: Option<CapFigures>,
    /// Device time of this calendar month, for the request's class.
    pub month: Option<CapFigures>,
}

/// A rate and the level of its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateFigures {
    /// Configured rate, in the unit of the limit.
    pub rate: Rate,
    /// Whole units that can be taken now.
    pub remaining: u64,
    /// Time until the bucket is full, if nothing more is taken.
    pub reset: Duration,
}

/// A cap and the rest of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapFigures {
    /// Configured cap.
    pub cap: DeviceNanos,
    /// Amount neither spent nor held.
    pub remaining: DeviceNanos,
    /// Time until the next calendar period.
    pub reset: Duration,
}

impl Figures {
    /// Leaves out the limits that do not concern a request with this estimate.
    pub(crate) fn of(mut self, estimate: &Estimate) -> Self {
        self.grammar_time = self.grammar_time.filter(|_| !estimate.grammar_time.is_zero());
        self
    }
}

impl RateFigures {
    pub(crate) fn of(bucket: &Bucket) -> Self {
        Self { rate: bucket.rate(), remaining: bucket.remaining(), reset: bucket.reset() }
    }
}

/// Keeps the tighter of two figures. On a tie the first one stays, which comes from the
/// narrower scope.
pub(crate) fn tighten<F: Copy, K: Ord>(
    kept: &mut Option<F>,
    found: Option<F>,
    left: impl Fn(&F) -> K,
) {
    if let Some(found) = found
        // Strictly less, so that a tie keeps the first one.
        && kept.as_ref().is_none_or(|kept| left(&found) < left(kept))
    {
        *kept = Some(found);
    }
}
