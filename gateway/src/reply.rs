//! What clients read when the answer is no. The only module that knows
//! status codes and the JSON of errors.
//!
//! Others say *what* happened as an [`ApiError`]; here it becomes a status, an
//! envelope with its four keys, and headers that tell a client whether and
//! when to come back. What the log reads is written elsewhere: nothing here
//! carries a cause, a path or a secret.

mod envelope;
mod figures;
mod idempotency;
mod limit;

use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use tollgate_admission::{Limit, Offence, Refusal};

pub use self::envelope::Envelope;
pub use self::figures::{duration_text, write_figures};
pub use self::idempotency::IdempotencyRefusal;
use self::idempotency::UNSETTLED_RETRY;
use self::limit::Retry;

/// Why a request was not answered with what it asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum ApiError {
    /// 401: no credential was shown.
    MissingCredential,
    /// 401: the credential does not authenticate. Unknown, revoked, expired
    /// and malformed look the same.
    InvalidCredential,
    /// 401: the credential is good, and not from this network address.
    SourceNotAllowed,
    /// 401 or a stream's error event: the key was revoked while its request was
    /// under way, and an admin wanted those to end.
    KeyRevoked,
    /// 403: the caller is known and may not do this.
    Permission {
        /// What it may not do, as a sentence.
        message: Cow<'static, str>,
    },
    /// 404: no such model, or not for this caller; both look the same.
    ModelNotFound {
        /// As the client named it.
        model: String,
    },
    /// 404: no such thing, or another tenant's; both look the same.
    NotFound {
        /// What was asked for: `request`, `model`.
        what: &'static str,
        /// As the client named it.
        id: String,
    },
    /// 404: no such route.
    UnknownRoute {
        /// The request's method.
        method: http::Method,
        /// The request's path.
        path: String,
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
        /// What is wrong, as a sentence.
        message: Cow<'static, str>,
    },
    /// 400: prompt and answer do not fit the model.
    ContextLength {
        /// The field that carries the prompt: `messages` or `prompt`.
        param: &'static str,
        /// Tokens that the model takes, prompt and answer together.
        limit: u64,
        /// Tokens of the prompt.
        prompt: u64,
        /// Tokens of answer asked for, where that is what does not fit.
        completion: Option<u64>,
    },
    /// 408: the body came too slowly.
    BodyTooSlow,
    /// 413: the body is larger than the route takes.
    BodyTooLarge {
        /// The limit, bytes.
        limit: u64,
    },
    /// 431: the headers are too many or too large.
    HeadTooLarge,
    /// 415: a body in a coding that we do not undo.
    UnsupportedEncoding {
        /// As the client named it.
        encoding: String,
    },
    /// 429: the network source sends too many requests, before authentication.
    SourceLimit {
        /// Requests a second that a source may send.
        per_second: u32,
        /// When the next one passes.
        retry_after: Duration,
    },
    /// 429: the tenant, or the network source, has offended too often.
    Penalty {
        /// What it has done.
        offence: Offence,
        /// When the penalty is over, if nothing is added to it.
        retry_after: Duration,
    },
    /// 429: one of the caller's limits does not allow it now, or ever.
    Limit(Box<Refusal>),
    /// 409, 422 or 429: the request's `Idempotency-Key` stands in its way.
    Idempotency(IdempotencyRefusal),
    /// 503: every worker's queue is full, or the wait would be too long.
    Overloaded {
        /// When a place is expected.
        retry_after: Option<Duration>,
    },
    /// 503: this gateway is about to stop. Not to be asked again on this
    /// connection.
    Draining,
    /// 503: usage could not be recorded, so nothing billable is done.
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
    /// 500: we broke, and nothing more is said about it.
    Internal,
    /// 500 or a stream's error event: the worker was lost in mid-answer.
    WorkerLost {
        /// Whether part of the answer went out, which is paid.
        charged: bool,
    },
}

/// What kind of error a response is, as a metric's label. It rides in the
/// response's extensions, so that the layer that counts need not parse JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorKind(pub &'static str);

impl ApiError {
    /// An invalid field: 400 with `param`.
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

    /// A field that must be there and is not: 400 with `param`.
    pub fn missing(param: &'static str) -> Self {
        Self::Invalid {
            param: Some(param.into()),
            code: Some("missing_required_parameter"),
            message: format!("Missing required parameter: '{param}'.").into(),
        }
    }

    /// A known field with a value that we do not support: 400 with `param`.
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

    /// A body that is wrong as a whole: not JSON, too deep.
    pub fn malformed(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Invalid { param: None, code: None, message: message.into() }
    }

    /// The status it is answered with before a response has begun.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::MissingCredential
            | Self::InvalidCredential
            | Self::SourceNotAllowed
            | Self::KeyRevoked => StatusCode::UNAUTHORIZED,
            Self::Permission { .. } => StatusCode::FORBIDDEN,
            Self::ModelNotFound { .. } | Self::NotFound { .. } | Self::UnknownRoute { .. } => {
                StatusCode::NOT_FOUND
            }
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Invalid { .. } | Self::ContextLength { .. } => StatusCode::BAD_REQUEST,
            Self::BodyTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::UnsupportedEncoding { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::SourceLimit { .. } | Self::Penalty { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Limit(refusal) if refusal.limit == Limit::Capacity => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Limit(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Idempotency(refusal) => match refusal {
                IdempotencyRefusal::OtherBody => StatusCode::UNPROCESSABLE_ENTITY,
                IdempotencyRefusal::Charged { .. } | IdempotencyRefusal::Unsettled { .. } => {
                    StatusCode::CONFLICT
                }
                IdempotencyRefusal::TooManyKeys { .. } => StatusCode::TOO_MANY_REQUESTS,
            },
            Self::Overloaded { .. }
            | Self::Draining
            | Self::LedgerUnavailable
            | Self::NoWorker { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal | Self::WorkerLost { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Its kind, for metrics and logs.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind(match self {
            Self::MissingCredential => "missing_credential",
            Self::InvalidCredential => "invalid_credential",
            Self::SourceNotAllowed => "source_not_allowed",
            Self::KeyRevoked => "key_revoked",
            Self::Permission { .. } => "permission",
            Self::ModelNotFound { .. } => "model_not_found",
            Self::NotFound { .. } => "not_found",
            Self::UnknownRoute { .. } => "unknown_route",
            Self::MethodNotAllowed { .. } => "method_not_allowed",
            Self::Invalid { .. } => "invalid_request",
            Self::ContextLength { .. } => "context_length",
            Self::BodyTooSlow => "body_too_slow",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::HeadTooLarge => "head_too_large",
            Self::UnsupportedEncoding { .. } => "unsupported_encoding",
            Self::SourceLimit { .. } => "source_requests",
            Self::Penalty { offence, .. } => match offence {
                Offence::Refusals => "penalty_refusals",
                Offence::FailedAuthentication => "penalty_failed_authentication",
                Offence::Cancels => "penalty_cancels",
            },
            Self::Limit(refusal) => refusal.limit.as_str(),
            Self::Idempotency(_) => "idempotency",
            Self::Overloaded { .. } => "overloaded",
            Self::Draining => "draining",
            Self::LedgerUnavailable => "ledger_unavailable",
            Self::NoWorker { .. } => "no_worker",
            Self::DeadlineExceeded { .. } => "deadline_exceeded",
            Self::Internal => "internal",
            Self::WorkerLost { .. } => "worker_lost",
        })
    }

    /// The JSON body, which is also the data of a stream's error event.
    pub fn envelope(&self) -> Envelope<'_> {
        let (kind, code) = self.type_and_code();
        Envelope::new(self.message(), kind, self.param(), code)
    }

    fn json(&self) -> Bytes {
        match self {
            // What those get who guess, and guess on.
            Self::InvalidCredential => INVALID_CREDENTIAL.clone(),
            _ => self.envelope().to_json().into(),
        }
    }

    fn type_and_code(&self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::MissingCredential | Self::InvalidCredential | Self::KeyRevoked => {
                ("invalid_request_error", Some("invalid_api_key"))
            }
            Self::SourceNotAllowed => ("invalid_request_error", Some("ip_not_authorized")),
            Self::Permission { .. } => ("permission_error", Some("permission_denied")),
            Self::ModelNotFound { .. } => ("invalid_request_error", Some("model_not_found")),
            Self::NotFound { .. } => ("invalid_request_error", Some("not_found")),
            Self::UnknownRoute { .. } => ("invalid_request_error", Some("unknown_url")),
            Self::MethodNotAllowed { .. } => ("invalid_request_error", Some("method_not_allowed")),
            Self::Invalid { code, .. } => ("invalid_request_error", *code),
            Self::ContextLength { .. } => {
                ("invalid_request_error", Some("context_length_exceeded"))
            }
            Self::BodyTooSlow => ("invalid_request_error", Some("request_timeout")),
            Self::BodyTooLarge { .. } => ("invalid_request_error", Some("request_too_large")),
            Self::HeadTooLarge => ("invalid_request_error", Some("headers_too_large")),
            Self::UnsupportedEncoding { .. } => {
                ("invalid_request_error", Some("unsupported_content_encoding"))
            }
            Self::Limit(refusal) if refusal.limit.is_cap() => {
                ("insufficient_quota", Some("insufficient_quota"))
            }
            Self::Limit(refusal) if refusal.limit == Limit::Capacity => {
                ("server_error", Some("overloaded"))
            }
            Self::SourceLimit { .. } | Self::Penalty { .. } | Self::Limit(_) => {
                ("rate_limit_error", Some("rate_limit_exceeded"))
            }
            Self::Idempotency(refusal) => match refusal {
                IdempotencyRefusal::OtherBody => {
                    ("idempotency_error", Some("idempotency_key_reused"))
                }
                IdempotencyRefusal::Charged { .. } => {
                    ("idempotency_error", Some("idempotency_answer_gone"))
                }
                IdempotencyRefusal::Unsettled { .. } => {
                    ("idempotency_error", Some("idempotency_unsettled"))
                }
                IdempotencyRefusal::TooManyKeys { .. } => {
                    ("rate_limit_error", Some("rate_limit_exceeded"))
                }
            },
            Self::Overloaded { .. } | Self::NoWorker { .. } => ("server_error", Some("overloaded")),
            Self::Draining => ("server_error", Some("draining")),
            Self::LedgerUnavailable => ("server_error", Some("ledger_unavailable")),
            Self::DeadlineExceeded { .. } => ("server_error", Some("deadline_exceeded")),
            Self::Internal => ("server_error", Some("server_error")),
            Self::WorkerLost { .. } => ("server_error", Some("worker_lost")),
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

    fn message(&self) -> Cow<'_, str> {
        match self {
            Self::MissingCredential => {
                "No API key was provided. Send it as 'Authorization: Bearer YOUR_KEY'.".into()
            }
            Self::InvalidCredential => "Incorrect API key provided.".into(),
            Self::KeyRevoked => {
                "This API key was revoked while the request was under way. You are charged for what \
                 was done."
                    .into()
            }
            Self::SourceNotAllowed => {
                "This API key may not be used from your network address.".into()
            }
            Self::Permission { message } | Self::Invalid { message, .. } => message.as_ref().into(),
            Self::ModelNotFound { model } => format!(
                "The model '{}' does not exist or you do not have access to it.",
                quoted(model)
            )
            .into(),
            Self::NotFound { what, id } => format!("No such {what}: '{}'.", quoted(id)).into(),
            Self::UnknownRoute { method, path } => {
                format!("Unknown request URL: {method} {}.", quoted(path)).into()
            }
            Self::MethodNotAllowed { method, path } => {
                format!("Not allowed to {method} on {}.", quoted(path)).into()
            }
            Self::ContextLength { limit, prompt, completion, .. } => match completion {
                Some(completion) => format!(
                    "This model's maximum context length is {limit} tokens. You requested {} \
                     tokens: {prompt} in the prompt and {completion} for the answer. Shorten the \
                     prompt or ask for fewer tokens.",
                    prompt.saturating_add(*completion)
                ),
                None => format!(
                    "This model's maximum context length is {limit} tokens. Your prompt has \
                     {prompt} tokens and leaves no room for an answer."
                ),
            }
            .into(),
            Self::BodyTooSlow => "The request body arrived too slowly.".into(),
            Self::BodyTooLarge { limit } => {
                format!("The request body is larger than the {limit} bytes that this route takes.")
                    .into()
            }
            Self::HeadTooLarge => "The headers of the request are too many or too large.".into(),
            Self::UnsupportedEncoding { encoding } => format!(
                "Request bodies with content-encoding '{}' are not taken: send it plain.",
                quoted(encoding)
            )
            .into(),
            Self::Penalty { offence, retry_after } => {
                let why = match offence {
                    Offence::Refusals => {
                        "your tenant keeps coming back sooner than it is told to. Wait as \
                         'retry-after' says."
                    }
                    Offence::FailedAuthentication => {
                        "too many wrong API keys came from your network address. A valid key is \
                         served at once."
                    }
                    Offence::Cancels => "your tenant cancels too many requests that are under way.",
                };
                let wait = duration_text(*retry_after);
                format!("Penalty: {why} Try again in {wait}.").into()
            }
            Self::SourceLimit { per_second, retry_after } => format!(
                "Limit reached: {per_second} requests a second for your network address. Try \
                 again in {}.",
                duration_text(*retry_after)
            )
            .into(),
            Self::Limit(refusal) => limit::message(refusal).into(),
            Self::Idempotency(refusal) => refusal.message().into(),
            Self::Overloaded { retry_after: Some(wait) } => {
                format!("All workers are busy. Try again in {}.", duration_text(*wait)).into()
            }
            Self::Overloaded { retry_after: None } => {
                "All workers are busy. Try again shortly.".into()
            }
            Self::Draining => "This server is about to stop. Connect again.".into(),
            Self::LedgerUnavailable => {
                "Usage cannot be recorded at the moment, so requests are not served.".into()
            }
            Self::NoWorker { model } => {
                format!("No worker serves the model '{}' at the moment.", quoted(model)).into()
            }
            Self::DeadlineExceeded { deadline } => format!(
                "The request did not finish within its deadline of {}.",
                duration_text(*deadline)
            )
            .into(),
            Self::Internal => {
                "The server had an error while processing your request. Quote the x-request-id \
                 when you report it."
                    .into()
            }
            Self::WorkerLost { charged: true } => {
                "The worker that was answering stopped. You are charged for what you received."
                    .into()
            }
            Self::WorkerLost { charged: false } => {
                "The worker that was answering stopped. You are not charged.".into()
            }
        }
    }

    /// Whether and when the client should come back, where we have an opinion.
    fn retry(&self) -> Option<Retry> {
        match self {
            Self::SourceLimit { retry_after, .. } | Self::Penalty { retry_after, .. } => {
                Some(Retry::After(*retry_after))
            }
            Self::Limit(refusal) => Some(Retry::of(refusal)),
            Self::Overloaded { retry_after } => {
                Some(Retry::After(retry_after.unwrap_or(OVERLOADED_RETRY)))
            }
            Self::NoWorker { .. } => Some(Retry::After(OVERLOADED_RETRY)),
            Self::Idempotency(IdempotencyRefusal::Unsettled { .. }) => {
                Some(Retry::After(UNSETTLED_RETRY))
            }
            Self::Idempotency(_) => Some(Retry::Never),
            Self::BodyTooSlow
            | Self::Draining
            | Self::LedgerUnavailable
            | Self::DeadlineExceeded { .. } => Some(Retry::Never),
            _ => None,
        }
    }

    /// When the client was told to come back, if it was told a time.
    pub(crate) fn told_wait(&self) -> Option<Duration> {
        match self.retry()? {
            Retry::After(wait) => Some(wait),
            Retry::Never => None,
        }
    }

    /// Whether the connection must not carry another request.
    fn closes_connection(&self) -> bool {
        matches!(
            self,
            Self::BodyTooSlow | Self::BodyTooLarge { .. } | Self::HeadTooLarge | Self::Draining
        )
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self::Limit(Box::new(refusal))
    }
}

impl ApiError {
    /// The response that says it.
    pub(crate) fn to_response(&self) -> http::Response<Bytes> {
        let status = self.status();
        let mut response = Response::new(self.json());
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.reserve(MOST_HEADERS);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // The other statuses nobody keeps of its own accord (RFC 9110, 15.1), but
        // some who stand between keep errors of servers.
        if matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
            || status.is_server_error()
        {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        if let Some(retry) = self.retry() {
            retry.write(headers);
        }
        if let Self::Limit(refusal) = self {
            write_figures(&refusal.figures, headers);
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.closes_connection() {
            // Over HTTP/2 hyper drops it, as it must.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.to_response().map(Body::from);
        response.extensions_mut().insert(self.kind());
        response
    }
}

/// What a client sent, fit to be said back: short and without control
/// characters.
fn quoted(text: &str) -> String {
    let mut short: String = text.chars().filter(|c| !c.is_control()).take(QUOTED_CHARS).collect();
    if text.chars().count() > QUOTED_CHARS {
        short.push('…');
    }
    short
}

static INVALID_CREDENTIAL: LazyLock<Bytes> =
    LazyLock::new(|| ApiError::InvalidCredential.envelope().to_json().into());

/// Headers of a refusal with all its figures, and those that come later.
const MOST_HEADERS: usize = 16;

/// How much of a client's own words an error repeats.
const QUOTED_CHARS: usize = 128;

/// When nothing better is known about an overload.
const OVERLOADED_RETRY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
