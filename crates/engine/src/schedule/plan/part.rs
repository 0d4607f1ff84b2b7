//! Parts: a large sequence that holds only a part of its KV blocks.
//!
//! Such a sequence reads as far as its blocks reach, gives up its last blocks to others, and
//! goes on when there is room. At most one sequence in the batch has only a part: two of
//! them could each wait for the blocks of the other.

use super::super::shares::{NodeId, Waiting};
use super::super::{Chunk, Rows, Running, Shrink};
use super::chunk::Pending;
use super::room::{Growth, RESERVE_BLOCKS, needed};
use super::{Admitted, Candidate, Member, Planner, QueueHead};
use crate::backend::BLOCK_TOKENS;
use crate::kv::blocks_for;

/// A sequence that holds only a part of its blocks.
#[derive(Clone, Copy)]
pub(super) struct Partial {
    share_owner: NodeId,
    /// Blocks that the sequence lacks.
    lacks: u32,
}

impl Planner<'_> {
    /// Returns the sequence that holds only a part of its blocks, if there is one.
    fn partial(&self) -> Option<Partial> {
        self.admitted_part.or_else(|| {
            let at = self.partial_in_batch()?;
            let share_owner = self.priority(at).share_owner.1;
            Some(Partial { share_owner, lacks: self.batch[at].lacks() })
        })
    }

    /// Returns the index of the sequence in the batch that holds only a part of its blocks.
    pub(super) fn partial_in_batch(&self) -> Option<usize> {
        self.batch.iter().position(|member| !member.preempted && member.lacks() > 0)
    }

    /// Returns the number of blocks that a sequence of the share owner lacks.
    pub(super) fn lacked_by(&self, share_owner: NodeId) -> u32 {
        let partial = self.partial().filter(|partial| partial.share_owner == share_owner);
        partial.map_or(0, |partial| partial.lacks)
    }

    /// Plans a chunk of at most `most` tokens for a sequence that lacks blocks. The sequence
    /// takes free blocks only, and rests if it may take none.
    pub(super) fn read_part(&mut self, at: usize, most: u32) {
        let member = &self.batch[at];
        let &Running { sequence, cached, pending, rows, .. } = member.running;
        // The step that takes read tokens away does not read them again.
        if member.kept < blocks_for(cached) {
            return;
        }
        let held = member.held();
        let tokens = most.min((held + self.free_for_part(at)) * BLOCK_TOKENS - cached);
        if tokens == 0 {
            return;
        }
        let pending = Pending { cached, tokens: pending, rows };
        let blocks = blocks_for(cached + tokens).max(held);
        let chunk = Chunk { sequence, tokens, blocks, rows: pending.rows_of(tokens) };
        self.room.free -= blocks - held;
        self.first_read = false;
        self.count(chunk, cached);
        self.batch[at].chunk = Some(chunk);
        // A sequence that is complete keeps room for its next tokens, as all others do.
        self.room.promised += self.batch[at].promised();
    }

    /// Returns the number of free blocks that a sequence may take which lacks blocks.
    ///
    /// A sequence that has lost blocks leaves the headroom free, and rests until half as many
    /// blocks more are free. Otherwise it would read the same tokens again after every
    /// request of others.
    fn free_for_part(&self, at: usize) -> u32 {
        let member = &self.batch[at];
        let &Running { cached, computed, followers, .. } = member.running;
        let free = self.room.free;
        let is_alone = self.room.sequences == 1 + followers;
        // A sequence that has lost nothing would read no token twice.
        if cached == computed || is_alone || member.lacks() <= free {
            return free;
        }
        let beyond = free.saturating_sub(self.headroom);
        if beyond < self.headroom / 2 { 0 } else { beyond }
    }

    /// Admits a large head with a part of its blocks. Returns false if the free blocks are
    /// too few, or if another sequence already has only a part.
    pub(super) fn admit_part(&mut self, candidate: &Candidate<'_>) -> bool {
        let QueueHead { key, waiting, priority } = candidate.head;
        let &Waiting { sequence, rank, rows, pending, followers, .. } = waiting;
        // Blocks that others will need soon stay free, and one for each follower.
        let usable = self.room.free.saturating_sub(self.room.promised + followers);
        let places = self.room.sequences + 1 + followers + self.spare.places;
        let starts = candidate.large
            && places <= self.bounds.max_sequences
            && usable >= RESERVE_BLOCKS.min(needed(waiting))
            && self.partial().is_none();
        if !starts {
            return false;
        }
        let pending = Pending { cached: 0, tokens: pending, rows };
        let tokens = self.chunk(pending).min(usable * BLOCK_TOKENS);
        let blocks = blocks_for(tokens);
        let chunk = Chunk { sequence, tokens, blocks, rows: pending.rows_of(tokens) };
        self.room.free -= blocks;
        self.room.sequences += 1 + followers;
        self.decisions.admit.push((key, rank));
        self.first_read = false;
        self.count(chunk, 0);
        self.admitted.push(Admitted { chunk, followers });
        let lacks = blocks_for(waiting.tokens).saturating_sub(blocks);
        let share_owner = priority.share_owner.1;
        self.admitted_part = (lacks > 0).then_some(Partial { share_owner, lacks });
        if lacks == 0 {
            let Waiting { tokens, most, .. } = *waiting;
            self.room.promised += Growth { tokens, most, followers }.soon(blocks);
        }
        true
    }

    /// Returns true if a sequence may give up only its last blocks.
    pub(super) fn can_shrink(&self, at: usize) -> bool {
        let member = &self.batch[at];
        let Running { key, blocks, exclusive, .. } = *member.running;
        let share_owner = self.view.shares.priority(key).share_owner.1;
        self.is_large(share_owner, member.running.filled())
            // Shared blocks become free only if all choices release them.
            && blocks == exclusive
            && (member.lacks() > 0 || self.partial().is_none())
    }

    /// Lets a sequence keep its first `kept` blocks only. Its chunk ends where these end.
    pub(super) fn shrink(&mut self, at: usize, kept: u32) {
        let member = &mut self.batch[at];
        let Running { sequence, cached, .. } = *member.running;
        self.room.free += member.held() - kept;
        self.room.promised -= member.promised();
        // Blocks beyond these belong to the chunk of this step, which is planned again below.
        member.kept = kept.min(member.running.blocks);
        if let Some(chunk) = member.chunk.take() {
            self.uncount(chunk, cached);
            let tokens = chunk.tokens.min((kept * BLOCK_TOKENS).saturating_sub(cached));
            let rows = match chunk.rows {
                // A shorter chunk no longer ends the prompt, and only that end gives logits.
                Rows::Last if tokens < chunk.tokens => Rows::None,
                rows => rows,
            };
            if tokens > 0 {
                let chunk = Chunk { tokens, blocks: kept, rows, ..chunk };
                self.count(chunk, cached);
                self.batch[at].chunk = Some(chunk);
            }
        }
        self.room.promised += self.batch[at].promised();
        let kept = self.batch[at].kept;
        // A sequence may shrink again in one decision; the last number counts.
        self.decisions.shrink.retain(|shrink| shrink.sequence != sequence);
        if kept < self.batch[at].running.blocks {
            self.decisions.shrink.push(Shrink { sequence, blocks: kept });
        }
    }
}

impl Member<'_> {
    /// Returns the number of blocks that the sequence lacks for its known tokens.
    pub(super) fn lacks(&self) -> u32 {
        self.running.lacks(self.held())
    }

    /// Returns the number of blocks that the pool keeps for the sequence.
    pub(super) fn promised(&self) -> u32 {
        self.running.promised(self.held())
    }
}

impl Running {
    /// Returns true if the sequence feeds only its newest token.
    pub(super) fn decodes(&self) -> bool {
        self.pending == 1 && self.cached + 1 == self.known
    }

    /// Returns the number of blocks that the sequence lacks for its known tokens if it holds
    /// `held` blocks. A sequence that decodes and has given up none lacks none: it gets the
    /// block of its next token in time.
    fn lacks(&self, held: u32) -> u32 {
        match held < self.blocks || !self.decodes() {
            true => blocks_for(self.known).saturating_sub(held),
            false => 0,
        }
    }

    /// Returns the number of blocks that the pool keeps for the sequence if it holds `held`
    /// blocks. A sequence that lacks blocks takes what is left.
    pub(super) fn promised(&self, held: u32) -> u32 {
        if self.lacks(held) > 0 { 0 } else { self.soon(held) }
    }
}
