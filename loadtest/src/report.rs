//! The report of a run, as a table for the terminal and as JSON. Percentiles come
//! from histograms with three significant digits. Every latency counts from the due
//! time.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::outcome::{End, Outcome};
use crate::plan::Load;

/// The report of a run: all requests, and the requests of each tenant.
#[derive(Debug, Deserialize, Serialize)]
pub struct Report {
    /// The planned requests a second, on average.
    pub offered_rate: f64,
    /// Seconds from the first due time to the last answer.
    pub seconds: f64,
    /// True if the generator sent requests in time. Otherwise the figures also
    /// measure the generator.
    pub generator_kept_up: bool,
    /// The figures of all requests.
    pub all: Figures,
    /// The figures of each tenant.
    pub tenants: BTreeMap<String, Figures>,
    /// The requests of each second.
    #[serde(default)]
    pub per_second: Vec<Second>,
    /// True if the planned rate changes, so that the seconds differ.
    #[serde(skip)]
    rate_changes: bool,
}

/// A request with its due time.
#[derive(Debug)]
pub struct Sample {
    /// The due time, from the start of the run.
    pub due: Duration,
    /// The measurements.
    pub outcome: Outcome,
}

/// The requests of one second. Those that ended may have been due earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Second {
    /// Requests that were due.
    pub due: u64,
    /// Requests that ended with a complete answer.
    pub done: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests with another end.
    pub failed: u64,
}

/// The figures of a group of requests.
#[derive(Debug, Deserialize, Serialize)]
pub struct Figures {
    /// Requests that were due.
    pub due: u64,
    /// Requests with a complete answer.
    pub done: u64,
    /// Refusals, by status and code.
    pub refused: BTreeMap<String, u64>,
    /// Requests with another end, by the reason.
    pub failed: BTreeMap<String, u64>,
    /// Answered requests a second.
    pub requests_per_second: f64,
    /// Completion tokens a second.
    pub tokens_per_second: f64,
    /// The time to the first content of a stream.
    pub first_token_ms: Latency,
    /// The time between pieces of content.
    pub between_tokens_ms: Latency,
    /// The time to the end of an answer.
    pub whole_ms: Latency,
    /// The time from due to sent: the generator's lateness and the wait for a
    /// connection.
    pub late_ms: Latency,
}

/// Percentiles in milliseconds; `None` if nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Latency {
    /// The number of measurements.
    pub count: u64,
    /// The median.
    pub p50: Option<f64>,
    /// The 90th percentile.
    pub p90: Option<f64>,
    /// The 99th percentile.
    pub p99: Option<f64>,
    /// The largest value.
    pub max: Option<f64>,
}

/// The 99th percentile of the generator's lateness on HTTP/2 above which the
/// generator itself was the bottleneck, in milliseconds.
const TOLERATED_LATENESS_MS: f64 = 50.0;

pub(crate) const TIMED_OUT: &str = "timed out";
pub(crate) const NOT_SENT: &str = "not sent: too many in flight";

impl Report {
    pub(crate) fn new(load: &Load, samples: &[Sample], elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64();
        let outcomes = || samples.iter().map(|sample| &sample.outcome);
        let all = Figures::new(outcomes(), seconds);
        let tenants = load.tenants.iter().enumerate().map(|(index, tenant)| {
            let own = outcomes().filter(|outcome| outcome.tenant == index);
            (tenant.name.clone(), Figures::new(own, seconds))
        });
        let planned = load.duration.as_secs_f64();
        Self {
            offered_rate: load.rates.count(planned) / planned,
            per_second: per_second(samples),
            rate_changes: !load.rates.is_constant(),
            seconds,
            generator_kept_up: all.late_ms.p99.is_none_or(|late| late <= TOLERATED_LATENESS_MS),
            tenants: tenants.collect(),
            all,
        }
    }
}

fn per_second(samples: &[Sample]) -> Vec<Second> {
    let end = |sample: &Sample| sample.due + sample.outcome.whole;
    let last = samples.iter().map(end).max();
    let mut seconds = vec![Second::default(); last.map_or(0, |last| last.as_secs() as usize + 1)];
    for sample in samples {
        seconds[sample.due.as_secs() as usize].due += 1;
        let second = &mut seconds[end(sample).as_secs() as usize];
        *match sample.outcome.end {
            End::Done => &mut second.done,
            End::Refused { .. } => &mut second.refused,
            _ => &mut second.failed,
        } += 1;
    }
    seconds
}

impl Figures {
    fn new<'a>(outcomes: impl Iterator<Item = &'a Outcome>, seconds: f64) -> Self {
        let mut counts = Counts::default();
        let [mut first, mut gaps, mut whole, mut late] = std::array::from_fn(|_| histogram());
        for outcome in outcomes {
            counts.add(outcome);
            outcome.late.iter().for_each(|&span| record(&mut late, span));
            // A fast refusal must not improve the latency of answers.
            if outcome.end == End::Done {
                record(&mut whole, outcome.whole);
                outcome.first_token.iter().for_each(|&span| record(&mut first, span));
                outcome.gaps.iter().for_each(|&span| record(&mut gaps, span));
            }
        }
        Self {
            due: counts.due,
            done: counts.done,
            refused: counts.refused,
            failed: counts.failed,
            requests_per_second: counts.done as f64 / seconds,
            tokens_per_second: counts.tokens as f64 / seconds,
            first_token_ms: Latency::of(&first),
            between_tokens_ms: Latency::of(&gaps),
            whole_ms: Latency::of(&whole),
            late_ms: Latency::of(&late),
        }
    }
}

#[derive(Default)]
struct Counts {
    due: u64,
    done: u64,
    tokens: u64,
    refused: BTreeMap<String, u64>,
    failed: BTreeMap<String, u64>,
}

impl Counts {
    fn add(&mut self, outcome: &Outcome) {
        self.due += 1;
        self.tokens += outcome.tokens;
        let failed = match &outcome.end {
            End::Done => {
                self.done += 1;
                return;
            }
            End::Refused { status, code } => {
                *self.refused.entry(format!("{status} {code}")).or_default() += 1;
                return;
            }
            End::BrokenOff(code) => format!("broke off: {code}"),
            End::Error(kind) => (*kind).to_owned(),
            End::TimedOut => TIMED_OUT.to_owned(),
            End::NotSent => NOT_SENT.to_owned(),
        };
        *self.failed.entry(failed).or_default() += 1;
    }
}

impl Latency {
    fn of(histogram: &Histogram<u64>) -> Self {
        let at = |quantile: f64| {
            (!histogram.is_empty()).then(|| histogram.value_at_quantile(quantile) as f64 / 1e3)
        };
        Self { count: histogram.len(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

/// Returns a histogram of microseconds, up to an hour.
#[expect(clippy::expect_used, reason = "the bounds are constants that the histogram accepts")]
fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(3_600_000_000, 3).expect("the bounds are valid")
}

fn record(histogram: &mut Histogram<u64>, span: Duration) {
    histogram.saturating_record(span.as_micros().min(u128::from(u64::MAX)) as u64);
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figures { due, done, requests_per_second, tokens_per_second, .. } = &self.all;
        writeln!(
            f,
            "{due} requests due in {:.1} s ({:.1}/s offered), {done} answered: \
             {requests_per_second:.1} requests/s, {tokens_per_second:.0} tokens/s",
            self.seconds, self.offered_rate,
        )?;
        if !self.generator_kept_up {
            writeln!(
                f,
                "the generator sent requests late, so these figures also measure the generator"
            )?;
        }
        writeln!(
            f,
            "\n{:<24}{:>9}{:>10}{:>10}{:>10}{:>10}",
            "ms from due", "count", "p50", "p90", "p99", "max"
        )?;
        let Figures { first_token_ms, between_tokens_ms, whole_ms, late_ms, .. } = &self.all;
        for (name, latency) in [
            ("first token", first_token_ms),
            ("between tokens", between_tokens_ms),
            ("whole answer", whole_ms),
            ("sent late", late_ms),
        ] {
            row(f, name, latency)?;
        }
        if self.tenants.len() > 1 {
            writeln!(
                f,
                "\n{:<24}{:>9}{:>10}{:>10}{:>10}{:>10}",
                "tenant", "due", "done", "refused", "failed", "p99 ms"
            )?;
            for (name, figures) in &self.tenants {
                let refused: u64 = figures.refused.values().sum();
                let failed: u64 = figures.failed.values().sum();
                let p99 = figures.whole_ms.p99.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
                let Figures { due, done, .. } = figures;
                writeln!(f, "{name:<24}{due:>9}{done:>10}{refused:>10}{failed:>10}{p99:>10}")?;
            }
        }
        if self.rate_changes {
            seconds(f, &self.per_second)?;
        }
        for (title, kinds) in [("refused", &self.all.refused), ("failed", &self.all.failed)] {
            for (kind, count) in kinds {
                writeln!(f, "{title}: {count} x {kind}")?;
            }
        }
        Ok(())
    }
}

/// Writes the requests a second over time, in at most `MOST_ROWS` rows.
fn seconds(f: &mut fmt::Formatter<'_>, seconds: &[Second]) -> fmt::Result {
    let span = seconds.len().div_ceil(MOST_ROWS).max(1);
    let digits = usize::from(span > 1);
    writeln!(
        f,
        "\n{:<24}{:>9}{:>10}{:>10}{:>10}",
        "requests/s from second", "due", "done", "refused", "failed"
    )?;
    for (number, rows) in seconds.chunks(span).enumerate() {
        write!(f, "{:<24}", number * span)?;
        let counts: [fn(&Second) -> u64; 4] =
            [|one| one.due, |one| one.done, |one| one.refused, |one| one.failed];
        for (count, width) in counts.iter().zip([9, 10, 10, 10]) {
            let sum: u64 = rows.iter().map(count).sum();
            write!(f, "{:>width$.digits$}", sum as f64 / rows.len() as f64)?;
        }
        writeln!(f)?;
    }
    Ok(())
}

/// The largest number of rows with requests a second in the terminal.
const MOST_ROWS: usize = 30;

fn row(f: &mut fmt::Formatter<'_>, name: &str, latency: &Latency) -> fmt::Result {
    let Latency { count, p50, p90, p99, max } = latency;
    write!(f, "{name:<24}{count:>9}")?;
    for figure in [p50, p90, p99, max] {
        match figure {
            Some(ms) => write!(f, "{ms:>10.2}")?,
            None => write!(f, "{:>10}", "-")?,
        }
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(end: End, whole_ms: u64) -> Outcome {
        Outcome {
            tenant: 0,
            late: (end != End::NotSent).then_some(Duration::from_millis(1)),
            first_token: Some(Duration::from_millis(whole_ms / 2)),
            gaps: vec![Duration::from_millis(2)],
            whole: Duration::from_millis(whole_ms),
            tokens: 4,
            at_worker: None,
            end,
        }
    }

    #[test]
    fn latency_counts_only_complete_answers() {
        let refused = End::Refused { status: 429, code: "rate_limit_exceeded".into() };
        let outcomes = [
            outcome(End::Done, 100),
            outcome(End::Done, 300),
            outcome(refused, 1),
            outcome(End::TimedOut, 60_000),
            outcome(End::NotSent, 0),
        ];
        let figures = Figures::new(outcomes.iter(), 2.0);
        assert_eq!((figures.due, figures.done), (5, 2));
        assert_eq!(figures.refused["429 rate_limit_exceeded"], 1);
        assert_eq!(figures.failed.values().sum::<u64>(), 2);
        assert_eq!(figures.requests_per_second, 1.0);
        assert_eq!(figures.whole_ms.count, 2);
        let max = figures.whole_ms.max.expect("measured");
        assert!((max - 300.0).abs() < 0.5, "{max}");
        assert_eq!(figures.late_ms.count, 4);
    }

    #[test]
    fn seconds_count_due_and_ended() {
        let refused = End::Refused { status: 429, code: "rate_limit_exceeded".into() };
        let sample = |due, end, whole_ms| Sample {
            due: Duration::from_millis(due),
            outcome: outcome(end, whole_ms),
        };
        let samples = [
            sample(900, End::Done, 2_200),
            sample(100, End::Done, 300),
            sample(1_500, refused, 1),
            sample(1_600, End::TimedOut, 2_000),
        ];
        let second = |due, done, refused, failed| Second { due, done, refused, failed };
        assert_eq!(
            per_second(&samples),
            [second(2, 1, 0, 0), second(2, 0, 1, 0), second(0, 0, 0, 0), second(0, 1, 0, 1)]
        );
        assert_eq!(per_second(&[]), []);
    }

    #[test]
    fn seconds_share_rows_of_long_runs() {
        struct Shown(Vec<Second>);
        impl fmt::Display for Shown {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                seconds(f, &self.0)
            }
        }
        // 100 seconds do not fit 30 rows, so a row has 4 seconds.
        let second = |number| Second { due: number, done: 2, ..Second::default() };
        let text = Shown((0..100).map(second).collect()).to_string();
        let lines: Vec<&str> = text.trim().lines().collect();
        assert_eq!(lines.len(), 1 + 25);
        let numbers =
            |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(numbers(lines[1]), "0 1.5 2.0 0.0 0.0");
        assert_eq!(numbers(lines[25]), "96 97.5 2.0 0.0 0.0");
    }

    #[test]
    fn latency_is_empty_without_measurements() {
        let figures = Figures::new([].iter(), 1.0);
        assert_eq!(figures.whole_ms, Latency::default());
    }
}
