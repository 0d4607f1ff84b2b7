//! Keeps one worker process alive: starts it, watches it, starts it again with
//! backoff when it ends, and ends it with us. The worker reads a pipe whose
//! other end we hold and stops when it closes, so it cannot outlive us even if
//! we are killed.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::{Child, Command};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

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
}

impl Worker {
    /// Runs the worker until `stop`. Before `ready` has been cancelled an end
    /// is final, since it would only end again: its exit status is returned.
    pub async fn keep(self, ready: CancellationToken, stop: CancellationToken) -> Result<Ended> {
        let mut backoff = FIRST_BACKOFF;
        loop {
            let started = Instant::now();
            let mut child = self.start()?;
            // Waiting closes the pipe, which would end the worker: hold it apart.
            let pipe = child.stdin.take();
            let status = tokio::select! {
                status = child.wait() => status.context("could not wait for a worker")?,
                () = stop.cancelled() => {
                    drop(pipe);
                    end(child).await?;
                    return Ok(Ended::Stopped);
                }
            };
            if !ready.is_cancelled() {
                return Ok(Ended::NeverReady(status));
            }
            if started.elapsed() >= STEADY {
                backoff = FIRST_BACKOFF;
            }
            tracing::error!(worker = self.name, %status, ?backoff, "worker ended; it is started again");
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = stop.cancelled() => return Ok(Ended::Stopped),
            }
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    fn start(&self) -> Result<Child> {
        let program = std::env::current_exe().context("where is this program?")?;
        Command::new(program)
            .args(&self.arguments)
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

/// Waits for a worker whose pipe was closed, and kills it if it takes too long.
async fn end(mut child: Child) -> Result<()> {
    if tokio::time::timeout(GRACE, child.wait()).await.is_err() {
        child.kill().await.context("could not kill a worker")?;
    }
    Ok(())
}
