//! The sender of a load. It sends each request at its due time, whether or not
//! earlier ones were answered. Requests in flight, connections and the time of each
//! request are bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::outcome::{End, Outcome, Question};
use crate::plan::{Due, Load, LoadError};
use crate::prompts::{Prompt, Prompts, WordRange};
use crate::report::{Report, Sample};
use crate::slot::{DueRequest, Slot, send};

/// The progress of a run.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests that were due.
    pub due: AtomicU64,
    /// Requests with a complete answer.
    pub done: AtomicU64,
    /// Requests that were refused.
    pub refused: AtomicU64,
    /// Requests with any other end.
    pub failed: AtomicU64,
}

/// A finished run.
#[derive(Debug)]
pub struct Finished {
    /// The report.
    pub report: Report,
    /// Every request in the order of due times.
    pub samples: Vec<Sample>,
}

/// Sends `load` and returns a report. `stop` ends the run early: later requests are
/// not sent, and answers of earlier ones are awaited.
///
/// # Errors
/// The load is invalid, or a connection could not be opened before the start.
pub async fn run(
    load: Load,
    progress: Arc<Progress>,
    stop: CancellationToken,
) -> Result<Finished, LoadError> {
    let schedule = load.schedule()?;
    // Connections open before the first due time, so handshakes do not count as
    // latency.
    let pools = open(&load).await?;
    let bodies = Arc::new(Bodies::new(&load));
    let started = clock::now();
    let mut under_way = JoinSet::new();
    let mut samples = Vec::with_capacity(schedule.len());
    let mut turn = 0usize;
    let timeout = load.timeout;
    for due in schedule {
        let at = started + due.at;
        tokio::select! {
            () = tokio::time::sleep_until(at) => {}
            () = stop.cancelled() => break,
        }
        while let Some(ended) = under_way.try_join_next() {
            note(&mut samples, ended, &progress);
        }
        progress.due.fetch_add(1, Ordering::Relaxed);
        // Without a bound a server that hangs would use up this machine's memory.
        if under_way.len() >= load.in_flight.get() as usize {
            let outcome = Outcome::ended(due.tenant, End::NotSent, Duration::ZERO);
            note(&mut samples, Ok(Sample { due: due.at, outcome }), &progress);
            continue;
        }
        turn += 1;
        let pool = &pools[due.tenant];
        let connection = Arc::clone(&pool[turn % pool.len()]);
        let Due { tenant, stream, .. } = due;
        let bodies = Arc::clone(&bodies);
        under_way.spawn(async move {
            // Made here, because a long body would delay the next request.
            let question = Question::chat(bodies.body(due), stream);
            let outcome = send(&connection, DueRequest { tenant, question, at, timeout }).await;
            Sample { due: due.at, outcome }
        });
    }
    while let Some(ended) = under_way.join_next().await {
        note(&mut samples, ended, &progress);
    }
    samples.sort_by_key(|sample| sample.due);
    Ok(Finished { report: Report::new(&load, &samples, started.elapsed()), samples })
}

async fn open(load: &Load) -> Result<Vec<Vec<Arc<Slot>>>, LoadError> {
    let mut pools = Vec::new();
    for tenant in &load.tenants {
        let mut pool = Vec::new();
        for _ in 0..load.connections.get() {
            let slot = Slot::new(tenant.target.clone(), load.protocol);
            slot.open()
                .await
                .map_err(|source| LoadError::Connect { tenant: tenant.name.clone(), source })?;
            pool.push(Arc::new(slot));
        }
        pools.push(pool);
    }
    Ok(pools)
}

#[expect(
    clippy::expect_used,
    reason = "a panic of a sender is a defect of the load test, not a result of the server"
)]
fn note(
    samples: &mut Vec<Sample>,
    ended: Result<Sample, tokio::task::JoinError>,
    progress: &Progress,
) {
    // A panic is a bug of the load test and not a result of the server.
    let sample = ended.expect("a sender panicked");
    let counter = match sample.outcome.end {
        End::Done => &progress.done,
        End::Refused { .. } => &progress.refused,
        _ => &progress.failed,
    };
    counter.fetch_add(1, Ordering::Relaxed);
    samples.push(sample);
}

/// The bodies of the requests.
enum Bodies {
    /// One for each prompt, whole and streamed, created before the run.
    InTurn { whole: Vec<Bytes>, streamed: Vec<Bytes> },
    /// A new one for each request.
    Words { words: WordRange, seed: u64, model: String, max_tokens: u32 },
}

impl Bodies {
    fn new(load: &Load) -> Self {
        let max_tokens = load.max_tokens.get();
        match &load.prompts {
            Prompts::InTurn(prompts) => {
                let body = |stream| {
                    let body = move |prompt: &Prompt| prompt.body(&load.model, max_tokens, stream);
                    prompts.iter().map(body).collect()
                };
                Self::InTurn { whole: body(false), streamed: body(true) }
            }
            &Prompts::Words(words) => {
                Self::Words { words, seed: load.seed, model: load.model.clone(), max_tokens }
            }
        }
    }

    fn body(&self, due: Due) -> Bytes {
        match self {
            Self::InTurn { whole, streamed } => {
                let bodies = if due.stream { streamed } else { whole };
                bodies[due.prompt % bodies.len()].clone()
            }
            Self::Words { words, seed, model, max_tokens } => {
                words.prompt(*seed, due.prompt).body(model, *max_tokens, due.stream)
            }
        }
    }
}

/// Returns the body of a chat with one question.
pub(crate) fn chat_body(model: &str, prompt: &str, max_tokens: u32, stream: bool) -> Bytes {
    Prompt::text(prompt).body(model, max_tokens, stream)
}
