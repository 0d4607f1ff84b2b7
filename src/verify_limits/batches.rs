//! Probes of the quotas of batches, on a temporary gateway of their own. Each quota is in a
//! plan alone, with room in all other quotas. Its day has device time for a few lines, which a
//! first batch spends: later batches wait, and so they count as long as a probe needs. A cap on
//! the device time of a day is in a plan alone, too, and lines run one by one until it is spent.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::time::sleep;
use tollgate_config::{BatchQuotas, Config};
use tollgate_domain::DeviceNanos;
use tollgate_loadtest::client::{Connection, Protocol, Target};

use super::caps::Measured;
use super::place::{bound_by, isolated, model, plans};
use super::plans::{time, too_slow};
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
/// The key of the cap on a day's device time.
const DAY_CAP: &str = "device_time_per_day";
/// Lines of the batch that spends a cap, beyond those for which the cap has device time.
const LINES_BEYOND: u64 = 20;
/// The states of a batch that has ended.
const ENDED: [&str; 4] = ["cancelled", "completed", "failed", "expired"];

/// One quota of one plan.
struct Quota<'a> {
    plan: &'a str,
    name: &'static str,
    most: u64,
    /// Units of the quota that refill a minute; 0 if time refills nothing.
    refill: u64,
}

/// The cap on the device time of all lines of one plan in a day.
struct DayCap<'a> {
    plan: &'a str,
    most: DeviceNanos,
}

/// Probes the quotas of every plan of `config`, and lists those that have no probe. Plans with
/// equal quotas are probed once. `shown` is the config as TOML, and `budget` the longest time
/// of the probe of a cap.
pub(super) async fn probe(
    (config, shown): (&Config, &str),
    measured: &Measured,
    budget: Duration,
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
    let caps: Vec<DayCap<'_>> =
        distinct.iter().filter_map(|(plan, quotas)| DayCap::of(plan, quotas, measured)).collect();
    let (text, wanted) = derived(shown, &quotas, &caps, LINES_OF_DAY * measured.cost.nanos())?;
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
    for (number, cap) in caps.iter().enumerate() {
        eprintln!("probing plans.{}.batches.{DAY_CAP}", cap.plan);
        let secrets = gateway.keys.get(&cap_tenant(number)).context("each cap has a tenant")?;
        let target = Target::new(&gateway.url, &gateway.ca(), &secrets[0])?;
        rows.push(cap.probe(&target, &model(config)?, measured, budget).await?);
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

impl<'a> DayCap<'a> {
    /// Returns the cap of a plan for the class of device of the probes, if it has one.
    fn of(plan: &'a str, quotas: &BatchQuotas, measured: &Measured) -> Option<Self> {
        let most = quotas.device_time_per_day.limit(&measured.class)?;
        Some(Self { plan, most })
    }

    /// Returns the number of lines whose cost is the whole cap, or the reason why a batch cannot
    /// spend it within `budget`.
    fn lines(&self, measured: &Measured, budget: Duration) -> Result<u64, String> {
        // The lines run one by one, and none takes less than its reference cost.
        if Duration::from_nanos(self.most.nanos()) > budget {
            let whole = time(self.most.nanos());
            return Err(format!("the probe would take more than {whole} to reach the limit"));
        }
        let lines = match measured.cost.nanos() {
            0 => return Err("the cost of a line is not known".to_owned()),
            cost => self.most.nanos() / cost,
        };
        match lines {
            0 => Err("the cap is smaller than one line of the probe".to_owned()),
            lines if lines * 2 + LINES_BEYOND > MOST_LINES => {
                Err(format!("the probe would need {lines} lines to reach the limit"))
            }
            lines => Ok(lines),
        }
    }

    /// Runs the lines of one batch until the cap lets it wait. Lines must never exceed a cap.
    async fn probe(
        &self,
        target: &Target,
        model: &str,
        measured: &Measured,
        budget: Duration,
    ) -> Result<ProbeResult> {
        let class = &measured.class;
        let shown = format!("{} of {class} time", time(self.most.nanos()));
        let row = ProbeResult::new(format!("plans.{}.batches.{DAY_CAP}", self.plan), shown);
        let lines = match self.lines(measured, budget) {
            Ok(lines) => lines,
            Err(why) => return Ok(row.not_probed(why)),
        };
        let connection = target.connect(Protocol::Http2).await?;
        // Twice as many as fit, because a line may cost less than the measured one.
        let input = made(upload(&connection, (model, lines * 2 + LINES_BEYOND)).await?)?;
        let path = batch(&connection, &input).await?;
        let (started, mut is_spent) = (Instant::now(), false);
        let body = loop {
            let (_, body) = read(connection.get(&path).await?).await?;
            let answered = body["request_counts"]["completed"].as_u64().unwrap_or(0).max(1);
            if ENDED.iter().any(|ended| body["status"] == *ended) {
                break body;
            }
            if started.elapsed() > budget + LONGEST_PROBE {
                return Ok(row.not_probed("the batch of the probe does not end"));
            }
            if !is_spent && body["tollgate"]["waiting"] == "cap_spent" {
                is_spent = true;
                // The output file of a batch is there once the batch has ended.
                connection.post(&format!("{path}/cancel"), "{}".into()).await?;
            } else if !is_spent
                && let Some(why) = too_slow(answered as f64 / lines as f64, started, budget)
            {
                connection.post(&format!("{path}/cancel"), "{}".into()).await?;
                return Ok(row.not_probed(why));
            }
            sleep(Duration::from_millis(50)).await;
        };
        let spent = match body["output_file_id"].as_str() {
            Some(file) => cost_of(&download(&connection, file).await?)?,
            None => 0,
        };
        Ok(self.judge(row, spent, is_spent))
    }

    /// Returns the finding about the cap. `spent` is the cost of the answered lines in
    /// nanoseconds, and `waited` is true if the cap then let the batch wait.
    fn judge(&self, row: ProbeResult, spent: u64, waited: bool) -> ProbeResult {
        let most = self.most.nanos();
        match (spent, waited) {
            (0, _) => row.not_probed("no line was answered: the cap is smaller than one line"),
            (spent, _) if spent > most => {
                row.saw(Finding::Broken, format!("{} spent", time(spent)))
            }
            (spent, true) => {
                row.saw(Finding::Holds, format!("{} spent, then the batch waits", time(spent)))
            }
            (spent, false) => {
                row.not_probed(format!("not reached: all lines together cost {}", time(spent)))
            }
        }
    }
}

/// Returns the reference cost of the answers in an output file, in nanoseconds.
fn cost_of(output: &[u8]) -> Result<u64> {
    let mut sum = 0;
    for line in output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Value = serde_json::from_slice(line).context("a line of an output file")?;
        let cost = line["response"]["body"]["usage"]["tollgate"]["reference_ns"].as_u64();
        sum += cost.context("an answer of a batch has its cost")?;
    }
    Ok(sum)
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

/// Returns the bytes of a file.
async fn download(connection: &Connection, file: &str) -> Result<Vec<u8>> {
    let response = connection.get(&format!("/v1/files/{file}/content")).await?;
    Ok(response.into_body().collect().await?.to_bytes().into())
}

async fn read<B: BodyExt>(response: http::Response<B>) -> Result<StatusAndBody>
where
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await?.to_bytes();
    Ok((status, serde_json::from_slice(&bytes).unwrap_or_default()))
}

/// Returns a config with each quota and each cap in a plan of its own. Where a quota is probed,
/// a day has `day_ns` of device time.
fn derived(
    shown: &str,
    quotas: &[Quota<'_>],
    caps: &[DayCap<'_>],
    day_ns: u64,
) -> Result<(String, Vec<WantedKeys>)> {
    let mut tree = isolated(shown)?;
    let configured = plans(&mut tree);
    let (mut alone, mut tenants, mut wanted) = (toml::Table::new(), toml::Table::new(), Vec::new());
    let mut add = |name: String, batches: toml::Table| {
        let plan = toml::Table::from_iter([("batches".to_owned(), toml::Value::Table(batches))]);
        alone.insert(name.clone(), toml::Value::Table(plan));
        tenants.insert(name.clone(), bound_by(&name));
        wanted.push(WantedKeys { tenant: name, count: 1, plan: None });
    };
    let own = |plan: &str, key: &str| {
        let own = configured.get(plan).and_then(|plan| plan.get("batches")?.get(key));
        own.context("a configured quota").cloned()
    };
    for (number, quota) in quotas.iter().enumerate() {
        let mut batches: toml::Table = ROOMY.parse()?;
        batches.insert(DAY_CAP.to_owned(), format!("{day_ns}ns").into());
        batches.insert(quota.name.to_owned(), own(quota.plan, quota.name)?);
        add(tenant(number), batches);
    }
    for (number, cap) in caps.iter().enumerate() {
        let mut batches: toml::Table = ROOMY.parse()?;
        // One at a time: lines beside each other reserve more of the cap than they cost.
        batches.insert("in_flight".to_owned(), 1.into());
        batches.insert(DAY_CAP.to_owned(), own(cap.plan, DAY_CAP)?);
        add(cap_tenant(number), batches);
    }
    tree.insert("plans".to_owned(), toml::Value::Table(alone));
    tree.insert("tenants".to_owned(), toml::Value::Table(tenants));
    Ok((toml::to_string(&tree)?, wanted))
}

fn tenant(number: usize) -> String {
    format!("batches-{number}")
}

fn cap_tenant(number: usize) -> String {
    format!("batch-cap-{number}")
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

    use tollgate_domain::DeviceClass;

    use super::*;

    #[test]
    fn derived_config_isolates_each_quota() {
        let config = "[plans.p.batches]\nqueued = 3\nfiles = 9\nmade_per_minute = { limit = 60, burst = 7 }\n\
             [plans.q]\n[tenants.acme]\nplan = \"p\"\n";
        let shown = Config::show_toml(Path::new("x.toml"), config).expect("valid");
        let config = Config::from_toml(Path::new("x.toml"), config).expect("valid");
        let found: Vec<Quota<'_>> =
            config.plans().flat_map(|plan| quotas_of(plan.name.as_str(), &plan.batches)).collect();
        let (text, wanted) = derived(&shown, &found, &[], 7).expect("derived");
        let derived = Config::from_toml(Path::new("y.toml"), &text).expect(&text);
        assert_eq!((wanted.len(), derived.plans().count()), (8, 8));
        let queued: Vec<u32> = derived.plans().map(|plan| plan.batches.queued).collect();
        assert_eq!(queued.iter().filter(|queued| **queued == 3).count(), 1, "{text}");
        assert_eq!(queued.iter().filter(|queued| **queued == 100).count(), 1, "{text}");
        let bursts = derived.plans().filter(|plan| plan.batches.made_per_minute.burst == 7);
        assert_eq!(bursts.count(), 1, "{text}");
    }

    fn measured(cost: u64) -> Measured {
        Measured { class: DeviceClass::cpu(), cost: DeviceNanos(cost) }
    }

    #[test]
    fn derived_config_keeps_each_day_cap() {
        let config = "[plans.p.batches]\ndevice_time_per_day = { cpu = \"2s\", default = \"9s\" }\n\
             [plans.q]\n[plans.r.batches]\ndevice_time_per_day = { h200 = \"1s\" }\n";
        let shown = Config::show_toml(Path::new("x.toml"), config).expect("valid");
        let config = Config::from_toml(Path::new("x.toml"), config).expect("valid");
        let class = measured(1);
        let plans = config.plans();
        let caps: Vec<DayCap<'_>> = plans
            .filter_map(|plan| DayCap::of(plan.name.as_str(), &plan.batches, &class))
            .collect();
        let found: Vec<_> = caps.iter().map(|cap| (cap.plan, cap.most.nanos())).collect();
        assert_eq!(found, [("p", 2_000_000_000)], "the others have no cap on a cpu");
        let (text, wanted) = derived(&shown, &[], &caps, 7).expect("derived");
        let derived = Config::from_toml(Path::new("y.toml"), &text).expect(&text);
        let plan = derived.plans().next().expect("a plan");
        assert_eq!(plan.name.as_str(), wanted[0].tenant);
        let kept = plan.batches.device_time_per_day.limit(&DeviceClass::cpu());
        assert_eq!((kept, plan.batches.in_flight), (Some(DeviceNanos(2_000_000_000)), 1));
    }

    #[test]
    fn day_cap_is_probed_within_the_budget() {
        let lines = |most, cost, budget| {
            let cap = DayCap { plan: "p", most: DeviceNanos(most) };
            cap.lines(&measured(cost), Duration::from_nanos(budget))
        };
        assert_eq!(lines(1_000, 10, 1_000), Ok(100));
        let refused = [(1_000, 10, 999), (1_000, 0, 1_000), (9, 10, 1_000), (50_000, 1, 50_000)];
        let why =
            refused.map(|(most, cost, budget)| lines(most, cost, budget).expect_err("refused"));
        assert!(why[0].contains("would take more than 1.0 us"), "{why:?}");
        assert!(why[1].contains("not known") && why[2].contains("smaller"), "{why:?}");
        assert!(why[3].contains("50000 lines"), "{why:?}");
    }

    #[test]
    fn day_cap_holds_up_to_its_last_nanosecond() {
        let cap = DayCap { plan: "p", most: DeviceNanos(100) };
        let finding =
            |spent, waited| cap.judge(ProbeResult::new("x", "100"), spent, waited).finding;
        assert_eq!(finding(100, true), Finding::Holds);
        assert_eq!(finding(101, true), Finding::Broken);
        assert_eq!(finding(101, false), Finding::Broken);
        assert_eq!(finding(100, false), Finding::NotProbed);
        assert_eq!(finding(0, true), Finding::NotProbed);
    }

    #[test]
    fn cost_of_output_is_that_of_answers() {
        let line = |cost: u64| {
            let usage = json!({ "tollgate": { "reference_ns": cost } });
            json!({ "response": { "body": { "usage": usage } } }).to_string()
        };
        let output = format!("{}\n{}\n", line(5), line(7));
        assert_eq!(cost_of(output.as_bytes()).expect("lines"), 12);
        cost_of(b"{}\n").expect_err("an answer without its cost");
    }
}
