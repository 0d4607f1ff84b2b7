//! One request on one worker: the assignment out, the events in. Each event is
//! checked against the order before other modules see it.

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

use super::ConnectedWorker;
use crate::model::ServedModel;
use crate::orders::{Placement, Terms, at_most_since};
use crate::timings::WorkerTimings;

/// The work that a worker is asked to do. The assignment says the same in the
/// messages of the wire.
#[derive(Clone, Debug)]
pub(crate) struct WorkOrder {
    pub(crate) request: RequestId,
    pub(crate) caller: Caller,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) assignment: v1::Assignment,
}

/// A request that runs. Dropping it cancels the request: the worker sees the end
/// of its stream.
#[derive(Debug)]
pub(crate) struct Running {
    // Kept open to the end: a worker takes the end of the messages for a gateway that died.
    requests: mpsc::Sender<RunRequest>,
    events: Streaming<v1::RunEvent>,
    check: StreamCheck,
    placement: Placement,
}

/// One checked event from a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum WorkerEvent {
    /// Text and tokens of one choice, and the request's progress after them.
    Delta(TextDelta, Progress),
    /// Log-probabilities of a prompt's tokens.
    PromptLogprobs { prompt: u32, tokens: Vec<TokenLogprob> },
    /// The end of one choice.
    ChoiceFinished { choice: u32, reason: FinishReason },
    /// The end of the request, with its figures.
    Finished { usage: Usage, timings: WorkerTimings },
    /// The worker took nothing.
    Refused(RefusedWork),
}

/// The refusal of a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RefusedWork {
    pub(crate) reason: v1::RefusedReason,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) message: String,
    /// Host time that was spent on a form that is refused.
    pub(crate) grammar_time: Duration,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Tokens generated, over all choices.
    pub(crate) tokens: u64,
    pub(crate) attributed: DeviceNanos,
    pub(crate) reference: DeviceNanos,
}

/// The reason why a stream gives no more events.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The call failed, or ended without its last message.
    Broken(Box<tonic::Status>),
    /// The worker reported something that cannot be true.
    InvalidReport(&'static str),
}

impl ConnectedWorker {
    /// Opens the stream for `order`.
    #[expect(clippy::expect_used, reason = "a new channel of two has room for one")]
    #[expect(clippy::disallowed_methods, reason = "the checks of the stream start here")]
    pub(crate) async fn run(&self, order: WorkOrder) -> Result<Running, Lost> {
        let WorkOrder { request, caller, model, assignment } = order;
        // The worker bills by its own cost table, so its reports are checked by that
        // table, even if another worker's table chose the estimate.
        let model = self.identity.models.get(&model.name).cloned().unwrap_or(model);
        let terms = Terms::of(model, &assignment);
        let attempt = Attempt { request, attempt: assignment.attempt };
        // The order is noted before the worker can journal the attempt.
        let now = Instant::now();
        let placement = self.orders.open(attempt, self.identity.epoch, caller, terms.clone(), now);
        let check = StreamCheck::new(&assignment, terms, now);
        // Room for the assignment and, at most once, for the cancel.
        let (requests, receiver) = mpsc::channel(2);
        let first = RunRequest { message: Some(Message::Assignment(assignment)) };
        requests.try_send(first).expect("a new channel of two has room for one");
        // A clone shares the connection: a call needs a handle of its own.
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
    /// Waits for the next event.
    #[expect(
        clippy::disallowed_methods,
        reason = "the check gets the time at which the event came"
    )]
    pub(crate) async fn next(&mut self) -> Result<WorkerEvent, Lost> {
        match self.events.message().await {
            Ok(Some(event)) => {
                let event = self.check.check(event, Instant::now()).map_err(Lost::InvalidReport)?;
                match &event {
                    WorkerEvent::Delta(_, progress) => self.placement.streamed(progress.tokens),
                    WorkerEvent::Finished { usage, .. } => {
                        self.placement.finished(*usage).map_err(Lost::InvalidReport)?;
                    }
                    WorkerEvent::Refused(_) => self.placement.refused(),
                    WorkerEvent::PromptLogprobs { .. } | WorkerEvent::ChoiceFinished { .. } => {}
                }
                Ok(event)
            }
            Ok(None) => Err(Lost::Broken(Box::new(tonic::Status::unavailable(
                "the stream ended without a last message",
            )))),
            Err(status) => Err(Lost::Broken(Box::new(status))),
        }
    }

    /// Asks the worker to stop the request at the next step. Its figures still come.
    pub(crate) fn cancel(&self, reason: CancelReason) {
        let cancel = v1::Cancel { reason: reason.into() };
        // A full channel holds an earlier cancel; a closed one belongs to a stream
        // that has ended. Neither needs another message.
        let _ = self.requests.try_send(RunRequest { message: Some(Message::Cancel(cancel)) });
    }
}

/// The check of one stream: the events that an honest worker can still send.
#[derive(Debug)]
pub(crate) struct StreamCheck {
    terms: Terms,
    opened: Instant,
    choices: Vec<ChoiceProgress>,
    logprobs: bool,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, Default)]
struct ChoiceProgress {
    tokens: u32,
    finished: bool,
}

impl StreamCheck {
    pub(crate) fn new(assignment: &v1::Assignment, terms: Terms, opened: Instant) -> Self {
        Self {
            choices: vec![ChoiceProgress::default(); terms.choices()],
            terms,
            opened,
            logprobs: assignment
                .sampling
                .as_ref()
                .is_some_and(|sampling| sampling.top_logprobs.is_some()),
            progress: Progress::default(),
        }
    }

    /// Checks the next event of the stream, which came at `now`.
    pub(crate) fn check(
        &mut self,
        event: v1::RunEvent,
        now: Instant,
    ) -> Result<WorkerEvent, &'static str> {
        match event.event.ok_or("an empty event")? {
            WireEvent::Delta(delta) => self.delta(delta, now),
            WireEvent::PromptLogprobs(v1::PromptLogprobs { prompt, logprobs }) => {
                // A bound for the size of the answer; the exact number is the engine's.
                let tokens = self.terms.prompt_tokens();
                if prompt as usize >= self.terms.prompts() || logprobs.len() as u64 > tokens {
                    return Err("log-probabilities of a prompt that was not sent");
                }
                Ok(WorkerEvent::PromptLogprobs {
                    prompt,
                    tokens: logprobs.into_iter().map(token).collect(),
                })
            }
            WireEvent::ChoiceFinished(finished) => self.choice_finished(finished),
            WireEvent::Finished(v1::Finished { usage, stages, transfers, grammar_ns }) => {
                let usage = self.usage(usage.ok_or("no usage at the end")?, now)?;
                // Bills do not depend on these times, but sums of metrics do: an
                // impossible time is cut to the largest possible one.
                let most = at_most_since(self.opened, now);
                let v1::Stages { queue_ns, prefill_ns, decode_ns } = stages.unwrap_or_default();
                let [queue_ns, prefill_ns, decode_ns] =
                    [queue_ns, prefill_ns, decode_ns].map(|stage| stage.min(most.nanos()));
                let stages = Stages { queue_ns, prefill_ns, decode_ns };
                let transfers = transfers.map(|v1::Transfers { to_device_ns, to_host_ns }| {
                    let [to_device, to_host] =
                        [to_device_ns, to_host_ns].map(|ns| DeviceNanos(ns).min(most));
                    Transfers { to_device, to_host }
                });
                let grammar = (grammar_ns > 0).then(|| {
                    // The masks of several choices are computed side by side.
                    let most = most.nanos().saturating_mul(self.choices.len() as u64);
                    Duration::from_nanos(grammar_ns.min(most))
                });
                let timings = WorkerTimings { stages, transfers, grammar };
                Ok(WorkerEvent::Finished { usage, timings })
            }
            WireEvent::Refused(refused) => {
                // A refused request is free, so none of it may have gone out.
                if self.progress.tokens > 0 {
                    return Err("a refusal after tokens");
                }
                let reason = refused.reason();
                let retry_after = (refused.retry_after_ms > 0)
                    .then(|| Duration::from_millis(refused.retry_after_ms));
                // One thread compiles a form, so its time is within the time that has passed.
                let most = at_most_since(self.opened, now).nanos();
                let grammar_time = Duration::from_nanos(refused.grammar_ns.min(most));
                let message = refused.message;
                Ok(WorkerEvent::Refused(RefusedWork { reason, retry_after, message, grammar_time }))
            }
        }
    }

    fn delta(&mut self, delta: v1::Delta, now: Instant) -> Result<WorkerEvent, &'static str> {
        let v1::Delta { choice, text, tokens, logprobs, attributed_ns, reference_ns, text_bytes } =
            delta;
        let count = u32::try_from(tokens.len()).map_err(|_| "too many tokens")?;
        let state = self.choices.get_mut(choice as usize).ok_or("a choice that was not ordered")?;
        state.tokens = state.tokens.saturating_add(count);
        if state.finished {
            return Err("tokens of a choice that had ended");
        }
        // The budget and the hold were computed for this many tokens.
        if state.tokens > self.terms.max_tokens() {
            return Err("more tokens than ordered");
        }
        if !logprobs.is_empty() && (!self.logprobs || logprobs.len() != tokens.len()) {
            return Err("log-probabilities that were not ordered");
        }
        let progress = Progress {
            // Counted here and not by the worker: the bill is compared with this sum.
            tokens: self.progress.tokens + u64::from(count),
            attributed: DeviceNanos(attributed_ns),
            reference: DeviceNanos(reference_ns),
        };
        self.advance(progress, now)?;
        // The worker joins waiting deltas of one choice, so tokens of other choices
        // from this and earlier steps may still come. They may be in the cost already.
        let most = self.choices.iter().zip(0..).map(|(state, index)| {
            u64::from(if index == choice { state.tokens } else { self.terms.max_tokens() })
        });
        if progress.reference > self.terms.cost(most) {
            return Err("more reference cost than its tokens can cause");
        }
        let logprobs = logprobs.into_iter().map(token).collect();
        let delta = TextDelta { choice, text, tokens: count, token_bytes: text_bytes, logprobs };
        Ok(WorkerEvent::Delta(delta, progress))
    }

    fn choice_finished(
        &mut self,
        finished: v1::ChoiceFinished,
    ) -> Result<WorkerEvent, &'static str> {
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
        Ok(WorkerEvent::ChoiceFinished { choice, reason })
    }

    fn usage(&mut self, usage: v1::Usage, now: Instant) -> Result<Usage, &'static str> {
        let v1::Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
        } = usage;
        // The client has the streamed tokens, so the bill must have as many.
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
        let progress = Progress {
            tokens: completion_tokens,
            attributed: usage.attributed,
            reference: usage.reference,
        };
        self.advance(progress, now)?;
        Ok(usage)
    }

    /// Checks that meters only go forward, and no faster than time.
    fn advance(&mut self, progress: Progress, now: Instant) -> Result<(), &'static str> {
        if progress.attributed < self.progress.attributed
            || progress.reference < self.progress.reference
        {
            return Err("a meter that went back");
        }
        if progress.attributed > at_most_since(self.opened, now) {
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
