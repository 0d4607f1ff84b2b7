//! The terms of an order, against which reports of a worker are compared. Each
//! term is a bound that an honest worker keeps, computed from the worker's own
//! cost table.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::{DeviceClass, DeviceNanos, ModelName, PromptWork, Tier, Usage};
use tollgate_wire::v1;

use crate::model::ServedModel;

/// The part of an order that bounds the cost of the order.
#[derive(Clone, Debug)]
pub struct Terms {
    model: Arc<ServedModel>,
    /// Tokens of each prompt.
    prompts: Vec<u64>,
    choices_each: u32,
    max_tokens: u32,
    /// True if the prompts' own log-probabilities were ordered.
    scored: bool,
    /// Reference cost that the request may not exceed.
    budget: Option<DeviceNanos>,
    tier: Tier,
}

impl Terms {
    /// Returns the terms of `assignment` to a worker that serves `model`.
    pub fn of(model: Arc<ServedModel>, assignment: &v1::Assignment) -> Self {
        Self {
            model,
            prompts: assignment.prompts.iter().map(|prompt| prompt.tokens.len() as u64).collect(),
            choices_each: assignment.choices,
            max_tokens: assignment.max_tokens,
            scored: assignment.echo_logprobs,
            budget: assignment.budget_ns.map(DeviceNanos),
            tier: assignment.tier().into(),
        }
    }

    pub(crate) fn is_for(&self, model: &ModelName, class: &DeviceClass) -> bool {
        self.model.name == *model && self.model.class == *class
    }

    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    pub(crate) fn prompts(&self) -> usize {
        self.prompts.len()
    }

    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().sum()
    }

    /// Returns the number of choices over all prompts.
    pub(crate) fn choices(&self) -> usize {
        self.prompts.len() * self.choices_each as usize
    }

    /// Returns the tokens that each choice may have.
    pub(crate) fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Checks that `usage` can be true. `generated` holds the tokens of each choice
    /// if they are known.
    pub(crate) fn check(
        &self,
        usage: &Usage,
        generated: Option<&[u32]>,
    ) -> Result<(), &'static str> {
        let most_tokens = u64::from(self.max_tokens) * self.choices() as u64;
        if usage.prompt_tokens > self.prompt_tokens() || usage.cached_tokens > usage.prompt_tokens {
            return Err("more prompt tokens than were sent");
        }
        if usage.completion_tokens > most_tokens {
            return Err("more tokens than were ordered");
        }
        let most = match generated {
            Some(generated) => self.cost(generated.iter().map(|&tokens| u64::from(tokens))),
            None => self.cost(self.costliest(usage.completion_tokens)),
        };
        if usage.reference > most {
            return Err("more reference cost than its tokens can cause");
        }
        Ok(())
    }

    /// Returns the largest reference cost with so many tokens `generated` for each
    /// choice.
    pub(crate) fn cost(&self, generated: impl IntoIterator<Item = u64>) -> DeviceNanos {
        let prompts = self.prompts.iter().map(|&tokens| PromptWork::of(tokens, self.scored));
        let contexts = self
            .prompts
            .iter()
            .flat_map(|&tokens| std::iter::repeat_n(tokens, self.choices_each as usize));
        let cost = with_rounding(self.model.table.request(prompts, contexts.zip(generated)));
        self.budget.map_or(cost, |budget| cost.min(budget))
    }

    /// Spreads `tokens` over the choices so that they cost the most: a token at the
    /// end of a longer context costs more, so the longest contexts are filled first.
    fn costliest(&self, tokens: u64) -> Vec<u64> {
        let mut order: Vec<usize> = (0..self.choices()).collect();
        let context = |choice: &usize| self.prompts[choice / self.choices_each as usize];
        order.sort_by_key(|choice| std::cmp::Reverse(context(choice)));
        let mut generated = vec![0; order.len()];
        let mut left = tokens;
        for choice in order {
            generated[choice] = left.min(u64::from(self.max_tokens));
            left -= generated[choice];
        }
        generated
    }
}

/// Returns the largest reference cost of a request of unknown shape,
/// because an earlier gateway ordered the request: every prompt is a chunk of its
/// own, and every token stands at the end of the longest context.
pub(crate) fn most_for_orphan(model: &ServedModel, usage: &Usage) -> DeviceNanos {
    let Usage { prompt_tokens, completion_tokens, .. } = *usage;
    let context = u64::from(model.context_length);
    // No order has so many tokens. The bound also keeps the sums below small.
    if prompt_tokens > context * MOST_CHOICES || completion_tokens > context * MOST_CHOICES {
        // With a bound of zero the usage is rejected.
        return DeviceNanos::ZERO;
    }
    let pieces = std::iter::repeat_n(PromptWork::of(1, false), MOST_CHOICES as usize);
    let prompts = std::iter::once(PromptWork::of(prompt_tokens, true)).chain(pieces);
    let token = model.table.generated_ns(context..context + 1);
    let prompts = model.table.request(prompts, []).nanos() as f64;
    with_rounding(DeviceNanos::from_f64_ceil(prompts + token * completion_tokens as f64))
}

/// Returns the largest device time that a worker can have given by `now` to an order
/// of `opened`: the time since then, and the error of two clocks.
pub(crate) fn at_most_since(opened: Instant, now: Instant) -> DeviceNanos {
    let passed = now.saturating_duration_since(opened);
    // One part grows with the time, because two clocks may run at different speeds.
    let nanos = (passed + passed / 256 + CLOCK_ERROR).as_nanos();
    DeviceNanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Adds the error of rounding. Gateway and worker add the same terms in another
/// order, from a table that crossed the wire as text.
fn with_rounding(cost: DeviceNanos) -> DeviceNanos {
    DeviceNanos(cost.nanos().saturating_add(cost.nanos() >> 16).saturating_add(2))
}

/// Choices of one request over all prompts: 16 prompts of 8.
const MOST_CHOICES: u64 = 128;

/// The difference that the clocks of gateway and worker may have at one moment.
const CLOCK_ERROR: Duration = Duration::from_millis(5);
