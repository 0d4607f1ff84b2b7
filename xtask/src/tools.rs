//! What the gate needs beside Rust and gcc: Debian packages, the OpenAI SDKs
//! and the compiler of GPU kernels in folders of their own under
//! `target/tools`, and cargo-deny.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::run::{check, command, exists, root};

/// Debian packages by the program that shows they are there.
const DEBIAN: [(&str, &str); 9] = [
    ("curl", "curl"),
    ("faketime", "faketime"),
    ("g++", "g++"),
    ("h2load", "nghttp2-client"),
    ("python3", "python3"),
    ("node", "nodejs"),
    ("npm", "npm"),
    ("openssl", "openssl"),
    ("slowhttptest", "slowhttptest"),
];

/// Those that only the long tests need.
const DEBIAN_FOR_LONG: [(&str, &str); 2] =
    [("testssl", "testssl.sh"), ("hexdump", "bsdextrautils")];

/// The SDKs that are tested, pinned: the API promises to work with them
/// unmodified.
const PYTHON_SDK: &str = "openai==3.52.0";
/// Compiles kernels for GPUs on machines that have none. The first of CUDA 13:
/// what it accepts, those after it do.
const NVRTC: &str = "nvidia-cuda-nvrtc==13.0.88";
const NODE_SDK: &str = "openai@6.49.0";
const CARGO_DENY: &str = "0.20.2";

/// Installs what is missing; what is there is left alone.
pub fn install() -> Result<()> {
    debian()?;
    python()?;
    node()?;
    if !exists("cargo-deny") {
        check(command("cargo").args([
            "install",
            "--locked",
            "cargo-deny",
            "--version",
            CARGO_DENY,
        ]))?;
    }
    Ok(())
}

/// Tells a test program where the tools are. In the gate a missing tool is a
/// failure; elsewhere a test that needs one says why it did not run.
pub fn environment(child: &mut Command, in_gate: bool) {
    child.env("TOLLGATE_PYTHON", python_folder().join("bin/python"));
    child.env("TOLLGATE_NODE_MODULES", node_folder().join("node_modules"));
    if in_gate {
        child.env("TOLLGATE_GATE", "1");
    }
}

/// Checks licences, bans and sources; and advisories where their database
/// can be fetched, which is said when it cannot.
pub fn deny() -> Result<()> {
    check(command("cargo").args(["deny", "--locked", "check", "bans", "licenses", "sources"]))?;
    let advisories = command("cargo").args(["deny", "--locked", "check", "advisories"]).output()?;
    let said = String::from_utf8_lossy(&advisories.stderr);
    if advisories.status.success() {
        return Ok(());
    }
    if said.contains("failed to fetch advisory database") {
        eprintln!("advisories not checked: their database cannot be fetched from here");
        return Ok(());
    }
    eprintln!("{said}");
    anyhow::bail!("cargo deny check advisories: {}", advisories.status)
}

/// Installs what only the long tests need.
pub fn install_for_long() -> Result<()> {
    packages(&missing(&DEBIAN_FOR_LONG))
}

fn debian() -> Result<()> {
    let venv = Command::new("python3").args(["-c", "import ensurepip, venv"]).output();
    let mut wanted = missing(&DEBIAN);
    if !venv.is_ok_and(|output| output.status.success()) {
        wanted.push("python3-venv");
    }
    packages(&wanted)
}

fn missing(wanted: &[(&'static str, &'static str)]) -> Vec<&'static str> {
    wanted.iter().filter(|(program, _)| !exists(program)).map(|&(_, package)| package).collect()
}

fn packages(missing: &[&str]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    check(command("apt-get").args(["update", "-q"]))?;
    check(
        command("apt-get")
            .args(["install", "-q", "-y", "--no-install-recommends"])
            .args(missing)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )
}

fn python() -> Result<()> {
    let folder = python_folder();
    let wanted = format!("{PYTHON_SDK} {NVRTC}");
    if !holds(&folder, &wanted) {
        check(command("python3").args(["-m", "venv"]).arg(&folder))?;
        let python = folder.join("bin/python");
        let pip = ["-m", "pip", "install", "-q"];
        check(command(&python.to_string_lossy()).args(pip).args([PYTHON_SDK, NVRTC]))?;
        mark(&folder, &wanted)?;
    }
    Ok(())
}

/// The folder of the compiler for GPUs' kernels, installed if it is missing.
pub fn nvrtc() -> Result<PathBuf> {
    python()?;
    let versions = std::fs::read_dir(python_folder().join("lib"))?;
    versions
        .flatten()
        .map(|version| version.path().join("site-packages/nvidia/cu13/lib"))
        .find(|folder| folder.is_dir())
        .context("the Python environment has no NVRTC")
}

fn node() -> Result<()> {
    let folder = node_folder();
    if !holds(&folder, NODE_SDK) {
        std::fs::create_dir_all(&folder)?;
        check(
            command("npm")
                .args(["install", "--no-fund", "--no-audit", "--silent", "--prefix"])
                .arg(&folder)
                .arg(NODE_SDK),
        )?;
        mark(&folder, NODE_SDK)?;
    }
    Ok(())
}

fn python_folder() -> PathBuf {
    root().join("target/tools/python")
}

fn node_folder() -> PathBuf {
    root().join("target/tools/node")
}

/// A finished install says what it holds, so that a torn one is made again.
fn holds(folder: &std::path::Path, what: &str) -> bool {
    std::fs::read_to_string(folder.join("installed")).is_ok_and(|text| text == what)
}

fn mark(folder: &std::path::Path, what: &str) -> Result<()> {
    std::fs::write(folder.join("installed"), what)
        .with_context(|| format!("could not mark {}", folder.display()))
}
