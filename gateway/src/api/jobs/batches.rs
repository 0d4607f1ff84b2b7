//! `/v1/batches`: creation, lists, progress and cancels.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use tollgate_domain::UtcTime;
use tollgate_jobs::{
    BatchId, BatchPage, BatchRow, BatchState, Cause, Endpoint, InputError, NewBatch,
};
use tollgate_openai::batches::{
    BatchError, BatchErrors, BatchObject, BatchRequest, BatchStatus, BatchTimes, BatchTokens,
    BatchWaiting, RequestCounts,
};
use tollgate_openai::files::ListObject;
use tollgate_openai::json;

use super::files::file_id;
use super::page::ListQuery;
use super::{JobsApi, OTHER_BODY, named, quotas, repeatable_id};
use crate::api::body::{self, BodyLimits};
use crate::api::{Api, Call};
use crate::reply::ApiError;

/// The only completion window.
const WINDOW: Duration = Duration::from_secs(24 * 3_600);
/// Batches of a page, if the client names no number, and at most.
const LISTED: (u32, u32) = (20, 100);
/// Bytes of the largest body that creates a batch.
const LARGEST_BODY: u64 = 64 * 1024;

/// Answers `POST /v1/batches`.
pub(crate) async fn create(api: Api, call: Call) -> Result<Response, ApiError> {
    let Call { request, caller, .. } = call;
    let tenant = caller.tenant.tenant().name.clone();
    let id = repeatable_id("batch", request.headers(), &caller)?;
    // Before the body, so that creations which are refused are counted as well.
    api.jobs.take(api.serving.clock().now(), &caller.tenant)?;
    let gateway = caller.tenant.config().gateway();
    let limits = BodyLimits {
        // The config may allow less for every body.
        size: gateway.requests.body.0.min(LARGEST_BODY),
        window: gateway.timeouts.body_progress,
        progress: gateway.timeouts.body_progress_bytes.0,
    };
    let mut held = api.bodies.begin(caller.tenant.share_owner(), &tenant);
    let bytes = body::read(request.into_body(), limits, &mut held).await?.into_bytes();
    let asked = BatchRequest::parse(json::text(&bytes, gateway.requests.json_depth)?)?;
    let endpoint = Endpoint::of_path(&asked.endpoint).ok_or_else(|| {
        let paths = "'/v1/chat/completions' or '/v1/completions'";
        ApiError::invalid("endpoint", format!("'endpoint' must be {paths}."))
    })?;
    let input = file_id(&asked.input_file_id).map_err(|_| no_input(&asked.input_file_id))?;
    // The names are sorted, so equal metadata gives equal text, by which repeats are compared.
    let metadata = asked.metadata.map(|notes| serde_json::json!(notes).to_string());
    let new = NewBatch {
        id: BatchId::from_random(id.map_or_else(random, Ok)?),
        pool: caller.tenant.tenant().pool.as_ref().map(|pool| pool.name.clone()),
        key: caller.caller.caller().key.clone(),
        input,
        endpoint,
        metadata: metadata.clone(),
        window: WINDOW,
        results_kept: asked.output_life,
        tenant,
    };
    let created = api.jobs.jobs.create_batch(new, quotas(&caller.tenant)).await;
    let created = created.map_err(|error| match ApiError::from(error) {
        // The batch is new, so only its input can be missing.
        ApiError::NotFound { .. } => no_input(&asked.input_file_id),
        other => other,
    })?;
    // It may be the batch of an earlier request with the same `Idempotency-Key`.
    if (created.input, created.endpoint, &created.metadata) != (input, endpoint, &metadata) {
        return Err(OTHER_BODY);
    }
    Ok(Json(object(&api.jobs, created)).into_response())
}

/// Answers `GET /v1/batches`.
pub(crate) async fn list(api: Api, call: Call) -> Result<Response, ApiError> {
    let query = ListQuery::of(call.request.uri())?;
    let after = query.after.as_deref().map(batch_id).transpose()?;
    let page = BatchPage { after, limit: query.limit(LISTED.0, LISTED.1)? };
    let tenant = call.caller.tenant.tenant().name.clone();
    let page = api.jobs.jobs.batches(tenant, page).await;
    let page = page.map_err(|error| named(error, query.after.as_deref().unwrap_or_default()))?;
    let batches = page.rows.into_iter().map(|row| object(&api.jobs, row)).collect();
    Ok(Json(ListObject::new(batches, page.has_more)).into_response())
}

/// Answers `GET /v1/batches/{id}`.
pub(crate) async fn show(api: Api, call: Call) -> Result<Response, ApiError> {
    let (id, tenant) = (batch_id(&call.parameter)?, call.caller.tenant.tenant().name.clone());
    let batch = api.jobs.jobs.batch(tenant, id).await;
    let batch = batch.map_err(|error| named(error, &call.parameter))?;
    Ok(Json(object(&api.jobs, batch)).into_response())
}

/// Answers `POST /v1/batches/{id}/cancel`.
pub(crate) async fn cancel(api: Api, call: Call) -> Result<Response, ApiError> {
    let (id, tenant) = (batch_id(&call.parameter)?, call.caller.tenant.tenant().name.clone());
    let batch = api.jobs.jobs.cancel(tenant, id).await;
    let batch = batch.map_err(|error| named(error, &call.parameter))?;
    Ok(Json(object(&api.jobs, batch)).into_response())
}

fn batch_id(text: &str) -> Result<BatchId, ApiError> {
    text.parse().map_err(|_| ApiError::NotFound { what: "batch", id: text.to_owned() })
}

fn no_input(id: &str) -> ApiError {
    let shown: String = id.chars().filter(|c| !c.is_control()).take(64).collect();
    ApiError::invalid("input_file_id", format!("There is no file '{shown}'."))
}

fn random() -> Result<u128, ApiError> {
    // Identifiers must not be guessed.
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| ApiError::Internal)?;
    Ok(u128::from_be_bytes(bytes))
}

/// Returns a batch as clients read it.
pub(crate) fn object(jobs: &JobsApi, row: BatchRow) -> BatchObject {
    let wait = jobs.jobs.waiting(row.id);
    let metadata: Option<BTreeMap<String, String>> =
        // The gateway wrote this text itself, so reading it does not fail.
        row.metadata.as_deref().and_then(|notes| serde_json::from_str(notes).ok());
    BatchObject {
        id: row.id.to_string(),
        object: "batch",
        endpoint: row.endpoint.path(),
        model: row.model.as_ref().map(ToString::to_string),
        errors: BatchErrors::of(row.errors.iter().map(error_object).collect()),
        input_file_id: row.input.to_string(),
        completion_window: "24h",
        status: status(row.state),
        output_file_id: row.output.map(|id| id.to_string()),
        error_file_id: row.error.map(|id| id.to_string()),
        times: times(&row),
        request_counts: RequestCounts {
            total: row.counts.total,
            completed: row.counts.completed,
            failed: row.counts.failed,
        },
        usage: BatchTokens {
            prompt: row.usage.prompt_tokens,
            cached: row.usage.cached_tokens,
            completion: row.usage.completion_tokens,
            reasoning: row.usage.reasoning_tokens,
        }
        .into(),
        metadata,
        tollgate: BatchWaiting {
            waiting: wait.map(|wait| wait.reason),
            until: wait.map(|wait| wait.until.unix_seconds()),
        },
    }
}

fn error_object(error: &InputError) -> BatchError {
    let InputError { code, message, param, line } = error.clone();
    BatchError { code, message, param, line }
}

/// Returns OpenAI's name for a state.
fn status(state: BatchState) -> BatchStatus {
    match state {
        BatchState::Validating => BatchStatus::Validating,
        BatchState::Running => BatchStatus::InProgress,
        BatchState::Ending(Cause::Cancelled(_)) => BatchStatus::Cancelling,
        BatchState::Ending(_) => BatchStatus::Finalizing,
        BatchState::Ended(Cause::Done) => BatchStatus::Completed,
        BatchState::Ended(Cause::Cancelled(_)) => BatchStatus::Cancelled,
        BatchState::Ended(Cause::Expired) => BatchStatus::Expired,
        BatchState::Ended(Cause::Failed(_)) => BatchStatus::Failed,
    }
}

fn times(row: &BatchRow) -> BatchTimes {
    let seconds = |time: Option<UtcTime>| time.map(UtcTime::unix_seconds);
    let (ending, ended) = (seconds(row.times.ending), seconds(row.times.ended));
    let cause = match row.state {
        BatchState::Ending(cause) | BatchState::Ended(cause) => Some(cause),
        BatchState::Validating | BatchState::Running => None,
    };
    let ended_by = |wanted: fn(Cause) -> bool| ended.filter(|_| cause.is_some_and(wanted));
    let is_cancelled = matches!(cause, Some(Cause::Cancelled(_)));
    BatchTimes {
        created_at: row.created.unix_seconds(),
        in_progress_at: seconds(row.times.running),
        expires_at: row.expires.unix_seconds(),
        finalizing_at: ending.filter(|_| !is_cancelled),
        completed_at: ended_by(|cause| cause == Cause::Done),
        failed_at: ended_by(|cause| matches!(cause, Cause::Failed(_))),
        expired_at: ended_by(|cause| cause == Cause::Expired),
        cancelling_at: ending.filter(|_| is_cancelled),
        cancelled_at: ended_by(|cause| matches!(cause, Cause::Cancelled(_))),
    }
}
