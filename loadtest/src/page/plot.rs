//! A plot over time as SVG: axes, the attack as a band, and the caller's marks. The
//! colours come from the page's style, so that a plot follows its light or dark
//! mode.

use std::fmt::{self, Write as _};

use crate::verdict::DrillReport;

const LEFT: f64 = 58.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 26.0;

/// The scale of the vertical axis.
#[derive(Clone, Copy)]
pub(super) enum Scale {
    /// A linear scale from zero.
    Linear { top: f64 },
    /// A logarithmic scale in powers of ten.
    Logarithmic { bottom: f64, top: f64 },
}

impl Scale {
    /// Returns a linear scale up to `most`, with some space above.
    pub(super) fn linear(most: f64) -> Self {
        let most = if most > 0.0 { most * 1.08 } else { 1.0 };
        Self::Linear { top: most }
    }

    fn part(self, value: f64) -> f64 {
        let part = match self {
            Self::Linear { top } => value / top,
            Self::Logarithmic { bottom, top } => {
                (value.max(bottom) / bottom).log10() / (top / bottom).log10()
            }
        };
        part.clamp(0.0, 1.0)
    }

    fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear { top } => {
                let step = nice(top / 4.0);
                (0..).map(|n| f64::from(n) * step).take_while(|value| *value <= top).collect()
            }
            Self::Logarithmic { bottom, top } => {
                let powers = (bottom.log10().round() as i32)..=(top.log10().round() as i32);
                powers.map(|power| 10f64.powi(power)).collect()
            }
        }
    }
}

/// Returns the next of 1, 2 and 5 times a power of ten.
fn nice(step: f64) -> f64 {
    let power = 10f64.powf(step.max(1e-9).log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= step * 0.999);
    factor.unwrap_or(10.0) * power
}

/// A colour of the page's style. The colours of tenants, of outcomes and of measurements
/// differ, so that no colour means two things on one page.
#[derive(Clone, Copy)]
pub(super) enum Colour {
    Tenant(usize),
    Outcome(usize),
    Measured(usize),
}

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant(number) => write!(f, "var(--c{number})"),
            Self::Outcome(number) => write!(f, "var(--o{number})"),
            Self::Measured(number) => write!(f, "var(--m{number})"),
        }
    }
}

/// A plot under construction.
pub(super) struct Plot {
    svg: String,
    width: f64,
    height: f64,
    seconds: f64,
    scale: Scale,
}

impl Plot {
    /// Draws the axes and the attack. `label` formats a value of the scale.
    pub(super) fn new(
        report: &DrillReport,
        (width, height): (f64, f64),
        scale: Scale,
        label: impl Fn(f64) -> String,
    ) -> Self {
        let seconds = report.after.to.max(1.0);
        let mut plot = Self { svg: String::new(), width, height, seconds, scale };
        let _ = write!(plot.svg, "<svg viewBox=\"0 0 {width} {height}\" role=\"img\">");
        plot.attack(report);
        for value in scale.ticks() {
            let y = plot.y(value);
            let _ = write!(
                plot.svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                width - RIGHT,
                LEFT - 7.0,
                y + 4.0,
                label(value),
            );
        }
        let step = nice(seconds / (width / 90.0));
        for number in 0..=(seconds / step) as u32 {
            let at = f64::from(number) * step;
            let _ = write!(
                plot.svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{at:.0} s</text>",
                plot.x(at),
                height - 8.0,
            );
        }
        plot
    }

    fn attack(&mut self, report: &DrillReport) {
        if report.attack.seconds() <= 0.0 {
            return;
        }
        let (from, to) = (self.x(report.attack.from), self.x(report.attack.to));
        let bottom = self.height - BOTTOM;
        let _ = write!(
            self.svg,
            "<rect class=\"span\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            to - from,
            bottom - TOP,
        );
        for x in [from, to] {
            let _ = write!(
                self.svg,
                "<line class=\"edge\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\"/>"
            );
        }
        let _ = write!(
            self.svg,
            "<text class=\"mark\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">attack</text>",
            f64::midpoint(from, to),
            TOP - 6.0,
        );
    }

    fn x(&self, at: f64) -> f64 {
        LEFT + (at / self.seconds).clamp(0.0, 1.0) * (self.width - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let bottom = self.height - BOTTOM;
        bottom - self.scale.part(value) * (bottom - TOP)
    }

    /// Draws a dashed line at one height, over the whole time.
    pub(super) fn level(&mut self, value: f64) {
        let (left, right, y) = (LEFT, self.width - RIGHT, self.y(value));
        let _ = write!(
            self.svg,
            "<line class=\"level\" x1=\"{left}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        );
    }

    /// Draws a line through points.
    pub(super) fn line(&mut self, colour: Colour, points: impl Iterator<Item = (f64, f64)>) {
        let points: Vec<String> =
            points.map(|(at, value)| format!("{:.1},{:.1}", self.x(at), self.y(value))).collect();
        let _ = write!(
            self.svg,
            "<polyline class=\"line\" style=\"stroke:{colour}\" points=\"{}\"/>",
            points.join(" ")
        );
    }

    /// Draws a point.
    pub(super) fn dot(&mut self, colour: Colour, at: f64, value: f64) {
        let (x, y) = (self.x(at), self.y(value));
        let _ = write!(
            self.svg,
            "<circle class=\"dot\" style=\"fill:{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.4\"/>"
        );
    }

    /// Draws a cross at the top, for a request without an answer.
    pub(super) fn miss(&mut self, at: f64) {
        let (x, y) = (self.x(at), TOP + 6.0);
        let _ = write!(
            self.svg,
            "<path class=\"miss\" d=\"M{:.1} {:.1}l6 6m0 -6l-6 6\"/>",
            x - 3.0,
            y - 3.0
        );
    }

    /// Draws a band between two heights over time.
    pub(super) fn band(&mut self, colour: Colour, points: &[(f64, f64, f64)]) {
        let above = points.iter().map(|&(at, _, to)| (at, to));
        let below = points.iter().rev().map(|&(at, from, _)| (at, from));
        let outline: Vec<String> = above
            .chain(below)
            .map(|(at, value)| format!("{:.1},{:.1}", self.x(at), self.y(value)))
            .collect();
        let _ = write!(
            self.svg,
            "<polygon style=\"fill:{colour}\" fill-opacity=\"0.8\" points=\"{}\"/>",
            outline.join(" ")
        );
    }

    /// Draws a bar over one second, from one height to another.
    pub(super) fn bar(&mut self, colour: Colour, second: usize, from: f64, to: f64) {
        let (left, right) = (self.x(second as f64), self.x(second as f64 + 1.0));
        let (low, high) = (self.y(from), self.y(to));
        let _ = write!(
            self.svg,
            "<rect style=\"fill:{colour}\" fill-opacity=\"0.85\" x=\"{left:.1}\" y=\"{high:.1}\" \
             width=\"{:.1}\" height=\"{:.1}\"/>",
            (right - left - 0.6).max(0.4),
            low - high,
        );
    }

    /// Returns the complete plot.
    pub(super) fn finish(mut self) -> String {
        self.svg.push_str("</svg>");
        self.svg
    }
}

/// A mark of a plot, which a legend explains.
#[derive(Clone, Copy)]
pub(super) enum Mark {
    Colour(Colour),
    /// The cross of [`Plot::miss`].
    Miss,
    /// The dashed line of [`Plot::level`].
    Level,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Colour(colour) => write!(f, "<i style=\"background:{colour}\"></i>"),
            Self::Miss => f.write_str(
                "<svg viewBox=\"0 0 12 12\"><path class=\"miss\" d=\"M3 3l6 6m0 -6l-6 6\"/></svg>",
            ),
            Self::Level => f.write_str(
                "<svg viewBox=\"0 0 12 12\"><line class=\"level\" x1=\"0\" x2=\"12\" y1=\"6\" y2=\"6\"/></svg>",
            ),
        }
    }
}

/// Returns the legend of a plot's marks.
pub(super) fn legend<'a>(entries: impl IntoIterator<Item = (Mark, &'a str)>) -> String {
    let entry = |(mark, what)| format!("<li>{mark}{}</li>", super::escape(what));
    let entries: String = entries.into_iter().map(entry).collect();
    format!("<ul class=\"legend\">{entries}</ul>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_ticks_are_round_numbers() {
        assert_eq!(Scale::Linear { top: 100.0 }.ticks(), [0.0, 50.0, 100.0]);
        assert_eq!(Scale::Linear { top: 81.0 }.ticks(), [0.0, 50.0]);
        let scale = Scale::Logarithmic { bottom: 1.0, top: 1_000.0 };
        assert_eq!(scale.ticks(), [1.0, 10.0, 100.0, 1_000.0]);
        assert!((scale.part(10.0) - 1.0 / 3.0).abs() < 1e-9);
    }
}
