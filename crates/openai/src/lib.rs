//! The formats of the OpenAI API: JSON to checked requests, results to JSON.
//!
//! Everything here is a pure function of its input: no HTTP, no tenants, no
//! models. A caller checks a body with [`json::text`], parses it with an
//! [`Interface`], and renders the results with a [`ResponseBuilder`] or a
//! [`ChunkWriter`]. Each dialect of the API is one [`Interface`] in one file;
//! [`CHAT`] and [`COMPLETIONS`] are the two that exist.
//!
//! Parsing never builds a value that is larger than its bound, and never
//! ignores a known field that it does not support.

pub mod batches;
mod chat;
mod completions;
mod fields;
pub mod files;
mod interface;
pub mod json;
mod logprobs;
mod regex_check;
mod request;
mod response;
mod response_builder;
pub mod schema;
pub mod schema_check;
mod schema_formats;
mod schema_hints;
pub mod sse;
mod stream;
mod structured;
mod tools;
mod usage;

pub use chat::CHAT;
pub use completions::COMPLETIONS;
pub use fields::Violation;
pub use interface::{ChunkPart, Interface};
pub use request::{
    CompletionRequest, FLEX, MaxTokens, RequestLimits, SERVICE_TIER, SamplingFields, StreamOptions,
};
pub use response::{CollectedCall, Echo, ResponseChoice, ResponseMeta, WholeResponse};
pub use response_builder::ResponseBuilder;
pub use stream::ChunkWriter;
pub use tools::{Tool, ToolUse};
pub use usage::UsageReport;
