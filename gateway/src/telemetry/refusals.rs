//! The refusals of the last hour by tenant and kind, for admins. The memory is bounded, and a
//! flood of refusals changes counts alone.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::{TenantId, UtcTime};
use tollgate_serving::Clock;

use crate::reply::ApiError;

/// The refusals that are remembered.
pub(crate) struct RefusalBook {
    clock: Clock,
    rows: Mutex<HashMap<TenantId, Vec<Counted>>>,
}

/// The refusals of a tenant of one kind.
struct Counted {
    kind: &'static str,
    /// The refusals of each of the last sixty minutes, at the place of the minute in its hour.
    minutes: [u32; MINUTES],
    /// The minute since 1970 that was counted last.
    minute: u64,
    since_start: u64,
    last: UtcTime,
    message: Option<String>,
}

/// The refusals of a tenant of one kind, as admins read them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct RefusedRow {
    #[schemars(with = "String")]
    pub(crate) tenant: TenantId,
    /// The kind of the error, as in metrics.
    pub(crate) kind: &'static str,
    /// The number in the last sixty minutes.
    pub(crate) last_hour: u64,
    /// The number since the start of the gateway.
    pub(crate) since_start: u64,
    /// The time of the last one (Unix, UTC).
    #[schemars(with = "u64")]
    #[serde(rename = "last_ns")]
    pub(crate) last: UtcTime,
    /// The message of the last one, which names the limit, its value and the time to wait;
    /// null for kinds whose message repeats parts of requests.
    pub(crate) message: Option<String>,
}

impl RefusalBook {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, rows: Mutex::default() }
    }

    /// Counts a refusal of `tenant`, which must be one of the config's.
    pub(super) fn count(&self, tenant: &TenantId, error: &ApiError) {
        let now = self.clock.utc();
        let kind = error.kind().0;
        let mut rows = self.rows();
        if !rows.contains_key(tenant) {
            if rows.len() >= MOST_TENANTS {
                forget_idle(&mut rows, now);
            }
            if rows.len() >= MOST_TENANTS {
                return;
            }
        }
        let kinds = rows.entry(tenant.clone()).or_default();
        let counted = match kinds.iter().position(|counted| counted.kind == kind) {
            Some(place) => &mut kinds[place],
            None => {
                // The kinds are a closed set, so the list stays short.
                kinds.push(Counted::new(kind, now));
                let last = kinds.len() - 1;
                &mut kinds[last]
            }
        };
        // One message a second: a flood would spend its time on text.
        let is_new = counted.since_start == 0 || now.unix_seconds() != counted.last.unix_seconds();
        counted.count(now);
        if is_new {
            counted.message = is_about_limits(error).then(|| error.text());
        }
    }

    /// Returns the refusals of the last hour, of `tenant` or of all tenants, most first.
    pub(crate) fn list(&self, tenant: Option<&TenantId>) -> Vec<RefusedRow> {
        let now = self.clock.utc();
        let rows = self.rows();
        let wanted = rows.iter().filter(|(name, _)| tenant.is_none_or(|tenant| tenant == *name));
        let mut list: Vec<RefusedRow> = wanted
            .flat_map(|(tenant, kinds)| kinds.iter().map(|counted| counted.row(tenant, now)))
            .filter(|row| row.last_hour > 0)
            .collect();
        list.sort_by(|a, b| {
            b.last_hour
                .cmp(&a.last_hour)
                .then_with(|| (&a.tenant, a.kind).cmp(&(&b.tenant, b.kind)))
        });
        list
    }

    fn rows(&self) -> MutexGuard<'_, HashMap<TenantId, Vec<Counted>>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RefusalBook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefusalBook").field("tenants", &self.rows().len()).finish_non_exhaustive()
    }
}

impl Counted {
    fn new(kind: &'static str, now: UtcTime) -> Self {
        let minute = minute_of(now);
        Self { kind, minutes: [0; MINUTES], minute, since_start: 0, last: now, message: None }
    }

    fn count(&mut self, now: UtcTime) {
        self.advance(now);
        let place = &mut self.minutes[place_of(self.minute)];
        *place = place.saturating_add(1);
        self.since_start += 1;
        self.last = now;
    }

    /// Clears the minutes between the last counted one and `now`.
    fn advance(&mut self, now: UtcTime) {
        // A clock that steps back counts into the last minute.
        let minute = minute_of(now).max(self.minute);
        // Bounded, because the gap can be years; a long one is cleared as a whole below.
        for passed in (self.minute + 1..=minute).take(MINUTES) {
            self.minutes[place_of(passed)] = 0;
        }
        if minute - self.minute >= MINUTES as u64 {
            self.minutes = [0; MINUTES];
        }
        self.minute = minute;
    }

    /// Returns the number of refusals in the sixty minutes before `now`.
    fn last_hour(&self, now: UtcTime) -> u64 {
        let now = minute_of(now).max(self.minute);
        let age = |place: usize| {
            let back = (place_of(self.minute) + MINUTES - place) % MINUTES;
            now - self.minute + back as u64
        };
        let recent = (0..MINUTES).filter(|place| age(*place) < MINUTES as u64);
        recent.map(|place| u64::from(self.minutes[place])).sum()
    }

    fn row(&self, tenant: &TenantId, now: UtcTime) -> RefusedRow {
        RefusedRow {
            tenant: tenant.clone(),
            kind: self.kind,
            last_hour: self.last_hour(now),
            since_start: self.since_start,
            last: self.last,
            message: self.message.clone(),
        }
    }
}

/// Returns true if the error's message names limits and queues, and nothing of the request.
fn is_about_limits(error: &ApiError) -> bool {
    matches!(error.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
}

/// Forgets tenants without a refusal in the last hour.
fn forget_idle(rows: &mut HashMap<TenantId, Vec<Counted>>, now: UtcTime) {
    rows.retain(|_, kinds| kinds.iter().any(|counted| counted.last_hour(now) > 0));
}

fn minute_of(time: UtcTime) -> u64 {
    time.unix_seconds() / 60
}

fn place_of(minute: u64) -> usize {
    (minute % MINUTES as u64) as usize
}

/// Minutes that are counted apart.
const MINUTES: usize = 60;

/// Tenants with refusals that are remembered. Others are not listed until a place is free.
const MOST_TENANTS: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn minutes(minutes: u64) -> UtcTime {
        UtcTime((29_000_000 + minutes) * 60_000_000_000)
    }

    #[test]
    fn refusals_leave_the_hour_by_minute() {
        let mut counted = Counted::new("kind", minutes(0));
        for minute in [0, 0, 30, 59] {
            counted.count(minutes(minute));
        }
        let at = |minute| counted.last_hour(minutes(minute));
        assert_eq!([at(59), at(60), at(89), at(90), at(118), at(119)], [4, 2, 2, 1, 1, 0]);
        counted.count(minutes(60));
        assert_eq!((counted.last_hour(minutes(60)), counted.since_start), (3, 5));
        counted.count(minutes(1_000));
        assert_eq!(counted.last_hour(minutes(1_000)), 1);
        // A clock that stepped back loses nothing.
        counted.count(minutes(900));
        assert_eq!(counted.last_hour(minutes(900)), 2);
    }

    #[test]
    fn refusals_of_too_many_tenants_are_bounded() {
        let book = RefusalBook::new(Clock::system());
        let error = ApiError::Draining;
        for number in 0..MOST_TENANTS + 5 {
            let tenant = TenantId::new(&format!("t{number}")).expect("a name");
            book.count(&tenant, &error);
            book.count(&tenant, &error);
        }
        let list = book.list(None);
        assert_eq!(list.len(), MOST_TENANTS);
        assert!(list.iter().all(|row| row.since_start == 2 && row.message.is_some()));
        let bad = ApiError::malformed("The prompt is secret.");
        book.count(&list[0].tenant, &bad);
        let of_one = book.list(Some(&list[0].tenant));
        assert_eq!(of_one.len(), 2);
        assert_eq!(of_one[1].message, None);
    }
}
