//! The plots of a report: latency, shares of device time, outcomes, memory and
//! descriptors.

use std::collections::BTreeMap;

use super::plot::Colour::{Measured, Outcome, Tenant};
use super::plot::{Mark, Plot, Scale, legend};
use crate::verdict::{DrillReport, Point};

const WIDE: (f64, f64) = (1000.0, 280.0);
const HALF: (f64, f64) = (480.0, 200.0);

/// Dots of a plot at most. More would only make the page slow.
const MOST_DOTS: usize = 4_000;

/// The number of colours. The last one stands for all others.
const COLOURS: usize = 8;

/// The colour of the attack.
const FIRST_WARM: usize = 3;

/// Nanoseconds of a second.
const NANOS: f64 = 1e9;

const NOTHING: &str = "<p class=\"none\">There are no data for this plot.</p>";

/// Draws each honest request as a dot, and the median of each second as a line.
pub(super) fn latency(report: &DrillReport) -> String {
    let known: Vec<(f64, f64)> =
        report.points.iter().filter_map(|point| Some((point.at, point.first_token_ms?))).collect();
    if known.is_empty() {
        return NOTHING.to_owned();
    }
    let (low, high) =
        known.iter().fold((f64::MAX, 1.0f64), |(low, high), &(_, ms)| (low.min(ms), high.max(ms)));
    let power = |value: f64, round: fn(f64) -> f64| 10f64.powf(round(value.max(0.1).log10()));
    let bottom = power(low, f64::floor);
    let scale = Scale::Logarithmic { bottom, top: power(high, f64::ceil).max(bottom * 10.0) };
    let mut plot = Plot::new(report, WIDE, scale, milliseconds);
    let every = known.len().div_ceil(MOST_DOTS);
    for (at, ms) in known.iter().step_by(every) {
        plot.dot(Measured(0), *at, *ms);
    }
    let missed = report.points.iter().filter(|point| !point.answered);
    missed.take(MOST_DOTS).for_each(|Point { at, .. }| plot.miss(*at));
    let seconds = by_second(&known);
    plot.line(Measured(1), seconds.iter().map(|(second, all)| (second + 0.5, all[all.len() / 2])));
    plot.line(Measured(2), seconds.iter().map(|(second, all)| (second + 0.5, all[all.len() - 1])));
    plot.finish()
        + &legend([
            (Mark::Colour(Measured(0)), "a request"),
            (Mark::Miss, "a request without an answer"),
            (Mark::Colour(Measured(1)), "median of each second"),
            (Mark::Colour(Measured(2)), "slowest of each second"),
        ])
}

/// Returns the sorted values of each second, without seconds that have none.
fn by_second(points: &[(f64, f64)]) -> Vec<(f64, Vec<f64>)> {
    let mut seconds: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (at, value) in points {
        seconds.entry(*at as u64).or_default().push(*value);
    }
    let sorted = |(second, mut all): (u64, Vec<f64>)| {
        all.sort_by(f64::total_cmp);
        (second as f64, all)
    };
    seconds.into_iter().map(sorted).collect()
}

/// Draws the device time of each tenant in each second, and a line at the mean of the honest
/// tenants before the attack, which is the device time that they ask for.
pub(super) fn shares(report: &DrillReport) -> String {
    let totals = report
        .shares
        .iter()
        .filter_map(|(name, points)| Some((name, points.last()?.attributed_ns)));
    let totals: BTreeMap<String, u64> =
        totals.filter(|(_, total)| *total > 0).map(|(name, total)| (name.clone(), total)).collect();
    if totals.is_empty() {
        return NOTHING.to_owned();
    }
    // Honest tenants are at the bottom, in cool colours. Attackers follow, sorted
    // by their device time, in warm colours that begin with the attack's colour.
    let named = ranked(&totals, |name| report.tenants.contains_key(name));
    let honest = named.iter().filter(|name| report.tenants.contains_key(*name)).count();
    let colour = |place: usize| match place < honest {
        true => place,
        false => (FIRST_WARM.max(honest) + place - honest) % COLOURS,
    };
    let seconds = report.after.to.ceil() as usize;
    let mut parts = vec![vec![0.0; named.len()]; seconds];
    for (name, points) in &report.shares {
        let Some(place) = place(&named, name) else { continue };
        let points: Vec<(f64, u64)> =
            points.iter().map(|point| (point.at, point.attributed_ns)).collect();
        for (second, used) in spread(&points, seconds).into_iter().enumerate() {
            parts[second][place] += used;
        }
    }
    let used = |part: f64| part / NANOS;
    let most = parts.iter().map(|parts| used(parts.iter().sum())).fold(0.0, f64::max);
    let label = |value: f64| format!("{:.0} ms/s", value * 1e3);
    let mut plot = Plot::new(report, WIDE, Scale::linear(most), label);
    for place in 0..named.len() {
        let band: Vec<(f64, f64, f64)> = parts
            .iter()
            .enumerate()
            .map(|(second, parts)| {
                let below = used(parts[..place].iter().sum());
                (second as f64 + 0.5, below, below + used(parts[place]))
            })
            .collect();
        plot.band(Tenant(colour(place)), &band);
    }
    let asked = asked_for(report, &parts, honest);
    plot.level(asked);
    let entries = named.iter().enumerate();
    let entries = entries.map(|(place, name)| (Mark::Colour(Tenant(colour(place))), name.as_str()));
    plot.finish()
        + &legend(entries.chain([(Mark::Level, "asked for by the honest tenants")]))
        + &format!(
            "<p class=\"note\">Device time that these tenants were charged in each second, from \
             their usage. The honest tenants ask for {:.0} ms/s, their mean before the attack. \
             The device does not idle: the attackers get the time that no honest tenant asks \
             for.</p>",
            asked * 1e3
        )
}

/// Returns the mean device time a second of the first `honest` tenants before the attack,
/// in seconds. `parts` has each tenant's device time of each second.
fn asked_for(report: &DrillReport, parts: &[Vec<f64>], honest: usize) -> f64 {
    let (from, to) = (report.alone.from.ceil() as usize, report.alone.to.floor() as usize);
    let seconds = parts.get(from..to.min(parts.len())).unwrap_or_default();
    let used: f64 = seconds.iter().flat_map(|parts| &parts[..honest]).sum();
    used / NANOS / seconds.len().max(1) as f64
}

/// Returns the names sorted by their figures, with the preferred ones first. The
/// smallest names without a colour of their own become `others`.
fn ranked(totals: &BTreeMap<String, u64>, comes_first: impl Fn(&str) -> bool) -> Vec<String> {
    let mut names: Vec<(&String, &u64)> = totals.iter().collect();
    names.sort_by(|a, b| {
        let key =
            |(name, total): &(&String, &u64)| (!comes_first(name), std::cmp::Reverse(**total));
        key(a).cmp(&key(b))
    });
    let has_rest = names.len() > COLOURS;
    let kept = if has_rest { COLOURS - 1 } else { names.len() };
    let kept = names[..kept].iter().map(|(name, _)| (*name).clone());
    kept.chain(has_rest.then(|| OTHERS.to_owned())).collect()
}

const OTHERS: &str = "others";

fn place(named: &[String], name: &str) -> Option<usize> {
    let other = || named.iter().position(|named| named == OTHERS);
    named.iter().position(|named| named == name).or_else(other)
}

/// Returns the growth of a count in each second, spread evenly between two
/// observations.
fn spread(points: &[(f64, u64)], seconds: usize) -> Vec<f64> {
    let mut gained = vec![0.0; seconds];
    for pair in points.windows(2) {
        let [(from, before), (to, then)] = pair else { continue };
        let rate = then.saturating_sub(*before) as f64 / (to - from).max(1e-6);
        for (second, gained) in gained.iter_mut().enumerate() {
            let (begin, end) = (second as f64, second as f64 + 1.0);
            *gained += rate * (to.min(end) - from.max(begin)).max(0.0);
        }
    }
    gained
}

/// Draws the outcomes of attackers' requests in each second as stacked bars.
pub(super) fn refusals(report: &DrillReport) -> String {
    let mut totals: BTreeMap<String, u64> = BTreeMap::new();
    for (what, count) in report.refusals.iter().flatten() {
        *totals.entry(what.clone()).or_default() += count;
    }
    if totals.is_empty() {
        return NOTHING.to_owned();
    }
    let named = ranked(&totals, |what| what == "answered");
    let most = report.refusals.iter().map(|counts| counts.values().sum::<u64>()).max().unwrap_or(0);
    let mut plot =
        Plot::new(report, WIDE, Scale::linear(most as f64), |value| format!("{value:.0}/s"));
    for (second, counts) in report.refusals.iter().enumerate() {
        let mut heights = vec![0u64; named.len()];
        for (what, count) in counts {
            if let Some(place) = place(&named, what) {
                heights[place] += count;
            }
        }
        let mut below = 0.0;
        for (colour, height) in heights.into_iter().enumerate().filter(|(_, height)| *height > 0) {
            let above = below + height as f64;
            plot.bar(Outcome(colour), second, below, above);
            below = above;
        }
    }
    let entries: Vec<String> = named
        .iter()
        .map(|what| {
            let count = match what.as_str() {
                OTHERS => String::new(),
                what => totals.get(what).map_or(String::new(), |count| format!(": {count}")),
            };
            format!("{what}{count}")
        })
        .collect();
    plot.finish()
        + &legend(
            entries
                .iter()
                .enumerate()
                .map(|(colour, what)| (Mark::Colour(Outcome(colour)), what.as_str())),
        )
}

/// Draws the memory and descriptors of each process.
pub(super) fn resources(report: &DrillReport) -> String {
    if report.processes.is_empty() {
        return NOTHING.to_owned();
    }
    let points = || report.processes.values().flatten();
    let memory = points().map(|point| mib(point.memory)).fold(0.0, f64::max);
    let descriptors = points().map(|point| point.descriptors as f64).fold(0.0, f64::max);
    let mut left =
        Plot::new(report, HALF, Scale::linear(memory), |value| format!("{value:.0} MiB"));
    let mut right =
        Plot::new(report, HALF, Scale::linear(descriptors), |value| format!("{value:.0}"));
    for (colour, points) in report.processes.values().enumerate() {
        left.line(
            Measured(colour % COLOURS),
            points.iter().map(|point| (point.at, mib(point.memory))),
        );
        right.line(
            Measured(colour % COLOURS),
            points.iter().map(|point| (point.at, point.descriptors as f64)),
        );
    }
    let names = report.processes.keys().enumerate();
    format!(
        "<div class=\"pair\"><div><h3>Resident memory</h3>{}</div><div><h3>Open descriptors</h3>{}</div></div>{}",
        left.finish(),
        right.finish(),
        legend(
            names.map(|(colour, name)| (Mark::Colour(Measured(colour % COLOURS)), name.as_str()))
        ),
    )
}

fn milliseconds(ms: f64) -> String {
    if ms >= 1_000.0 { format!("{:.0} s", ms / 1e3) } else { format!("{ms} ms") }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_are_spread_evenly() {
        let gained = spread(&[(0.0, 0), (2.0, 10), (3.0, 10)], 3);
        assert_eq!(gained, [5.0, 5.0, 0.0]);
    }

    #[test]
    fn many_names_have_others() {
        let totals = (0..20).map(|number| (format!("t{number}"), number)).collect();
        let named = ranked(&totals, |name| name == "t3");
        assert_eq!(
            (named[0].as_str(), named[1].as_str(), named[7].as_str()),
            ("t3", "t19", OTHERS)
        );
        assert_eq!(place(&named, "t0"), Some(7));
    }
}
