//! Passes the version with the commit to the program: `0.1.0 (1a2b3c4d5e)`, or `0.1.0` where
//! the sources are no checkout.

use std::path::Path;
use std::process::Command;

#[expect(clippy::disallowed_methods, reason = "Cargo passes the version in the environment")]
fn main() {
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = match git(&["rev-parse", "--short=10", "HEAD"]) {
        Some(commit) => format!("{version} ({commit})"),
        None => version,
    };
    println!("cargo::rustc-env=TOLLGATE_VERSION={version}");
    println!("cargo::rerun-if-changed=build.rs");
    // Git appends a line for each change of HEAD. Cargo would run this at every build if it
    // watched a file that does not exist.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}

/// Returns the output of a git command; `None` if there is no git or no checkout here.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
