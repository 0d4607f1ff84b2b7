//! Builds every test once, runs each test program and prints the slowest
//! twenty tests, and what the failed ones said once more, so that the end of
//! a log tells why. It starts the programs itself, because the standard harness
//! reports times only when asked with an unstable flag, which must not reach
//! the compiler.

use std::collections::BTreeMap;
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
    /// Package and target.
    name: String,
    target: String,
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
        for (part, arguments) in parts(program)? {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            failed.extend(run_program(program, (&part, &arguments), scope, &mut times)?);
        }
    }
    if scope == Scope::Long {
        for program in &programs {
            if has_long(program)? {
                failed.extend(run_program(program, ("long", &LONG), scope, &mut times)?);
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
            target: target.to_owned(),
        });
    }
    if programs.is_empty() {
        bail!("cargo built no test program");
    }
    Ok(programs)
}

/// Returns the parts in which a program's tests run, each with the arguments that
/// select it: one part for each module of the whole-system tests, one part with
/// everything for any other program.
///
/// Modules of the whole-system tests run one after the other because several of
/// them judge latencies and keep both cores busy.
fn parts(program: &TestProgram) -> Result<BTreeMap<String, Vec<String>>> {
    if program.target != WHOLE_SYSTEM {
        return Ok(BTreeMap::from([(String::new(), Vec::new())]));
    }
    let mut list = command(&program.path.to_string_lossy());
    list.current_dir(&program.folder).arg("--list");
    Ok(parts_of(&output(&mut list)?))
}

/// Groups listed tests by the first segment of their paths.
fn parts_of(listed: &str) -> BTreeMap<String, Vec<String>> {
    let mut parts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in listed.lines().filter_map(|line| line.strip_suffix(": test")) {
        let module = test.split("::").next().unwrap_or(test);
        // Exact names, because "limits::" would select "verify_limits::", too.
        let tests = parts.entry(module.to_owned()).or_insert_with(|| vec!["--exact".to_owned()]);
        tests.push(test.to_owned());
    }
    parts
}

/// The target name of the whole-system tests.
const WHOLE_SYSTEM: &str = "it";

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

/// Runs one part of a program, passes its output on and notes the time of each
/// test. Returns the failure, if there was one.
fn run_program(
    program: &TestProgram,
    (part, arguments): (&str, &[&str]),
    scope: Scope,
    times: &mut Vec<(f64, String)>,
) -> Result<Option<Failure>> {
    let name = [program.name.as_str(), part].join(" ").trim_end().to_owned();
    eprintln!("-- {name}");
    let mut child: Command = command(&program.path.to_string_lossy());
    child
        .current_dir(&program.folder)
        .args(["-Zunstable-options", "--report-time"])
        .args(arguments)
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
    Ok(Some(Failure { name, said }))
}

/// `test a::b ... ok <0.123s>` as its name and seconds.
fn timed(line: &str) -> Option<(&str, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.split_once('<')?.1.strip_suffix("s>")?;
    Some((name, seconds.parse().ok()?))
}

#[cfg(test)]
mod unit {
    use super::{parts_of, timed};

    #[test]
    fn reads_the_harness() {
        assert_eq!(timed("test a::b ... ok <0.125s>"), Some(("a::b", 0.125)));
        assert_eq!(timed("test a::b ... ok"), None);
        assert_eq!(timed("running 3 tests"), None);
    }

    #[test]
    fn parts_hold_the_tests_of_one_module_each() {
        let listed = "limits::a: test\nverify_limits::b: test\nlimits::long::c: test\n\n3 tests";
        let parts: Vec<(String, Vec<String>)> = parts_of(listed).into_iter().collect();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(
            parts,
            [
                ("limits".to_owned(), names(&["--exact", "limits::a", "limits::long::c"])),
                ("verify_limits".to_owned(), names(&["--exact", "verify_limits::b"])),
            ]
        );
    }
}
