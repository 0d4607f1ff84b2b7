//! Scopes of limits (key, tenant, pool, model, gateway) and the state of the limits in each
//! scope.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use tollgate_domain::{
    DeviceClass, KeyId, ModelName, MonotonicTime, PlanLimits, PoolName, Rate, TenantId, UtcDay,
    UtcMonth,
};

use crate::bucket::Bucket;
use crate::cap::Spend;

/// The owner of a set of limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// One key.
    Key(KeyId),
    /// One tenant, over all its keys.
    Tenant(TenantId),
    /// All tenants that share the pool's limits.
    Pool(PoolName),
    /// One model, over all tenants.
    Model(ModelName),
    /// The gateway, over all requests.
    Gateway,
}

impl Scope {
    /// Returns the kind of scope: `key`, `tenant`, `pool`, `model` or `gateway`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Key(_) => "key",
            Self::Tenant(_) => "tenant",
            Self::Pool(_) => "pool",
            Self::Model(_) => "model",
            Self::Gateway => "gateway",
        }
    }

    /// Returns the name of the key, tenant, pool or model; empty for the gateway.
    pub fn name(&self) -> &str {
        match self {
            Self::Key(id) => id.as_str(),
            Self::Tenant(id) => id.as_str(),
            Self::Pool(name) => name.as_str(),
            Self::Model(name) => name.as_str(),
            Self::Gateway => "",
        }
    }
}

/// Formats the scope like `tenant acme`.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        if !self.name().is_empty() {
            write!(f, " {}", self.name())?;
        }
        Ok(())
    }
}

/// A scope and the limits that it sets.
#[derive(Clone, Debug)]
pub struct ScopeLimits {
    /// Scope of the limits.
    pub scope: Scope,
    /// Limits, shared with config so that a request copies nothing.
    pub limits: Arc<PlanLimits>,
}

/// A calendar period of a cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// A calendar day in UTC.
    Day(UtcDay),
    /// A calendar month in UTC.
    Month(UtcMonth),
}

/// The state of a scope's limits.
#[derive(Debug)]
pub(crate) struct ScopeState {
    pub(crate) limits: Arc<PlanLimits>,
    pub(crate) requests: Option<Bucket>,
    pub(crate) tokens: Option<Bucket>,
    pub(crate) classes: BTreeMap<DeviceClass, ClassState>,
    /// Number of requests that may run.
    pub(crate) running: u32,
    /// Tickets of the waiting requests, in order of arrival.
    pub(crate) waiting: BTreeSet<u64>,
    /// True if the limit on concurrency was removed, perhaps while requests waited for it.
    lifted: bool,
}

/// The state of the limits by device class, for one class.
#[derive(Debug, Default)]
pub(crate) struct ClassState {
    pub(crate) device_time: Option<Bucket>,
    pub(crate) day: Spend,
    pub(crate) month: Spend,
}

impl ScopeState {
    pub(crate) fn new() -> Self {
        Self {
            limits: Arc::default(),
            requests: None,
            tokens: None,
            classes: BTreeMap::new(),
            running: 0,
            waiting: BTreeSet::new(),
            lifted: false,
        }
    }

    /// Applies the limits as configured now, refills the buckets of `class` up to `now`,
    /// and advances the calendar.
    pub(crate) fn refresh(
        &mut self,
        limits: &Arc<PlanLimits>,
        class: &DeviceClass,
        now: MonotonicTime,
        (day, month): (UtcDay, UtcMonth),
    ) {
        // The pointer changes only when config is loaded again, so the comparison is cheap.
        if !Arc::ptr_eq(&self.limits, limits) {
            self.lifted |= self.limits.concurrent.is_some() && limits.concurrent.is_none();
            self.limits = Arc::clone(limits);
        }
        refresh(&mut self.requests, limits.requests, now);
        refresh(&mut self.tokens, limits.tokens, now);
        let state = self.class(class);
        refresh(&mut state.device_time, limits.device_time.limit(class), now);
        // Rolled here, so that the check sees the new period.
        state.day.roll(day.0);
        state.month.roll(month.0);
    }

    pub(crate) fn class(&mut self, class: &DeviceClass) -> &mut ClassState {
        if !self.classes.contains_key(class) {
            self.classes.insert(class.clone(), ClassState::default());
        }
        self.classes.get_mut(class).expect("inserted above if it was absent")
    }

    /// Returns true if one more request may run now.
    pub(crate) fn has_place(&self) -> bool {
        self.limits.concurrent.is_none_or(|limit| self.running < limit)
    }

    /// Returns true if requests may be waiting for this scope. A removed limit counts once:
    /// a request that is skipped then waits for another scope.
    pub(crate) fn may_have_blocked(&mut self) -> bool {
        // One pass after the limit was removed is enough.
        std::mem::take(&mut self.lifted) || self.limits.concurrent.is_some()
    }

    /// Returns true if forgetting the scope changes no decision: no request runs or waits,
    /// all buckets are full, and the current periods have no spend.
    pub(crate) fn is_idle(&mut self, now: MonotonicTime, (day, month): (UtcDay, UtcMonth)) -> bool {
        let full = |bucket: &mut Option<Bucket>| {
            bucket.as_mut().is_none_or(|bucket| {
                bucket.refill(now);
                bucket.is_full()
            })
        };
        self.running == 0
            && self.waiting.is_empty()
            && full(&mut self.requests)
            && full(&mut self.tokens)
            && self.classes.values_mut().all(|class| {
                full(&mut class.device_time)
                    && class.day.is_over(day.0)
                    && class.month.is_over(month.0)
            })
    }
}

fn refresh(bucket: &mut Option<Bucket>, rate: Option<Rate>, now: MonotonicTime) {
    match (bucket.as_mut(), rate) {
        // Without a limit the bucket is dropped; a later limit starts with a full one.
        (_, None) => *bucket = None,
        (None, Some(rate)) => *bucket = Some(Bucket::full(rate, now)),
        (Some(bucket), Some(rate)) => {
            bucket.refill(now);
            if bucket.rate() != rate {
                bucket.adopt(rate);
            }
        }
    }
}
