//! Model folders of any shape with random weights, for tests and benchmarks. A folder
//! contains config, weights, tokenizer and chat template, so it can be served like a real
//! model.
//!
//! The same specification and seed give the same bytes. Weights are written while they are
//! drawn, so a large model needs disk space but little memory.

mod shape;
mod tokenizer;
mod weights;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::json;

pub use shape::ModelSpec;

use crate::model::Family;
use crate::weights::Element;

/// The specification of a random model.
#[derive(Clone, Debug)]
pub struct RandomModel {
    /// Shape of the model.
    pub spec: ModelSpec,
    /// Element type of the weights.
    pub element: Element,
    /// Seed of the weights.
    pub seed: u64,
}

/// The reason for which a folder could not be written.
#[derive(Debug, thiserror::Error)]
pub enum RandomModelError {
    /// No model can have this shape.
    #[error("the shape's {field} {reason}")]
    Spec {
        /// Name of the field.
        field: &'static str,
        /// Rest of the sentence after the field's name.
        reason: &'static str,
    },
    /// A file could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error from the system.
        source: io::Error,
    },
}

impl RandomModel {
    /// Writes `config.json`, `generation_config.json`, `tokenizer.json`,
    /// `tokenizer_config.json` and `model.safetensors` into `folder`. Creates the folder if
    /// needed.
    ///
    /// # Errors
    ///
    /// [`RandomModelError`] if the shape is invalid or a file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), RandomModelError> {
        self.spec.check()?;
        write(folder, |_| fs::create_dir_all(folder))?;
        let text = |name: &str, value: &serde_json::Value| {
            write(&folder.join(name), |path| fs::write(path, format!("{value:#}\n")))
        };
        text("config.json", &self.spec.config(self.element))?;
        text("generation_config.json", &json!({ "eos_token_id": [tokenizer::END_OF_TURN] }))?;
        text("tokenizer_config.json", &tokenizer::config(self.spec.context))?;
        write(&folder.join("tokenizer.json"), |path| {
            fs::write(path, tokenizer::json(self.spec.vocabulary).to_string())
        })?;
        write(&folder.join("model.safetensors"), |path| weights::write(self, path))
    }
}

impl Family {
    /// Returns the class name of the causal model in transformers.
    fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

fn write(path: &Path, act: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), RandomModelError> {
    act(path).map_err(|source| RandomModelError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelFiles, RopeScaling};

    #[test]
    fn random_model_opens_with_its_shape() {
        for family in Family::ALL {
            for element in [Element::F32, Element::F16, Element::Bf16] {
                let spec = ModelSpec { family, ..ModelSpec::tiny() };
                let folder = tempfile::tempdir().unwrap();
                RandomModel { spec: spec.clone(), element, seed: 1 }.write(folder.path()).unwrap();
                let files = ModelFiles::open(folder.path()).unwrap();
                let config = files.config();
                assert_eq!(config.family, family);
                assert_eq!((config.hidden, config.layers), (spec.hidden, spec.layers));
                assert_eq!(config.end_tokens, [tokenizer::END_OF_TURN]);
                assert_eq!(config.rope.scaling, RopeScaling::None);
            }
        }
    }

    #[test]
    fn random_model_seed_fixes_every_byte() {
        let hash = |seed| {
            let folder = tempfile::tempdir().unwrap();
            let model = RandomModel { spec: ModelSpec::tiny(), element: Element::Bf16, seed };
            model.write(folder.path()).unwrap();
            ModelFiles::open(folder.path()).unwrap().hash().to_owned()
        };
        assert_eq!(hash(1), hash(1));
        assert_ne!(hash(1), hash(2));
    }

    #[test]
    fn invalid_shapes_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for (spec, field) in [
            (ModelSpec { vocabulary: 100, ..ModelSpec::tiny() }, "vocabulary"),
            (ModelSpec { layers: 0, ..ModelSpec::tiny() }, "layers"),
            (ModelSpec { kv_heads: 3, ..ModelSpec::tiny() }, "kv_heads"),
            (ModelSpec { head_dim: 5, ..ModelSpec::tiny() }, "head_dim"),
        ] {
            let model = RandomModel { spec, element: Element::F32, seed: 0 };
            match model.write(folder.path()) {
                Err(RandomModelError::Spec { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
        }
    }
}
