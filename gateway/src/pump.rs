//! From admission to the bill: one task for each request that owns its hold
//! and its worker's stream, and outlives the client.
//!
//! Whatever happens, to the client, the worker or the clock, the task ends by
//! resolving the hold exactly once: settled with the true figure, or with what
//! was told before a fault, or voided where nothing was done. When the client
//! leaves it cancels, waits for the figure and settles. Nobody hears of the
//! end before that is done, so a client's next request finds its place free.

mod attempt;
mod event;
mod in_flight;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tollgate_admission::{QueueTicketLost, ResolveError, Resolved, Settlement, Spent};
use tollgate_domain::block::Attempt as AttemptId;
use tollgate_domain::{DeviceNanos, Usage, WorkerEpoch};
use tollgate_ledger::FaultCap;

pub(crate) use self::event::{Event, Failure, Receipt};
pub(crate) use self::in_flight::{InFlight, Stage};

use self::attempt::Attempted;
pub(crate) use self::in_flight::Open;
use crate::admit::Admitted;
use crate::api::Job;
use crate::path::{InWorker, Path};
use crate::reply::ApiError;
use crate::route;
use crate::serving::Serving;
use crate::upstream::Progress;

/// Events between a request's task and its client that nobody has read yet.
const UNREAD_EVENTS: usize = 32;
/// How often a request is placed, over all workers.
const MOST_ATTEMPTS: u32 = 3;
/// How long a request whose worker died waits for another to come.
const REPLACE_PATIENCE: Duration = Duration::from_secs(20);

/// Starts the task of an admitted request; what it tells comes out here. The
/// client leaves by dropping the receiver.
pub(crate) fn start(serving: &Arc<Serving>, admitted: Admitted) -> mpsc::Receiver<Event> {
    let (events, receiver) = mpsc::channel(UNREAD_EVENTS);
    let open = serving.in_flight.begin(admitted.job.id.clone(), admitted.caller.clone());
    let now = Instant::now();
    let pump = Pump {
        serving: Arc::clone(serving),
        events,
        started: now,
        deadline: now + serving.deadlines.request,
        queue_deadline: now + serving.deadlines.queue,
        revoked: open.revoked(),
        told: Told::default(),
        place: Duration::ZERO,
    };
    serving.pumps.spawn(pump.run(admitted, open));
    receiver
}

/// One request's task.
struct Pump {
    serving: Arc<Serving>,
    events: mpsc::Sender<Event>,
    started: Instant,
    deadline: Instant,
    queue_deadline: Instant,
    /// Cancelled when its key was revoked and it has to end.
    revoked: CancellationToken,
    told: Told,
    /// From the start to its last placement.
    place: Duration,
}

/// What the client has been told.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    /// Whether any event has gone out.
    anything: bool,
    /// Up to the last token that has.
    progress: Progress,
}

/// How a request ended.
#[derive(Debug)]
enum Ended {
    /// Nothing was done that anyone pays for: the hold is given back.
    Free(ApiError),
    /// The tenant pays what was done; then the client hears `event`.
    Paid { usage: Usage, in_worker: InWorker, error: Option<ApiError> },
    /// By our fault, after content went out: the tenant pays up to there.
    Faulted { error: ApiError },
}

impl Pump {
    async fn run(mut self, admitted: Admitted, open: Open) {
        let ended = self.work(&admitted, &open).await;
        let last = self.resolve(admitted, ended);
        open.end();
        // The client may have left; then nobody hears it.
        let _ = tokio::time::timeout_at(self.last_word(), self.events.send(last)).await;
    }

    /// A stalled client gets this long for its last event.
    fn last_word(&self) -> Instant {
        self.deadline.max(Instant::now()) + Duration::from_secs(30)
    }

    /// Waits for a place, then places the request until it ends.
    async fn work(&mut self, admitted: &Admitted, open: &Open) -> Ended {
        if let Err(error) = self.turn(admitted).await {
            return Ended::Free(error);
        }
        let mut unable: Vec<WorkerEpoch> = Vec::new();
        let mut why = ApiError::NoWorker { model: admitted.job.model.name.as_str().to_owned() };
        // A worker that is away is expected back, as long as a place is waited for.
        let mut patience = match self.serving.workers.are_all_there() {
            true => Duration::ZERO,
            false => self.queue_deadline.saturating_duration_since(Instant::now()),
        };
        for number in 0..MOST_ATTEMPTS {
            let Some(placed) =
                self.place(&admitted.job, admitted.expected, &unable, patience).await
            else {
                break;
            };
            let epoch = placed.worker.epoch;
            open.placed(number);
            self.place = self.started.elapsed();
            match self.attempt(admitted, placed, number).await {
                Attempted::Ended(ended) => return ended,
                Attempted::Refused(error) => why = error,
                Attempted::Lost => {
                    // Nothing of it reached anyone: it never happened.
                    self.cap(admitted, number, Usage::default());
                    patience = REPLACE_PATIENCE;
                    why = ApiError::WorkerLost { charged: false };
                    if self.told.anything && self.events.send(Event::Restarted).await.is_err() {
                        break;
                    }
                    self.told = Told::default();
                }
            }
            unable.push(epoch);
        }
        Ended::Free(if self.revoked.is_cancelled() { ApiError::KeyRevoked } else { why })
    }

    /// Waits for a place within the caller's limits.
    async fn turn(&self, admitted: &Admitted) -> Result<(), ApiError> {
        tokio::select! {
            turn = admitted.hold.queue_ticket() => turn.map_err(|QueueTicketLost| ApiError::Overloaded {
                retry_after: Some(Duration::from_secs(1)),
            }),
            () = self.events.closed() => {
                // Taking places in a queue for nothing is no better than on a device.
                self.serving.penalties.cancelled(self.serving.clock.now(), &admitted.caller.tenant);
                Err(ApiError::Internal) // nobody reads it
            }
            () = self.revoked.cancelled() => Err(ApiError::KeyRevoked),
            () = self.serving.stopping.cancelled() => Err(ApiError::Draining),
        }
    }

    async fn place(
        &self,
        job: &Job,
        cost: DeviceNanos,
        unable: &[WorkerEpoch],
        patience: Duration,
    ) -> Option<route::Placed> {
        let workers = &self.serving.workers;
        tokio::select! {
            placed = route::place_within(workers, &job.model, cost, unable, patience) => placed,
            () = self.events.closed() => None,
            () = self.revoked.cancelled() => None,
            () = tokio::time::sleep_until(self.deadline) => None,
        }
    }

    /// Resolves the hold, and makes the last word for the client.
    fn resolve(&self, admitted: Admitted, ended: Ended) -> Event {
        let Admitted { job, caller, hold, .. } = admitted;
        let now = self.serving.clock.now();
        let budget = hold.budget();
        let reserved = admitted.expected;
        let (resolved, event) = match ended {
            Ended::Free(error) => {
                let voided = match hold.void(now) {
                    // Its turn never came, so admission gave it back itself.
                    Err(ResolveError::AlreadySettled(Resolved::Voided)) => {
                        Ok(Settlement::default())
                    }
                    voided => voided,
                };
                (voided, Event::Failed(Failure { error, is_charged: false }))
            }
            Ended::Paid { usage, in_worker, error } => {
                let spent = Spent { tokens: usage.total_tokens(), reference: usage.reference };
                self.serving.metrics.usage(&job.model.name, &job.model.class, &usage);
                if error.is_none() {
                    let tokens = usage.completion_tokens.div_ceil(job.all_choices().max(1));
                    self.serving.expected.learn(&caller.tenant, &job.model.name, tokens);
                }
                let event = match error {
                    Some(error) => Event::Failed(Failure { error, is_charged: true }),
                    None => {
                        let class = job.model.class.clone();
                        let path = Path { in_front: job.in_front, place: self.place, in_worker };
                        self.serving.metrics.path(&path);
                        Event::Finished(Box::new(Receipt { usage, path, class, reserved }))
                    }
                };
                (hold.settle(now, spent), event)
            }
            Ended::Faulted { error } => {
                let usage = self.told_usage(&job);
                self.serving.metrics.usage(&job.model.name, &job.model.class, &usage);
                let spent = Spent { tokens: usage.total_tokens(), reference: usage.reference };
                let failure = Failure { error, is_charged: true };
                (hold.settle(now, spent), Event::Failed(failure))
            }
        };
        match resolved {
            Ok(settlement) if settlement.overrun > DeviceNanos::ZERO => tracing::error!(
                request = %job.id, overrun_ns = settlement.overrun.nanos(), ?budget,
                "a worker exceeded a budget"
            ),
            Ok(_) => {}
            // It expired first: what is spent has been posted late, or nothing was.
            Err(error) => {
                tracing::warn!(request = %job.id, %error, "a hold ended before its request")
            }
        }
        event
    }

    /// Says in the ledger that placement `number` pays `payable` at most; what
    /// it cost beyond that is the platform's loss. The ledger may take its
    /// time: nobody waits for it, and a drain does.
    fn cap(&self, admitted: &Admitted, number: u32, payable: Usage) {
        let cap = FaultCap {
            caller: admitted.caller.clone(),
            attempt: AttemptId { request: admitted.job.id.clone(), attempt: number },
            model: admitted.job.model.name.clone(),
            class: admitted.job.model.class.clone(),
            payable,
            at: self.serving.clock.utc(),
        };
        let books = self.serving.books.clone();
        self.serving.pumps.spawn(async move { books.fault(cap).await });
    }

    /// What was told up to the last token that went out.
    fn told_usage(&self, job: &Job) -> Usage {
        let Progress { tokens, attributed, reference } = self.told.progress;
        Usage {
            prompt_tokens: job.prompt_tokens(),
            cached_tokens: 0,
            completion_tokens: tokens,
            attributed,
            reference,
        }
    }
}

#[cfg(test)]
mod tests;
