//! Fuzzing for as long as one likes: with our own mutations on the stable
//! toolchain, or with cargo-fuzz, which sees what code an input reaches.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};

use crate::run::{cargo, check, command, exists, root};

const CARGO_FUZZ: &str = "0.13.2";
/// Mutations of a target in one turn of our own.
const TURN: &str = "20000";

/// `fuzz [TARGET] [--seconds N] [--own]`
pub fn run(words: &[&str]) -> Result<()> {
    let (mut target, mut seconds, mut own) = (None, 60, false);
    let mut words = words.iter();
    while let Some(&word) = words.next() {
        match word {
            "--own" => own = true,
            "--seconds" => {
                let count = words.next().context("--seconds wants a number")?;
                seconds = count.parse().context("--seconds wants a number")?;
            }
            name if !name.starts_with('-') && target.is_none() => target = Some(name),
            other => bail!("fuzz does not understand {other:?}"),
        }
    }
    match (own, target) {
        (true, target) => run_own(target.unwrap_or_default(), Duration::from_secs(seconds)),
        (false, Some(target)) => run_cargo_fuzz(target, seconds),
        (false, None) => bail!("cargo-fuzz runs one target: name it, or say --own"),
    }
}

/// Turns with a new seed each until the time is over.
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
                .env("FUZZ_COUNT", TURN),
        )?;
        if began.elapsed() >= time {
            break;
        }
    }
    Ok(())
}

/// libFuzzer needs flags that the stable compiler takes only when told so.
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
    // The same versions as everything else; libFuzzer's own are added.
    std::fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    check(
        command("cargo")
            .args(["fuzz", "run", "--fuzz-dir"])
            .arg(&folder)
            .args(["--sanitizer", "none", target])
            .arg(root().join("target/fuzz").join(target))
            .arg(root().join("fuzz/corpus").join(target))
            .args(["--", &format!("-max_total_time={seconds}"), "-rss_limit_mb=4096"])
            .env("RUSTC_BOOTSTRAP", "1"),
    )
}
