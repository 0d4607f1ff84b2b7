//! The sentences of errors, for people.

use std::borrow::Cow;
use std::time::Duration;

use tollgate_admission::Offence;

use super::{ApiError, FullQueue, duration_text, idempotency, jobs, limit};

impl ApiError {
    /// Returns the sentence for people.
    pub(super) fn message(&self) -> Cow<'_, str> {
        match self {
            Self::MissingCredential => MISSING_CREDENTIAL.into(),
            Self::InvalidCredential => "Incorrect API key provided.".into(),
            Self::KeyRevoked => KEY_REVOKED.into(),
            Self::SourceNotAllowed => SOURCE_NOT_ALLOWED.into(),
            Self::TenantNotServed => TENANT_NOT_SERVED.into(),
            Self::Permission { message } | Self::Invalid { message, .. } => message.as_ref().into(),
            Self::ModelNotFound { model } => {
                // One sentence for unknown and for forbidden models, so that a caller cannot learn
                // the names of other tenants' models.
                let model = quoted(model);
                format!("The model '{model}' does not exist or you do not have access to it.")
                    .into()
            }
            Self::NotFound { what, id } => format!("No such {what}: '{}'.", quoted(id)).into(),
            Self::UnknownRoute { method, path, hint } => unknown_route(method, path, *hint).into(),
            Self::MethodNotAllowed { method, path } => {
                format!("Not allowed to {method} on {}.", quoted(path)).into()
            }
            Self::ContextLength { limit, prompt, completion, .. } => {
                context_length(*limit, *prompt, *completion).into()
            }
            Self::BodyTooSlow => "The request body arrived too slowly.".into(),
            Self::BodyTooLarge { limit } => {
                format!("The request body is larger than the {limit} bytes that this route takes.")
                    .into()
            }
            Self::BodyMemory { limit } => body_memory(*limit).into(),
            Self::HeadTooLarge => "The headers of the request are too many or too large.".into(),
            Self::UnsupportedEncoding { encoding } => format!(
                "Request bodies with content-encoding '{}' are not taken: send it plain.",
                quoted(encoding)
            )
            .into(),
            Self::Penalty { offence, retry_after } => penalty(*offence, *retry_after).into(),
            Self::SourceLimit { per_second, retry_after } => format!(
                "Limit reached: {per_second} requests a second for your network address. Try \
                 again in {}.",
                duration_text(*retry_after)
            )
            .into(),
            Self::ConnectionLimit { most, owner } => format!(
                "Limit reached: {most} connections at once for {owner}. Close idle connections or \
                 send several requests on one."
            )
            .into(),
            Self::LiveStreams { most } => format!(
                "Limit reached: {most} streams of the live view at once. Close another one."
            )
            .into(),
            Self::ReadLimit { per_second, retry_after } => format!(
                "Limit reached: {per_second} read-only requests a second for your key. Try again \
                 in {}.",
                duration_text(*retry_after)
            )
            .into(),
            Self::Limit(refusal) => limit::message(refusal).into(),
            Self::Jobs(error) => jobs::message(error).into(),
            Self::Idempotency(refusal) => idempotency::message(refusal).into(),
            Self::Overloaded { full, retry_after } => overloaded(*full, *retry_after).into(),
            Self::Draining => "This server is about to stop. Connect again.".into(),
            Self::LedgerUnavailable => LEDGER_UNAVAILABLE.into(),
            Self::NoWorker { model } => no_worker(model).into(),
            Self::DeadlineExceeded { deadline } => {
                let deadline = duration_text(*deadline);
                format!("The request did not finish within its deadline of {deadline}.").into()
            }
            Self::Internal => INTERNAL.into(),
            Self::WorkerLost { charged: true } => WORKER_LOST_CHARGED.into(),
            Self::WorkerLost { charged: false } => WORKER_LOST.into(),
        }
    }
}

fn unknown_route(method: &http::Method, path: &str, hint: Option<&str>) -> String {
    let hint = hint.map(|hint| format!(" {hint}")).unwrap_or_default();
    format!("Unknown request URL: {method} {}.{hint}", quoted(path))
}

fn no_worker(model: &str) -> String {
    format!("No worker serves the model '{}' at the moment.", quoted(model))
}

fn body_memory(limit: u64) -> String {
    format!(
        "Limit reached: {limit} bytes for the request bodies of your tenant or pool that are \
         on their way. Send fewer large bodies at the same time."
    )
}

fn overloaded(full: FullQueue, retry_after: Option<Duration>) -> String {
    let full = match full {
        FullQueue::Workers => "All workers are busy.",
        FullQueue::Tokenizing => "Too many prompts wait to be tokenized.",
        FullQueue::BodyMemory => "The request bodies of all tenants take all memory for bodies.",
    };
    match retry_after {
        Some(wait) => format!("{full} Try again in {}.", duration_text(wait)),
        None => format!("{full} Try again shortly."),
    }
}

fn context_length(limit: u64, prompt: u64, completion: Option<u64>) -> String {
    match completion {
        Some(completion) => format!(
            "This model's maximum context length is {limit} tokens. You requested {} tokens: \
             {prompt} in the prompt and {completion} for the answer. Shorten the prompt or ask \
             for fewer tokens.",
            // The client chose `completion`, so the sum must not overflow.
            prompt.saturating_add(completion)
        ),
        None => format!(
            "This model's maximum context length is {limit} tokens. Your prompt has at \
             least {prompt} tokens and leaves no room for an answer."
        ),
    }
}

fn penalty(offence: Offence, retry_after: Duration) -> String {
    let why = match offence {
        Offence::Refusals => {
            "your tenant keeps coming back sooner than it is told to. Wait as 'retry-after' says."
        }
        Offence::FailedAuthentication => {
            "too many wrong API keys came from your network address. A valid key is served at once."
        }
        Offence::Cancels => "your tenant leaves too many requests whose answers were under way.",
    };
    format!("Penalty: {why} Try again in {}.", duration_text(retry_after))
}

/// Returns a client's text as an error may repeat it: short and without control
/// characters.
fn quoted(text: &str) -> String {
    // Control characters could forge lines where the error is printed. Characters are counted,
    // because a cut at a byte could split one.
    let mut short: String = text.chars().filter(|c| !c.is_control()).take(QUOTED_CHARS).collect();
    if text.chars().count() > QUOTED_CHARS {
        short.push('…');
    }
    short
}

/// Characters of a client's own text that an error repeats.
const QUOTED_CHARS: usize = 128;

const MISSING_CREDENTIAL: &str =
    "No API key was provided. Send it as 'Authorization: Bearer YOUR_KEY'.";
const KEY_REVOKED: &str = "This API key was revoked while the request was under way. You are \
                           charged for what was done.";
const TENANT_NOT_SERVED: &str = "The tenant of this credential is not served here.";

const SOURCE_NOT_ALLOWED: &str = "This API key may not be used from your network address.";
const LEDGER_UNAVAILABLE: &str =
    "Usage cannot be recorded at the moment, so requests are not served.";
const INTERNAL: &str = "The server had an error while processing your request. Quote the \
                        x-request-id when you report it.";
const WORKER_LOST_CHARGED: &str =
    "The worker that was answering stopped. You are charged for what you received.";
const WORKER_LOST: &str = "The worker that was answering stopped. You are not charged.";
