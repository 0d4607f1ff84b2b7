//! Scopes of limits (key, tenant, pool, model, gateway) and the state of the limits in each
//! scope.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use tollgate_cluster::parts::PartMode;
use tollgate_domain::{
    DeviceClass, DeviceNanos, ExactAmount, KeyId, ModelName, MonotonicTime, PlanLimits, PoolName,
    Rate, TenantId, Tier, UtcDay, UtcMonth,
};

use crate::bucket::{Bucket, Demand};
use crate::cap::Spend;
use crate::core::is_capped;
use crate::place_lease::{PlaceLease, PlaceUse, equal_places};
use crate::places::Places;
use crate::refusal::Limit;
use crate::terms::Estimate;

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
    /// The lines of one tenant's batches.
    TenantBatches(TenantId),
    /// The lines of the batches of all tenants of a pool.
    PoolBatches(PoolName),
}

impl Scope {
    /// Returns true for the lines of batches.
    pub fn is_of_batches(&self) -> bool {
        matches!(self, Self::TenantBatches(_) | Self::PoolBatches(_))
    }

    /// Returns the kind of scope: `key`, `tenant`, `pool`, `model`, `gateway`,
    /// `tenant_batches` or `pool_batches`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Key(_) => "key",
            Self::Tenant(_) => "tenant",
            Self::Pool(_) => "pool",
            Self::Model(_) => "model",
            Self::Gateway => "gateway",
            Self::TenantBatches(_) => "tenant_batches",
            Self::PoolBatches(_) => "pool_batches",
        }
    }

    /// Returns true if requests of several tenants may count here.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Self::Pool(_) | Self::Model(_) | Self::Gateway | Self::PoolBatches(_))
    }

    /// Returns the scope of this [kind](Self::kind) and [name](Self::name); `None` if there can
    /// be none.
    pub fn of(kind: &str, name: &str) -> Option<Self> {
        Some(match kind {
            "key" => Self::Key(KeyId::new(name).ok()?),
            "tenant" => Self::Tenant(TenantId::new(name).ok()?),
            "pool" => Self::Pool(PoolName::new(name).ok()?),
            "model" => Self::Model(ModelName::new(name).ok()?),
            "gateway" => Self::Gateway,
            "tenant_batches" => Self::TenantBatches(TenantId::new(name).ok()?),
            "pool_batches" => Self::PoolBatches(PoolName::new(name).ok()?),
            _ => return None,
        })
    }

    /// Returns the name of the key, tenant, pool or model; empty for the gateway.
    pub fn name(&self) -> &str {
        match self {
            Self::Key(id) => id.as_str(),
            Self::Tenant(id) | Self::TenantBatches(id) => id.as_str(),
            Self::Pool(name) | Self::PoolBatches(name) => name.as_str(),
            Self::Model(name) => name.as_str(),
            Self::Gateway => "",
        }
    }
}

/// Formats the scope like `tenant acme`.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TenantBatches(_) => "the batches of tenant",
            Self::PoolBatches(_) => "the batches of pool",
            other => other.kind(),
        })?;
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
    /// Number of the config that set the limits. A scope keeps the limits of the largest
    /// number, so that a request from before a reload does not bring old limits back.
    pub revision: u64,
}

impl ScopeLimits {
    /// Returns true if a cap on devices of `class` or a budget applies.
    pub fn has_cap(&self, class: &DeviceClass) -> bool {
        is_capped(&self.limits, class) || self.limits.budget_per_month.is_some()
    }

    /// Returns true if the number of requests that run and wait has a limit.
    pub(crate) fn bounds_places(&self) -> bool {
        self.limits.concurrent.is_some() && self.limits.queued.is_some()
    }
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
    /// Number of the config that set `limits`.
    revision: u64,
    /// The terms on which gateways share rates and places.
    rates: ShareTerms,
    /// True if this gateway has only a slice of each cap.
    has_slices: bool,
    pub(crate) requests: Option<Bucket>,
    pub(crate) tokens: Option<Bucket>,
    pub(crate) grammar_time: Option<Bucket>,
    pub(crate) classes: BTreeMap<DeviceClass, ClassState>,
    /// Money of the month.
    pub(crate) budget: Spend<ExactAmount>,
    /// Requests that run, wait and arrive.
    pub(crate) places: Places,
    /// The parts of the places, if they move between gateways.
    leases: Option<PlaceLeases>,
    /// True if the limit on concurrency was removed, perhaps while requests waited for it.
    lifted: bool,
}

/// The parts of the places of a scope.
#[derive(Debug)]
struct PlaceLeases {
    concurrent: PlaceLease,
    queued: PlaceLease,
}

/// The terms on which gateways share rates and places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShareTerms {
    /// The gateways.
    pub(crate) gateways: NonZeroU32,
    /// The way in which rates may be used, and the time since which this is so, if their parts
    /// move between gateways.
    pub(crate) mode: Option<(PartMode, MonotonicTime)>,
}

impl Default for ShareTerms {
    fn default() -> Self {
        Self { gateways: NonZeroU32::MIN, mode: None }
    }
}

impl ShareTerms {
    /// Makes the bucket of a rate.
    pub(crate) fn bucket(self, rate: Rate, now: MonotonicTime) -> Bucket {
        let Some((mode, since)) = self.mode else {
            let mut bucket = Bucket::full(rate, now);
            bucket.share_among(self.gateways);
            return bucket;
        };
        // Another gateway may have used what it had before, so it was empty then.
        let mut bucket = Bucket::full(rate, since);
        bucket.begin_lease(mode);
        bucket.set_part(0);
        bucket.share_among(self.gateways);
        bucket.empty();
        bucket.refill(now);
        bucket
    }
}

/// The state of the limits by device class, for one class.
#[derive(Debug, Default)]
pub(crate) struct ClassState {
    pub(crate) device_time: Option<Bucket>,
    pub(crate) day: Spend<DeviceNanos>,
    pub(crate) month: Spend<DeviceNanos>,
}

impl PlaceLeases {
    fn new(mode: PartMode, gateways: NonZeroU32) -> Self {
        let mut lease = PlaceLease::new(mode);
        lease.enter(mode, gateways);
        Self { concurrent: lease.clone(), queued: lease }
    }
}

impl ScopeState {
    pub(crate) fn new(rates: ShareTerms, has_slices: bool) -> Self {
        Self {
            limits: Arc::default(),
            revision: 0,
            rates,
            has_slices,
            requests: None,
            tokens: None,
            grammar_time: None,
            classes: BTreeMap::new(),
            budget: Spend::default(),
            places: Places::default(),
            leases: rates.mode.map(|(mode, _)| PlaceLeases::new(mode, rates.gateways)),
            lifted: false,
        }
    }

    /// Applies the limits as configured now, refills the buckets of `class` up to `now`,
    /// and advances the calendar.
    pub(crate) fn refresh(
        &mut self,
        limited: &ScopeLimits,
        class: &DeviceClass,
        now: MonotonicTime,
        (day, month): (UtcDay, UtcMonth),
    ) {
        self.refresh_requests(limited, now);
        let at = (now, self.rates);
        refresh(&mut self.tokens, self.limits.tokens, at);
        refresh(&mut self.grammar_time, self.limits.grammar_time, at);
        let device_time = self.limits.device_time.limit(class);
        self.budget.roll(month.0);
        let state = self.class(class);
        refresh(&mut state.device_time, device_time, at);
        // Rolled here, so that the check sees the new period.
        state.day.roll(day.0);
        state.month.roll(month.0);
        self.share_caps(class);
    }

    /// Makes the caps those of which this gateway has a slice, if several gateways share them.
    fn share_caps(&mut self, class: &DeviceClass) {
        if !self.has_slices {
            return;
        }
        if self.limits.budget_per_month.is_some() {
            self.budget.share();
        }
        let limits = Arc::clone(&self.limits);
        let Some(state) = self.classes.get_mut(class) else { return };
        if limits.device_time_per_day.limit(class).is_some() {
            state.day.share();
        }
        if limits.device_time_per_month.limit(class).is_some() {
            state.month.share();
        }
    }

    /// Applies the limits as configured now, and refills the bucket of requests alone.
    pub(crate) fn refresh_requests(&mut self, limited: &ScopeLimits, now: MonotonicTime) {
        self.adopt(&limited.limits, limited.revision);
        refresh(&mut self.requests, self.limits.requests, (now, self.rates));
    }

    /// Applies the limits of a new config to every bucket, up to `now` at the old rates.
    pub(crate) fn refresh_all(
        &mut self,
        limits: &Arc<PlanLimits>,
        revision: u64,
        now: MonotonicTime,
    ) {
        self.adopt(limits, revision);
        let at = (now, self.rates);
        refresh(&mut self.requests, self.limits.requests, at);
        refresh(&mut self.tokens, self.limits.tokens, at);
        refresh(&mut self.grammar_time, self.limits.grammar_time, at);
        for (class, state) in &mut self.classes {
            refresh(&mut state.device_time, self.limits.device_time.limit(class), at);
            let (day, month) =
                (&self.limits.device_time_per_day, &self.limits.device_time_per_month);
            day.limit(class).into_iter().for_each(|cap| state.day.adopt(cap));
            month.limit(class).into_iter().for_each(|cap| state.month.adopt(cap));
        }
        if let Some(budget) = self.limits.budget_per_month {
            self.budget.adopt(ExactAmount::of_nanos(budget.nanos));
        }
    }

    /// Changes the terms on which gateways share rates and places. The buckets are refilled up to
    /// `now` as they were shared until then.
    pub(crate) fn share(&mut self, rates: ShareTerms, now: MonotonicTime) {
        let entered = rates.mode.filter(|_| self.rates.mode != rates.mode);
        self.rates = rates;
        if let (Some(leases), Some((mode, _))) = (&mut self.leases, rates.mode) {
            leases.concurrent.enter(mode, rates.gateways);
            leases.queued.enter(mode, rates.gateways);
        }
        for (_, _, bucket) in self.buckets() {
            bucket.refill(now);
            bucket.share_among(rates.gateways);
            if let Some((mode, _)) = entered {
                bucket.enter(mode);
            }
        }
    }

    /// Returns the buckets, each with its limit and device class.
    pub(crate) fn buckets(
        &mut self,
    ) -> impl Iterator<Item = (Limit, Option<&DeviceClass>, &mut Bucket)> {
        let of_class = self.classes.iter_mut().filter_map(|(class, state)| {
            Some((Limit::DeviceTime, Some(class), state.device_time.as_mut()?))
        });
        let buckets = [
            (Limit::Requests, self.requests.as_mut()),
            (Limit::Tokens, self.tokens.as_mut()),
            (Limit::GrammarTime, self.grammar_time.as_mut()),
        ];
        let buckets =
            buckets.into_iter().filter_map(|(limit, bucket)| Some((limit, None, bucket?)));
        buckets.chain(of_class)
    }

    /// Returns the bucket of a limit.
    pub(crate) fn bucket(
        &mut self,
        limit: Limit,
        class: Option<&DeviceClass>,
    ) -> Option<&mut Bucket> {
        match (limit, class) {
            (Limit::Requests, _) => self.requests.as_mut(),
            (Limit::Tokens, _) => self.tokens.as_mut(),
            (Limit::GrammarTime, _) => self.grammar_time.as_mut(),
            (Limit::DeviceTime, Some(class)) => self.classes.get_mut(class)?.device_time.as_mut(),
            _ => None,
        }
    }

    /// Replaces the limits, unless those in force are of a later config.
    fn adopt(&mut self, limits: &Arc<PlanLimits>, revision: u64) {
        // The pointer changes only when config is loaded again, so the comparison is cheap.
        if revision >= self.revision && !Arc::ptr_eq(&self.limits, limits) {
            self.lifted |= self.limits.concurrent.is_some() && limits.concurrent.is_none();
            self.limits = Arc::clone(limits);
            self.revision = revision;
        }
    }

    #[expect(clippy::expect_used, reason = "the entry was inserted if it was absent")]
    pub(crate) fn class(&mut self, class: &DeviceClass) -> &mut ClassState {
        // Looked up first, so that only the first request of a class pays for a clone.
        if !self.classes.contains_key(class) {
            self.classes.insert(class.clone(), ClassState::default());
        }
        self.classes.get_mut(class).expect("inserted above if it was absent")
    }

    /// Returns the buckets that a request of `class` and `tier` takes its cost from, each
    /// with the demand.
    pub(crate) fn cost_buckets(
        &mut self,
        tier: Tier,
        class: &DeviceClass,
        estimate: &Estimate,
    ) -> impl Iterator<Item = (&mut Bucket, Demand)> {
        let time = self.classes.get_mut(class).and_then(|of_class| of_class.device_time.as_mut());
        let demands = (estimate.demand_of_tokens(), estimate.demand_of_time());
        let tokens = self.tokens.as_mut().map(|bucket| (bucket, demands.0));
        let both = tokens.into_iter().chain(time.map(|bucket| (bucket, demands.1)));
        // The host's time is not left over by interactive work, so batch work takes it too.
        let grammar = self.grammar_time.as_mut();
        let grammar = grammar.map(|bucket| (bucket, estimate.demand_of_grammar_time()));
        both.filter(move |_| tier == Tier::Interactive).chain(grammar)
    }

    /// Returns true if one more request may run now.
    pub(crate) fn has_place(&self) -> bool {
        self.concurrent().is_none_or(|limit| self.places.running() < limit)
    }

    /// Returns this gateway's part of the requests that may run at once.
    pub(crate) fn concurrent(&self) -> Option<u32> {
        let lease = self.leases.as_ref().map(|leases| &leases.concurrent);
        self.limits.concurrent.map(|limit| self.part(limit, lease))
    }

    /// Returns this gateway's part of the requests that may wait.
    pub(crate) fn queued(&self) -> Option<u32> {
        let lease = self.leases.as_ref().map(|leases| &leases.queued);
        self.limits.queued.map(|limit| self.part(limit, lease))
    }

    fn part(&self, limit: u32, lease: Option<&PlaceLease>) -> u32 {
        match lease {
            Some(lease) => lease.places(limit, self.rates.gateways),
            None => equal_places(limit, self.rates.gateways),
        }
    }

    /// Returns the value of a limit on places.
    pub(crate) fn place_limit(&self, limit: Limit) -> Option<u32> {
        match limit {
            Limit::Concurrent => self.limits.concurrent,
            Limit::Queued => self.limits.queued,
            _ => None,
        }
    }

    /// Returns the parts of a limit on places, if they move between gateways.
    pub(crate) fn place_lease(&mut self, limit: Limit) -> Option<&mut PlaceLease> {
        let leases = self.leases.as_mut()?;
        match limit {
            Limit::Concurrent => Some(&mut leases.concurrent),
            Limit::Queued => Some(&mut leases.queued),
            _ => None,
        }
    }

    /// Returns the use of a limit on places. A request that arrives may need a place to run; if
    /// all are taken, one to wait.
    pub(crate) fn place_use(&self, limit: Limit) -> Option<PlaceUse> {
        let (places, waiting) = (&self.places, self.places.waiting() as u64);
        let may_run = places.taken() - waiting;
        let most = self.place_limit(limit)?;
        Some(match limit {
            Limit::Concurrent => {
                let held = places.running().into();
                PlaceUse { limit: most, taken: may_run.min(most.into()), held, waiting }
            }
            _ => {
                let concurrent = self.concurrent().map_or(u64::MAX, u64::from);
                let beyond = may_run.saturating_sub(concurrent);
                let taken = (waiting + beyond).min(most.into());
                PlaceUse { limit: most, taken, held: waiting, waiting: 0 }
            }
        })
    }

    /// Returns the places of a limit that other gateways have, as far as is known.
    pub(crate) fn places_of_others(&self, limit: Limit) -> u32 {
        let Some(most) = self.place_limit(limit) else { return 0 };
        let Some(PlaceLeases { concurrent, queued }) = &self.leases else { return 0 };
        let lease = if limit == Limit::Concurrent { concurrent } else { queued };
        most - lease.known_places(most, self.rates.gateways)
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
        let terms = self.rates;
        let full = |bucket: &mut Option<Bucket>| {
            bucket.as_mut().is_none_or(|bucket| {
                bucket.refill(now);
                bucket.can_be_forgotten(|| terms.bucket(bucket.rate(), now))
            })
        };
        let are_over = |leases: &PlaceLeases| {
            leases.concurrent.can_be_forgotten() && leases.queued.can_be_forgotten()
        };
        self.places.taken() == 0
            && self.leases.as_ref().is_none_or(are_over)
            && self.budget.is_over(month.0)
            && full(&mut self.requests)
            && full(&mut self.tokens)
            && full(&mut self.grammar_time)
            && self.classes.values_mut().all(|class| {
                full(&mut class.device_time)
                    && class.day.is_over(day.0)
                    && class.month.is_over(month.0)
            })
    }
}

fn refresh(
    bucket: &mut Option<Bucket>,
    rate: Option<Rate>,
    (now, terms): (MonotonicTime, ShareTerms),
) {
    match (bucket.as_mut(), rate) {
        // Without a limit the bucket is dropped; a later limit starts with a full one.
        (_, None) => *bucket = None,
        (None, Some(rate)) => *bucket = Some(terms.bucket(rate, now)),
        (Some(bucket), Some(rate)) => {
            bucket.refill(now);
            if bucket.rate() != rate {
                bucket.adopt(rate);
            }
        }
    }
}
