//! The log. It goes to standard error: as lines on a terminal, and as JSON
//! elsewhere. `TOLLGATE_LOG` sets the filter (default `info`).

use std::io::IsTerminal;

use tollgate_gateway::telemetry::{LogFormat, LogOptions, log_subscriber};

/// Starts the log. Called once in the process.
pub fn start() {
    let format = match std::io::stderr().is_terminal() {
        false => LogFormat::Json,
        true if tollgate_config::wants_no_colours() => LogFormat::Plain,
        true => LogFormat::Coloured,
    };
    let filter = tollgate_config::log_filter();
    let chosen = log_subscriber(&LogOptions { format, filter }, std::io::stderr);
    // A wrong filter must not stop the gateway, so the default filter takes its
    // place.
    let subscriber = chosen.or_else(|error| {
        eprintln!("tollgate: TOLLGATE_LOG is invalid ({error}); using `info`");
        log_subscriber(&LogOptions { format, filter: String::new() }, std::io::stderr)
    });
    if let Ok(subscriber) = subscriber {
        // A second start would be a mistake without consequences.
        let _ = tracing::subscriber::set_global_default(subscriber);
    }
}
