//! The figures of samples: percentiles with their number of samples, the recovery,
//! and the device time within a span.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use super::Phased;
use crate::drill::Tally;
use crate::drill::{Drill, HonestSample, Span, UsedPoint};
use crate::outcome::End;

/// A percentile, or the reason why it is unknown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantile {
    /// The value in milliseconds.
    Known(f64),
    /// Too few samples: the number of samples, and the number that is needed.
    TooFew(usize, usize),
}

impl fmt::Display for Quantile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Tokens that arrive in one piece have next to no time between them.
            Self::Known(ms) if *ms < 0.05 => f.write_str("< 0.1 ms"),
            Self::Known(ms) => write!(f, "{ms:.1} ms"),
            Self::TooFew(there, wanted) => write!(f, "{there} samples, {wanted} needed"),
        }
    }
}

impl Serialize for Quantile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Known(ms) => serializer.serialize_f64(*ms),
            Self::TooFew(..) => serializer.serialize_str(&self.to_string()),
        }
    }
}

/// The latencies of one kind, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latencies {
    /// The number of measurements.
    pub count: usize,
    /// The median.
    pub p50: Quantile,
    /// The 99th percentile.
    pub p99: Quantile,
    /// The largest value.
    pub max: Option<f64>,
}

/// Samples that a median needs.
const FOR_P50: usize = 10;

/// Samples that a 99th percentile needs.
const FOR_P99: usize = 100;

impl Latencies {
    /// Computes the figures of milliseconds in any order.
    pub fn of(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let at = |quantile: f64, wanted: usize| match all.len() {
            there if there < wanted => Quantile::TooFew(there, wanted),
            // The smallest value that this part of the samples does not exceed.
            there => Quantile::Known(all[(there as f64 * quantile).ceil() as usize - 1]),
        };
        Self {
            count: all.len(),
            p50: at(0.5, FOR_P50),
            p99: at(0.99, FOR_P99),
            max: all.last().copied(),
        }
    }
}

/// The figures of honest requests in one phase.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseFigures {
    /// Requests that were due.
    pub due: u64,
    /// Requests with a complete answer.
    pub answered: u64,
    /// Tokens of those answers.
    pub tokens: u64,
    /// The time from due to the first token.
    pub first_token: Latencies,
    /// The time between pieces of content.
    pub between_tokens: Latencies,
    /// The time from due to sent.
    pub late: Latencies,
    /// The wait for the worker's batch.
    pub queued: Latencies,
    /// The time from there to the end of the prompt.
    pub read: Latencies,
}

impl PhaseFigures {
    fn of<'a>(samples: impl Iterator<Item = &'a HonestSample>) -> Self {
        let [mut first, mut gaps, mut late, mut queued, mut read] = std::array::from_fn(|_| vec![]);
        let (mut due, mut answered, mut tokens) = (0, 0, 0);
        let ms = |span: std::time::Duration| span.as_secs_f64() * 1e3;
        for sample in samples {
            due += 1;
            let outcome = &sample.outcome;
            late.extend(outcome.late.map(ms));
            if outcome.end == End::Done {
                answered += 1;
                tokens += outcome.tokens;
                first.extend(outcome.first_token.map(ms));
                gaps.extend(outcome.gaps.iter().copied().map(ms));
                queued.extend(outcome.at_worker.map(|at_worker| ms(at_worker.queued)));
                read.extend(outcome.at_worker.map(|at_worker| ms(at_worker.read)));
            }
        }
        let [first_token, between_tokens, late, queued, read] =
            [first, gaps, late, queued, read].map(Latencies::of);
        Self { due, answered, tokens, first_token, between_tokens, late, queued, read }
    }
}

/// The figures of all honest requests.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// The figures of all tenants.
    pub all: Phased<PhaseFigures>,
    /// The figures of each tenant.
    pub tenants: BTreeMap<String, Phased<PhaseFigures>>,
    /// The figures of all tenants from 5 s after the attack on.
    pub settled: PhaseFigures,
    /// The outcomes of requests without a complete answer, in and after the attack.
    pub failures: BTreeMap<String, u64>,
    /// True if requests were sent in time.
    pub generator_kept_up: bool,
}

/// The seconds after an attack from which on nothing of it may be left. The scenarios demand at
/// most as many for the recovery.
const SETTLED: f64 = 5.0;

/// The lateness for one request in twenty above which the generator itself was the
/// bottleneck.
const TOLERATED_LATENESS_MS: f64 = 25.0;

impl Gathered {
    pub(super) fn new(drill: &Drill) -> Self {
        let mut tenants: BTreeMap<String, Vec<&HonestSample>> = BTreeMap::new();
        let mut failures = Tally::default();
        for sample in &drill.honest {
            tenants.entry(sample.tenant.to_string()).or_default().push(sample);
            if sample.outcome.end != End::Done && sample.due >= drill.attack.from {
                failures.add(0.0, &crate::drill::outcome_name(&sample.outcome.end));
            }
        }
        let all: Vec<&HonestSample> = drill.honest.iter().collect();
        let is_late = |late: std::time::Duration| late.as_secs_f64() * 1e3 > TOLERATED_LATENESS_MS;
        let late = all.iter().filter(|sample| sample.outcome.late.is_some_and(is_late));
        let generator_kept_up = late.count() * 20 <= all.len();
        let phased = |samples: &[&HonestSample]| {
            let phase = |span: Span| {
                PhaseFigures::of(samples.iter().copied().filter(|sample| span.holds(sample.due)))
            };
            Phased {
                alone: phase(drill.alone),
                attack: phase(drill.attack),
                after: phase(drill.after),
            }
        };
        let settled = Span { from: drill.after.from + SETTLED, to: drill.after.to };
        let is_settled = |sample: &&HonestSample| settled.holds(sample.due);
        Self {
            settled: PhaseFigures::of(all.iter().copied().filter(is_settled)),
            all: phased(&all),
            tenants: tenants.iter().map(|(name, own)| (name.clone(), phased(own))).collect(),
            failures: failures.totals(),
            generator_kept_up,
        }
    }
}

/// Returns the seconds from the end of the attack to the end of the last second in
/// which most honest requests failed or took more than twice the slowest time
/// before the attack.
pub(super) fn recovery(drill: &Drill, alone: &PhaseFigures) -> Option<f64> {
    let usual = alone.first_token.max?;
    let after: Vec<&HonestSample> =
        drill.honest.iter().filter(|sample| drill.after.holds(sample.due)).collect();
    if after.len() < FOR_P50 {
        return None;
    }
    let mut recovered: f64 = 0.0;
    for second in 0..drill.after.seconds().ceil() as u32 {
        let from = drill.after.from + f64::from(second);
        let within = Span { from, to: from + 1.0 };
        let here: Vec<_> = after.iter().filter(|sample| within.holds(sample.due)).collect();
        let slow = here.iter().filter(|sample| {
            let first = sample.outcome.first_token.map(|span| span.as_secs_f64() * 1e3);
            sample.outcome.end != End::Done || first.is_some_and(|first| first > 2.0 * usual)
        });
        if slow.count() * 2 > here.len() {
            recovered = f64::from(second) + 1.0;
        }
    }
    Some(recovered)
}

/// Returns the use of each tenant within `span`.
pub(super) fn used(drill: &Drill, span: Span) -> BTreeMap<String, UsedPoint> {
    let at = |points: &[UsedPoint], when: f64| {
        let last = points.iter().take_while(|point| point.at <= when).last();
        last.copied().unwrap_or_default()
    };
    drill
        .shares
        .iter()
        .map(|(tenant, points)| {
            // Records arrive a moment after the work.
            let within = at(points, span.to + 1.0).since(&at(points, span.from));
            (tenant.clone(), within)
        })
        .collect()
}
