//! Batches: the lines a second of a batch beside the requests a second of the same requests
//! over HTTP, the memory of a large upload, and the time after a kill until lines are answered
//! again.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::h2load::{Load, Protocol, SERVER_CORE, UNBOUNDED, listener_config, pinned};
use super::process::Process;
use super::report::Report;
use super::{INSTANT_DEVICE, Options, build, tools};
use crate::run::{command, output, target};

/// Lines of a batch that is compared with requests.
const LINES: usize = 20_000;
/// Lines of the batch under which the gateway is killed: they last longer than the measurement.
const LINES_OF_KILL: usize = 50_000;
/// Bytes of the small and the large upload.
const UPLOADS: [usize; 2] = [2 << 20, 190 << 20];
/// Pause between two looks at a batch.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest wait for a batch.
const LONGEST: Duration = Duration::from_secs(120);

/// The smallest promised ratio of lines a second to requests a second.
const LEAST_RATIO: f64 = 1.0;
/// The most promised memory in MiB that the large upload takes beyond the small one.
const MOST_MIB: f64 = 8.0;
/// The longest promised time in seconds from a start until a line is answered.
const MOST_START: f64 = 1.0;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    tools::h2load()?;
    let built = build(options, &["-p", "tollgate"])?;
    let bench = JobsBench::prepare(&built)?;
    report.fact("lines_a_round", LINES);
    report.fact("seconds_a_turn", options.seconds);
    report.fact("at_once", "h1: 32 connections; h2: 4 connections of 8 streams");
    let lines = bench.lines("lines.jsonl", LINES)?;
    let many = bench.lines("many.jsonl", LINES_OF_KILL)?;
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        // Each round starts a new process: two of one program differ as long as they live.
        let gateway = JobsGateway::start(&bench)?;
        report.add("lines", "lines/s", gateway.lines_per_second(&lines)?);
        for protocol in Protocol::ALL {
            let load = Load {
                url: format!("{}/v1/chat/completions", gateway.url),
                protocol,
                headers: &gateway.headers,
                body: Some(&bench.body),
                status: 200,
                exceptions: 0,
                seconds: options.seconds,
            };
            let (answered, _) = load.run(&[&gateway.process])?;
            let name = format!("requests, {}", protocol.name());
            report.add(&name, "requests/s", answered.per_second);
        }
        uploads(&bench, &gateway, report)?;
        report.add(START, "s", restart(&bench, gateway, &many)?);
    }
    for protocol in Protocol::ALL {
        let requests = format!("requests, {}", protocol.name());
        let name = format!("lines over requests, {}", protocol.name());
        let ratio = report.ratio(&name, "lines", &requests)?;
        if ratio < LEAST_RATIO {
            eprintln!("{name}: {ratio:.2}, less than the promised {LEAST_RATIO}");
        }
    }
    for (series, most, unit) in
        [("memory of the large upload", MOST_MIB, "MiB"), (START, MOST_START, "s")]
    {
        let found = report.most(series)?;
        if found > most {
            eprintln!("{series}: {found:.2} {unit}, more than the promised {most}");
        }
    }
    Ok(())
}

const START: &str = "start until a line is answered";

/// Measures the most memory of the gateway while a small and a large file are uploaded and
/// checked.
fn uploads(bench: &JobsBench, gateway: &JobsGateway, report: &mut Report) -> Result<()> {
    let [small, large] = UPLOADS.map(|bytes| bench.padded(bytes));
    let (small, large) = (small?, large?);
    // The first one also pays for pages that stay.
    gateway.peak_of_upload(&small)?;
    let small = gateway.peak_of_upload(&small)?;
    let large = gateway.peak_of_upload(&large)?;
    report.add("peak of the small upload", "MiB", small);
    report.add("peak of the large upload", "MiB", large);
    report.add("memory of the large upload", "MiB", large - small);
    Ok(())
}

/// Kills the gateway under a batch, and returns the seconds from the ready line of the next
/// process until a further line is answered.
fn restart(bench: &JobsBench, mut gateway: JobsGateway, lines: &Path) -> Result<f64> {
    let batch = gateway.batch(lines)?;
    gateway.until(&batch, |it| completed(it) >= 1_000)?;
    gateway.process.kill()?;
    drop(gateway);
    let gateway = JobsGateway::start(bench)?;
    let began = Instant::now();
    let first = completed(&gateway.look(&batch)?);
    gateway.until(&batch, |it| completed(it) > first)?;
    let seconds = began.elapsed().as_secs_f64();
    gateway.cancel(&batch)?;
    Ok(seconds)
}

fn completed(batch: &Value) -> u64 {
    batch["request_counts"]["completed"].as_u64().unwrap_or_default()
}

/// The folder of a run, with the config, the key and the files.
struct JobsBench {
    tollgate: String,
    folder: PathBuf,
    key: String,
    /// The body of a request, in a file for h2load.
    body: PathBuf,
}

impl JobsBench {
    fn prepare(built: &Path) -> Result<Self> {
        let folder = target().join("bench/jobs");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        let config = listener_config(UNBOUNDED, UNBOUNDED) + INSTANT_DEVICE + CONFIG;
        fs::write(folder.join("bench.toml"), config)?;
        let body = folder.join("chat.json");
        fs::write(&body, request().to_string())?;
        let tollgate = built.join("tollgate").display().to_string();
        let mut create = command(&tollgate);
        create.args(["keys", "create", "--quiet", "--tenant", "acme", "--config"]);
        create.arg(folder.join("bench.toml")).arg("--data").arg(folder.join("data"));
        fs::create_dir_all(folder.join("data"))?;
        let key = output(&mut create)?.trim().to_owned();
        Ok(Self { tollgate, folder, key, body })
    }

    /// Writes an input of `count` lines, and returns its path.
    fn lines(&self, name: &str, count: usize) -> Result<PathBuf> {
        let request = request();
        let mut text = String::new();
        for number in 0..count {
            writeln!(
                text,
                "{{\"custom_id\":\"{number}\",\"method\":\"POST\",\
                 \"url\":\"/v1/chat/completions\",\"body\":{request}}}"
            )?;
        }
        let path = self.folder.join(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Writes an input of `bytes` in lines of 4 KiB whose model nobody serves, and returns its
    /// path.
    fn padded(&self, bytes: usize) -> Result<PathBuf> {
        let path = self.folder.join(format!("{bytes}.jsonl"));
        if path.exists() {
            return Ok(path);
        }
        let content = "x".repeat(4_096 - 140);
        let mut text = String::new();
        for number in 0..bytes / 4_096 {
            writeln!(
                text,
                "{{\"custom_id\":\"line-{number:08}\",\"method\":\"POST\",\
                 \"url\":\"/v1/chat/completions\",\"body\":{{\"model\":\"none\",\"x\":\"{content}\"}}}}"
            )?;
        }
        fs::write(&path, text)?;
        Ok(path)
    }
}

/// Returns the request that is sent as a line and over HTTP.
fn request() -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "Say hello." }],
    })
}

/// A `tollgate up` with a synthetic worker, on one core.
struct JobsGateway {
    process: Process,
    url: String,
    headers: Vec<String>,
    ca: PathBuf,
}

impl JobsGateway {
    fn start(bench: &JobsBench) -> Result<Self> {
        let data = bench.folder.join("data");
        let mut up = pinned(SERVER_CORE, &bench.tollgate);
        up.arg("up").arg("--config").arg(bench.folder.join("bench.toml")).arg("--data").arg(&data);
        let process = Process::start("tollgate", &mut up)?;
        let ready = process.ready()?;
        let url = ready.split_whitespace().next().context("the ready line has no URL")?.to_owned();
        let headers = vec![
            format!("authorization: Bearer {}", bench.key),
            "content-type: application/json".to_owned(),
        ];
        Ok(Self { process, url, headers, ca: data.join("tls/ca.pem") })
    }

    /// Sends a request by curl and returns the JSON of the answer.
    fn send(&self, path: &str, arguments: &[&str]) -> Result<Value> {
        let mut curl = command("curl");
        curl.args(["-sS", "--fail-with-body", "--cacert"]).arg(&self.ca);
        curl.args(["-H", &self.headers[0]]).args(arguments).arg(format!("{}{path}", self.url));
        let text = output(&mut curl).with_context(|| path.to_owned())?;
        serde_json::from_str(&text).with_context(|| format!("{path}: {text}"))
    }

    /// Uploads an input and makes a batch of it.
    fn batch(&self, input: &Path) -> Result<Value> {
        let form = format!("file=@{}", input.display());
        let file = self.send("/v1/files", &["-F", "purpose=batch", "-F", &form])?;
        let body = json!({
            "input_file_id": file["id"], "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        });
        self.send("/v1/batches", &["-H", &self.headers[1], "-d", &body.to_string()])
    }

    fn look(&self, batch: &Value) -> Result<Value> {
        self.send(&format!("/v1/batches/{}", id(batch)?), &[])
    }

    fn cancel(&self, batch: &Value) -> Result<()> {
        self.send(&format!("/v1/batches/{}/cancel", id(batch)?), &["-X", "POST"])?;
        self.until(batch, |it| it["status"] == "cancelled").map(drop)
    }

    /// Waits until a batch is as `is_right` says.
    fn until(&self, batch: &Value, is_right: impl Fn(&Value) -> bool) -> Result<Value> {
        let began = Instant::now();
        loop {
            let now = self.look(batch)?;
            if is_right(&now) {
                return Ok(now);
            }
            if began.elapsed() > LONGEST {
                bail!("a batch does not go on: {now}");
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Runs a batch and returns its lines a second, from the first line to the last.
    fn lines_per_second(&self, input: &Path) -> Result<f64> {
        let batch = self.batch(input)?;
        let first = completed(&self.until(&batch, |it| completed(it) > 0)?);
        let began = Instant::now();
        let ended = self.until(&batch, |it| it["completed_at"].is_u64())?;
        let seconds = began.elapsed().as_secs_f64();
        if completed(&ended) != LINES as u64 {
            bail!("not all lines are answered: {ended}");
        }
        Ok((LINES as u64 - first) as f64 / seconds)
    }

    /// Uploads and checks an input, and returns the most memory meanwhile in MiB.
    fn peak_of_upload(&self, input: &Path) -> Result<f64> {
        self.process.forget_peak()?;
        let batch = self.batch(input)?;
        self.until(&batch, |it| it["status"] != "validating")?;
        let peak = self.process.peak_mib()?;
        self.cancel(&batch)?;
        Ok(peak)
    }
}

fn id(batch: &Value) -> Result<&str> {
    batch["id"].as_str().with_context(|| format!("no id: {batch}"))
}

/// Limits that no run reaches.
const CONFIG: &str = r#"
[plans.open]
concurrent = 256

[plans.open.batches]
lines = 1_000_000
stored = "4GiB"
made_per_minute = 1_000

[tenants.acme]
plan = "open"
"#;
