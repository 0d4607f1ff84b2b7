//! Errors of requests with an `Idempotency-Key`.

use std::time::Duration;

use http::StatusCode;
use tollgate_serving::IdempotencyRefusal;

use super::duration_text;
use super::spec::{self, ErrorSpec};

/// The kind of all these errors, for metrics.
const KIND: &str = "idempotency";

/// Returns the fixed properties of the error.
pub(super) fn spec(refusal: &IdempotencyRefusal) -> ErrorSpec {
    // OpenAI's SDKs repeat a 409 by themselves, which helps only where a wait does.
    let client =
        |status, code| spec::client(status, KIND, code).of_type("idempotency_error").never_retry();
    match refusal {
        IdempotencyRefusal::OtherBody => {
            client(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key_reused")
        }
        IdempotencyRefusal::Charged { .. } => {
            client(StatusCode::CONFLICT, "idempotency_answer_gone")
        }
        IdempotencyRefusal::Unsettled { .. } => {
            client(StatusCode::CONFLICT, "idempotency_unsettled").retry_after(UNSETTLED_RETRY)
        }
        // Keys are kept for hours, so an early repeat would be refused as well.
        IdempotencyRefusal::TooManyKeys { .. } => spec::rate(KIND).never_retry(),
    }
}

/// Returns the sentence for people.
pub(super) fn message(refusal: &IdempotencyRefusal) -> String {
    match refusal {
        IdempotencyRefusal::OtherBody => {
            "This Idempotency-Key was used with another request. Use a new key for a new request."
                .to_owned()
        }
        IdempotencyRefusal::Charged { request } => format!(
            "The first request with this Idempotency-Key was charged, and its answer is no \
             longer kept. See GET /v1/usage/{request} for its figures; use a new key to run it \
             again."
        ),
        IdempotencyRefusal::Unsettled { request } => format!(
            "The first request with this Idempotency-Key, {request}, is not settled yet. Try \
             again in {}.",
            duration_text(UNSETTLED_RETRY)
        ),
        IdempotencyRefusal::TooManyKeys { limit } => format!(
            "Limit reached: {limit} values of Idempotency-Key in use by your tenant. Send the \
             request without one, or wait until older ones are forgotten."
        ),
    }
}

/// The wait that an unsettled request's client is told. The true time is not
/// known: a few seconds after the worker's journal has come.
const UNSETTLED_RETRY: Duration = Duration::from_secs(5);
