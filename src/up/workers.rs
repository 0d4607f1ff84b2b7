//! The worker processes that a config asks for, and the options of each one.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tollgate_config::{
    Config, DeviceSelector, EngineKind, Health, Model, SyntheticPolicy, Watchdog,
};
use tollgate_domain::WorkerName;
use tollgate_gateway::workers::WorkerEndpoint;
use tollgate_wire::WorkerAddress;
use tollgate_worker::{
    DeviceChoice, EngineChoice, GpuOptions, HealthOptions, ListenAt, SchedulePolicy, StepCost,
    StepTimeout, SyntheticDevice, Thresholds, WorkerOptions,
};

use super::liveness::SilenceTimeouts;
use super::supervisor::WorkerCommand;
use super::{demo_model, gpus};

/// One worker process to start.
pub struct Planned {
    name: WorkerName,
    socket: PathBuf,
    options: PathBuf,
    visible_gpu: Option<String>,
    timeouts: SilenceTimeouts,
}

/// Plans one worker for each model and device of the config, numbered in order.
/// Writes each worker's options into `sockets`, beside the worker's socket.
pub fn plan(config: &Config, data: &Path, sockets: &Path) -> Result<Vec<Planned>> {
    let Watchdog { silence, start, .. } = config.worker().watchdog;
    // In the data folder even if the sockets are elsewhere: a cleaner of temporary
    // folders deletes old files, and every restart of a worker reads this one.
    let options_folder = data.join("run");
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&options_folder)
        .with_context(|| options_folder.display().to_string())?;
    let mut planned = Vec::new();
    for model in config.models() {
        for device in &model.devices {
            // Names are stable across restarts with the same config, so each worker
            // finds its journal again.
            let name = WorkerName::new(&planned.len().to_string())?;
            let socket = sockets.join(format!("{name}.sock"));
            let listen = ListenAt::Socket(socket.clone());
            let options = options((config, data), (model, device), name.clone(), listen)?;
            let path = options_folder.join(format!("{name}.json"));
            options.write(&path).with_context(|| format!("cannot write {}", path.display()))?;
            planned.push(Planned {
                name,
                socket,
                options: path,
                visible_gpu: gpus::identity(device),
                timeouts: SilenceTimeouts { running: silence, start },
            });
        }
    }
    Ok(planned)
}

/// Returns the options of the worker `name`, which runs `model` on `device`.
///
/// # Errors
/// The model's folder has no valid path, or the demo model cannot be written.
pub fn options(
    (config, data): (&Config, &Path),
    (model, device): (&Model, &DeviceSelector),
    name: WorkerName,
    listen: ListenAt,
) -> Result<WorkerOptions> {
    let folder = match &model.path {
        Some(path) => text_path(std::path::absolute(path).context("model folder")?)?,
        None => demo_model::lay_out(data)?,
    };
    let mut options = WorkerOptions::new(name, listen, data.to_owned(), folder, model.name.clone());
    configure(&mut options, config, device);
    Ok(options)
}

/// Returns `path` unchanged.
///
/// # Errors
/// The path is not valid UTF-8. A worker's options are JSON, which holds text only.
pub fn text_path(path: PathBuf) -> Result<PathBuf> {
    if path.to_str().is_none() {
        bail!(
            "{path:?} is not valid UTF-8, and workers get their paths as text; choose another folder"
        );
    }
    Ok(path)
}

impl Planned {
    /// Returns the worker's name and socket, for the gateway.
    pub fn endpoint(&self) -> WorkerEndpoint {
        let address = WorkerAddress::Socket(self.socket.clone());
        WorkerEndpoint { name: self.name.clone(), address, is_shareable: false }
    }

    /// Returns the command line that the supervisor starts.
    pub fn into_command(self) -> WorkerCommand {
        let Self { name, socket: _, options, visible_gpu, timeouts } = self;
        // A worker must not outlive this process, even if this process is killed.
        let arguments =
            vec!["worker".into(), "--end-with-parent".into(), "--options".into(), options.into()];
        WorkerCommand { name: name.to_string(), arguments, visible_gpu, timeouts }
    }
}

/// Sets every option that the config determines.
fn configure(options: &mut WorkerOptions, config: &Config, device: &DeviceSelector) {
    let worker = config.worker();
    options.engine = engine(config, &options.name);
    options.device = match device {
        DeviceSelector::Auto => DeviceChoice::Auto,
        DeviceSelector::Cpu => DeviceChoice::Cpu,
        DeviceSelector::Cuda(name) => DeviceChoice::Cuda(name.clone()),
    };
    options.threads = worker.threads;
    options.kv_bytes = worker.kv_memory.0;
    options.gpu_memory_percent = worker.gpu_memory;
    options.deterministic = worker.deterministic;
    options.max_sequences = worker.max_sequences;
    options.step_tokens = worker.max_chunk_tokens;
    options.step_time_budget = worker.step_time_budget;
    options.batch_step = worker.batch_step;
    options.queue_capacity = worker.queue_capacity as usize;
    options.gpu = GpuOptions {
        locks: worker.sharing.locks.as_deref().map(absolute),
        turn: is_shared(config, device).then_some(worker.sharing.turn),
    };
    options.health = health(&worker.health);
    options.step_timeout = StepTimeout {
        least: worker.watchdog.step,
        times_predicted: worker.watchdog.times_predicted,
    };
}

fn engine(config: &Config, name: &WorkerName) -> EngineChoice {
    let worker = config.worker();
    let synthetic = match worker.engine {
        EngineKind::Model => return EngineChoice::Model,
        EngineKind::Synthetic => &worker.synthetic,
    };
    EngineChoice::Synthetic(SyntheticDevice {
        cost: StepCost {
            step: synthetic.step,
            sequence: synthetic.sequence,
            kv_token: synthetic.kv_token,
            prefill_token: synthetic.prefill_token,
            speed: synthetic.speed,
        },
        kv_tokens: synthetic.kv_tokens,
        context: synthetic.context,
        policy: match synthetic.policy {
            SyntheticPolicy::Fair => SchedulePolicy::Fair,
            SyntheticPolicy::FirstCome => SchedulePolicy::FirstComeFirstServed,
            SyntheticPolicy::TokenCounters => SchedulePolicy::TokenCounters,
            SyntheticPolicy::KeyCounters => SchedulePolicy::KeyCounters,
        },
        // A file for each worker, so that a rehearsal fails one of them.
        faults: synthetic.faults.as_ref().map(|folder| folder.join(name.as_str())),
    })
}

fn health(health: &Health) -> HealthOptions {
    // Destructured in full, so that a new key of the config cannot be missed.
    let Health { every, hot, cooled, well_for, busy, busy_for, memory, leak, nvml } = health;
    HealthOptions {
        nvml: nvml.as_deref().map(absolute),
        every: *every,
        thresholds: Thresholds {
            hot: *hot,
            cooled: *cooled,
            well_for: *well_for,
            busy: *busy,
            busy_for: *busy_for,
            memory: *memory,
            leak: leak.0,
        },
    }
}

/// Returns the path from the root. A path that cannot be resolved is returned
/// unchanged: the worker reports the error when it opens the path.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns true if several workers will use the GPU that `device` names.
fn is_shared(config: &Config, device: &DeviceSelector) -> bool {
    let synthetic = config.worker().engine == EngineKind::Synthetic;
    let is_gpu = match device {
        DeviceSelector::Cpu => false,
        DeviceSelector::Cuda(Some(_)) => true,
        // Unnamed synthetic devices never share: each one has its own identity.
        DeviceSelector::Auto | DeviceSelector::Cuda(None) => !synthetic,
    };
    let all = config.models().flat_map(|model| &model.devices);
    is_gpu && all.filter(|other| gpus::are_same(other, device)).count() > 1
}
