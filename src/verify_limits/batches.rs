//! Probes of the quotas of batches, on a temporary gateway of their own. Each quota is in a
//! plan alone, with room in all other quotas. Its day has device time for a few lines, which a
//! first batch spends: later batches wait, and so they count as long as a probe needs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::time::sleep;
use tollgate_config::{BatchQuotas, Config};
use tollgate_loadtest::client::{Connection, Protocol, Target};

use super::caps::Measured;
use super::place::{bound_by, isolated, model, plans};
use super::{Finding, ProbeResult};
use crate::own_gateway::{OwnGateway, WantedKeys};

/// The quotas that are probed, in the order of the rows.
const PROBED: [&str; 4] = ["made_per_minute", "queued", "lines", "files"];
/// Files and batches that one probe makes at most.
const MOST_MADE: u64 = 2_000;
/// Lines of the largest input.
const MOST_LINES: u64 = 50_000;
/// Lines for which a day has device time.
const LINES_OF_DAY: u64 = 3;
/// Lines that spend the day: each leaves less of it than the one before.
const SPENDING_LINES: u64 = 100;
/// Time in which a rate of a probe refills at most.
const LONGEST_PROBE: Duration = Duration::from_secs(60);

/// One quota of one plan.
struct Quota<'a> {
    plan: &'a str,
    name: &'static str,
    most: u64,
    /// Units of the quota that refill a minute; 0 if time refills nothing.
    refill: u64,
}

/// Probes the quotas of every plan of `config`, and lists those that have no probe. Plans with
/// equal quotas are probed once. `shown` is the config as TOML.
pub(super) async fn probe(
    (config, shown): (&Config, &str),
    measured: &Measured,
) -> Result<Vec<ProbeResult>> {
    let mut distinct: Vec<(&str, &BatchQuotas)> = Vec::new();
    for plan in config.plans() {
        if !distinct.iter().any(|(_, quotas)| **quotas == plan.batches) {
            distinct.push((plan.name.as_str(), &plan.batches));
        }
    }
    let quotas: Vec<Quota<'_>> =
        distinct.iter().flat_map(|(plan, quotas)| quotas_of(plan, quotas)).collect();
    if quotas.is_empty() {
        return Ok(Vec::new());
    }
    let (text, wanted) = derived(shown, &quotas, LINES_OF_DAY * measured.cost.nanos())?;
    let gateway = OwnGateway::start(&text, &wanted)?;
    let mut rows = Vec::new();
    for (number, quota) in quotas.iter().enumerate() {
        eprintln!("probing plans.{}.batches.{}", quota.plan, quota.name);
        let secrets = gateway.keys.get(&tenant(number)).context("each quota has a tenant")?;
        let target = Target::new(&gateway.url, &gateway.ca(), &secrets[0])?;
        let row =
            ProbeResult::new(format!("plans.{}.batches.{}", quota.plan, quota.name), quota.shown());
        rows.push(quota.probe(row, &target, config).await?);
    }
    gateway.end()?;
    for (plan, quotas) in distinct {
        rows.extend(unprobed(plan, quotas));
    }
    Ok(rows)
}

fn quotas_of<'a>(plan: &'a str, quotas: &BatchQuotas) -> impl Iterator<Item = Quota<'a>> {
    let BatchQuotas { queued, lines, files, made_per_minute, .. } = quotas;
    let values = [
        (made_per_minute.burst, made_per_minute.per_minute),
        (u64::from(*queued), 0),
        (*lines, 0),
        (u64::from(*files), 0),
    ];
    PROBED.into_iter().zip(values).map(move |(name, (most, refill))| Quota {
        plan,
        name,
        most,
        refill,
    })
}

/// Returns the rows of the quotas that no probe meets.
fn unprobed(plan: &str, quotas: &BatchQuotas) -> Vec<ProbeResult> {
    let BatchQuotas { running, in_flight, stored, results, uploads, .. } = quotas;
    let why = "the probe would need uploads as large as the quota, or lines that run for minutes";
    [
        ("running", running.to_string()),
        ("in_flight", in_flight.to_string()),
        ("stored", format!("{} bytes", stored.0)),
        ("results", format!("{} bytes", results.0)),
        ("uploads", uploads.to_string()),
    ]
    .map(|(name, value)| {
        ProbeResult::new(format!("plans.{plan}.batches.{name}"), value).has_no_probe(why)
    })
    .into()
}

impl Quota<'_> {
    fn shown(&self) -> String {
        match self.refill {
            0 => self.most.to_string(),
            refill => format!("{refill} a minute, {} at once", self.most),
        }
    }

    async fn probe(
        &self,
        row: ProbeResult,
        target: &Target,
        config: &Config,
    ) -> Result<ProbeResult> {
        let connection = target.connect(Protocol::Http2).await?;
        let model = model(config)?;
        let line = line(&model).len() as u64;
        let largest = (config.gateway().jobs.file.0 / line).min(MOST_LINES);
        // Each unit is a file or a batch, but for lines: an input has many of them.
        let (unit, lines) = match self.name {
            "lines" => (self.most.min(largest).max(1), self.most.min(largest).max(1)),
            _ => (1, 1),
        };
        if self.most / unit > MOST_MADE {
            let why = format!("the probe would make {} files or batches", self.most / unit);
            return Ok(row.has_no_probe(why));
        }
        let input = match self.name {
            "queued" | "lines" => {
                let few = if self.name == "lines" { self.most } else { SPENDING_LINES };
                let few = few.clamp(1, SPENDING_LINES);
                let spends = made(upload(&connection, (&model, few)).await?)?;
                if !spend(&connection, &spends).await? {
                    return Ok(row.not_probed("a first batch did not spend the day"));
                }
                Some(made(upload(&connection, (&model, lines)).await?)?)
            }
            _ => None,
        };
        let started = Instant::now();
        let mut admitted = 0;
        loop {
            let told = match &input {
                Some(input) => create(&connection, input).await?,
                None => upload(&connection, (&model, lines)).await?,
            };
            if told.0 == 429 {
                break;
            }
            made(told)?;
            admitted += unit;
            let refilled = self.refill as f64 * started.elapsed().as_secs_f64() / 60.0;
            if admitted > self.most + refilled.ceil() as u64 {
                let seen = format!("{admitted} admitted, and not refused");
                return Ok(row.saw(Finding::Broken, seen));
            }
            if started.elapsed() > LONGEST_PROBE {
                return Ok(row.not_probed(format!("{admitted} admitted in {LONGEST_PROBE:?}")));
            }
        }
        // The next unit would be beyond the quota.
        let holds = admitted + unit > self.most;
        Ok(row.saw(Finding::of(holds), format!("{admitted} admitted, then refused")))
    }
}

/// Spends the day's device time by batches of `input`, and cancels the last one. Returns false
/// if none comes to wait.
async fn spend(connection: &Connection, input: &str) -> Result<bool> {
    let started = Instant::now();
    let mut path = batch(connection, input).await?;
    let mut is_spent = false;
    while started.elapsed() < LONGEST_PROBE {
        let (_, body) = read(connection.get(&path).await?).await?;
        match body["status"].as_str() {
            Some("cancelled") => return Ok(true),
            // Its lines have left too much of the day for the next one to wait.
            Some("completed") if body["request_counts"]["failed"] != 0 => return Ok(false),
            Some("completed") => path = batch(connection, input).await?,
            _ if !is_spent && body["tollgate"]["waiting"] == "cap_spent" => {
                is_spent = true;
                // Left waiting, the batch would count against the quota that is probed.
                connection.post(&format!("{path}/cancel"), "{}".into()).await?;
            }
            _ => {}
        }
        sleep(Duration::from_millis(50)).await;
    }
    Ok(false)
}

/// Creates a batch and returns its path.
async fn batch(connection: &Connection, input: &str) -> Result<String> {
    Ok(format!("/v1/batches/{}", made(create(connection, input).await?)?))
}

/// The status of an answer, and its body.
type StatusAndBody = (u16, Value);

/// Returns the id in an answer.
fn made((status, body): StatusAndBody) -> Result<String> {
    match body["id"].as_str() {
        Some(id) if status == 200 => Ok(id.to_owned()),
        _ => bail!("a probe of batches got {status}: {}", body["error"]["message"]),
    }
}

/// Returns a line for `model`. A line of another model would end at once, and its batch too.
fn line(model: &str) -> String {
    let body = json!({
        "model": model, "temperature": 0, "max_tokens": 100,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    let id = "0".repeat(9);
    let line = json!({
        "custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body,
    });
    format!("{line}\n")
}

/// Uploads an input of some lines.
async fn upload(connection: &Connection, (model, lines): (&str, u64)) -> Result<StatusAndBody> {
    const BOUNDARY: &str = "tollgate-verify-limits";
    let mut form = format!(
        "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --{BOUNDARY}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n"
    );
    let line = line(model);
    for number in 0..lines {
        // Each line needs an id of its own.
        form += &line.replacen(&"0".repeat(9), &format!("{number:09}"), 1);
    }
    form += &format!("\r\n--{BOUNDARY}--\r\n");
    let kind = format!("multipart/form-data; boundary={BOUNDARY}").parse()?;
    let headers = HeaderMap::from_iter([(CONTENT_TYPE, kind)]);
    read(connection.post_with("/v1/files", form.into(), headers).await?).await
}

/// Creates a batch of an uploaded input.
async fn create(connection: &Connection, input: &str) -> Result<StatusAndBody> {
    let body = json!({
        "input_file_id": input, "endpoint": "/v1/chat/completions", "completion_window": "24h",
    });
    read(connection.post("/v1/batches", body.to_string().into()).await?).await
}

async fn read<B: BodyExt>(response: http::Response<B>) -> Result<StatusAndBody>
where
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await?.to_bytes();
    Ok((status, serde_json::from_slice(&bytes).unwrap_or_default()))
}

/// Returns a config with each quota in a plan of its own.
fn derived(shown: &str, quotas: &[Quota<'_>], day_ns: u64) -> Result<(String, Vec<WantedKeys>)> {
    let mut tree = isolated(shown)?;
    let configured = plans(&mut tree);
    let (mut alone, mut tenants, mut wanted) = (toml::Table::new(), toml::Table::new(), Vec::new());
    for (number, quota) in quotas.iter().enumerate() {
        let own = configured.get(quota.plan).and_then(|plan| plan.get("batches")?.get(quota.name));
        let mut batches: toml::Table = ROOMY.parse()?;
        batches.insert("device_time_per_day".to_owned(), format!("{day_ns}ns").into());
        batches.insert(quota.name.to_owned(), own.context("a configured quota")?.clone());
        let plan = toml::Table::from_iter([("batches".to_owned(), toml::Value::Table(batches))]);
        let name = tenant(number);
        alone.insert(name.clone(), toml::Value::Table(plan));
        tenants.insert(name.clone(), bound_by(&name));
        wanted.push(WantedKeys { tenant: name, count: 1, plan: None });
    }
    tree.insert("plans".to_owned(), toml::Value::Table(alone));
    tree.insert("tenants".to_owned(), toml::Value::Table(tenants));
    Ok((toml::to_string(&tree)?, wanted))
}

fn tenant(number: usize) -> String {
    format!("batches-{number}")
}

/// Quotas that no probe reaches.
const ROOMY: &str = "
queued = 100_000
lines = 100_000_000
made_per_minute = 1_000_000
results = \"1024GiB\"
stored = \"1024GiB\"
files = 1_000_000
uploads = 1_000
";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn derived_config_isolates_each_quota() {
        let config = "[plans.p.batches]\nqueued = 3\nfiles = 9\nmade_per_minute = { limit = 60, burst = 7 }\n\
             [plans.q]\n[tenants.acme]\nplan = \"p\"\n";
        let shown = Config::show_toml(Path::new("x.toml"), config).expect("valid");
        let config = Config::from_toml(Path::new("x.toml"), config).expect("valid");
        let found: Vec<Quota<'_>> =
            config.plans().flat_map(|plan| quotas_of(plan.name.as_str(), &plan.batches)).collect();
        let (text, wanted) = derived(&shown, &found, 7).expect("derived");
        let derived = Config::from_toml(Path::new("y.toml"), &text).expect(&text);
        assert_eq!((wanted.len(), derived.plans().count()), (8, 8));
        let queued: Vec<u32> = derived.plans().map(|plan| plan.batches.queued).collect();
        assert_eq!(queued.iter().filter(|queued| **queued == 3).count(), 1, "{text}");
        assert_eq!(queued.iter().filter(|queued| **queued == 100).count(), 1, "{text}");
        let bursts = derived.plans().filter(|plan| plan.batches.made_per_minute.burst == 7);
        assert_eq!(bursts.count(), 1, "{text}");
    }
}
