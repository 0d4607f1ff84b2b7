//! Packs a folder that tests tollgate on a GPU machine without Rust and without a
//! network: the programs, the kernels' machine code, and one script that runs all
//! checks and writes raw results.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::run::{cargo, check, command, target};
use crate::tools;

/// The largest pack in bytes, so that it can be copied to another machine.
const MOST_BYTES: u64 = 60 << 20;

/// Builds the folder `target/gpu-check`.
///
/// # Errors
///
/// A build or a copy failed, or the pack is larger than [`MOST_BYTES`].
pub fn pack() -> Result<()> {
    let built = target().join("release");
    check(cargo().args(["build", "--release", "--locked", "-p", "tollgate"]))?;
    let example = ["-p", "tollgate-engine", "--example", "gpu_check"];
    check(cargo().args(["build", "--release", "--locked"]).args(example))?;

    // A file of an earlier pack must not travel with this one.
    let folder = target().join("gpu-check");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for (from, name) in [("tollgate", "tollgate"), ("examples/gpu_check", "gpu_check")] {
        let to = folder.join(name);
        fs::copy(built.join(from), &to).with_context(|| format!("copying {from}"))?;
        // Debug symbols are most of a program's bytes.
        check(command("strip").arg(&to))?;
    }
    let mut kernels = command(&folder.join("tollgate").to_string_lossy());
    kernels.args(["worker", "kernels", "build", "--out"]).arg(folder.join("kernels"));
    check(kernels.arg("--libraries").arg(tools::nvrtc()?))?;
    let script = folder.join("run");
    fs::write(&script, include_str!("gpu_check/run.sh"))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    fs::write(folder.join("peer.py"), include_str!("gpu_check/peer.py"))?;

    let bytes = size(&folder)?;
    if bytes > MOST_BYTES {
        bail!("the pack has {} MiB, more than the {} MiB allowed", bytes >> 20, MOST_BYTES >> 20);
    }
    println!(
        "{}: {} MiB; copy it to a machine with a GPU and run `run --out DIR` there",
        folder.display(),
        bytes >> 20
    );
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { size(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
