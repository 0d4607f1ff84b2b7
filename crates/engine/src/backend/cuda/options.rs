//! The options of a backend on a GPU, and the errors of its setup.

use std::fmt;
use std::time::Duration;

use super::code::{CodeError, CodeFolders};
use super::driver::DriverFault;
use super::probe::{DeviceSelector, NoDevice};
use super::weights::LoadError;
use crate::weights::WeightsError;

/// The options of a [`CudaBackend`](super::CudaBackend).
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The device to open.
    pub device: DeviceSelector,
    /// The share of the device's free memory that is taken, above 0 and at most 1.
    /// Weights and buffers are taken first; the KV cache gets what is left.
    pub memory_share: f64,
    /// Tokens that one step may feed to the model.
    pub step_tokens: u32,
    /// The folders in which kernels and libraries are searched.
    pub folders: CodeFolders,
    /// The kernels to run.
    pub kernels: KernelChoice,
    /// The way in which kernels are launched.
    pub launches: Launches,
    /// Device time that the start may spend on measuring the vendor's matrix products
    /// against our own.
    pub search: Duration,
}

/// The kernels that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// The fastest kernels for each step, including those of the vendor's library.
    Fastest,
    /// The fastest of our own kernels.
    Own,
    /// One of our own kernels for each operation, with a fixed order of summation. A
    /// token's logits are bit-identical in any batch.
    Deterministic,
}

impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fastest => "fastest",
            Self::Own => "own",
            Self::Deterministic => "deterministic",
        })
    }
}

/// The way in which kernels are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launches {
    /// One launch for each kernel.
    Single,
    /// One graph for each step that only decodes; single launches for other steps.
    Graphs,
    /// Graphs, and each kernel may start while the kernel before it ends. This is
    /// CUDA's programmatic dependent launch, on Hopper and later.
    Overlapping,
}

impl fmt::Display for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single => "single",
            Self::Graphs => "graphs",
            Self::Overlapping => "overlapping",
        })
    }
}

/// The reasons why a model could not be set up on a GPU.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No device can be used.
    #[error(transparent)]
    NoDevice(#[from] NoDevice),
    /// There is no machine code for the device.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The kernels do not support this model.
    #[error("the CUDA kernels do not serve this model: {0}")]
    Model(String),
    /// The model is larger than the memory that may be taken.
    #[error(
        "the model needs {} MiB and {} MiB of the device's memory may be taken",
        .needed >> 20, .allowed >> 20
    )]
    Memory {
        /// Bytes of weights, buffers and the smallest useful cache.
        needed: u64,
        /// Bytes that may be taken.
        allowed: u64,
    },
    /// The weights do not match the configuration.
    #[error(transparent)]
    Weights(WeightsError),
    /// The driver refused a call.
    #[error("the device cannot be set up: {0}")]
    Driver(#[from] DriverFault),
}

impl CudaError {
    /// Returns true if the CPU can serve the model instead, which is so unless the
    /// model's files are broken.
    pub fn leaves_the_cpu(&self) -> bool {
        !matches!(self, Self::Weights(_))
    }
}

impl From<LoadError> for CudaError {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Weights(error) => Self::Weights(error),
            LoadError::Driver(fault) => Self::Driver(fault),
        }
    }
}
