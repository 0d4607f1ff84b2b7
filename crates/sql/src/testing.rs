//! PostgreSQL servers for tests: each with a folder of its own, on a free port of
//! loopback, stopped and removed when the last user is dropped.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(clippy::missing_panics_doc, reason = "every function here panics to fail a test")]

mod relay;

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub use self::relay::{Passing, Relay};
use crate::{Connection, Server, ServerAddress};

/// The password of every user of a test server.
pub const PASSWORD: &str = "a password of tests";
/// The longest wait for a server to start or to stop.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time within which the server must answer the test's own statements.
const LIMIT: Duration = Duration::from_secs(20);

/// A PostgreSQL server that a test may kill, stop and start again.
pub struct TestServer {
    programs: PathBuf,
    // Before the folder, so that the server ends before its files go.
    running: Mutex<Option<Child>>,
    folder: TempDir,
    port: u16,
    has_tls: bool,
    databases: AtomicU32,
}

/// The certificate chain and the private key of a server, in PEM.
pub struct Certificate<'a> {
    /// The chain, the leaf first.
    pub chain: &'a str,
    /// The private key.
    pub key: &'a str,
}

impl TestServer {
    /// Starts a server, or returns one that another test of this process uses. Returns
    /// `None`, with the reason on standard error, where PostgreSQL is not installed; in the
    /// gate that is a failure.
    pub fn shared() -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<TestServer>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = shared.upgrade() {
            return Some(server);
        }
        let server = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&server);
        Some(server)
    }

    /// Starts a server of the test's own, as [`Self::shared`].
    pub fn start() -> Option<Self> {
        Self::start_with(None)
    }

    /// Starts a server of the test's own that accepts TLS, as [`Self::shared`].
    pub fn start_with_tls(certificate: &Certificate<'_>) -> Option<Self> {
        Self::start_with(Some(certificate))
    }

    fn start_with(tls: Option<&Certificate<'_>>) -> Option<Self> {
        let Some(programs) = programs() else {
            #[expect(
                clippy::disallowed_methods,
                reason = "a test is told by the gate that it runs in it"
            )]
            let in_gate = std::env::var_os("TOLLGATE_GATE").is_some();
            assert!(!in_gate, "PostgreSQL is missing: `cargo xtask test` installs it");
            eprintln!("skipped: PostgreSQL is not installed");
            return None;
        };
        let folder = tempfile::tempdir().expect("a folder");
        give_to_server(folder.path());
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).expect("writes");
            fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("its owner may");
            give_to_server(&path);
            path
        };
        let passwords = put("password", PASSWORD);
        if let Some(Certificate { chain, key }) = tls {
            put("server.pem", chain);
            put("server.key", key);
        }
        let made = as_server(&programs.join("initdb"))
            .args(["--no-sync", "--username=tollgate", "--auth=scram-sha-256", "--encoding=UTF8"])
            .args(["--locale=C.UTF-8", "--no-instructions"])
            .arg(format!("--pwfile={}", passwords.display()))
            .arg(data(folder.path()))
            .output()
            .expect("initdb runs");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let (running, databases) = (Mutex::new(None), AtomicU32::new(0));
        let server = Self { programs, running, folder, port, has_tls: tls.is_some(), databases };
        server.resume();
        Some(server)
    }

    /// Starts a standby that follows this server. From then on a commit here waits until the standby
    /// has it.
    pub fn start_standby(&self) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        give_to_server(folder.path());
        let copied = as_server(&self.programs.join("pg_basebackup"))
            .args(["--host=127.0.0.1", "--username=tollgate", "--no-password", "--no-sync"])
            .args(["--write-recovery-conf", "--checkpoint=fast"])
            .arg(format!("--port={}", self.port))
            .arg("-D")
            .arg(data(folder.path()))
            .env("PGPASSWORD", PASSWORD)
            .output()
            .expect("pg_basebackup runs");
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let (running, databases) = (Mutex::new(None), AtomicU32::new(0));
        let programs = self.programs.clone();
        let standby = Self { programs, running, folder, port, has_tls: false, databases };
        standby.resume();
        // Not before the copy, or the standby would wait for one of its own, too.
        for sql in ["ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"] {
            self.run("postgres", sql);
        }
        standby
    }

    /// Makes a standby the primary.
    pub fn promote(&self) {
        self.run("postgres", "SELECT pg_promote()");
    }

    /// Starts the server again after [`Self::kill`] and waits until it answers.
    pub fn resume(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(running.is_none(), "the server runs");
        let log = fs::File::options().create(true).append(true).open(self.log()).expect("a log");
        let file = |name: &str| self.folder.path().join(name).display().to_string();
        let mut command = as_server(&self.programs.join("postgres"));
        if self.has_tls {
            command
                .args(["-c", "ssl=on"])
                .args(["-c", &format!("ssl_cert_file={}", file("server.pem"))])
                .args(["-c", &format!("ssl_key_file={}", file("server.key"))]);
        }
        let child = command
            .arg("-D")
            .arg(data(self.folder.path()))
            .args(["-p", &self.port.to_string(), "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "unix_socket_directories=", "-c", "max_connections=200"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("postgres runs");
        *running = Some(child);
        drop(running);
        let begun = now();
        while let Err(error) = Server::connect(&self.address("postgres"), LIMIT) {
            assert!(begun.elapsed() < PATIENCE, "{error}: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the server as a power cut would: nothing more is written, and every connection
    /// breaks.
    pub fn kill(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut child) = running.take() {
            // SIGQUIT ends the server and its children at once, without a checkpoint. Processes that
            // stand still get it when they go on.
            let _ = kill_process(pid(&child), Signal::QUIT);
            for process in children_of(pid(&child)).into_iter().chain([pid(&child)]) {
                let _ = kill_process(process, Signal::CONT);
            }
            let _ = child.wait();
        }
    }

    /// Stops the processes of all connections without closing these.
    pub fn freeze(&self) {
        self.signal_all(Signal::STOP);
    }

    /// Lets the processes of [`Self::freeze`] go on.
    pub fn thaw(&self) {
        self.signal_all(Signal::CONT);
    }

    /// Makes an empty database and returns its name.
    pub fn new_database(&self) -> String {
        let name = format!("test_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.run("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    /// Returns the address of a database.
    pub fn address(&self, database: &str) -> ServerAddress {
        let url = self.url(database);
        ServerAddress::new(&url, Some(PASSWORD), None).expect("an address of loopback")
    }

    /// Returns the URL of a database, without the password.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://tollgate@127.0.0.1:{}/{database}", self.port)
    }

    /// Connects to a database.
    pub fn connect(&self, database: &str) -> Connection {
        let server = Server::connect(&self.address(database), LIMIT).expect("the server answers");
        server.into()
    }

    /// Returns the server's port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Runs statements in a database.
    pub fn run(&self, database: &str, sql: &str) {
        self.connect(database).execute_batch(sql).expect("the server accepts the statements");
    }

    /// Breaks every connection to a database but those of this call.
    pub fn cut_connections(&self, database: &str) {
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
             WHERE datname = ?1 AND pid <> pg_backend_pid()";
        let cut = self.connect("postgres").query_row(sql, [database], |row| row.get::<i64>(0));
        cut.expect("the server cuts");
    }

    fn signal_all(&self, signal: Signal) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let server = pid(running.as_ref().expect("the server runs"));
        for process in children_of(server).into_iter().chain([server]) {
            // A process may have ended since it was listed.
            let _ = kill_process(process, signal);
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn data(folder: &Path) -> PathBuf {
    folder.join("data")
}

/// Returns the folder of the newest installed server's programs.
fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let folders = versions.filter_map(|version| Some(version.ok()?.path().join("bin")));
    folders.filter(|folder| folder.join("postgres").exists()).max()
}

/// Returns user and group that must run the server: it refuses to run as root.
fn other_user() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").expect("the users can be read");
    let of_line = |line: &str| {
        let mut fields = line.split(':');
        let user = fields.nth(2)?.parse().ok()?;
        Some((user, fields.next()?.parse().ok()?))
    };
    let user = users.lines().find(|line| line.starts_with("postgres:")).and_then(of_line);
    Some(user.expect("the package of PostgreSQL makes the user postgres"))
}

/// Makes the user that runs the server the owner of `path`.
fn give_to_server(path: &Path) {
    if let Some((user, group)) = other_user() {
        std::os::unix::fs::chown(path, Some(user), Some(group)).expect("root may do that");
    }
}

fn as_server(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some((user, group)) = other_user() {
        command.uid(user).gid(group);
    }
    // The test's folder may be closed to the server's user.
    command.current_dir("/");
    command
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").expect("the processes can be listed");
    let is_child = |process: &Pid| {
        let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero()));
        let line = format!("PPid:\t{}", parent.as_raw_nonzero());
        status.is_ok_and(|status| status.lines().any(|found| found == line))
    };
    processes
        .filter_map(|process| process.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .filter(is_child)
        .collect()
}

#[expect(clippy::disallowed_methods, reason = "a test waits for a server by the real clock")]
fn now() -> Instant {
    Instant::now()
}
