//! Sends a load: each request at its due time, whether or not earlier ones
//! were answered. Everything is bounded: requests under way, connections, and
//! the time until each must end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::client::Connection;
use crate::outcome::{End, Outcome, Seen, follow};
use crate::plan::{Due, Load, LoadError};
use crate::report::Report;

/// How far a run is, readable while it goes on.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests that fell due.
    pub due: AtomicU64,
    /// Requests answered whole.
    pub done: AtomicU64,
    /// Requests refused.
    pub refused: AtomicU64,
    /// Anything else that ended.
    pub failed: AtomicU64,
}

/// Sends `load` and reports on it. `stop` ends it early: what is under way is
/// waited for, what is not yet due is not sent.
///
/// # Errors
/// The load is invalid, or a connection could not be opened before the start.
pub async fn run(
    load: Load,
    progress: Arc<Progress>,
    stop: CancellationToken,
) -> Result<Report, LoadError> {
    let schedule = load.schedule()?;
    let pools = open(&load).await?;
    let bodies = Bodies::new(&load);
    let started = Instant::now();
    let mut under_way = JoinSet::new();
    let mut outcomes = Vec::with_capacity(schedule.len());
    let mut turn = 0usize;
    for due in schedule {
        let at = started + due.at;
        tokio::select! {
            () = tokio::time::sleep_until(at) => {}
            () = stop.cancelled() => break,
        }
        while let Some(ended) = under_way.try_join_next() {
            note(&mut outcomes, ended, &progress);
        }
        progress.due.fetch_add(1, Ordering::Relaxed);
        if under_way.len() >= load.in_flight.get() as usize {
            let outcome = Outcome::ended(due.tenant, End::NotSent, Duration::ZERO);
            note(&mut outcomes, Ok(outcome), &progress);
            continue;
        }
        turn += 1;
        let pool = &pools[due.tenant];
        let connection = Arc::clone(&pool[turn % pool.len()]);
        let body = bodies.body(due);
        under_way.spawn(send(connection, body, due, at, load.timeout));
    }
    while let Some(ended) = under_way.join_next().await {
        note(&mut outcomes, ended, &progress);
    }
    Ok(Report::new(&load, &outcomes, started.elapsed()))
}

/// One place on the wire. An h1 connection carries one request at a time, so
/// waiting for it is part of the latency; one that broke is opened again.
struct Slot {
    tenant: crate::plan::Tenant,
    protocol: crate::client::Protocol,
    open: tokio::sync::Mutex<Option<Connection>>,
    turn: tokio::sync::Mutex<()>,
}

async fn open(load: &Load) -> Result<Vec<Vec<Arc<Slot>>>, LoadError> {
    let mut pools = Vec::new();
    for tenant in &load.tenants {
        let mut pool = Vec::new();
        for _ in 0..load.connections.get() {
            let connection = tenant
                .target
                .connect(load.protocol)
                .await
                .map_err(|source| LoadError::Connect { tenant: tenant.name.clone(), source })?;
            pool.push(Arc::new(Slot {
                tenant: tenant.clone(),
                protocol: load.protocol,
                open: tokio::sync::Mutex::new(Some(connection)),
                turn: tokio::sync::Mutex::new(()),
            }));
        }
        pools.push(pool);
    }
    Ok(pools)
}

async fn send(slot: Arc<Slot>, body: Bytes, due: Due, at: Instant, timeout: Duration) -> Outcome {
    let mut late = Duration::ZERO;
    let sending = async {
        let connection = slot.connection().await?;
        // h1: hold the connection until the answer has been read.
        let _turn = if connection.is_http2() { None } else { Some(slot.turn.lock().await) };
        late = at.elapsed();
        follow(&connection, body, due.stream, at).await
    };
    let seen = tokio::time::timeout_at(at + timeout, sending).await;
    let whole = at.elapsed();
    let seen = match seen {
        Ok(Ok(seen)) => seen,
        Ok(Err(error)) => {
            slot.broke().await;
            return Outcome { late, ..Outcome::ended(due.tenant, End::Error(error.kind()), whole) };
        }
        Err(_) => {
            slot.broke().await;
            return Outcome { late, ..Outcome::ended(due.tenant, End::TimedOut, whole) };
        }
    };
    let Seen { end, first_token, gaps, tokens } = seen;
    Outcome { tenant: due.tenant, end, late, first_token, gaps, whole, tokens }
}

impl Slot {
    async fn connection(&self) -> Result<Connection, crate::client::ClientError> {
        let mut open = self.open.lock().await;
        if let Some(connection) = open.as_ref() {
            return Ok(connection.clone());
        }
        let connection = self.tenant.target.connect(self.protocol).await?;
        Ok(open.insert(connection).clone())
    }

    async fn broke(&self) {
        self.open.lock().await.take();
    }
}

impl Outcome {
    fn ended(tenant: usize, end: End, whole: Duration) -> Self {
        let none = Duration::ZERO;
        Self { tenant, end, late: none, first_token: None, gaps: Vec::new(), whole, tokens: 0 }
    }
}

fn note(
    outcomes: &mut Vec<Outcome>,
    ended: Result<Outcome, tokio::task::JoinError>,
    progress: &Progress,
) {
    // A task of ours that panicked is a bug here, not a figure of the server.
    let outcome = ended.expect("a sender panicked");
    let counter = match outcome.end {
        End::Done => &progress.done,
        End::Refused { .. } => &progress.refused,
        _ => &progress.failed,
    };
    counter.fetch_add(1, Ordering::Relaxed);
    outcomes.push(outcome);
}

/// Request bodies, made once for each prompt and manner.
struct Bodies {
    whole: Vec<Bytes>,
    streamed: Vec<Bytes>,
}

impl Bodies {
    fn new(load: &Load) -> Self {
        let body = |prompt: &String, stream: bool| {
            let mut body = serde_json::json!({
                "model": load.model,
                "messages": [{ "role": "user", "content": prompt }],
                "max_completion_tokens": load.max_tokens,
                "temperature": 0,
                "stream": stream,
            });
            if stream {
                body["stream_options"] = serde_json::json!({ "include_usage": true });
            }
            Bytes::from(body.to_string())
        };
        Self {
            whole: load.prompts.iter().map(|prompt| body(prompt, false)).collect(),
            streamed: load.prompts.iter().map(|prompt| body(prompt, true)).collect(),
        }
    }

    fn body(&self, due: Due) -> Bytes {
        let bodies = if due.stream { &self.streamed } else { &self.whole };
        bodies[due.prompt].clone()
    }
}
