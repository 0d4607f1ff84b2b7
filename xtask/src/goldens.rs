//! Reference logits, written anew with transformers in an environment of
//! their own; the gate compares against the committed files and needs none.

use anyhow::Result;

use crate::run::{check, command, root};

/// Runs `models/train/goldens.py` in a fresh or kept Python environment.
pub fn write() -> Result<()> {
    let folder = root().join("target/tools/goldens");
    let python = folder.join("bin/python");
    if !python.exists() {
        check(command("python3").args(["-m", "venv"]).arg(&folder))?;
    }
    let requirements = root().join("models/train/requirements.txt");
    check(
        command(&python.to_string_lossy())
            .args(["-m", "pip", "install", "-q", "-r"])
            .arg(requirements),
    )?;
    check(command(&python.to_string_lossy()).arg("models/train/goldens.py"))
}
