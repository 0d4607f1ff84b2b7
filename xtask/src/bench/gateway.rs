//! The cost of the gateway. First, requests and refusals a second beside a bare TLS
//! "hello" server and nginx as a TLS proxy; all servers share one core and the load
//! comes from the other core. Then, the time that the gateway adds to an answered
//! request.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::h2load::{Load, Protocol, SERVER_CORE, UNBOUNDED, listener_config, pinned};
use super::process::Process;
use super::report::{Report, median};
use super::{Options, build, tools};
use crate::run::{check, command, output, target};

/// The requests over each path in one round of the overhead, and the tokens of an
/// answer.
const PAIRS: &str = "100";
const ANSWER_TOKENS: &str = "16";

/// The load of the last check: requests a second, then seconds.
const SANITY: (&str, &str) = ("20", "10");

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    tools::h2load()?;
    let nginx = tools::nginx()?;
    let built = build(options, &["-p", "tollgate"])?;
    build(options, &["-p", "tollgate-edge", "--example", "hello_tls"])?;
    build(options, &["-p", "tollgate-worker", "--example", "direct"])?;
    let bench = GatewayBench::prepare(built, nginx)?;
    {
        let servers = GatewayServers::start(&bench)?;
        requests(&bench, &servers, options, report)?;
    }
    overhead(&bench, options, report)
}

/// The folders and programs of a run.
struct GatewayBench {
    built: PathBuf,
    nginx: PathBuf,
    folder: PathBuf,
}

/// The servers under comparison, all on one core.
struct GatewayServers {
    tollgate: Tollgate,
    hello: Process,
    nginx: Process,
    /// The host and port of each server that speaks TLS.
    hello_address: String,
    nginx_address: String,
}

/// A running `tollgate up`.
struct Tollgate {
    process: Process,
    url: String,
}

/// A server and a request that are measured.
struct Target<'a> {
    name: &'static str,
    url: String,
    headers: Vec<String>,
    body: Option<PathBuf>,
    status: u16,
    /// The number of answers that may have another status.
    exceptions: u64,
    servers: Vec<&'a Process>,
}

fn requests(
    bench: &GatewayBench,
    servers: &GatewayServers,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let targets = targets(bench, servers)?;
    report.fact("seconds_a_turn", options.seconds);
    report.fact("at_once", "h1: 32 connections; h2: 4 connections of 8 streams");
    report.fact("generator", "h2load, one thread, on another core");
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        for protocol in Protocol::ALL {
            for target in &targets {
                let load = Load {
                    url: target.url.clone(),
                    protocol,
                    headers: &target.headers,
                    body: target.body.as_deref(),
                    status: target.status,
                    exceptions: target.exceptions,
                    seconds: options.seconds,
                };
                let (answered, microseconds) = load.run(&target.servers)?;
                let name = format!("{}, {}", target.name, protocol.name());
                report.add(&name, "requests/s", answered.per_second);
                report.add(&format!("{name}: server"), "us of processor a request", microseconds);
            }
        }
    }
    for protocol in Protocol::ALL {
        ratios(protocol.name(), report)?;
    }
    Ok(())
}

/// Adds the ratios to "hello" and nginx, once of requests a second and once of
/// processor time. Other work on the machine disturbs processor time less.
fn ratios(protocol: &str, report: &mut Report) -> Result<()> {
    for name in ["models", "wrong key", "over its rate"] {
        for peer in ["hello", "nginx"] {
            let (of, to) = (format!("{name}, {protocol}"), format!("{peer}, {protocol}"));
            report.ratio(&format!("{name} over {peer}, {protocol}: requests/s"), &of, &to)?;
            report.ratio(
                &format!("{name} over {peer}, {protocol}: requests a processor second"),
                &format!("{to}: server"),
                &format!("{of}: server"),
            )?;
        }
    }
    Ok(())
}

fn targets<'a>(bench: &GatewayBench, servers: &'a GatewayServers) -> Result<Vec<Target<'a>>> {
    let bearer = |key: &str| vec![format!("authorization: Bearer {key}")];
    let chat = bench.folder.join("chat.json");
    let body = r#"{"model":"tollgate-demo","messages":[{"role":"user","content":"What is a rate limit?"}],"max_tokens":1}"#;
    fs::write(&chat, body)?;
    let url = &servers.tollgate.url;
    let mut limited = bearer(&bench.key("limited", "data")?);
    limited.push("content-type: application/json".to_owned());
    let hello = |address: &str| format!("https://{address}/");
    let mut targets = vec![
        Target {
            name: "hello",
            url: hello(&servers.hello_address),
            headers: Vec::new(),
            body: None,
            status: 200,
            exceptions: 0,
            servers: vec![&servers.hello],
        },
        Target {
            name: "nginx",
            url: hello(&servers.nginx_address),
            headers: Vec::new(),
            body: None,
            status: 200,
            exceptions: 0,
            servers: vec![&servers.nginx, &servers.hello],
        },
    ];
    let ours = |name, path: &str, headers, body, status, exceptions| Target {
        name,
        url: format!("{url}{path}"),
        headers,
        body,
        status,
        exceptions,
        servers: vec![&servers.tollgate.process],
    };
    let models = "/v1/models";
    let open = bearer(&bench.key("open", "data")?);
    // The key is well formed with a valid checksum, but another installation made it.
    let unknown = bearer(&bench.key("open", "elsewhere")?);
    targets.push(ours("models", models, open, None, 200, 0));
    // The source gets a penalty after the first sixty attempts; then its answer is 429
    // and not 401.
    targets.push(ours("wrong key", models, unknown, None, 429, 200));
    // The plan admits one request a minute.
    targets.push(ours("over its rate", "/v1/chat/completions", limited, Some(chat), 429, 2));
    Ok(targets)
}

/// Sends the same chat through the gateway and straight to the worker, in turn.
fn overhead(bench: &GatewayBench, options: &Options, report: &mut Report) -> Result<()> {
    // The key is made before the start: a running gateway learns of a new key only
    // within a second.
    let key = bench.folder.join("open.key");
    fs::write(&key, bench.key("open", "data")?)?;
    let tollgate = Tollgate::start(bench, None)?;
    // A gateway stops using a worker that reports work the gateway never ordered. So the direct
    // requests go to a worker of their own.
    let (_worker, socket) = bench.worker()?;
    let data = bench.folder.join("data");
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        let mut direct = command(&bench.built.join("examples/direct").to_string_lossy());
        direct.arg(&tollgate.url).arg(data.join("tls/ca.pem")).arg(&key);
        direct.arg(&socket).arg(data.join("models/tollgate-demo"));
        let result: Value = serde_json::from_str(&output(direct.args([PAIRS, ANSWER_TOKENS]))?)?;
        let through = milliseconds(&result["gateway_us"])?;
        let straight = milliseconds(&result["direct_us"])?;
        let differences: Vec<f64> = through.iter().zip(&straight).map(|(a, b)| a - b).collect();
        report.add("chat through the gateway", "ms, median", median(&through));
        report.add("chat straight to the worker", "ms, median", median(&straight));
        report.add("what the gateway adds", "ms, median of pairs", median(&differences));
        if round == 0 {
            let shown = ["prompt_tokens", "completion_tokens", "answer"];
            let chat: serde_json::Map<String, Value> =
                shown.iter().map(|&name| (name.to_owned(), result[name].clone())).collect();
            report.fact("chat", chat);
        }
    }
    report.ratio(
        "chat through the gateway over straight to the worker",
        "chat through the gateway",
        "chat straight to the worker",
    )?;
    sanity(bench, &tollgate, &key, report)
}

/// Applies a moderate load with the project's own generator; no request may be refused
/// or fail.
fn sanity(
    bench: &GatewayBench,
    tollgate: &Tollgate,
    key: &Path,
    report: &mut Report,
) -> Result<()> {
    let path = bench.folder.join("loadtest.json");
    let (rate, seconds) = SANITY;
    let mut loadtest = bench.tollgate();
    loadtest.args(["loadtest", "--url", &tollgate.url, "--rate", rate, "--seconds", seconds]);
    loadtest.args(["--max-tokens", ANSWER_TOKENS, "--tenant"]);
    loadtest.arg(format!("open={}", key.display()));
    loadtest.arg("--ca").arg(bench.folder.join("data/tls/ca.pem"));
    check(loadtest.arg("--json").arg(&path))?;
    let result: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
    report.fact("loadtest", result);
    Ok(())
}

fn milliseconds(result: &Value) -> Result<Vec<f64>> {
    let list = result.as_array().context("no times")?;
    list.iter().map(|time| Ok(time.as_f64().context("a time is a number")? / 1e3)).collect()
}

impl GatewayBench {
    /// Makes an empty folder with a config under `target/bench`.
    fn prepare(built: PathBuf, nginx: PathBuf) -> Result<Self> {
        let folder = target().join("bench/gateway");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("tollgate.toml"), listener_config(UNBOUNDED, UNBOUNDED) + CONFIG)?;
        Ok(Self { built, nginx, folder })
    }

    fn tollgate(&self) -> std::process::Command {
        command(&self.built.join("tollgate").to_string_lossy())
    }

    /// Starts a worker without a gateway. Returns the worker and its socket. The options
    /// are those of the running gateway's worker, in another folder.
    fn worker(&self) -> Result<(Process, PathBuf)> {
        let folder = self.folder.join("straight");
        // A worker listens only in a folder that no other user may enter.
        fs::DirBuilder::new().mode(0o700).create(&folder)?;
        let socket = folder.join("0.sock");
        let options = fs::read_to_string(self.folder.join("data/run/0.json"))?;
        let mut options: Value = serde_json::from_str(&options)?;
        options["listen"] = json!({ "socket": socket });
        options["data"] = folder.to_string_lossy().into();
        let file = folder.join("0.json");
        fs::write(&file, options.to_string())?;
        let mut start = self.tollgate();
        start.args(["worker", "--end-with-parent", "--options"]).arg(&file);
        let worker = Process::start("tollgate worker", &mut start)?;
        await_open(|| UnixStream::connect(&socket).is_ok())
            .with_context(|| format!("no worker listens on {}", socket.display()))?;
        Ok((worker, socket))
    }

    /// Creates a key of `tenant` in one of the data folders.
    fn key(&self, tenant: &str, data: &str) -> Result<String> {
        fs::create_dir_all(self.folder.join(data))?;
        let mut create = self.tollgate();
        create.args(["keys", "create", "--quiet", "--tenant", tenant, "--config"]);
        create.arg(self.folder.join("tollgate.toml")).arg("--data").arg(self.folder.join(data));
        Ok(output(&mut create)?.trim().to_owned())
    }
}

impl Tollgate {
    /// Starts `tollgate up`, on `core` alone if one is given.
    fn start(bench: &GatewayBench, core: Option<&str>) -> Result<Self> {
        let program = bench.built.join("tollgate");
        let mut up = match core {
            Some(core) => pinned(core, &program.to_string_lossy()),
            None => command(&program.to_string_lossy()),
        };
        up.arg("up").arg("--config").arg(bench.folder.join("tollgate.toml"));
        up.arg("--data").arg(bench.folder.join("data"));
        let process = Process::start("tollgate", &mut up)?;
        let ready = process.ready()?;
        let url = ready.split_whitespace().next().context("the ready line has no URL")?.to_owned();
        Ok(Self { process, url })
    }
}

impl GatewayServers {
    fn start(bench: &GatewayBench) -> Result<Self> {
        let tollgate = Tollgate::start(bench, Some(SERVER_CORE))?;
        let tls = bench.folder.join("data/tls");
        let (certificate, key) = (tls.join("server.pem"), tls.join("server.key"));
        let hello = bench.built.join("examples/hello_tls");
        let mut start = pinned(SERVER_CORE, &hello.to_string_lossy());
        let hello = Process::start("hello_tls", start.arg(&certificate).arg(&key))?;
        let addresses = hello.ready()?;
        let ["tls", hello_address, "plain", plain] =
            addresses.split_whitespace().collect::<Vec<_>>()[..]
        else {
            bail!("hello_tls printed an unexpected ready line: {addresses}");
        };
        let nginx_address = free_address()?;
        let folder = bench.folder.join("nginx");
        fs::create_dir_all(&folder)?;
        let config = folder.join("nginx.conf");
        fs::write(&config, nginx_config(&folder, &tls, &nginx_address, plain))?;
        let mut start = pinned(SERVER_CORE, &bench.nginx.to_string_lossy());
        start.arg("-p").arg(&folder).arg("-c").arg(&config);
        let nginx = Process::start("nginx", start.arg("-e").arg(folder.join("error.log")))?;
        await_open(|| TcpStream::connect(&nginx_address).is_ok())?;
        let hello_address = hello_address.to_owned();
        Ok(Self { tollgate, hello, nginx, hello_address, nginx_address })
    }
}

/// Limits that no run reaches, except the rate of the plan `limited`, which every run
/// reaches.
const CONFIG: &str = r#"
[plans.open]
concurrent = 256

[plans.limited]
requests_per_minute = { limit = 1, burst = 1 }

[tenants.open]
plan = "open"

[tenants.limited]
plan = "limited"
"#;

/// Returns a config of nginx: one worker process, kept connections on both sides, no
/// logs.
fn nginx_config(folder: &Path, tls: &Path, address: &str, origin: &str) -> String {
    let (folder, tls) = (folder.display(), tls.display());
    format!(
        r"daemon off;
user root;
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000000;
  upstream origin {{
    server {origin};
    keepalive 64;
    keepalive_requests 1000000000;
  }}
  server {{
    listen {address} ssl http2;
    ssl_certificate {tls}/server.pem;
    ssl_certificate_key {tls}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    location / {{
      proxy_pass http://origin;
      proxy_http_version 1.1;
      proxy_set_header Connection '';
    }}
  }}
}}
"
    )
}

/// Returns a port that was free a moment ago; nginx cannot choose one itself.
fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

/// Waits up to ten seconds until `is_open` returns true.
fn await_open(is_open: impl Fn() -> bool) -> Result<()> {
    for _ in 0..200 {
        if is_open() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    bail!("nothing listens after 10 s")
}
