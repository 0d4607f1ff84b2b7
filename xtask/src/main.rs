//! The project's own commands. `cargo xtask test` is the gate, which is the same on a
//! laptop and in CI. No part of this crate belongs to the product.
#![allow(clippy::expect_used, reason = "a tool stops at a defect of its own")]
#![allow(unreachable_pub, reason = "a program has no API; pub marks what a module offers")]

use std::process::ExitCode;

use anyhow::{Result, bail};

mod bench;
mod fuzz;
mod gate;
mod goldens;
mod gpu_check;
mod run;
mod tests;
mod tidy;
mod tools;

const USAGE: &str = "\
cargo xtask COMMAND

  test [--quick|--long]
                    the gate: installs what it needs, then format, tidy, lints,
                    tests, documentation, dependency policy
                    (--quick: no installs and no whole-system tests;
                    --long: also the tests that take about an hour)
  ci                the gate as CI runs it: a missing tool is an error
  tools             install the tools that the gate needs
  tidy              check import directions, module headers, names, links
  bench NAME        run a benchmark: gateway, refusal, engine, grammar, ledger, peers,
                    tenants, fairness, drills
                    (release build; writes docs/benchmarks/)
  fuzz TARGET [--seconds N]
                    run cargo-fuzz on one target for N seconds (60)
                    (--own: the project's own mutations; without TARGET,
                    of all targets)
  gpu-check         pack target/gpu-check; its `run --out DIR` tests the
                    product on a GPU machine without Rust or network
  goldens           write the reference logits again with transformers
";

fn main() -> ExitCode {
    match dispatch() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["test"] => gate::test(gate::Scope::Whole),
        ["test", "--quick"] => gate::test(gate::Scope::Quick),
        ["test", "--long"] => gate::test(gate::Scope::Long),
        ["ci"] => gate::test(gate::Scope::Whole),
        ["tools"] => tools::install(),
        ["tidy"] => tidy::check(),
        ["bench", name, rest @ ..] => bench::run(name, rest),
        ["goldens"] => goldens::write(),
        ["gpu-check"] => gpu_check::pack(),
        ["fuzz", rest @ ..] => fuzz::run(rest),
        [] | ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            Ok(())
        }
        other => bail!("no such command: {}\n\n{USAGE}", other.join(" ")),
    }
}
