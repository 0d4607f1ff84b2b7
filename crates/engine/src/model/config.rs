//! The model's configuration: reads `config.json` in the spellings of several years of
//! tools. A field that would change the arithmetic and is not supported refuses the
//! model; other unknown fields are ignored.

use std::path::Path;

use serde::Deserialize;

use super::checker::{Checker, TokenIds};
use super::error::ModelError;
use super::generation::SamplingDefaults;
use super::rope::{self, RawRope, Rope};

/// The checked configuration of a decoder-only transformer of the Llama family.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The variation of the family.
    pub family: Family,
    /// Rows of the embedding, and elements of a row of logits.
    pub vocabulary: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the feed-forward layer.
    pub intermediate: u32,
    /// Number of transformer layers.
    pub layers: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Elements of a head, an even number.
    pub head_dim: u32,
    /// Tokens that a sequence may hold.
    pub context: u32,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// Parameters of the rotary position embedding.
    pub rope: Rope,
    /// True if the output head is the embedding.
    pub tied: bool,
    /// The number of tokens that attention sees in each layer, including the current one;
    /// `None` for all.
    pub windows: Vec<Option<u32>>,
    /// Tokens that end a completion; may be empty.
    pub end_tokens: Vec<u32>,
    /// The sampling parameters of requests that name none.
    pub sampling_defaults: SamplingDefaults,
}

/// The supported variations of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3.
    Llama,
    /// Mistral, with sliding windows.
    Mistral,
    /// Qwen2 and 2.5, with biases on q, k and v.
    Qwen2,
    /// Qwen3, dense, with norms on the heads of q and k.
    Qwen3,
}

impl Family {
    /// All supported variations, for lookups by name.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// Returns the variation's `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Returns true if q, k and v have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Returns true if the heads of q and k are normalised.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }
}

impl ModelConfig {
    /// Parses and checks the bytes of a `config.json`. Errors contain `path`.
    ///
    /// # Errors
    /// [`ModelError::Json`] or [`ModelError::Field`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let raw: RawConfig = serde_json::from_slice(bytes)
            .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
        Checker { path }.resolve(raw)
    }

    /// Returns the number of rows that have at most this many logits: at least one for
    /// each of 64 sequences.
    pub fn logit_rows(&self, most_logits: u32) -> u32 {
        (most_logits / self.vocabulary.max(1)).max(64)
    }

    /// Returns the width of the queries over all heads.
    pub fn query_width(&self) -> usize {
        self.heads as usize * self.head_dim as usize
    }

    /// Returns the width of the keys over all heads, which is also that of the values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads as usize * self.head_dim as usize
    }
}

/// The fields that matter, in every known spelling.
#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    vocab_size: Option<u64>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    max_position_embeddings: Option<u64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<u64>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<u64>,
    layer_types: Option<Vec<String>>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    quantization_config: Option<serde_json::Value>,
    eos_token_id: Option<TokenIds>,
}

impl Checker<'_> {
    fn resolve(&self, raw: RawConfig) -> Result<ModelConfig, ModelError> {
        let family = self.family(raw.model_type.as_deref())?;
        self.refuse_unsupported(&raw)?;
        let layers = self.size("num_hidden_layers", raw.num_hidden_layers, MAX_LAYERS)?;
        let hidden = self.size("hidden_size", raw.hidden_size, MAX_WIDTH)?;
        let heads = self.size("num_attention_heads", raw.num_attention_heads, MAX_HEADS)?;
        // Files older than grouped-query attention lack the field: every head has its
        // own keys.
        let kv_heads = raw.num_key_value_heads.or(raw.num_attention_heads);
        let kv_heads = self.size("num_key_value_heads", kv_heads, u64::from(heads))?;
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("{kv_heads} does not divide num_attention_heads {heads}");
            return Err(self.field("num_key_value_heads", reason));
        }
        let head_dim = self.head_dim(raw.head_dim, hidden, heads)?;
        let context =
            self.size("max_position_embeddings", raw.max_position_embeddings, MAX_CONTEXT)?;
        let vocabulary = self.size("vocab_size", raw.vocab_size, MAX_VOCABULARY)?;
        Ok(ModelConfig {
            family,
            vocabulary,
            hidden,
            intermediate: self.size("intermediate_size", raw.intermediate_size, MAX_WIDTH)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            context,
            norm_epsilon: self.norm_epsilon(raw.rms_norm_eps)?,
            windows: self.windows(family, layers, &raw)?,
            end_tokens: self.end_tokens(raw.eos_token_id, vocabulary)?,
            sampling_defaults: SamplingDefaults::default(), // in a file of its own
            // The default of this family in transformers.
            tied: raw.tie_word_embeddings.unwrap_or(false),
            rope: rope::resolve(self, raw.rope_theta, raw.rope_scaling, raw.rope_parameters)?,
        })
    }

    fn family(&self, model_type: Option<&str>) -> Result<Family, ModelError> {
        let name = model_type.ok_or_else(|| self.field("model_type", "is missing".to_owned()))?;
        Family::ALL.into_iter().find(|family| family.model_type() == name).ok_or_else(|| {
            let known = Family::ALL.map(Family::model_type).join(", ");
            self.field("model_type", format!("{name:?} is not supported: only {known} are"))
        })
    }

    fn refuse_unsupported(&self, raw: &RawConfig) -> Result<(), ModelError> {
        let refuse = |field, reason: &str| Err(self.field(field, reason.to_owned()));
        if raw.quantization_config.as_ref().is_some_and(|value| !value.is_null()) {
            return refuse("quantization_config", "is set: quantised weights are not supported");
        }
        if let Some(act) = raw.hidden_act.as_deref().filter(|&act| act != "silu" && act != "swish")
        {
            return refuse("hidden_act", &format!("{act:?} is not supported: only silu is"));
        }
        if raw.attention_bias == Some(true) {
            return refuse("attention_bias", "is true: a bias on o_proj is not supported");
        }
        if raw.mlp_bias == Some(true) {
            return refuse("mlp_bias", "is true: it is not supported");
        }
        if raw.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
            return refuse("partial_rotary_factor", "is not 1: it is not supported");
        }
        for (field, dtype) in [("dtype", &raw.dtype), ("torch_dtype", &raw.torch_dtype)] {
            match dtype.as_deref() {
                None | Some("float32" | "float16" | "bfloat16") => {}
                Some(other) => {
                    let known = "float32, float16 and bfloat16";
                    return refuse(field, &format!("{other:?} is not supported: only {known} are"));
                }
            }
        }
        Ok(())
    }

    fn head_dim(&self, given: Option<u64>, hidden: u32, heads: u32) -> Result<u32, ModelError> {
        if given.is_none() && !hidden.is_multiple_of(heads) {
            let reason = format!("{hidden} is not a multiple of num_attention_heads {heads}");
            return Err(self.field("hidden_size", reason));
        }
        let head_dim = given.unwrap_or_else(|| u64::from(hidden / heads));
        let head_dim = self.size("head_dim", Some(head_dim), MAX_HEAD_DIM)?;
        if !head_dim.is_multiple_of(2) {
            return Err(self.field("head_dim", format!("{head_dim} is odd")));
        }
        Ok(head_dim)
    }

    fn norm_epsilon(&self, given: Option<f64>) -> Result<f32, ModelError> {
        // The default of this family in transformers.
        let epsilon = given.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&epsilon) {
            let reason = format!("{epsilon} is not in 0 <= rms_norm_eps < 1");
            return Err(self.field("rms_norm_eps", reason));
        }
        Ok(epsilon as f32)
    }

    /// Returns the attention window of each layer. Newer files list the layers' types;
    /// older Qwen files give the first layer with a window; Mistral has windows in all
    /// layers, and Llama in none.
    fn windows(
        &self,
        family: Family,
        layers: u32,
        raw: &RawConfig,
    ) -> Result<Vec<Option<u32>>, ModelError> {
        let full = vec![None; layers as usize];
        // Qwen files name a window even if it is off; Mistral files omit it.
        let enabled = match family {
            Family::Llama => false,
            Family::Mistral => raw.sliding_window.is_some(),
            Family::Qwen2 | Family::Qwen3 => {
                raw.sliding_window.is_some() && raw.use_sliding_window == Some(true)
            }
        };
        // A window without a layer that uses it is common in Qwen files.
        if !enabled && !raw.layer_types.iter().flatten().any(|kind| kind != "full_attention") {
            return Ok(full);
        }
        let window = self.size("sliding_window", raw.sliding_window, u64::from(u32::MAX))?;
        if let Some(types) = &raw.layer_types {
            if types.len() != layers as usize {
                let reason = format!("names {} layers of {layers}", types.len());
                return Err(self.field("layer_types", reason));
            }
            return types.iter().map(|kind| self.window_of(kind, window)).collect();
        }
        let first = match family {
            // Mistral has the window in every layer, Qwen only from `max_window_layers` on.
            Family::Mistral => 0,
            _ => raw.max_window_layers.unwrap_or(u64::from(layers)),
        };
        Ok((0..u64::from(layers)).map(|layer| (layer >= first).then_some(window)).collect())
    }

    fn window_of(&self, kind: &str, window: u32) -> Result<Option<u32>, ModelError> {
        match kind {
            "full_attention" => Ok(None),
            "sliding_attention" => Ok(Some(window)),
            other => Err(self.field("layer_types", format!("{other:?} is not supported"))),
        }
    }
}

// Far above any model of the family, and far below an overflow of an index.
const MAX_LAYERS: u64 = 1_024;
const MAX_WIDTH: u64 = 1 << 18;
const MAX_HEADS: u64 = 1_024;
const MAX_HEAD_DIM: u64 = 512;
const MAX_VOCABULARY: u64 = 1 << 22;
const MAX_CONTEXT: u64 = 1 << 24;
