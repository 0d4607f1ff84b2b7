//! Where other threads leave word for the engine's thread.
//!
//! A bounded inbox: submissions up to the queue's capacity, cancels of what
//! is alive only, and the wish to drain or stop. Nobody waits in here: a full
//! queue is an answer, to the newcomer or to the newest of the longest line,
//! and each lock is held for a few operations.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_domain::{DeviceNanos, MonotonicTime, RequestId};

use super::EngineStatus;
use super::intake::Intake;
use super::pulse::{Pulse, Work};
use super::queues::{Queued, Queues, Size, Ticket};
use super::submission::{CancelReason, RequestKey, Submission, SubmitError};
use crate::clock::Clock;
use crate::schedule::{SchedulePolicy, Seat};

/// What other threads hold of a running engine. Cloning is cheap.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: Arc<Inbox>,
}

impl EngineHandle {
    pub(super) fn new(inbox: Arc<Inbox>) -> Self {
        Self { inbox }
    }

    /// Hands a request to the engine. From `Ok` on its sink is answered.
    ///
    /// # Errors
    /// [`SubmitError`] when it can never run, or not now; nothing was kept.
    pub fn submit(&self, submission: Submission) -> Result<(), SubmitError> {
        self.inbox.submit(submission)
    }

    /// Ends a request at the next step, with what it has. One that is not (or
    /// no longer) known is left alone.
    pub fn cancel(&self, request: &RequestId, attempt: u32, reason: CancelReason) {
        self.inbox.cancel((request.clone(), attempt), reason);
    }

    /// Load and figures as of the last step.
    pub fn status(&self) -> EngineStatus {
        self.inbox.status()
    }

    /// What its thread is at; `None` while it waits for something to do. Read
    /// without a lock, so that it can be asked while the thread is stuck.
    pub fn work(&self) -> Option<Work> {
        self.inbox.pulse.work()
    }

    /// Takes nothing new; the engine ends when all it has is done.
    pub fn drain(&self) {
        self.inbox.advance_to_phase(Phase::Draining);
    }

    /// Ends the engine after the current step: what runs ends as a fault, what
    /// waits is refused.
    pub fn stop(&self) {
        self.inbox.advance_to_phase(Phase::Stopping);
    }
}

/// How far the engine's life has come. It only ever moves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Serving,
    Draining,
    Stopping,
    Ended,
}

/// A submission that was taken, with what was found out about it at the door.
pub(super) struct Arrival {
    pub(super) submission: Submission,
    pub(super) at: MonotonicTime,
    /// Where it stands in the order of who runs next.
    pub(super) seat: Seat,
    /// Names it in the door's count of what waits.
    pub(super) ticket: Ticket,
}

/// What had come in since the engine last looked.
pub(super) struct Commands {
    pub(super) arrivals: Vec<Arrival>,
    /// Requests that have to go for others, if they have not started by now.
    pub(super) displaced: Vec<RequestKey>,
    pub(super) cancels: BTreeMap<RequestKey, CancelReason>,
    pub(super) phase: Phase,
}

pub(super) struct Inbox {
    intake: Intake,
    policy: SchedulePolicy,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    wake: Condvar,
    status: Mutex<EngineStatus>,
    pub(super) pulse: Pulse,
}

struct State {
    arrivals: Vec<Arrival>,
    /// At most as many as may wait.
    displaced: Vec<RequestKey>,
    /// Only of requests in `live`, which bounds it.
    cancels: BTreeMap<RequestKey, CancelReason>,
    /// Every attempt that was taken and has not ended: at most the queue's
    /// capacity and what runs.
    live: HashSet<RequestKey>,
    /// What waits, here and in the engine's lines.
    queues: Queues,
    /// Tokens that a choice is expected to generate.
    expected_tokens: u64,
    phase: Phase,
}

impl Inbox {
    pub(super) fn new(
        intake: Intake,
        policy: SchedulePolicy,
        clock: Arc<dyn Clock>,
        status: EngineStatus,
    ) -> Self {
        Self {
            intake,
            policy,
            clock,
            state: Mutex::new(State {
                arrivals: Vec::new(),
                displaced: Vec::new(),
                cancels: BTreeMap::new(),
                live: HashSet::new(),
                queues: Queues::default(),
                expected_tokens: FIRST_GUESS_TOKENS,
                phase: Phase::Serving,
            }),
            wake: Condvar::new(),
            status: Mutex::new(status),
            pulse: Pulse::default(),
        }
    }

    fn submit(&self, submission: Submission) -> Result<(), SubmitError> {
        let prompt_tokens = self.intake.check(&submission)?;
        let at = self.clock.now();
        let mut state = self.state();
        match state.phase {
            Phase::Serving => {}
            Phase::Draining | Phase::Stopping => return Err(SubmitError::Draining),
            Phase::Ended => return Err(SubmitError::Stopped),
        }
        let Submission { request, attempt, tier, pool, caller, weight, .. } = &submission;
        let key = (request.clone(), *attempt);
        if state.live.contains(&key) {
            return Err(SubmitError::Invalid(format!(
                "request {request} attempt {attempt} is already here"
            )));
        }
        let seat = Seat::new(self.policy, *tier, pool.as_ref(), caller, *weight);
        let predicted = state.queues.predicted_wait(&seat);
        if predicted > submission.queue_deadline {
            return Err(SubmitError::Deadline { predicted });
        }
        let expected = self.intake.expected(&submission, state.expected_tokens);
        let size = Size { requests: 1, prompt_tokens, expected };
        let Some(displaced) = state.make_room(&seat, &size, &self.intake) else {
            return Err(SubmitError::Full { predicted });
        };
        state.displaced.extend(displaced);
        state.live.insert(key.clone());
        let ticket = state.queues.push(Queued { key, seat: seat.clone(), size });
        state.arrivals.push(Arrival { submission, at, seat, ticket });
        self.wake.notify_one();
        Ok(())
    }

    fn cancel(&self, key: RequestKey, reason: CancelReason) {
        let mut state = self.state();
        if state.live.contains(&key) {
            state.cancels.entry(key).or_insert(reason);
            self.wake.notify_one();
        }
    }

    pub(super) fn advance_to_phase(&self, phase: Phase) {
        let mut state = self.state();
        state.phase = state.phase.max(phase);
        self.wake.notify_one();
    }

    fn status(&self) -> EngineStatus {
        let (waiting, phase) = {
            let state = self.state();
            (state.queues.size(), state.phase)
        };
        let mut status = *self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.queued = waiting.requests as u32;
        status.backlog =
            DeviceNanos(status.backlog.nanos().saturating_add(waiting.expected.nanos()));
        status.draining = phase > Phase::Serving;
        status
    }

    /// Takes what has come in, at once.
    pub(super) fn collect(&self) -> Commands {
        Self::empty(&mut self.state())
    }

    /// Takes what has come in; waits for something up to `at_most`.
    pub(super) fn wait(&self, at_most: Duration) -> Commands {
        let (mut state, _) = self
            .wake
            .wait_timeout_while(self.state(), at_most, |state| {
                state.arrivals.is_empty()
                    && state.cancels.is_empty()
                    && state.phase == Phase::Serving
            })
            .unwrap_or_else(PoisonError::into_inner);
        Self::empty(&mut state)
    }

    fn empty(state: &mut State) -> Commands {
        Commands {
            arrivals: std::mem::take(&mut state.arrivals),
            displaced: std::mem::take(&mut state.displaced),
            cancels: std::mem::take(&mut state.cancels),
            phase: state.phase,
        }
    }

    /// How long a newcomer in `seat` would wait now.
    pub(super) fn predicted_wait(&self, seat: &Seat) -> Duration {
        self.state().queues.predicted_wait(seat)
    }

    /// A request has begun to start.
    pub(super) fn began(&self, ticket: Ticket) {
        self.state().queues.begin(ticket);
    }

    /// A request left its line, whatever became of it.
    pub(super) fn dequeued(&self, ticket: Ticket) {
        self.state().queues.remove(ticket);
    }

    /// A request ended; its id may come again.
    pub(super) fn ended(&self, key: &RequestKey) {
        let mut state = self.state();
        state.live.remove(key);
        state.cancels.remove(key);
    }

    pub(super) fn publish(&self, status: EngineStatus, expected_tokens: u64) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
        self.state().expected_tokens = expected_tokens;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change under the lock is whole, so a panic elsewhere leaves it sound.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Makes room for a newcomer; says who has to go. `None` if it is refused.
    fn make_room(&mut self, seat: &Seat, size: &Size, intake: &Intake) -> Option<Vec<RequestKey>> {
        let most = Size {
            requests: intake.queue_capacity,
            prompt_tokens: intake.queue_tokens,
            expected: DeviceNanos::ZERO,
        };
        // Whoever has to go is here until the engine has looked.
        if self.displaced.len() >= intake.queue_capacity {
            return None;
        }
        self.queues.make_room(seat, size, &most)
    }
}

/// Generated tokens expected of a choice before any was seen to end.
pub(super) const FIRST_GUESS_TOKENS: u64 = 128;
