//! The results of a benchmark: every round of every figure, and ratios of figures round
//! by round. The report is text for people and JSON for programs.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Map, Value};

use super::machine::{self, Machine};
use crate::run::{command, output};

/// The results of one run.
#[derive(Serialize)]
pub(super) struct Report {
    benchmark: String,
    /// The start, UTC.
    began: String,
    /// The commit, with `+` if the checkout differed from the commit.
    revision: String,
    machine: Machine,
    /// The average load of the machine over a minute, before and after. Other work on
    /// the machine shows here.
    load_before: f64,
    load_after: f64,
    /// The settings of the run and the results that are no series.
    facts: Map<String, Value>,
    series: Vec<Series>,
    ratios: Vec<Ratio>,
}

/// One figure, round by round.
#[derive(Serialize)]
struct Series {
    name: String,
    unit: &'static str,
    median: f64,
    rounds: Vec<f64>,
}

/// One figure over another of the same rounds.
#[derive(Serialize)]
struct Ratio {
    name: String,
    of: String,
    to: String,
    median: f64,
    lowest: f64,
    highest: f64,
    /// The best round of one figure over the best round of the other. Other work on the
    /// machine disturbs this ratio least.
    best_to_best: f64,
}

impl Report {
    pub(super) fn begin(benchmark: &str) -> Result<Self> {
        let commit = output(command("git").args(["rev-parse", "--short=12", "HEAD"]))?;
        let changed = output(command("git").args(["status", "--porcelain", "-uno"]))?;
        let mark = if changed.is_empty() { "" } else { "+" };
        Ok(Self {
            benchmark: benchmark.to_owned(),
            began: output(command("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]))?.trim().to_owned(),
            revision: format!("{}{mark}", commit.trim()),
            machine: Machine::read()?,
            load_before: machine::load(),
            load_after: 0.0,
            facts: Map::new(),
            series: Vec::new(),
            ratios: Vec::new(),
        })
    }

    /// Adds a result that is no figure of rounds.
    pub(super) fn fact(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.to_owned(), value.into());
    }

    /// Adds one round's `value` to the figure `name`.
    pub(super) fn add(&mut self, name: &str, unit: &'static str, value: f64) {
        eprintln!("  {name}: {value:.2} {unit}");
        match self.series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.rounds.push(value),
            None => self.series.push(Series {
                name: name.to_owned(),
                unit,
                median: 0.0,
                rounds: vec![value],
            }),
        }
    }

    /// Adds the ratio `name` of two figures that took turns and returns its median.
    ///
    /// # Errors
    ///
    /// A figure is missing, or the figures have different numbers of rounds.
    pub(super) fn ratio(&mut self, name: &str, of: &str, to: &str) -> Result<f64> {
        let (upper, lower) = (self.rounds(of)?, self.rounds(to)?);
        if upper.len() != lower.len() {
            bail!("{of} and {to} have different numbers of rounds");
        }
        let each: Vec<f64> = upper.iter().zip(lower).map(|(of, to)| of / to).collect();
        let median = median(&each);
        let best_to_best = best(upper, self.unit(of)) / best(lower, self.unit(to));
        self.ratios.push(Ratio {
            name: name.to_owned(),
            of: of.to_owned(),
            to: to.to_owned(),
            median,
            lowest: lowest(&each),
            highest: highest(&each),
            best_to_best,
        });
        Ok(median)
    }

    pub(super) fn end(&mut self) -> Result<()> {
        for series in &mut self.series {
            series.median = median(&series.rounds);
        }
        self.load_after = machine::load();
        Ok(())
    }

    /// Formats the time, the revision, the machine and its load.
    pub(super) fn head(&self) -> String {
        let Self { benchmark, began, revision, machine, load_before, load_after, .. } = self;
        format!(
            "{benchmark} at {began}, revision {revision}\n{}\n\
             load {load_before:.1} before, {load_after:.1} after\n",
            machine.line()
        )
    }

    /// Writes the report as JSON.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Returns the highest round of the figure `name`.
    ///
    /// # Errors
    ///
    /// The figure is missing.
    pub(super) fn most(&self, name: &str) -> Result<f64> {
        self.rounds(name).map(highest)
    }

    fn unit(&self, name: &str) -> &'static str {
        self.series.iter().find(|series| series.name == name).map_or("", |series| series.unit)
    }

    fn rounds(&self, name: &str) -> Result<&[f64]> {
        let series = self.series.iter().find(|series| series.name == name);
        Ok(&series.with_context(|| format!("{name} was not measured"))?.rounds)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.head())?;
        writeln!(f, "{:<52}{:>12}{:>12}{:>12}", "figure", "median", "lowest", "highest")?;
        for Series { name, unit, median, rounds } in &self.series {
            let (lowest, highest) = (lowest(rounds), highest(rounds));
            let name = format!("{name}, {unit}");
            writeln!(f, "{name:<52}{median:>12.2}{lowest:>12.2}{highest:>12.2}")?;
        }
        let best = "best to best";
        writeln!(
            f,
            "\n{:<52}{:>12}{:>12}{:>12}{best:>14}",
            "ratio", "median", "lowest", "highest"
        )?;
        for Ratio { name, median, lowest, highest, best_to_best, .. } in &self.ratios {
            let figures = format!("{median:>12.3}{lowest:>12.3}{highest:>12.3}");
            writeln!(f, "{name:<52}{figures}{best_to_best:>14.3}")?;
        }
        Ok(())
    }
}

/// Returns the best round: the highest of a rate, the lowest of any other figure.
fn best(values: &[f64], unit: &str) -> f64 {
    if unit.ends_with("/s") { highest(values) } else { lowest(values) }
}

fn lowest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn highest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// Returns the middle value, or the mean of the two middle values.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::{best, median};

    #[test]
    fn median_and_best_follow_the_unit() {
        for (values, expected) in
            [(&[3.0][..], 3.0), (&[9.0, 1.0, 2.0], 2.0), (&[4.0, 1.0, 3.0, 2.0], 2.5)]
        {
            assert_eq!(median(values), expected, "{values:?}");
        }
        assert!(median(&[]).is_nan());
        assert_eq!(best(&[1.0, 2.0], "requests/s"), 2.0);
        assert_eq!(best(&[1.0, 2.0], "ms"), 1.0);
    }
}
