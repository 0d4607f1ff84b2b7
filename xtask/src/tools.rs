//! Tools that the gate needs besides Rust and gcc: Debian packages, the OpenAI SDKs,
//! Schemathesis, the compiler of GPU kernels, and cargo-deny. The Python and Node packages lie in
//! folders of their own under `target/tools`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::run::{check, command, exists, target};

/// Pairs of a program and the Debian package that installs the program.
const DEBIAN: [(&str, &str); 15] = [
    ("buildah", "buildah"),
    ("busybox", "busybox-static"),
    ("bwrap", "bubblewrap"),
    ("curl", "curl"),
    ("faketime", "faketime"),
    ("g++", "g++"),
    ("h2load", "nghttp2-client"),
    ("python3", "python3"),
    ("node", "nodejs"),
    ("npm", "npm"),
    ("openssl", "openssl"),
    ("redis-server", "redis-server"),
    ("slowhttptest", "slowhttptest"),
    ("systemd-analyze", "systemd"),
    ("systemd-nspawn", "systemd-container"),
];

/// Pairs of a program and its Debian package that only the long tests need.
const DEBIAN_FOR_LONG: [(&str, &str); 2] =
    [("testssl", "testssl.sh"), ("hexdump", "bsdextrautils")];

/// The Python SDK under test, pinned, because the API promises to work with this SDK
/// unmodified.
const PYTHON_SDK: &str = "openai==3.52.0";
/// The program that checks the API against its OpenAPI document.
const SCHEMATHESIS: &str = "schemathesis==4.32.5";
/// The compiler of GPU kernels, which needs no GPU. The version is the first of CUDA
/// 13, because later versions accept every kernel that this version accepts.
const NVRTC: &str = "nvidia-cuda-nvrtc==13.0.88";
const NODE_SDK: &str = "openai@6.49.0";
/// Client libraries that the long tests use unmodified.
const PYTHON_LIBRARIES: [&str; 7] = [
    "instructor==1.17.0",
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "llama-index-llms-openai-like==0.8.1",
    "openai-agents==0.20.0",
    "openai==2.54.0",
    "pydantic-ai-slim[openai]==2.31.1",
];
const NODE_LIBRARIES: [&str; 4] =
    ["@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "ai@6.0.326", "zod@4.6.7"];
const CARGO_DENY: &str = "0.20.2";

/// Installs the tools that are missing and leaves the others unchanged.
///
/// # Errors
///
/// A package manager failed.
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

/// Sets the variables by which a test program finds the tools. In the gate a missing
/// tool is a failure; elsewhere a test prints why it did not run.
pub fn environment(child: &mut Command, in_gate: bool) {
    child.env("TOLLGATE_PYTHON", python_folder().join("bin/python"));
    child.env("TOLLGATE_NODE_MODULES", node_folder().join("node_modules"));
    let libraries = python_folder().with_extension("libraries");
    child.env("TOLLGATE_LIBRARIES_PYTHON", libraries.join("bin/python"));
    let libraries = node_folder().with_extension("libraries");
    child.env("TOLLGATE_LIBRARIES_NODE", libraries.join("node_modules"));
    if in_gate {
        child.env("TOLLGATE_GATE", "1");
    }
}

/// Checks licences, bans and sources. Checks advisories, too, if their database can be
/// fetched; otherwise prints that they were not checked.
///
/// # Errors
///
/// A dependency breaks the policy.
pub fn deny() -> Result<()> {
    check(command("cargo").args(["deny", "--locked", "check", "bans", "licenses", "sources"]))?;
    let advisories = command("cargo").args(["deny", "--locked", "check", "advisories"]).output()?;
    let errors = String::from_utf8_lossy(&advisories.stderr);
    if advisories.status.success() {
        return Ok(());
    }
    if errors.contains("failed to fetch advisory database") {
        eprintln!("advisories were not checked: their database cannot be fetched");
        return Ok(());
    }
    eprintln!("{errors}");
    anyhow::bail!("cargo deny check advisories: {}", advisories.status)
}

/// Installs the tools that only the long tests need.
///
/// # Errors
///
/// The package manager failed.
pub fn install_for_long() -> Result<()> {
    packages(&missing(&DEBIAN_FOR_LONG))?;
    python_packages(&python_folder().with_extension("libraries"), &PYTHON_LIBRARIES)?;
    node_packages(&node_folder().with_extension("libraries"), &NODE_LIBRARIES)
}

/// The folder in which Debian installs the programs of PostgreSQL, which are on no PATH.
const POSTGRES: &str = "/usr/lib/postgresql";
/// The file that tells Debian's package whether to make a database and to start it.
const POSTGRES_CONFIG: &str = "/etc/postgresql-common/createcluster.conf";

fn debian() -> Result<()> {
    // Debian's python3 has these modules only with a further package.
    let venv = Command::new("python3").args(["-c", "import ensurepip, venv"]).output();
    let mut wanted = missing(&DEBIAN);
    if !venv.is_ok_and(|output| output.status.success()) {
        wanted.push("python3-venv");
    }
    if !Path::new(POSTGRES).exists() {
        // The tests start servers of their own.
        let config = Path::new(POSTGRES_CONFIG);
        if !config.exists() {
            fs::create_dir_all(config.parent().unwrap_or(config))?;
            fs::write(config, "create_main_cluster = false\n")?;
        }
        wanted.push("postgresql");
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
            // A configuration file that is here already stays.
            .args(["-o", "Dpkg::Options::=--force-confold"])
            .args(missing)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )
}

fn python() -> Result<()> {
    python_packages(&python_folder(), &[PYTHON_SDK, SCHEMATHESIS, NVRTC])
}

/// Installs Python packages in an environment of their own.
fn python_packages(folder: &Path, packages: &[&str]) -> Result<()> {
    let wanted = packages.join(" ");
    if !is_installed(folder, &wanted) {
        check(command("python3").args(["-m", "venv"]).arg(folder))?;
        let python = folder.join("bin/python");
        let pip = ["-m", "pip", "install", "-q"];
        check(command(&python.to_string_lossy()).args(pip).args(packages))?;
        mark_installed(folder, &wanted)?;
    }
    Ok(())
}

/// Returns the folder of the compiler for GPU kernels and installs the compiler if it
/// is missing.
///
/// # Errors
///
/// The installation failed or has no such folder.
pub fn nvrtc() -> Result<PathBuf> {
    python()?;
    let versions = fs::read_dir(python_folder().join("lib"))?;
    versions
        .flatten()
        .map(|version| version.path().join("site-packages/nvidia/cu13/lib"))
        .find(|folder| folder.is_dir())
        .context("the Python environment has no NVRTC")
}

fn node() -> Result<()> {
    node_packages(&node_folder(), &[NODE_SDK])
}

/// Installs Node packages in a folder of their own.
fn node_packages(folder: &Path, packages: &[&str]) -> Result<()> {
    let wanted = packages.join(" ");
    if !is_installed(folder, &wanted) {
        fs::create_dir_all(folder)?;
        check(
            command("npm")
                .args(["install", "--no-fund", "--no-audit", "--silent", "--prefix"])
                .arg(folder)
                .args(packages),
        )?;
        mark_installed(folder, &wanted)?;
    }
    Ok(())
}

fn python_folder() -> PathBuf {
    target().join("tools/python")
}

fn node_folder() -> PathBuf {
    target().join("tools/node")
}

/// Returns true if `folder` has a finished installation of `what`. An installation
/// writes this mark last, so an interrupted one is repeated.
fn is_installed(folder: &Path, what: &str) -> bool {
    fs::read_to_string(folder.join("installed")).is_ok_and(|text| text == what)
}

fn mark_installed(folder: &Path, what: &str) -> Result<()> {
    fs::write(folder.join("installed"), what)
        .with_context(|| format!("could not mark {}", folder.display()))
}
