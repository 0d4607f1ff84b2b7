//! The names of tensors in the files of this family.

use super::config::ModelConfig;

/// Returns the full name of a layer's tensor.
pub(crate) fn layer_tensor(index: usize, part: &str) -> String {
    format!("model.layers.{index}.{part}")
}

/// Returns the names and rows of the tensors that make queries, keys and values. `kind`
/// is `weight` or `bias`.
pub(crate) fn qkv_parts(config: &ModelConfig, index: usize, kind: &str) -> [(String, usize); 3] {
    let (queries, keys) = (config.query_width(), config.kv_width());
    [("q", queries), ("k", keys), ("v", keys)]
        .map(|(part, rows)| (layer_tensor(index, &format!("self_attn.{part}_proj.{kind}")), rows))
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const NORM: &str = "model.norm.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const INPUT_NORM: &str = "input_layernorm.weight";
pub(crate) const POST_NORM: &str = "post_attention_layernorm.weight";
pub(crate) const QUERIES: &str = "self_attn.q_proj.weight";
pub(crate) const KEYS: &str = "self_attn.k_proj.weight";
pub(crate) const VALUES: &str = "self_attn.v_proj.weight";
pub(crate) const OUTPUT: &str = "self_attn.o_proj.weight";
pub(crate) const Q_NORM: &str = "self_attn.q_norm.weight";
pub(crate) const K_NORM: &str = "self_attn.k_norm.weight";
pub(crate) const GATE: &str = "mlp.gate_proj.weight";
pub(crate) const UP: &str = "mlp.up_proj.weight";
pub(crate) const DOWN: &str = "mlp.down_proj.weight";
