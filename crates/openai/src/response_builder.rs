//! A response in one piece: results go in as they come, one JSON object comes out.

use serde::Serialize;
use tollgate_domain::{StopReason, TextDelta, TokenLogprob};

use crate::usage::UsageBody;
use crate::{Interface, ResponseMeta, UsageReport};

/// Collects the choices of one response.
#[derive(Debug)]
pub struct ResponseBuilder {
    interface: &'static dyn Interface,
    meta: ResponseMeta,
    /// The log-probabilities of each prompt's tokens after the first one.
    prompts: Vec<Vec<TokenLogprob>>,
    choices: Vec<CollectedChoice>,
}

/// The parts of one choice that have come so far.
#[derive(Clone, Debug, Default)]
struct CollectedChoice {
    text: String,
    logprobs: Vec<TokenLogprob>,
    end: Option<StopReason>,
}

/// A complete response, for an [`Interface`] to render.
#[derive(Clone, Copy, Debug)]
pub struct WholeResponse<'a> {
    /// The frame of the response.
    pub meta: &'a ResponseMeta,
    /// The measured figures.
    pub usage: &'a UsageReport,
    builder: &'a ResponseBuilder,
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

impl ResponseBuilder {
    /// Makes an empty response.
    pub fn new(interface: &'static dyn Interface, meta: ResponseMeta) -> Self {
        let choices = vec![CollectedChoice::default(); meta.all_choices() as usize];
        let prompts = vec![Vec::new(); meta.prompts as usize];
        Self { interface, meta, prompts, choices }
    }

    /// Drops everything that was collected, because the request starts again.
    pub fn restart(&mut self) {
        self.prompts.fill(Vec::new());
        self.choices.fill(CollectedChoice::default());
    }

    /// Adds text and tokens to a choice. An unknown choice is ignored.
    pub fn delta(&mut self, delta: TextDelta) {
        // The index comes from a worker, so it may be out of range.
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else { return };
        choice.text.push_str(&delta.text);
        choice.logprobs.extend(delta.logprobs);
    }

    /// Adds the log-probabilities of a prompt that the response repeats.
    pub fn prompt_logprobs(&mut self, prompt: u32, tokens: Vec<TokenLogprob>) {
        if let Some(prompt) = self.prompts.get_mut(prompt as usize) {
            prompt.extend(tokens);
        }
    }

    /// Ends a choice.
    pub fn finish_choice(&mut self, choice: u32, reason: StopReason) {
        if let Some(choice) = self.choices.get_mut(choice as usize) {
            choice.end = Some(reason);
        }
    }

    /// Renders the response as one JSON object.
    pub fn finish(&self, usage: &UsageReport) -> Vec<u8> {
        self.interface.response(&WholeResponse { meta: &self.meta, usage, builder: self })
    }
}

impl<'a> WholeResponse<'a> {
    /// Returns all choices in the order of their indices.
    pub fn choices(&self) -> impl Iterator<Item = ResponseChoice<'a>> {
        let (meta, builder) = (self.meta, self.builder);
        builder.choices.iter().zip(0..).map(move |(choice, index)| {
            let echo = meta.echo(index);
            ResponseChoice {
                index,
                echo: echo.map_or("", |echo| &echo.text),
                first_token: echo.map(|echo| echo.first_token.as_slice()),
                prompt_logprobs: &builder.prompts[(index / meta.choices) as usize],
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
#[derive(Serialize)]
struct ResponseBody<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    usage: UsageBody<'a>,
    system_fingerprint: &'a str,
}
