//! The gate: cheap checks before dear ones, each a stage with its time.

use anyhow::Result;

use crate::run::{cargo, check, stage};
use crate::{tests, tidy, tools};

/// How much of the gate runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything that needs no GPU, tools installed first.
    Whole,
    /// What a clean machine can run at once, in a few minutes.
    Quick,
}

/// Runs the gate.
pub fn test(scope: Scope) -> Result<()> {
    let whole = scope == Scope::Whole;
    stage("format", || check(cargo().args(["fmt", "--all", "--check"])))?;
    stage("tidy", tidy::check)?;
    if whole {
        stage("tools", tools::install)?;
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
    eprintln!("the gate is passed");
    Ok(())
}
