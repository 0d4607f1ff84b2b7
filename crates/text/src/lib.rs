//! Text and tokens: tokenizer, chat template, incremental decoding and stop
//! strings. The gateway renders and encodes with this crate; the worker decodes
//! with it. The crate does no I/O and reads no clock.
//!
//! The gateway also reads answers with it: reasoning, and calls of tools.
//!
//! Two rules must always hold. The text of a caller never becomes a control token
//! (see [`encode_chat`]). The work for a template or a text is bounded by its
//! size.

mod answer;
mod chat;
mod control;
mod error;
mod infill;
mod pieces;
mod prompt;
mod reasoning;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod tools;

pub use answer::{AnswerParser, AnswerPiece, AnswerSyntax, ReasoningSyntax};
pub use chat::encode_chat;
pub use error::TextError;
pub use infill::InfillTokens;
pub use prompt::{
    AnsweredCall, Chat, ChatMessage, Prompt, Role, TextWithGap, ToolCall, UnknownRole,
};
pub use stop::{Released, StopMatcher};
pub use stream::TextStream;
pub use template::{ChatTemplate, TokenizerConfig, is_template_argument};
pub use tokenizer::Tokenizer;
pub use tools::{
    CallRules, ParameterKind, ToolSignature, ToolSignatures, call_grammar, tool_markers,
};
