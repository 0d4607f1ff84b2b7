//! What `gpu_check` was asked for.

use std::path::PathBuf;
use std::time::Duration;

use tollgate_engine::backend::cuda::{CodeFolders, CudaOptions, KernelChoice, Wanted};

/// What was asked for.
#[derive(Default)]
pub(crate) struct Options {
    /// Tiny models alone, in seconds even where a card is emulated.
    pub(crate) is_quick: bool,
    /// Bundles of machine code.
    pub(crate) kernels: Vec<PathBuf>,
    /// Where results are written as they come, beside being printed at the end.
    pub(crate) out: Option<PathBuf>,
    /// The one case to run, in this process.
    pub(crate) case: Option<String>,
    /// The tool that tells how busy a card is, where it has no usual name.
    pub(crate) nvidia_smi: Option<PathBuf>,
}

impl Options {
    /// How a backend is set up.
    pub(crate) fn backend(&self, kernels: KernelChoice, step_tokens: u32) -> CudaOptions {
        CudaOptions {
            wanted: Wanted::First,
            memory_share: 0.9,
            step_tokens,
            folders: CodeFolders {
                kept: std::env::temp_dir().join("tollgate-gpu-check-kernels"),
                bundles: self.kernels.clone(),
                libraries: Vec::new(),
            },
            kernels,
            graphs: true,
            search: Duration::from_secs(2),
        }
    }
}
