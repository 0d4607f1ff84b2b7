//! The two text formats of Prometheus. The registry is encoded as OpenMetrics. Scrapers and
//! tools that do not ask for OpenMetrics get the older text format, which is made from it.

use std::fmt::Write as _;

use http::{HeaderMap, HeaderValue, header};

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextFormat {
    /// Prometheus's text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl TextFormat {
    /// Returns the format that a client asks for: OpenMetrics only if the client names it
    /// and weighs it at least as much as plain text.
    pub(crate) fn asked_by(headers: &HeaderMap) -> Self {
        let (mut open, mut plain) = (None, None);
        let values = headers.get_all(header::ACCEPT).iter().filter_map(|it| it.to_str().ok());
        for range in values.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or("");
            let weight = parts.find_map(|part| part.strip_prefix("q="));
            // A weight that cannot be read must not choose a format.
            let weight: f64 = weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0));
            let asked = match media {
                "application/openmetrics-text" => &mut open,
                "text/plain" => &mut plain,
                _ => continue,
            };
            // A client may name several versions of one format.
            *asked = Some(weight.max(asked.unwrap_or(0.0)));
        }
        match open {
            // A weight of 0 refuses the format (RFC 9110, 12.4.2).
            Some(open) if open > 0.0 && open >= plain.unwrap_or(0.0) => Self::OpenMetrics,
            _ => Self::Prometheus,
        }
    }

    /// Returns the media type.
    pub(crate) fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        })
    }
}

/// Returns OpenMetrics text in Prometheus's text format: a counter's family has the name of
/// its samples there, and there are no units and no end mark.
pub(super) fn to_prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    // The help comes first, but its name depends on the type.
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap_or((rest, "untyped"));
            let suffix = if kind == "counter" { "_total" } else { "" };
            // Writing into a String cannot fail.
            if let Some((_, help)) = help.take() {
                let _ = writeln!(text, "# HELP {name}{suffix} {help}");
            }
            let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_is_served_only_if_asked_for() {
        for (accept, expected) in [
            ("", TextFormat::Prometheus),
            ("*/*", TextFormat::Prometheus),
            ("text/plain", TextFormat::Prometheus),
            ("application/openmetrics-text", TextFormat::OpenMetrics),
            ("application/openmetrics-text;q=0", TextFormat::Prometheus),
            ("application/openmetrics-text;q=0.2, text/plain;q=0.5", TextFormat::Prometheus),
            (
                // Prometheus 2.42.
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                TextFormat::OpenMetrics,
            ),
        ] {
            let mut headers = HeaderMap::new();
            if !accept.is_empty() {
                headers.insert(header::ACCEPT, accept.parse().unwrap());
            }
            assert_eq!(TextFormat::asked_by(&headers), expected, "{accept}");
        }
    }

    #[test]
    fn text_format_names_counters_like_their_samples() {
        let open = "# HELP a_seconds Time.\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
            a_seconds_total{b=\"c\"} 1.0\n# HELP d Things.\n# TYPE d gauge\nd 2\n# EOF\n";
        let expected = "# HELP a_seconds_total Time.\n# TYPE a_seconds_total counter\n\
            a_seconds_total{b=\"c\"} 1.0\n# HELP d Things.\n# TYPE d gauge\nd 2\n";
        assert_eq!(to_prometheus(open), expected);
    }
}
