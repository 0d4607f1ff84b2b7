//! The requests to end that a worker listens for: signals, and the end of a
//! pipe whose write end the parent holds. The kernel closes that pipe when the
//! parent ends, even if the parent was killed.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A request to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShutdownRequest {
    /// Accept nothing new, finish the current requests, then end.
    Drain,
    /// Finish the current step, then end.
    Stop,
}

/// A listener for requests to end.
pub(crate) struct ShutdownListener {
    terminate: Signal,
    interrupt: Signal,
    parent: Option<pipe::Receiver>,
}

impl ShutdownListener {
    /// Starts to listen. A worker with a parent ignores SIGINT, because Ctrl-C
    /// in a terminal also reaches the parent, which ends the worker in order.
    pub(crate) fn listen(parent: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            parent: parent.map(pipe::Receiver::from_owned_fd).transpose()?,
        })
    }

    /// Waits for the next request. The future is cancel-safe.
    pub(crate) async fn next(&mut self) -> ShutdownRequest {
        let has_parent = self.parent.is_some();
        tokio::select! {
            _ = self.terminate.recv() => ShutdownRequest::Drain,
            _ = self.interrupt.recv(), if !has_parent => ShutdownRequest::Drain,
            () = end_of_pipe(&mut self.parent) => ShutdownRequest::Stop,
        }
    }
}

/// Waits until the pipe closes. Never returns if there is no pipe.
async fn end_of_pipe(pipe: &mut Option<pipe::Receiver>) {
    let Some(open) = pipe else {
        return std::future::pending().await;
    };
    let mut ignored = [0; 64];
    // A read error counts as the end: the worker could not notice it later.
    // Bytes in the pipe have no meaning. Only the end of the pipe has one.
    while matches!(open.read(&mut ignored).await, Ok(1..)) {}
    // The next call must not report the same end again.
    *pipe = None;
}
