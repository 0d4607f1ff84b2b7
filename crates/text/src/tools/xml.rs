//! Arguments that a model writes as elements, `<parameter=NAME>VALUE</parameter>`. They
//! become the text of a JSON object, piece by piece.

use super::{ParameterKind, ToolSignature};
use crate::stop::overlap;

/// The arguments of one call.
#[derive(Clone, Debug)]
pub(super) struct XmlArguments {
    signature: ToolSignature,
    state: XmlState,
    /// Parameters that have begun.
    count: u32,
}

#[derive(Clone, Debug)]
enum XmlState {
    Between,
    /// A value that is text, written as it comes.
    Text,
    /// A value that is JSON or not, which only the whole value tells.
    Json(String),
}

/// A part of the answer that was read.
#[derive(Debug, Default)]
pub(super) struct XmlText {
    /// Bytes of the part.
    pub(super) bytes: usize,
    /// The part as text of a JSON object.
    pub(super) json: String,
}

/// The way in which the arguments ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClosedBy {
    /// Their end.
    End,
    /// Something that is neither an argument nor their end.
    Other,
}

impl XmlArguments {
    pub(super) fn new(signature: ToolSignature) -> Self {
        Self { signature, state: XmlState::Between, count: 0 }
    }

    /// Reads from the start of `text` what is decided.
    pub(super) fn read(&mut self, text: &str) -> (XmlText, Option<ClosedBy>) {
        let mut taken = XmlText::default();
        loop {
            let before = taken.bytes;
            let rest = &text[taken.bytes..];
            match self.state {
                XmlState::Between => {
                    if let Some(closed) = self.between(rest, &mut taken) {
                        return (taken, Some(closed));
                    }
                }
                XmlState::Text | XmlState::Json(_) => self.value(rest, &mut taken),
            }
            if taken.bytes == before {
                return (taken, None);
            }
        }
    }

    /// Ends the answer within the arguments; returns the JSON for the undecided `text`.
    pub(super) fn finish(&mut self, text: &str) -> String {
        match std::mem::replace(&mut self.state, XmlState::Between) {
            XmlState::Between => String::new(),
            XmlState::Text => escaped(text),
            XmlState::Json(value) => json(&(value + text)),
        }
    }

    fn between(&mut self, rest: &str, taken: &mut XmlText) -> Option<ClosedBy> {
        let element = rest.trim_start();
        let space = rest.len() - element.len();
        if element.starts_with(END) {
            taken.bytes += space + END.len();
            taken.json.push_str(self.closing());
            return Some(ClosedBy::End);
        }
        // The element may still become one of the two.
        if END.starts_with(element) || PARAMETER.starts_with(element) {
            return None;
        }
        let named = element.strip_prefix(PARAMETER).map(|rest| (rest, rest.find('>')));
        match named {
            Some((name, Some(length))) if length <= MOST_NAME_BYTES => {
                let (name, value) = (&name[..length], &name[length + 1..]);
                // One line break belongs to the form, and may be on its way.
                if value.is_empty() {
                    return None;
                }
                let line_break = usize::from(value.starts_with('\n'));
                taken.bytes += space + PARAMETER.len() + length + 1 + line_break;
                taken.json.push_str(if self.count == 0 { "{\"" } else { ", \"" });
                taken.json.push_str(&escaped(name));
                taken.json.push_str("\": ");
                self.count += 1;
                self.state = match self.signature.parameters.get(name) {
                    Some(ParameterKind::Text) => {
                        taken.json.push('"');
                        XmlState::Text
                    }
                    // Held back, because only the whole value shows if it is JSON.
                    Some(ParameterKind::Json) | None => XmlState::Json(String::new()),
                };
                None
            }
            // Bounded, so that a name without an end does not hold back the text for ever.
            Some((name, None)) if name.len() <= MOST_NAME_BYTES => None,
            _ => {
                taken.json.push_str(self.closing());
                Some(ClosedBy::Other)
            }
        }
    }

    fn value(&mut self, rest: &str, taken: &mut XmlText) {
        let end = rest.find(VALUE_END);
        let length = match end {
            Some(at) => at - usize::from(rest[..at].ends_with('\n')),
            // The line break before the end belongs to the form.
            None => rest.len() - overlap(rest, LINE_AND_VALUE_END).max(overlap(rest, VALUE_END)),
        };
        let piece = &rest[..length];
        match &mut self.state {
            XmlState::Json(value) => value.push_str(piece),
            _ => taken.json.push_str(&escaped(piece)),
        }
        taken.bytes += match end {
            None => length,
            Some(at) => at + VALUE_END.len(),
        };
        if end.is_some() {
            match std::mem::replace(&mut self.state, XmlState::Between) {
                XmlState::Json(value) => taken.json.push_str(&json(&value)),
                _ => taken.json.push('"'),
            }
        }
    }

    fn closing(&self) -> &'static str {
        if self.count == 0 { "{}" } else { "}" }
    }
}

/// Returns `text` as the inside of a JSON string.
fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Returns `value` if it is JSON, and a JSON string of it otherwise.
fn json(value: &str) -> String {
    let value = value.trim();
    match value {
        // Models often write the words of Python.
        "True" => "true".to_owned(),
        "False" => "false".to_owned(),
        "None" => "null".to_owned(),
        _ if serde_json::from_str::<serde::de::IgnoredAny>(value).is_ok() => value.to_owned(),
        _ => format!("\"{}\"", escaped(value)),
    }
}

const PARAMETER: &str = "<parameter=";
const VALUE_END: &str = "</parameter>";
const LINE_AND_VALUE_END: &str = "\n</parameter>";
const END: &str = "</function>";
/// The longest name of a parameter, in bytes.
const MOST_NAME_BYTES: usize = 256;
