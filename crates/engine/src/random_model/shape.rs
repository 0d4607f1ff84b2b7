//! Shapes of models: arbitrary ones and those of some common models.

use serde_json::{Value, json};

use super::RandomModelError;
use crate::model::Family;
use crate::random_model::tokenizer;
use crate::weights::Element;

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Variant of the Llama family.
    pub family: Family,
    /// Rows of the embedding, at least 259 for all bytes and control tokens.
    pub vocabulary: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the feed-forward layer.
    pub intermediate: u32,
    /// Number of transformer layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Heads of keys and values; a divisor of `heads`.
    pub kv_heads: u32,
    /// Elements of a head, an even number.
    pub head_dim: u32,
    /// Largest number of tokens in a sequence.
    pub context: u32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// True if the output head uses the embedding's weights.
    pub tied: bool,
}

impl ModelSpec {
    /// Names that [`ModelSpec::named`] accepts.
    pub const NAMES: [&'static str; 4] = ["tiny", "qwen2.5-0.5b", "qwen2.5-7b", "llama-3-8b"];

    /// Returns the shape of a model by name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "tiny" => Some(Self::tiny()),
            "qwen2.5-0.5b" => Some(Self::qwen2_5_half_b()),
            "qwen2.5-7b" => Some(Self::qwen2_5_7b()),
            "llama-3-8b" => Some(Self::llama_3_8b()),
            _ => None,
        }
    }

    /// Returns a Qwen2 shape that answers within microseconds.
    pub fn tiny() -> Self {
        Self {
            family: Family::Qwen2,
            vocabulary: 512,
            hidden: 64,
            intermediate: 96,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            context: 1_024,
            rope_theta: 10_000.0,
            tied: true,
        }
    }

    /// Returns the shape of Qwen2.5-0.5B.
    pub fn qwen2_5_half_b() -> Self {
        Self {
            family: Family::Qwen2,
            vocabulary: 151_936,
            hidden: 896,
            intermediate: 4_864,
            layers: 24,
            heads: 14,
            kv_heads: 2,
            head_dim: 64,
            context: 32_768,
            rope_theta: 1_000_000.0,
            tied: true,
        }
    }

    /// Returns the shape of Qwen2.5-7B.
    pub fn qwen2_5_7b() -> Self {
        Self {
            family: Family::Qwen2,
            vocabulary: 152_064,
            hidden: 3_584,
            intermediate: 18_944,
            layers: 28,
            heads: 28,
            kv_heads: 4,
            head_dim: 128,
            context: 32_768,
            rope_theta: 1_000_000.0,
            tied: false,
        }
    }

    /// Returns the shape of Llama 3 8B.
    pub fn llama_3_8b() -> Self {
        Self {
            family: Family::Llama,
            vocabulary: 128_256,
            hidden: 4_096,
            intermediate: 14_336,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            context: 8_192,
            rope_theta: 500_000.0,
            tied: false,
        }
    }

    pub(super) fn check(&self) -> Result<(), RandomModelError> {
        let refuse = |field, reason| Err(RandomModelError::Spec { field, reason });
        if self.vocabulary < tokenizer::CONTROL_END {
            return refuse("vocabulary", "is too small for all bytes and the control tokens");
        }
        for (field, size) in [
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("context", self.context),
        ] {
            if size == 0 {
                return refuse(field, "is 0");
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return refuse("kv_heads", "does not divide heads");
        }
        if !self.head_dim.is_multiple_of(2) {
            return refuse("head_dim", "is odd");
        }
        Ok(())
    }

    /// Returns the content of `config.json`.
    pub fn config(&self, element: Element) -> Value {
        json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "rope_scaling": null,
            "hidden_act": "silu",
            "attention_bias": false,
            "sliding_window": null,
            "use_sliding_window": false,
            "tie_word_embeddings": self.tied,
            "torch_dtype": match element {
                Element::F32 => "float32",
                Element::F16 => "float16",
                Element::Bf16 => "bfloat16",
            },
            "bos_token_id": tokenizer::END_OF_TEXT,
            "eos_token_id": tokenizer::END_OF_TURN,
        })
    }

    /// Returns the name and shape of every tensor, in the order of the file.
    pub(super) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let [hidden, intermediate, vocabulary, head] =
            [self.hidden, self.intermediate, self.vocabulary, self.head_dim].map(|n| n as usize);
        let queries = self.heads as usize * head;
        let keys = self.kv_heads as usize * head;
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden])];
        for layer in 0..self.layers {
            let mut push = |part: &str, shape: &[usize]| {
                tensors.push((format!("model.layers.{layer}.{part}"), shape.to_vec()));
            };
            push("input_layernorm.weight", &[hidden]);
            for (part, rows) in [("q", queries), ("k", keys), ("v", keys)] {
                push(&format!("self_attn.{part}_proj.weight"), &[rows, hidden]);
                if self.family.has_qkv_bias() {
                    push(&format!("self_attn.{part}_proj.bias"), &[rows]);
                }
            }
            if self.family.has_qk_norm() {
                push("self_attn.q_norm.weight", &[head]);
                push("self_attn.k_norm.weight", &[head]);
            }
            push("self_attn.o_proj.weight", &[hidden, queries]);
            push("post_attention_layernorm.weight", &[hidden]);
            push("mlp.gate_proj.weight", &[intermediate, hidden]);
            push("mlp.up_proj.weight", &[intermediate, hidden]);
            push("mlp.down_proj.weight", &[hidden, intermediate]);
        }
        tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
        if !self.tied {
            tensors.push(("lm_head.weight".to_owned(), vec![vocabulary, hidden]));
        }
        tensors
    }
}
