//! The engine: one thread that owns a device, its KV cache and the batch.
//!
//! [`Engine::start`] takes a backend and makes that thread; an
//! [`EngineHandle`] is what the rest of the process holds. Any fault inside a
//! step ends the engine: there is no recovery in the process, whoever started
//! it starts another.

mod batch;
mod charge;
pub mod driven;
mod intake;
pub mod journal;
mod lines;
pub mod mailbox;
pub mod pulse;
mod step;
pub mod submission;
mod turn;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tollgate_domain::{CostTable, DeviceNanos};

use self::intake::Intake;
use self::journal::StepJournal;
use self::mailbox::{EngineHandle, Mailbox, Phase};
use self::step::panic_message;
use self::submission::{RequestOutcome, SubmitError};
use self::turn::{Core, Turn};
use crate::backend::{BLOCK_TOKENS, Backend, BackendError, StepLimits};
use crate::clock::Clock;
use crate::meter::Totals;
use crate::schedule::{Bounds, SchedulePolicy, Spare};

/// A running engine: its thread, and the way to it. Dropping this leaves the
/// thread to itself; it is ended through its handle.
pub struct Engine {
    handle: EngineHandle,
    thread: JoinHandle<Result<Totals, EngineError>>,
}

/// Why an engine ended before it was asked to. Whatever ran has ended with
/// [`FinishReason::Fault`](tollgate_domain::FinishReason::Fault), or, if the
/// journal failed, its sinks were dropped without a last word.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The backend failed in a step.
    #[error("the device failed")]
    Backend(#[from] BackendError),
    /// Something panicked on the engine's thread.
    #[error("the engine panicked: {0}")]
    Panic(String),
    /// The account could not be kept.
    #[error("the journal failed")]
    Journal(#[source] io::Error),
    /// There was work and the scheduler found nothing to do.
    #[error("the scheduler stalled")]
    Stalled,
}

/// How an engine is run.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The price of steps on this device, for this model.
    pub table: CostTable,
    /// Sequences in the batch at once.
    pub max_sequences: u32,
    /// How long a step should take at most: prefill chunks are cut to it.
    pub step_time_budget: Duration,
    /// Requests that may wait.
    pub queue_capacity: usize,
    /// Prompt tokens that may wait, over all requests.
    pub queue_tokens: usize,
    /// Prompts in one request.
    pub max_prompts: usize,
    /// How it is decided who runs next.
    pub policy: SchedulePolicy,
    /// Device time by which another tenant must be ahead before a request that
    /// waits takes the place of one of its requests.
    pub preemption_guard: Duration,
    /// How long a request that lost its place so is spared from losing it again.
    pub preemption_rest: Duration,
}

impl EngineOptions {
    /// The defaults around a calibrated table.
    pub fn new(table: CostTable) -> Self {
        Self {
            table,
            max_sequences: 64,
            step_time_budget: Duration::from_millis(80),
            queue_capacity: 256,
            queue_tokens: 4 << 20,
            max_prompts: 128,
            policy: SchedulePolicy::Fair,
            preemption_guard: Duration::from_millis(250),
            preemption_rest: Duration::from_secs(5),
        }
    }
}

impl Engine {
    /// Starts the engine's thread. From here on the meter runs: the time until
    /// the first step is idle.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        backend: Box<dyn Backend>,
        options: EngineOptions,
        clock: Arc<dyn Clock>,
        journal: Box<dyn StepJournal>,
    ) -> io::Result<Self> {
        let (mut core, mailbox) = assemble(backend, options, clock, journal);
        let handle = EngineHandle::new(Arc::clone(&mailbox));
        let thread = thread::Builder::new().name("engine".into()).spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(|| serve(&mut core, &mailbox)))
                .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))));
            close(&mailbox);
            result.map(|()| core.totals())
        })?;
        Ok(Self { handle, thread })
    }

    /// The way to it.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Whether its thread has ended; then `join` does not wait.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it ends: after [`EngineHandle::drain`], after
    /// [`EngineHandle::stop`], or by a fault.
    ///
    /// # Errors
    /// The fault.
    pub fn join(self) -> Result<Totals, EngineError> {
        self.thread
            .join()
            .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))))
    }
}

/// The engine without its thread.
fn assemble(
    backend: Box<dyn Backend>,
    options: EngineOptions,
    clock: Arc<dyn Clock>,
    journal: Box<dyn StepJournal>,
) -> (Core, Arc<Mailbox>) {
    let EngineOptions {
        table,
        max_sequences,
        step_time_budget,
        queue_capacity,
        queue_tokens,
        max_prompts,
        policy,
        preemption_guard,
        preemption_rest,
    } = options;
    let shape = backend.shape();
    let limits = backend.limits();
    let StepLimits { tokens, logit_rows } = limits;
    // Half of a step's tokens at least are left for reading prompts.
    let max_sequences = max_sequences.min(logit_rows).min(tokens.div_ceil(2)).max(1);
    let pool_tokens = u64::from(backend.kv_blocks()) * u64::from(BLOCK_TOKENS);
    let intake = Intake {
        table: table.clone(),
        vocabulary: shape.vocabulary,
        context: shape.context,
        pool_tokens,
        max_sequences,
        max_prompts,
        queue_capacity,
        queue_tokens,
    };
    let status = EngineStatus {
        kv_blocks_total: backend.kv_blocks(),
        kv_blocks_free: backend.kv_blocks(),
        ..EngineStatus::default()
    };
    let mailbox = Arc::new(Mailbox::new(intake, policy, Arc::clone(&clock), status));
    let bounds = Bounds {
        table,
        step_time_budget,
        max_sequences,
        limits,
        total_blocks: backend.kv_blocks(),
        guard: DeviceNanos(preemption_guard.as_nanos().min(u128::from(u64::MAX)) as u64),
        rest: preemption_rest,
        spare: match policy {
            SchedulePolicy::FirstComeFirstServed => Spare::default(),
            _ => Spare {
                places: max_sequences / SPARE_PARTS,
                blocks: backend.kv_blocks() / SPARE_PARTS,
            },
        },
    };
    (Core::new(backend, bounds, policy, clock, journal, Arc::clone(&mailbox)), mailbox)
}

/// The thread's loop.
fn serve(core: &mut Core, mailbox: &Mailbox) -> Result<(), EngineError> {
    core.enter();
    let mut mail = mailbox.collect();
    loop {
        mailbox.pulse.begin();
        mail = match core.turn(mail)? {
            Turn::Worked => mailbox.collect(),
            Turn::Idle => {
                core.idle()?;
                mailbox.pulse.rest();
                mailbox.wait(IDLE_BEAT)
            }
            Turn::Ended => return Ok(()),
        };
    }
}

/// Shuts the door, and answers those who came through it as it closed.
fn close(mailbox: &Mailbox) {
    mailbox.pulse.rest();
    mailbox.turn_to(Phase::Ended);
    for mut arrival in mailbox.collect().arrivals {
        arrival.submission.sink.done(RequestOutcome::Refused(SubmitError::Stopped.into()));
    }
}

/// One part in so many of places and cache is kept free by whoever has half.
const SPARE_PARTS: u32 = 32;
/// How often an idle engine tells its journal so.
const IDLE_BEAT: Duration = Duration::from_secs(1);

/// Load and figures of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Requests that wait.
    pub queued: u32,
    /// Requests that have started and not ended.
    pub running: u32,
    /// KV blocks in the pool.
    pub kv_blocks_total: u32,
    /// Those that hold nothing.
    pub kv_blocks_free: u32,
    /// Predicted device time of all that waits and runs, reference cost.
    pub backlog: DeviceNanos,
    /// Whether new requests are refused.
    pub draining: bool,
    /// Steps since the start.
    pub steps: u64,
    /// Device time of those steps.
    pub busy: DeviceNanos,
}

#[cfg(test)]
mod tests;
