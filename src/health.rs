//! `tollgate health`: asks a running gateway whether it is ready, for probes of service
//! managers and containers.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::admin::{Admin, Ask};
use crate::common::{Place, say};

/// Ask the running gateway whether it is ready; exits with 1 if it is not.
#[derive(clap::Args)]
pub struct HealthArguments {
    #[command(flatten)]
    place: Place,
    /// The admin listener [default: the gateway that runs on the data folder].
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// With --url: the CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE", requires = "url")]
    ca: Option<PathBuf>,
    /// Ask only whether the process answers, not whether requests would succeed.
    #[arg(long)]
    live: bool,
}

/// Runs the subcommand.
pub fn run(arguments: HealthArguments) -> Result<()> {
    let HealthArguments { place, url, ca, live } = arguments;
    let client = Admin::without_key(place, url, ca).probe()?;
    if live {
        client.text(Ask::Get("/healthz"))?;
        return say("live\n");
    }
    let (is_ready, answer) = client.answer(Ask::Get("/readyz"))?;
    if !is_ready {
        bail!("the gateway is not ready: {}", obstacles(&answer));
    }
    say("ready\n")
}

/// Returns the obstacles that the answer of `/readyz` names.
fn obstacles(answer: &str) -> String {
    #[derive(serde::Deserialize)]
    struct Readiness {
        worker: bool,
        ledger: bool,
        draining: bool,
    }
    let Ok(Readiness { worker, ledger, draining }) = serde_json::from_str(answer) else {
        return answer.trim().to_owned();
    };
    let found = [
        (draining, "it is about to stop"),
        (!worker, "no worker takes requests"),
        (!ledger, "usage cannot be recorded"),
    ];
    let found: Vec<&str> =
        found.into_iter().filter(|(applies, _)| *applies).map(|(_, text)| text).collect();
    found.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn obstacles_are_named_in_words() {
        let answer = r#"{"worker":false,"ledger":true,"draining":true}"#;
        assert_eq!(obstacles(answer), "it is about to stop; no worker takes requests");
        assert_eq!(obstacles("busy\n"), "busy");
    }
}
