//! The facts that every part of one response repeats, and the complete response
//! for a dialect to render.

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::{StopReason, TokenLogprob};

use crate::usage::UsageBody;
use crate::{UsageReport, sse};

/// The frame of one response: the values that each chunk, or the whole
/// response, repeats.
#[derive(Clone, Debug)]
pub struct ResponseMeta {
    /// The response's id, from [`crate::Interface::response_id`].
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
#[derive(Serialize, JsonSchema)]
pub(crate) struct ChunkBody<'a, C> {
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

/// The parts of one choice that have come so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct CollectedChoice {
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) end: Option<StopReason>,
}

/// A complete response, for a dialect to render.
#[derive(Clone, Copy, Debug)]
pub struct WholeResponse<'a> {
    /// The frame of the response.
    pub meta: &'a ResponseMeta,
    /// The measured figures.
    pub usage: &'a UsageReport,
    /// The log-probabilities of each prompt's tokens after the first one.
    pub(crate) prompts: &'a [Vec<TokenLogprob>],
    pub(crate) choices: &'a [CollectedChoice],
}

/// One choice of a complete response.
#[derive(Clone, Copy, Debug)]
pub struct ResponseChoice<'a> {
    /// The index of the choice over all prompts.
    pub index: u32,
    /// The repeated prompt; empty if the response repeats none.
    pub echo: &'a str,
    /// The bytes of the repeated prompt's first token.
    pub first_token: Option<&'a [u8]>,
    /// The log-probabilities of the repeated prompt after its first token.
    pub prompt_logprobs: &'a [TokenLogprob],
    /// The generated text.
    pub text: &'a str,
    /// The log-probabilities of the generated tokens.
    pub logprobs: &'a [TokenLogprob],
    /// The reason why the choice ended.
    pub end: StopReason,
}

impl<'a> WholeResponse<'a> {
    /// Returns all choices in the order of their indices.
    pub fn choices(&self) -> impl Iterator<Item = ResponseChoice<'a>> {
        let Self { meta, prompts, choices, usage: _ } = *self;
        choices.iter().zip(0..).map(move |(choice, index)| {
            let echo = meta.echo(index);
            ResponseChoice {
                index,
                echo: echo.map_or("", |echo| &echo.text),
                first_token: echo.map(|echo| echo.first_token.as_slice()),
                prompt_logprobs: &prompts[(index / meta.choices) as usize],
                text: &choice.text,
                logprobs: &choice.logprobs,
                // A worker ends each choice before it ends a request. A choice
                // without an end was cut short, so its text is incomplete.
                end: choice.end.unwrap_or(StopReason::Length),
            }
        })
    }
}

/// Renders `response` with `choices` in the shape of a dialect.
#[expect(
    clippy::expect_used,
    reason = "strings and finite numbers serialise, and writing to a vector does not fail"
)]
pub(crate) fn render<C: Serialize>(
    response: &WholeResponse<'_>,
    object: &'static str,
    choices: Vec<C>,
) -> Vec<u8> {
    let body = ResponseBody {
        id: &response.meta.id,
        object,
        created: response.meta.created,
        model: &response.meta.model,
        choices,
        usage: UsageBody::from(response.usage),
        system_fingerprint: &response.meta.fingerprint,
    };
    serde_json::to_vec(&body).expect("strings and finite numbers serialise")
}

/// A response in one piece as JSON, with the choices in the shape of a dialect.
#[derive(Serialize, JsonSchema)]
pub(crate) struct ResponseBody<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    usage: UsageBody<'a>,
    system_fingerprint: &'a str,
}
