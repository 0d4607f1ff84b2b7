//! Continuous batching of decoder-only transformers, metered to the nanosecond.
//!
//! One thread owns the device and the batch ([`engine`]); others send it
//! [`Submission`]s and are answered through their [`TokenSink`]s. Each turn it
//! decides as data what to run ([`schedule`]), reserves cache ([`kv`]), runs
//! one step, draws tokens ([`sample`]), splits the step's time over those in it
//! ([`meter`]) and journals that before any token leaves. Nothing here knows
//! text, a protocol or a limit.

pub mod backend;
pub mod calibrate;
pub mod clock;
pub mod engine;
mod kernels;
pub mod kv;
pub mod meter;
pub mod model;
pub mod random_model;
pub mod sample;
pub mod schedule;
#[cfg(test)]
mod testing;
pub mod weights;

pub use backend::{Backend, BackendError, DeviceInfo, ModelShape};
pub use calibrate::{Calibration, CalibrationError, calibrate, calibration_key, coarse};
pub use clock::{Clock, SystemClock, VirtualClock};
pub use engine::driven::{ManualEngine, Turn};
pub use engine::journal::{Owner, RequestFigures, StepJournal, StepRecord, StepShare};
pub use engine::mailbox::EngineHandle;
pub use engine::pulse::Work;
pub use engine::submission::{
    CancelReason, Flow, GeneratedToken, PromptLogprob, Refusal, RefusedReason, RequestOutcome,
    Stages, Submission, SubmitError, TokenSink,
};
pub use engine::{Engine, EngineError, EngineOptions, EngineStatus};
pub use kernels::Instructions;
pub use meter::Totals;
pub use sample::{SamplingParams, TokenLogprobs};
pub use schedule::{SchedulePolicy, Tier, step_time_budget};
