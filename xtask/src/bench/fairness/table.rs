//! The table of both modes: figure beside bound, in order of first mention.

use std::fmt;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use crate::bench::report::Report;

/// All rows.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub(super) struct Table(Vec<Row>);

/// One row. A mode in which it was not played is absent.
#[derive(Serialize)]
struct Row {
    name: String,
    unit: String,
    #[serde(rename = "virtual")]
    in_virtual: Option<Virtual>,
    wall: Option<Wall>,
}

/// A figure in virtual time, and its bound as the benchmark says it.
#[derive(Serialize)]
struct Virtual {
    figure: f64,
    bound: String,
    holds: bool,
}

/// A figure on a real clock.
#[derive(Serialize)]
pub(super) struct Wall {
    pub(super) figure: f64,
    bound: String,
    #[serde(skip)]
    limit: Bound,
    /// Why it says nothing.
    pub(super) void: Option<String>,
}

/// What a figure must keep.
#[derive(Clone, Copy)]
pub(super) enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Above(f64),
}

impl Wall {
    pub(super) fn new(figure: f64, limit: Bound) -> Self {
        let bound = match limit {
            Bound::AtMost(bound) => format!("<= {bound}"),
            Bound::AtLeast(bound) => format!(">= {bound}"),
            Bound::Above(bound) => format!("> {bound}"),
        };
        Self { figure, bound, limit, void: None }
    }

    /// A machine that wakes late, or sends late, by more than a fifth of a bound
    /// cannot say whether the bound holds.
    pub(super) fn check_lateness(&mut self, jitter: f64, sent_late: f64, bound: f64) {
        for (late, who) in [(jitter, "an idle thread woke"), (sent_late, "requests were sent")] {
            if late > bound / 5.0 {
                self.void = Some(format!("{who} {late:.2} s late (p99)"));
                return;
            }
        }
    }

    fn holds(&self) -> bool {
        self.void.is_some()
            || match self.limit {
                Bound::AtMost(bound) => self.figure <= bound,
                Bound::AtLeast(bound) => self.figure >= bound,
                Bound::Above(bound) => self.figure > bound,
            }
    }

    fn verdict(&self) -> String {
        match (&self.void, self.holds()) {
            (Some(why), _) => format!("void: {why}"),
            (None, true) => "holds".to_owned(),
            (None, false) => "BROKEN".to_owned(),
        }
    }
}

impl Table {
    /// Adds a row of the virtual table as its program tells it.
    pub(super) fn add_virtual(&mut self, told: &Value) -> Result<()> {
        let text = |name: &str| told[name].as_str().with_context(|| format!("no {name}"));
        let figure = told["figure"].as_f64().context("no figure")?;
        let holds = told["holds"].as_bool().context("no verdict")?;
        let (name, unit, bound) = (text("name")?, text("unit")?, text("bound")?.to_owned());
        self.row(name, unit).in_virtual = Some(Virtual { figure, bound, holds });
        Ok(())
    }

    pub(super) fn add_wall(&mut self, name: &str, unit: &str, wall: Wall) {
        eprintln!("  {name}: {:.3} {unit} ({}): {}", wall.figure, wall.bound, wall.verdict());
        self.row(name, unit).wall = Some(wall);
    }

    fn row(&mut self, name: &str, unit: &str) -> &mut Row {
        let at = self.0.iter().position(|row| row.name == name).unwrap_or_else(|| {
            let (name, unit) = (name.to_owned(), unit.to_owned());
            self.0.push(Row { name, unit, in_virtual: None, wall: None });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    /// Whether every figure that says something keeps its bound.
    pub(super) fn holds(&self) -> bool {
        self.0.iter().all(|row| {
            row.in_virtual.as_ref().is_none_or(|figure| figure.holds)
                && row.wall.as_ref().is_none_or(Wall::holds)
        })
    }

    /// The table as a page beside its raw figures.
    pub(super) fn page(&self, report: &Report) -> Result<String> {
        use fmt::Write as _;
        let mut page = String::from(
            "# Fair shares of a device under attack\n\n\
             Written by `cargo xtask bench fairness`; [README.md](README.md) says what is played.\n\
             The device is **synthetic**: it computes nothing and takes the time of a cost\n\
             model. Seconds are the model's.\n\n```text\n",
        );
        writeln!(page, "{}```\n", report.head())?;
        page += "| figure | virtual time | bound | real clock | bound |\n|---|---|---|---|---|\n";
        for Row { name, unit, in_virtual, wall } in &self.0 {
            write!(page, "| {name} | ")?;
            match in_virtual {
                Some(Virtual { figure, bound, holds }) => {
                    let broken = if *holds { "" } else { " **broken**" };
                    write!(page, "{} {unit}{broken} | {bound} | ", shown(*figure))?;
                }
                None => page += "| | ",
            }
            match wall {
                Some(wall) => {
                    let remark = match wall.verdict().as_str() {
                        "holds" => String::new(),
                        other => format!(" **{other}**"),
                    };
                    writeln!(page, "{} {unit}{remark} | {} |", shown(wall.figure), wall.bound)?;
                }
                None => page += "| |\n",
            }
        }
        Ok(page)
    }
}

/// Enough digits to compare with a bound.
fn shown(figure: f64) -> String {
    if figure.abs() >= 100.0 { format!("{figure:.0}") } else { format!("{figure:.4}") }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<64}{:>22}{:>22}", "figure", "virtual (bound)", "wall (bound)")?;
        for Row { name, unit, in_virtual, wall } in &self.0 {
            let in_virtual = in_virtual.as_ref().map_or(String::new(), |told| {
                let Virtual { figure, bound, holds } = told;
                let broken = if *holds { "" } else { " BROKEN" };
                format!("{} {unit} ({bound}){broken}", shown(*figure))
            });
            let wall = wall.as_ref().map_or(String::new(), |wall| {
                let remark = match wall.verdict().as_str() {
                    "holds" => String::new(),
                    other => format!(" {other}"),
                };
                format!("{} {unit} ({}){remark}", shown(wall.figure), wall.bound)
            });
            writeln!(f, "{name:<64}{in_virtual:>22}{wall:>22}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn modes_meet_in_a_row_and_bounds_are_kept() {
        let mut table = Table::default();
        let told =
            json!({ "name": "x", "unit": "s", "figure": 0.4, "bound": "<= 0.6", "holds": true });
        table.add_virtual(&told).expect("a row");
        table.add_wall("x", "s", Wall::new(1.1, Bound::AtMost(1.2)));
        assert_eq!(table.0.len(), 1);
        assert!(table.holds());
        table.add_wall("y", "", Wall::new(0.9, Bound::AtLeast(0.93)));
        assert!(!table.holds());
        let mut void = Wall::new(9.0, Bound::AtMost(1.2));
        void.check_lateness(0.25, 0.0, 1.2);
        table.add_wall("y", "", void);
        assert!(table.holds(), "what is void is not broken");
        let mut quiet = Wall::new(9.0, Bound::AtMost(1.2));
        quiet.check_lateness(0.23, 0.23, 1.2);
        assert!(!quiet.holds());
        quiet.check_lateness(0.0, 0.25, 1.2);
        assert!(quiet.holds());
    }
}
