//! Keeps one worker process alive: starts it, watches it, starts it again with
//! backoff when it ends, kills it when nothing is heard of it, and ends it with
//! us. The worker reads a pipe whose other end we hold and stops when it
//! closes, so it cannot outlive us even if we are killed.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tollgate_worker::{EXIT_DEVICE, EXIT_HUNG};

use super::vital::{LOOK_EVERY, Pardons, Patience, Signs, Verdict, Watch};

/// The first wait before a restart; it doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
/// The longest wait before a restart.
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// A worker that lived this long starts again without delay.
const STEADY: Duration = Duration::from_secs(60);
/// How long a worker may take to finish its step and journal when we end.
const GRACE: Duration = Duration::from_secs(5);

/// The command line of one worker.
pub struct Worker {
    /// Its name in config and logs.
    pub name: String,
    /// The arguments after the program's own path.
    pub arguments: Vec<OsString>,
    /// The one card that the driver is to show it; all where none is given.
    pub shown: Option<String>,
    /// How long it may be silent.
    pub patience: Patience,
}

/// When a worker is not to be started again.
#[derive(Clone)]
pub struct Ends {
    /// Once cancelled, an end is no longer final.
    pub ready: CancellationToken,
    /// Cancelled when we end.
    pub stop: CancellationToken,
}

impl Worker {
    /// Runs the worker until it is to stop. Before it has been ready an end is
    /// final, since it would only end again: its exit status is returned.
    /// `signs` says what the gateway hears of it.
    pub async fn keep(self, ends: Ends, signs: impl Fn() -> Signs) -> Result<Ended> {
        let mut backoff = FIRST_BACKOFF;
        let mut pardons = Pardons::default();
        loop {
            let started = Instant::now();
            let watch = Watch::new(self.patience, signs(), started);
            let Some(status) = self.live(&ends, watch, &mut pardons, &signs).await? else {
                return Ok(Ended::Stopped);
            };
            if !ends.ready.is_cancelled() {
                return Ok(Ended::NeverReady(status));
            }
            if started.elapsed() >= STEADY {
                backoff = FIRST_BACKOFF;
            }
            let why = why(status);
            tracing::error!(worker = self.name, why, %status, ?backoff, "worker ended; it is started again");
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = ends.stop.cancelled() => return Ok(Ended::Stopped),
            }
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    /// One process from its start to its end; none where it was us who ended.
    async fn live(
        &self,
        ends: &Ends,
        mut watch: Watch,
        pardons: &mut Pardons,
        signs: &impl Fn() -> Signs,
    ) -> Result<Option<ExitStatus>> {
        let mut child = self.start()?;
        // Waiting closes the pipe, which would end the worker: hold it apart.
        let pipe = child.stdin.take();
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                status = child.wait() => {
                    return status.map(Some).context("could not wait for a worker");
                }
                () = ends.stop.cancelled() => {
                    end(child, pipe).await?;
                    return Ok(None);
                }
                now = looks.tick() => match watch.look(signs(), pardons.are_left(now), now) {
                    Verdict::Well => {}
                    Verdict::Silent(quiet) => {
                        tracing::error!(worker = self.name, ?quiet, "nothing is heard of a worker: it is killed");
                        child.start_kill().context("could not kill a worker")?;
                        return child.wait().await.map(Some).context("could not wait for a worker");
                    }
                    Verdict::Lied => {
                        tracing::error!(worker = self.name, "a worker lied: it is ended");
                        pardons.give(now);
                        return end(child, pipe).await.map(Some);
                    }
                }
            }
        }
    }

    fn start(&self) -> Result<Child> {
        let program = std::env::current_exe().context("where is this program?")?;
        Command::new(program)
            .args(&self.arguments)
            .envs(self.shown.iter().map(|uuid| ("CUDA_VISIBLE_DEVICES", uuid)))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            // Its own group: Ctrl-C in a terminal reaches us, and we end it in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("could not start worker {}", self.name))
    }
}

/// Why a worker is no longer kept.
#[derive(Debug)]
pub enum Ended {
    /// We were told to stop.
    Stopped,
    /// It ended before it had ever been ready.
    NeverReady(ExitStatus),
}

/// What an exit status says.
fn why(status: ExitStatus) -> &'static str {
    match status.code() {
        Some(code) if code == i32::from(EXIT_HUNG) => "a step did not end",
        Some(code) if code == i32::from(EXIT_DEVICE) => "its device failed",
        Some(0) => "it was asked to",
        Some(_) => "it failed",
        None => "it was killed",
    }
}

/// Closes a worker's pipe, waits, and kills it if it takes too long.
async fn end(mut child: Child, pipe: Option<ChildStdin>) -> Result<ExitStatus> {
    drop(pipe);
    match tokio::time::timeout(GRACE, child.wait()).await {
        Ok(status) => status.context("could not wait for a worker"),
        Err(_) => {
            child.start_kill().context("could not kill a worker")?;
            child.wait().await.context("could not wait for a worker")
        }
    }
}
