//! Room: the slots of the batch and the blocks of the KV cache that a sequence may use.

use super::super::shares::{NodeId, Priority, Shares, VirtualTime, Waiting};
use super::super::{Running, Spare, Tier};
use super::{Admitted, Candidate, Member, Planner, QueueHead};
use crate::kv::blocks_for;

/// Capacity that is left for new sequences.
#[derive(Clone, Copy)]
pub(super) struct FreeCapacity {
    pub(super) free: u32,
    /// Sequences in the batch, including the choices that will fork.
    pub(super) sequences: u32,
    /// KV blocks that the sequences in the batch will need soon.
    pub(super) promised: u32,
}

impl Planner<'_> {
    /// Returns true if the share owner and the tenant are both within the guard of the
    /// smallest virtual time. Every sibling with requests counts.
    pub(super) fn is_near_smallest(&self, priority: &Priority) -> bool {
        let shares: &Shares = self.view.shares;
        let near = |own: (VirtualTime, NodeId)| {
            shares
                .smallest_beside(own.1)
                .is_none_or(|smallest| own.1 == smallest.1 || own.0 <= self.guarded(smallest))
        };
        !self.is_below_others(priority.tier) && near(priority.share_owner) && near(priority.tenant)
    }

    /// Returns true if a queue head may use the headroom: its owner is near the smallest virtual
    /// time, or stays within its part of the cache. An owner that has used less of the device may
    /// hold most of the cache, and must not keep others from their parts.
    pub(super) fn may_use_headroom(&self, head: &QueueHead<'_>) -> bool {
        let QueueHead { priority, waiting, .. } = head;
        self.is_near_smallest(priority)
            || (!self.is_below_others(priority.tier)
                && self.is_within_part(priority.share_owner.1, needed(waiting)))
    }

    /// Returns true for batch work beside interactive requests, which never uses the headroom.
    fn is_below_others(&self, tier: Tier) -> bool {
        tier == Tier::Batch && self.view.shares.has_requests(Tier::Interactive)
    }

    /// Returns the part of `free` blocks that a sequence may use.
    fn allowed(&self, free: u32, uses_headroom: bool) -> u32 {
        free.saturating_sub(if uses_headroom { 0 } else { self.headroom })
    }

    /// Returns the number of blocks that a candidate may use. Running sequences keep the
    /// blocks that they will need soon, and each follower of the candidate will need one
    /// block for its own tail.
    pub(super) fn usable(&self, room: FreeCapacity, candidate: &Candidate<'_>) -> u32 {
        // An empty batch has no sequence to protect. Without this case a request as large
        // as the pool would never start.
        if room.sequences == 0 {
            return room.free;
        }
        // A large sequence gives way to other share owners, and keeps its room from its own.
        let lacked = self.lacked_by(candidate.head.priority.share_owner.1);
        let kept = room.promised + candidate.head.waiting.followers + lacked;
        self.allowed(room.free, candidate.uses_headroom).saturating_sub(kept)
    }

    /// Returns true if the candidate fits and leaves the spare capacity that its share owner may
    /// not use.
    pub(super) fn fits(&self, room: FreeCapacity, candidate: &Candidate<'_>) -> bool {
        self.leaves(room, candidate, self.spare)
            || (self.leaves(room, candidate, Spare::default())
                // In an empty batch the spare capacity is ignored, so that a request as
                // large as the pool can start.
                && (room.sequences == 0
                    || self.leaves(room, candidate, self.spare_without(&candidate.head))))
    }

    /// Returns true if the capacity suffices for the candidate and for `spare`.
    pub(super) fn leaves(
        &self,
        room: FreeCapacity,
        candidate: &Candidate<'_>,
        spare: Spare,
    ) -> bool {
        let waiting = candidate.head.waiting;
        let places = room.sequences + 1 + waiting.followers + spare.places;
        let blocks = needed(waiting) + spare.blocks;
        places <= self.bounds.max_sequences && blocks <= self.usable(room, candidate)
    }

    /// Returns the spare capacity that a queue head must leave for other share owners.
    ///
    /// Its owner may use the spare blocks if it holds little. It may use the spare slots if it has
    /// had few requests since it last had none, but not for batch work beside interactive
    /// requests. Waiting requests count, because an owner with many of them fills any slot. Its
    /// part of the slots that are not spare is few: if all owners have no more than that, they
    /// leave the spare slots free. The rule looks back, because answers that began together end
    /// together, and then an owner with many requests has few.
    pub(super) fn spare_without(&self, head: &QueueHead<'_>) -> Spare {
        let QueueHead { priority, waiting, .. } = head;
        let share_owner = priority.share_owner.1;
        let Spare { places, blocks } = self.bounds.spare;
        let (held_places, held_blocks) = self.held_by(share_owner);
        let part = self.view.shares.part(share_owner, self.bounds.max_sequences - places);
        let few = part.max(LEAST_FEW.min(places));
        let has_few = self.view.shares.most_requests(share_owner) <= few
            && held_places + 1 + waiting.followers <= few
            && !self.is_below_others(priority.tier);
        let holds_little = held_places < places.max(1) && held_blocks < blocks.max(1);
        Spare {
            places: if has_few { 0 } else { self.spare.places },
            blocks: if holds_little { 0 } else { self.spare.blocks },
        }
    }

    /// Returns the slots and the blocks that a share owner holds.
    pub(super) fn held_by(&self, share_owner: NodeId) -> (u32, u32) {
        let (mut places, mut blocks) = (0, 0);
        // Sequences admitted earlier in this step count too. Otherwise one owner could fill
        // the spare capacity within one step.
        let stays = self.batch.iter().filter(|member| !member.preempted);
        let stays = stays.map(|member| {
            let Running { key, blocks, followers, .. } = *member.running;
            (key, 1 + followers, blocks)
        });
        let comes = self.decisions.admit.iter().zip(&self.admitted);
        let comes = comes
            .map(|(&(key, _), &Admitted { chunk, followers })| (key, 1 + followers, chunk.blocks));
        for (key, more_places, more_blocks) in stays.chain(comes) {
            if self.view.shares.priority(key).share_owner.1 == share_owner {
                places += more_places;
                blocks += more_blocks;
            }
        }
        (places, blocks)
    }

    /// Returns the number of blocks that a running sequence must hold for its next tokens.
    /// Blocks are reserved in advance where the pool allows it. Returns `None` if the
    /// sequence itself was preempted.
    pub(super) fn blocks_to_grow(&mut self, at: usize) -> Option<u32> {
        let Member { running, kept, .. } = self.batch[at];
        if !self.batch[at].grows() {
            return Some(kept);
        }
        let needed = blocks_for(running.cached + running.pending);
        let near_smallest = self.is_near_smallest(&self.priority(at));
        // A large sequence gives its blocks up as soon as another owner needs them.
        let large = self.is_large(self.priority(at).share_owner.1, running.filled());
        let mut usable = self.allowed(self.room.free, near_smallest || large);
        while usable < needed - kept {
            let mut furthest = self.furthest_ahead(at);
            // A large sequence is not computed again for one block. It takes the block from
            // a sequence that rests, or waits for it.
            if furthest == at && large && self.room.sequences > 1 + running.followers {
                match self.partial_in_batch() {
                    Some(partial) => furthest = partial,
                    None => return None,
                }
            }
            let before = self.room.free;
            let lacking = needed - kept - usable;
            let held = self.batch[furthest].held();
            if furthest != at && held > lacking && self.can_shrink(furthest) {
                self.shrink(furthest, held - lacking);
            } else {
                self.preempt(furthest);
            }
            // No sequence further ahead is left, so the asking sequence itself was
            // preempted.
            if furthest == at {
                return None;
            }
            // Blocks freed by preemption are usable even if the free ones are headroom.
            usable += self.room.free - before;
        }
        let ahead = usable.saturating_sub(self.spare.blocks);
        let more = (reserved(needed, running.most) - kept).min(ahead).max(needed - kept);
        let blocks = kept + more;
        self.room.free -= more;
        // The new blocks are no longer promised: the sequence holds them now.
        self.room.promised -= running.soon(kept) - running.soon(blocks);
        Some(blocks)
    }
}

impl Running {
    /// Returns the number of further blocks that the sequence will need soon if it holds
    /// `blocks`.
    pub(super) fn soon(&self, blocks: u32) -> u32 {
        let &Self { known, most, followers, .. } = self;
        Growth { tokens: known, most, followers }.soon(blocks)
    }
}

/// The expected growth of a sequence.
pub(super) struct Growth {
    pub(super) tokens: u32,
    pub(super) most: u32,
    pub(super) followers: u32,
}

impl Growth {
    /// Returns the number of blocks that the sequence will need soon beyond the `blocks` that it
    /// holds: for its next tokens, and one for each follower.
    pub(super) fn soon(self, blocks: u32) -> u32 {
        let Self { tokens, most, followers } = self;
        blocks_for((tokens + SOON_TOKENS).min(most)).saturating_sub(blocks) + followers
    }
}

/// Returns the number of blocks that a waiting entry needs to run: all its tokens and the
/// first token to come.
pub(super) fn needed(waiting: &Waiting) -> u32 {
    blocks_for((waiting.tokens + 1).min(waiting.most).max(waiting.tokens))
}

/// Returns `needed` plus the blocks reserved in advance, up to the most that the sequence
/// can use.
pub(super) fn reserved(needed: u32, most: u32) -> u32 {
    needed.next_multiple_of(RESERVE_BLOCKS).min(blocks_for(most)).max(needed)
}

/// Requests that are few for a share owner, however small its part is, if there are as many
/// spare slots.
const LEAST_FEW: u32 = 2;
/// Granularity of block reservation: 16 blocks hold 256 tokens.
pub(super) const RESERVE_BLOCKS: u32 = 16;
/// Look-ahead for admission. New sequences may not use KV blocks that running sequences
/// will need within this many tokens. Otherwise one of the sequences would soon be
/// preempted.
const SOON_TOKENS: u32 = 64;
