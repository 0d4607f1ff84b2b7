//! Whose limits: a key's, a tenant's, a pool's, ... and where each stands.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use tollgate_domain::{
    DeviceClass, KeyId, ModelName, MonotonicTime, PlanLimits, PoolName, Rate, TenantId, UtcDay,
    UtcMonth,
};

use crate::bucket::Bucket;
use crate::cap::Spend;

/// Who owns a set of limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// One credential.
    Key(KeyId),
    /// One tenant, over all its keys.
    Tenant(TenantId),
    /// Tenants that share limits.
    Pool(PoolName),
    /// One model, over all tenants.
    Model(ModelName),
    /// Everyone.
    Gateway,
}

impl Scope {
    /// What kind of owner: `key`, `tenant`, `pool`, `model` or `gateway`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Key(_) => "key",
            Self::Tenant(_) => "tenant",
            Self::Pool(_) => "pool",
            Self::Model(_) => "model",
            Self::Gateway => "gateway",
        }
    }

    /// The owner's name; empty for the gateway.
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

/// `tenant acme`.
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
    /// Who.
    pub scope: Scope,
    /// What; shared with config, so that a request copies nothing.
    pub limits: Arc<PlanLimits>,
}

/// A calendar period of a cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// A calendar day, UTC.
    Day(UtcDay),
    /// A calendar month, UTC.
    Month(UtcMonth),
}

/// Where a scope's limits stand.
#[derive(Debug)]
pub(crate) struct ScopeState {
    pub(crate) limits: Arc<PlanLimits>,
    pub(crate) requests: Option<Bucket>,
    pub(crate) tokens: Option<Bucket>,
    pub(crate) classes: BTreeMap<DeviceClass, ClassState>,
    /// Requests that hold a place to run.
    pub(crate) running: u32,
    /// Tickets of those that wait for one, in order of arrival.
    pub(crate) waiting: BTreeSet<u64>,
    /// Whether a limit on places was lifted while some waited, perhaps for it.
    lifted: bool,
}

/// Where the limits by class stand, for one class.
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

    /// Takes on the limits as they are now configured and brings every bucket
    /// of `class` up to `now` and the calendar to today.
    pub(crate) fn refresh(
        &mut self,
        limits: &Arc<PlanLimits>,
        class: &DeviceClass,
        now: MonotonicTime,
        (day, month): (UtcDay, UtcMonth),
    ) {
        if !Arc::ptr_eq(&self.limits, limits) {
            self.lifted |= self.limits.concurrent.is_some() && limits.concurrent.is_none();
            self.limits = Arc::clone(limits);
        }
        refresh(&mut self.requests, limits.requests, now);
        refresh(&mut self.tokens, limits.tokens, now);
        let state = self.class(class);
        refresh(&mut state.device_time, limits.device_time.limit(class), now);
        state.day.roll(day.0);
        state.month.roll(month.0);
    }

    pub(crate) fn class(&mut self, class: &DeviceClass) -> &mut ClassState {
        if !self.classes.contains_key(class) {
            self.classes.insert(class.clone(), ClassState::default());
        }
        self.classes.get_mut(class).expect("inserted above if it was absent")
    }

    /// Whether a request could run now.
    pub(crate) fn has_place(&self) -> bool {
        self.limits.concurrent.is_none_or(|limit| self.running < limit)
    }

    /// Whether someone may be waiting for a place here; what was lifted counts
    /// once, since whoever is passed over then waits for another scope.
    pub(crate) fn may_have_blocked(&mut self) -> bool {
        std::mem::take(&mut self.lifted) || self.limits.concurrent.is_some()
    }

    /// Whether forgetting it would change no decision: nobody runs or waits,
    /// every bucket is full and no spend of the current periods is known.
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
