//! Encoding of chats. Control tokens come from the template alone, and honest text
//! encodes exactly as in the model's training.
//!
//! The template is rendered twice. The first rendering has the messages as they
//! are. In the second rendering a mark follows every character of a message that
//! could begin a control token, and precedes the first word of each message. The
//! mark is a private-use character that occurs nowhere else, so every control
//! token of the second rendering comes from the template. If both renderings
//! have the same control tokens, the first is encoded. Otherwise a message spells
//! a control token, and the second rendering is encoded without its marks.
//!
//! Tools and calls are texts of the caller, too, and are marked in the same way: names,
//! descriptions, the keys and texts of schemas and arguments. The words that templates
//! compare or look up, such as `type` and `object`, have no marks, and neither has a word
//! that cannot be a part of any control token.
//!
//! The client's other values for the template have no marks, because templates
//! compare them. A text among them is refused if it has a character that begins a
//! control token.

use std::collections::HashSet;

use serde_json::Value;
use tollgate_domain::UtcTime;

use crate::control::{ControlTokens, Found};
use crate::{AnsweredCall, Chat, ChatMessage, ChatTemplate, TextError, Tokenizer, ToolCall};

/// Returns the tokens of the prompt that asks the model to answer `chat`.
/// Templates that print the date print the one of `now`. Stops soon after `most`
/// tokens.
///
/// # Errors
/// The template refuses the messages or fails, an argument could begin a control token,
/// the text cannot be encoded, or it has more than `most` tokens.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Chat,
    now: UtcTime,
    most: usize,
) -> Result<Vec<u32>, TextError> {
    let control = tokenizer.control();
    for (name, value) in &chat.arguments {
        check_argument(name, value, &|c| control.may_begin_with(c))?;
    }
    let plain = template.render(chat, now)?;
    let found = control.find(&plain);
    // Each control token becomes at least one token. Thousands of short messages are
    // refused here, before the second rendering.
    if found.len() > most {
        return Err(TextError::TooLong { at_least: found.len() });
    }
    // Without control tokens there is nothing to protect.
    if control.is_empty() {
        return tokenizer.encode_marked(&plain, &found, most);
    }
    // The template's own text does not contain the mark either; otherwise removing
    // the marks would change that text.
    let marks = Marks { mark: unused_mark(chat, &plain)?, control };
    let marked = marks.chat(chat);
    let (guarded, ours) =
        without_marks(&template.render(&marked, now)?, marks.mark, |text| control.find(text));
    // Without marks both renderings are usually equal. They differ if the template
    // searches a message, for `</think>` as an example, and a mark hides the match.
    // Equal control tokens prove that the messages spell none, so the first
    // rendering is safe and closer to the training text.
    if plain != guarded && ids(&found).eq(ids(&ours)) {
        tokenizer.encode_marked(&plain, &found, most)
    } else {
        tokenizer.encode_marked(&guarded, &ours, most)
    }
}

fn ids(found: &[Found]) -> impl Iterator<Item = u32> {
    found.iter().map(|found| found.id)
}

/// Refuses texts in `value` that have a character for which `may_begin` is true, names
/// of entries included.
fn check_argument(
    name: &str,
    value: &Value,
    may_begin: &impl Fn(char) -> bool,
) -> Result<(), TextError> {
    let check_text = |text: &str| match text.chars().find(|&c| may_begin(c)) {
        Some(found) => Err(TextError::Argument { name: name.to_owned(), found }),
        None => Ok(()),
    };
    match value {
        Value::String(text) => check_text(text),
        Value::Array(values) => {
            values.iter().try_for_each(|value| check_argument(name, value, may_begin))
        }
        Value::Object(entries) => entries.iter().try_for_each(|(key, value)| {
            check_text(key)?;
            check_argument(name, value, may_begin)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

/// Returns a private-use character that occurs neither in the chat nor in the rendered
/// text.
fn unused_mark(chat: &Chat, rendered: &str) -> Result<char, TextError> {
    let private = '\u{100000}'..='\u{10FFFD}';
    let mut used = HashSet::new();
    let mut add = |text: &str| used.extend(text.chars().filter(|c| private.contains(c)));
    add(rendered);
    for ChatMessage { role: _, content, reasoning, tool_calls, answers } in &chat.messages {
        add(content);
        reasoning.iter().for_each(|text| add(text));
        for ToolCall { id, name, arguments } in tool_calls {
            add(id);
            add(name);
            each_text(arguments, &mut add);
        }
        if let Some(AnsweredCall { id, name }) = answers {
            add(id);
            add(name);
        }
    }
    for value in chat.arguments.values().chain(&chat.tools) {
        each_text(value, &mut add);
    }
    private.into_iter().find(|c| !used.contains(c)).ok_or(TextError::NoMark)
}

/// Calls `visit` for each text in `value`, keys of objects included.
fn each_text(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(values) => values.iter().for_each(|value| each_text(value, visit)),
        Value::Object(entries) => {
            for (key, value) in entries {
                visit(key);
                each_text(value, visit);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The mark, and the control tokens that it keeps apart.
struct Marks<'a> {
    mark: char,
    control: &'a ControlTokens,
}

impl Marks<'_> {
    /// Returns `chat` with marks in every text of the caller.
    fn chat(&self, chat: &Chat) -> Chat {
        Chat {
            messages: chat.messages.iter().map(|message| self.message(message)).collect(),
            arguments: chat.arguments.clone(),
            tools: chat.tools.iter().map(|tool| self.json(tool)).collect(),
        }
    }

    fn message(&self, message: &ChatMessage) -> ChatMessage {
        let ChatMessage { role, content, reasoning, tool_calls, answers } = message;
        let tool_calls = tool_calls.iter().map(|ToolCall { id, name, arguments }| ToolCall {
            id: self.word(id),
            name: self.word(name),
            arguments: self.json(arguments),
        });
        ChatMessage {
            role: *role,
            content: self.text(content),
            reasoning: reasoning.as_ref().map(|text| self.text(text)),
            tool_calls: tool_calls.collect(),
            answers: answers.as_ref().map(|AnsweredCall { id, name }| AnsweredCall {
                id: self.word(id),
                name: self.word(name),
            }),
        }
    }

    fn json(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.word(text)),
            Value::Array(values) => values.iter().map(|value| self.json(value)).collect(),
            Value::Object(entries) => {
                entries.iter().map(|(key, value)| (self.word(key), self.json(value))).collect()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// Marks a text that templates may compare, look up or measure, unless it is harmless
    /// as it is.
    fn word(&self, text: &str) -> String {
        // Templates write no part of a control token beside a word of a schema.
        match SCHEMA_WORDS.contains(&text) || self.control.cannot_contain(text) {
            true => text.to_owned(),
            false => self.text(text),
        }
    }

    /// Returns `content` with a mark before its first word and after each character
    /// that may begin a control token.
    fn text(&self, content: &str) -> String {
        // A token that strips the white space on its right would otherwise hide the
        // border between the template and the message.
        let word = content.len() - content.trim_start().len();
        let mut marked = String::with_capacity(content.len() + content.len() / 8 + 4);
        for (at, c) in content.char_indices() {
            if at == word {
                marked.push(self.mark);
            }
            marked.push(c);
            if self.control.may_begin_with(c) {
                marked.push(self.mark);
            }
        }
        marked
    }
}

/// The keys and types of tools and schemas, which templates look up and compare.
const SCHEMA_WORDS: &[&str] = &[
    "type",
    "function",
    "name",
    "description",
    "parameters",
    "properties",
    "required",
    "items",
    "enum",
    "object",
    "array",
    "string",
    "number",
    "integer",
    "boolean",
    "null",
];

/// Removes the marks from `marked`. Returns the text, and the control tokens that
/// `find` sees in the marked text, with their places in the text without marks.
fn without_marks(
    marked: &str,
    mark: char,
    find: impl Fn(&str) -> Vec<Found>,
) -> (String, Vec<Found>) {
    let mut found = find(marked);
    let mut text = String::with_capacity(marked.len());
    let mut at = 0;
    for token in &mut found {
        text.extend(marked[at..token.span.start].chars().filter(|&c| c != mark));
        let start = text.len();
        // Neither a token nor the white space around it contains a mark.
        text.push_str(&marked[token.span.clone()]);
        at = token.span.end;
        token.span = start..text.len();
    }
    text.extend(marked[at..].chars().filter(|&c| c != mark));
    (text, found)
}
