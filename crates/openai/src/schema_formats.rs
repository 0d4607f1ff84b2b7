//! Patterns in the place of formats that the compiler of schemas takes more widely than most
//! programs: it allows a second 60 at any time, the 29th of February in any year, the year 0, and
//! names of hosts and mailboxes of any length.

use serde_json::{Map, Value};

use crate::schema_hints::each_schema;

/// Replaces the formats `date`, `time`, `date-time`, `hostname` and `email` by patterns, in
/// `schema` and in every schema in it. A format beside a pattern stays, since a schema has one pattern at most.
pub(crate) fn with_patterns(schema: Value) -> Value {
    each_schema(schema, &|mut fields: Map<String, Value>| {
        let pattern = match fields.get("format").and_then(Value::as_str) {
            Some("date") => format!("^{DATE}$"),
            Some("time") => format!("^{TIME}$"),
            Some("date-time") => format!("^{DATE}T{TIME}$"),
            // At most 4 labels of 62 characters: RFC 1123 allows 253 in all.
            Some("hostname") => format!("^{LABEL}(?:\\.{LABEL}){{0,3}}$"),
            // A mailbox has at most 64 characters before the `@` (RFC 5321).
            Some("email") => {
                format!("^{ATOM}(?:\\.{ATOM})?@(?:{LABEL}\\.){{1,2}}[A-Za-z]{{2,24}}$")
            }
            _ => return fields,
        };
        if !fields.contains_key("pattern") {
            fields.shift_remove("format");
            fields.insert("pattern".to_owned(), pattern.into());
        }
        fields
    })
}

/// A day of the years 1000 to 9999 (RFC 3339, `full-date`).
const DATE: &str = concat!(
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    // Leap years: divisible by 4 and not by 100, or divisible by 400.
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)",
);
/// A time of day with its zone (RFC 3339, `full-time`), without leap seconds, in capitals.
const TIME: &str = concat!(
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?",
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);

/// A label of a host's name (RFC 1123), at most 62 characters.
const LABEL: &str = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?";
/// A part of a mailbox's name before the `@` (RFC 5321, `Atom`), at most 31 characters.
const ATOM: &str = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,31}";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn loose_formats_become_patterns() {
        let schema = json!({ "type": "object", "properties": {
            "format": { "type": "string", "format": "date" },
            "at": { "anyOf": [{ "format": "date-time" }, { "format": "uuid" }] },
            "own": { "format": "time", "pattern": "^0" } },
            "default": { "format": "date" } });
        let changed = with_patterns(schema);
        let properties = &changed["properties"];
        let date = format!("^{DATE}$");
        assert_eq!(properties["format"], json!({ "type": "string", "pattern": date }));
        let at = format!("^{DATE}T{TIME}$");
        assert_eq!(properties["at"], json!({ "anyOf": [{ "pattern": at }, { "format": "uuid" }] }));
        assert_eq!(
            with_patterns(json!({ "format": "hostname" })),
            json!({ "pattern": format!("^{LABEL}(?:\\.{LABEL}){{0,3}}$") })
        );
        assert_eq!(properties["own"], json!({ "format": "time", "pattern": "^0" }));
        assert_eq!(changed["default"], json!({ "format": "date" }));
    }
}
