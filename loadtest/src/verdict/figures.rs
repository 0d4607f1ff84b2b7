//! From samples to figures: percentiles that say when they stand on too few,
//! recovery, and device time within a span.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use super::Phased;
use crate::drill::Tally;
use crate::drill::{Drill, HonestSample, Span};
use crate::outcome::End;

/// A percentile, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantile {
    /// In milliseconds.
    Known(f64),
    /// There are so many samples, and so many are wanted.
    TooFew(usize, usize),
}

impl fmt::Display for Quantile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(ms) => write!(f, "{ms:.1} ms"),
            Self::TooFew(there, wanted) => write!(f, "{there} samples, {wanted} wanted"),
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

/// Latencies of one kind, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latencies {
    /// How many were measured.
    pub count: usize,
    /// Half were faster.
    pub p50: Quantile,
    /// All but a hundredth were faster.
    pub p99: Quantile,
    /// The slowest.
    pub max: Option<f64>,
}

/// Samples below which half of them say nothing.
const FOR_P50: usize = 10;

/// Samples below which there is no slowest hundredth.
const FOR_P99: usize = 100;

impl Latencies {
    /// Of milliseconds in any order.
    pub fn of(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let at = |quantile: f64, wanted: usize| match all.len() {
            there if there < wanted => Quantile::TooFew(there, wanted),
            // The smallest value that this part of all does not exceed.
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

/// The honest in one phase.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseFigures {
    /// Requests that fell due.
    pub due: u64,
    /// Answered whole.
    pub answered: u64,
    /// Tokens of those.
    pub tokens: u64,
    /// From due to the first token.
    pub first_token: Latencies,
    /// Between pieces of content.
    pub between_tokens: Latencies,
    /// From due to sent.
    pub late: Latencies,
    /// Waiting for a place in the worker's batch.
    pub queued: Latencies,
    /// From that place to the prompt's end.
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
            late.push(ms(outcome.late));
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

/// What the honest saw, gathered.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// All of them.
    pub all: Phased<PhaseFigures>,
    /// Each tenant's.
    pub tenants: BTreeMap<String, Phased<PhaseFigures>>,
    /// What became of those that were not answered, in and after the attack.
    pub failures: BTreeMap<String, u64>,
    /// Whether requests went out when they were due.
    pub generator_kept_up: bool,
}

/// A generator that was later than this for one request in twenty was itself
/// what was measured.
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
        let late =
            all.iter().filter(|s| s.outcome.late.as_secs_f64() * 1e3 > TOLERATED_LATENESS_MS);
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
        Self {
            all: phased(&all),
            tenants: tenants.iter().map(|(name, own)| (name.clone(), phased(own))).collect(),
            failures: failures.totals(),
            generator_kept_up,
        }
    }
}

/// Seconds from the attack's end until the honest are as they were: the end of
/// the last second in which most of them failed or took longer than twice the
/// slowest of before.
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

/// Nanoseconds of device time of each tenant within `span`.
pub(super) fn device_time(drill: &Drill, span: Span) -> BTreeMap<String, u64> {
    let at = |points: &[(f64, u64)], when: f64| {
        points.iter().take_while(|(at, _)| *at <= when).last().map_or(0, |(_, nanos)| *nanos)
    };
    drill
        .shares
        .iter()
        .map(|(tenant, points)| {
            // Records come a moment after the work.
            let within = at(points, span.to + 1.0).saturating_sub(at(points, span.from));
            (tenant.clone(), within)
        })
        .collect()
}
