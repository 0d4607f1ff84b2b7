//! A prompt in the form in which a client may send it.

use crate::ChatMessage;

/// One or several prompts, before they become tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A conversation that a chat template turns into one prompt.
    Messages(Vec<ChatMessage>),
    /// Texts, each a prompt of its own, encoded as they are.
    Texts(Vec<String>),
    /// Token ids, each list a prompt of its own.
    Tokens(Vec<Vec<u32>>),
}
