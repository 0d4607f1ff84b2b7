//! The plays on a real clock and the rows of their figures.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::FairnessOptions;
use super::play::{ANSWER_TIMEOUT, LedgerSample, Play, PlayResult, Sender};
use super::table::{Bound, FairnessTable, WallFigure};
use crate::bench::build;
use crate::bench::report::Report;
use crate::run::{command, output};

use Bound::{Above, AtLeast, AtMost};

/// An attack: its name in the virtual table, and the attacker's load.
struct Attack {
    name: &'static str,
    keys: u32,
    rate: f64,
    prompt: u32,
    answer: u32,
    max_tokens: u32,
    /// The bound of the victims' first token in seconds: twice the virtual bound.
    bound: f64,
}

const ATTACKS: [Attack; 5] = [
    Attack {
        name: "A1 flood, 20/s of 256/256",
        keys: 1,
        rate: 20.0,
        prompt: 256,
        answer: 256,
        max_tokens: 256,
        bound: 1.2,
    },
    Attack {
        name: "A2 the same from 50 keys",
        keys: 50,
        rate: 20.0,
        prompt: 256,
        answer: 256,
        max_tokens: 256,
        bound: 1.2,
    },
    Attack {
        name: "A3 costly prompts, 5/s of 4,000/1",
        keys: 1,
        rate: 5.0,
        prompt: 4_000,
        answer: 1,
        max_tokens: 1,
        bound: 2.4,
    },
    Attack {
        name: "A4 hogs, 5/s of 16/8 with max_tokens 4,000",
        keys: 1,
        rate: 5.0,
        prompt: 16,
        answer: 8,
        max_tokens: 4_000,
        bound: 0.6,
    },
    Attack {
        name: "A5 endless answers, 2/s of 16/2,000",
        keys: 1,
        rate: 2.0,
        prompt: 16,
        answer: 2_000,
        max_tokens: 2_000,
        bound: 1.2,
    },
];

/// The attacks with a compared throughput, each with its bound.
const THROUGHPUT: [(usize, f64); 2] = [(0, 0.93), (2, 0.73)];

/// The number of plays besides the attacks.
const OTHERS: u64 = 7;

/// The longest decision in microseconds.
const LONGEST_DECISION_US: f64 = 5.0;

/// The longest play, in seconds of the cost model.
const LONGEST: f64 = 300.0;

/// The time until queues have formed, in seconds of the cost model; at most half of a
/// play.
const WARM: f64 = 30.0;

const FAIR: &str = "fair";
const FIRST_COME: &str = "first_come";

/// Runs all plays and adds their rows to the table.
pub(super) fn run(
    options: &FairnessOptions,
    report: &mut Report,
    table: &mut FairnessTable,
) -> Result<()> {
    let build_options = options.build_options();
    let built = build(&build_options, &["-p", "tollgate"])?;
    build(&build_options, &["-p", "tollgate-loadtest", "--example", "mixed"])?;
    build(&build_options, &["-p", "tollgate-ledger", "--example", "watch"])?;
    build(&build_options, &["-p", "tollgate-engine", "--example", "decide_speed"])?;
    let plays = 5 * options.seeds + OTHERS;
    let duration = (options.minutes * 60.0 / plays as f64 * options.speed).min(LONGEST);
    report.fact("speed", options.speed);
    report.fact("seeds", options.seeds);
    report.fact("seconds_of_the_model_a_play", duration);
    let mut runner = PlayRunner { options, built, duration, plays: Vec::new(), exact: true };
    runner.attacks(table)?;
    runner.equals(table)?;
    runner.weights(table)?;
    runner.overload(table)?;
    runner.eight(table)?;
    let exact = f64::from(u8::from(runner.exact));
    table.add_wall(
        "every play: the ledger's account is exact",
        "",
        WallFigure::new(exact, AtLeast(1.0)),
    );
    report.fact("plays", runner.plays);
    decisions(&runner.built, table)
}

/// Measures the scheduler's decision with ten thousand waiting tenants.
fn decisions(built: &Path, table: &mut FairnessTable) -> Result<()> {
    let times = output(&mut command(&built.join("examples/decide_speed").to_string_lossy()))?;
    let times = times.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [tenants, _running, full, admits, _charge] = words[..] else { return None };
        (tenants == "10000").then_some([full, admits])
    });
    let times: Option<Vec<f64>> = times.flatten().map(microseconds).collect();
    let times = times.filter(|times| !times.is_empty()).context("decide_speed printed no times")?;
    let longest = times.into_iter().fold(0.0, f64::max);
    table.add_wall(
        "a decision where 10,000 tenants wait",
        "us",
        WallFigure::new(longest, AtMost(LONGEST_DECISION_US)),
    );
    Ok(())
}

/// Parses a time in the format of `{:?}` into microseconds.
fn microseconds(text: &str) -> Option<f64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "ns" => 1e-3,
        "µs" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

struct PlayRunner<'a> {
    options: &'a FairnessOptions,
    built: std::path::PathBuf,
    duration: f64,
    /// The results of every play, for the raw figures.
    plays: Vec<Value>,
    exact: bool,
}

impl PlayRunner<'_> {
    fn play(
        &mut self,
        name: &str,
        policy: &'static str,
        senders: Vec<Sender>,
        seed: u64,
    ) -> Result<PlayResult> {
        eprintln!("{name}, {policy}, seed {seed}");
        let play = Play {
            built: &self.built,
            policy,
            senders,
            duration: self.duration,
            speed: self.options.speed,
            seed,
        };
        let played = play.run().with_context(|| name.to_owned())?;
        self.exact &= played.account["exact"] == true;
        let last = played.series.last();
        let served = last.map(|moment| json!(moment.tenants)).unwrap_or_default();
        self.plays.push(json!({
            "name": name,
            "policy": policy,
            "seed": seed,
            "victims": played.report,
            "device_s_and_tokens": served,
            "prompt_tokens": played.prompt_tokens,
            "jitter_p99_s": played.jitter,
            "account": played.account,
        }));
        Ok(played)
    }

    fn attacks(&mut self, table: &mut FairnessTable) -> Result<()> {
        let mut first_seed = Vec::new();
        for attack in &ATTACKS {
            let mut worst = WallFigure::new(0.0, AtMost(attack.bound));
            for seed in 0..self.options.seeds {
                let played = self.play(attack.name, FAIR, attack.senders(), seed)?;
                let wait = first_token(&played, self.options.speed)?;
                worst.figure = worst.figure.max(wait);
                let late = sent_late(&played, self.options.speed)?;
                worst.check_lateness(played.jitter, late, attack.bound);
                if seed == 0 {
                    first_seed.push(tokens_per_second(&played));
                }
            }
            table.add_wall(&format!("{}: victims' first token p99", attack.name), "s", worst);
        }
        for (index, least) in THROUGHPUT {
            let attack = &ATTACKS[index];
            let played = self.play(attack.name, FIRST_COME, attack.senders(), 0)?;
            let ratio = first_seed[index] / tokens_per_second(&played);
            let name = format!("{}: tokens/s over first come, first served", attack.name);
            table.add_wall(&name, "", self.over_a_play(ratio, AtLeast(least)));
            if index == 0 {
                let wait = first_token(&played, self.options.speed)?;
                let mut control = WallFigure::new(wait, Above(100.0));
                if self.duration < LONGEST {
                    control.void = Some("too short a play for its bound".to_owned());
                }
                table.add_wall("control: A1 under first come, first served", "s", control);
            }
        }
        Ok(())
    }

    /// Makes a figure over a whole play. In a short play the start and the end are too
    /// large a part, so the figure is void.
    fn over_a_play(&self, figure: f64, bound: Bound) -> WallFigure {
        let mut wall = WallFigure::new(figure, bound);
        if self.duration < LONGEST / 2.0 {
            wall.void = Some("too short a play".to_owned());
        }
        wall
    }

    fn equals(&mut self, table: &mut FairnessTable) -> Result<()> {
        let senders = vec![
            sender("reader", "reader", 6.0, (512, 32)),
            sender("writer", "writer", 2.0, (32, 512)),
        ];
        let played = self.play("FB-9", FAIR, senders, 0)?;
        let served = self.served(&played);
        let ratio = served[0].max(served[1]) / served[0].min(served[1]);
        table.add_wall(
            "FB-9: device time of two equals, more over less",
            "",
            self.over_a_play(ratio, AtMost(1.10)),
        );
        Ok(())
    }

    fn weights(&mut self, table: &mut FairnessTable) -> Result<()> {
        let senders = (1..=4).map(|weight| Sender {
            weight,
            ..sender("all", &format!("weight-{weight}"), 2.0, (256, 256))
        });
        let played = self.play("weights", FAIR, senders.collect(), 0)?;
        let served = self.served(&played);
        let all: f64 = served.iter().sum();
        let deviations = served
            .iter()
            .zip([0.1, 0.2, 0.3, 0.4])
            .map(|(served, share)| (served / all / share - 1.0).abs() * 100.0);
        table.add_wall(
            "weights 1:2:3:4: furthest from its share of device time",
            "%",
            self.over_a_play(deviations.fold(0.0, f64::max), AtMost(5.0)),
        );
        Ok(())
    }

    fn overload(&mut self, table: &mut FairnessTable) -> Result<()> {
        let senders =
            || vec![sender("over", "over", 1.5, (256, 256)), sender("far", "far", 3.0, (256, 256))];
        let fair = self.play("overload", FAIR, senders(), 0)?;
        let control = self.play("overload", FIRST_COME, senders(), 0)?;
        table.add_wall(
            "overload: largest difference of device time",
            "s",
            WallFigure::new(
                largest_difference(&fair.series, self.warm(), self.duration),
                AtMost(8.0),
            ),
        );
        table.add_wall(
            "overload: tokens/s over first come, first served",
            "",
            self.over_a_play(tokens_per_second(&fair) / tokens_per_second(&control), AtLeast(0.93)),
        );
        Ok(())
    }

    fn eight(&mut self, table: &mut FairnessTable) -> Result<()> {
        let senders =
            (0..8).map(|number| sender("all", &format!("equal-{number}"), 1.0, (256, 256)));
        let played = self.play("eight equals", FAIR, senders.collect(), 0)?;
        let served = self.served(&played);
        let (sum, squares): (f64, f64) =
            served.iter().fold((0.0, 0.0), |(sum, squares), s| (sum + s, squares + s * s));
        let jain = sum * sum / (served.len() as f64 * squares);
        table.add_wall(
            "eight equals: Jain's index of device time",
            "",
            self.over_a_play(jain, AtLeast(0.99)),
        );
        let difference = largest_difference(&played.series, self.warm(), self.duration);
        table.add_wall(
            "eight equals: largest difference of device time",
            "s",
            WallFigure::new(difference, AtMost(4.0)),
        );
        Ok(())
    }

    fn warm(&self) -> f64 {
        WARM.min(self.duration / 2.0)
    }

    /// Returns each tenant's device time after the warm-up, in order of name.
    fn served(&self, played: &PlayResult) -> Vec<f64> {
        let part = between(&played.series, self.warm(), self.duration);
        let (Some(first), Some(last)) = (part.first(), part.last()) else { return Vec::new() };
        last.tenants.iter().map(|(tenant, (after, _))| after - first.tenants[tenant].0).collect()
    }
}

impl Attack {
    fn senders(&self) -> Vec<Sender> {
        let Self { keys, rate, prompt, answer, max_tokens, .. } = *self;
        let victims = (0..4).map(|number| Sender {
            awaited: true,
            ..sender("victims", &format!("victim-{number}"), 0.2, (256, 128))
        });
        let attacker =
            Sender { keys, max_tokens, ..sender("attackers", "attacker", rate, (prompt, answer)) };
        victims.chain([attacker]).collect()
    }
}

fn sender(group: &'static str, tenant: &str, rate: f64, (prompt, answer): (u32, u32)) -> Sender {
    Sender {
        group,
        tenant: tenant.to_owned(),
        weight: 1,
        keys: 1,
        rate,
        prompt,
        answer,
        max_tokens: answer,
        awaited: false,
    }
}

/// Returns the victims' p99 in seconds of the cost model. If more than a hundredth of
/// the requests got no answer, the p99 is at least [`ANSWER_TIMEOUT`].
fn first_token(played: &PlayResult, speed: f64) -> Result<f64> {
    let all = &played.report["all"];
    let due = all["due"].as_f64().context("no victims")?;
    let done = all["done"].as_f64().context("no victims")?;
    if done < due * 0.99 {
        return Ok(ANSWER_TIMEOUT);
    }
    let p99 = all["first_token_ms"]["p99"].as_f64().context("no first token")?;
    Ok(p99 / 1e3 * speed)
}

/// Returns the p99 of the delay with which victims' requests were sent, in seconds of
/// the cost model.
fn sent_late(played: &PlayResult, speed: f64) -> Result<f64> {
    let p99 = played.report["all"]["late_ms"]["p99"].as_f64().context("nothing was sent")?;
    Ok(p99 / 1e3 * speed)
}

fn tokens_per_second(played: &PlayResult) -> f64 {
    let Some(last) = played.series.last() else { return 0.0 };
    let tokens: f64 = last.tenants.values().map(|(_, tokens)| tokens).sum();
    tokens / last.at
}

fn between(series: &[LedgerSample], from: f64, to: f64) -> &[LedgerSample] {
    let first = series.partition_point(|moment| moment.at < from);
    let last = series.partition_point(|moment| moment.at <= to);
    &series[first.min(last)..last]
}

/// Returns the largest difference between two tenants at any moment, counted from
/// `from`.
fn largest_difference(series: &[LedgerSample], from: f64, to: f64) -> f64 {
    let part = between(series, from, to);
    let Some(first) = part.first() else { return 0.0 };
    let spreads = part.iter().map(|moment| {
        let served =
            moment.tenants.iter().map(|(tenant, (after, _))| after - first.tenants[tenant].0);
        let (least, most) =
            served.fold((f64::INFINITY, 0.0_f64), |(least, most), s| (least.min(s), most.max(s)));
        most - least
    });
    spreads.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::microseconds;

    #[test]
    fn microseconds_parse_every_unit() {
        for (text, expected) in [("250.00ns", 0.25), ("3.21µs", 3.21), ("1.5ms", 1_500.0)] {
            let read = microseconds(text).expect("a time");
            assert!((read - expected).abs() < 1e-9, "{text}: {read}");
        }
        assert_eq!(microseconds("fast"), None);
    }
}
