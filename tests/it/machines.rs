//! Workers and gateways on machines of their own, which prove by certificates who they are. Here
//! all machines are this one.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{self, Tollgate, binary};

/// The certificates and the configs of gateways and their workers.
pub(crate) struct Machines {
    folder: TempDir,
    /// The addresses of the workers gpu0 and gpu1.
    addresses: [String; 2],
}

/// A worker process.
pub(crate) struct RemoteProcess {
    child: Child,
    log: PathBuf,
}

impl Machines {
    /// Makes certificates for the gateways a, b and c and the workers gpu0 and gpu1 of the
    /// cluster `prod`.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // Free ports: the gateways' configs name them before the workers start.
        let free = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let addresses = free.map(|free| free.local_addr().expect("an address").to_string());
        let machines = Self { folder, addresses };
        machines.certificates("tls", "prod");
        machines
    }

    /// Makes the certificates of `cluster` in the folder `name` and returns the output.
    pub(crate) fn certificates(&self, name: &str, cluster: &str) -> String {
        let out = self.path(name).display().to_string();
        let gateways = ["--gateway", "a", "--gateway", "b", "--gateway", "c"];
        let workers = ["--worker", "gpu0", "--worker", "gpu1"];
        let words = ["workers", "certificates", "--cluster", cluster, "--out", &out];
        support::command(&[&words[..], &gateways, &workers].concat())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the address of the worker gpu0.
    pub(crate) fn address(&self) -> &str {
        &self.addresses[0]
    }

    /// Returns the section of the owner `name`, whose certificates are in `tls`.
    pub(crate) fn cluster(&self, tls: &str, name: &str) -> String {
        let tls = self.path(tls).display().to_string();
        format!(
            "[cluster]\nname = \"prod\"\nca = \"{tls}/ca.pem\"\ncertificate = \"{tls}/{name}.pem\"\nkey = \"{tls}/{name}.key\"\n"
        )
    }

    /// Returns the sections of the gateway `name`, which knows the first `workers` workers.
    pub(crate) fn sections(&self, name: &str, workers: usize) -> String {
        let mut sections = self.cluster("tls", name);
        for (at, address) in self.addresses.iter().take(workers).enumerate() {
            sections.push_str(&format!("[cluster.workers.gpu{at}]\naddress = \"{address}\"\n"));
        }
        sections
    }

    /// Returns the config of the gateway `name`, which knows the worker gpu0.
    pub(crate) fn gateway_config(&self, name: &str) -> String {
        format!("{}\n{}", support::OPEN, self.sections(name, 1))
    }

    /// Starts the gateway `name` with its own data.
    pub(crate) fn gateway(&self, name: &str) -> Tollgate {
        self.gateway_with(name, &self.gateway_config(name))
    }

    /// Starts the gateway `name` with its own data and this config.
    pub(crate) fn gateway_with(&self, name: &str, config: &str) -> Tollgate {
        let mut command = Command::new(binary());
        command.arg("gateway");
        Tollgate::start_on(&self.path(name), config, command)
    }

    /// Starts the worker gpu0 with the certificate of `owner` in `tls`.
    pub(crate) fn worker(&self, tls: &str, owner: &str) -> RemoteProcess {
        self.worker_with(0, (tls, owner), "")
    }

    /// Starts a worker by its number with the certificate of `owner` in `tls`, and `other` in its
    /// config.
    pub(crate) fn worker_with(
        &self,
        number: usize,
        (tls, owner): (&str, &str),
        other: &str,
    ) -> RemoteProcess {
        let name = format!("gpu{number}");
        let config = self.path(&format!("{name}.toml"));
        fs::write(&config, self.cluster(tls, owner) + other).expect("writes the config");
        let log = self.path(&format!("{name}.log"));
        let child = Command::new(binary())
            .args(["worker", "--name", &name, "--listen", &self.addresses[number]])
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
    pub(crate) fn check(&self, config: &str) -> (bool, String) {
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
    pub(crate) fn failure(mut self) -> String {
        let status = self.child.wait().expect("it was started");
        assert!(!status.success(), "{status}");
        fs::read_to_string(&self.log).expect("a log")
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started");
    }

    /// Sends SIGTERM and waits for the end, which must be orderly.
    pub(crate) fn drain(&mut self) {
        support::signal(self.pid(), "TERM");
        assert_eq!(self.child.wait().expect("it was started").code(), Some(0));
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns what the worker has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    /// Waits until the log has `text`.
    pub(crate) async fn until_logged(&self, text: &str) {
        let started = Instant::now();
        while !self.log().contains(text) {
            assert!(started.elapsed() < Duration::from_secs(60), "{text}: {}", self.log());
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
