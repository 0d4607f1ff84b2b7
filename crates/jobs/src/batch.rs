//! Batches as rows, and the states that a batch goes through.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tollgate_domain::{
    DeviceClass, DeviceNanos, KeyId, ModelName, PoolName, TenantId, UtcDay, UtcTime,
};

use crate::ids::{BatchId, FileId};

/// The interface that every line of a batch uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    /// Returns the path, as lines name it.
    pub fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// Finds the endpoint with this path.
    pub fn of_path(path: &str) -> Option<Self> {
        [Self::ChatCompletions, Self::Completions].into_iter().find(|known| known.path() == path)
    }
}

/// The state of a batch. A state is never left for an earlier one, and the first cause
/// that is committed stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchState {
    /// The input is being checked, or waits for that.
    Validating,
    /// Lines run or wait to run.
    Running,
    /// No line begins any more; open tries are being settled.
    Ending(Cause),
    /// Each line is in one of the two files.
    Ended(Cause),
}

/// The reason why a batch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Every line has an answer.
    Done,
    /// A client or an admin cancelled the batch.
    Cancelled(CancelReason),
    /// The completion window is over.
    Expired,
    /// The batch cannot go on.
    Failed(FailureCode),
}

/// The reason of a cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// A client asked.
    Asked,
    /// The key that made the batch was revoked.
    KeyRevoked,
    /// The tenant is not configured any more.
    TenantGone,
}

/// The reason of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCode {
    /// The input breaks the format; the batch's errors name lines.
    InvalidInput,
    /// The dispatcher failed on this batch.
    Internal,
}

/// The number of lines by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All lines of the input.
    pub total: u64,
    /// Lines with an answer of status 200.
    pub completed: u64,
    /// Lines in the error file.
    pub failed: u64,
}

impl Counts {
    /// Returns the number of lines without an outcome.
    pub fn unanswered(&self) -> u64 {
        self.total.saturating_sub(self.completed + self.failed)
    }
}

/// Tokens of all answers of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchUsage {
    /// Tokens of prompts, with those that were cached.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were not computed again.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Tokens of reasoning, which are a part of those of answers.
    pub reasoning_tokens: u64,
}

impl BatchUsage {
    /// Adds the tokens of another answer.
    pub fn add(&mut self, other: &Self) {
        // All fields by name, so that a new one cannot be left out of the sum.
        let Self { prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens } = other;
        self.prompt_tokens += prompt_tokens;
        self.cached_tokens += cached_tokens;
        self.completion_tokens += completion_tokens;
        self.reasoning_tokens += reasoning_tokens;
    }
}

/// The work of a try that is paid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TryUsage {
    /// The tokens.
    pub tokens: BatchUsage,
    /// The cost; `None` if the try cost nothing.
    pub cost: Option<TryCost>,
}

/// The cost of a try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TryCost {
    /// The day on which the try ended (UTC).
    pub day: UtcDay,
    /// The class of the device.
    pub class: DeviceClass,
    /// The reference cost.
    pub reference: DeviceNanos,
}

/// The cost of the lines of a tenant's batches on one day and one class of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpentByBatches {
    /// The tenant.
    pub tenant: TenantId,
    /// The class of the devices.
    pub class: DeviceClass,
    /// The reference cost.
    pub reference: DeviceNanos,
}

/// The times at which a batch changed its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// `Running` began.
    pub running: Option<UtcTime>,
    /// `Ending` began.
    pub ending: Option<UtcTime>,
    /// The batch ended.
    pub ended: Option<UtcTime>,
}

/// One mistake in an input, as the batch reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputError {
    /// A code such as `invalid_json_line`.
    pub code: String,
    /// A sentence that says what is wrong.
    pub message: String,
    /// The field.
    pub param: Option<String>,
    /// The number of the line in the file, from 1.
    pub line: Option<u64>,
}

/// A batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRow {
    /// The id.
    pub id: BatchId,
    /// The owner.
    pub tenant: TenantId,
    /// The owner's pool when the batch was made.
    pub pool: Option<PoolName>,
    /// The key that made the batch: every try is this key's.
    pub key: KeyId,
    /// The input.
    pub input: FileId,
    /// The endpoint of every line.
    pub endpoint: Endpoint,
    /// The client's metadata, as the text of a JSON object; `None` if there is none.
    pub metadata: Option<String>,
    /// The time of creation.
    pub created: UtcTime,
    /// The end of the completion window.
    pub expires: UtcTime,
    /// The life of the result files from their creation.
    pub results_kept: Duration,
    /// The state.
    pub state: BatchState,
    /// The model, if every line so far has named the same one.
    pub model: Option<ModelName>,
    /// Live counts.
    pub counts: Counts,
    /// Live usage.
    pub usage: BatchUsage,
    /// Mistakes in the input, at most 100.
    pub errors: Vec<InputError>,
    /// The file of answers, at the end.
    pub output: Option<FileId>,
    /// The file of errors, at the end.
    pub error: Option<FileId>,
    /// The times of changes.
    pub times: Times,
    /// True if a dispatcher has claimed the batch.
    pub is_claimed: bool,
}

/// A batch that a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBatch {
    /// The id, drawn by the caller.
    pub id: BatchId,
    /// The owner.
    pub tenant: TenantId,
    /// The owner's pool.
    pub pool: Option<PoolName>,
    /// The key that asks.
    pub key: KeyId,
    /// The input.
    pub input: FileId,
    /// The endpoint of every line.
    pub endpoint: Endpoint,
    /// The client's metadata, as the text of a JSON object.
    pub metadata: Option<String>,
    /// Time from creation to expiry: 24 hours.
    pub window: Duration,
    /// The life of the result files that the client asked for; the plan's `kept` bounds
    /// it.
    pub results_kept: Option<Duration>,
}

/// The part of a list of batches that a client asks for, newest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPage {
    /// The last batch of the page before.
    pub after: Option<BatchId>,
    /// Most batches of the page.
    pub limit: u32,
}
