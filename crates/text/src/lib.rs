//! Text and tokens: tokenizer, chat template, incremental decoding and stop
//! strings. The gateway renders and encodes with this crate; the worker decodes
//! with it. The crate does no I/O and reads no clock.
//!
//! Two rules must always hold. The text of a caller never becomes a control token
//! (see [`encode_chat`]). The work for a template or a text is bounded by its
//! size.

mod chat;
mod control;
mod error;
mod infill;
mod pieces;
mod prompt;
mod stop;
mod stream;
mod template;
mod tokenizer;

pub use chat::encode_chat;
pub use error::TextError;
pub use infill::InfillTokens;
pub use prompt::{Chat, ChatMessage, Prompt, Role, TextWithGap, UnknownRole};
pub use stop::{Released, StopMatcher};
pub use stream::TextStream;
pub use template::{ChatTemplate, TokenizerConfig, is_template_argument};
pub use tokenizer::Tokenizer;
