//! One step on the device: spans in, drawn tokens out. It changes nothing but
//! the device's own state, so a step that fails leaves the batch as it was.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tollgate_domain::{SequenceId, SequenceWork};

use super::EngineError;
use super::batch::{Request, Sequence};
use super::journal::Owner;
use super::submission::PromptLogprob;
use super::turn::Core;
use crate::backend::{LogitRows, Span, StepPlan};
use crate::meter::Payer;
use crate::sample::{Drawn, Place, choice_seed, token_logprobs};
use crate::schedule::{Chunk, Rows};

/// A sequence's part in a step.
pub(super) struct Part {
    pub(super) sequence: SequenceId,
    pub(super) request: SequenceId,
    pub(super) tokens: u32,
    pub(super) rows: Rows,
    /// As it is booked: recompute stands there under a number of its own.
    pub(super) work: SequenceWork,
    pub(super) payer: Payer,
}

impl Part {
    pub(super) fn new(sequence: &Sequence, chunk: Chunk) -> Self {
        let Chunk { tokens, rows, .. } = chunk;
        let recomputing = sequence.recomputing();
        Self {
            sequence: sequence.id,
            request: sequence.request,
            tokens,
            rows,
            work: SequenceWork {
                sequence: recomputing.unwrap_or(sequence.id),
                new_tokens: tokens,
                logit_rows: match rows {
                    Rows::None => 0,
                    Rows::Last => 1,
                    Rows::All => tokens,
                },
                context: sequence.cached,
            },
            payer: if recomputing.is_some() { Payer::Overhead } else { Payer::Request },
        }
    }

    pub(super) fn is_billed(&self) -> bool {
        self.payer == Payer::Request
    }

    pub(super) fn owner(&self, request: &Request) -> Owner {
        match self.payer {
            Payer::Request => request.owner(),
            Payer::Overhead => Owner::Overhead,
        }
    }

    fn span<'a>(&self, sequence: &'a Sequence) -> Span<'a> {
        let start = sequence.cached;
        Span {
            tokens: &sequence.tokens[start as usize..][..self.tokens as usize],
            start,
            blocks: sequence.table.blocks(),
            logits: match self.rows {
                Rows::None => LogitRows::None,
                Rows::Last => LogitRows::Last,
                Rows::All => LogitRows::All,
            },
        }
    }
}

/// What was read from one part's rows.
pub(super) struct Drawing {
    pub(super) sequence: SequenceId,
    /// The next token of each choice: several when a prompt has just been
    /// read. `None` where the row had nothing to draw from.
    pub(super) draws: Vec<Option<Drawn>>,
    /// Of the prompt's tokens that these rows speak of.
    pub(super) prompt_logprobs: Vec<PromptLogprob>,
}

/// What came out for one choice.
pub(super) struct Outcome {
    pub(super) request: SequenceId,
    pub(super) sequence: SequenceId,
    pub(super) choice: u32,
    pub(super) event: Event,
}

pub(super) enum Event {
    /// The prompt's own log-probabilities are complete.
    PromptRead(usize),
    /// A token, and whether it is an end token.
    Token(Drawn, bool),
    /// The prompt is read and no token was asked for.
    NothingWanted,
    /// The model gave nothing to draw from.
    Broken,
}

impl Core {
    /// Runs the parts as one step and draws from its rows. A panic below is an
    /// answer like any other fault.
    pub(super) fn compute(&mut self, parts: &[Part]) -> Result<Vec<Drawing>, EngineError> {
        catch_unwind(AssertUnwindSafe(|| self.run_and_draw(parts)))
            .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))))
    }

    fn run_and_draw(&mut self, parts: &[Part]) -> Result<Vec<Drawing>, EngineError> {
        let spans: Vec<Span<'_>> =
            parts.iter().map(|part| part.span(&self.sequences[&part.sequence])).collect();
        self.backend.step(&StepPlan { spans: &spans }, &mut self.output)?;
        let mut drawings = Vec::with_capacity(parts.len());
        let mut row = 0;
        for part in parts {
            let rows = part.work.logit_rows as usize;
            drawings.push(self.draw(part, row..row + rows));
            row += rows;
        }
        Ok(drawings)
    }

    fn draw(&mut self, part: &Part, rows: std::ops::Range<usize>) -> Drawing {
        let sequence = &self.sequences[&part.sequence];
        let request = &self.requests[&part.request];
        let start = sequence.cached as usize;
        let end = start + part.tokens as usize;
        let mut prompt_logprobs = Vec::new();
        if part.rows == Rows::All {
            let top = request.sampling.top_logprobs.unwrap_or(0) as usize;
            // A row speaks of the token after its own.
            let next = &sequence.tokens[start + 1..sequence.tokens.len().min(end + 1)];
            for (row, &token) in rows.clone().zip(next) {
                let logprobs = token_logprobs(self.output.row(row), token, top);
                prompt_logprobs.push(PromptLogprob { token, logprobs });
            }
        }
        let mut draws = Vec::new();
        if end == sequence.tokens.len() && !rows.is_empty() && request.max_tokens > 0 {
            for number in 0..=sequence.followers {
                let place = Place {
                    seed: choice_seed(request.sampling.seed, sequence.choice + number),
                    position: sequence.generated(),
                    counts: &sequence.counts,
                };
                let row = self.output.row(rows.end - 1);
                draws.push(self.sampler.draw(row, &request.sampling, place));
            }
        }
        Drawing { sequence: part.sequence, draws, prompt_logprobs }
    }
}

/// What a panic said.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without words".to_owned())
}
