//! Hands steps to the device and reads their results. Nothing here changes the batch, so a
//! failed step leaves the batch as it was.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Begun, Core, EngineError, Part, SampledPart};
use crate::backend::{Results, StepOutput, StepPlan};
use crate::engine::submission::PromptLogprob;
use crate::sample::SampledToken;

impl Core {
    /// Hands a step of these parts to the device. A panic in the backend becomes an error.
    pub(super) fn begin(&mut self, parts: &[Part]) -> Result<StepOutput, EngineError> {
        let mut output = self.outputs.pop().unwrap_or_default();
        unless_it_panics(|| self.begin_parts(parts, &mut output))?;
        Ok(output)
    }

    fn begin_parts(&mut self, parts: &[Part], output: &mut StepOutput) -> Result<(), EngineError> {
        let Self { sequences, requests, .. } = self;
        let (mut spans, mut samples) = (Vec::with_capacity(parts.len()), Vec::new());
        let (mut token_feedback, mut row) = (Vec::new(), 0);
        for part in parts {
            let sequence = &sequences[&part.sequence];
            spans.push(part.span(sequence));
            samples.extend(part.samples(row, sequence, &requests[&part.request]));
            token_feedback.extend(part.feedback);
            // Rows of the whole step are numbered through, in the order of the parts.
            row += part.work.logit_rows;
        }
        let plan = StepPlan {
            spans: &spans,
            results: Results::Samples(&samples),
            token_feedback: &token_feedback,
        };
        Ok(self.backend.begin(&plan, output)?)
    }

    /// Waits for a step and reads its results. Results of sequences that have left are
    /// dropped.
    pub(super) fn finish(&mut self, begun: &mut Begun) -> Result<Vec<SampledPart>, EngineError> {
        unless_it_panics(|| Ok(self.backend.finish(&mut begun.output)?))?;
        let mut sampled = begun.output.take_sampled();
        let mut sampled_parts = Vec::with_capacity(begun.parts.len());
        for part in &begun.parts {
            // The results come in the order in which the parts requested them, so parts
            // that have left must still be skipped.
            let given = sampled.by_ref().take(part.given as usize).flatten();
            let prompt_logprobs: Vec<PromptLogprob> = given
                .filter_map(|SampledToken { token, logprobs }| {
                    logprobs.map(|logprobs| PromptLogprob { token, logprobs })
                })
                .collect();
            let samples = sampled.by_ref().take(part.sampled as usize).collect();
            if self.sequences.contains_key(&part.sequence) {
                sampled_parts.push(SampledPart {
                    sequence: part.sequence,
                    samples,
                    prompt_logprobs,
                });
            }
        }
        Ok(sampled_parts)
    }
}

/// Runs `work` and converts a panic into an error.
fn unless_it_panics(work: impl FnOnce() -> Result<(), EngineError>) -> Result<(), EngineError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))))
}

/// Returns the message of a panic.
pub(in crate::engine) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
