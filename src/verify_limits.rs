//! `tollgate verify-limits`: fires canary traffic at every configured limit
//! and shows what it saw: limit, configured, observed, holds or not. By
//! default on a gateway of its own with the same config, where each limit is
//! probed alone; with `--url` on a running one, with keys that live for
//! minutes and are revoked at the end.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;
use tollgate_config::Config;
use tollgate_loadtest::client::Target;

use crate::common::{Place, say, span, table};

mod caller;
mod connections;
mod place;
mod plans;
mod requests;

use place::Canaries;

/// Probe every configured limit with canary traffic.
///
/// Exit code 0: every limit that was probed holds; 1: one does not; 2: nothing
/// can be said.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    place: Place,
    /// Probe this running gateway (of the same config and data folder) instead
    /// of one that is started for it.
    #[arg(long, value_name = "URL", requires = "tenant")]
    url: Option<String>,
    /// With --url: the tenant whose keys are made for it. Best one that nobody
    /// else uses, with a plan wider than all that are probed.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// With --url: the CA to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// How long one probe may take; what takes longer is not probed.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "20s")]
    budget: Duration,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Where nothing can be said.
const UNCLEAR: u8 = 2;

/// What a probe saw.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The limit's key in config.
    pub limit: String,
    /// Its value.
    pub configured: String,
    /// What was seen, or why nothing was.
    pub observed: String,
    /// Whether it holds.
    pub finding: Finding,
}

/// Whether a limit holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// It bites, where it should.
    Holds,
    /// It was not probed; the reason stands beside it.
    NotProbed,
    /// It does not.
    Broken,
}

impl Finding {
    fn of(holds: bool) -> Self {
        if holds { Self::Holds } else { Self::Broken }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::NotProbed => "not probed",
            Self::Broken => "BROKEN",
        }
    }
}

impl Row {
    fn new(limit: impl Into<String>, configured: impl Into<String>) -> Self {
        let (limit, configured) = (limit.into(), configured.into());
        Self { limit, configured, observed: String::new(), finding: Finding::NotProbed }
    }

    fn saw(self, finding: Finding, observed: impl Into<String>) -> Self {
        Self { finding, observed: observed.into(), ..self }
    }

    fn not_probed(self, why: impl Into<String>) -> Self {
        self.saw(Finding::NotProbed, why)
    }
}

/// Probes and prints.
pub fn run(arguments: Arguments) -> ExitCode {
    match probe(&arguments) {
        Ok(exit) => exit,
        Err(error) => {
            eprintln!("tollgate: {error:#}");
            ExitCode::from(UNCLEAR)
        }
    }
}

fn probe(arguments: &Arguments) -> Result<ExitCode> {
    let config = arguments.place.load()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let canaries = match (&arguments.url, &arguments.tenant) {
        (Some(url), Some(tenant)) => {
            let ca = arguments.ca.clone().unwrap_or_else(|| config.data().join("tls/ca.pem"));
            runtime.block_on(Canaries::on_a_running_one(&config, url, tenant, &ca))?
        }
        (None, None) => {
            eprintln!("starting a gateway with these limits");
            Canaries::on_our_own(&config, &arguments.place.show()?)?
        }
        _ => bail!("--url and --tenant go together"),
    };
    let probed = runtime.block_on(all(&config, &canaries, arguments.budget));
    canaries.end()?;
    let rows = probed?;
    if arguments.json {
        say(format!("{:#}\n", serde_json::json!({ "limits": rows })))?;
    } else {
        say(text(&rows))?;
    }
    Ok(match worst(&rows) {
        Finding::Holds => ExitCode::SUCCESS,
        Finding::Broken => ExitCode::FAILURE,
        Finding::NotProbed => ExitCode::from(UNCLEAR),
    })
}

async fn all(config: &Config, canaries: &Canaries, budget: Duration) -> Result<Vec<Row>> {
    // Plans last: what their probes cancel and are refused may earn a penalty.
    let mut rows = requests::probe(config, canaries.any()).await?;
    rows.extend(Box::pin(connections::probe(config, canaries.any(), budget)).await?);
    rows.extend(plans::probe(config, canaries, budget).await?);
    Ok(rows)
}

/// Broken where one is; not probed where none was.
fn worst(rows: &[Row]) -> Finding {
    let has = |finding: Finding| rows.iter().any(|row| row.finding == finding);
    match (has(Finding::Broken), has(Finding::Holds)) {
        (true, _) => Finding::Broken,
        (false, true) => Finding::Holds,
        (false, false) => Finding::NotProbed,
    }
}

fn text(rows: &[Row]) -> String {
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|Row { limit, configured, observed, finding }| {
            vec![limit.clone(), configured.clone(), finding.as_str().to_owned(), observed.clone()]
        })
        .collect();
    let count = |finding: Finding| rows.iter().filter(|row| row.finding == finding).count();
    format!(
        "{}\n{} hold, {} do not, {} were not probed\n",
        table(&["limit", "configured", "finding", "observed"], &cells),
        count(Finding::Holds),
        count(Finding::Broken),
        count(Finding::NotProbed),
    )
}

/// The target of a probe, and the model that it asks.
#[derive(Clone)]
pub struct Canary {
    target: Target,
    model: String,
}

/// A span of time as config writes it.
fn shown(span: Duration) -> String {
    match span.as_millis() {
        millis if millis % 1_000 == 0 => format!("{}s", millis / 1_000),
        millis => format!("{millis}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_does_not_hold_decides() {
        let row = |finding| Row::new("a", "1").saw(finding, "x");
        let holds = row(Finding::Holds);
        assert_eq!(worst(&[holds.clone(), row(Finding::NotProbed)]), Finding::Holds);
        assert_eq!(worst(&[holds, row(Finding::Broken)]), Finding::Broken);
        assert_eq!(worst(&[row(Finding::NotProbed)]), Finding::NotProbed);
    }
}
