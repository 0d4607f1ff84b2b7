//! Reference logits, written by transformers in a Python environment of their own. The
//! gate compares with the committed files and does not need that environment.

use anyhow::Result;

use crate::run::{check, command, root, target};

/// Runs `models/train/goldens.py` in a Python environment, which is made if missing.
///
/// # Errors
///
/// A command failed.
pub fn write() -> Result<()> {
    let folder = target().join("tools/goldens");
    let python = folder.join("bin/python");
    if !python.exists() {
        check(command("python3").args(["-m", "venv"]).arg(&folder))?;
    }
    // pip runs each time: it installs the pinned versions after a change of the file.
    let requirements = root().join("models/train/requirements.txt");
    check(
        command(&python.to_string_lossy())
            .args(["-m", "pip", "install", "-q", "-r"])
            .arg(requirements),
    )?;
    check(command(&python.to_string_lossy()).arg("models/train/goldens.py"))
}
