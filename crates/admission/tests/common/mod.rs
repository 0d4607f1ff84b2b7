//! Helpers of the admission tests: short forms for times and limits.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::sync::Arc;
use std::time::Duration;

use tollgate_admission::{
    Admission, AdmissionOptions, Estimate, Hold, MoneyEstimate, Refusal, Requester, Reserve,
    ReserveError, Scope, ScopeLimits, Spent,
};
use tollgate_domain::{
    ByClass, DeviceClass, DeviceNanos, KeyId, MonotonicTime, PlanLimits, PoolName, RequestId,
    TenantId, Tier, UtcTime,
};

pub const SECOND: u64 = 1_000_000_000;
pub const HOUR: u64 = 3_600 * SECOND;
pub const DAY: u64 = 24 * HOUR;
/// The instant 2026-11-20T00:00:00Z.
pub const TODAY: UtcTime = UtcTime(1_795_132_800 * SECOND);

pub fn at(nanos: u64) -> MonotonicTime {
    MonotonicTime(nanos)
}

/// Returns the wall clock time `nanos` after midnight.
pub fn utc(nanos: u64) -> UtcTime {
    UtcTime(TODAY.0 + nanos)
}

pub fn id(number: u64) -> RequestId {
    RequestId::from_random(u128::from(number))
}

pub fn tenant_id(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

pub fn tenant(name: &str) -> Scope {
    Scope::Tenant(tenant_id(name))
}

pub fn pool(name: &str) -> Scope {
    Scope::Pool(PoolName::new(name).expect("a name"))
}

pub fn key(name: &str) -> Scope {
    Scope::Key(KeyId::new(name).expect("a name"))
}

pub fn requester(name: &str) -> Requester {
    Requester { tenant: tenant_id(name), pool: None }
}

pub fn scoped(scope: Scope, limits: PlanLimits) -> ScopeLimits {
    ScopeLimits { scope, limits: Arc::new(limits), revision: 0 }
}

pub fn day_cap(nanos: u64) -> PlanLimits {
    PlanLimits { device_time_per_day: ByClass::all(DeviceNanos(nanos)), ..PlanLimits::default() }
}

/// A prediction without risk for rates: the expected cost is the most of a minute.
pub fn estimate(tokens: u64, expected: u64, worst: u64) -> Estimate {
    Estimate {
        tokens,
        most_tokens: tokens,
        expected: DeviceNanos(expected),
        most: DeviceNanos(expected),
        worst: DeviceNanos(worst),
        least: DeviceNanos(1),
        grammar_time: Duration::ZERO,
        money: MoneyEstimate::default(),
    }
}

pub fn spent(tokens: u64, reference: u64) -> Spent {
    Spent { tokens, reference: DeviceNanos(reference), ..Spent::default() }
}

/// A request that waits at most 30 s and expires after 630 s.
pub fn request(number: u64, now: u64, scopes: &[ScopeLimits], estimate: Estimate) -> Reserve {
    // The requests of a test without tenants count for the same one.
    let of = |limited: &ScopeLimits| match &limited.scope {
        Scope::Tenant(tenant) => Some(tenant.clone()),
        _ => None,
    };
    let tenant = scopes.iter().find_map(of).unwrap_or_else(|| tenant_id("acme"));
    Reserve {
        id: id(number),
        requester: Requester { tenant, pool: None },
        tier: Tier::Interactive,
        is_line: false,
        scopes: scopes.to_vec(),
        counted: 0,
        class: DeviceClass::cpu(),
        estimate,
        queue_deadline: at(now + 30 * SECOND),
        expires: at(now + 630 * SECOND),
    }
}

/// A gateway that numbers its requests.
pub struct Gate {
    pub admission: Admission,
    pub scopes: Vec<ScopeLimits>,
    next: std::cell::Cell<u64>,
}

impl Gate {
    pub fn new(scopes: Vec<ScopeLimits>) -> Self {
        let admission = Admission::new(AdmissionOptions::default());
        Self { admission, scopes, next: std::cell::Cell::new(0) }
    }

    pub fn of(limits: PlanLimits) -> Self {
        Self::new(vec![scoped(tenant("acme"), limits)])
    }

    /// Reserves at `now` after the origin, which is midnight on the wall clock.
    pub fn reserve(&self, now: u64, estimate: Estimate) -> Result<Hold, Box<Refusal>> {
        self.next.set(self.next.get() + 1);
        let request = request(self.next.get(), now, &self.scopes, estimate);
        match self.admission.reserve(at(now), utc(now), request) {
            Ok(hold) => Ok(hold),
            Err(ReserveError::Refused(refusal)) => Err(refusal),
            Err(ReserveError::AlreadyHeld) => panic!("ids are numbered"),
        }
    }
}
