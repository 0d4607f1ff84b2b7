//! The API that clients use. The caller is known before the body is read. The
//! body becomes a job, the job is admitted, a task runs it, and the task's events
//! become a response in one piece or a stream.

mod body;
mod body_budget;
mod idempotent;
mod job;
pub(crate) mod jobs;
pub(crate) mod limits;
pub(crate) mod models;
mod outgoing;
mod preflight;
mod response;
mod stream_body;
pub(crate) mod usage;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use tokio_util::sync::CancellationToken;
use tollgate_admission::Arrival;
use tollgate_config::{Config, LiveConfig};
use tollgate_domain::{ModelName, MonotonicTime, RequestId, TenantId, Tier, ToolFormat};
use tollgate_openai::{
    CompletionRequest, FLEX, Interface, RequestLimits, ResponseMeta, SERVICE_TIER, Violation, json,
};
use tollgate_serving::admit::Admitted;
use tollgate_serving::idempotency::{ClaimOutcome, IdempotencyClaim, fingerprint};
use tollgate_serving::job::Job;
use tollgate_serving::model::ServedModel;
use tollgate_serving::tokenize::{check_wanted, tokenize};
use tollgate_serving::{CallerContext, ConfiguredTenant, Serving, route};

pub(crate) use self::preflight::{Call, KnownCaller, RouteKind};

use self::body::{BodyLimits, ReceivedBody};
pub(crate) use self::body_budget::BodyBudget;
use self::body_budget::{BodyBudgetOptions, BodyBytes};
use self::job::{RequestFacts, ResponseFacts, tokenize_request};
use self::jobs::JobsApi;
use self::response::Rendering;
use crate::access_log::{AccessFacts, AccessLog};
use crate::auth::{AuthenticatedCaller, Authenticator};
use crate::client_ids::{ClientIdTable, ClientIds};
use crate::connection_owners::OwnerNumbers;
use crate::record::{KeptFacts, RequestRecord};
use crate::reply::ApiError;
use crate::source_penalties::SourcePenalties;
use crate::stack::HasRecord;
use crate::telemetry::Metrics;

/// The components that the API's handlers share.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) serving: Arc<Serving>,
    pub(crate) config: LiveConfig,
    pub(crate) authenticator: Authenticator,
    /// The penalties of network sources.
    pub(crate) source_penalties: SourcePenalties,
    /// The numbers by which the listener counts connections.
    pub(crate) owner_numbers: OwnerNumbers,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) access_log: AccessLog,
    /// The clients' own ids of the last requests.
    pub(crate) client_ids: ClientIdTable,
    /// The memory for bodies.
    pub(crate) bodies: BodyBudget,
    /// Files and batches.
    pub(crate) jobs: JobsApi,
    /// Cancelled when the gateway stops accepting work.
    pub(crate) draining: CancellationToken,
}

/// Answers a request for work in the dialect `interface`. Counts a refusal against
/// the tenant, because clients that ignore `retry-after` accumulate a penalty.
pub(crate) async fn generate(api: Api, call: Call, interface: &'static dyn Interface) -> Response {
    let tenant = call.caller.tenant.tenant().name.clone();
    let facts = || AccessFacts {
        request: call.id.clone(),
        endpoint: call.label,
        caller: Some(call.caller.caller.caller().clone()),
        client: ClientIds::of(call.request.headers()),
    };
    let mut record = RequestRecord::begin(&api.metrics, call.caller.caller.caller().clone());
    record.write_line(&api.access_log, facts);
    record.keep_ids(KeptFacts {
        table: api.client_ids.clone(),
        clock: api.serving.clock().clone(),
        request: call.id.clone(),
        ids: ClientIds::of(call.request.headers()),
    });
    let mut record = Some(record);
    let answered = serve(&api, call, interface, &mut record).await;
    if let Err(error) = &answered {
        api.count_refusal(api.serving.clock().now(), &tenant, error);
    }
    // The task of an admitted request has taken the record.
    match (record, &answered) {
        (Some(record), Ok(_)) => record.repeated(),
        (Some(record), Err(error)) => record.failed(error),
        (None, _) => {}
    }
    let mut response = answered.unwrap_or_else(|error| error.into_response());
    response.extensions_mut().insert(HasRecord);
    response
}

#[expect(clippy::disallowed_methods, reason = "the stages of a request are measured")]
async fn serve(
    api: &Api,
    call: Call,
    interface: &'static dyn Interface,
    record: &mut Option<RequestRecord>,
) -> Result<Response, ApiError> {
    let Call { request, id, endpoint, caller, label: _, parameter: _ } = call;
    let KnownCaller { caller, tenant, context } = caller;
    // The head check finds the limits of every route for work.
    let context = context.ok_or(ApiError::Internal)?;
    // Not in the head check, because this may wait for the server that has the rates.
    api.serving.count(&context).await?;
    let key = idempotent::key(request.headers())?;
    // A request with a key takes no place for a small body: a duplicate needs none, and
    // only the body shows whether the request is a duplicate.
    let is_placed = key.is_none() || body::may_be_large(request.body());
    let arrival = match is_placed {
        true => Some(api.serving.arrive(&context).await?),
        false => None,
    };
    let began = Instant::now();
    let (body, held) = api.read(&context, request.into_body()).await?;
    let read = began.elapsed();
    let mut received = Received { body, held, arrival };
    let guard = match key {
        None => None,
        Some(key) => {
            // With the endpoint, because one body can be valid for two of them.
            let fingerprint = fingerprint(endpoint.as_str(), received.body.segments());
            let owner = caller.caller().clone();
            let claim = IdempotencyClaim { caller: owner, key, fingerprint, request: id.clone() };
            match api.serving.idempotency().claim(claim, || received.let_go()).await? {
                ClaimOutcome::First(guard) => Some(guard),
                ClaimOutcome::Repeat { first, answer } => {
                    return idempotent::repeat(&first, answer);
                }
            }
        }
    };
    let Received { body, held, arrival } = received;
    // Not a repeat after all, so the request needs its place.
    let arrival = match arrival {
        Some(arrival) => arrival,
        None => api.serving.arrive(&context).await?,
    };
    let arrived = Arrived { id, body, held, read, interface, caller, tenant };
    let began = Instant::now();
    // The pool does the work of a small body on this thread.
    let bytes = arrived.body.len();
    let prepare = {
        let api = api.clone();
        move |abandoned: &CancellationToken| api.prepare(arrived, began, abandoned)
    };
    let (owner, timeout) = (context.share_owner(), context.config().gateway().deadlines.queue);
    let Prepared { job, meta, streamed } =
        api.serving.tokenize_pool().run(&owner, timeout, bytes, prepare).await??;
    let admitted = api.serving.admit(&context, arrival, job).await?;
    let metrics = Arc::clone(&api.metrics);
    let rendering = Rendering::new(interface, meta, streamed, (&admitted, metrics));
    let record = record.take().ok_or(ApiError::Internal)?;
    let run = Run { admitted, record };
    if let Some(guard) = guard {
        return idempotent::respond(&api.serving, guard, rendering, run).await;
    }
    let Run { admitted, record } = run;
    Ok(rendering.respond(api.serving.run(admitted, record.on_end())).await?)
}

/// An admitted request and the record of its end.
struct Run {
    admitted: Admitted,
    record: RequestRecord,
}

/// The things that a request holds when its body has arrived.
struct Received {
    body: ReceivedBody,
    /// The memory of the body.
    held: BodyBytes,
    /// The place of the request, if it has taken one.
    arrival: Option<Arrival>,
}

impl Received {
    /// Lets go of everything that a repeat does not need while it waits for the first
    /// request: its place, and a large body with its memory. Returns true if the request
    /// can still run.
    fn let_go(&mut self) -> bool {
        self.arrival = None;
        let is_small = self.body.len() <= body::SMALL_BODY;
        if !is_small {
            // The wait can take minutes, and a large body must not hold its memory so long.
            self.body = ReceivedBody::default();
            self.held.release();
        }
        is_small
    }
}

/// A request that has arrived whole.
struct Arrived {
    id: RequestId,
    body: ReceivedBody,
    /// The memory of the body.
    held: BodyBytes,
    /// Time in which the body arrived.
    read: Duration,
    interface: &'static dyn Interface,
    caller: AuthenticatedCaller,
    tenant: ConfiguredTenant,
}

/// The facts of a request or a line from which its job is made.
struct JobFacts<'a> {
    id: RequestId,
    interface: &'static dyn Interface,
    caller: &'a AuthenticatedCaller,
    tenant: &'a ConfiguredTenant,
    /// Time in which the body arrived.
    read: Duration,
    /// The moment when the request began to wait for a thread.
    began: Instant,
    tier: Tier,
}

/// A request that is ready for admission.
struct Prepared {
    job: Job,
    meta: ResponseMeta,
    streamed: bool,
}

impl Api {
    /// Parses and tokenizes a request; `began` is when it started to wait for that. The
    /// body and its memory are gone at the end. The work ends early once `abandoned` is
    /// cancelled.
    fn prepare(
        &self,
        arrived: Arrived,
        began: Instant,
        abandoned: &CancellationToken,
    ) -> Result<Prepared, ApiError> {
        // The client may have left while the request waited for a thread.
        check_wanted(abandoned)?;
        let Arrived { id, body, held: _held, read, interface, caller, tenant } = arrived;
        let config = tenant.config();
        // The raw bytes are freed before the prompt is rendered and tokenized.
        let parsed = parse(config, &body.into_bytes(), interface)?;
        check_tier(&caller, &tenant, parsed.tier)?;
        let (caller, tenant, tier) = (&caller, &tenant, parsed.tier);
        let facts = JobFacts { id, interface, caller, tenant, read, began, tier };
        self.job(parsed, facts, abandoned)
    }

    /// Makes the job of a parsed request.
    fn job(
        &self,
        mut parsed: CompletionRequest,
        facts: JobFacts<'_>,
        abandoned: &CancellationToken,
    ) -> Result<Prepared, ApiError> {
        let JobFacts { id, interface, caller, tenant, read, began, tier } = facts;
        let config = tenant.config();
        let model = self.model(caller, tenant, &parsed.model)?;
        let facts = RequestFacts {
            interface,
            now: self.serving.clock().utc(),
            default_max_tokens: config.gateway().requests.default_max_tokens,
            sampling_defaults: model.defaults,
            read,
            parsing_began: began,
            tool_format: tool_format(config, &model),
            thinks: model.template.as_ref().is_some_and(|template| template.thinks()),
        };
        if let Some(tools) = parsed.tools.as_ref() {
            let format = facts.tool_format.ok_or_else(|| unknown_tool_format(&model))?;
            // The form of the content becomes an alternative within the form of the calls.
            let content = parsed.sampling.grammar.take();
            if let Some(form) = tools.grammar(format, content)? {
                parsed.sampling.set_form(form, "tools")?;
            }
        }
        // Only now, because the form of the answer decides where reasoning may stand.
        let response_facts = ResponseFacts::of(&parsed, &facts);
        // A line of a batch runs in the batch tier, whatever its body asks for.
        parsed.tier = tier;
        let streamed = parsed.stream.is_some();
        let tokenized = tokenize(tokenize_request(id, parsed, facts), model, abandoned)?;
        let (job, meta) = response_facts.meta(tokenized);
        Ok(Prepared { job, meta, streamed })
    }

    /// Reads the body of a request. The second value holds the memory of the body
    /// until it is dropped.
    async fn read(
        &self,
        context: &CallerContext,
        body: Body,
    ) -> Result<(ReceivedBody, BodyBytes), ApiError> {
        let gateway = context.config().gateway();
        let limits = BodyLimits {
            size: gateway.requests.body.0,
            window: gateway.timeouts.body_progress,
            progress: gateway.timeouts.body_progress_bytes.0,
        };
        let mut held = self.bodies.begin(context.share_owner(), &context.tenant().name);
        let received = body::read(body, limits, &mut held).await?;
        Ok((received, held))
    }

    /// Counts a refused request against its tenant. A fault or an overload of the
    /// gateway is not the client's offence.
    fn count_refusal(&self, now: MonotonicTime, tenant: &TenantId, error: &ApiError) {
        if error.status().is_client_error() {
            self.serving.penalties().count_refusal(now, tenant, error.told_wait());
        }
    }

    /// Returns the model `name`, if the caller may use it and a worker serves it now.
    fn model(
        &self,
        caller: &AuthenticatedCaller,
        tenant: &ConfiguredTenant,
        name: &str,
    ) -> Result<Arc<ServedModel>, ApiError> {
        let unknown = || ApiError::ModelNotFound { model: name.to_owned() };
        let model = ModelName::new(name).map_err(|_| unknown())?;
        // A forbidden model looks like a missing one, so that no client learns what others use.
        if !tenant.tenant().allows(&model) || !caller.may_use_model(&model) {
            return Err(unknown());
        }
        match route::offer(self.serving.workers(), name) {
            Some(served) => Ok(served),
            // A model that exists but has no free worker is worth a retry.
            None if self.knows(tenant.config(), &model) => {
                Err(ApiError::NoWorker { model: name.to_owned() })
            }
            None => Err(unknown()),
        }
    }

    fn knows(&self, config: &Config, model: &ModelName) -> bool {
        config.model(model).is_some()
            // `offered` returns its names sorted.
            || route::offered(self.serving.workers()).binary_search(model).is_ok()
    }
}

/// Returns the form in which `model` writes calls of tools: the one in the config, or else
/// the one that its template shows.
fn tool_format(config: &Config, model: &ServedModel) -> Option<ToolFormat> {
    let configured = config.model(&model.name).and_then(|model| model.tool_format);
    configured.or_else(|| model.template.as_ref()?.tool_format())
}

fn unknown_tool_format(model: &ServedModel) -> Violation {
    Violation {
        param: Some("tools".into()),
        code: Some("unsupported_parameter"),
        message: format!(
            "The model '{}' does not know tools: its chat template shows no form of calls that this gateway reads. Leave 'tools' out, or send \"tool_choice\": \"none\".",
            model.name
        ),
    }
}

fn parse(
    config: &Config,
    body: &[u8],
    interface: &dyn Interface,
) -> Result<CompletionRequest, Violation> {
    let limits = &config.gateway().requests;
    interface.parse(json::text(body, limits.json_depth)?, &request_limits(limits))
}

/// Checks that every plan of the caller allows the tier.
fn check_tier(
    caller: &AuthenticatedCaller,
    tenant: &ConfiguredTenant,
    tier: Tier,
) -> Result<(), ApiError> {
    if tier == Tier::Interactive {
        return Ok(());
    }
    let (config, tenant) = (tenant.config(), tenant.tenant());
    let of_key = caller.plan().and_then(|plan| config.plan(plan));
    let of_pool = tenant.pool.as_ref().map(|pool| &pool.plan);
    let plans = of_key.into_iter().chain(&tenant.plan).chain(of_pool);
    match plans.map(Arc::as_ref).find(|plan| !plan.flex) {
        None => Ok(()),
        Some(plan) => Err(ApiError::Invalid {
            param: Some(SERVICE_TIER.into()),
            code: Some("invalid_value"),
            message: format!("Plan '{}' does not allow service_tier '{FLEX}'.", plan.name).into(),
        }),
    }
}

/// Returns the sizes of the budget for bodies. One body of the largest size always fits.
pub(crate) fn body_budget_options(config: &tollgate_config::RequestLimits) -> BodyBudgetOptions {
    let per_owner = config.body_memory_per_tenant.max(config.body).0;
    // Half, so that one tenant of a pool leaves room to the others.
    let per_pooled_tenant = (per_owner / 2).max(config.body.0);
    let total = config.body_memory.0.max(per_owner);
    BodyBudgetOptions { per_pooled_tenant, per_owner, total }
}

/// Returns the bounds that a request's fields must keep.
pub(crate) fn request_limits(config: &tollgate_config::RequestLimits) -> RequestLimits {
    let tollgate_config::RequestLimits {
        body: _,                   // bounds reading
        body_memory_per_tenant: _, // bounds reading
        body_memory: _,            // bounds reading
        json_depth: _,             // checked before parsing
        default_max_tokens: _,     // a default, not a bound
        messages,
        choices,
        best_of,
        prompts,
        stop,
        stop_size,
        top_logprobs,
        logit_bias,
    } = config;
    RequestLimits {
        choices: *choices,
        best_of: *best_of,
        prompts: *prompts,
        messages: *messages,
        stop: *stop,
        stop_bytes: stop_size.0,
        logit_bias: *logit_bias,
        top_logprobs: *top_logprobs,
    }
}

impl From<Violation> for ApiError {
    fn from(violation: Violation) -> Self {
        let Violation { param, code, message } = violation;
        // A body that is wrong as a whole has no field and no code.
        let code = code.or(param.is_some().then_some("invalid_value"));
        Self::Invalid { param: param.map(Into::into), code, message: message.into() }
    }
}

#[cfg(test)]
pub(crate) mod tests;
