//! `tollgate worker`: one worker process. `tollgate up` starts it with a file
//! of options and with a pipe as standard input, and the worker ends when that
//! pipe closes.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tollgate_worker::{WorkerError, WorkerOptions, build_kernels};

use crate::common::exit;
use crate::logging;

/// Run one worker process. `tollgate up` starts its own workers.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct WorkerArguments {
    #[command(subcommand)]
    command: Option<WorkerTask>,
    /// The worker's options (JSON). `tollgate up` writes one such file for each
    /// worker, beside the worker's socket: DATA/run/NAME.json.
    #[arg(long, value_name = "FILE", required = true)]
    options: Option<PathBuf>,
    /// End when standard input closes.
    #[arg(long)]
    end_with_parent: bool,
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
    let mut options = WorkerOptions::read(&arguments.options.context("--options is required")?)?;
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
