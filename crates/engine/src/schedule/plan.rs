//! Planner of one step: chooses the sequences, their tokens and their KV blocks, and
//! preempts sequences where the capacity is short.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use tollgate_domain::{DeviceNanos, SequenceId, SequenceWork, StepCost};

use super::queue_heads::{QueueHead, QueueHeads};
use super::shares::{NodeId, Priority, Shares, VirtualTime, Waiting};
use super::{Bounds, Chunk, Decisions, Rows, Running, Spare, Tier, View};
use crate::kv::blocks_for;

pub(super) struct Planner<'a> {
    view: &'a View<'a>,
    bounds: &'a Bounds,
    decisions: Decisions,
    /// Running sequences, in order of arrival.
    batch: Vec<Member<'a>>,
    /// Chunks of the sequences that this step admits.
    admitted: Vec<Chunk>,
    cost: StepCost<'a>,
    room: FreeCapacity,
    /// KV blocks that only tenants near the smallest virtual time may use.
    headroom: u32,
    tokens_left: u32,
    rows_left: u32,
    /// True until the step contains a chunk of a prompt. The first such chunk gets a
    /// minimum size.
    first_read: bool,
}

/// A running sequence and the decision about it.
struct Member<'a> {
    running: &'a Running,
    chunk: Option<Chunk>,
    preempted: bool,
}

/// Capacity that is left for new sequences.
#[derive(Clone, Copy)]
struct FreeCapacity {
    free: u32,
    /// Sequences in the batch, including the choices that will fork.
    sequences: u32,
    /// KV blocks that the sequences in the batch will need soon.
    promised: u32,
}

/// The capacity that is short.
#[derive(Clone, Copy)]
enum Scarce {
    Places,
    Blocks,
}

/// A queue head that could enter the batch. The flag is true if the head may use the
/// headroom of the pool.
struct Candidate<'a> {
    head: QueueHead<'a>,
    near_smallest: bool,
}

/// Preemption order, smallest first: the tenant furthest over its share, then the sequence
/// with the least computed, then the newest sequence.
type PreemptionOrder = (Reverse<TenantPriority>, u32, Reverse<SequenceId>);

/// Priority of a tenant: smaller values run first.
type TenantPriority = (Tier, (VirtualTime, NodeId), (VirtualTime, NodeId));

impl<'a> Planner<'a> {
    pub(super) fn new(view: &'a View<'a>, bounds: &'a Bounds) -> Self {
        let running = view.running;
        let room = FreeCapacity {
            free: view.free_blocks,
            sequences: running.iter().map(|running| 1 + running.followers).sum(),
            promised: running.iter().map(|running| running.soon(running.blocks)).sum(),
        };
        let member = |running| Member { running, chunk: None, preempted: false };
        Self {
            view,
            bounds,
            decisions: Decisions::default(),
            batch: running.iter().map(member).collect(),
            admitted: Vec::new(),
            cost: bounds.table.step_cost(),
            room,
            headroom: bounds.headroom(),
            tokens_left: bounds.limits.tokens,
            rows_left: bounds.limits.logit_rows,
            first_read: true,
        }
    }

    /// Returns the decisions. Chunks that decode come before chunks of prompts.
    pub(super) fn decisions(mut self) -> Decisions {
        let chunks = &mut self.decisions.chunks;
        chunks.reserve(self.batch.len() + self.admitted.len());
        for decodes in [true, false] {
            let those = self.batch.iter().filter(|member| member.decodes() == decodes);
            chunks.extend(those.filter_map(|member| member.chunk));
        }
        chunks.extend(self.admitted);
        self.decisions
    }

    /// Refuses every request that has waited past its deadline.
    pub(super) fn refuse(&mut self) {
        self.decisions.refuse = self.view.shares.expired(self.view.now).collect();
    }

    /// Plans one token for every sequence that decodes. If a sequence needs a block and
    /// none is free, the sequence that is first in [`PreemptionOrder`] is preempted.
    pub(super) fn decode(&mut self) {
        let decoding = |member: &Member<'_>| member.decodes();
        // Sorting is only needed if a sequence needs a block. Otherwise no sequence can be
        // preempted, and the order has no effect.
        let grows = self.batch.iter().any(|member| member.decodes() && member.grows());
        let order = if grows { self.in_order(decoding) } else { (0..self.batch.len()).collect() };
        for at in order {
            let Member { running, preempted, .. } = self.batch[at];
            // The sequences left over decode in the next step; none of them loses its
            // blocks.
            let full = self.tokens_left == 0 || self.rows_left == 0;
            if !self.batch[at].decodes() || preempted || full {
                continue;
            }
            if let Some(blocks) = self.blocks_to_grow(at) {
                let chunk =
                    Chunk { sequence: running.sequence, tokens: 1, blocks, rows: running.rows };
                self.count(chunk, running.cached);
                self.batch[at].chunk = Some(chunk);
            }
        }
    }

    /// Reads prompts while the time budget lasts, smallest virtual time first. Prompts in
    /// the batch and heads of the queues compete in one order.
    pub(super) fn read(&mut self) {
        let readers = self.in_order(|member| !member.decodes());
        let mut readers = readers.into_iter().peekable();
        let mut queue_heads = QueueHeads::new(self.view.shares, self.view.now);
        let mut blocked = false;
        loop {
            // A prompt may have been preempted for a head that was admitted in this loop.
            while readers.next_if(|&at| self.batch[at].preempted).is_some() {}
            let reader = readers.peek().copied();
            // A head that does not fit blocks all later heads: serving a smaller request
            // first would starve the blocked one.
            let head = if blocked { None } else { queue_heads.first() };
            let goes_on = match (reader, head) {
                (Some(at), head) if head.is_none_or(|head| self.priority(at) <= head.priority) => {
                    readers.next();
                    self.read_on(at)
                }
                (_, Some(head)) => {
                    let goes_on = self.has_room_to_read(head.waiting);
                    blocked = goes_on && !self.try_admit(head);
                    if goes_on && !blocked {
                        // The head is taken only once it is admitted, so a blocked head
                        // keeps its position.
                        queue_heads.take(head.key);
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
        those.sort_unstable();
        those.into_iter().map(|(_, at)| at).collect()
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
        if let Some(blocks) = self.blocks_to_grow(at) {
            let chunk = Chunk { sequence, tokens, blocks, rows: pending.rows_of(tokens) };
            self.first_read = false;
            self.count(chunk, cached);
            self.batch[at].chunk = Some(chunk);
        }
        true
    }

    /// Admits a queue head if there is room, or if preemption can make room. Returns true
    /// if the head was admitted.
    fn try_admit(&mut self, head: QueueHead<'_>) -> bool {
        let near_smallest = self.is_near_smallest(&head.priority);
        let candidate = Candidate { head, near_smallest };
        let admitted = self.make_room(&candidate);
        if admitted {
            self.admit(&candidate);
        }
        admitted
    }

    fn admit(&mut self, candidate: &Candidate<'_>) {
        let QueueHead { key, waiting, .. } = candidate.head;
        let &Waiting { sequence, rank, rows, tokens, pending, most, followers, .. } = waiting;
        let needed = needed(waiting);
        let usable = self.usable(self.room, candidate).saturating_sub(self.bounds.spare.blocks);
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
        self.admitted.push(chunk);
    }

    /// Makes room for a candidate, if needed by preemption. Returns false and preempts
    /// nothing if preemption would not free enough.
    fn make_room(&mut self, candidate: &Candidate<'_>) -> bool {
        if self.fits(self.room, candidate) {
            return true;
        }
        let mut preemptible = self.preemptible(&candidate.head);
        preemptible.sort_unstable();
        let mut room = self.room;
        for (index, &(_, at)) in preemptible.iter().enumerate() {
            // `room` is a copy. The plan changes only after enough sequences were found.
            self.batch[at].leave(&mut room);
            if self.fits(room, candidate) {
                for &(_, at) in &preemptible[..=index] {
                    self.preempt(at);
                }
                return true;
            }
        }
        false
    }

    /// Returns the sequences that may be preempted for a queue head. Such a sequence
    /// belongs to another tenant that is ahead by more than the guard and holds more of the
    /// scarce capacity. The sequence must also have rested since its last preemption.
    fn preemptible(&self, head: &QueueHead<'_>) -> Vec<(PreemptionOrder, usize)> {
        let limit = Limit::new(self, &head.priority);
        let rested = |running: &Running| {
            running.preempted_at.is_none_or(|at| self.view.now.since(at) >= self.bounds.rest)
        };
        let mut ahead: Vec<(Priority, usize)> = (0..self.batch.len())
            .filter(|&at| !self.batch[at].preempted && rested(self.batch[at].running))
            .map(|at| (self.priority(at), at))
            .filter(|(priority, _)| limit.is_passed_by(priority))
            .collect();
        // Counting the held capacity walks the whole batch, so it is skipped where no
        // sequence qualifies.
        if !ahead.is_empty() {
            let held = self.held(head);
            ahead.retain(|(priority, _)| self.holds_more(priority, &head.priority, &held));
        }
        ahead.into_iter().map(|(priority, at)| (self.preemption_order(at, &priority), at)).collect()
    }

    /// Returns the amount of the scarce capacity that each share owner and each tenant in
    /// the batch holds. Slots in the batch are scarce if the head would exceed them,
    /// otherwise KV blocks.
    fn held(&self, head: &QueueHead<'_>) -> BTreeMap<NodeId, u32> {
        let places = self.room.sequences + 1 + head.waiting.followers;
        let scarce = match places > self.bounds.max_sequences {
            true => Scarce::Places,
            false => Scarce::Blocks,
        };
        let mut held = BTreeMap::new();
        for (at, member) in self.batch.iter().enumerate().filter(|(_, member)| !member.preempted) {
            let Priority { share_owner, tenant, .. } = self.priority(at);
            for id in [share_owner.1, tenant.1] {
                *held.entry(id).or_default() += match scarce {
                    Scarce::Places => 1 + member.running.followers,
                    Scarce::Blocks => member.running.blocks,
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

    fn guarded(&self, (virtual_time, id): (VirtualTime, NodeId)) -> VirtualTime {
        virtual_time.plus(VirtualTime::of(self.bounds.guard, self.view.shares.weight(id)))
    }

    /// Returns true if the share owner and the tenant are both within the guard of the
    /// smallest virtual time. Every sibling with requests counts.
    fn is_near_smallest(&self, priority: &Priority) -> bool {
        let shares: &Shares = self.view.shares;
        let near = |own: (VirtualTime, NodeId)| {
            shares
                .smallest_beside(own.1)
                .is_none_or(|smallest| own.1 == smallest.1 || own.0 <= self.guarded(smallest))
        };
        // Batch work never uses the headroom while interactive requests exist.
        let below = priority.tier == Tier::Batch && shares.has_requests(Tier::Interactive);
        !below && near(priority.share_owner) && near(priority.tenant)
    }

    /// Returns the part of `free` blocks that a sequence may use. Only sequences near the
    /// smallest virtual time may use the headroom.
    fn allowed(&self, free: u32, near_smallest: bool) -> u32 {
        free.saturating_sub(if near_smallest { 0 } else { self.headroom })
    }

    /// Returns the number of blocks that a candidate may use. Running sequences keep the
    /// blocks that they will need soon, and each follower of the candidate will need one
    /// block for its own tail.
    fn usable(&self, room: FreeCapacity, candidate: &Candidate<'_>) -> u32 {
        // An empty batch has no sequence to protect. Without this case a request as large
        // as the pool would never start.
        if room.sequences == 0 {
            return room.free;
        }
        let kept = room.promised + candidate.head.waiting.followers;
        self.allowed(room.free, candidate.near_smallest).saturating_sub(kept)
    }

    /// Returns true if the candidate fits. A share owner that holds little may use the
    /// spare capacity.
    fn fits(&self, room: FreeCapacity, candidate: &Candidate<'_>) -> bool {
        self.leaves(room, candidate, self.bounds.spare)
            || (self.leaves(room, candidate, Spare::default())
                // In an empty batch the spare capacity is ignored, so that a request as
                // large as the pool can start.
                && (room.sequences == 0
                    || !self.holds_as_much_as_spare(candidate.head.priority.share_owner.1)))
    }

    /// Returns true if the capacity suffices for the candidate and for `spare`.
    fn leaves(&self, room: FreeCapacity, candidate: &Candidate<'_>, spare: Spare) -> bool {
        let waiting = candidate.head.waiting;
        let places = room.sequences + 1 + waiting.followers + spare.places;
        let blocks = needed(waiting) + spare.blocks;
        places <= self.bounds.max_sequences && blocks <= self.usable(room, candidate)
    }

    /// Returns true if the share owner already holds as much as the spare capacity, in
    /// slots or in blocks.
    fn holds_as_much_as_spare(&self, share_owner: NodeId) -> bool {
        let (mut places, mut blocks) = (0, 0);
        // Sequences admitted earlier in this step count too. Otherwise one owner could fill
        // the spare capacity within one step.
        let stays = self.batch.iter().filter(|member| !member.preempted);
        let stays = stays.map(|member| {
            let Running { key, blocks, followers, .. } = *member.running;
            (key, 1 + followers, blocks)
        });
        let comes = self.decisions.admit.iter().zip(&self.admitted);
        let comes = comes.map(|(&(key, _), chunk)| (key, 1, chunk.blocks));
        for (key, more_places, more_blocks) in stays.chain(comes) {
            if self.view.shares.priority(key).share_owner.1 == share_owner {
                places += more_places;
                blocks += more_blocks;
            }
        }
        let Spare { places: spare_places, blocks: spare_blocks } = self.bounds.spare;
        places >= spare_places.max(1) || blocks >= spare_blocks.max(1)
    }

    /// Returns the number of blocks that a running sequence must hold for its next tokens.
    /// Blocks are reserved in advance where the pool allows it. Returns `None` if the
    /// sequence itself was preempted.
    fn blocks_to_grow(&mut self, at: usize) -> Option<u32> {
        let Member { running, .. } = self.batch[at];
        if !self.batch[at].grows() {
            return Some(running.blocks);
        }
        let needed = blocks_for(running.cached + running.pending);
        let near_smallest = self.is_near_smallest(&self.priority(at));
        let mut usable = self.allowed(self.room.free, near_smallest);
        while usable < needed - running.blocks {
            let furthest = self.furthest_ahead(at);
            let before = self.room.free;
            self.preempt(furthest);
            // No sequence further ahead is left, so the asking sequence itself was
            // preempted.
            if furthest == at {
                return None;
            }
            // Blocks freed by preemption are usable even if the free ones are headroom.
            usable += self.room.free - before;
        }
        let ahead = usable.saturating_sub(self.bounds.spare.blocks);
        let more = (reserved(needed, running.most) - running.blocks)
            .min(ahead)
            .max(needed - running.blocks);
        let blocks = running.blocks + more;
        self.room.free -= more;
        // The new blocks are no longer promised: the sequence holds them now.
        self.room.promised -= running.soon(running.blocks) - running.soon(blocks);
        Some(blocks)
    }

    /// Returns the sequence to preempt for a sequence that needs a block. Candidates are
    /// the sequences of the same tenant and of tenants further ahead. The asking sequence
    /// is preempted only if it comes first itself.
    fn furthest_ahead(&self, at: usize) -> usize {
        let own = self.priority(at).tenant();
        (0..self.batch.len())
            .filter(|&other| !self.batch[other].preempted)
            .map(|other| (self.priority(other), other))
            .filter(|(priority, _)| priority.tenant() >= own)
            // The asking sequence is in the list, so the minimum always exists.
            .min_by_key(|(priority, other)| self.preemption_order(*other, priority))
            .map(|(_, other)| other)
            .expect("the sequence that asks for blocks is not preempted yet")
    }

    fn preemption_order(&self, at: usize, priority: &Priority) -> PreemptionOrder {
        let Running { computed, sequence, .. } = *self.batch[at].running;
        (Reverse(priority.tenant()), computed, Reverse(sequence))
    }

    fn preempt(&mut self, at: usize) {
        self.batch[at].leave(&mut self.room);
        let member = &mut self.batch[at];
        member.preempted = true;
        self.decisions.preempt.push(member.running.sequence);
        // The sequence may already have a chunk in this step; then its cost is taken out
        // again.
        if let Some(chunk) = member.chunk.take() {
            let work = work(&chunk, member.running.cached);
            self.tokens_left += work.new_tokens;
            self.rows_left += work.logit_rows;
            self.cost.remove(&work);
        }
    }

    /// Returns true if at least one token of the waiting entry fits into the step.
    fn has_room_to_read(&self, waiting: &Waiting) -> bool {
        let &Waiting { pending, rows, .. } = waiting;
        let pending = Pending { cached: 0, tokens: pending, rows };
        self.most_to_read(pending) > 0 && (self.first_read || self.fits_time_budget(pending, 1))
    }

    /// Returns the number of `pending` tokens that fit into the step, or 0 if the step is
    /// full.
    fn chunk(&self, pending: Pending) -> u32 {
        let most = self.most_to_read(pending);
        let least = if self.first_read { LEAST_CHUNK.min(most) } else { 0 };
        let tokens = largest(least..=most, |tokens| self.fits_time_budget(pending, tokens));
        // Kernels run faster on whole blocks than on odd ends.
        if tokens < pending.tokens && tokens > LEAST_CHUNK {
            tokens - tokens % LEAST_CHUNK
        } else {
            tokens
        }
    }

    /// Returns the number of `pending` tokens that the device accepts beside the tokens
    /// already in the step.
    fn most_to_read(&self, Pending { tokens, rows, .. }: Pending) -> u32 {
        match rows {
            Rows::None => tokens.min(self.tokens_left),
            // Without a free row the newest token must wait for the next step.
            Rows::Last if self.rows_left == 0 => tokens.saturating_sub(1).min(self.tokens_left),
            Rows::Last => tokens.min(self.tokens_left),
            Rows::All => tokens.min(self.tokens_left).min(self.rows_left),
        }
    }

    fn fits_time_budget(&self, pending: Pending, tokens: u32) -> bool {
        let rows = pending.rows_of(tokens);
        // Only the amount of work matters for the prediction, so the id is arbitrary.
        let chunk = Chunk { sequence: SequenceId(0), tokens, blocks: 0, rows };
        let mut cost = self.cost;
        cost.add(&work(&chunk, pending.cached));
        cost.predicted() <= self.step_time_budget()
    }

    fn step_time_budget(&self) -> DeviceNanos {
        DeviceNanos(self.bounds.step_time_budget.as_nanos().min(u128::from(u64::MAX)) as u64)
    }

    fn count(&mut self, chunk: Chunk, cached: u32) {
        let work = work(&chunk, cached);
        self.tokens_left -= work.new_tokens;
        self.rows_left -= work.logit_rows;
        self.cost.add(&work);
    }
}

impl Member<'_> {
    /// Returns true if the sequence feeds only its newest token.
    fn decodes(&self) -> bool {
        self.running.pending == 1
    }

    /// Returns true if the next tokens need more blocks than the sequence holds.
    fn grows(&self) -> bool {
        blocks_for(self.running.cached + self.running.pending) > self.running.blocks
    }

    /// Adds the capacity that the sequence would release to `room`.
    fn leave(&self, room: &mut FreeCapacity) {
        let Running { blocks, exclusive, followers, .. } = *self.running;
        let held = self.chunk.map_or(blocks, |chunk| chunk.blocks);
        room.free += exclusive + (held - blocks);
        room.sequences -= 1 + followers;
        room.promised -= self.running.soon(held);
    }
}

impl Running {
    /// Returns the number of further blocks that the sequence will need soon if it holds
    /// `blocks`.
    fn soon(&self, blocks: u32) -> u32 {
        let &Self { cached, pending, most, followers, .. } = self;
        Growth { tokens: cached + pending, most, followers }.soon(blocks)
    }
}

impl Priority {
    fn tenant(&self) -> TenantPriority {
        (self.tier, self.share_owner, self.tenant)
    }
}

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

/// Returns the largest value in `range` that fits. If a value fits, all smaller values must fit. The
/// first value is assumed to fit and is never tested.
fn largest(range: RangeInclusive<u32>, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = range.into_inner();
    while low < high {
        // Rounding up keeps `middle` above `low`, so the loop ends.
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Returns the number of blocks that a waiting entry needs to run: all its tokens and the
/// first token to come.
fn needed(waiting: &Waiting) -> u32 {
    blocks_for((waiting.tokens + 1).min(waiting.most).max(waiting.tokens))
}

/// Returns `needed` plus the blocks reserved in advance, up to the most that the sequence
/// can use.
fn reserved(needed: u32, most: u32) -> u32 {
    needed.next_multiple_of(RESERVE_BLOCKS).min(blocks_for(most)).max(needed)
}

/// The tokens of a sequence that could be fed next.
#[derive(Clone, Copy)]
struct Pending {
    /// Tokens before them in the KV cache.
    cached: u32,
    tokens: u32,
    rows: Rows,
}

impl Pending {
    /// Returns the logit rows of a chunk of `tokens` tokens. A chunk that does not reach the last
    /// pending token has no last row.
    fn rows_of(self, tokens: u32) -> Rows {
        match self.rows {
            Rows::Last if tokens < self.tokens => Rows::None,
            rows => rows,
        }
    }
}

/// The expected growth of a sequence.
struct Growth {
    tokens: u32,
    most: u32,
    followers: u32,
}

impl Growth {
    /// Returns the number of blocks that the sequence will need soon beyond the `blocks` that it
    /// holds: for its next tokens, and one for each follower.
    fn soon(self, blocks: u32) -> u32 {
        let Self { tokens, most, followers } = self;
        blocks_for((tokens + SOON_TOKENS).min(most)).saturating_sub(blocks) + followers
    }
}

pub(super) fn row_count(rows: Rows, tokens: u32) -> u32 {
    match rows {
        Rows::None => 0,
        Rows::Last => 1,
        Rows::All => tokens,
    }
}

pub(super) fn work(chunk: &Chunk, cached: u32) -> SequenceWork {
    let &Chunk { sequence, tokens, rows, .. } = chunk;
    SequenceWork {
        sequence,
        new_tokens: tokens,
        logit_rows: row_count(rows, tokens),
        context: cached,
    }
}

/// Granularity of block reservation: 16 blocks hold 256 tokens.
const RESERVE_BLOCKS: u32 = 16;
/// Look-ahead for admission. New sequences may not use KV blocks that running sequences
/// will need within this many tokens. Otherwise one of the sequences would soon be
/// preempted.
const SOON_TOKENS: u32 = 64;
/// Smallest first chunk of a step. This chunk is read even if the time budget is used up,
/// so that prompts make progress beside any number of decoding sequences.
const LEAST_CHUNK: u32 = 16;
