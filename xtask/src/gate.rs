//! The gate: a list of stages, cheap checks before expensive ones. Each stage prints
//! its time.

use anyhow::Result;

use crate::run::{cargo, check, stage, target};
use crate::{bench, tests, tidy, tools};

/// The amount of the gate that runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All stages that need no GPU, with the installation of tools.
    Whole,
    /// All stages of `Whole`, then the tests that take too long for every day.
    Long,
    /// The stages that a clean machine can run at once, in a few minutes.
    Quick,
}

/// Runs the stages of `scope` in order and stops at the first that fails.
///
/// # Errors
///
/// The stage that failed, with its cause.
pub fn test(scope: Scope) -> Result<()> {
    let whole = scope != Scope::Quick;
    stage("format", || check(cargo().args(["fmt", "--all", "--check"])))?;
    // Tidy needs no build, so a broken rule shows within seconds.
    stage("tidy", tidy::check)?;
    if whole {
        stage("tools", tools::install)?;
    }
    if scope == Scope::Long {
        stage("tools of the long tests", tools::install_for_long)?;
    }
    stage("lints", || {
        check(cargo().args([
            "clippy",
            "--locked",
            "--workspace",
            "--all-targets",
            "--",
            "-Dwarnings",
        ]))
    })?;
    // Before the tests, which take most of the time.
    if whole {
        stage("documentation", || {
            check(
                cargo()
                    .args(["doc", "--locked", "--workspace", "--no-deps"])
                    .env("RUSTDOCFLAGS", "-Dwarnings"),
            )
        })?;
        stage("dependency policy", tools::deny)?;
    }
    stage("tests", || tests::run(scope))?;
    if scope == Scope::Long {
        // The files lie under `target/`, so the committed figures of another machine
        // stay.
        let drills = target().join("drills.json");
        let drills = drills.to_string_lossy().into_owned();
        stage("shipped drills", || bench::run("drills", &["--soak", "--output", &drills]))?;
        let output = target().join("fairness.json");
        let output = output.to_string_lossy().into_owned();
        stage("fairness on a real clock", || bench::run("fairness", &["--output", &output]))?;
    }
    eprintln!("the gate passed");
    Ok(())
}
