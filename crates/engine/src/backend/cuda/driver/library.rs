//! The search for the vendor's libraries and a check of their symbols.
//!
//! cudarc finds libraries by the loader's names and panics over the first missing
//! symbol. Therefore this module searches more folders first, and looks up every symbol
//! that the crate calls. A library that is found stays loaded, so that the loader gives
//! the same one to cudarc.

use std::cmp::Reverse;
use std::fmt;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};

/// A library that is loaded at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// The driver's library, which only the driver's package contains.
    Driver,
    /// NVRTC, the CUDA compiler.
    Nvrtc,
    /// The vendor's matrix products.
    BlasLt,
}

/// The reasons why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LibraryFault {
    /// The library is in none of the folders.
    #[error("{0} was not found")]
    Missing(Library),
    /// The library lacks a symbol that the crate calls.
    #[error("{library} lacks {symbol}")]
    Symbol {
        /// The incomplete library.
        library: Library,
        /// The first missing symbol.
        symbol: &'static str,
    },
}

/// Checks that the loader finds the library and every symbol in it.
///
/// # Errors
/// [`LibraryFault`] with the first thing that is missing.
pub(crate) fn check(library: Library) -> Result<(), LibraryFault> {
    // SAFETY: the vendor's libraries run no code of note when they are loaded.
    let is_there = unsafe {
        match library {
            Library::Driver => driver::sys::is_culib_present(),
            Library::Nvrtc => nvrtc::sys::is_culib_present(),
            Library::BlasLt => cublaslt::sys::is_culib_present(),
        }
    };
    if !is_there {
        return Err(LibraryFault::Missing(library));
    }
    // SAFETY: the library is present, so none of these calls panics.
    let loaded = unsafe {
        match library {
            Library::Driver => driver::sys::culib(),
            Library::Nvrtc => nvrtc::sys::culib(),
            Library::BlasLt => cublaslt::sys::culib(),
        }
    };
    let lacks = |symbol: &&&'static str| {
        // SAFETY: the symbol is looked up and not called.
        unsafe { loaded.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err()
    };
    match library.symbols().iter().find(lacks) {
        Some(symbol) => Err(LibraryFault::Symbol { library, symbol }),
        None => Ok(()),
    }
}

/// Checks a library like [`check`]. If the loader does not find it by name, `folders`
/// are searched first, then the usual folders of toolkits and Python wheels.
///
/// # Errors
/// [`LibraryFault`] with the first thing that is missing.
pub(crate) fn find(library: Library, folders: &[PathBuf]) -> Result<(), LibraryFault> {
    let given = folders.iter().any(|folder| load_from(folder, library));
    if !given && check(library) == Err(LibraryFault::Missing(library)) {
        usual_folders().iter().any(|folder| load_from(folder, library));
    }
    check(library)
}

/// Loads the library from a folder for the rest of the process, and its helper
/// libraries before it: NVRTC does not search its own folder for them.
fn load_from(folder: &Path, library: Library) -> bool {
    let files = entries(folder)
        .into_iter()
        .filter(|path| file_name(path).starts_with(library.file_stem()))
        .collect();
    let mut is_loaded = false;
    for file in in_load_order(files) {
        let is_helper = file_name(&file).contains("-builtins");
        if is_loaded && !is_helper {
            break;
        }
        // SAFETY: the file's name and folder say that it is the vendor's library; an
        // administrator chose the folder.
        if let Ok(loaded) = unsafe { libloading::Library::new(&file) } {
            std::mem::forget(loaded); // the library stays loaded for the whole process
            is_loaded |= !is_helper;
        }
    }
    is_loaded
}

/// Sorts the files of one library: `libnvrtc-builtins.so...` comes before `libnvrtc.so...`,
/// and newer versions before older ones.
fn in_load_order(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    files.sort_by_cached_key(|path| {
        let name = file_name(path);
        let (stem, version) = name.split_once(".so").unwrap_or((name, ""));
        // By number, because as a text `9` comes after `12`.
        let version: Vec<u32> =
            version.split('.').filter_map(|number| number.parse().ok()).collect();
        (!stem.contains("-builtins"), stem.to_owned(), Reverse(version))
    });
    files
}

/// Returns the folders in which toolkits and Python wheels install the vendor's
/// libraries.
fn usual_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = entries(Path::new("/usr/local"))
        .into_iter()
        .filter(|path| file_name(path).starts_with("cuda"))
        .map(|path| path.join("lib64"))
        .collect();
    let pythons = ["/usr/lib", "/usr/local/lib"].map(PathBuf::from);
    for base in pythons.into_iter().chain(pythons_in(Path::new("/opt"))) {
        folders.extend(wheels_in(&base));
    }
    folders
}

/// Returns the `lib` folder of every Python below a folder: `conda`, `venv`,
/// `app/.venv`.
fn pythons_in(folder: &Path) -> Vec<PathBuf> {
    let apart = |path: PathBuf| ["lib", ".venv/lib", "venv/lib"].map(|lib| path.join(lib));
    entries(folder).into_iter().flat_map(apart).collect()
}

/// Returns the library folders of wheels below a Python's `lib` folder.
fn wheels_in(base: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let pythons = entries(base).into_iter();
    for python in pythons.filter(|path| file_name(path).starts_with("python3")) {
        for packages in ["site-packages", "dist-packages"] {
            let wheels = entries(&python.join(packages).join("nvidia"));
            folders.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
        }
    }
    folders
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    // A system lists entries in any order, and the first library that loads is used.
    paths.sort_unstable();
    paths
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

impl Library {
    fn file_stem(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so",
            Self::Nvrtc => "libnvrtc",
            Self::BlasLt => "libcublasLt.so",
        }
    }

    /// Returns every symbol that this crate calls.
    fn symbols(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &DRIVER_SYMBOLS,
            Self::Nvrtc => &NVRTC_SYMBOLS,
            Self::BlasLt => &BLAS_SYMBOLS,
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "the NVIDIA driver's library (libcuda.so.1)",
            Self::Nvrtc => "the CUDA compiler's library (libnvrtc.so)",
            Self::BlasLt => "NVIDIA's library of matrix products (libcublasLt.so)",
        })
    }
}

const DRIVER_SYMBOLS: [&str; 39] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime_v2",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernelEx",
];

const NVRTC_SYMBOLS: [&str; 8] = [
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcDestroyProgram",
];

const BLAS_SYMBOLS: [&str; 13] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul",
];

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn library_files_are_ordered_by_version_numbers() {
        let newest_first = [
            "libnvrtc-builtins.so.12.9",
            "libnvrtc-builtins.so.9.2",
            "libnvrtc.so.12.10.1",
            "libnvrtc.so.12.9.86",
            "libnvrtc.so.12",
            "libnvrtc.so.9",
            "libnvrtc.so",
            "libnvrtc.alt.so.13",
        ]
        .map(PathBuf::from);
        let mut files = newest_first.to_vec();
        files.sort_unstable();
        assert_eq!(in_load_order(files), newest_first);
    }

    #[test]
    fn wheels_of_a_virtual_environment_are_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let wheel = folder.path().join("app/.venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        fs::create_dir_all(&wheel).expect("a folder");
        let bases = pythons_in(folder.path());
        let found: Vec<PathBuf> = bases.iter().flat_map(|base| wheels_in(base)).collect();
        assert_eq!(found, [wheel]);
    }
}
