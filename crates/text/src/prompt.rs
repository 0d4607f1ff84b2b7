//! Prompts and messages in the form in which a client may send them.

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
