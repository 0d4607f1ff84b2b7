//! What `gpu_check` was asked for.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_engine::backend::cuda::{
    CodeFolders, CudaOptions, DeviceSelector, KernelChoice, Launches,
};

/// Which kernels run, and how they are given to the card.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) kernels: KernelChoice,
    pub(crate) launches: Launches,
}

impl Way {
    /// What a worker does.
    pub(crate) const WORKER: Self =
        Self { kernels: KernelChoice::Fastest, launches: Launches::Graphs };
    /// The same without the vendor's products.
    pub(crate) const OWN: Self = Self { kernels: KernelChoice::Own, ..Self::WORKER };
    /// The vendor's products and our own, what a worker may be told to do, and
    /// what it might do.
    pub(crate) const ALL: [Self; 5] = [
        Self::WORKER,
        Self { launches: Launches::Overlapping, ..Self::WORKER },
        Self::OWN,
        Self { launches: Launches::Single, ..Self::WORKER },
        Self { kernels: KernelChoice::Deterministic, ..Self::WORKER },
    ];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kernels, self.launches)
    }
}

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
    pub(crate) fn backend(&self, Way { kernels, launches }: Way, step_tokens: u32) -> CudaOptions {
        CudaOptions {
            device: DeviceSelector::First,
            memory_share: 0.9,
            step_tokens,
            folders: CodeFolders {
                kept: std::env::temp_dir().join("tollgate-gpu-check-kernels"),
                bundles: self.kernels.clone(),
                libraries: Vec::new(),
            },
            kernels,
            launches,
            search: Duration::from_secs(2),
        }
    }
}
