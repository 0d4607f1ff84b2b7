//! What headers and metrics tell a caller about its limits: of several scopes
//! that set the same limit, the tightest, by what is left.

use std::time::Duration;

use tollgate_domain::{DeviceNanos, Rate, UtcTime};

use crate::bucket::Bucket;

/// What is left after this request, for each kind of limit that applies.
/// `remaining` of zero means that the next of the same size would be refused
/// now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Requests a minute.
    pub requests: Option<RateFigures>,
    /// Tokens a minute.
    pub tokens: Option<RateFigures>,
    /// Device nanoseconds a minute, of the request's class.
    pub device_time: Option<RateFigures>,
    /// Device time this calendar day, of the request's class.
    pub day: Option<CapFigures>,
    /// Device time this calendar month, of the request's class.
    pub month: Option<CapFigures>,
}

/// A rate and where its bucket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateFigures {
    /// The rate as configured, in the limit's unit.
    pub rate: Rate,
    /// Whole units that could be taken now.
    pub remaining: u64,
    /// Time until the bucket is full, if nothing more is taken.
    pub reset: Duration,
}

/// A cap and what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapFigures {
    /// The cap.
    pub cap: DeviceNanos,
    /// Neither spent nor held.
    pub remaining: DeviceNanos,
    /// When the next calendar period begins.
    pub resets: UtcTime,
}

impl RateFigures {
    pub(crate) fn of(bucket: &Bucket) -> Self {
        Self { rate: bucket.rate(), remaining: bucket.remaining(), reset: bucket.reset() }
    }
}

/// Keeps the tighter of two; the first, from the narrower scope, on a tie.
pub(crate) fn tighten<F: Copy, K: Ord>(
    kept: &mut Option<F>,
    found: Option<F>,
    left: impl Fn(&F) -> K,
) {
    if let Some(found) = found
        && kept.as_ref().is_none_or(|kept| left(&found) < left(kept))
    {
        *kept = Some(found);
    }
}
