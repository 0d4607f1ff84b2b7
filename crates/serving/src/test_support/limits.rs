//! A config with limits in every scope, and a way to read the state of a scope.

use std::time::Duration;

use tollgate_admission::{
    Admission, Estimate, Figures, MoneyEstimate, Requester, Reserve, ReserveError, ScopeLimits,
};
use tollgate_domain::{
    DeviceClass, DeviceNanos, MonotonicTime, RequestId, TenantId, Tier, UtcTime,
};

/// Tenants with a plan of their own, with a pool and with both, and a model with
/// limits.
pub const LIMITS_CONFIG: &str = r#"
[plans.key]
device_time_per_day = "10s"
[plans.own]
requests_per_minute = 5
device_time_per_day = "20s"
device_time_per_month = "40s"
weight = 3
[plans.shared]
requests_per_minute = { limit = 60, burst = 1 }
device_time_per_day = "30s"
weight = 2
[plans.model]
device_time_per_day = "50s"

[pools.trial]
plan = "shared"
[tenants.acme]
plan = "own"
pool = "trial"
[tenants.other]
pool = "trial"
[models.tollgate-demo]
plan = "model"
"#;

/// Returns the state of a scope, as a request that takes nothing of it reads it.
#[expect(clippy::expect_used, reason = "the constant name is valid")]
pub fn state_of(
    admission: &Admission,
    number: u128,
    limited: ScopeLimits,
    utc: UtcTime,
) -> Figures {
    let reserve = Reserve {
        id: RequestId::from_random(number),
        requester: Requester { tenant: TenantId::new("acme").expect("a name"), pool: None },
        tier: Tier::Interactive,
        is_line: false,
        scopes: vec![limited],
        counted: 0,
        class: DeviceClass::cpu(),
        estimate: Estimate {
            tokens: 0,
            most_tokens: 0,
            expected: DeviceNanos::ZERO,
            most: DeviceNanos::ZERO,
            worst: DeviceNanos::ZERO,
            least: DeviceNanos::ZERO,
            grammar_time: Duration::ZERO,
            money: MoneyEstimate::default(),
        },
        queue_deadline: MonotonicTime(u64::MAX),
        expires: MonotonicTime(u64::MAX),
    };
    match admission.reserve(MonotonicTime::default(), utc, reserve) {
        Ok(hold) => hold.figures().clone(),
        Err(ReserveError::Refused(refusal)) => refusal.figures,
        Err(ReserveError::AlreadyHeld) => panic!("numbers are used once"),
    }
}
