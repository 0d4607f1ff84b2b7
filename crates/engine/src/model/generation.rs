//! The end tokens of `generation_config.json`. Other fields of the file are ignored.

use std::path::Path;

use serde::Deserialize;

use super::checker::{Checker, TokenIds};
use super::config::ModelConfig;
use super::error::ModelError;
use crate::json_file::{self, JsonFileError};

#[derive(Deserialize)]
struct RawGeneration {
    eos_token_id: Option<TokenIds>,
}

/// Adds the end tokens of `generation_config.json`, if the file exists, before those of
/// `config.json`. Chat models name the token that ends a turn only in that file.
pub(super) fn add_end_tokens(folder: &Path, config: &mut ModelConfig) -> Result<(), ModelError> {
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
    let mut ids = Checker { path: &path }.end_tokens(raw.eos_token_id, config.vocabulary)?;
    ids.append(&mut config.end_tokens);
    for id in ids {
        if !config.end_tokens.contains(&id) {
            config.end_tokens.push(id);
        }
    }
    Ok(())
}
