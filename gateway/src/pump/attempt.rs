//! One placement of a request: its events as they come, until it ends or is
//! lost, with an ear for the client, the deadline and our own end.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::{FinishReason, StopReason, Usage};
use tollgate_wire::v1::{CancelReason, RefusedReason};

use super::{Ended, Event, Pump};
use crate::admit::Admitted;
use crate::path::InWorker;
use crate::reply::ApiError;
use crate::route::Placed;
use crate::upstream::{Lost, Online, Order, Progress, Running, Said, ServedModel};

/// How long the true figure is waited for after a cancel: the worker has to
/// end one step.
const FIGURE_PATIENCE: Duration = Duration::from_secs(10);

/// How one placement went.
pub(super) enum Attempted {
    /// The request has ended.
    Ended(Ended),
    /// The worker took nothing; another may.
    Refused(ApiError),
    /// The worker was lost and nothing had gone out: it can be placed again.
    Lost,
}

/// Why we stop a request that could go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    Client,
    Deadline,
    /// Its key was revoked, and its requests with it.
    Revoked,
    Stopping,
}

impl Leaving {
    fn reason(self) -> CancelReason {
        match self {
            Self::Client | Self::Revoked | Self::Stopping => CancelReason::Client,
            Self::Deadline => CancelReason::Deadline,
        }
    }
}

/// What is known of one placement while it runs.
struct State {
    worker: Arc<Online>,
    model: Arc<ServedModel>,
    streamed: bool,
    leaving: Option<Leaving>,
    /// When a worker that was told to stop has had its time.
    patience: Option<Instant>,
    /// Whether a choice ended by a fault of the worker's.
    fault: bool,
    /// The last figures heard.
    heard: Progress,
}

impl State {
    fn leave(&mut self, leaving: Leaving) {
        self.leaving = Some(leaving);
        self.patience = Some(Instant::now() + FIGURE_PATIENCE);
    }
}

impl Pump {
    /// Places `admitted` on the chosen worker and follows it to its end.
    pub(super) async fn attempt(
        &mut self,
        admitted: &Admitted,
        placed: Placed,
        number: u32,
    ) -> Attempted {
        let mut state = State {
            worker: Arc::clone(&placed.worker),
            model: Arc::clone(&admitted.job.model),
            streamed: admitted.job.streamed,
            leaving: None,
            patience: None,
            fault: false,
            heard: Progress::default(),
        };
        let attempted = match self.open(admitted, &placed, number, &mut state).await {
            Ok(running) => self.follow(admitted, number, &mut state, running).await,
            Err(attempted) => attempted,
        };
        if state.leaving == Some(Leaving::Client) {
            self.serving.penalties.cancelled(self.serving.clock.now(), &admitted.caller.tenant);
        }
        attempted
    }

    /// Opens the stream. Should there be a reason to stop meanwhile, it is
    /// opened all the same, so that what the worker did is known and paid.
    async fn open(
        &self,
        admitted: &Admitted,
        placed: &Placed,
        number: u32,
        state: &mut State,
    ) -> Result<Running, Attempted> {
        let mut opening = pin!(placed.worker.run(self.order(admitted, number)));
        loop {
            tokio::select! {
                opened = &mut opening => return match opened {
                    Ok(running) => {
                        if let Some(leaving) = state.leaving {
                            running.cancel(leaving.reason());
                        }
                        Ok(running)
                    }
                    Err(lost) => Err(self.lost(admitted, number, state, lost)),
                },
                leaving = self.leave(), if state.leaving.is_none() => state.leave(leaving),
                // It has not even said that it has the request, which it
                // cannot tell from a gateway that died: nobody pays.
                () = patience(state.patience) => {
                    let error = self.unanswered(admitted, state);
                    return Err(self.charge_told(admitted, number, state, error));
                }
            }
        }
    }

    /// Follows the stream to its end.
    async fn follow(
        &mut self,
        admitted: &Admitted,
        number: u32,
        state: &mut State,
        mut running: Running,
    ) -> Attempted {
        loop {
            let said = tokio::select! {
                said = running.next() => said,
                leaving = self.leave(), if state.leaving.is_none() => {
                    stop(&running, state, leaving);
                    continue;
                }
                () = patience(state.patience) => return self.ran_out_of_patience(admitted, state),
            };
            match said {
                Err(lost) => return self.lost(admitted, number, state, lost),
                Ok(Said::Delta(delta, progress)) => {
                    state.heard = progress;
                    self.tell(Event::Delta(delta), Some(progress), &running, state).await;
                }
                Ok(Said::PromptLogprobs { prompt, tokens }) => {
                    let event = Event::PromptLogprobs { prompt, tokens };
                    self.tell(event, None, &running, state).await;
                }
                Ok(Said::ChoiceFinished { choice, reason }) => {
                    let ending = match reason {
                        FinishReason::Stop => StopReason::Stop,
                        FinishReason::Length => StopReason::Length,
                        // As it was told; what that means is said at the end.
                        FinishReason::Cancelled | FinishReason::Deadline
                            if state.leaving.is_some() =>
                        {
                            continue;
                        }
                        FinishReason::Fault | FinishReason::Cancelled | FinishReason::Deadline => {
                            state.fault = true;
                            continue;
                        }
                    };
                    self.tell(
                        Event::ChoiceFinished { choice, reason: ending },
                        None,
                        &running,
                        state,
                    )
                    .await;
                }
                Ok(Said::Finished { usage, in_worker }) => {
                    return self.finished(admitted, number, state, (usage, in_worker));
                }
                Ok(Said::Refused { reason, retry_after, message }) => {
                    return self.refused(admitted, state, reason, retry_after, message);
                }
            }
        }
    }

    /// Waits until there is a reason to stop.
    async fn leave(&self) -> Leaving {
        tokio::select! {
            () = self.events.closed() => Leaving::Client,
            () = tokio::time::sleep_until(self.deadline) => Leaving::Deadline,
            () = self.revoked.cancelled() => Leaving::Revoked,
            () = self.serving.stopping.cancelled() => Leaving::Stopping,
        }
    }

    /// Passes `event` on, as fast as the client reads.
    async fn tell(
        &mut self,
        event: Event,
        progress: Option<Progress>,
        running: &Running,
        state: &mut State,
    ) {
        if state.leaving.is_some() {
            return; // it is cancelled: nothing more goes out
        }
        tokio::select! {
            biased;
            place = self.events.reserve() => match place {
                Ok(place) => {
                    place.send(event);
                    self.told.anything = true;
                    if let Some(progress) = progress {
                        if self.told.progress.tokens == 0 {
                            let ServedModel { name, class, .. } = &*state.model;
                            self.serving.metrics.first_token(name, class, self.started.elapsed());
                        }
                        self.told.progress = progress;
                    }
                }
                Err(_) => stop(running, state, Leaving::Client),
            },
            leaving = self.leave() => stop(running, state, leaving),
        }
    }

    /// The worker has said its last word, with the true figures.
    fn finished(
        &self,
        admitted: &Admitted,
        number: u32,
        state: &State,
        (usage, in_worker): (Usage, InWorker),
    ) -> Attempted {
        if state.fault {
            return self.faulted(admitted, number, state);
        }
        let error = match state.leaving {
            None => None,
            Some(Leaving::Stopping) => return self.interrupted(admitted, number, state),
            // Nobody hears of it.
            Some(Leaving::Client) => Some(ApiError::Internal),
            Some(Leaving::Deadline) => Some(self.deadline_exceeded()),
            Some(Leaving::Revoked) => Some(ApiError::KeyRevoked),
        };
        Attempted::Ended(Ended::Paid { usage, in_worker, error })
    }

    fn refused(
        &self,
        admitted: &Admitted,
        state: &State,
        reason: RefusedReason,
        retry_after: Option<Duration>,
        message: String,
    ) -> Attempted {
        let free = |error| Attempted::Ended(Ended::Free(error));
        match state.leaving {
            Some(Leaving::Client) => return free(ApiError::Internal),
            Some(Leaving::Deadline) => return free(self.deadline_exceeded()),
            Some(Leaving::Revoked) => return free(ApiError::KeyRevoked),
            Some(Leaving::Stopping) => return free(ApiError::Draining),
            None => {}
        }
        match reason {
            RefusedReason::Overloaded | RefusedReason::Deadline | RefusedReason::Draining => {
                Attempted::Refused(ApiError::Overloaded { retry_after })
            }
            RefusedReason::Invalid => {
                let param = admitted.job.interface.prompt_field();
                free(ApiError::invalid(param, message))
            }
            RefusedReason::Budget => {
                // Admission holds at least the prompt and a first token.
                tracing::error!(request = %admitted.job.id, "a worker finds a budget too small");
                free(ApiError::Internal)
            }
        }
    }

    /// The stream broke, or what came over it cannot be true.
    fn lost(&self, admitted: &Admitted, number: u32, state: &State, lost: Lost) -> Attempted {
        match lost {
            Lost::Lied(what) => {
                state.worker.distrust();
                let worker = &state.worker.name;
                tracing::error!(request = %admitted.job.id, %worker, what, "a worker lied");
            }
            Lost::Broken(status) => {
                tracing::warn!(request = %admitted.job.id, code = ?status.code(), "a worker's stream broke");
            }
        }
        self.faulted(admitted, number, state)
    }

    /// It ended by the worker's fault: placed again where nothing has gone
    /// out and somebody still waits, else the tenant pays what went out.
    fn faulted(&self, admitted: &Admitted, number: u32, state: &State) -> Attempted {
        if state.leaving.is_none() && !(state.streamed && self.told.anything) {
            return Attempted::Lost;
        }
        self.charge_told(admitted, number, state, ApiError::WorkerLost { charged: true })
    }

    /// We stop, and nobody else is to blame.
    fn interrupted(&self, admitted: &Admitted, number: u32, state: &State) -> Attempted {
        self.charge_told(admitted, number, state, ApiError::Draining)
    }

    fn charge_told(
        &self,
        admitted: &Admitted,
        number: u32,
        state: &State,
        error: ApiError,
    ) -> Attempted {
        let content = state.streamed && self.told.progress.tokens > 0;
        let error = match error {
            ApiError::WorkerLost { .. } => ApiError::WorkerLost { charged: content },
            error => error,
        };
        let payable = if content { self.told_usage(&admitted.job) } else { Usage::default() };
        self.cap(admitted, number, payable);
        Attempted::Ended(if content { Ended::Faulted { error } } else { Ended::Free(error) })
    }

    /// The worker was told to stop and says nothing. The journal brings the
    /// true figure to the ledger; until then limits believe what was held, so
    /// that it cannot exceed a cap.
    fn ran_out_of_patience(&self, admitted: &Admitted, state: &State) -> Attempted {
        let error = self.unanswered(admitted, state);
        let Progress { tokens, attributed, reference } = state.heard;
        let held = admitted.hold.budget().unwrap_or(admitted.expected);
        let usage = Usage {
            prompt_tokens: admitted.job.prompt_tokens(),
            cached_tokens: 0,
            completion_tokens: tokens,
            attributed,
            reference: reference.max(held),
        };
        let in_worker = InWorker::default();
        Attempted::Ended(Ended::Paid { usage, in_worker, error: Some(error) })
    }

    /// What the client hears where the worker does not answer a cancel.
    fn unanswered(&self, admitted: &Admitted, state: &State) -> ApiError {
        tracing::error!(request = %admitted.job.id, "a worker does not answer a cancel");
        match state.leaving {
            Some(Leaving::Deadline) => self.deadline_exceeded(),
            Some(Leaving::Revoked) => ApiError::KeyRevoked,
            Some(Leaving::Stopping) => ApiError::Draining,
            Some(Leaving::Client) | None => ApiError::Internal,
        }
    }

    fn deadline_exceeded(&self) -> ApiError {
        ApiError::DeadlineExceeded { deadline: self.serving.deadlines.request }
    }

    fn order(&self, admitted: &Admitted, number: u32) -> Order {
        let left = self.queue_deadline.saturating_duration_since(Instant::now());
        admitted.order(number, left)
    }
}

/// Tells the worker to stop, once.
fn stop(running: &Running, state: &mut State, leaving: Leaving) {
    running.cancel(leaving.reason());
    state.leave(leaving);
}

async fn patience(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}
