//! The log goes to standard error: lines for people on a terminal, JSON
//! elsewhere. `TOLLGATE_LOG` sets the filter (`info` unless given).

use std::io::IsTerminal;

use tollgate_gateway::telemetry::{LogFormat, LogOptions, log_subscriber};

/// Starts the log, once for the process.
pub fn start() {
    let format = if std::io::stderr().is_terminal() { LogFormat::Pretty } else { LogFormat::Json };
    let filter = tollgate_config::log_filter();
    let chosen = log_subscriber(&LogOptions { format, filter }, std::io::stderr);
    let subscriber = chosen.or_else(|error| {
        eprintln!("tollgate: TOLLGATE_LOG: {error}; `info` is used");
        log_subscriber(&LogOptions { format, filter: String::new() }, std::io::stderr)
    });
    if let Ok(subscriber) = subscriber {
        // A second start in one process would be a bug without consequence.
        let _ = tracing::subscriber::set_global_default(subscriber);
    }
}
