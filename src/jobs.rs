//! `tollgate jobs`: lists, shows and cancels the batches of a tenant. Uses the admin
//! listener of a running gateway.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;
use tollgate_domain::{TenantId, UtcTime};

use crate::admin::{Admin, Ask, encoded};
use crate::common::{minute, say, table};

/// List, show and cancel batches.
#[derive(clap::Args)]
pub struct JobsArguments {
    #[command(subcommand)]
    action: JobsAction,
}

#[derive(clap::Subcommand)]
enum JobsAction {
    /// List the newest batches of a tenant, 100 at most.
    List(ListJobs),
    /// Show a batch of a tenant.
    Show(OneJob),
    /// Cancel a batch of a tenant. Finished answers are kept.
    Cancel(OneJob),
}

#[derive(clap::Args)]
struct ListJobs {
    #[command(flatten)]
    admin: Admin,
    /// The tenant.
    #[arg(long, value_name = "NAME")]
    tenant: TenantId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct OneJob {
    /// The batch, as `list` shows it.
    batch: String,
    #[command(flatten)]
    admin: Admin,
    /// The tenant.
    #[arg(long, value_name = "NAME")]
    tenant: TenantId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A page of batches.
#[derive(Deserialize)]
struct Listed {
    data: Vec<Batch>,
}

/// A batch as the gateway shows it.
#[derive(Deserialize)]
struct Batch {
    id: String,
    status: String,
    created_at: u64,
    expires_at: u64,
    model: Option<String>,
    request_counts: LineCounts,
    tollgate: Wait,
}

#[derive(Deserialize)]
struct LineCounts {
    total: u64,
    completed: u64,
    failed: u64,
}

/// The reason why no line runs.
#[derive(Deserialize)]
struct Wait {
    waiting: Option<String>,
}

/// Runs the subcommand.
pub fn run(arguments: JobsArguments) -> Result<()> {
    match arguments.action {
        JobsAction::List(ListJobs { admin, tenant, json }) => {
            let path = batches_of(&tenant);
            let text = admin.connect()?.text(Ask::Get(&path))?;
            if json {
                return say_json(&text);
            }
            let listed: Listed = parse(&text)?;
            say(rows(&listed.data))
        }
        JobsAction::Show(job) => one(&job, |path| Ask::Get(path), ""),
        JobsAction::Cancel(job) => one(&job, |path| Ask::Post(path, &Value::Null), "/cancel"),
    }
}

/// Asks about one batch and prints the answer.
fn one(job: &OneJob, ask: impl Fn(&str) -> Ask<'_>, suffix: &str) -> Result<()> {
    let OneJob { batch, admin, tenant, json } = job;
    // Any other character would change the path of the request.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    anyhow::ensure!(batch.chars().all(is_plain), "{batch:?} is no id of a batch");
    let path = format!("{}/{batch}{suffix}", batches_of(tenant));
    let text = admin.connect()?.text(ask(&path))?;
    if *json {
        return say_json(&text);
    }
    say(rows(&[parse(&text)?]))
}

/// Returns the path of a tenant's batches.
fn batches_of(tenant: &TenantId) -> String {
    // The name of a tenant may have a `/`.
    format!("/v1/tenants/{}/batches", encoded(tenant.as_str()))
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T> {
    serde_json::from_str(text).context("cannot parse the gateway's answer")
}

fn say_json(text: &str) -> Result<()> {
    let value: Value = parse(text)?;
    say(format!("{value:#}\n"))
}

fn rows(batches: &[Batch]) -> String {
    let time = |seconds: u64| minute(UtcTime(seconds.saturating_mul(1_000_000_000)));
    let row = |batch: &Batch| {
        let LineCounts { total, completed, failed } = batch.request_counts;
        vec![
            batch.id.clone(),
            batch.status.clone(),
            total.to_string(),
            completed.to_string(),
            failed.to_string(),
            batch.tollgate.waiting.clone().unwrap_or_default(),
            batch.model.clone().unwrap_or_default(),
            time(batch.created_at),
            time(batch.expires_at),
        ]
    };
    let head =
        ["batch", "status", "lines", "answered", "failed", "waits", "model", "created", "expires"];
    table(&head, &batches.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_path_encodes_name_of_tenant() {
        let tenant = TenantId::new("org/team").expect("a name");
        assert_eq!(batches_of(&tenant), "/v1/tenants/org%2Fteam/batches");
    }
}
