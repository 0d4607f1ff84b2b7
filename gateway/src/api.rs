//! The API that clients use. The caller is known before the body is read. The
//! body becomes a job, the job is admitted, a task runs it, and the task's events
//! become a response in one piece or a stream.

mod body;
mod idempotent;
mod job;
pub(crate) mod models;
mod outgoing;
mod preflight;
mod response;
mod stream_body;
pub(crate) mod usage;

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::response::Response;
use tokio_util::sync::CancellationToken;
use tollgate_config::{Config, Tenant};
use tollgate_domain::{ModelName, RequestId, TenantId};
use tollgate_openai::{CompletionRequest, Interface, RequestLimits, Violation, json};
use tollgate_serving::idempotency::{ClaimOutcome, IdempotencyClaim, IdempotencyKey, fingerprint};
use tollgate_serving::model::ServedModel;
use tollgate_serving::{Serving, route};

pub(crate) use self::preflight::{Call, KnownCaller, RouteKind};

use self::body::BodyLimits;
use self::job::{RequestFacts, ResponseFacts, tokenize_request};
use self::response::Rendering;
use crate::auth::{AuthenticatedCaller, Authenticator, Endpoint};
use crate::reply::ApiError;
use crate::source_penalties::SourcePenalties;
use crate::telemetry::Metrics;

/// The components that the API's handlers share.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) serving: Arc<Serving>,
    pub(crate) config: Arc<Config>,
    pub(crate) authenticator: Authenticator,
    /// The penalties of network sources.
    pub(crate) source_penalties: SourcePenalties,
    pub(crate) metrics: Arc<Metrics>,
    /// Cancelled when the gateway stops accepting work.
    pub(crate) draining: CancellationToken,
}

/// Answers a request for work in the dialect `interface`. Counts a refusal against
/// the tenant, because clients that ignore `retry-after` accumulate a penalty.
pub(crate) async fn generate(
    api: Api,
    call: Call,
    interface: &'static dyn Interface,
) -> Result<Response, ApiError> {
    let tenant = call.caller.tenant.name.clone();
    let answered = serve(&api, call, interface).await;
    if let Err(error) = &answered {
        api.count_refusal(&tenant, error);
    }
    answered
}

async fn serve(
    api: &Api,
    call: Call,
    interface: &'static dyn Interface,
) -> Result<Response, ApiError> {
    let Call { request, id, endpoint, caller, parameter: _ } = call;
    let KnownCaller { caller, tenant, context } = caller;
    // The head check finds the limits of every route for work.
    let context = context.ok_or(ApiError::Internal)?;
    if !api.serving.can_record() {
        return Err(ApiError::LedgerUnavailable);
    }
    let key = idempotent::key(request.headers())?;
    // A request with a key skips this check: a duplicate needs no place of its
    // own, and only the body shows whether the request is a duplicate.
    if key.is_none() {
        api.serving.limits().check_concurrency(&context)?;
    }
    let began = Instant::now();
    let body = api.read(request.into_body()).await?;
    let read = began.elapsed();
    let guard = match key {
        None => None,
        Some(key) => match api.claim(&caller, endpoint, key, (&id, &body)).await? {
            ClaimOutcome::First(guard) => Some(guard),
            ClaimOutcome::Repeat { first, answer } => return idempotent::repeat(&first, answer),
        },
    };
    // Asked again, because the body may have taken a while to arrive.
    api.serving.limits().check_concurrency(&context)?;
    let parsing_began = Instant::now();
    let parsed = api.parse(&body, interface)?;
    let model = api.model(&caller, &tenant, &parsed.model)?;
    let facts = RequestFacts {
        interface,
        now: api.serving.clock().utc(),
        default_max_tokens: api.config.gateway().requests.default_max_tokens,
        sampling_defaults: model.defaults,
        read,
        parsing_began,
    };
    let response_facts = ResponseFacts::of(&parsed, &facts);
    let streamed = parsed.stream.is_some();
    let request = tokenize_request(id, parsed, facts);
    let pool = api.serving.tokenize_pool();
    let tokenized = pool.tokenize(context.share_owner(), request, model).await?;
    let (job, meta) = response_facts.meta(tokenized);
    let admitted = api.serving.admit(&context, job)?;
    let metrics = Arc::clone(&api.metrics);
    let rendering = Rendering::new(interface, meta, streamed, (&admitted, metrics));
    if let Some(guard) = guard {
        return idempotent::respond(&api.serving, guard, rendering, admitted).await;
    }
    Ok(rendering.respond(api.serving.run(admitted)).await?)
}

impl Api {
    async fn read(&self, body: Body) -> Result<Bytes, ApiError> {
        let gateway = self.config.gateway();
        let limits = BodyLimits {
            size: gateway.requests.body.0,
            window: gateway.timeouts.body_progress,
            progress: gateway.timeouts.body_progress_bytes.0,
        };
        Ok(body::read(body, limits).await?)
    }

    /// Counts a refused request against its tenant. A fault or an overload of the
    /// gateway is not the client's offence.
    fn count_refusal(&self, tenant: &TenantId, error: &ApiError) {
        if error.status().is_client_error() {
            let now = self.serving.clock().now();
            self.serving.penalties().count_refusal(now, tenant, error.told_wait());
        }
    }

    /// Claims the request's idempotency key. A repeat waits for the first request.
    async fn claim(
        &self,
        caller: &AuthenticatedCaller,
        endpoint: Endpoint,
        key: IdempotencyKey,
        (id, body): (&RequestId, &Bytes),
    ) -> Result<ClaimOutcome, ApiError> {
        let fingerprint = fingerprint(endpoint.as_str(), body);
        let (caller, request) = (caller.caller().clone(), id.clone());
        let claim = IdempotencyClaim { caller, key, fingerprint, request };
        Ok(self.serving.idempotency().claim(claim).await?)
    }

    fn parse(
        &self,
        body: &Bytes,
        interface: &dyn Interface,
    ) -> Result<CompletionRequest, Violation> {
        let limits = &self.config.gateway().requests;
        interface.parse(json::text(body, limits.json_depth)?, &request_limits(limits))
    }

    /// Returns the model `name`, if the caller may use it and a worker serves it now.
    fn model(
        &self,
        caller: &AuthenticatedCaller,
        tenant: &Tenant,
        name: &str,
    ) -> Result<Arc<ServedModel>, ApiError> {
        let unknown = || ApiError::ModelNotFound { model: name.to_owned() };
        let model = ModelName::new(name).map_err(|_| unknown())?;
        if !tenant.allows(&model) || !caller.may_use_model(&model) {
            return Err(unknown());
        }
        match route::offer(self.serving.workers(), name) {
            Some(served) => Ok(served),
            // A model that exists but has no free worker is worth a retry.
            None if self.knows(&model) => Err(ApiError::NoWorker { model: name.to_owned() }),
            None => Err(unknown()),
        }
    }

    fn knows(&self, model: &ModelName) -> bool {
        self.config.model(model).is_some()
            || route::offered(self.serving.workers()).binary_search(model).is_ok()
    }
}

/// Returns the bounds that a request's fields must keep.
fn request_limits(config: &tollgate_config::RequestLimits) -> RequestLimits {
    let tollgate_config::RequestLimits {
        body: _,               // bounds reading
        json_depth: _,         // checked before parsing
        default_max_tokens: _, // a default, not a bound
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
