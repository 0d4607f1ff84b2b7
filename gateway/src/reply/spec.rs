//! The table of all errors: status, labels and advice about a retry.

use std::time::Duration;

use http::StatusCode as S;
use tollgate_admission::{Limit, Offence, Refusal};

use super::limit::Retry;
use super::{ApiError, ErrorKind, idempotency, jobs};

/// The fixed properties of one error.
#[derive(Clone, Copy, Debug)]
pub(super) struct ErrorSpec {
    pub(super) status: S,
    pub(super) kind: ErrorKind,
    /// The `type` of the JSON body.
    pub(super) error_type: &'static str,
    /// The `code` of the JSON body.
    pub(super) code: Option<&'static str>,
    /// The advice about a retry; `None` leaves it to the client.
    pub(super) retry: Option<Retry>,
    /// True if the connection must not carry another request.
    pub(super) closes_connection: bool,
}

impl ApiError {
    /// Returns all fixed properties of the error.
    pub(super) fn spec(&self) -> ErrorSpec {
        match self {
            Self::MissingCredential => client(S::UNAUTHORIZED, "missing_credential", INVALID_KEY),
            Self::InvalidCredential => client(S::UNAUTHORIZED, "invalid_credential", INVALID_KEY),
            Self::KeyRevoked => client(S::UNAUTHORIZED, "key_revoked", INVALID_KEY),
            Self::SourceNotAllowed => {
                client(S::UNAUTHORIZED, "source_not_allowed", "ip_not_authorized")
            }
            Self::TenantNotServed => {
                client(S::UNAUTHORIZED, "tenant_not_served", "tenant_not_served")
            }
            Self::Permission { .. } => {
                client(S::FORBIDDEN, "permission", "permission_denied").of_type("permission_error")
            }
            Self::ModelNotFound { .. } => same(S::NOT_FOUND, "model_not_found"),
            Self::NotFound { .. } => same(S::NOT_FOUND, "not_found"),
            Self::UnknownRoute { .. } => client(S::NOT_FOUND, "unknown_route", "unknown_url"),
            Self::MethodNotAllowed { .. } => same(S::METHOD_NOT_ALLOWED, "method_not_allowed"),
            // The one error whose code depends on the request.
            Self::Invalid { code, .. } => {
                ErrorSpec { code: *code, ..same(S::BAD_REQUEST, "invalid_request") }
            }
            Self::ContextLength { .. } => {
                client(S::BAD_REQUEST, "context_length", "context_length_exceeded")
            }
            // Closing, because the rest of the body may still come and must not be read as a
            // request.
            Self::BodyTooSlow => client(S::REQUEST_TIMEOUT, "body_too_slow", "request_timeout")
                .never_retry()
                .closing(),
            Self::BodyTooLarge { .. } => {
                client(S::PAYLOAD_TOO_LARGE, "body_too_large", "request_too_large").closing()
            }
            Self::BodyMemory { .. } => rate("body_memory").retry_after(OVERLOADED_RETRY),
            Self::HeadTooLarge => {
                let status = S::REQUEST_HEADER_FIELDS_TOO_LARGE;
                client(status, "head_too_large", "headers_too_large").closing()
            }
            Self::UnsupportedEncoding { .. } => {
                client(S::UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", UNSUPPORTED_ENCODING)
            }
            Self::SourceLimit { retry_after, .. } => {
                rate("source_requests").retry_after(*retry_after)
            }
            Self::ConnectionLimit { .. } => {
                rate("connections").retry_after(CONNECTIONS_RETRY).closing()
            }
            Self::LiveStreams { .. } => rate("live_streams").retry_after(LIVE_STREAMS_RETRY),
            Self::ReadLimit { retry_after, .. } => rate("read_requests").retry_after(*retry_after),
            Self::Penalty { offence, retry_after } => {
                rate(penalty_kind(*offence)).retry_after(*retry_after)
            }
            Self::Limit(refusal) => limit(refusal),
            Self::Jobs(error) => jobs::spec(error),
            Self::Idempotency(refusal) => idempotency::spec(refusal),
            Self::Overloaded { retry_after, full: _ } => server("overloaded", "overloaded")
                .retry_after(retry_after.unwrap_or(OVERLOADED_RETRY)),
            Self::NoWorker { .. } => {
                server("no_worker", "overloaded").retry_after(OVERLOADED_RETRY)
            }
            Self::Draining => server("draining", "draining").retry_after(DRAINING_RETRY).closing(),
            Self::LedgerUnavailable => {
                // An admin has to mend the disk first.
                server("ledger_unavailable", "ledger_unavailable").never_retry()
            }
            Self::DeadlineExceeded { .. } => server("deadline_exceeded", "deadline_exceeded")
                .with_status(S::GATEWAY_TIMEOUT)
                .never_retry(),
            Self::Internal => {
                server("internal", "server_error").with_status(S::INTERNAL_SERVER_ERROR)
            }
            Self::WorkerLost { .. } => {
                server("worker_lost", "worker_lost").with_status(S::INTERNAL_SERVER_ERROR)
            }
        }
    }
}

/// Makes the spec of an error in the client's request.
pub(super) const fn client(status: S, kind: &'static str, code: &'static str) -> ErrorSpec {
    ErrorSpec {
        status,
        kind: ErrorKind(kind),
        error_type: "invalid_request_error",
        code: Some(code),
        retry: None,
        closes_connection: false,
    }
}

/// Makes the spec of a client's error with one name for kind and code.
const fn same(status: S, name: &'static str) -> ErrorSpec {
    client(status, name, name)
}

/// Makes the spec of a 429 for too many requests.
pub(super) const fn rate(kind: &'static str) -> ErrorSpec {
    client(S::TOO_MANY_REQUESTS, kind, "rate_limit_exceeded").of_type("rate_limit_error")
}

/// Makes the spec of a 503.
pub(super) const fn server(kind: &'static str, code: &'static str) -> ErrorSpec {
    client(S::SERVICE_UNAVAILABLE, kind, code).of_type("server_error")
}

fn limit(refusal: &Refusal) -> ErrorSpec {
    let kind = refusal.limit.as_str();
    let spec = match refusal.limit {
        // The gateway's own bound, not a limit of the caller.
        Limit::Capacity => server(kind, "overloaded"),
        // OpenAI uses this code for a spent budget, so clients can tell it from a rate.
        // A cap that other gateways may give some of back is not spent.
        limit if limit.is_cap() && !refusal.is_held_cap() => {
            client(S::TOO_MANY_REQUESTS, kind, "insufficient_quota").of_type("insufficient_quota")
        }
        _ => rate(kind),
    };
    ErrorSpec { retry: Some(Retry::of(refusal)), ..spec }
}

const fn penalty_kind(offence: Offence) -> &'static str {
    match offence {
        Offence::Refusals => "penalty_refusals",
        Offence::FailedAuthentication => "penalty_failed_authentication",
        Offence::Cancels => "penalty_cancels",
    }
}

impl ErrorSpec {
    pub(super) const fn of_type(self, error_type: &'static str) -> Self {
        Self { error_type, ..self }
    }

    const fn with_status(self, status: S) -> Self {
        Self { status, ..self }
    }

    pub(super) const fn retry_after(self, wait: Duration) -> Self {
        Self { retry: Some(Retry::After(wait)), ..self }
    }

    pub(super) const fn never_retry(self) -> Self {
        Self { retry: Some(Retry::Never), ..self }
    }

    const fn closing(self) -> Self {
        Self { closes_connection: true, ..self }
    }
}

/// The code of a body with a coding.
const UNSUPPORTED_ENCODING: &str = "unsupported_content_encoding";
/// The code of all errors of a credential, so that they look the same.
const INVALID_KEY: &str = "invalid_api_key";

/// The wait for a connection to become idle, at an unknown time.
const CONNECTIONS_RETRY: Duration = Duration::from_secs(1);

/// The wait for the end of another stream, at an unknown time.
const LIVE_STREAMS_RETRY: Duration = Duration::from_secs(5);

/// The wait before a connection is opened again, to another server or to this one
/// after its restart.
const DRAINING_RETRY: Duration = Duration::from_secs(1);

/// The wait after an overload of unknown length.
const OVERLOADED_RETRY: Duration = Duration::from_secs(1);
