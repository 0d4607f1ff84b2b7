//! Messages into token ids, such that control tokens come from the template
//! alone (T36), while honest text encodes exactly as the model was trained on.
//!
//! The template is rendered twice: with the messages as they are, and with
//! every character of theirs that could begin a control token followed by a
//! mark (a private-use character that occurs nowhere in them), and their
//! first word preceded by one. In the second rendering no control token can
//! hold a character of theirs, so what is found there is the template's own.
//! If the first rendering shows the same tokens, it may be encoded; otherwise
//! some message spells a control token, and the second is, its marks taken out.

use std::collections::HashSet;

use tollgate_domain::UtcTime;

use crate::control::Found;
use crate::{ChatTemplate, TextError, Tokenizer};

/// Who speaks in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The operator of the application; `developer` is another name for it.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// A role that no chat template knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role must be system, developer, user or assistant")]
pub struct UnknownRole;

impl Role {
    /// The role as templates call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = UnknownRole;
    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        match text {
            "system" | "developer" => Ok(Self::System),
            "user" => Ok(Self::User),
            "assistant" => Ok(Self::Assistant),
            _ => Err(UnknownRole),
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What they say, as one text.
    pub content: String,
}

/// The prompt that asks the model to answer `messages`. `now` is what a
/// template that prints the date prints.
///
/// # Errors
/// When the template refuses the messages or fails, or the text cannot be
/// encoded.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[ChatMessage],
    now: UtcTime,
) -> Result<Vec<u32>, TextError> {
    let control = tokenizer.control();
    let plain = template.render(messages, now)?;
    let found = control.find(&plain);
    if control.is_empty() {
        return tokenizer.encode_marked(&plain, &found);
    }
    let mark = unused_mark(messages, &plain)?;
    let marked: Vec<ChatMessage> = messages
        .iter()
        .map(|message| ChatMessage {
            role: message.role,
            content: with_marks(&message.content, mark, |c| control.may_begin_with(c)),
        })
        .collect();
    let (guarded, ours) =
        without_marks(&template.render(&marked, now)?, mark, |text| control.find(text));
    // The renderings differ where a template looks into a message (for
    // `</think>`, say) and a mark hid what it looks for.
    if plain != guarded && ids(&found).eq(ids(&ours)) {
        tokenizer.encode_marked(&plain, &found)
    } else {
        tokenizer.encode_marked(&guarded, &ours)
    }
}

fn ids(found: &[Found]) -> impl Iterator<Item = u32> {
    found.iter().map(|found| found.id)
}

/// A private-use character that neither the messages nor what the template
/// makes of them holds.
fn unused_mark(messages: &[ChatMessage], rendered: &str) -> Result<char, TextError> {
    let private = '\u{100000}'..='\u{10FFFD}';
    let used: HashSet<char> = messages
        .iter()
        .flat_map(|message| message.content.chars())
        .chain(rendered.chars())
        .filter(|c| private.contains(c))
        .collect();
    private.into_iter().find(|c| !used.contains(c)).ok_or(TextError::NoMark)
}

fn with_marks(content: &str, mark: char, may_begin: impl Fn(char) -> bool) -> String {
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

/// Takes the marks out of `marked`; returns the text and the control tokens
/// that `find` sees while the marks are in, at their places in the text.
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
        // A token itself holds no mark, nor does the white space it takes.
        text.push_str(&marked[token.span.clone()]);
        at = token.span.end;
        token.span = start..text.len();
    }
    text.extend(marked[at..].chars().filter(|&c| c != mark));
    (text, found)
}
