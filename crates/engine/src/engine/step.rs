//! The parts of a step. A part says which tokens of a sequence are fed, which logit rows
//! are computed, which tokens are sampled from the rows, and which account pays. If a step
//! starts before the previous one is finished, its parts use the tokens that the previous
//! step samples.

use tollgate_domain::{MonotonicTime, SequenceId, SequenceWork};

use super::batch::{Request, Sequence};
use super::journal::Owner;
use super::submission::PromptLogprob;
use crate::backend::{LogitRows, SampleRequest, SampleTarget, Span, StepOutput};
use crate::meter::Payer;
use crate::sample::{SampledToken, SamplingPoint, choice_seed};
use crate::schedule::{Chunk, Rows};

/// The part of one sequence in a step.
pub(super) struct Part {
    pub(super) sequence: SequenceId,
    pub(super) request: SequenceId,
    pub(super) tokens: u32,
    pub(super) rows: Rows,
    /// Index of the sample of the previous step that is the input token of this part.
    pub(super) feedback: Option<u32>,
    /// Number of log-probabilities of known prompt tokens, and number of tokens to sample.
    /// The sample requests of a part come in this order.
    pub(super) given: u32,
    pub(super) sampled: u32,
    /// Work as it is booked. Recomputation is booked under a sequence id of its own.
    pub(super) work: SequenceWork,
    pub(super) payer: Payer,
}

impl Part {
    pub(super) fn new(sequence: &Sequence, chunk: Chunk) -> Self {
        let Chunk { tokens, rows, .. } = chunk;
        let recomputing = sequence.recomputing();
        let (all, end) = (sequence.tokens.len() as u32, sequence.cached + tokens);
        // A chunk samples only if it reaches the newest token and the choice may still
        // generate.
        let samples = rows != Rows::None && end == all && sequence.most_to_come() > 0;
        Self {
            sequence: sequence.id,
            request: sequence.request,
            tokens,
            rows,
            feedback: None,
            // A row predicts the token after its own, so the last row of the sequence has
            // no known token.
            given: if rows == Rows::All { tokens - u32::from(end == all) } else { 0 },
            sampled: if samples { sequence.followers + 1 } else { 0 },
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

    /// Creates the part that follows this one in the step ahead. `feedback` is the index of
    /// this part's sample.
    pub(super) fn next(&self, feedback: u32) -> Self {
        let (tokens, rows, context) = (1, Rows::Last, self.work.context + self.tokens);
        Self {
            tokens,
            rows,
            feedback: Some(feedback),
            given: 0,
            sampled: 1,
            work: SequenceWork {
                sequence: self.sequence,
                new_tokens: tokens,
                logit_rows: 1,
                context,
            },
            ..*self
        }
    }

    /// Returns true if the part samples one token of one choice and nothing else.
    pub(super) fn samples_one(&self) -> bool {
        self.is_billed() && self.given == 0 && self.sampled == 1
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

    pub(super) fn span<'a>(&self, sequence: &'a Sequence) -> Span<'a> {
        let start = self.work.context;
        let tokens = match self.feedback {
            None => &sequence.tokens[start as usize..][..self.tokens as usize],
            // The backend replaces this token by the sample of the previous step.
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

    /// Returns the sample requests of the part. `row` is the index of the part's first
    /// logit row.
    pub(super) fn samples<'a>(
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
        let (last, pending) = (row + self.work.logit_rows.saturating_sub(1), self.feedback);
        let next = (0..self.sampled).map(move |number| {
            let point = SamplingPoint {
                seed: choice_seed(params.seed, sequence.choice + number),
                // The token of the running step is not in `tokens` yet, but it has a
                // position.
                position: sequence.generated() + u32::from(pending.is_some()),
                counts: &sequence.counts,
                prompt: &sequence.prompt_set,
                // Choices that fork now share the mask of the first token.
                constraint: sequence.constraint.as_ref(),
            };
            SampleRequest { row: last, params, token: SampleTarget::Next { point, pending } }
        });
        given.chain(next)
    }
}

/// A step that the device has received and not finished.
pub(super) struct Begun {
    pub(super) parts: Vec<Part>,
    pub(super) started: MonotonicTime,
    pub(super) output: StepOutput,
}

/// Results of one part.
pub(super) struct SampledPart {
    pub(super) sequence: SequenceId,
    /// Next token of each choice: several after a prompt was read. `None` if no logit in
    /// the row was above minus infinity.
    pub(super) samples: Vec<Option<SampledToken>>,
    /// Log-probabilities of the prompt tokens that these rows predict.
    pub(super) prompt_logprobs: Vec<PromptLogprob>,
}
