//! The process around an engine. One worker owns one device and serves one
//! model over gRPC on a Unix socket; a gateway asks, the engine answers, and
//! what the device did is in the journal before anyone hears of a token.
//!
//! [`serve`] is the whole life of it. No prompt is ever logged here.

mod assignment;
mod calibration;
mod card;
mod device;
mod energy;
mod error;
mod health;
mod journal;
mod load;
mod monitor;
mod nvml;
mod options;
mod outbox;
mod run;
mod service;
mod sink;
mod socket;
mod told;
mod watchdog;

#[doc(hidden)]
pub mod rig;

pub use card::{CardError, CardOptions};
pub use error::{EXIT_DEVICE, EXIT_HUNG, WorkerError};
pub use health::Thresholds;
pub use monitor::HealthOptions;
pub use options::{DeviceChoice, EngineChoice, SyntheticDevice, WorkerOptions};
pub use run::serve;
pub use tollgate_engine::SchedulePolicy;
pub use tollgate_engine::backend::cuda::{CodeError, build_kernels};
pub use tollgate_engine::backend::synthetic::StepCost;
pub use watchdog::{Hung, StepPatience};
