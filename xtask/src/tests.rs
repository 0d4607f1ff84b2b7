//! Builds every test once, runs each test program, and prints the slowest twenty tests.
//! The output of failed tests is printed once more at the end, where a reader of a log
//! looks first.
//!
//! This module starts the programs itself: the standard harness reports times only with
//! an unstable flag, which must not reach the compiler.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::gate::Scope;
use crate::run::{cargo, check, command, output};
use crate::tools;

/// A compiled test program and the package folder in which it runs.
struct TestProgram {
    path: PathBuf,
    folder: PathBuf,
    /// The package and the target, as `package/target`.
    name: String,
    target: String,
}

/// Builds and runs all tests of `scope`.
///
/// # Errors
///
/// The build failed, or tests failed; the text names the programs.
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
        // Long tests run last, so that a failure of a short test shows early.
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
    // Doc tests are compiled again by rustdoc; they run only if all other tests passed.
    eprintln!("the slowest twenty of {} tests:", times.len());
    for (seconds, name) in times.iter().take(20) {
        eprintln!("  {seconds:8.3} s  {name}");
    }
    if failed.is_empty() {
        return Ok(());
    }
    for failure in &failed {
        eprintln!("-- {} failed", failure.name);
        failure.lines.iter().for_each(|line| eprintln!("{line}"));
    }
    let names: Vec<&str> = failed.iter().map(|failure| failure.name.as_str()).collect();
    bail!("failed: {}", names.join(", "))
}

/// Reads the test programs out of cargo's JSON messages.
fn programs(messages: &str) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: serde_json::Value =
            serde_json::from_str(line).context("cargo printed a line that is not JSON")?;
        let is_test =
            message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let (true, Some(path)) = (is_test, message["executable"].as_str()) else { continue };
        let manifest = PathBuf::from(message["manifest_path"].as_str().unwrap_or_default());
        let folder = manifest.parent().context("a manifest's path has a parent")?.to_owned();
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

/// The arguments that select long tests: ignored tests in a module `long`. An ignored
/// test elsewhere is a helper that another test starts.
const LONG: [&str; 3] = ["--ignored", "long::", "--test-threads=1"];

/// Returns true if the program has at least one long test.
fn has_long(program: &TestProgram) -> Result<bool> {
    let mut list = command(&program.path.to_string_lossy());
    list.current_dir(&program.folder).args(["--list", "--ignored", "long::"]);
    Ok(output(&mut list)?.lines().any(|line| line.ends_with(": test")))
}

/// A test program that did not pass.
struct Failure {
    name: String,
    /// The lines of its output that describe the failed tests.
    lines: Vec<String>,
}

/// Runs one part of a program, prints its output and adds the time of each test to
/// `times`. Returns the failure, if there was one.
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
        // The stable harness accepts an unstable flag only with this variable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .stdout(Stdio::piped());
    tools::environment(&mut child, scope != Scope::Quick);
    let mut child = child.spawn().with_context(|| format!("could not start {}", program.name))?;
    let stdout = child.stdout.take().expect("stdout was piped above");
    let mut failure_lines = Vec::new();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("a test program's output")?;
        println!("{line}");
        if !failure_lines.is_empty() || line == "failures:" {
            failure_lines.push(line.clone());
        }
        if let Some((name, seconds)) = timed(&line) {
            times.push((seconds, format!("{}::{name}", program.name)));
        }
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(None);
    }
    if failure_lines.is_empty() {
        failure_lines.push(status.to_string());
    }
    Ok(Some(Failure { name, lines: failure_lines }))
}

/// Parses `test a::b ... ok <0.123s>` into the name and the seconds.
fn timed(line: &str) -> Option<(&str, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.split_once('<')?.1.strip_suffix("s>")?;
    Some((name, seconds.parse().ok()?))
}

#[cfg(test)]
mod unit {
    use super::{parts_of, timed};

    #[test]
    fn harness_lines_give_names_and_seconds() {
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
