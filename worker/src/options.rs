//! The options of one worker. `tollgate up` writes them to a JSON file for each
//! worker process, and the worker reads that file at its start.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tollgate_domain::{ModelName, WorkerName};
use tollgate_engine::SchedulePolicy;
use tollgate_engine::backend::synthetic::StepCost;
use tollgate_wire::LinkFiles;

use crate::{GpuOptions, HealthOptions, StepTimeout};

/// The options of one worker. The file that holds them names every field, and a
/// field that is unknown is an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerOptions {
    /// The worker's name in the configuration. Every metering record carries it.
    pub name: WorkerName,
    /// The place where the worker listens for its gateway.
    pub listen: ListenAt,
    /// The data folder. The journal and the calibrations are in subfolders.
    pub data: PathBuf,
    /// The model's folder, in the layout of Hugging Face.
    pub model: PathBuf,
    /// The model's name in requests.
    pub model_name: ModelName,
    /// The engine that answers requests.
    pub engine: EngineChoice,
    /// The device that the engine runs on.
    pub device: DeviceChoice,
    /// Threads that compute on a CPU; `None` means one for each core.
    pub threads: Option<u32>,
    /// Bytes of memory for the KV cache on a CPU. The worker takes more than
    /// this if one sequence of the model's full context needs more.
    pub kv_bytes: u64,
    /// Percent of a GPU's free memory that the worker takes: for weights and
    /// buffers first, and for the KV cache with the remainder.
    pub gpu_memory_percent: u32,
    /// True if a token's logits are bitwise the same in any batch.
    pub deterministic: bool,
    /// Tokens that one step computes at most, over all sequences.
    pub step_tokens: u32,
    /// Sequences in the batch at most.
    pub max_sequences: u32,
    /// The time that the scheduler plans for one step at most.
    pub step_time_budget: Duration,
    /// The part by which batch work makes a step with interactive work longer at
    /// most, in percent.
    pub batch_step: u32,
    /// Requests that wait for the batch at most. The engine refuses more.
    pub queue_capacity: usize,
    /// The lock and the turns of a GPU.
    pub gpu: GpuOptions,
    /// The health checks of a GPU.
    pub health: HealthOptions,
    /// The time after which a step counts as hung.
    pub step_timeout: StepTimeout,
    /// Bytes of journal files that the gateway has not acknowledged at most.
    pub journal_bytes: u64,
    /// The read end of a pipe whose write end the parent process holds. The
    /// worker stops after the current step when the parent closes the pipe.
    #[serde(skip)]
    pub parent: Option<OwnedFd>,
}

/// The place where a worker listens for its gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenAt {
    /// A Unix socket in a folder that only its user may enter.
    Socket(PathBuf),
    /// An address of the network, with TLS on both sides.
    Network {
        /// The address; port 0 takes a free port.
        address: SocketAddr,
        /// The worker's certificates.
        files: LinkFiles,
    },
}

/// The engine that answers requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineChoice {
    /// The model on its device.
    #[default]
    Model,
    /// A simulated device. Steps take the time that a cost model gives. The
    /// tokenizer and the chat template are the model's.
    Synthetic(SyntheticDevice),
}

/// A simulated device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyntheticDevice {
    /// The time that a step takes.
    pub cost: StepCost,
    /// Tokens that the KV cache holds.
    pub kv_tokens: u32,
    /// Tokens that one sequence holds at most.
    pub context: u32,
    /// The scheduling policy. Every other device uses [`SchedulePolicy::Fair`].
    pub policy: SchedulePolicy,
    /// A file that makes the next step fail when it exists: `hang`, `fail` or
    /// `memory`. The file with the extension `.start` fails the start.
    pub faults: Option<PathBuf>,
}

/// The device that the engine runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// The first usable GPU, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device: the first one, or the one with this UUID or index. The
    /// worker does not start if the device cannot be used.
    Cuda(Option<String>),
}

/// An error in a worker's options file.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The file cannot be read.
    #[error("cannot read the worker options {}", path.display())]
    Read {
        /// The options file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The file is not JSON, or a field is missing, unknown or of a wrong type.
    #[error("the worker options {} are invalid", path.display())]
    Parse {
        /// The options file.
        path: PathBuf,
        /// The error with its line and column.
        source: serde_json::Error,
    },
    /// A number is outside its range.
    #[error("the worker options {}: {field} must be from {least} to {most}", path.display())]
    Range {
        /// The options file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// The smallest valid number.
        least: u32,
        /// The largest valid number.
        most: u32,
    },
}

impl WorkerOptions {
    /// Creates the default options for a worker with these paths and names.
    pub fn new(
        name: WorkerName,
        listen: ListenAt,
        data: PathBuf,
        model: PathBuf,
        model_name: ModelName,
    ) -> Self {
        Self {
            name,
            listen,
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
            batch_step: 25,
            queue_capacity: 256,
            gpu: GpuOptions::default(),
            health: HealthOptions::default(),
            step_timeout: StepTimeout::default(),
            journal_bytes: 1 << 30,
            parent: None,
        }
    }

    /// Reads options from a file that [`Self::write`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, is malformed, or holds a number out of range.
    pub fn read(path: &Path) -> Result<Self, OptionsError> {
        let bytes = fs::read(path)
            .map_err(|source| OptionsError::Read { path: path.to_owned(), source })?;
        let options: Self = serde_json::from_slice(&bytes)
            .map_err(|source| OptionsError::Parse { path: path.to_owned(), source })?;
        options.check(path)?;
        Ok(options)
    }

    /// Writes the options to `path` as JSON that only the owner may read (0600).
    ///
    /// # Errors
    /// The file cannot be written, or a path is not valid UTF-8.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        // The rename replaces a file of an earlier start together with its mode.
        let unfinished = path.with_extension("new");
        // A file that an interrupted start left would keep its own mode.
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)?
            .write_all(&text)?;
        fs::rename(&unfinished, path)
    }

    /// Checks the ranges that the engine does not check itself. The gateway's
    /// configuration checks the same ranges, but an admin may edit the file.
    fn check(&self, path: &Path) -> Result<(), OptionsError> {
        let synthetic = match &self.engine {
            EngineChoice::Model => None,
            EngineChoice::Synthetic(device) => Some(device),
        };
        let fields = [
            ("threads", self.threads, 1, 1_024),
            ("gpu_memory_percent", Some(self.gpu_memory_percent), 1, 100),
            ("batch_step", Some(self.batch_step), 1, 1_000),
            ("step_timeout.times_predicted", Some(self.step_timeout.times_predicted), 1, 10_000),
            ("engine.synthetic.kv_tokens", synthetic.map(|it| it.kv_tokens), 16, 100_000_000),
            ("engine.synthetic.context", synthetic.map(|it| it.context), 2, 1 << 20),
        ];
        for (field, value, least, most) in fields {
            if value.is_some_and(|value| !(least..=most).contains(&value)) {
                return Err(OptionsError::Range { path: path.to_owned(), field, least, most });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn options() -> WorkerOptions {
        let name = WorkerName::new("0").expect("a name");
        let model = ModelName::new("m").expect("a name");
        let path = |path: &str| PathBuf::from(path);
        WorkerOptions::new(name, ListenAt::Socket(path("/s")), path("/d"), path("/m"), model)
    }

    #[test]
    fn options_file_keeps_every_field() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("0.json");
        let mut options = options();
        options.device = DeviceChoice::Cuda(None);
        options.step_time_budget = Duration::from_nanos(1_000_000_001);
        options.engine = EngineChoice::Synthetic(SyntheticDevice {
            cost: StepCost { speed: 0.3, ..StepCost::default() },
            kv_tokens: 16,
            context: 2,
            policy: SchedulePolicy::KeyCounters,
            faults: Some(PathBuf::from("/f")),
        });
        options.write(&path).expect("writes");
        let read = WorkerOptions::read(&path).expect("reads");
        assert_eq!(format!("{read:?}"), format!("{options:?}"));
        let mode = fs::metadata(&path).expect("exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn options_file_reports_mistakes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("0.json");
        let refused = |old: &str, new: &str| {
            options().write(&path).expect("writes");
            let text = fs::read_to_string(&path).expect("reads");
            assert!(text.contains(old), "{text}");
            fs::write(&path, text.replace(old, new)).expect("writes");
            let error = WorkerOptions::read(&path).expect_err("a mistake");
            let cause = error.source().map(ToString::to_string).unwrap_or_default();
            format!("{error}: {cause}")
        };
        for (old, new, expected) in [
            ("\"max_sequences\"", "\"max_sequence\"", "unknown field `max_sequence`"),
            ("\"deterministic\": false,", "", "missing field `deterministic`"),
            ("\"threads\": null", "\"threads\": \"4\"", "invalid type: string \"4\""),
            ("\"threads\": null", "\"threads\": 0", "threads must be from 1 to 1024"),
        ] {
            let words = refused(old, new);
            assert!(words.contains(expected), "{words}");
        }
        fs::remove_file(&path).expect("removes");
        let error = WorkerOptions::read(&path).expect_err("no file").to_string();
        assert!(error.starts_with("cannot read the worker options /"), "{error}");
    }
}
