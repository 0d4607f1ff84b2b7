//! Tidiness as a test: walls between crates, module headers, plain words, links and
//! citations in documents.

mod documents;
mod imports;
mod words;

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail};

use self::words::Words;
use crate::run::{command, output, root};

/// Checks the whole checkout and reports everything that is wrong.
///
/// # Errors
/// Every finding, one a line, with its file and line.
pub fn check() -> Result<()> {
    let mut wrong = Vec::new();
    imports::check(&mut wrong)?;
    let mut words = Words::default();
    for file in tracked_files()? {
        let Ok(text) = fs::read_to_string(root().join(&file)) else { continue };
        let path = file.to_string_lossy();
        if path.ends_with(".rs") && !path.contains("/generated/") {
            module_header(&path, &text, &mut wrong);
            imports::sql_library(&path, &text, &mut wrong);
            words.file(&path, &text, &mut wrong);
        }
        if path.ends_with(".md") {
            documents::links(&file, &text, &mut wrong);
            documents::cited_tests(&file, &text, &mut wrong);
        }
    }
    words.finish(&mut wrong);
    if !wrong.is_empty() {
        bail!("{} untidy:\n  {}", wrong.len(), wrong.join("\n  "));
    }
    Ok(())
}

fn module_header(path: &str, text: &str, wrong: &mut Vec<String>) {
    if !text.starts_with("//! ") {
        wrong.push(format!("{path}:1: no module header (`//! ...`)"));
    }
}

fn tracked_files() -> Result<Vec<PathBuf>> {
    let listed = output(command("git").args(["ls-files"]))?;
    Ok(listed.lines().map(PathBuf::from).collect())
}
