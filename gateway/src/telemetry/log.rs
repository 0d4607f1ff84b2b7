//! The log: one JSON object a line, or lines for people. Both formats escape
//! control bytes, so that no client can forge a line.

use std::fmt::Write as _;
use std::io;

use tracing::Subscriber;
use tracing_subscriber::filter::{EnvFilter, ParseError};
use tracing_subscriber::layer::SubscriberExt as _;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// Lines for people to read.
    #[default]
    Pretty,
}

/// The format and the filter of the log.
#[derive(Clone, Debug, Default)]
pub struct LogOptions {
    /// The format of lines.
    pub format: LogFormat,
    /// A filter such as `info` or `info,tollgate_gateway=debug`. An empty filter
    /// means `info` without the libraries' lines about misbehaving peers.
    pub filter: String,
}

/// Builds a subscriber that writes to the values that `writer` makes, such as
/// `std::io::stderr`. The binary installs the subscriber once.
///
/// # Errors
/// The filter has a syntax error.
pub fn log_subscriber<W, F>(
    options: &LogOptions,
    writer: F,
) -> Result<Box<dyn Subscriber + Send + Sync>, ParseError>
where
    W: io::Write + 'static,
    F: Fn() -> W + Send + Sync + 'static,
{
    let filter = if options.filter.is_empty() { FILTER } else { &options.filter };
    let registry = tracing_subscriber::registry().with(EnvFilter::try_new(filter)?);
    let lines =
        // Without colours: `Escaping` would turn their control bytes into visible text.
        tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || Escaping(writer()));
    Ok(match options.format {
        LogFormat::Json => {
            Box::new(registry.with(lines.json().flatten_event(true).with_current_span(false)))
        }
        LogFormat::Pretty => Box::new(registry.with(lines.compact())),
    })
}

/// The default filter. h2 warns for each unexpected frame, so with its lines a
/// peer could fill the log.
const FILTER: &str = "info,h2=off,hyper=off,rustls=off";

/// A writer that escapes the control characters that formatters let through:
/// JSON allows DEL and the C1 controls, and lines for people contain any text
/// that a value displays.
struct Escaping<W>(W);

impl<W: io::Write> io::Write for Escaping<W> {
    /// Writes one event, whose only line feed is its last byte.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Ok(text) = std::str::from_utf8(bytes) else {
            // Formatters write strings, so these bytes are no event: dropped.
            return Ok(bytes.len());
        };
        let (line, end) = match text.strip_suffix('\n') {
            Some(line) => (line, "\n"),
            None => (text, ""),
        };
        if !line.contains(char::is_control) {
            self.0.write_all(bytes)?;
            return Ok(bytes.len());
        }
        let mut escaped = String::with_capacity(text.len() + 16);
        for c in line.chars() {
            if c.is_control() {
                // Writing into a String cannot fail.
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            } else {
                escaped.push(c);
            }
        }
        escaped.push_str(end);
        // The result below counts the bytes of the caller, as `write` must, and not the escaped
        // ones.
        self.0.write_all(escaped.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
