//! May it: a job's cost is estimated and every limit of its caller taken, or
//! none. What comes out is the right to occupy a device.

use std::sync::Arc;
use std::time::Duration;

use tollgate_admission::{Estimate, Figures, Hold, Reserve, ReserveError};
use tollgate_domain::{Caller, DeviceNanos, PoolName};
use tollgate_wire::v1;

use crate::api::Job;
use crate::auth::AuthenticatedCaller;
use crate::limits::Bound;
use crate::reply::ApiError;
use crate::serving::Serving;
use crate::upstream::Order;

/// A job whose every limit has been taken. Nothing else reaches a worker.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) job: Job,
    pub(crate) caller: Caller,
    pub(crate) hold: Hold,
    /// Reference cost with the output that is expected; held against rates.
    pub(crate) expected: DeviceNanos,
    /// The pool on whose share it runs, where that is not the tenant's own.
    pool: Option<PoolName>,
    /// The weight of that share.
    weight: f64,
    /// Drawn once, so that a placement anew gives the same answer.
    seed: u64,
}

/// Takes every limit in `bound`, which are those of `caller`, for `job`.
///
/// # Errors
/// The limit that said no; nothing is held then.
pub(crate) fn admit(
    serving: &Serving,
    caller: &AuthenticatedCaller,
    bound: Bound,
    job: Job,
) -> Result<Admitted, ApiError> {
    let expected_tokens = serving.expected.expect(caller.tenant(), &job.model.name, job.max_tokens);
    let expected = job.cost(expected_tokens);
    let worst = job.cost(job.max_tokens);
    let estimate = Estimate {
        tokens: job.prompt_tokens() + u64::from(expected_tokens) * job.all_choices(),
        expected,
        worst: with_margin(worst),
        least: with_margin(job.cost(job.max_tokens.min(1))),
    };
    let Bound { scopes, pool, weight } = bound;
    let now = serving.clock.now();
    let utc = serving.clock.utc();
    let seed = match job.sampling.seed {
        Some(seed) => seed,
        None => random_seed()?,
    };
    let reserve = Reserve {
        id: job.id.clone(),
        scopes,
        class: job.model.class.clone(),
        estimate,
        queue_deadline: now.after(serving.deadlines.queue),
        expires: now.after(serving.deadlines.request + serving.deadlines.hold_grace),
    };
    let hold = serving.admission.reserve(now, utc, reserve).map_err(|error| match error {
        ReserveError::Refused(refusal) => ApiError::Limit(refusal),
        ReserveError::AlreadyHeld => {
            tracing::error!(request = %job.id, "a request id came twice");
            ApiError::Internal
        }
    })?;
    let caller = caller.caller().clone();
    Ok(Admitted { job, caller, hold, expected, pool, weight, seed })
}

impl Admitted {
    /// What a worker is asked to do, as placement `number`, with `queue` left
    /// to wait there.
    pub(crate) fn order(&self, number: u32, queue: Duration) -> Order {
        let job = &self.job;
        let sampling = &job.sampling;
        let assignment = v1::Assignment {
            request_id: job.id.as_str().to_owned(),
            attempt: number,
            tenant: self.caller.tenant.as_str().to_owned(),
            key: self.caller.key.as_str().to_owned(),
            model: job.model.name.as_str().to_owned(),
            weight: self.weight,
            prompts: job
                .prompts
                .iter()
                .map(|tokens| v1::Prompt { tokens: tokens.clone() })
                .collect(),
            choices: job.choices,
            max_tokens: job.max_tokens,
            sampling: Some(v1::Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                repetition_penalty: sampling.repetition_penalty,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                logit_bias: sampling
                    .logit_bias
                    .iter()
                    .map(|(&token, &bias)| (token, bias))
                    .collect(),
                seed: self.seed,
                top_logprobs: sampling.top_logprobs,
            }),
            stop: job.stop.clone(),
            budget_ns: self.hold.budget().map(DeviceNanos::nanos),
            queue_deadline_ms: (queue.as_millis() as u64).max(1),
            echo_logprobs: job.scores_prompts(),
            pool: self.pool.as_ref().map_or_else(String::new, |pool| pool.as_str().to_owned()),
            tier: v1::Tier::Interactive.into(),
        };
        Order {
            request: job.id.clone(),
            caller: self.caller.clone(),
            model: Arc::clone(&job.model),
            assignment,
        }
    }

    /// Gives every limit back: it does not run after all.
    pub(crate) fn give_back(self, serving: &Serving) {
        if let Err(error) = self.hold.void(serving.clock.now()) {
            tracing::warn!(request = %self.job.id, %error, "a hold ended before its request");
        }
    }

    /// Where the caller's limits stand after this request.
    pub(crate) fn figures(&self) -> &Figures {
        self.hold.figures()
    }
}

/// Gateway and worker add the same terms in another order: a cost that fits
/// here must fit there.
fn with_margin(cost: DeviceNanos) -> DeviceNanos {
    DeviceNanos(cost.nanos().saturating_add(cost.nanos() >> 20).saturating_add(1))
}

fn random_seed() -> Result<u64, ApiError> {
    let mut bytes = [0; 8];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| ApiError::Internal)?;
    Ok(u64::from_ne_bytes(bytes))
}
