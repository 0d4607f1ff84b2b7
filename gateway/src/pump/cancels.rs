//! Requests that a tenant cancelled while they waited for a place or after a
//! worker had them. A few are a person who changed their mind; many are a way
//! to keep a queue or a device busy with nothing, so who goes beyond the rate
//! waits until it has decayed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tollgate_domain::{MonotonicTime, TenantId};

const MINUTE: Duration = Duration::from_secs(60);
/// No penalty lasts longer.
const LONGEST: Duration = Duration::from_secs(60);

/// Each tenant's cancels, as the time until which they fill the rate (GCRA).
/// Bounded by the tenants there are; [`Cancels::sweep`] forgets the decayed.
#[derive(Debug)]
pub(crate) struct Cancels {
    per_minute: u32,
    filled: Mutex<HashMap<TenantId, MonotonicTime>>,
}

impl Cancels {
    /// Allows each tenant `per_minute`.
    pub(crate) fn new(per_minute: u32) -> Self {
        Self { per_minute: per_minute.max(1), filled: Mutex::default() }
    }

    /// The rate.
    pub(crate) fn per_minute(&self) -> u32 {
        self.per_minute
    }

    /// Counts one cancel of `tenant`.
    pub(crate) fn count(&self, now: MonotonicTime, tenant: &TenantId) {
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let until = filled.entry(tenant.clone()).or_insert(now);
        *until = (*until).max(now).after(MINUTE / self.per_minute).min(now.after(MINUTE + LONGEST));
    }

    /// How long `tenant` has to wait before its next request; none where it
    /// need not.
    pub(crate) fn penalty(&self, now: MonotonicTime, tenant: &TenantId) -> Option<Duration> {
        let filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let beyond = filled.get(tenant)?.since(now).checked_sub(MINUTE)?;
        (!beyond.is_zero()).then_some(beyond)
    }

    /// Forgets what has decayed; call it each second.
    pub(crate) fn sweep(&self, now: MonotonicTime) {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, until| *until > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_free_and_what_is_beyond_waits() {
        let cancels = Cancels::new(60);
        let tenant = TenantId::new("acme").expect("a name");
        let at = |seconds: u64| MonotonicTime(seconds * 1_000_000_000);
        for _ in 0..60 {
            cancels.count(at(0), &tenant);
        }
        assert_eq!(cancels.penalty(at(0), &tenant), None);
        cancels.count(at(0), &tenant);
        assert_eq!(cancels.penalty(at(0), &tenant), Some(Duration::from_secs(1)));
        assert_eq!(cancels.penalty(at(1), &tenant), None);
        for _ in 0..10_000 {
            cancels.count(at(1), &tenant);
        }
        assert_eq!(cancels.penalty(at(1), &tenant), Some(LONGEST));
        assert_eq!(cancels.penalty(at(1), &TenantId::new("other").expect("a name")), None);
        cancels.sweep(at(120));
        assert_eq!(cancels.filled.lock().expect("a test").len(), 1);
        cancels.sweep(at(121));
        assert_eq!(cancels.filled.lock().expect("a test").len(), 0);
    }
}
