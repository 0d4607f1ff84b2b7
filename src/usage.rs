//! `tollgate usage`: the used device time, from the ledger. The gateway may be
//! running.

use anyhow::{Context, Result};
use tollgate_domain::{DeviceClass, DeviceNanos, KeyId, Millijoules, ModelName, TenantId, UtcDay};
use tollgate_ledger::{GroupBy, Ledger, UsageQuery, UsageRow};

use crate::common::{Place, parse_day, say, table};
use crate::manifest;

/// Show the used device time by tenant, key and model.
#[derive(clap::Args)]
pub struct UsageArguments {
    #[command(flatten)]
    place: Place,
    /// Only this tenant.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Only this key.
    #[arg(long, value_name = "ID")]
    key: Option<String>,
    /// Only this model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Only devices of this class, such as cpu or h200.
    #[arg(long, value_name = "CLASS")]
    class: Option<String>,
    /// The first UTC day, such as 2026-11-20.
    #[arg(long, value_name = "DAY", value_parser = parse_day)]
    from: Option<UtcDay>,
    /// The last UTC day, inclusive.
    #[arg(long, value_name = "DAY", value_parser = parse_day)]
    to: Option<UtcDay>,
    /// The groups of a row. The device class is always one of them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tenant,key,model")]
    by: Vec<By>,
    /// Print JSON, in whole nanoseconds and millijoules.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print CSV, in the same units.
    #[arg(long)]
    csv: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    Tenant,
    Key,
    Model,
    Day,
}

/// Prints the usage.
pub fn run(arguments: UsageArguments) -> Result<()> {
    let config = arguments.place.load()?;
    manifest::refuse_loss(config.data(), "ledger.db")?;
    let path = config.data().join("ledger.db");
    // A gateway that never ran has no usage, which is no error.
    if !path.exists() {
        return say(format!("no usage in data folder {} yet\n", config.data().display()));
    }
    let reader = Ledger::open_read_only(&path)
        .with_context(|| format!("cannot read the ledger {}", path.display()))?;
    let rows = reader.usage(&query(&arguments)?)?;
    if arguments.json {
        say(format!("{:#}\n", serde_json::json!({ "rows": rows })))
    } else if arguments.csv {
        say(csv(&rows))
    } else if rows.is_empty() {
        say("no usage yet\n")
    } else {
        say(text(&rows))
    }
}

fn query(arguments: &UsageArguments) -> Result<UsageQuery> {
    Ok(UsageQuery {
        tenant: arguments.tenant.as_deref().map(TenantId::new).transpose()?,
        key: arguments.key.as_deref().map(KeyId::new).transpose()?,
        model: arguments.model.as_deref().map(ModelName::new).transpose()?,
        class: arguments.class.as_deref().map(DeviceClass::new).transpose()?,
        from: arguments.from,
        to: arguments.to,
        group: arguments.by.iter().map(|by| by.group()).collect(),
    })
}

impl By {
    fn group(self) -> GroupBy {
        match self {
            Self::Tenant => GroupBy::Tenant,
            Self::Key => GroupBy::Key,
            Self::Model => GroupBy::Model,
            Self::Day => GroupBy::Day,
        }
    }
}

/// The text forms of times and energy.
struct Units {
    time: fn(DeviceNanos) -> String,
    energy: fn(Millijoules) -> String,
}

/// Returns the columns of a row: its groups, then its figures. Unknown energy is
/// empty.
fn columns(row: &UsageRow, units: &Units) -> Vec<(&'static str, String)> {
    let UsageRow { tenant, key, model, day, device_class, .. } = row;
    let day = day.map(|day| day.to_string());
    let named = [("tenant", tenant), ("key", key), ("model", model), ("day", &day)];
    let mut columns: Vec<_> =
        named.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect();
    // Times on different classes cannot be added, so each row has its class.
    columns.push(("device_class", device_class.clone()));
    for (name, count) in [
        ("requests", row.requests),
        ("prompt_tokens", row.prompt_tokens),
        ("cached_tokens", row.cached_tokens),
        ("completion_tokens", row.completion_tokens),
    ] {
        columns.push((name, count.to_string()));
    }
    for (name, nanos) in [
        ("attributed_ns", row.attributed_ns),
        ("reference_ns", row.reference_ns),
        ("gpu_ns", row.gpu_ns),
    ] {
        columns.push((name, (units.time)(DeviceNanos(nanos))));
    }
    let energy = row.energy_mj.map(|energy| (units.energy)(Millijoules(energy)));
    columns.push(("energy_mj", energy.unwrap_or_default()));
    columns
}

/// Returns a table for the terminal. Each value has its unit, so the headings have
/// none.
fn text(rows: &[UsageRow]) -> String {
    let units = Units { time: |time| time.to_string(), energy: |energy| energy.to_string() };
    let all: Vec<_> = rows.iter().map(|row| columns(row, &units)).collect();
    let head: Vec<String> = all
        .first()
        .map(|columns| {
            let unit = |name: &'static str| name.trim_end_matches("_ns").trim_end_matches("_mj");
            columns.iter().map(|(name, _)| unit(name).replace('_', " ")).collect()
        })
        .unwrap_or_default();
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let cells: Vec<Vec<String>> =
        all.into_iter().map(|row| row.into_iter().map(|(_, cell)| cell).collect()).collect();
    table(&head, &cells)
}

/// Returns CSV (RFC 4180). Names contain neither commas nor quotes, so no cell
/// needs quoting.
fn csv(rows: &[UsageRow]) -> String {
    let units = Units {
        time: |time| time.nanos().to_string(),
        energy: |energy| energy.millijoules().to_string(),
    };
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let columns = columns(row, &units);
        // The groups decide the columns, so the first row gives the heading.
        if index == 0 {
            let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
            text += &(names.join(",") + "\r\n");
        }
        let cells: Vec<String> = columns.into_iter().map(|(_, cell)| cell).collect();
        text += &(cells.join(",") + "\r\n");
    }
    text
}
