//! What the engine knows of the requests that it has, and of their sequences.
//!
//! A request is named by its first sequence. Its prompts wait and start one by
//! one; a prompt that is read forks into its choices, each a sequence.

use std::collections::BTreeMap;

use tollgate_domain::{
    Caller, CostTable, DeviceNanos, FinishReason, MonotonicTime, PromptWork, SequenceId, Transfers,
    Usage,
};

use super::inbox::Arrival;
use super::journal::{Owner, RequestFigures};
use super::outcome::{ChoiceEvent, Outcome};
use super::queues::Ticket;
use super::submission::{PromptLogprob, RequestKey, Stages, TokenSink};
use crate::kv::{BlockPool, BlockTable};
use crate::sample::{SampledToken, SamplingParams, TokenCounts};
use crate::schedule::{NodeId, Rank, Rows, Running, SchedulePolicy, Seat, Shares, Waiting};

/// An attempt at a request.
pub(super) struct Request {
    pub(super) id: SequenceId,
    pub(super) key: RequestKey,
    pub(super) caller: Caller,
    pub(super) seat: Seat,
    /// Where it waits and what it is charged to.
    pub(super) node: NodeId,
    /// When it is refused if it has not started.
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
    /// Choices without an end.
    pub(super) open: usize,
    /// Prompts that have not started.
    pub(super) waiting: usize,
    /// Its name in the inbox's count of what waits.
    pub(super) ticket: Ticket,
    pub(super) attributed: DeviceNanos,
    pub(super) transfers: Option<Transfers>,
    pub(super) times: Times,
}

pub(super) struct Prompt {
    /// Taken by its first sequence when it starts.
    tokens: Vec<u32>,
    pub(super) length: u32,
    /// Tokens read so far; a preemption does not unread them.
    pub(super) read: u32,
    /// Of its tokens but the first, as far as it was read.
    pub(super) logprobs: Vec<PromptLogprob>,
}

/// One choice, as its client counts it.
#[derive(Clone, Copy, Default)]
pub(super) struct Choice {
    pub(super) generated: u32,
    pub(super) ended: Option<FinishReason>,
}

#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) arrived: MonotonicTime,
    pub(super) started: Option<MonotonicTime>,
    pub(super) first_token: Option<MonotonicTime>,
    /// When its last token came, which may be a step before it is closed.
    pub(super) ended: Option<MonotonicTime>,
}

/// A sequence that runs or was preempted.
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) request: SequenceId,
    pub(super) node: NodeId,
    /// Its choice, counted over all prompts.
    pub(super) choice: u32,
    pub(super) prompt: usize,
    pub(super) prompt_length: u32,
    pub(super) most: u32,
    /// What its prompt's rows are wanted for.
    pub(super) prompt_rows: Rows,
    /// The prompt and what was generated.
    pub(super) tokens: Vec<u32>,
    /// How often each token was generated; kept only where a penalty asks.
    pub(super) counts: TokenCounts,
    /// Tokens in the KV cache.
    pub(super) cached: u32,
    /// After a preemption: who computes what was there before.
    pub(super) recompute: Option<Recompute>,
    pub(super) table: BlockTable,
    /// Choices that fork from it when its prompt is read.
    pub(super) followers: u32,
    /// Whether it waits to get its place back.
    pub(super) preempted: bool,
    pub(super) preempted_at: Option<MonotonicTime>,
    /// What is predicted of its prompt and stands on its tenant's counter.
    pub(super) predicted: DeviceNanos,
}

/// Work done a second time, by a sequence of its own on the platform's account.
#[derive(Clone, Copy)]
pub(super) struct Recompute {
    pub(super) sequence: SequenceId,
    /// Tokens that had been in the cache.
    pub(super) until: u32,
}

impl Request {
    /// The request of an arrival, which has a place among the shares from here
    /// on until it is forgotten.
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
        let choices = prompts.len() * submission.choices as usize;
        Self {
            id,
            key: (submission.request, submission.attempt),
            caller: submission.caller,
            node,
            seat,
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

    /// Whether any of its prompts has had a place in the batch.
    pub(super) fn has_started(&self) -> bool {
        self.times.started.is_some()
    }

    /// Its prompts that have not started: they start in their order.
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

    /// Where its prompts that have not started stand in the line.
    pub(super) fn ranks(&self, policy: SchedulePolicy) -> impl Iterator<Item = Rank> {
        self.unstarted().map(move |prompt| self.rank(policy, prompt))
    }

    fn unstarted(&self) -> std::ops::Range<usize> {
        self.prompts.len() - self.waiting..self.prompts.len()
    }

    fn rank(&self, policy: SchedulePolicy, prompt: usize) -> Rank {
        Rank::fresh(policy, self.deadline, self.leader(prompt))
    }

    /// The sequence of a prompt's first choice; the others follow it.
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
        let Prompt { tokens, length, .. } = &mut self.prompts[prompt];
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

    /// What it has cost at the reference batch.
    pub(super) fn reference(&self, table: &CostTable) -> DeviceNanos {
        table.request(
            self.prompts.iter().map(|prompt| self.prompt_work(prompt.read)),
            self.by_choice(|_, choice| choice.generated),
        )
    }

    /// Of the choices that come next, in order, those whose next token does not
    /// fit the budget beside the others'. The figure compared is made as the
    /// final bill is, so not even rounding can exceed it.
    pub(super) fn unaffordable(
        &self,
        next: &[(u32, SequenceId)],
        table: &CostTable,
    ) -> Vec<(u32, SequenceId)> {
        let mut granted: Vec<u32> = next.iter().map(|&(choice, _)| choice).collect();
        if next.is_empty() || self.affords(&granted, 1, table) {
            return Vec::new();
        }
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

    /// Whether its budget holds when every prompt is read, every choice has
    /// had its first token and each of `next` so many more, at the reference
    /// batch.
    pub(super) fn affords(&self, next: &[u32], more: u32, table: &CostTable) -> bool {
        let Some(budget) = self.budget else { return true };
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

    /// A prompt of which `read` tokens count, as the table prices it.
    fn prompt_work(&self, read: u32) -> PromptWork {
        PromptWork::of(u64::from(read), self.echo_logprobs)
    }

    /// Each choice as (context, generated).
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
            cached_tokens: 0, // no prefix is kept between requests
            completion_tokens: self.choices.iter().map(|choice| u64::from(choice.generated)).sum(),
            attributed: self.attributed,
            reference: self.reference(table),
        }
    }

    fn stages(&self, now: MonotonicTime) -> Stages {
        let Times { arrived, started, first_token, ended } = self.times;
        let now = ended.unwrap_or(now);
        let nanos = |from: MonotonicTime, to: MonotonicTime| to.0.saturating_sub(from.0);
        let read = started.map(|started| (started, first_token.unwrap_or(now)));
        Stages {
            queue_ns: nanos(arrived, started.unwrap_or(now)),
            prefill_ns: read.map_or(0, |(started, read)| nanos(started, read)),
            decode_ns: first_token.map_or(0, |first| nanos(first, now)),
            transfers: self.transfers,
        }
    }

    /// Its final figures.
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
                .unwrap_or(FinishReason::Fault),
        }
    }

    /// Ends a choice, once, and tells the sink.
    pub(super) fn end(&mut self, choice: u32, reason: FinishReason) {
        let state = &mut self.choices[choice as usize];
        if state.ended.is_none() {
            state.ended = Some(reason);
            self.open -= 1;
            self.sink.finished(choice, reason, state.generated);
        }
    }

    /// Ends every choice that is open.
    pub(super) fn end_all(&mut self, reason: FinishReason) {
        for choice in 0..self.choices.len() as u32 {
            self.end(choice, reason);
        }
    }

    pub(super) fn owner(&self) -> Owner {
        let (request, attempt) = self.key.clone();
        Owner::Request { caller: self.caller.clone(), request, attempt }
    }
}

impl Sequence {
    /// Tokens that its next steps feed on one account, and the rows they want.
    pub(super) fn pending(&self) -> (u32, Rows) {
        match self.recompute {
            Some(Recompute { until, .. }) if until > self.cached => {
                (until - self.cached, Rows::None)
            }
            _ => (self.tokens.len() as u32 - self.cached, self.rows()),
        }
    }

    /// A prompt's rows are its request's wish; a generated token always wants
    /// the next.
    fn rows(&self) -> Rows {
        if self.cached < self.prompt_length { self.prompt_rows } else { Rows::Last }
    }

    /// What is left to read of its tokens, as the table prices it.
    pub(super) fn reading(&self) -> PromptWork {
        let (cached, all) = (u64::from(self.cached), self.tokens.len() as u64);
        let scored = match self.prompt_rows {
            Rows::All => {
                let told = self.recompute.map_or(0, |recompute| recompute.until).max(self.cached);
                u64::from(self.prompt_length.saturating_sub(told))
            }
            Rows::None | Rows::Last => 0,
        };
        PromptWork { uncached: all.saturating_sub(cached), cached, scored }
    }

    /// Tokens that it has generated.
    pub(super) fn generated(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_length
    }

    /// Tokens that it may generate yet.
    pub(super) fn most_to_come(&self) -> u32 {
        self.most.saturating_sub(self.tokens.len() as u32)
    }

    /// Whether its next step is one that samples a token it did not have.
    pub(super) fn decodes(&self) -> bool {
        !self.preempted && self.generated() > 0 && self.recomputing().is_none()
    }

    /// The sequence on whose account its next tokens are computed again, if
    /// they are.
    pub(super) fn recomputing(&self) -> Option<SequenceId> {
        self.recompute
            .filter(|recompute| recompute.until > self.cached)
            .map(|recompute| recompute.sequence)
    }

    /// What of its prompt was never read, as the table prices it.
    pub(super) fn unread(&self) -> PromptWork {
        let read = self.computed().min(self.prompt_length);
        let unread = u64::from(self.prompt_length - read);
        let scored = if self.prompt_rows == Rows::All { unread } else { 0 };
        PromptWork { uncached: unread, cached: u64::from(read), scored }
    }

    /// Tokens that were in its cache at any time.
    fn computed(&self) -> u32 {
        self.recompute.map_or(0, |recompute| recompute.until).max(self.cached)
    }

    /// Gives its blocks back; what they held is to be computed again, as the
    /// sequence `again`.
    pub(super) fn preempt(&mut self, again: SequenceId, now: MonotonicTime, pool: &mut BlockPool) {
        self.table.release(pool);
        let until = self.computed();
        self.recompute = (until > 0).then_some(Recompute { sequence: again, until });
        self.cached = 0;
        self.preempted = true;
        self.preempted_at = Some(now);
    }

    /// Takes the next token of its choice.
    pub(super) fn take(
        &mut self,
        sampled: Option<SampledToken>,
        request: &mut Request,
        end_tokens: &[u32],
    ) -> Outcome {
        let Some(sampled) = sampled else { return self.outcome(ChoiceEvent::Broken) };
        self.tokens.push(sampled.token);
        if request.sampling.penalises() {
            self.counts.add(sampled.token);
        }
        request.choices[self.choice as usize].generated += 1;
        let end = end_tokens.contains(&sampled.token);
        self.outcome(ChoiceEvent::Token(sampled, end))
    }

    /// Whether its choice wants more, as far as the engine knows.
    pub(super) fn goes_on(&self, request: &Request, end_tokens: &[u32]) -> bool {
        let generated = &self.tokens[self.prompt_length as usize..];
        generated
            .last()
            .is_some_and(|last| self.generated() < request.max_tokens && !end_tokens.contains(last))
    }

    pub(super) fn outcome(&self, event: ChoiceEvent) -> Outcome {
        let &Self { request, id: sequence, choice, .. } = self;
        Outcome { request, sequence, choice, event }
    }

    /// Another choice that starts with the same prompt.
    pub(super) fn follower(&self, number: u32) -> Self {
        Self {
            id: SequenceId(self.id.0 + u64::from(number)),
            request: self.request,
            node: self.node,
            choice: self.choice + number,
            prompt: self.prompt,
            prompt_length: self.prompt_length,
            most: self.most,
            prompt_rows: self.prompt_rows,
            tokens: self.tokens[..self.prompt_length as usize].to_vec(),
            counts: TokenCounts::default(),
            cached: self.prompt_length,
            recompute: None,
            table: BlockTable::default(),
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
            pending,
            rows,
            most: self.most,
            blocks: self.table.len(),
            exclusive: self.table.exclusive(pool),
            followers: self.followers,
            preempted_at: self.preempted_at,
        }
    }

    /// As it waits for its place after a preemption.
    pub(super) fn as_waiting(&self, policy: SchedulePolicy, table: &CostTable) -> Waiting {
        let (pending, rows) = self.pending();
        Waiting {
            sequence: self.id,
            request: self.request,
            rank: Rank::again(self.id),
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

/// The sequences in order of arrival.
pub(super) type Sequences = BTreeMap<SequenceId, Sequence>;
/// The requests by their first sequence.
pub(super) type Requests = BTreeMap<SequenceId, Request>;

/// Of several reasons the gravest stands for the request.
fn gravity(reason: FinishReason) -> u8 {
    match reason {
        FinishReason::Stop => 0,
        FinishReason::Length => 1,
        FinishReason::Cancelled => 2,
        FinishReason::Deadline => 3,
        FinishReason::Fault => 4,
    }
}
