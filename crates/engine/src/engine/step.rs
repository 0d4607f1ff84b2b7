//! One step on the device: spans in, drawn tokens out. It changes nothing but
//! the device's own state, so a step that fails leaves the batch as it was.
//! Where the device takes one more step before the last is finished, its parts
//! are fed with what that one draws.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tollgate_domain::{MonotonicTime, SequenceId, SequenceWork};

use super::EngineError;
use super::batch::{Request, Sequence};
use super::journal::Owner;
use super::submission::PromptLogprob;
use super::turn::Core;
use crate::backend::{LogitRows, Results, SampleRequest, SampleTarget, Span, StepOutput, StepPlan};
use crate::meter::Payer;
use crate::sample::{SampledToken, SamplingPoint, choice_seed};
use crate::schedule::{Chunk, Rows};

/// A sequence's part in a step.
pub(super) struct Part {
    pub(super) sequence: SequenceId,
    pub(super) request: SequenceId,
    pub(super) tokens: u32,
    pub(super) rows: Rows,
    /// The draw of the step before that its one token is.
    fed: Option<u32>,
    /// Log-probabilities of tokens that stand there, and tokens that are
    /// drawn: as many draws of the step, in this order.
    given: u32,
    drawn: u32,
    /// As it is booked: recompute stands there under a number of its own.
    pub(super) work: SequenceWork,
    pub(super) payer: Payer,
}

impl Part {
    pub(super) fn new(sequence: &Sequence, chunk: Chunk) -> Self {
        let Chunk { tokens, rows, .. } = chunk;
        let recomputing = sequence.recomputing();
        let (all, end) = (sequence.tokens.len() as u32, sequence.cached + tokens);
        let draws = rows != Rows::None && end == all && sequence.most_to_come() > 0;
        Self {
            sequence: sequence.id,
            request: sequence.request,
            tokens,
            rows,
            fed: None,
            // A row speaks of the token after its own.
            given: if rows == Rows::All { tokens - u32::from(end == all) } else { 0 },
            drawn: if draws { sequence.followers + 1 } else { 0 },
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

    /// The part after this one, which drew the step's token `fed`.
    pub(super) fn next(&self, fed: u32) -> Self {
        let (tokens, rows, context) = (1, Rows::Last, self.work.context + self.tokens);
        Self {
            tokens,
            rows,
            fed: Some(fed),
            given: 0,
            drawn: 1,
            work: SequenceWork {
                sequence: self.sequence,
                new_tokens: tokens,
                logit_rows: 1,
                context,
            },
            ..*self
        }
    }

    /// Whether it comes to one token, of one choice, and to nothing else.
    pub(super) fn draws_one(&self) -> bool {
        self.is_billed() && self.given == 0 && self.drawn == 1
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
        let start = self.work.context;
        let tokens = match self.fed {
            None => &sequence.tokens[start as usize..][..self.tokens as usize],
            Some(_) => &[0],
        };
        Span {
            tokens,
            start,
            blocks: sequence.table.blocks(),
            logits: match self.rows {
                Rows::None => LogitRows::None,
                Rows::Last => LogitRows::Last,
                Rows::All => LogitRows::All,
            },
        }
    }

    /// What it wants of its rows, the first of which is `row`.
    fn draws<'a>(
        &self,
        row: u32,
        sequence: &'a Sequence,
        request: &'a Request,
    ) -> impl Iterator<Item = SampleRequest<'a>> {
        let (params, start) = (&request.sampling, self.work.context as usize);
        let there = sequence.tokens.iter().skip(start + 1).take(self.given as usize);
        let given = (row..).zip(there).map(|(row, &token)| SampleRequest {
            row,
            params,
            token: SampleTarget::Given(token),
        });
        let (last, pending) = (row + self.work.logit_rows.saturating_sub(1), self.fed);
        let next = (0..self.drawn).map(move |number| {
            let point = SamplingPoint {
                seed: choice_seed(params.seed, sequence.choice + number),
                position: sequence.generated() + u32::from(pending.is_some()),
                counts: &sequence.counts,
            };
            SampleRequest { row: last, params, token: SampleTarget::Next { point, pending } }
        });
        given.chain(next)
    }
}

/// A step that the device was given and that is not finished.
pub(super) struct Begun {
    pub(super) parts: Vec<Part>,
    pub(super) started: MonotonicTime,
    pub(super) output: StepOutput,
}

/// What was read from one part's rows.
pub(super) struct Drawing {
    pub(super) sequence: SequenceId,
    /// The next token of each choice: several when a prompt has just been
    /// read. `None` where the row had nothing to draw from.
    pub(super) draws: Vec<Option<SampledToken>>,
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
    Token(SampledToken, bool),
    /// The prompt is read and no token was asked for.
    NothingWanted,
    /// The model gave nothing to draw from.
    Broken,
}

impl Core {
    /// Gives the device a step of these parts. A panic below is an answer like
    /// any other fault.
    pub(super) fn begin(&mut self, parts: &[Part]) -> Result<StepOutput, EngineError> {
        let mut output = self.outputs.pop().unwrap_or_default();
        unless_it_panics(|| self.begin_parts(parts, &mut output))?;
        Ok(output)
    }

    fn begin_parts(&mut self, parts: &[Part], output: &mut StepOutput) -> Result<(), EngineError> {
        let Self { sequences, requests, .. } = self;
        let (mut spans, mut draws) = (Vec::with_capacity(parts.len()), Vec::new());
        let (mut feeds, mut row) = (Vec::new(), 0);
        for part in parts {
            let sequence = &sequences[&part.sequence];
            spans.push(part.span(sequence));
            draws.extend(part.draws(row, sequence, &requests[&part.request]));
            feeds.extend(part.fed);
            row += part.work.logit_rows;
        }
        let plan =
            StepPlan { spans: &spans, results: Results::Samples(&draws), token_feedback: &feeds };
        Ok(self.backend.begin(&plan, output)?)
    }

    /// Waits for a step and reads what it came to, for the sequences that are
    /// there yet.
    pub(super) fn finish(&mut self, begun: &mut Begun) -> Result<Vec<Drawing>, EngineError> {
        unless_it_panics(|| Ok(self.backend.finish(&mut begun.output)?))?;
        let mut drawn = begun.output.take_sampled();
        let mut drawings = Vec::with_capacity(begun.parts.len());
        for part in &begun.parts {
            let given = drawn.by_ref().take(part.given as usize).flatten();
            let prompt_logprobs: Vec<PromptLogprob> = given
                .filter_map(|SampledToken { token, logprobs }| {
                    logprobs.map(|logprobs| PromptLogprob { token, logprobs })
                })
                .collect();
            let draws = drawn.by_ref().take(part.drawn as usize).collect();
            if self.sequences.contains_key(&part.sequence) {
                drawings.push(Drawing { sequence: part.sequence, draws, prompt_logprobs });
            }
        }
        Ok(drawings)
    }
}

/// The answer, or what a panic said.
fn unless_it_panics(work: impl FnOnce() -> Result<(), EngineError>) -> Result<(), EngineError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))))
}

/// What a panic said.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without words".to_owned())
}
