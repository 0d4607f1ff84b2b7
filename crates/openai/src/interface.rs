//! The seam between the dialects of the API and the code that serves them all.

use std::fmt;

use tollgate_domain::{RequestId, StopReason, TextDelta, TokenLogprob};
use tollgate_text::AnswerPiece;

use crate::{CompletionRequest, Echo, RequestLimits, ResponseMeta, Violation, WholeResponse};

/// One dialect of the API: the shape of its requests and of its responses.
///
/// The bookkeeping that all dialects share (the order of chunks, the choices of
/// each prompt, text offsets) is done by [`crate::ResponseBuilder`] and
/// [`crate::ChunkWriter`]; an interface only knows how its JSON looks.
pub trait Interface: fmt::Debug + Send + Sync {
    /// Returns the name of the field that carries the prompt.
    fn prompt_field(&self) -> &'static str;

    /// Returns the prefix of response ids, such as `chatcmpl-`.
    fn id_prefix(&self) -> &'static str;

    /// Returns the id of the response to `request`. It differs from the id in the
    /// header by its prefix alone, so that either id leads to the other.
    fn response_id(&self, request: &RequestId) -> String {
        let bare = request.as_str().strip_prefix("req-").unwrap_or(request.as_str());
        format!("{}{bare}", self.id_prefix())
    }

    /// Returns the value of `object` in the chunks of a stream.
    fn chunk_object(&self) -> &'static str;

    /// Parses and checks the body of a request.
    ///
    /// # Errors
    /// A [`Violation`] that names the first field that breaks a rule.
    fn parse(&self, body: &str, limits: &RequestLimits) -> Result<CompletionRequest, Violation>;

    /// Renders a response in one piece as a JSON object.
    fn response(&self, response: &WholeResponse<'_>) -> Vec<u8>;

    /// Appends the event for `part` of choice `choice` to `out`; appends nothing
    /// if the dialect has no chunk for that part.
    fn write_chunk(&self, meta: &ResponseMeta, choice: u32, part: ChunkPart<'_>, out: &mut Vec<u8>);
}

/// One part of a choice in a stream.
#[derive(Clone, Copy, Debug)]
pub enum ChunkPart<'a> {
    /// The start of a choice, before its first text.
    Start {
        /// The prompt, if the response repeats it.
        echo: Option<&'a Echo>,
    },
    /// The start of a choice that repeats its prompt with log-probabilities.
    ScoredPrompt {
        /// The prompt.
        echo: &'a Echo,
        /// The prompt's tokens after the first one.
        tokens: &'a [TokenLogprob],
    },
    /// New text.
    Delta {
        /// The text and its tokens.
        delta: &'a TextDelta,
        /// The number of characters of the choice before this text.
        offset: u64,
    },
    /// New text of an answer that may have reasoning and calls of tools.
    Piece {
        /// The text.
        piece: &'a AnswerPiece,
        /// The index of the latest call of the choice.
        call: u32,
        /// The tokens since the piece before.
        tokens: &'a [TokenLogprob],
    },
    /// The end of a choice.
    End {
        /// The reason why the choice ended.
        reason: StopReason,
        /// True if the choice calls a tool and its last call is complete.
        called: bool,
    },
}
