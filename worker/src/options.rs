//! How a worker is run, checked by whoever read the command line or config.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_domain::{ModelName, WorkerName};
use tollgate_engine::SchedulePolicy;
use tollgate_engine::backend::synthetic::StepCost;

use crate::{CardOptions, HealthOptions, StepPatience};

/// Everything that a worker is told at its start.
#[derive(Debug)]
pub struct WorkerOptions {
    /// Its name in config; it stands in every record.
    pub name: WorkerName,
    /// The Unix socket to serve on, in a folder that only its user may enter.
    pub socket: PathBuf,
    /// The data folder: journal and calibration lie below it.
    pub data: PathBuf,
    /// The model's folder, as Hugging Face lays it out.
    pub model: PathBuf,
    /// The model's name, as clients say it.
    pub model_name: ModelName,
    /// What computes.
    pub engine: EngineChoice,
    /// Which device computes.
    pub device: DeviceChoice,
    /// Threads that compute, on a CPU; as many as there are cores unless given.
    pub threads: Option<u32>,
    /// Memory for the KV cache on a CPU, bytes. Never less is taken than one
    /// long sequence of the model needs.
    pub kv_bytes: u64,
    /// The part of a GPU's free memory that is taken, percent: weights,
    /// buffers, and for the KV cache what is left of it.
    pub gpu_memory_percent: u32,
    /// Whether a token's logits are the same to the bit, whatever else is in
    /// its step.
    pub deterministic: bool,
    /// Tokens that one step feeds at most, over all sequences.
    pub step_tokens: u32,
    /// Sequences in the batch at once.
    pub max_sequences: u32,
    /// How long a step should take at most.
    pub step_time_budget: Duration,
    /// Requests that may wait.
    pub queue_capacity: usize,
    /// How its card is locked, where the device has an identity.
    pub card: CardOptions,
    /// When its device is not well.
    pub health: HealthOptions,
    /// How long a step may take before the device is given up.
    pub step_timeout: StepPatience,
    /// A file by which a test makes a synthetic device fail.
    pub faults: Option<PathBuf>,
    /// What the journal may occupy on disk before its gateway has taken it.
    pub journal_bytes: u64,
    /// The read end of a pipe whose write end the parent holds: at its end
    /// the worker stops after the current step.
    pub parent: Option<OwnedFd>,
}

/// What computes.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum EngineChoice {
    /// The model, on its device.
    #[default]
    Model,
    /// Nothing: steps take the time that a cost model says. Tokenizer and
    /// template are the model's.
    Synthetic(SyntheticDevice),
}

/// A device that is not there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SyntheticDevice {
    /// How long a step takes.
    pub cost: StepCost,
    /// Tokens that its KV cache holds.
    pub kv_tokens: u32,
    /// Tokens that one sequence may hold.
    pub context: u32,
    /// Who runs next; on any other device it is always the fair one.
    pub policy: SchedulePolicy,
}

/// Which device computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best there is.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// A CUDA device and nothing else: the first, or by UUID or index.
    Cuda(Option<String>),
}

impl WorkerOptions {
    /// The defaults for a worker of that name, with its places and its model.
    pub fn new(
        name: WorkerName,
        socket: PathBuf,
        data: PathBuf,
        model: PathBuf,
        model_name: ModelName,
    ) -> Self {
        Self {
            name,
            socket,
            data,
            model,
            model_name,
            engine: EngineChoice::Model,
            device: DeviceChoice::Auto,
            threads: None,
            kv_bytes: 512 << 20,
            gpu_memory_percent: 90,
            deterministic: false,
            step_tokens: 512,
            max_sequences: 64,
            step_time_budget: Duration::from_millis(80),
            queue_capacity: 256,
            card: CardOptions::default(),
            health: HealthOptions::default(),
            step_timeout: StepPatience::default(),
            faults: None,
            journal_bytes: 1 << 30,
            parent: None,
        }
    }
}
