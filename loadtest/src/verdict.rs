//! The verdict on a scenario's expectations. A figure with too few samples, or one
//! that a late generator may have distorted, is unclear: it neither holds nor is
//! broken.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::drill::{AttackerResult, Drill, GATEWAY, HonestSample, ProcessPoint, Span, UsedPoint};
use crate::machine::Machine;
use crate::outcome::End;
use crate::scenario::{AttackKind, Hold, Scenario, Times};

mod figures;
mod terminal;
mod worst;

pub use figures::{Gathered, Latencies, PhaseFigures, Quantile};
pub use worst::{WorstShape, WorstShapes};

/// An expectation with its result.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The subject.
    pub what: String,
    /// The expected bound.
    pub bound: String,
    /// The observed value.
    pub observed: String,
    /// The verdict.
    pub verdict: Verdict,
}

/// A verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The expectation held.
    Holds,
    /// The observations allow no verdict.
    Unclear,
    /// The expectation was broken.
    Broken,
}

impl Verdict {
    fn of(holds: bool) -> Self {
        if holds { Self::Holds } else { Self::Broken }
    }

    /// Returns the verdict as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Unclear => "unclear",
            Self::Broken => "BROKEN",
        }
    }
}

/// The report of a drill, for people and for programs.
#[derive(Debug, Serialize)]
pub struct DrillReport {
    /// The scenario's name.
    pub scenario: String,
    /// The scenario's description.
    pub about: String,
    /// The start in Unix seconds.
    pub started: u64,
    /// The machine that sent the load.
    pub machine: Machine,
    /// The phase before the attack.
    pub alone: Span,
    /// See [`DrillReport::alone`].
    pub attack: Span,
    /// See [`DrillReport::alone`].
    pub after: Span,
    /// The worst verdict of the checks.
    pub verdict: Verdict,
    /// The expectations with their results.
    pub checks: Vec<Check>,
    /// True if the generator sent requests in time.
    pub generator_kept_up: bool,
    /// The measured capacity of the gateway.
    pub capacity: Vec<crate::drill::MeasuredCapacity>,
    /// The honest requests by phase.
    pub honest: Phased<PhaseFigures>,
    /// The honest requests by tenant and phase.
    pub tenants: BTreeMap<String, Phased<PhaseFigures>>,
    /// The attackers.
    pub attackers: Vec<AttackerFigures>,
    /// The outcomes of the attackers' requests, by second.
    pub refusals: Vec<BTreeMap<String, u64>>,
    /// The device time of each tenant in the attack, in nanoseconds.
    pub device_time_in_attack: BTreeMap<String, u64>,
    /// Memory and descriptors of each process over time.
    pub processes: BTreeMap<String, Vec<ProcessPoint>>,
    /// The use of each tenant over time.
    pub shares: crate::drill::Shares,
    /// The worst random shapes by each figure.
    pub worst_shapes: Vec<WorstShapes>,
    /// The honest requests: due time, time to the first token, and success.
    pub points: Vec<Point>,
}

/// A value for each phase.
#[derive(Clone, Debug, Serialize)]
pub struct Phased<T> {
    /// The value before the attack.
    pub alone: T,
    /// The value in the attack.
    pub attack: T,
    /// The value after the attack.
    pub after: T,
}

/// An honest request, as a point of a plot.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Point {
    /// The due time in seconds.
    pub at: f64,
    /// Milliseconds to the first token.
    pub first_token_ms: Option<f64>,
    /// True if the answer was complete.
    pub answered: bool,
}

/// The figures of an attacker.
#[derive(Clone, Debug, Serialize)]
pub struct AttackerFigures {
    /// The kind of the attack.
    pub kind: String,
    /// The attacker's tenants.
    pub who: String,
    /// The planned requests a second.
    pub offered_rate: Option<f64>,
    /// The time to the first token of the answers.
    pub first_token: Latencies,
    /// The counts of outcomes.
    pub outcomes: BTreeMap<String, u64>,
    /// The number of connections that the gateway closed.
    pub closed: u64,
    /// See [`AttackerFigures::closed`].
    pub oldest_closed: Option<f64>,
    /// The age in seconds of the oldest connection that was open at the end.
    pub oldest_open: Option<f64>,
}

impl DrillReport {
    /// Compares the drill with the scenario's expectations.
    pub fn new(scenario: &Scenario, drill: &Drill) -> Self {
        let gathered = Gathered::new(drill);
        let checks = Judge { scenario, drill, gathered: &gathered }.checks();
        let verdict = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Holds);
        let since = drill.started.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self {
            scenario: scenario.name.clone(),
            about: scenario.about.clone(),
            started: since.as_secs(),
            machine: Machine::here(),
            alone: drill.alone,
            attack: drill.attack,
            after: drill.after,
            verdict,
            checks,
            generator_kept_up: gathered.generator_kept_up,
            capacity: drill.capacity.clone(),
            honest: gathered.all.clone(),
            tenants: gathered.tenants.clone(),
            attackers: drill.attackers.iter().map(AttackerFigures::new).collect(),
            refusals: refusals(&drill.attackers),
            device_time_in_attack: figures::used(drill, drill.attack)
                .into_iter()
                .map(|(tenant, used)| (tenant, used.attributed_ns))
                .collect(),
            processes: drill.processes.clone(),
            shares: drill.shares.clone(),
            worst_shapes: worst::worst(drill),
            points: drill.honest.iter().map(point).collect(),
        }
    }
}

impl AttackerFigures {
    fn new(seen: &AttackerResult) -> Self {
        let oldest_closed = seen.closed_after.iter().copied().reduce(f64::max);
        Self {
            kind: kind_name(seen.kind).to_owned(),
            who: seen.who.clone(),
            offered_rate: seen.rate,
            first_token: Latencies::of(seen.first_tokens.clone()),
            outcomes: seen.tally.totals(),
            closed: seen.closed_after.len() as u64,
            oldest_closed,
            oldest_open: (seen.oldest_open > 0.0).then_some(seen.oldest_open),
        }
    }
}

fn point(sample: &HonestSample) -> Point {
    Point {
        at: sample.due,
        first_token_ms: sample.outcome.first_token.map(|span| span.as_secs_f64() * 1e3),
        answered: sample.outcome.end == End::Done,
    }
}

fn refusals(attackers: &[AttackerResult]) -> Vec<BTreeMap<String, u64>> {
    let mut all: Vec<BTreeMap<String, u64>> = Vec::new();
    for seen in attackers {
        for (second, counts) in seen.tally.seconds().iter().enumerate() {
            if all.len() <= second {
                all.resize(second + 1, BTreeMap::new());
            }
            for (what, count) in counts {
                *all[second].entry(what.clone()).or_default() += count;
            }
        }
    }
    all
}

/// Returns a kind as scenarios write it.
pub fn kind_name(kind: AttackKind) -> &'static str {
    match kind {
        AttackKind::Flood => "flood",
        AttackKind::ManySources => "many_sources",
        AttackKind::CostlyPrompts => "costly_prompts",
        AttackKind::Hogs => "hogs",
        AttackKind::EndlessOutputs => "endless_outputs",
        AttackKind::Sybils => "sybils",
        AttackKind::EarlyLeavers => "early_leavers",
        AttackKind::RetryStorm => "retry_storm",
        AttackKind::SlowReaders => "slow_readers",
        AttackKind::Slowloris => "slowloris",
        AttackKind::RapidReset => "rapid_reset",
        AttackKind::HoldConnections => "hold_connections",
        AttackKind::BodyFlood => "body_flood",
        AttackKind::RefusedWork => "refused_work",
        AttackKind::UnreadBesideDrip => "unread_beside_drip",
        AttackKind::TaughtEstimates => "taught_estimates",
        AttackKind::OddShapes => "odd_shapes",
        AttackKind::RandomShapes => "random_shapes",
        AttackKind::JobStorm => "job_storm",
        AttackKind::CancelStorm => "cancel_storm",
        AttackKind::GiantLines => "giant_lines",
    }
}

/// The comparison of a drill with its expectations.
struct Judge<'a> {
    scenario: &'a Scenario,
    drill: &'a Drill,
    gathered: &'a Gathered,
}

impl Judge<'_> {
    fn checks(&self) -> Vec<Check> {
        let hold = &self.scenario.hold;
        let mut checks = Vec::new();
        checks.extend(hold.success.map(|least| self.success(least)));
        if let Some(times) = hold.first_token {
            checks.extend(self.latency("first token", times, |of| &of.first_token));
        }
        if let Some(times) = hold.between_tokens {
            checks.extend(self.latency("between tokens", times, |of| &of.between_tokens));
        }
        checks.extend(hold.ahead_of_attackers.map(|least| self.ahead(least)));
        checks.extend(hold.recovery.map(|most| self.recovery(most)));
        checks.extend(self.clear_refusals());
        checks.extend(self.no_panic());
        checks.extend(self.resources(hold));
        checks.extend(hold.accepted.map(|most| self.accepted(most)));
        checks.extend(hold.goodput.map(|least| self.goodput(least)));
        checks.extend(hold.attackers_share.map(|most| self.share(most)));
        checks.extend(hold.worked_on.map(|most| self.worked_on(most)));
        checks.extend(hold.gateway_cpu.map(|most| self.gateway_cpu(most)));
        checks.extend(hold.attackers_tokens.map(|most| self.attackers_tokens(most)));
        checks.extend(hold.attackers_reference.map(|most| self.attackers_reference(most)));
        for (attacker, seen) in self.scenario.attackers.iter().zip(&self.drill.attackers) {
            checks.extend(attacker.closed_within.map(|most| closed(seen, most)));
            if attacker.kind == AttackKind::RandomShapes {
                checks.push(worst::played(attacker.requests, seen));
            }
        }
        checks
    }

    fn success(&self, least: f64) -> Check {
        let Phased { attack, after, .. } = &self.gathered.all;
        let (due, done) = (attack.due + after.due, attack.answered + after.answered);
        let share = done as f64 / due.max(1) as f64;
        let verdict = match due {
            0 => Verdict::Unclear,
            _ => Verdict::of(share >= least),
        };
        let failures: Vec<String> = self
            .gathered
            .failures
            .iter()
            .map(|(what, count)| format!("{count} x {what}"))
            .collect();
        Check {
            what: "honest requests answered in and after the attack".to_owned(),
            bound: format!("at least {:.1} %", least * 100.0),
            observed: match failures.is_empty() {
                true => format!("{done} of {due}"),
                false => format!("{done} of {due} ({})", failures.join(", ")),
            },
            verdict,
        }
    }

    /// Compares latencies in the attack with those without it. The slower of the times before
    /// and well after counts: what else a machine does changes from minute to minute.
    fn latency(
        &self,
        name: &str,
        times: Times,
        of: impl Fn(&PhaseFigures) -> &Latencies,
    ) -> Vec<Check> {
        let Gathered { all: Phased { alone, attack, .. }, settled, .. } = self.gathered;
        let (alone, attack, settled) = (of(alone), of(attack), of(settled));
        let one = |label: &str, most: Option<f64>, quantile: fn(&Latencies) -> Quantile| {
            let most = most?;
            let (before, then) = (quantile(alone), quantile(attack));
            let bound = match times.or_added {
                Some(added) => {
                    format!(
                        "at most {most} x the time without it, or {} ms more",
                        added.as_millis()
                    )
                }
                None => format!("at most {most} x the time without it"),
            };
            let (observed, verdict) = match (before, then) {
                (Quantile::Known(before), Quantile::Known(then)) => {
                    self.compare(before, quantile(settled), then, (most, times.or_added))
                }
                (before, then) => {
                    (format!("before: {before}, in the attack: {then}"), Verdict::Unclear)
                }
            };
            Some(Check { what: format!("honest {name}, {label}"), bound, observed, verdict })
        };
        [one("p50", times.p50, |all| all.p50), one("p99", times.p99, |all| all.p99)]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Compares one latency, in milliseconds. Returns the comparison in words.
    fn compare(
        &self,
        before: f64,
        settled: Quantile,
        then: f64,
        (most, added): (f64, Option<Duration>),
    ) -> (String, Verdict) {
        let (quiet, shown) = match settled {
            Quantile::Known(after) if after > before => {
                (after, format!("{before:.1} ms before, {after:.1} ms well after"))
            }
            _ => (before, format!("{before:.1} ms before")),
        };
        let added = added.map(|added| added.as_secs_f64() * 1e3);
        let fits = then <= quiet * most || added.is_some_and(|added| then <= quiet + added);
        let verdict = match fits {
            true => Verdict::Holds,
            // A late generator makes latencies longer and never shorter, so a limit that
            // holds is certain.
            false if !self.gathered.generator_kept_up => Verdict::Unclear,
            false => Verdict::Broken,
        };
        // Within the growth that is always accepted, a multiple would look like a breach.
        let grown = match added {
            Some(added) if then > quiet * most && then <= quiet + added => {
                format!("{:.1} ms more", then - quiet)
            }
            _ => format!("{:.2} x", then / quiet.max(1e-3)),
        };
        (format!("{shown}, {then:.1} ms in the attack: {grown}"), verdict)
    }

    fn ahead(&self, least: f64) -> Check {
        let all = self.drill.attackers.iter().flat_map(|seen| seen.first_tokens.iter().copied());
        let theirs = Latencies::of(all.collect()).p50;
        let ours = self.gathered.all.attack.first_token.p50;
        let (observed, verdict) = match (ours, theirs) {
            (Quantile::Known(ours), Quantile::Known(theirs)) => (
                format!("honest {ours:.1} ms, attackers {theirs:.1} ms: {:.1} x", theirs / ours),
                Verdict::of(theirs >= ours * least),
            ),
            (ours, theirs) => (format!("honest: {ours}, attackers: {theirs}"), Verdict::Unclear),
        };
        Check {
            what: "attackers' wait for the first token, relative to honest tenants, p50".to_owned(),
            bound: format!("at least {least} x"),
            observed,
            verdict,
        }
    }

    fn recovery(&self, most: Duration) -> Check {
        let took = figures::recovery(self.drill, &self.gathered.all.alone);
        let (observed, verdict) = match took {
            None => ("too few honest requests after the attack".to_owned(), Verdict::Unclear),
            Some(seconds) => {
                let fits = seconds <= most.as_secs_f64();
                let verdict = match fits {
                    false if !self.gathered.generator_kept_up => Verdict::Unclear,
                    fits => Verdict::of(fits),
                };
                (format!("after {seconds:.0} s"), verdict)
            }
        };
        Check {
            what: "honest requests are as before the attack again".to_owned(),
            bound: format!("within {} s", most.as_secs_f64()),
            observed,
            verdict,
        }
    }

    /// Checks that refusals are clear: no other server errors, and no body that is
    /// not an error.
    fn clear_refusals(&self) -> Option<Check> {
        let attackers = self.drill.attackers.iter().flat_map(|seen| seen.tally.totals());
        let all: Vec<(String, u64)> = attackers
            .chain(self.gathered.failures.clone())
            .filter(|(what, _)| is_fault(what))
            .collect();
        let faults: u64 = all.iter().map(|(_, count)| count).sum();
        let named: Vec<String> =
            all.iter().map(|(what, count)| format!("{count} x {what}")).collect();
        Some(Check {
            what: "refusals are clear".to_owned(),
            bound: "no 5xx except 503 and 504, no malformed answer".to_owned(),
            observed: if faults == 0 { "none".to_owned() } else { named.join(", ") },
            verdict: Verdict::of(faults == 0),
        })
    }

    /// Checks that the gateway and its workers logged no panic. A client may see nothing
    /// of one.
    fn no_panic(&self) -> Option<Check> {
        let panics = self.drill.panics.as_ref()?;
        Some(Check {
            what: "panics in the gateway's log".to_owned(),
            bound: "none".to_owned(),
            observed: if panics.is_empty() { "none".to_owned() } else { panics.join("; ") },
            verdict: Verdict::of(panics.is_empty()),
        })
    }

    fn resources(&self, hold: &Hold) -> Vec<Check> {
        let mut checks = Vec::new();
        let wanted = [hold.memory_growth, hold.memory_kept, hold.descriptors_growth];
        if wanted.iter().all(Option::is_none) {
            return checks;
        }
        let unclear = |what: &str| Check {
            what: what.to_owned(),
            bound: "observed".to_owned(),
            observed: "unknown; give --admin-url".to_owned(),
            verdict: Verdict::Unclear,
        };
        if self.drill.processes.is_empty() {
            checks.push(unclear("the gateway's memory and descriptors"));
            return checks;
        }
        for (name, points) in &self.drill.processes {
            let before = points.iter().filter(|point| self.drill.alone.holds(point.at));
            let Some(memory) = before.clone().map(|point| point.memory).max() else {
                checks.push(unclear(name));
                continue;
            };
            let descriptors = before.map(|point| point.descriptors).max().unwrap_or(0);
            let later = points.iter().filter(|point| point.at >= self.drill.attack.from);
            if let Some(most) = hold.memory_growth {
                let peak = later.clone().map(|point| point.memory).max().unwrap_or(memory);
                let grown = peak.saturating_sub(memory);
                checks.push(Check {
                    what: format!("memory of the {name}"),
                    bound: format!("grows by at most {} MiB", most >> 20),
                    observed: format!(
                        "{:.1} MiB before, {:.1} MiB at most",
                        mib(memory),
                        mib(peak)
                    ),
                    verdict: Verdict::of(grown <= most),
                });
            }
            if let Some(most) = hold.memory_kept {
                let last = points.last().map_or(memory, |point| point.memory);
                checks.push(Check {
                    what: format!("memory of the {name} at the end"),
                    bound: format!("at most {} MiB more than before", most >> 20),
                    observed: format!("{:.1} MiB before, {:.1} MiB", mib(memory), mib(last)),
                    verdict: Verdict::of(last.saturating_sub(memory) <= most),
                });
            }
            if let Some(most) = hold.descriptors_growth {
                let last = points.last().map_or(descriptors, |point| point.descriptors);
                let peak = later.map(|point| point.descriptors).max().unwrap_or(descriptors);
                checks.push(Check {
                    what: format!("open descriptors of the {name}"),
                    bound: format!("at the end at most {most} more than before"),
                    observed: format!("{descriptors} before, {peak} at most, {last} at the end"),
                    verdict: Verdict::of(last.saturating_sub(descriptors) <= most),
                });
            }
        }
        checks
    }

    fn accepted(&self, most: f64) -> Check {
        let Drill { alone, attack, .. } = self.drill;
        let rate = |span: &Span| {
            let all = self.drill.attackers.iter();
            let count: u64 =
                all.map(|seen| seen.tally.between("answered", span.from, span.to)).sum();
            count as f64 / span.seconds()
        };
        let (once, often) = (rate(alone), rate(attack));
        Check {
            what: "attackers' accepted requests with retries, relative to without".to_owned(),
            bound: format!("at most {most} x"),
            observed: format!(
                "{once:.2}/s without, {often:.2}/s with: {:.2} x",
                often / once.max(1e-9)
            ),
            verdict: if once == 0.0 { Verdict::Unclear } else { Verdict::of(often <= once * most) },
        }
    }

    fn goodput(&self, least: f64) -> Check {
        let tokens: u64 = self.drill.attackers.iter().map(|seen| seen.tokens).sum::<u64>()
            + self.gathered.all.attack.tokens;
        let rate = tokens as f64 / self.drill.attack.seconds();
        let most = self.drill.capacity.iter().map(|found| found.tokens_per_second);
        let capacity = most.fold(0.0, f64::max);
        Check {
            what: "answered tokens in the attack, relative to the capacity".to_owned(),
            bound: format!("at least {:.0} %", least * 100.0),
            observed: format!(
                "{rate:.0}/s of {capacity:.0}/s: {:.0} %",
                rate / capacity.max(1e-9) * 100.0
            ),
            verdict: match capacity > 0.0 {
                false => Verdict::Unclear,
                true => Verdict::of(rate >= capacity * least),
            },
        }
    }

    fn share(&self, most: f64) -> Check {
        let used = figures::used(self.drill, self.drill.attack);
        let whole: u64 = used.values().map(|used| used.attributed_ns).sum();
        let theirs: u64 = self.attackers_used(|used| used.attributed_ns);
        let share = theirs as f64 / whole.max(1) as f64;
        Check {
            what: "attackers' part of the device time in the attack".to_owned(),
            bound: format!("at most {:.0} %", most * 100.0),
            observed: format!("{:.1} % of {:.2} s", share * 100.0, whole as f64 / 1e9),
            verdict: if whole == 0 { Verdict::Unclear } else { Verdict::of(share <= most) },
        }
    }
}

impl Judge<'_> {
    /// Returns the sum of a figure over all attackers in the attack.
    fn attackers_used(&self, figure: fn(&UsedPoint) -> u64) -> u64 {
        let used = figures::used(self.drill, self.drill.attack);
        let names = self.scenario.attackers.iter().flat_map(|attacker| &attacker.tenants);
        names.filter_map(|name| used.get(name)).map(figure).sum()
    }

    fn worked_on(&self, most: u64) -> Check {
        let is_cheap = |what: &str| ["429", "503", "413"].iter().any(|code| what.starts_with(code));
        let all = self.drill.attackers.iter().flat_map(|seen| seen.tally.totals());
        let (refused, others): (Vec<_>, Vec<_>) = all.partition(|(what, _)| is_cheap(what));
        let sum = |outcomes: &[(String, u64)]| outcomes.iter().map(|(_, count)| count).sum::<u64>();
        let (refused, worked) = (sum(&refused), sum(&others));
        let named: Vec<String> =
            others.iter().map(|(what, count)| format!("{count} x {what}")).collect();
        Check {
            what: "attackers' requests that the gateway worked on".to_owned(),
            bound: format!("at most {most}"),
            observed: format!("{worked} of {} ({})", worked + refused, named.join(", ")),
            verdict: match worked + refused {
                0 => Verdict::Unclear,
                _ => Verdict::of(worked <= most),
            },
        }
    }

    fn gateway_cpu(&self, most: f64) -> Check {
        let points = self.drill.processes.get(GATEWAY).map_or(&[][..], Vec::as_slice);
        let in_phase = |span: Span| {
            let within = points.iter().filter(|point| span.holds(point.at));
            let known: Vec<(f64, f64)> =
                within.filter_map(|point| Some((point.at, point.cpu_seconds?))).collect();
            let (first, last) = (known.first()?, known.last()?);
            (last.0 > first.0).then(|| (last.1 - first.1) / (last.0 - first.0))
        };
        let (observed, verdict) = match (in_phase(self.drill.alone), in_phase(self.drill.attack)) {
            (Some(before), Some(then)) => (
                format!("{before:.2} cores before, {then:.2} cores in the attack"),
                Verdict::of(then - before <= most),
            ),
            _ => {
                ("unknown; only a gateway of the drill's own tells it".to_owned(), Verdict::Unclear)
            }
        };
        let bound = format!("at most {most} cores more than before");
        Check { what: "processor time of the gateway".to_owned(), bound, observed, verdict }
    }

    fn attackers_tokens(&self, most: u64) -> Check {
        let used = self.attackers_used(|used| used.tokens);
        Check {
            what: "attackers' tokens in the attack".to_owned(),
            bound: format!("at most {most}"),
            observed: used.to_string(),
            // Nothing used means that nothing was attacked.
            verdict: if used == 0 { Verdict::Unclear } else { Verdict::of(used <= most) },
        }
    }

    fn attackers_reference(&self, most: Duration) -> Check {
        let used = Duration::from_nanos(self.attackers_used(|used| used.reference_ns));
        Check {
            what: "attackers' reference cost in the attack".to_owned(),
            bound: format!("at most {:.3} s", most.as_secs_f64()),
            observed: format!("{:.3} s", used.as_secs_f64()),
            verdict: if used.is_zero() { Verdict::Unclear } else { Verdict::of(used <= most) },
        }
    }
}

fn closed(seen: &AttackerResult, most: Duration) -> Check {
    let most = most.as_secs_f64();
    let oldest = seen.closed_after.iter().copied().fold(seen.oldest_open, f64::max);
    // The generator notices the end a moment after the gateway acts.
    let verdict = match (seen.closed_after.is_empty(), oldest > most + 1.0) {
        (_, true) => Verdict::Broken,
        (true, false) => Verdict::Unclear,
        (false, false) => Verdict::Holds,
    };
    Check {
        what: format!("each connection of {} ({}) is closed", kind_name(seen.kind), seen.who),
        bound: format!("within {most} s"),
        observed: match seen.closed_after.is_empty() {
            true => "none was closed".to_owned(),
            false => format!("{} closed, the oldest after {oldest:.2} s", seen.closed_after.len()),
        },
        verdict,
    }
}

/// Returns true if the outcome is a fault of the gateway and not a refusal.
fn is_fault(what: &str) -> bool {
    let status = what.split(' ').next().and_then(|word| word.parse::<u16>().ok());
    let bad_status = status.is_some_and(|status| status >= 500 && status != 503 && status != 504);
    bad_status
        || what.ends_with("not an error body")
        || what.starts_with("the answer is not")
        || what.starts_with("an event")
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests;
