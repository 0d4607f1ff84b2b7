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
mod turns;
pub(crate) mod usage;

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::response::Response;
use tokio_util::sync::CancellationToken;
use tollgate_admission::ScopeLimits;
use tollgate_config::{Config, Tenant};
use tollgate_domain::{ModelName, PoolName, RequestId};
use tollgate_openai::{CompletionRequest, Interface, RequestLimits, Violation, json};

pub(crate) use self::job::{Counting, Job};
pub(crate) use self::preflight::{Call, CallerContext, RouteKind};

use self::body::BodyLimits;
use self::job::CountContext;
use self::response::Rendering;
use crate::auth::{AuthenticatedCaller, Authenticator, Endpoint};
use crate::idempotency::{Ask, Claimed, IdempotencyKey, fingerprint};
use crate::pump;
use crate::reply::ApiError;
use crate::serving::Serving;
use crate::upstream::ServedModel;
use crate::{admit, limits, route};

/// The components that the API's handlers share.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) serving: Arc<Serving>,
    pub(crate) config: Arc<Config>,
    pub(crate) authenticator: Authenticator,
    /// Cancelled when the gateway stops accepting work.
    pub(crate) draining: CancellationToken,
}

/// Answers a request for work in the dialect `interface`. Counts a refusal against the tenant, because
/// clients that ignore `retry-after` accumulate a penalty.
pub(crate) async fn generate(
    api: Api,
    call: Call,
    interface: &'static dyn Interface,
) -> Result<Response, ApiError> {
    let tenant = call.caller.tenant.name.clone();
    let answered = serve(&api, call, interface).await;
    if let Err(error) = &answered {
        api.serving.penalties.answered(api.serving.clock.now(), &tenant, error);
    }
    answered
}

async fn serve(
    api: &Api,
    call: Call,
    interface: &'static dyn Interface,
) -> Result<Response, ApiError> {
    let Call { request, id, endpoint, caller, parameter: _ } = call;
    let CallerContext { caller, tenant, scopes } = caller;
    if !api.serving.can_record() {
        return Err(ApiError::LedgerUnavailable);
    }
    let key = IdempotencyKey::of(request.headers())?;
    // A request with a key skips this check: a duplicate needs no place of its
    // own, and only the body shows whether the request is a duplicate.
    if key.is_none() {
        api.has_place(&scopes)?;
    }
    let began = Instant::now();
    let body = api.read(request.into_body()).await?;
    let read = began.elapsed();
    let first = match key {
        None => None,
        Some(key) => match api.claim(&caller, endpoint, key, (&id, &body)).await? {
            Claimed::First(first) => Some(first),
            Claimed::Repeat(answer) => return answer,
        },
    };
    // Asked again, because the body may have taken a while to arrive.
    api.has_place(&scopes)?;
    let parsing_began = Instant::now();
    let asked = api.parse(&body, interface)?;
    let model = api.model(&caller, &tenant, &asked.model)?;
    let context = CountContext {
        interface,
        now: api.serving.clock.utc(),
        default_max_tokens: api.config.gateway().requests.default_max_tokens,
        read,
        parsed: parsing_began,
    };
    let bound = limits::bind(&api.config, scopes, &tenant, &model.name);
    let holder = bound.pool.as_ref().map_or(tenant.name.as_str(), PoolName::as_str);
    let job = api.serving.counting.count(holder, id, asked, model, context).await?;
    let admitted = admit::admit(&api.serving, &caller, bound, job)?;
    let rendering = Rendering::new(&api.serving, &admitted);
    if let Some(first) = first {
        return idempotent::respond(&api.serving, first, rendering, admitted).await;
    }
    Ok(rendering.respond(pump::start(&api.serving, admitted)).await?)
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

    /// Says no if one of `scopes` has no place left to run or to wait, before
    /// anything is done for the request.
    fn has_place(&self, scopes: &[ScopeLimits]) -> Result<(), ApiError> {
        match self.serving.admission.check_concurrency(scopes) {
            Some(refusal) => Err(ApiError::Limit(refusal)),
            None => Ok(()),
        }
    }

    /// Whether the request is the first with its key; a repeat waits for that.
    async fn claim(
        &self,
        caller: &AuthenticatedCaller,
        endpoint: Endpoint,
        key: IdempotencyKey,
        (id, body): (&RequestId, &Bytes),
    ) -> Result<Claimed, ApiError> {
        let fingerprint = fingerprint(endpoint.as_str(), body);
        let (caller, request) = (caller.caller().clone(), id.clone());
        self.serving.idempotency.claim(Ask { caller, key, fingerprint, request }).await
    }

    fn parse(
        &self,
        body: &Bytes,
        interface: &dyn Interface,
    ) -> Result<CompletionRequest, Violation> {
        let limits = &self.config.gateway().requests;
        interface.parse(json::text(body, limits.json_depth)?, &request_limits(limits))
    }

    /// The model named `name`, if the caller may use it and it is served now.
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
        match route::offer(&self.serving.workers, name) {
            Some(served) => Ok(served),
            // A worker that drains still says that the model exists.
            None if self.knows(&model) => Err(ApiError::NoWorker { model: name.to_owned() }),
            None => Err(unknown()),
        }
    }

    fn knows(&self, model: &ModelName) -> bool {
        self.config.model(model).is_some()
            || route::offered(&self.serving.workers).binary_search(model).is_ok()
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
