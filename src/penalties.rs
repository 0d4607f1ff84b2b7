//! `tollgate penalties`: lists and lifts the penalties for repeated offences. Uses
//! the admin listener of a running gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use serde::Deserialize;
use tollgate_config::Config;
use tollgate_loadtest::client::{Connection, Protocol, Target};

use crate::common::{Place, say, table};

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

/// The address of the admin listener and the files that give access.
#[derive(clap::Args)]
struct Admin {
    #[command(flatten)]
    place: Place,
    /// The admin listener [default: from the config].
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

/// Runs the subcommand.
pub fn run(arguments: PenaltiesArguments) -> Result<()> {
    // One request is sent, so one thread is enough.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match arguments.action {
            PenaltiesAction::List(list) => self::list(list).await,
            PenaltiesAction::Lift(lift) => self::lift(lift).await,
        }
    })
}

async fn list(list: ListPenalties) -> Result<()> {
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
    let connection = list.admin.connect().await?;
    let body = ask(&connection, Ask::List).await?;
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

async fn lift(lift: Lift) -> Result<()> {
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
    let connection = lift.admin.connect().await?;
    ask(&connection, Ask::Lift { kind, name }).await?;
    say(format!("{kind} {name} has no penalty now\n"))
}

impl Admin {
    async fn connect(&self) -> Result<Connection> {
        let config = self.place.load()?;
        let url = self.url.clone().unwrap_or_else(|| url(&config));
        let ca = self.ca.clone().unwrap_or_else(|| config.data().join("tls/ca.pem"));
        // The running gateway wrote this key; access to the file is the permission.
        let key_file = config.data().join("admin.key");
        let key = std::fs::read_to_string(&key_file).with_context(|| {
            format!("admin key {} (does `tollgate up` use this data folder?)", key_file.display())
        })?;
        let target = Target::new(&url, &ca, &key)?;
        Ok(target.connect(Protocol::Either).await?)
    }
}

/// Returns the address of the config's admin listener, as this host reaches it.
fn url(config: &Config) -> String {
    let mut address = config.gateway().admin_listen;
    match address.ip() {
        // An unspecified address is no target, but a listener on it also listens on
        // loopback.
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    format!("https://{address}")
}

/// A request to the admin listener.
enum Ask<'a> {
    List,
    Lift { kind: &'a str, name: &'a str },
}

/// Returns the body of a successful answer. Any other answer is an error with the
/// gateway's message.
async fn ask(connection: &Connection, ask: Ask<'_>) -> Result<String> {
    #[derive(Deserialize)]
    struct Refused {
        error: Why,
    }
    #[derive(Deserialize)]
    struct Why {
        message: String,
    }
    let response = match ask {
        Ask::List => connection.get("/v1/penalties").await?,
        Ask::Lift { kind, name } => {
            connection.delete(&format!("/v1/penalties/{kind}/{name}")).await?
        }
    };
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    let body = String::from_utf8(body.to_vec()).context("cannot parse the gateway's answer")?;
    if status.is_success() {
        return Ok(body);
    }
    match serde_json::from_str::<Refused>(&body) {
        Ok(Refused { error }) => bail!("the gateway answered {status}: {}", error.message),
        Err(_) => bail!("the gateway answered {status}"),
    }
}
