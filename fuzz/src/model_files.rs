//! Hostile model files: the config and the header of the weights are either read
//! within bounds or refused, and no tensor reaches beyond its file.

use std::fs;
use std::path::Path;

use tollgate_engine::model::ModelConfig;
use tollgate_engine::weights::Weights;

pub(crate) fn config(data: &[u8]) {
    let Ok(config) = ModelConfig::parse(Path::new("config.json"), data) else { return };
    assert!(config.layers > 0 && config.heads > 0 && config.kv_heads > 0);
    assert!(config.heads.is_multiple_of(config.kv_heads) && config.head_dim.is_multiple_of(2));
    assert!(config.vocabulary > 0 && config.context > 0 && config.hidden > 0);
    assert!(config.end_tokens.iter().all(|&token| token < config.vocabulary));
    assert!(config.windows.len() == config.layers as usize);
    assert!(config.norm_epsilon.is_finite());
    // Products of these figures must fit their types.
    let width = config.query_width().max(config.kv_width());
    assert!(width < 1 << 32 && width > 0);
}

pub(crate) fn safetensors(data: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, data).expect("writes");
    let Ok(weights) = Weights::open(folder.path()) else { return };
    let inside = data.as_ptr_range().end as usize - data.as_ptr_range().start as usize;
    for shape in [&[4_usize][..], &[2, 2], &[1, 4]] {
        for name in ["a", "weight", "model.embed_tokens.weight"] {
            let Ok(tensor) = weights.tensor(name, shape) else { continue };
            assert_eq!(tensor.bytes.len(), 4 * tensor.element.size(), "{name}");
            assert!(tensor.bytes.len() <= inside);
            let mut values = [0.0; 4];
            tensor.read(0..4, &mut values);
        }
    }
}
