//! What tells a worker to end: signals, and the pipe whose write end its
//! parent holds. The parent's death closes the pipe, whatever killed it.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a worker is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Take nothing new, finish what there is, end.
    Drain,
    /// Finish the current step, end.
    Stop,
}

/// Listens for it.
pub(crate) struct Told {
    terminate: Signal,
    interrupt: Signal,
    parent: Option<pipe::Receiver>,
}

impl Told {
    /// Starts to listen. With a parent, Ctrl-C on the terminal is the
    /// parent's to act on.
    pub(crate) fn listen(parent: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            parent: parent.map(pipe::Receiver::from_owned_fd).transpose()?,
        })
    }

    /// The next word. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> Word {
        let has_parent = self.parent.is_some();
        tokio::select! {
            _ = self.terminate.recv() => Word::Drain,
            _ = self.interrupt.recv(), if !has_parent => Word::Drain,
            () = end_of_pipe(&mut self.parent) => Word::Stop,
        }
    }
}

/// Waits for the pipe's end; for ever where there is no pipe.
async fn end_of_pipe(pipe: &mut Option<pipe::Receiver>) {
    let Some(open) = pipe else {
        return std::future::pending().await;
    };
    let mut ignored = [0; 64];
    // An error is as good as an end: the parent cannot be heard any more.
    while matches!(open.read(&mut ignored).await, Ok(1..)) {}
    *pipe = None;
}
