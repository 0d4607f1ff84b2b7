//! `tollgate verify-limits`: tests every configured limit with probe requests
//! ("canaries") and reports each limit with its configured value and the
//! observation. By default it uses a temporary gateway with the same config, where
//! each limit is probed alone. With `--url` it probes a running gateway, with
//! temporary keys that are revoked at the end.

#![expect(clippy::disallowed_methods, reason = "probes measure a running gateway")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;
use tollgate_config::Config;
use tollgate_domain::TenantId;
use tollgate_loadtest::client::Target;

use crate::common::{Place, report, say, span, table};

mod batches;
mod caller;
mod caps;
mod connections;
mod held;
mod place;
mod plans;
mod requests;
mod stack;

use caps::Measured;
use place::Canaries;

/// Test every configured limit with probe requests.
///
/// Exit code 0: every probed limit holds; 1: a limit does not hold; 2: no verdict, or a
/// limit of a plan, of connections or of requests was not probed.
#[derive(clap::Args)]
pub struct VerifyLimitsArguments {
    #[command(flatten)]
    place: Place,
    /// Probe this running gateway, which uses the same config and data folder,
    /// instead of a temporary one.
    #[arg(long, value_name = "URL", requires = "tenant")]
    url: Option<String>,
    /// With --url: the tenant of the temporary keys. Choose a tenant without other
    /// traffic, with a plan wider than all plans that are probed.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// With --url: the CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The longest time of one probe. Limits that need more time are not probed.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "20s")]
    budget: Duration,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The exit code without a verdict.
const UNCLEAR: u8 = 2;

/// The result of a probe.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeResult {
    /// The limit's key in the config.
    pub limit: String,
    /// The configured value.
    pub configured: String,
    /// The observation, or the reason why the limit was not probed.
    pub observed: String,
    /// The finding.
    pub finding: Finding,
}

/// The finding about a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The limit applies where it should.
    Holds,
    /// The limit was not probed, for the reason in the result.
    NotProbed,
    /// There is no probe of the limit, for the reason in the result.
    NoProbe,
    /// The limit does not apply where it should.
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
            Self::NoProbe => "no probe",
            Self::Broken => "BROKEN",
        }
    }
}

impl ProbeResult {
    fn new(limit: impl Into<String>, configured: impl Into<String>) -> Self {
        let (limit, configured) = (limit.into(), configured.into());
        Self { limit, configured, observed: String::new(), finding: Finding::NotProbed }
    }

    fn saw(self, finding: Finding, observed: impl Into<String>) -> Self {
        Self { finding, observed: observed.into(), ..self }
    }

    fn has_no_probe(self, why: impl Into<String>) -> Self {
        self.saw(Finding::NoProbe, why)
    }

    fn not_probed(self, why: impl Into<String>) -> Self {
        self.saw(Finding::NotProbed, why)
    }
}

/// Runs the subcommand.
pub fn run(arguments: VerifyLimitsArguments) -> ExitCode {
    match probe(&arguments) {
        Ok(exit) => exit,
        Err(error) => {
            report(&error);
            ExitCode::from(UNCLEAR)
        }
    }
}

fn probe(arguments: &VerifyLimitsArguments) -> Result<ExitCode> {
    let config = arguments.place.load()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let canaries = match (&arguments.url, &arguments.tenant) {
        (Some(url), Some(tenant)) => {
            let ca = arguments.ca.clone().unwrap_or_else(|| config.data().join("tls/ca.pem"));
            Canaries::running(&runtime, &config, (url, &ca), &TenantId::new(tenant)?)?
        }
        (None, None) => {
            eprintln!("starting a temporary gateway with these limits");
            Canaries::temporary(&config, &arguments.place.show()?)?
        }
        _ => bail!("--url and --tenant go together"),
    };
    let probed = runtime.block_on(all(&config, &canaries, arguments.budget));
    // The keys are revoked before an error of the probes is returned.
    canaries.end()?;
    let (mut rows, measured) = probed?;
    let together = match arguments.url {
        Some(_) => stack::no_probe(),
        None => {
            let shown = arguments.place.show()?;
            eprintln!("probing the quotas of batches, on another gateway");
            rows.extend(runtime.block_on(batches::probe(
                (&config, &shown),
                &measured,
                arguments.budget,
            ))?);
            caps::probe(&runtime, (&config, &shown), &measured, &mut rows)?;
            eprintln!("probing limits that apply together, on another gateway");
            runtime.block_on(stack::probe(&config, &shown))?
        }
    };
    rows.push(together);
    if arguments.json {
        say(format!("{:#}\n", serde_json::json!({ "limits": rows })))?;
    } else {
        say(text(&rows))?;
    }
    Ok(match worst(&rows) {
        Finding::Holds => ExitCode::SUCCESS,
        Finding::Broken => ExitCode::FAILURE,
        Finding::NotProbed | Finding::NoProbe => ExitCode::from(UNCLEAR),
    })
}

async fn all(
    config: &Config,
    canaries: &Canaries,
    budget: Duration,
) -> Result<(Vec<ProbeResult>, Measured)> {
    // Plans come last: their probes are refused and cancel requests, which may earn
    // a penalty.
    eprintln!("probing the limits of requests");
    let mut rows = requests::probe(config, canaries.any()).await?;
    eprintln!("probing the limits of connections");
    rows.extend(Box::pin(connections::probe(config, canaries.any(), budget)).await?);
    eprintln!("probing what a key, a tenant and a source may hold");
    rows.extend(Box::pin(held::probe(config, canaries, budget)).await?);
    let (of_plans, measured) = plans::probe(config, canaries, budget).await?;
    rows.extend(of_plans);
    Ok((rows, measured))
}

/// The limits that protect tenants from each other. A verdict needs the probes of all of
/// these that have one.
const ESSENTIAL: [&str; 3] = ["plans.", "gateway.connections.", "gateway.requests."];

/// Returns the overall finding: broken if any limit is, and otherwise not probed if an
/// essential limit was not that has a probe.
fn worst(rows: &[ProbeResult]) -> Finding {
    let has = |finding: Finding| rows.iter().any(|row| row.finding == finding);
    let is_skipped = |row: &ProbeResult| {
        let is_essential = ESSENTIAL.iter().any(|start| row.limit.starts_with(start));
        row.finding == Finding::NotProbed && is_essential
    };
    match (has(Finding::Broken), rows.iter().any(is_skipped), has(Finding::Holds)) {
        (true, ..) => Finding::Broken,
        (false, false, true) => Finding::Holds,
        (false, ..) => Finding::NotProbed,
    }
}

fn text(rows: &[ProbeResult]) -> String {
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|ProbeResult { limit, configured, observed, finding }| {
            vec![limit.clone(), configured.clone(), finding.as_str().to_owned(), observed.clone()]
        })
        .collect();
    let count = |finding: Finding| rows.iter().filter(|row| row.finding == finding).count();
    format!(
        "{}\n{} hold, {} do not, {} were not probed, {} have no probe\n",
        table(&["limit", "configured", "finding", "observed"], &cells),
        count(Finding::Holds),
        count(Finding::Broken),
        count(Finding::NotProbed),
        count(Finding::NoProbe),
    )
}

/// The target of a probe, and the model for its requests.
#[derive(Clone)]
pub struct Canary {
    target: Target,
    model: String,
}

/// Returns a duration in the config's syntax.
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
    fn overall_finding_is_the_worst_one() {
        let row = |finding| ProbeResult::new("plans.a.concurrent", "1").saw(finding, "x");
        let holds = row(Finding::Holds);
        assert_eq!(worst(&[holds.clone(), row(Finding::NoProbe)]), Finding::Holds);
        assert_eq!(worst(&[holds.clone(), row(Finding::NotProbed)]), Finding::NotProbed);
        assert_eq!(worst(&[row(Finding::NotProbed), row(Finding::Broken)]), Finding::Broken);
        assert_eq!(worst(&[row(Finding::NoProbe)]), Finding::NotProbed);
        let timeout = ProbeResult::new("gateway.timeouts.idle", "60s").not_probed("long");
        assert_eq!(worst(&[row(Finding::Holds), timeout]), Finding::Holds);
        assert_eq!(worst(&[holds, row(Finding::Broken)]), Finding::Broken);
        assert_eq!(worst(&[row(Finding::NotProbed)]), Finding::NotProbed);
    }
}
