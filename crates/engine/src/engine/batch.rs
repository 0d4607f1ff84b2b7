//! Requests in the engine and their sequences.
//!
//! The id of a request is the id of its first sequence. The prompts of a request wait and
//! start one by one. After its prompt is read, a sequence forks into the choices of the
//! prompt, and each choice is a sequence.

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate_domain::{
    Caller, CostTable, DeviceNanos, FinishReason, MonotonicTime, PromptWork, SequenceId, Transfers,
    Usage,
};

use super::inbox::Arrival;
use super::journal::{Owner, RequestFigures};
use super::outcome::{ChoiceEvent, Outcome};
use super::queues::Ticket;
use super::submission::{PromptLogprob, RequestKey, Stages, TokenSink};
use crate::backend::BLOCK_TOKENS;
use crate::grammar::{Constraint, RequestGrammar, Unsampled};
use crate::kv::{BlockPool, BlockTable};
use crate::sample::{SampledToken, SamplingParams, TokenCounts};
use crate::schedule::{NodeId, Rank, Rows, Running, SchedulePolicy, Seat, Shares, Waiting};

/// One attempt at a request.
pub(super) struct Request {
    pub(super) id: SequenceId,
    pub(super) key: RequestKey,
    pub(super) caller: Caller,
    pub(super) seat: Seat,
    /// Node of the request's key in the tree of shares: its queue, and the account for its
    /// device time.
    pub(super) node: NodeId,
    /// Time at which the request is refused if it has not started.
    pub(super) deadline: MonotonicTime,
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: u32,
    pub(super) budget: Option<DeviceNanos>,
    pub(super) echo_logprobs: bool,
    pub(super) sink: Box<dyn TokenSink>,
    pub(super) prompts: Vec<Prompt>,
    pub(super) choices: Vec<Choice>,
    /// Choices for each prompt.
    pub(super) choices_each: u32,
    /// Number of choices that have not ended.
    pub(super) open: usize,
    /// Number of prompts that have not started.
    pub(super) waiting: usize,
    /// Ticket of the request in the inbox's queues.
    pub(super) ticket: Ticket,
    pub(super) attributed: DeviceNanos,
    pub(super) transfers: Option<Transfers>,
    pub(super) times: Times,
}

/// One prompt of a request.
pub(super) struct Prompt {
    /// Token ids. The first sequence takes them when the prompt starts.
    tokens: Vec<u32>,
    pub(super) length: u32,
    /// Number of tokens read so far. Preemption does not reduce it.
    pub(super) read: u32,
    /// Log-probabilities of the tokens read so far, without the first token.
    pub(super) logprobs: Vec<PromptLogprob>,
}

/// One choice of the response.
#[derive(Clone, Copy, Default)]
pub(super) struct Choice {
    pub(super) generated: u32,
    pub(super) ended: Option<FinishReason>,
}

#[derive(Clone, Copy)]
/// Times of a request's stages, on the engine's clock.
pub(super) struct Times {
    pub(super) arrived: MonotonicTime,
    pub(super) started: Option<MonotonicTime>,
    pub(super) first_token: Option<MonotonicTime>,
    /// Time of the last token. The request may be closed one step later.
    pub(super) ended: Option<MonotonicTime>,
}

/// A sequence in the batch, or a preempted one.
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) request: SequenceId,
    pub(super) node: NodeId,
    /// Index of the choice, counted over all prompts.
    pub(super) choice: u32,
    pub(super) prompt: usize,
    pub(super) prompt_length: u32,
    pub(super) most: u32,
    /// Logit rows that the prompt's tokens need.
    pub(super) prompt_rows: Rows,
    /// Tokens of the prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    /// Number of times each token was generated. Empty unless a penalty needs the counts.
    pub(super) counts: TokenCounts,
    /// The prompt's distinct tokens in ascending order, for all choices of the
    /// prompt; empty unless there is a repetition penalty.
    pub(super) prompt_set: Arc<[u32]>,
    /// The grammar's state in this choice; `None` for free text.
    pub(super) constraint: Option<Constraint>,
    /// Tokens in the KV cache.
    pub(super) cached: u32,
    /// Recomputation after a preemption.
    pub(super) recompute: Option<Recompute>,
    pub(super) table: BlockTable,
    /// Choices that fork from this sequence after its prompt is read.
    pub(super) followers: u32,
    /// True while the sequence waits for a place in the batch after a preemption.
    pub(super) preempted: bool,
    pub(super) preempted_at: Option<MonotonicTime>,
    /// Predicted cost of the unread prompt, which counts in the virtual time.
    pub(super) predicted: DeviceNanos,
}

/// Work that is done a second time, under a sequence id of its own and on the platform's
/// account.
#[derive(Clone, Copy)]
pub(super) struct Recompute {
    pub(super) sequence: SequenceId,
    /// Number of tokens that had been in the cache before the preemption.
    pub(super) until: u32,
}

impl Request {
    /// Creates the request of an arrival. The request counts in the tree of shares until it
    /// is removed.
    pub(super) fn new(id: SequenceId, arrival: Arrival, shares: &mut Shares) -> Self {
        let Arrival { submission, at, seat, ticket } = arrival;
        let node = shares.enter(&seat);
        let prompts: Vec<Prompt> = submission
            .prompts
            .into_iter()
            .map(|tokens| Prompt {
                length: tokens.len() as u32, // at most the context: checked at the door
                tokens,
                read: 0,
                logprobs: Vec::new(),
            })
            .collect();
        // Bounded by the checks at submission, so the product is small.
        let choices = prompts.len() * submission.choices as usize;
        Self {
            id,
            key: (submission.request, submission.attempt),
            caller: submission.caller,
            node,
            seat,
            // Counted from the arrival, so that time in the inbox counts.
            deadline: at.after(submission.queue_deadline),
            sampling: submission.sampling,
            max_tokens: submission.max_tokens,
            budget: submission.budget,
            echo_logprobs: submission.echo_logprobs,
            sink: submission.sink,
            choices: vec![Choice::default(); choices],
            choices_each: submission.choices,
            open: choices,
            waiting: prompts.len(),
            prompts,
            ticket,
            attributed: DeviceNanos::ZERO,
            transfers: None,
            times: Times { arrived: at, started: None, first_token: None, ended: None },
        }
    }

    /// Returns true if any prompt of the request has started.
    pub(super) fn has_started(&self) -> bool {
        self.times.started.is_some()
    }

    /// Returns the queue entries of the prompts that have not started, in the order in
    /// which they start.
    pub(super) fn waiting(
        &self,
        policy: SchedulePolicy,
        table: &CostTable,
    ) -> impl Iterator<Item = Waiting> {
        self.unstarted().map(move |prompt| {
            let length = self.prompts[prompt].length;
            Waiting {
                sequence: self.leader(prompt),
                request: self.id,
                rank: self.rank(policy, prompt),
                deadline: self.deadline,
                tokens: length,
                pending: length,
                most: length + self.max_tokens,
                rows: self.prompt_rows(),
                followers: self.choices_each - 1,
                predicted: policy.predicted(table, self.prompt_work(length)),
            }
        })
    }

    /// Returns the ranks of the prompts that have not started.
    pub(super) fn ranks(&self, policy: SchedulePolicy) -> impl Iterator<Item = Rank> {
        self.unstarted().map(move |prompt| self.rank(policy, prompt))
    }

    fn unstarted(&self) -> std::ops::Range<usize> {
        self.prompts.len() - self.waiting..self.prompts.len()
    }

    fn rank(&self, policy: SchedulePolicy, prompt: usize) -> Rank {
        Rank::fresh(policy, self.deadline, self.leader(prompt))
    }

    /// Returns the sequence of a prompt's first choice. The other choices have the ids
    /// after it.
    fn leader(&self, prompt: usize) -> SequenceId {
        SequenceId(self.id.0 + prompt as u64 * u64::from(self.choices_each))
    }

    fn prompt_rows(&self) -> Rows {
        match (self.echo_logprobs, self.max_tokens) {
            (true, _) => Rows::All,
            (false, 0) => Rows::None,
            (false, _) => Rows::Last,
        }
    }

    /// Starts the prompt whose first sequence is `leader`.
    pub(super) fn start(&mut self, leader: SequenceId, now: MonotonicTime) -> Sequence {
        let choice = (leader.0 - self.id.0) as u32;
        let prompt = (choice / self.choices_each) as usize;
        self.waiting -= 1;
        self.times.started.get_or_insert(now);
        let penalises_repetition = self.sampling.penalises_repetition();
        // The tokens move into the sequence; the request keeps only their number.
        let Prompt { tokens, length, .. } = &mut self.prompts[prompt];
        let prompt_set = if penalises_repetition { distinct(tokens) } else { Arc::default() };
        Sequence {
            id: leader,
            request: self.id,
            node: self.node,
            choice,
            prompt,
            prompt_length: *length,
            most: *length + self.max_tokens,
            tokens: std::mem::take(tokens),
            counts: TokenCounts::default(),
            prompt_set,
            constraint: self.constraint(),
            cached: 0,
            recompute: None,
            table: BlockTable::default(),
            followers: self.choices_each - 1,
            preempted: false,
            preempted_at: None,
            predicted: DeviceNanos::ZERO,
            prompt_rows: self.prompt_rows(),
        }
    }

    /// Returns the grammar's state in a choice that has generated nothing.
    fn constraint(&self) -> Option<Constraint> {
        self.sampling.grammar.as_ref().map(RequestGrammar::constraint)
    }

    /// Returns the reference cost so far.
    pub(super) fn reference(&self, table: &CostTable) -> DeviceNanos {
        table.request(
            self.prompts.iter().map(|prompt| self.prompt_work(prompt.read)),
            self.by_choice(|_, choice| choice.generated),
        )
    }

    /// Returns those of the `next` choices whose next token does not fit the budget
    /// together with the tokens of the choices before. The cost is computed like the final
    /// bill, so rounding cannot exceed the budget.
    pub(super) fn unaffordable(
        &self,
        next: &[(u32, SequenceId)],
        table: &CostTable,
    ) -> Vec<(u32, SequenceId)> {
        let mut granted: Vec<u32> = next.iter().map(|&(choice, _)| choice).collect();
        if next.is_empty() || self.affords(&granted, 1, table) {
            return Vec::new();
        }
        // Not all fit: grant tokens one choice at a time, in order, so that the result is
        // deterministic.
        granted.clear();
        let mut refused = Vec::new();
        for &(choice, sequence) in next {
            granted.push(choice);
            if !self.affords(&granted, 1, table) {
                granted.pop();
                refused.push((choice, sequence));
            }
        }
        refused
    }

    /// Returns true if the budget covers all prompts, the first token of every choice, and
    /// `more` tokens for each choice in `next`. Costs are reference costs.
    pub(super) fn affords(&self, next: &[u32], more: u32, table: &CostTable) -> bool {
        let Some(budget) = self.budget else { return true };
        // Every choice gets its first token, so the tokens of others leave room for it.
        let least = self.max_tokens.min(1);
        let committed = table.request(
            self.prompts.iter().map(|prompt| self.prompt_work(prompt.length)),
            self.by_choice(|index, choice| {
                let more = if next.contains(&index) { more } else { 0 };
                (choice.generated + more).max(least)
            }),
        );
        committed <= budget
    }

    /// Returns the work of reading the first `read` tokens of a prompt.
    fn prompt_work(&self, read: u32) -> PromptWork {
        PromptWork::of(u64::from(read), self.echo_logprobs)
    }

    /// Returns (context, generated) for each choice.
    fn by_choice(
        &self,
        generated: impl Fn(u32, &Choice) -> u32,
    ) -> impl Iterator<Item = (u64, u64)> {
        self.choices.iter().zip(0u32..).map(move |(choice, index)| {
            let prompt = &self.prompts[(index / self.choices_each) as usize];
            (u64::from(prompt.length), u64::from(generated(index, choice)))
        })
    }

    pub(super) fn usage(&self, table: &CostTable) -> Usage {
        Usage {
            prompt_tokens: self.prompts.iter().map(|prompt| u64::from(prompt.read)).sum(),
            cached_tokens: 0, // the engine keeps no prefix between requests
            completion_tokens: self.choices.iter().map(|choice| u64::from(choice.generated)).sum(),
            attributed: self.attributed,
            reference: self.reference(table),
        }
    }

    fn stages(&self, now: MonotonicTime) -> Stages {
        let Times { arrived, started, first_token, ended } = self.times;
        let now = ended.unwrap_or(now);
        let nanos = |from: MonotonicTime, to: MonotonicTime| to.0.saturating_sub(from.0);
        // A request without tokens spent all its time after the start on prefill.
        let read = started.map(|started| (started, first_token.unwrap_or(now)));
        Stages {
            queue_ns: nanos(arrived, started.unwrap_or(now)),
            prefill_ns: read.map_or(0, |(started, read)| nanos(started, read)),
            decode_ns: first_token.map_or(0, |first| nanos(first, now)),
            transfers: self.transfers,
        }
    }

    /// Returns the final figures of the request.
    pub(super) fn figures(&self, table: &CostTable, now: MonotonicTime) -> RequestFigures {
        RequestFigures {
            request: self.key.0.clone(),
            attempt: self.key.1,
            caller: self.caller.clone(),
            usage: self.usage(table),
            stages: self.stages(now),
            reason: self
                .choices
                .iter()
                .filter_map(|choice| choice.ended)
                .max_by_key(|reason| gravity(*reason))
                // A request without an ended choice was broken off.
                .unwrap_or(FinishReason::Fault),
            tier: self.seat.tier,
        }
    }

    /// Ends a choice once and reports the end to the sink.
    pub(super) fn end(&mut self, choice: u32, reason: FinishReason) {
        let state = &mut self.choices[choice as usize];
        // A cancel and the last token may both end the choice; the first one wins.
        if state.ended.is_none() {
            state.ended = Some(reason);
            self.open -= 1;
            self.sink.finished(choice, reason, state.generated);
        }
    }

    /// Ends every open choice.
    pub(super) fn end_all(&mut self, reason: FinishReason) {
        for choice in 0..self.choices.len() as u32 {
            self.end(choice, reason);
        }
    }

    pub(super) fn owner(&self) -> Owner {
        let (request, attempt) = self.key.clone();
        Owner::Request { caller: self.caller.clone(), request, attempt, tier: self.seat.tier }
    }
}

impl Sequence {
    /// Returns the number of tokens that the next steps feed on one account, and the logit
    /// rows they need.
    pub(super) fn pending(&self) -> (u32, Rows) {
        match self.recompute {
            // Recomputation is fed apart from new tokens, because another account pays. It
            // needs no rows.
            Some(Recompute { until, .. }) if until > self.cached => {
                (until - self.cached, Rows::None)
            }
            _ => (self.tokens.len() as u32 - self.cached, self.rows()),
        }
    }

    /// Returns the logit rows of the next tokens: those of the prompt, or one row after a
    /// generated token.
    fn rows(&self) -> Rows {
        if self.cached < self.prompt_length { self.prompt_rows } else { Rows::Last }
    }

    /// Returns the work of reading the tokens that are not in the cache.
    pub(super) fn reading(&self) -> PromptWork {
        let (cached, all) = (u64::from(self.cached), self.tokens.len() as u64);
        let scored = match self.prompt_rows {
            Rows::All => {
                // Rows that were reported before a preemption are not computed again.
                let told = self.recompute.map_or(0, |recompute| recompute.until).max(self.cached);
                u64::from(self.prompt_length.saturating_sub(told))
            }
            Rows::None | Rows::Last => 0,
        };
        PromptWork { uncached: all.saturating_sub(cached), cached, scored }
    }

    /// Returns the number of generated tokens.
    pub(super) fn generated(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_length
    }

    /// Returns the number of tokens that the sequence may still generate.
    pub(super) fn most_to_come(&self) -> u32 {
        self.most.saturating_sub(self.tokens.len() as u32)
    }

    /// Returns true if the next step samples a new token.
    pub(super) fn decodes(&self) -> bool {
        !self.preempted && self.generated() > 0 && self.recomputing().is_none()
    }

    /// Returns the sequence id under which the next tokens are computed again, or `None` if
    /// they are computed for the first time.
    pub(super) fn recomputing(&self) -> Option<SequenceId> {
        self.recompute
            .filter(|recompute| recompute.until > self.cached)
            .map(|recompute| recompute.sequence)
    }

    /// Returns the work of reading the part of the prompt that was never read.
    pub(super) fn unread(&self) -> PromptWork {
        let read = self.computed().min(self.prompt_length);
        let unread = u64::from(self.prompt_length - read);
        let scored = if self.prompt_rows == Rows::All { unread } else { 0 };
        PromptWork { uncached: unread, cached: u64::from(read), scored }
    }

    /// Returns the largest number of tokens that the cache has held.
    fn computed(&self) -> u32 {
        self.recompute.map_or(0, |recompute| recompute.until).max(self.cached)
    }

    /// Releases the KV blocks. The tokens in them must be computed again, under the
    /// sequence id `again`.
    pub(super) fn preempt(&mut self, again: SequenceId, now: MonotonicTime, pool: &mut BlockPool) {
        self.shrink(0, again, pool);
        self.preempted = true;
        self.preempted_at = Some(now);
    }

    /// Releases all KV blocks but the first `blocks`. The tokens in the others must be
    /// computed again, under the sequence id `again`.
    pub(super) fn shrink(&mut self, blocks: u32, again: SequenceId, pool: &mut BlockPool) {
        self.table.shrink_to(blocks, pool);
        let until = self.computed();
        self.cached = self.cached.min(blocks * BLOCK_TOKENS);
        // Nothing is computed again if the released blocks were empty.
        self.recompute = (until > self.cached).then_some(Recompute { sequence: again, until });
    }

    /// Appends the sampled token to the choice. Returns `None` if the next step must try
    /// again.
    pub(super) fn take(
        &mut self,
        sampled: Option<SampledToken>,
        request: &mut Request,
        end_tokens: &[u32],
    ) -> Option<Outcome> {
        let Some(sampled) = sampled else { return self.unsampled() };
        self.tokens.push(sampled.token);
        if request.sampling.penalises() {
            self.counts.add(sampled.token);
        }
        request.choices[self.choice as usize].generated += 1;
        let end = request.sampling.ends_with(sampled.token, end_tokens);
        // No mask is needed after the last token of a choice.
        if let Some(constraint) = &self.constraint
            && !end
            && self.most_to_come() > 0
        {
            // Before the step is booked: the mask is computed while the host does that.
            constraint.advance(sampled.token);
        }
        Some(self.outcome(ChoiceEvent::Token(sampled, end)))
    }

    /// Handles a row that gave no token.
    fn unsampled(&mut self) -> Option<Outcome> {
        match self.constraint.as_ref().map(Constraint::unsampled) {
            Some(Unsampled::Late) => {
                // The row is gone, so the next step feeds the last token once more. The
                // request pays for that: others went on meanwhile.
                self.cached -= 1;
                None
            }
            Some(Unsampled::Exceeded) => Some(self.outcome(ChoiceEvent::Exceeded)),
            // No logit above minus infinity: the model is broken, not the request.
            Some(Unsampled::Broken) | None => Some(self.outcome(ChoiceEvent::Broken)),
        }
    }

    /// Returns true if the choice needs more tokens, as far as the engine knows. A stop
    /// string is found by the sink.
    pub(super) fn goes_on(&self, request: &Request, end_tokens: &[u32]) -> bool {
        let generated = &self.tokens[self.prompt_length as usize..];
        generated.last().is_some_and(|&last| {
            self.generated() < request.max_tokens && !request.sampling.ends_with(last, end_tokens)
        })
    }

    pub(super) fn outcome(&self, event: ChoiceEvent) -> Outcome {
        let &Self { request, id: sequence, choice, .. } = self;
        Outcome { request, sequence, choice, event }
    }

    /// Returns the sequence of another choice of the same prompt.
    pub(super) fn follower(&self, number: u32, request: &Request) -> Self {
        Self {
            id: SequenceId(self.id.0 + u64::from(number)),
            request: self.request,
            node: self.node,
            choice: self.choice + number,
            prompt: self.prompt,
            prompt_length: self.prompt_length,
            most: self.most,
            prompt_rows: self.prompt_rows,
            // A follower shares the prompt only; its generated tokens are its own.
            tokens: self.tokens[..self.prompt_length as usize].to_vec(),
            counts: TokenCounts::default(),
            prompt_set: Arc::clone(&self.prompt_set),
            constraint: request.constraint(),
            // It shares the blocks of the prompt and reads none of it again.
            cached: self.prompt_length,
            recompute: None,
            table: BlockTable::default(),
            // Only the first choice of a prompt starts others.
            followers: 0,
            preempted: false,
            preempted_at: None,
            predicted: DeviceNanos::ZERO,
        }
    }

    pub(super) fn as_running(&self, pool: &BlockPool) -> Running {
        let (pending, rows) = self.pending();
        Running {
            sequence: self.id,
            key: self.node,
            cached: self.cached,
            computed: self.computed(),
            known: self.tokens.len() as u32,
            pending,
            rows,
            most: self.most,
            blocks: self.table.len(),
            exclusive: self.table.exclusive(pool),
            followers: self.followers,
            preempted_at: self.preempted_at,
        }
    }

    /// Returns the queue entry of the preempted sequence.
    pub(super) fn as_waiting(&self, policy: SchedulePolicy, table: &CostTable) -> Waiting {
        let (pending, rows) = self.pending();
        Waiting {
            sequence: self.id,
            request: self.request,
            rank: Rank::again(self.id),
            // A started request has no queue deadline any more.
            deadline: MonotonicTime::default(),
            tokens: self.tokens.len() as u32,
            pending,
            rows,
            most: self.most,
            followers: self.followers,
            predicted: policy.predicted(table, self.unread()),
        }
    }
}

/// Sequences in order of arrival.
pub(super) type Sequences = BTreeMap<SequenceId, Sequence>;
/// Requests by their id.
pub(super) type Requests = BTreeMap<SequenceId, Request>;

/// Returns the distinct tokens of a prompt in ascending order.
fn distinct(tokens: &[u32]) -> Arc<[u32]> {
    // Once for each prompt, on the engine's thread: sorting the longest prompt
    // takes a thousandth of the time that reading it takes.
    let mut distinct = tokens.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    distinct.into()
}

/// Returns the rank of a reason. The request reports the reason with the highest rank.
fn gravity(reason: FinishReason) -> u8 {
    match reason {
        FinishReason::Stop => 0,
        FinishReason::Length => 1,
        FinishReason::Cancelled => 2,
        FinishReason::Deadline => 3,
        FinishReason::Fault => 4,
    }
}
