//! Which worker processes a config asks for, and what each is told.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tollgate_config::{Config, DeviceSelector, EngineKind, Health, Model, Synthetic, Watchdog};
use tollgate_domain::WorkerName;
use tollgate_gateway::upstream::WorkerEndpoint;

use super::supervisor::Worker;
use super::vital::Patience;
use super::{cards, demo_model};

/// One worker process to start.
pub struct Planned {
    name: WorkerName,
    socket: PathBuf,
    arguments: Vec<OsString>,
    shown: Option<String>,
    patience: Patience,
}

/// One worker for each model and device of the config, numbered in order.
pub fn plan(config: &Config, data: &Path, sockets: &Path) -> Result<Vec<Planned>> {
    let Watchdog { silence, start, .. } = config.worker().watchdog;
    let patience = Patience { silence, start };
    let mut planned = Vec::new();
    for model in config.models() {
        let folder = match &model.path {
            Some(path) => std::path::absolute(path).context("model folder")?,
            None => demo_model::lay_out(data)?,
        };
        for device in &model.devices {
            let name = WorkerName::new(&planned.len().to_string())?;
            let socket = sockets.join(format!("{name}.sock"));
            let arguments = arguments(config, model, &folder, device, &name, &socket, data);
            let shown = cards::identity(device);
            planned.push(Planned { name, socket, arguments, shown, patience });
        }
    }
    Ok(planned)
}

impl Planned {
    /// Where the gateway finds it.
    pub fn endpoint(&self) -> WorkerEndpoint {
        WorkerEndpoint { name: self.name.clone(), socket: self.socket.clone() }
    }

    /// What the supervisor starts.
    pub fn into_command(self) -> Worker {
        let Self { name, socket: _, arguments, shown, patience } = self;
        Worker { name: name.to_string(), arguments, shown, patience }
    }
}

/// Whether several workers will be on the card that `device` means.
fn is_shared(config: &Config, device: &DeviceSelector) -> bool {
    let synthetic = config.worker().engine == EngineKind::Synthetic;
    let is_card = match device {
        DeviceSelector::Cpu => false,
        DeviceSelector::Cuda(Some(_)) => true,
        // Synthetic devices without a name are each a card of their own.
        DeviceSelector::Auto | DeviceSelector::Cuda(None) => !synthetic,
    };
    let all = config.models().flat_map(|model| &model.devices);
    is_card && all.filter(|other| cards::are_one(other, device)).count() > 1
}

#[allow(clippy::too_many_arguments, reason = "each is one flag of the command line it becomes")]
fn arguments(
    config: &Config,
    model: &Model,
    folder: &Path,
    device: &DeviceSelector,
    name: &WorkerName,
    socket: &Path,
    data: &Path,
) -> Vec<OsString> {
    let worker = config.worker();
    let nanos = |span: Duration| OsString::from(format!("{}ns", span.as_nanos()));
    let mut words: Vec<OsString> = vec!["worker".into(), "--end-with-parent".into()];
    words.extend(worker.deterministic.then(|| "--deterministic".into()));
    let mut flag = |name: &str, value: OsString| words.extend([name.into(), value]);
    flag("--name", name.to_string().into());
    flag("--socket", socket.into());
    flag("--data", data.into());
    flag("--model", folder.into());
    flag("--model-name", model.name.to_string().into());
    flag("--device", device.to_string().into());
    flag("--kv-memory", worker.kv_memory.0.to_string().into());
    flag("--gpu-memory", worker.gpu_memory.to_string().into());
    flag("--max-sequences", worker.max_sequences.to_string().into());
    flag("--max-chunk-tokens", worker.max_chunk_tokens.to_string().into());
    flag("--step-time-budget", nanos(worker.step_time_budget));
    flag("--queue-capacity", worker.queue_capacity.to_string().into());
    if let Some(locks) = &worker.sharing.locks {
        flag("--card-locks", std::path::absolute(locks).unwrap_or_else(|_| locks.clone()).into());
    }
    if is_shared(config, device) {
        flag("--card-turn", nanos(worker.sharing.turn));
    }
    flag("--step-timeout", nanos(worker.watchdog.step));
    flag("--step-times-predicted", worker.watchdog.times_predicted.to_string().into());
    let Health { every, hot, cooled, well_for, busy, busy_for, memory, leak, nvml } =
        &worker.health;
    flag("--health-every", nanos(*every));
    flag("--health-hot", hot.to_string().into());
    flag("--health-cooled", cooled.to_string().into());
    flag("--health-well-for", nanos(*well_for));
    flag("--health-busy", busy.to_string().into());
    flag("--health-busy-for", nanos(*busy_for));
    flag("--health-memory", memory.to_string().into());
    flag("--health-leak", leak.0.to_string().into());
    if let Some(nvml) = nvml {
        flag("--health-nvml", std::path::absolute(nvml).unwrap_or_else(|_| nvml.clone()).into());
    }
    if worker.engine == EngineKind::Synthetic {
        let Synthetic {
            step,
            sequence,
            kv_token,
            prefill_token,
            speed,
            policy,
            kv_tokens,
            context,
            ref faults,
        } = worker.synthetic;
        flag("--engine", worker.engine.to_string().into());
        flag("--synthetic-step", nanos(step));
        flag("--synthetic-sequence", nanos(sequence));
        flag("--synthetic-kv-token", nanos(kv_token));
        flag("--synthetic-prefill-token", nanos(prefill_token));
        flag("--synthetic-speed", speed.to_string().into());
        flag("--synthetic-policy", policy.to_string().into());
        flag("--synthetic-kv-tokens", kv_tokens.to_string().into());
        flag("--synthetic-context", context.to_string().into());
        if let Some(faults) = faults {
            flag("--synthetic-faults", faults.join(name.as_str()).into());
        }
    }
    if let Some(threads) = worker.threads {
        flag("--threads", threads.to_string().into());
    }
    words
}
