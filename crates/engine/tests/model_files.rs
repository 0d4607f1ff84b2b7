//! Tests of unusable model folders: each gives an error that names the file and the
//! field or tensor.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::error::Error;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::model::{Family, ModelFiles, RopeScaling, SamplingDefaults};
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

#[test]
fn unsupported_config_is_refused_by_field() {
    let folder = tiny();
    let original = read_json(&folder.path().join("config.json"));
    for (change, expected) in [
        (json!({"model_type": "gpt2"}), r#"model_type "gpt2" is not supported"#),
        (json!({"model_type": null}), "model_type is missing"),
        (json!({"hidden_size": null}), "hidden_size is missing"),
        (json!({"hidden_size": 0}), "hidden_size 0 is not between 1 and"),
        (json!({"hidden_size": 1_u64 << 40}), "hidden_size 1099511627776 is not between"),
        (json!({"hidden_size": "64"}), "is malformed"),
        (json!({"num_hidden_layers": 4_000_000}), "num_hidden_layers 4000000 is not between"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads 3 does not divide"),
        (json!({"num_key_value_heads": 8}), "num_key_value_heads 8 is not between 1 and 4"),
        (json!({"head_dim": 15}), "head_dim 15 is odd"),
        (json!({"hidden_size": 66, "head_dim": null}), "hidden_size 66 is not a multiple"),
        (json!({"hidden_act": "gelu"}), r#"hidden_act "gelu" is not supported"#),
        (json!({"attention_bias": true}), "attention_bias is true"),
        (json!({"mlp_bias": true}), "mlp_bias is true"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is not 1"),
        (json!({"quantization_config": {"bits": 4}}), "quantization_config is set"),
        (json!({"torch_dtype": "float8_e4m3fn"}), r#"torch_dtype "float8_e4m3fn" is not"#),
        (json!({"dtype": "int8"}), r#"dtype "int8" is not supported"#),
        (json!({"rms_norm_eps": -1.0}), "rms_norm_eps -1 is not in"),
        (json!({"rope_theta": 0.5}), "rope_theta 0.5 is not a number above 1"),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            r#"rope_scaling has type "yarn""#,
        ),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling lacks factor"),
        (
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 4.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64}}),
            "rope_parameters has high_freq_factor 1 not above low_freq_factor 4",
        ),
        (json!({"eos_token_id": [1, 512]}), "eos_token_id 512 is not below vocab_size 512"),
        (
            json!({"use_sliding_window": true, "sliding_window": 0}),
            "sliding_window 0 is not between",
        ),
        (
            json!({"layer_types": ["sliding_attention"], "sliding_window": 8}),
            "layer_types names 1 layers of 2",
        ),
        (
            json!({"layer_types": ["full_attention", "mamba"], "sliding_window": 8}),
            r#"layer_types "mamba" is not supported"#,
        ),
    ] {
        let mut config = original.clone();
        for (field, value) in change.as_object().unwrap() {
            config[field] = value.clone();
        }
        write_json(&folder.path().join("config.json"), &config);
        refused(folder.path(), &["config.json", expected]);
    }
}

#[test]
fn config_accepts_old_and_new_spellings() {
    let folder = tiny();
    let path = folder.path().join("config.json");
    let original = read_json(&path);
    let llama3 = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 8192.0 };
    for (change, theta, scaling) in [
        (json!({"rope_theta": 5e5, "rope_scaling": llama3}), 5e5, scaling),
        (json!({"rope_theta": null, "rope_parameters": llama3}), 5e5, scaling),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
            1e4,
            RopeScaling::Linear { factor: 2.0 },
        ),
        (json!({"rope_parameters": {"rope_type": "default"}}), 1e4, RopeScaling::None),
    ] {
        let mut config = original.clone();
        for (field, value) in change.as_object().unwrap() {
            config[field] = value.clone();
        }
        write_json(&path, &config);
        let rope = ModelFiles::open(folder.path()).unwrap().config().rope;
        assert_eq!((rope.theta, rope.scaling), (theta, scaling), "{change}");
    }
}

#[test]
fn end_tokens_come_from_both_files() {
    let folder = tiny();
    let path = folder.path().join("config.json");
    let mut config = read_json(&path);
    config["eos_token_id"] = json!(7);
    write_json(&path, &config);
    for (generation, expected) in [
        (json!({"eos_token_id": [9, 7]}), vec![7, 9]),
        (json!({"eos_token_id": 8}), vec![7, 8]),
        (json!({}), vec![7]),
    ] {
        write_json(&folder.path().join("generation_config.json"), &generation);
        let files = ModelFiles::open(folder.path()).unwrap();
        let mut found = files.config().end_tokens.clone();
        found.sort_unstable();
        assert_eq!(found, expected);
    }
    write_json(&folder.path().join("generation_config.json"), &json!({"eos_token_id": 512}));
    refused(folder.path(), &["generation_config.json", "eos_token_id 512"]);
}

#[test]
fn sampling_defaults_come_from_generation_config() {
    let folder = tiny();
    let path = folder.path().join("generation_config.json");
    let none = SamplingDefaults::default();
    for (generation, expected) in [
        (json!({}), none),
        (json!({"do_sample": true}), none),
        (json!({"do_sample": false}), SamplingDefaults { temperature: Some(0.0), ..none }),
        (
            json!({"do_sample": false, "temperature": 0.7, "top_p": 0.9}),
            SamplingDefaults { temperature: Some(0.0), top_p: Some(0.9), ..none },
        ),
        (
            // As Qwen2.5-0.5B-Instruct has it.
            json!({"do_sample": true, "repetition_penalty": 1.1, "temperature": 0.7,
                "top_p": 0.8, "top_k": 20}),
            SamplingDefaults {
                temperature: Some(0.7),
                top_k: Some(20),
                top_p: Some(0.8),
                min_p: None,
                repetition_penalty: Some(1.1),
            },
        ),
        (json!({"min_p": 0.05}), SamplingDefaults { min_p: Some(0.05), ..none }),
        (json!({"temperature": null, "top_k": -1}), SamplingDefaults { top_k: Some(0), ..none }),
    ] {
        write_json(&path, &generation);
        let files = ModelFiles::open(folder.path()).unwrap();
        assert_eq!(files.config().sampling_defaults, expected, "{generation}");
    }
    for (generation, words) in [
        (json!({"temperature": 2.5}), "temperature 2.5 is not between 0 and 2"),
        (json!({"top_p": -0.1}), "top_p -0.1 is not between 0 and 1"),
        (json!({"min_p": 1.5}), "min_p 1.5 is not between 0 and 1"),
        (json!({"top_k": -2}), "top_k -2 is not a number of tokens"),
        (json!({"repetition_penalty": 0}), "repetition_penalty 0 is not between 0.01 and 10"),
    ] {
        write_json(&path, &generation);
        refused(folder.path(), &["generation_config.json", words]);
    }
}

#[test]
fn attention_windows_follow_the_family() {
    let folder = tiny();
    let path = folder.path().join("config.json");
    let original = read_json(&path);
    for (change, expected) in [
        (json!({"sliding_window": 8}), [None, None]),
        (
            json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1}),
            [None, Some(8)],
        ),
        (json!({"model_type": "mistral", "sliding_window": 8}), [Some(8), Some(8)]),
        (json!({"model_type": "llama", "sliding_window": 8}), [None, None]),
        (
            json!({"model_type": "qwen3", "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"]}),
            [Some(8), None],
        ),
    ] {
        let mut config = original.clone();
        for (field, value) in change.as_object().unwrap() {
            config[field] = value.clone();
        }
        write_json(&path, &config);
        let windows = ModelFiles::open(folder.path()).unwrap().config().windows.clone();
        assert_eq!(windows, expected, "{change}");
    }
}

#[test]
fn damaged_weights_are_refused_by_file() {
    let folder = tiny();
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let with_header = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let entry = |shape: &str, offsets: &str| {
        with_header(
            &format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#),
            16,
        )
    };
    for (bytes, expected) in [
        (Vec::new(), "no header"),
        (whole[..4].to_vec(), "no header"),
        (whole[..100].to_vec(), "within its header"),
        (whole[..whole.len() - 2].to_vec(), "the file is torn"),
        (u64::MAX.to_le_bytes().to_vec(), "is more than"),
        (with_header("not json", 0), "header: "),
        (with_header(r#"{"a":{"dtype":"F32"}}"#, 0), "tensor a lacks"),
        (entry("[4]", "[16,0]"), "tensor a ends before it begins"),
        (entry("[4]", "[0,17]"), "tensor a ends at byte 17 of 16"),
        (entry("[5]", "[0,16]"), "tensor a has 16 bytes for shape [5]"),
        (entry("[4294967296,4294967296,4294967296]", "[0,16]"), "tensor a has 16 bytes"),
        (entry("[4]", "[0,18446744073709551615]"), "tensor a ends at byte"),
    ] {
        fs::write(&path, bytes).unwrap();
        refused(folder.path(), &["model.safetensors", expected]);
    }
    fs::remove_file(&path).unwrap();
    refused(folder.path(), &["cannot read weights", "model.safetensors"]);
}

#[test]
fn shards_are_refused_by_file_and_tensor() {
    let folder = tiny();
    let single = folder.path().join("model.safetensors");
    let index = folder.path().join("model.safetensors.index.json");
    fs::rename(&single, folder.path().join("part-1.safetensors")).unwrap();
    let norm = "model.norm.weight";
    for (map, expected) in [
        (json!({}), vec!["index.json", "weight_map is empty"]),
        (json!({norm: "../part-1.safetensors"}), vec!["index.json", "not a plain file name"]),
        (json!({norm: "/etc/passwd"}), vec!["index.json", "not a plain file name"]),
        (json!({norm: "part-2.safetensors"}), vec!["cannot read weights", "part-2.safetensors"]),
        (json!({"x": "part-1.safetensors"}), vec!["part-1.safetensors", "tensor x is missing"]),
        (json!({norm: "part-1.safetensors"}), vec!["tensor model.embed_tokens.weight is missing"]),
    ] {
        write_json(&index, &json!({"weight_map": map}));
        refused(folder.path(), &expected);
    }
    fs::write(&index, "{").unwrap();
    refused(folder.path(), &["index.json is malformed"]);
}

#[test]
fn tensor_of_wrong_shape_is_refused_by_name() {
    let folder = tiny();
    let path = folder.path().join("config.json");
    let mut config = read_json(&path);
    config["intermediate_size"] = json!(97);
    write_json(&path, &config);
    refused(
        folder.path(),
        &["model.safetensors", "mlp.gate_proj.weight has shape [96, 64]", "implies [97, 64]"],
    );
    config["intermediate_size"] = json!(96);
    config["tie_word_embeddings"] = json!(false);
    write_json(&path, &config);
    refused(folder.path(), &["tensor lm_head.weight is missing"]);
    config["tie_word_embeddings"] = json!(true);
    write_json(&path, &config);
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let at = bytes.windows(6).position(|bytes| bytes == b"\"BF16\"").unwrap();
    let mut other = bytes.clone();
    other[at..at + 6].copy_from_slice(b"\"I16\" ");
    fs::write(&file, other).unwrap();
    refused(folder.path(), &["model.safetensors", "is I16: only F32, F16 and BF16"]);
}

#[test]
fn oversized_tokenizer_is_refused() {
    let folder = tiny();
    let files = ModelFiles::open(folder.path()).unwrap();
    assert!(files.check_tokenizer(512).is_ok());
    let error = files.check_tokenizer(513).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("513"), "{error}");
}

#[test]
fn missing_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), &["cannot read", "config.json"]);
    fs::write(folder.path().join("config.json"), "{\n\"model_type\": }").unwrap();
    refused(folder.path(), &["config.json is malformed", "line 2"]);
    fs::write(folder.path().join("config.json"), vec![b' '; (16 << 20) + 1]).unwrap();
    refused(folder.path(), &["config.json is larger than"]);
}

/// Opens and sets up a folder, which must fail with all these words.
fn refused(folder: &Path, words: &[&str]) {
    let options = CpuOptions { threads: 1, kv_tokens: 16, step_tokens: 16, instructions: None };
    let error: Box<dyn Error> = match ModelFiles::open(folder) {
        Err(error) => error.into(),
        Ok(files) => match CpuBackend::new(&files, &options) {
            Err(error) => error.into(),
            Ok(_) => panic!("expected an error with {words:?}"),
        },
    };
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
}

fn tiny() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let spec = ModelSpec { family: Family::Qwen2, ..ModelSpec::tiny() };
    RandomModel { spec, element: Element::Bf16, seed: 1 }.write(folder.path()).unwrap();
    folder
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn write_json(path: &Path, value: &Value) {
    fs::write(path, value.to_string()).unwrap();
}
