//! The parser of calls. It reads an answer in pieces of any size and gives the same text
//! and calls for all sizes. Text that may still become a call is held back: at most the
//! beginning of one call, up to its arguments. What is no call is text.

use std::ops::Bound;
use std::sync::Arc;

use tollgate_domain::ToolFormat;

use super::ToolSignatures;
use super::pattern::{Match, Names, Part, matches};
use super::xml::{ClosedBy, XmlArguments};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolPiece {
    /// Text for the reader.
    Text(String),
    /// The start of a call of the tool with this name.
    Call(String),
    /// Further text of the arguments of the call, as the model wrote it.
    Arguments(String),
}

/// The text after the arguments of a call.
#[derive(Clone, Copy, Debug)]
enum After {
    /// The end of the call.
    Tail,
    /// Nothing that belongs to the call.
    Nothing,
}

/// A parser of one answer.
#[derive(Clone, Debug)]
pub(crate) struct ToolParser {
    format: ToolFormat,
    tools: Arc<ToolSignatures>,
    /// Text that is not decided yet.
    held: String,
    /// White space that goes out before further text, and is dropped before a call.
    blank: String,
    state: ParserState,
    calls: u32,
    /// True once text other than white space went out.
    has_text: bool,
    /// True if text other than white space went out after the latest call.
    has_text_since_call: bool,
    /// True if the answer ended within the arguments of a call.
    is_cut_off: bool,
}

#[derive(Clone, Debug)]
enum ParserState {
    /// Text, before and between calls.
    Text,
    /// The arguments of a call as JSON.
    Json(JsonScan, After),
    /// The text between the arguments and the end of the call.
    Tail,
    /// The text after a call in a list.
    List,
    /// The arguments of a call as elements.
    Xml(XmlArguments),
}

impl Names for ToolSignatures {
    fn is_name(&self, name: &str) -> bool {
        self.contains_key(name)
    }

    fn may_begin(&self, start: &str) -> bool {
        // Of the sorted names, those that begin with `start` follow it directly.
        let from = (Bound::Included(start), Bound::Unbounded);
        self.range::<str, _>(from).next().is_some_and(|(name, _)| name.starts_with(start))
    }
}

impl ToolParser {
    pub(crate) fn new(format: ToolFormat, tools: Arc<ToolSignatures>) -> Self {
        Self {
            format,
            tools,
            held: String::new(),
            blank: String::new(),
            state: ParserState::Text,
            calls: 0,
            has_text: false,
            has_text_since_call: false,
            is_cut_off: false,
        }
    }

    /// Takes the next piece of the answer; appends what is decided by it to `out`.
    pub(crate) fn push(&mut self, piece: &str, out: &mut Vec<ToolPiece>) {
        self.held.push_str(piece);
        while self.step(out) {}
    }

    /// Ends the answer; appends the text that was held back to `out`.
    pub(crate) fn finish(&mut self, out: &mut Vec<ToolPiece>) {
        let held = std::mem::take(&mut self.held);
        let state = std::mem::replace(&mut self.state, ParserState::Text);
        self.is_cut_off = matches!(state, ParserState::Json(..) | ParserState::Xml(_));
        match state {
            ParserState::Text => {
                self.text(&held, out);
                // After a call, white space belongs to the form. An answer of white space
                // alone is text.
                let blank = std::mem::take(&mut self.blank);
                if self.calls == 0 && !blank.is_empty() {
                    push_text(&blank, out);
                }
            }
            ParserState::Json(..) => push_arguments(&held, out),
            // An incomplete end of a call has nothing for the reader.
            ParserState::Tail | ParserState::List => {}
            ParserState::Xml(mut arguments) => push_arguments(&arguments.finish(&held), out),
        }
    }

    /// Returns true if the answer had calls, and the arguments of the last one were complete.
    /// Call it after [`Self::finish`].
    pub(crate) fn has_called(&self) -> bool {
        self.calls > 0 && !self.is_cut_off
    }

    /// Returns the bytes that are held back, white space excluded.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.held.trim().len()
    }

    /// Decides about the front of the held text. Returns false if that needs more text.
    fn step(&mut self, out: &mut Vec<ToolPiece>) -> bool {
        if self.held.is_empty() {
            return false;
        }
        match &mut self.state {
            ParserState::Text => self.find_call(out),
            ParserState::Json(scan, after) => {
                let after = *after;
                let (length, ended) = scan.scan(&self.held);
                let rest = self.held.split_off(length);
                push_arguments(&std::mem::replace(&mut self.held, rest), out);
                if ended {
                    self.state = match after {
                        After::Tail => ParserState::Tail,
                        After::Nothing => ParserState::Text,
                    };
                }
                ended
            }
            ParserState::Tail => self.tail(),
            ParserState::List => self.list(out),
            ParserState::Xml(arguments) => {
                let (taken, closed) = arguments.read(&self.held);
                let rest = self.held.split_off(taken.bytes);
                self.held = rest;
                push_arguments(&taken.json, out);
                match closed {
                    None => false,
                    Some(ClosedBy::End) => {
                        self.state = ParserState::Tail;
                        true
                    }
                    // The model left the form, so the rest is text.
                    Some(ClosedBy::Other) => {
                        self.state = ParserState::Text;
                        true
                    }
                }
            }
        }
    }

    /// Searches the held text for the start of a call.
    fn find_call(&mut self, out: &mut Vec<ToolPiece>) -> bool {
        let held = std::mem::take(&mut self.held);
        // A call of any form begins with one of these characters.
        for (at, _) in held.match_indices(['<', '[', '{', ';']) {
            // A bare object is a call only if the answer has no text.
            let is_bare =
                self.format == ToolFormat::Llama3 && !self.has_text && held[..at].trim().is_empty();
            for &(start, form) in starts(self.format, is_bare, self.calls) {
                match matches(start, &held[at..], self.tools.as_ref()) {
                    Match::Not => {}
                    // The text before it is certain; the rest may become a call.
                    Match::Partial => {
                        self.text(&held[..at], out);
                        self.held = held[at..].to_owned();
                        return false;
                    }
                    Match::Whole { length, name } => {
                        self.text(&held[..at], out);
                        let name = &held[at..][name];
                        self.held = held[at + length..].to_owned();
                        self.begin(name, form, out);
                        return true;
                    }
                }
            }
        }
        self.text(&held, out);
        false
    }

    fn begin(&mut self, name: &str, form: Form, out: &mut Vec<ToolPiece>) {
        // White space before a call belongs to the form.
        self.blank.clear();
        self.has_text_since_call = false;
        self.calls += 1;
        out.push(ToolPiece::Call(name.to_owned()));
        self.state = match form {
            Form::Json => ParserState::Json(JsonScan::default(), After::Tail),
            Form::Bare => ParserState::Json(JsonScan::default(), After::Nothing),
            Form::Xml => {
                // The match took only the name of a tool, so the signature is there.
                let signature = self.tools.get(name).cloned().unwrap_or_default();
                ParserState::Xml(XmlArguments::new(signature))
            }
        };
    }

    fn tail(&mut self) -> bool {
        let (ends, after): (&[&[Part]], ParserState) = match self.format {
            ToolFormat::Hermes => (&[TAIL], ParserState::Text),
            ToolFormat::Qwen3Coder => (&[TAIL, XML_TAIL], ParserState::Text),
            ToolFormat::Llama3 => (&[OBJECT_END], ParserState::Text),
            ToolFormat::Mistral => (&[OBJECT_END_WITH_ID, OBJECT_END], ParserState::List),
        };
        match first(ends, &self.held, self.tools.as_ref()) {
            Match::Partial => false,
            Match::Whole { length, .. } => {
                self.held.drain(..length);
                self.state = after;
                true
            }
            // The model left the form, so the rest is text.
            Match::Not => {
                self.state = ParserState::Text;
                true
            }
        }
    }

    fn list(&mut self, out: &mut Vec<ToolPiece>) -> bool {
        let next = matches(LIST_ITEM, &self.held, self.tools.as_ref());
        let end = matches(LIST_END, &self.held, self.tools.as_ref());
        match (next, end) {
            (Match::Whole { length, name }, _) => {
                let name = self.held[name].to_owned();
                self.held.drain(..length);
                self.begin(&name, Form::Json, out);
                true
            }
            (_, Match::Whole { length, .. }) => {
                self.held.drain(..length);
                self.state = ParserState::Text;
                true
            }
            // The model left the form, so the rest is text.
            (Match::Not, Match::Not) => {
                self.state = ParserState::Text;
                true
            }
            // One of the two may still become whole.
            _ => false,
        }
    }

    /// Appends `text` to `out`, except for white space that may stand before a call.
    fn text(&mut self, text: &str, out: &mut Vec<ToolPiece>) {
        self.blank.push_str(text);
        // White space after other text goes out, however the pieces are cut.
        if !self.has_text_since_call && self.blank.trim().is_empty() {
            return;
        }
        self.has_text = true;
        self.has_text_since_call = true;
        let text = std::mem::take(&mut self.blank);
        push_text(&text, out);
    }
}

/// The progress through a JSON object.
#[derive(Clone, Copy, Debug, Default)]
struct JsonScan {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl JsonScan {
    /// Reads on in `text`; returns the bytes that belong to the object, and true if it
    /// ends with them.
    fn scan(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                // First, because an escaped quote does not end the string.
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'{' | b'[' if !self.in_string => self.depth = self.depth.saturating_add(1),
                b'}' | b']' if !self.in_string => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ => {}
            }
        }
        (text.len(), false)
    }
}

/// The form of a call's arguments.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// JSON within the object of the call.
    Json,
    /// JSON after the name.
    Bare,
    /// Elements.
    Xml,
}

fn first(patterns: &[&[Part]], text: &str, names: &impl Names) -> Match {
    let mut open = Match::Not;
    for pattern in patterns {
        match matches(pattern, text, names) {
            Match::Not => {}
            Match::Partial => open = Match::Partial,
            whole => return whole,
        }
    }
    open
}

fn push_text(text: &str, out: &mut Vec<ToolPiece>) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(ToolPiece::Text(last)) => last.push_str(text),
        _ => out.push(ToolPiece::Text(text.to_owned())),
    }
}

fn push_arguments(text: &str, out: &mut Vec<ToolPiece>) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(ToolPiece::Arguments(last)) => last.push_str(text),
        _ => out.push(ToolPiece::Arguments(text.to_owned())),
    }
}

/// Returns the patterns with which a call may begin after `calls` calls.
fn starts(format: ToolFormat, is_bare: bool, calls: u32) -> &'static [(&'static [Part], Form)] {
    match (format, is_bare, calls > 0) {
        (ToolFormat::Hermes, ..) => &[(HERMES, Form::Json)],
        (ToolFormat::Qwen3Coder, ..) => &[(QWEN3_CODER, Form::Xml), (HERMES, Form::Json)],
        (ToolFormat::Llama3, true, true) => &[(LLAMA3_NEXT, Form::Json), (LLAMA3, Form::Json)],
        (ToolFormat::Llama3, true, false) => &[(LLAMA3, Form::Json)],
        (ToolFormat::Llama3, false, _) => &[(LLAMA3_TAGGED, Form::Json)],
        (ToolFormat::Mistral, ..) => &[(MISTRAL, Form::Bare), (MISTRAL_LIST, Form::Json)],
    }
}

/// Declares patterns that end with the object of a call, up to its arguments.
macro_rules! object_patterns {
    ($($name:ident = [$($part:expr),* $(,)?];)*) => {
        $(
            const $name: &[Part] = &[
                $($part,)*
                Part::Text("{"),
                Part::Space,
                Part::Text("\"name\""),
                Part::Space,
                Part::Text(":"),
                Part::Space,
                Part::Text("\""),
                Part::Name,
                Part::Text("\""),
                Part::Space,
                Part::Text(","),
                Part::Space,
                Part::Either(&["\"arguments\"", "\"parameters\""]),
                Part::Space,
                Part::Text(":"),
                Part::Space,
                Part::Before("{"),
            ];
        )*
    };
}

object_patterns! {
    HERMES = [Part::Text("<tool_call>"), Part::Space];
    LLAMA3 = [Part::Maybe("<|python_tag|>"), Part::Space];
    LLAMA3_NEXT = [Part::Text(";"), Part::Space];
    LLAMA3_TAGGED = [Part::Text("<|python_tag|>"), Part::Space];
    MISTRAL_LIST = [Part::Text("[TOOL_CALLS]"), Part::Space, Part::Text("["), Part::Space];
    LIST_ITEM = [Part::Space, Part::Text(","), Part::Space];
}

const QWEN3_CODER: &[Part] = &[
    Part::Text("<tool_call>"),
    Part::Space,
    Part::Text("<function="),
    Part::Name,
    Part::Text(">"),
];
const MISTRAL: &[Part] = &[
    Part::Text("[TOOL_CALLS]"),
    Part::Space,
    Part::Name,
    Part::Maybe("[ARGS]"),
    Part::Space,
    Part::Before("{"),
];
const TAIL: &[Part] = &[Part::Space, Part::Text("}"), Part::Space, Part::Text("</tool_call>")];
const XML_TAIL: &[Part] = &[Part::Space, Part::Text("</tool_call>")];
const OBJECT_END: &[Part] = &[Part::Space, Part::Text("}")];
const OBJECT_END_WITH_ID: &[Part] = &[
    Part::Space,
    Part::Text(","),
    Part::Space,
    Part::Text("\"id\""),
    Part::Space,
    Part::Text(":"),
    Part::Space,
    Part::Text("\""),
    Part::Id,
    Part::Text("\""),
    Part::Space,
    Part::Text("}"),
];
const LIST_END: &[Part] = &[Part::Space, Part::Text("]")];
