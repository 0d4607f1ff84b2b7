//! Batches: the request that creates one, and the object that clients read. Every key is
//! always there, as the SDKs' types want it.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use crate::Violation;
use crate::fields::{Field, known_fields, object};
use crate::files::Listed;

/// The only completion window.
const WINDOW: &str = "24h";
/// The shortest and the longest life that a client may give a file, in seconds.
const LIFE_SECONDS: std::ops::RangeInclusive<u32> = 3_600..=2_592_000;
/// Bytes of the longest id that is read.
const MAX_ID_BYTES: usize = 128;

/// A request for a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRequest {
    /// The id of the input.
    pub input_file_id: String,
    /// The path that every line names.
    pub endpoint: String,
    /// The client's own notes; `None` if there are none.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The life of the result files, if the client gives one.
    pub output_life: Option<Duration>,
}

known_fields! {
    /// The fields of a request for a batch.
    BatchFields { input_file_id, endpoint, completion_window, metadata, output_expires_after }
}

known_fields! {
    /// The fields of `output_expires_after`.
    LifeFields { anchor, seconds }
}

impl BatchRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    /// A [`Violation`] that names the first field that breaks a rule.
    pub fn parse(body: &str) -> Result<Self, Violation> {
        let fields: BatchFields<'_> = object(body, "")?;
        let input_file_id: String =
            Field::new("input_file_id", fields.input_file_id).required("the id of a file")?;
        if input_file_id.len() > MAX_ID_BYTES {
            return Err(Violation::field("input_file_id", "'input_file_id' is no id of a file."));
        }
        let endpoint: String = Field::new("endpoint", fields.endpoint).required("a path")?;
        let window = Field::new("completion_window", fields.completion_window);
        let given: String = window.required("'24h'")?;
        if given != WINDOW {
            return Err(Violation::field(window.name(), "'completion_window' must be '24h'."));
        }
        Ok(Self {
            input_file_id,
            endpoint,
            metadata: metadata(&Field::new("metadata", fields.metadata))?,
            output_life: output_life(&Field::new(
                "output_expires_after",
                fields.output_expires_after,
            ))?,
        })
    }
}

/// Entries of `metadata`, and bytes of a name and of a value.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);

fn metadata(field: &Field<'_>) -> Result<Option<BTreeMap<String, String>>, Violation> {
    let (entries, name, value) = MAX_METADATA;
    let expected = format!(
        "an object of at most {entries} texts, with names of at most {name} and values of at most {value} bytes"
    );
    let Some(notes) = field.read::<BTreeMap<String, String>>(&expected)? else { return Ok(None) };
    let fits = |(key, text): (&String, &String)| key.len() <= name && text.len() <= value;
    match notes.len() <= entries && notes.iter().all(fits) {
        true => Ok(Some(notes)),
        false => Err(field.must_be(&expected, "larger")),
    }
}

fn output_life(field: &Field<'_>) -> Result<Option<Duration>, Violation> {
    let Some(raw) = field.read::<&serde_json::value::RawValue>("an object")? else {
        return Ok(None);
    };
    let fields: LifeFields<'_> = object(raw.get(), field.name())?;
    let anchor: String =
        Field::new("output_expires_after.anchor", fields.anchor).required("'created_at'")?;
    let seconds =
        Field::new("output_expires_after.seconds", fields.seconds).integer(LIFE_SECONDS)?;
    // As text, because a form gives it so, and one function checks both.
    let seconds = seconds.map(|seconds| seconds.to_string());
    life("output_expires_after", Some(&anchor), seconds.as_deref())
}

/// Reads the life of a file from its anchor and its seconds, which a form gives as text.
/// `name` is the field that holds both.
///
/// # Errors
/// A [`Violation`]: one of the two is missing or no value of its kind.
pub fn life(
    name: &str,
    anchor: Option<&str>,
    seconds: Option<&str>,
) -> Result<Option<Duration>, Violation> {
    let part = |part: &str, message: String| Violation::field(format!("{name}[{part}]"), message);
    if anchor.is_none() && seconds.is_none() {
        return Ok(None);
    }
    let missing = |part: &str| {
        let field = format!("{name}[{part}]");
        let message = format!("'{field}' is missing; '{name}' has an anchor and seconds.");
        Violation { code: Some("missing_required_parameter"), ..Violation::field(field, message) }
    };
    let anchor = anchor.ok_or_else(|| missing("anchor"))?;
    if anchor != "created_at" {
        return Err(part("anchor", format!("'{name}[anchor]' must be 'created_at'.")));
    }
    let seconds = seconds.ok_or_else(|| missing("seconds"))?;
    match seconds.parse().ok().filter(|seconds| LIFE_SECONDS.contains(seconds)) {
        Some(seconds) => Ok(Some(Duration::from_secs(seconds.into()))),
        None => {
            let (least, most) = (LIFE_SECONDS.start(), LIFE_SECONDS.end());
            let message =
                format!("'{name}[seconds]' must be a whole number from {least} to {most}.");
            Err(part("seconds", message))
        }
    }
}

/// The state of a batch, under the names of OpenAI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchStatus {
    /// The input is being checked, or waits for that.
    Validating,
    /// The input breaks the format, or the batch cannot go on.
    Failed,
    /// Lines run or wait to run.
    InProgress,
    /// The files of results are being completed.
    Finalizing,
    /// Every line has an outcome.
    Completed,
    /// The completion window is over.
    Expired,
    /// A cancel takes effect.
    Cancelling,
    /// A client or an admin cancelled the batch.
    Cancelled,
}

/// A batch as clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchObject {
    /// The batch's id.
    pub id: String,
    /// The value `batch`.
    pub object: &'static str,
    /// The path that every line names.
    pub endpoint: &'static str,
    /// The model, if every line names the same one.
    pub model: Option<String>,
    /// Mistakes in the input.
    pub errors: Option<BatchErrors>,
    /// The id of the input.
    pub input_file_id: String,
    /// The value `24h`.
    pub completion_window: &'static str,
    /// The state.
    pub status: BatchStatus,
    /// The id of the file of answers, at the end.
    pub output_file_id: Option<String>,
    /// The id of the file of errors, at the end.
    pub error_file_id: Option<String>,
    /// The times of changes.
    #[serde(flatten)]
    pub times: BatchTimes,
    /// Lines by outcome.
    pub request_counts: RequestCounts,
    /// Tokens of all answers.
    pub usage: BatchUsage,
    /// The client's own notes.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The reason for which no line runs.
    pub tollgate: BatchWaiting,
}

/// The reason for which no line of a batch runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchWaiting {
    /// A short word such as `no_worker` or `cap_spent`; null while lines run.
    pub waiting: Option<&'static str>,
    /// The time at which the batch tries again, in Unix seconds.
    pub until: Option<u64>,
}

/// The times of a batch, in Unix seconds; null until they come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchTimes {
    /// The creation.
    pub created_at: u64,
    /// The first moment at which lines could run.
    pub in_progress_at: Option<u64>,
    /// The end of the completion window.
    pub expires_at: u64,
    /// The moment at which every line had an outcome.
    pub finalizing_at: Option<u64>,
    /// The end as `completed`.
    pub completed_at: Option<u64>,
    /// The end as `failed`.
    pub failed_at: Option<u64>,
    /// The end as `expired`.
    pub expired_at: Option<u64>,
    /// The cancel.
    pub cancelling_at: Option<u64>,
    /// The end as `cancelled`.
    pub cancelled_at: Option<u64>,
}

/// Mistakes in an input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchErrors {
    object: &'static str,
    data: Vec<BatchError>,
}

impl BatchErrors {
    /// Makes the list; `None` without a mistake.
    pub fn of(data: Vec<BatchError>) -> Option<Self> {
        (!data.is_empty()).then_some(Self { object: "list", data })
    }
}

/// One mistake in an input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchError {
    /// A code such as `invalid_json_line`.
    pub code: String,
    /// A sentence that says what is wrong.
    pub message: String,
    /// The field, if one is wrong.
    pub param: Option<String>,
    /// The number of the line, from 1.
    pub line: Option<u64>,
}

/// Lines of a batch by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RequestCounts {
    /// All lines.
    pub total: u64,
    /// Lines with an answer.
    pub completed: u64,
    /// Lines with an error.
    pub failed: u64,
}

/// Tokens of all answers of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

/// The kinds of input tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
struct InputDetails {
    cached_tokens: u64,
}

/// The kinds of output tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
struct OutputDetails {
    reasoning_tokens: u64,
}

/// Tokens by kind, from which a [`BatchUsage`] is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchTokens {
    /// Tokens of prompts, with those that were cached.
    pub prompt: u64,
    /// Tokens of prompts that were not computed again.
    pub cached: u64,
    /// Tokens of answers.
    pub completion: u64,
    /// Tokens of reasoning, which are a part of those of answers.
    pub reasoning: u64,
}

impl From<BatchTokens> for BatchUsage {
    fn from(BatchTokens { prompt, cached, completion, reasoning }: BatchTokens) -> Self {
        Self {
            input_tokens: prompt,
            input_tokens_details: InputDetails { cached_tokens: cached },
            output_tokens: completion,
            output_tokens_details: OutputDetails { reasoning_tokens: reasoning },
            total_tokens: prompt.saturating_add(completion),
        }
    }
}

impl Listed for BatchObject {
    fn id(&self) -> &str {
        &self.id
    }
}
