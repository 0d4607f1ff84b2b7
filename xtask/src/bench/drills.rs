//! Attack drills end to end: every scenario that comes along is played against
//! a gateway of its own, with the real engine and the shipped model, and one
//! table says what the attack did to the honest.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::report::Report;
use super::{Options, build};
use crate::run::{command, output, root};

/// Takes ten minutes: played only where it is named.
const SOAK: &str = "soak";

/// What is drawn in pages and told by nothing here.
const SERIES: [&str; 4] = ["points", "shares", "processes", "refusals"];

/// What is played.
struct Wanted {
    /// None named: all that come along but [`SOAK`].
    scenarios: Vec<String>,
    output: PathBuf,
    as_built: bool,
}

/// Plays them one after the other, prints the table and writes it as text, and
/// all figures as JSON.
pub(super) fn run(rest: &[&str]) -> Result<()> {
    let wanted = Wanted::read(rest)?;
    let options =
        Options { rounds: 1, seconds: 1, output: wanted.output, as_built: wanted.as_built };
    let mut report = Report::begin("drills")?;
    let built = build(&options, &["-p", "tollgate"])?;
    let scenarios = match wanted.scenarios {
        named if !named.is_empty() => named,
        _ => shipped(&built)?,
    };
    let mut drills = Map::new();
    for name in scenarios {
        eprintln!("{name}");
        let found = play(&built, &name)?;
        drills.insert(name, found);
    }
    let table = Table { rows: drills.iter().map(Row::of).collect() };
    report.fact("drills", drills);
    report.end()?;
    println!("{}\n{table}", report.head());
    report.write(&options.output)?;
    let text = options.output.with_extension("md");
    let page = format!("{INTRODUCTION}\n```text\n{}```\n\n{table}", report.head());
    std::fs::write(&text, page).with_context(|| text.display().to_string())?;
    eprintln!("wrote {} and {}", options.output.display(), text.display());
    match table.rows.iter().find(|row| row.verdict == "broken") {
        Some(row) => bail!("{} broke", row.name),
        None => Ok(()),
    }
}

/// What the program says comes along, but [`SOAK`].
fn shipped(built: &Path) -> Result<Vec<String>> {
    let mut list = command(&built.join("tollgate").to_string_lossy());
    let listed = output(list.args(["loadtest", "--list"]))?;
    // Below the header each line begins with a name.
    let names = listed.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| *name != SOAK).map(str::to_owned).collect())
}

/// One scenario; what it found, without what is only drawn.
fn play(built: &Path, name: &str) -> Result<Value> {
    let folder = root().join("target/bench");
    std::fs::create_dir_all(&folder)?;
    let page = folder.join(format!("drill-{name}.html"));
    let json = page.with_extension("json");
    // What an earlier run left must not be taken for this one's.
    let _ = std::fs::remove_file(&json);
    let mut play = command(&built.join("tollgate").to_string_lossy());
    // A bound that broke is in the table; it ends the program ill.
    let status = play.args(["loadtest", "--scenario", name, "--report"]).arg(&page).status()?;
    let text = std::fs::read_to_string(&json).with_context(|| format!("{name}: {status}"))?;
    let mut found: Map<String, Value> = serde_json::from_str(&text)?;
    SERIES.iter().for_each(|series| _ = found.remove(*series));
    Ok(found.into())
}

/// What became of everybody.
struct Table {
    rows: Vec<Row>,
}

/// One scenario.
struct Row {
    name: String,
    verdict: String,
    /// Requests a second that attackers meant to send, and as a multiple of
    /// what this machine answers of them.
    offered: String,
    answered: String,
    /// The honest: first token, alone and in the attack.
    p50: String,
    p99: String,
    /// Between tokens.
    gap: String,
    refused: String,
    memory: String,
    descriptors: String,
}

impl Row {
    fn of((name, found): (&String, &Value)) -> Self {
        let honest = &found["honest"];
        let checks = found["checks"].as_array().map_or(&[][..], Vec::as_slice);
        let attackers = found["attackers"].as_array().map_or(&[][..], Vec::as_slice);
        let observed = |what: &str| {
            let said = checks.iter().find(|check| check["what"].as_str() == Some(what));
            said.and_then(|check| check["observed"].as_str()).unwrap_or("-").to_owned()
        };
        Self {
            name: name.clone(),
            verdict: found["verdict"].as_str().unwrap_or("?").to_owned(),
            offered: offered(attackers),
            answered: observed("honest requests answered, in and after the attack"),
            p50: both(honest, "first_token", "p50"),
            p99: both(honest, "first_token", "p99"),
            gap: both(honest, "between_tokens", "p99"),
            refused: refused(attackers),
            memory: observed("memory of the gateway"),
            descriptors: observed("open descriptors of the gateway"),
        }
    }
}

/// A percentile alone, then in the attack, and how many times as long.
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

fn offered(attackers: &[Value]) -> String {
    let rates: f64 = attackers.iter().filter_map(|one| one["offered_rate"].as_f64()).sum();
    let without = attackers.iter().filter(|one| one["offered_rate"].is_null()).count();
    match (rates > 0.0, without) {
        (true, 0) => format!("{rates:.0}/s"),
        (true, _) => format!("{rates:.0}/s and connections"),
        (false, _) => "connections".to_owned(),
    }
}

/// What attackers were told, the most frequent first.
fn refused(attackers: &[Value]) -> String {
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    for (what, count) in attackers.iter().filter_map(|one| one["outcomes"].as_object()).flatten() {
        *all.entry(what).or_default() += count.as_u64().unwrap_or(0);
    }
    let mut all: Vec<(&str, u64)> = all.into_iter().collect();
    all.sort_by_key(|(what, count)| (std::cmp::Reverse(*count), *what));
    let told = all.iter().take(4).map(|(what, count)| format!("{count} {what}"));
    told.collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| drill | verdict | attackers offer | honest answered | first token p50, ms | p99, ms \
             | between tokens p99, ms | what became of attackers' requests | gateway's memory \
             | descriptors |\n|---|---|---|---|---|---|---|---|---|---|"
        )?;
        self.rows.iter().try_for_each(|row| {
            let Row { name, verdict, offered, answered, p50, p99, gap, .. } = row;
            let Row { refused, memory, descriptors, .. } = row;
            writeln!(
                f,
                "| {name} | {verdict} | {offered} | {answered} | {p50} | {p99} | {gap} | {refused} \
                 | {memory} | {descriptors} |"
            )
        })
    }
}

impl Wanted {
    /// `--scenario NAME` (often), `--output FILE`, `--as-built`, in any order.
    fn read(rest: &[&str]) -> Result<Self> {
        let output = root().join("docs/benchmarks/drills.json");
        let mut wanted = Self { scenarios: Vec::new(), output, as_built: false };
        let mut words = rest.iter();
        while let Some(flag) = words.next() {
            let mut value = || words.next().with_context(|| format!("{flag} wants a value"));
            match *flag {
                "--scenario" => wanted.scenarios.push((*value()?).to_owned()),
                "--output" => wanted.output = PathBuf::from(value()?),
                "--as-built" => wanted.as_built = true,
                _ => bail!("no such option: {flag} (there: --scenario, --output, --as-built)"),
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
    fn a_drill_becomes_a_row() {
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
        let table = Table { rows: vec![Row::of((&"flood".to_owned(), &found))] };
        let expected = "| flood | holds | 10/s and connections | - | 4.0, then 5.0 (1.25x) \
                        | too few | 0.0, then 3.0 | 7 answered, 3 429 full | 1 MiB | - |\n";
        assert!(table.to_string().ends_with(expected), "{table}");
    }
}
