//! The errors that keep a worker from starting or make it end.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tollgate_engine::backend::cpu::CpuError;
use tollgate_engine::backend::cuda::{CudaError, DriverFault};
use tollgate_engine::backend::synthetic::SyntheticError;
use tollgate_engine::calibrate::CalibrationError;
use tollgate_engine::model::ModelError;
use tollgate_engine::{BackendError, EngineError};
use tollgate_text::TextError;
use tollgate_wire::LinkError;

use crate::{GpuLockError, Hung};

/// An error that ended a worker before it was told to end.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model in the folder cannot be served.
    #[error("the model cannot be served")]
    Model(#[from] ModelError),
    /// A file of the model cannot be read.
    #[error("cannot read {}", path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The tokenizer or the chat template was refused.
    #[error("{}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: TextError,
    },
    /// The name of the CUDA device is invalid.
    #[error("the CUDA device is invalid: {0}")]
    Device(String),
    /// The chosen GPU does not exist or cannot serve the model.
    #[error(transparent)]
    Cuda(CudaError),
    /// A call of the GPU's driver failed. The message contains the cause, so the
    /// error has no separate source.
    #[error("{}", CudaError::Driver(.0.clone()))]
    Refused(DriverFault),
    /// The GPU is in use, or its locks cannot be used.
    #[error(transparent)]
    GpuLock(#[from] GpuLockError),
    /// The model does not fit the device.
    #[error("the model cannot be set up on the CPU")]
    Cpu(#[from] CpuError),
    /// The parameters of the synthetic engine are invalid.
    #[error(transparent)]
    Synthetic(#[from] SyntheticError),
    /// The steps that measure the device failed.
    #[error("the device cannot be calibrated")]
    Calibration(#[from] CalibrationError),
    /// The calibration cannot be written.
    #[error("cannot write the calibration {}", path.display())]
    CalibrationFile {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// Another process serves on the socket.
    #[error("the socket {} is in use by another process", .0.display())]
    SocketInUse(PathBuf),
    /// The socket cannot be created.
    #[error("cannot listen on {}", path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The address of the network cannot be used.
    #[error("cannot listen on {address}")]
    Address {
        /// The address.
        address: SocketAddr,
        /// The error of the network.
        source: io::Error,
    },
    /// The worker's certificates cannot be used.
    #[error("the certificates for gateways cannot be used")]
    Link(#[from] LinkError),
    /// The journal cannot be opened or written.
    #[error("cannot open or write the metering journal {}", path.display())]
    Journal {
        /// Its folder.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The engine failed. The supervisor restarts the worker.
    #[error("the engine failed")]
    Engine(#[from] EngineError),
    /// A step did not end in time.
    #[error("the device is hung")]
    Hung(#[from] Hung),
    /// The device failed before the first step.
    #[error("the device cannot be set up")]
    Setup(#[source] BackendError),
    /// Signals or the parent's pipe cannot be received.
    #[error("cannot listen for signals or for the parent's end")]
    Signals(#[source] io::Error),
    /// A thread cannot be started, or it panicked.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The gRPC server failed.
    #[error("the worker's gRPC server failed")]
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
    /// Returns true if the CPU can be used instead, where a GPU was not required.
    pub(crate) fn leaves_the_cpu(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            Self::Cuda(error) => error.leaves_the_cpu(),
            _ => false,
        }
    }

    /// Returns the exit code that tells the supervisor what happened.
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

/// The exit code after a step that did not end in time.
pub const EXIT_HUNG: u8 = 3;
/// The exit code after a fault of the device.
pub const EXIT_DEVICE: u8 = 4;
