//! The log: one JSON object a line, or lines for people. Fields, not prose;
//! control bytes are escaped in both, so that no client writes a line.

use std::fmt::Write as _;
use std::io;

use tracing::Subscriber;
use tracing_subscriber::filter::{EnvFilter, ParseError};
use tracing_subscriber::layer::SubscriberExt as _;

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    #[default]
    Pretty,
}

/// What is logged and how.
#[derive(Clone, Debug, Default)]
pub struct LogOptions {
    /// How lines are written.
    pub format: LogFormat,
    /// `info`, or `info,tollgate_gateway=debug`; empty: `info` without what
    /// libraries say about each peer that misbehaves.
    pub filter: String,
}

/// A subscriber that writes to what `writer` makes, as `std::io::stderr`; the binary makes it the default,
/// once.
///
/// # Errors
/// When the filter cannot be read.
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
        tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || Escaping(writer()));
    Ok(match options.format {
        LogFormat::Json => {
            Box::new(registry.with(lines.json().flatten_event(true).with_current_span(false)))
        }
        LogFormat::Pretty => Box::new(registry.with(lines.compact())),
    })
}

/// h2 warns for each frame that it did not expect: a peer would write the log.
const FILTER: &str = "info,h2=off,hyper=off,rustls=off";

/// Escapes what a formatter lets through: JSON may hold DEL and the C1
/// controls as they are, and lines for people hold whatever a value displays.
struct Escaping<W>(W);

impl<W: io::Write> io::Write for Escaping<W> {
    /// `bytes` are one event, which ends with the only line feed it may have.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Ok(text) = std::str::from_utf8(bytes) else {
            // Formatters write strings; whatever this is, it is not an event.
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
        self.0.write_all(escaped.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
