//! The walls between crates: the crates that each crate may depend on, and the
//! packages that must never reach a crate.

use std::fs;

use anyhow::{Context, Result};

use crate::run::root;

/// The crates of this workspace that each crate may depend on. ARCHITECTURE.md
/// gives the reason for each wall.
const MAY_IMPORT: [(&str, &[&str]); 17] = [
    ("crates/domain", &[]),
    ("crates/edge", &["domain"]),
    ("crates/text", &["domain"]),
    ("crates/admission", &["domain"]),
    ("crates/ledger", &["domain"]),
    ("crates/auditor", &[]), // judges what the ledger writes, and shares no line with it
    ("crates/wire", &["domain"]),
    ("crates/engine", &["domain"]),
    ("crates/openai", &["domain", "text"]),
    ("crates/serving", &["domain", "text", "admission", "ledger", "wire", "config"]),
    ("config", &["domain"]),
    (
        "gateway",
        &["domain", "edge", "text", "admission", "ledger", "openai", "serving", "wire", "config"],
    ),
    ("worker", &["domain", "text", "wire", "engine", "config"]),
    ("loadtest", &[]),
    (
        "fuzz",
        &["domain", "edge", "text", "wire", "engine", "openai", "config", "gateway", "loadtest"],
    ),
    ("xtask", &[]),
    (".", &["domain", "auditor", "config", "gateway", "ledger", "loadtest", "worker"]),
];

/// The packages that a crate must never depend on, by prefix.
const MUST_NOT_REACH: [(&str, &[&str]); 10] = [
    ("gateway", &["cudarc", "nvml-wrapper", "safetensors"]),
    ("worker", &["axum", "rusqlite", "hyper-util"]),
    ("crates/admission", &["axum", "tonic", "tokio", "hyper", "rusqlite"]),
    ("crates/ledger", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/engine", &["axum", "tonic", "tokio", "hyper", "rusqlite"]),
    ("crates/serving", &["axum", "http", "hyper"]),
    ("crates/openai", &["axum", "http", "tonic", "tokio", "hyper", "rusqlite"]),
    ("crates/edge", &["axum", "tonic", "rusqlite", "serde"]),
    ("crates/auditor", &["tollgate-", "axum", "tonic", "tokio", "hyper", "rusqlite"]),
    ("loadtest", &["tollgate-", "rusqlite"]),
];

/// Compares every manifest with the two tables above.
pub(super) fn check(wrong: &mut Vec<String>) -> Result<()> {
    for (folder, allowed) in MAY_IMPORT {
        for dependency in direct_dependencies(folder)? {
            if let Some(ours) = dependency.strip_prefix("tollgate-")
                && !allowed.contains(&ours)
            {
                wrong.push(format!("{folder}/Cargo.toml: must not depend on tollgate-{ours}"));
            }
        }
    }
    for (folder, forbidden) in MUST_NOT_REACH {
        for dependency in direct_dependencies(folder)? {
            if forbidden.iter().any(|prefix| dependency.starts_with(prefix)) {
                wrong.push(format!("{folder}/Cargo.toml: must not depend on {dependency}"));
            }
        }
    }
    Ok(())
}

/// Returns the names under `[dependencies]`. Dependencies of tests build no wall.
fn direct_dependencies(folder: &str) -> Result<Vec<String>> {
    let path = root().join(folder).join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let manifest: toml::Table = text.parse().with_context(|| path.display().to_string())?;
    let table = manifest.get("dependencies").and_then(toml::Value::as_table);
    Ok(table.map(|table| table.keys().cloned().collect()).unwrap_or_default())
}
