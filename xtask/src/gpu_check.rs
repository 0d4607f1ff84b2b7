//! Packs what is needed to see what a GPU makes of tollgate, for a machine with
//! neither Rust nor a network: the programs, the kernels' machine code, and one
//! script that runs everything and writes raw results.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::run::{cargo, check, command, root};
use crate::tools;

/// Bytes that a pack has at most, so that it travels.
const MOST_BYTES: u64 = 60 << 20;

/// Makes `target/gpu-check`.
pub fn pack() -> Result<()> {
    let built = root().join("target/release");
    check(cargo().args(["build", "--release", "--locked", "-p", "tollgate"]))?;
    let example = ["-p", "tollgate-engine", "--example", "gpu_check"];
    check(cargo().args(["build", "--release", "--locked"]).args(example))?;

    let folder = root().join("target/gpu-check");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for (from, name) in [("tollgate", "tollgate"), ("examples/gpu_check", "gpu_check")] {
        let to = folder.join(name);
        fs::copy(built.join(from), &to).with_context(|| format!("copying {from}"))?;
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
        bail!("the pack has {} MiB, more than {}", bytes >> 20, MOST_BYTES >> 20);
    }
    println!(
        "{}: {} MiB; `run --out DIR` there, on a machine with a GPU",
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
