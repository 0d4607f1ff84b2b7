//! The demo model. The binary carries its files and writes them to a folder in the
//! data folder, so that a worker loads the demo model like any other.

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

/// Writes the demo model's files below `data` and returns their folder. Leaves
/// files with the right content untouched.
pub fn lay_out(data: &Path) -> Result<PathBuf> {
    lay_out_as(std::process::id(), data)
}

/// Writes the files as [`lay_out`] does. No other writer has the number `writer`.
fn lay_out_as(writer: u32, data: &Path) -> Result<PathBuf> {
    let folder = data.join("models/tollgate-demo");
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(&folder)?;
        for (name, bytes) in FILES {
            let path = folder.join(name);
            if fs::read(&path).is_ok_and(|found| found == bytes) {
                continue;
            }
            // The rename is atomic: a worker must never load a partly written file. Several workers
            // may start on one data folder at once, so each writes a file of its own.
            let unfinished = folder.join(format!("{name}.{writer}.new"));
            fs::write(&unfinished, bytes)?;
            fs::rename(unfinished, path)?;
        }
        Ok(())
    };
    write().with_context(|| format!("cannot write the demo model to {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demo_model_has_many_writers_at_once() {
        let data = tempfile::tempdir().expect("a folder");
        std::thread::scope(|scope| {
            let data = data.path();
            let writing = (0..8).map(|writer| scope.spawn(move || lay_out_as(writer, data)));
            for written in writing.collect::<Vec<_>>() {
                written.join().expect("no panic").expect("writes");
            }
        });
        let folder = data.path().join("models/tollgate-demo");
        assert_eq!(fs::read_dir(&folder).expect("reads").count(), FILES.len());
        for (name, bytes) in FILES {
            assert!(fs::read(folder.join(name)).expect("reads") == bytes, "{name}");
        }
    }
}
