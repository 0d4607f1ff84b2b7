//! Text in, token ids out, and back: tokenizer, chat template, incremental
//! decoding, stop strings. Used by the gateway (which renders and encodes) and
//! by the worker (which decodes). No device, no I/O, no clock.
//!
//! Two things may never happen here: a caller's text becoming a control token
//! (see [`encode_chat`]), and a template or a text making work that its size
//! does not bound.

mod chat;
mod control;
mod error;
mod pieces;
mod prompt;
mod stop;
mod stream;
mod template;
mod tokenizer;

pub use chat::{ChatMessage, Role, UnknownRole, encode_chat};
pub use error::TextError;
pub use prompt::Prompt;
pub use stop::{Released, StopMatcher};
pub use stream::TextStream;
pub use template::{ChatTemplate, TokenizerConfig};
pub use tokenizer::Tokenizer;
