//! A refusal by a limit, told to the client: which, whose, its value, and
//! when to come back.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use tollgate_admission::{Limit, Refusal};

use super::figures::{duration_text, millis_up, passing, seconds_up};

/// Whether the same request can pass later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    /// After this time.
    After(Duration),
    /// Not at all, or not before someone changes something.
    Never,
}

impl Retry {
    /// What a caller limit's refusal says about coming back.
    pub(super) fn of(refusal: &Refusal) -> Self {
        match refusal.retry_after {
            Some(wait) if !refusal.permanent => Self::After(wait),
            // Another request must end first; when is not known.
            None if !refusal.permanent => Self::After(UNKNOWN_WAIT),
            _ => Self::Never,
        }
    }

    /// Writes what SDKs act on. Waits beyond [`LONGEST_WAIT`] are said in the
    /// message only: some clients would sleep through them.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        match self {
            Self::After(wait) if wait <= LONGEST_WAIT => {
                headers.insert(header::RETRY_AFTER, seconds_up(wait).max(1).into());
                headers.insert(RETRY_AFTER_MS, passing(millis_up(wait).max(1)));
            }
            Self::After(_) | Self::Never => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
        }
    }
}

/// The refusal as a sentence for people.
pub(super) fn message(refusal: &Refusal) -> String {
    let Refusal { limit, scope, value, largest, asked, retry_after, permanent, .. } = refusal;
    let class = refusal.class.as_ref().map_or("device", |class| class.as_str());
    let limit_text = match limit {
        Limit::Requests => format!("{value} requests a minute"),
        Limit::Tokens => format!("{value} tokens a minute"),
        Limit::DeviceTime => format!("{} of {class} time a minute", time(*value)),
        Limit::DeviceTimePerDay => format!("{} of {class} time a day (UTC)", time(*value)),
        Limit::DeviceTimePerMonth => format!("{} of {class} time a month (UTC)", time(*value)),
        Limit::Concurrent => format!("{value} requests at once"),
        Limit::Queued => format!("{value} requests waiting at once"),
        Limit::LargestJob => format!("{} of {class} time in one request", time(*value)),
        Limit::Capacity => format!("{value} requests held at once"),
    };
    let amount = |amount: u64| match limit {
        _ if limit.is_device_time() => format!("{} of {class} time", time(amount)),
        Limit::Tokens => format!("{amount} tokens"),
        _ => format!("{amount} requests"),
    };
    match retry_after {
        _ if *permanent && !limit.is_cap() => format!(
            "This request may need {}, and {scope} may never take more than {} at once: the limit \
             is {limit_text}.",
            amount(*asked),
            amount(*largest),
        ),
        Some(wait) => {
            format!(
                "Limit reached: {limit_text} for {scope}. Try again in {}.",
                duration_text(*wait)
            )
        }
        None => format!(
            "Limit reached: {limit_text} for {scope}. Try again when another request has ended."
        ),
    }
}

fn time(nanos: u64) -> String {
    duration_text(Duration::from_nanos(nanos))
}

/// Python's SDK gives up and Node's hangs beyond it.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// When a place becomes free is not known: soon, but not at once.
const UNKNOWN_WAIT: Duration = Duration::from_secs(1);

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
