//! `tollgate audit actions`: the newest actions of admins, for people.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tollgate_domain::UtcTime;
use tollgate_ledger::{DatabasePlace, Ledger};

use crate::common::{Place, say, second};
use crate::databases;

#[derive(clap::Args)]
pub(super) struct Actions {
    #[command(flatten)]
    place: Place,
    /// The number of actions.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    last: u32,
    /// Print the records as JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the newest actions, the newest last.
pub(super) fn print(arguments: &Actions) -> Result<()> {
    let Actions { place, last, json } = arguments;
    let config = place.load()?;
    let records = read(&databases::ledger(&config)?, *last)?;
    if *json {
        return say(format!("{}\n", json!({ "actions": records })));
    }
    say(records.iter().map(lines).collect::<String>())
}

fn read(ledger: &DatabasePlace, last: u32) -> Result<Vec<Value>> {
    let reader = Ledger::open_read_only(ledger.clone())
        .with_context(|| format!("cannot read the ledger {ledger}"))?;
    let records = reader.newest_actions(last)?.into_iter().map(|(seq, text)| {
        let mut record: Value = serde_json::from_str(&text).context("a record")?;
        // The ledger keeps the number beside the text.
        record["seq"] = seq.into();
        Ok(record)
    });
    records.collect()
}

/// Returns the lines of one record: number, time, actor, action and user, then its details.
fn lines(record: &Value) -> String {
    let text = |name: &str| record[name].as_str().unwrap_or("-");
    // Records write times in RFC 3339, in UTC: the first 19 characters end with the second.
    let at = text("time").get(..19).unwrap_or("-").replace('T', " ");
    let user = &record["user.id"];
    let user = ["tenant", "key"].map(|name| user[name].as_str().unwrap_or(""));
    let (seq, actor, action) = (&record["seq"], text("actor"), text("operation.type"));
    let line = format!("{seq}  {at}  {actor}  {action}  {}", user.join(" "));
    let mut said = line.trim_end().to_owned() + "\n";
    let mut details = Vec::new();
    leaves("", &record["detail"], &mut details);
    for detail in details {
        let cut: String = detail.chars().take(WIDTH).collect();
        let more = if detail.chars().count() > WIDTH { "..." } else { "" };
        said += &format!("    {cut}{more}\n");
    }
    said
}

/// Collects the values within `value` that tell something, each with its name.
fn leaves(name: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Null | Value::Bool(false) => {}
        // A change of a key of the config, as the gateway records it at a reload.
        Value::Object(change) if change.contains_key("key") && change.contains_key("new") => {
            let shown = |side| change.get(side).and_then(Value::as_str).unwrap_or("not set");
            found.push(format!("{}: {} -> {}", shown("key"), shown("old"), shown("new")));
        }
        Value::Object(parts) => {
            for (part, value) in parts {
                let dot = if name.is_empty() { "" } else { "." };
                leaves(&format!("{name}{dot}{part}"), value, found);
            }
        }
        Value::Array(parts) => parts.iter().for_each(|part| leaves(name, part, found)),
        Value::Number(nanos) if name.ends_with("_ns") => {
            let at = nanos.as_u64().map_or_else(|| nanos.to_string(), |ns| second(UtcTime(ns)));
            found.push(format!("{}: {at}", name.trim_end_matches("_ns")));
        }
        Value::String(text) => found.push(format!("{name}: {text}")),
        other => found.push(format!("{name}: {other}")),
    }
}

/// Characters of a detail that a line shows.
const WIDTH: usize = 72;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn action_shows_actor_user_and_details() {
        let record = json!({
            "seq": 7, "time": "2026-11-25T11:04:33.917563979Z", "operation.type": "config.changed",
            "actor": "admin alice", "user.id": { "tenant": "acme" },
            "detail": {
                "certificate_renewed": false, "overrides": [],
                "changes": [
                    { "key": "a.b", "old": null, "new": "1", "place": "x.toml:3" },
                    { "key": "c", "old": "2", "new": "y".repeat(100), "place": "x.toml:4" },
                ],
            },
        });
        let expected = format!(
            "7  2026-11-25 11:04:33  admin alice  config.changed  acme\n    \
             a.b: not set -> 1\n    c: 2 -> {}...\n",
            "y".repeat(64)
        );
        assert_eq!(lines(&record), expected);
    }

    #[test]
    fn action_shows_times_as_dates() {
        let detail = json!({ "until_ns": 1_795_824_000_000_000_000_u64 });
        let said = lines(&json!({ "seq": 1, "detail": detail }));
        assert_eq!(said, "1  -  -  -\n    until: 2026-11-28 00:00:00\n");
    }

    #[test]
    fn action_without_fields_is_one_line() {
        assert_eq!(lines(&json!({ "seq": 1 })), "1  -  -  -\n");
    }
}
