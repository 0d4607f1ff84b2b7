//! Lines of a batch's input and of its results.
//!
//! An input is read in one pass with one line in memory. A byte order mark, CRLF and
//! blank lines are skipped; the number of a line counts the lines that are not blank. The
//! validator refuses blank lines before the last line.

use std::borrow::Cow;
use std::io::BufRead;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use tollgate_domain::{ModelName, RequestId};

/// Counts the lines of a file while it is written.
#[derive(Debug, Default)]
pub(crate) struct LineCounter {
    /// Lines that are not blank, with the present one.
    lines: u64,
    /// Bytes of the present line.
    length: u64,
    is_blank: bool,
    longest: u64,
    has_begun: bool,
}

impl LineCounter {
    /// Counts the next bytes of the file.
    pub(crate) fn count(&mut self, mut bytes: &[u8]) {
        if !self.has_begun && !bytes.is_empty() {
            (self.has_begun, self.is_blank) = (true, true);
            bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
        }
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.length += part.len() as u64;
            self.longest = self.longest.max(self.length);
            // `LineReader` must find the same lines: the total of a batch is this count.
            if self.is_blank && !part.iter().all(u8::is_ascii_whitespace) {
                self.is_blank = false;
                self.lines += 1;
            }
            if part.ends_with(b"\n") {
                (self.length, self.is_blank) = (0, true);
            }
        }
    }

    /// Returns the lines that are not blank.
    pub(crate) fn lines(&self) -> u64 {
        self.lines
    }

    /// Returns the bytes of the longest line.
    pub(crate) fn longest(&self) -> u64 {
        self.longest
    }
}

/// Reads the lines of an input.
pub(crate) struct LineReader<R> {
    input: R,
    /// The number of the last line in the file, from 1, blank ones included.
    physical: u64,
    /// The number of the next line that is not blank, from 0.
    next: u64,
    buffer: Vec<u8>,
}

/// A line that is not blank.
pub(crate) struct InputLine<'a> {
    /// The number among the lines that are not blank, from 0.
    pub(crate) number: u64,
    /// The number in the file, from 1.
    pub(crate) physical: u64,
    /// The number in the file of the first of the blank lines directly before this one.
    pub(crate) blank_before: Option<u64>,
    /// The bytes, without the end of the line.
    pub(crate) bytes: &'a [u8],
}

impl<R: BufRead> LineReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, physical: 0, next: 0, buffer: Vec::new() }
    }

    /// Reads the next line that is not blank.
    ///
    /// # Errors
    /// The input cannot be read.
    pub(crate) fn next(&mut self) -> std::io::Result<Option<InputLine<'_>>> {
        let mut blank_before = None;
        loop {
            // The upload has bounded the longest line, and so this buffer.
            self.buffer.clear();
            if self.input.read_until(b'\n', &mut self.buffer)? == 0 {
                return Ok(None);
            }
            self.physical += 1;
            if self.physical == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) {
                self.buffer.drain(..BYTE_ORDER_MARK.len());
            }
            if !self.buffer.iter().all(u8::is_ascii_whitespace) {
                break;
            }
            blank_before.get_or_insert(self.physical);
        }
        let (number, physical) = (self.next, self.physical);
        self.next += 1;
        let bytes = self.buffer.trim_ascii();
        Ok(Some(InputLine { number, physical, blank_before, bytes }))
    }
}

/// A line of an input, as far as it is read before it runs. Unknown fields are ignored.
#[derive(Deserialize)]
pub(crate) struct RawLine<'a> {
    #[serde(borrow)]
    pub(crate) custom_id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) url: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) body: Option<&'a RawValue>,
}

/// A line that runs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    /// The number, from 0.
    pub(crate) number: u64,
    /// The `custom_id` as it stands in the input, with its quotes.
    pub(crate) custom_id: String,
    /// The body, as JSON. Shared with each try, because a body may have megabytes.
    pub(crate) body: Arc<str>,
    /// The model that the body names.
    pub(crate) model: Option<ModelName>,
    /// Bytes that the answer may have.
    pub(crate) room: u64,
}

impl Line {
    /// Reads a line that the validator has passed; `None` if it is not one.
    pub(crate) fn read(line: &InputLine<'_>) -> Option<Self> {
        let raw: RawLine<'_> = serde_json::from_slice(line.bytes).ok()?;
        let body = raw.body?.get();
        let cost = serde_json::from_str::<CostFields<'_>>(body).unwrap_or_default();
        Some(Self {
            number: line.number,
            custom_id: raw.custom_id?.get().to_owned(),
            body: body.into(),
            model: cost.model.as_deref().and_then(|model| ModelName::new(model).ok()),
            room: cost.room(),
        })
    }
}

/// Returns the `custom_id` of a line as it stands in the input; `null` if there is none.
pub(crate) fn custom_id_of(line: &InputLine<'_>) -> String {
    let raw = serde_json::from_slice::<RawLine<'_>>(line.bytes).ok();
    raw.and_then(|raw| raw.custom_id).map_or_else(|| "null".to_owned(), |id| id.get().to_owned())
}

/// The fields of a body that tell how large its answer may be. A field of another type
/// counts as absent: the line fails when it runs.
#[derive(Default, Deserialize)]
struct CostFields<'a> {
    #[serde(borrow, default, deserialize_with = "lenient_text")]
    model: Option<Cow<'a, str>>,
    #[serde(default, deserialize_with = "lenient")]
    max_tokens: Option<u64>,
    #[serde(default, deserialize_with = "lenient")]
    max_completion_tokens: Option<u64>,
    #[serde(default, deserialize_with = "lenient")]
    n: Option<u64>,
    #[serde(default, deserialize_with = "lenient")]
    top_logprobs: Option<u64>,
}

fn lenient<'de, D: serde::Deserializer<'de>>(input: D) -> Result<Option<u64>, D::Error> {
    let value = serde_json::Value::deserialize(input)?;
    Ok(value.as_u64())
}

fn lenient_text<'de, D: serde::Deserializer<'de>>(
    input: D,
) -> Result<Option<Cow<'de, str>>, D::Error> {
    let value = serde_json::Value::deserialize(input)?;
    Ok(value.as_str().map(|text| Cow::Owned(text.to_owned())))
}

impl CostFields<'_> {
    fn room(&self) -> u64 {
        // A line with two different values is refused when it runs, so either would do.
        let tokens = self.max_completion_tokens.into_iter().chain(self.max_tokens).max();
        let tokens = tokens.unwrap_or(TOKENS_UNLESS_GIVEN).min(MOST_TOKENS);
        let choices = self.n.unwrap_or(1).clamp(1, MOST_CHOICES);
        let alternatives = self.top_logprobs.unwrap_or(0).min(MOST_ALTERNATIVES);
        let each = BYTES_OF_A_TOKEN + BYTES_OF_AN_ALTERNATIVE * alternatives;
        (FIXED_BYTES + tokens * choices * each).min(MOST_ROOM)
    }
}

/// Writes a line of the output file or of the error file: an answer with its status.
pub(crate) fn answer_line(
    custom_id: &str,
    request: &RequestId,
    (status, body): (u16, &str),
) -> Vec<u8> {
    // Both texts are JSON already: the validator has read the id, and the service wrote the body.
    let id = batch_request_id(request);
    format!(
        "{{\"id\":\"{id}\",\"custom_id\":{custom_id},\"response\":{{\"status_code\":{status},\
         \"request_id\":\"{request}\",\"body\":{body}}},\"error\":null}}\n"
    )
    .into_bytes()
}

/// Writes a line of the error file for a line without an answer. `code` and `message` are
/// texts of this program, without characters that JSON escapes.
pub(crate) fn error_line(
    custom_id: &str,
    request: &RequestId,
    (code, message): (&str, &str),
) -> Vec<u8> {
    let id = batch_request_id(request);
    format!(
        "{{\"id\":\"{id}\",\"custom_id\":{custom_id},\"response\":null,\
         \"error\":{{\"code\":\"{code}\",\"message\":\"{message}\"}}}}\n"
    )
    .into_bytes()
}

fn batch_request_id(request: &RequestId) -> String {
    let text = request.as_str();
    format!("batch_req_{}", text.strip_prefix("req-").unwrap_or(text))
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Bytes of an answer beside its tokens.
const FIXED_BYTES: u64 = 1_024;
const BYTES_OF_A_TOKEN: u64 = 32;
const BYTES_OF_AN_ALTERNATIVE: u64 = 100;
/// Tokens that are expected of an answer to a line without a limit.
const TOKENS_UNLESS_GIVEN: u64 = 4_096;
// A line beyond these is refused when it runs; the figures only keep the product small.
const MOST_TOKENS: u64 = 1 << 20;
const MOST_CHOICES: u64 = 128;
const MOST_ALTERNATIVES: u64 = 20;
/// Bytes that the answer of one line reserves at most. Without this bound a line that no
/// model could answer would wait for room until its batch expires.
const MOST_ROOM: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_counter_agrees_with_reader_for_any_split() {
        let inputs: [&[u8]; 7] = [
            b"",
            b"\n \r\n",
            b"a\nb",
            b"a\r\n\r\nb\n\n",
            b"\xef\xbb\xbfa\nbb\n",
            b"\xef\xbb\xbf\na",
            b"aaaa",
        ];
        for input in inputs {
            let mut reader = LineReader::new(input);
            let mut read = 0;
            while let Some(line) = reader.next().expect("memory") {
                assert_eq!(line.number, read);
                read += 1;
            }
            for size in 3..8 {
                let mut counter = LineCounter::default();
                input.chunks(size).for_each(|part| counter.count(part));
                assert_eq!(counter.lines(), read, "{input:?} in parts of {size}");
            }
        }
    }

    proptest::proptest! {
        /// Any bytes in any parts: no panic, and one count.
        #[test]
        fn line_counter_takes_any_bytes(
            parts in proptest::collection::vec(
                proptest::collection::vec(proptest::sample::select(&b"\xef\xbb\xbf\r\n a{\"\0"[..]), 0..9),
                0..9,
            ),
        ) {
            let whole = parts.concat();
            // The mark of the byte order comes in one part: a client sends more than 3 bytes.
            proptest::prop_assume!(!whole.starts_with(b"\xef"));
            let mut reader = LineReader::new(&whole[..]);
            let mut read = 0;
            while let Some(line) = reader.next().expect("memory") {
                let _ = Line::read(&line);
                read += 1;
            }
            let mut counter = LineCounter::default();
            parts.iter().for_each(|part| counter.count(part));
            proptest::prop_assert_eq!(counter.lines(), read);
        }
    }

    #[test]
    fn line_room_grows_with_the_body() {
        let room = |body: &str| {
            let text = format!("{{\"custom_id\":\"a\",\"body\":{body}}}");
            let line =
                InputLine { number: 0, physical: 1, blank_before: None, bytes: text.as_bytes() };
            Line::read(&line).expect("a line").room
        };
        let small = room("{\"max_tokens\":10}");
        assert_eq!(small, FIXED_BYTES + 320);
        assert_eq!(room("{\"max_tokens\":10,\"n\":2}"), FIXED_BYTES + 640);
        assert_eq!(room("{\"max_tokens\":10,\"top_logprobs\":5}"), FIXED_BYTES + 5_320);
        assert_eq!(room("{\"max_tokens\":\"ten\"}"), room("{}"));
    }

    #[test]
    fn result_lines_are_json() {
        let request = RequestId::from_random(0xa);
        let answered = answer_line("\"x\\n\"", &request, (200, "{\"a\":1}"));
        let value: serde_json::Value = serde_json::from_slice(&answered).expect("JSON");
        assert_eq!(value["custom_id"], "x\n");
        assert_eq!(value["response"]["status_code"], 200);
        assert_eq!(value["response"]["body"]["a"], 1);
        let error = error_line("\"x\"", &request, ("batch_expired", "The window is over."));
        let value: serde_json::Value = serde_json::from_slice(&error).expect("JSON");
        assert_eq!(value["response"], serde_json::Value::Null);
        assert_eq!(value["error"]["code"], "batch_expired");
    }
}
