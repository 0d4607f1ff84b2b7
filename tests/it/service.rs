//! The gateway under a service manager: systemd's messages and unit, probes by `tollgate
//! health`, and commands beside the certificate of a domain.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair};
use serde_json::Value;

use crate::support::{self, OPEN, Tollgate, post};

/// Time in which a message must come. A loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Receives the next message to systemd that is none of the watchdog's.
fn next_state(socket: &UnixDatagram) -> String {
    loop {
        let message = next_message(socket);
        if message != "WATCHDOG=1" {
            return message;
        }
    }
}

fn next_message(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer).expect("a message within the time");
    String::from_utf8(buffer[..length].to_vec()).expect("UTF-8").trim_end().to_owned()
}

#[test]
fn service_manager_sees_ready_reload_and_stop() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("binds");
    socket.set_read_timeout(Some(PATIENCE)).expect("a bound");
    let shown = path.display().to_string();
    let environment = [("NOTIFY_SOCKET", shown.as_str()), ("WATCHDOG_USEC", "200000")];
    let mut gateway = Tollgate::with_environment(OPEN, &environment);
    assert_eq!(next_state(&socket), "READY=1");
    let started = Instant::now();
    while next_message(&socket) != "WATCHDOG=1" {
        assert!(started.elapsed() < PATIENCE, "the watchdog gets no message");
    }
    support::signal(gateway.pid(), "HUP");
    let reloading = next_state(&socket);
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert_eq!(next_state(&socket), "READY=1");
    assert_eq!(gateway.stop(), Some(0));
    assert_eq!(next_state(&socket), "STOPPING=1");
}

#[test]
fn health_tells_ready_from_absent() {
    let mut gateway = Tollgate::with_config(OPEN);
    assert_eq!(gateway.command(&["health"]), "ready\n");
    assert_eq!(gateway.command(&["health", "--live"]), "live\n");
    let data = gateway.data().display().to_string();
    gateway.stop();
    let error = support::failing(&["health", "--data", &data]);
    assert!(error.contains(&format!("no gateway runs on the data folder {data}")), "{error}");
}

#[tokio::test]
async fn health_names_the_obstacle() {
    let gateway = Tollgate::with_config(OPEN);
    let admin = gateway.connect_admin().await;
    let (status, answer) = post(&admin, "/v1/workers/0/rest", &Value::Null).await;
    assert_eq!(status, 200, "{answer}");
    let data = gateway.data().display().to_string();
    let error = support::failing(&["health", "--data", &data]);
    assert!(error.contains("the gateway is not ready: no worker takes requests"), "{error}");
    assert_eq!(gateway.command(&["health", "--live"]), "live\n");
}

/// Writes a certificate of no known authority for a domain, and its key.
fn write_certificate(folder: &Path) {
    let key = KeyPair::generate().expect("a key");
    let parameters = CertificateParams::new(["api.example.com".to_owned()]).expect("a name");
    let certificate = parameters.self_signed(&key).expect("a certificate");
    // The key first: the gateway looks at both files every two seconds.
    fs::write(folder.join("key.pem"), key.serialize_pem()).expect("writes");
    fs::write(folder.join("chain.pem"), certificate.pem()).expect("writes");
}

/// Starts a gateway with a certificate in `folder`, by a child process that waits for no
/// client: clients of these tests do not trust the certificate.
fn with_domain_certificate(folder: &Path) -> Tollgate {
    write_certificate(folder);
    let shown = folder.display();
    Tollgate::with_config(&format!(
        "{OPEN}\n[gateway.tls]\ncertificate = \"{shown}/chain.pem\"\nkey = \"{shown}/key.pem\"\n"
    ))
}

#[test]
fn commands_trust_the_gateways_own_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    let gateway = with_domain_certificate(folder.path());
    let config = gateway.config().display().to_string();
    let list = ["keys", "list", "--config", &config];
    assert_eq!(gateway.command(&["health"]), "ready\n");
    gateway.command(&list);
    write_certificate(folder.path());
    gateway.command(&["config", "reload", "--config", &config]);
    gateway.command(&list);
}

#[test]
fn commands_refuse_another_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    let gateway = with_domain_certificate(folder.path());
    let der = gateway.data().join("admin.der");
    let other = KeyPair::generate().expect("a key");
    let parameters = CertificateParams::new(["api.example.com".to_owned()]).expect("a name");
    fs::write(&der, parameters.self_signed(&other).expect("a certificate").der()).expect("writes");
    let data = gateway.data().display().to_string();
    let error = support::failing(&["health", "--data", &data]);
    assert!(error.contains("TLS with 127.0.0.1"), "{error}");
}

fn unit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd/tollgate.service")
}

#[test]
fn systemd_unit_has_no_unknown_setting() {
    let Some(analyze) = support::program("systemd-analyze") else { return };
    // The check wants the program at the place that the unit names.
    let text = fs::read_to_string(unit()).expect("reads");
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("tollgate.service");
    let verify = |text: &str| {
        let here = text.replace("/usr/local/bin/tollgate", support::binary());
        fs::write(&copy, here).expect("writes");
        let output = Command::new(&analyze).arg("verify").arg(&copy).output().expect("runs");
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    // It exits with 0 for unknown settings, too, so its words count.
    assert_eq!(verify(&text), "");
    assert!(verify(&text.replace("UMask=", "UMasks=")).contains("UMasks"));
}

#[test]
fn systemd_unit_is_barely_exposed() {
    let Some(analyze) = support::program("systemd-analyze") else { return };
    let secure = |threshold: &str| {
        let bound = format!("--threshold={threshold}");
        let words = ["security", "--offline=true", "--no-pager", &bound];
        Command::new(&analyze).args(words).arg(unit()).output().expect("runs").status.success()
    };
    assert!(secure("20"), "the exposure is more than 2.0");
    assert!(!secure("10"), "the check finds no exposure at all");
}
