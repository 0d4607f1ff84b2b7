//! The engine: one thread that owns a device, its KV cache and the batch.
//!
//! [`Engine::start`] takes a backend and starts the thread. The rest of the process uses an
//! [`EngineHandle`]. Any fault inside a step ends the engine, because a device is not
//! reliable after a fault. The supervisor starts a new process.

mod batch;
mod charge;
pub mod inbox;
mod intake;
pub mod journal;
pub mod manual;
mod outcome;
pub mod pulse;
mod queues;
mod step;
pub mod submission;
mod tick;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tollgate_domain::{CostTable, DeviceNanos, StepCounts};

use self::inbox::{EngineHandle, Inbox, Phase};
use self::intake::Intake;
use self::journal::StepJournal;
use self::submission::{RequestOutcome, SubmitError};
use self::tick::{Core, Tick, panic_message};
use crate::backend::{BLOCK_TOKENS, Backend, BackendError, StepLimits};
use crate::clock::Clock;
use crate::meter::Totals;
use crate::schedule::{Bounds, SchedulePolicy, Spare};

/// A running engine: the thread and a handle to it. Dropping this value does not stop the
/// thread; use [`EngineHandle::drain`] or [`EngineHandle::stop`].
pub struct Engine {
    handle: EngineHandle,
    thread: JoinHandle<Result<Totals, EngineError>>,
}

/// The reason for which an engine ended by itself. Running requests have ended with
/// [`FinishReason::Fault`](tollgate_domain::FinishReason::Fault). If the journal failed,
/// their sinks were dropped without a final call.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The backend failed in a step.
    #[error("the device failed")]
    Backend(#[from] BackendError),
    /// A panic on the engine's thread. The text is the panic's message.
    #[error("the engine panicked: {0}")]
    Panic(String),
    /// The journal could not be written.
    #[error("the journal failed")]
    Journal(#[source] io::Error),
    /// Work was present and the scheduler decided nothing. This is a bug.
    #[error("the scheduler stalled")]
    Stalled,
}

/// Options of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Calibrated cost of steps on this device for this model.
    pub table: CostTable,
    /// Largest number of sequences in the batch.
    pub max_sequences: u32,
    /// Time budget of a step. Prompts are read in chunks that fit it.
    pub step_time_budget: Duration,
    /// Largest part by which batch work makes a step with interactive work longer, in
    /// percent.
    pub batch_step: u32,
    /// Largest number of waiting requests.
    pub queue_capacity: usize,
    /// Largest number of waiting prompt tokens, over all requests.
    pub queue_tokens: usize,
    /// Largest number of prompts in one request.
    pub max_prompts: usize,
    /// Rule that decides which request runs next.
    pub policy: SchedulePolicy,
    /// Device time by which another tenant must be ahead before a waiting request may
    /// preempt one of its requests.
    pub preemption_guard: Duration,
    /// Time during which a preempted request cannot be preempted again.
    pub preemption_rest: Duration,
}

impl EngineOptions {
    /// Creates the default options around a calibrated table.
    pub fn new(table: CostTable) -> Self {
        Self {
            table,
            max_sequences: 64,
            step_time_budget: Duration::from_millis(80),
            batch_step: 23,
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
    /// Starts the engine's thread. The meter starts here: the time until the first step is
    /// idle time.
    ///
    /// # Errors
    ///
    /// The system's error if no thread can be created.
    pub fn start(
        backend: Box<dyn Backend>,
        options: EngineOptions,
        clock: Arc<dyn Clock>,
        journal: Box<dyn StepJournal>,
    ) -> io::Result<Self> {
        let (mut core, inbox) = assemble(backend, options, clock, journal);
        let handle = EngineHandle::new(Arc::clone(&inbox));
        // A thread of its own: a step blocks for milliseconds and must not block an async
        // runtime.
        let thread = thread::Builder::new().name("engine".into()).spawn(move || {
            // A panic must end the engine with an error, not leave its requests without an
            // answer.
            let result = catch_unwind(AssertUnwindSafe(|| serve(&mut core, &inbox)))
                .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))));
            // The inbox is closed on every path, so that no request waits for an engine
            // that has ended.
            close(&inbox);
            result.map(|()| core.totals())
        })?;
        Ok(Self { handle, thread })
    }

    /// Returns a handle to the engine.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Returns true if the thread has ended. Then [`Engine::join`] does not block.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the engine ends by [`EngineHandle::drain`], by [`EngineHandle::stop`] or
    /// by a fault. Returns the totals of the meter.
    ///
    /// # Errors
    ///
    /// The fault that ended the engine.
    pub fn join(self) -> Result<Totals, EngineError> {
        self.thread
            .join()
            .unwrap_or_else(|panic| Err(EngineError::Panic(panic_message(panic.as_ref()))))
    }
}

/// Builds the engine without its thread.
fn assemble(
    backend: Box<dyn Backend>,
    options: EngineOptions,
    clock: Arc<dyn Clock>,
    journal: Box<dyn StepJournal>,
) -> (Core, Arc<Inbox>) {
    let EngineOptions {
        table,
        max_sequences,
        step_time_budget,
        batch_step,
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
    // At least half of the tokens of a step stay free for reading prompts.
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
    let inbox = Arc::new(Inbox::new(intake, policy, Arc::clone(&clock), status));
    let bounds = Bounds {
        table,
        step_time_budget,
        batch_step,
        max_sequences,
        limits,
        total_blocks: backend.kv_blocks(),
        guard: DeviceNanos(preemption_guard.as_nanos().min(u128::from(u64::MAX)) as u64),
        rest: preemption_rest,
        spare: match policy {
            // First come, first served knows no share owners.
            SchedulePolicy::FirstComeFirstServed => Spare::default(),
            // The control policy models engines without fairness, so it keeps nothing free.
            _ => Spare::of(max_sequences, backend.kv_blocks()),
        },
    };
    (Core::new(backend, bounds, policy, clock, journal, Arc::clone(&inbox)), inbox)
}

/// Runs ticks until the engine ends.
fn serve(core: &mut Core, inbox: &Inbox) -> Result<(), EngineError> {
    // The backend must bind its context to the thread that uses it.
    core.enter();
    let mut commands = inbox.collect();
    loop {
        inbox.pulse.begin();
        commands = match core.tick(commands)? {
            Tick::Worked => inbox.collect(),
            Tick::Idle => {
                core.idle()?;
                // An idle engine must not look hung to the watchdog.
                inbox.pulse.rest();
                inbox.wait(IDLE_BEAT)
            }
            Tick::Ended => return Ok(()),
        };
    }
}

/// Closes the inbox and refuses the requests that arrived in the meantime.
fn close(inbox: &Inbox) {
    inbox.pulse.rest();
    // The phase changes first: a submission after this call is refused at the door.
    inbox.advance_to_phase(Phase::Ended);
    for mut arrival in inbox.collect().arrivals {
        arrival.submission.sink.done(RequestOutcome::Refused(SubmitError::Stopped.into()));
    }
}

/// Interval at which an idle engine calls [`StepJournal::idle`].
const IDLE_BEAT: Duration = Duration::from_secs(1);

/// Load and totals of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Number of waiting requests.
    pub queued: u32,
    /// Number of requests that have started and not ended.
    pub running: u32,
    /// KV blocks in the pool.
    pub kv_blocks_total: u32,
    /// KV blocks that no sequence holds.
    pub kv_blocks_free: u32,
    /// Predicted device time of all waiting and running requests, as reference cost.
    pub backlog: DeviceNanos,
    /// True if new requests are refused.
    pub draining: bool,
    /// Number of steps since the start.
    pub steps: u64,
    /// Device time of all steps.
    pub busy: DeviceNanos,
    /// The steps by length and by sequences.
    pub counts: StepCounts,
    /// Number of sequences that lost their place in the batch.
    pub preemptions: u64,
    /// Predicted device time of waiting interactive requests, as reference cost.
    pub waiting_interactive: DeviceNanos,
    /// Predicted device time of waiting batch requests, as reference cost.
    pub waiting_batch: DeviceNanos,
}

#[cfg(test)]
mod tests;
