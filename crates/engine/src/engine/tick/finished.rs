//! Handling of a finished step, in this order: commit its results, book its time, deliver
//! its tokens.

use std::collections::{BTreeMap, BTreeSet};

use tollgate_domain::{DeviceNanos, FinishReason, MonotonicTime, SequenceId};

use super::{ChoiceEvent, Core, EngineError, Outcome, Part, SampledPart};
use crate::backend::Transfers;
use crate::engine::charge::Tokens;
use crate::engine::journal::{StepRecord, StepShare};
use crate::engine::submission::{Flow, GeneratedToken};
use crate::kv::{Fork, blocks_for};
use crate::meter::BookedStep;
use crate::schedule::is_large;

impl Core {
    /// Commits the results of a step: cache positions, counts, tokens and forks.
    pub(super) fn commit(
        &mut self,
        parts: &[Part],
        sampled_parts: Vec<SampledPart>,
        now: MonotonicTime,
    ) -> Vec<Outcome> {
        for part in parts {
            // The sequence left while the step ran; its results are not needed.
            let Some(sequence) = self.sequences.get_mut(&part.sequence) else { continue };
            sequence.cached += part.tokens;
            let request = self
                .requests
                .get_mut(&sequence.request)
                .expect("a sequence belongs to a live request");
            let prompt = &mut request.prompts[sequence.prompt];
            prompt.read = prompt.read.max(sequence.cached.min(prompt.length));
        }
        let mut outcomes = Vec::with_capacity(sampled_parts.len());
        for sampled_part in sampled_parts {
            self.commit_part(sampled_part, now, &mut outcomes);
        }
        outcomes
    }

    fn commit_part(
        &mut self,
        sampled_part: SampledPart,
        now: MonotonicTime,
        outcomes: &mut Vec<Outcome>,
    ) {
        let SampledPart { sequence, samples, prompt_logprobs } = sampled_part;
        let leader = self
            .sequences
            .get_mut(&sequence)
            .expect("a sampled part belongs to a running sequence");
        let request =
            self.requests.get_mut(&leader.request).expect("a sequence belongs to a live request");
        request.prompts[leader.prompt].logprobs.extend(prompt_logprobs);
        if leader.cached < leader.tokens.len() as u32 {
            return; // the prompt is not read to its end, so nothing was sampled
        }
        if leader.generated() == 0 && request.echo_logprobs {
            outcomes.push(leader.outcome(ChoiceEvent::PromptRead(leader.prompt)));
        }
        // The followers fork here, exactly once.
        let followers = std::mem::take(&mut leader.followers);
        if samples.is_empty() {
            outcomes.push(leader.outcome(ChoiceEvent::NothingWanted));
            let others = (1..=followers).map(|number| leader.follower(number, request));
            outcomes.extend(others.map(|follower| follower.outcome(ChoiceEvent::NothingWanted)));
            return;
        }
        let mut samples = samples.into_iter();
        let first = samples.next();
        outcomes.extend(first.and_then(|first| leader.take(first, request, &self.end_tokens)));
        let mut forked = Vec::new();
        for (number, sampled) in (1..).zip(samples) {
            let mut follower = leader.follower(number, request);
            outcomes.extend(follower.take(sampled, request, &self.end_tokens));
            // A choice that ends with its first token needs no KV blocks.
            if !follower.goes_on(request, &self.end_tokens) {
                continue;
            }
            match leader.table.fork(follower.cached, &mut self.pool) {
                Some(Fork { table, copy }) => {
                    follower.table = table;
                    if let Some(copy) = copy {
                        self.backend.copy_block(copy);
                    }
                }
                // Without a free block the follower starts preempted. It recomputes the
                // prompt when it is admitted.
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

    /// Books the step and writes it to the journal. Its tokens may leave after this call.
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
            let request =
                self.requests.get_mut(&part.request).expect("a sequence belongs to a live request");
            booked.push(StepShare {
                sequence: part.work.sequence,
                owner: part.owner(request),
                attributed,
            });
            // Recomputation is the platform's cost: the tenant pays for each token once.
            if part.is_billed() {
                request.attributed += attributed;
                self.charge(part, attributed);
            } else {
                self.count_repeated(part, attributed);
            }
        }
        let record = StepRecord { step, started, busy, shares: &booked };
        self.journal.step(&record).map_err(EngineError::Journal)
    }

    /// Adds the transfer times of the step once to every request in it: each request waited
    /// for all of them.
    pub(super) fn add_transfers(&mut self, parts: &[Part], transfers: Transfers) {
        let requests: BTreeSet<SequenceId> = parts.iter().map(|part| part.request).collect();
        for id in requests {
            let request = self.requests.get_mut(&id).expect("a sequence belongs to a live request");
            *request.transfers.get_or_insert_default() += transfers;
        }
    }

    /// Counts repeated work of a large sequence in the virtual time of its share owner. The
    /// tenant does not pay for the work, but its request took the device from others. Otherwise a
    /// large sequence that gives way would be read first again and again.
    fn count_repeated(&mut self, part: &Part, attributed: DeviceNanos) {
        let Some(sequence) = self.sequences.get(&part.sequence) else { return };
        if is_large(blocks_for(sequence.tokens.len() as u32), self.pool.total()) {
            let counted =
                self.policy.counted(attributed, Tokens { read: part.tokens, generated: 0 });
            self.shares.charge(sequence.node, counted, DeviceNanos::ZERO, DeviceNanos::ZERO);
        }
    }

    /// Charges a share of a step to its share owner and replaces the prediction for the
    /// prompt.
    fn charge(&mut self, part: &Part, attributed: DeviceNanos) {
        let Some(sequence) = self.sequences.get_mut(&part.sequence) else {
            // The sequence ended while the step ahead ran. Its part was one generated
            // token, without any prediction.
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

    /// Delivers tokens to their sinks and ends the choices that are complete.
    pub(super) fn deliver(&mut self, outcomes: Vec<Outcome>, now: MonotonicTime) {
        let mut references: BTreeMap<SequenceId, DeviceNanos> = BTreeMap::new();
        let mut ended = Vec::new();
        for Outcome { request, sequence, choice, event } in outcomes {
            let request =
                self.requests.get_mut(&request).expect("a sequence belongs to a live request");
            // All tokens of one step show the same cost, so it is computed once for each
            // request.
            let reference = *references
                .entry(request.id)
                .or_insert_with(|| request.reference(self.meter.table()));
            let reason = match event {
                ChoiceEvent::PromptRead(prompt) => {
                    let logprobs = std::mem::take(&mut request.prompts[prompt].logprobs);
                    request.sink.prompt_logprobs(prompt as u32, logprobs);
                    continue;
                }
                ChoiceEvent::Token(sampled, end) => {
                    request.times.first_token.get_or_insert(now);
                    let token = GeneratedToken {
                        token: sampled.token,
                        end,
                        logprobs: sampled.logprobs,
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
                ChoiceEvent::NothingWanted | ChoiceEvent::Exceeded => FinishReason::Length,
                ChoiceEvent::Broken => FinishReason::Fault,
            };
            let generated = request.choices[choice as usize].generated;
            self.expected_tokens += (f64::from(generated) - self.expected_tokens) / LENGTH_MEMORY;
            request.end(choice, reason);
            // The journal closes the request later, but its decode stage ends with this
            // token.
            if request.open == 0 {
                request.times.ended = Some(now);
            }
            self.ending.insert(request.id);
            ended.push(sequence);
        }
        // The sequences are dropped after the loop, because several outcomes may belong to
        // one request.
        self.drop_sequences(|sequence| ended.contains(&sequence.id));
    }
}

/// Number of recent choices over which the expected length is averaged, roughly.
const LENGTH_MEMORY: f64 = 32.0;
