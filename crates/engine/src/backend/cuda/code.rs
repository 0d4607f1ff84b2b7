//! Machine code of the kernels, read from a folder or compiled now and kept.
//!
//! A file's name holds a digest of the sources and options, the target and the
//! compiler. A file begins with a digest of its content, so that a truncated file is
//! detected here and not by the driver. A bundle is a folder of such files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{Context as Hasher, SHA256, digest};

use super::driver::{Compiler, KernelSource};

/// The folders in which machine code and the vendor's libraries are searched.
#[derive(Clone, Debug, Default)]
pub struct CodeFolders {
    /// The folder that keeps compiled code.
    pub kept: PathBuf,
    /// Folders of bundles that were shipped, read only.
    pub bundles: Vec<PathBuf>,
    /// The folders that are searched first for the vendor's libraries.
    pub libraries: Vec<PathBuf>,
}

/// Machine code, and a sentence for the log about its origin.
pub(super) struct Code {
    pub(super) image: Vec<u8>,
    pub(super) origin: String,
}

/// The reasons why there is no machine code.
#[derive(Debug, thiserror::Error)]
pub enum CodeError {
    /// No folder holds the code, and there is no compiler.
    #[error(
        "no kernels for {target}: none in {}, and {reason}; \
         `tollgate worker kernels build` makes them where there is a compiler",
        listing(.looked)
    )]
    Missing {
        /// Name of the target architecture.
        target: String,
        /// The folders that were searched.
        looked: Vec<PathBuf>,
        /// The reason why the code cannot be compiled.
        reason: String,
    },
    /// The compiler refused the sources.
    #[error("no kernels for {target}: {reason}")]
    Compiler {
        /// Name of the target architecture.
        target: String,
        /// The messages of the compiler.
        reason: String,
    },
    /// A bundle's file cannot be written.
    #[error("cannot write kernels to {}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Returns the target architecture for a device of this compute
/// capability.
pub(super) fn target_of((major, minor): (u32, u32)) -> String {
    match (major, minor) {
        (8, _) => "sm_80".to_owned(), // runs on the whole generation
        (9, 0) => "sm_90a".to_owned(),
        _ => format!("sm_{major}{minor}"),
    }
}

/// Returns the code for `target` from one of the folders, or compiles and keeps it.
///
/// # Errors
/// [`CodeError::Missing`] or [`CodeError::Compiler`].
pub(super) fn obtain(
    source: &KernelSource,
    target: &str,
    folders: &CodeFolders,
) -> Result<Code, CodeError> {
    let CodeFolders { kept, bundles, libraries } = folders;
    let looked: Vec<PathBuf> = std::iter::once(kept).chain(bundles).cloned().collect();
    let prefix = prefix(source, target);
    if let Some((path, image)) = looked.iter().find_map(|folder| newest(folder, &prefix)) {
        return Ok(Code { image, origin: format!("kernels from {}", path.display()) });
    }
    let compiler = Compiler::find(libraries).map_err(|reason| CodeError::Missing {
        target: target.to_owned(),
        looked,
        reason,
    })?;
    let image = compile(compiler, source, target)?;
    let path = kept.join(format!("{prefix}{}.cubin", compiler.name()));
    // A full disk must not stop the worker: the next start compiles again.
    let origin = match write(&path, &image) {
        Ok(()) => format!("kernels compiled by {}, kept as {}", compiler.name(), path.display()),
        Err(error) => format!(
            "kernels compiled by {}; they cannot be kept as {}: {error}",
            compiler.name(),
            path.display()
        ),
    };
    Ok(Code { image, origin })
}

/// Compiles the code for every target of a bundle, and returns the written files.
///
/// # Errors
/// [`CodeError::Compiler`] or [`CodeError::Write`].
pub(super) fn build(
    source: &KernelSource,
    out: &Path,
    libraries: &[PathBuf],
) -> Result<Vec<PathBuf>, CodeError> {
    let mut written = Vec::with_capacity(TARGETS.len());
    for target in TARGETS {
        let failed = |reason| CodeError::Compiler { target: target.to_owned(), reason };
        let compiler = Compiler::find(libraries).map_err(failed)?;
        let image = compile(compiler, source, target)?;
        let path = out.join(format!("{}{}.cubin", prefix(source, target), compiler.name()));
        write(&path, &image)
            .map_err(|error| CodeError::Write { path: path.clone(), source: error })?;
        written.push(path);
    }
    Ok(written)
}

fn compile(compiler: Compiler, source: &KernelSource, target: &str) -> Result<Vec<u8>, CodeError> {
    compiler
        .compile(source, &options(source, target))
        .map_err(|reason| CodeError::Compiler { target: target.to_owned(), reason })
}

fn options(source: &KernelSource, target: &str) -> Vec<String> {
    let fixed = source.options.iter().map(|&option| option.to_owned());
    fixed.chain([format!("--gpu-architecture={target}")]).collect()
}

/// Returns the part of a file's name that depends on the sources, the options and the
/// target.
fn prefix(source: &KernelSource, target: &str) -> String {
    let mut hasher = Hasher::new(&SHA256);
    let mut feed = |text: &str| {
        // The length keeps texts apart: "ab" + "c" must not hash like "a" + "bc".
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    feed(source.name);
    feed(source.text);
    for (name, text) in source.headers {
        feed(name);
        feed(text);
    }
    for option in options(source, target) {
        feed(&option);
    }
    let hash: String =
        hasher.finish().as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{hash}-{target}-")
}

/// Returns the intact file with this prefix that was made by the newest compiler.
fn newest(folder: &Path, prefix: &str) -> Option<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(folder).ok()?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(prefix) && name.ends_with(".cubin")
        })
        .collect();
    // The name ends with the compiler's version, so the last file is the newest.
    files.sort_unstable();
    files.into_iter().rev().find_map(|path| {
        let image = read(&path)?;
        Some((path, image))
    })
}

/// Returns the code in a file, or `None` if the file is damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    if fs::metadata(path).ok()?.len() > MOST_BYTES {
        return None;
    }
    let bytes = fs::read(path).ok()?;
    let (sum, image) = bytes.split_at_checked(SUM_BYTES)?;
    (digest(&SHA256, image).as_ref() == sum).then(|| image.to_vec())
}

/// Writes the file atomically: another process reads the whole file or no file.
fn write(path: &Path, image: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    // The process id keeps two workers that compile at the same time apart.
    let draft = path.with_extension(format!("draft-{}", std::process::id()));
    let mut bytes = digest(&SHA256, image).as_ref().to_vec();
    bytes.extend_from_slice(image);
    fs::write(&draft, bytes)?;
    fs::rename(&draft, path)
}

fn listing(folders: &[PathBuf]) -> String {
    let names: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    names.join(" or ")
}

/// The targets of a bundle: all device generations since the A100.
const TARGETS: [&str; 2] = ["sm_80", "sm_90a"];
const SUM_BYTES: usize = 32;
/// The size of a file above which it cannot be a file of kernels.
const MOST_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: KernelSource = KernelSource {
        name: "k.cu",
        text: "text",
        headers: &[("h.h", "header")],
        options: &["-x"],
    };

    #[test]
    fn capabilities_map_to_targets() {
        for (capability, target) in
            [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90a"), ((10, 3), "sm_103")]
        {
            assert_eq!(target_of(capability), target);
        }
    }

    #[test]
    fn file_names_depend_on_sources_and_targets() {
        let other = KernelSource { headers: &[("h.h", "Header")], ..SOURCE };
        assert_ne!(prefix(&SOURCE, "sm_80"), prefix(&other, "sm_80"));
        assert_ne!(prefix(&SOURCE, "sm_80")[..16], prefix(&SOURCE, "sm_90a")[..16]);
    }

    #[test]
    fn intact_files_are_found_and_damaged_ones_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let start = prefix(&SOURCE, "sm_80");
        let path = |compiler: &str| folder.path().join(format!("{start}{compiler}.cubin"));
        write(&path("nvrtc12.8"), b"old").unwrap();
        write(&path("nvrtc13.0"), b"new").unwrap();
        fs::write(folder.path().join(format!("{}x.cubin", prefix(&SOURCE, "sm_90a"))), "no")
            .unwrap();
        let found = || newest(folder.path(), &start).map(|(_, image)| image);
        assert_eq!(found(), Some(b"new".to_vec()));
        let mut torn = fs::read(path("nvrtc13.0")).unwrap();
        torn.pop();
        fs::write(path("nvrtc13.0"), torn).unwrap();
        assert_eq!(found(), Some(b"old".to_vec()));
        fs::write(path("nvrtc12.8"), "short").unwrap();
        assert_eq!(found(), None);
        assert_eq!(newest(&folder.path().join("nowhere"), &start).map(|(path, _)| path), None);
    }
}
