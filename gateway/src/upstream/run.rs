//! One request on one worker: its assignment out, its events in, each checked
//! against what was ordered before anyone else sees it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tollgate_domain::block::{Attempt, Stages};
use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, RequestId, TextDelta, TokenLogprob, Transfers, Usage,
};
use tollgate_wire::v1::run_event::Event as WireEvent;
use tollgate_wire::v1::run_request::Message;
use tollgate_wire::v1::{self, CancelReason, RunRequest};
use tonic::Streaming;

use super::orders::Placement;
use super::terms::{Terms, at_most_since};
use super::{Online, ServedModel};
use crate::path::InWorker;

/// What a worker is asked to do. The assignment says the same in the wire's
/// words.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) request: RequestId,
    pub(crate) caller: Caller,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) assignment: v1::Assignment,
}

/// A request that runs. Dropping it cancels: the worker sees its stream end.
#[derive(Debug)]
pub(crate) struct Running {
    requests: mpsc::Sender<RunRequest>,
    events: Streaming<v1::RunEvent>,
    check: Check,
    placement: Placement,
}

/// One thing that a worker said, checked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Said {
    Delta(TextDelta, Progress),
    PromptLogprobs { prompt: u32, tokens: Vec<TokenLogprob> },
    ChoiceFinished { choice: u32, reason: FinishReason },
    Finished { usage: Usage, in_worker: InWorker },
    Refused { reason: v1::RefusedReason, retry_after: Option<Duration>, message: String },
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Tokens generated, over all choices.
    pub(crate) tokens: u64,
    pub(crate) attributed: DeviceNanos,
    pub(crate) reference: DeviceNanos,
}

/// Why no more comes.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The call failed, or ended without its last message.
    Broken(Box<tonic::Status>),
    /// The worker said what cannot be true.
    Lied(&'static str),
}

impl Online {
    /// Opens the stream for `order`.
    pub(crate) async fn run(&self, order: Order) -> Result<Running, Lost> {
        let Order { request, caller, model, assignment } = order;
        // Its own table, where it has one of its own for the same model.
        let model = self.models.get(&model.name).cloned().unwrap_or(model);
        let terms = Terms::of(model, &assignment);
        let attempt = Attempt { request, attempt: assignment.attempt };
        let placement = self.orders.open(attempt, self.epoch, caller, terms.clone());
        let check = Check::new(&assignment, terms);
        // Its assignment and, at most once, its cancel.
        let (requests, receiver) = mpsc::channel(2);
        let first = RunRequest { message: Some(Message::Assignment(assignment)) };
        requests.try_send(first).expect("a new channel of two has room for one");
        let events = self
            .client
            .clone()
            .run(ReceiverStream::new(receiver))
            .await
            .map_err(|status| Lost::Broken(Box::new(status)))?
            .into_inner();
        Ok(Running { requests, events, check, placement })
    }
}

impl Running {
    /// The next thing it says.
    pub(crate) async fn next(&mut self) -> Result<Said, Lost> {
        match self.events.message().await {
            Ok(Some(event)) => {
                let said = self.check.take(event).map_err(Lost::Lied)?;
                match &said {
                    Said::Delta(_, progress) => self.placement.streamed(progress.tokens),
                    Said::Finished { usage, .. } => {
                        self.placement.heard(*usage).map_err(Lost::Lied)?;
                    }
                    Said::Refused { .. } => self.placement.refused(),
                    Said::PromptLogprobs { .. } | Said::ChoiceFinished { .. } => {}
                }
                Ok(said)
            }
            Ok(None) => Err(Lost::Broken(Box::new(tonic::Status::unavailable(
                "the stream ended without a last message",
            )))),
            Err(status) => Err(Lost::Broken(Box::new(status))),
        }
    }

    /// Asks it to stop at the next step; its figures still come.
    pub(crate) fn cancel(&self, reason: CancelReason) {
        let cancel = v1::Cancel { reason: reason.into() };
        // Full: it has been asked before. Closed: it has ended already.
        let _ = self.requests.try_send(RunRequest { message: Some(Message::Cancel(cancel)) });
    }
}

/// What an honest worker can still say about one request.
#[derive(Debug)]
pub(super) struct Check {
    terms: Terms,
    opened: Instant,
    choices: Vec<Choice>,
    logprobs: bool,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    tokens: u32,
    finished: bool,
}

impl Check {
    pub(super) fn new(assignment: &v1::Assignment, terms: Terms) -> Self {
        Self {
            choices: vec![Choice::default(); terms.choices()],
            terms,
            opened: Instant::now(),
            logprobs: assignment
                .sampling
                .as_ref()
                .is_some_and(|sampling| sampling.top_logprobs.is_some()),
            progress: Progress::default(),
        }
    }

    pub(super) fn take(&mut self, event: v1::RunEvent) -> Result<Said, &'static str> {
        match event.event.ok_or("an empty event")? {
            WireEvent::Delta(delta) => self.delta(delta),
            WireEvent::PromptLogprobs(v1::PromptLogprobs { prompt, logprobs }) => {
                let tokens = self.terms.prompt_tokens();
                if prompt as usize >= self.terms.prompts() || logprobs.len() as u64 > tokens {
                    return Err("log-probabilities of a prompt that was not sent");
                }
                Ok(Said::PromptLogprobs {
                    prompt,
                    tokens: logprobs.into_iter().map(token).collect(),
                })
            }
            WireEvent::ChoiceFinished(finished) => self.choice_finished(finished),
            WireEvent::Finished(v1::Finished { usage, stages, transfers }) => {
                let usage = self.usage(usage.ok_or("no usage at the end")?)?;
                // Nobody pays by them; but no sum of ours is to hold what cannot be.
                let most = at_most_since(self.opened);
                let v1::Stages { queue_ns, prefill_ns, decode_ns } = stages.unwrap_or_default();
                let [queue_ns, prefill_ns, decode_ns] =
                    [queue_ns, prefill_ns, decode_ns].map(|stage| stage.min(most.nanos()));
                let stages = Stages { queue_ns, prefill_ns, decode_ns };
                let transfers = transfers.map(|v1::Transfers { to_device_ns, to_host_ns }| {
                    let [to_device, to_host] =
                        [to_device_ns, to_host_ns].map(|ns| DeviceNanos(ns).min(most));
                    Transfers { to_device, to_host }
                });
                Ok(Said::Finished { usage, in_worker: InWorker { stages, transfers } })
            }
            WireEvent::Refused(refused) => {
                if self.progress.tokens > 0 {
                    return Err("a refusal after tokens");
                }
                let reason = refused.reason();
                let retry_after = (refused.retry_after_ms > 0)
                    .then(|| Duration::from_millis(refused.retry_after_ms));
                Ok(Said::Refused { reason, retry_after, message: refused.message })
            }
        }
    }

    fn delta(&mut self, delta: v1::Delta) -> Result<Said, &'static str> {
        let v1::Delta { choice, text, tokens, logprobs, attributed_ns, reference_ns } = delta;
        let count = u32::try_from(tokens.len()).map_err(|_| "too many tokens")?;
        let state = self.choices.get_mut(choice as usize).ok_or("a choice that was not ordered")?;
        state.tokens = state.tokens.saturating_add(count);
        if state.finished {
            return Err("tokens of a choice that had ended");
        }
        if state.tokens > self.terms.max_tokens() {
            return Err("more tokens than ordered");
        }
        if !logprobs.is_empty() && (!self.logprobs || logprobs.len() != tokens.len()) {
            return Err("log-probabilities that were not ordered");
        }
        let progress = Progress {
            tokens: self.progress.tokens + u64::from(count),
            attributed: DeviceNanos(attributed_ns),
            reference: DeviceNanos(reference_ns),
        };
        self.advance(progress)?;
        // Deltas that wait are joined, so that other choices' tokens of this
        // and earlier steps may still come.
        let most = self.choices.iter().zip(0..).map(|(state, index)| {
            u64::from(if index == choice { state.tokens } else { self.terms.max_tokens() })
        });
        if progress.reference > self.terms.cost(most) {
            return Err("more reference cost than its tokens can cause");
        }
        let logprobs = logprobs.into_iter().map(token).collect();
        Ok(Said::Delta(TextDelta { choice, text, logprobs }, progress))
    }

    fn choice_finished(&mut self, finished: v1::ChoiceFinished) -> Result<Said, &'static str> {
        let reason = match finished.reason() {
            v1::FinishReason::Stop => FinishReason::Stop,
            v1::FinishReason::Length => FinishReason::Length,
            v1::FinishReason::Cancelled => FinishReason::Cancelled,
            v1::FinishReason::Deadline => FinishReason::Deadline,
            v1::FinishReason::Fault => FinishReason::Fault,
            v1::FinishReason::Unspecified => return Err("a choice that ended without a reason"),
        };
        let choice = finished.choice;
        let state = self.choices.get_mut(choice as usize).ok_or("a choice that was not ordered")?;
        if std::mem::replace(&mut state.finished, true) {
            return Err("a choice that ended twice");
        }
        Ok(Said::ChoiceFinished { choice, reason })
    }

    fn usage(&mut self, usage: v1::Usage) -> Result<Usage, &'static str> {
        let v1::Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
        } = usage;
        if completion_tokens != self.progress.tokens {
            return Err("another count of tokens than was streamed");
        }
        let usage = Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed: DeviceNanos(attributed_ns),
            reference: DeviceNanos(reference_ns),
        };
        let generated: Vec<u32> = self.choices.iter().map(|choice| choice.tokens).collect();
        self.terms.check(&usage, Some(&generated))?;
        self.advance(Progress {
            tokens: completion_tokens,
            attributed: usage.attributed,
            reference: usage.reference,
        })?;
        Ok(usage)
    }

    /// Meters only go forward, and no faster than time.
    fn advance(&mut self, progress: Progress) -> Result<(), &'static str> {
        if progress.attributed < self.progress.attributed
            || progress.reference < self.progress.reference
        {
            return Err("a meter that went back");
        }
        if progress.attributed > at_most_since(self.opened) {
            return Err("more device time than has passed");
        }
        self.progress = progress;
        Ok(())
    }
}

fn token(wire: v1::TokenLogprob) -> TokenLogprob {
    let v1::TokenLogprob { token: _, bytes, logprob, top } = wire;
    let top = top.into_iter().map(|v1::TopLogprob { token: _, bytes, logprob }| (bytes, logprob));
    TokenLogprob { bytes, logprob, top: top.collect() }
}
