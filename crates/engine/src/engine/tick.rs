//! The state of the engine's thread, and one tick of it.
//!
//! A tick applies the commands, runs a step, books the step, and only then delivers its
//! tokens. All state belongs to one thread. The thread itself is in the parent module, so
//! that a test can run ticks with its own clock.

#![expect(
    clippy::expect_used,
    reason = "a request, its sequences and its queue entries are added and removed together"
)]

mod ahead;
mod device;
mod finished;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{DeviceNanos, FinishReason, MonotonicTime, SequenceId};

use super::batch::{Request, Requests, Sequence, Sequences};
use super::inbox::{Arrival, Commands, FIRST_GUESS_TOKENS, Inbox, Phase};
use super::journal::{RequestFigures, StepJournal};
use super::outcome::{ChoiceEvent, Outcome};
use super::step::{Begun, Part, SampledPart};
use super::submission::{CancelReason, Refusal, RefusedReason, RequestKey, RequestOutcome};
use super::{EngineError, EngineStatus};
use crate::backend::{Backend, StepOutput};
use crate::clock::Clock;
use crate::kv::BlockPool;
use crate::meter::{Meter, Totals};
use crate::schedule::{
    Bounds, Chunk, Decisions, NodeId, Rank, Running, SchedulePolicy, Shares, Shrink, View, decide,
};

pub(super) use self::device::panic_message;

pub(super) struct Core {
    pub(super) backend: Box<dyn Backend>,
    /// Outputs of finished steps, kept so that their memory is used again.
    pub(super) outputs: Vec<StepOutput>,
    /// The step that the device received before the previous one was finished.
    ahead: Option<Begun>,
    pub(super) end_tokens: Vec<u32>,
    pub(super) sequences: Sequences,
    pub(super) requests: Requests,
    clock: Arc<dyn Clock>,
    journal: Box<dyn StepJournal>,
    inbox: Arc<Inbox>,
    bounds: Bounds,
    policy: SchedulePolicy,
    by_key: HashMap<RequestKey, SequenceId>,
    pub(super) shares: Shares,
    /// Requests that may have ended since the last call of [`Core::settle`].
    ending: BTreeSet<SequenceId>,
    /// Number of requests that have started and not ended.
    started: u32,
    pool: BlockPool,
    meter: Meter,
    next_sequence: u64,
    /// Number of sequences that lost their place in the batch.
    preemptions: u64,
    /// Moving average of the generated tokens of a choice.
    expected_tokens: f64,
}

/// The result of a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// The tick did something; run another one.
    Worked,
    /// Nothing to do until a command arrives.
    Idle,
    /// All work is done and no more is accepted.
    Ended,
}

impl Core {
    pub(super) fn new(
        backend: Box<dyn Backend>,
        bounds: Bounds,
        policy: SchedulePolicy,
        clock: Arc<dyn Clock>,
        journal: Box<dyn StepJournal>,
        inbox: Arc<Inbox>,
    ) -> Self {
        Self {
            pool: BlockPool::new(backend.kv_blocks()),
            end_tokens: backend.shape().end_tokens.clone(),
            meter: Meter::new(bounds.table.clone(), clock.now()),
            outputs: Vec::new(),
            ahead: None,
            sequences: Sequences::new(),
            requests: Requests::new(),
            by_key: HashMap::new(),
            shares: Shares::default(),
            ending: BTreeSet::new(),
            started: 0,
            policy,
            next_sequence: 1,
            preemptions: 0,
            expected_tokens: FIRST_GUESS_TOKENS as f64,
            backend,
            clock,
            journal,
            inbox,
            bounds,
        }
    }

    /// Returns the totals of the meter.
    pub(super) fn totals(&self) -> Totals {
        self.meter.totals()
    }

    /// Applies the commands, then runs a step if there is work.
    pub(super) fn tick(&mut self, commands: Commands) -> Result<Tick, EngineError> {
        // Arrivals come first: a cancel or a displacement may concern a request that
        // arrived in the same batch of commands.
        self.take(commands.arrivals);
        self.displace(&commands.displaced);
        self.cancel(commands.cancels);
        if commands.phase >= Phase::Stopping {
            // The device already runs this step, so its time must be booked before the
            // engine ends.
            self.finish_ahead()?;
            self.break_off()?;
            return Ok(Tick::Ended);
        }
        // Budgets are checked before the step, so that no token is computed that cannot be
        // paid.
        self.end_over_budget();
        self.settle()?;
        let is_done = self.requests.is_empty() && self.ahead.is_none();
        let tick = match (is_done, commands.phase) {
            (true, Phase::Serving) => Tick::Idle,
            (true, _) => Tick::Ended,
            (false, _) => {
                self.step()?;
                Tick::Worked
            }
        };
        // Published after the step, so that admission sees the load that the next request
        // will meet.
        self.inbox.publish(self.status(), self.expected_tokens as u64);
        Ok(tick)
    }

    /// Binds the backend to the current thread.
    pub(super) fn enter(&mut self) {
        self.backend.enter();
    }

    /// Releases the device to other workers and reports to the journal that nothing runs.
    pub(super) fn idle(&mut self) -> Result<(), EngineError> {
        self.backend.release();
        self.journal.idle(self.clock.now()).map_err(EngineError::Journal)
    }

    fn take(&mut self, arrivals: Vec<Arrival>) {
        for arrival in arrivals {
            let id = SequenceId(self.next_sequence);
            let request = Request::new(id, arrival, &mut self.shares);
            // Every choice gets an id now, so ids grow in the order of arrival.
            self.next_sequence += request.choices.len() as u64;
            // Before the entries are queued: the credit is bounded only where nothing waits.
            self.shares.bound_credit(request.node, self.bounds.most_credit());
            for waiting in request.waiting(self.policy, self.meter.table()) {
                self.shares.push(request.node, waiting);
            }
            self.shares.expect_start(id, request.deadline);
            self.by_key.insert(request.key.clone(), id);
            self.requests.insert(id, request);
        }
    }

    /// Refuses the requests that lost their queue slots to others, unless they have
    /// started.
    fn displace(&mut self, displaced: &[RequestKey]) {
        for key in displaced {
            let request = self.by_key.get(key).and_then(|id| self.requests.get(id));
            if let Some(id) = request.filter(|request| !request.has_started()).map(|it| it.id) {
                self.refuse(id, RefusedReason::Overloaded, "the worker's queue is full");
            }
        }
    }

    fn cancel(&mut self, cancels: BTreeMap<RequestKey, CancelReason>) {
        for (key, reason) in cancels {
            if let Some(&id) = self.by_key.get(&key) {
                self.dequeue(id);
                self.drop_sequences(|sequence| sequence.request == id);
                if let Some(request) = self.requests.get_mut(&id) {
                    request.end_all(reason.into());
                    self.ending.insert(id);
                }
            }
        }
    }

    /// Ends every choice whose next token would exceed the budget of its request.
    fn end_over_budget(&mut self) {
        let mut next: BTreeMap<SequenceId, Vec<(u32, SequenceId)>> = BTreeMap::new();
        for sequence in self.sequences.values().filter(|sequence| sequence.decodes()) {
            next.entry(sequence.request).or_default().push((sequence.choice, sequence.id));
        }
        let mut ended = Vec::new();
        for (id, next) in next {
            let request = self.requests.get_mut(&id).expect("a sequence belongs to a live request");
            for (choice, sequence) in request.unaffordable(&next, self.meter.table()) {
                request.end(choice, FinishReason::Length);
                self.ending.insert(id);
                ended.push(sequence);
            }
        }
        self.drop_sequences(|sequence| ended.contains(&sequence.id));
    }

    /// Closes every request that has ended: writes its figures to the journal, then calls
    /// its sink for the last time. A request that is in the step ahead is closed after that
    /// step, because the request pays for its share of it.
    fn settle(&mut self) -> Result<(), EngineError> {
        // A request in the step ahead still gets a share of that step. Its final figures
        // are not known yet.
        let (later, now): (BTreeSet<SequenceId>, BTreeSet<SequenceId>) =
            std::mem::take(&mut self.ending).into_iter().partition(|id| self.is_ahead(*id));
        self.ending = later;
        let over: Vec<SequenceId> = now
            .into_iter()
            .filter(|id| self.requests.get(id).is_some_and(|request| request.open == 0))
            .collect();
        if over.is_empty() {
            return Ok(());
        }
        let now = self.clock.now();
        let mut figures: Vec<RequestFigures> = Vec::with_capacity(over.len());
        let mut requests = Vec::with_capacity(over.len());
        for id in over {
            let Some(request) = self.forget(id) else { continue };
            figures.push(request.figures(self.meter.table(), now));
            requests.push(request);
        }
        // The journal comes first: a client must never know a figure that a crash can lose.
        self.journal.finished(now, &figures).map_err(EngineError::Journal)?;
        for (mut request, RequestFigures { usage, stages, .. }) in requests.into_iter().zip(figures)
        {
            request.sink.done(RequestOutcome::Finished { usage, stages });
        }
        Ok(())
    }

    /// Runs one step to its end: the step ahead if the device already has one, otherwise a
    /// new one.
    fn step(&mut self) -> Result<(), EngineError> {
        let begun = match self.take_ahead()? {
            Some(begun) => begun,
            None => match self.begin_decided()? {
                Some(begun) => begun,
                None => return Ok(()),
            },
        };
        // The device gets its next step before the host handles this one, so the device
        // does not wait for the host.
        match self.begin_ahead(&begun) {
            Ok(ahead) => self.ahead = ahead,
            Err(fault) => return self.fail(&begun.parts, begun.started, fault),
        }
        self.finish_step(begun)
    }

    /// Decides a step and hands it to the device. Returns `None` if the decision only
    /// refused or preempted.
    fn begin_decided(&mut self) -> Result<Option<Begun>, EngineError> {
        // The start is read after the device was acquired, so waiting for other workers is
        // not billed.
        self.take_device()?;
        let started = self.clock.now();
        let decisions = self.decide(started);
        let Decisions { refuse, preempt, shrink, .. } = &decisions;
        let moved = !(refuse.is_empty() && preempt.is_empty() && shrink.is_empty());
        let parts = self.apply(decisions, started);
        if parts.is_empty() {
            // A preemption or a refusal is progress: the next tick decides again with the
            // freed capacity.
            return if moved { Ok(None) } else { Err(EngineError::Stalled) };
        }
        self.announce_step(&parts, started)?;
        match self.begin(&parts) {
            Ok(output) => Ok(Some(Begun { parts, started, output })),
            Err(fault) => self.fail(&parts, started, fault).map(|()| None),
        }
    }

    /// Finishes a step: books its time, then delivers its tokens.
    fn finish_step(&mut self, mut begun: Begun) -> Result<(), EngineError> {
        let sampled_parts = match self.finish(&mut begun) {
            Ok(sampled_parts) => sampled_parts,
            Err(fault) => return self.fail(&begun.parts, begun.started, fault),
        };
        let Begun { parts, started, output } = begun;
        // Commit before booking: the shares need the new state, but no token has left yet.
        let outcomes = self.commit(&parts, sampled_parts, started);
        let ended = self.clock.now();
        // A device with its own timer reports its exact busy time. The host's part of the
        // step is then idle time.
        let busy_until = match output.device_time() {
            Some(busy) => MonotonicTime(started.0.saturating_add(busy.nanos())).min(ended),
            None => ended,
        };
        if let Some(transfers) = output.transfers() {
            self.add_transfers(&parts, transfers);
        }
        // Recycled by `begin`, which saves an allocation for each step.
        self.outputs.push(output);
        self.account(&parts, started, busy_until)?;
        self.backend.stepped(Duration::from_nanos(ended.0.saturating_sub(started.0)));
        self.deliver(outcomes, ended);
        self.settle()
    }

    /// Ends all requests after a fault of the device. The exact device time of the failed
    /// step is unknown, so all the time since its start counts as busy.
    fn fail(
        &mut self,
        parts: &[Part],
        started: MonotonicTime,
        fault: EngineError,
    ) -> Result<(), EngineError> {
        // A device is not reliable after a fault, so its next step is not awaited.
        self.ahead = None;
        let ended = self.clock.now();
        self.account(parts, started, ended)?;
        self.backend.stepped(Duration::from_nanos(ended.0.saturating_sub(started.0)));
        self.break_off()?;
        Err(fault)
    }

    /// Waits for the device if other workers share it. No step runs during this wait, so
    /// the watchdog is paused.
    fn take_device(&mut self) -> Result<(), EngineError> {
        // The pulse rests while the thread waits, because a wait for another worker is not
        // a hung step.
        self.inbox.pulse.rest();
        let taken = self.backend.acquire();
        self.inbox.pulse.begin();
        if taken.is_err() {
            self.break_off()?;
        }
        Ok(taken?)
    }

    /// Announces the step to the watchdog, with its predicted time, and to the journal.
    fn announce_step(&mut self, parts: &[Part], started: MonotonicTime) -> Result<(), EngineError> {
        let works: Vec<_> = parts.iter().map(|part| part.work).collect();
        self.inbox.pulse.expect(self.meter.table().predict_step(&works));
        self.journal.began(started).map_err(EngineError::Journal)
    }

    fn decide(&self, now: MonotonicTime) -> Decisions {
        let running: Vec<Running> = self
            .sequences
            .values()
            .filter(|sequence| !sequence.preempted)
            .map(|sequence| sequence.as_running(&self.pool))
            .collect();
        let view =
            View { now, running: &running, shares: &self.shares, free_blocks: self.pool.free() };
        decide(&view, &self.bounds)
    }

    /// Applies the decisions. Returns the parts of the step.
    fn apply(&mut self, decisions: Decisions, now: MonotonicTime) -> Vec<Part> {
        let Decisions { refuse, preempt, shrink, passed, admit, chunks } = decisions;
        for id in refuse {
            self.refuse(id, RefusedReason::Deadline, "it waited past its deadline");
        }
        for id in preempt {
            self.preempt(id, now);
        }
        for shrink in shrink {
            self.shrink(shrink);
        }
        for share_owner in passed {
            self.shares.catch_up(share_owner);
        }
        for (node, rank) in admit {
            self.admit(node, rank, now);
        }
        chunks.into_iter().map(|chunk| self.reserve(chunk)).collect()
    }

    /// Preempts a sequence: frees its KV blocks and puts it back into its queue. Its unread
    /// prompt is no longer predicted, because nothing reads it now.
    fn preempt(&mut self, id: SequenceId, now: MonotonicTime) {
        // Recomputation has its own id, so that its time can be booked as overhead.
        let again = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        self.preemptions += 1;
        let sequence = self.sequences.get_mut(&id).expect("a preempted sequence was in the batch");
        sequence.preempt(again, now, &mut self.pool);
        let predicted = std::mem::take(&mut sequence.predicted);
        let waiting = sequence.as_waiting(self.policy, self.meter.table());
        // Charged before the push: the entry is queued with the final virtual time.
        self.shares.charge(sequence.node, DeviceNanos::ZERO, predicted, DeviceNanos::ZERO);
        self.shares.push(sequence.node, waiting);
    }

    /// Takes the last KV blocks of a sequence, which stays in the batch.
    fn shrink(&mut self, Shrink { sequence, blocks }: Shrink) {
        let again = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let sequence = self.sequences.get_mut(&sequence).expect("it was in the batch");
        sequence.shrink(blocks, again, &mut self.pool);
    }

    /// Moves a prompt or a preempted sequence from its queue into the batch. The predicted
    /// cost of reading it counts from now on.
    fn admit(&mut self, node: NodeId, rank: Rank, now: MonotonicTime) {
        let waiting = self.shares.take(node, rank).expect("an admitted entry is in its queue");
        if !rank.is_again() {
            self.start(waiting.request, waiting.sequence, now);
        }
        let sequence = self
            .sequences
            .get_mut(&waiting.sequence)
            .expect("the sequence was started above or before its preemption");
        sequence.preempted = false;
        sequence.predicted = waiting.predicted;
        self.shares.charge(node, DeviceNanos::ZERO, DeviceNanos::ZERO, waiting.predicted);
    }

    fn start(&mut self, id: SequenceId, leader: SequenceId, now: MonotonicTime) {
        let request = self.requests.get_mut(&id).expect("a queue entry belongs to a live request");
        // Only the first prompt starts the request: deadline and displacement end here.
        if !request.has_started() {
            self.started += 1;
            self.shares.forget_deadline(id, request.deadline);
            self.inbox.began(request.ticket);
        }
        let sequence = request.start(leader, now);
        if request.waiting == 0 {
            self.inbox.dequeued(request.ticket);
        }
        self.sequences.insert(leader, sequence);
    }

    /// Takes the KV blocks for a chunk.
    fn reserve(&mut self, chunk: Chunk) -> Part {
        let sequence = self
            .sequences
            .get_mut(&chunk.sequence)
            .expect("a chunk belongs to a sequence in the batch");
        let grown = sequence.table.grow_to(chunk.blocks, &mut self.pool);
        assert!(grown, "a decision spends no more KV blocks than are free");
        Part::new(sequence, chunk)
    }

    /// Ends everything at once: running requests with a fault, waiting ones with a refusal.
    pub(super) fn break_off(&mut self) -> Result<(), EngineError> {
        let all: Vec<SequenceId> = self.requests.keys().copied().collect();
        // The blocks are released before the requests are closed, so the pool is whole for
        // the invariant checks.
        self.drop_sequences(|_| true);
        for id in all {
            let request = self.requests.get_mut(&id).expect("just listed");
            if request.has_started() {
                request.end_all(FinishReason::Fault);
                self.ending.insert(id);
            } else {
                self.refuse(id, RefusedReason::Draining, "the worker is stopping");
            }
        }
        self.settle()
    }

    /// Refuses a request that has not started.
    fn refuse(&mut self, id: SequenceId, reason: RefusedReason, message: &str) {
        if let Some(mut request) = self.forget(id) {
            let retry_after = match reason {
                RefusedReason::Deadline | RefusedReason::Overloaded => {
                    Some(self.inbox.predicted_wait(&request.seat).max(SOON))
                }
                RefusedReason::Draining
                | RefusedReason::Invalid
                | RefusedReason::Budget
                | RefusedReason::Grammar => None,
            };
            let refusal = Refusal { reason, retry_after, message: message.to_owned() };
            request.sink.done(RequestOutcome::Refused(refusal));
        }
    }

    /// Removes a request, whose sequences must be gone already, from all state.
    fn forget(&mut self, id: SequenceId) -> Option<Request> {
        self.dequeue(id);
        let request = self.requests.remove(&id)?;
        self.shares.forget_deadline(id, request.deadline);
        self.shares.leave(request.node);
        self.started -= u32::from(request.has_started());
        self.by_key.remove(&request.key);
        self.inbox.ended(&request.key);
        Some(request)
    }

    /// Removes the unstarted prompts of a request from the queue.
    fn dequeue(&mut self, id: SequenceId) {
        if let Some(request) = self.requests.get_mut(&id).filter(|request| request.waiting > 0) {
            for rank in request.ranks(self.policy) {
                self.shares.take(request.node, rank);
            }
            request.waiting = 0;
            self.inbox.dequeued(request.ticket);
        }
    }

    fn drop_sequences(&mut self, over: impl Fn(&Sequence) -> bool) {
        for (id, mut sequence) in self.sequences.extract_if(.., |_, sequence| over(sequence)) {
            sequence.table.release(&mut self.pool);
            // A preempted sequence also has an entry in the queue of its key.
            if sequence.preempted {
                self.shares.take(sequence.node, Rank::again(id));
            }
            // Nothing reads the rest of the prompt, so its prediction must not stay in the
            // virtual time.
            let predicted = sequence.predicted;
            self.shares.charge(sequence.node, DeviceNanos::ZERO, predicted, DeviceNanos::ZERO);
        }
    }

    fn status(&self) -> EngineStatus {
        let Totals { steps, .. } = self.meter.totals();
        let backlog = self.sequences.values().map(|sequence| {
            let left = (self.expected_tokens as u64).min(u64::from(sequence.most_to_come()));
            let context = sequence.tokens.len() as u64;
            self.meter.table().request([sequence.reading()], [(context, left)])
        });
        EngineStatus {
            running: self.started,
            kv_blocks_total: self.pool.total(),
            kv_blocks_free: self.pool.free(),
            backlog: backlog.sum(),
            steps,
            busy: self.meter.totals().busy(),
            counts: self.meter.counts(),
            preemptions: self.preemptions,
            // The inbox fills in the rest: it counts waiting requests and holds the phase.
            ..EngineStatus::default()
        }
    }
}

/// Shortest `retry_after` of a refused request.
const SOON: Duration = Duration::from_secs(1);
