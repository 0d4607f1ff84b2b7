//! A refusal by a limit, told to the client: which, whose, its value, and
//! when to come back.

use std::fmt::{self, Write as _};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use tollgate_admission::{Limit, Refusal};

use super::figures::{duration_text, millis_up, number, passing, seconds_up};

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
                headers.insert(header::RETRY_AFTER, number(seconds_up(wait).max(1)));
                headers.insert(RETRY_AFTER_MS, passing(number(millis_up(wait).max(1))));
            }
            Self::After(_) | Self::Never => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
        }
    }
}

/// The refusal as a sentence for people.
pub(super) fn message(refusal: &Refusal) -> String {
    let Refusal { limit, scope, asked, largest, retry_after, permanent, .. } = refusal;
    let mut text = String::with_capacity(USUAL_MESSAGE);
    let written = match retry_after {
        _ if *permanent && !limit.is_cap() => write!(
            text,
            "This request may need {}, and {scope} may never take more than {} at once: the limit \
             is {}.",
            amount(refusal, *asked),
            amount(refusal, *largest),
            limit_text(refusal),
        ),
        Some(wait) => {
            let (limit, wait) = (limit_text(refusal), duration_text(*wait));
            write!(text, "Limit reached: {limit} for {scope}. Try again in {wait}.")
        }
        None => write!(
            text,
            "Limit reached: {} for {scope}. Try again when another request has ended.",
            limit_text(refusal)
        ),
    };
    written.expect("a text takes whatever is written");
    text
}

/// `60 requests a minute`.
fn limit_text(refusal: &Refusal) -> impl fmt::Display {
    let Refusal { limit, value, .. } = refusal;
    let class = class(refusal);
    fmt::from_fn(move |f| match limit {
        Limit::Requests => write!(f, "{value} requests a minute"),
        Limit::Tokens => write!(f, "{value} tokens a minute"),
        Limit::DeviceTime => write!(f, "{} of {class} time a minute", time(*value)),
        Limit::DeviceTimePerDay => write!(f, "{} of {class} time a day (UTC)", time(*value)),
        Limit::DeviceTimePerMonth => write!(f, "{} of {class} time a month (UTC)", time(*value)),
        Limit::Concurrent => write!(f, "{value} requests at once"),
        Limit::Queued => write!(f, "{value} requests waiting at once"),
        Limit::LargestJob => write!(f, "{} of {class} time in one request", time(*value)),
        Limit::Capacity => write!(f, "{value} requests held at once"),
    })
}

/// `amount` of what the limit counts.
fn amount(refusal: &Refusal, amount: u64) -> impl fmt::Display {
    let (limit, class) = (refusal.limit, class(refusal));
    fmt::from_fn(move |f| match limit {
        _ if limit.is_device_time() => write!(f, "{} of {class} time", time(amount)),
        Limit::Tokens => write!(f, "{amount} tokens"),
        _ => write!(f, "{amount} requests"),
    })
}

fn class(refusal: &Refusal) -> &str {
    refusal.class.as_ref().map_or("device", |class| class.as_str())
}

fn time(nanos: u64) -> impl fmt::Display {
    duration_text(Duration::from_nanos(nanos))
}

/// Bytes: most messages are shorter.
const USUAL_MESSAGE: usize = 128;

/// Python's SDK gives up and Node's hangs beyond it.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// When a place becomes free is not known: soon, but not at once.
const UNKNOWN_WAIT: Duration = Duration::from_secs(1);

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
