//! A worker process: an engine with a gRPC service, a metering journal and health
//! checks around it. One worker owns one device and serves one model, on a Unix
//! socket or on the network.
//!
//! [`serve`] runs a worker from its start to its end. A token leaves the worker
//! only after the journal has recorded the step that produced it. Prompts are never
//! logged.

mod assignment;
mod calibration;
mod device;
mod energy;
mod error;
mod gpu_lock;
mod grammars;
mod health;
mod journal;
mod journal_streams;
mod load;
mod monitor;
mod network;
mod nvml;
mod open_attempts;
mod options;
mod outbox;
mod roster;
mod run;
mod served;
mod service;
mod shutdown;
mod sink;
mod socket;
mod watchdog;

#[doc(hidden)]
pub mod test_harness;

pub use error::{EXIT_DEVICE, EXIT_HUNG, WorkerError};
pub use gpu_lock::{GpuLockError, GpuOptions};
pub use health::Thresholds;
pub use monitor::HealthOptions;
pub use options::{
    DeviceChoice, EngineChoice, ListenAt, OptionsError, SyntheticDevice, WorkerOptions,
};
pub use run::serve;
pub use tollgate_engine::SchedulePolicy;
pub use tollgate_engine::backend::cuda::{CodeError, build_kernels};
pub use tollgate_engine::backend::synthetic::StepCost;
pub use watchdog::{Hung, StepTimeout};
