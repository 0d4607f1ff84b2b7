//! The check of an input before its first line runs: one pass, one line in memory.
//!
//! The check finds what makes the file no batch. What an endpoint refuses is found when
//! the line runs, and is the line's own error.

use std::collections::HashSet;
use std::io::BufRead;

use crate::batch::{Endpoint, InputError};
use crate::hash::Sha256;
use crate::line::{InputLine, LineReader, RawLine};
use crate::rules::LONGEST_CUSTOM_ID;

/// Mistakes that a batch names at most.
pub(crate) const MOST_ERRORS: usize = 100;

/// Checks an input. Returns the mistakes, at most 100; none for a valid input.
///
/// # Errors
/// The input cannot be read.
pub(crate) fn validate(
    input: impl BufRead,
    endpoint: Endpoint,
) -> std::io::Result<Vec<InputError>> {
    let mut reader = LineReader::new(input);
    let mut check = Check { endpoint, seen: HashSet::new(), errors: Vec::new(), lines: 0 };
    while let Some(line) = reader.next()? {
        check.line(&line);
        if check.errors.len() >= MOST_ERRORS {
            break;
        }
    }
    if check.lines == 0 {
        check.errors.push(InputError {
            code: "empty_file".to_owned(),
            message: "The input file has no lines.".to_owned(),
            param: None,
            line: None,
        });
    }
    Ok(check.errors)
}

struct Check {
    endpoint: Endpoint,
    /// Hashes instead of the ids: their size does not depend on the client.
    seen: HashSet<[u8; 16]>,
    errors: Vec<InputError>,
    lines: u64,
}

impl Check {
    fn line(&mut self, line: &InputLine<'_>) {
        self.lines += 1;
        if let Some(blank) = line.blank_before {
            let message = "The line is blank; only the end of a file may be blank.".to_owned();
            self.error_at(blank, ("invalid_json_line", None), message);
        }
        // The parser does not look into texts that it skips, such as those of unknown fields.
        let Ok(text) = std::str::from_utf8(line.bytes) else {
            let message = "The line is not UTF-8.".to_owned();
            return self.error(line, ("invalid_json_line", None), message);
        };
        let raw: RawLine<'_> = match serde_json::from_str(text) {
            Ok(raw) => raw,
            Err(error) => {
                let message = unreadable(line.bytes, &error);
                return self.error(line, ("invalid_json_line", None), message);
            }
        };
        self.custom_id(line, &raw);
        match raw.method.as_deref() {
            Some("POST") => {}
            Some(method) => {
                let message = format!("The method is '{}'; use 'POST'.", shown(method));
                self.error(line, ("invalid_method", Some("method")), message);
            }
            None => self.missing(line, "method"),
        }
        match raw.url.as_deref() {
            Some(url) if url == self.endpoint.path() => {}
            Some(url) => {
                let endpoint = self.endpoint.path();
                let url = shown(url);
                let message =
                    format!("The url is '{url}'; the endpoint of the batch is '{endpoint}'.");
                self.error(line, ("url_mismatch", Some("url")), message);
            }
            None => self.missing(line, "url"),
        }
        // The fields of the body are checked when the line runs, like those of a request.
        if !raw.body.is_some_and(|body| body.get().starts_with('{')) {
            self.missing(line, "body");
        }
    }

    fn custom_id(&mut self, line: &InputLine<'_>, raw: &RawLine<'_>) {
        // Decoded, because one text has several spellings in JSON, and they are the same id.
        let text = raw.custom_id.and_then(|id| serde_json::from_str::<String>(id.get()).ok());
        let Some(text) = text.filter(|text| !text.is_empty()) else {
            return self.missing(line, "custom_id");
        };
        // The undecoded text is measured: results repeat it as it stands, and their room is
        // reserved.
        if raw.custom_id.is_some_and(|id| id.get().len() > LONGEST_CUSTOM_ID) {
            let message =
                format!("The custom_id with its quotes has more than {LONGEST_CUSTOM_ID} bytes.");
            return self.error(line, ("invalid_json_line", Some("custom_id")), message);
        }
        let mut digest = Sha256::new();
        digest.update(text.as_bytes());
        // 128 bits: nobody finds two ids of one hash, and a client would harm its own batch only.
        let mut hash = [0; 16];
        hash.iter_mut().zip(digest.finish()).for_each(|(to, from)| *to = from);
        if !self.seen.insert(hash) {
            let message = format!("The custom_id '{}' is used before.", shown(&text));
            self.error(line, ("duplicate_custom_id", Some("custom_id")), message);
        }
    }

    fn missing(&mut self, line: &InputLine<'_>, field: &'static str) {
        let message = format!("The field '{field}' is missing or has the wrong type.");
        self.error(line, ("missing_required_parameter", Some(field)), message);
    }

    fn error(
        &mut self,
        line: &InputLine<'_>,
        (code, param): (&'static str, Option<&'static str>),
        message: String,
    ) {
        self.error_at(line.physical, (code, param), message);
    }

    fn error_at(
        &mut self,
        physical: u64,
        (code, param): (&'static str, Option<&'static str>),
        message: String,
    ) {
        if self.errors.len() < MOST_ERRORS {
            self.errors.push(InputError {
                code: code.to_owned(),
                message,
                param: param.map(str::to_owned),
                line: Some(physical),
            });
        }
    }
}

/// Tells why a line is no request. `error` is the error of its parser.
fn unreadable(bytes: &[u8], error: &serde_json::Error) -> String {
    // The parser takes an array for the fields in their order and names Rust's type.
    if !bytes.starts_with(b"{") {
        return "The line is not a JSON object.".to_owned();
    }
    // The parser sees one line only, so its "line 1" is not the line of the file.
    let text = error.to_string();
    let reason = text.split(" at line ").next().unwrap_or(&text);
    let column = error.column();
    format!("The line is not a JSON object of a request: {reason} (column {column}).")
}

/// Cuts a text of a client for a message.
fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(input: &str) -> Vec<(String, Option<u64>)> {
        let errors = validate(input.as_bytes(), Endpoint::ChatCompletions).expect("memory");
        errors.into_iter().map(|error| (error.code, error.line)).collect()
    }

    fn line(id: &str) -> String {
        format!(
            "{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{{}}}}"
        )
    }

    #[test]
    fn validator_passes_mark_crlf_and_blank_last_lines() {
        let input = format!("\u{feff}{}\r\n{}\n\r\n\n", line("a"), line("b"));
        assert_eq!(codes(&input), []);
    }

    #[test]
    fn validator_names_each_mistake_and_its_line() {
        let expect = |input: &str, code: &str, at: Option<u64>| {
            assert_eq!(codes(input), [(code.to_owned(), at)], "{input}");
        };
        expect("", "empty_file", None);
        expect("\n\n", "empty_file", None);
        expect(&format!("{}\nno", line("a")), "invalid_json_line", Some(2));
        expect("[]", "invalid_json_line", Some(1));
        expect(&line("a").replace("POST", "GET"), "invalid_method", Some(1));
        expect(&line("a").replace("chat/", ""), "url_mismatch", Some(1));
        expect(&format!("{}\n \n\n{}", line("a"), line("b")), "invalid_json_line", Some(2));
        expect(&format!("\n{}", line("a")), "invalid_json_line", Some(1));
        expect(&line(&"i".repeat(LONGEST_CUSTOM_ID)), "invalid_json_line", Some(1));
        expect(&line(""), "missing_required_parameter", Some(1));
        expect(&line("a").replace("{}", "1"), "missing_required_parameter", Some(1));
        let twice = format!("{}\n{}", line("a"), line("\\u0061"));
        expect(&twice, "duplicate_custom_id", Some(2));
    }

    #[test]
    fn validator_tells_why_a_line_is_unreadable() {
        let message = |input: &str| {
            let errors = validate(input.as_bytes(), Endpoint::ChatCompletions).expect("memory");
            errors.into_iter().next().expect("a mistake").message
        };
        assert_eq!(message("[1,2,3]"), "The line is not a JSON object.");
        let cut = format!("{}\n{{\"custom_id\":\"a", line("b"));
        assert_eq!(
            message(&cut),
            "The line is not a JSON object of a request: EOF while parsing a string (column 15)."
        );
    }

    #[test]
    fn validator_refuses_bytes_that_are_no_text() {
        let input = line("a").replace("\"body\"", "\"x\":\"?\",\"body\"").replace('?', "\u{e9}");
        assert_eq!(codes(&input), []);
        // Half of a character, in a field that nobody reads.
        let mut input = input.into_bytes();
        input.retain(|byte| *byte != 0xa9);
        let errors = validate(&input[..], Endpoint::ChatCompletions).expect("memory");
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0].message, "The line is not UTF-8.");
    }

    #[test]
    fn validator_takes_longest_custom_id() {
        // The quotes count.
        assert_eq!(codes(&line(&"i".repeat(LONGEST_CUSTOM_ID - 2))), []);
    }

    #[test]
    fn validator_names_at_most_a_hundred_mistakes() {
        assert_eq!(codes(&"no\n".repeat(5_000)).len(), 100);
    }

    #[test]
    fn validator_refuses_a_deep_line_without_recursion() {
        let body = "[".repeat(1_000_000);
        assert_eq!(codes(&line("a").replace("{}", &body)).len(), 1);
    }
}
