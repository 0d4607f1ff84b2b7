//! A step in the making: who is in it, with what, and who makes room.

use std::cmp::Reverse;

use tollgate_domain::{DeviceNanos, SequenceId, SequenceWork, StepCost};

use super::heads::{Head, Heads};
use super::shares::{Counter, NodeId, Shares, Standing, Waiting};
use super::{Bounds, Chunk, Decisions, Rows, Running, Tier, View};
use crate::kv::blocks_for;

pub(super) struct Plan<'a> {
    view: &'a View<'a>,
    bounds: &'a Bounds,
    decisions: Decisions,
    /// What runs, smallest counter first.
    batch: Vec<Member<'a>>,
    /// Chunks of what was admitted in this step.
    admitted: Vec<Chunk>,
    cost: StepCost<'a>,
    room: Room,
    /// KV blocks that are only for who is near the smallest counter.
    headroom: u32,
    tokens_left: u32,
    rows_left: u32,
    /// No prompt is read in the step yet, so the next gets at least a little.
    first_read: bool,
}

/// A running sequence and what becomes of it.
struct Member<'a> {
    running: &'a Running,
    standing: Standing,
    chunk: Option<Chunk>,
    preempted: bool,
}

/// What is left for those who come.
#[derive(Clone, Copy)]
struct Room {
    free: u32,
    /// Sequences in the batch, those that will fork too.
    sequences: u32,
    /// Blocks that those who are there will want soon.
    promised: u32,
}

/// What there is too little of.
#[derive(Clone, Copy)]
enum Scarce {
    Places,
    Blocks,
}

impl<'a> Plan<'a> {
    pub(super) fn new(view: &'a View<'a>, bounds: &'a Bounds) -> Self {
        let mut batch: Vec<Member<'a>> = view
            .running
            .iter()
            .map(|running| {
                let standing = view.shares.standing(running.key);
                Member { running, standing, chunk: None, preempted: false }
            })
            .collect();
        batch.sort_unstable_by_key(|member| (member.standing, member.running.sequence));
        let room = Room {
            free: view.free_blocks,
            sequences: view.running.iter().map(|running| 1 + running.followers).sum(),
            promised: view.running.iter().map(|running| running.soon(running.blocks)).sum(),
        };
        Self {
            view,
            bounds,
            decisions: Decisions::default(),
            batch,
            admitted: Vec::new(),
            cost: bounds.table.step_cost(),
            room,
            headroom: bounds.total_blocks / HEADROOM_PARTS,
            tokens_left: bounds.limits.tokens,
            rows_left: bounds.limits.logit_rows,
            first_read: true,
        }
    }

    /// What was decided.
    pub(super) fn decisions(mut self) -> Decisions {
        let (decoding, reading): (Vec<_>, Vec<_>) = self
            .batch
            .iter()
            .filter_map(|member| Some((member.running.pending, member.chunk?)))
            .partition(|&(pending, _)| pending == 1);
        let chunks = decoding.into_iter().chain(reading).map(|(_, chunk)| chunk);
        self.decisions.chunks = chunks.chain(self.admitted).collect();
        self.decisions
    }

    /// Who waited too long.
    pub(super) fn refuse(&mut self) {
        self.decisions.refuse = self.view.shares.expired(self.view.now).collect();
    }

    /// One token of every sequence that decodes; whoever needs a block that is
    /// not there takes it from whoever is furthest ahead.
    pub(super) fn decode(&mut self) {
        for at in 0..self.batch.len() {
            let Member { running, preempted, .. } = self.batch[at];
            let full = self.tokens_left == 0 || self.rows_left == 0;
            if running.pending != 1 || preempted || full {
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

    /// Reads prompts while the box has room, smallest counter first: those
    /// that are in the batch, and those that come into it now.
    pub(super) fn read(&mut self) {
        let mut heads = Heads::new(self.view.shares, self.view.now);
        let mut blocked = false;
        let mut next = 0;
        loop {
            while self.batch.get(next).is_some_and(|member| !member.reads()) {
                next += 1;
            }
            let reader = self.batch.get(next).map(|member| member.standing);
            let head = if blocked { None } else { heads.first() };
            let goes_on = match (reader, head) {
                (Some(standing), head) if head.is_none_or(|head| standing <= head.standing) => {
                    next += 1;
                    self.read_on(next - 1)
                }
                (_, Some(head)) => {
                    let goes_on = self.has_room_to_read(head.waiting);
                    blocked = goes_on && !self.make_room(&head);
                    if goes_on && !blocked {
                        self.admit(&head);
                        heads.take(head.key);
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

    /// Gives a sequence that is being read its next chunk; false if the step
    /// has no room for it, and so for nobody behind it.
    fn read_on(&mut self, at: usize) -> bool {
        let running = self.batch[at].running;
        let &Running { sequence, cached, pending, rows, .. } = running;
        let tokens = self.chunk(cached, pending, rows);
        if tokens == 0 {
            return false;
        }
        if let Some(blocks) = self.blocks_to_grow(at) {
            let chunk = Chunk { sequence, tokens, blocks, rows: chunk_rows(rows, tokens, pending) };
            self.first_read = false;
            self.count(chunk, cached);
            self.batch[at].chunk = Some(chunk);
        }
        true
    }

    /// Brings a head into the batch, where there is room for it.
    fn admit(&mut self, head: &Head<'_>) {
        let &Waiting { sequence, rank, rows, pending, most, followers, .. } = head.waiting;
        let tokens = self.chunk(0, pending, rows);
        let needed = needed(head.waiting);
        let blocks = reserved(needed, most).min(self.usable(self.room, head)).max(needed);
        self.room.free -= blocks;
        self.room.sequences += 1 + followers;
        self.room.promised += soon(head.waiting.tokens, most, followers, blocks);
        self.decisions.admit.push((head.key, rank));
        let chunk = Chunk { sequence, tokens, blocks, rows: chunk_rows(rows, tokens, pending) };
        self.first_read = false;
        self.count(chunk, 0);
        self.admitted.push(chunk);
    }

    /// Sees to it that a head has room, if need be by taking the places of
    /// others; false, and nothing is taken, if that would not do.
    fn make_room(&mut self, head: &Head<'_>) -> bool {
        if self.fits(self.room, head) {
            return true;
        }
        let mut ahead: Vec<usize> = (0..self.batch.len())
            .filter(|&at| self.may_lose_place(&self.batch[at], &head.standing))
            .collect();
        if ahead.is_empty() {
            return false;
        }
        let scarce = self.scarce(head);
        ahead.retain(|&at| self.holds_more(&self.batch[at].standing, &head.standing, scarce));
        ahead.sort_unstable_by_key(|&at| self.batch[at].cost_to_preempt());
        let mut room = self.room;
        for (index, &at) in ahead.iter().enumerate() {
            self.batch[at].leave(&mut room);
            if self.fits(room, head) {
                for &at in &ahead[..=index] {
                    self.preempt(at);
                }
                return true;
            }
        }
        false
    }

    /// What a head that does not fit is short of.
    fn scarce(&self, head: &Head<'_>) -> Scarce {
        let places = self.room.sequences + 1 + head.waiting.followers;
        if places > self.bounds.max_sequences { Scarce::Places } else { Scarce::Blocks }
    }

    /// Whether `one` holds more of what is scarce than `other` does, over their
    /// weights. Counters follow what is held with a delay: without this, who is
    /// behind would take place after place until it is as far ahead.
    fn holds_more(&self, one: &Standing, other: &Standing, scarce: Scarce) -> bool {
        if one.tier != other.tier {
            return true;
        }
        let within = one.holder.1 == other.holder.1;
        let id = |it: &Standing| if within { it.tenant.1 } else { it.holder.1 };
        let held = |id: NodeId| {
            let of_id = |it: &&Member<'_>| {
                !it.preempted && [it.standing.holder.1, it.standing.tenant.1].contains(&id)
            };
            let held = self.batch.iter().filter(of_id).map(|member| match scarce {
                Scarce::Places => 1 + member.running.followers,
                Scarce::Blocks => member.running.blocks,
            });
            Counter::of(DeviceNanos(held.map(u64::from).sum()), self.view.shares.weight(id))
        };
        held(id(one)) > held(id(other))
    }

    /// Whether a member is of another tenant that is ahead of `head` by more
    /// than the guard, and had its place for long enough.
    fn may_lose_place(&self, member: &Member<'_>, head: &Standing) -> bool {
        let rested = member
            .running
            .preempted_at
            .is_none_or(|at| self.view.now.since(at) >= self.bounds.rest);
        !member.preempted && rested && self.is_ahead(&member.standing, head)
    }

    /// Whether `one` is ahead of `other` by more than the guard, as `other`'s
    /// weight counts it: where batch work stands beside interactive work, or
    /// one tenant beside another; never within a tenant.
    fn is_ahead(&self, one: &Standing, other: &Standing) -> bool {
        if one.tier != other.tier {
            return one.tier > other.tier;
        }
        let (one, other) = if one.holder.1 == other.holder.1 {
            (one.tenant, other.tenant)
        } else {
            (one.holder, other.holder)
        };
        one.1 != other.1 && one.0 > self.guarded(other)
    }

    fn guarded(&self, (counter, id): (Counter, NodeId)) -> Counter {
        counter.plus(Counter::of(self.bounds.guard, self.view.shares.weight(id)))
    }

    /// Whether someone stands within the guard of the smallest counter, as
    /// holder and as tenant: who has requests at all counts.
    fn is_near_smallest(&self, standing: &Standing) -> bool {
        let shares: &Shares = self.view.shares;
        let near = |own: (Counter, NodeId)| {
            shares
                .smallest_beside(own.1)
                .is_none_or(|smallest| own.1 == smallest.1 || own.0 <= self.guarded(smallest))
        };
        let below = standing.tier == Tier::Batch && shares.has_requests(Tier::Interactive);
        !below && near(standing.holder) && near(standing.tenant)
    }

    /// Of `free` blocks those that may be used by who stands there.
    fn allowed(&self, free: u32, standing: &Standing) -> u32 {
        let kept = if self.is_near_smallest(standing) { 0 } else { self.headroom };
        free.saturating_sub(kept)
    }

    /// Blocks for a newcomer: those who are there keep what they will want
    /// soon, and each follower will want one for its own tail.
    fn usable(&self, room: Room, head: &Head<'_>) -> u32 {
        if room.sequences == 0 {
            return room.free;
        }
        let kept = room.promised + head.waiting.followers;
        self.allowed(room.free, &head.standing).saturating_sub(kept)
    }

    fn fits(&self, room: Room, head: &Head<'_>) -> bool {
        let followers = head.waiting.followers;
        room.sequences + 1 + followers <= self.bounds.max_sequences
            && needed(head.waiting) <= self.usable(room, head)
    }

    /// Blocks that a running sequence should hold for its next tokens, grown
    /// ahead where the pool allows it. `None` if it had to be preempted itself.
    fn blocks_to_grow(&mut self, at: usize) -> Option<u32> {
        let Member { running, standing, .. } = self.batch[at];
        let needed = blocks_for(running.cached + running.pending);
        if needed <= running.blocks {
            return Some(running.blocks);
        }
        let mut usable = self.allowed(self.room.free, &standing);
        while usable < needed - running.blocks {
            let furthest = self.furthest_ahead(at);
            let before = self.room.free;
            self.preempt(furthest);
            if furthest == at {
                return None;
            }
            usable += self.room.free - before;
        }
        let more = (reserved(needed, running.most) - running.blocks).min(usable);
        let blocks = running.blocks + more;
        self.room.free -= more;
        self.room.promised -= running.soon(running.blocks) - running.soon(blocks);
        Some(blocks)
    }

    /// Who gives way to a sequence that needs a block: of its own tenant and
    /// those ahead of it the furthest, itself at last.
    fn furthest_ahead(&self, at: usize) -> usize {
        let own = self.batch[at].standing.tenant();
        (0..self.batch.len())
            .filter(|&other| !self.batch[other].preempted)
            .filter(|&other| self.batch[other].standing.tenant() >= own)
            .min_by_key(|&other| self.batch[other].cost_to_preempt())
            .expect("whoever asks for blocks is itself still there")
    }

    fn preempt(&mut self, at: usize) {
        self.batch[at].leave(&mut self.room);
        let member = &mut self.batch[at];
        member.preempted = true;
        self.decisions.preempt.push(member.running.sequence);
        // It may have been given a place in this very step.
        if let Some(chunk) = member.chunk.take() {
            let work = work(&chunk, member.running.cached);
            self.tokens_left += work.new_tokens;
            self.rows_left += work.logit_rows;
            self.cost.remove(&work);
        }
    }

    /// Whether any token of something that waits fits the step.
    fn has_room_to_read(&self, waiting: &Waiting) -> bool {
        let &Waiting { pending, rows, .. } = waiting;
        let most = self.most_to_read(pending, rows);
        most > 0 && (self.first_read || self.fits_box(0, 1, pending, rows))
    }

    /// Tokens of `pending` that fit the step; 0 if it is full.
    fn chunk(&self, cached: u32, pending: u32, rows: Rows) -> u32 {
        let most = self.most_to_read(pending, rows);
        let least = if self.first_read { LEAST_CHUNK.min(most) } else { 0 };
        let tokens = largest(least, most, |tokens| self.fits_box(cached, tokens, pending, rows));
        // Whole blocks suit every kernel better than odd ends.
        if tokens < pending && tokens > LEAST_CHUNK {
            tokens - tokens % LEAST_CHUNK
        } else {
            tokens
        }
    }

    /// Tokens of `pending` that the device takes beside what is in the step.
    fn most_to_read(&self, pending: u32, rows: Rows) -> u32 {
        match rows {
            Rows::None => pending.min(self.tokens_left),
            Rows::Last if self.rows_left == 0 => pending.saturating_sub(1).min(self.tokens_left),
            Rows::Last => pending.min(self.tokens_left),
            Rows::All => pending.min(self.tokens_left).min(self.rows_left),
        }
    }

    fn fits_box(&self, cached: u32, tokens: u32, pending: u32, rows: Rows) -> bool {
        let rows = chunk_rows(rows, tokens, pending);
        let chunk = Chunk { sequence: SequenceId(0), tokens, blocks: 0, rows };
        let mut cost = self.cost;
        cost.add(&work(&chunk, cached));
        cost.predicted() <= self.step_box()
    }

    fn step_box(&self) -> DeviceNanos {
        DeviceNanos(self.bounds.step_box.as_nanos().min(u128::from(u64::MAX)) as u64)
    }

    fn count(&mut self, chunk: Chunk, cached: u32) {
        let work = work(&chunk, cached);
        self.tokens_left -= work.new_tokens;
        self.rows_left -= work.logit_rows;
        self.cost.add(&work);
    }
}

impl Member<'_> {
    /// Whether it still has a prompt to read, or to read again.
    fn reads(&self) -> bool {
        self.running.pending > 1 && !self.preempted
    }

    /// Who is preempted first has the least: of whoever is furthest ahead what
    /// was computed least, and of equals who came last.
    fn cost_to_preempt(&self) -> impl Ord + use<> {
        let Running { computed, sequence, .. } = *self.running;
        (Reverse(self.standing.tenant()), computed, Reverse(sequence))
    }

    /// Gives back all that it has.
    fn leave(&self, room: &mut Room) {
        let Running { blocks, exclusive, followers, .. } = *self.running;
        let held = self.chunk.map_or(blocks, |chunk| chunk.blocks);
        room.free += exclusive + (held - blocks);
        room.sequences -= 1 + followers;
        room.promised -= self.running.soon(held);
    }
}

impl Running {
    /// Blocks that it will want soon, if it holds `blocks`.
    fn soon(&self, blocks: u32) -> u32 {
        soon(self.cached + self.pending, self.most, self.followers, blocks)
    }
}

impl Standing {
    /// Where its tenant stands.
    fn tenant(&self) -> (Tier, (Counter, NodeId), (Counter, NodeId)) {
        (self.tier, self.holder, self.tenant)
    }
}

/// The largest value in `low..=high` that fits, where everything below one
/// that fits does too; `low` itself is never asked.
fn largest(mut low: u32, mut high: u32, fits: impl Fn(u32) -> bool) -> u32 {
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Blocks without which something that waits cannot go on: all its tokens and
/// the first one to come.
fn needed(waiting: &Waiting) -> u32 {
    blocks_for((waiting.tokens + 1).min(waiting.most).max(waiting.tokens))
}

/// `needed` blocks and those reserved ahead, up to what is ever needed.
fn reserved(needed: u32, most: u32) -> u32 {
    needed.next_multiple_of(RESERVE_BLOCKS).min(blocks_for(most)).max(needed)
}

/// Blocks that a sequence of `tokens` tokens will want soon beside the
/// `blocks` that it holds: for its own next tokens, and one for each follower.
fn soon(tokens: u32, most: u32, followers: u32, blocks: u32) -> u32 {
    blocks_for((tokens + SOON_TOKENS).min(most)).saturating_sub(blocks) + followers
}

/// The rows of a chunk of `tokens` of `pending` tokens.
fn chunk_rows(rows: Rows, tokens: u32, pending: u32) -> Rows {
    match rows {
        Rows::Last if tokens < pending => Rows::None,
        rows => rows,
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

/// KV blocks are reserved in steps of this many: 256 tokens.
const RESERVE_BLOCKS: u32 = 16;
/// One part in so many of the pool is kept for who is near the smallest
/// counter.
const HEADROOM_PARTS: u32 = 10;
/// Nobody comes in on blocks that who is there wants for so many tokens more:
/// one of them would soon have to go.
const SOON_TOKENS: u32 = 64;
/// The first prompt in a step is read by this many tokens even if the box is
/// full, so that prompts get read beside any number of decoders.
const LEAST_CHUNK: u32 = 16;
