//! The table of both modes: each figure beside its bound, in order of first mention.

use std::fmt;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use crate::bench::report::Report;

/// All rows of the table.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub(super) struct FairnessTable(Vec<FairnessRow>);

/// One row. A mode without a play of this figure is absent.
#[derive(Serialize)]
struct FairnessRow {
    name: String,
    unit: String,
    #[serde(rename = "virtual")]
    in_virtual: Option<VirtualFigure>,
    wall: Option<WallFigure>,
}

/// A figure in virtual time, with its bound as the benchmark printed it.
#[derive(Serialize)]
struct VirtualFigure {
    figure: f64,
    bound: String,
    holds: bool,
}

/// A figure on a real clock.
#[derive(Serialize)]
pub(super) struct WallFigure {
    pub(super) figure: f64,
    bound: String,
    #[serde(skip)]
    limit: Bound,
    /// The reason for which the figure proves nothing, if there is one.
    pub(super) void: Option<String>,
}

/// The bound of a figure.
#[derive(Clone, Copy)]
pub(super) enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Above(f64),
}

impl WallFigure {
    pub(super) fn new(figure: f64, limit: Bound) -> Self {
        let bound = match limit {
            Bound::AtMost(bound) => format!("<= {bound}"),
            Bound::AtLeast(bound) => format!(">= {bound}"),
            Bound::Above(bound) => format!("> {bound}"),
        };
        Self { figure, bound, limit, void: None }
    }

    /// Marks the figure void if threads woke late, or requests were sent late, by more
    /// than a fifth of the bound: such a machine cannot prove whether the bound holds.
    pub(super) fn check_lateness(&mut self, jitter: f64, sent_late: f64, bound: f64) {
        for (late, event) in [(jitter, "an idle thread woke"), (sent_late, "requests were sent")] {
            if late > bound / 5.0 {
                self.void = Some(format!("{event} {late:.2} s late (p99)"));
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
            (Some(reason), _) => format!("void: {reason}"),
            (None, true) => "holds".to_owned(),
            (None, false) => "BROKEN".to_owned(),
        }
    }
}

impl FairnessTable {
    /// Adds a row of the virtual table from the JSON of its program.
    pub(super) fn add_virtual(&mut self, virtual_row: &Value) -> Result<()> {
        let text = |name: &str| virtual_row[name].as_str().with_context(|| format!("no {name}"));
        let figure = virtual_row["figure"].as_f64().context("no figure")?;
        let holds = virtual_row["holds"].as_bool().context("no verdict")?;
        let (name, unit, bound) = (text("name")?, text("unit")?, text("bound")?.to_owned());
        self.row(name, unit).in_virtual = Some(VirtualFigure { figure, bound, holds });
        Ok(())
    }

    pub(super) fn add_wall(&mut self, name: &str, unit: &str, wall: WallFigure) {
        eprintln!("  {name}: {:.3} {unit} ({}): {}", wall.figure, wall.bound, wall.verdict());
        self.row(name, unit).wall = Some(wall);
    }

    fn row(&mut self, name: &str, unit: &str) -> &mut FairnessRow {
        let at = self.0.iter().position(|row| row.name == name).unwrap_or_else(|| {
            let (name, unit) = (name.to_owned(), unit.to_owned());
            self.0.push(FairnessRow { name, unit, in_virtual: None, wall: None });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    /// Returns true if every figure that is not void keeps its bound.
    pub(super) fn holds(&self) -> bool {
        self.0.iter().all(|row| {
            row.in_virtual.as_ref().is_none_or(|figure| figure.holds)
                && row.wall.as_ref().is_none_or(WallFigure::holds)
        })
    }

    /// Formats the table as a page that lies beside its raw figures.
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
        for FairnessRow { name, unit, in_virtual, wall } in &self.0 {
            write!(page, "| {name} | ")?;
            match in_virtual {
                Some(VirtualFigure { figure, bound, holds }) => {
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

/// Formats a figure with enough digits for a comparison with its bound.
fn shown(figure: f64) -> String {
    if figure.abs() >= 100.0 { format!("{figure:.0}") } else { format!("{figure:.4}") }
}

impl fmt::Display for FairnessTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<64}{:>22}{:>22}", "figure", "virtual (bound)", "wall (bound)")?;
        for FairnessRow { name, unit, in_virtual, wall } in &self.0 {
            let in_virtual = in_virtual.as_ref().map_or(String::new(), |virtual_row| {
                let VirtualFigure { figure, bound, holds } = virtual_row;
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
    fn table_joins_modes_and_checks_bounds() {
        let mut table = FairnessTable::default();
        let virtual_row =
            json!({ "name": "x", "unit": "s", "figure": 0.4, "bound": "<= 0.6", "holds": true });
        table.add_virtual(&virtual_row).expect("a row");
        table.add_wall("x", "s", WallFigure::new(1.1, Bound::AtMost(1.2)));
        assert_eq!(table.0.len(), 1);
        assert!(table.holds());
        table.add_wall("y", "", WallFigure::new(0.9, Bound::AtLeast(0.93)));
        assert!(!table.holds());
        let mut void = WallFigure::new(9.0, Bound::AtMost(1.2));
        void.check_lateness(0.25, 0.0, 1.2);
        table.add_wall("y", "", void);
        assert!(table.holds(), "what is void is not broken");
        let mut quiet = WallFigure::new(9.0, Bound::AtMost(1.2));
        quiet.check_lateness(0.23, 0.23, 1.2);
        assert!(!quiet.holds());
        quiet.check_lateness(0.0, 0.25, 1.2);
        assert!(quiet.holds());
    }
}
