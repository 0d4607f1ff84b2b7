//! Builds stand-ins for the vendor's libraries with g++. A process that loads them runs
//! the engine's own code, from the probe to the last event; only the hardware is
//! missing.

#[path = "../../src/backend/cuda/kernels/fused.rs"]
mod fused;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ENGINE;
use fused::fused;

/// A library of the vendor.
#[derive(Clone, Copy)]
pub enum Part {
    /// `driver.cpp`, with the emulated kernels unless a macro excludes them.
    Driver,
    /// `compiler.cpp`, a compiler that compiles nothing.
    Compiler,
    /// `blas.cpp`, the library of matrix products.
    Blas,
}

impl Part {
    fn source(self) -> &'static str {
        match self {
            Self::Driver => "driver.cpp",
            Self::Compiler => "compiler.cpp",
            Self::Blas => "blas.cpp",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so",
            Self::Compiler => "libnvrtc.so",
            Self::Blas => "libcublasLt.so",
        }
    }
}

/// Builds a library into `folder`, under the name that the loader looks for.
pub fn build(part: Part, folder: &Path, macros: &[&str]) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    let here = Path::new(ENGINE);
    let out = folder.join(part.name());
    let draft = folder.join(format!("{}.{}", part.name(), std::process::id()));
    let output = Command::new("g++")
        .args(["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-w"])
        .args(fused())
        .args(macros.iter().map(|name| format!("-D{name}")))
        .arg(format!("-Wl,-soname,{}", part.name()))
        .arg("-I")
        .arg(here.join("src/backend/cuda/kernels"))
        .arg("-o")
        .arg(&draft)
        .arg(here.join("tests/cuda").join(part.source()))
        .output()
        .expect("g++ runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(draft, &out).unwrap(); // another process may build the same
    out
}

/// Returns a folder for the libraries of this test program.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}
