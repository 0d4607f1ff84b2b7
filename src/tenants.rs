//! `tollgate tenants`: the tenants of a running gateway with the state of their limits, or
//! those of the config if no gateway runs.

use std::time::Duration;

use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tollgate_config::{Config, Tenant};
use tollgate_domain::{
    Amount, DeviceClass, DeviceNanos, KeyId, PlanName, PoolName, TenantId, UtcDay, UtcTime,
};

use crate::admin::{Admin, Ask, Reach, encoded};
use crate::common::{minute, say, second, span, table};

/// List tenants and show the state of their limits.
#[derive(clap::Args)]
pub struct TenantsArguments {
    #[command(subcommand)]
    action: TenantsAction,
}

#[derive(clap::Subcommand)]
enum TenantsAction {
    /// List the tenants.
    List(ListTenants),
    /// Show a tenant's limits, penalties and keys.
    Show(ShowTenant),
    /// List the refusals of the last hour by tenant.
    Refused(RefusedTenants),
    /// Raise limits of a tenant for a time.
    Raise(RaiseTenant),
    /// End raises of a tenant before their time.
    Lower(LowerTenant),
}

#[derive(clap::Args)]
struct ListTenants {
    #[command(flatten)]
    admin: Admin,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct RefusedTenants {
    #[command(flatten)]
    admin: Admin,
    /// List the last 200 refusals one by one, the newest last.
    #[arg(long)]
    recent: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct ShowTenant {
    #[command(flatten)]
    admin: Admin,
    /// The tenant.
    name: TenantId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct RaiseTenant {
    #[command(flatten)]
    admin: Admin,
    /// The tenant.
    name: TenantId,
    /// A limit of the tenant's plan and its higher value; may be repeated. A value is a
    /// number, a duration such as 2h, or JSON.
    #[arg(long, value_name = "LIMIT=VALUE", required = true, value_parser = assignment)]
    limit: Vec<(String, Value)>,
    /// The first UTC day without the raise.
    #[arg(long, value_name = "DAY", required_unless_present = "span")]
    until: Option<UtcDay>,
    /// The time after which the raise ends, such as 12h.
    #[arg(long = "for", value_name = "TIME", id = "span", value_parser = span, conflicts_with = "until")]
    span: Option<Duration>,
}

#[derive(clap::Args)]
struct LowerTenant {
    #[command(flatten)]
    admin: Admin,
    /// The tenant.
    name: TenantId,
    /// End the raise of this limit alone.
    #[arg(long, value_name = "LIMIT")]
    limit: Option<String>,
}

/// The refusals of a tenant of one kind.
#[derive(Deserialize)]
struct RefusedRow {
    tenant: TenantId,
    kind: String,
    last_hour: u64,
    since_start: u64,
    last_ns: UtcTime,
    message: Option<String>,
}

/// The refusals in an answer.
#[derive(Deserialize)]
struct RefusedRows {
    refusals: Vec<RefusedRow>,
}

/// One refusal.
#[derive(Deserialize)]
struct RecentRefusal {
    at_ns: UtcTime,
    tenant: TenantId,
    key: KeyId,
    kind: String,
    scope: Option<String>,
    retry_after_ms: Option<u64>,
}

/// A higher value of one limit for a time.
#[derive(Deserialize)]
struct RaiseRow {
    limit: String,
    value: Value,
    until_ns: UtcTime,
    actor: String,
}

/// The answer to a change of raises.
#[derive(Deserialize)]
struct RaiseRows {
    raises: Vec<RaiseRow>,
}

/// A tenant in the list. Only a running gateway knows the requests.
#[derive(Serialize, Deserialize)]
struct Row {
    tenant: TenantId,
    plan: Option<PlanName>,
    pool: Option<PoolName>,
    weight: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    running: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
}

/// The state of one limit.
#[derive(Deserialize)]
struct LimitRow {
    scope: String,
    limit: String,
    device_class: Option<DeviceClass>,
    currency: Option<String>,
    value: u64,
    used: u64,
    remaining: u64,
    refills_ms: Option<u64>,
}

/// Runs the subcommand.
pub fn run(arguments: TenantsArguments) -> Result<()> {
    match arguments.action {
        TenantsAction::List(list) => self::list(list),
        TenantsAction::Show(show) => self::show(show),
        TenantsAction::Refused(refused) => self::refused(refused),
        TenantsAction::Raise(raise) => self::raise(raise),
        TenantsAction::Lower(lower) => self::lower(lower),
    }
}

fn list(list: ListTenants) -> Result<()> {
    let rows: Vec<Row> = match list.admin.reach()? {
        Reach::Running(client) => client.pages("/v1/tenants")?,
        Reach::Stopped(config) => config.tenants().map(Row::configured).collect(),
    };
    if list.json {
        return say(format!("{:#}\n", json!({ "tenants": rows })));
    }
    let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    say(table(&HEAD, &cells))
}

fn show(show: ShowTenant) -> Result<()> {
    #[derive(Deserialize)]
    struct Shown {
        #[serde(flatten)]
        row: Row,
        limits: Vec<LimitRow>,
        raises: Vec<RaiseRow>,
        refusals: Vec<RefusedRow>,
    }
    let client = match show.admin.reach()? {
        Reach::Running(client) => client,
        Reach::Stopped(config) => {
            let row = configured(&config, &show.name)?;
            if show.json {
                return say(format!("{:#}\n", json!(row)));
            }
            eprintln!("no gateway runs, so the limits have no state");
            return say(table(&HEAD, &[row.cells()]));
        }
    };
    let path = format!("/v1/tenants/{}", encoded(show.name.as_str()));
    // Not typed yet: `--json` also prints fields that this version does not know.
    let state: Value = client.json(Ask::Get(&path))?;
    if show.json {
        return say(format!("{state:#}\n"));
    }
    let Shown { row, limits, raises, refusals } = serde_json::from_value(state)?;
    say(table(&HEAD, &[row.cells()]))?;
    let limits: Vec<Vec<String>> = limits.iter().map(LimitRow::cells).collect();
    say(format!(
        "\n{}",
        table(&["scope", "limit", "class", "bound", "used", "left", "whole in"], &limits)
    ))?;
    if !raises.is_empty() {
        say(format!("\n{}", RaiseRow::table(&raises)))?;
    }
    if !refusals.is_empty() {
        say(format!("\n{}", RefusedRow::table(&refusals)))?;
    }
    Ok(())
}

fn refused(refused: RefusedTenants) -> Result<()> {
    // Only a running gateway counts refusals; no file has them.
    let client = refused.admin.connect()?;
    if refused.recent {
        let mut view: Value = client.json(Ask::Get("/v1/live"))?;
        let recent = view["recent_refusals"].take();
        if refused.json {
            return say(format!("{:#}\n", json!({ "recent_refusals": recent })));
        }
        let recent: Vec<RecentRefusal> = serde_json::from_value(recent)?;
        return say(match recent.is_empty() {
            true => "no tenant was refused since the gateway started\n".to_owned(),
            false => RecentRefusal::table(&recent),
        });
    }
    let answer: Value = client.json(Ask::Get("/v1/refusals"))?;
    if refused.json {
        return say(format!("{answer:#}\n"));
    }
    let RefusedRows { refusals } = serde_json::from_value(answer)?;
    if refusals.is_empty() {
        return say("no tenant was refused in the last hour\n");
    }
    say(RefusedRow::table(&refusals))
}

fn raise(raise: RaiseTenant) -> Result<()> {
    let RaiseTenant { admin, name, limit, until, span } = raise;
    let mut body = json!({ "limits": Map::from_iter(limit) });
    match (until, span) {
        (Some(day), _) => body["until"] = json!(day.to_string()),
        // The command line demands one of the two, so the default is never sent.
        (None, span) => body["seconds"] = json!(span.unwrap_or_default().as_secs()),
    }
    // The running gateway keeps raises, because only it may write them.
    let client = admin.connect()?;
    let path = format!("/v1/tenants/{}/raises", encoded(name.as_str()));
    let RaiseRows { raises } = client.json(Ask::Post(&path, &body))?;
    say(RaiseRow::table(&raises))
}

fn lower(lower: LowerTenant) -> Result<()> {
    let LowerTenant { admin, name, limit } = lower;
    let client = admin.connect()?;
    let limit = limit.map(|limit| format!("?limit={}", encoded(&limit))).unwrap_or_default();
    let path = format!("/v1/tenants/{}/raises{limit}", encoded(name.as_str()));
    let RaiseRows { raises } = client.json(Ask::Delete(&path))?;
    let ended: Vec<&str> = raises.iter().map(|raise| raise.limit.as_str()).collect();
    say(format!("ended the raises of {}\n", ended.join(", ")))
}

/// Parses `LIMIT=VALUE`. A value that is no JSON is text.
fn assignment(text: &str) -> Result<(String, Value), String> {
    let wrong = || format!("{text:?} is not LIMIT=VALUE, such as tokens_per_minute=400000");
    let (limit, value) = text.split_once('=').ok_or_else(wrong)?;
    // As in the config, digits may be grouped: 400_000.
    let plain = value.replace('_', "");
    let number = plain.parse::<u64>().map(Value::from).ok();
    let json = || serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
    Ok((limit.trim().to_owned(), number.unwrap_or_else(json)))
}

fn configured(config: &Config, name: &TenantId) -> Result<Row> {
    let tenant = config.tenant(name);
    let tenant = tenant.ok_or_else(|| anyhow!("the config has no tenant {name}"))?;
    Ok(Row::configured(tenant))
}

impl Row {
    fn configured(tenant: &Tenant) -> Self {
        Self {
            tenant: tenant.name.clone(),
            plan: tenant.plan.as_ref().map(|plan| plan.name.clone()),
            pool: tenant.pool.as_ref().map(|pool| pool.name.clone()),
            weight: tenant.weight,
            running: None,
            waiting: None,
        }
    }

    fn cells(&self) -> Vec<String> {
        let Self { tenant, plan, pool, weight, running, waiting } = self;
        let count = |count: &Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
        vec![
            tenant.to_string(),
            plan.as_ref().map_or("-", PlanName::as_str).to_owned(),
            pool.as_ref().map_or("-", PoolName::as_str).to_owned(),
            weight.to_string(),
            count(running),
            count(waiting),
        ]
    }
}

impl LimitRow {
    fn cells(&self) -> Vec<String> {
        let Self { scope, limit, device_class, currency, value, used, remaining, refills_ms } =
            self;
        // Limits by device class are in nanoseconds of that class, budgets in nano-units of their
        // currency, and the time for forms in nanoseconds of the host.
        let is_time = device_class.is_some() || limit == "grammar_time_per_minute";
        let amount = |amount: u64| match currency {
            _ if is_time => DeviceNanos(amount).to_string(),
            Some(currency) => format!("{} {currency}", Amount(amount.into())),
            None => amount.to_string(),
        };
        // Rounded up, so that the limit is whole after this time.
        let seconds = |ms: u64| format!("{}s", ms.div_ceil(1000));
        vec![
            scope.clone(),
            limit.clone(),
            device_class.as_ref().map_or("-", DeviceClass::as_str).to_owned(),
            amount(*value),
            amount(*used),
            amount(*remaining),
            refills_ms.map_or("-".to_owned(), seconds),
        ]
    }
}

impl RefusedRow {
    /// Returns a table, and below it the last message of each row that has one.
    fn table(rows: &[Self]) -> String {
        let cells = rows.iter().map(|row| {
            let Self { tenant, kind, last_hour, since_start, last_ns, message: _ } = row;
            let (tenant, kind) = (tenant.to_string(), kind.clone());
            vec![tenant, kind, last_hour.to_string(), since_start.to_string(), minute(*last_ns)]
        });
        let head = ["refused", "by", "last hour", "since start", "last (UTC)"];
        let mut text = table(&head, &cells.collect::<Vec<_>>());
        for Self { tenant, message, .. } in rows {
            if let Some(message) = message {
                text.push_str(&format!("{tenant}: {message}\n"));
            }
        }
        text
    }
}

impl RecentRefusal {
    fn table(refusals: &[Self]) -> String {
        let cells = refusals.iter().map(|refusal| {
            let Self { at_ns, tenant, key, kind, scope, retry_after_ms } = refusal;
            let wait = retry_after_ms.map(|ms| format!("{}s", ms.div_ceil(1000)));
            let scope = scope.as_deref().unwrap_or("-");
            // The names of the tenant and of the key stand in the row already.
            let owner = match scope.split_once(' ') {
                Some((kind @ "tenant", name)) if name == tenant.as_str() => kind,
                Some((kind @ "key", name)) if name == key.as_str() => kind,
                _ => scope,
            };
            vec![
                second(*at_ns),
                tenant.to_string(),
                key.to_string(),
                kind.clone(),
                owner.to_owned(),
                wait.unwrap_or_else(|| "-".to_owned()),
            ]
        });
        let head = ["at (UTC)", "tenant", "key", "refused by", "of", "wait"];
        table(&head, &cells.collect::<Vec<_>>())
    }
}

impl RaiseRow {
    fn table(raises: &[Self]) -> String {
        let cells = raises.iter().map(|Self { limit, value, until_ns, actor }| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            vec![limit.clone(), value, minute(*until_ns), actor.clone()]
        });
        table(&["raised limit", "bound", "until (UTC)", "by"], &cells.collect::<Vec<_>>())
    }
}

/// The columns of a tenant.
const HEAD: [&str; 6] = ["tenant", "plan", "pool", "weight", "running", "waiting"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_shown_in_their_units() {
        let row = |limit: &str, class: Option<&str>, currency: Option<&str>| LimitRow {
            scope: "tenant acme".to_owned(),
            limit: limit.to_owned(),
            device_class: class.map(|name| DeviceClass::new(name).expect("a name")),
            currency: currency.map(str::to_owned),
            value: 2_000_000_000,
            used: 0,
            remaining: 2_000_000_000,
            refills_ms: None,
        };
        for (row, expected) in [
            (row("grammar_time_per_minute", None, None), "2.000s"),
            (row("device_time_per_day", Some("h200"), None), "2.000s"),
            (row("budget_per_month", None, Some("EUR")), "2.000000000 EUR"),
            (row("tokens_per_minute", None, None), "2000000000"),
        ] {
            assert_eq!(row.cells()[3], expected, "{}", row.limit);
        }
    }
}
