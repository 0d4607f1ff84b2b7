//! The cost of a refusal: refusals a second beside the answers of a bare hyper server
//! to the same requests, over TLS and kept connections. Both servers share one core and
//! the load comes from the other core. The bare server answers with six bytes; to a
//! tenant's requests also with as many bytes as the refusal has.

use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::h2load::{Load, Protocol, SERVER_CORE, UNBOUNDED, listener_config, pinned};
use super::process::Process;
use super::report::Report;
use super::{Options, build, tools};
use crate::run::{command, output, target};

/// The smallest promised ratio of refusals a second to the peer's answers a second.
const PROMISED: f64 = 0.6;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    tools::h2load()?;
    let built = build(options, &["-p", "tollgate"])?;
    build(options, &["-p", "tollgate-edge", "--example", "hello_tls"])?;
    let bench = RefusalBench::prepare(built)?;
    let keys = bench.keys()?;
    report.fact("seconds_a_turn", options.seconds);
    report.fact("at_once", "h1: 32 connections; h2: 4 connections of 8 streams");
    report.fact("promised", PROMISED);
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        // Each round starts new servers: two processes of one program differ by some
        // hundredths for as long as they run.
        let servers = RefusalServers::start(&bench)?;
        let requests = bench.requests(&servers, &keys)?;
        for protocol in Protocol::ALL {
            for request in &requests {
                request.turn(protocol, options.seconds, report)?;
            }
        }
        if round + 1 == options.rounds {
            for protocol in Protocol::ALL {
                for request in &requests {
                    request.ratios(protocol, report)?;
                }
            }
        }
    }
    Ok(())
}

/// An answer of the peer, with which a refusal is compared.
struct Answer {
    /// The words for this answer in the names of series and of ratios.
    label: &'static str,
    beside: &'static str,
    /// The path of the request, or `None` for the path of the refused request.
    path: Option<&'static str>,
    status: u16,
}

const HELLO: Answer = Answer { label: "answered", beside: "", path: None, status: 200 };
const AT_LENGTH: Answer = Answer {
    label: "answered at length",
    beside: ", over as long an answer",
    path: Some("/refusal"),
    status: 429,
};

/// The folders and programs of a run.
struct RefusalBench {
    built: PathBuf,
    folder: PathBuf,
}

/// The servers under comparison, all on one core.
struct RefusalServers {
    /// The gateway with the limits of callers.
    tollgate: Process,
    tollgate_url: String,
    /// The gateway with a source limit that refuses almost all requests.
    source_limited: Process,
    source_limited_url: String,
    hello: Process,
    hello_url: String,
}

/// A request that the gateway refuses and the peer answers.
struct Request<'a> {
    name: &'static str,
    path: &'static str,
    headers: Vec<String>,
    body: Option<PathBuf>,
    status: u16,
    /// The number of answers with another status that a turn may have.
    exceptions: u64,
    answers: &'static [Answer],
    server: &'a Process,
    url: &'a str,
    hello: &'a Process,
    hello_url: &'a str,
}

impl Request<'_> {
    /// Measures the refusals of the gateway, then the answers of the peer.
    fn turn(&self, protocol: Protocol, seconds: u32, report: &mut Report) -> Result<()> {
        let answers = self.answers.iter().map(|answer| {
            let path = answer.path.unwrap_or(self.path);
            (answer.label, self.hello, self.hello_url, path, answer.status, 0)
        });
        let refused = ("refused", self.server, self.url, self.path, self.status, self.exceptions);
        for (label, server, url, path, status, exceptions) in iter::once(refused).chain(answers) {
            let load = Load {
                url: format!("{url}{path}"),
                protocol,
                headers: &self.headers,
                body: self.body.as_deref(),
                status,
                exceptions,
                seconds,
            };
            let (answered, microseconds) = load.run(&[server])?;
            let name = self.series(label, protocol);
            report.add(&name, "requests/s", answered.per_second);
            report.add(&format!("{name}: server"), "us of processor a request", microseconds);
        }
        Ok(())
    }

    fn ratios(&self, protocol: Protocol, report: &mut Report) -> Result<()> {
        for Answer { label, beside, .. } in self.answers {
            let (of, to) = (self.series("refused", protocol), self.series(label, protocol));
            let name = format!("{}, {}{beside}", self.name, protocol.name());
            report.ratio(&format!("{name}: requests/s"), &of, &to)?;
            // Other work on the machine disturbs processor time less than the rate.
            report.ratio(
                &format!("{name}: requests a processor second"),
                &format!("{to}: server"),
                &format!("{of}: server"),
            )?;
        }
        Ok(())
    }

    fn series(&self, label: &str, protocol: Protocol) -> String {
        format!("{} {label}, {}", self.name, protocol.name())
    }
}

impl RefusalBench {
    /// Makes an empty folder with both configs under `target/bench`.
    fn prepare(built: PathBuf) -> Result<Self> {
        let folder = target().join("bench/refusal");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("open.toml"), listener_config(UNBOUNDED, 1) + LIMITS)?;
        fs::write(folder.join("source_limited.toml"), listener_config(1, UNBOUNDED) + LIMITS)?;
        Ok(Self { built, folder })
    }

    /// Creates a key of another installation and a key of the tenant.
    fn keys(&self) -> Result<[String; 2]> {
        Ok([self.key("elsewhere")?, self.key("open")?])
    }

    fn requests<'a>(
        &self,
        servers: &'a RefusalServers,
        [elsewhere, limited]: &[String; 2],
    ) -> Result<Vec<Request<'a>>> {
        let body = self.folder.join("chat.json");
        fs::write(&body, CHAT)?;
        let bearer = |key: &str| vec![format!("authorization: Bearer {key}")];
        // The key is well formed with a valid checksum, but another installation made
        // it.
        let unknown = bearer(elsewhere);
        let reader = bearer(limited);
        let mut limited = reader.clone();
        limited.push("content-type: application/json".to_owned());
        let (hello, hello_url) = (&servers.hello, servers.hello_url.as_str());
        let (server, url) = (&servers.tollgate, servers.tollgate_url.as_str());
        Ok(vec![
            Request {
                name: "an unknown key",
                path: "/v1/models",
                headers: unknown.clone(),
                body: None,
                status: 401,
                exceptions: 0,
                answers: &[HELLO],
                server,
                url,
                hello,
                hello_url,
            },
            Request {
                name: "a source over its rate",
                path: "/v1/models",
                headers: unknown,
                body: None,
                status: 429,
                // One request a second is admitted.
                exceptions: 64,
                answers: &[HELLO],
                server: &servers.source_limited,
                url: &servers.source_limited_url,
                hello,
                hello_url,
            },
            Request {
                name: "a key over its rate of reads",
                path: "/v1/models",
                headers: reader,
                body: None,
                status: 429,
                exceptions: 64,
                answers: &[HELLO],
                server,
                url,
                hello,
                hello_url,
            },
            Request {
                name: "a tenant over its rate",
                path: "/v1/chat/completions",
                headers: limited,
                body: Some(body),
                status: 429,
                // One request a minute is admitted.
                exceptions: 2,
                answers: &[HELLO, AT_LENGTH],
                server,
                url,
                hello,
                hello_url,
            },
        ])
    }

    /// Creates a key of the tenant in one of the data folders.
    fn key(&self, data: &str) -> Result<String> {
        let data = self.folder.join(data);
        fs::create_dir_all(&data)?;
        let mut create = command(&self.built.join("tollgate").to_string_lossy());
        create.args(["keys", "create", "--quiet", "--tenant", "limited", "--config"]);
        create.arg(self.folder.join("open.toml")).arg("--data").arg(data);
        Ok(output(&mut create)?.trim().to_owned())
    }

    /// Starts `tollgate up` with the config and the data folder of this name.
    fn up(&self, name: &str) -> Result<(Process, String)> {
        let mut up = pinned(SERVER_CORE, &self.built.join("tollgate").to_string_lossy());
        up.arg("up").arg("--config").arg(self.folder.join(format!("{name}.toml")));
        let process = Process::start("tollgate", up.arg("--data").arg(self.folder.join(name)))?;
        let ready = process.ready()?;
        let url = ready.split_whitespace().next().context("the ready line has no URL")?.to_owned();
        Ok((process, url))
    }

    fn hello(&self, tls: &Path) -> Result<(Process, String)> {
        let program = self.built.join("examples/hello_tls");
        let mut start = pinned(SERVER_CORE, &program.to_string_lossy());
        start.arg(tls.join("server.pem")).arg(tls.join("server.key"));
        let process = Process::start("hello_tls", &mut start)?;
        let addresses = process.ready()?;
        let Some(("tls", rest)) = addresses.split_once(' ') else {
            bail!("hello_tls printed an unexpected ready line: {addresses}");
        };
        let address = rest.split_whitespace().next().context("no address")?;
        let url = format!("https://{address}");
        Ok((process, url))
    }
}

impl RefusalServers {
    fn start(bench: &RefusalBench) -> Result<Self> {
        let (tollgate, tollgate_url) = bench.up("open")?;
        let (source_limited, source_limited_url) = bench.up("source_limited")?;
        let (hello, hello_url) = bench.hello(&bench.folder.join("open/tls"))?;
        Ok(Self { tollgate, tollgate_url, source_limited, source_limited_url, hello, hello_url })
    }
}

/// Limits that no run reaches, except the one that is measured. Penalties are off,
/// because they would change the refusal in the middle of a turn.
const LIMITS: &str = r#"
[gateway.penalties]
refused_clients = 1_000_000
failed_authentications_per_minute = 1_000_000

[plans.limited]
requests_per_minute = { limit = 1, burst = 1 }

[tenants.limited]
plan = "limited"
"#;

const CHAT: &str = r#"{"model":"tollgate-demo","messages":[{"role":"user","content":"What is a rate limit?"}],"max_tokens":1}"#;
