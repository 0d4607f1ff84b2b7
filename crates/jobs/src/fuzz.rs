//! Hostile bytes as the input of a batch. Only the fuzz crate calls this module.

#![expect(clippy::expect_used, reason = "a panic is how a fuzz target reports")]

use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;

use crate::batch::{Endpoint, InputError};
use crate::line::{Line, LineCounter, LineReader};
use crate::validate::{MOST_ERRORS, validate};

/// The codes of mistakes in an input.
const CODES: [&str; 6] = [
    "invalid_json_line",
    "missing_required_parameter",
    "duplicate_custom_id",
    "invalid_method",
    "url_mismatch",
    "empty_file",
];
/// Bytes of the longest message about a mistake.
const LONGEST_MESSAGE: usize = 1_024;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Checks an input and reads its lines. Each mistake is one of the line that it names, and a
/// line without a mistake is the same line alone. Gives the body of each such line to `accepted`.
pub fn batch_lines(data: &[u8], accepted: &mut dyn FnMut(&str)) {
    for endpoint in [Endpoint::ChatCompletions, Endpoint::Completions] {
        let mistakes = mistakes(data, endpoint);
        assert!(mistakes.len() <= MOST_ERRORS);
        for mistake in &mistakes {
            check_mistake(data, mistake, endpoint);
        }
        let named: BTreeSet<u64> = mistakes.iter().filter_map(|mistake| mistake.line).collect();
        // Beyond the most mistakes nothing is said about a line.
        let known = if mistakes.len() < MOST_ERRORS { u64::MAX } else { 0 };
        check_lines(data, |line| line < known && !named.contains(&line), endpoint, accepted);
    }
}

/// Returns the number of mistakes in an input.
pub fn count_mistakes(data: &[u8]) -> usize {
    mistakes(data, Endpoint::ChatCompletions).len()
}

fn mistakes(data: &[u8], endpoint: Endpoint) -> Vec<InputError> {
    validate(data, endpoint).expect("memory can be read")
}

/// Checks that the line that a mistake names has this mistake.
fn check_mistake(data: &[u8], mistake: &InputError, endpoint: Endpoint) {
    let InputError { code, message, param: _, line } = mistake;
    assert!(CODES.contains(&code.as_str()), "{code}");
    assert!(!message.is_empty() && message.len() <= LONGEST_MESSAGE, "{message}");
    let Some(number) = line else {
        assert_eq!(code, "empty_file");
        assert!(
            data.iter().all(|byte| byte.is_ascii_whitespace() || BYTE_ORDER_MARK.contains(byte))
        );
        return;
    };
    let named = physical(data, *number).expect("a line of the file");
    // The second of two equal ids is right without the first, and so is a blank line at the end
    // of a file.
    if code == "duplicate_custom_id" || named.iter().all(u8::is_ascii_whitespace) {
        return;
    }
    let alone = mistakes(&marked(named), endpoint);
    assert!(
        alone.iter().any(|other| (&other.code, &other.message) == (code, message)),
        "line {number} alone: {alone:?}, not {mistake:?}"
    );
}

/// Reads the lines for which `is_right` is true, each in its file and alone.
fn check_lines(
    data: &[u8],
    is_right: impl Fn(u64) -> bool,
    endpoint: Endpoint,
    accepted: &mut dyn FnMut(&str),
) {
    let (mut reader, mut count) = (LineReader::new(data), 0);
    while let Some(line) = reader.next().expect("memory can be read") {
        assert_eq!(line.number, count);
        count += 1;
        if !is_right(line.physical) {
            continue;
        }
        let read = Line::read(&line).expect("a line without a mistake");
        let alone = marked(physical(data, line.physical).expect("a line of the file"));
        assert_eq!(mistakes(&alone, endpoint), []);
        let mut reader = LineReader::new(&alone[..]);
        let line = reader.next().expect("memory can be read").expect("it is not blank");
        let again = Line::read(&line).map(|again| Line { number: read.number, ..again });
        assert_eq!(again.as_ref(), Some(&read));
        // Another reader of JSON finds the same texts.
        let fields: BTreeMap<String, &RawValue> =
            serde_json::from_slice(line.bytes).expect("it was parsed before");
        let texts = ["custom_id", "body"].map(|name| fields.get(name).map(|text| text.get()));
        assert_eq!(texts, [Some(read.custom_id.as_str()), Some(&*read.body)]);
        accepted(&read.body);
    }
    let mut counter = LineCounter::default();
    counter.count(data);
    assert_eq!(counter.lines(), count, "the upload counts the lines that run");
}

/// Returns a line of the file by its number from 1, without the mark of the byte order.
fn physical(data: &[u8], number: u64) -> Option<&[u8]> {
    let data = data.strip_prefix(BYTE_ORDER_MARK).unwrap_or(data);
    let index = usize::try_from(number.checked_sub(1)?).ok()?;
    data.split_inclusive(|byte| *byte == b'\n').nth(index)
}

/// Returns a line as a file of its own. The mark comes first, because a line may itself begin
/// with one, which only the first line of a file may.
fn marked(line: &[u8]) -> Vec<u8> {
    [BYTE_ORDER_MARK, line].concat()
}
