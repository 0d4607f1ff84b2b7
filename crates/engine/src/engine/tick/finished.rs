//! What becomes of a step that is finished: it is taken over, booked, and told,
//! in this order.

use std::collections::{BTreeMap, BTreeSet};

use tollgate_domain::{DeviceNanos, FinishReason, MonotonicTime, SequenceId};

use super::{Core, Drawing, EngineError, Event, Outcome, Part};
use crate::backend::Transfers;
use crate::engine::charge::Tokens;
use crate::engine::journal::{StepRecord, StepShare};
use crate::engine::submission::{Flow, GeneratedToken};
use crate::kv::{BlockCopy, Fork};
use crate::meter::BookedStep;

impl Core {
    /// Takes over what a step computed: caches, counts, tokens, forks.
    pub(super) fn commit(
        &mut self,
        parts: &[Part],
        drawings: Vec<Drawing>,
        now: MonotonicTime,
    ) -> Vec<Outcome> {
        for part in parts {
            // Who left meanwhile has no use for it.
            let Some(sequence) = self.sequences.get_mut(&part.sequence) else { continue };
            sequence.cached += part.tokens;
            let request = self.requests.get_mut(&sequence.request).expect("it is alive");
            let prompt = &mut request.prompts[sequence.prompt];
            prompt.read = prompt.read.max(sequence.cached.min(prompt.length));
        }
        let mut outcomes = Vec::with_capacity(drawings.len());
        for drawing in drawings {
            self.commit_drawing(drawing, now, &mut outcomes);
        }
        outcomes
    }

    fn commit_drawing(
        &mut self,
        drawing: Drawing,
        now: MonotonicTime,
        outcomes: &mut Vec<Outcome>,
    ) {
        let Drawing { sequence, draws, prompt_logprobs } = drawing;
        let leader = self.sequences.get_mut(&sequence).expect("it ran");
        let request = self.requests.get_mut(&leader.request).expect("it is alive");
        request.prompts[leader.prompt].logprobs.extend(prompt_logprobs);
        if leader.cached < leader.tokens.len() as u32 {
            return; // more is to be read before anything is drawn
        }
        if leader.generated() == 0 && request.echo_logprobs {
            outcomes.push(leader.outcome(Event::PromptRead(leader.prompt)));
        }
        let followers = std::mem::take(&mut leader.followers);
        if draws.is_empty() {
            outcomes.push(leader.outcome(Event::NothingWanted));
            let others = (1..=followers).map(|number| leader.follower(number));
            outcomes.extend(others.map(|follower| follower.outcome(Event::NothingWanted)));
            return;
        }
        let mut draws = draws.into_iter();
        outcomes.extend(draws.next().map(|drawn| leader.take(drawn, request, &self.end_tokens)));
        let mut forked = Vec::new();
        for (number, drawn) in (1..).zip(draws) {
            let mut follower = leader.follower(number);
            outcomes.push(follower.take(drawn, request, &self.end_tokens));
            if !follower.goes_on(request, &self.end_tokens) {
                continue;
            }
            match leader.table.fork(follower.cached, &mut self.pool) {
                Some(Fork { table, copy }) => {
                    follower.table = table;
                    if let Some(BlockCopy { from, to }) = copy {
                        self.backend.copy_block(from, to);
                    }
                }
                None => {
                    follower.preempt(SequenceId(self.next_sequence), now, &mut self.pool);
                    self.next_sequence += 1;
                    let waiting = follower.as_waiting(self.policy, self.meter.table());
                    self.shares.push(follower.node, waiting);
                }
            }
            forked.push((follower.id, follower));
        }
        self.sequences.extend(forked);
    }

    /// Books the step and journals it; after this its tokens may leave.
    pub(super) fn account(
        &mut self,
        parts: &[Part],
        started: MonotonicTime,
        ended: MonotonicTime,
    ) -> Result<(), EngineError> {
        let works: Vec<_> = parts.iter().map(|part| part.work).collect();
        let payers: Vec<_> = parts.iter().map(|part| part.payer).collect();
        let BookedStep { step, started, busy, shares } =
            self.meter.book(started, ended, &works, &payers);
        let mut booked = Vec::with_capacity(parts.len());
        for (part, attributed) in parts.iter().zip(shares) {
            let request = self.requests.get_mut(&part.request).expect("it is alive");
            booked.push(StepShare {
                sequence: part.work.sequence,
                owner: part.owner(request),
                attributed,
            });
            if part.is_billed() {
                request.attributed += attributed;
                self.charge(part, attributed);
            }
        }
        let record = StepRecord { step, started, busy, shares: &booked };
        self.journal.step(&record).map_err(EngineError::Journal)
    }

    /// Every request in a step waits for all that is moved for it, once.
    pub(super) fn add_transfers(&mut self, parts: &[Part], transfers: Transfers) {
        let requests: BTreeSet<SequenceId> = parts.iter().map(|part| part.request).collect();
        for first in requests {
            let request = self.requests.get_mut(&first).expect("it is alive");
            *request.transfers.get_or_insert_default() += transfers;
        }
    }

    /// Counts a share of a step towards who is next, in place of what was
    /// predicted of it.
    fn charge(&mut self, part: &Part, attributed: DeviceNanos) {
        let Some(sequence) = self.sequences.get_mut(&part.sequence) else {
            // It ended while it ran ahead: for one token, of which nothing was
            // predicted.
            let counted = self.policy.counted(attributed, Tokens { read: 0, generated: 1 });
            let node = self.requests[&part.request].node;
            self.shares.charge(node, counted, DeviceNanos::ZERO, DeviceNanos::ZERO);
            return;
        };
        let read = part.tokens.min(sequence.prompt_length.saturating_sub(part.work.context));
        let tokens = Tokens { read, generated: part.tokens - read };
        let counted = self.policy.counted(attributed, tokens);
        let predicted = self.policy.predicted(self.meter.table(), sequence.unread());
        let before = std::mem::replace(&mut sequence.predicted, predicted);
        self.shares.charge(sequence.node, counted, before, predicted);
    }

    /// Hands tokens to their sinks and ends the choices that are over.
    pub(super) fn deliver(&mut self, outcomes: Vec<Outcome>, now: MonotonicTime) {
        let mut references: BTreeMap<SequenceId, DeviceNanos> = BTreeMap::new();
        let mut ended = Vec::new();
        for Outcome { request, sequence, choice, event } in outcomes {
            let request = self.requests.get_mut(&request).expect("it is alive");
            let reference = *references
                .entry(request.first)
                .or_insert_with(|| request.reference(self.meter.table()));
            let reason = match event {
                Event::PromptRead(prompt) => {
                    let logprobs = std::mem::take(&mut request.prompts[prompt].logprobs);
                    request.sink.prompt_logprobs(prompt as u32, logprobs);
                    continue;
                }
                Event::Token(drawn, end) => {
                    request.times.first_token.get_or_insert(now);
                    let token = GeneratedToken {
                        token: drawn.token,
                        end,
                        logprobs: drawn.logprobs,
                        attributed: request.attributed,
                        reference,
                    };
                    let flow = request.sink.token(choice, token);
                    if end || flow == Flow::Stop {
                        FinishReason::Stop
                    } else if request.choices[choice as usize].generated >= request.max_tokens {
                        FinishReason::Length
                    } else {
                        continue;
                    }
                }
                Event::NothingWanted => FinishReason::Length,
                Event::Broken => FinishReason::Fault,
            };
            let generated = request.choices[choice as usize].generated;
            self.expected_tokens += (f64::from(generated) - self.expected_tokens) / LENGTH_MEMORY;
            request.end(choice, reason);
            if request.open == 0 {
                request.times.ended = Some(now);
            }
            self.ending.insert(request.first);
            ended.push(sequence);
        }
        self.drop_sequences(|sequence| ended.contains(&sequence.id));
    }
}

/// The expected length of a completion follows the last this many or so.
const LENGTH_MEMORY: f64 = 32.0;
