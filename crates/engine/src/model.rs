//! A model's folder on disk, checked: configuration, weights, identity.
//!
//! What is opened here has been found fit to run: every size bounded, every
//! field that changes the arithmetic either understood or refused by name.
//! Nothing here computes, and nothing behind it reads a file again.

mod config;
mod generation;
mod hash;
pub(crate) mod names;
mod rope;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::weights::{Weights, WeightsError};

pub use config::{Family, ModelConfig};
pub use rope::{Rope, RopeScaling};

/// The largest JSON file that a model folder may hold, bytes (the shards'
/// index of a very large model is some hundred KiB).
pub const MAX_JSON_BYTES: u64 = 16 << 20;

/// A model's folder in the Hugging Face layout, checked and mapped.
#[derive(Debug)]
pub struct ModelFiles {
    folder: PathBuf,
    config: ModelConfig,
    weights: Weights,
    hash: String,
}

/// Why a model's folder was refused.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A JSON file is larger than [`MAX_JSON_BYTES`].
    #[error("{} is larger than {MAX_JSON_BYTES} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// A file is not the JSON that it should be; the cause says the line.
    #[error("{} is malformed", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A field is missing, out of range, or asks for what the engine lacks.
    #[error("{}: {field} {reason}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, by its JSON name.
        field: &'static str,
        /// A sentence that goes on after the field's name.
        reason: String,
    },
    /// The tokenizer knows tokens that the model has no embedding for.
    #[error(
        "{}: the tokenizer has {tokens} tokens, the model's vocab_size is {vocabulary}",
        path.display()
    )]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// Tokens that it knows.
        tokens: u32,
        /// Rows of the embedding.
        vocabulary: u32,
    },
    /// The weights were refused.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

impl ModelFiles {
    /// Opens and checks a folder: `config.json`, `generation_config.json` if
    /// there is one, and the safetensors files. Reads every weight once, for
    /// the hash (about a second for each gigabyte and core).
    ///
    /// # Errors
    /// [`ModelError`], which names the file and the field or tensor.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config_path = folder.join("config.json");
        let config_bytes = read_json_bytes(&config_path)?;
        let mut config = ModelConfig::parse(&config_path, &config_bytes)?;
        generation::add_end_tokens(folder, &mut config)?;
        let weights = Weights::open(folder)?;
        let hash = hash::of_model(&config_bytes, &weights);
        Ok(Self { folder: folder.to_owned(), config, weights, hash })
    }

    /// The folder that was opened.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The checked configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The mapped weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Hex SHA-256 over `config.json` and the content of every weight file.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Checks that a tokenizer of `tokens` tokens (its largest id plus one)
    /// fits: every id that it makes has an embedding. A smaller tokenizer is
    /// usual, embeddings are padded.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] when it is too large.
    pub fn check_tokenizer(&self, tokens: u32) -> Result<(), ModelError> {
        if tokens <= self.config.vocabulary {
            return Ok(());
        }
        Err(ModelError::Tokenizer {
            path: self.folder.join("tokenizer.json"),
            tokens,
            vocabulary: self.config.vocabulary,
        })
    }
}

/// Reads a JSON file whole, refusing one that is too large.
pub(crate) fn read_json_bytes(path: &Path) -> Result<Vec<u8>, ModelError> {
    let fail = |source| ModelError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fail)?;
    file.take(MAX_JSON_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_JSON_BYTES {
        return Err(ModelError::TooLarge { path: path.to_owned() });
    }
    Ok(bytes)
}
