//! The facts of `generation_config.json`: the tokens that end a completion and the model's
//! own sampling defaults.

use std::path::Path;

use serde::Deserialize;

use super::checker::{Checker, TokenIds};
use super::config::ModelConfig;
use super::error::ModelError;
use crate::json_file::{self, JsonFileError};
use crate::sample::{MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY};

/// The sampling parameters that a model's publisher recommends. A request that
/// names none of its own gets these, as vLLM does. A parameter is absent where
/// the model has no default for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Temperature from 0 to 2; 0 if `do_sample` is false.
    pub temperature: Option<f32>,
    /// Number of likeliest tokens to sample from; 0 for all.
    pub top_k: Option<u32>,
    /// Probability from 0 to 1 that the likeliest tokens must reach together.
    pub top_p: Option<f32>,
    /// Part, from 0 to 1, of the likeliest token's probability that a token must reach.
    pub min_p: Option<f32>,
    /// Factor from [`MIN_REPETITION_PENALTY`] to [`MAX_REPETITION_PENALTY`].
    pub repetition_penalty: Option<f32>,
}

#[derive(Deserialize)]
struct RawGeneration {
    eos_token_id: Option<TokenIds>,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

/// Adds the facts of `generation_config.json` to `config`, if the file exists. The
/// file's end tokens come before those of `config.json`: chat models name the token
/// that ends a turn only in that file.
///
/// # Errors
/// [`ModelError`] if the file cannot be read, is not JSON, names a token
/// outside the vocabulary, or has a default outside its range.
pub(super) fn add_generation(folder: &Path, config: &mut ModelConfig) -> Result<(), ModelError> {
    let path = folder.join("generation_config.json");
    let bytes = match json_file::read(&path) {
        Err(JsonFileError::Read { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            return Ok(());
        }
        other => other?,
    };
    let raw: RawGeneration = serde_json::from_slice(&bytes)
        .map_err(|source| ModelError::Json { path: path.clone(), source })?;
    let checker = Checker { path: &path };
    config.sampling_defaults = raw.sampling_defaults(&checker)?;
    let mut ids = checker.end_tokens(raw.eos_token_id, config.vocabulary)?;
    ids.append(&mut config.end_tokens);
    for id in ids {
        if !config.end_tokens.contains(&id) {
            config.end_tokens.push(id);
        }
    }
    Ok(())
}

impl RawGeneration {
    fn sampling_defaults(&self, checker: &Checker<'_>) -> Result<SamplingDefaults, ModelError> {
        let temperature = in_range(checker, "temperature", self.temperature, (0.0, 2.0))?;
        Ok(SamplingDefaults {
            // Only a plain "false" asks for greedy answers: a file that leaves
            // the key out is one that its publisher did not think about.
            temperature: if self.do_sample == Some(false) { Some(0.0) } else { temperature },
            top_k: top_k(checker, self.top_k)?,
            top_p: in_range(checker, "top_p", self.top_p, (0.0, 1.0))?,
            min_p: in_range(checker, "min_p", self.min_p, (0.0, 1.0))?,
            repetition_penalty: in_range(
                checker,
                "repetition_penalty",
                self.repetition_penalty,
                (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            )?,
        })
    }
}

fn in_range(
    checker: &Checker<'_>,
    field: &'static str,
    value: Option<f32>,
    (low, high): (f32, f32),
) -> Result<Option<f32>, ModelError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => {
            Err(checker.field(field, format!("{value} is not between {low} and {high}")))
        }
        value => Ok(value),
    }
}

/// Checks `top_k`; 0 and -1 both stand for all tokens.
fn top_k(checker: &Checker<'_>, value: Option<i64>) -> Result<Option<u32>, ModelError> {
    match value {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(value) => match u32::try_from(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(checker.field("top_k", format!("{value} is not a number of tokens"))),
        },
    }
}
