//! Two reports side by side, with the ratio of each figure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::report::{Figures, Latency, Report};

/// Returns a table of the figures of `a` and `b`, in at most 80 columns.
pub fn compare(a: &Report, b: &Report) -> String {
    let mut table = Table { text: String::new() };
    let mut line = |figure: &str, digits, of: fn(&Report) -> f64| {
        table.row(figure, digits, [Some(of(a)), Some(of(b))]);
    };
    line("seconds", 1, |report| report.seconds);
    line("offered requests/s", 1, |report| report.offered_rate);
    line("requests/s", 1, |report| report.all.requests_per_second);
    line("tokens/s", 1, |report| report.all.tokens_per_second);
    line("due", 0, |report| report.all.due as f64);
    line("done", 0, |report| report.all.done as f64);
    table.kinds("refused", [&a.all.refused, &b.all.refused]);
    table.kinds("failed", [&a.all.failed, &b.all.failed]);
    table.latencies([&a.all, &b.all]);
    let names: BTreeSet<&String> = a.tenants.keys().chain(b.tenants.keys()).collect();
    // The figures of a single tenant are those of the run.
    for name in names.iter().filter(|_| names.len() > 1) {
        let both = [a, b].map(|report| report.tenants.get(*name));
        let figure = |of: fn(&Figures) -> Option<f64>| both.map(|figures| figures.and_then(of));
        let done = figure(|figures| Some(figures.done as f64));
        table.row(&format!("tenant {name}: done"), 0, done);
        let p99 = figure(|figures| figures.whole_ms.p99);
        table.row(&format!("tenant {name}: whole p99 ms"), 2, p99);
    }
    for (name, report) in [("A", a), ("B", b)] {
        if !report.generator_kept_up {
            let _ = writeln!(table.text, "{name}: the generator sent requests late");
        }
    }
    format!("{}{}", head(), table.text)
}

/// The characters of the first column. With the other columns, a line has 77.
const NAME: usize = 40;

fn head() -> String {
    format!("{:<NAME$}{:>14}{:>14}{:>9}\n", "", "A", "B", "B / A")
}

struct Table {
    text: String,
}

impl Table {
    fn row(&mut self, name: &str, digits: usize, values: [Option<f64>; 2]) {
        let shown = values.map(|value| match value {
            Some(value) => format!("{value:.digits$}"),
            None => "-".to_owned(),
        });
        let ratio = match values {
            [Some(a), Some(b)] if a > 0.0 => format!("{:.2}", b / a),
            _ => "-".to_owned(),
        };
        let [a, b] = shown;
        // Writing into a `String` cannot fail.
        let _ = writeln!(self.text, "{:<NAME$}{a:>14}{b:>14}{ratio:>9}", clipped(name));
    }

    /// Appends a row with the sum of `counts`, and one for each kind.
    fn kinds(&mut self, name: &str, counts: [&BTreeMap<String, u64>; 2]) {
        self.row(name, 0, counts.map(|counts| Some(counts.values().sum::<u64>() as f64)));
        let kinds: BTreeSet<&String> = counts.iter().flat_map(|counts| counts.keys()).collect();
        for kind in kinds {
            let of = |counts: &BTreeMap<String, u64>| counts.get(kind).copied().unwrap_or(0) as f64;
            self.row(&format!("  {kind}"), 0, counts.map(|counts| Some(of(counts))));
        }
    }

    /// Appends a row for each percentile of each latency.
    fn latencies(&mut self, both: [&Figures; 2]) {
        let names = ["first token", "between tokens", "whole answer", "sent late"];
        let [a, b] = both.map(|figures| {
            let Figures { first_token_ms, between_tokens_ms, whole_ms, late_ms, .. } = figures;
            [first_token_ms, between_tokens_ms, whole_ms, late_ms].map(percentiles)
        });
        for ((name, a), b) in names.iter().zip(a).zip(b) {
            for ((percentile, a), b) in ["p50", "p90", "p99", "max"].iter().zip(a).zip(b) {
                self.row(&format!("{name} {percentile} ms"), 2, [a, b]);
            }
        }
    }
}

fn percentiles(latency: &Latency) -> [Option<f64>; 4] {
    [latency.p50, latency.p90, latency.p99, latency.max]
}

/// Returns `name`, or its beginning if it is too long for the first column.
fn clipped(name: &str) -> String {
    match name.chars().count() < NAME {
        true => name.to_owned(),
        false => name.chars().take(NAME - 2).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn figures(done: u64, ms: f64) -> serde_json::Value {
        let latency = json!({ "count": done, "p50": ms, "p90": ms * 2.0, "p99": ms * 3.0,
            "max": ms * 4.0 });
        let none = json!({ "count": 0, "p50": null, "p90": null, "p99": null, "max": null });
        json!({ "due": 100, "done": done, "failed": {},
            "refused": { "429 rate_limit_exceeded": 100 - done },
            "requests_per_second": done as f64 / 10.0, "tokens_per_second": done,
            "first_token_ms": latency, "between_tokens_ms": none, "whole_ms": latency,
            "late_ms": latency })
    }

    fn report(done: u64, ms: f64, tenants: &[&str]) -> Report {
        let tenants: BTreeMap<&str, _> =
            tenants.iter().map(|name| (*name, figures(done, ms))).collect();
        let report = json!({ "offered_rate": 10.0, "seconds": 10.0, "generator_kept_up": ms < 20.0,
            "all": figures(done, ms), "tenants": tenants });
        serde_json::from_value(report).expect("a report")
    }

    #[test]
    fn table_has_ratios_of_figures() {
        let text = compare(&report(80, 10.0, &["a"]), &report(100, 25.0, &["a"]));
        let line = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(start)).expect(start);
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("done"), "done 80 100 1.25");
        assert_eq!(line("refused"), "refused 20 0 0.00");
        assert_eq!(line("  429"), "429 rate_limit_exceeded 20 0 0.00");
        assert_eq!(line("failed"), "failed 0 0 -");
        assert_eq!(line("first token p99"), "first token p99 ms 30.00 75.00 2.50");
        assert_eq!(line("between tokens p50"), "between tokens p50 ms - - -");
        assert!(!text.contains("tenant"), "{text}");
        assert!(text.ends_with("\nB: the generator sent requests late\n"), "{text}");
    }

    #[test]
    fn table_shows_tenants_of_either_report() {
        let long = "n".repeat(60);
        let text = compare(&report(80, 1.0, &["acme", &long]), &report(90, 1.0, &["acme"]));
        let row = |name: &str, a: &str, b: &str, ratio: &str| {
            format!("\n{name:<NAME$}{a:>14}{b:>14}{ratio:>9}\n")
        };
        assert!(text.contains(&row("tenant acme: done", "80", "90", "1.12")), "{text}");
        let clipped = format!("tenant {}…", "n".repeat(31));
        assert!(text.contains(&row(&clipped, "80", "-", "-")), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
}
