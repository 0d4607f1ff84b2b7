//! Planner of one step: chooses the sequences, their tokens and their KV blocks, and
//! preempts sequences where the capacity is short.
//!
//! This file has the order of the work. `room` decides if a sequence fits, `preemption`
//! decides which sequences make room, and `chunk` decides how many tokens are read.

mod chunk;
mod part;
mod preemption;
mod room;

use tollgate_domain::{DeviceNanos, StepCost};

use self::chunk::Pending;
use self::part::Partial;
use self::room::{FreeCapacity, Growth, needed, reserved};
use super::queue_heads::{QueueHead, QueueHeads};
use super::shares::{NodeId, Priority, Shares, Waiting};
use super::{Bounds, Chunk, Decisions, Running, Spare, Tier, View};
use crate::kv::blocks_for;

#[cfg(test)]
pub(super) use self::chunk::{row_count, work};

pub(super) struct Planner<'a> {
    view: &'a View<'a>,
    bounds: &'a Bounds,
    decisions: Decisions,
    /// Running sequences, in order of arrival.
    batch: Vec<Member<'a>>,
    /// Sequences that this step admits.
    admitted: Vec<Admitted>,
    cost: StepCost<'a>,
    /// Predicted time of the interactive sequences that decode in the step.
    decoding: DeviceNanos,
    /// Longest predicted time of the step with batch work, once interactive work is in it.
    batch_bound: Option<DeviceNanos>,
    room: FreeCapacity,
    /// KV blocks that only some owners may use ([`Planner::may_use_headroom`]).
    headroom: u32,
    /// Capacity that new sequences leave free: none while only one share owner has requests.
    spare: Spare,
    tokens_left: u32,
    rows_left: u32,
    /// True until the step contains a chunk of a prompt. The first such chunk gets a
    /// minimum size.
    first_read: bool,
    /// Share owners with a large head that does not fit, in order. Others may pass them.
    passed: Vec<NodeId>,
    /// A large sequence that this step admits with a part of its blocks.
    admitted_part: Option<Partial>,
}

/// The queues of both tiers during one decision.
pub(super) struct Queues<'a> {
    heads: QueueHeads<'a>,
    /// True once a head did not fit. A later head that started first would starve it, except
    /// in the spare capacity, which the head cannot use alone.
    blocked: bool,
    /// Heads that may still be looked at after one that blocks the others.
    looks: u32,
}

impl<'a> Queues<'a> {
    pub(super) fn new(view: &View<'a>) -> Self {
        Self { heads: QueueHeads::new(view.shares, view.now), blocked: false, looks: MOST_LOOKS }
    }

    /// Returns the head that is served next, if it is of `tier` and nothing blocks it.
    fn first(&mut self, tier: Tier) -> Option<QueueHead<'a>> {
        // Batch work never uses the spare capacity beside interactive requests.
        if self.blocked && (self.looks == 0 || tier == Tier::Batch) {
            return None;
        }
        self.heads.first().filter(|head| head.priority.tier == tier)
    }
}

/// A running sequence and the decision about it.
struct Member<'a> {
    running: &'a Running,
    chunk: Option<Chunk>,
    preempted: bool,
    /// Blocks that the sequence keeps: fewer than it holds if it gives up its last ones.
    kept: u32,
}

/// A sequence that this step admits.
struct Admitted {
    chunk: Chunk,
    /// Choices that fork from the sequence after its prompt is read.
    followers: u32,
}

/// A queue head that could enter the batch.
struct Candidate<'a> {
    head: QueueHead<'a>,
    /// True if the head may use the headroom of the pool.
    uses_headroom: bool,
    /// True if the head needs a large part of the pool.
    large: bool,
}

impl<'a> Planner<'a> {
    pub(super) fn new(view: &'a View<'a>, bounds: &'a Bounds) -> Self {
        let running = view.running;
        let room = FreeCapacity {
            free: view.free_blocks,
            // A follower takes a place once its prompt is read, so it counts from the start.
            sequences: running.iter().map(|running| 1 + running.followers).sum(),
            promised: running.iter().map(|running| running.promised(running.blocks)).sum(),
        };
        let member = |running: &'a Running| Member {
            running,
            chunk: None,
            preempted: false,
            kept: running.blocks,
        };
        Self {
            view,
            bounds,
            decisions: Decisions::default(),
            batch: running.iter().map(member).collect(),
            admitted: Vec::new(),
            cost: bounds.table.step_cost(),
            decoding: DeviceNanos::ZERO,
            batch_bound: None,
            room,
            headroom: bounds.headroom(),
            // An owner that is alone may use all; a newcomer takes the spare part back by
            // preemption.
            spare: if view.shares.has_one_owner() { Spare::default() } else { bounds.spare },
            tokens_left: bounds.limits.tokens,
            rows_left: bounds.limits.logit_rows,
            first_read: true,
            passed: Vec::new(),
            admitted_part: None,
        }
    }

    /// Returns the decisions. Chunks that decode come before chunks of prompts.
    pub(super) fn decisions(mut self) -> Decisions {
        let shares: &Shares = self.view.shares;
        // An owner that is not behind has no credit that the wait could add to.
        self.decisions.passed =
            self.passed.iter().copied().filter(|&id| shares.is_behind(id)).collect();
        let chunks = &mut self.decisions.chunks;
        chunks.reserve(self.batch.len() + self.admitted.len());
        for decodes in [true, false] {
            let those = self.batch.iter().filter(|member| member.decodes() == decodes);
            chunks.extend(those.filter_map(|member| member.chunk));
        }
        chunks.extend(self.admitted.into_iter().map(|admitted| admitted.chunk));
        self.decisions
    }

    /// Refuses every request that has waited past its deadline.
    pub(super) fn refuse(&mut self) {
        self.decisions.refuse = self.view.shares.expired(self.view.now).collect();
    }

    /// Bounds the step for the work of `tier`. Beside interactive work, batch work may make
    /// the step longer by [`Bounds::batch_step`] percent.
    pub(super) fn bound(&mut self, tier: Tier) {
        let has_chunks =
            !self.admitted.is_empty() || self.batch.iter().any(|member| member.chunk.is_some());
        // Otherwise the step has no interactive work that it could delay.
        if tier == Tier::Batch && has_chunks {
            let alone = self.cost.predicted().nanos();
            let more = u128::from(alone) * u128::from(self.bounds.batch_step) / 100;
            let more = u64::try_from(more).unwrap_or(u64::MAX);
            self.batch_bound = Some(DeviceNanos(alone.saturating_add(more)));
        }
    }

    /// Plans one token for every sequence of `tier` that decodes. If a sequence needs a block
    /// and none is free, the sequence that is first in [`PreemptionOrder`] is preempted.
    pub(super) fn decode(&mut self, tier: Tier) {
        let decoding = |member: &Member<'_>| member.decodes() && self.tier(member.running) == tier;
        // Sorting is only needed if a sequence needs a block, or if the step may have no place
        // for all of them. Otherwise the order has no effect.
        let grows = self.batch.iter().any(|member| decoding(member) && member.grows());
        let order: Vec<usize> = if grows || self.batch_bound.is_some() {
            self.in_order(decoding)
        } else {
            (0..self.batch.len()).filter(|&at| decoding(&self.batch[at])).collect()
        };
        for at in order {
            let Member { running, preempted, .. } = self.batch[at];
            // The sequences left over decode in the next step; none of them loses its
            // blocks.
            let full = self.tokens_left == 0 || self.rows_left == 0;
            // A sequence that gave up blocks for another one waits for the next step.
            let gave = self.batch[at].lacks() > 0;
            if preempted || gave || full {
                continue;
            }
            // A later sequence never takes the place of one that does not fit.
            if !self.fits_batch_bound(running) {
                return;
            }
            if let Some(blocks) = self.blocks_to_grow(at) {
                let chunk =
                    Chunk { sequence: running.sequence, tokens: 1, blocks, rows: running.rows };
                self.count(chunk, running.cached);
                self.batch[at].chunk = Some(chunk);
            }
        }
    }

    /// Reads prompts of `tier` while the time budget lasts, smallest virtual time first.
    /// Prompts in the batch and heads of the queues compete in one order.
    pub(super) fn read(&mut self, tier: Tier, queues: &mut Queues<'a>) {
        if tier == Tier::Interactive {
            self.decoding = self.cost.predicted();
        }
        let readers =
            self.in_order(|member| !member.decodes() && self.tier(member.running) == tier);
        let mut readers = readers.into_iter().peekable();
        loop {
            // A prompt may have been preempted for a head that was admitted in this loop.
            while readers.next_if(|&at| self.batch[at].preempted).is_some() {}
            let reader = readers.peek().copied();
            let head = queues.first(tier);
            let goes_on = match (reader, head) {
                // At the same priority, a prompt that has begun goes before a waiting one.
                (Some(at), head) if head.is_none_or(|head| self.priority(at) <= head.priority) => {
                    readers.next();
                    self.read_on(at)
                }
                (_, Some(head)) => {
                    let goes_on = self.has_room_to_read(head.waiting);
                    if goes_on && queues.blocked {
                        self.admit_into_spare(head, queues);
                    } else if goes_on {
                        queues.blocked = !self.admit_or_pass(head, &mut queues.heads);
                    }
                    goes_on
                }
                _ => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Returns the members that satisfy `are`, smallest virtual time first.
    fn in_order(&self, are: impl Fn(&Member<'_>) -> bool) -> Vec<usize> {
        let those = (0..self.batch.len()).filter(|&at| are(&self.batch[at]));
        let mut those: Vec<(Priority, usize)> = those.map(|at| (self.priority(at), at)).collect();
        // The place is a part of the key, so equal priorities keep the order of the batch.
        those.sort_unstable();
        those.into_iter().map(|(_, at)| at).collect()
    }

    fn tier(&self, running: &Running) -> Tier {
        self.view.shares.priority(running.key).tier
    }

    fn priority(&self, at: usize) -> Priority {
        self.view.shares.priority(self.batch[at].running.key)
    }

    /// Plans the next chunk of a prompt in the batch. Returns false if the step is full;
    /// then no later prompt fits either.
    fn read_on(&mut self, at: usize) -> bool {
        let running = self.batch[at].running;
        let &Running { sequence, cached, pending, rows, .. } = running;
        let pending = Pending { cached, tokens: pending, rows };
        let tokens = self.chunk(pending);
        if tokens == 0 {
            return false;
        }
        if self.batch[at].lacks() > 0 {
            self.read_part(at, tokens);
        } else if let Some(blocks) = self.blocks_to_grow(at) {
            let chunk = Chunk { sequence, tokens, blocks, rows: pending.rows_of(tokens) };
            self.first_read = false;
            self.count(chunk, cached);
            self.batch[at].chunk = Some(chunk);
        }
        true
    }

    /// Admits a queue head, or passes it if it is large and does not fit. Returns false if
    /// the head blocks all later heads.
    fn admit_or_pass(&mut self, head: QueueHead<'_>, queue_heads: &mut QueueHeads<'_>) -> bool {
        let share_owner = head.priority.share_owner;
        let large = self.is_large(share_owner.1, needed(head.waiting));
        let uses_headroom = self.may_use_headroom(&head);
        let candidate = Candidate { head, uses_headroom, large };
        // Only small heads pass a large one.
        let waits = large && !self.passed.is_empty();
        if !waits && (self.try_admit(&candidate) || self.admit_part(&candidate)) {
            // The head is taken only once it is admitted, so a blocked head keeps its
            // position.
            queue_heads.take(head.key);
            return true;
        }
        // The other requests of an owner wait for the large one of that owner.
        let passed = large || self.lacked_by(share_owner.1) > 0;
        if passed {
            queue_heads.pass(share_owner.1);
            self.passed.push(share_owner.1);
        }
        passed
    }

    /// Admits a head behind one that does not fit, if its owner may use all spare capacity and the
    /// head needs no more than that. Otherwise the owner is left out.
    ///
    /// The head in front needs more than the spare capacity, or its owner may not use it, so it
    /// waits for other capacity. Without this, a head with many choices would keep small requests
    /// of others waiting until that many places are free at once.
    fn admit_into_spare(&mut self, head: QueueHead<'_>, queues: &mut Queues<'_>) {
        queues.looks -= 1;
        let share_owner = head.priority.share_owner.1;
        let Spare { places, blocks } = self.spare;
        let is_small = head.waiting.followers < places
            && needed(head.waiting) <= blocks
            && self.spare_without(&head) == Spare::default();
        if is_small {
            let uses_headroom = self.may_use_headroom(&head);
            let candidate = Candidate { head, uses_headroom, large: false };
            if self.leaves(self.room, &candidate, Spare::default()) {
                self.admit(&candidate);
                return queues.heads.take(head.key);
            }
        }
        queues.heads.pass(share_owner);
    }

    /// Admits a queue head if there is room, or if preemption can make room. Returns true
    /// if the head was admitted.
    fn try_admit(&mut self, candidate: &Candidate<'_>) -> bool {
        let admitted = self.make_room(candidate);
        if admitted {
            self.admit(candidate);
        }
        admitted
    }

    fn admit(&mut self, candidate: &Candidate<'_>) {
        let QueueHead { key, waiting, .. } = candidate.head;
        let &Waiting { sequence, rank, rows, tokens, pending, most, followers, .. } = waiting;
        let needed = needed(waiting);
        // A reservation leaves the spare blocks free, what the head needs does not.
        let usable = self.usable(self.room, candidate).saturating_sub(self.spare.blocks);
        // The reservation may shrink to the usable blocks, but never below what the
        // sequence needs to run.
        let blocks = reserved(needed, most).min(usable).max(needed);
        self.room.free -= blocks;
        self.room.sequences += 1 + followers;
        self.room.promised += Growth { tokens, most, followers }.soon(blocks);
        self.decisions.admit.push((key, rank));
        let pending = Pending { cached: 0, tokens: pending, rows };
        let tokens = self.chunk(pending);
        let chunk = Chunk { sequence, tokens, blocks, rows: pending.rows_of(tokens) };
        self.first_read = false;
        self.count(chunk, 0);
        self.admitted.push(Admitted { chunk, followers });
    }
}

impl Member<'_> {
    /// Returns true if the sequence feeds only its newest token.
    fn decodes(&self) -> bool {
        self.running.decodes()
    }

    /// Returns true if the next tokens need more blocks than the sequence holds.
    fn grows(&self) -> bool {
        blocks_for(self.running.cached + self.running.pending) > self.kept
    }

    /// Returns the blocks that the sequence holds after the decisions so far.
    fn held(&self) -> u32 {
        self.chunk.map_or(self.kept, |chunk| chunk.blocks)
    }

    /// Adds the capacity that the sequence would release to `room`.
    fn leave(&self, room: &mut FreeCapacity) {
        let Running { blocks, exclusive, followers, .. } = *self.running;
        let held = self.held();
        room.free += exclusive + held - blocks;
        room.sequences -= 1 + followers;
        room.promised -= self.promised();
    }
}

/// Heads behind one that does not fit that a decision looks at. A bound, because thousands of
/// owners may wait.
const MOST_LOOKS: u32 = 16;
