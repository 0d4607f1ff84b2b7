//! The project's own commands: `cargo xtask test` is the gate, the same on a
//! laptop and in CI. Nothing here is part of the product.
#![allow(unreachable_pub, reason = "a program has no API; pub says what a module offers")]

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
                    (--quick: no installs, no whole-system tests; --long: then
                    the tests that take too long for every day, about an hour)
  ci                the gate as CI runs it: every tool must be there
  tools             install what the gate needs, and nothing else
  tidy              import directions, module headers, links in documents
  bench NAME        a benchmark: gateway, refusal, engine, ledger, peers,
                    tenants, fairness, drills
                    (release build; writes docs/benchmarks/)
  fuzz TARGET [--seconds N]
                    cargo-fuzz on one target, 60 seconds unless told
                    (--own: our own mutations, of all targets if none is named)
  gpu-check         pack target/gpu-check, whose `run --out DIR` sees what a GPU
                    makes of all this, where there is no Rust and no network
  goldens           reference logits, written anew with transformers
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
