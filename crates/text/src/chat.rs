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
//! The client's other values for the template have no marks, because templates
//! compare them. A text among them is refused if it has a character that begins a
//! control token.

use std::collections::HashSet;

use serde_json::Value;
use tollgate_domain::UtcTime;

use crate::control::Found;
use crate::{Chat, ChatMessage, ChatTemplate, TextError, Tokenizer};

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
    let mark = unused_mark(chat, &plain)?;
    // The template's own text does not contain the mark either; otherwise removing
    // the marks would change that text.
    let messages = chat
        .messages
        .iter()
        .map(|message| ChatMessage {
            role: message.role,
            content: with_marks(&message.content, mark, |c| control.may_begin_with(c)),
        })
        .collect();
    let marked = Chat { messages, arguments: chat.arguments.clone() };
    let (guarded, ours) =
        without_marks(&template.render(&marked, now)?, mark, |text| control.find(text));
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
    let arguments: String = chat
        .arguments
        .values()
        .filter(|value| value.is_string() || value.is_array() || value.is_object())
        .map(Value::to_string)
        .collect();
    let used: HashSet<char> = chat
        .messages
        .iter()
        .flat_map(|message| message.content.chars())
        .chain(rendered.chars())
        .chain(arguments.chars())
        .filter(|c| private.contains(c))
        .collect();
    private.into_iter().find(|c| !used.contains(c)).ok_or(TextError::NoMark)
}

/// Returns `content` with a mark before its first word and after each character
/// that may begin a control token.
fn with_marks(content: &str, mark: char, may_begin: impl Fn(char) -> bool) -> String {
    // A token that strips the white space on its right would otherwise hide the
    // border between the template and the message.
    let word = content.len() - content.trim_start().len();
    let mut marked = String::with_capacity(content.len() + content.len() / 8 + 4);
    for (at, c) in content.char_indices() {
        if at == word {
            marked.push(mark);
        }
        marked.push(c);
        if may_begin(c) {
            marked.push(mark);
        }
    }
    marked
}

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
