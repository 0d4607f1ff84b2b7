//! What serving a request takes, beside the request: built once and shared by
//! handlers and requests' tasks.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_admission::{Admission, ExpectedOutput};
use tollgate_config::{Config, Deadlines};
use tollgate_domain::UtcTime;
use tollgate_ledger::{Health, LedgerHandle};

use crate::Clock;
use crate::api::Counting;
use crate::auth::KeyStore;
use crate::idempotency::Idempotency;
use crate::limits::LateSpend;
use crate::penalties::Penalties;
use crate::pump::InFlight;
use crate::telemetry::Metrics;
use crate::upstream::{Books, WorkerEndpoint, Workers};

/// What it is made of.
pub(crate) struct ServingOptions {
    /// Where the workers listen.
    pub(crate) workers: Vec<WorkerEndpoint>,
    /// Where usage is recorded.
    pub(crate) ledger: LedgerHandle,
    /// The limits; what has been spent is restored before this.
    pub(crate) admission: Admission,
    /// Whose limits, for what was spent and is reported late.
    pub(crate) config: Arc<Config>,
    pub(crate) keys: KeyStore,
    /// The clock of limits and records.
    pub(crate) clock: Clock,
    /// Requests that are sent again.
    pub(crate) idempotency: Idempotency,
    /// A request's deadlines.
    pub(crate) deadlines: Deadlines,
    /// What is counted.
    pub(crate) metrics: Arc<Metrics>,
    /// Cancelled when running requests must end now.
    pub(crate) stopping: CancellationToken,
}

/// The room behind the front door.
pub(crate) struct Serving {
    pub(crate) admission: Admission,
    pub(crate) workers: Workers,
    pub(crate) books: Books,
    pub(crate) clock: Clock,
    pub(crate) idempotency: Idempotency,
    pub(crate) deadlines: Deadlines,
    pub(crate) expected: ExpectedOutput,
    pub(crate) in_flight: InFlight,
    pub(crate) counting: Counting,
    pub(crate) penalties: Penalties,
    pub(crate) metrics: Arc<Metrics>,
    /// The requests' tasks. They end by themselves; a drain waits for them.
    pub(crate) pumps: TaskTracker,
    pub(crate) stopping: CancellationToken,
    /// When it was.
    pub(crate) started: UtcTime,
    /// The workers' keepers, which outlast the requests' tasks.
    keepers: TaskTracker,
    stop_keepers: CancellationToken,
}

impl Serving {
    /// Starts the workers' keepers and the sweeper.
    pub(crate) fn start(options: ServingOptions) -> Arc<Self> {
        let ServingOptions {
            workers,
            ledger,
            admission,
            config,
            keys,
            clock,
            idempotency,
            deadlines,
            metrics,
            stopping,
        } = options;
        let penalties = Penalties::new(&config.gateway().penalties, Arc::clone(&metrics));
        let in_flight = InFlight::default();
        let started = clock.utc();
        let late = Arc::new(LateSpend { admission: admission.clone(), config, keys: keys.clone() });
        let books = Books::new(ledger, in_flight.clone(), clock.clone(), late, stopping.clone());
        let keepers = TaskTracker::new();
        let stop_keepers = CancellationToken::new();
        let workers = Workers::start(workers, &books, &keepers, &stop_keepers);
        let sweeping = Sweeping {
            admission: admission.clone(),
            clock: clock.clone(),
            in_flight: in_flight.clone(),
            penalties: penalties.clone(),
            keys,
        };
        let sweeping = sweeping.run();
        keepers.spawn(stop_keepers.clone().run_until_cancelled_owned(sweeping));
        Arc::new(Self {
            started,
            admission,
            workers,
            books,
            clock,
            idempotency,
            deadlines,
            expected: ExpectedOutput::default(),
            in_flight,
            counting: Counting::new(),
            penalties,
            metrics,
            pumps: TaskTracker::new(),
            stopping,
            keepers,
            stop_keepers,
        })
    }

    /// Whether usage can be recorded; where it cannot, nothing is served.
    pub(crate) fn can_record(&self) -> bool {
        self.books.ledger.health() == Health::Healthy
    }

    /// Waits for the requests' tasks, then a moment for their records, then
    /// ends the keepers. What is not recorded by then stays in the workers'
    /// journals and comes with the next start.
    pub(crate) async fn stop(&self) {
        self.pumps.close();
        self.pumps.wait().await;
        let recorded = async {
            while self.in_flight.len() > 0 && self.workers.online().next().is_some() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let _ = tokio::time::timeout(LAST_RECORDS, recorded).await;
        self.stop_keepers.cancel();
        self.keepers.close();
        self.keepers.wait().await;
    }
}

/// What is swept.
struct Sweeping {
    admission: Admission,
    clock: Clock,
    in_flight: InFlight,
    penalties: Penalties,
    keys: KeyStore,
}

impl Sweeping {
    /// Ends what is overdue, once a second.
    async fn run(self) {
        let Self { admission, clock, in_flight, penalties, keys } = self;
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let swept = admission.expire(clock.now());
            if !swept.expired.is_empty() {
                tracing::error!(holds = swept.expired.len(), "holds expired unresolved");
            }
            in_flight.sweep();
            in_flight.end_revoked(|key| keys.ends_requests(key));
            penalties.sweep(clock.now());
        }
    }
}

/// A block is closed when a request ends, and committed within milliseconds.
const LAST_RECORDS: Duration = Duration::from_secs(2);
