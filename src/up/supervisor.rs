//! The supervisor of one worker process. It starts the process, restarts it
//! with a backoff when it ends, kills it when its heartbeats stop, and ends it
//! together with this process.
//!
//! The worker's standard input is a pipe whose write end the supervisor holds.
//! The worker stops when the pipe closes, so a worker cannot outlive this
//! process even if this process is killed.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tollgate_worker::{EXIT_DEVICE, EXIT_HUNG};

use super::liveness::{CHECK_EVERY, DistrustRestarts, Heartbeats, SilenceTimeouts, Verdict, Watch};

/// The wait before the first restart. Each further restart doubles the wait.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
/// The longest wait before a restart.
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// The lifetime after which the backoff begins anew.
const STEADY: Duration = Duration::from_secs(60);
/// Time that a worker has to finish its step and its journal at shutdown.
const GRACE: Duration = Duration::from_secs(5);

/// The command line of one worker.
pub struct WorkerCommand {
    /// The worker's name in the config and in logs.
    pub name: String,
    /// The arguments after the program's own path.
    pub arguments: Vec<OsString>,
    /// The UUID of the only GPU that the worker may see; `None` shows all GPUs.
    pub visible_gpu: Option<String>,
    /// The longest silence that is allowed.
    pub timeouts: SilenceTimeouts,
}

/// The signals that stop restarts.
#[derive(Clone)]
pub struct Phases {
    /// Cancelled once every worker has been ready. Restarts begin then.
    pub ready: CancellationToken,
    /// Cancelled at shutdown.
    pub stop: CancellationToken,
}

impl WorkerCommand {
    /// Runs the worker until shutdown. `heartbeats` returns what the gateway
    /// knows of the worker, and `restarted` is told the cause of each restart.
    ///
    /// A worker that ends before every worker was ready is not restarted, since
    /// the same config would fail again; its exit status is returned.
    #[expect(
        clippy::disallowed_methods,
        reason = "the watch gets the time at which the process starts"
    )]
    pub async fn supervise(
        self,
        phases: Phases,
        heartbeats: impl Fn() -> Heartbeats,
        restarted: impl Fn(&'static str),
    ) -> Result<Ended> {
        let mut backoff = FIRST_BACKOFF;
        let mut restarts = DistrustRestarts::default();
        loop {
            let started = Instant::now();
            let watch = Watch::new(self.timeouts, heartbeats(), started);
            let Some((status, cause)) =
                self.run_once(&phases, watch, &mut restarts, &heartbeats).await?
            else {
                return Ok(Ended::Stopped);
            };
            if !phases.ready.is_cancelled() {
                return Ok(Ended::NeverReady(status));
            }
            // A worker that ran for a while has no lasting fault, so its restart
            // need not wait.
            if started.elapsed() >= STEADY {
                backoff = FIRST_BACKOFF;
            }
            let reason = cause.sentence();
            tracing::error!(worker = self.name, reason, %status, ?backoff, "worker process ended; restarting it");
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = phases.stop.cancelled() => return Ok(Ended::Stopped),
            }
            restarted(cause.label());
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    /// Runs one process from its start to its end. Returns the end and its cause; `None` at
    /// shutdown.
    async fn run_once(
        &self,
        phases: &Phases,
        mut watch: Watch,
        restarts: &mut DistrustRestarts,
        heartbeats: &impl Fn() -> Heartbeats,
    ) -> Result<Option<(ExitStatus, EndCause)>> {
        let mut child = self.start()?;
        // `Child::wait` closes the pipe, which would end the worker: keep it apart.
        let pipe = child.stdin.take();
        let mut checks = interval(CHECK_EVERY);
        // Missed checks must not follow in a burst.
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                status = child.wait() => {
                    let status = status.context("cannot wait for a worker process")?;
                    return Ok(Some((status, EndCause::of(status))));
                }
                () = phases.stop.cancelled() => {
                    end(child, pipe).await?;
                    return Ok(None);
                }
                now = checks.tick() => match watch.check(heartbeats(), restarts.are_left(now), now) {
                    Verdict::Alive => {}
                    Verdict::Silent(quiet) => {
                        tracing::error!(worker = self.name, ?quiet, "worker sends no heartbeats; killing the process");
                        // A silent worker may not react to a request to end, so it is
                        // killed.
                        child.start_kill().context("cannot kill a worker process")?;
                        let status = child.wait().await.context("cannot wait for a worker process")?;
                        return Ok(Some((status, EndCause::Silent)));
                    }
                    Verdict::Distrusted => {
                        tracing::error!(worker = self.name, "worker sent an invalid report; restarting the process");
                        restarts.record(now);
                        return Ok(Some((end(child, pipe).await?, EndCause::Distrusted)));
                    }
                }
            }
        }
    }

    fn start(&self) -> Result<Child> {
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        Command::new(program)
            .args(&self.arguments)
            .envs(self.visible_gpu.iter().map(|uuid| ("CUDA_VISIBLE_DEVICES", uuid)))
            .stdin(Stdio::piped())
            // Standard output is for the banner of `up` only.
            .stdout(Stdio::null())
            // A supervisor that is dropped must not leave a worker behind.
            .kill_on_drop(true)
            // A group of its own: Ctrl-C in a terminal must reach this process alone,
            // which then ends the gateway before the workers.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start worker {}", self.name))
    }
}

/// The reason that supervision ended.
#[derive(Debug)]
pub enum Ended {
    /// This process shuts down.
    Stopped,
    /// The worker ended before every worker was ready.
    NeverReady(ExitStatus),
}

/// The cause for which a worker process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndCause {
    Hung,
    Device,
    Ended,
    Failed,
    Killed,
    Silent,
    Distrusted,
}

impl EndCause {
    /// Returns the cause that an exit status stands for.
    fn of(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) if code == i32::from(EXIT_HUNG) => Self::Hung,
            Some(code) if code == i32::from(EXIT_DEVICE) => Self::Device,
            Some(0) => Self::Ended,
            Some(_) => Self::Failed,
            // A process without an exit code was ended by a signal.
            None => Self::Killed,
        }
    }

    /// Returns the value of the label in metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Hung => "hung",
            Self::Device => "device",
            Self::Ended => "ended",
            Self::Failed => "failed",
            Self::Killed => "killed",
            Self::Silent => "silent",
            Self::Distrusted => "distrusted",
        }
    }

    /// Returns the reason for the log.
    fn sentence(self) -> &'static str {
        match self {
            Self::Hung => "a step did not end in time",
            Self::Device => "the device failed",
            Self::Ended => "the worker was told to end",
            Self::Failed => "the worker failed",
            Self::Killed => "the worker was killed",
            Self::Silent => "the worker sent no heartbeats",
            Self::Distrusted => "the worker sent an invalid report",
        }
    }
}

/// Closes the worker's pipe and waits. Kills the worker after [`GRACE`].
async fn end(mut child: Child, pipe: Option<ChildStdin>) -> Result<ExitStatus> {
    // The end of the pipe asks the worker to stop after its current step.
    drop(pipe);
    match tokio::time::timeout(GRACE, child.wait()).await {
        Ok(status) => status.context("cannot wait for a worker process"),
        Err(_) => {
            child.start_kill().context("cannot kill a worker process")?;
            child.wait().await.context("cannot wait for a worker process")
        }
    }
}
