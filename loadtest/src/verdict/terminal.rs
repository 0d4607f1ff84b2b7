//! The report as text for the terminal.

use std::fmt;

use super::{Check, DrillReport, PhaseFigures, Verdict, WorstShape, WorstShapes};

impl fmt::Display for DrillReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}\n", self.scenario, self.about)?;
        for found in &self.capacity {
            writeln!(
                f,
                "capacity: {:.1} requests/s, {:.0} tokens/s of {:?}",
                found.requests_per_second, found.tokens_per_second, found.asks
            )?;
        }
        writeln!(
            f,
            "{:<10}{:>7}{:>10}{:>22}{:>22}{:>22}{:>22}",
            "honest", "due", "answered", "first token p50", "p99", "between tokens p50", "p99"
        )?;
        let phases = [
            ("alone", &self.honest.alone),
            ("attack", &self.honest.attack),
            ("after", &self.honest.after),
        ];
        for (name, figures) in phases {
            row(f, name, figures)?;
        }
        if !self.generator_kept_up {
            writeln!(f, "requests were sent late: this machine was too busy for exact figures")?;
        }
        for attacker in &self.attackers {
            let outcomes: Vec<String> =
                attacker.outcomes.iter().map(|(what, count)| format!("{count} {what}")).collect();
            let rate = attacker.offered_rate.map_or(String::new(), |rate| format!(", {rate:.1}/s"));
            let (kind, who) = (&attacker.kind, &attacker.who);
            writeln!(f, "attacker {kind} ({who}{rate}): {}", outcomes.join(", "))?;
        }
        for WorstShapes { by, shapes } in &self.worst_shapes {
            writeln!(f, "\nworst shapes by {by}")?;
            for WorstShape { number, about, value } in shapes {
                writeln!(f, "{value:>10.1}  shape {number}: {about}")?;
            }
        }
        writeln!(f)?;
        for Check { what, bound, observed, verdict } in &self.checks {
            writeln!(f, "{:<8} {what}: {bound}; {observed}", verdict.as_str())?;
        }
        let said = match self.verdict {
            Verdict::Holds => "everything held",
            Verdict::Unclear => "nothing was broken, but some checks are unclear",
            Verdict::Broken => "something BROKE",
        };
        writeln!(f, "\n{said}")
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, figures: &PhaseFigures) -> fmt::Result {
    let PhaseFigures { due, answered, first_token, between_tokens, .. } = figures;
    write!(f, "{name:<10}{due:>7}{answered:>10}")?;
    for quantile in [first_token.p50, first_token.p99, between_tokens.p50, between_tokens.p99] {
        write!(f, "{:>22}", quantile.to_string())?;
    }
    writeln!(f)
}
