//! What a refusal costs: refusals a second beside what a bare hyper server
//! answers to the very same requests, over TLS and kept connections, both on
//! one core while the load comes from the other. The server says hello in six
//! bytes; to a tenant's requests also as much as the refusal says.

use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::h2load::{Load, Protocol, SERVER_CORE, UNBOUNDED, door, pinned};
use super::process::Process;
use super::report::Report;
use super::{Options, build, tools};
use crate::run::{command, output, root};

/// What a refusal may cost: at least so much of the peer's rate is promised.
const PROMISED: f64 = 0.6;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    tools::h2load()?;
    let built = build(options, &["-p", "tollgate"])?;
    build(options, &["-p", "tollgate-edge", "--example", "hello_tls"])?;
    let bench = Bench::prepare(built)?;
    let keys = bench.keys()?;
    report.fact("seconds_a_turn", options.seconds);
    report.fact("at_once", "h1: 32 connections; h2: 4 connections of 8 streams");
    report.fact("promised", PROMISED);
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        // Anew: two processes of one program differ by some hundredths for life.
        let servers = Servers::start(&bench)?;
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

/// An answer of the peer's, which a refusal is compared with.
struct Answer {
    /// In the names of series, and of ratios.
    who: &'static str,
    beside: &'static str,
    /// `None`: where the refused request went.
    path: Option<&'static str>,
    status: u16,
}

const HELLO: Answer = Answer { who: "answered", beside: "", path: None, status: 200 };
const AT_LENGTH: Answer = Answer {
    who: "answered at length",
    beside: ", over as long an answer",
    path: Some("/refusal"),
    status: 429,
};

/// Where things are.
struct Bench {
    built: PathBuf,
    folder: PathBuf,
}

/// Everything that answers, on one core.
struct Servers {
    /// Whose limits are those of callers.
    tollgate: Process,
    tollgate_url: String,
    /// Whose source ring lets nobody through.
    ringed: Process,
    ringed_url: String,
    hello: Process,
    hello_url: String,
}

/// A request that is refused, and that the peer answers.
struct Request<'a> {
    name: &'static str,
    path: &'static str,
    headers: Vec<String>,
    body: Option<PathBuf>,
    status: u16,
    /// Answers of another kind that a turn may have.
    exceptions: u64,
    answers: &'static [Answer],
    server: &'a Process,
    url: &'a str,
    hello: &'a Process,
    hello_url: &'a str,
}

impl Request<'_> {
    /// Refused, then answered by the peer.
    fn turn(&self, protocol: Protocol, seconds: u32, report: &mut Report) -> Result<()> {
        let answers = self.answers.iter().map(|answer| {
            let path = answer.path.unwrap_or(self.path);
            (answer.who, self.hello, self.hello_url, path, answer.status, 0)
        });
        let refused = ("refused", self.server, self.url, self.path, self.status, self.exceptions);
        for (who, server, url, path, status, exceptions) in iter::once(refused).chain(answers) {
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
            let name = self.series(who, protocol);
            report.add(&name, "requests/s", answered.per_second);
            report.add(&format!("{name}: server"), "us of processor a request", microseconds);
        }
        Ok(())
    }

    fn ratios(&self, protocol: Protocol, report: &mut Report) -> Result<()> {
        for Answer { who, beside, .. } in self.answers {
            let (of, to) = (self.series("refused", protocol), self.series(who, protocol));
            let name = format!("{}, {}{beside}", self.name, protocol.name());
            report.ratio(&format!("{name}: requests/s"), &of, &to)?;
            // What a neighbour on the machine disturbs less.
            report.ratio(
                &format!("{name}: requests a processor second"),
                &format!("{to}: server"),
                &format!("{of}: server"),
            )?;
        }
        Ok(())
    }

    fn series(&self, who: &str, protocol: Protocol) -> String {
        format!("{} {who}, {}", self.name, protocol.name())
    }
}

impl Bench {
    /// A fresh folder with both configs under `target/bench`.
    fn prepare(built: PathBuf) -> Result<Self> {
        let folder = root().join("target/bench/refusal");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("open.toml"), door(UNBOUNDED, UNBOUNDED) + LIMITS)?;
        fs::write(folder.join("ringed.toml"), door(1, 1) + LIMITS)?;
        Ok(Self { built, folder })
    }

    /// A key made by another installation, and one of the tenant.
    fn keys(&self) -> Result<[String; 2]> {
        Ok([self.key("elsewhere")?, self.key("open")?])
    }

    fn requests<'a>(
        &self,
        servers: &'a Servers,
        [elsewhere, limited]: &[String; 2],
    ) -> Result<Vec<Request<'a>>> {
        let body = self.folder.join("chat.json");
        fs::write(&body, CHAT)?;
        let bearer = |key: &str| vec![format!("authorization: Bearer {key}")];
        // Well formed, its checksum right, made by another installation.
        let strange = bearer(elsewhere);
        let mut limited = bearer(limited);
        limited.push("content-type: application/json".to_owned());
        let (hello, hello_url) = (&servers.hello, servers.hello_url.as_str());
        let (server, url) = (&servers.tollgate, servers.tollgate_url.as_str());
        Ok(vec![
            Request {
                name: "an unknown key",
                path: "/v1/models",
                headers: strange.clone(),
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
                headers: strange,
                body: None,
                status: 429,
                // One a second passes.
                exceptions: 64,
                answers: &[HELLO],
                server: &servers.ringed,
                url: &servers.ringed_url,
                hello,
                hello_url,
            },
            Request {
                name: "a tenant over its rate",
                path: "/v1/chat/completions",
                headers: limited,
                body: Some(body),
                status: 429,
                // One a minute passes.
                exceptions: 2,
                answers: &[HELLO, AT_LENGTH],
                server,
                url,
                hello,
                hello_url,
            },
        ])
    }

    /// A new key of the tenant in one of the data folders.
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
        let url = ready.split_whitespace().next().context("no URL behind ready")?.to_owned();
        Ok((process, url))
    }

    fn hello(&self, tls: &Path) -> Result<(Process, String)> {
        let program = self.built.join("examples/hello_tls");
        let mut start = pinned(SERVER_CORE, &program.to_string_lossy());
        start.arg(tls.join("server.pem")).arg(tls.join("server.key"));
        let process = Process::start("hello_tls", &mut start)?;
        let addresses = process.ready()?;
        let Some(("tls", rest)) = addresses.split_once(' ') else {
            bail!("hello_tls is ready {addresses}");
        };
        let address = rest.split_whitespace().next().context("no address")?;
        let url = format!("https://{address}");
        Ok((process, url))
    }
}

impl Servers {
    fn start(bench: &Bench) -> Result<Self> {
        let (tollgate, tollgate_url) = bench.up("open")?;
        let (ringed, ringed_url) = bench.up("ringed")?;
        let (hello, hello_url) = bench.hello(&bench.folder.join("open/tls"))?;
        Ok(Self { tollgate, tollgate_url, ringed, ringed_url, hello, hello_url })
    }
}

/// Behind the door: limits that no run reaches, but for the one that is
/// measured. Penalties would change what is refused in the middle of a turn.
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
