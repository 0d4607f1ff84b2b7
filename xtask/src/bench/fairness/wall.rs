//! The plays on a real clock, and the rows that come of them.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Wanted;
use super::play::{Moment, PATIENCE, Play, Played, Sender};
use super::table::{Bound, Table, Wall};
use crate::bench::build;
use crate::bench::report::Report;
use crate::run::{command, output};

use Bound::{Above, AtLeast, AtMost};

/// An attack: its name as the virtual table has it, and the attacker.
struct Attack {
    name: &'static str,
    keys: u32,
    rate: f64,
    prompt: u32,
    answer: u32,
    max_tokens: u32,
    /// The victims' first token, seconds: twice the virtual bound.
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

/// Whose throughput is compared, and the bound.
const THROUGHPUT: [(usize, f64); 2] = [(0, 0.93), (2, 0.73)];

/// Plays besides the attacks.
const OTHERS: u64 = 7;

/// The longest that a decision may take.
const LONGEST_DECISION_US: f64 = 5.0;

/// The longest that a play lasts, seconds of the model.
const LONGEST: f64 = 300.0;

/// Until queues stand, seconds of the model; at most half of a play.
const WARM: f64 = 30.0;

const FAIR: &str = "fair";
const FIRST_COME: &str = "first_come";

/// Plays everything.
pub(super) fn run(wanted: &Wanted, report: &mut Report, table: &mut Table) -> Result<()> {
    let options = wanted.options();
    let built = build(&options, &["-p", "tollgate"])?;
    build(&options, &["-p", "tollgate-loadtest", "--example", "mixed"])?;
    build(&options, &["-p", "tollgate-ledger", "--example", "watch"])?;
    build(&options, &["-p", "tollgate-engine", "--example", "decide_speed"])?;
    let plays = 5 * wanted.seeds + OTHERS;
    let lasts = (wanted.minutes * 60.0 / plays as f64 * wanted.speed).min(LONGEST);
    report.fact("speed", wanted.speed);
    report.fact("seeds", wanted.seeds);
    report.fact("seconds_of_the_model_a_play", lasts);
    let mut players = Players { wanted, built, lasts, told: Vec::new(), exact: true };
    players.attacks(table)?;
    players.equals(table)?;
    players.weights(table)?;
    players.overload(table)?;
    players.eight(table)?;
    let exact = f64::from(u8::from(players.exact));
    table.add_wall("every play: the ledger's account is exact", "", Wall::new(exact, AtLeast(1.0)));
    report.fact("plays", players.told);
    decisions(&players.built, table)
}

/// How long the scheduler takes to decide where ten thousand tenants wait.
fn decisions(built: &Path, table: &mut Table) -> Result<()> {
    let told = output(&mut command(&built.join("examples/decide_speed").to_string_lossy()))?;
    let times = told.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [tenants, _running, full, admits, _charge] = words[..] else { return None };
        (tenants == "10000").then_some([full, admits])
    });
    let times: Option<Vec<f64>> = times.flatten().map(microseconds).collect();
    let times = times.filter(|times| !times.is_empty()).context("decide_speed told no times")?;
    let longest = times.into_iter().fold(0.0, f64::max);
    table.add_wall(
        "a decision where 10,000 tenants wait",
        "us",
        Wall::new(longest, AtMost(LONGEST_DECISION_US)),
    );
    Ok(())
}

/// A time as `{:?}` writes it.
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

struct Players<'a> {
    wanted: &'a Wanted,
    built: std::path::PathBuf,
    lasts: f64,
    /// Every play, for the raw figures.
    told: Vec<Value>,
    exact: bool,
}

impl Players<'_> {
    fn play(
        &mut self,
        name: &str,
        policy: &'static str,
        senders: Vec<Sender>,
        seed: u64,
    ) -> Result<Played> {
        eprintln!("{name}, {policy}, seed {seed}");
        let play = Play {
            built: &self.built,
            policy,
            senders,
            lasts: self.lasts,
            speed: self.wanted.speed,
            seed,
        };
        let played = play.run().with_context(|| name.to_owned())?;
        self.exact &= played.account["exact"] == true;
        let last = played.series.last();
        let served = last.map(|moment| json!(moment.tenants)).unwrap_or_default();
        self.told.push(json!({
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

    fn attacks(&mut self, table: &mut Table) -> Result<()> {
        let mut first_seed = Vec::new();
        for attack in &ATTACKS {
            let mut worst = Wall::new(0.0, AtMost(attack.bound));
            for seed in 0..self.wanted.seeds {
                let played = self.play(attack.name, FAIR, attack.senders(), seed)?;
                let wait = first_token(&played, self.wanted.speed)?;
                worst.figure = worst.figure.max(wait);
                let late = sent_late(&played, self.wanted.speed)?;
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
                let wait = first_token(&played, self.wanted.speed)?;
                let mut control = Wall::new(wait, Above(100.0));
                if self.lasts < LONGEST {
                    control.void = Some("too short a play for its bound".to_owned());
                }
                table.add_wall("control: A1 under first come, first served", "s", control);
            }
        }
        Ok(())
    }

    /// A figure over a whole play: what it takes for queues to stand, and what
    /// is under way at the end, must not be much of it.
    fn over_a_play(&self, figure: f64, bound: Bound) -> Wall {
        let mut wall = Wall::new(figure, bound);
        if self.lasts < LONGEST / 2.0 {
            wall.void = Some("too short a play".to_owned());
        }
        wall
    }

    fn equals(&mut self, table: &mut Table) -> Result<()> {
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

    fn weights(&mut self, table: &mut Table) -> Result<()> {
        let senders = (1..=4).map(|weight| Sender {
            weight,
            ..sender("all", &format!("weight-{weight}"), 2.0, (256, 256))
        });
        let played = self.play("weights", FAIR, senders.collect(), 0)?;
        let served = self.served(&played);
        let all: f64 = served.iter().sum();
        let strays = served
            .iter()
            .zip([0.1, 0.2, 0.3, 0.4])
            .map(|(served, share)| (served / all / share - 1.0).abs() * 100.0);
        table.add_wall(
            "weights 1:2:3:4: furthest from its share of device time",
            "%",
            self.over_a_play(strays.fold(0.0, f64::max), AtMost(5.0)),
        );
        Ok(())
    }

    fn overload(&mut self, table: &mut Table) -> Result<()> {
        let senders =
            || vec![sender("over", "over", 1.5, (256, 256)), sender("far", "far", 3.0, (256, 256))];
        let fair = self.play("overload", FAIR, senders(), 0)?;
        let control = self.play("overload", FIRST_COME, senders(), 0)?;
        table.add_wall(
            "overload: largest difference of device time",
            "s",
            Wall::new(largest_difference(&fair.series, self.warm(), self.lasts), AtMost(8.0)),
        );
        table.add_wall(
            "overload: tokens/s over first come, first served",
            "",
            self.over_a_play(tokens_per_second(&fair) / tokens_per_second(&control), AtLeast(0.93)),
        );
        Ok(())
    }

    fn eight(&mut self, table: &mut Table) -> Result<()> {
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
        let difference = largest_difference(&played.series, self.warm(), self.lasts);
        table.add_wall(
            "eight equals: largest difference of device time",
            "s",
            Wall::new(difference, AtMost(4.0)),
        );
        Ok(())
    }

    fn warm(&self) -> f64 {
        WARM.min(self.lasts / 2.0)
    }

    /// Each tenant's device time once queues stand, in order of name.
    fn served(&self, played: &Played) -> Vec<f64> {
        let part = between(&played.series, self.warm(), self.lasts);
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

/// The victims' p99, seconds of the model. Where more than a hundredth was not
/// answered it is at least as long as they were waited for.
fn first_token(played: &Played, speed: f64) -> Result<f64> {
    let all = &played.report["all"];
    let due = all["due"].as_f64().context("no victims")?;
    let done = all["done"].as_f64().context("no victims")?;
    if done < due * 0.99 {
        return Ok(PATIENCE);
    }
    let p99 = all["first_token_ms"]["p99"].as_f64().context("no first token")?;
    Ok(p99 / 1e3 * speed)
}

/// The p99 by which victims' requests were sent late, seconds of the model.
fn sent_late(played: &Played, speed: f64) -> Result<f64> {
    let p99 = played.report["all"]["late_ms"]["p99"].as_f64().context("nothing was sent")?;
    Ok(p99 / 1e3 * speed)
}

fn tokens_per_second(played: &Played) -> f64 {
    let Some(last) = played.series.last() else { return 0.0 };
    let tokens: f64 = last.tenants.values().map(|(_, tokens)| tokens).sum();
    tokens / last.at
}

fn between(series: &[Moment], from: f64, to: f64) -> &[Moment] {
    let first = series.partition_point(|moment| moment.at < from);
    let last = series.partition_point(|moment| moment.at <= to);
    &series[first.min(last)..last]
}

/// The most by which any tenant was ahead of any other, counted from `from`.
fn largest_difference(series: &[Moment], from: f64, to: f64) -> f64 {
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
    fn reads_times_as_they_are_written() {
        for (text, expected) in [("250.00ns", 0.25), ("3.21µs", 3.21), ("1.5ms", 1_500.0)] {
            let read = microseconds(text).expect("a time");
            assert!((read - expected).abs() < 1e-9, "{text}: {read}");
        }
        assert_eq!(microseconds("fast"), None);
    }
}
