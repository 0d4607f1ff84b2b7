//! What the front door costs: requests and refusals a second beside a bare
//! TLS "hello" and nginx as a TLS proxy, all on one core while the load
//! comes from the other; then what it adds to a request that is answered.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::h2load::{Load, Protocol, SERVER_CORE, UNBOUNDED, door, pinned};
use super::process::Process;
use super::report::{Report, median};
use super::{Options, build, tools};
use crate::run::{check, command, output, root};

/// Requests of each way in one round of the overhead, and tokens of an answer.
const PAIRS: &str = "100";
const ANSWER_TOKENS: &str = "16";

/// The load of the last check: requests a second, seconds.
const SANITY: (&str, &str) = ("20", "10");

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    tools::h2load()?;
    let nginx = tools::nginx()?;
    let built = build(options, &["-p", "tollgate"])?;
    build(options, &["-p", "tollgate-edge", "--example", "hello_tls"])?;
    build(options, &["-p", "tollgate-worker", "--example", "direct"])?;
    let bench = Bench::prepare(built, nginx)?;
    {
        let servers = Servers::start(&bench)?;
        requests(&bench, &servers, options, report)?;
    }
    overhead(&bench, options, report)
}

/// Where things are.
struct Bench {
    built: PathBuf,
    nginx: PathBuf,
    folder: PathBuf,
}

/// Everything that answers, on one core.
struct Servers {
    tollgate: Tollgate,
    hello: Process,
    nginx: Process,
    /// Host and port of each that speaks TLS.
    hello_address: String,
    nginx_address: String,
}

/// A running `tollgate up`.
struct Tollgate {
    process: Process,
    url: String,
}

/// One thing that is measured.
struct Target<'a> {
    name: &'static str,
    url: String,
    headers: Vec<String>,
    body: Option<PathBuf>,
    status: u16,
    /// Answers that may have another status.
    exceptions: u64,
    servers: Vec<&'a Process>,
}

fn requests(
    bench: &Bench,
    servers: &Servers,
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

/// Requests a second over hello's and nginx's; and because the machine may
/// have been busy otherwise, what a request cost the servers, the other way up.
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

fn targets<'a>(bench: &Bench, servers: &'a Servers) -> Result<Vec<Target<'a>>> {
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
    // Well formed, checksum right, made by another installation.
    let strange = bearer(&bench.key("open", "elsewhere")?);
    targets.push(ours("models", models, open, None, 200, 0));
    // Its source is penalised after the first sixty, and told so instead.
    targets.push(ours("wrong key", models, strange, None, 429, 200));
    // One a minute is answered.
    targets.push(ours("over its rate", "/v1/chat/completions", limited, Some(chat), 429, 2));
    Ok(targets)
}

/// The same chat through the gateway and straight to the worker, in turn.
fn overhead(bench: &Bench, options: &Options, report: &mut Report) -> Result<()> {
    // Before the start: a running gateway hears of a key within a second only.
    let key = bench.folder.join("open.key");
    fs::write(&key, bench.key("open", "data")?)?;
    let tollgate = Tollgate::start(bench, None)?;
    let data = bench.folder.join("data");
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        let mut direct = command(&bench.built.join("examples/direct").to_string_lossy());
        direct.arg(&tollgate.url).arg(data.join("tls/ca.pem")).arg(&key);
        direct.arg(data.join("run/0.sock")).arg(data.join("models/tollgate-demo"));
        let told: Value = serde_json::from_str(&output(direct.args([PAIRS, ANSWER_TOKENS]))?)?;
        let through = milliseconds(&told["gateway_us"])?;
        let straight = milliseconds(&told["direct_us"])?;
        let differences: Vec<f64> = through.iter().zip(&straight).map(|(a, b)| a - b).collect();
        report.add("chat through the gateway", "ms, median", median(&through));
        report.add("chat straight to the worker", "ms, median", median(&straight));
        report.add("what the gateway adds", "ms, median of pairs", median(&differences));
        if round == 0 {
            let shown = ["prompt_tokens", "completion_tokens", "answer"];
            let chat: serde_json::Map<String, Value> =
                shown.iter().map(|&name| (name.to_owned(), told[name].clone())).collect();
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

/// A moderate load by our own generator: nothing is refused, nothing fails.
fn sanity(bench: &Bench, tollgate: &Tollgate, key: &Path, report: &mut Report) -> Result<()> {
    let result = bench.folder.join("loadtest.json");
    let (rate, seconds) = SANITY;
    let mut loadtest = bench.tollgate();
    loadtest.args(["loadtest", "--url", &tollgate.url, "--rate", rate, "--seconds", seconds]);
    loadtest.args(["--max-tokens", ANSWER_TOKENS, "--tenant"]);
    loadtest.arg(format!("open={}", key.display()));
    loadtest.arg("--ca").arg(bench.folder.join("data/tls/ca.pem"));
    check(loadtest.arg("--json").arg(&result))?;
    let told: Value = serde_json::from_str(&fs::read_to_string(&result)?)?;
    report.fact("loadtest", told);
    Ok(())
}

fn milliseconds(told: &Value) -> Result<Vec<f64>> {
    let list = told.as_array().context("no times")?;
    list.iter().map(|time| Ok(time.as_f64().context("a time is a number")? / 1e3)).collect()
}

impl Bench {
    /// A fresh folder with a config under `target/bench`.
    fn prepare(built: PathBuf, nginx: PathBuf) -> Result<Self> {
        let folder = root().join("target/bench/gateway");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("tollgate.toml"), door(UNBOUNDED, UNBOUNDED) + CONFIG)?;
        Ok(Self { built, nginx, folder })
    }

    fn tollgate(&self) -> std::process::Command {
        command(&self.built.join("tollgate").to_string_lossy())
    }

    /// A new key of `tenant` in one of the data folders.
    fn key(&self, tenant: &str, data: &str) -> Result<String> {
        fs::create_dir_all(self.folder.join(data))?;
        let mut create = self.tollgate();
        create.args(["keys", "create", "--quiet", "--tenant", tenant, "--config"]);
        create.arg(self.folder.join("tollgate.toml")).arg("--data").arg(self.folder.join(data));
        Ok(output(&mut create)?.trim().to_owned())
    }
}

impl Tollgate {
    /// Starts it, on `core` alone if one is given.
    fn start(bench: &Bench, core: Option<&str>) -> Result<Self> {
        let program = bench.built.join("tollgate");
        let mut up = match core {
            Some(core) => pinned(core, &program.to_string_lossy()),
            None => command(&program.to_string_lossy()),
        };
        up.arg("up").arg("--config").arg(bench.folder.join("tollgate.toml"));
        up.arg("--data").arg(bench.folder.join("data"));
        let process = Process::start("tollgate", &mut up)?;
        let ready = process.ready()?;
        let url = ready.split_whitespace().next().context("no URL behind ready")?.to_owned();
        Ok(Self { process, url })
    }
}

impl Servers {
    fn start(bench: &Bench) -> Result<Self> {
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
            bail!("hello_tls is ready {addresses}");
        };
        let nginx_address = free_address()?;
        let folder = bench.folder.join("nginx");
        fs::create_dir_all(&folder)?;
        let config = folder.join("nginx.conf");
        fs::write(&config, nginx_config(&folder, &tls, &nginx_address, plain))?;
        let mut start = pinned(SERVER_CORE, &bench.nginx.to_string_lossy());
        start.arg("-p").arg(&folder).arg("-c").arg(&config);
        let nginx = Process::start("nginx", start.arg("-e").arg(folder.join("error.log")))?;
        await_listener(&nginx_address)?;
        let hello_address = hello_address.to_owned();
        Ok(Self { tollgate, hello, nginx, hello_address, nginx_address })
    }
}

/// Limits that no run reaches, except one that every run does.
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

/// One worker process, connections kept on both sides, no logs.
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

/// A port that was free a moment ago.
fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

fn await_listener(address: &str) -> Result<()> {
    for _ in 0..100 {
        if std::net::TcpStream::connect(address).is_ok() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    bail!("nothing listens on {address}")
}
