//! A place on the wire: a connection that is opened when it is first needed
//! and opened again after it broke, and one request sent on it.

use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::client::{ClientError, Connection, Protocol, Target};
use crate::outcome::{End, Outcome, Seen, follow};

/// One connection. Over h1 it carries one request at a time, so waiting for it
/// is part of the latency.
pub(crate) struct Slot {
    target: Target,
    protocol: Protocol,
    open: Mutex<Option<Connection>>,
    turn: Mutex<()>,
}

impl Slot {
    pub(crate) fn new(target: Target, protocol: Protocol) -> Self {
        Self { target, protocol, open: Mutex::new(None), turn: Mutex::new(()) }
    }

    /// The connection, opened if it is not.
    pub(crate) async fn open(&self) -> Result<Connection, ClientError> {
        let mut open = self.open.lock().await;
        if let Some(connection) = open.as_ref() {
            return Ok(connection.clone());
        }
        let connection = self.target.connect(self.protocol).await?;
        Ok(open.insert(connection).clone())
    }

    /// The next request opens a new one.
    pub(crate) async fn broke(&self) {
        self.open.lock().await.take();
    }
}

/// Sends `body` for sender number `tenant`, due at `at`, and follows the answer.
pub(crate) async fn send(
    slot: &Slot,
    tenant: usize,
    body: Bytes,
    stream: bool,
    at: Instant,
    timeout: Duration,
) -> Outcome {
    send_noting(slot, tenant, body, stream, at, timeout, &OnceLock::new()).await
}

/// The same; `begun` is set at the first content of a stream.
pub(crate) async fn send_noting(
    slot: &Slot,
    tenant: usize,
    body: Bytes,
    stream: bool,
    at: Instant,
    timeout: Duration,
    begun: &OnceLock<Duration>,
) -> Outcome {
    let mut late = Duration::ZERO;
    let sending = async {
        let connection = slot.open().await?;
        // h1: hold the connection until the answer has been read.
        let _turn = if connection.is_http2() { None } else { Some(slot.turn.lock().await) };
        late = at.elapsed();
        follow(&connection, body, stream, at, begun).await
    };
    let seen = tokio::time::timeout_at(at + timeout, sending).await;
    let whole = at.elapsed();
    let end = match seen {
        Ok(Ok(Seen { end, first_token, gaps, tokens, at_worker })) => {
            return Outcome { tenant, end, late, first_token, gaps, whole, tokens, at_worker };
        }
        Ok(Err(error)) => End::Error(error.kind()),
        Err(_) => End::TimedOut,
    };
    slot.broke().await;
    Outcome { late, ..Outcome::ended(tenant, end, whole) }
}

impl Outcome {
    /// One that saw nothing of an answer.
    pub(crate) fn ended(tenant: usize, end: End, whole: Duration) -> Self {
        Self {
            tenant,
            end,
            late: Duration::ZERO,
            first_token: None,
            gaps: Vec::new(),
            whole,
            tokens: 0,
            at_worker: None,
        }
    }
}
