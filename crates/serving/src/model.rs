//! A model as a worker serves it. A [`ServedModel`] is made from a checked
//! announcement, so other modules take its fields as facts.

use std::sync::Arc;

use tollgate_domain::{CostTable, DeviceClass, ModelName, SamplingDefaults};
use tollgate_text::{ChatTemplate, Tokenizer};

/// A model that a worker serves.
#[derive(Debug)]
pub struct ServedModel {
    /// The model's name.
    pub name: ModelName,
    /// A hash of weights and config, in hex.
    pub hash: String,
    /// The class of the worker's device.
    pub class: DeviceClass,
    /// The tokenizer, shared by all workers that announce the same file.
    pub text: Arc<BuiltTokenizer>,
    /// The chat template; `None` if the model serves completions only.
    pub template: Option<Arc<ChatTemplate>>,
    /// Tokens that the model takes, prompt and completion together.
    pub context_length: u32,
    /// Rows of logits.
    pub vocabulary: u32,
    /// Costs of this model on this class of device.
    pub table: CostTable,
    /// The sampling parameters of requests that name none.
    pub defaults: SamplingDefaults,
}

/// A tokenizer with a figure derived from its vocabulary.
#[derive(Debug)]
pub struct BuiltTokenizer {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Bytes of the longest token.
    pub longest_token: usize,
}

impl BuiltTokenizer {
    /// Builds a tokenizer from its JSON file. A large file takes a second, so
    /// callers run this on the blocking pool.
    ///
    /// # Errors
    /// The file is not a tokenizer that the text crate takes.
    pub fn from_json(bytes: &[u8]) -> Result<Self, tollgate_text::TextError> {
        let tokenizer = Tokenizer::from_json(bytes)?;
        let longest_token = (0..tokenizer.vocabulary_size())
            .map(|id| tokenizer.token_bytes(id as u32).len())
            .max()
            .unwrap_or(0);
        Ok(Self { tokenizer: Arc::new(tokenizer), longest_token })
    }
}
