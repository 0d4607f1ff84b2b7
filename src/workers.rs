//! `tollgate workers`: the workers on other machines, seen from the gateway's machine.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{Instant, timeout};
use tollgate_gateway::workers::WorkerEndpoint;
use tollgate_wire::v1::{AnnounceRequest, Announcement, EchoMessage};

use crate::common::{Place, exit, say, table};
use crate::up::remote;

mod certificates;

/// Check the workers on other machines, and make certificates for them.
#[derive(clap::Args)]
pub struct WorkersArguments {
    #[command(subcommand)]
    action: WorkersAction,
}

#[derive(clap::Subcommand)]
enum WorkersAction {
    /// Connect to every worker of [cluster.workers] and measure the connections.
    ///
    /// Asks from this machine, with the gateway's certificate, also while the gateway
    /// runs. Ends with 1 if a worker cannot be used.
    Check(Place),
    /// Make an authority and certificates for gateways and workers.
    Certificates(certificates::CertificatesArguments),
}

/// Runs the subcommand.
pub fn run(arguments: WorkersArguments) -> ExitCode {
    match arguments.action {
        WorkersAction::Certificates(arguments) => exit(certificates::make(&arguments)),
        WorkersAction::Check(place) => match check(&place) {
            Ok(code) => code,
            Err(error) => exit(Err(error)),
        },
    }
}

/// The messages that measure the round trip.
const ECHOES: usize = 20;
/// Bytes of each of these messages.
const SMALL: usize = 64;
/// Bytes of the message that measures the bandwidth.
const LARGE: usize = 4 << 20;
/// Time that a worker has to answer a message.
const ANSWER: Duration = Duration::from_secs(20);

/// A measured connection.
struct Connection {
    announcement: Announcement,
    /// The round trips of small messages, sorted.
    round_trips: Vec<Duration>,
    /// The time of a message of [`LARGE`] bytes and back.
    large: Duration,
}

fn check(place: &Place) -> Result<ExitCode> {
    let endpoints = remote::endpoints(&place.load()?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut rows, mut failures) = (Vec::new(), String::new());
    // One after the other, so that the measurements do not disturb each other.
    for endpoint in &endpoints {
        let (name, address) = (&endpoint.name, &endpoint.address);
        match runtime.block_on(measure(endpoint)) {
            Ok(connection) => rows.push(row(endpoint, &connection)),
            Err(error) => {
                failures.push_str(&format!("worker {name} at {address}: {error:#}\n"));
            }
        }
    }
    let head = ["worker", "address", "device", "models", "median", "worst", "MB/s"];
    let mut text = String::new();
    if !rows.is_empty() {
        text.push_str(&table(&head, &rows));
        text.push_str("median, worst: milliseconds of a message and back; MB/s: over one stream\n");
    }
    say(text + &failures)?;
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn row(endpoint: &WorkerEndpoint, connection: &Connection) -> Vec<String> {
    let Connection { announcement, round_trips, large } = connection;
    let device = announcement.device.as_ref().map(|device| device.class.clone());
    let models: Vec<&str> = announcement.models.iter().map(|model| model.name.as_str()).collect();
    let milliseconds = |time: Option<&Duration>| {
        time.map_or_else(String::new, |time| format!("{:.2}", time.as_secs_f64() * 1e3))
    };
    // The message goes both ways.
    let bandwidth = 2.0 * LARGE as f64 / 1e6 / large.as_secs_f64();
    vec![
        endpoint.name.to_string(),
        endpoint.address.to_string(),
        device.unwrap_or_default(),
        models.join(", "),
        milliseconds(round_trips.get(round_trips.len() / 2)),
        milliseconds(round_trips.last()),
        format!("{bandwidth:.0}"),
    ]
}

async fn measure(endpoint: &WorkerEndpoint) -> Result<Connection> {
    let mut client = tollgate_wire::connect(&endpoint.address).await?;
    // A probe: the gateway of this machine may use the worker with a ledger that it shares.
    let request = AnnounceRequest { probe: true, ..AnnounceRequest::default() };
    let announcement = timeout(ANSWER, client.announce(request))
        .await
        .context("the worker did not answer in time")?
        .map_err(|status| anyhow::anyhow!("{}", status.message()))?
        .into_inner();
    anyhow::ensure!(
        announcement.worker == endpoint.name.as_str(),
        "the worker calls itself {:?}",
        announcement.worker
    );
    let mut round_trips = Vec::with_capacity(ECHOES);
    for _ in 0..ECHOES {
        round_trips.push(echo(&mut client, SMALL).await?);
    }
    round_trips.sort_unstable();
    let large = echo(&mut client, LARGE).await?;
    Ok(Connection { announcement, round_trips, large })
}

/// Returns the time of a message of `bytes` bytes to the worker and back.
#[expect(clippy::disallowed_methods, reason = "the time of a message is measured")]
async fn echo(client: &mut tollgate_wire::Client, bytes: usize) -> Result<Duration> {
    let payload = vec![0; bytes];
    let sent = Instant::now();
    timeout(ANSWER, client.echo(EchoMessage { payload }))
        .await
        .context("the worker did not answer in time")?
        .map_err(|status| anyhow::anyhow!("{}", status.message()))?;
    Ok(sent.elapsed())
}
