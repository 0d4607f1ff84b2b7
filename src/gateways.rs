//! `tollgate gateways`: lists the gateways that share a database server, and frees what a lost
//! one has of the caps. Uses the admin listener of a running gateway.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::admin::{Admin, Ask};
use crate::common::{say, table};

/// List the gateways that share a database server, and give up a lost one.
#[derive(clap::Args)]
pub struct GatewaysArguments {
    #[command(subcommand)]
    action: GatewaysAction,
}

#[derive(clap::Subcommand)]
enum GatewaysAction {
    /// List the gateways, also those that were killed or have stopped.
    List(ListGateways),
    /// Free what a gateway that never starts again has of the caps.
    ///
    /// Also lets other gateways repeat requests with an idempotency key that it has begun.
    /// Work of it that is not in the ledger yet is given up.
    Free(Free),
}

#[derive(clap::Args)]
struct ListGateways {
    #[command(flatten)]
    admin: Admin,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Free {
    #[command(flatten)]
    admin: Admin,
    /// The id of the gateway's data folder, or its beginning, as `list` shows it.
    #[arg(value_name = "ID")]
    home: String,
}

/// Runs the subcommand.
pub fn run(arguments: GatewaysArguments) -> Result<()> {
    match arguments.action {
        GatewaysAction::List(list) => self::list(list),
        GatewaysAction::Free(free) => self::free(free),
    }
}

#[derive(Deserialize)]
struct GatewayList {
    gateways: Vec<GatewayLine>,
}

#[derive(Deserialize)]
struct GatewayLine {
    home: String,
    name: Option<String>,
    state: String,
    silent_ms: Option<u64>,
    caps: u32,
    is_this: bool,
}

impl GatewayList {
    fn of(body: &str) -> Result<Self> {
        serde_json::from_str(body).context("cannot parse the gateway's answer")
    }
}

/// Characters of an id in the table: enough to tell gateways apart, and short enough for a
/// terminal of 80 columns.
const SHOWN: usize = 12;

fn list(list: ListGateways) -> Result<()> {
    let body = list.admin.connect()?.text(Ask::Get("/v1/gateways"))?;
    if list.json {
        let value: serde_json::Value = serde_json::from_str(&body)?;
        return say(format!("{value:#}\n"));
    }
    let listed = GatewayList::of(&body)?;
    if listed.gateways.is_empty() {
        return say("this gateway shares no database server\n");
    }
    let heard = |millis: Option<u64>| {
        millis.map_or_else(String::new, |millis| {
            format!("{} s ago", Duration::from_millis(millis).as_secs())
        })
    };
    let row = |row: GatewayLine| {
        let name = row.name.unwrap_or_default();
        let name = if row.is_this { format!("{name} (this)") } else { name };
        let home = row.home.chars().take(SHOWN).collect();
        vec![home, name, row.state, heard(row.silent_ms), row.caps.to_string()]
    };
    let rows: Vec<Vec<String>> = listed.gateways.into_iter().map(row).collect();
    say(table(&["id", "name", "state", "heard", "caps"], &rows))
}

fn free(free: Free) -> Result<()> {
    #[derive(Deserialize)]
    struct Freed {
        caps: u32,
    }
    let client = free.admin.connect()?;
    let listed = GatewayList::of(&client.text(Ask::Get("/v1/gateways"))?)?;
    let begins = |row: &GatewayLine| row.home.starts_with(&free.home);
    let mut found = listed.gateways.into_iter().filter(begins).map(|row| row.home);
    let (home, other) = (found.next(), found.next());
    let home = match (home, other) {
        (Some(home), None) => home,
        (None, _) => bail!(
            "no gateway has an id that begins with {:?}; `tollgate gateways list` shows the ids",
            free.home
        ),
        _ => bail!("several gateways have an id that begins with {:?}", free.home),
    };
    let path = format!("/v1/gateways/{home}/free");
    let body = client.text(Ask::Post(&path, &serde_json::Value::Null))?;
    let freed: Freed = serde_json::from_str(&body).context("cannot parse the gateway's answer")?;
    say(format!("gateway {home} has nothing of the caps now; it had a part of {}\n", freed.caps))
}
