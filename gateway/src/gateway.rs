//! The composition root: it builds every part of the gateway once, in order,
//! and runs the service until shutdown.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_admission::{Admission, AdmissionOptions};
use tollgate_config::{Config, LiveConfig};
use tollgate_domain::{UtcDay, WorkerName};
use tollgate_edge::listener::{ListenerMetrics, ListenerStop};
use tollgate_edge::tls::{TlsError, TlsIdentity, TlsSource};
use tollgate_edge::{Listener, ListenerOptions};
use tollgate_jobs::{
    DispatchOptions, Dispatcher, JobError, JobLimits, Jobs, JobsOptions, JobsPlace, SpentByBatches,
};
use tollgate_ledger::caps::{Home, Slices};
use tollgate_ledger::gateways::{Membership, MembershipError};
use tollgate_ledger::idempotency::IdempotencyStore;
use tollgate_ledger::{LedgerError, LedgerHandle, Spending, WalRewriter};
use tollgate_rates::{RateServer, RateServerError, RedisAddress};
use tollgate_serving::idempotency::{Idempotency, IdempotencyStoreError};
use tollgate_serving::limits::Limits;
use tollgate_serving::rates::SharedRates;
use tollgate_serving::workers::{WorkerEndpoint, WorkerReport};
use tollgate_serving::{
    BatchSpend, KeyDirectory, Serving, ServingOptions, SharedCaps, SharedLedger,
};

use crate::access_log::AccessLog;
use crate::admin::{
    AdminKey, AdminKeyError, AdminRoutes, AdminState, LiveState, Neighbours, Readiness,
};
use crate::api::Api;
use crate::api::jobs::{JobsApi, Lines};
use crate::auth::{Authenticator, IssuerError, IssuerOptions, KeyStore};
use crate::client_ids::ClientIdTable;
use crate::connection_owners::OwnerNumbers;
use crate::cors::Cors;
use crate::doors::{Doors, LargestBody, RequestDoors, admin_listener};
use crate::members::{Divided, Peers, Watched};
use crate::observer::GatewayObserver;
use crate::raises::{self, RaiseFileError};
use crate::reload::{ReloadParts, Reloader};
use crate::routes::PublicRoutes;
use crate::source_penalties::SourcePenalties;
use crate::stack::{Stack, StackOptions};
use crate::telemetry::Metrics;
use crate::webhook::{WebhookService, webhook};
use crate::{Clock, admin_certificate, audit, edge_options, members, retirement};

/// The inputs of a gateway.
pub struct GatewayOptions {
    /// The checked config; it also names the addresses to listen on.
    pub config: Arc<Config>,
    /// The data folder. The caller holds its lock.
    pub data: PathBuf,
    /// The sockets of the workers.
    pub workers: Vec<WorkerEndpoint>,
    /// The ledger that records usage.
    pub ledger: LedgerHandle,
    /// The store of API keys.
    pub keys: KeyStore,
    /// The clock for limits and records.
    pub clock: Clock,
    /// The gateway's slices of caps on a database server that several gateways share; `None`
    /// where ledger and keys are files. The ledger counts charges for their data folder.
    pub slices: Option<Slices>,
    /// The server on which the gateways of one database server share rates; `None` if each has an
    /// equal part of them.
    pub redis: Option<RedisAddress>,
}

/// An error that keeps a gateway from starting.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// No certificate is usable.
    #[error("cannot use the certificate")]
    Tls(#[from] TlsError),
    /// No admin key is usable.
    #[error(transparent)]
    AdminKey(#[from] AdminKeyError),
    /// The certificate cannot be written where commands of this host look for it.
    #[error("cannot write {}", path.display())]
    PublishCertificate {
        /// The file in the data folder.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: std::io::Error,
    },
    /// The file of raised limits cannot be used.
    #[error(transparent)]
    Raises(#[from] RaiseFileError),
    /// A token issuer cannot be used.
    #[error("cannot use a token issuer")]
    Issuer(#[from] IssuerError),
    /// The ledger does not give the spending of this day and month.
    #[error("cannot read from the ledger what tenants have spent")]
    Spending(#[source] LedgerError),
    /// Files and batches cannot be opened.
    #[error("cannot open the files and batches")]
    Jobs(#[from] JobError),
    /// The gateway cannot join those that share its database server.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The Redis server cannot be used as it is.
    #[error("cannot share rates and places with other gateways")]
    Rates(#[from] RateServerError),
    /// The records of idempotency keys cannot be read.
    #[error(transparent)]
    Idempotency(#[from] IdempotencyStoreError),
    /// An address cannot be bound.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address of the config.
        address: SocketAddr,
        /// The cause: the address is in use, or belongs to another machine.
        #[source]
        source: std::io::Error,
    },
}

/// The two requests to stop a gateway.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Cancelled to drain: new requests are refused, running ones go on.
    pub drain: CancellationToken,
    /// Cancelled to cut the requests that still run.
    pub now: CancellationToken,
}

/// A handle for reading the state of a running gateway.
#[derive(Clone)]
pub struct Gateway {
    state: Arc<AdminState>,
}

/// A gateway with bound sockets; [`Self::run`] serves on them.
pub struct GatewayService {
    state: Arc<AdminState>,
    authenticator: Authenticator,
    doors: RequestDoors,
    live: LiveConfig,
    access_log: AccessLog,
    aside: Aside,
    public: Bound,
    admin: Bound,
    /// Cancelled when running requests must end at once.
    stopping: CancellationToken,
}

/// The parts of a gateway that run beside the requests.
struct Aside {
    webhook: WebhookService,
    /// The gateway's place among those that share its server; `None` if its keys are a file.
    membership: Option<Membership>,
}

/// A listener and its address.
struct Bound {
    listener: Listener,
    address: SocketAddr,
}

impl GatewayService {
    /// Builds everything and binds both addresses; connections wait in the
    /// kernel until [`Self::run`].
    ///
    /// # Errors
    /// A part cannot be built: certificate, admin key, token issuers, the
    /// spending in the ledger, a listening address.
    pub async fn bind(options: GatewayOptions) -> Result<Self, GatewayError> {
        let GatewayOptions { config, data, workers, ledger, keys, clock, slices, redis } = options;
        let (metrics, raises) = (Metrics::new(clock.clone()), raises::read(&data)?);
        // With the time, so that a raise that ended while the gateway was down is left out.
        let config = Arc::new(raises::apply(&config, &raises, clock.utc()));
        let tls = load_certificate(&config, &data)?;
        // Before the workers, so that a start without a key does no work.
        let admin_key = AdminKey::load(&data)?;
        let authenticator = Authenticator::new(keys, issuers(&config))?;
        let admission = Admission::new(AdmissionOptions::default());
        let key_directory: Arc<dyn KeyDirectory> = Arc::new(authenticator.keys().clone());
        let live = LiveConfig::new(Arc::clone(&config));
        let limits = Limits::new(admission.clone(), live.clone(), Arc::clone(&key_directory));
        let (peers, shared) = (Peers::new(clock.clone()), slices.as_ref());
        let jobs = open_jobs(&config, &data, shared, &peers).await?;
        let (home, neighbours) = (shared.map(Slices::home), shared.map(Neighbours::of));
        let (spending, restored) = start_limits(&limits, &ledger, (&jobs, home), &clock).await?;
        let idempotency = open_idempotency(&config, &data, (shared, &ledger), &clock).await?;
        let jobs = JobsApi::new(jobs, peers, config.gateway().jobs.folder.is_some());
        // Bound before workers are connected, so that a port in use is found
        // before any work begins.
        let (public, admin) = bind_both(&config, &tls, &metrics)?;
        let divided = Divided { limits: &limits, jobs: &jobs, now: clock.now() };
        let own = (public.address, home, shareable(&workers));
        let (membership, rates) = join(authenticator.keys(), own, divided, redis).await?;
        let (stopping, draining) = (CancellationToken::new(), CancellationToken::new());
        let (events, webhook) = webhook(live.clone(), clock.clone(), Arc::clone(&metrics));
        let serving = Serving::start(ServingOptions {
            workers,
            ledger,
            admission,
            config: live.clone(),
            keys: key_directory,
            clock,
            idempotency,
            observer: Arc::new(GatewayObserver::new(&metrics, events)),
            stopping: stopping.clone(),
            shared: membership.as_ref().map(|it| shared_ledger(&authenticator, it)),
            caps: slices.map(|slices| SharedCaps { slices, restored }),
            rates,
        });
        let penalties = SourcePenalties::new(&config.gateway().penalties, Arc::clone(&metrics));
        let doors = RequestDoors::new(config.gateway());
        let access_log = AccessLog::new(live.clone(), serving.clock().clone());
        let reloader = Reloader::new(ReloadParts {
            config: live.clone(),
            data,
            serving: Arc::clone(&serving),
            jobs: jobs.jobs.clone(),
            spending,
            source_penalties: penalties.clone(),
            authenticator: authenticator.clone(),
            tls,
            metrics: Arc::clone(&metrics),
            doors: doors_of(&public, &admin, &doors),
            raises: ArcSwap::from_pointee(raises),
        });
        let state = Arc::new(AdminState {
            key: admin_key,
            neighbours,
            keys: authenticator.keys().clone(),
            serving,
            reloader,
            source_penalties: penalties,
            metrics,
            bodies: doors.bodies.clone(),
            jobs,
            live: LiveState::new(),
            draining,
            closing: CancellationToken::new(),
        });
        let aside = Aside { webhook, membership };
        Ok(Self { state, authenticator, doors, live, access_log, aside, public, admin, stopping })
    }

    /// Returns the address of the API.
    pub fn local_addr(&self) -> SocketAddr {
        self.public.address
    }

    /// Returns the address of health, metrics and administration.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.address
    }

    /// Returns a handle for reading the gateway's state.
    pub fn gateway(&self) -> Arc<Gateway> {
        Arc::new(Gateway { state: Arc::clone(&self.state) })
    }

    /// Returns the component that replaces the config while the gateway runs.
    pub fn reloader(&self) -> Reloader {
        self.state.reloader.clone()
    }

    /// Serves until `shutdown` asks for a drain: new requests are refused then,
    /// running requests end by themselves within the drain's bound and are cut after
    /// that bound, or at once if `shutdown` asks for that. The public listener closes
    /// after the last of them. Returns when every request is settled.
    ///
    /// `end_workers` runs between the last request and the last read of the
    /// workers' journals: workers that it ends hand over their last blocks.
    pub async fn run(self, shutdown: Shutdown, end_workers: impl Future<Output = ()>) {
        let api = self.api();
        let dispatcher = self.dispatcher(api.clone());
        let public_stack = self.public_stack(api);
        let admin_stack = self.admin_stack();
        let Self { state, authenticator, doors, live, aside, public, admin, stopping, .. } = self;
        // Two tokens, because the admin listener outlasts the public one:
        // probes must see the drain.
        let listeners = TaskTracker::new();
        let close_admin = state.closing.clone();
        let public_stop =
            ListenerStop { refuse: state.draining.clone(), end: CancellationToken::new() };
        let close_public = public_stop.end.clone();
        let public_done = listeners.spawn(public.listener.serve(public_stack, public_stop));
        let admin_stop = ListenerStop { refuse: close_admin.clone(), end: close_admin.clone() };
        listeners.spawn(admin.listener.serve(admin_stack, admin_stop));
        let upkeep = TaskTracker::new();
        let end_upkeep = CancellationToken::new();
        start_upkeep(&upkeep, &end_upkeep, (&state, authenticator, doors, aside));

        let dispatched = run_batches(dispatcher, &upkeep, state.draining.clone());

        shutdown.drain.cancelled().await;
        // First of all, so that no request starts behind the waits below.
        state.draining.cancel();
        let requests = state.serving.tasks();
        // Only a closed tracker ends its wait.
        requests.close();
        let drain = live.current().gateway().timeouts.drain;
        tracing::info!(
            requests = requests.len(),
            seconds = drain.as_secs(),
            "draining; new requests are refused, and a second signal cuts the running ones"
        );
        // The listener cuts its connections at the same bound.
        let waited = tokio::select! {
            waited = timeout(drain, requests.wait()) => waited.is_ok(),
            () = shutdown.now.cancelled() => false,
            never = log_drain(requests) => match never {},
        };
        if !waited {
            tracing::warn!(
                requests = requests.len(),
                "requests outlast the drain; they are cut and charged for what they used"
            );
            stopping.cancel();
        }
        // After the requests: until now a client that connects is told to come back.
        close_public.cancel();
        // Before the workers end, since a handler may still write a response.
        if public_done.await.is_err() {
            tracing::error!("the public listener panicked; the gateway stops without it");
        }
        // Requests that were cut still wait for their final usage.
        requests.wait().await;
        // Its lines have ended. What it writes last needs the ledger.
        dispatched.await;
        // After the last request, so that no worker stops under one.
        end_workers.await;
        // After the workers, whose last blocks arrive while they end.
        state.serving.stop().await;
        // Last, so that probes and scrapes see every step above.
        close_admin.cancel();
        end_upkeep.cancel();
        listeners.close();
        upkeep.close();
        listeners.wait().await;
        upkeep.wait().await;
    }

    /// Returns the number of the gateway in request ids.
    fn number(&self) -> u32 {
        self.aside.membership.as_ref().map_or(0, Membership::number)
    }

    /// Builds the components of the API's handlers.
    fn api(&self) -> Api {
        Api {
            serving: Arc::clone(&self.state.serving),
            config: self.live.clone(),
            authenticator: self.authenticator.clone(),
            source_penalties: self.state.source_penalties.clone(),
            owner_numbers: OwnerNumbers::default(),
            metrics: Arc::clone(&self.state.metrics),
            access_log: self.access_log.clone(),
            client_ids: ClientIdTable::default(),
            bodies: self.state.bodies.clone(),
            jobs: self.state.jobs.clone(),
            draining: self.state.draining.clone(),
        }
    }

    /// Builds the component that runs batches.
    fn dispatcher(&self, api: Api) -> Dispatcher {
        let config = self.live.current();
        let options = DispatchOptions {
            line: config.gateway().jobs.line,
            drain: config.gateway().timeouts.drain.min(LINES_DRAIN),
            gateway: self.number(),
            renewal: match config.gateway().jobs.folder {
                Some(_) => SHARED_RENEWAL,
                None => DispatchOptions::default().renewal,
            },
        };
        Dispatcher::new(self.state.jobs.jobs.clone(), Arc::new(Lines::new(api)), options)
    }

    /// Builds the service behind the public listener.
    fn public_stack(&self, api: Api) -> Arc<Stack<PublicRoutes>> {
        let routes = PublicRoutes::new(api, self.doors.reads.clone());
        let options = StackOptions {
            metrics: Arc::clone(&self.state.metrics),
            access_log: self.access_log.clone(),
            sources: Some(self.doors.sources.clone()),
            cors: Some(Cors::new(self.live.clone())),
            largest_body: self.doors.largest_body.clone(),
            gateway: self.number(),
        };
        Stack::new(routes, options, self.state.serving.clock().clone())
    }

    /// Builds the service behind the admin listener.
    fn admin_stack(&self) -> Arc<Stack<AdminRoutes>> {
        let routes = AdminRoutes::new(Arc::clone(&self.state), self.doors.admin_reads.clone());
        let options = StackOptions {
            metrics: Arc::clone(&self.state.metrics),
            access_log: self.access_log.clone(),
            sources: None,
            cors: None,
            largest_body: LargestBody::new(ADMIN_BODY),
            gateway: self.number(),
        };
        Stack::new(routes, options, self.state.serving.clock().clone())
    }
}

impl Gateway {
    /// Returns the conditions under which requests succeed.
    pub fn readiness(&self) -> Readiness {
        self.state.readiness()
    }

    /// Counts a restart of a worker's process. `why` is one of a closed set.
    pub fn worker_restarted(&self, worker: &WorkerName, why: &'static str) {
        self.state.metrics.worker_restarted(worker, why);
    }

    /// Waits until another gateway has taken this one for lost. This one must end then.
    pub async fn retired(&self) {
        match &self.state.neighbours {
            Some(neighbours) => neighbours.retired.cancelled().await,
            None => std::future::pending().await,
        }
    }

    /// Returns a report on each worker.
    pub fn worker_reports(&self) -> Vec<WorkerReport> {
        self.state.worker_reports()
    }
}

/// Starts the tasks that keep the gateway's state up to date until `end`.
fn start_upkeep(
    upkeep: &TaskTracker,
    end: &CancellationToken,
    (state, authenticator, doors, aside): (&Arc<AdminState>, Authenticator, RequestDoors, Aside),
) {
    upkeep.spawn(authenticator.follow_changes(end.clone()));
    let swept = sweep(doors, Arc::clone(state));
    upkeep.spawn(end.clone().run_until_cancelled_owned(swept));
    let followed = state.reloader.clone().follow_files();
    upkeep.spawn(end.clone().run_until_cancelled_owned(followed));
    let ended = state.reloader.clone().follow_raises();
    upkeep.spawn(end.clone().run_until_cancelled_owned(ended));
    upkeep.spawn(aside.webhook.run(end.clone()));
    if let Some(membership) = aside.membership {
        let (keys, serving) = (state.keys.clone(), Arc::clone(&state.serving));
        let watched = state.neighbours.clone().map(|neighbours| {
            // One place: what is not read now is told again.
            let (lost, found) = mpsc::channel(1);
            let retired = neighbours.retired.clone();
            let retiring = retirement::run(found, neighbours, Arc::clone(&serving));
            upkeep.spawn(end.clone().run_until_cancelled_owned(retiring));
            Watched { retired, lost }
        });
        let limited = (serving, state.jobs.clone());
        upkeep.spawn(members::follow(membership, keys, limited, watched, end.clone()));
    }
    // It sees the stop itself, because it moves the last actions after the stop.
    let (keys, ledger) = (state.keys.clone(), state.serving.ledger().clone());
    upkeep.spawn(audit::follow_keys(keys, ledger, end.clone()));
}

/// Returns the doors that a reload changes.
fn doors_of(public: &Bound, admin: &Bound, requests: &RequestDoors) -> Doors {
    let (public, admin) = (public.listener.control(), admin.listener.control());
    Doors { public, admin, requests: requests.clone() }
}

/// Binds the addresses of the public and of the admin listener.
fn bind_both(
    config: &Config,
    tls: &TlsIdentity,
    metrics: &Arc<Metrics>,
) -> Result<(Bound, Bound), GatewayError> {
    let gateway = config.gateway();
    let options = edge_options::listener(gateway);
    let public = bind(gateway.listen, options.clone(), tls, metrics)?;
    let admin = bind(gateway.admin_listen, admin_listener(options), tls, metrics)?;
    Ok((public, admin))
}

/// Binds `address`.
fn bind(
    address: SocketAddr,
    options: ListenerOptions,
    tls: &TlsIdentity,
    metrics: &Arc<Metrics>,
) -> Result<Bound, GatewayError> {
    let listen = |source| GatewayError::Listen { address, source };
    let metrics = Arc::clone(metrics) as Arc<dyn ListenerMetrics>;
    let listener =
        Listener::bind(address, options, tls.server_config()?, metrics).map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    Ok(Bound { listener, address })
}

/// Runs batches on `tasks` until `stop`. The returned future waits for the end.
fn run_batches(
    dispatcher: Dispatcher,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> impl Future<Output = ()> {
    let running = tasks.spawn(dispatcher.run(stop));
    async move {
        if running.await.is_err() {
            tracing::error!(
                "the dispatcher of batches panicked; its batches go on at the next start"
            );
        }
    }
}

/// Time between two renewals of a batch's lease where gateways share batches: a cancel through
/// another gateway is noticed within it.
const SHARED_RENEWAL: Duration = Duration::from_secs(1);

/// Joins the gateways that share the server of `keys`, if there is one, and their Redis server. A
/// Redis server that does not answer now is used once it does.
///
/// # Errors
/// The database server cannot be used, or the Redis server answers and cannot be used as it is.
async fn join(
    keys: &KeyStore,
    own: (SocketAddr, Option<&Home>, Option<Vec<WorkerName>>),
    divided: Divided<'_>,
    redis: Option<RedisAddress>,
) -> Result<(Option<Membership>, Option<SharedRates>), GatewayError> {
    let Some(membership) = members::join(keys, own, divided).await? else {
        return Ok((None, None));
    };
    let Some(address) = redis else { return Ok((Some(membership), None)) };
    let mut server = RateServer::new(address, keys.cluster_mark());
    match server.connect().await {
        Err(error) if error.is_mistake() => return Err(error.into()),
        // The task that uses the server logs its failures.
        Ok(()) | Err(_) => {}
    }
    let rates = SharedRates { server, number: membership.number() };
    Ok((Some(membership), Some(rates)))
}

/// Returns the names of the workers; `None` if one of them is of this machine, which no other
/// gateway can use.
fn shareable(workers: &[WorkerEndpoint]) -> Option<Vec<WorkerName>> {
    workers.iter().map(|worker| worker.is_shareable.then(|| worker.name.clone())).collect()
}

/// Returns the place of this gateway among those that share the server of its keys.
fn shared_ledger(authenticator: &Authenticator, membership: &Membership) -> SharedLedger {
    SharedLedger {
        name: authenticator.keys().cluster_mark(),
        number: membership.number(),
        earlier: membership.earlier_numbers().to_vec(),
    }
}

/// Opens the files and batches: in the data folder, or on the server and in the folder that
/// several gateways share.
async fn open_jobs(
    config: &Config,
    data: &std::path::Path,
    slices: Option<&Slices>,
    peers: &Peers,
) -> Result<Jobs, GatewayError> {
    let (gateway, peers) = (config.gateway(), peers.clone());
    let own = data.join("jobs");
    let place = match (&gateway.jobs.folder, slices) {
        (Some(folder), Some(slices)) => JobsPlace::Shared {
            server: Box::new(slices.address().clone()),
            home: slices.home().id.clone(),
            folder: folder.clone(),
            own,
        },
        _ => {
            let log = WalRewriter::default();
            // A process that died after a failed sync may have left pages that only the kernel
            // has.
            JobsPlace::Own { folder: own, before_open: Arc::new(move |path| log.rewrite(path)) }
        }
    };
    let options = JobsOptions {
        place,
        limits: JobLimits {
            file: gateway.jobs.file.0,
            line: gateway.requests.body.0,
            stored: gateway.jobs.stored.0,
            spare: gateway.jobs.spare.0,
            ..JobLimits::default()
        },
        utc: Arc::new(move || peers.utc()),
    };
    // The server's answers are waited for in a blocking call.
    let opened = tokio::task::spawn_blocking(move || Jobs::open(options)).await;
    // A blocking task fails only while the runtime stops.
    Ok(opened.unwrap_or(Err(JobError::Closed))?)
}

/// Time that lines on workers have to end when the gateway drains. After that they are
/// cancelled and run again at the next start.
const LINES_DRAIN: Duration = Duration::from_secs(10);

/// Counts the spending of this day and month, before the first request, so that no cap starts
/// empty. Also returns the spending. `home` is the data folder of a gateway that shares the caps with others.
async fn start_limits(
    limits: &Limits,
    ledger: &LedgerHandle,
    (jobs, home): (&Jobs, Option<&Home>),
    clock: &Clock,
) -> Result<(SpendReader, (UtcDay, Spending)), GatewayError> {
    if let Some(home) = home {
        // First of all, so that what is restored counts against slices.
        limits.share_caps(home.life);
    }
    let reader = SpendReader { home: home.map(|home| home.id.clone()) };
    // One day for all, so that midnight does not fall between the readings.
    let today = clock.utc().day();
    let spending = reader.read(ledger, today).await.map_err(GatewayError::Spending)?;
    let batches = spent_by_batches(jobs, today).await?;
    limits.log_missing_plans();
    limits.restore_spend(spending.clone(), today);
    limits.restore_batches(&batches, today);
    Ok((reader, (today, spending)))
}

/// Opens the records of idempotency keys: on the server that several gateways share, or in the
/// data folder.
async fn open_idempotency(
    config: &Config,
    data: &std::path::Path,
    (slices, ledger): (Option<&Slices>, &LedgerHandle),
    clock: &Clock,
) -> Result<Idempotency, GatewayError> {
    let (data, kept) = (data.to_owned(), config.gateway().idempotency.clone());
    let (options, reader) = (kept.clone(), ledger.reader().clone());
    let shared = slices.map(|slices| (slices.address().clone(), slices.home().clone()));
    // The server's answers are waited for in a blocking call.
    let opened = tokio::task::spawn_blocking(move || match shared {
        None => IdempotencyStore::open(&data, kept.kept, kept.keys_per_tenant),
        Some((address, home)) => {
            let limits = (kept.kept, kept.keys_per_tenant);
            IdempotencyStore::on_server(&address, home, &data, limits)
        }
    });
    // A blocking task fails only while the runtime stops.
    let opened = opened.await.map_err(|_| GatewayError::Spending(LedgerError::Closed))?;
    Ok(Idempotency::over(opened?, options, reader, clock.clone()))
}

/// The reader of what was spent before. Of several gateways each counts what it has charged
/// itself.
#[derive(Clone)]
pub(crate) struct SpendReader {
    home: Option<String>,
}

impl SpendReader {
    /// Returns what was spent on `day` and in its month.
    pub(crate) async fn read(
        &self,
        ledger: &LedgerHandle,
        day: UtcDay,
    ) -> Result<Spending, LedgerError> {
        let (reader, home) = (ledger.reader().clone(), self.home.clone());
        // The read waits for the disk, or for the database server.
        let read = tokio::task::spawn_blocking(move || match home {
            Some(home) => reader.spending_of(&home, day),
            None => reader.spending(day),
        });
        // A blocking task fails only while the runtime stops.
        read.await.unwrap_or(Err(LedgerError::Closed))
    }
}

/// Returns what the lines of batches have spent on `day`.
pub(crate) async fn spent_by_batches(
    jobs: &Jobs,
    day: UtcDay,
) -> Result<Vec<BatchSpend>, JobError> {
    let of = |SpentByBatches { tenant, class, reference }| BatchSpend { tenant, class, reference };
    Ok(jobs.spent(day).await?.into_iter().map(of).collect())
}

/// Loads the certificate and writes it where commands on this host look for it.
fn load_certificate(config: &Config, data: &std::path::Path) -> Result<TlsIdentity, GatewayError> {
    let tls = TlsIdentity::load(tls_source(config, data))?;
    admin_certificate::publish(data, &tls)?;
    Ok(tls)
}

pub(crate) fn tls_source(config: &Config, data: &std::path::Path) -> TlsSource {
    let tls = &config.gateway().tls;
    match (&tls.certificate, &tls.key) {
        (Some(certificate), Some(key)) => {
            TlsSource::Files { certificate: certificate.clone(), key: key.clone() }
        }
        // The config was checked: both are set, or neither is.
        _ => TlsSource::Development { folder: data.join("tls") },
    }
}

pub(crate) fn issuers(config: &Config) -> Vec<IssuerOptions> {
    config.issuers().iter().map(IssuerOptions::from).collect()
}

/// Logs the number of running requests again and again; never returns.
async fn log_drain(requests: &TaskTracker) -> std::convert::Infallible {
    let mut ticks = interval(DRAIN_REPORT);
    // The first tick is at once, and the number was just logged.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        tracing::info!(requests = requests.len(), "still draining");
    }
}

/// Sweeps the limits on requests and the sources' penalties once a second, which bounds
/// their memory, and records the history of the live view.
async fn sweep(doors: RequestDoors, state: Arc<AdminState>) {
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        doors.sweep();
        state.source_penalties.sweep(state.serving.clock().now());
        state.record_history();
    }
}

/// Interval between two reports on a drain.
const DRAIN_REPORT: Duration = Duration::from_secs(5);

/// Bytes of the largest body of an admin request.
const ADMIN_BODY: u64 = 64 * 1024;

#[cfg(test)]
pub(crate) mod tests;
