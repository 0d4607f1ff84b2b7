//! The command line: what each subcommand is called, and how a result becomes
//! an exit code.

use std::process::ExitCode;

use clap::{FromArgMatches, Parser, Subcommand};

use crate::{
    audit, chat, config, keys, ledger, loadtest, penalties, statement, up, usage, verify_limits,
    worker,
};

/// A multi-tenant inference gateway that limits, batches and bills by GPU time.
///
/// Without a command it is `tollgate up`: gateway, ledger and one worker for
/// each device, on embedded defaults.
#[derive(Parser)]
#[command(name = "tollgate", version, args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    up: up::Arguments,
}

/// One subcommand and its arguments.
#[derive(Subcommand)]
pub enum Command {
    /// Serve: gateway, ledger and one worker process for each device (the default).
    Up(up::Arguments),
    /// One worker process; `up` starts it.
    Worker(Box<worker::Arguments>),
    /// Create, list, rotate and revoke API keys.
    Keys(keys::Arguments),
    /// List and lift the penalties of a running gateway.
    Penalties(penalties::Arguments),
    /// Who used how much device time.
    Usage(usage::Arguments),
    /// What a tenant owes for a month, each line traceable to its entries.
    Statement(statement::Arguments),
    /// Export, verify and prove the audit log.
    Audit(audit::Arguments),
    /// Check, back up, restore and archive the ledger.
    Ledger(ledger::Arguments),
    /// Check, show and describe the configuration.
    Config(config::Arguments),
    /// Send open-loop load to a gateway, or play an attack drill.
    Loadtest(loadtest::Arguments),
    /// Probe every configured limit with canary traffic.
    VerifyLimits(verify_limits::Arguments),
    /// Ask a model from the terminal.
    Chat(chat::Arguments),
}

/// Reads the command line; a mistake or `--help` is printed and is an exit.
pub fn parse() -> Result<Command, ExitCode> {
    let exit = |error: clap::Error| {
        // Nothing can be said if even the terminal is gone.
        let _ = error.print();
        ExitCode::from(error.exit_code().clamp(0, 255) as u8)
    };
    let command = <CommandLine as clap::CommandFactory>::command();
    let matches = command.try_get_matches().map_err(exit)?;
    let line = CommandLine::from_arg_matches(&matches).map_err(exit)?;
    Ok(line.command.unwrap_or(Command::Up(line.up)))
}
