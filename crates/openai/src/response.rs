//! The facts that every part of one response repeats.

use serde::Serialize;
use tollgate_domain::RequestId;

use crate::usage::UsageBody;
use crate::{Interface, sse};

/// The frame of one response: the values that each chunk, or the whole
/// response, repeats.
#[derive(Clone, Debug)]
pub struct ResponseMeta {
    /// The response's id, from [`ResponseMeta::id`].
    pub id: String,
    /// The time when the request arrived, in Unix seconds.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The name of the weights that answered.
    pub fingerprint: String,
    /// The number of choices for each prompt, at least 1.
    pub choices: u32,
    /// The prompts to repeat before the generated text: one for each prompt, or
    /// none at all.
    pub echoes: Vec<Echo>,
    /// The number of prompts.
    pub prompts: u32,
    /// True if the response reports log-probabilities.
    pub logprobs: bool,
    /// True if a stream reports its usage in a last chunk.
    pub include_usage: bool,
}

/// A prompt that the response repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Echo {
    /// The whole prompt.
    pub text: String,
    /// The bytes of the prompt's first token.
    pub first_token: Vec<u8>,
}

impl ResponseMeta {
    /// Returns the id of a response in its body. It differs from the request's id
    /// in the header by its prefix alone, so that either leads to the other.
    pub fn id(interface: &dyn Interface, request: &RequestId) -> String {
        let bare = request.as_str().strip_prefix("req-").unwrap_or(request.as_str());
        format!("{}{bare}", interface.id_prefix())
    }

    /// Returns the number of choices over all prompts.
    pub(crate) fn all_choices(&self) -> u32 {
        self.prompts * self.choices
    }

    /// Returns the indices of the choices of prompt `prompt`; empty if there is
    /// no such prompt.
    pub(crate) fn choices_of(&self, prompt: u32) -> std::ops::Range<u32> {
        if prompt >= self.prompts {
            return 0..0;
        }
        // A choice's index is `prompt * n + i`, in the worker's protocol, too.
        prompt * self.choices..(prompt + 1) * self.choices
    }

    /// Returns the prompt that choice `choice` repeats, if it repeats one.
    pub(crate) fn echo(&self, choice: u32) -> Option<&Echo> {
        self.echoes.get((choice / self.choices) as usize)
    }

    /// Appends a chunk with one choice.
    pub(crate) fn write_choice<C: Serialize>(
        &self,
        object: &'static str,
        choice: C,
        out: &mut Vec<u8>,
    ) {
        // Clients that asked for the usage expect `usage: null` in each chunk
        // before the last one.
        self.write_chunk(object, &[choice], self.include_usage.then_some(None), out);
    }

    /// Appends the chunk that reports the usage. It has no choices.
    pub(crate) fn write_usage(
        &self,
        object: &'static str,
        usage: UsageBody<'_>,
        out: &mut Vec<u8>,
    ) {
        self.write_chunk::<()>(object, &[], Some(Some(usage)), out);
    }

    fn write_chunk<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: Option<Option<UsageBody<'_>>>,
        out: &mut Vec<u8>,
    ) {
        let chunk = ChunkBody {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage,
        };
        sse::write_event(&chunk, out);
    }
}

/// One chunk as JSON, with the choices in the shape of a dialect.
#[derive(Serialize)]
struct ChunkBody<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    /// Absent, null, or the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody<'a>>>,
}
