//! The checks of an assignment. A checked assignment becomes a [`Submission`] for
//! the engine, which checks the limits of its model itself.

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate_domain::{
    Caller, DeviceNanos, Grammar, InvalidName, KeyId, ModelName, PoolName, RequestId, TenantId,
};
use tollgate_engine::grammar::RequestGrammar;
use tollgate_engine::{Refusal, RefusedReason, SamplingParams, Submission, Tier, TokenSink};
use tollgate_wire::v1;

/// Stop strings of one request at most.
const MOST_STOPS: usize = 64;
/// Bytes of one stop string at most.
const MOST_STOP_BYTES: usize = 16 << 10;
/// Control tokens at most that the text of an answer shows.
const MOST_SHOWN_TOKENS: usize = 64;
/// Choices of one request at most, over all its prompts.
const MOST_CHOICES: usize = 1_024;

/// A checked assignment.
pub(crate) struct Work {
    pub(crate) request: RequestId,
    pub(crate) attempt: u32,
    pub(crate) stops: Vec<String>,
    /// Control tokens that the text of the answer shows.
    pub(crate) shown_tokens: Vec<u32>,
    /// Choices over all prompts.
    pub(crate) choices: usize,
    caller: Caller,
    pool: Option<PoolName>,
    tier: Tier,
    weight: f64,
    prompts: Vec<Vec<u32>>,
    choices_each: u32,
    max_tokens: u32,
    sampling: SamplingParams,
    /// The form that every choice must have, not compiled yet.
    pub(crate) grammar: Option<Grammar>,
    budget: Option<DeviceNanos>,
    queue_deadline: Duration,
    echo_logprobs: bool,
}

impl Work {
    /// Checks an assignment for a worker that serves `model`.
    pub(crate) fn check(assignment: v1::Assignment, model: &ModelName) -> Result<Self, Refusal> {
        let v1::Assignment {
            request_id,
            attempt,
            tenant,
            key,
            model: named,
            weight,
            prompts,
            choices: choices_each,
            max_tokens,
            sampling,
            stop: stops,
            budget_ns,
            queue_deadline_ms,
            echo_logprobs,
            pool,
            tier,
            shown_tokens,
        } = assignment;
        if named != model.as_str() {
            return Err(invalid(format!("this worker serves {model}")));
        }
        if stops.len() > MOST_STOPS || stops.iter().any(|stop| stop.len() > MOST_STOP_BYTES) {
            return Err(invalid("at most 64 stop strings of at most 16 KiB are allowed"));
        }
        if shown_tokens.len() > MOST_SHOWN_TOKENS {
            return Err(invalid("at most 64 control tokens may be shown"));
        }
        // The scheduler divides by the weight, so 0 or NaN would distort the shares
        // of all tenants.
        if !weight.is_finite() || weight <= 0.0 {
            return Err(invalid("the weight must be above 0"));
        }
        let mut sampling =
            sampling.ok_or_else(|| invalid("the sampling parameters are missing"))?;
        let grammar = sampling.grammar.take().map(known_form).transpose()?;
        // A gateway with a fault could send numbers that overflow.
        let choices = prompts.len().saturating_mul(choices_each as usize);
        if choices == 0 || choices > MOST_CHOICES {
            return Err(invalid("the number of choices must be from 1 to 1024"));
        }
        Ok(Self {
            request: named_as(RequestId::new(&request_id))?,
            attempt,
            // An empty stop string would match before the first token.
            stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(),
            shown_tokens,
            choices,
            caller: Caller {
                tenant: named_as(TenantId::new(&tenant))?,
                key: named_as(KeyId::new(&key))?,
            },
            // proto3 sends an empty string for an absent one.
            pool: match pool.as_str() {
                "" => None,
                name => Some(named_as(PoolName::new(name))?),
            },
            tier: v1::Tier::try_from(tier)
                .map(Tier::from)
                .map_err(|_| invalid("the tier is unknown"))?,
            weight,
            prompts: prompts.into_iter().map(|prompt| prompt.tokens).collect(),
            choices_each,
            max_tokens,
            sampling: params(sampling),
            grammar,
            budget: budget_ns.map(DeviceNanos),
            queue_deadline: Duration::from_millis(queue_deadline_ms),
            echo_logprobs,
        })
    }

    /// Returns the tenant that pays.
    pub(crate) fn tenant(&self) -> &TenantId {
        &self.caller.tenant
    }

    /// Sets the compiled form of the assignment's grammar.
    pub(crate) fn constrain(&mut self, grammar: RequestGrammar) {
        self.sampling.grammar = Some(grammar);
    }

    /// Returns the compiled form of the assignment's grammar, if it has one.
    pub(crate) fn constraint(&self) -> Option<RequestGrammar> {
        self.sampling.grammar.clone()
    }

    /// Returns the submission. The engine sends its results to `sink`.
    pub(crate) fn submission(self, sink: Box<dyn TokenSink>) -> Submission {
        Submission {
            request: self.request,
            attempt: self.attempt,
            caller: self.caller,
            pool: self.pool,
            tier: self.tier,
            weight: self.weight,
            prompts: self.prompts,
            choices: self.choices_each,
            max_tokens: self.max_tokens,
            sampling: self.sampling,
            budget: self.budget,
            queue_deadline: self.queue_deadline,
            echo_logprobs: self.echo_logprobs,
            sink,
        }
    }
}

fn known_form(grammar: v1::Grammar) -> Result<Grammar, Refusal> {
    grammar.into_domain().ok_or_else(|| invalid("the form of the answer is unknown"))
}

fn params(sampling: v1::Sampling) -> SamplingParams {
    let v1::Sampling {
        temperature,
        top_k,
        top_p,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
        top_logprobs,
        repetition_penalty,
        stop_tokens,
        ignores_end,
        min_p,
        // Compiled apart from the others, because that takes time.
        grammar: _,
    } = sampling;
    let mut logit_bias: Vec<(u32, f32)> = logit_bias.into_iter().collect();
    // A map has no order, and the same request must be sampled in the same way.
    logit_bias.sort_unstable_by_key(|&(token, _)| token);
    SamplingParams {
        temperature,
        // proto3 sends 0 for an absent number, which means that there is no limit.
        top_k: NonZeroU32::new(top_k),
        top_p,
        min_p,
        presence_penalty,
        frequency_penalty,
        // A gateway that does not know the field leaves it at 0.
        repetition_penalty: if repetition_penalty == 0.0 { 1.0 } else { repetition_penalty },
        logit_bias,
        seed,
        top_logprobs,
        stop_tokens,
        ignores_end,
        grammar: None,
    }
}

fn named_as<T>(name: Result<T, InvalidName>) -> Result<T, Refusal> {
    name.map_err(|error| invalid(error.to_string()))
}

fn invalid(message: impl Into<String>) -> Refusal {
    Refusal { reason: RefusedReason::Invalid, retry_after: None, message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn honest() -> v1::Assignment {
        v1::Assignment {
            request_id: "req-1".into(),
            tenant: "acme".into(),
            key: "k1".into(),
            model: "m".into(),
            weight: 1.0,
            prompts: vec![v1::Prompt { tokens: vec![1, 2] }],
            choices: 1,
            max_tokens: 4,
            sampling: Some(v1::Sampling::default()),
            queue_deadline_ms: 1_000,
            ..v1::Assignment::default()
        }
    }

    fn sampling(assignment: &mut v1::Assignment) -> &mut v1::Sampling {
        assignment.sampling.get_or_insert_default()
    }

    #[test]
    fn assignment_check_refuses_invalid_fields() {
        type Change = fn(&mut v1::Assignment);
        let cases: &[(&str, Change, bool)] = &[
            ("honest", |_| (), true),
            ("another model", |it| it.model = "n".into(), false),
            ("no request id", |it| it.request_id.clear(), false),
            ("no tenant", |it| it.tenant.clear(), false),
            ("a weight of 0", |it| it.weight = 0.0, false),
            ("a weight that is none", |it| it.weight = f64::NAN, false),
            ("a pool", |it| it.pool = "trial".into(), true),
            ("a pool that is no name", |it| it.pool = "a b".into(), false),
            ("batch work", |it| it.set_tier(v1::Tier::Batch), true),
            ("a tier of tomorrow", |it| it.tier = 2, false),
            ("no choices", |it| it.choices = 0, false),
            ("no prompts", |it| it.prompts.clear(), false),
            ("a billion choices", |it| it.choices = u32::MAX, false),
            ("no sampling", |it| it.sampling = None, false),
            (
                "a grammar of tomorrow",
                |it| sampling(it).grammar = Some(v1::Grammar { form: None }),
                false,
            ),
            ("a grammar", |it| sampling(it).grammar = Some((&Grammar::JsonObject).into()), true),
            ("many stops", |it| it.stop = vec!["x".into(); 65], false),
            ("a long stop", |it| it.stop = vec!["x".repeat((16 << 10) + 1)], false),
            ("an empty stop", |it| it.stop = vec![String::new()], true),
        ];
        let model = ModelName::new("m").expect("a name");
        for (name, change, good) in cases {
            let mut assignment = honest();
            change(&mut assignment);
            assert_eq!(Work::check(assignment, &model).is_ok(), *good, "{name}");
        }
    }
}
