//! The command line: the subcommands and their arguments.

use std::process::ExitCode;

use anyhow::Result;
use clap::{FromArgMatches, Parser, Subcommand};

use crate::common::say;
use crate::{
    admins, audit, chat, config, gateway, gateways, health, jobs, keys, ledger, loadtest, migrate,
    penalties, statement, tenants, up, usage, verify_limits, worker, workers,
};

/// Without a subcommand, tollgate runs `up`: the gateway, the ledger and one worker
/// for each device, with built-in defaults.
#[derive(Parser)]
#[command(name = "tollgate", version = env!("TOLLGATE_VERSION"), max_term_width = 80)]
#[command(args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    up: up::UpArguments,
}

/// A subcommand with its arguments.
#[derive(Subcommand)]
pub enum Command {
    /// Run the gateway, the ledger and one worker for each device (default).
    // Other servers of models call this `serve`.
    #[command(alias = "serve")]
    Up(up::UpArguments),
    /// Run the gateway and the ledger, with workers on other machines.
    Gateway(gateway::GatewayArguments),
    /// Run one worker process; `up` starts its own workers.
    Worker(Box<worker::WorkerArguments>),
    /// Check the workers on other machines, and make certificates for them.
    Workers(workers::WorkersArguments),
    /// List the gateways that share a database server, and give up a lost one.
    Gateways(gateways::GatewaysArguments),
    /// Create, list, rotate and revoke API keys.
    Keys(keys::KeysArguments),
    /// Create, list and revoke named admins with roles.
    Admins(admins::AdminsArguments),
    /// List tenants and show how much of each limit is used.
    Tenants(tenants::TenantsArguments),
    /// List and lift the penalties of a running gateway.
    Penalties(penalties::PenaltiesArguments),
    /// List, show and cancel the batches of a tenant.
    Jobs(jobs::JobsArguments),
    /// Ask the running gateway whether it is ready, for probes.
    Health(health::HealthArguments),
    /// Show the used device time by tenant, key and model.
    Usage(usage::UsageArguments),
    /// Print a tenant's monthly statement.
    Statement(statement::StatementArguments),
    /// Export, verify and prove the audit log.
    Audit(audit::AuditArguments),
    /// Check, back up, restore and archive the ledger.
    Ledger(ledger::LedgerArguments),
    /// Move the ledger from its file to a database server.
    Migrate(migrate::MigrateArguments),
    /// Check, show and describe the configuration.
    Config(config::ConfigArguments),
    /// Send open-loop load to a gateway, or run an attack drill.
    Loadtest(Box<loadtest::LoadtestArguments>),
    /// Test every configured limit with probe requests.
    VerifyLimits(verify_limits::VerifyLimitsArguments),
    /// Chat with a model from the terminal.
    Chat(chat::ChatArguments),
    /// Print a script that completes the commands in a shell.
    Completions(CompletionsArguments),
}

/// Print a script that completes the commands in a shell.
///
/// For bash: tollgate completions bash > /etc/bash_completion.d/tollgate
#[derive(clap::Args)]
pub struct CompletionsArguments {
    /// The shell.
    #[arg(value_name = "SHELL")]
    shell: clap_complete::Shell,
}

/// Prints the completions.
pub fn completions(arguments: CompletionsArguments) -> Result<()> {
    let mut script = Vec::new();
    let mut command = <CommandLine as clap::CommandFactory>::command();
    clap_complete::generate(arguments.shell, &mut command, "tollgate", &mut script);
    say(String::from_utf8(script)?)
}

/// Parses the command line. Prints a mistake or the help text and returns its exit
/// code.
pub fn parse() -> Result<Command, ExitCode> {
    let exit = |error: clap::Error| {
        // A closed terminal leaves nowhere to report the error.
        let _ = error.print();
        ExitCode::from(error.exit_code().clamp(0, 255) as u8)
    };
    let command = <CommandLine as clap::CommandFactory>::command();
    let matches = command.try_get_matches().map_err(exit)?;
    let line = CommandLine::from_arg_matches(&matches).map_err(exit)?;
    Ok(line.command.unwrap_or(Command::Up(line.up)))
}
