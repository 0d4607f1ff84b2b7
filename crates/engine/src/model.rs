//! A model's folder on disk, checked: configuration, weights and identity.
//!
//! A folder that was opened here is fit to run: every size is bounded, and every field
//! that changes the arithmetic is either supported or refused by name. This module
//! computes nothing, and no later code reads the folder's JSON files again.

mod checker;
mod config;
mod error;
mod generation;
mod hash;
pub(crate) mod names;
mod rope;

use std::path::{Path, PathBuf};

use crate::json_file;
use crate::weights::Weights;

pub use crate::json_file::MAX_JSON_BYTES;
pub use config::{Family, ModelConfig};
pub use error::ModelError;
pub use generation::SamplingDefaults;
pub use rope::{Rope, RopeScaling};

/// A model's folder in the Hugging Face layout, checked and mapped into memory.
#[derive(Debug)]
pub struct ModelFiles {
    folder: PathBuf,
    config: ModelConfig,
    weights: Weights,
    hash: String,
}

impl ModelFiles {
    /// Opens and checks a folder: `config.json`, `generation_config.json` if it exists,
    /// and the safetensors files. Reads every weight once for the hash, which takes
    /// about a second for each gigabyte and core.
    ///
    /// # Errors
    /// [`ModelError`], which names the file and the field or tensor.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config_path = folder.join("config.json");
        let config_bytes = json_file::read(&config_path)?;
        let mut config = ModelConfig::parse(&config_path, &config_bytes)?;
        generation::add_generation(folder, &mut config)?;
        let weights = Weights::open(folder)?;
        let hash = hash::of_model(&config_bytes, &weights);
        Ok(Self { folder: folder.to_owned(), config, weights, hash })
    }

    /// Returns the folder that was opened.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the checked configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the mapped weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Returns the SHA-256 over `config.json` and the content of every weight file, in
    /// hex.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Checks that a tokenizer with `tokens` tokens (its largest id plus one) fits, so
    /// that every id has an embedding. A smaller tokenizer is usual, because embeddings
    /// are padded.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if the tokenizer is too large.
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
