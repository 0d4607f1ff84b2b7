//! The systemd unit under a booted systemd, in a container that borrows this machine's
//! `/usr`: start, reload, a crash, a gateway that hangs, stop.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate_loadtest::client::{Protocol, Target};

use crate::support::{self, get};

/// Time in which systemd must do what it was told. A loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(120);

const CONFIG: &str = r#"
[gateway]
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"

[plans.open]
requests_per_minute = 1_000

[tenants.acme]
plan = "open"
"#;

/// A shorter watchdog, so that the test need not wait for half a minute.
const DROP_IN: &str = "[Service]\nWatchdogSec=10\n";

/// A container with systemd as process 1.
struct Booted {
    folder: TempDir,
    container: Child,
    /// Process 1 of the container, as this machine numbers it.
    init: u32,
    /// The lines that nspawn and systemd print. Nothing reads them after the boot.
    _console: Receiver<String>,
}

impl Booted {
    /// Boots the container, unless the tools are missing or this machine refuses to.
    fn boot() -> Option<Self> {
        let nspawn = support::program("systemd-nspawn")?;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: a container needs root");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        lay_out(folder.path());
        let (root, programs) = (folder.path().join("root"), folder.path().join("usr"));
        let mut container = Command::new(nspawn)
            // The unit's processes are counted by a control group of version 2.
            .env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
            .args(["--quiet", "--register=no", "--keep-unit", "--boot"])
            .arg(format!("--machine=tollgate-{}", std::process::id()))
            .arg(format!("--directory={}", root.display()))
            .arg(format!("--overlay-ro=/usr:{}:/usr", programs.display()))
            .arg("systemd.unit=basic.target")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("nspawn starts");
        let console = support::lines_of(container.stdout.take().expect("it was piped"));
        let began = Instant::now();
        loop {
            if container.try_wait().expect("it was started").is_some() {
                eprintln!("skipped: this machine boots no container");
                return None;
            }
            if let Some(init) = child_of(container.id()) {
                let words = ["is-system-running", "--wait"];
                let state = systemctl(init, &words).output().expect("nsenter starts").stdout;
                if matches!(state.trim_ascii(), b"running" | b"degraded") {
                    return Some(Self { folder, container, init, _console: console });
                }
            }
            assert!(began.elapsed() < PATIENCE, "systemd does not boot");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn file(&self, path: &str) -> PathBuf {
        self.folder.path().join("root").join(path)
    }

    /// Runs a command of systemctl and returns true if it succeeds.
    fn systemctl(&self, words: &[&str]) -> bool {
        systemctl(self.init, words).status().expect("nsenter starts").success()
    }

    /// Returns a property of the unit.
    fn property(&self, name: &str) -> String {
        let words = ["show", "tollgate", "--value", "--property", name];
        let output = systemctl(self.init, &words).output().expect("nsenter starts");
        String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
    }

    /// Waits until systemd has started the unit again after `restarts` failures.
    fn until_restarted(&self, restarts: u32) {
        let began = Instant::now();
        let wanted = restarts.to_string();
        while (self.property("NRestarts"), self.property("ActiveState"))
            != (wanted.clone(), "active".to_owned())
        {
            let state = self.property("SubState");
            assert!(began.elapsed() < PATIENCE, "no restart {restarts}: {state}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns the log of the unit.
    fn log(&self) -> String {
        let mut command = inside(self.init);
        command.args(["journalctl", "--unit=tollgate", "--no-pager", "--output=cat"]);
        let output = command.output().expect("nsenter starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Asks the gateway for its models with a new key.
    async fn models(&self) -> u16 {
        let log = self.log();
        let ready = log.lines().rev().find_map(|line| line.strip_prefix("ready "));
        let url = ready.and_then(|rest| rest.split(' ').next()).expect("the line `ready`");
        let output = inside(self.init)
            .args(["/usr/local/bin/tollgate", "keys", "create", "--quiet", "--tenant", "acme"])
            .args(["--config", "/etc/tollgate", "--data", "/var/lib/tollgate"])
            .output()
            .expect("nsenter starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let key = String::from_utf8(output.stdout).expect("UTF-8");
        let ca = self.file("var/lib/private/tollgate/tls/ca.pem");
        let target = Target::new(url, &ca, key.trim()).expect("a target");
        let connection = target.connect(Protocol::Either).await.expect("connects");
        get(&connection, "/v1/models").await.0
    }
}

impl Drop for Booted {
    fn drop(&mut self) {
        // Nothing in the container outlives its process 1.
        let _ = self.container.kill();
        let _ = self.container.wait();
    }
}

/// Makes the root of the container, and beside it the program that is laid over `/usr`.
fn lay_out(folder: &Path) {
    let (root, programs) = (folder.join("root"), folder.join("usr/local/bin"));
    fs::create_dir_all(&programs).expect("a folder");
    fs::copy(support::binary(), programs.join("tollgate")).expect("copies");
    let unit = root.join("etc/systemd/system");
    for part in ["dev", "proc", "run", "sys", "tmp", "usr", "var", "etc/tollgate"] {
        fs::create_dir_all(root.join(part)).expect("a folder");
    }
    fs::create_dir_all(unit.join("tollgate.service.d")).expect("a folder");
    for link in ["bin", "lib", "lib64", "sbin"] {
        symlink(format!("usr/{link}"), root.join(link)).expect("a link");
    }
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd/tollgate.service");
    fs::copy(ours, unit.join("tollgate.service")).expect("copies");
    fs::write(unit.join("tollgate.service.d/test.conf"), DROP_IN).expect("writes");
    // A machine without an id would start the services of every installed package.
    let id = "6f1d0a7c5b8e4d3c9a2f4e6b8d0c1a35\n";
    let users = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n";
    let files = [
        ("os-release", "ID=debian\n"),
        ("machine-id", id),
        ("passwd", users),
        ("group", "root:x:0:\nnogroup:x:65534:\n"),
        ("nsswitch.conf", "passwd: files systemd\ngroup: files systemd\n"),
        ("tollgate/config.toml", CONFIG),
    ];
    for (name, text) in files {
        fs::write(root.join("etc").join(name), text).expect("writes");
    }
}

fn child_of(process: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    children.ok()?.split_whitespace().next()?.parse().ok()
}

/// Returns a command that runs the rest of its words in the container of `init`. It ends
/// after [`PATIENCE`]: the unit itself gives the gateway any time to start.
fn inside(init: u32) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string());
    command.args(["nsenter", "--all", "--target", &init.to_string()]);
    command
}

fn systemctl(init: u32, words: &[&str]) -> Command {
    let mut command = inside(init);
    command.arg("systemctl").args(words);
    command
}

#[tokio::test]
async fn booted_unit_restarts_reloads_and_stops() {
    let Some(booted) = Booted::boot() else { return };
    // systemd waits for the gateway's message that it is ready.
    assert!(booted.systemctl(&["start", "tollgate"]), "{}", booted.log());
    assert_eq!(booted.models().await, 200);
    let data = fs::metadata(booted.file("var/lib/private/tollgate")).expect("it is there");
    assert_eq!(data.mode() & 0o777, 0o700);
    // The account of the unit is none of the accounts in /etc/passwd.
    assert!((61_184..=65_519).contains(&data.uid()), "user {}", data.uid());

    let config = booted.file("etc/tollgate/config.toml");
    fs::write(&config, CONFIG.replace("1_000", "2_000")).expect("writes");
    assert!(booted.systemctl(&["reload", "tollgate"]), "{}", booted.log());
    assert!(booted.log().contains("1 change in force"), "{}", booted.log());
    fs::write(&config, CONFIG.replace("1_000", "-1")).expect("writes");
    assert!(!booted.systemctl(&["reload", "tollgate"]), "a config with a mistake is accepted");
    fs::write(&config, CONFIG).expect("writes");
    assert_eq!(booted.models().await, 200);

    assert!(booted.systemctl(&["kill", "--kill-whom=main", "--signal=KILL", "tollgate"]));
    booted.until_restarted(1);
    assert_eq!(booted.models().await, 200);
    // A gateway that hangs stays silent, and the watchdog ends it.
    assert!(booted.systemctl(&["kill", "--kill-whom=main", "--signal=STOP", "tollgate"]));
    booted.until_restarted(2);
    assert!(booted.log().contains("Watchdog timeout"), "{}", booted.log());
    assert_eq!(booted.models().await, 200);

    assert!(booted.systemctl(&["stop", "tollgate"]));
    assert_eq!((booted.property("ActiveState"), booted.property("Result")), {
        ("inactive".to_owned(), "success".to_owned())
    });
}
