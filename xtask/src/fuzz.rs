//! Fuzzing for a given time, either with the project's own mutations on the stable
//! toolchain, or with cargo-fuzz, which follows the code that an input reaches.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};

use crate::run::{cargo, check, command, exists, root};

const CARGO_FUZZ: &str = "0.13.2";
/// The mutations of each target in one run of the project's own fuzzer.
const MUTATIONS: &str = "20000";

/// Runs `fuzz [TARGET] [--seconds N] [--own]`.
///
/// # Errors
///
/// An argument is wrong, or the fuzzer found a failure.
pub fn run(words: &[&str]) -> Result<()> {
    let (mut target, mut seconds, mut own) = (None, 60, false);
    let mut words = words.iter();
    while let Some(&word) = words.next() {
        match word {
            "--own" => own = true,
            "--seconds" => {
                let count = words.next().context("--seconds needs a whole number")?;
                seconds = count.parse().context("--seconds needs a whole number")?;
            }
            name if !name.starts_with('-') && target.is_none() => target = Some(name),
            other => bail!("fuzz has no argument {other:?}; use [TARGET] [--seconds N] [--own]"),
        }
    }
    match (own, target) {
        (true, target) => run_own(target.unwrap_or_default(), Duration::from_secs(seconds)),
        (false, Some(target)) => run_cargo_fuzz(target, seconds),
        (false, None) => bail!("cargo-fuzz runs one target: name a target, or use --own"),
    }
}

/// Repeats runs, each with a new seed, until the time is over.
#[expect(clippy::disallowed_methods, reason = "the run has a bound")]
fn run_own(target: &str, time: Duration) -> Result<()> {
    let began = Instant::now();
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for seed in clock.as_nanos() as u64.. {
        check(
            cargo()
                .args(["test", "--locked", "-q", "-p", "tollgate-fuzz", "--test", "replay", "--"])
                .args(["--ignored", "on_demand"])
                .env("FUZZ_TARGET", target)
                .env("FUZZ_SEED", seed.to_string())
                .env("FUZZ_COUNT", MUTATIONS),
        )?;
        if began.elapsed() >= time {
            break;
        }
    }
    Ok(())
}

/// Runs cargo-fuzz on one target and installs cargo-fuzz if it is missing.
fn run_cargo_fuzz(target: &str, seconds: u64) -> Result<()> {
    if !exists("cargo-fuzz") {
        check(command("cargo").args([
            "install",
            "--locked",
            "cargo-fuzz",
            "--version",
            CARGO_FUZZ,
        ]))?;
    }
    let folder = root().join("fuzz/libfuzzer");
    // The dependencies get the versions of the product; cargo adds those of libFuzzer.
    std::fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    check(
        command("cargo")
            .args(["fuzz", "run", "--fuzz-dir"])
            .arg(&folder)
            .args(["--sanitizer", "none", target])
            .arg(crate::run::target().join("fuzz").join(target))
            .arg(root().join("fuzz/corpus").join(target))
            .args(["--", &format!("-max_total_time={seconds}"), "-rss_limit_mb=4096"])
            .env("RUSTC_BOOTSTRAP", "1"),
    )
}
