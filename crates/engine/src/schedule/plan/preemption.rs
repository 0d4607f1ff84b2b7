//! Preemption: which sequences give up their KV blocks where the capacity is short.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use tollgate_domain::{DeviceNanos, SequenceId};

use super::super::queue_heads::QueueHead;
use super::super::shares::{NodeId, Priority, VirtualTime};
use super::super::{Running, Spare, Tier};
use super::chunk::largest;
use super::room::{FreeCapacity, needed};
use super::{Candidate, Planner};
use crate::kv::blocks_for;
use crate::schedule;

/// Preemption order, smallest first: the tenant furthest over its share, then the sequence
/// with the least computed, then the newest sequence.
type PreemptionOrder = (Reverse<TenantPriority>, u32, Reverse<SequenceId>);

/// Priority of a tenant: smaller values run first.
type TenantPriority = (Tier, (VirtualTime, NodeId), (VirtualTime, NodeId));

/// The capacity that is short.
#[derive(Clone, Copy)]
enum Scarce {
    Places,
    Blocks,
}

impl Planner<'_> {
    /// Returns true if `blocks` are a large part of the cache and more than the share owner's
    /// part by weight.
    pub(super) fn is_large(&self, share_owner: NodeId, blocks: u32) -> bool {
        let total = self.bounds.total_blocks;
        schedule::is_large(blocks, total) && blocks > self.view.shares.part(share_owner, total)
    }

    /// Returns true if a large sequence gives way to another share owner. It does not if the
    /// other one has used more of the device by more than the guard and, with the blocks that
    /// it asks for, holds more than its part of the cache.
    fn gives_way(&self, large: &Priority, other: &Priority, within_part: bool) -> bool {
        if large.tier != other.tier {
            return large.tier > other.tier;
        }
        large.share_owner.1 != other.share_owner.1
            && (within_part || other.share_owner.0 <= self.guarded(large.share_owner))
    }

    /// Returns true if a share owner holds at most its part of the cache with `more` blocks.
    pub(super) fn is_within_part(&self, share_owner: NodeId, more: u32) -> bool {
        let held = self.held(Scarce::Blocks).get(&share_owner).copied().unwrap_or(0);
        held + more <= self.view.shares.part(share_owner, self.bounds.total_blocks)
    }

    /// Makes room for a candidate, if needed by preemption. Returns false and preempts
    /// nothing if preemption would not free enough.
    pub(super) fn make_room(&mut self, candidate: &Candidate<'_>) -> bool {
        if self.fits(self.room, candidate) {
            return true;
        }
        let mut preemptible = self.preemptible(candidate);
        // No two sequences are equal in this order, so the result is always the same.
        preemptible.sort_unstable();
        let mut room = self.room;
        for (index, &(_, at)) in preemptible.iter().enumerate() {
            // `room` is a copy. The plan changes only after enough sequences were found.
            let before = room;
            self.batch[at].leave(&mut room);
            if self.fits(room, candidate) {
                for &(_, at) in &preemptible[..index] {
                    self.preempt(at);
                }
                self.give_way(at, before, candidate);
                return true;
            }
        }
        false
    }

    /// Frees what a candidate lacks beyond `room`: the last blocks of a sequence that can do
    /// without them, otherwise the whole sequence.
    fn give_way(&mut self, at: usize, room: FreeCapacity, candidate: &Candidate<'_>) {
        let kept = if self.can_shrink(at) {
            let member = &self.batch[at];
            let (held, promised) = (member.held(), member.promised());
            largest(0..=held, |kept| {
                let running = self.batch[at].running;
                let promised = room.promised - promised + running.promised(kept);
                let free = room.free + held - kept;
                self.fits(FreeCapacity { free, promised, ..room }, candidate)
            })
        } else {
            0
        };
        if kept > 0 { self.shrink(at, kept) } else { self.preempt(at) }
    }

    /// Returns the sequences that may be preempted for a queue head. Such a sequence
    /// belongs to another tenant that is ahead by more than the guard, or has borrowed the
    /// spare capacity, and holds more of the scarce capacity. The sequence must also have
    /// rested since its last preemption.
    fn preemptible(&self, candidate: &Candidate<'_>) -> Vec<(PreemptionOrder, usize)> {
        let &Candidate { ref head, large, .. } = candidate;
        let limit = Limit::new(self, &head.priority);
        let within_part = self.is_within_part(head.priority.share_owner.1, needed(head.waiting));
        let rested = |running: &Running| {
            running.preempted_at.is_none_or(|at| self.view.now.since(at) >= self.bounds.rest)
        };
        let borrower = self.borrower(head);
        let mut ahead: Vec<(Priority, usize)> = (0..self.batch.len())
            .filter(|&at| !self.batch[at].preempted)
            .map(|at| (self.priority(at), at))
            .filter(|&(priority, at)| {
                let running = self.batch[at].running;
                let passed =
                    limit.is_passed_by(&priority) || borrower == Some(priority.share_owner.1);
                // For a smaller head a large sequence needs no rest: others would wait until it
                // is read.
                let gives = !large && self.is_large(priority.share_owner.1, running.filled());
                (gives && (passed || self.gives_way(&priority, &head.priority, within_part)))
                    || (passed && rested(running))
            })
            .collect();
        // Counting the held capacity walks the whole batch, so it is skipped where no
        // sequence qualifies.
        if !ahead.is_empty() {
            let held = self.held(self.scarce(head));
            ahead.retain(|&(ref priority, at)| {
                // A sequence that lacks blocks rests on the ones that it has, so a small head
                // may take them from an owner that holds less, too.
                let rests = !large && self.batch[at].lacks() > 0;
                rests || self.holds_more(priority, &head.priority, &held)
            });
            if large {
                // Sequences that may pass a large head keep their places. Otherwise the two
                // would preempt each other in turn.
                let blocks = self.held(Scarce::Blocks);
                ahead.retain(|(priority, _)| {
                    let owner = priority.share_owner.1;
                    priority.tier != head.priority.tier
                        || self.is_large(owner, blocks.get(&owner).copied().unwrap_or(0))
                });
            }
        }
        ahead.into_iter().map(|(priority, at)| (self.preemption_order(at, &priority), at)).collect()
    }

    /// Returns the share owner that was alone and has borrowed the spare capacity, if the
    /// owner of the head takes it back. It does so if it has used no more of the device than
    /// the other, holds less than the spare capacity, and needs no more than that.
    fn borrower(&self, head: &QueueHead<'_>) -> Option<NodeId> {
        let Priority { tier, share_owner, .. } = head.priority;
        let scarce = self.scarce(head);
        let (asked, all, spare) = match scarce {
            Scarce::Places => {
                (1 + head.waiting.followers, self.bounds.max_sequences, self.bounds.spare.places)
            }
            Scarce::Blocks => {
                (needed(head.waiting), self.bounds.total_blocks, self.bounds.spare.blocks)
            }
        };
        // First, because the held capacity walks the whole batch.
        if asked > spare {
            return None;
        }
        let (places, blocks) = self.held_by(share_owner.1);
        let Spare { places: spare_places, blocks: spare_blocks } = self.bounds.spare;
        if places >= MOST_TAKEN_BACK.min(spare_places.max(1)) || blocks >= spare_blocks.max(1) {
            return None;
        }
        let held = self.held(scarce);
        let others = (0..self.batch.len()).map(|at| self.priority(at));
        // At most one share owner holds more than all but the spare capacity.
        let mut others = others
            .filter(|other| held.get(&other.share_owner.1).is_some_and(|&held| held > all - spare));
        let other = others.next()?;
        let behind = (other.tier, other.share_owner.0) < (tier, share_owner.0);
        (!behind).then_some(other.share_owner.1)
    }

    /// Returns the capacity that is short for a head: the slots of the batch if the head would
    /// exceed them, otherwise KV blocks.
    fn scarce(&self, head: &QueueHead<'_>) -> Scarce {
        let places = self.room.sequences + 1 + head.waiting.followers;
        match places > self.bounds.max_sequences {
            true => Scarce::Places,
            false => Scarce::Blocks,
        }
    }

    /// Returns the amount of a capacity that each share owner and each tenant in the batch
    /// holds.
    fn held(&self, scarce: Scarce) -> BTreeMap<NodeId, u32> {
        let mut held = BTreeMap::new();
        for (at, member) in self.batch.iter().enumerate().filter(|(_, member)| !member.preempted) {
            let Priority { share_owner, tenant, .. } = self.priority(at);
            for id in [share_owner.1, tenant.1] {
                *held.entry(id).or_default() += match scarce {
                    Scarce::Places => 1 + member.running.followers,
                    Scarce::Blocks => member.held(),
                };
            }
        }
        held
    }

    /// Returns true if `one` holds more of the scarce capacity than `other`, each divided
    /// by its weight. Virtual times follow the held capacity with a delay. Without this
    /// check a tenant that is behind would preempt again and again until it is as far
    /// ahead.
    fn holds_more(&self, one: &Priority, other: &Priority, held: &BTreeMap<NodeId, u32>) -> bool {
        let over_weight = |id: NodeId| {
            let held = held.get(&id).copied().unwrap_or(0);
            VirtualTime::of(DeviceNanos(held.into()), self.view.shares.weight(id))
        };
        let (one_id, other_id) = match one.share_owner.1 == other.share_owner.1 {
            true => (one.tenant.1, other.tenant.1),
            false => (one.share_owner.1, other.share_owner.1),
        };
        one.tier != other.tier || over_weight(one_id) > over_weight(other_id)
    }

    pub(super) fn guarded(&self, (virtual_time, id): (VirtualTime, NodeId)) -> VirtualTime {
        virtual_time.plus(VirtualTime::of(self.bounds.guard, self.view.shares.weight(id)))
    }

    /// Returns the sequence to preempt for a sequence that needs a block. Candidates are
    /// the sequences of the same tenant and of tenants further ahead. The asking sequence
    /// is preempted only if it comes first itself.
    #[expect(clippy::expect_used, reason = "the sequence that asks is one of the candidates")]
    pub(super) fn furthest_ahead(&self, at: usize) -> usize {
        let asker = self.priority(at);
        let small = !self.is_large(asker.share_owner.1, self.batch[at].running.filled());
        let within_part = self.is_within_part(asker.share_owner.1, 1);
        let gives_way = |other: usize, priority: &Priority| {
            small
                && self.is_large(priority.share_owner.1, self.batch[other].running.filled())
                && self.gives_way(priority, &asker, within_part)
        };
        (0..self.batch.len())
            .filter(|&other| !self.batch[other].preempted)
            .map(|other| (self.priority(other), other))
            .map(|(priority, other)| (gives_way(other, &priority), priority, other))
            .filter(|(large, priority, _)| *large || priority.tenant() >= asker.tenant())
            // The asking sequence is in the list, so the minimum always exists.
            .min_by_key(|(large, priority, other)| {
                (!large, self.preemption_order(*other, priority))
            })
            .map(|(.., other)| other)
            .expect("the sequence that asks for blocks is not preempted yet")
    }

    fn preemption_order(&self, at: usize, priority: &Priority) -> PreemptionOrder {
        let Running { computed, sequence, .. } = *self.batch[at].running;
        (Reverse(priority.tenant()), computed, Reverse(sequence))
    }

    pub(super) fn preempt(&mut self, at: usize) {
        self.batch[at].leave(&mut self.room);
        let member = &mut self.batch[at];
        member.preempted = true;
        self.decisions.preempt.push(member.running.sequence);
        // The sequence may already have a chunk in this step; then its cost is taken out
        // again.
        if let Some(chunk) = member.chunk.take() {
            let cached = member.running.cached;
            self.uncount(chunk, cached);
        }
        let sequence = self.batch[at].running.sequence;
        // A sequence that loses all its blocks must not also be told to keep some.
        self.decisions.shrink.retain(|shrink| shrink.sequence != sequence);
    }
}

impl Running {
    /// Returns the blocks that the known tokens of the sequence fill. Blocks that are reserved
    /// in advance do not count: with them, two sequences could each look large to the other
    /// and preempt each other for ever.
    pub(super) fn filled(&self) -> u32 {
        blocks_for(self.known)
    }
}

impl Priority {
    fn tenant(&self) -> TenantPriority {
        (self.tier, self.share_owner, self.tenant)
    }
}

/// Slots that an owner takes back from the one that was alone, before that one is ahead by the
/// guard.
const MOST_TAKEN_BACK: u32 = 2;

/// Virtual times that others must exceed before they may be preempted for a queue head.
struct Limit {
    tier: Tier,
    share_owner: (VirtualTime, NodeId),
    tenant: (VirtualTime, NodeId),
}

impl Limit {
    fn new(plan: &Planner<'_>, head: &Priority) -> Self {
        let guarded = |own: (VirtualTime, NodeId)| (plan.guarded(own), own.1);
        Self {
            tier: head.tier,
            share_owner: guarded(head.share_owner),
            tenant: guarded(head.tenant),
        }
    }

    /// Returns true if `priority` exceeds the limit. Batch work always exceeds the limit of
    /// interactive work. Otherwise share owners are compared, or the tenants of one share
    /// owner. A sequence of the same tenant never exceeds the limit.
    fn is_passed_by(&self, priority: &Priority) -> bool {
        if priority.tier != self.tier {
            return priority.tier > self.tier;
        }
        let (one, limit) = match priority.share_owner.1 == self.share_owner.1 {
            true => (priority.tenant, self.tenant),
            false => (priority.share_owner, self.share_owner),
        };
        one.1 != limit.1 && one.0 > limit.0
    }
}
