//! The terms of an order: who reads what a worker says of it compares with
//! these. Everything is a bound that an honest worker meets exactly or keeps,
//! computed from its own cost table.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::{DeviceClass, DeviceNanos, ModelName, PromptWork, Usage};
use tollgate_wire::v1;

use super::ServedModel;

/// What a worker was asked to do, as far as it says what that can cost.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    model: Arc<ServedModel>,
    /// Tokens of each prompt.
    prompts: Vec<u64>,
    choices_each: u32,
    max_tokens: u32,
    /// Whether the prompts' own log-probabilities are wanted.
    scored: bool,
    /// Reference cost that it may not exceed.
    budget: Option<DeviceNanos>,
}

impl Terms {
    /// Of `assignment` to a worker that serves `model`.
    pub(super) fn of(model: Arc<ServedModel>, assignment: &v1::Assignment) -> Self {
        Self {
            model,
            prompts: assignment.prompts.iter().map(|prompt| prompt.tokens.len() as u64).collect(),
            choices_each: assignment.choices,
            max_tokens: assignment.max_tokens,
            scored: assignment.echo_logprobs,
            budget: assignment.budget_ns.map(DeviceNanos),
        }
    }

    pub(super) fn is_for(&self, model: &ModelName, class: &DeviceClass) -> bool {
        self.model.name == *model && self.model.class == *class
    }

    pub(super) fn prompts(&self) -> usize {
        self.prompts.len()
    }

    pub(super) fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().sum()
    }

    /// Over all prompts.
    pub(super) fn choices(&self) -> usize {
        self.prompts.len() * self.choices_each as usize
    }

    /// For each choice.
    pub(super) fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Whether `usage` can be true, given the tokens `generated` for each
    /// choice where they are known.
    pub(super) fn check(
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

    /// The most that it can have cost at the reference batch, with so many
    /// tokens `generated` for each choice.
    pub(super) fn cost(&self, generated: impl IntoIterator<Item = u64>) -> DeviceNanos {
        let prompts = self.prompts.iter().map(|&tokens| PromptWork::of(tokens, self.scored));
        let contexts = self
            .prompts
            .iter()
            .flat_map(|&tokens| std::iter::repeat_n(tokens, self.choices_each as usize));
        let cost = with_grain(self.model.table.request(prompts, contexts.zip(generated)));
        self.budget.map_or(cost, |budget| cost.min(budget))
    }

    /// `tokens` spread over the choices so that they cost the most: the
    /// longest contexts as full as they may be.
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

/// The most that a request of unknown shape can have cost: every prompt a
/// chunk of its own, every token at the end of the longest context.
pub(super) fn most_for_strangers(model: &ServedModel, usage: &Usage) -> DeviceNanos {
    let Usage { prompt_tokens, completion_tokens, .. } = *usage;
    let context = u64::from(model.context_length);
    if prompt_tokens > context * MOST_CHOICES || completion_tokens > context * MOST_CHOICES {
        return DeviceNanos::ZERO;
    }
    let pieces = std::iter::repeat_n(PromptWork::of(1, false), MOST_CHOICES as usize);
    let prompts = std::iter::once(PromptWork::of(prompt_tokens, true)).chain(pieces);
    let token = model.table.generated_ns(context, 1);
    let prompts = model.table.request(prompts, []).nanos() as f64;
    with_grain(DeviceNanos::from_f64_ceil(prompts + token * completion_tokens as f64))
}

/// The most device time that a worker can have given to what was ordered at
/// `opened`: what has passed since, and how far two clocks may differ.
pub(super) fn at_most_since(opened: Instant) -> DeviceNanos {
    let passed = opened.elapsed();
    let nanos = (passed + passed / 256 + CLOCKS).as_nanos();
    DeviceNanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Gateway and worker add the same terms in another order, from a table that
/// was told as text.
fn with_grain(cost: DeviceNanos) -> DeviceNanos {
    DeviceNanos(cost.nanos().saturating_add(cost.nanos() >> 16).saturating_add(2))
}

/// Choices of one request, over all prompts: 16 prompts of 8.
const MOST_CHOICES: u64 = 128;
/// By how much the clocks of gateway and worker may disagree about a moment.
const CLOCKS: Duration = Duration::from_millis(5);
