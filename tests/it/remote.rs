//! Workers on other machines: `tollgate gateway` and `tollgate worker --listen`, which
//! prove by certificates who they are. Here all machines are this one.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{self, Tollgate, binary, failing, post, posted, rest, signal};

/// The certificates and the configs of a gateway and its workers.
struct Machines {
    folder: TempDir,
    /// The address of the worker.
    address: String,
}

/// A worker process.
struct RemoteProcess {
    child: Child,
    log: PathBuf,
}

impl Machines {
    /// Makes certificates for the gateways a and b and the workers gpu0 and gpu1 of the
    /// cluster `prod`.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // A free port: the gateway's config names it before the worker starts.
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = free.local_addr().expect("an address").to_string();
        let machines = Self { folder, address };
        machines.certificates("tls", "prod");
        machines
    }

    /// Makes the certificates of `cluster` in the folder `name` and returns the output.
    fn certificates(&self, name: &str, cluster: &str) -> String {
        let out = self.path(name).display().to_string();
        let owners = ["--gateway", "a", "--gateway", "b", "--worker", "gpu0", "--worker", "gpu1"];
        let words = ["workers", "certificates", "--cluster", cluster, "--out", &out];
        support::command(&[&words[..], &owners].concat())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the section of the owner `name`, whose certificates are in `tls`.
    fn cluster(&self, tls: &str, name: &str) -> String {
        let tls = self.path(tls).display().to_string();
        format!(
            "[cluster]\nname = \"prod\"\nca = \"{tls}/ca.pem\"\ncertificate = \"{tls}/{name}.pem\"\nkey = \"{tls}/{name}.key\"\n"
        )
    }

    /// Returns the config of the gateway `name`, which knows the worker gpu0.
    fn gateway_config(&self, name: &str) -> String {
        let cluster = self.cluster("tls", name);
        let address = &self.address;
        format!("{}\n{cluster}\n[cluster.workers.gpu0]\naddress = \"{address}\"\n", support::OPEN)
    }

    /// Starts the gateway `name` with its own data.
    fn gateway(&self, name: &str) -> Tollgate {
        let mut command = Command::new(binary());
        command.arg("gateway");
        Tollgate::start_on(&self.path(name), &self.gateway_config(name), command)
    }

    /// Starts the worker gpu0 with the certificate of `owner` in `tls`.
    fn worker(&self, tls: &str, owner: &str) -> RemoteProcess {
        let config = self.path("worker.toml");
        fs::write(&config, self.cluster(tls, owner)).expect("writes the config");
        let log = self.path("worker.log");
        let child = Command::new(binary())
            .args(["worker", "--name", "gpu0", "--listen", &self.address])
            .args(["--device", "cpu", "--config"])
            .arg(&config)
            .arg("--data")
            .arg(self.path("worker"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("the binary starts");
        RemoteProcess { child, log }
    }

    /// Runs `tollgate workers check` as the gateway `name` with this `config`.
    fn check(&self, config: &str) -> (bool, String) {
        let path = self.path("check.toml");
        fs::write(&path, config).expect("writes the config");
        let output = Command::new(binary())
            .args(["workers", "check", "--config"])
            .arg(&path)
            .output()
            .expect("the binary starts");
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).expect("UTF-8"))
    }
}

impl RemoteProcess {
    /// Waits for the end, which must be an error, and returns the log.
    fn failure(mut self) -> String {
        let status = self.child.wait().expect("it was started");
        assert!(!status.success(), "{status}");
        fs::read_to_string(&self.log).expect("a log")
    }

    fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started");
    }

    /// Waits until the log has `text`.
    async fn until_logged(&self, text: &str) {
        let started = Instant::now();
        while !fs::read_to_string(&self.log).expect("a log").contains(text) {
            assert!(started.elapsed() < Duration::from_secs(60), "{text}: {}", log(&self.log));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        // A process that has ended is no error here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn count(max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens, "stream": stream,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(60);

/// The worker is killed in the middle of an answer. What the device did before is billed,
/// and the next worker process goes on.
#[tokio::test]
async fn remote_worker_killed_loses_no_usage() {
    let machines = Machines::new();
    let mut gateway = machines.gateway("a");
    assert!(gateway.banner.iter().any(|line| line.contains("gpu0   not connected yet")));
    let mut worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 200, "{body}");

    let long = count(400, true).to_string().into();
    let response = connection.post(CHAT, long).await.expect("answers");
    assert_eq!(response.status(), 200);
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    worker.kill();
    let _ = rest(response).await;
    let mut worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let usage = posted(&connection, &id).await;
    assert!(usage["attributed_ns"].as_u64() > Some(0), "{usage}");
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 200, "{body}");

    // A drained worker hands over its last blocks before it ends.
    signal(worker.child.id(), "TERM");
    assert_eq!(worker.child.wait().expect("it was started").code(), Some(0));
    assert_eq!(gateway.stop(), Some(0));
    let books = gateway.books();
    let epochs = books.epochs().expect("reads");
    assert_eq!(epochs.len(), 2, "two lives of one worker");
    assert!(epochs.into_iter().all(|epoch| books.balance(epoch).expect("reads").is_exact()));
}

/// A worker that does not answer, as one behind a cut cable, gets no requests and is
/// connected again when it answers.
#[tokio::test]
async fn remote_worker_that_hangs_is_left_and_returns() {
    let machines = Machines::new();
    let mut gateway = machines.gateway("a");
    let worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let long = count(400, true).to_string().into();
    let response = connection.post(CHAT, long).await.expect("answers");
    signal(worker.child.id(), "STOP");
    let stopped = Instant::now();
    // The ping after 5 s and its answer within 5 s decide; the test has a margin.
    gateway.until_ready(0, Duration::from_secs(30)).await;
    assert!(rest(response).await.contains("\"error\""), "the stream ends with its error");
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 503, "{body} {:?}", stopped.elapsed());
    signal(worker.child.id(), "CONT");
    gateway.until_ready(1, SOON).await;
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(gateway.stop(), Some(0));
    gateway.books();
}

#[tokio::test]
async fn remote_link_is_measured() {
    let machines = Machines::new();
    let gateway = machines.gateway("a");
    let _worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let admin = gateway.connect_admin().await;
    let metrics = read_metrics(&admin).await;
    let series = "tollgate_worker_round_trip_seconds{worker=\"gpu0\"} ";
    let seconds = metrics.lines().find_map(|line| line.strip_prefix(series));
    let seconds: f64 = seconds.expect(&metrics).parse().expect("a number");
    assert!(seconds > 0.0 && seconds < 5.0, "{seconds}");
    let (is_ok, text) = machines.check(&machines.gateway_config("a"));
    assert!(is_ok, "{text}");
    assert!(text.contains("gpu0") && text.contains("tollgate-demo"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    // Two ledgers must not bill the same time, so another gateway is refused.
    let (is_ok, text) = machines.check(&machines.gateway_config("b"));
    assert!(!is_ok && text.contains("the worker serves gateway a"), "{text}");
}

async fn read_metrics(admin: &tollgate_loadtest::client::Connection) -> String {
    let response = admin.get("/metrics").await.expect("answers");
    rest(response).await
}

/// Each wrong certificate is refused, with a sentence that names the mistake.
#[tokio::test]
async fn remote_link_refuses_wrong_certificates() {
    let machines = Machines::new();
    machines.certificates("foreign", "prod");
    machines.certificates("staging", "staging");
    // The worker's own certificate has another name.
    let failure = machines.worker("tls", "gpu1").failure();
    assert!(failure.contains("is not of tollgate://prod/worker/gpu0"), "{failure}");
    assert!(failure.contains("it names tollgate://prod/worker/gpu1"), "{failure}");
    let failure = machines.worker("staging", "gpu0").failure();
    assert!(failure.contains("it names tollgate://staging/worker/gpu0"), "{failure}");

    let worker = machines.worker("tls", "gpu0");
    worker.until_logged("is ready to serve").await;
    let ours = machines.gateway_config("a");
    let tls = machines.path("tls").display().to_string();
    let foreign = machines.path("foreign").display().to_string();
    let (is_ok, text) = machines.check(&ours.replace(&tls, &foreign));
    assert!(!is_ok && text.contains("invalid peer certificate"), "{text}");
    let (is_ok, text) = machines.check(&ours.replace("workers.gpu0", "workers.gpu1"));
    assert!(!is_ok && text.contains("tollgate://prod/worker/gpu1"), "{text}");
    // A worker's certificate is none of a gateway.
    let (is_ok, text) = machines.check(&ours.replace("/a.", "/gpu1."));
    assert!(!is_ok && text.contains("is not of tollgate://prod/gateway/NAME"), "{text}");
    let (is_ok, text) = machines.check(&ours.replace(&machines.address, "127.0.0.1:1"));
    assert!(!is_ok && text.contains("cannot connect to 127.0.0.1:1"), "{text}");
    // The control: nothing of this has harmed the worker.
    let (is_ok, text) = machines.check(&ours);
    assert!(is_ok, "{text}");
}

#[test]
fn remote_workers_need_their_own_command() {
    let machines = Machines::new();
    let config = machines.path("gateway.toml");
    fs::write(&config, machines.gateway_config("a")).expect("writes");
    let (config, data) = (config.display().to_string(), machines.path("x").display().to_string());
    let refused = failing(&["up", "--config", &config, "--data", &data]);
    assert!(refused.contains("run `tollgate gateway`"), "{refused}");
    let refused = failing(&["gateway", "--data", &data]);
    assert!(refused.contains("the config names no worker"), "{refused}");
    let tls = machines.path("tls").display().to_string();
    let words = ["workers", "certificates", "--cluster", "prod", "--out", &tls, "--worker", "gpu0"];
    let refused = failing(&words);
    assert!(refused.contains("gpu0.pem exists"), "{refused}");
}
