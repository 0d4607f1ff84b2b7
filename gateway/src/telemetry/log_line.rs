//! Log lines for people: the time of day in UTC, the level, the message, and the
//! fields. A line holds no name of a module and no control character but those of its
//! own colours.

use std::error::Error;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use tollgate_serving::with_causes;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

use super::log::escape;

/// The format of one line.
pub(super) struct LogLine {
    /// True if the line has colours.
    pub(super) colours: bool,
}

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    #[expect(clippy::disallowed_methods, reason = "a log line has the time of the system's clock")]
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut parts = Parts::default();
        event.record(&mut parts);
        // A clock before 1970 costs the time of the line, and not the line.
        let second = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (hours, minutes, seconds) = (second / 3_600 % 24, second / 60 % 60, second % 60);
        let level = event.metadata().level();
        self.styled(&mut line, DIM, &format!("{hours:02}:{minutes:02}:{seconds:02}Z"))?;
        line.write_char(' ')?;
        self.styled(&mut line, style(*level), &format!("{level:<5}"))?;
        write!(line, " {}", escape(&parts.message))?;
        for (name, value) in &parts.fields {
            line.write_char(' ')?;
            self.styled(&mut line, DIM, &format!("{name}="))?;
            line.write_str(&quoted(value))?;
        }
        writeln!(line)
    }
}

impl LogLine {
    fn styled(&self, line: &mut Writer<'_>, Style(style): Style, text: &str) -> fmt::Result {
        match self.colours {
            true => write!(line, "{style}{text}{RESET}"),
            false => line.write_str(text),
        }
    }
}

/// The message and the fields of an event.
#[derive(Default)]
struct Parts {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Parts {
    fn push(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            // The place in the source of a line that a library logged.
            name if name.starts_with("log.") => {}
            name => self.fields.push((name, value)),
        }
    }
}

impl Visit for Parts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value.to_owned());
    }

    fn record_error(&mut self, field: &Field, error: &(dyn Error + 'static)) {
        self.push(field, with_causes(error));
    }
}

/// Returns a value without control characters, in quotes if its end could not be seen
/// otherwise.
fn quoted(value: &str) -> String {
    let value = escape(value);
    match value.is_empty() || value.contains([' ', '"', '=']) {
        true => format!("\"{}\"", value.replace('"', "\\\"")),
        false => value.into_owned(),
    }
}

fn style(level: Level) -> Style {
    match level {
        Level::ERROR => Style("\u{1b}[31m"),
        Level::WARN => Style("\u{1b}[33m"),
        Level::INFO => Style("\u{1b}[32m"),
        _ => DIM,
    }
}

/// The control sequence that begins a style on a terminal.
#[derive(Clone, Copy)]
struct Style(&'static str);

const DIM: Style = Style("\u{1b}[2m");
const RESET: &str = "\u{1b}[0m";
