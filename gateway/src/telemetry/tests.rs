//! Metric names, which dashboards rely on, and lines that stay lines.

use std::io;
use std::sync::Mutex;

use super::*;

#[test]
fn metrics_keep_their_names() {
    let metrics = Metrics::new(Clock::system());
    let (model, class) = (ModelName::new("m").unwrap(), DeviceClass::cpu());
    metrics.request_answered("models", StatusCode::OK, Duration::from_millis(3));
    metrics.error("requests_per_minute");
    metrics.connection_refused("per_source");
    metrics.connection_ended("idle");
    metrics.handshake_failed("silent");
    metrics.usage(&model, &class, &Usage { prompt_tokens: 7, ..Usage::default() });
    metrics.first_token(&model, &class, Duration::from_millis(40));
    metrics.timings(&RequestTimings::default());
    let readings = Readings { ready: true, ..Readings::default() };
    let text = metrics.scrape(readings, TextFormat::OpenMetrics);
    let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    insta::assert_snapshot!("metrics", names.join("\n"));
    assert!(text.contains(r#"tollgate_tokens_total{model="m",kind="prompt"} 7"#), "{text}");
}

#[test]
fn metrics_stay_whole_in_parallel_scrapes() {
    let metrics = Metrics::new(Clock::system());
    let scrape = || {
        for _ in 0..200 {
            let workers = vec![reference_tests::worker()];
            let readings = Readings { workers, ..Readings::default() };
            let text = metrics.scrape(readings, TextFormat::OpenMetrics);
            let total = r#"tollgate_device_energy_joules_total{worker="0"} 0.001"#;
            assert!(text.lines().any(|line| line == total), "{text}");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(scrape);
        }
    });
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// T05: a client that floods writes no lines, unless an admin asks for them.
#[test]
fn log_default_filter_hides_floods() {
    for (filter, expected) in [("", 1), ("info", 2)] {
        let lines = Lines::default();
        let writer = lines.clone();
        let options = LogOptions { format: LogFormat::Json, filter: filter.into() };
        let subscriber = log_subscriber(&options, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(target: "h2::proto::streams::recv", "streams reached limit");
            tracing::info!("ours");
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), expected, "{filter}: {text}");
    }
}

/// T51: what a client says cannot end a line or colour a terminal.
#[test]
fn log_escapes_control_characters() {
    let hostile = "a\r\n{\"level\":\"ERROR\"}\u{1b}[31m\u{0}\u{7f}\u{9b}\"";
    for format in [LogFormat::Json, LogFormat::Plain] {
        let lines = Lines::default();
        let writer = lines.clone();
        let options = LogOptions { format, filter: "trace".into() };
        let subscriber = log_subscriber(&options, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(model = hostile, "refused");
            tracing::info!(path = ?hostile, "refused");
            tracing::info!(path = %hostile, "refused {hostile}");
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 3, "{text:?}");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        if format == LogFormat::Json {
            for line in text.lines() {
                serde_json::from_str::<serde_json::Value>(line).unwrap();
            }
        }
    }
}

fn line_of(format: LogFormat, log: impl FnOnce()) -> String {
    let lines = Lines::default();
    let writer = lines.clone();
    let options = LogOptions { format, filter: String::new() };
    let subscriber = log_subscriber(&options, move || writer.clone()).unwrap();
    tracing::subscriber::with_default(subscriber, log);
    String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
}

#[test]
fn plain_log_line_shows_message_and_fields() {
    let cause = io::Error::other("disk full");
    let line = line_of(LogFormat::Plain, || {
        let error: &dyn std::error::Error = &cause;
        tracing::warn!(worker = "0", reason = "it \"fell\"", count = 3, empty = "", error, "ended");
    });
    let (time, rest) = line.split_once(' ').unwrap();
    assert_eq!(time.len(), "10:56:32Z".len(), "{line}");
    assert_eq!(
        rest,
        "WARN  ended worker=0 reason=\"it \\\"fell\\\"\" count=3 empty=\"\" error=\"disk full\"\n"
    );
}

/// A program that reads the log needs the cause, too.
#[test]
fn json_log_line_has_causes_and_typed_fields() {
    #[derive(Debug, thiserror::Error)]
    #[error("cannot write the ledger")]
    struct Failed(#[source] io::Error);
    let failed = Failed(io::Error::other("disk \"full\""));
    let line = line_of(LogFormat::Json, || {
        let error: &dyn std::error::Error = &failed;
        tracing::warn!(worker = %"a", count = 3_u64, below = -1, is_new = true, error, "ended");
    });
    let read: serde_json::Value = serde_json::from_str(&line).unwrap();
    let expected = serde_json::json!({
        "timestamp": read["timestamp"], "level": "WARN", "message": "ended", "worker": "a",
        "count": 3, "below": -1, "is_new": true,
        "error": "cannot write the ledger: disk \"full\"",
        "target": "tollgate_gateway::telemetry::tests",
    });
    assert_eq!(read, expected);
    assert_eq!(read["timestamp"].as_str().unwrap().len(), "2026-11-28T23:33:04.195760Z".len());
}

#[test]
fn coloured_log_line_has_own_colours_only() {
    let line = line_of(LogFormat::Coloured, || tracing::error!(model = "\u{1b}[32mx", "refused"));
    assert!(line.contains("\u{1b}[31mERROR\u{1b}[0m refused"), "{line:?}");
    assert!(line.contains("\\u001b[32mx") && !line.contains("\u{1b}[32m"), "{line:?}");
}
