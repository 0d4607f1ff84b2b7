//! One task for each request, from admission to the bill. The task owns the
//! request's hold and its worker's stream, and outlives the client.
//!
//! Whatever happens to the client, the worker or the clock, the task ends by
//! resolving the hold exactly once. The hold is settled with the true figure,
//! or with the figure up to the last delivered token before a fault, or voided
//! if no work was done. When the client leaves, the task cancels the work,
//! waits for the figure and settles. The last event goes out after the hold is resolved,
//! so a client's next request finds its place free.

mod attempt;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_admission::{
    ExpectedOutput, Hold, QueueTicketLost, ResolveError, Resolved, Settlement as SettledHold, Spent,
};
use tollgate_domain::block::Attempt as AttemptId;
use tollgate_domain::{DeviceNanos, Tier, UnitPrices, Usage, WorkerEpoch};
use tollgate_ledger::FaultCap;

use self::attempt::AttemptOutcome;
use crate::Clock;
use crate::admit::Admitted;
use crate::error::{Fault, FullQueue, Refusal, RequestError};
use crate::event::{Event, Failure, Receipt};
use crate::in_flight::{InFlight, InFlightTask};
use crate::job::Job;
use crate::observer::Observer;
use crate::penalties::TenantPenalties;
use crate::route;
use crate::settlement::Settlement;
use crate::timings::{RequestTimings, WorkerTimings};
use crate::workers::{Progress, Workers};

/// Events of a request that its client has not taken yet.
const UNREAD_EVENTS: usize = 32;
/// Time that a request waits for another worker after its worker died.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time after the deadline in which a slow client may take its last event.
const LAST_EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// The component that runs admitted requests. Clones share its tasks.
#[derive(Clone)]
pub(crate) struct RequestTasks {
    shared: Arc<TaskContext>,
}

/// The components that every request's task uses.
pub(crate) struct TaskContext {
    pub(crate) workers: Workers,
    pub(crate) settlement: Settlement,
    pub(crate) in_flight: InFlight,
    pub(crate) penalties: TenantPenalties,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) expected: Arc<ExpectedOutput>,
    pub(crate) clock: Clock,
    /// Holds the tasks of requests, so that a drain can wait for them.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when running requests must end now.
    pub(crate) stopping: CancellationToken,
}

impl RequestTasks {
    pub(crate) fn new(context: TaskContext) -> Self {
        Self { shared: Arc::new(context) }
    }

    /// Starts the task of an admitted request and returns the request's events.
    /// The client leaves by dropping the receiver. Once `abandoned` is cancelled, the
    /// request ends if it has no place at a worker, and goes on if it has one.
    #[expect(
        clippy::disallowed_methods,
        reason = "the task's deadlines are on the runtime's clock"
    )]
    pub(crate) fn start(
        &self,
        admitted: Admitted,
        abandoned: CancellationToken,
        on_end: OnEnd,
    ) -> mpsc::Receiver<Event> {
        // Bounded: a client that does not read slows its own request down.
        let (events, receiver) = mpsc::channel(UNREAD_EVENTS);
        let context = Arc::clone(&self.shared);
        // Before the task is spawned, so that a query of the usage finds the request from the
        // start.
        let entry = context.in_flight.begin(admitted.job.id.clone(), admitted.caller.clone());
        let now = Instant::now();
        let task = RequestTask {
            events,
            started: now,
            deadline: now + admitted.deadlines.request,
            queue_deadline: now + admitted.deadlines.queue,
            revoked: entry.revoked(),
            abandoned,
            delivered: Delivered::default(),
            has_first_token: false,
            place: Duration::ZERO,
            on_end: Some(on_end),
            context,
        };
        self.shared.tasks.spawn(task.run(admitted, entry));
        receiver
    }
}

/// A receiver of the figures of one request's end. It is called once, from the request's
/// task, and must not block. A task that panics drops it uncalled.
pub type OnEnd = Box<dyn FnOnce(&RequestEnded<'_>) + Send + Sync>;

/// The figures of the end of an admitted request.
#[derive(Debug)]
pub struct RequestEnded<'a> {
    /// The job.
    pub job: &'a Job,
    /// The failure, if the request was not answered whole.
    pub failure: Option<&'a Failure>,
    /// True if the client left before the end.
    pub client_left: bool,
    /// True if a part of a streamed answer went out.
    pub answer_began: bool,
    /// The tokens and the device time that count against the tenant's limits.
    pub usage: Usage,
    /// The time in each stage; zero for stages that did not begin.
    pub timings: RequestTimings,
}

/// The task of one request.
struct RequestTask {
    context: Arc<TaskContext>,
    events: mpsc::Sender<Event>,
    started: Instant,
    deadline: Instant,
    queue_deadline: Instant,
    /// Cancelled when the request's key was revoked and the request must end.
    revoked: CancellationToken,
    /// Cancelled when no client waits for the answer of a request that would be kept.
    abandoned: CancellationToken,
    delivered: Delivered,
    /// True once a token has gone out, also one of a placement that was lost.
    has_first_token: bool,
    /// Time from the start to the last placement.
    place: Duration,
    /// Takes the figures of the request's end, once.
    on_end: Option<OnEnd>,
}

/// The part of the answer that has gone out to the client.
#[derive(Clone, Copy, Debug, Default)]
struct Delivered {
    /// True if any event has gone out.
    any: bool,
    /// The figures up to the last token that has gone out.
    progress: Progress,
}

/// The end of a request.
#[derive(Debug)]
enum RequestEnd {
    /// No billable work was done: the hold is given back.
    Free(RequestError),
    /// The worker refused the form of the answer after it had worked on it: the tenant's
    /// limits pay that time of the host.
    FormRefused { error: RequestError, grammar_time: Duration },
    /// The tenant pays the work that was done.
    Paid { usage: Usage, timings: WorkerTimings, error: Option<RequestError> },
    /// The platform failed after content went out: the tenant pays up to there.
    Faulted { error: RequestError },
}

impl RequestTask {
    #[expect(
        clippy::disallowed_methods,
        reason = "the task's deadlines are on the runtime's clock"
    )]
    async fn run(mut self, admitted: Admitted, entry: InFlightTask) {
        let end = self.work(&admitted, &entry).await;
        let last = self.resolve(admitted, end);
        // After the hold is resolved: a usage query then waits for the record.
        entry.end();
        // The client may have left; then the last event goes nowhere. A client that
        // does not read must not keep the task for ever.
        let until = self.deadline.max(Instant::now()) + LAST_EVENT_TIMEOUT;
        let _ = tokio::time::timeout_at(until, self.events.send(last)).await;
    }

    /// Waits for a place, then places the request until the request ends.
    #[expect(
        clippy::disallowed_methods,
        reason = "the task's deadlines are on the runtime's clock"
    )]
    async fn work(&mut self, admitted: &Admitted, entry: &InFlightTask) -> RequestEnd {
        if let Err(error) = self.wait_for_turn(admitted).await {
            return RequestEnd::Free(error);
        }
        let mut excluded: Vec<WorkerEpoch> = Vec::new();
        // The client reads this if no worker is found at all.
        let mut error: RequestError = self.unplaced(&admitted.job).into();
        // A disconnected worker may be back within a second, and a place for batch work
        // may become free, so the request waits as long as it may wait in a queue.
        let waits = admitted.job.tier == Tier::Batch || !self.context.workers.all_connected();
        let mut timeout = match waits {
            false => Duration::ZERO,
            true => self.queue_deadline.saturating_duration_since(Instant::now()),
        };
        for number in 0..admitted.placements {
            let placed = match self.place(admitted, &excluded, timeout).await {
                Ok(Some(placed)) => placed,
                Ok(None) => break,
                Err(error) => return RequestEnd::Free(error),
            };
            let epoch = placed.worker.identity.epoch;
            // Noted before the worker can journal the attempt.
            entry.placed(number);
            self.place = self.started.elapsed();
            match self.attempt(admitted, placed, number).await {
                AttemptOutcome::Ended(end) => return end,
                AttemptOutcome::Refused(refusal) => error = refusal,
                AttemptOutcome::Lost => {
                    // No token of the attempt counts for the client, so no tenant pays it.
                    self.cap(admitted, number, Usage::default());
                    timeout = REPLACE_TIMEOUT;
                    error = Fault::WorkerLost { charged: false }.into();
                    // Only the reader of an answer in one piece gets here; it drops the
                    // events it has.
                    if self.delivered.any && self.events.send(Event::Restarted).await.is_err() {
                        break;
                    }
                    self.delivered = Delivered::default();
                }
            }
            // A worker that refused or was lost is not asked again in this epoch.
            excluded.push(epoch);
        }
        RequestEnd::Free(error)
    }

    /// Returns the refusal of a job that finds no worker.
    fn unplaced(&self, job: &Job) -> Refusal {
        let model = job.model.name.as_str();
        let is_served = !self.context.workers.serving(model).is_empty();
        match job.tier {
            // The places for batch work in the queues of all workers are taken.
            Tier::Batch if is_served => Refusal::Overloaded {
                full: FullQueue::Workers,
                retry_after: Some(Duration::from_secs(1)),
            },
            _ => Refusal::NoWorker { model: model.to_owned() },
        }
    }

    /// Waits for a place within the caller's limits.
    async fn wait_for_turn(&self, admitted: &Admitted) -> Result<(), RequestError> {
        let context = &self.context;
        tokio::select! {
            ticket = admitted.hold.queue_ticket() => ticket.map_err(|lost| match lost {
                QueueTicketLost::Ended => {
                    let retry_after = Some(Duration::from_secs(1));
                    Refusal::Overloaded { full: FullQueue::Workers, retry_after }.into()
                }
                QueueTicketLost::GaveWay(refusal) => Refusal::Limit(refusal).into(),
            }),
            // The client has left, so the error is not read.
            () = self.unwanted() => Err(RequestError::INTERNAL),
            () = self.revoked.cancelled() => Err(Refusal::KeyRevoked.into()),
            () = context.stopping.cancelled() => Err(Refusal::Draining.into()),
        }
    }

    /// Waits up to `timeout` for a place at a worker. Returns `None` if none came, or if the
    /// client has left.
    async fn place(
        &self,
        admitted: &Admitted,
        excluded: &[WorkerEpoch],
        timeout: Duration,
    ) -> Result<Option<route::Placed>, RequestError> {
        let (workers, job) = (&self.context.workers, &admitted.job);
        let placed = route::place_within(workers, job, admitted.expected, excluded, timeout);
        tokio::select! {
            // In this order, so that no worker gets the prompt of a client that has left.
            biased;
            () = self.unwanted() => Ok(None),
            () = self.revoked.cancelled() => Err(Refusal::KeyRevoked.into()),
            () = self.context.stopping.cancelled() => Err(Refusal::Draining.into()),
            // Before the deadline: both may be due at once, and the reason for the wait says more.
            placed = placed => Ok(placed),
            () = tokio::time::sleep_until(self.deadline) => {
                Err(Refusal::DeadlineExceeded { deadline: admitted.deadlines.request }.into())
            }
        }
    }

    /// Waits until no client wants a request that has no place at a worker.
    async fn unwanted(&self) {
        tokio::select! {
            () = self.events.closed() => {}
            () = self.abandoned.cancelled() => {}
        }
    }

    /// Resolves the hold and returns the last event for the client.
    fn resolve(&mut self, admitted: Admitted, end: RequestEnd) -> Event {
        let Admitted { job, caller, hold, expected, prices, .. } = admitted;
        let budget = hold.budget();
        let failed = |error, is_charged| Event::Failed(Failure { error, is_charged });
        let (resolved, figures, event) = match end {
            RequestEnd::Free(error) => (self.void(hold), Default::default(), failed(error, false)),
            RequestEnd::FormRefused { error, grammar_time } => {
                let resolved = hold.void_form(self.context.clock.now(), grammar_time);
                let timings =
                    WorkerTimings { grammar: Some(grammar_time), ..WorkerTimings::default() };
                (resolved, (Usage::default(), timings), failed(error, false))
            }
            RequestEnd::Paid { usage, timings, error } => {
                let grammar_time = timings.grammar.unwrap_or_default();
                let resolved = self.settle(&job, (hold, grammar_time), &usage, &prices);
                let event = match error {
                    Some(error) => failed(error, true),
                    None => {
                        let receipt = self.receipt(&job, usage, timings, expected);
                        // Only whole answers teach the estimate: others were cut short.
                        let tokens = usage.completion_tokens.div_ceil(job.all_choices().max(1));
                        self.context.expected.learn(&caller.tenant, &job.model.name, tokens);
                        Event::Finished(Box::new(receipt))
                    }
                };
                (resolved, (usage, timings), event)
            }
            RequestEnd::Faulted { error } => {
                let usage = self.delivered_usage(&job);
                // Only what went out is paid, so no grammar time either.
                let resolved = self.settle(&job, (hold, Duration::ZERO), &usage, &prices);
                (resolved, (usage, WorkerTimings::default()), failed(error, true))
            }
        };
        match resolved {
            Ok(settled) if settled.overrun > DeviceNanos::ZERO => tracing::error!(
                request = %job.id, overrun_ns = settled.overrun.nanos(), ?budget,
                "worker exceeded a budget; the tenant's limits are overdrawn"
            ),
            Ok(_) => {}
            // The hold expired first. Admission has posted the spending late, if any.
            Err(error) => {
                tracing::warn!(request = %job.id, %error, "hold ended before its request; the figure came late");
            }
        }
        self.report(&job, figures, &event);
        event
    }

    /// Reports the end of the request before its last event goes out, so that a client
    /// that has the whole answer finds it counted.
    fn report(&mut self, job: &Job, (usage, worker): (Usage, WorkerTimings), last: &Event) {
        let failure = match last {
            Event::Failed(failure) => Some(failure),
            _ => None,
        };
        let ended = RequestEnded {
            job,
            failure,
            client_left: failure.is_some()
                && (self.events.is_closed() || self.abandoned.is_cancelled()),
            answer_began: job.is_streamed() && self.delivered.any,
            usage,
            timings: RequestTimings { front: job.timings, place: self.place, worker },
        };
        if let Some(on_end) = self.on_end.take() {
            on_end(&ended);
        }
    }

    fn void(&self, hold: Hold) -> Result<SettledHold, ResolveError> {
        match hold.void(self.context.clock.now()) {
            // The request's turn never came, so admission gave the hold back itself.
            Err(ResolveError::AlreadySettled(Resolved::Voided)) => Ok(SettledHold::default()),
            voided => voided,
        }
    }

    fn settle(
        &self,
        job: &Job,
        (hold, grammar_time): (Hold, Duration),
        usage: &Usage,
        prices: &UnitPrices,
    ) -> Result<SettledHold, ResolveError> {
        self.context.observer.usage(&job.model.name, &job.model.class, usage);
        let spent = Spent {
            tokens: usage.total_tokens(),
            reference: usage.reference,
            money: prices.exact_cost(usage.priced()),
            grammar_time,
        };
        hold.settle(self.context.clock.now(), spent)
    }

    /// Makes the receipt of an answered request and reports its timings.
    fn receipt(
        &self,
        job: &Job,
        usage: Usage,
        worker: WorkerTimings,
        reserved: DeviceNanos,
    ) -> Receipt {
        let timings = RequestTimings { front: job.timings, place: self.place, worker };
        self.context.observer.timings(&timings);
        Receipt { usage, timings, class: job.model.class.clone(), reserved }
    }

    /// Posts in the ledger that placement `number` pays `payable` at most. Costs
    /// beyond that are the platform's loss.
    fn cap(&self, admitted: &Admitted, number: u32, payable: Usage) {
        let cap = FaultCap {
            caller: admitted.caller.clone(),
            attempt: AttemptId { request: admitted.job.id.clone(), attempt: number },
            model: admitted.job.model.name.clone(),
            class: admitted.job.model.class.clone(),
            payable,
            at: self.context.clock.utc(),
            tier: admitted.job.tier,
        };
        let settlement = self.context.settlement.clone();
        // The ledger may take its time. The client does not wait for it; a drain does.
        self.context.tasks.spawn(async move { settlement.cap_fault(cap).await });
    }

    /// Returns the usage up to the last token that went out.
    fn delivered_usage(&self, job: &Job) -> Usage {
        let Progress { tokens, attributed, reference } = self.delivered.progress;
        Usage {
            prompt_tokens: job.prompt_tokens(),
            // The worker tells cached tokens only in its last event, which may not have come.
            cached_tokens: 0,
            completion_tokens: tokens,
            attributed,
            reference,
        }
    }
}
