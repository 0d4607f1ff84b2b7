//! `generation_config.json`: of it only the tokens that end a completion.

use std::path::Path;

use serde::Deserialize;

use super::config::Checker;
use super::{ModelConfig, ModelError, read_json_bytes};

/// One token id, or a list of them.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(u64),
    Many(Vec<u64>),
}

impl TokenIds {
    pub(super) fn into_vec(self) -> Vec<u64> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Deserialize)]
struct RawGeneration {
    eos_token_id: Option<TokenIds>,
}

/// Puts the end tokens of `generation_config.json`, if there is one, before
/// those of `config.json`: chat models name the end of a turn only there.
pub(super) fn add_end_tokens(folder: &Path, config: &mut ModelConfig) -> Result<(), ModelError> {
    let path = folder.join("generation_config.json");
    let bytes = match read_json_bytes(&path) {
        Err(ModelError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
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
