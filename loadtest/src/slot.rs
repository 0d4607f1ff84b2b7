//! A slot for a connection. The connection is opened when it is first needed and
//! again after it broke. Also sends one request on a slot.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::client::{ClientError, Connection, Protocol, Target};
use crate::outcome::{End, FollowedAnswer, Outcome, Question, follow};

/// A slot for one connection. An HTTP/1.1 connection carries one request at a time,
/// so waiting for it is part of the latency.
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

    /// Returns the connection. Opens it if necessary.
    pub(crate) async fn open(&self) -> Result<Connection, ClientError> {
        let mut open = self.open.lock().await;
        if let Some(connection) = open.as_ref() {
            return Ok(connection.clone());
        }
        let connection = self.target.connect(self.protocol).await?;
        Ok(open.insert(connection).clone())
    }

    /// Drops a broken connection, so that the next request opens a new one.
    pub(crate) async fn broke(&self) {
        self.open.lock().await.take();
    }
}

/// A request that is due.
pub(crate) struct DueRequest {
    /// The number of the tenant.
    pub(crate) tenant: usize,
    pub(crate) question: Question,
    /// The moment when the request is due.
    pub(crate) at: Instant,
    /// The longest time from then to the end of the answer.
    pub(crate) timeout: Duration,
}

/// Sends a request and reads the answer.
pub(crate) async fn send(slot: &Slot, request: DueRequest) -> Outcome {
    send_noting(slot, request, &OnceLock::new()).await
}

/// Does the same as [`send`]. Sets `begun` at the first content of a stream.
pub(crate) async fn send_noting(
    slot: &Slot,
    request: DueRequest,
    begun: &OnceLock<Duration>,
) -> Outcome {
    let DueRequest { tenant, question, at, timeout } = request;
    let mut late = None;
    let sending = async {
        let connection = slot.open().await?;
        // HTTP/1.1 needs the connection until the answer is complete.
        let _turn = if connection.is_http2() { None } else { Some(slot.turn.lock().await) };
        late = Some(at.elapsed());
        follow(&connection, question, at, begun).await
    };
    let seen = tokio::time::timeout_at(at + timeout, sending).await;
    let whole = at.elapsed();
    let end = match seen {
        Ok(Ok(FollowedAnswer { end, first_token, gaps, tokens, at_worker })) => {
            return Outcome { tenant, end, late, first_token, gaps, whole, tokens, at_worker };
        }
        Ok(Err(error)) => End::Error(error.kind()),
        Err(_) => End::TimedOut,
    };
    slot.broke().await;
    Outcome { late, ..Outcome::ended(tenant, end, whole) }
}

impl Outcome {
    /// Creates the outcome of a request without an answer.
    pub(crate) fn ended(tenant: usize, end: End, whole: Duration) -> Self {
        Self {
            tenant,
            end,
            late: None,
            first_token: None,
            gaps: Vec::new(),
            whole,
            tokens: 0,
            at_worker: None,
        }
    }
}
