//! One placement of a request: its events as they come, until the request ends
//! or its worker is lost. The client, the deadline, a revoked key and the
//! gateway's own shutdown can interrupt it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::{DeviceNanos, FinishReason, StopReason, Usage};
use tollgate_wire::v1::{CancelReason, RefusedReason};

use super::{RequestEnd, RequestTask};
use crate::admit::Admitted;
use crate::error::{Fault, FullQueue, Refusal, RequestError};
use crate::event::Event;
use crate::model::ServedModel;
use crate::route::Placed;
use crate::timings::WorkerTimings;
use crate::workers::{
    BatchPlace, ConnectedWorker, Lost, Progress, RefusedWork, Running, WorkerEvent,
};

/// Time that the true figure may take to come after a cancel: the worker has to
/// end one step.
const FIGURE_TIMEOUT: Duration = Duration::from_secs(10);

/// The result of one placement.
pub(super) enum AttemptOutcome {
    /// The request has ended.
    Ended(RequestEnd),
    /// The worker took nothing; another worker may.
    Refused(RequestError),
    /// The worker was lost and the client has no content: the request can be
    /// placed again.
    Lost,
}

/// The reason why the gateway stops a request that could go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interruption {
    /// The client left.
    Client,
    /// The request's deadline passed.
    Deadline,
    /// The request's key was revoked and its requests must end.
    KeyRevoked,
    /// The gateway stops.
    Shutdown,
}

impl Interruption {
    /// Returns the reason in the words of the wire, which knows two.
    fn cancel_reason(self) -> CancelReason {
        match self {
            Self::Client | Self::KeyRevoked | Self::Shutdown => CancelReason::Client,
            Self::Deadline => CancelReason::Deadline,
        }
    }
}

/// One placement while it runs.
struct Attempt<'a> {
    admitted: &'a Admitted,
    /// The number of the placement, from 0.
    number: u32,
    worker: Arc<ConnectedWorker>,
    /// The place of batch work in the worker's queue, until the first event.
    batch_place: Option<BatchPlace>,
    interrupted: Option<Interruption>,
    /// The end of the time in which a worker that was told to stop must answer.
    figure_deadline: Option<Instant>,
    /// True if a choice ended by a fault of the worker.
    faulted: bool,
    /// The last figures from the worker.
    progress: Progress,
}

impl Attempt<'_> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the task's deadlines are on the runtime's clock"
    )]
    fn interrupt(&mut self, interruption: Interruption) {
        self.interrupted = Some(interruption);
        self.figure_deadline = Some(Instant::now() + FIGURE_TIMEOUT);
    }

    /// Tells the worker to stop.
    fn stop(&mut self, running: &Running, interruption: Interruption) {
        running.cancel(interruption.cancel_reason());
        self.interrupt(interruption);
    }

    /// True if the client has content that it keeps: a stream cannot be taken back.
    fn is_streamed(&self) -> bool {
        self.admitted.job.is_streamed()
    }
}

impl RequestTask {
    /// Places `admitted` on the chosen worker and follows it to its end.
    pub(super) async fn attempt(
        &mut self,
        admitted: &Admitted,
        mut placed: Placed,
        number: u32,
    ) -> AttemptOutcome {
        let mut attempt = Attempt {
            admitted,
            number,
            worker: Arc::clone(&placed.worker),
            batch_place: placed.batch_place.take(),
            interrupted: None,
            figure_deadline: None,
            faulted: false,
            progress: Progress::default(),
        };
        let outcome = match self.open(&mut attempt).await {
            Ok(running) => self.follow(&mut attempt, running).await,
            Err(outcome) => outcome,
        };
        // Only a client that left has wasted the time.
        if attempt.interrupted == Some(Interruption::Client) {
            self.count_waste(&attempt, &outcome);
        }
        outcome
    }

    /// Counts the device time of a request that its client left, without the time of
    /// content that the client has: no client reads what was computed in it.
    fn count_waste(&self, attempt: &Attempt<'_>, outcome: &AttemptOutcome) {
        let AttemptOutcome::Ended(RequestEnd::Paid { usage, .. }) = outcome else { return };
        let delivered = match attempt.is_streamed() {
            true => self.delivered.progress.attributed,
            // An answer in one piece goes out at its end only.
            false => DeviceNanos::ZERO,
        };
        let wasted = usage.attributed.nanos().saturating_sub(delivered.nanos());
        let (context, tenant) = (&self.context, &attempt.admitted.caller.tenant);
        context.penalties.count_wasted_time(context.clock.now(), tenant, DeviceNanos(wasted));
    }

    /// Opens the stream. A reason to stop meanwhile does not keep the stream from
    /// being opened, so that the worker's figures are known and paid.
    #[expect(
        clippy::disallowed_methods,
        reason = "the task's deadlines are on the runtime's clock"
    )]
    async fn open(&self, attempt: &mut Attempt<'_>) -> Result<Running, AttemptOutcome> {
        let queue_left = self.queue_deadline.saturating_duration_since(Instant::now());
        let order = attempt.admitted.order(attempt.number, queue_left);
        let worker = Arc::clone(&attempt.worker);
        let mut opening = pin!(worker.run(order));
        loop {
            tokio::select! {
                opened = &mut opening => return match opened {
                    Ok(running) => {
                        // The worker had no stream to cancel until now.
                        if let Some(interruption) = attempt.interrupted {
                            running.cancel(interruption.cancel_reason());
                        }
                        Ok(running)
                    }
                    Err(lost) => Err(self.lost(attempt, lost)),
                },
                interruption = self.interruption(), if attempt.interrupted.is_none() => {
                    attempt.interrupt(interruption);
                }
                // The worker has not even confirmed that it has the request. It cannot
                // tell this case from a gateway that died, so no tenant pays.
                () = sleep_until(attempt.figure_deadline) => {
                    let error = self.cancel_unanswered(attempt);
                    return Err(self.charge_delivered(attempt, error));
                }
            }
        }
    }

    /// Follows the stream to its end.
    async fn follow(&mut self, attempt: &mut Attempt<'_>, mut running: Running) -> AttemptOutcome {
        loop {
            let event = tokio::select! {
                event = running.next() => event,
                interruption = self.interruption(), if attempt.interrupted.is_none() => {
                    attempt.stop(&running, interruption);
                    continue;
                }
                () = sleep_until(attempt.figure_deadline) => return self.figure_missing(attempt),
            };
            // Any event says that the request has left the queue.
            attempt.batch_place = None;
            match event {
                Err(lost) => return self.lost(attempt, lost),
                Ok(WorkerEvent::Delta(delta, progress)) => {
                    attempt.progress = progress;
                    self.deliver(Event::Delta(delta), Some(progress), &running, attempt).await;
                }
                Ok(WorkerEvent::PromptLogprobs { prompt, tokens }) => {
                    let event = Event::PromptLogprobs { prompt, tokens };
                    self.deliver(event, None, &running, attempt).await;
                }
                Ok(WorkerEvent::ChoiceFinished { choice, reason }) => {
                    if let Some(reason) = stop_reason(reason, attempt) {
                        let event = Event::ChoiceFinished { choice, reason };
                        self.deliver(event, None, &running, attempt).await;
                    }
                }
                Ok(WorkerEvent::Finished { usage, timings }) => {
                    return self.finished(attempt, usage, timings);
                }
                Ok(WorkerEvent::Refused(refused)) => return self.refused(attempt, refused),
            }
        }
    }

    /// Waits until there is a reason to stop.
    async fn interruption(&self) -> Interruption {
        tokio::select! {
            () = self.events.closed() => Interruption::Client,
            () = tokio::time::sleep_until(self.deadline) => Interruption::Deadline,
            () = self.revoked.cancelled() => Interruption::KeyRevoked,
            () = self.context.stopping.cancelled() => Interruption::Shutdown,
        }
    }

    /// Passes `event` on, as fast as the client reads.
    async fn deliver(
        &mut self,
        event: Event,
        progress: Option<Progress>,
        running: &Running,
        attempt: &mut Attempt<'_>,
    ) {
        // The request is cancelled, so no more content goes out or is paid.
        if attempt.interrupted.is_some() {
            return;
        }
        tokio::select! {
            // An event that fits goes out even if there is a reason to stop as well.
            biased;
            place = self.events.reserve() => match place {
                Ok(place) => {
                    place.send(event);
                    self.delivered.any = true;
                    if let Some(progress) = progress {
                        // Once for each request: a metric counts requests by this time.
                        if !self.has_first_token {
                            self.has_first_token = true;
                            let ServedModel { name, class, .. } = &*attempt.admitted.job.model;
                            let elapsed = self.started.elapsed();
                            self.context.observer.first_token(name, class, elapsed);
                        }
                        self.delivered.progress = progress;
                    }
                }
                // The receiver is gone, so the client has left.
                Err(_) => attempt.stop(running, Interruption::Client),
            },
            interruption = self.interruption() => attempt.stop(running, interruption),
        }
    }

    /// Ends the request after the worker's last event, which has the true figures.
    fn finished(
        &self,
        attempt: &Attempt<'_>,
        usage: Usage,
        timings: WorkerTimings,
    ) -> AttemptOutcome {
        if attempt.faulted {
            return self.faulted(attempt);
        }
        let error = match attempt.interrupted {
            None => None,
            // The gateway stops for its own reasons, so the tenant pays what went out.
            Some(Interruption::Shutdown) => {
                return self.charge_delivered(attempt, Refusal::Draining.into());
            }
            Some(interruption) => Some(interruption_error(interruption, attempt.admitted)),
        };
        AttemptOutcome::Ended(RequestEnd::Paid { usage, timings, error })
    }

    fn refused(&self, attempt: &Attempt<'_>, refused: RefusedWork) -> AttemptOutcome {
        let RefusedWork { reason, retry_after, message, grammar_time } = refused;
        let free = |error| AttemptOutcome::Ended(RequestEnd::Free(error));
        // The reason to stop came before the refusal, so the client reads that one.
        if let Some(interruption) = attempt.interrupted {
            return free(interruption_error(interruption, attempt.admitted));
        }
        let job = &attempt.admitted.job;
        match reason {
            RefusedReason::Overloaded | RefusedReason::Deadline | RefusedReason::Draining => {
                let full = FullQueue::Workers;
                AttemptOutcome::Refused(Refusal::Overloaded { full, retry_after }.into())
            }
            // Every worker would refuse the request, so it is not placed again.
            RefusedReason::Invalid => free(Refusal::invalid(job.prompt_field, message).into()),
            RefusedReason::Grammar => {
                let error = Refusal::invalid(job.form_field, message).into();
                AttemptOutcome::Ended(RequestEnd::FormRefused { error, grammar_time })
            }
            RefusedReason::Budget => {
                // Admission holds at least the cost of the prompt and a first token.
                tracing::error!(request = %job.id, "worker refused a budget as too small; the request fails");
                free(RequestError::INTERNAL)
            }
        }
    }

    /// Handles a stream that broke, or that brought an invalid report.
    fn lost(&self, attempt: &Attempt<'_>, lost: Lost) -> AttemptOutcome {
        let (request, identity) = (&attempt.admitted.job.id, &attempt.worker.identity);
        match lost {
            Lost::InvalidReport(what) => {
                identity.distrust();
                tracing::error!(%request, worker = %identity.name, what, "worker sent an invalid event; its stream is dropped");
            }
            Lost::Broken(status) => {
                tracing::warn!(%request, code = ?status.code(), "stream from a worker broke; the request is placed again or fails");
            }
        }
        self.faulted(attempt)
    }

    /// Handles the end of a placement by the worker's fault. The request is placed
    /// again if its client still waits and has no content that it keeps. Otherwise
    /// the tenant pays the content that went out.
    fn faulted(&self, attempt: &Attempt<'_>) -> AttemptOutcome {
        if attempt.interrupted.is_none() && !(attempt.is_streamed() && self.delivered.any) {
            return AttemptOutcome::Lost;
        }
        self.charge_delivered(attempt, Fault::WorkerLost { charged: true }.into())
    }

    /// Ends the request with `error`; the tenant pays the content that went out.
    fn charge_delivered(&self, attempt: &Attempt<'_>, error: RequestError) -> AttemptOutcome {
        // An answer in one piece goes out at its end only, so none of it is paid.
        let content = attempt.is_streamed() && self.delivered.progress.tokens > 0;
        let error = match error {
            RequestError::Failed(Fault::WorkerLost { .. }) => {
                Fault::WorkerLost { charged: content }.into()
            }
            error => error,
        };
        let job = &attempt.admitted.job;
        let payable = if content { self.delivered_usage(job) } else { Usage::default() };
        self.cap(attempt.admitted, attempt.number, payable);
        AttemptOutcome::Ended(match content {
            true => RequestEnd::Faulted { error },
            false => RequestEnd::Free(error),
        })
    }

    /// Ends a request after its worker was told to stop and sent no figure. The
    /// journal brings the true figure to the ledger. Until then the limits count
    /// the whole hold, so that the request cannot exceed a cap.
    fn figure_missing(&self, attempt: &Attempt<'_>) -> AttemptOutcome {
        let error = self.cancel_unanswered(attempt);
        let Progress { tokens, attributed, reference } = attempt.progress;
        let Admitted { job, hold, expected, .. } = attempt.admitted;
        let held = hold.budget().unwrap_or(*expected);
        let usage = Usage {
            prompt_tokens: job.prompt_tokens(),
            cached_tokens: 0,
            completion_tokens: tokens,
            attributed,
            reference: reference.max(held),
        };
        let timings = WorkerTimings::default();
        AttemptOutcome::Ended(RequestEnd::Paid { usage, timings, error: Some(error) })
    }

    /// Returns the client's error for a worker that does not answer a cancel.
    fn cancel_unanswered(&self, attempt: &Attempt<'_>) -> RequestError {
        let (request, worker) = (&attempt.admitted.job.id, &attempt.worker.identity.name);
        tracing::error!(%request, %worker, "worker does not answer a cancel; the request ends without its figure");
        attempt
            .interrupted
            .map_or(RequestError::INTERNAL, |it| interruption_error(it, attempt.admitted))
    }
}

/// Returns the error that an interrupted client reads.
fn interruption_error(interruption: Interruption, admitted: &Admitted) -> RequestError {
    match interruption {
        Interruption::Client => RequestError::INTERNAL, // the client has left
        Interruption::Deadline => {
            Refusal::DeadlineExceeded { deadline: admitted.deadlines.request }.into()
        }
        Interruption::KeyRevoked => Refusal::KeyRevoked.into(),
        Interruption::Shutdown => Refusal::Draining.into(),
    }
}

/// Returns the reason for the client, or `None` if the choice did not end well.
fn stop_reason(reason: FinishReason, attempt: &mut Attempt<'_>) -> Option<StopReason> {
    match reason {
        FinishReason::Stop => Some(StopReason::Stop),
        FinishReason::Length => Some(StopReason::Length),
        // The worker was told to stop. The last event decides what that means.
        FinishReason::Cancelled | FinishReason::Deadline if attempt.interrupted.is_some() => None,
        FinishReason::Fault | FinishReason::Cancelled | FinishReason::Deadline => {
            attempt.faulted = true;
            None
        }
    }
}

/// Sleeps until `deadline`; for ever if there is none.
async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
