//! The errors of an unusable model folder.

use std::path::PathBuf;

use crate::json_file::{JsonFileError, MAX_JSON_BYTES};
use crate::weights::WeightsError;

/// The reasons why a model's folder is refused.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A JSON file is larger than [`MAX_JSON_BYTES`].
    #[error("{} is larger than {MAX_JSON_BYTES} bytes", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// A file is not valid JSON of the expected structure; the cause names the line.
    #[error("{} is malformed", path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// A field is missing, out of range, or asks for an unsupported feature.
    #[error("{}: {field} {reason}", path.display())]
    Field {
        /// Path of the file.
        path: PathBuf,
        /// The field's JSON name.
        field: &'static str,
        /// The end of a sentence that starts with the field's name.
        reason: String,
    },
    /// The tokenizer has more tokens than the model's embedding has rows.
    #[error(
        "{}: the tokenizer has {tokens} tokens, the model's vocab_size is {vocabulary}",
        path.display()
    )]
    Tokenizer {
        /// Path of the tokenizer's file.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokens: u32,
        /// Rows of the embedding.
        vocabulary: u32,
    },
    /// The weights were refused.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

impl From<JsonFileError> for ModelError {
    fn from(error: JsonFileError) -> Self {
        match error {
            JsonFileError::Read { path, source } => Self::Read { path, source },
            JsonFileError::TooLarge { path } => Self::TooLarge { path },
        }
    }
}
