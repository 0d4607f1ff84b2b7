//! The model that comes along, carried in the binary and laid out as a folder
//! in the data folder, so that a worker loads it like any other.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

macro_rules! files {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_bytes!(concat!("../../models/tollgate-demo/", $name)) as &[u8])),+]
    };
}

const FILES: [(&str, &[u8]); 5] = files![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Makes sure that the folder under `data` holds the model, and returns it.
/// Files that are there and right are left alone.
pub fn lay_out(data: &Path) -> Result<PathBuf> {
    let folder = data.join("models/tollgate-demo");
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(&folder)?;
        for (name, bytes) in FILES {
            let path = folder.join(name);
            if fs::read(&path).is_ok_and(|found| found == bytes) {
                continue;
            }
            // Under another name first: a torn write must not be loaded.
            let unfinished = folder.join(format!("{name}.new"));
            fs::write(&unfinished, bytes)?;
            fs::rename(unfinished, path)?;
        }
        Ok(())
    };
    write().with_context(|| format!("could not lay out the model in {}", folder.display()))?;
    Ok(folder)
}
