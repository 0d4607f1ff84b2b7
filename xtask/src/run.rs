//! Runs commands in the repository's root and says what it ran.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// The repository's root.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root").to_owned()
}

/// `cargo` as it was called.
pub fn cargo() -> Command {
    command(env!("CARGO"))
}

/// A command that runs in the root.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// Runs to the end; anything but success is an error that shows the command.
pub fn check(command: &mut Command) -> Result<()> {
    let shown = show(command);
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("could not start: {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Runs to the end and returns its standard output.
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

/// Whether `program` can be started at all.
pub fn exists(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", "command -v \"$0\" >/dev/null 2>&1", program])
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a named part of the gate and prints how long it took.
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
