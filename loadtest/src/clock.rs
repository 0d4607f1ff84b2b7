//! The clocks of the load test.

use std::time::SystemTime;

use tokio::time::Instant;

/// Returns the present time of the runtime's clock.
#[expect(clippy::disallowed_methods, reason = "the load test measures time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Returns the present date.
#[expect(clippy::disallowed_methods, reason = "a report has a date")]
pub(crate) fn date() -> SystemTime {
    SystemTime::now()
}
