//! `tollgate tenants`: the tenants of a running gateway with the state of their limits, or
//! those of the config if no gateway runs.

use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tollgate_config::{Config, Tenant};
use tollgate_domain::{Amount, DeviceClass, DeviceNanos, PlanName, PoolName, TenantId};

use crate::admin::{Admin, Ask, Reach, encoded};
use crate::common::{say, table};

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
struct ShowTenant {
    #[command(flatten)]
    admin: Admin,
    /// The tenant.
    name: TenantId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
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
    let state: Value = client.json(Ask::Get(&path))?;
    if show.json {
        return say(format!("{state:#}\n"));
    }
    let Shown { row, limits } = serde_json::from_value(state)?;
    say(table(&HEAD, &[row.cells()]))?;
    let limits: Vec<Vec<String>> = limits.iter().map(LimitRow::cells).collect();
    say(format!(
        "\n{}",
        table(&["scope", "limit", "class", "bound", "used", "left", "whole in"], &limits)
    ))
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
        // Limits by device class are in nanoseconds of that class, and budgets in nano-units
        // of their currency.
        let amount = |amount: u64| match (device_class, currency) {
            (Some(_), _) => DeviceNanos(amount).to_string(),
            (None, Some(currency)) => format!("{} {currency}", Amount(amount.into())),
            (None, None) => amount.to_string(),
        };
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

/// The columns of a tenant.
const HEAD: [&str; 6] = ["tenant", "plan", "pool", "weight", "running", "waiting"];
