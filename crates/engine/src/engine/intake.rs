//! Checks of submissions. They run on the caller's thread, so that the engine's thread only
//! gets requests that it can run.

use tollgate_domain::{CostTable, DeviceNanos, PromptWork};

use super::submission::{Submission, SubmitError};
use crate::sample::SamplingParams;

/// Bounds of one engine with one model.
pub(super) struct Intake {
    pub(super) table: CostTable,
    pub(super) vocabulary: u32,
    pub(super) context: u32,
    /// Tokens that the whole KV pool can hold.
    pub(super) pool_tokens: u64,
    pub(super) max_sequences: u32,
    pub(super) max_prompts: usize,
    /// Largest number of waiting requests.
    pub(super) queue_capacity: usize,
    /// Largest number of waiting prompt tokens, over all requests.
    pub(super) queue_tokens: usize,
}

impl Intake {
    /// Checks a submission and returns the number of tokens in its prompts.
    pub(super) fn check(&self, submission: &Submission) -> Result<usize, SubmitError> {
        let Submission { prompts, choices, max_tokens, sampling, weight, .. } = submission;
        let invalid = |message: String| Err(SubmitError::Invalid(message));
        if prompts.is_empty() || prompts.len() > self.max_prompts {
            return invalid(format!("a request has 1 to {} prompts", self.max_prompts));
        }
        if !(1..=self.max_sequences).contains(choices) {
            return invalid(format!("a prompt has 1 to {} choices", self.max_sequences));
        }
        // Virtual time divides by the weight.
        if !weight.is_finite() || *weight <= 0.0 {
            return invalid("a tenant's weight is above 0 and finite".into());
        }
        for prompt in prompts {
            self.check_prompt(prompt, *max_tokens)?;
        }
        self.check_sampling(sampling)?;
        // Last, because the cost of the prompts is only meaningful if they fit the model.
        self.check_budget(submission)?;
        Ok(prompts.iter().map(Vec::len).sum())
    }

    /// Returns the expected reference cost if each choice generates `tokens` tokens.
    pub(super) fn expected(&self, submission: &Submission, tokens: u64) -> DeviceNanos {
        cost(&self.table, submission, tokens.min(u64::from(submission.max_tokens)))
    }

    fn check_prompt(&self, prompt: &[u32], max_tokens: u32) -> Result<(), SubmitError> {
        // In 64 bits, so that a huge `max_tokens` cannot wrap around the checks below.
        let total = prompt.len() as u64 + u64::from(max_tokens);
        if prompt.is_empty() {
            return Err(SubmitError::Invalid("a prompt has no tokens".into()));
        }
        if total > u64::from(self.context) {
            return Err(SubmitError::Invalid(format!(
                "a prompt of {} tokens and max_tokens {max_tokens} exceed the context of {}",
                prompt.len(),
                self.context
            )));
        }
        // Such a request would wait for blocks forever.
        if total > self.pool_tokens {
            return Err(SubmitError::Invalid(format!(
                "a prompt of {} tokens and max_tokens {max_tokens} exceed the {} that the KV cache holds",
                prompt.len(),
                self.pool_tokens
            )));
        }
        // An unknown id would read outside the embedding.
        match prompt.iter().find(|&&token| token >= self.vocabulary) {
            Some(token) => Err(SubmitError::Invalid(format!(
                "token {token} is not in the vocabulary of {}",
                self.vocabulary
            ))),
            None => Ok(()),
        }
    }

    fn check_sampling(&self, sampling: &SamplingParams) -> Result<(), SubmitError> {
        // A complete answer has no next token but the end, so it would never end.
        if sampling.grammar.is_some() && sampling.ignores_end {
            return Err(SubmitError::Invalid(
                "an answer with a grammar cannot ignore end tokens".into(),
            ));
        }
        sampling.check(self.vocabulary).map_err(|error| SubmitError::Invalid(error.to_string()))
    }

    /// Checks that the budget covers the prompts and the first token of each choice. The
    /// engine relies on this: it checks the budget again only from the second token on.
    fn check_budget(&self, submission: &Submission) -> Result<(), SubmitError> {
        let Some(budget) = submission.budget else { return Ok(()) };
        let needed = cost(&self.table, submission, u64::from(submission.max_tokens.min(1)));
        if needed > budget { Err(SubmitError::Budget { budget, needed }) } else { Ok(()) }
    }
}

/// Returns the reference cost of a submission whose choices generate `tokens` tokens each.
fn cost(table: &CostTable, submission: &Submission, tokens: u64) -> DeviceNanos {
    let lengths = || submission.prompts.iter().map(|prompt| prompt.len() as u64);
    table.request(
        lengths().map(|length| PromptWork::of(length, submission.echo_logprobs)),
        lengths()
            .flat_map(|length| std::iter::repeat_n((length, tokens), submission.choices as usize)),
    )
}
