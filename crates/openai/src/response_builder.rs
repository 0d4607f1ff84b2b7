//! A response in one piece: results go in as they come, one JSON object comes out.

use tollgate_domain::{StopReason, TextDelta, TokenLogprob};

use crate::response::CollectedChoice;
use crate::{Interface, ResponseMeta, UsageReport, WholeResponse};

/// Collects the choices of one response.
#[derive(Debug)]
pub struct ResponseBuilder {
    interface: &'static dyn Interface,
    meta: ResponseMeta,
    /// The log-probabilities of each prompt's tokens after the first one.
    prompts: Vec<Vec<TokenLogprob>>,
    choices: Vec<CollectedChoice>,
}

impl ResponseBuilder {
    /// Makes an empty response.
    pub fn new(interface: &'static dyn Interface, meta: ResponseMeta) -> Self {
        let choices = vec![CollectedChoice::new(&meta.answer); meta.all_choices() as usize];
        let prompts = vec![Vec::new(); meta.prompts as usize];
        Self { interface, meta, prompts, choices }
    }

    /// Drops everything that was collected, because the request starts again.
    pub fn restart(&mut self) {
        self.prompts.fill(Vec::new());
        self.choices.fill(CollectedChoice::new(&self.meta.answer));
    }

    /// Adds text and tokens to a choice. An unknown choice is ignored.
    pub fn delta(&mut self, delta: TextDelta) {
        // The index comes from a worker, so it may be out of range.
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else { return };
        choice.push(&delta);
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
            choice.finish();
            choice.end = Some(reason);
        }
    }

    /// Returns the number of tokens of reasoning in all choices.
    pub fn reasoning_tokens(&self) -> u64 {
        self.choices.iter().map(CollectedChoice::reasoning_tokens).sum()
    }

    /// Renders the response as one JSON object.
    pub fn finish(&self, usage: &UsageReport) -> Vec<u8> {
        let Self { interface, meta, prompts, choices } = self;
        interface.response(&WholeResponse { meta, usage, prompts, choices })
    }
}
