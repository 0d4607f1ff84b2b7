//! The reference page of every key, as it stands in `docs/reference/config.md`.
//! A test holds the page and these declarations together.

use serde_json::Value;

use crate::example::samples;
use crate::read::{Section, Visited};
use crate::schema;
use crate::sections::Root;

const HEAD: &str = "\
# Configuration keys

<!-- Generated from config/src/sections. Do not edit this page. To renew it, run
TOLLGATE_REGENERATE=1 cargo test -p tollgate-config --test reference -->

Every key, with its type, its default and its meaning. `NAME` stands for a name that you
choose. A key that is not in this list is an error.

`--config` takes a file or a folder of `*.toml` files. A command-line flag takes precedence
over an environment variable, and an environment variable over a file. The environment
variable of `gateway.listen` is `TOLLGATE_GATEWAY__LISTEN`. A relative path in a file is
relative to that file.

| type | written as |
|---|---|
| duration | `\"250ms\"`, `\"2s\"`, `\"1h30m\"`; units ns, us, ms, s, m, h, d |
| size | `\"64KiB\"`, `\"2MiB\"`, or a number of bytes |
| decimal | `\"0.15\"`: a decimal in quotes with at most nine digits after the point |
| rate | a limit for a minute, or `{ limit = 600, burst = 60 }`; the burst is one minute's limit unless given |
| by class | one value for every device class, or `{ h200 = VALUE, default = VALUE }` |
";

/// Returns the whole page.
pub(crate) fn whole() -> String {
    let schema = schema::whole();
    let mut page = HEAD.to_owned();
    Root::default().visit("", &mut |visited| write(&mut page, &schema, &visited));
    // Tables that hold named entries are empty by default, so one entry of each
    // kind is visited to list the keys of these tables.
    samples().visit("", &mut |visited| {
        let (Visited::Table { key, .. } | Visited::Field { key, .. }) = &visited;
        if NAMED.iter().any(|table| key.starts_with(table)) {
            write(&mut page, &schema, &visited);
        }
    });
    page
}

fn write(page: &mut String, schema: &Value, visited: &Visited<'_>) {
    match visited {
        // These two tables hold nothing but other tables.
        Visited::Table { key: "" | "auth", .. } => {}
        Visited::Table { key, doc } => {
            let (title, text) = (generic(key), escaped(&schema::sentence(doc)));
            page.push_str(&format!("\n## `[{title}]`\n\n{text}\n{COLUMNS}"));
        }
        Visited::Field { key, doc, value, .. } => {
            let (_, name) = key.rsplit_once('.').unwrap_or(("", key));
            if name == *key {
                // A key outside every table: the page begins with these.
                page.push_str(&format!("\n## Outside every table\n{COLUMNS}"));
            }
            let default = value.as_ref().map_or_else(|| "none".to_owned(), |v| format!("`{v}`"));
            let (kind, text) = (kind(schema, key), escaped(&schema::sentence(doc)));
            page.push_str(&format!("| `{name}` | {kind} | {default} | {text} |\n"));
        }
    }
}

/// Returns `plans.NAME.weight` for `plans.team.weight`.
fn generic(key: &str) -> String {
    for table in NAMED {
        if let Some(rest) = key.strip_prefix(table) {
            let inner = rest.split_once('.').map_or("", |(_, inner)| inner);
            let dot = if inner.is_empty() { "" } else { "." };
            return format!("{table}NAME{dot}{inner}");
        }
    }
    key.to_owned()
}

/// Names the type of a key for people, from its JSON schema.
fn kind(schema: &Value, key: &str) -> &'static str {
    let mut node = schema;
    for part in key.split('.') {
        node = match &node["properties"][part] {
            // A table of named entries declares the schema of an entry.
            Value::Null => &node["additionalProperties"],
            property => property,
        };
    }
    let pattern = node["pattern"].as_str().unwrap_or_default();
    match &node["type"] {
        // The schema has no types for durations and sizes, so their patterns tell
        // them apart.
        _ if pattern.contains("us|ms") => "duration",
        _ if pattern.contains("kKMGT") => "size",
        Value::String(name) => match name.as_str() {
            "boolean" => "boolean",
            "integer" => "whole number",
            "number" => "number",
            "array" => "list",
            "string" => "string",
            _ => "table",
        },
        _ => {
            // The value has several forms.
            let forms = node.to_string();
            let by_class = node["anyOf"][1]["additionalProperties"].is_object();
            match (forms.contains("burst"), forms.contains("us|ms"), by_class) {
                (true, _, true) => "rate, by class",
                (true, _, false) => "rate",
                (false, true, _) => "duration, by class",
                (false, false, true) => "decimal, by class",
                (false, false, false) => "decimal",
            }
        }
    }
}

/// A bar would end a cell of a table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

const COLUMNS: &str = "\n| key | type | default | meaning |\n|---|---|---|---|\n";

/// Tables of named entries.
const NAMED: [&str; 6] = ["plans.", "pools.", "tenants.", "models.", "prices.", "auth.jwt."];
