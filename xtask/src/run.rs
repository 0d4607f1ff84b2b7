//! Runs commands in the repository's root and prints each command.

#![expect(
    clippy::disallowed_methods,
    reason = "the wait for a program has a bound, and cargo tells its folder by the environment"
)]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Returns the repository's root.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate's folder has the root as its parent")
        .to_owned()
}

/// Returns the folder of build outputs, which is cargo's: `CARGO_TARGET_DIR`, or `target`.
pub fn target() -> PathBuf {
    let folder = std::env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty());
    // Cargo runs in the root, so a relative path begins there.
    root().join(folder.unwrap_or_else(|| "target".into()))
}

/// Returns a command for the `cargo` that started this program.
pub fn cargo() -> Command {
    command(env!("CARGO"))
}

/// Returns a command that runs in the root with an empty standard input.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// Runs a command to its end.
///
/// # Errors
///
/// The command did not start or did not succeed; the text shows the command.
pub fn check(command: &mut Command) -> Result<()> {
    let shown = show(command);
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("could not start: {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
///
/// The command did not start, did not succeed, or wrote bytes that are not UTF-8.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start: {shown}"))?;
    if !output.status.success() {
        bail!("{shown}: {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{shown}: output is not UTF-8"))
}

/// Returns true if the shell finds `program` on the PATH.
pub fn exists(program: &str) -> bool {
    Command::new("sh")
        // The name is an argument and not part of the script, so the shell does not
        // interpret it.
        .args(["-c", "command -v \"$0\" >/dev/null 2>&1", program])
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a named stage and prints its time.
///
/// # Errors
///
/// The error of the stage, with the stage's name.
pub fn stage(name: &str, part: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("== {name}");
    let started = Instant::now();
    part().with_context(|| format!("{name} failed"))?;
    eprintln!("== {name}: {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn show(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}
