//! Attack drills end to end. Each shipped scenario runs against a gateway of its own,
//! with the real engine and the shipped model. One table shows the effect of each
//! attack on the honest tenants.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::report::Report;
use super::{Options, build};
use crate::run::{command, output, root, target};

/// The scenario that takes ten minutes and runs only if it is named.
const SOAK: &str = "soak";

/// Scenarios that are played and reported, and that fail nothing by a broken bound: the attackers
/// need more processors than two, and the generator takes those of the gateway.
const MEASURED_ONLY: [&str; 1] = ["all"];

/// The keys of series that the HTML page draws and the figures leave out.
const SERIES: [&str; 4] = ["points", "shares", "processes", "refusals"];

/// The options of a run.
struct DrillOptions {
    /// The scenarios to run. If empty, all shipped scenarios but [`SOAK`].
    scenarios: Vec<String>,
    /// True if [`SOAK`] runs with all others.
    soak: bool,
    output: PathBuf,
    as_built: bool,
}

/// Runs the scenarios one after the other, prints the table, and writes the table as
/// text and all figures as JSON.
pub(super) fn run(rest: &[&str]) -> Result<()> {
    let wanted = DrillOptions::read(rest)?;
    let options =
        Options { rounds: 1, seconds: 1, output: wanted.output, as_built: wanted.as_built };
    let mut report = Report::begin("drills")?;
    let built = build(&options, &["-p", "tollgate"])?;
    let scenarios = match wanted.scenarios {
        named if !named.is_empty() => named,
        _ => shipped(&built, wanted.soak)?,
    };
    let mut drills = Map::new();
    for name in scenarios {
        eprintln!("{name}");
        let found = play(&built, &name, &name)?;
        drills.insert(name, found);
    }
    let table = DrillTable { rows: drills.iter().map(DrillRow::of).collect() };
    report.fact("drills", drills);
    report.end()?;
    println!("{}\n{table}", report.head());
    report.write(&options.output)?;
    let text = options.output.with_extension("md");
    let page = format!("{INTRODUCTION}\n```text\n{}```\n\n{table}", report.head());
    std::fs::write(&text, page).with_context(|| text.display().to_string())?;
    eprintln!("wrote {} and {}", options.output.display(), text.display());
    let is_judged = |row: &&DrillRow| !MEASURED_ONLY.contains(&row.name.as_str());
    match table.rows.iter().filter(is_judged).find(|row| row.verdict == "broken") {
        Some(row) => bail!("the scenario {} broke a bound", row.name),
        None => Ok(()),
    }
}

/// Lists the shipped scenarios, with [`SOAK`] or without it.
fn shipped(built: &Path, soak: bool) -> Result<Vec<String>> {
    let mut list = command(&built.join("tollgate").to_string_lossy());
    let listed = output(list.args(["loadtest", "--list"]))?;
    let names = names_in(&listed).into_iter();
    Ok(names.filter(|name| soak || *name != SOAK).map(str::to_owned).collect())
}

/// Returns the names in the output of `tollgate loadtest --list`.
fn names_in(listed: &str) -> Vec<&str> {
    // The first line is a header. Each further line begins with a name, or with a space if it
    // continues a description.
    let lines = listed.lines().skip(1).filter(|line| !line.starts_with(' '));
    lines.filter_map(|line| line.split_whitespace().next()).collect()
}

/// Runs one scenario, a shipped one or a file, and returns its figures without [`SERIES`]. The
/// report's name has `name` in it.
pub(super) fn play(built: &Path, scenario: &str, name: &str) -> Result<Value> {
    let folder = target().join("bench");
    std::fs::create_dir_all(&folder)?;
    let page = folder.join(format!("drill-{name}.html"));
    let json = page.with_extension("json");
    // A figure file of an earlier run must not be taken for the file of this run.
    let _ = std::fs::remove_file(&json);
    let mut play = command(&built.join("tollgate").to_string_lossy());
    // A broken bound gives a non-zero status; the table shows the bound, so the status
    // is no error.
    let status = play.args(["loadtest", "--scenario", scenario, "--report"]).arg(&page).status()?;
    let text = std::fs::read_to_string(&json).with_context(|| format!("{name}: {status}"))?;
    let mut found: Map<String, Value> = serde_json::from_str(&text)?;
    SERIES.iter().for_each(|series| _ = found.remove(*series));
    Ok(found.into())
}

/// The table of all scenarios.
struct DrillTable {
    rows: Vec<DrillRow>,
}

/// One row of the table: a scenario.
struct DrillRow {
    name: String,
    verdict: String,
    /// The requests a second that attackers tried to send.
    offered: String,
    answered: String,
    /// The milliseconds to the first token of honest requests, alone and in the attack.
    p50: String,
    p99: String,
    /// The milliseconds between two tokens of honest requests, p99.
    gap: String,
    refused: String,
    memory: String,
    descriptors: String,
}

impl DrillRow {
    fn of((name, found): (&String, &Value)) -> Self {
        let honest = &found["honest"];
        let checks = found["checks"].as_array().map_or(&[][..], Vec::as_slice);
        let attackers = found["attackers"].as_array().map_or(&[][..], Vec::as_slice);
        let observed = |what: &str| {
            let check = checks.iter().find(|check| check["what"].as_str() == Some(what));
            check.and_then(|check| check["observed"].as_str()).unwrap_or("-").to_owned()
        };
        Self {
            name: name.clone(),
            verdict: found["verdict"].as_str().unwrap_or("?").to_owned(),
            offered: offered(attackers),
            answered: observed("honest requests answered in and after the attack"),
            p50: both(honest, "first_token", "p50"),
            p99: both(honest, "first_token", "p99"),
            gap: both(honest, "between_tokens", "p99"),
            refused: refused(attackers),
            memory: observed("memory of the gateway"),
            descriptors: observed("open descriptors of the gateway"),
        }
    }
}

/// Formats a percentile alone, then in the attack, then their ratio.
fn both(honest: &Value, kind: &str, quantile: &str) -> String {
    let of = |phase: &str| honest[phase][kind][quantile].as_f64();
    match (of("alone"), of("attack")) {
        (Some(alone), Some(attack)) if alone > 0.0 => {
            format!("{alone:.1}, then {attack:.1} ({:.2}x)", attack / alone)
        }
        (Some(alone), Some(attack)) => format!("{alone:.1}, then {attack:.1}"),
        _ => "too few".to_owned(),
    }
}

/// Formats the rate that attackers offered; an attack by connections has no rate.
fn offered(attackers: &[Value]) -> String {
    let rates: f64 = attackers.iter().filter_map(|one| one["offered_rate"].as_f64()).sum();
    let without = attackers.iter().filter(|one| one["offered_rate"].is_null()).count();
    match (rates > 0.0, without) {
        (true, 0) => format!("{rates:.0}/s"),
        (true, _) => format!("{rates:.0}/s and connections"),
        (false, _) => "connections".to_owned(),
    }
}

/// Formats the four most frequent outcomes of attackers' requests.
fn refused(attackers: &[Value]) -> String {
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    for (what, count) in attackers.iter().filter_map(|one| one["outcomes"].as_object()).flatten() {
        *all.entry(what).or_default() += count.as_u64().unwrap_or(0);
    }
    let mut all: Vec<(&str, u64)> = all.into_iter().collect();
    all.sort_by_key(|(what, count)| (std::cmp::Reverse(*count), *what));
    let shown = all.iter().take(4).map(|(what, count)| format!("{count} {what}"));
    shown.collect::<Vec<_>>().join(", ")
}

impl fmt::Display for DrillTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| drill | verdict | attackers offer | honest answered | first token p50, ms | p99, ms \
             | between tokens p99, ms | what became of attackers' requests | gateway's memory \
             | descriptors |\n|---|---|---|---|---|---|---|---|---|---|"
        )?;
        self.rows.iter().try_for_each(|row| {
            let DrillRow { name, verdict, offered, answered, p50, p99, gap, .. } = row;
            let DrillRow { refused, memory, descriptors, .. } = row;
            writeln!(
                f,
                "| {name} | {verdict} | {offered} | {answered} | {p50} | {p99} | {gap} | {refused} \
                 | {memory} | {descriptors} |"
            )
        })
    }
}

impl DrillOptions {
    /// Parses `--scenario NAME` (repeatable), `--soak`, `--output FILE` and `--as-built`, in any
    /// order.
    fn read(rest: &[&str]) -> Result<Self> {
        let output = root().join("docs/benchmarks/drills.json");
        let mut wanted = Self { scenarios: Vec::new(), soak: false, output, as_built: false };
        let mut words = rest.iter();
        while let Some(flag) = words.next() {
            let mut value = || words.next().with_context(|| format!("{flag} needs a value"));
            match *flag {
                "--scenario" => wanted.scenarios.push((*value()?).to_owned()),
                "--output" => wanted.output = PathBuf::from(value()?),
                "--as-built" => wanted.as_built = true,
                "--soak" => wanted.soak = true,
                _ => bail!(
                    "no such option: {flag} (options: --scenario, --soak, --output, --as-built)"
                ),
            }
        }
        Ok(wanted)
    }
}

const INTRODUCTION: &str = "# Attack drills with the real engine

Written by `cargo xtask bench drills`; [README.md](README.md) says how to read it,
[attacks.md](../attacks.md) what is played. Load, gateway and worker share one
machine. Raw figures: [drills.json](drills.json).
";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn drill_names_leave_out_descriptions() {
        let listed = "scenario   takes\nflood       50 s\n    shows One tenant.\nsoak      900 s\n";
        assert_eq!(names_in(listed), ["flood", "soak"]);
    }

    #[test]
    fn drill_figures_become_a_table_row() {
        let found = json!({
            "verdict": "holds",
            "honest": {
                "alone": {"first_token": {"p50": 4.0, "p99": 8.0}, "between_tokens": {"p99": 0.0}},
                "attack": {"first_token": {"p50": 5.0, "p99": "9 samples, 100 wanted"},
                           "between_tokens": {"p99": 3.0}},
            },
            "checks": [{"what": "memory of the gateway", "observed": "1 MiB"}],
            "attackers": [
                {"offered_rate": 10.4, "outcomes": {"429 full": 3, "answered": 5}},
                {"offered_rate": null, "outcomes": {"answered": 2}},
            ],
        });
        let table = DrillTable { rows: vec![DrillRow::of((&"flood".to_owned(), &found))] };
        let expected = "| flood | holds | 10/s and connections | - | 4.0, then 5.0 (1.25x) \
                        | too few | 0.0, then 3.0 | 7 answered, 3 429 full | 1 MiB | - |\n";
        assert!(table.to_string().ends_with(expected), "{table}");
    }
}
