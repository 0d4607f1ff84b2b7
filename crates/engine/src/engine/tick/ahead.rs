//! The next step before the last is finished, where the device takes it and who
//! runs would not be decided otherwise. It is fed with what that one draws; who
//! ends meanwhile is in it all the same, and pays for it.

use std::collections::BTreeMap;

use tollgate_domain::SequenceId;

use super::{Begun, Core, Decisions, EngineError, Part};
use crate::backend::BLOCK_TOKENS;

impl Core {
    /// Gives the device the next step before this one is finished: one more token
    /// of all who run, if they all decode and nobody is to come or to go.
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

    /// One more token of each sequence in the step; nothing where anything
    /// else is to be decided first.
    fn parts_ahead(&mut self, parts: &[Part]) -> Vec<Part> {
        let here: Vec<(u32, &Part)> = (0..)
            .zip(parts)
            .filter(|(_, part)| self.sequences.contains_key(&part.sequence))
            .collect();
        let running = self.sequences.values().filter(|sequence| !sequence.preempted).count();
        let is_all = here.len() == running && parts.iter().all(Part::draws_one);
        if !is_all || !self.affords_ahead() {
            return Vec::new();
        }
        let goes_on = |part: &Part| self.sequences[&part.sequence].most_to_come() > 1;
        let next: Vec<Part> = here
            .into_iter()
            .filter(|(_, part)| goes_on(part))
            .map(|(draw, part)| part.next(draw))
            .collect();
        let may_go = self.nobody_waits()
            || (next.len() == parts.len()
                && parts.iter().all(|part| part.tokens == 1)
                && self.nobody_moves());
        match may_go && self.reserve_ahead(&next) {
            true => next,
            false => Vec::new(),
        }
    }

    /// Whether whoever there is has a place, with all its prompts.
    fn nobody_waits(&self) -> bool {
        self.requests.len() == self.started as usize
            && self.requests.values().all(|request| request.waiting == 0)
            && self.sequences.values().all(|sequence| !sequence.preempted)
    }

    /// Whether a decision now would let those who run go on and those who wait
    /// wait. Where all decode, and each goes on, the next one differs from it by
    /// one token of each and by the time of this step.
    fn nobody_moves(&self) -> bool {
        let Decisions { refuse, preempt, admit, chunks: _ } = self.decide(self.clock.now());
        refuse.is_empty() && preempt.is_empty() && admit.is_empty()
    }

    /// Whether every choice's next two tokens fit its request's budget.
    fn affords_ahead(&self) -> bool {
        let mut choices: BTreeMap<SequenceId, Vec<u32>> = BTreeMap::new();
        for sequence in self.sequences.values() {
            choices.entry(sequence.request).or_default().push(sequence.choice);
        }
        choices.iter().all(|(first, next)| {
            let request = self.requests.get(first).expect("it is alive");
            request.affords(next, 2, self.meter.table())
        })
    }

    /// Takes the blocks that the parts lack, or none where that would take what
    /// a decision keeps for others.
    fn reserve_ahead(&mut self, parts: &[Part]) -> bool {
        let lacking: Vec<(SequenceId, u32)> = parts
            .iter()
            .map(|part| (part.sequence, (part.work.context + part.tokens).div_ceil(BLOCK_TOKENS)))
            .filter(|(id, blocks)| self.sequences[id].table.len() < *blocks)
            .collect();
        let more = |(id, blocks): &(SequenceId, u32)| blocks - self.sequences[id].table.len();
        let more: u32 = lacking.iter().map(more).sum();
        let kept = self.bounds.headroom() + self.bounds.spare.blocks;
        if more > 0 && more + kept > self.pool.free() {
            return false;
        }
        for (id, blocks) in lacking {
            let sequence = self.sequences.get_mut(&id).expect("it was looked up above");
            let grown = sequence.table.grow_to(blocks, &mut self.pool);
            assert!(grown, "there are as many blocks as were counted");
        }
        true
    }

    /// The step that the device has already. It was waiting there while the one
    /// before ran, so it began where that one ended.
    pub(super) fn take_ahead(&mut self) -> Result<Option<Begun>, EngineError> {
        let Some(mut begun) = self.ahead.take() else { return Ok(None) };
        begun.started = begun.started.max(self.meter.booked());
        self.announce_step(&begun.parts, begun.started)?;
        Ok(Some(begun))
    }

    /// Finishes the step that the device has already, for who stops after it.
    pub(super) fn finish_ahead(&mut self) -> Result<(), EngineError> {
        self.take_ahead()?.map_or(Ok(()), |begun| self.finish_step(begun))
    }

    /// Whether a request is in the step that the device has already.
    pub(super) fn is_ahead(&self, first: SequenceId) -> bool {
        self.ahead.iter().flat_map(|begun| &begun.parts).any(|part| part.request == first)
    }
}
