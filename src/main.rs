//! The program `tollgate`. Each module is one subcommand.
#![allow(unreachable_pub, reason = "a program has no API; `pub` marks the interface of a module")]

use std::process::ExitCode;

mod admin;
mod admins;
mod audit;
mod chat;
mod cli;
mod common;
mod config;
mod data;
mod databases;
mod gateway;
mod gateways;
mod health;
mod jobs;
mod keys;
mod ledger;
mod loadtest;
mod logging;
mod manifest;
mod memory;
mod migrate;
mod own_gateway;
mod penalties;
mod progress;
mod statement;
mod tenants;
mod up;
mod usage;
mod verify_limits;
mod worker;
mod workers;

fn main() -> ExitCode {
    memory::bound_arenas();
    let command = match cli::parse() {
        Ok(command) => command,
        Err(exit) => return exit,
    };
    // Before any file is made and any worker is started: workers inherit the umask.
    data::keep_files_private();
    let result = match command {
        cli::Command::Up(arguments) => up::run(arguments),
        cli::Command::Gateway(arguments) => gateway::run(arguments),
        cli::Command::Workers(arguments) => return workers::run(arguments),
        cli::Command::Worker(arguments) => return worker::run(*arguments),
        cli::Command::Keys(arguments) => keys::run(arguments),
        cli::Command::Admins(arguments) => admins::run(arguments),
        cli::Command::Tenants(arguments) => tenants::run(arguments),
        cli::Command::Penalties(arguments) => penalties::run(arguments),
        cli::Command::Gateways(arguments) => gateways::run(arguments),
        cli::Command::Jobs(arguments) => jobs::run(arguments),
        cli::Command::Health(arguments) => health::run(arguments),
        cli::Command::Usage(arguments) => usage::run(arguments),
        cli::Command::Statement(arguments) => statement::run(arguments),
        cli::Command::Audit(arguments) => audit::run(arguments),
        cli::Command::Ledger(arguments) => return ledger::run(arguments),
        cli::Command::Migrate(arguments) => migrate::run(arguments),
        cli::Command::Config(arguments) => config::run(arguments),
        cli::Command::Loadtest(arguments) => return loadtest::run(*arguments),
        cli::Command::VerifyLimits(arguments) => return verify_limits::run(arguments),
        cli::Command::Chat(arguments) => return chat::run(arguments),
        cli::Command::Completions(arguments) => cli::completions(arguments),
    };
    common::exit(result)
}
