//! Checks of single fields, shared by the readers of all JSON files of a model.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::ModelError;

/// One token id, or a list of them: both spellings occur.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(u64),
    Many(Vec<u64>),
}

impl TokenIds {
    fn into_vec(self) -> Vec<u64> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// A check of the fields of one file, which every error names.
pub(super) struct Checker<'a> {
    pub(super) path: &'a Path,
}

impl Checker<'_> {
    /// Checks that end tokens are in the vocabulary.
    pub(super) fn end_tokens(
        &self,
        ids: Option<TokenIds>,
        vocabulary: u32,
    ) -> Result<Vec<u32>, ModelError> {
        let ids = ids.map(TokenIds::into_vec).unwrap_or_default();
        match ids.iter().find(|&&id| id >= u64::from(vocabulary)) {
            Some(id) => {
                let reason = format!("{id} is not below vocab_size {vocabulary}");
                Err(self.field("eos_token_id", reason))
            }
            None => Ok(ids.into_iter().map(|id| id as u32).collect()),
        }
    }

    /// Checks a required size, which must be at least 1 and at most `most`.
    pub(super) fn size(
        &self,
        field: &'static str,
        value: Option<u64>,
        most: u64,
    ) -> Result<u32, ModelError> {
        let value = value.ok_or_else(|| self.field(field, "is missing".to_owned()))?;
        match u32::try_from(value) {
            Ok(size) if size > 0 && value <= most => Ok(size),
            _ => Err(self.field(field, format!("{value} is not between 1 and {most}"))),
        }
    }

    /// Builds the error for a field. `reason` continues a sentence that starts with its name.
    pub(super) fn field(&self, field: &'static str, reason: String) -> ModelError {
        ModelError::Field { path: PathBuf::from(self.path), field, reason }
    }
}
