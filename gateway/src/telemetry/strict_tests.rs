//! A strict reading of both text formats: what a scraper would reject fails here.

use std::collections::{BTreeMap, BTreeSet};

use super::TextFormat;
use super::reference_tests::every_metric;

/// One family as it was read.
#[derive(Debug, Default)]
struct MetricFamily {
    kind: String,
    has_help: bool,
    samples: Vec<MetricSample>,
}

#[derive(Debug, PartialEq)]
struct MetricSample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// Reads a text in `format`, and panics with the line if it is not well-formed.
fn read(text: &str, format: TextFormat) -> BTreeMap<String, MetricFamily> {
    assert!(text.ends_with('\n') && !text.contains('\r') && !text.contains("\n\n"));
    let body = match format {
        TextFormat::OpenMetrics => text.strip_suffix("# EOF\n").expect("an end mark"),
        TextFormat::Prometheus => text,
    };
    let mut families: BTreeMap<String, MetricFamily> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in body.lines() {
        let Some(comment) = line.strip_prefix('#') else {
            let sample = sample(line);
            let name = current.as_ref().unwrap_or_else(|| panic!("no family before {line}"));
            let family = families.get_mut(name).expect("it was begun");
            check_name(name, family, &sample, format);
            assert!(
                !family
                    .samples
                    .iter()
                    .any(|it| it.name == sample.name && it.labels == sample.labels),
                "twice: {line}"
            );
            family.samples.push(sample);
            continue;
        };
        let mut words = comment.strip_prefix(' ').expect(line).splitn(3, ' ');
        let (what, name) = (words.next().expect(line), words.next().expect(line));
        let rest = words.next().expect(line);
        assert!(is_name(name), "{line}");
        let is_new = current.as_deref() != Some(name);
        assert!(!is_new || !families.contains_key(name), "not in one piece: {line}");
        current = Some(name.to_owned());
        let family = families.entry(name.to_owned()).or_default();
        assert!(family.samples.is_empty(), "after samples: {line}");
        match what {
            "HELP" => {
                assert!(!family.has_help && !rest.is_empty(), "{line}");
                family.has_help = true;
            }
            "TYPE" => {
                assert!(family.kind.is_empty(), "{line}");
                family.kind = rest.to_owned();
            }
            "UNIT" => {
                assert_eq!(format, TextFormat::OpenMetrics, "{line}");
                assert!(name.ends_with(&format!("_{rest}")), "{line}");
            }
            _ => panic!("{line}"),
        }
    }
    families.values().for_each(check_family);
    families
}

/// Checks that a sample may belong to its family.
fn check_name(name: &str, family: &MetricFamily, sample: &MetricSample, format: TextFormat) {
    let suffix = sample.name.strip_prefix(name).unwrap_or_else(|| panic!("{sample:?} in {name}"));
    match (&*family.kind, format) {
        ("counter", TextFormat::OpenMetrics) => assert_eq!(suffix, "_total", "{sample:?}"),
        ("counter", TextFormat::Prometheus) => {
            assert!(suffix.is_empty() && name.ends_with("_total"), "{sample:?}");
        }
        ("gauge", _) => assert!(suffix.is_empty() && !name.ends_with("_total"), "{sample:?}"),
        ("histogram", _) => {
            assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{sample:?}");
            assert_eq!(suffix == "_bucket", sample.labels.contains_key("le"), "{sample:?}");
        }
        (kind, _) => panic!("{name} has the type {kind:?}"),
    }
}

fn check_family(family: &MetricFamily) {
    assert!(family.has_help, "no help: {family:?}");
    if family.kind == "counter" {
        assert!(family.samples.iter().all(|it| it.value >= 0.0), "{family:?}");
    }
    if family.kind == "histogram" {
        let mut last: BTreeMap<BTreeMap<String, String>, (f64, f64)> = BTreeMap::new();
        for sample in family.samples.iter().filter(|it| it.labels.contains_key("le")) {
            let mut labels = sample.labels.clone();
            let bound = labels.remove("le").map(|bound| bound.replace("+Inf", "inf"));
            let bound: f64 = bound.and_then(|bound| bound.parse().ok()).expect("a bound");
            if let Some((before, count)) = last.insert(labels, (bound, sample.value)) {
                assert!(before < bound && count <= sample.value, "not cumulative: {sample:?}");
            }
        }
        for sample in family.samples.iter().filter(|it| it.name.ends_with("_count")) {
            assert_eq!(last[&sample.labels], (f64::INFINITY, sample.value), "{sample:?}");
        }
    }
}

/// Reads `name{label="value",…} number`, without a timestamp or an exemplar.
fn sample(line: &str) -> MetricSample {
    let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("no value: {line}"));
    let (name, mut rest) = line.split_at(end);
    assert!(is_name(name), "{line}");
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while let Some((label, after)) = rest.split_once("=\"") {
            assert!(is_name(label) && !label.contains(':'), "{line}");
            let (value, after) = quoted(after).unwrap_or_else(|| panic!("no end: {line}"));
            assert!(labels.insert(label.to_owned(), value).is_none(), "label twice: {line}");
            rest = after.strip_prefix(',').unwrap_or(after);
            if rest.starts_with('}') {
                break;
            }
        }
        rest = rest.strip_prefix('}').unwrap_or_else(|| panic!("no end: {line}"));
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("no space: {line}"));
    let value = value.parse().unwrap_or_else(|_| panic!("no number: {line}"));
    MetricSample { name: name.to_owned(), labels, value }
}

/// Reads an escaped value up to its closing quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                c @ ('"' | '\\') => c,
                _ => return None,
            }),
            '\n' => return None,
            c => value.push(c),
        }
    }
    None
}

fn is_name(name: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    name.starts_with(is_first) && name.chars().all(|c| is_first(c) || c.is_ascii_digit())
}

#[test]
fn both_text_formats_are_well_formed_and_equal() {
    let open = read(&every_metric(TextFormat::OpenMetrics), TextFormat::OpenMetrics);
    let plain = read(&every_metric(TextFormat::Prometheus), TextFormat::Prometheus);
    let samples = |families: &BTreeMap<String, MetricFamily>| -> BTreeSet<String> {
        let all = families.values().flat_map(|family| &family.samples);
        all.map(|sample| format!("{} {:?}", sample.name, sample.labels)).collect()
    };
    assert_eq!(samples(&open), samples(&plain));
    assert!(open.len() > 70, "{}", open.len());
    let info = &plain["tollgate_worker_info"].samples[0];
    assert_eq!(info.labels["device"], "a \"quoted\" name");
}

#[test]
#[should_panic(expected = "not in one piece")]
fn strict_reading_finds_a_divided_family() {
    let text = "# HELP a A\n# TYPE a gauge\na 1\n# HELP b B\n# TYPE b gauge\nb 1\n# HELP a A\n";
    read(text, TextFormat::Prometheus);
}

#[test]
#[should_panic(expected = "no help")]
fn strict_reading_finds_a_missing_help() {
    read("# TYPE a gauge\na 1\n", TextFormat::Prometheus);
}
