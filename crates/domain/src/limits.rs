//! Limits of a plan. Admission defines the meaning of rates, caps and holds; config defines
//! how they are written.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{Budget, DeviceClass, DeviceNanos};

/// A rate per minute: a token bucket that refills `per_minute / 60` units per second and
/// holds at most `burst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units granted per minute, in the unit of the limit.
    pub per_minute: u64,
    /// Capacity of the bucket in the same unit. By default equal to `per_minute`.
    pub burst: u64,
}

impl Rate {
    /// Creates a rate with a burst of one minute's units.
    pub const fn per_minute(per_minute: u64) -> Self {
        Self { per_minute, burst: per_minute }
    }
}

/// A limit by device class. Classes are never summed, because times on different devices
/// are not comparable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByClass<T> {
    /// Limit for every class that is not in `classes`.
    pub default: Option<T>,
    /// Limits for single classes.
    pub classes: BTreeMap<DeviceClass, T>,
}

impl<T> Default for ByClass<T> {
    fn default() -> Self {
        Self { default: None, classes: BTreeMap::new() }
    }
}

impl<T: Copy> ByClass<T> {
    /// Sets the same limit for every class.
    pub fn all(value: T) -> Self {
        Self { default: Some(value), classes: BTreeMap::new() }
    }

    /// Returns the limit for `class`, if there is one.
    pub fn limit(&self, class: &DeviceClass) -> Option<T> {
        // A named class replaces the default; the two are never combined.
        self.classes.get(class).copied().or(self.default)
    }
}

/// The limits of a plan. An absent limit does not restrict. Device time is reference cost;
/// see [`crate::cost`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanLimits {
    /// Requests per minute.
    pub requests: Option<Rate>,
    /// Prompt and completion tokens per minute.
    pub tokens: Option<Rate>,
    /// Device nanoseconds per minute.
    pub device_time: ByClass<Rate>,
    /// Nanoseconds of the host per minute for the forms of answers.
    pub grammar_time: Option<Rate>,
    /// Device time per calendar day (UTC). A cap: never exceeded.
    pub device_time_per_day: ByClass<DeviceNanos>,
    /// Device time per calendar month (UTC). A cap: never exceeded.
    pub device_time_per_month: ByClass<DeviceNanos>,
    /// Cost at the tenant's prices per calendar month (UTC). A cap.
    pub budget_per_month: Option<Budget>,
    /// Requests running at once.
    pub concurrent: Option<u32>,
    /// Requests waiting at once.
    pub queued: Option<u32>,
    /// Largest worst-case cost of a single request.
    pub largest_job: ByClass<DeviceNanos>,
}

/// Host time that a request takes in advance if its answer has a form. Most forms are
/// compiled and enforced in less.
pub const HELD_GRAMMAR_TIME: Duration = Duration::from_millis(20);

/// The limit on grammar time of a plan that sets none: two seconds a minute.
pub const DEFAULT_GRAMMAR_TIME: Rate = Rate::per_minute(2_000_000_000);
