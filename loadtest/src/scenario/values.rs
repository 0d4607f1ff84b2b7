//! Values of a scenario: lists of names, durations and sizes with a unit, and defaults.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::plan::Arrivals;

/// Parses a list of names, in which `a-{1..3}` stands for three.
pub(super) fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let mut all = Vec::new();
    for name in Vec::<String>::deserialize(deserializer)? {
        match expand(&name) {
            Some(several) => all.extend(several),
            None => {
                return Err(serde::de::Error::custom(format!(
                    "{name:?} is neither a name nor a range"
                )));
            }
        }
    }
    if all.is_empty() {
        return Err(serde::de::Error::custom("at least one tenant is required"));
    }
    Ok(all)
}

fn expand(name: &str) -> Option<Vec<String>> {
    let plain = |name: &str| {
        let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        !name.is_empty() && name.chars().all(fine)
    };
    let Some((stem, range)) = name.split_once('{') else {
        return plain(name).then(|| vec![name.to_owned()]);
    };
    let (first, last) = range.strip_suffix('}')?.split_once("..")?;
    let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
    let fits = plain(stem) && first <= last && last - first < 10_000;
    fits.then(|| (first..=last).map(|number| format!("{stem}{number}")).collect())
}

pub(super) fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong =
        || serde::de::Error::custom(format!("{text:?} is not a duration such as 10s or 250ms"));
    let (number, nanos) = unit(
        &text,
        &[("ms", 1_000_000), ("s", 1_000_000_000), ("m", 60_000_000_000), ("h", 3_600_000_000_000)],
    )
    .ok_or_else(wrong)?;
    number.checked_mul(nanos).map(Duration::from_nanos).ok_or_else(wrong)
}

pub(super) fn some_span<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    span(deserializer).map(Some)
}

pub(super) fn some_size<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong = || serde::de::Error::custom(format!("{text:?} is not a size such as 50MiB"));
    let (number, bytes) =
        unit(&text, &[("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)]).ok_or_else(wrong)?;
    number.checked_mul(bytes).map(Some).ok_or_else(wrong)
}

/// Splits a whole number from its unit. Returns the number and the unit's value.
fn unit(text: &str, units: &[(&str, u64)]) -> Option<(u64, u64)> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(end);
    let &(_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    Some((number.parse().ok()?, factor))
}

impl<'de> Deserialize<'de> for Arrivals {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "poisson" => Ok(Self::Poisson),
            "uniform" => Ok(Self::Uniform),
            _ => Err(serde::de::Error::custom("arrivals must be \"poisson\" or \"uniform\"")),
        }
    }
}

pub(super) fn demo_model() -> String {
    "tollgate-demo".to_owned()
}

pub(super) fn one() -> u64 {
    1
}

pub(super) fn one_u32() -> u32 {
    1
}

pub(super) fn two() -> u32 {
    2
}

pub(super) fn four() -> u32 {
    4
}

pub(super) fn five() -> u32 {
    5
}

pub(super) fn eight() -> u32 {
    8
}

pub(super) fn sixteen() -> u32 {
    16
}

pub(super) fn hundred() -> u8 {
    100
}

pub(super) fn three_seconds() -> Duration {
    Duration::from_secs(3)
}
