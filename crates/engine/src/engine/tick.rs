//! What the engine's thread does in one turn.
//!
//! Mail first, then a step, then its account, and only then its tokens. All
//! state is here and belongs to one thread; the thread itself is in the parent
//! module, so that a test can turn the crank with a clock of its own.

mod ahead;
mod finished;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{DeviceNanos, FinishReason, MonotonicTime, SequenceId};

use super::batch::{Request, Requests, Sequence, Sequences};
use super::journal::{RequestFigures, StepJournal};
use super::mailbox::{Arrival, FIRST_GUESS_TOKENS, Mail, Mailbox, Phase, RequestKey};
use super::step::{Begun, Drawing, Event, Outcome, Part};
use super::submission::{CancelReason, Refusal, RefusedReason, RequestOutcome};
use super::{EngineError, EngineStatus};
use crate::backend::{Backend, StepOutput};
use crate::clock::Clock;
use crate::kv::BlockPool;
use crate::meter::{Meter, Totals};
use crate::schedule::{
    Bounds, Chunk, Decisions, NodeId, Rank, Running, SchedulePolicy, Shares, View, decide,
};

pub(super) struct Core {
    pub(super) backend: Box<dyn Backend>,
    /// Kept for the next step.
    pub(super) outputs: Vec<StepOutput>,
    /// The step after the last one that was finished, where the device has it
    /// already.
    ahead: Option<Begun>,
    pub(super) end_tokens: Vec<u32>,
    pub(super) sequences: Sequences,
    pub(super) requests: Requests,
    clock: Arc<dyn Clock>,
    journal: Box<dyn StepJournal>,
    mailbox: Arc<Mailbox>,
    bounds: Bounds,
    policy: SchedulePolicy,
    by_key: HashMap<RequestKey, SequenceId>,
    pub(super) shares: Shares,
    /// Requests that may have come to their end since that was last settled.
    ending: BTreeSet<SequenceId>,
    /// Requests that have started and not ended.
    started: u32,
    pool: BlockPool,
    meter: Meter,
    next_sequence: u64,
    /// Tokens that choices came to of late.
    expected_tokens: f64,
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Something was done: go on.
    Worked,
    /// There is nothing to do until mail comes.
    Idle,
    /// All is done and nothing more is wanted.
    Ended,
}

impl Core {
    pub(super) fn new(
        backend: Box<dyn Backend>,
        bounds: Bounds,
        policy: SchedulePolicy,
        clock: Arc<dyn Clock>,
        journal: Box<dyn StepJournal>,
        mailbox: Arc<Mailbox>,
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
            expected_tokens: FIRST_GUESS_TOKENS as f64,
            backend,
            clock,
            journal,
            mailbox,
            bounds,
        }
    }

    /// The sums of the meter.
    pub(super) fn totals(&self) -> Totals {
        self.meter.totals()
    }

    /// Does what the mail asks, then runs a step if there is anything to run.
    pub(super) fn turn(&mut self, mail: Mail) -> Result<Turn, EngineError> {
        self.take(mail.arrivals);
        self.displace(&mail.displaced);
        self.cancel(mail.cancels);
        if mail.phase >= Phase::Stopping {
            self.finish_ahead()?;
            self.break_off()?;
            return Ok(Turn::Ended);
        }
        self.end_what_is_spent();
        self.settle()?;
        let is_done = self.requests.is_empty() && self.ahead.is_none();
        let turn = match (is_done, mail.phase) {
            (true, Phase::Serving) => Turn::Idle,
            (true, _) => Turn::Ended,
            (false, _) => {
                self.step()?;
                Turn::Worked
            }
        };
        self.mailbox.publish(self.status(), self.expected_tokens as u64);
        Ok(turn)
    }

    /// Tells the backend which thread it runs on from here on.
    pub(super) fn enter(&mut self) {
        self.backend.enter();
    }

    /// Leaves the device to others and tells the journal that nothing runs.
    pub(super) fn idle(&mut self) -> Result<(), EngineError> {
        self.backend.release();
        self.journal.idle(self.clock.now()).map_err(EngineError::Journal)
    }

    fn take(&mut self, arrivals: Vec<Arrival>) {
        for arrival in arrivals {
            let first = SequenceId(self.next_sequence);
            let request = Request::new(first, arrival, &mut self.shares);
            self.next_sequence += request.choices.len() as u64;
            for waiting in request.waiting(self.policy, self.meter.table()) {
                self.shares.push(request.node, waiting);
            }
            self.shares.expect_start(first, request.deadline);
            self.by_key.insert(request.key.clone(), first);
            self.requests.insert(first, request);
        }
    }

    /// Refuses those whose place in the queue others have, unless they have
    /// started.
    fn displace(&mut self, displaced: &[RequestKey]) {
        for key in displaced {
            let request = self.by_key.get(key).and_then(|first| self.requests.get(first));
            if let Some(first) = request.filter(|request| !request.has_started()).map(|it| it.first)
            {
                self.refuse(first, RefusedReason::Overloaded, "the worker's queue is full");
            }
        }
    }

    fn cancel(&mut self, cancels: BTreeMap<RequestKey, CancelReason>) {
        for (key, reason) in cancels {
            if let Some(&first) = self.by_key.get(&key) {
                self.leave_line(first);
                self.drop_sequences(|sequence| sequence.request == first);
                if let Some(request) = self.requests.get_mut(&first) {
                    request.end_all(reason.into());
                    self.ending.insert(first);
                }
            }
        }
    }

    /// Ends every choice whose next token would exceed its request's budget.
    fn end_what_is_spent(&mut self) {
        let mut next: BTreeMap<SequenceId, Vec<(u32, SequenceId)>> = BTreeMap::new();
        for sequence in self.sequences.values().filter(|sequence| sequence.decodes()) {
            next.entry(sequence.request).or_default().push((sequence.choice, sequence.id));
        }
        let mut ended = Vec::new();
        for (first, next) in next {
            let request = self.requests.get_mut(&first).expect("it is alive");
            for (choice, sequence) in request.unaffordable(&next, self.meter.table()) {
                request.end(choice, FinishReason::Length);
                self.ending.insert(first);
                ended.push(sequence);
            }
        }
        self.drop_sequences(|sequence| ended.contains(&sequence.id));
    }

    /// Closes every request that has come to its end: figures to the journal,
    /// then the last word to the sink. One that is in the step that the device
    /// has already is closed after that, because it pays for it.
    fn settle(&mut self) -> Result<(), EngineError> {
        let (later, now): (BTreeSet<SequenceId>, BTreeSet<SequenceId>) =
            std::mem::take(&mut self.ending).into_iter().partition(|first| self.is_ahead(*first));
        self.ending = later;
        let over: Vec<SequenceId> = now
            .into_iter()
            .filter(|first| self.requests.get(first).is_some_and(|request| request.open == 0))
            .collect();
        if over.is_empty() {
            return Ok(());
        }
        let now = self.clock.now();
        let mut figures: Vec<RequestFigures> = Vec::with_capacity(over.len());
        let mut requests = Vec::with_capacity(over.len());
        for first in over {
            let Some(request) = self.forget(first) else { continue };
            figures.push(request.figures(self.meter.table(), now));
            requests.push(request);
        }
        self.journal.finished(now, &figures).map_err(EngineError::Journal)?;
        for (mut request, RequestFigures { usage, stages, .. }) in requests.into_iter().zip(figures)
        {
            request.sink.done(RequestOutcome::Finished { usage, stages });
        }
        Ok(())
    }

    /// One step of the device, to its last token: the one that it has already,
    /// or what is decided now.
    fn step(&mut self) -> Result<(), EngineError> {
        let begun = match self.take_ahead()? {
            Some(begun) => begun,
            None => match self.begin_decided()? {
                Some(begun) => begun,
                None => return Ok(()),
            },
        };
        match self.begin_ahead(&begun) {
            Ok(ahead) => self.ahead = ahead,
            Err(fault) => return self.fail(&begun.parts, begun.started, fault),
        }
        self.finish_step(begun)
    }

    /// Decides what runs and gives it to the device; none where there was only
    /// something to move.
    fn begin_decided(&mut self) -> Result<Option<Begun>, EngineError> {
        self.take_device()?;
        let started = self.clock.now();
        let decisions = self.decide(started);
        let moved = !decisions.refuse.is_empty() || !decisions.preempt.is_empty();
        let parts = self.apply(decisions, started);
        if parts.is_empty() {
            return if moved { Ok(None) } else { Err(EngineError::Stalled) };
        }
        self.announce_step(&parts, started)?;
        match self.begin(&parts) {
            Ok(output) => Ok(Some(Begun { parts, started, output })),
            Err(fault) => self.fail(&parts, started, fault).map(|()| None),
        }
    }

    /// Finishes a step: its account, then its tokens.
    fn finish_step(&mut self, mut begun: Begun) -> Result<(), EngineError> {
        let drawings = match self.finish(&mut begun) {
            Ok(drawings) => drawings,
            Err(fault) => return self.fail(&begun.parts, begun.started, fault),
        };
        let Begun { parts, started, output } = begun;
        let outcomes = self.commit(&parts, drawings, started);
        let ended = self.clock.now();
        // A device that keeps its own time was busy for just that, and the
        // host's part of the step is idle.
        let busy_until = match output.device_time() {
            Some(busy) => MonotonicTime(started.0.saturating_add(busy.nanos())).min(ended),
            None => ended,
        };
        if let Some(transfers) = output.transfers() {
            self.add_transfers(&parts, transfers);
        }
        self.outputs.push(output);
        self.account(&parts, started, busy_until)?;
        self.backend.stepped(Duration::from_nanos(ended.0.saturating_sub(started.0)));
        self.deliver(outcomes, ended);
        self.settle()
    }

    /// Ends everything after a fault of the device. Nobody knows for how long
    /// it worked on the step, so all the time since then counts.
    fn fail(
        &mut self,
        parts: &[Part],
        started: MonotonicTime,
        fault: EngineError,
    ) -> Result<(), EngineError> {
        self.ahead = None;
        let ended = self.clock.now();
        self.account(parts, started, ended)?;
        self.backend.stepped(Duration::from_nanos(ended.0.saturating_sub(started.0)));
        self.break_off()?;
        Err(fault)
    }

    /// Waits until the device is ours, where others use it too. No step runs
    /// meanwhile, so nobody watches over one.
    fn take_device(&mut self) -> Result<(), EngineError> {
        self.mailbox.pulse.rest();
        let taken = self.backend.acquire();
        self.mailbox.pulse.begin();
        if taken.is_err() {
            self.break_off()?;
        }
        Ok(taken?)
    }

    /// Says that a step begins and how long it should take, to whoever would
    /// find it unfinished.
    fn announce_step(&mut self, parts: &[Part], started: MonotonicTime) -> Result<(), EngineError> {
        let works: Vec<_> = parts.iter().map(|part| part.work).collect();
        self.mailbox.pulse.expect(self.meter.table().predict_step(&works));
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

    /// Does what was decided, up to the step itself.
    fn apply(&mut self, decisions: Decisions, now: MonotonicTime) -> Vec<Part> {
        let Decisions { refuse, preempt, admit, chunks } = decisions;
        for first in refuse {
            self.refuse(first, RefusedReason::Deadline, "it waited past its deadline");
        }
        for id in preempt {
            self.preempt(id, now);
        }
        for (node, rank) in admit {
            self.admit(node, rank, now);
        }
        chunks.into_iter().map(|chunk| self.reserve(chunk)).collect()
    }

    /// Moves a sequence out of the batch, back into its line. What is left of
    /// its prompt is no longer predicted: nobody reads it now.
    fn preempt(&mut self, id: SequenceId, now: MonotonicTime) {
        let again = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let sequence = self.sequences.get_mut(&id).expect("who is preempted runs");
        sequence.preempt(again, now, &mut self.pool);
        let predicted = std::mem::take(&mut sequence.predicted);
        let waiting = sequence.as_waiting(self.policy, self.meter.table());
        self.shares.charge(sequence.node, DeviceNanos::ZERO, predicted, DeviceNanos::ZERO);
        self.shares.push(sequence.node, waiting);
    }

    /// Moves a prompt, or a sequence that was preempted, from its line into
    /// the batch. What reading it should take counts from now on.
    fn admit(&mut self, node: NodeId, rank: Rank, now: MonotonicTime) {
        let waiting = self.shares.take(node, rank).expect("what is admitted waits");
        if !rank.is_again() {
            self.start(waiting.request, waiting.sequence, now);
        }
        let sequence = self.sequences.get_mut(&waiting.sequence).expect("it has started");
        sequence.preempted = false;
        sequence.predicted = waiting.predicted;
        self.shares.charge(node, DeviceNanos::ZERO, DeviceNanos::ZERO, waiting.predicted);
    }

    fn start(&mut self, first: SequenceId, leader: SequenceId, now: MonotonicTime) {
        let request = self.requests.get_mut(&first).expect("what waits belongs to a request");
        if !request.has_started() {
            self.started += 1;
            self.shares.forget_deadline(first, request.deadline);
            self.mailbox.began(request.ticket);
        }
        let sequence = request.start(leader, now);
        if request.waiting == 0 {
            self.mailbox.left_line(request.ticket);
        }
        self.sequences.insert(leader, sequence);
    }

    /// Takes the blocks for a chunk.
    fn reserve(&mut self, chunk: Chunk) -> Part {
        let sequence =
            self.sequences.get_mut(&chunk.sequence).expect("a chunk is of a sequence that runs");
        let grown = sequence.table.grow_to(chunk.blocks, &mut self.pool);
        assert!(grown, "a decision spends no more KV blocks than are free");
        Part::new(sequence, chunk)
    }

    /// Ends everything at once: what started as a fault, what waits as refused.
    pub(super) fn break_off(&mut self) -> Result<(), EngineError> {
        let all: Vec<SequenceId> = self.requests.keys().copied().collect();
        self.drop_sequences(|_| true);
        for first in all {
            let request = self.requests.get_mut(&first).expect("just listed");
            if request.has_started() {
                request.end_all(FinishReason::Fault);
                self.ending.insert(first);
            } else {
                self.refuse(first, RefusedReason::Draining, "the worker is stopping");
            }
        }
        self.settle()
    }

    /// Refuses a request that has not started.
    fn refuse(&mut self, first: SequenceId, reason: RefusedReason, message: &str) {
        if let Some(mut request) = self.forget(first) {
            let retry_after = match reason {
                RefusedReason::Deadline | RefusedReason::Overloaded => {
                    Some(self.mailbox.predicted_wait(&request.seat).max(SOON))
                }
                RefusedReason::Draining | RefusedReason::Invalid | RefusedReason::Budget => None,
            };
            let refusal = Refusal { reason, retry_after, message: message.to_owned() };
            request.sink.done(RequestOutcome::Refused(refusal));
        }
    }

    /// Takes a request, whose sequences are gone, out of everything.
    fn forget(&mut self, first: SequenceId) -> Option<Request> {
        self.leave_line(first);
        let request = self.requests.remove(&first)?;
        self.shares.forget_deadline(first, request.deadline);
        self.shares.leave(request.node);
        self.started -= u32::from(request.has_started());
        self.by_key.remove(&request.key);
        self.mailbox.ended(&request.key);
        Some(request)
    }

    /// Takes what still waits of a request out of its line.
    fn leave_line(&mut self, first: SequenceId) {
        if let Some(request) = self.requests.get_mut(&first).filter(|request| request.waiting > 0) {
            for rank in request.ranks(self.policy) {
                self.shares.take(request.node, rank);
            }
            request.waiting = 0;
            self.mailbox.left_line(request.ticket);
        }
    }

    fn drop_sequences(&mut self, over: impl Fn(&Sequence) -> bool) {
        for (id, mut sequence) in self.sequences.extract_if(.., |_, sequence| over(sequence)) {
            sequence.table.release(&mut self.pool);
            if sequence.preempted {
                self.shares.take(sequence.node, Rank::again(id));
            }
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
            queued: 0, // the mailbox counts
            running: self.started,
            kv_blocks_total: self.pool.total(),
            kv_blocks_free: self.pool.free(),
            backlog: backlog.sum(),
            draining: false, // the mailbox knows
            steps,
            busy: self.meter.totals().busy(),
        }
    }
}

/// Who is refused for want of room comes back no sooner.
const SOON: Duration = Duration::from_secs(1);
