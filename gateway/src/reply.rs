//! The errors that clients read. This is the only module that knows status codes
//! and the JSON of errors.
//!
//! Other modules report an [`ApiError`]; `reply/spec.rs` is the one table that
//! gives each error its status, its labels and its advice about a retry. An error
//! carries no cause, no path and no secret: the log has them.

mod envelope;
mod figures;
mod idempotency;
mod jobs;
mod limit;
mod message;
mod spec;

use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use tollgate_admission::{Offence, Refusal as LimitRefusal, Scope};
use tollgate_serving::event::Failure;
use tollgate_serving::{Fault, FullQueue, IdempotencyRefusal, Refusal, RequestError};

pub use self::envelope::Envelope;
pub use self::figures::{duration_text, write_figures};
pub use self::jobs::JobsError;
use self::limit::Retry;
use self::spec::ErrorSpec;

/// The reason why a request was not answered as asked.
#[derive(Clone, Debug, PartialEq)]
pub enum ApiError {
    /// 401: the request has no credential.
    MissingCredential,
    /// 401: the credential does not authenticate. Unknown, revoked, expired and
    /// malformed credentials look the same.
    InvalidCredential,
    /// 401: the credential is valid, but not from this network address.
    SourceNotAllowed,
    /// 401: the credential is valid, but the config does not name its tenant, perhaps
    /// since a reload.
    TenantNotServed,
    /// 401 or a stream's error event: the key was revoked while its request ran,
    /// and an admin asked for such requests to end.
    KeyRevoked,
    /// 403: the caller is known and may not do this.
    Permission {
        /// A sentence that says what the caller may not do.
        message: Cow<'static, str>,
    },
    /// 404: no such model, or not for this caller; both look the same.
    ModelNotFound {
        /// The name as the client wrote it.
        model: String,
    },
    /// 404: no such thing, or another tenant's; both look the same.
    NotFound {
        /// The kind of thing: `request`, `model`.
        what: &'static str,
        /// The name as the client wrote it.
        id: String,
    },
    /// 404: no such route.
    UnknownRoute {
        /// The request's method.
        method: http::Method,
        /// The request's path.
        path: String,
        /// A sentence about the mistake, if it is a common one.
        hint: Option<&'static str>,
    },
    /// 405: the route exists, for other methods.
    MethodNotAllowed {
        /// The request's method.
        method: http::Method,
        /// The request's path.
        path: String,
    },
    /// 400: a field, or the body as a whole, is wrong.
    Invalid {
        /// The field, as a path like `messages[2].content`.
        param: Option<Cow<'static, str>>,
        /// A code that names the mistake, where one exists.
        code: Option<&'static str>,
        /// A sentence that says what is wrong.
        message: Cow<'static, str>,
    },
    /// 400: prompt and answer do not fit the model.
    ContextLength {
        /// The field that carries the prompt: `messages` or `prompt`.
        param: &'static str,
        /// Tokens that the model takes, prompt and answer together.
        limit: u64,
        /// Tokens of the prompt, or those counted before counting stopped.
        prompt: u64,
        /// Tokens of answer that were asked for, if they are what does not fit.
        completion: Option<u64>,
    },
    /// 408: the body came too slowly.
    BodyTooSlow,
    /// 413: the body is larger than the route takes.
    BodyTooLarge {
        /// The limit, bytes.
        limit: u64,
    },
    /// 429: the bodies of the tenant or of its pool that are on their way hold too much memory.
    BodyMemory {
        /// The limit, bytes.
        limit: u64,
    },
    /// 431: the headers are too many or too large.
    HeadTooLarge,
    /// 415: the body has a coding that the gateway does not decode.
    UnsupportedEncoding {
        /// The name as the client wrote it.
        encoding: String,
    },
    /// 429: the network source sends too many requests, before authentication.
    SourceLimit {
        /// Requests a second that a source may send.
        per_second: u32,
        /// Time until the next request passes.
        retry_after: Duration,
    },
    /// 429: the key, the tenant, the pool or the network source has too many
    /// connections, and each has a request under way. The connection is closed.
    ConnectionLimit {
        /// Connections that the owner may have.
        most: u32,
        /// The owner, such as `tenant acme`.
        owner: String,
    },
    /// 429: too many streams of the live view are open.
    LiveStreams {
        /// Streams at one time.
        most: u32,
    },
    /// 429: the caller sends too many requests that no plan limits.
    ReadLimit {
        /// Requests a second that a caller may send.
        per_second: u32,
        /// Time until the next request passes.
        retry_after: Duration,
    },
    /// 429: the tenant, or the network source, has offended too often.
    Penalty {
        /// The offence that earned the penalty.
        offence: Offence,
        /// Time until the penalty is over, if nothing is added to it.
        retry_after: Duration,
    },
    /// 429: one of the caller's limits does not allow it now, or ever.
    Limit(Box<LimitRefusal>),
    /// 409, 413, 429 or 503: the operation on files or batches was not done.
    Jobs(JobsError),
    /// 409, 422 or 429: the request's `Idempotency-Key` does not allow it.
    Idempotency(IdempotencyRefusal),
    /// 503: a queue is full, or the wait would be too long.
    Overloaded {
        /// The queue.
        full: FullQueue,
        /// Time after which a place is expected.
        retry_after: Option<Duration>,
    },
    /// 503: this gateway is about to stop. The connection takes no more requests.
    Draining,
    /// 503: usage could not be recorded, so no billable work is done.
    LedgerUnavailable,
    /// 503: no worker serves the model now.
    NoWorker {
        /// The model.
        model: String,
    },
    /// 504: the deadline of the whole request passed before its first token.
    DeadlineExceeded {
        /// The deadline.
        deadline: Duration,
    },
    /// 500: the gateway failed. The log has the cause.
    Internal,
    /// 500 or a stream's error event: the worker was lost in the middle of an
    /// answer.
    WorkerLost {
        /// True if part of the answer went out, which the tenant pays.
        charged: bool,
    },
}

/// The kind of an error, as a metric's label. It is in the response's extensions,
/// so that the code that counts errors need not parse JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorKind(pub &'static str);

impl ApiError {
    /// Makes the 400 for an invalid field.
    pub fn invalid(
        param: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Invalid {
            param: Some(param.into()),
            code: Some("invalid_value"),
            message: message.into(),
        }
    }

    /// Makes the 400 for a field that is required and missing.
    pub fn missing(param: &'static str) -> Self {
        Self::Invalid {
            param: Some(param.into()),
            code: Some("missing_required_parameter"),
            message: format!("Missing required parameter: '{param}'.").into(),
        }
    }

    /// Makes the 400 for a known field with a value that is not supported.
    pub fn unsupported(
        param: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Invalid {
            param: Some(param.into()),
            code: Some("unsupported_parameter"),
            message: message.into(),
        }
    }

    /// Makes the 400 for a body that is wrong as a whole: not JSON, or too deep.
    pub fn malformed(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Invalid { param: None, code: None, message: message.into() }
    }

    /// Returns the status of a response that has not begun.
    pub fn status(&self) -> StatusCode {
        self.spec().status
    }

    /// Returns the kind, for metrics and logs.
    pub fn kind(&self) -> ErrorKind {
        self.spec().kind
    }

    /// Returns the JSON body, which is also the data of a stream's error event.
    pub fn envelope(&self) -> Envelope<'_> {
        let ErrorSpec { error_type, code, .. } = self.spec();
        Envelope::new(self.message(), error_type, self.param(), code)
    }

    /// Returns the message for people.
    pub(crate) fn text(&self) -> String {
        self.message().into_owned()
    }

    /// Returns true if the gateway or a worker failed, and false if the request was refused.
    pub(crate) fn is_fault(&self) -> bool {
        matches!(self, Self::Internal | Self::WorkerLost { .. } | Self::LedgerUnavailable)
    }

    fn json(&self) -> Bytes {
        match self {
            // Made once: a client that guesses keys causes it again and again.
            Self::InvalidCredential => INVALID_CREDENTIAL.clone(),
            _ => self.envelope().to_json().into(),
        }
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::ModelNotFound { .. } => Some("model"),
            Self::Invalid { param, .. } => param.as_deref(),
            Self::ContextLength { param, .. } => Some(param),
            _ => None,
        }
    }

    /// Returns the scope of the limit that refused the request, if a limit did.
    pub(crate) fn limit_scope(&self) -> Option<&Scope> {
        match self {
            Self::Limit(refusal) => Some(&refusal.scope),
            _ => None,
        }
    }

    /// Returns the wait that the client was told, if it was told one.
    pub(crate) fn told_wait(&self) -> Option<Duration> {
        match self.spec().retry? {
            Retry::After(wait) => Some(wait),
            Retry::Never => None,
        }
    }
}

impl From<JobsError> for ApiError {
    fn from(error: JobsError) -> Self {
        Self::Jobs(error)
    }
}

impl From<LimitRefusal> for ApiError {
    fn from(refusal: LimitRefusal) -> Self {
        // Boxed, because a refusal holds many figures and would enlarge every `ApiError`.
        Self::Limit(Box::new(refusal))
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Refused(refusal) => refusal.into(),
            RequestError::Failed(fault) => fault.into(),
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        failure.error.into()
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Limit(refusal) => Self::Limit(refusal),
            Refusal::Penalty { offence, retry_after } => Self::Penalty { offence, retry_after },
            Refusal::PlanNotConfigured { plan } => Self::Permission {
                message: format!("The plan '{plan}' that limits this key is not configured here.")
                    .into(),
            },
            Refusal::InvalidField { field, message } => Self::invalid(field, message),
            Refusal::ContextLength { field: param, limit, prompt, completion } => {
                Self::ContextLength { param, limit, prompt, completion }
            }
            Refusal::Overloaded { full, retry_after } => Self::Overloaded { full, retry_after },
            Refusal::NoWorker { model } => Self::NoWorker { model },
            Refusal::DeadlineExceeded { deadline } => Self::DeadlineExceeded { deadline },
            Refusal::KeyRevoked => Self::KeyRevoked,
            Refusal::Draining => Self::Draining,
            Refusal::Idempotency(refusal) => Self::Idempotency(refusal),
        }
    }
}

impl From<Fault> for ApiError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Internal => Self::Internal,
            Fault::LedgerUnavailable => Self::LedgerUnavailable,
            Fault::WorkerLost { charged } => Self::WorkerLost { charged },
        }
    }
}

impl ApiError {
    /// Makes the error's response.
    pub(crate) fn to_response(&self) -> http::Response<Bytes> {
        let spec = self.spec();
        let status = spec.status;
        let mut response = Response::new(self.json());
        *response.status_mut() = status;
        let headers = response.headers_mut();
        // One allocation for all headers, because refusals come in floods.
        headers.reserve(MOST_HEADERS);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // Caches keep 404 and 405 of their own accord (RFC 9110, 15.1), and some
        // proxies keep errors of servers.
        if matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
            || status.is_server_error()
        {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        if let Some(retry) = spec.retry {
            retry.write(headers);
        }
        if let Self::Limit(refusal) = self {
            write_figures(&refusal.figures, headers);
        }
        if status == StatusCode::UNAUTHORIZED {
            // RFC 9110, 15.5.2 requires a challenge with every 401.
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if spec.closes_connection {
            // HTTP/2 has no such header, and hyper drops it there.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.to_response().map(Body::from);
        // The stack counts errors by this value, so it need not parse the JSON.
        response.extensions_mut().insert(self.kind());
        response
    }
}

static INVALID_CREDENTIAL: LazyLock<Bytes> =
    LazyLock::new(|| ApiError::InvalidCredential.envelope().to_json().into());

/// Headers of a refusal with all its figures, and of the layers outside.
const MOST_HEADERS: usize = 16;

#[cfg(test)]
mod tests;
