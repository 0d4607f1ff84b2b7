//! A step in the making: who is in it, with what, and who makes room.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use tollgate_domain::{DeviceNanos, SequenceId, SequenceWork, StepCost};

use super::heads::{Head, Heads};
use super::shares::{Counter, NodeId, Shares, Standing, Waiting};
use super::{Bounds, Chunk, Decisions, Rows, Running, Spare, Tier, View};
use crate::kv::blocks_for;

pub(super) struct Plan<'a> {
    view: &'a View<'a>,
    bounds: &'a Bounds,
    decisions: Decisions,
    /// What runs, in order of arrival.
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

/// A head, and whether it may use the last of the pool.
struct Newcomer<'a> {
    head: Head<'a>,
    near_smallest: bool,
}

/// Who gives way first is less: of whoever is furthest ahead what was computed
/// least, and of equals who came last.
type Yielding = (Reverse<TenantStanding>, u32, Reverse<SequenceId>);

/// Where a tenant stands: lower ones come first.
type TenantStanding = (Tier, (Counter, NodeId), (Counter, NodeId));

impl<'a> Plan<'a> {
    pub(super) fn new(view: &'a View<'a>, bounds: &'a Bounds) -> Self {
        let running = view.running;
        let room = Room {
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

    /// What was decided.
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

    /// Who waited too long.
    pub(super) fn refuse(&mut self) {
        self.decisions.refuse = self.view.shares.expired(self.view.now).collect();
    }

    /// One token of every sequence that decodes; whoever needs a block that is
    /// not there takes it from whoever is furthest ahead.
    pub(super) fn decode(&mut self) {
        let decoding = |member: &Member<'_>| member.decodes();
        // Whose turn it is matters only where blocks are asked for.
        let grows = self.batch.iter().any(|member| member.decodes() && member.grows());
        let order = if grows { self.in_order(decoding) } else { (0..self.batch.len()).collect() };
        for at in order {
            let Member { running, preempted, .. } = self.batch[at];
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

    /// Reads prompts while the box has room, smallest counter first: those
    /// that are in the batch, and those that come into it now.
    pub(super) fn read(&mut self) {
        let readers = self.in_order(|member| !member.decodes());
        let mut readers = readers.into_iter().peekable();
        let mut heads = Heads::new(self.view.shares, self.view.now);
        let mut blocked = false;
        loop {
            while readers.next_if(|&at| self.batch[at].preempted).is_some() {}
            let reader = readers.peek().copied();
            let head = if blocked { None } else { heads.first() };
            let goes_on = match (reader, head) {
                (Some(at), head) if head.is_none_or(|head| self.standing(at) <= head.standing) => {
                    readers.next();
                    self.read_on(at)
                }
                (_, Some(head)) => {
                    let goes_on = self.has_room_to_read(head.waiting);
                    blocked = goes_on && !self.welcome(head);
                    if goes_on && !blocked {
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

    /// The members that `are` so, smallest counter first.
    fn in_order(&self, are: impl Fn(&Member<'_>) -> bool) -> Vec<usize> {
        let those = (0..self.batch.len()).filter(|&at| are(&self.batch[at]));
        let mut those: Vec<(Standing, usize)> = those.map(|at| (self.standing(at), at)).collect();
        those.sort_unstable();
        those.into_iter().map(|(_, at)| at).collect()
    }

    fn standing(&self, at: usize) -> Standing {
        self.view.shares.standing(self.batch[at].running.key)
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

    /// Brings a head into the batch if there is room for it, or if it can be
    /// made; says whether it came in.
    fn welcome(&mut self, head: Head<'_>) -> bool {
        let near_smallest = self.is_near_smallest(&head.standing);
        let newcomer = Newcomer { head, near_smallest };
        let comes = self.make_room(&newcomer);
        if comes {
            self.admit(&newcomer);
        }
        comes
    }

    fn admit(&mut self, newcomer: &Newcomer<'_>) {
        let Head { key, waiting, .. } = newcomer.head;
        let &Waiting { sequence, rank, rows, tokens, pending, most, followers, .. } = waiting;
        let needed = needed(waiting);
        let usable = self.usable(self.room, newcomer).saturating_sub(self.bounds.spare.blocks);
        let blocks = reserved(needed, most).min(usable).max(needed);
        self.room.free -= blocks;
        self.room.sequences += 1 + followers;
        self.room.promised += soon(tokens, most, followers, blocks);
        self.decisions.admit.push((key, rank));
        let tokens = self.chunk(0, pending, rows);
        let chunk = Chunk { sequence, tokens, blocks, rows: chunk_rows(rows, tokens, pending) };
        self.first_read = false;
        self.count(chunk, 0);
        self.admitted.push(chunk);
    }

    /// Sees to it that a newcomer has room, if need be by taking the places of
    /// others; false, and nothing is taken, if that would not do.
    fn make_room(&mut self, newcomer: &Newcomer<'_>) -> bool {
        if self.fits(self.room, newcomer) {
            return true;
        }
        let mut yielding = self.may_lose_place(&newcomer.head);
        yielding.sort_unstable();
        let mut room = self.room;
        for (index, &(_, at)) in yielding.iter().enumerate() {
            self.batch[at].leave(&mut room);
            if self.fits(room, newcomer) {
                for &(_, at) in &yielding[..=index] {
                    self.preempt(at);
                }
                return true;
            }
        }
        false
    }

    /// Who may lose a place to a head: another tenant's, who is ahead of it by
    /// more than the guard, holds more of what is scarce and had its place for
    /// long enough.
    fn may_lose_place(&self, head: &Head<'_>) -> Vec<(Yielding, usize)> {
        let limit = Limit::new(self, &head.standing);
        let rested = |running: &Running| {
            running.preempted_at.is_none_or(|at| self.view.now.since(at) >= self.bounds.rest)
        };
        let mut ahead: Vec<(Standing, usize)> = (0..self.batch.len())
            .filter(|&at| !self.batch[at].preempted && rested(self.batch[at].running))
            .map(|at| (self.standing(at), at))
            .filter(|(standing, _)| limit.is_passed_by(standing))
            .collect();
        if !ahead.is_empty() {
            let held = self.held(head);
            ahead.retain(|(standing, _)| self.holds_more(standing, &head.standing, &held));
        }
        ahead.into_iter().map(|(standing, at)| (self.yielding(at, &standing), at)).collect()
    }

    /// What every holder and tenant in the batch holds of what a head that does
    /// not fit is short of.
    fn held(&self, head: &Head<'_>) -> BTreeMap<NodeId, u32> {
        let places = self.room.sequences + 1 + head.waiting.followers;
        let scarce = match places > self.bounds.max_sequences {
            true => Scarce::Places,
            false => Scarce::Blocks,
        };
        let mut held = BTreeMap::new();
        for (at, member) in self.batch.iter().enumerate().filter(|(_, member)| !member.preempted) {
            let Standing { holder, tenant, .. } = self.standing(at);
            for id in [holder.1, tenant.1] {
                *held.entry(id).or_default() += match scarce {
                    Scarce::Places => 1 + member.running.followers,
                    Scarce::Blocks => member.running.blocks,
                };
            }
        }
        held
    }

    /// Whether `one` holds more than `other` does, over their weights. Counters
    /// follow with a delay what is held: without this, who is behind would take
    /// place after place until it is as far ahead.
    fn holds_more(&self, one: &Standing, other: &Standing, held: &BTreeMap<NodeId, u32>) -> bool {
        let over_weight = |id: NodeId| {
            let held = held.get(&id).copied().unwrap_or(0);
            Counter::of(DeviceNanos(held.into()), self.view.shares.weight(id))
        };
        let (one_id, other_id) = match one.holder.1 == other.holder.1 {
            true => (one.tenant.1, other.tenant.1),
            false => (one.holder.1, other.holder.1),
        };
        one.tier != other.tier || over_weight(one_id) > over_weight(other_id)
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

    /// Of `free` blocks those that may be used by who is or is not near the
    /// smallest counter.
    fn allowed(&self, free: u32, near_smallest: bool) -> u32 {
        free.saturating_sub(if near_smallest { 0 } else { self.headroom })
    }

    /// Blocks for a newcomer: those who are there keep what they will want
    /// soon, and each follower will want one for its own tail.
    fn usable(&self, room: Room, newcomer: &Newcomer<'_>) -> u32 {
        if room.sequences == 0 {
            return room.free;
        }
        let kept = room.promised + newcomer.head.waiting.followers;
        self.allowed(room.free, newcomer.near_smallest).saturating_sub(kept)
    }

    fn fits(&self, room: Room, newcomer: &Newcomer<'_>) -> bool {
        self.leaves(room, newcomer, self.bounds.spare)
            || (self.leaves(room, newcomer, Spare::default())
                && (room.sequences == 0
                    || !self.has_as_much_as_is_spare(newcomer.head.standing.holder.1)))
    }

    /// Whether there is room for a newcomer and for `spare`.
    fn leaves(&self, room: Room, newcomer: &Newcomer<'_>, spare: Spare) -> bool {
        let waiting = newcomer.head.waiting;
        let places = room.sequences + 1 + waiting.followers + spare.places;
        let blocks = needed(waiting) + spare.blocks;
        places <= self.bounds.max_sequences && blocks <= self.usable(room, newcomer)
    }

    /// Whether a holder has as many places or blocks already as are spare.
    fn has_as_much_as_is_spare(&self, holder: NodeId) -> bool {
        let (mut places, mut blocks) = (0, 0);
        let stays = self.batch.iter().filter(|member| !member.preempted);
        let stays = stays.map(|member| {
            let Running { key, blocks, followers, .. } = *member.running;
            (key, 1 + followers, blocks)
        });
        let comes = self.decisions.admit.iter().zip(&self.admitted);
        let comes = comes.map(|(&(key, _), chunk)| (key, 1, chunk.blocks));
        for (key, more_places, more_blocks) in stays.chain(comes) {
            if self.view.shares.standing(key).holder.1 == holder {
                places += more_places;
                blocks += more_blocks;
            }
        }
        let Spare { places: spare_places, blocks: spare_blocks } = self.bounds.spare;
        places >= spare_places.max(1) || blocks >= spare_blocks.max(1)
    }

    /// Blocks that a running sequence should hold for its next tokens, grown
    /// ahead where the pool allows it. `None` if it had to be preempted itself.
    fn blocks_to_grow(&mut self, at: usize) -> Option<u32> {
        let Member { running, .. } = self.batch[at];
        if !self.batch[at].grows() {
            return Some(running.blocks);
        }
        let needed = blocks_for(running.cached + running.pending);
        let near_smallest = self.is_near_smallest(&self.standing(at));
        let mut usable = self.allowed(self.room.free, near_smallest);
        while usable < needed - running.blocks {
            let furthest = self.furthest_ahead(at);
            let before = self.room.free;
            self.preempt(furthest);
            if furthest == at {
                return None;
            }
            usable += self.room.free - before;
        }
        let ahead = usable.saturating_sub(self.bounds.spare.blocks);
        let more = (reserved(needed, running.most) - running.blocks)
            .min(ahead)
            .max(needed - running.blocks);
        let blocks = running.blocks + more;
        self.room.free -= more;
        self.room.promised -= running.soon(running.blocks) - running.soon(blocks);
        Some(blocks)
    }

    /// Who gives way to a sequence that needs a block: of its own tenant and
    /// those ahead of it the furthest, itself at last.
    fn furthest_ahead(&self, at: usize) -> usize {
        let own = self.standing(at).tenant();
        (0..self.batch.len())
            .filter(|&other| !self.batch[other].preempted)
            .map(|other| (self.standing(other), other))
            .filter(|(standing, _)| standing.tenant() >= own)
            .min_by_key(|(standing, other)| self.yielding(*other, standing))
            .map(|(_, other)| other)
            .expect("whoever asks for blocks is itself still there")
    }

    fn yielding(&self, at: usize, standing: &Standing) -> Yielding {
        let Running { computed, sequence, .. } = *self.batch[at].running;
        (Reverse(standing.tenant()), computed, Reverse(sequence))
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
    /// Whether all that it feeds is its next token.
    fn decodes(&self) -> bool {
        self.running.pending == 1
    }

    /// Whether its next tokens want more blocks than it has.
    fn grows(&self) -> bool {
        blocks_for(self.running.cached + self.running.pending) > self.running.blocks
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
    fn tenant(&self) -> TenantStanding {
        (self.tier, self.holder, self.tenant)
    }
}

/// How far others may be ahead of a head.
struct Limit {
    tier: Tier,
    holder: (Counter, NodeId),
    tenant: (Counter, NodeId),
}

impl Limit {
    fn new(plan: &Plan<'_>, head: &Standing) -> Self {
        let guarded = |own: (Counter, NodeId)| (plan.guarded(own), own.1);
        Self { tier: head.tier, holder: guarded(head.holder), tenant: guarded(head.tenant) }
    }

    /// Whether `standing` is beyond it: batch work beside interactive work
    /// always, one holder beside another, or one tenant beside another of the
    /// same holder; never within a tenant.
    fn is_passed_by(&self, standing: &Standing) -> bool {
        if standing.tier != self.tier {
            return standing.tier > self.tier;
        }
        let (one, limit) = match standing.holder.1 == self.holder.1 {
            true => (standing.tenant, self.tenant),
            false => (standing.holder, self.holder),
        };
        one.1 != limit.1 && one.0 > limit.0
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
/// Nobody comes in on blocks that who is there wants for so many tokens more:
/// one of them would soon have to go.
const SOON_TOKENS: u32 = 64;
/// The first prompt in a step is read by this many tokens even if the box is
/// full, so that prompts get read beside any number of decoders.
const LEAST_CHUNK: u32 = 16;
