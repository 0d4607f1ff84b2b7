//! Log lines for programs: one JSON object with the time, the level, the message, the fields
//! and the target. An error has its causes in its text.

use std::error::Error;
use std::fmt;

use serde_json::Value;
use tollgate_serving::with_causes;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::registry::LookupSpan;

/// The format of one line.
pub(super) struct JsonLine;

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        line.write_str("{\"timestamp\":\"")?;
        SystemTime.format_time(&mut line)?;
        write!(line, "\",\"level\":\"{}\"", metadata.level())?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        for (name, value) in &fields.0 {
            // `Value` writes text as JSON does.
            write!(line, ",{}:{value}", Value::from(*name))?;
        }
        writeln!(line, ",\"target\":{}}}", Value::from(metadata.target()))
    }
}

/// The message and the fields of an event, in their order.
#[derive(Default)]
struct Fields(Vec<(&'static str, Value)>);

impl Fields {
    fn push(&mut self, field: &Field, value: impl Into<Value>) {
        // Names with `log.` are the place in the source of a line that a library logged.
        if !field.name().starts_with("log.") {
            self.0.push((field.name(), value.into()));
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value);
    }

    fn record_error(&mut self, field: &Field, error: &(dyn Error + 'static)) {
        self.push(field, with_causes(error));
    }
}
