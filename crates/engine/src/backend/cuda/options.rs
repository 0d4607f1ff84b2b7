//! How a backend on a GPU is set up, and why it may not be.

use std::fmt;
use std::time::Duration;

use super::code::{CodeError, CodeFolders};
use super::driver::DriverFault;
use super::probe::{Absent, Wanted};
use super::weights::LoadError;
use crate::weights::WeightsError;

/// How a [`CudaBackend`](super::CudaBackend) is set up.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which device.
    pub wanted: Wanted,
    /// The part of the device's free memory that is taken: weights, buffers,
    /// and for the KV cache what is left of it. Above 0, at most 1.
    pub memory_share: f64,
    /// Tokens that one step may feed.
    pub step_tokens: u32,
    /// Where kernels and libraries are looked for.
    pub folders: CodeFolders,
    /// Which kernels run.
    pub kernels: KernelChoice,
    /// How kernels are given to the device.
    pub launches: Launches,
    /// Of the device's time at the start, what may go into measuring the
    /// vendor's ways to multiply and ours.
    pub search: Duration,
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// The fastest for a step, those of the vendor's library among them.
    Fastest,
    /// The fastest of our own.
    Own,
    /// One of our own for each operation, which adds in one order: a token's
    /// logits are the same to the bit, whatever else is in its step.
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

/// How kernels are given to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launches {
    /// One by one.
    Single,
    /// Steps that decode as one graph.
    Graphs,
    /// Likewise, and a kernel may take its place on the device while the one
    /// before it ends: programmatic dependent launch, on Hopper and later.
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

/// Why a model could not be set up on a GPU.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no device for us.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// There are no kernels for it.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The kernels do not know models of this kind.
    #[error("the CUDA kernels do not serve this model: {0}")]
    Model(String),
    /// The model is larger than the memory that may be taken.
    #[error(
        "the model needs {} MiB and {} MiB of the device's memory may be taken",
        .needed >> 20, .allowed >> 20
    )]
    Memory {
        /// Bytes of weights, buffers and the least cache.
        needed: u64,
        /// Bytes that may be taken.
        allowed: u64,
    },
    /// The weights are not what the configuration implies.
    #[error(transparent)]
    Weights(WeightsError),
    /// The driver refused something.
    #[error("the device cannot be set up: {0}")]
    Driver(#[from] DriverFault),
}

impl CudaError {
    /// Whether a CPU can serve instead: everything but a broken model.
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
