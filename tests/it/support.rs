//! Starts the real binary on free ports with a fresh data folder, as a person would,
//! and ends only the processes that it started.
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate_ledger::{Ledger, LedgerReader};
use tollgate_loadtest::client::{Connection, Protocol, Target};

/// A plan with limits that no test reaches.
pub const OPEN: &str = r#"
[gateway.reads]
requests_per_second = 10_000
request_burst = 100_000

[gateway.connections]
new_per_second = 10_000
new_burst = 10_000

[plans.open]
requests_per_minute = 100_000
concurrent = 256
queued = 1024

[tenants.acme]
plan = "open"
"#;

/// A running `tollgate up` or `tollgate gateway`.
pub struct Tollgate {
    child: Child,
    data: PathBuf,
    folder: Option<TempDir>,
    /// The subcommand, if the command names one.
    subcommand: Vec<OsString>,
    arguments: Vec<String>,
    /// The URL of the API, `https://127.0.0.1:port`.
    pub url: String,
    /// The URL of the admin listener.
    pub admin: String,
    /// The lines printed up to `ready`.
    pub banner: Vec<String>,
}

impl Tollgate {
    /// Starts the gateway with built-in defaults.
    pub fn demo() -> Self {
        Self::start(None, &[])
    }

    /// Starts the gateway with `config` (TOML).
    pub fn with_config(config: &str) -> Self {
        Self::start(Some(config), &[])
    }

    /// Starts the gateway with `config` and further arguments.
    pub fn start(config: Option<&str>, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut all: Vec<String> = arguments.iter().map(|&word| word.to_owned()).collect();
        if let Some(config) = config {
            let path = folder.path().join("tollgate.toml");
            fs::write(&path, config).expect("writes the config");
            all.extend(["--config".to_owned(), path.display().to_string()]);
        }
        let data = folder.path().join("data");
        Self::start_in(data, Some(folder), all)
    }

    /// Starts the gateway with `config` and writes its log by `filter` to the file at
    /// `log`.
    pub fn logging(config: &str, filter: &str, log: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tollgate.toml");
        fs::write(&path, config).expect("writes the config");
        let arguments = vec!["--config".to_owned(), path.display().to_string()];
        let mut command = Command::new(binary());
        command.env("TOLLGATE_LOG", filter).stderr(fs::File::create(log).expect("a log"));
        Self::start_by(command, folder.path().join("data"), Some(folder), arguments)
    }

    /// Starts the gateway with `config` on the data folder `data`, by a prepared
    /// command of the binary. A command without a subcommand is `tollgate up`.
    pub fn start_on(data: &Path, config: &str, command: Command) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tollgate.toml");
        fs::write(&path, config).expect("writes the config");
        let arguments = vec!["--config".to_owned(), path.display().to_string()];
        Self::start_by(command, data.to_owned(), Some(folder), arguments)
    }

    /// Starts the gateway with `config` and further environment variables.
    pub fn with_environment(config: &str, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tollgate.toml");
        fs::write(&path, config).expect("writes the config");
        let arguments = vec!["--config".to_owned(), path.display().to_string()];
        let mut command = Command::new(binary());
        command.envs(environment.iter().copied());
        Self::start_by(command, folder.path().join("data"), Some(folder), arguments)
    }

    fn start_in(data: PathBuf, folder: Option<TempDir>, arguments: Vec<String>) -> Self {
        Self::start_by(Command::new(binary()), data, folder, arguments)
    }

    fn start_by(
        mut command: Command,
        data: PathBuf,
        folder: Option<TempDir>,
        arguments: Vec<String>,
    ) -> Self {
        // The arguments of another program, such as a shell, are none of the binary's.
        let is_binary = command.get_program() == OsStr::new(binary());
        let subcommand = command.get_args().filter(|_| is_binary).map(OsStr::to_owned).collect();
        let mut child = Self::spawn(&mut command, &data, &arguments);
        let lines = lines_of(child.stdout.take().expect("it was piped"));
        let mut banner = Vec::new();
        loop {
            let line = lines.recv_timeout(Duration::from_secs(120)).unwrap_or_else(|error| {
                let status = child.try_wait();
                // A panic here drops no `Tollgate`, so the child must be ended by hand.
                let _ = child.kill();
                panic!("no `ready` line ({error}; {status:?}) after: {banner:#?}")
            });
            banner.push(line.clone());
            let words: Vec<&str> = line.split_whitespace().collect();
            if let ["ready", url, "admin", admin] = words[..] {
                let (url, admin) = (url.to_owned(), admin.to_owned());
                return Self { child, data, folder, subcommand, arguments, url, admin, banner };
            }
        }
    }

    fn spawn(command: &mut Command, data: &Path, arguments: &[String]) -> Child {
        if command.get_args().next().is_none() {
            command.arg("up");
        }
        command
            .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .args(["--data", &data.display().to_string()])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts")
    }

    /// Returns the data folder.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Returns the path of its config file.
    pub fn config(&self) -> PathBuf {
        let at = self.arguments.iter().position(|word| word == "--config");
        PathBuf::from(&self.arguments[at.expect("it was given one") + 1])
    }

    /// Returns the path of the CA to trust.
    pub fn ca(&self) -> PathBuf {
        self.data.join("tls/ca.pem")
    }

    /// Returns the process id of the gateway.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the process ids of its workers.
    pub fn workers(&self) -> Vec<u32> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        tasks
            .filter_map(Result::ok)
            .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
            .flat_map(|pids| pids.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .map(|pid| pid.parse().expect("a process id"))
            .collect()
    }

    /// Runs a subcommand on its data folder and returns the output.
    pub fn command(&self, words: &[&str]) -> String {
        let data = self.data.display().to_string();
        command(&[words, &["--data", &data]].concat())
    }

    /// Creates a key of `tenant` by `tollgate keys create`.
    pub fn key(&self, tenant: &str, options: &[&str]) -> String {
        let mut words = [&["keys", "create", "--tenant", tenant, "--quiet"], options].concat();
        if let Some(at) = self.arguments.iter().position(|word| word == "--config") {
            words.extend(["--config", &self.arguments[at + 1]]);
        }
        let key = self.command(&words).trim().to_owned();
        self.wait_until_known(&key);
        key
    }

    /// Waits until the gateway knows the key, which takes up to a second after another
    /// process made it.
    fn wait_until_known(&self, key: &str) {
        let target = self.target(key);
        let poll = async move {
            let connection = target.connect(Protocol::Either).await.expect("connects");
            let started = Instant::now();
            // An unknown key gets 401, or 429 after too many unknown keys.
            while matches!(get(&connection, "/v1/models").await.0, 401 | 429) {
                assert!(started.elapsed() < Duration::from_secs(5), "the key stays unknown");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        // The caller may be within a runtime, so this one needs a thread of its own.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(poll);
        });
        thread.join().expect("the key is known");
    }

    /// Returns the demo tenant's key.
    pub fn demo_key(&self) -> String {
        fs::read_to_string(self.data.join("demo.key")).expect("demo.key").trim().to_owned()
    }

    /// Returns a client's target with `key`.
    pub fn target(&self, key: &str) -> Target {
        Target::new(&self.url, &self.ca(), key).expect("a target")
    }

    /// Opens a connection with `key`.
    pub async fn connect(&self, key: &str) -> Connection {
        self.target(key).connect(Protocol::Either).await.expect("connects")
    }

    /// Opens a connection to the admin listener.
    pub async fn connect_admin(&self) -> Connection {
        let key = fs::read_to_string(self.data.join("admin.key")).expect("made at the start");
        let admin = Target::new(&self.admin, &self.ca(), key.trim()).expect("a target");
        admin.connect(Protocol::Either).await.expect("connects")
    }

    /// Returns the metrics in Prometheus's text format.
    pub async fn metrics(&self) -> String {
        rest(self.connect_admin().await.get("/metrics").await.expect("answers")).await
    }

    /// Waits until `workers` workers accept requests.
    pub async fn until_ready(&self, workers: usize, within: Duration) {
        let connection = self.connect_admin().await;
        let started = Instant::now();
        loop {
            let (_, status) = get(&connection, "/v1/status").await;
            let all = status["workers"].as_array().expect("workers");
            if all.iter().filter(|worker| worker["ready"] == true).count() == workers {
                return;
            }
            assert!(started.elapsed() < within, "not back: {status}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Opens the ledger of a stopped gateway and asserts that every nanosecond has an
    /// account.
    pub fn books(&self) -> LedgerReader {
        let reader = Ledger::open_read_only(&self.data.join("ledger.db")).expect("a ledger");
        let findings = reader.check();
        assert!(findings.is_empty(), "{findings:#?}");
        reader
    }

    /// Sends SIGTERM, waits for the end and returns the exit code.
    pub fn stop(&mut self) -> Option<i32> {
        signal(self.pid(), "TERM");
        self.child.wait().expect("it was started").code()
    }

    /// Waits for the end of a gateway that ends by itself, and returns the exit code.
    pub fn ended_within(&mut self, within: Duration) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it was started") {
                return status.code();
            }
            assert!(begun.elapsed() < within, "it still runs");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Stops the gateway and returns its data, which stay as long as the folder is
    /// held.
    pub fn into_data(mut self) -> (PathBuf, Option<TempDir>) {
        self.stop();
        (self.data.clone(), self.folder.take())
    }

    /// Kills the gateway (SIGKILL).
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started");
    }

    /// Starts the gateway again on the same data after [`Self::stop`] or
    /// [`Self::kill`].
    pub fn restart(mut self) -> Self {
        let (data, folder) = (self.data.clone(), self.folder.take());
        let arguments = std::mem::take(&mut self.arguments);
        let mut command = Command::new(binary());
        command.args(&self.subcommand);
        drop(self);
        Self::start_by(command, data, folder, arguments)
    }
}

impl Tollgate {
    /// Starts the gateway on the same data and kills it `after` some time, ready or
    /// not.
    pub fn restart_and_kill(mut self, after: Duration) -> Self {
        let mut command = Command::new(binary());
        self.child = Self::spawn(&mut command, &self.data, &self.arguments);
        std::thread::sleep(after);
        self.kill();
        self
    }
}

impl Drop for Tollgate {
    fn drop(&mut self) {
        // A process that has ended is no error here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a config in which the tenant `acme` may spend `cap` of device time a day, on a
/// simulated device.
pub fn capped(cap: &str) -> String {
    format!(
        r#"
[worker]
engine = "synthetic"

[worker.synthetic]
speed = 50.0

[plans.small]
device_time_per_day = {{ default = "{cap}" }}

[tenants.acme]
plan = "small"
"#
    )
}

/// Returns the body of a request that costs some of a cap.
pub fn story() -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": 40,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    })
}

/// Waits until midnight UTC if it is near: a test of a daily cap takes some seconds,
/// and midnight resets the cap.
pub async fn stay_within_a_day() {
    #[allow(clippy::disallowed_methods, reason = "the gateway's caps follow the wall clock, too")]
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let of_day = now.expect("after 1970").as_secs() % 86_400;
    if of_day > 86_400 - 90 {
        tokio::time::sleep(Duration::from_secs(86_401 - of_day)).await;
    }
}

/// Waits until a request's end is in the ledger and returns its usage.
pub async fn posted(connection: &Connection, id: &str) -> Value {
    let started = Instant::now();
    loop {
        let (status, usage) = get(connection, &format!("/v1/usage/{id}")).await;
        if status == 200 && usage["state"] == "posted" {
            return usage;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{id}: {status} {usage}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Reads the rest of a stream, which must end cleanly.
pub async fn rest(response: http::Response<hyper::body::Incoming>) -> String {
    let rest = response.into_body().collect().await.expect("a clean end").to_bytes();
    String::from_utf8(rest.to_vec()).expect("UTF-8")
}

/// Counts the error events in a stream.
pub fn errors(text: &str) -> usize {
    text.matches("\"error\"").count()
}

/// Sends a signal, by name, to a process that a test started.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(status.expect("kill runs").success(), "kill -{name} {pid}");
}

/// Returns true if a process runs and is not a zombie.
pub fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Runs the binary to its end, asserts success and returns the output.
pub fn command(words: &[&str]) -> String {
    let output = Command::new(binary()).args(words).output().expect("the binary starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tollgate {}: {error}", words.join(" "));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs the binary to its end, asserts failure and returns the message.
pub fn failing(words: &[&str]) -> String {
    let output = Command::new(binary()).args(words).output().expect("the binary starts");
    assert!(!output.status.success(), "tollgate {} succeeded", words.join(" "));
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// Returns the path of the binary under test.
pub fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_tollgate")
}

/// Finds a tool of the gate. In the gate a missing tool is a failure; elsewhere the
/// test prints a reason and is skipped.
pub fn tool(name: &str, path: Option<PathBuf>) -> Option<PathBuf> {
    if let Some(path) = path.filter(|path| path.exists()) {
        return Some(path);
    }
    skip(&format!("{name} is missing; `cargo xtask test` installs it"));
    None
}

/// Prints why a test cannot run here. In the gate that is a failure.
pub fn skip(why: &str) {
    #[allow(clippy::disallowed_methods, reason = "a test is told by the gate that it runs in it")]
    let in_gate = std::env::var_os("TOLLGATE_GATE").is_some();
    assert!(!in_gate, "{why}");
    eprintln!("skipped: {why}");
}

/// Finds a program on the PATH.
pub fn program(name: &str) -> Option<PathBuf> {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", name]).output().ok()?;
    let path = String::from_utf8(found.stdout).ok()?;
    tool(name, Some(PathBuf::from(path.trim())))
}

/// Sends a POST with `body` and returns status and JSON.
pub async fn post(connection: &Connection, path: &str, body: &Value) -> (u16, Value) {
    let response = connection.post(path, body.to_string().into()).await.expect("answers");
    read(response).await
}

/// Adds `fields` to the JSON object `body`, in place of fields of the same name.
pub fn with_fields(mut body: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// The field of a request whose answer is valid under `schema`.
pub fn of_schema(schema: &Value) -> Value {
    json!({ "response_format": { "type": "json_schema",
        "json_schema": { "name": "reply", "strict": true, "schema": schema } } })
}

/// Sends a GET and returns status and JSON.
pub async fn get(connection: &Connection, path: &str) -> (u16, Value) {
    read(connection.get(path).await.expect("answers")).await
}

/// Reads a whole response as status and JSON.
pub async fn read(response: http::Response<hyper::body::Incoming>) -> (u16, Value) {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    let json = serde_json::from_slice(&body).unwrap_or_else(|error| {
        panic!("{status}: {error} in {:?}", String::from_utf8_lossy(&body))
    });
    (status, json)
}

/// Reads the lines of `output` in a thread of their own.
pub fn lines_of(output: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = sync_channel(64);
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // Later lines are read and dropped, so that the child never blocks.
            let _ = sender.try_send(line);
        }
    });
    receiver
}
