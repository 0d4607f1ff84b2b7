//! Tidiness as a test: who may import whom, every file says what room it is,
//! links in documents lead somewhere.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::run::{command, output, root};

/// Each crate and the crates of ours that it may depend on. A wall that is
/// not here does not exist; ARCHITECTURE.md says why each stands.
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

/// Crates that must never reach a package, and the packages, by prefix.
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

/// Checks the whole checkout and reports everything that is wrong.
pub fn check() -> Result<()> {
    let mut wrong = Vec::new();
    import_directions(&mut wrong)?;
    for file in tracked_files()? {
        let Ok(text) = fs::read_to_string(root().join(&file)) else { continue };
        let path = file.to_string_lossy();
        if path.ends_with(".rs") && !path.contains("/generated/") {
            module_header(&path, &text, &mut wrong);
        }
        if path.ends_with(".md") {
            links(&file, &text, &mut wrong);
        }
    }
    if !wrong.is_empty() {
        bail!("{} untidy:\n  {}", wrong.len(), wrong.join("\n  "));
    }
    Ok(())
}

fn import_directions(wrong: &mut Vec<String>) -> Result<()> {
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

/// The names under `[dependencies]`; what only tests use builds no wall.
fn direct_dependencies(folder: &str) -> Result<Vec<String>> {
    let path = root().join(folder).join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let manifest: toml::Table = text.parse().with_context(|| path.display().to_string())?;
    let table = manifest.get("dependencies").and_then(toml::Value::as_table);
    Ok(table.map(|table| table.keys().cloned().collect()).unwrap_or_default())
}

fn module_header(path: &str, text: &str, wrong: &mut Vec<String>) {
    if !text.starts_with("//! ") {
        wrong.push(format!("{path}:1: no module header (`//! what room this is`)"));
    }
}

/// Checks that relative links lead to a file or folder of the checkout, and
/// that the part after `#` is a heading of a document.
fn links(file: &Path, text: &str, wrong: &mut Vec<String>) {
    let folder = root().join(file.parent().unwrap_or(Path::new("")));
    for (number, line) in text.lines().enumerate() {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            if path.contains("://") || path.starts_with("mailto:") {
                continue;
            }
            // A link without a path stays within its own document.
            let linked = if path.is_empty() { root().join(file) } else { folder.join(path) };
            let found = match fs::read_to_string(&linked) {
                Ok(text) if !anchor.is_empty() && path_is_document(&linked) => {
                    text.lines().any(|line| heading_anchor(line).as_deref() == Some(anchor))
                }
                _ => linked.exists(),
            };
            if !found {
                wrong.push(format!("{}:{}: link to {target}", file.display(), number + 1));
            }
        }
    }
}

fn path_is_document(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// Returns the anchor that code hosts make of a heading: lower case, spaces as
/// hyphens, punctuation dropped.
fn heading_anchor(line: &str) -> Option<String> {
    let title = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))?;
    let kept = title.trim().chars().filter(|&c| c.is_alphanumeric() || " -_".contains(c));
    Some(kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect())
}

fn tracked_files() -> Result<Vec<PathBuf>> {
    let listed = output(command("git").args(["ls-files"]))?;
    Ok(listed.lines().map(PathBuf::from).collect())
}
