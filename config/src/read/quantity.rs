//! Durations and sizes in text: `250ms`, `1h30m`, `2MiB`. Numbers are whole
//! multiples of the smallest unit, so nothing is rounded.

use std::time::Duration;

use serde_json::json;
use tollgate_domain::{Budget, Currency, DeviceNanos};

use super::{Field, Reader, join};
use crate::sections::ByteSize;
use crate::tree::{Node, Value};

const TIME_UNITS: [(&str, u64); 7] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

const SIZE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

/// An amount of one currency: `{ EUR = "500" }`.
impl Field for Budget {
    fn sample() -> String {
        "{ EUR = \"500\" }".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let wanted = "a table of one currency such as { EUR = \"500\" }";
        let mut entries = node.table().into_iter().flatten();
        let (Some((name, amount)), None) = (entries.next(), entries.next()) else {
            return reader.expected(node, key, wanted);
        };
        let dotted = join(key, name);
        let currency = match name.parse::<Currency>() {
            Ok(currency) => currency,
            Err(error) => {
                reader.problem(&amount.place, &dotted, error.to_string());
                return None;
            }
        };
        let budget = match &amount.value {
            Value::String(text) | Value::Text(text) => Self::new(currency, text),
            Value::Integer(number) => Self::new(currency, &number.to_string()),
            // A TOML float is refused, because it is not exact.
            _ => None,
        };
        let largest = Self::LARGEST;
        budget.or_else(|| {
            let wanted = format!(
                "an amount in quotes such as \"500\", more than 0 and at most {largest}, with at \
                 most nine digits after the point"
            );
            reader.expected(amount, &dotted, &wanted)
        })
    }

    fn show(&self) -> Option<String> {
        Some(format!("{{ {} = \"{self}\" }}", self.currency))
    }

    fn schema() -> serde_json::Value {
        json!({
            "type": "object",
            "additionalProperties": { "anyOf": [
                { "type": "string", "pattern": "^[0-9]{1,10}([.][0-9]{1,9})?$" },
                { "type": "integer", "minimum": 1, "maximum": Self::LARGEST },
            ] },
            "minProperties": 1,
            "maxProperties": 1,
        })
    }
}

/// Parses a duration such as `1h30m`. Returns nanoseconds, or `None` if the text is
/// no duration or overflows.
pub(crate) fn parse_duration(text: &str) -> Option<u64> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    let mut total = 0_u64;
    while !rest.is_empty() {
        let (number, unit, after) = quantity(rest)?;
        let (_, nanos) = TIME_UNITS.iter().find(|(name, _)| *name == unit)?;
        // An overflow must not become a short duration.
        total = total.checked_add(number.checked_mul(*nanos)?)?;
        rest = after;
    }
    Some(total)
}

/// Parses a size such as `2MiB`. Returns bytes.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let (number, unit, rest) = quantity(text.trim())?;
    let (_, bytes) = SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    // A size has one quantity only, unlike a duration such as `1h30m`.
    if rest.is_empty() { number.checked_mul(*bytes) } else { None }
}

/// Splits the first quantity off: `90m30s` becomes 90, `m` and `30s`.
fn quantity(text: &str) -> Option<(u64, &str, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '_')?;
    let (number, rest) = text.split_at(digits);
    // A space may stand between the number and the unit.
    let unit_end = rest.find(|c: char| !c.is_ascii_alphabetic() && c != ' ').unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(unit_end);
    Some((number.replace('_', "").parse().ok()?, unit.trim(), rest))
}

/// In the largest unit that says it exactly.
pub(crate) fn show_duration(nanos: u64) -> String {
    let (name, unit) = TIME_UNITS
        .into_iter()
        // 0 is a multiple of every unit and would be shown in days.
        .find(|(_, unit)| nanos > 0 && nanos.is_multiple_of(*unit))
        .unwrap_or(("s", 1_000_000_000));
    format!("{}{name}", nanos / unit)
}

/// In the largest unit that says it exactly.
pub(crate) fn show_size(bytes: u64) -> String {
    let (name, unit) = SIZE_UNITS
        .into_iter()
        .find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit))
        .unwrap_or(("B", 1));
    format!("{}{name}", bytes / unit)
}

/// Reads a duration in nanoseconds.
pub(super) fn read_duration(node: &Node, key: &str, reader: &mut Reader) -> Option<u64> {
    if let Value::String(text) | Value::Text(text) = &node.value
        && let Some(nanos) = parse_duration(text)
    {
        return Some(nanos);
    }
    reader.expected(node, key, "a duration such as \"250ms\", \"2s\" or \"1h\"")
}

pub(super) fn duration_schema() -> serde_json::Value {
    json!({ "type": "string", "pattern": "^([0-9_]+(ns|us|ms|s|m|h|d))+$" })
}

impl Field for Duration {
    fn sample() -> String {
        "\"2s\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        read_duration(node, key, reader).map(Duration::from_nanos)
    }

    fn show(&self) -> Option<String> {
        // A `u64` holds 584 years, and the bounds of every key are far below.
        let nanos = u64::try_from(self.as_nanos()).unwrap_or(u64::MAX);
        Some(format!("{:?}", show_duration(nanos)))
    }

    fn schema() -> serde_json::Value {
        duration_schema()
    }
}

impl Field for DeviceNanos {
    fn sample() -> String {
        "\"20s\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let nanos = read_duration(node, key, reader)?;
        // A limit of 0 would refuse every request.
        if nanos == 0 {
            return reader.expected(node, key, "a duration above 0");
        }
        Some(DeviceNanos(nanos))
    }

    fn show(&self) -> Option<String> {
        Some(format!("{:?}", show_duration(self.nanos())))
    }

    fn schema() -> serde_json::Value {
        duration_schema()
    }
}

impl Field for ByteSize {
    fn sample() -> String {
        "\"2MiB\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let bytes = match &node.value {
            Value::String(text) | Value::Text(text) => {
                // An environment variable has no types, so a plain number is text,
                // too.
                parse_size(text).or_else(|| text.parse().ok())
            }
            Value::Integer(bytes) => u64::try_from(*bytes).ok(),
            _ => None,
        };
        match bytes {
            Some(bytes) => Some(ByteSize(bytes)),
            None => reader.expected(node, key, "a size such as \"64KiB\" or \"2MiB\""),
        }
    }

    fn show(&self) -> Option<String> {
        Some(format!("{:?}", show_size(self.0)))
    }

    fn schema() -> serde_json::Value {
        json!({ "type": ["string", "integer"], "minimum": 0,
            "pattern": "^[0-9_]+ ?([kKMGT]i?)?[bB]$" })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn duration_parser_accepts_known_units() {
        for (text, expected) in [
            ("250ms", Some(250_000_000)),
            ("2s", Some(2_000_000_000)),
            ("1h", Some(3_600_000_000_000)),
            ("1h30m", Some(5_400_000_000_000)),
            ("1 d", Some(86_400_000_000_000)),
            ("0s", Some(0)),
            ("1_000ns", Some(1_000)),
            ("", None),
            ("2", None),
            ("s", None),
            ("2 parsecs", None),
            ("-2s", None),
            ("1.5s", None),
            ("99999999999999999999s", None),
            ("999999d", None),
        ] {
            assert_eq!(parse_duration(text), expected, "{text:?}");
        }
    }

    #[test]
    fn size_parser_accepts_known_units() {
        for (text, expected) in [
            ("2MiB", Some(2 << 20)),
            ("64 KiB", Some(64 << 10)),
            ("200MB", Some(200_000_000)),
            ("5kb", Some(5_000)),
            ("7B", Some(7)),
            ("7", None),
            ("MiB", None),
            ("1MiB2", None),
            ("99999999TiB", None),
        ] {
            assert_eq!(parse_size(text), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn quantities_round_trip(amount in any::<u64>()) {
            prop_assert_eq!(parse_duration(&show_duration(amount)), Some(amount));
            prop_assert_eq!(parse_size(&show_size(amount)), Some(amount));
        }
    }
}
