//! The errors of files and batches.

use std::time::Duration;

use http::StatusCode as S;

use super::limit::Retry;
use super::spec::{ErrorSpec, client, rate, server};

/// The reason why an operation on files or batches was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobsError {
    /// 409: the file or the batch is in a state that does not allow it.
    Conflict {
        /// The code, which names the state.
        code: &'static str,
        /// A sentence that says what is in the way.
        message: &'static str,
    },
    /// 413: the file, or a line of it, is too large.
    TooLarge {
        /// A sentence that names the limit.
        message: String,
    },
    /// 429: a quota of files and batches is used up.
    Quota {
        /// A sentence that names the owner, the figures and the plan.
        message: String,
        /// Time after which it is allowed; `None` if time alone does not help.
        retry_after: Option<Duration>,
    },
    /// 503: files and batches cannot be stored now.
    Storage {
        /// A sentence that says what is missing.
        message: &'static str,
    },
}

pub(super) fn spec(error: &JobsError) -> ErrorSpec {
    match error {
        // OpenAI's SDKs repeat a 409 by themselves, and the state would be the same.
        JobsError::Conflict { code, .. } => client(S::CONFLICT, code, code).never_retry(),
        JobsError::TooLarge { .. } => {
            client(S::PAYLOAD_TOO_LARGE, "file_too_large", "request_too_large").never_retry()
        }
        JobsError::Quota { retry_after, .. } => ErrorSpec {
            code: Some("batch_quota_exceeded"),
            retry: Some(retry_after.map_or(Retry::Never, Retry::After)),
            ..rate("batch_quota")
        },
        JobsError::Storage { .. } => {
            server("job_storage", "job_storage_unavailable").retry_after(STORAGE_RETRY)
        }
    }
}

pub(super) fn message(error: &JobsError) -> &str {
    match error {
        JobsError::Conflict { message, .. } | JobsError::Storage { message } => message,
        JobsError::TooLarge { message } | JobsError::Quota { message, .. } => message,
    }
}

/// The wait after the disk or the database has refused.
const STORAGE_RETRY: Duration = Duration::from_secs(5);
