//! The walls between crates: the crates that each crate may depend on, and the
//! packages that must never reach a crate.

use std::fs;

use anyhow::{Context, Result};

use crate::run::root;

/// The crates of this workspace that each crate may depend on. ARCHITECTURE.md
/// gives the reason for each wall.
const MAY_IMPORT: [(&str, &[&str]); 21] = [
    ("crates/domain", &[]),
    ("crates/edge", &["domain"]),
    ("crates/text", &["domain"]),
    ("crates/admission", &["domain", "cluster"]),
    ("crates/cluster", &[]),
    ("crates/rates", &["cluster"]),
    ("crates/sql", &[]),
    ("crates/ledger", &["domain", "sql", "cluster"]),
    ("crates/auditor", &[]), // judges what the ledger writes, and shares no line with it
    ("crates/wire", &["domain"]),
    ("crates/engine", &["domain"]),
    ("crates/openai", &["domain", "text"]),
    ("crates/jobs", &["domain", "sql"]),
    (
        "crates/serving",
        &["domain", "text", "admission", "cluster", "ledger", "rates", "wire", "config"],
    ),
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
            "rates",
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
    (
        ".",
        &[
            "domain", "auditor", "config", "gateway", "ledger", "loadtest", "rates", "sql", "wire",
            "worker",
        ],
    ),
];

/// The packages that a crate must never depend on, by prefix.
const MUST_NOT_REACH: [(&str, &[&str]); 12] = [
    ("gateway", &["cudarc", "nvml-wrapper", "safetensors"]),
    ("worker", &["axum", "hyper-util"]),
    ("crates/admission", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/sql", &["axum", "tonic", "hyper"]),
    ("crates/ledger", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/engine", &["axum", "tonic", "tokio", "hyper"]),
    ("crates/serving", &["axum", "http", "hyper"]),
    ("crates/jobs", &["axum", "http", "hyper", "tonic"]),
    ("crates/openai", &["axum", "http", "tonic", "tokio", "hyper"]),
    ("crates/edge", &["axum", "tonic", "serde"]),
    ("crates/auditor", &["tollgate-", "axum", "tonic", "tokio", "hyper"]),
    ("loadtest", &["tollgate-"]),
];

/// The library of SQLite, the only crates that may depend on it, and the folder of each that
/// may name it. Another database can stand behind such a folder.
const SQL_LIBRARY: &str = "rusqlite";
const SQL_FOLDERS: [(&str, &str); 3] =
    [("crates/sql", "src"), ("crates/ledger", "src/rows"), ("crates/jobs", "src/rows")];

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
        if depends && !SQL_FOLDERS.iter().any(|(may, _)| *may == folder) {
            let crates = SQL_FOLDERS.map(|(folder, _)| folder).join(", ");
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
    let found = SQL_FOLDERS.iter().find_map(|(of, folder)| {
        let file = path.strip_prefix(of)?.strip_prefix('/')?;
        file.starts_with("src/").then_some((file, folder))
    });
    let Some((file, folder)) = found else { return };
    let may_name = file.starts_with(&format!("{folder}/"))
        || file == format!("{folder}.rs")
        || file.starts_with("src/tests/");
    let Some(line) = text.lines().position(|line| line.contains(SQL_LIBRARY)) else { return };
    if !may_name {
        wrong.push(format!(
            "{path}:{}: must not name {SQL_LIBRARY}: SQL stands in {folder}",
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
