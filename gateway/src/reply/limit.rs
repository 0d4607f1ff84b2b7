//! A refusal by a limit, for the client: the limit, its scope and value, and the
//! time to wait.

use std::fmt::{self, Write as _};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use tollgate_admission::{Limit, Refusal};
use tollgate_domain::Budget;

use super::figures::{duration_text, millis_up, number, passing, seconds_up};

/// The advice about sending the same request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    /// The request can pass after this time.
    After(Duration),
    /// The request cannot pass, unless an admin or the client changes something.
    Never,
}

impl Retry {
    /// Returns the advice for a refusal by a limit.
    pub(super) fn of(refusal: &Refusal) -> Self {
        match refusal.retry_after {
            Some(wait) if !refusal.permanent => Self::After(wait),
            // Another request must end first, at an unknown time.
            None if !refusal.permanent => Self::After(UNKNOWN_WAIT),
            _ => Self::Never,
        }
    }

    /// Writes the headers that SDKs act on.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        let mut is_for_sdks = false;
        if let Self::After(wait) = self {
            // At least 1: a client that is told 0 comes back at once, only to be refused again.
            headers.insert(header::RETRY_AFTER, number(seconds_up(wait).max(1)));
            headers.insert(RETRY_AFTER_MS, passing(number(millis_up(wait).max(1))));
            is_for_sdks = wait <= LONGEST_WAIT;
        }
        if !is_for_sdks {
            // OpenAI's SDKs retry every 429 and 503 by themselves unless this header forbids it.
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
    }
}

/// Returns the refusal as a sentence for people.
#[expect(clippy::expect_used, reason = "writing to a string does not fail")]
pub(super) fn message(refusal: &Refusal) -> String {
    let Refusal { limit, scope, asked, largest, retry_after, permanent, .. } = refusal;
    let mut text = String::with_capacity(USUAL_MESSAGE);
    let written = match retry_after {
        _ if *permanent && !limit.is_cap() => write!(
            text,
            "This request may need {}, and {scope} may never take more than {} at once: the limit \
             is {}. Ask for a shorter answer or fewer choices, or send a shorter prompt.",
            amount(refusal, *asked),
            amount(refusal, *largest),
            limit_text(refusal),
        ),
        None if *permanent => write!(
            text,
            "This request may need {}, which is more than the whole limit of {} for {scope}. Lower \
             'max_tokens', ask for fewer choices or send a shorter prompt.",
            amount(refusal, *asked),
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

/// Returns the limit with its value, such as `60 requests a minute`.
fn limit_text(refusal: &Refusal) -> impl fmt::Display {
    let Refusal { limit, value, .. } = refusal;
    let class = class(refusal);
    fmt::from_fn(move |f| match limit {
        Limit::Requests => write!(f, "{value} requests a minute"),
        Limit::Tokens => write!(f, "{value} tokens a minute"),
        Limit::DeviceTime => write!(f, "{} of {class} time a minute", time(*value)),
        Limit::GrammarTime => write!(f, "{} of grammar time a minute", time(*value)),
        Limit::DeviceTimePerDay => write!(f, "{} of {class} time a day (UTC)", time(*value)),
        Limit::DeviceTimePerMonth => write!(f, "{} of {class} time a month (UTC)", time(*value)),
        Limit::BudgetPerMonth => write!(f, "{} a month (UTC)", money(refusal, *value)),
        Limit::Concurrent => write!(f, "{value} requests at once"),
        Limit::Queued => write!(f, "{value} requests waiting at once"),
        Limit::LargestJob => write!(f, "{} of {class} time in one request", time(*value)),
        Limit::Capacity => write!(f, "{value} requests held at once"),
    })
}

/// Returns `amount` with the limit's unit.
fn amount(refusal: &Refusal, amount: u64) -> impl fmt::Display {
    let (limit, class) = (refusal.limit, class(refusal));
    fmt::from_fn(move |f| match limit {
        _ if limit.is_device_time() => write!(f, "{} of {class} time", time(amount)),
        Limit::Tokens => write!(f, "{amount} tokens"),
        Limit::GrammarTime => write!(f, "{} of grammar time", time(amount)),
        Limit::BudgetPerMonth => write!(f, "{}", money(refusal, amount)),
        _ => write!(f, "{amount} requests"),
    })
}

/// Returns an amount of money, such as `500 EUR`.
fn money(refusal: &Refusal, nanos: u64) -> impl fmt::Display {
    fmt::from_fn(move |f| match refusal.currency {
        Some(currency) => write!(f, "{} {currency}", Budget { currency, nanos }),
        // Every refusal by a budget has a currency.
        None => write!(f, "{nanos}"),
    })
}

fn class(refusal: &Refusal) -> &str {
    refusal.class.as_ref().map_or("device", |class| class.as_str())
}

fn time(nanos: u64) -> impl fmt::Display {
    duration_text(Duration::from_nanos(nanos))
}

/// Bytes of a message; most are shorter.
const USUAL_MESSAGE: usize = 128;

/// The longest wait that SDKs are asked to sleep through. For a longer one Python's SDK
/// waits too short a time, and Node's seems to hang.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The wait for a place that becomes free at an unknown time.
const UNKNOWN_WAIT: Duration = Duration::from_secs(1);

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
