//! A job: the work of one request, tokenized and checked against the model that
//! will answer. [`crate::tokenize::TokenizePool`] is the only maker.

use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{DeviceNanos, ModelName, PromptWork, RequestId, Sampling, Tier};

use crate::model::ServedModel;
use crate::timings::FrontTimings;

/// One unit of requested work.
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) id: RequestId,
    /// The model as the worker that looks best now serves it.
    pub(crate) model: Arc<ServedModel>,
    /// Token ids of each prompt; no prompt is empty.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// The prompt's name in the caller's interface, for refusals.
    pub(crate) prompt_field: &'static str,
    /// The field that asks for the form of the answer, for refusals of that form.
    pub(crate) form_field: &'static str,
    /// Choices for each prompt.
    pub(crate) choices: u32,
    /// Tokens for each choice at most. With every prompt they fit the context.
    pub(crate) max_tokens: u32,
    pub(crate) sampling: Sampling,
    pub(crate) stop: Vec<String>,
    /// Control tokens that the text of the answer shows.
    pub(crate) shown_tokens: Vec<u32>,
    pub(crate) delivery: Delivery,
    pub(crate) tier: Tier,
    /// True if the log-probabilities of the prompts were asked for.
    pub(crate) scores_prompts: bool,
    pub(crate) timings: FrontTimings,
}

/// The way in which a client takes its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Each part goes out as soon as it is there.
    Streamed,
    /// The answer goes out in one piece at the end.
    Whole,
}

impl Job {
    /// Returns the request's id.
    pub fn id(&self) -> &RequestId {
        &self.id
    }

    /// Returns the model that will answer.
    pub fn model(&self) -> &ServedModel {
        &self.model
    }

    /// Returns the model's name.
    pub fn model_name(&self) -> &ModelName {
        &self.model.name
    }

    /// Returns the number of prompts.
    pub fn prompts(&self) -> u32 {
        self.prompts.len() as u32
    }

    /// Returns the number of tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.len() as u64).sum()
    }

    /// Returns the number of choices over all prompts.
    pub fn all_choices(&self) -> u64 {
        self.prompts.len() as u64 * u64::from(self.choices)
    }

    /// True if the answer goes out as a stream.
    pub(crate) fn is_streamed(&self) -> bool {
        self.delivery == Delivery::Streamed
    }

    /// Returns the tokens that each choice can have within `time` on an otherwise idle
    /// device: at most `max_tokens`.
    pub(crate) fn tokens_within(&self, time: Duration) -> u32 {
        let tokens = self.model.table.tokens_within(time);
        u32::try_from(tokens).unwrap_or(u32::MAX).min(self.max_tokens)
    }

    /// Returns the reference cost if each choice has `tokens` tokens.
    pub(crate) fn cost(&self, tokens: u32) -> DeviceNanos {
        let scored = self.scores_prompts;
        let prompts = self.prompts.iter().map(|prompt| PromptWork::of(prompt.len() as u64, scored));
        let choices = self.prompts.iter().flat_map(|prompt| {
            std::iter::repeat_n((prompt.len() as u64, u64::from(tokens)), self.choices as usize)
        });
        self.model.table.request(prompts, choices)
    }
}
