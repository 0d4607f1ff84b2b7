//! Builds every test once, runs each test program and prints the slowest
//! twenty tests, and what the failed ones said once more, so that the end of
//! a log tells why. It starts the programs itself, because the standard harness
//! reports times only when asked with an unstable flag, which must not reach
//! the compiler.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::gate::Scope;
use crate::run::{cargo, check, command, output};
use crate::tools;

/// A compiled test program and the package folder it runs in.
struct TestProgram {
    path: PathBuf,
    folder: PathBuf,
    name: String,
}

/// Builds and runs all tests of `scope`.
pub fn run(scope: Scope) -> Result<()> {
    let mut build = cargo();
    build.args(["test", "--locked", "--workspace", "--no-run", "--message-format=json"]);
    if scope == Scope::Quick {
        build.args(["--lib", "--bins"]);
    }
    let programs = programs(&output(&mut build)?)?;
    let mut times = Vec::new();
    let mut failed = Vec::new();
    for program in &programs {
        failed.extend(run_program(program, scope, &[], &mut times)?);
    }
    if scope == Scope::Long {
        for program in &programs {
            if has_long(program)? {
                failed.extend(run_program(program, scope, &LONG, &mut times)?);
            }
        }
    }
    if scope != Scope::Quick && failed.is_empty() {
        check(cargo().args(["test", "--locked", "--workspace", "--doc"]))?;
    }
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    eprintln!("the slowest twenty of {} tests:", times.len());
    for (seconds, name) in times.iter().take(20) {
        eprintln!("  {seconds:8.3} s  {name}");
    }
    if failed.is_empty() {
        return Ok(());
    }
    for failure in &failed {
        eprintln!("-- {} failed", failure.name);
        failure.said.iter().for_each(|line| eprintln!("{line}"));
    }
    let names: Vec<&str> = failed.iter().map(|failure| failure.name.as_str()).collect();
    bail!("failed: {}", names.join(", "))
}

fn programs(messages: &str) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: serde_json::Value =
            serde_json::from_str(line).context("cargo printed something that is not JSON")?;
        let is_test =
            message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let (true, Some(path)) = (is_test, message["executable"].as_str()) else { continue };
        let manifest = PathBuf::from(message["manifest_path"].as_str().unwrap_or_default());
        let folder = manifest.parent().context("a manifest lies in a folder")?.to_owned();
        let package = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let target = message["target"]["name"].as_str().unwrap_or("?");
        programs.push(TestProgram {
            path: path.into(),
            folder,
            name: format!("{package}/{target}"),
        });
    }
    if programs.is_empty() {
        bail!("cargo built no test program");
    }
    Ok(programs)
}

/// Long tests are ignored ones in a module `long`: an ignored test elsewhere is
/// part of another one.
const LONG: [&str; 3] = ["--ignored", "long::", "--test-threads=1"];

fn has_long(program: &TestProgram) -> Result<bool> {
    let mut list = command(&program.path.to_string_lossy());
    list.current_dir(&program.folder).args(["--list", "--ignored", "long::"]);
    Ok(output(&mut list)?.lines().any(|line| line.ends_with(": test")))
}

/// A test program that did not pass.
struct Failure {
    name: String,
    /// The end of its output that tells about failed tests.
    said: Vec<String>,
}

/// Runs one program, its output passed on and the time of each test noted; how
/// it failed, if it did.
fn run_program(
    program: &TestProgram,
    scope: Scope,
    words: &[&str],
    times: &mut Vec<(f64, String)>,
) -> Result<Option<Failure>> {
    eprintln!("-- {}", program.name);
    let mut child: Command = command(&program.path.to_string_lossy());
    child
        .current_dir(&program.folder)
        .args(["-Zunstable-options", "--report-time"])
        .args(words)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .stdout(Stdio::piped());
    tools::environment(&mut child, scope != Scope::Quick);
    let mut child = child.spawn().with_context(|| format!("could not start {}", program.name))?;
    let stdout = child.stdout.take().expect("it was piped");
    let mut said = Vec::new();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("a test program's output")?;
        println!("{line}");
        if !said.is_empty() || line == "failures:" {
            said.push(line.clone());
        }
        if let Some((name, seconds)) = timed(&line) {
            times.push((seconds, format!("{}::{name}", program.name)));
        }
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(None);
    }
    if said.is_empty() {
        said.push(status.to_string());
    }
    Ok(Some(Failure { name: [&[program.name.as_str()], words].concat().join(" "), said }))
}

/// `test a::b ... ok <0.123s>` as its name and seconds.
fn timed(line: &str) -> Option<(&str, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.split_once('<')?.1.strip_suffix("s>")?;
    Some((name, seconds.parse().ok()?))
}

#[cfg(test)]
mod unit {
    use super::timed;

    #[test]
    fn reads_the_harness() {
        assert_eq!(timed("test a::b ... ok <0.125s>"), Some(("a::b", 0.125)));
        assert_eq!(timed("test a::b ... ok"), None);
        assert_eq!(timed("running 3 tests"), None);
    }
}
