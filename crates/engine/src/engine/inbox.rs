//! The inbox of the engine's thread, written by other threads.
//!
//! The inbox is bounded: it holds submissions up to the capacity of the queue, cancels of
//! live requests, and the wish to drain or stop. No call blocks on a full queue. Either the
//! new request is refused, or the newest request of the longest queue is displaced. Each
//! lock is held for a few operations only.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_domain::{DeviceNanos, MonotonicTime, RequestId, Tier};

use super::EngineStatus;
use super::intake::Intake;
use super::pulse::{Pulse, Work};
use super::queues::{Queued, Queues, Size, Ticket};
use super::submission::{CancelReason, RequestKey, Submission, SubmitError};
use crate::clock::Clock;
use crate::schedule::{SchedulePolicy, Seat};

/// A handle to a running engine. Cloning is cheap.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: Arc<Inbox>,
}

impl EngineHandle {
    pub(super) fn new(inbox: Arc<Inbox>) -> Self {
        Self { inbox }
    }

    /// Submits a request to the engine. After `Ok` the sink gets all results.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] if the request can never run, or cannot run now. The engine then
    /// keeps nothing of the request.
    pub fn submit(&self, submission: Submission) -> Result<(), SubmitError> {
        self.inbox.submit(submission)
    }

    /// Ends a request at the next step, with the tokens generated so far. A request that is
    /// unknown or has ended is ignored.
    pub fn cancel(&self, request: &RequestId, attempt: u32, reason: CancelReason) {
        self.inbox.cancel((request.clone(), attempt), reason);
    }

    /// Returns load and totals as of the last step.
    pub fn status(&self) -> EngineStatus {
        self.inbox.status()
    }

    /// Returns the current tick of the engine's thread, or `None` while the thread waits.
    /// The call takes no lock, so it also works while the thread is stuck.
    pub fn work(&self) -> Option<Work> {
        self.inbox.pulse.work()
    }

    /// Stops accepting requests. The engine ends when its work is done.
    pub fn drain(&self) {
        self.inbox.advance_to_phase(Phase::Draining);
    }

    /// Ends the engine after the current step. Running requests end with a fault, waiting
    /// ones are refused.
    pub fn stop(&self) {
        self.inbox.advance_to_phase(Phase::Stopping);
    }
}

/// The phase of the engine's life. A phase is never left for an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Serving,
    Draining,
    Stopping,
    Ended,
}

/// An accepted submission with the values computed at the door.
pub(super) struct Arrival {
    pub(super) submission: Submission,
    pub(super) at: MonotonicTime,
    /// Position in the tree of shares.
    pub(super) seat: Seat,
    /// Ticket in the queues of the inbox.
    pub(super) ticket: Ticket,
}

/// Everything that arrived since the last tick.
pub(super) struct Commands {
    pub(super) arrivals: Vec<Arrival>,
    /// Requests that were displaced, unless they have started by now.
    pub(super) displaced: Vec<RequestKey>,
    pub(super) cancels: BTreeMap<RequestKey, CancelReason>,
    pub(super) phase: Phase,
}

/// Shared state between the engine's thread and its handles.
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
    /// Displaced requests; at most as many as may wait.
    displaced: Vec<RequestKey>,
    /// Cancels. Only requests in `live` may be here, which bounds the map.
    cancels: BTreeMap<RequestKey, CancelReason>,
    /// Attempts that were accepted and have not ended. Bounded by the queue's capacity plus
    /// the running requests.
    live: HashSet<RequestKey>,
    /// Requests that wait here or in the engine.
    queues: Queues,
    /// Number of tokens that one choice is expected to generate.
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
        // Checked before the lock is taken: the check of a long prompt takes time.
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
        // A second run of the same attempt would be billed twice.
        if state.live.contains(&key) {
            return Err(SubmitError::Invalid(format!(
                "request {request} attempt {attempt} is already in the engine"
            )));
        }
        let seat = Seat::new(self.policy, *tier, pool.as_ref(), caller, *weight);
        let predicted = state.queues.predicted_wait(&seat);
        // Refusing now is better than refusing after the deadline: the client can go
        // elsewhere.
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
        // The thread may be waiting in `wait`.
        self.wake.notify_one();
        Ok(())
    }

    fn cancel(&self, key: RequestKey, reason: CancelReason) {
        let mut state = self.state();
        if state.live.contains(&key) {
            // The first reason counts.
            state.cancels.entry(key).or_insert(reason);
            self.wake.notify_one();
        }
    }

    pub(super) fn advance_to_phase(&self, phase: Phase) {
        let mut state = self.state();
        // `max` keeps a late drain from undoing a stop.
        state.phase = state.phase.max(phase);
        self.wake.notify_one();
    }

    fn status(&self) -> EngineStatus {
        let (waiting, batch, phase) = {
            let state = self.state();
            (state.queues.size(), state.queues.size_of(Tier::Batch), state.phase)
        };
        // The two locks are never held together, so their order cannot deadlock.
        let mut status = *self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.queued = waiting.requests as u32;
        status.backlog =
            DeviceNanos(status.backlog.nanos().saturating_add(waiting.expected.nanos()));
        status.waiting_batch = batch.expected;
        status.waiting_interactive =
            DeviceNanos(waiting.expected.nanos().saturating_sub(batch.expected.nanos()));
        status.draining = phase > Phase::Serving;
        status
    }

    /// Takes all commands without waiting.
    pub(super) fn collect(&self) -> Commands {
        Self::empty(&mut self.state())
    }

    /// Takes all commands. Waits up to `at_most` for the first one.
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

    /// Returns the predicted wait of a new request in `seat`.
    pub(super) fn predicted_wait(&self, seat: &Seat) -> Duration {
        self.state().queues.predicted_wait(seat)
    }

    /// Records that a request is starting.
    pub(super) fn began(&self, ticket: Ticket) {
        self.state().queues.begin(ticket);
    }

    /// Records that a request left its queue for any reason.
    pub(super) fn dequeued(&self, ticket: Ticket) {
        self.state().queues.remove(ticket);
    }

    /// Records that a request ended. Its key may be used again.
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
        // Every change under the lock is complete before the lock is released, so the state
        // is valid even after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Makes room for a new request and returns the displaced requests, or `None` if the
    /// new request is refused.
    fn make_room(&mut self, seat: &Seat, size: &Size, intake: &Intake) -> Option<Vec<RequestKey>> {
        let most = Size {
            requests: intake.queue_capacity,
            prompt_tokens: intake.queue_tokens,
            expected: DeviceNanos::ZERO,
        };
        // Displaced requests stay in the engine until its next tick, so their number needs
        // a bound of its own.
        if self.displaced.len() >= intake.queue_capacity {
            return None;
        }
        self.queues.make_room(seat, size, &most)
    }
}

/// Expected tokens of a choice before any choice has ended.
pub(super) const FIRST_GUESS_TOKENS: u64 = 128;
