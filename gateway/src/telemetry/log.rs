//! The log: one JSON object a line, or lines for people. Both formats escape
//! control characters, so that no client can forge a line.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;

use tracing::Subscriber;
use tracing_subscriber::filter::{EnvFilter, ParseError};
use tracing_subscriber::layer::SubscriberExt as _;

use super::json_line::JsonLine;
use super::log_line::LogLine;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// Lines for people to read.
    #[default]
    Plain,
    /// Lines for people to read, with colours.
    Coloured,
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
    let lines = tracing_subscriber::fmt::layer();
    let colours = options.format == LogFormat::Coloured;
    Ok(match options.format {
        LogFormat::Json => {
            // JSON allows DEL and the C1 controls.
            let lines = lines.with_ansi(false).with_writer(move || Escaping(writer()));
            Box::new(registry.with(lines.event_format(JsonLine)))
        }
        LogFormat::Plain | LogFormat::Coloured => {
            Box::new(registry.with(lines.with_writer(writer).event_format(LogLine { colours })))
        }
    })
}

/// The default filter. h2 warns for each unexpected frame, so with its lines a
/// peer could fill the log.
const FILTER: &str = "info,h2=off,hyper=off,rustls=off";

/// Returns `text` with its control characters as visible escapes.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if c.is_control() {
            // Writing into a String cannot fail.
            let _ = write!(escaped, "\\u{:04x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

/// A writer that escapes the control characters that a formatter lets through.
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
        // In one write, so that a line stays whole beside other processes' lines.
        let escaped = [&escape(line), end].concat();
        self.0.write_all(escaped.as_bytes())?;
        // `write` counts the bytes of its caller, not the escaped ones.
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
