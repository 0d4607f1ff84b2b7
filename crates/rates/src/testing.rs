//! Redis servers for tests: each with a folder of its own, on a free port of loopback, stopped
//! and removed when it is dropped.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(clippy::missing_panics_doc, reason = "every function here panics to fail a test")]

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use redis::{Client, FromRedisValue};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The longest wait for a server to start.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time within which the server must answer a test's own command.
const LIMIT: Duration = Duration::from_secs(10);

/// A Redis server that a test may kill, stop and start again.
pub struct TestRedis {
    // Before the folder, so that the server ends before its files go.
    running: Mutex<Option<Child>>,
    folder: TempDir,
    port: u16,
    options: Vec<String>,
    password: Option<String>,
}

impl TestRedis {
    /// Starts a server without a disk. Returns `None`, with the reason on standard error, where
    /// Redis is not installed; in the gate that is a failure.
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts a server with further options, such as `--requirepass`, as [`Self::start`].
    pub fn start_with(options: &[&str]) -> Option<Self> {
        let is_installed = PathBuf::from("/usr/bin/redis-server").exists();
        if !is_installed {
            #[expect(
                clippy::disallowed_methods,
                reason = "a test is told by the gate that it runs in it"
            )]
            let in_gate = std::env::var_os("TOLLGATE_GATE").is_some();
            assert!(!in_gate, "Redis is missing: `cargo xtask test` installs it");
            eprintln!("skipped: Redis is not installed");
            return None;
        }
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let password = options.iter().skip_while(|option| **option != "--requirepass").nth(1);
        let server = Self {
            running: Mutex::new(None),
            folder: tempfile::tempdir().expect("a folder"),
            port,
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            password: password.map(|password| (*password).to_owned()),
        };
        server.resume();
        Some(server)
    }

    /// Starts the server again after [`Self::kill`] and waits until it answers. Without further
    /// options it has forgotten everything.
    pub fn resume(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(running.is_none(), "the server runs");
        let log = self.folder.path().join("log");
        let log = File::options().create(true).append(true).open(log).expect("a log");
        let child = Command::new("/usr/bin/redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--port", &self.port.to_string()])
            .arg("--dir")
            .arg(self.folder.path())
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(log)
            .spawn()
            .expect("redis-server runs");
        *running = Some(child);
        drop(running);
        let begun = now();
        while self.try_run::<String>(&["PING"]).is_none() {
            assert!(begun.elapsed() < PATIENCE, "the server does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills the server as a power cut would.
    pub fn kill(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut child) = running.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops the process without closing its connections.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets the process of [`Self::freeze`] go on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Runs a command and returns its answer.
    pub fn run<T: FromRedisValue>(&self, command: &[&str]) -> T {
        self.try_run(command).expect("the server answers")
    }

    fn try_run<T: FromRedisValue>(&self, command: &[&str]) -> Option<T> {
        let user = self.password.as_ref().map_or(String::new(), |it| format!(":{it}@"));
        let client = Client::open(format!("redis://{user}127.0.0.1:{}", self.port)).ok()?;
        let mut connection = client.get_connection_with_timeout(LIMIT).ok()?;
        connection.set_read_timeout(Some(LIMIT)).ok()?;
        let (name, arguments) = command.split_first()?;
        redis::cmd(name).arg(arguments).query(&mut connection).ok()
    }

    /// Returns the URL of the server, without the password.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the server's port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    fn signal(&self, signal: Signal) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let child = running.as_ref().expect("the server runs");
        kill_process(Pid::from_child(child), signal).expect("the server is a child");
    }
}

impl Drop for TestRedis {
    fn drop(&mut self) {
        self.kill();
    }
}

#[expect(clippy::disallowed_methods, reason = "a test waits for a server by the real clock")]
fn now() -> Instant {
    Instant::now()
}
