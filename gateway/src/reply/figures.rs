//! The remaining limits as headers: OpenAI's names for requests and tokens, the
//! names of the IETF draft for time of devices and of the host.

use std::fmt;
use std::io::Write as _;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_admission::{CapFigures, Figures, RateFigures};

/// Writes the state of a caller's limits into the headers of a response, which may
/// be an answer or a refusal.
pub fn write_figures(figures: &Figures, headers: &mut HeaderMap) {
    let Figures { requests, tokens, device_time, grammar_time, day, month } = figures;
    if let Some(figures) = requests {
        write_rate(figures, REQUESTS, headers);
    }
    if let Some(figures) = tokens {
        write_rate(figures, TOKENS, headers);
    }
    let minute = device_time.as_ref().map(|rate| TimeLimit::of_minute("device-time", rate));
    let forms = grammar_time.as_ref().map(|rate| TimeLimit {
        unit: "host-milliseconds",
        ..TimeLimit::of_minute("grammar-time", rate)
    });
    let caps = day.as_ref().map(|day| TimeLimit::of_cap("device-time-day", Some(86_400), day));
    // Months differ in length, so the limit of a month states no window.
    let of_month = |month| TimeLimit::of_cap("device-time-month", None, month);
    let caps = caps.into_iter().chain(month.as_ref().map(of_month));
    let limits: Vec<TimeLimit> = minute.into_iter().chain(caps).chain(forms).collect();
    if !limits.is_empty() {
        write_times(&limits, headers);
    }
}

fn write_rate(
    figures: &RateFigures,
    [limit, remaining, reset]: [HeaderName; 3],
    headers: &mut HeaderMap,
) {
    headers.insert(limit, number(figures.rate.per_minute));
    headers.insert(remaining, number(figures.remaining));
    headers.insert(reset, passing(text(format_args!("{}", duration_text(figures.reset)))));
}

/// A limit on time of a device or of the host in the whole units of the draft: milliseconds
/// rounded down, and seconds until the limit is whole, rounded up.
struct TimeLimit {
    name: &'static str,
    unit: &'static str,
    quota: u64,
    window: Option<u32>,
    remaining: u64,
    reset: u64,
}

impl TimeLimit {
    fn of_minute(name: &'static str, figures: &RateFigures) -> Self {
        Self {
            name,
            unit: DEVICE_MILLIS,
            quota: millis(figures.rate.per_minute),
            window: Some(60),
            remaining: millis(figures.remaining),
            reset: seconds_up(figures.reset),
        }
    }

    fn of_cap(name: &'static str, window: Option<u32>, figures: &CapFigures) -> Self {
        Self {
            name,
            unit: DEVICE_MILLIS,
            quota: millis(figures.cap.nanos()),
            window,
            remaining: millis(figures.remaining.nanos()),
            reset: seconds_up(figures.reset),
        }
    }
}

/// Writes the limits on time as the lists of the draft.
fn write_times(limits: &[TimeLimit], headers: &mut HeaderMap) {
    // The draft uses structured fields, in which the name of a policy is a quoted string.
    let policies = fmt::from_fn(|f| {
        for (index, TimeLimit { name, unit, quota, window, .. }) in limits.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}\"{name}\";q={quota};qu=\"{unit}\"")?;
            window.map_or(Ok(()), |window| write!(f, ";w={window}"))?;
        }
        Ok(())
    });
    let left = fmt::from_fn(|f| {
        for (index, TimeLimit { name, remaining, reset, .. }) in limits.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}\"{name}\";r={remaining};t={reset}")?;
        }
        Ok(())
    });
    headers.insert(HeaderName::from_static("ratelimit-policy"), text(format_args!("{policies}")));
    headers.insert(HeaderName::from_static("ratelimit"), passing(text(format_args!("{left}"))));
}

/// Returns a duration in the form of OpenAI's headers: `12ms`, `1.5s`, `6m0s`,
/// `1h0m0s`, rounded up to milliseconds.
pub fn duration_text(duration: Duration) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        let millis = millis_up(duration);
        if millis == 0 {
            return f.write_str("0s");
        }
        if millis < 1_000 {
            return write!(f, "{millis}ms");
        }
        let (hours, minutes) = (millis / 3_600_000, millis / 60_000 % 60);
        let (seconds, mut fraction) = (millis / 1_000 % 60, millis % 1_000);
        if hours > 0 {
            write!(f, "{hours}h")?;
        }
        // After hours, zero minutes are written, too: `1h0m5s`.
        if hours > 0 || minutes > 0 {
            write!(f, "{minutes}m")?;
        }
        write!(f, "{seconds}")?;
        if fraction > 0 {
            // OpenAI's headers have no trailing zeros: `1.5s` and not `1.500s`.
            let mut digits = 3;
            while fraction % 10 == 0 {
                (fraction, digits) = (fraction / 10, digits - 1);
            }
            write!(f, ".{fraction:0digits$}")?;
        }
        f.write_str("s")
    })
}

/// Returns whole milliseconds, rounded up: a client that waits as told must not
/// come too early.
pub(super) fn millis_up(duration: Duration) -> u64 {
    // The longest duration has more milliseconds than 64 bits hold, and must not panic.
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Returns whole seconds, rounded up.
pub(super) fn seconds_up(duration: Duration) -> u64 {
    millis_up(duration).div_ceil(1_000)
}

fn millis(nanos: u64) -> u64 {
    nanos / 1_000_000
}

pub(super) fn number(value: u64) -> HeaderValue {
    // Several times quicker than `text`, which goes through the formatter.
    HeaderValue::from(value)
}

/// Formats a header's value without an allocation of its own: `value` must be made
/// of digits, names and units.
#[expect(
    clippy::expect_used,
    reason = "`LONGEST_VALUE` holds the longest figures, which are visible ASCII"
)]
fn text(value: fmt::Arguments<'_>) -> HeaderValue {
    let mut space = [0; LONGEST_VALUE];
    let mut rest = &mut space[..];
    rest.write_fmt(value).expect("no figure is as long");
    let written = LONGEST_VALUE - rest.len();
    HeaderValue::from_bytes(&space[..written]).expect("all of it is visible ASCII")
}

/// Marks a value that hardly any other response has. HTTP/2 then does not index
/// the value, which would cost more than it saves.
pub(super) fn passing(mut value: HeaderValue) -> HeaderValue {
    value.set_sensitive(true);
    value
}

const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// The unit of device time in the draft's policies.
const DEVICE_MILLIS: &str = "device-milliseconds";

/// Bytes of the longest figure with its units, and more.
const LONGEST_VALUE: usize = 512;
