//! `tollgate usage`: the used device time, from the ledger. The gateway may be
//! running; then it also tells which requests it refused.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use tollgate_domain::{DeviceClass, DeviceNanos, KeyId, Millijoules, ModelName, TenantId, UtcDay};
use tollgate_ledger::{GroupBy, UsageQuery, UsageRow};

use crate::admin::{Admin, Ask, Reach};
use crate::common::{Place, parse_day, say, table};
use crate::keys::records;
use crate::{databases, manifest};

/// Show the used device time by tenant, key and model, or by day and tier.
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
    Tier,
}

/// Prints the usage.
pub fn run(arguments: UsageArguments) -> Result<()> {
    let config = arguments.place.load()?;
    let place = databases::ledger(&config)?;
    manifest::refuse_lost_ledger(config.data(), &place)?;
    // A gateway that never ran has no usage, which is no error.
    let Some(reader) = databases::open_ledger(&place)? else {
        return say(format!("no usage in data folder {} yet\n", config.data().display()));
    };
    let rows = reader.usage(&query(&arguments)?)?;
    if arguments.json {
        say(format!("{:#}\n", serde_json::json!({ "rows": rows })))
    } else if arguments.csv {
        say(csv(&rows))
    } else if rows.is_empty() {
        say("no usage yet\n")
    } else {
        say(text(&rows))?;
        let labels = labels(&arguments, &rows);
        if !labels.is_empty() {
            say(format!("\n{}", table(&["key", "label"], &labels)))?;
        }
        match refusals(&arguments) {
            Some(rows) if !rows.is_empty() => say(format!(
                "\nrefused since the gateway started\n{}",
                table(&["tenant", "kind", "requests"], &rows)
            )),
            _ => Ok(()),
        }
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
            Self::Tier => GroupBy::Tier,
        }
    }
}

/// Returns the groups of a row by name.
fn groups(row: &UsageRow) -> Vec<(&'static str, String)> {
    let UsageRow { tenant, key, model, day, tier, device_class, .. } = row;
    let (day, tier) = (day.map(|day| day.to_string()), tier.map(|tier| tier.to_string()));
    let named =
        [("tenant", tenant), ("key", key), ("model", model), ("day", &day), ("tier", &tier)];
    let mut groups: Vec<_> =
        named.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect();
    // Times on different classes cannot be added, so each row has its class.
    groups.push(("device_class", device_class.clone()));
    groups
}

/// A column of figures: its name, whether the table shows it, and its text in a row.
type Column<'a> = (&'static str, bool, &'a dyn Fn(&UsageRow) -> String);

/// Returns a table for the terminal, with a total for each device class. Each value has its
/// unit. Columns in which nothing happened are left out.
fn text(rows: &[UsageRow]) -> String {
    let totals = totals(rows);
    let group_names: Vec<&str> = rows.first().map_or(Vec::new(), |row| {
        groups(row)
            .iter()
            .map(|(name, _)| if *name == "device_class" { "class" } else { name })
            .collect()
    });
    let of_groups = |row: &UsageRow| groups(row).into_iter().map(|(_, value)| value).collect();
    let of_total = |row: &UsageRow| {
        // The class stands in its own column, the last of the groups.
        let mut cells = vec![String::new(); group_names.len()];
        cells[0] = "total".to_owned();
        if let [_, .., class] = &mut cells[..] {
            class.clone_from(&row.device_class);
        }
        cells
    };
    let lines: Vec<(Vec<String>, &UsageRow)> = rows
        .iter()
        .map(|row| (of_groups(row), row))
        .chain(totals.iter().map(|row| (of_total(row), row)))
        .collect();
    let time = |nanos| DeviceNanos(nanos).to_string();
    let energy = |row: &UsageRow| row.energy_mj.map(|energy| Millijoules(energy).to_string());
    let figures: [Column<'_>; 7] = [
        ("requests", true, &|row| row.requests.to_string()),
        ("billed", true, &|row| time(row.reference_ns)),
        ("measured", true, &|row| time(row.attributed_ns)),
        ("in", true, &|row| row.prompt_tokens.to_string()),
        ("cached", rows.iter().any(|row| row.cached_tokens > 0), &|row| {
            row.cached_tokens.to_string()
        }),
        ("out", true, &|row| row.completion_tokens.to_string()),
        ("energy", rows.iter().any(|row| row.energy_mj.is_some()), &|row| {
            energy(row).unwrap_or_default()
        }),
    ];
    let figures: Vec<_> = figures.into_iter().filter(|(_, is_shown, _)| *is_shown).collect();
    let head: Vec<&str> =
        group_names.iter().copied().chain(figures.iter().map(|(name, ..)| *name)).collect();
    let cells: Vec<Vec<String>> = lines
        .into_iter()
        .map(|(groups, row)| {
            groups.into_iter().chain(figures.iter().map(|(_, _, figure)| figure(row))).collect()
        })
        .collect();
    table(&head, &cells) + LEGEND
}

/// Returns the sum of the rows of each device class that has several.
fn totals(rows: &[UsageRow]) -> Vec<UsageRow> {
    let mut totals: BTreeMap<&str, (usize, UsageRow)> = BTreeMap::new();
    for row in rows {
        let (count, total) = totals
            .entry(&row.device_class)
            .or_insert_with(|| (0, UsageRow { device_class: row.device_class.clone(), ..NOTHING }));
        // The energy of a class is known if that of each row is.
        let is_known = *count == 0 || total.energy_mj.is_some();
        *count += 1;
        total.requests += row.requests;
        total.prompt_tokens += row.prompt_tokens;
        total.cached_tokens += row.cached_tokens;
        total.completion_tokens += row.completion_tokens;
        total.attributed_ns += row.attributed_ns;
        total.reference_ns += row.reference_ns;
        total.gpu_ns += row.gpu_ns;
        let energy = row.energy_mj.filter(|_| is_known);
        total.energy_mj = energy.map(|energy| energy + total.energy_mj.unwrap_or(0));
    }
    totals.into_values().filter(|(count, _)| *count > 1).map(|(_, total)| total).collect()
}

const NOTHING: UsageRow = UsageRow {
    tenant: None,
    key: None,
    model: None,
    day: None,
    tier: None,
    device_class: String::new(),
    requests: 0,
    prompt_tokens: 0,
    cached_tokens: 0,
    completion_tokens: 0,
    attributed_ns: 0,
    reference_ns: 0,
    gpu_ns: 0,
    energy_mj: None,
};

/// The meaning of the columns.
const LEGEND: &str = "\nbilled: reference cost; limits and prices use this time\n\
    measured: the device time that was attributed to the requests\n\
    in, out: tokens of the prompts and of the answers\n";

/// Returns the keys of `rows` that have labels, each with its label. Returns none if the keys
/// cannot be read.
fn labels(arguments: &UsageArguments, rows: &[UsageRow]) -> Vec<Vec<String>> {
    // Usage is complete without labels, so no error of the keys is one of the usage.
    let keys = Admin::of(arguments.place.clone()).reach().and_then(|reach| match &reach {
        // An archive has no keys, and reading must not make their file.
        Reach::Stopped(config)
            if config.postgres().is_none() && !config.data().join("keys.db").exists() =>
        {
            Ok(Vec::new())
        }
        _ => records(&reach, None),
    });
    let Ok(keys) = keys else {
        return Vec::new();
    };
    let used: BTreeSet<&str> = rows.iter().filter_map(|row| row.key.as_deref()).collect();
    keys.into_iter()
        .filter(|key| !key.label.is_empty() && used.contains(key.id.as_str()))
        .map(|key| vec![key.id.to_string(), key.label])
        .collect()
}

/// Returns the requests that the running gateway has refused since its start, by tenant and
/// kind; `None` if no gateway answers.
fn refusals(arguments: &UsageArguments) -> Option<Vec<Vec<String>>> {
    // Usage is in the ledger, so a gateway that does not answer is no error.
    let Ok(Reach::Running(client)) = Admin::of(arguments.place.clone()).reach() else {
        return None;
    };
    let metrics = client.text(Ask::Get("/metrics")).ok()?;
    let rows = metrics.lines().filter_map(refusal);
    let wanted = arguments.tenant.as_deref();
    Some(rows.filter(|row| wanted.is_none_or(|tenant| row[0] == tenant)).collect())
}

/// Reads `tollgate_tenant_refusals_total{tenant="acme",kind="queued"} 7`. Neither label can
/// hold a quote.
fn refusal(line: &str) -> Option<Vec<String>> {
    let rest = line.strip_prefix("tollgate_tenant_refusals_total{tenant=\"")?;
    let (tenant, rest) = rest.split_once("\",kind=\"")?;
    let (kind, count) = rest.split_once("\"} ")?;
    Some(vec![tenant.to_owned(), kind.to_owned(), count.to_owned()])
}

/// Returns CSV (RFC 4180). Names contain neither commas nor quotes, so no cell
/// needs quoting.
fn csv(rows: &[UsageRow]) -> String {
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let mut columns = groups(row);
        for (name, figure) in [
            ("requests", row.requests),
            ("prompt_tokens", row.prompt_tokens),
            ("cached_tokens", row.cached_tokens),
            ("completion_tokens", row.completion_tokens),
            ("attributed_ns", row.attributed_ns),
            ("reference_ns", row.reference_ns),
            ("gpu_ns", row.gpu_ns),
        ] {
            columns.push((name, figure.to_string()));
        }
        // Unknown energy is empty.
        let energy = row.energy_mj.map(|energy| energy.to_string()).unwrap_or_default();
        columns.push(("energy_mj", energy));
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

#[cfg(test)]
mod tests {
    use tollgate_domain::Tier;

    use super::*;

    fn row(tenant: &str, class: &str, requests: u64) -> UsageRow {
        UsageRow {
            tenant: Some(tenant.to_owned()),
            key: Some("gwf7hrkkx8".to_owned()),
            model: Some("tollgate-demo".to_owned()),
            device_class: class.to_owned(),
            requests,
            prompt_tokens: 20,
            completion_tokens: 30,
            attributed_ns: 2_000_000,
            reference_ns: 1_000_000,
            ..NOTHING
        }
    }

    #[test]
    fn usage_table_has_totals_and_fits_a_terminal() {
        let rows = [row("acme", "cpu", 3), row("globex", "cpu", 4), row("acme", "h200", 5)];
        let text = text(&rows);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let total: Vec<&str> = text
            .lines()
            .find(|line| line.starts_with("total"))
            .unwrap()
            .split_whitespace()
            .collect();
        assert_eq!(total[..3], ["total", "cpu", "7"], "{text}");
        assert!(!text.contains("energy") && !text.contains("cached"), "{text}");
        assert!(text.contains("billed"), "{text}");
        assert_eq!(text.matches("total").count(), 1, "one row needs no total: {text}");
    }

    #[test]
    fn rows_by_tier_name_it() {
        let of = |tier| UsageRow { tier: Some(tier), ..row("acme", "cpu", 3) };
        let rows = [of(Tier::Interactive), of(Tier::Batch)];
        let csv = csv(&rows);
        assert!(csv.starts_with("tenant,key,model,tier,device_class,requests,"), "{csv}");
        assert!(csv.contains("tollgate-demo,batch,cpu,3,"), "{csv}");
        let json = serde_json::to_value(&rows[1]).unwrap();
        assert_eq!(json["tier"], "batch");
        let text = text(&rows);
        assert!(text.contains("interactive") && text.contains("batch"), "{text}");
    }

    #[test]
    fn total_has_energy_only_if_each_row_has() {
        let known = |energy| UsageRow { energy_mj: energy, ..row("acme", "h200", 1) };
        assert_eq!(totals(&[known(Some(5)), known(Some(7))])[0].energy_mj, Some(12));
        assert_eq!(totals(&[known(Some(5)), known(None), known(Some(7))])[0].energy_mj, None);
        assert_eq!(totals(&[known(None), known(Some(7))])[0].energy_mj, None);
    }

    #[test]
    fn refusals_are_read_from_metrics() {
        let line = r#"tollgate_tenant_refusals_total{tenant="acme",kind="queued"} 7"#;
        assert_eq!(refusal(line), Some(vec!["acme".into(), "queued".into(), "7".into()]));
        assert_eq!(refusal("# TYPE tollgate_tenant_refusals_total counter"), None);
    }
}
