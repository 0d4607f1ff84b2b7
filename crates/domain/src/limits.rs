//! Limits as a plan states them. What they mean (rate, cap, hold) is
//! admission's business; how they are written is config's.

use std::collections::BTreeMap;

use crate::{DeviceClass, DeviceNanos};

/// A rate a minute: a token bucket that refills `per_minute / 60` a second
/// and never holds more than `burst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units granted a minute, in the unit of the limit.
    pub per_minute: u64,
    /// The bucket's capacity, in the same unit; `per_minute` unless given.
    pub burst: u64,
}

impl Rate {
    /// A rate whose burst is one minute's worth.
    pub const fn per_minute(per_minute: u64) -> Self {
        Self { per_minute, burst: per_minute }
    }
}

/// A limit set by device class. Classes are never summed: time on one device
/// says nothing about time on another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByClass<T> {
    /// For every class that is not named.
    pub default: Option<T>,
    /// For the classes that are.
    pub classes: BTreeMap<DeviceClass, T>,
}

impl<T> Default for ByClass<T> {
    fn default() -> Self {
        Self { default: None, classes: BTreeMap::new() }
    }
}

impl<T: Copy> ByClass<T> {
    /// The same limit for every class.
    pub fn all(value: T) -> Self {
        Self { default: Some(value), classes: BTreeMap::new() }
    }

    /// The limit for `class`, if there is one.
    pub fn limit(&self, class: &DeviceClass) -> Option<T> {
        self.classes.get(class).copied().or(self.default)
    }
}

/// A plan's limits, each absent where nothing limits. Device time is
/// reference cost; see [`crate::cost`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanLimits {
    /// Requests a minute.
    pub requests: Option<Rate>,
    /// Prompt and completion tokens a minute.
    pub tokens: Option<Rate>,
    /// Device nanoseconds a minute.
    pub device_time: ByClass<Rate>,
    /// Device time a calendar day (UTC); a cap, never exceeded.
    pub device_time_per_day: ByClass<DeviceNanos>,
    /// Device time a calendar month (UTC); a cap, never exceeded.
    pub device_time_per_month: ByClass<DeviceNanos>,
    /// Requests running at once.
    pub concurrent: Option<u32>,
    /// Requests waiting for a place at once.
    pub queued: Option<u32>,
    /// The largest single request, by its worst case.
    pub largest_job: ByClass<DeviceNanos>,
}
