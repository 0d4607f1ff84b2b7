//! Admission of a job: the job's cost is estimated, and every limit of its
//! caller is taken, or none. The result is the right to occupy a device.

use std::sync::Arc;
use std::time::Duration;

use tollgate_admission::{
    Arrival, Estimate, ExpectedOutput, Figures, Hold, Lacking, MoneyEstimate, Reserve, ReserveError,
};
use tollgate_config::Deadlines;
use tollgate_domain::{Caller, DeviceNanos, HELD_GRAMMAR_TIME, PoolName, UnitPrices, UtcTime};
use tollgate_wire::v1;

use crate::Clock;
use crate::caps::Caps;
use crate::error::{Fault, Refusal, RequestError};
use crate::job::Job;
use crate::limits::{BindingLimits, CallerContext, Limits, prices};
use crate::rates::Rates;
use crate::workers::WorkOrder;

/// A job with every limit taken. No other job reaches a worker.
#[derive(Debug)]
pub struct Admitted {
    pub(crate) job: Job,
    pub(crate) caller: Caller,
    pub(crate) hold: Hold,
    /// Reference cost with the expected output, which is held against rates.
    pub(crate) expected: DeviceNanos,
    /// The prices that budgets use for the request, whenever it ends.
    pub(crate) prices: UnitPrices,
    /// The pool that owns the job's share; `None` if the tenant owns it.
    pool: Option<PoolName>,
    /// The weight of that share.
    weight: f64,
    /// The deadlines of the config that the request keeps.
    pub(crate) deadlines: Deadlines,
    /// The seed for sampling, drawn once, so that a second placement gives the
    /// same answer.
    seed: u64,
    /// The number of placements at most.
    pub(crate) placements: u32,
}

/// The source of a job.
pub(crate) enum JobSource {
    /// A request, which has a place.
    Request(Arrival),
    /// A line of a batch, which may take this long from its admission.
    Line(Duration),
}

/// The reason why a line of a batch was not admitted.
#[derive(Clone, Debug, PartialEq)]
pub enum LineError {
    /// Admission knows the request id: it serves once.
    IdKnown,
    /// The line may not run, or not now.
    Refused(RequestError),
}

/// The component that takes limits for jobs.
pub(crate) struct Admitter {
    pub(crate) limits: Limits,
    pub(crate) expected: Arc<ExpectedOutput>,
    pub(crate) clock: Clock,
    /// The slices of the caps; `None` if the whole caps are this gateway's.
    pub(crate) caps: Option<Caps>,
    /// The parts of the rates; `None` if they do not move between gateways.
    pub(crate) rates: Option<Rates>,
}

/// The reason for which a request got no hold.
#[derive(Debug)]
enum NoHold {
    /// The reservation failed.
    Reserve(ReserveError),
    /// The request has a cap, and the server of the slices does not answer.
    Unavailable,
}

impl Admitter {
    pub(crate) fn new(
        (limits, clock): (&Limits, &Clock),
        expected: Arc<ExpectedOutput>,
        caps: Option<Caps>,
        rates: Option<Rates>,
    ) -> Self {
        let (limits, clock) = (limits.clone(), clock.clone());
        Self { limits, expected, clock, caps, rates }
    }

    /// Takes every limit that binds `job` of the caller in `context`. A request runs or
    /// waits in the place of its arrival. A line takes the caps and the largest job alone.
    /// Where several gateways share the caps, this may wait for the database server.
    ///
    /// # Errors
    /// The limit that refused the job. Nothing is held then.
    pub(crate) async fn admit(
        &self,
        context: &CallerContext,
        source: JobSource,
        job: Job,
    ) -> Result<Admitted, LineError> {
        let caller = context.caller().clone();
        let BindingLimits { scopes, counted, pool, weight } =
            self.limits.bind(context, &job.model.name);
        // A cap or a budget may shorten the answer of a request. A line waits instead, so it
        // needs room for its longest answer.
        let least_tokens = match source {
            JobSource::Request(_) => job.max_tokens.min(1),
            JobSource::Line(_) => job.max_tokens,
        };
        let utc = self.clock.utc();
        let estimate = self.estimate(context, &job, least_tokens, utc);
        let (expected, prices) = (estimate.expected, estimate.money.prices);
        // The seed comes before the hold: a failure must not leave a hold open.
        let seed = match job.sampling.seed {
            Some(seed) => seed,
            None => random_seed().map_err(|fault| LineError::Refused(fault.into()))?,
        };
        // The worst case bounds the budget; the least decides if a cap has room at all.
        let now = self.clock.now();
        let mut deadlines = context.config().gateway().deadlines.clone();
        if let JobSource::Line(time) = &source {
            deadlines.request = *time;
        }
        let reserve = Reserve {
            id: job.id.clone(),
            requester: context.requester(),
            tier: job.tier,
            is_line: matches!(source, JobSource::Line(_)),
            scopes,
            counted,
            class: job.model.class.clone(),
            estimate,
            queue_deadline: now.after(deadlines.queue),
            // The hold outlives the deadline, so that a late figure still settles it.
            expires: now.after(deadlines.request + deadlines.hold_grace),
        };
        let (arrival, placements) = match source {
            JobSource::Request(arrival) => (Some(arrival), MOST_PLACEMENTS),
            // A second placement would need a second request id.
            JobSource::Line(_) => (None, 1),
        };
        let hold = self.reserve(reserve, arrival).await.map_err(|error| match error {
            NoHold::Reserve(ReserveError::Refused(refusal)) => {
                LineError::Refused(Refusal::Limit(refusal).into())
            }
            NoHold::Reserve(ReserveError::AlreadyHeld) => LineError::IdKnown,
            NoHold::Unavailable => LineError::Refused(Fault::LedgerUnavailable.into()),
        })?;
        Ok(Admitted {
            job,
            caller,
            hold,
            expected,
            prices,
            pool,
            weight,
            deadlines,
            seed,
            placements,
        })
    }

    /// Takes one request from the request rates of `context`, which the head of the request has
    /// not counted because this gateway lacks parts of them.
    ///
    /// # Errors
    /// The rate that is spent.
    pub(crate) async fn count(&self, context: &CallerContext) -> Result<(), Refusal> {
        let now = self.clock.now();
        let taken = match &self.rates {
            Some(rates) => rates.take_request(context.scopes()).await,
            None => self.limits.admission().take_request(now, context.scopes()),
        };
        Ok(taken?)
    }

    /// Takes a place to run or to wait for a request that is still arriving. Waits for the Redis
    /// server if this gateway lacks parts of the places.
    ///
    /// # Errors
    /// One of the caller's scopes is full.
    pub(crate) async fn arrive(&self, context: &CallerContext) -> Result<Arrival, Refusal> {
        let (requester, scopes) = (context.requester(), context.scopes());
        let arrived = match &self.rates {
            Some(rates) => rates.arrive(&requester, scopes).await,
            None => self.limits.admission().arrive(self.clock.now(), &requester, scopes),
        };
        Ok(arrived?)
    }

    /// Takes every limit of a request, or none. If this gateway lacks parts of shared limits, the
    /// servers that have them are asked first.
    async fn reserve(
        &self,
        mut request: Reserve,
        mut arrival: Option<Arrival>,
    ) -> Result<Hold, NoHold> {
        let admission = self.limits.admission();
        let has_cap = || request.scopes.iter().any(|limited| limited.has_cap(&request.class));
        if self.caps.as_ref().is_some_and(|caps| !caps.are_usable() && has_cap()) {
            return Err(NoHold::Unavailable);
        }
        let are_shared = self.caps.is_some() || self.rates.is_some();
        let mut is_answered = true;
        for _ in 0..if are_shared { ATTEMPTS } else { 0 } {
            let now = self.clock.now();
            let lacking =
                match admission.reserve_or_ask(now, self.clock.utc_at(now), request, arrival) {
                    Ok(reserved) => return reserved.map_err(NoHold::Reserve),
                    Err(lacking) => lacking,
                };
            let Lacking { request: same, arrival: place, wants, parts } = lacking;
            (request, arrival) = (same, place);
            if let (Some(server), false) = (&self.rates, parts.is_empty())
                && !server.ask(parts).await
            {
                break;
            }
            if let (Some(server), false) = (&self.caps, wants.is_empty()) {
                is_answered = server.ask(wants).await;
                if !is_answered {
                    break;
                }
            }
        }
        // The last try is with what is there: a request before it may have taken the grant.
        let (now, utc) = (self.clock.now(), self.clock.utc());
        let reserved = match arrival {
            Some(arrival) => admission.reserve_arrived(now, utc, request, arrival),
            None => admission.reserve(now, utc, request),
        };
        reserved.map_err(|error| match error {
            ReserveError::Refused(refusal) if !is_answered && refusal.is_held_cap() => {
                NoHold::Unavailable
            }
            error => NoHold::Reserve(error),
        })
    }

    /// Predicts the cost of `job`, of which each choice has `least_tokens` tokens at least.
    fn estimate(
        &self,
        context: &CallerContext,
        job: &Job,
        least_tokens: u32,
        utc: UtcTime,
    ) -> Estimate {
        let tenant = context.tenant();
        // Without end tokens an answer has all the tokens that it may have.
        let expected_tokens = match job.sampling.ignores_end {
            true => job.max_tokens,
            false => self.expected.expect(&tenant.name, &job.model.name, job.max_tokens),
        };
        // At least as expected: a device may be faster than its calibration.
        let most_tokens = job.tokens_within(RATE_WINDOW).max(expected_tokens);
        let tokens = |each| job.prompt_tokens() + u64::from(each) * job.all_choices();
        Estimate {
            tokens: tokens(expected_tokens),
            most_tokens: tokens(most_tokens),
            expected: job.cost(expected_tokens),
            most: job.cost(most_tokens),
            worst: with_margin(job.cost(job.max_tokens)),
            least: with_margin(job.cost(least_tokens)),
            grammar_time: match job.sampling.grammar {
                Some(_) => HELD_GRAMMAR_TIME,
                None => Duration::ZERO,
            },
            money: MoneyEstimate {
                prices: prices(
                    context.config(),
                    tenant.priced_as().map(|plan| &plan.name),
                    (&job.model.name, &job.model.class, job.tier),
                    utc.day(),
                ),
                prompt_tokens: job.prompt_tokens(),
                least_output: u64::from(least_tokens) * job.all_choices(),
                most_output: u64::from(job.max_tokens) * job.all_choices(),
            },
        }
    }

    /// Gives every limit of `admitted` back, because the job does not run after
    /// all.
    pub(crate) fn give_back(&self, admitted: Admitted) {
        let Admitted { job, hold, .. } = admitted;
        if let Err(error) = hold.void(self.clock.now()) {
            tracing::warn!(request = %job.id, %error, "hold ended before its request; nothing is given back");
        }
    }
}

impl Admitted {
    /// Returns the admitted job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Returns the reference cost that is held for the job.
    pub fn reserved(&self) -> DeviceNanos {
        self.expected
    }

    /// Returns the state of the caller's limits after this request.
    pub fn figures(&self) -> &Figures {
        self.hold.figures()
    }

    /// Returns the largest number of tokens of each choice: those that the client asks for,
    /// or what a budget has left.
    fn max_tokens(&self) -> u32 {
        let asked = self.job.max_tokens;
        // Rounded down, so that all choices together stay within the budget.
        let each = self.hold.most_output().map(|all| all / self.job.all_choices().max(1));
        each.map_or(asked, |each| u32::try_from(each).unwrap_or(asked).min(asked))
    }

    /// Makes the order for a worker, as placement `number`. The worker may let the
    /// request wait for `queue_left`.
    pub(crate) fn order(&self, number: u32, queue_left: Duration) -> WorkOrder {
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
            max_tokens: self.max_tokens(),
            sampling: Some(v1::Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
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
                stop_tokens: sampling.stop_tokens.clone(),
                ignores_end: sampling.ignores_end,
                grammar: sampling.grammar.as_ref().map(v1::Grammar::from),
            }),
            stop: job.stop.clone(),
            budget_ns: self.hold.budget().map(DeviceNanos::nanos),
            // A wait that rounds down to 0 ms would be refused on arrival.
            queue_deadline_ms: (queue_left.as_millis() as u64).max(1),
            echo_logprobs: job.scores_prompts,
            pool: self.pool.as_ref().map_or_else(String::new, |pool| pool.as_str().to_owned()),
            tier: v1::Tier::from(job.tier).into(),
            shown_tokens: job.shown_tokens.clone(),
        };
        WorkOrder {
            request: job.id.clone(),
            caller: self.caller.clone(),
            model: Arc::clone(&job.model),
            assignment,
        }
    }
}

/// Adds a margin to a cost. Gateway and worker add the same terms in another
/// order, and a cost that fits here must fit there.
fn with_margin(cost: DeviceNanos) -> DeviceNanos {
    DeviceNanos(cost.nanos().saturating_add(cost.nanos() >> 20).saturating_add(1))
}

/// The questions of one request at most. Another request may take what was granted.
const ATTEMPTS: u32 = 4;

/// Placements of one request at most.
const MOST_PLACEMENTS: u32 = 3;

/// The window of rates: a request's largest use within it is compared with theirs.
const RATE_WINDOW: Duration = Duration::from_secs(60);

fn random_seed() -> Result<u64, Fault> {
    let mut bytes = [0; 8];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| Fault::Internal)?;
    Ok(u64::from_ne_bytes(bytes))
}
