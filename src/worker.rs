//! `tollgate worker`: one worker process, told everything on its command line.
//! `up` starts it with a pipe as its standard input; when that closes, it ends.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tollgate_config::SyntheticPolicy;
use tollgate_domain::{ModelName, WorkerName};
use tollgate_worker::{
    CardOptions, DeviceChoice, EngineChoice, HealthOptions, SchedulePolicy, StepCost, StepPatience,
    SyntheticDevice, Thresholds, WorkerError, WorkerOptions, build_kernels,
};

use crate::common::span;
use crate::{cli, logging};

/// One worker process; `up` starts it.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Its name, which stands in every record.
    #[arg(long, default_value = "0")]
    name: String,
    /// The Unix socket to serve on.
    #[arg(long, value_name = "PATH", required = true)]
    socket: Option<PathBuf>,
    /// The folder of its journal and calibrations.
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// The model's folder.
    #[arg(long, value_name = "DIR", required = true)]
    model: Option<PathBuf>,
    /// The model's name in requests.
    #[arg(long, value_name = "NAME", required = true)]
    model_name: Option<String>,
    /// model, or synthetic: a device that is not there.
    #[arg(long, default_value = "model")]
    engine: String,
    #[command(flatten)]
    synthetic: Synthetic,
    /// auto, cpu, cuda, cuda:UUID or cuda:INDEX.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Threads that compute on a CPU [default: one for each core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Bytes of memory for the KV cache on a CPU.
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20)]
    kv_memory: u64,
    /// Percent of a GPU's free memory that is taken.
    #[arg(long, value_name = "PERCENT", default_value_t = 90,
        value_parser = clap::value_parser!(u32).range(1..=100))]
    gpu_memory: u32,
    /// The same logits to the bit, whatever else is in the batch.
    #[arg(long)]
    deterministic: bool,
    /// Sequences in one batch.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_sequences: u32,
    /// Tokens that one step feeds at most, over all sequences.
    #[arg(long, value_name = "N", default_value_t = 512)]
    max_chunk_tokens: u32,
    /// How long one step should take at most.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "80ms")]
    step_time_budget: Duration,
    /// Requests that wait for the batch; more are refused.
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue_capacity: u32,
    /// The folder of the locks that say whose a card is [default: the host's].
    #[arg(long, value_name = "DIR")]
    card_locks: Option<PathBuf>,
    /// Others of this data folder use the same card: run steps for so long
    /// while they wait.
    #[arg(long, value_name = "SPAN", value_parser = span)]
    card_turn: Option<Duration>,
    #[command(flatten)]
    health: Health,
    /// How long any step may take before the device is given up.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "8s")]
    step_timeout: Duration,
    /// So many times as long as predicted a step may take, where that is more.
    #[arg(long, value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    step_times_predicted: u32,
    /// End when standard input closes.
    #[arg(long)]
    end_with_parent: bool,
}

/// What else a worker's program does.
#[derive(clap::Subcommand)]
enum Command {
    /// The kernels of GPUs.
    #[command(subcommand)]
    Kernels(Kernels),
}

/// What is done with kernels.
#[derive(clap::Subcommand)]
enum Kernels {
    /// Compile them into a folder, for machines without the vendor's compiler:
    /// a worker looks in DATA/kernels, and in `kernels` beside the program.
    Build {
        /// The folder to write to.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Folders where the compiler's library (libnvrtc) is looked for first.
        #[arg(long, value_name = "DIR")]
        libraries: Vec<PathBuf>,
    },
}

/// When the device is not well.
#[derive(clap::Args)]
struct Health {
    /// How often the device is looked at.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "5s")]
    health_every: Duration,
    /// Too hot, in degrees Celsius.
    #[arg(long, value_name = "DEGREES", default_value_t = 85)]
    health_hot: u32,
    /// Cool again.
    #[arg(long, value_name = "DEGREES", default_value_t = 75)]
    health_cooled: u32,
    /// How long it must have been well after an illness.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "5m")]
    health_well_for: Duration,
    /// Worth a word: more than so many percent busy.
    #[arg(long, value_name = "PERCENT", default_value_t = 95)]
    health_busy: u32,
    /// For so long.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "10m")]
    health_busy_for: Duration,
    /// Worth a word: more than so many percent of its memory in use.
    #[arg(long, value_name = "PERCENT", default_value_t = 90)]
    health_memory: u32,
    /// Worth a word: our memory on it grew by so many bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    health_leak: u64,
    /// The NVML library, where it is not found by its usual name.
    #[arg(long, value_name = "PATH")]
    health_nvml: Option<PathBuf>,
}

/// The synthetic engine: a step takes (step + sequence for each drawn token +
/// prefill-token for each token of a prompt + kv-token for each token of
/// context) / speed.
#[derive(clap::Args)]
struct Synthetic {
    /// Any step of the synthetic engine.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "28ms")]
    synthetic_step: Duration,
    /// Each token that it draws.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "300us")]
    synthetic_sequence: Duration,
    /// Each token of context that it reads.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "1200ns")]
    synthetic_kv_token: Duration,
    /// Each token of a prompt.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "210us")]
    synthetic_prefill_token: Duration,
    /// How much faster than all that.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    synthetic_speed: f64,
    /// Tokens that its KV cache holds.
    #[arg(long, value_name = "N", default_value_t = 10_000,
        value_parser = clap::value_parser!(u32).range(16..=100_000_000))]
    synthetic_kv_tokens: u32,
    /// Tokens that one sequence may hold.
    #[arg(long, value_name = "N", default_value_t = 8_192,
        value_parser = clap::value_parser!(u32).range(2..=1_048_576))]
    synthetic_context: u32,
    /// A file that a test writes to make a step fail.
    #[arg(long, value_name = "PATH")]
    synthetic_faults: Option<PathBuf>,
    /// Who runs next, to compare with fair: first_come, token_counters, key_counters.
    #[arg(long, value_name = "POLICY", value_parser = policy, default_value = "fair")]
    synthetic_policy: SchedulePolicy,
}

/// Serves until told to stop. The exit code says why it ended.
pub fn run(arguments: Arguments) -> ExitCode {
    let result = serve(arguments);
    let code = result.as_ref().err().and_then(|error| error.downcast_ref::<WorkerError>());
    match code.map(WorkerError::exit_code) {
        None => cli::exit(result),
        Some(code) => {
            cli::exit(result);
            ExitCode::from(code)
        }
    }
}

fn serve(mut arguments: Arguments) -> Result<()> {
    logging::start();
    if let Some(Command::Kernels(Kernels::Build { out, libraries })) = arguments.command.take() {
        for file in build_kernels(&out, &libraries)? {
            println!("{}", file.display());
        }
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // the device's thread has its own cores to use
        .enable_all()
        .build()?;
    let options = options(arguments)?;
    let result = runtime.block_on(tollgate_worker::serve(options));
    // A model that is still being loaded must not hold up the end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(result?)
}

fn options(arguments: Arguments) -> Result<WorkerOptions> {
    let parent = if arguments.end_with_parent {
        Some(std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?)
    } else {
        None
    };
    let mut options = WorkerOptions::new(
        WorkerName::new(&arguments.name)?,
        arguments.socket.context("--socket")?,
        arguments.data,
        arguments.model.context("--model")?,
        ModelName::new(&arguments.model_name.context("--model-name")?)?,
    );
    options.engine = engine(&arguments.engine, &arguments.synthetic)?;
    options.device = device(&arguments.device)?;
    options.threads = arguments.threads;
    options.kv_bytes = arguments.kv_memory;
    options.gpu_memory_percent = arguments.gpu_memory;
    options.deterministic = arguments.deterministic;
    options.step_tokens = arguments.max_chunk_tokens;
    options.max_sequences = arguments.max_sequences;
    options.step_time_budget = arguments.step_time_budget;
    options.queue_capacity = arguments.queue_capacity as usize;
    options.health = health(arguments.health);
    options.card = CardOptions { locks: arguments.card_locks, turn: arguments.card_turn };
    options.step_timeout = StepPatience {
        least: arguments.step_timeout,
        times_predicted: arguments.step_times_predicted,
    };
    options.faults = arguments.synthetic.synthetic_faults;
    options.parent = parent;
    Ok(options)
}

fn health(health: Health) -> HealthOptions {
    HealthOptions {
        nvml: health.health_nvml,
        every: health.health_every,
        thresholds: Thresholds {
            hot: health.health_hot,
            cooled: health.health_cooled,
            well_for: health.health_well_for,
            busy: health.health_busy,
            busy_for: health.health_busy_for,
            memory: health.health_memory,
            leak: health.health_leak,
        },
    }
}

fn engine(text: &str, synthetic: &Synthetic) -> Result<EngineChoice> {
    match text {
        "model" => Ok(EngineChoice::Model),
        "synthetic" => Ok(EngineChoice::Synthetic(SyntheticDevice {
            cost: StepCost {
                step: synthetic.synthetic_step,
                sequence: synthetic.synthetic_sequence,
                kv_token: synthetic.synthetic_kv_token,
                prefill_token: synthetic.synthetic_prefill_token,
                speed: synthetic.synthetic_speed,
            },
            kv_tokens: synthetic.synthetic_kv_tokens,
            context: synthetic.synthetic_context,
            policy: synthetic.synthetic_policy,
        })),
        _ => anyhow::bail!("--engine {text:?} is none of model, synthetic"),
    }
}

fn policy(text: &str) -> Result<SchedulePolicy, String> {
    match text.parse() {
        Ok(SyntheticPolicy::Fair) => Ok(SchedulePolicy::Fair),
        Ok(SyntheticPolicy::FirstCome) => Ok(SchedulePolicy::FirstComeFirstServed),
        Ok(SyntheticPolicy::TokenCounters) => Ok(SchedulePolicy::TokenCounters),
        Ok(SyntheticPolicy::KeyCounters) => Ok(SchedulePolicy::KeyCounters),
        Err(()) => Err("none of fair, first_come, token_counters, key_counters".to_owned()),
    }
}

fn device(text: &str) -> Result<DeviceChoice> {
    match text.split_once(':') {
        None if text == "auto" => Ok(DeviceChoice::Auto),
        None if text == "cpu" => Ok(DeviceChoice::Cpu),
        None if text == "cuda" => Ok(DeviceChoice::Cuda(None)),
        Some(("cuda", name)) if !name.is_empty() => Ok(DeviceChoice::Cuda(Some(name.to_owned()))),
        _ => anyhow::bail!("--device {text:?} is none of auto, cpu, cuda, cuda:UUID, cuda:INDEX"),
    }
}
