//! Steps that start before the previous step is finished. The device must support this, and
//! a new decision must not change which sequences run. The step ahead uses the tokens that
//! the previous step samples. A request that ends in the meantime is still in the step
//! ahead and pays for its share.

use std::collections::BTreeMap;

use tollgate_domain::SequenceId;

use super::{Begun, Core, Decisions, EngineError, Part};
use crate::backend::BLOCK_TOKENS;

impl Core {
    /// Hands the next step to the device before this one is finished: one more token for
    /// every running sequence. Returns `None` unless all sequences decode and none has to
    /// start, stop or wait.
    pub(super) fn begin_ahead(&mut self, begun: &Begun) -> Result<Option<Begun>, EngineError> {
        let parts = match self.backend.runs_ahead() {
            true => self.parts_ahead(&begun.parts),
            false => Vec::new(),
        };
        if parts.is_empty() {
            return Ok(None);
        }
        let started = self.clock.now();
        let output = self.begin(&parts)?;
        Ok(Some(Begun { parts, started, output }))
    }

    /// Returns one more token for each sequence in the step, or nothing if a new decision
    /// is needed first.
    fn parts_ahead(&mut self, parts: &[Part]) -> Vec<Part> {
        let here: Vec<(u32, &Part)> = (0..)
            .zip(parts)
            .filter(|(_, part)| self.sequences.contains_key(&part.sequence))
            .collect();
        let running = self.sequences.values().filter(|sequence| !sequence.preempted).count();
        // Every running sequence must be in the step and sample exactly one token; anything
        // else needs a decision.
        let is_all = here.len() == running && parts.iter().all(Part::samples_one);
        // The mask after a token is known only once the token is.
        let is_free = self.sequences.values().all(|sequence| sequence.constraint.is_none());
        if !is_all || !is_free || !self.affords_ahead() {
            return Vec::new();
        }
        let goes_on = |part: &Part| self.sequences[&part.sequence].most_to_come() > 1;
        let next: Vec<Part> = here
            .into_iter()
            // A sequence at its token limit ends with this step and is not fed again.
            .filter(|(_, part)| goes_on(part))
            .map(|(draw, part)| part.next(draw))
            .collect();
        // With every prompt in the batch, a decision could only decode all of them again.
        let may_go = self.all_prompts_started()
            || (next.len() == parts.len()
                && parts.iter().all(|part| part.tokens == 1)
                && self.decision_is_unchanged());
        match may_go && self.reserve_ahead(&next) {
            true => next,
            false => Vec::new(),
        }
    }

    /// Returns true if every prompt of every request is in the batch.
    fn all_prompts_started(&self) -> bool {
        self.requests.len() == self.started as usize
            && self.requests.values().all(|request| request.waiting == 0)
            && self.sequences.values().all(|sequence| !sequence.preempted)
    }

    /// Returns true if a decision now would admit, preempt and refuse nothing. If all
    /// sequences decode and continue, the state after this step differs only by one token
    /// for each sequence and by the elapsed time.
    fn decision_is_unchanged(&self) -> bool {
        let Decisions { refuse, preempt, shrink, passed, admit, chunks: _ } =
            self.decide(self.clock.now());
        refuse.is_empty()
            && preempt.is_empty()
            && shrink.is_empty()
            && passed.is_empty()
            && admit.is_empty()
    }

    /// Returns true if the next two tokens of every choice fit the budget of its request.
    fn affords_ahead(&self) -> bool {
        let mut choices: BTreeMap<SequenceId, Vec<u32>> = BTreeMap::new();
        for sequence in self.sequences.values() {
            choices.entry(sequence.request).or_default().push(sequence.choice);
        }
        choices.iter().all(|(id, next)| {
            let request = self.requests.get(id).expect("a sequence belongs to a live request");
            // Two tokens: the one of the running step is not counted yet.
            request.affords(next, 2, self.meter.table())
        })
    }

    /// Takes the KV blocks that the parts lack. Takes none and returns false if the rest
    /// would be less than the capacity that a decision keeps free.
    fn reserve_ahead(&mut self, parts: &[Part]) -> bool {
        let lacking: Vec<(SequenceId, u32)> = parts
            .iter()
            .map(|part| (part.sequence, (part.work.context + part.tokens).div_ceil(BLOCK_TOKENS)))
            .filter(|(id, blocks)| self.sequences[id].table.len() < *blocks)
            .collect();
        let more = |(id, blocks): &(SequenceId, u32)| blocks - self.sequences[id].table.len();
        let more: u32 = lacking.iter().map(more).sum();
        let kept = self.bounds.headroom() + self.bounds.spare.blocks;
        // The step ahead must not take blocks that a decision would refuse to give.
        if more > 0 && more + kept > self.pool.free() {
            return false;
        }
        for (id, blocks) in lacking {
            let sequence = self.sequences.get_mut(&id).expect("the sequence was looked up above");
            let grown = sequence.table.grow_to(blocks, &mut self.pool);
            assert!(grown, "the pool has the blocks that were counted above");
        }
        true
    }

    /// Returns the step ahead, if there is one. The step waited on the device while the
    /// previous step ran, so it started when the previous step ended.
    pub(super) fn take_ahead(&mut self) -> Result<Option<Begun>, EngineError> {
        let Some(mut begun) = self.ahead.take() else { return Ok(None) };
        // Steps never overlap in the journal.
        begun.started = begun.started.max(self.meter.booked());
        self.announce_step(&begun.parts, begun.started)?;
        Ok(Some(begun))
    }

    /// Finishes the step ahead, if there is one, so that the engine can stop.
    pub(super) fn finish_ahead(&mut self) -> Result<(), EngineError> {
        self.take_ahead()?.map_or(Ok(()), |begun| self.finish_step(begun))
    }

    /// Returns true if a request is in the step ahead.
    pub(super) fn is_ahead(&self, id: SequenceId) -> bool {
        self.ahead.iter().flat_map(|begun| &begun.parts).any(|part| part.request == id)
    }
}
