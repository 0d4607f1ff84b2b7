//! Why a worker does not start or does not go on, each in one sentence.

use std::io;
use std::path::PathBuf;

use tollgate_engine::backend::cpu::CpuError;
use tollgate_engine::backend::cuda::{CudaError, DriverFault};
use tollgate_engine::backend::synthetic::SyntheticError;
use tollgate_engine::calibrate::CalibrationError;
use tollgate_engine::model::ModelError;
use tollgate_engine::{BackendError, EngineError};
use tollgate_text::TextError;

use crate::{CardError, Hung};

/// What ended a worker before it was asked to end.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model's folder was refused.
    #[error("the model cannot be served")]
    Model(#[from] ModelError),
    /// A file of the model cannot be read.
    #[error("cannot read {}", path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The tokenizer or the chat template was refused.
    #[error("{}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TextError,
    },
    /// The device that was asked for cannot be any.
    #[error("--device cuda: {0}")]
    Device(String),
    /// The GPU that was asked for is not there, or cannot serve the model.
    #[error(transparent)]
    Cuda(CudaError),
    /// The GPU's driver refused something. The engine's sentence holds its
    /// cause, which a source would say once more.
    #[error("{}", CudaError::Driver(.0.clone()))]
    Refused(DriverFault),
    /// The device is another's, or its locks cannot be used.
    #[error(transparent)]
    Card(#[from] CardError),
    /// The model does not fit the device.
    #[error("the model cannot be set up on the processor")]
    Cpu(#[from] CpuError),
    /// The synthetic engine's figures make no engine.
    #[error(transparent)]
    Synthetic(#[from] SyntheticError),
    /// The first steps, which measure the device, failed.
    #[error("the device cannot be calibrated")]
    Calibration(#[from] CalibrationError),
    /// The calibration cannot be kept.
    #[error("cannot keep the calibration {}", path.display())]
    CalibrationFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process serves on the socket.
    #[error("the socket {} is in use by another process", .0.display())]
    SocketInUse(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {}", path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The journal cannot be opened or kept.
    #[error("the metering journal {} cannot be kept", path.display())]
    Journal {
        /// Its folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The engine broke down; whoever started this worker starts another.
    #[error("the engine broke down")]
    Engine(#[from] EngineError),
    /// The device does not come back from a step.
    #[error("the device hangs")]
    Hung(#[from] Hung),
    /// The device failed before the first step.
    #[error("the device cannot be set up")]
    Setup(#[source] BackendError),
    /// Signals or the parent's pipe cannot be listened to.
    #[error("cannot listen for the end")]
    Signals(#[source] io::Error),
    /// A thread cannot be had.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The gRPC server failed.
    #[error("the worker's server failed")]
    Server(#[source] tonic::transport::Error),
}

impl From<CudaError> for WorkerError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Driver(fault) => Self::Refused(fault),
            error => Self::Cuda(error),
        }
    }
}

impl WorkerError {
    /// Whether a processor can serve where a GPU was not insisted on.
    pub(crate) fn leaves_the_cpu(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            Self::Cuda(error) => error.leaves_the_cpu(),
            _ => false,
        }
    }

    /// The exit code that tells whoever started the process what happened.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Hung(_) => EXIT_HUNG,
            Self::Setup(_) | Self::Refused(_) | Self::Engine(EngineError::Backend(_)) => {
                EXIT_DEVICE
            }
            _ => 1,
        }
    }
}

/// The exit code after a step that did not end.
pub const EXIT_HUNG: u8 = 3;
/// The exit code after a fault of the device.
pub const EXIT_DEVICE: u8 = 4;
