//! What is left of the limits, as headers: the names that OpenAI's clients
//! know for requests and tokens, the IETF draft's for device time, ours for
//! the rest.

use std::fmt::Write as _;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_admission::{Figures, RateFigures};

/// Writes where a caller's limits stand after this request into the headers
/// of its response, be it an answer or a refusal.
pub fn write_figures(figures: &Figures, headers: &mut HeaderMap) {
    // Caps have no header of their own: a refusal's message names them.
    let Figures { requests, tokens, device_time, day: _, month: _ } = figures;
    if let Some(figures) = requests {
        write_rate(figures, REQUESTS, headers);
    }
    if let Some(figures) = tokens {
        write_rate(figures, TOKENS, headers);
    }
    if let Some(figures) = device_time {
        write_device_time(figures, headers);
    }
}

fn write_rate(
    figures: &RateFigures,
    [limit, remaining, reset]: [HeaderName; 3],
    headers: &mut HeaderMap,
) {
    headers.insert(limit, figures.rate.per_minute.into());
    headers.insert(remaining, figures.remaining.into());
    headers.insert(reset, passing(text(duration_text(figures.reset))));
}

/// The draft wants whole units: milliseconds of device time, rounded down,
/// and seconds until the bucket is full, rounded up.
fn write_device_time(figures: &RateFigures, headers: &mut HeaderMap) {
    let quota = millis(figures.rate.per_minute);
    headers.insert(
        HeaderName::from_static("ratelimit-policy"),
        text(format!("\"device-time\";q={quota};qu=\"device-milliseconds\";w=60")),
    );
    headers.insert(
        HeaderName::from_static("ratelimit"),
        passing(text(format!(
            "\"device-time\";r={};t={}",
            millis(figures.remaining),
            seconds_up(figures.reset)
        ))),
    );
}

/// A duration as OpenAI's headers say it: `12ms`, `1.5s`, `6m0s`, `1h0m0s`;
/// rounded up to milliseconds.
pub fn duration_text(duration: Duration) -> String {
    let millis = millis_up(duration);
    if millis == 0 {
        return "0s".into();
    }
    if millis < 1_000 {
        return format!("{millis}ms");
    }
    let (hours, minutes) = (millis / 3_600_000, millis / 60_000 % 60);
    let (seconds, fraction) = (millis / 1_000 % 60, millis % 1_000);
    let mut text = String::new();
    // Writing into a String cannot fail.
    if hours > 0 {
        let _ = write!(text, "{hours}h");
    }
    if hours > 0 || minutes > 0 {
        let _ = write!(text, "{minutes}m");
    }
    let _ = write!(text, "{seconds}");
    if fraction > 0 {
        let _ = write!(text, "{}", format!(".{fraction:03}").trim_end_matches('0'));
    }
    text.push('s');
    text
}

/// Whole milliseconds, rounded up: a client that waits as told is not refused
/// again for having come too early.
pub(super) fn millis_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Whole seconds, rounded up.
pub(super) fn seconds_up(duration: Duration) -> u64 {
    millis_up(duration).div_ceil(1_000)
}

fn millis(nanos: u64) -> u64 {
    nanos / 1_000_000
}

fn text(value: String) -> HeaderValue {
    HeaderValue::try_from(value).expect("digits, names and units are visible ASCII")
}

/// A value that another response hardly has again: HTTP/2 is not to remember
/// it, which costs more than it saves.
pub(super) fn passing(value: impl Into<HeaderValue>) -> HeaderValue {
    let mut value = value.into();
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
