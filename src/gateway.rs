//! `tollgate gateway`: the gateway and the ledger. The workers are on other machines.

use std::path::PathBuf;

use anyhow::Result;
use tollgate_config::Flags;

use crate::{logging, up};

/// Run the gateway and the ledger, with workers on other machines.
///
/// The config names the workers in [cluster.workers]. Each of them is a
/// `tollgate worker --listen`.
#[derive(clap::Args)]
pub struct GatewayArguments {
    /// A config file, or a folder of *.toml files.
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// The data folder, for ledger, keys and certificates [default: data].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// The address for callers; port 0 takes a free port [default: 127.0.0.1:8443].
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// The address for admins, probes and metrics [default: 127.0.0.1:9443].
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<String>,
    /// Start although ledger.db, keys.db or idempotency.db is missing, empty or older
    /// than the data folder. The audit log records the loss.
    #[arg(long)]
    accept_loss: bool,
}

/// Serves until SIGTERM or SIGINT, then drains.
pub fn run(arguments: GatewayArguments) -> Result<()> {
    logging::start();
    let GatewayArguments { config, data, listen, admin_listen, accept_loss } = arguments;
    let flags = Flags { listen, admin_listen, data, ..Flags::default() };
    up::run_gateway(config, flags, accept_loss)
}
