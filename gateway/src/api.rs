//! The interface that clients speak: who calls is known before the body is
//! read; the body becomes a job, the job is admitted, a task runs it, and what
//! the task tells becomes an answer in one piece or a stream.

mod asked;
mod body;
mod chat;
mod chunks;
mod completions;
mod fields;
pub(crate) mod fuzz;
mod job;
mod keyed;
mod logprobs;
mod outgoing;
mod preflight;
mod sse;
mod telling;
mod turns;
mod whole;

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tollgate_admission::{Figures, ScopeLimits};
use tollgate_config::{Config, RequestLimits, Tenant};
use tollgate_domain::{DeviceNanos, ModelName, PoolName, RequestId};

pub(crate) use self::job::{Counting, Job};

use self::asked::Asked;
use self::body::BodyLimits;
use self::fields::Violation;
use self::job::CountContext;
use self::outgoing::{Outgoing, TimedBody};
pub(crate) use self::preflight::{Call, CallerContext, RouteKind};
use self::telling::Telling;
use self::whole::Whole;
use crate::auth::{AuthenticatedCaller, Authenticator, Endpoint};
use crate::idempotency::{Ask, Claimed, IdempotencyKey, fingerprint};
use crate::pump::{self, Event, Failure, Receipt};
use crate::reply::{ApiError, write_figures};
use crate::serving::Serving;
use crate::telemetry::Metrics;
use crate::upstream::ServedModel;
use crate::{admit, limits, route};

/// What the API's handlers share.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) serving: Arc<Serving>,
    pub(crate) config: Arc<Config>,
    pub(crate) authenticator: Authenticator,
    /// Cancelled when no new work is taken any more.
    pub(crate) draining: CancellationToken,
}

/// `POST /v1/chat/completions`
pub(crate) async fn chat_completions(api: Api, call: Call) -> Result<Response, ApiError> {
    answer(api, call, Interface { endpoint: Endpoint::Chat, parse: chat::parse }).await
}

/// `POST /v1/completions`
pub(crate) async fn completions(api: Api, call: Call) -> Result<Response, ApiError> {
    answer(api, call, Interface { endpoint: Endpoint::Completions, parse: completions::parse })
        .await
}

/// What tells one interface from the other.
struct Interface {
    endpoint: Endpoint,
    parse: Parse,
}

type Parse = fn(&str, &RequestLimits) -> Result<Asked, Violation>;

/// Answers a request for work. Counts a refusal against the tenant, because
/// clients that ignore `retry-after` accumulate a penalty.
async fn answer(api: Api, call: Call, interface: Interface) -> Result<Response, ApiError> {
    let tenant = call.caller.tenant.name.clone();
    let answered = serve(&api, call, &interface).await;
    if let Err(error) = &answered {
        api.serving.penalties.answered(api.serving.clock.now(), &tenant, error);
    }
    answered
}

async fn serve(api: &Api, call: Call, interface: &Interface) -> Result<Response, ApiError> {
    let Call { request, id, caller: CallerContext { caller, tenant, scopes }, parameter: _ } = call;
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
        Some(key) => match api.claim(&caller, interface.endpoint, key, (&id, &body)).await? {
            Claimed::First(first) => Some(first),
            Claimed::Repeat(answer) => return answer,
        },
    };
    // Asked again, because the body may have taken a while to arrive.
    api.has_place(&scopes)?;
    let parsed = Instant::now();
    let asked = api.parse(&body, interface.parse)?;
    let model = api.model(&caller, &tenant, &asked.model)?;
    let context = CountContext {
        now: api.serving.clock.utc(),
        default_max_tokens: api.config.gateway().requests.default_max_tokens,
        read,
        parsed,
    };
    let bound = limits::bind(&api.config, scopes, &tenant, &model.name);
    let holder = bound.pool.as_ref().map_or(tenant.name.as_str(), PoolName::as_str);
    let job = api.serving.counting.count(holder, id, asked, model, context).await?;
    let admitted = admit::admit(&api.serving, &caller, bound, job)?;
    let head = Head {
        telling: admitted.job.telling.clone(),
        streamed: admitted.job.streamed,
        figures: admitted.figures().clone(),
        reserved: admitted.expected,
        class: admitted.job.model.class.as_str().to_owned(),
        metrics: Arc::clone(&api.serving.metrics),
    };
    if let Some(first) = first {
        return keyed::answer(&api.serving, first, head, admitted).await;
    }
    let events = pump::start(&api.serving, admitted);
    match head.streamed {
        true => Ok(tell_stream(head, events).await?),
        false => Ok(tell_whole(head, events).await?),
    }
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

    fn parse(&self, body: &Bytes, parse: Parse) -> Result<Asked, ApiError> {
        let limits = &self.config.gateway().requests;
        let text = body::text(body, limits.json_depth)?;
        Ok(parse(text, limits)?)
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

/// What an answer needs of the request that a task now owns.
struct Head {
    telling: Telling,
    streamed: bool,
    figures: Figures,
    reserved: DeviceNanos,
    class: String,
    metrics: Arc<Metrics>,
}

impl Head {
    fn write(&self, headers: &mut HeaderMap) {
        write_figures(&self.figures, headers);
        headers.insert(RESERVED, self.reserved.nanos().into());
        if let Ok(class) = HeaderValue::from_str(&self.class) {
            headers.insert(DEVICE_CLASS, class);
        }
    }
}

/// Collects the answer and sends it in one piece.
async fn tell_whole(head: Head, mut events: mpsc::Receiver<Event>) -> Result<Response, Failure> {
    let mut whole = Whole::new(head.telling.clone());
    while let Some(event) = events.recv().await {
        match event {
            Event::Delta(delta) => whole.delta(&delta),
            Event::PromptLogprobs { prompt, tokens } => whole.prompt_logprobs(prompt, &tokens),
            Event::ChoiceFinished { choice, reason } => whole.finished(choice, reason),
            Event::Restarted => whole.restart(),
            Event::Failed(failure) => return Err(failure),
            Event::Finished(receipt) => {
                let mut out = Outgoing::new(head.metrics.clone());
                out.begins();
                let json = Bytes::from(whole.into_json(&receipt));
                let mut response = Response::new(Body::new(TimedBody::new(json, out)));
                let headers = response.headers_mut();
                headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                head.write(headers);
                write_receipt(&receipt, headers);
                return Ok(response);
            }
        }
    }
    Err(Failure::UNKNOWN)
}

/// Waits for the first token, up to which a refusal is a plain status; then
/// answers with a stream.
async fn tell_stream(head: Head, mut events: mpsc::Receiver<Event>) -> Result<Response, Failure> {
    let first = loop {
        match events.recv().await {
            None => return Err(Failure::UNKNOWN),
            Some(Event::Failed(failure)) => return Err(failure),
            Some(Event::Restarted) => {}
            Some(event) => break event,
        }
    };
    let out = Outgoing::new(head.metrics.clone());
    let body = Body::from_stream(sse::transcript(head.telling.clone(), (first, events), out));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    head.write(headers);
    Ok(response)
}

fn write_receipt(receipt: &Receipt, headers: &mut HeaderMap) {
    headers.insert(ATTRIBUTED, receipt.usage.attributed.nanos().into());
    headers.insert(REFERENCE, receipt.usage.reference.nanos().into());
    headers.insert(QUEUE, receipt.path.in_worker.stages.queue_ns.into());
}

const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
const DEVICE_CLASS: HeaderName = HeaderName::from_static("x-tollgate-device-class");
const RESERVED: HeaderName = HeaderName::from_static("x-tollgate-reserved-ns");
const REFERENCE: HeaderName = HeaderName::from_static("x-tollgate-reference-ns");
const ATTRIBUTED: HeaderName = HeaderName::from_static("x-tollgate-attributed-ns");
const QUEUE: HeaderName = HeaderName::from_static("x-tollgate-queue-ns");

#[cfg(test)]
pub(crate) mod tests;
