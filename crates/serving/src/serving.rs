//! The components of serving, built once and handed out by the composition root.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_admission::{Admission, Arrival, CapReached, ExpectedOutput};
use tollgate_config::LiveConfig;
use tollgate_domain::{UtcDay, UtcTime};
use tollgate_ledger::caps::Slices;
use tollgate_ledger::{LedgerHandle, ServerAddress, Spending};

use crate::Clock;
use crate::admit::{Admitted, Admitter, JobSource, LineError};
use crate::caps::{CapFigures, Caps};
use crate::error::{Fault, Refusal, RequestError};
use crate::event::Event;
use crate::idempotency::Idempotency;
use crate::in_flight::InFlight;
use crate::job::Job;
use crate::keys::KeyDirectory;
use crate::limits::{CallerContext, Limits};
use crate::observer::Observer;
use crate::penalties::TenantPenalties;
use crate::pump::{OnEnd, RequestTasks, TaskContext};
use crate::rates::{PartFigures, Rates, SharedRates};
use crate::settlement::{ReadThread, Settlement, SettlementOptions};
use crate::tokenize::TokenizePool;
use crate::workers::{WorkerEndpoint, Workers, WorkersOptions};

/// The parts from which [`Serving`] is built.
pub struct ServingOptions {
    /// The addresses of the workers.
    pub workers: Vec<WorkerEndpoint>,
    /// The ledger that records usage.
    pub ledger: LedgerHandle,
    /// The limits' state. Spending must be restored before.
    pub admission: Admission,
    /// The config of tenants, plans and deadlines.
    pub config: LiveConfig,
    /// The API keys.
    pub keys: Arc<dyn KeyDirectory>,
    /// The clock of limits and records.
    pub clock: Clock,
    /// The idempotency keys.
    pub idempotency: Idempotency,
    /// The receiver of figures.
    pub observer: Arc<dyn Observer>,
    /// Cancelled when running requests must end now.
    pub stopping: CancellationToken,
    /// The place of this gateway among those that share its ledger, if it may share it.
    pub shared: Option<SharedLedger>,
    /// The slices of the caps, if several gateways share them. The admission has only slices
    /// then.
    pub caps: Option<SharedCaps>,
    /// The server on which several gateways share rates, if there is one.
    pub rates: Option<SharedRates>,
}

/// The place of a gateway among those that share its ledger, and may share its workers.
#[derive(Clone, Debug)]
pub struct SharedLedger {
    /// The name of the ledger for workers. They serve gateways with one ledger.
    pub name: String,
    /// The number of this start of the gateway, which is in the ids of its requests.
    pub number: u32,
    /// The numbers of the earlier starts in its data folder.
    pub earlier: Vec<u32>,
}

/// A gateway's slices of the caps that several gateways share.
pub struct SharedCaps {
    /// The slices.
    pub slices: Slices,
    /// The spending of the earlier starts that was restored in the admission, and its day.
    pub restored: (UtcDay, Spending),
}

/// The path of a request: [`Self::submit`] takes a known caller and a job and
/// returns events. Each component can be had by itself.
pub struct Serving {
    limits: Limits,
    admitter: Admitter,
    requests: RequestTasks,
    workers: Workers,
    settlement: Settlement,
    clock: Clock,
    idempotency: Idempotency,
    in_flight: InFlight,
    tokenize_pool: TokenizePool,
    penalties: TenantPenalties,
    /// The requests' tasks. They end by themselves; a drain waits for them.
    tasks: TaskTracker,
    started: UtcTime,
    keepers: Keepers,
}

/// The background tasks that outlast the requests' tasks: the workers' keepers and
/// the sweeper.
#[derive(Default)]
struct Keepers {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Keepers {
    /// Runs `task` until the keepers stop.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(task));
    }

    /// Runs the sweeper, and closes what an earlier gateway has left open.
    fn start(&self, settlement: Settlement, workers: &Workers, sweeper: Sweeper) {
        let workers = workers.clone();
        // In the background: the ledger may be slow, and requests need not wait for it.
        self.spawn(async move {
            settlement.close_left_open().await;
            // Another gateway may still be recording what an earlier start of this one has left.
            if settlement.is_shared() {
                workers.settled().await;
                settlement.close_left_open().await;
            }
        });
        self.spawn(sweeper.run());
    }

    /// Runs the task that shares the rates of `limits` with other gateways.
    fn share_rates(&self, rates: SharedRates, limits: &Limits, clock: &Clock) -> Rates {
        let (rates, task) = Rates::new(rates, limits.admission(), clock);
        self.spawn(task);
        rates
    }

    async fn stop(&self) {
        self.stop.cancel();
        // A tracker that is not closed never finishes its wait.
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Serving {
    /// Starts the workers' keepers and the sweeper.
    pub fn start(options: ServingOptions) -> Arc<Self> {
        let ServingOptions {
            workers,
            ledger,
            admission,
            config,
            keys,
            clock,
            idempotency,
            observer,
            stopping,
            shared,
            caps,
            rates,
        } = options;
        let current = config.current();
        let penalties = TenantPenalties::new(&current.gateway().penalties, Arc::clone(&observer));
        let in_flight = InFlight::default();
        let limits = Limits::new(admission, config, Arc::clone(&keys));
        let settlement = Settlement::new(SettlementOptions {
            ledger,
            in_flight: in_flight.clone(),
            clock: clock.clone(),
            limits: limits.clone(),
            observer: Arc::clone(&observer),
            stopping: stopping.clone(),
            reads: ReadThread::Blocking,
            number: shared.as_ref().map(|shared| shared.number),
        });
        let keepers = Keepers::default();
        let workers = WorkersOptions { endpoints: workers, config: current.worker(), shared };
        let workers = Workers::start(workers, &settlement, &keepers.tasks, &keepers.stop);
        let sweeper = Sweeper {
            limits: limits.clone(),
            clock: clock.clone(),
            in_flight: in_flight.clone(),
            penalties: penalties.clone(),
            keys,
            observer: Arc::clone(&observer),
        };
        keepers.start(settlement.clone(), &workers, sweeper);
        // Shared: tasks learn from answers, and admission estimates by them.
        let (expected, tasks) = (Arc::new(ExpectedOutput::default()), TaskTracker::new());
        let requests = RequestTasks::new(TaskContext {
            workers: workers.clone(),
            settlement: settlement.clone(),
            in_flight: in_flight.clone(),
            penalties: penalties.clone(),
            observer,
            expected: Arc::clone(&expected),
            clock: clock.clone(),
            tasks: tasks.clone(),
            stopping,
        });
        let caps = caps.map(|own| Caps::start(own, (&limits, &clock), &settlement, &workers));
        let rates = rates.map(|rates| keepers.share_rates(rates, &limits, &clock));
        let admitter = Admitter::new((&limits, &clock), expected, caps, rates);
        Arc::new(Self {
            limits,
            admitter,
            requests,
            workers,
            settlement,
            started: clock.utc(),
            clock,
            idempotency,
            in_flight,
            tokenize_pool: TokenizePool::new(),
            penalties,
            tasks,
            keepers,
        })
    }

    /// Takes the limits of `context`'s caller for `job`, runs the job, and returns
    /// its events. The client leaves by dropping the receiver; the job's task then
    /// cancels the work and settles.
    ///
    /// # Errors
    /// The limit that refused the job.
    pub async fn submit(
        &self,
        context: &CallerContext,
        job: Job,
    ) -> Result<mpsc::Receiver<Event>, RequestError> {
        let arrival = self.arrive(context).await?;
        let admitted = self.admit(context, arrival, job).await?;
        Ok(self.run(admitted, Box::new(|_| ())))
    }

    /// Takes a place to run or to wait for a request of `context`'s caller that is still
    /// arriving. Waits for the Redis server if this gateway lacks parts of the places.
    ///
    /// # Errors
    /// [`Refusal::Limit`]: one of the caller's scopes is full.
    pub async fn arrive(&self, context: &CallerContext) -> Result<Arrival, Refusal> {
        self.admitter.arrive(context).await
    }

    /// Takes the limits of `context`'s caller for `job`, which has arrived in the
    /// place of `arrival`. This is the first half of [`Self::submit`], for a caller
    /// that has work to do before the job runs.
    ///
    /// # Errors
    /// The limit that refused the job.
    pub async fn admit(
        &self,
        context: &CallerContext,
        arrival: Arrival,
        job: Job,
    ) -> Result<Admitted, RequestError> {
        let id = job.id.clone();
        let admitted = self.admitter.admit(context, JobSource::Request(arrival), job).await;
        admitted.map_err(|error| match error {
            LineError::Refused(error) => error,
            LineError::IdKnown => {
                tracing::error!(request = %id, "request id came twice; the second request is refused");
                Fault::Internal.into()
            }
        })
    }

    /// Takes the caps of `context`'s caller for a line of a batch, which may take `time`
    /// from now on. The line is placed at most once.
    ///
    /// # Errors
    /// The limit that refused the line, or its request id is known.
    pub async fn admit_line(
        &self,
        context: &CallerContext,
        job: Job,
        time: Duration,
    ) -> Result<Admitted, LineError> {
        self.admitter.admit(context, JobSource::Line(time), job).await
    }

    /// Runs an admitted job and returns its events: the second half of
    /// [`Self::submit`]. `on_end` takes the figures before the last event goes out.
    pub fn run(&self, admitted: Admitted, on_end: OnEnd) -> mpsc::Receiver<Event> {
        self.run_until_abandoned(admitted, CancellationToken::new(), on_end)
    }

    /// Runs an admitted job like [`Self::run`], for a caller that keeps the answer
    /// after its client has left. Once `abandoned` is cancelled, the job ends without
    /// cost if it has no place at a worker, and runs to its end if it has one.
    pub fn run_until_abandoned(
        &self,
        admitted: Admitted,
        abandoned: CancellationToken,
        on_end: OnEnd,
    ) -> mpsc::Receiver<Event> {
        self.requests.start(admitted, abandoned, on_end)
    }

    /// Gives the limits of an admitted job back, because the job does not run.
    pub fn give_back(&self, admitted: Admitted) {
        self.admitter.give_back(admitted);
    }

    /// Returns the limits of all tenants.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Counts a request that the check of its head has not counted, because this gateway lacks
    /// parts of its caller's rates. Waits for the Redis server if needed. Does nothing for other requests.
    ///
    /// # Errors
    /// The rate that is spent.
    pub async fn count(&self, context: &CallerContext) -> Result<(), Refusal> {
        match context.is_counted() {
            true => Ok(()),
            false => self.admitter.count(context).await,
        }
    }

    /// Returns the work for parts of rates; `None` where they do not move between gateways.
    pub fn part_figures(&self) -> Option<PartFigures> {
        self.admitter.rates.as_ref().map(Rates::figures)
    }

    /// Returns the work for slices of caps; zeros where no other gateway shares them.
    pub fn cap_figures(&self) -> CapFigures {
        self.admitter.caps.as_ref().map(Caps::figures).unwrap_or_default()
    }

    /// Returns the address of the server that has the slices of caps, if gateways share them.
    pub(crate) fn caps_address(&self) -> Option<ServerAddress> {
        self.admitter.caps.as_ref().map(|caps| caps.address.clone())
    }

    /// Returns the configured workers.
    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Returns the settlement of journals and corrections.
    pub fn settlement(&self) -> &Settlement {
        &self.settlement
    }

    /// Returns the ledger's handle.
    pub fn ledger(&self) -> &LedgerHandle {
        self.settlement.ledger()
    }

    /// Returns the clock of limits and records.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the idempotency keys.
    pub fn idempotency(&self) -> &Idempotency {
        &self.idempotency
    }

    /// Returns the requests that run or have just ended.
    pub fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

    /// Returns the pool that tokenizes prompts.
    pub fn tokenize_pool(&self) -> &TokenizePool {
        &self.tokenize_pool
    }

    /// Returns the tenants' penalties.
    pub fn penalties(&self) -> &TenantPenalties {
        &self.penalties
    }

    /// Returns the tracker of the requests' tasks. A task that keeps a request's
    /// answer belongs there too, so that a drain waits for it.
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Returns the time at which serving started.
    pub fn started(&self) -> UtcTime {
        self.started
    }

    /// Returns true while usage is recorded at once.
    pub fn can_record(&self) -> bool {
        self.settlement.can_record()
    }

    /// Returns true if work that must be billed may begin, as [`Settlement::may_begin_work`].
    pub fn may_begin_work(&self) -> bool {
        self.settlement.may_begin_work()
    }

    /// Waits for the requests' tasks, then a moment for their records, then ends
    /// the keepers. Records that are missing by then stay in the workers' journals
    /// and come with the next start.
    pub async fn stop(&self) {
        // A task posts fault caps on the same tracker, so the wait covers them too.
        self.tasks.close();
        self.tasks.wait().await;
        let recorded = async {
            // Without a worker no record can come.
            while !self.in_flight.is_empty() && self.workers.connected().next().is_some() {
                tokio::time::sleep(RECORD_POLL).await;
            }
        };
        let _ = tokio::time::timeout(LAST_RECORDS, recorded).await;
        // Before the keepers, which run its task.
        if let Some(rates) = &self.admitter.rates {
            rates.stop().await;
        }
        // Keepers post the last blocks, so they end after all requests.
        self.keepers.stop().await;
        if let Some(caps) = &self.admitter.caps {
            caps.stop().await;
        }
    }
}

/// The task that ends overdue holds, requests and penalties.
struct Sweeper {
    limits: Limits,
    clock: Clock,
    in_flight: InFlight,
    penalties: TenantPenalties,
    keys: Arc<dyn KeyDirectory>,
    observer: Arc<dyn Observer>,
}

impl Sweeper {
    async fn run(self) {
        let mut ticks = tokio::time::interval(SWEEP_PERIOD);
        // After a pause of the process one sweep is enough.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let swept = self.limits.admission().expire(self.clock.now());
            // A hold outlives its request's deadline, so an expired one is a bug.
            if !swept.expired.is_empty() {
                tracing::error!(
                    holds = swept.expired.len(),
                    "holds expired before their requests ended; the requests settle late"
                );
            }
            for reached in &swept.reached {
                self.report(reached);
            }
            self.in_flight.sweep();
            self.in_flight.end_revoked(|key| self.keys.ends_requests(key));
            self.penalties.sweep(self.clock.now());
        }
    }
}

impl Sweeper {
    /// Logs and counts a threshold of a cap.
    fn report(&self, reached: &CapReached) {
        let CapReached { limit, scope, class, percent } = reached;
        let (limit, class) = (limit.as_str(), class.as_ref().map(tracing::field::display));
        if *percent < 100 {
            tracing::info!(%scope, limit, class, percent, "a part of a cap is spent");
        } else {
            tracing::warn!(%scope, limit, class, percent, "cap is spent; requests are refused until its period ends");
        }
        self.observer.cap_reached(reached);
    }
}

/// Time between two sweeps.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Time that the last records may take at shutdown. A worker closes its block
/// when a request ends, and the ledger commits within milliseconds.
const LAST_RECORDS: Duration = Duration::from_secs(2);

/// Time between two looks for the last records.
const RECORD_POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
