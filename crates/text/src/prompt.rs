//! Prompts and messages in the form in which a client may send them.

use std::collections::BTreeMap;

use serde_json::Value;

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The operator of the application, also called `developer`.
    System,
    /// The person that asks.
    User,
    /// The model that answers.
    Assistant,
    /// The application, with the result of a tool that the model called.
    Tool,
}

/// The name of a role that no chat template knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role must be system, developer, user, assistant or tool")]
pub struct UnknownRole;

impl Role {
    /// Returns the name of the role in templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
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
            "tool" => Ok(Self::Tool),
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
    /// The reasoning before the content, of an assistant's message.
    pub reasoning: Option<String>,
    /// The calls of tools, of an assistant's message.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool's message answers.
    pub answers: Option<AnsweredCall>,
}

/// A call of a tool that the model made earlier in the conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The call's id.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments, a JSON object.
    pub arguments: Value,
}

/// The call that a tool's message answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnsweredCall {
    /// The call's id.
    pub id: String,
    /// The name of the tool.
    pub name: String,
}

impl ChatMessage {
    /// Returns a message with text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        let content = content.into();
        Self { role, content, reasoning: None, tool_calls: Vec::new(), answers: None }
    }

    /// Returns the bytes of the message's texts, with the calls as JSON.
    fn bytes(&self) -> usize {
        let calls = self.tool_calls.iter();
        let calls: usize = calls.map(|call| call.name.len() + json_bytes(&call.arguments)).sum();
        self.content.len() + self.reasoning.as_ref().map_or(0, String::len) + calls
    }
}

/// A conversation, with the values that its client gives to the chat template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chat {
    /// The messages.
    pub messages: Vec<ChatMessage>,
    /// Further variables of the template, such as `enable_thinking`, as JSON.
    pub arguments: BTreeMap<String, Value>,
    /// The tools that the model may call, as JSON in the order in which the template
    /// prints it.
    pub tools: Vec<Value>,
}

impl Chat {
    /// Returns the bytes of all texts that a template may print, tools as JSON included.
    pub fn bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(ChatMessage::bytes).sum();
        messages + self.tools.iter().map(json_bytes).sum::<usize>()
    }

    /// Returns the number of JSON values in tools and calls, which a template may visit
    /// one by one.
    pub(crate) fn json_values(&self) -> usize {
        let calls = self.messages.iter().flat_map(|message| &message.tool_calls);
        calls.map(|call| &call.arguments).chain(&self.tools).map(json_values).sum()
    }
}

impl From<Vec<ChatMessage>> for Chat {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self { messages, ..Self::default() }
    }
}

/// Returns about the bytes of `value` as JSON: all texts, and a few bytes for each value.
fn json_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 5,
        Value::Number(_) => 8,
        Value::String(text) => text.len() + 4,
        Value::Array(values) => 4 + values.iter().map(json_bytes).sum::<usize>(),
        Value::Object(entries) => {
            4 + entries.iter().map(|(key, value)| key.len() + 4 + json_bytes(value)).sum::<usize>()
        }
    }
}

fn json_values(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(json_values).sum::<usize>(),
        Value::Object(entries) => 1 + entries.values().map(json_values).sum::<usize>(),
        _ => 1,
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
