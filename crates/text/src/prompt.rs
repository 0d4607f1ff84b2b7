//! Prompts and messages in the form in which a client may send them.

use std::collections::BTreeMap;

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The operator of the application, also called `developer`.
    System,
    /// The person that asks.
    User,
    /// The model that answers.
    Assistant,
}

/// The name of a role that no chat template knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role must be system, developer, user or assistant")]
pub struct UnknownRole;

impl Role {
    /// Returns the name of the role in templates.
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
    /// The speaker.
    pub role: Role,
    /// The whole message as one text.
    pub content: String,
}

/// A conversation, with the values that its client gives to the chat template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chat {
    /// The messages.
    pub messages: Vec<ChatMessage>,
    /// Further variables of the template, such as `enable_thinking`, as JSON.
    pub arguments: BTreeMap<String, serde_json::Value>,
}

impl From<Vec<ChatMessage>> for Chat {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self { messages, arguments: BTreeMap::new() }
    }
}

/// A text with a gap that the model fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextWithGap<'a> {
    /// The text before the gap.
    pub before: &'a str,
    /// The text after the gap.
    pub after: &'a str,
}

/// One or several prompts, before they become tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A conversation that a chat template turns into one prompt.
    Chat(Chat),
    /// Texts, each a prompt of its own, encoded as they are.
    Texts(Vec<String>),
    /// Texts with a gap at their end, each a prompt of its own, and the text that follows
    /// each gap.
    Infill {
        /// The texts before their gaps.
        before: Vec<String>,
        /// The text after each gap.
        after: String,
    },
    /// Token ids, each list a prompt of its own.
    Tokens(Vec<Vec<u32>>),
}
