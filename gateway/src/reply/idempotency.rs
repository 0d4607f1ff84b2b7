//! Why a request with an `Idempotency-Key` is refused.

use std::time::Duration;

use tollgate_domain::RequestId;

use super::{ApiError, duration_text};

/// What is wrong with a request that brings an `Idempotency-Key`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdempotencyRefusal {
    /// 422: the key was used with another body.
    OtherBody,
    /// 409: the first request was charged, and its answer is gone.
    Charged {
        /// The first request.
        request: RequestId,
    },
    /// 409: the first request is not settled yet.
    Unsettled {
        /// The first request.
        request: RequestId,
    },
    /// 429: the tenant has as many keys in use as it may.
    TooManyKeys {
        /// How many.
        limit: u32,
    },
}

impl IdempotencyRefusal {
    pub(super) fn message(&self) -> String {
        match self {
            Self::OtherBody => {
                "This Idempotency-Key was used with another request. Use a new key for a new \
                 request."
                    .to_owned()
            }
            Self::Charged { request } => format!(
                "The first request with this Idempotency-Key was charged, and its answer is no \
                 longer kept. See GET /v1/usage/{request} for its figures; use a new key to run \
                 it again."
            ),
            Self::Unsettled { request } => format!(
                "The first request with this Idempotency-Key, {request}, is not settled yet. Try \
                 again in {}.",
                duration_text(UNSETTLED_RETRY)
            ),
            Self::TooManyKeys { limit } => format!(
                "Limit reached: {limit} values of Idempotency-Key in use by your tenant. Send the \
                 request without one, or wait until older ones are forgotten."
            ),
        }
    }
}

impl From<IdempotencyRefusal> for ApiError {
    fn from(refusal: IdempotencyRefusal) -> Self {
        Self::Idempotency(refusal)
    }
}

/// When a request of a gateway that died has been settled is not known: a few
/// seconds after its worker's journal came.
pub(super) const UNSETTLED_RETRY: Duration = Duration::from_secs(5);
