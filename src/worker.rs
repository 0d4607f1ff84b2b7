//! `tollgate worker`: one worker process. `tollgate up` starts it with a file
//! of options and with a pipe as standard input, and the worker ends when that
//! pipe closes. With `--listen` it is a worker of a gateway on another machine.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tollgate_config::{Config, Flags, Model};
use tollgate_domain::{ModelName, WorkerName};
use tollgate_worker::{ListenAt, WorkerError, WorkerOptions, build_kernels};

use crate::common::{exit, load};
use crate::up::{remote, workers};
use crate::{data, logging};

/// Run one worker process. `tollgate up` starts its own workers.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct WorkerArguments {
    #[command(subcommand)]
    command: Option<WorkerTask>,
    /// The worker's options (JSON). `tollgate up` writes one such file for each
    /// worker, beside the worker's socket: DATA/run/NAME.json.
    #[arg(long, value_name = "FILE", required_unless_present = "listen")]
    options: Option<PathBuf>,
    /// End when standard input closes.
    #[arg(long)]
    end_with_parent: bool,
    #[command(flatten)]
    network: NetworkArguments,
}

/// The options of a worker on the network.
#[derive(clap::Args)]
struct NetworkArguments {
    /// Listen at this address for a gateway on another machine. The config has the
    /// model, the device, and in `[cluster]` this machine's certificates.
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["options", "end_with_parent"], requires = "name")]
    listen: Option<SocketAddr>,
    /// The worker's name, as in its certificate and in the gateway's config.
    #[arg(long, value_name = "NAME", requires = "listen")]
    name: Option<WorkerName>,
    /// A config file, or a folder of *.toml files.
    #[arg(long, value_name = "PATH", requires = "listen")]
    config: Option<PathBuf>,
    /// The data folder, for the journal and the calibrations [default: data].
    #[arg(long, value_name = "DIR", requires = "listen")]
    data: Option<PathBuf>,
    /// The model, if the config has several.
    #[arg(long, value_name = "NAME", requires = "listen")]
    model: Option<ModelName>,
    /// The device: auto, cpu, cuda, cuda:INDEX or cuda:UUID [default: the model's].
    #[arg(long, value_name = "DEVICE", requires = "listen")]
    device: Option<String>,
}

/// A task other than serving.
#[derive(clap::Subcommand)]
enum WorkerTask {
    /// Manage the compiled kernels of GPUs.
    #[command(subcommand)]
    Kernels(Kernels),
}

/// A task with kernels.
#[derive(clap::Subcommand)]
enum Kernels {
    /// Compile the kernels into a folder, for machines without NVRTC.
    ///
    /// A worker looks for compiled kernels in DATA/kernels and in the folder
    /// `kernels` beside the program.
    Build {
        /// The folder to write to.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// A folder to search first for the compiler's library (libnvrtc).
        #[arg(long, value_name = "DIR")]
        libraries: Vec<PathBuf>,
    },
}

/// Serves until the worker is told to stop. The exit code tells the supervisor
/// why the worker ended.
pub fn run(arguments: WorkerArguments) -> ExitCode {
    let result = serve(arguments);
    let code = result.as_ref().err().and_then(|error| error.downcast_ref::<WorkerError>());
    match code.map(WorkerError::exit_code) {
        None => exit(result),
        // `exit` prints the error. Its own code would not tell the supervisor the cause.
        Some(code) => {
            exit(result);
            ExitCode::from(code)
        }
    }
}

fn serve(mut arguments: WorkerArguments) -> Result<()> {
    logging::start();
    if let Some(WorkerTask::Kernels(Kernels::Build { out, libraries })) = arguments.command.take() {
        for file in build_kernels(&out, &libraries)? {
            println!("{}", file.display());
        }
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // more would compete with the device's own threads
        .enable_all()
        .build()?;
    let mut options = match arguments.options {
        Some(file) => WorkerOptions::read(&file)?,
        None => arguments.network.options()?,
    };
    if arguments.end_with_parent {
        // The supervisor holds the write end of this pipe, and the kernel closes it
        // with the supervisor.
        let input = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
        options.parent = Some(input);
    }
    let result = runtime.block_on(tollgate_worker::serve(options));
    // A blocking thread may still be loading a model, which takes minutes.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(result?)
}

impl NetworkArguments {
    /// Returns the worker's options by the config.
    fn options(self) -> Result<WorkerOptions> {
        let Self { listen, name, config, data, model, device } = self;
        let (address, name) =
            (listen.context("--listen is required")?, name.context("--name is required")?);
        // Without `--model` here: that flag of `up` names a folder.
        let flags = Flags { data, device, ..Flags::default() };
        let config = load(config, flags)?;
        let Some(cluster) = config.cluster() else {
            bail!("the config has no section [cluster], which names this worker's certificates");
        };
        let files = remote::link_files(cluster);
        let model = chosen_model(&config, model.as_ref())?;
        let [device] = model.devices.as_slice() else {
            bail!(
                "the model {} has {} devices in the config, and a worker runs on one; choose it with --device",
                model.name,
                model.devices.len()
            );
        };
        let folder =
            workers::text_path(std::path::absolute(config.data()).context("data folder")?)?;
        data::make(&folder)?;
        let listen = ListenAt::Network { address, files };
        workers::options((&config, &folder), (model, device), name, listen)
    }
}

/// Returns the model of this name, or the only one.
fn chosen_model<'a>(config: &'a Config, name: Option<&ModelName>) -> Result<&'a Model> {
    let all: Vec<&str> = config.models().map(|model| model.name.as_str()).collect();
    match name {
        Some(name) => config
            .model(name)
            .with_context(|| format!("the config has no model {name}; it has {}", all.join(", "))),
        None if all.len() == 1 => config.models().next().context("the config has no model"),
        None => bail!("the config has several models; choose one with --model: {}", all.join(", ")),
    }
}
