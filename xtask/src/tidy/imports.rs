//! The walls between crates: the crates that each crate may depend on, and the
//! packages that must never reach a crate.

use std::fs;

use anyhow::{Context, Result};

use crate::run::root;

/// The crates of this workspace that each crate may depend on. ARCHITECTURE.md
/// gives the reason for each wall.
const MAY_IMPORT: [(&str, &[&str]); 19] = [
    ("crates/domain", &[]),
    ("crates/edge", &["domain"]),
    ("crates/text", &["domain"]),
    ("crates/admission", &["domain"]),
    ("crates/cluster", &[]),
    ("crates/ledger", &["domain"]),
    ("crates/auditor", &[]), // judges what the ledger writes, and shares no line with it
    ("crates/wire", &["domain"]),
    ("crates/engine", &["domain"]),
    ("crates/openai", &["domain", "text"]),
    ("crates/jobs", &["domain"]),
    ("crates/serving", &["domain", "text", "admission", "ledger", "wire", "config"]),
    ("config", &["domain"]),
    (
        "gateway",
        &[
            "domain",
            "edge",
            "text",
            "admission",
            "ledger",
            "jobs",
            "openai",
            "serving",
            "wire",
            "config",
        ],
    ),
    ("worker", &["domain", "text", "wire", "engine", "config"]),
    ("loadtest", &[]),
    (
        "fuzz",
        &["domain", "edge", "text", "wire", "engine", "openai", "config", "gateway", "loadtest"],
    ),
    ("xtask", &[]),
    (".", &["domain", "auditor", "config", "gateway", "ledger", "loadtest", "wire", "worker"]),
];

/// The packages that a crate must never depend on, by prefix.
const MUST_NOT_REACH: [(&str, &[&str]); 11] = [
    ("gateway", &["cudarc", "nvml-wrapper", "safetensors"]),
    ("worker", &["axum", "hyper-util"]),
    ("crates/admission", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/ledger", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/engine", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/serving", &["axum", "http", "hyper"]),
    ("crates/jobs", &["axum", "http", "hyper", "tonic"]),
    ("crates/openai", &["axum", "http", "tonic", "tokio", "hyper"]),
    ("crates/edge", &["axum", "tonic", "serde"]),
    ("crates/auditor", &["tollgate-", "axum", "tonic", "tokio", "hyper"]),
    ("loadtest", &["tollgate-"]),
];

/// The library of the database, the only crates that may depend on it, and the folder of
/// each that may name it. Another database can stand behind such a folder.
const SQL_LIBRARY: &str = "rusqlite";
const SQL_CRATES: [&str; 2] = ["crates/ledger", "crates/jobs"];
const SQL_FOLDER: &str = "src/rows";

/// Compares every manifest with the tables above.
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
    for (folder, _) in MAY_IMPORT {
        let depends = direct_dependencies(folder)?.iter().any(|name| name == SQL_LIBRARY);
        if depends && !SQL_CRATES.contains(&folder) {
            let crates = SQL_CRATES.join(" and ");
            wrong.push(format!(
                "{folder}/Cargo.toml: must not depend on {SQL_LIBRARY}: SQL stands in {crates}"
            ));
        }
    }
    Ok(())
}

/// Checks that a source file outside of the folders of SQL does not name the library of
/// the database. Tests may.
pub(super) fn sql_library(path: &str, text: &str, wrong: &mut Vec<String>) {
    let file = SQL_CRATES.iter().find_map(|folder| path.strip_prefix(folder)?.strip_prefix('/'));
    let Some(file) = file.filter(|file| file.starts_with("src/")) else { return };
    let may_name = file.starts_with(&format!("{SQL_FOLDER}/"))
        || file == format!("{SQL_FOLDER}.rs")
        || file.starts_with("src/tests/");
    let Some(line) = text.lines().position(|line| line.contains(SQL_LIBRARY)) else { return };
    if !may_name {
        wrong.push(format!(
            "{path}:{}: must not name {SQL_LIBRARY}: SQL stands in {SQL_FOLDER}",
            line + 1
        ));
    }
}

/// Returns the names under `[dependencies]`. Dependencies of tests build no wall.
fn direct_dependencies(folder: &str) -> Result<Vec<String>> {
    let path = root().join(folder).join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let manifest: toml::Table = text.parse().with_context(|| path.display().to_string())?;
    let table = manifest.get("dependencies").and_then(toml::Value::as_table);
    Ok(table.map(|table| table.keys().cloned().collect()).unwrap_or_default())
}
