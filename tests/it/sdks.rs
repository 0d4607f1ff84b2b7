//! The unmodified OpenAI SDKs, curl and h2load against the real binary.

use std::path::PathBuf;
use std::process::Command;

use crate::support::{self, Tollgate, program, tool};

const CONFIG: &str = r#"
[plans.open]
requests_per_minute = 1_200
concurrent = 256
queued = 1024

[plans.rate]
requests_per_minute = { limit = 60, burst = 2 }
concurrent = 16

[plans.spent]
concurrent = 4
device_time_per_day = { default = "1us" }

[tenants.acme]
plan = "open"
[tenants.rated]
plan = "rate"
[tenants.spent]
plan = "spent"
"#;

#[test]
fn python_sdk() {
    let Some(python) = tool("the Python SDK", variable("TOLLGATE_PYTHON")) else { return };
    let gateway = Tollgate::with_config(CONFIG);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/test_openai.py");
    let mut command = Command::new(python);
    command.arg(script);
    run(&gateway, command);
}

#[test]
fn python_sdk_past_a_deadline() {
    let Some(python) = tool("the Python SDK", variable("TOLLGATE_PYTHON")) else { return };
    let config =
        format!("{}\n[gateway.deadlines]\nrequest = \"50ms\"\nqueue = \"50ms\"\n", support::OPEN);
    let gateway = Tollgate::with_config(&config);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/test_openai_faults.py");
    let mut command = Command::new(python);
    command.arg(script).env("TOLLGATE_URL", &gateway.url).env("TOLLGATE_CA", gateway.ca());
    command.env("TOLLGATE_KEY", gateway.key("acme", &[]));
    succeeds(command);
}

#[test]
fn node_sdk() {
    let Some(modules) = tool("the Node SDK", variable("TOLLGATE_NODE_MODULES")) else { return };
    let Some(node) = program("node") else { return };
    let gateway = Tollgate::with_config(CONFIG);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/openai.test.mjs");
    let mut command = Command::new(node);
    command.arg("--test").arg(script).env("TOLLGATE_NODE_MODULES", modules);
    command.env("NODE_EXTRA_CA_CERTS", gateway.ca());
    run(&gateway, command);
}

#[test]
fn python_sdk_with_tools() {
    let Some(python) = tool("the Python SDK", variable("TOLLGATE_PYTHON")) else { return };
    let gateway = Tollgate::with_config(support::OPEN);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/test_tools.py");
    let mut command = Command::new(python);
    command.arg(script).env("TOLLGATE_URL", &gateway.url).env("TOLLGATE_CA", gateway.ca());
    command.env("TOLLGATE_KEY", gateway.key("acme", &[]));
    succeeds(command);
}

#[test]
fn node_sdk_with_tools() {
    let Some(modules) = tool("the Node SDK", variable("TOLLGATE_NODE_MODULES")) else { return };
    let Some(node) = program("node") else { return };
    let gateway = Tollgate::with_config(support::OPEN);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/tools.test.mjs");
    let mut command = Command::new(node);
    command.arg("--test").arg(script).env("TOLLGATE_NODE_MODULES", modules);
    command.env("NODE_EXTRA_CA_CERTS", gateway.ca()).env("TOLLGATE_URL", &gateway.url);
    command.env("TOLLGATE_KEY", gateway.key("acme", &[]));
    succeeds(command);
}

/// Tests that only `cargo xtask test --long` runs.
mod long {
    use super::*;

    fn script(name: &str) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk").join(name)
    }

    #[test]
    #[ignore = "long: installs many client libraries of Python"]
    fn python_libraries_with_schemas_and_tools() {
        let python = variable("TOLLGATE_LIBRARIES_PYTHON");
        let Some(python) = tool("the libraries of Python", python) else { return };
        let gateway = Tollgate::with_config(support::OPEN);
        let mut command = Command::new(python);
        command
            .args(["-W", "ignore"])
            .arg(script("test_libraries.py"))
            .env("TOLLGATE_URL", &gateway.url);
        command.env("TOLLGATE_CA", gateway.ca()).env("TOLLGATE_KEY", gateway.key("acme", &[]));
        succeeds(command);
    }

    #[test]
    #[ignore = "long: installs client libraries of Node"]
    fn node_libraries_with_schemas_and_tools() {
        let modules = variable("TOLLGATE_LIBRARIES_NODE");
        let Some(modules) = tool("the libraries of Node", modules) else { return };
        let Some(node) = program("node") else { return };
        let gateway = Tollgate::with_config(support::OPEN);
        let mut command = Command::new(node);
        command.arg("--test").arg(script("libraries.test.mjs"));
        command.env("TOLLGATE_LIBRARIES_NODE", modules).env("TOLLGATE_URL", &gateway.url);
        command.env("NODE_EXTRA_CA_CERTS", gateway.ca());
        command.env("TOLLGATE_KEY", gateway.key("acme", &[]));
        succeeds(command);
    }
}

/// Runs `command` with the gateway's address and a key of each kind and asserts
/// success.
fn run(gateway: &Tollgate, mut command: Command) {
    command
        .env("TOLLGATE_URL", &gateway.url)
        .env("TOLLGATE_CA", gateway.ca())
        .env("TOLLGATE_KEY", gateway.key("acme", &[]))
        .env("TOLLGATE_KEY_RATE", gateway.key("rated", &[]))
        .env("TOLLGATE_KEY_SPENT", gateway.key("spent", &[]))
        .env("TOLLGATE_KEY_SCOPED", gateway.key("acme", &["--endpoint", "models"]));
    succeeds(command);
}

pub fn succeeds(mut command: Command) {
    let output = command.output().expect("it starts");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{}\n{said}", output.status);
    println!("{said}");
}

/// Returns the path of a tool that the gate installed.
#[allow(clippy::disallowed_methods, reason = "a test is told by the gate where its tools are")]
pub fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}
