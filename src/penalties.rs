//! `tollgate penalties`: lists and lifts the penalties for repeated offences. Uses
//! the admin listener of a running gateway.

use std::time::Duration;

use crate::admin::{Admin, Ask};
use crate::common::{say, table};
use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// List and lift penalties.
#[derive(clap::Args)]
pub struct PenaltiesArguments {
    #[command(subcommand)]
    action: PenaltiesAction,
}

#[derive(clap::Subcommand)]
enum PenaltiesAction {
    /// List the current penalties.
    List(ListPenalties),
    /// Lift the penalties of a tenant or of a source address.
    Lift(Lift),
}

#[derive(clap::Args)]
struct ListPenalties {
    #[command(flatten)]
    admin: Admin,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Lift {
    #[command(flatten)]
    admin: Admin,
    #[command(flatten)]
    offender: Offender,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Offender {
    /// The tenant.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// The source address, as `list` shows it.
    #[arg(long, value_name = "ADDR")]
    source: Option<String>,
}

/// Runs the subcommand.
pub fn run(arguments: PenaltiesArguments) -> Result<()> {
    match arguments.action {
        PenaltiesAction::List(list) => self::list(list),
        PenaltiesAction::Lift(lift) => self::lift(lift),
    }
}

fn list(list: ListPenalties) -> Result<()> {
    #[derive(Deserialize)]
    struct Listed {
        penalties: Vec<Row>,
    }
    #[derive(Deserialize)]
    struct Row {
        kind: String,
        name: String,
        offence: String,
        offences: u64,
        left_ms: u64,
    }
    let body = list.admin.connect()?.text(Ask::Get("/v1/penalties"))?;
    if list.json {
        let value: serde_json::Value = serde_json::from_str(&body)?;
        return say(format!("{value:#}\n"));
    }
    let listed: Listed =
        serde_json::from_str(&body).context("cannot parse the gateway's answer")?;
    let left = |millis| format!("{:.1?}", Duration::from_millis(millis));
    let row = |row: Row| {
        vec![row.kind, row.name, row.offence, row.offences.to_string(), left(row.left_ms)]
    };
    let rows: Vec<Vec<String>> = listed.penalties.into_iter().map(row).collect();
    say(table(&["kind", "name", "offence", "offences", "left"], &rows))
}

fn lift(lift: Lift) -> Result<()> {
    let (kind, name) = match (&lift.offender.tenant, &lift.offender.source) {
        (Some(name), _) => ("tenant", name),
        (None, Some(name)) => ("source", name),
        (None, None) => bail!("give --tenant or --source"),
    };
    // Any other character would change the path of the request.
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:/".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        bail!("{name:?} is not a valid {kind}");
    }
    lift.admin.connect()?.text(Ask::Delete(&format!("/v1/penalties/{kind}/{name}")))?;
    say(format!("{kind} {name} has no penalty now\n"))
}
