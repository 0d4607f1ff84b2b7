//! The options of `gpu_check`.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_engine::backend::cuda::{
    CodeFolders, CudaBackend, CudaOptions, DeviceSelector, KernelChoice, Launches,
};
use tollgate_engine::model::ModelConfig;
use tollgate_engine::random_model::ModelSpec;
use tollgate_engine::weights::Element;

/// The kernels to run, and the way in which they are launched.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) kernels: KernelChoice,
    pub(crate) launches: Launches,
}

impl Way {
    /// The way of a worker.
    pub(crate) const WORKER: Self =
        Self { kernels: KernelChoice::Fastest, launches: Launches::Overlapping };
    /// The same way without the vendor's matrix products.
    pub(crate) const OWN: Self = Self { kernels: KernelChoice::Own, ..Self::WORKER };
    /// The vendor's products and our own, with each kind of launch.
    pub(crate) const ALL: [Self; 5] = [
        Self::WORKER,
        Self { launches: Launches::Graphs, ..Self::WORKER },
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

/// The parsed options.
#[derive(Default)]
pub(crate) struct Options {
    /// Tiny models only, which take seconds even on an emulated device.
    pub(crate) is_quick: bool,
    /// Bundles of machine code.
    pub(crate) kernels: Vec<PathBuf>,
    /// The file to which results are written as they come; they are also printed at the
    /// end.
    pub(crate) out: Option<PathBuf>,
    /// The only case to run, in the current process.
    pub(crate) case: Option<String>,
    /// The device's own tool, if it has an unusual path.
    pub(crate) nvidia_smi: Option<PathBuf>,
}

impl Options {
    /// Returns the options of a backend.
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

/// Returns a model that answers within seconds even on an emulated device.
pub(crate) fn tiny() -> ModelSpec {
    ModelSpec { head_dim: 32, heads: 4, kv_heads: 2, ..ModelSpec::tiny() }
}

/// Returns a model of this shape with random weights in bf16, on the device.
pub(crate) fn with_noise(
    spec: &ModelSpec,
    options: &CudaOptions,
) -> Result<CudaBackend, Box<dyn Error>> {
    let config = spec.config(Element::Bf16).to_string();
    let config = ModelConfig::parse("config.json".as_ref(), config.as_bytes())?;
    Ok(CudaBackend::with_noise(&config, options)?)
}
