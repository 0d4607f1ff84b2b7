//! Fuzz targets: functions of bytes that call every reader of hostile input and
//! assert what must hold. The gate replays and mutates the corpora; cargo-fuzz runs
//! the same functions on demand.

#![allow(clippy::expect_used, reason = "a panic is how a fuzz target reports")]

mod config;
mod credentials;
mod forms;
mod model_files;
pub mod mutate;
mod requests;
mod sse;
mod text;
mod wire;

use std::fs;
use std::path::{Path, PathBuf};

use tollgate_edge::fuzz as edge;
use tollgate_gateway::fuzz as gateway;

/// A target. The function panics if a property does not hold.
pub type Target = fn(&[u8]);

/// All targets, by the names of their corpora.
pub const TARGETS: [(&str, Target); 22] = [
    ("proxy_header", edge::proxy_header),
    ("request_head", edge::request_head),
    ("chat_body", requests::chat_body),
    ("completion_body", requests::completion_body),
    ("upload_form", gateway::upload_form),
    ("batch_lines", requests::batch_lines),
    ("schema", forms::schema),
    ("credential", credentials::credential),
    ("claims", gateway::claims),
    ("config", config::config),
    ("model_config", model_files::config),
    ("safetensors", model_files::safetensors),
    ("tokenizer_file", text::tokenizer_file),
    ("template", text::template),
    ("prompt", text::prompt),
    ("chat", text::chat),
    ("answer", text::answer),
    ("cost_table", wire::cost_table),
    ("journal_block", wire::journal_block),
    ("journal_judged", wire::journal_judged),
    ("run_events", wire::run_events),
    ("sse", sse::events),
];

/// Returns the target with that name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|&(_, target)| target)
}

/// Returns the folder of a target's corpus.
pub fn corpus_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name)
}

/// Returns the inputs of a target's corpus, ordered by file name, after an empty
/// input.
///
/// # Errors
/// The corpus cannot be read.
pub fn corpus(name: &str) -> std::io::Result<Vec<Vec<u8>>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(corpus_folder(name))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    paths.sort();
    let mut inputs = vec![Vec::new()];
    for path in paths {
        inputs.push(fs::read(path)?);
    }
    Ok(inputs)
}
