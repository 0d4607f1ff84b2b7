//! The gate: cheap checks before dear ones, each a stage with its time.

use anyhow::Result;

use crate::run::{cargo, check, root, stage};
use crate::{bench, tests, tidy, tools};

/// How much of the gate runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything that needs no GPU, tools installed first.
    Whole,
    /// The same, and then the tests that take too long for every day.
    Long,
    /// What a clean machine can run at once, in a few minutes.
    Quick,
}

/// Runs the gate.
pub fn test(scope: Scope) -> Result<()> {
    let whole = scope != Scope::Quick;
    stage("format", || check(cargo().args(["fmt", "--all", "--check"])))?;
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
    stage("tests", || tests::run(scope))?;
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
    if scope == Scope::Long {
        // Its figures of this machine go where they replace no others.
        let output = root().join("target/fairness.json");
        let output = output.to_string_lossy().into_owned();
        stage("fairness on a real clock", || bench::run("fairness", &["--output", &output]))?;
    }
    eprintln!("the gate is passed");
    Ok(())
}
