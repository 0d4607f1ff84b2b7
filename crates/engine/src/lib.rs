//! Continuous batching of decoder-only transformers, metered to the nanosecond.
//!
//! One thread owns the device and the batch ([`engine`]). Other threads send
//! [`Submission`]s and receive results through their [`TokenSink`]s. In each tick the
//! thread decides what to run ([`schedule`]), reserves KV cache ([`kv`]), runs one step,
//! samples tokens ([`sample`]), splits the time of the step over its sequences ([`meter`]),
//! and writes the split to the journal before any token leaves. Nothing in this crate knows
//! text, a network protocol or a limit.

pub mod backend;
pub mod calibrate;
pub mod clock;
pub mod engine;
pub mod grammar;
mod json_file;
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
pub use engine::inbox::EngineHandle;
pub use engine::journal::{Owner, RequestFigures, StepJournal, StepRecord, StepShare};
pub use engine::manual::{ManualEngine, Tick};
pub use engine::pulse::Work;
pub use engine::submission::{
    CancelReason, Flow, GeneratedToken, PromptLogprob, Refusal, RefusedReason, RequestOutcome,
    Stages, Submission, SubmitError, TokenSink,
};
pub use engine::{Engine, EngineError, EngineOptions, EngineStatus};
pub use kernels::Instructions;
pub use meter::Totals;
pub use sample::{SamplingParams, TokenLogprobs};
pub use schedule::{SchedulePolicy, step_time_budget};
pub use tollgate_domain::Tier;
