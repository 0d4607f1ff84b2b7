//! The life of a worker: load the model, calibrate, open the journal, serve, end.
//! SIGTERM drains; the end of the parent's pipe stops the worker after the current
//! step; an engine failure or a hung step ends the worker at once. The journal is
//! closed in every case.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_domain::{CostTable, Device, DeviceNanos, UtcTime, WorkerEpoch};
use tollgate_engine::model::SamplingDefaults;
use tollgate_engine::{
    Backend, Clock, DeviceInfo, Engine, EngineError, EngineHandle, EngineOptions, ModelShape,
    SystemClock, Totals,
};
use tollgate_wire::v1::worker_server::WorkerServer;
use tollgate_wire::{LinkFiles, v1};
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::calibration::{self, Calibrated};
use crate::energy::Meter;
use crate::grammars::Grammars;
use crate::journal::{Journal, JournalOptions, OsDisk, Tail};
use crate::journal_streams::JournalStreams;
use crate::load::{self, Loaded};
use crate::monitor::{HealthTerms, LatestHealth, Monitor, MonitorParts};
use crate::network;
use crate::open_attempts::OpenAttempts;
use crate::service::Service;
use crate::shutdown::{ShutdownListener, ShutdownRequest};
use crate::socket::{self, Socket, SocketFile};
use crate::watchdog::Watchdog;
use crate::{EngineChoice, Hung, ListenAt, WorkerError, WorkerOptions};

/// Serves until the worker is told to end, its parent ends, or an error occurs.
///
/// # Errors
/// [`WorkerError`]: the start failed, or an error ended the worker.
pub async fn serve(mut options: WorkerOptions) -> Result<(), WorkerError> {
    // Signals are caught before the slow start, so that a signal during the start is
    // not lost.
    let mut shutdown =
        ShutdownListener::listen(options.parent.take()).map_err(WorkerError::Signals)?;
    let step_timeout = options.step_timeout;
    // The listener comes first: a second worker with the same address must fail before
    // it takes a device.
    let (listener, socket_file) = Listener::open(&options).await?;
    // Loading blocks for minutes. On a thread of its own it does not delay signals.
    let starting = tokio::task::spawn_blocking(move || Started::new(&options));
    let Started { service, engine, journal, journal_folder, monitor } = tokio::select! {
        started = starting => started.map_err(|error| WorkerError::Thread(error.into()))??,
        // No request was accepted yet, so there is nothing to finish.
        _ = shutdown.next() => return Ok(()),
    };
    // Copies, because the server below takes the service.
    let (tasks, ended) = (service.tasks.clone(), service.ended.clone());
    tasks.spawn(ended.clone().run_until_cancelled_owned(service.streams.clone().judge()));
    let handle = service.engine.clone();
    tracing::info!(
        worker = service.announcement.worker,
        epoch = %service.epoch,
        model = %service.model,
        "worker is ready to serve"
    );
    let mut watchdog =
        Watchdog::start(handle.clone(), step_timeout).map_err(WorkerError::Thread)?;
    let grammars = service.grammars.clone();
    let mut server = tasks.spawn(serve_calls(listener, service, ended.clone()));
    let mut engine = watch(engine)?;

    let end = tokio::select! {
        end = life(&mut shutdown, &handle, &mut engine) => end,
        // If the watchdog's thread ends without a report, this branch is off and the
        // others go on.
        Ok(hung) = &mut watchdog.hung => End::Hung(hung),
        failed = &mut server => End::ServerFailed(match failed {
            Ok(Err(error)) => WorkerError::Server(error),
            Ok(Ok(())) => WorkerError::Thread(io::Error::other("the server ended by itself")),
            Err(error) => WorkerError::Thread(error.into()),
        }),
    };
    // Time after an engine failure counts as lost, since the device may still have
    // been busy.
    let tail = if matches!(end, End::Idle) { Tail::Idle } else { Tail::Loss };
    // A disk that hangs would hold the journal's lock for ever.
    let closed = match tokio::time::timeout(LAST_SYNC, close(&journal, tail)).await {
        Ok(closed) => closed,
        Err(late) => Err(late.into()),
    };
    // After a failure the worker does not wait: the next start sends the remaining
    // blocks.
    if matches!(end, End::Idle) {
        let _ = tokio::time::timeout(LAST_BLOCKS, acknowledged(&journal)).await;
    }
    // The cancel ends the journal's stream, too, so it comes after the last blocks.
    ended.cancel();
    tasks.close();
    // A gateway that does not read must not keep the process alive.
    let _ = tokio::time::timeout(LAST_ANSWERS, tasks.wait()).await;
    grammars.end();
    // The socket's file goes last, so that a successor waits until the journal is
    // closed.
    drop((socket_file, monitor));
    match end {
        // The cause of the end is reported, not a failure to close that followed from
        // it.
        End::Broken(error) => Err(error.into()),
        End::Hung(hung) => Err(hung.into()),
        End::ServerFailed(error) => Err(error),
        End::Idle | End::InStep => {
            closed.map_err(|source| WorkerError::Journal { path: journal_folder, source })
        }
    }
}

/// A worker that is ready to serve.
struct Started {
    service: Service,
    engine: Engine,
    journal: Journal,
    journal_folder: PathBuf,
    /// `None` if the device's health is not monitored.
    monitor: Option<Monitor>,
}

impl Started {
    /// Does everything before the first request, in order. Blocks.
    fn new(options: &WorkerOptions) -> Result<Self, WorkerError> {
        let epoch = new_epoch().map_err(WorkerError::Thread)?;
        let clock = Arc::new(SystemClock::new());
        let mut loaded = load::load(options)?;
        let (health, meter) = (LatestHealth::default(), Meter::default());
        let health_terms = HealthTerms::new(&options.health);
        // The monitor starts before the calibration, so that the energy of the
        // calibration counts.
        let watched = (&health, &health_terms);
        let monitor =
            start_monitor(options, loaded.backend.device(), clock.clone(), watched, &meter)?;
        // The accounts of device time and of energy begin here.
        let began = clock.now();
        let counter = meter.now(began);
        let Calibrated { table, device_time } = match loaded.table.take() {
            Some(table) => Calibrated { table, device_time: DeviceNanos::ZERO },
            None => measured(options, loaded.backend.as_mut(), &*clock)?,
        };
        let journal_folder = journal_folder(&options.data, options.name.as_str());
        let failed = |source| WorkerError::Journal { path: journal_folder.clone(), source };
        let journal = Journal::open(
            OsDisk,
            JournalOptions {
                folder: journal_folder.clone(),
                epoch,
                worker: options.name.clone(),
                device: device(loaded.backend.device()),
                model: options.model_name.clone(),
                calibration: table.version().to_owned(),
                meter,
                counter,
                most_bytes: options.journal_bytes,
                began,
                clock: clock.clone(),
                utc,
            },
        )
        .map_err(failed)?;
        // Calibration used the device, so its time is on the platform's account.
        journal.overhead(began, device_time).map_err(failed)?;
        journal.start().map_err(WorkerError::Thread)?;
        let announcement = announcement(options, epoch, &loaded, &table);
        let engine_options = engine_options(options, loaded.backend.device(), table);
        let Loaded { backend, tokenizer, tokenizer_asset, template_asset, .. } = loaded;
        let ModelShape { vocabulary, end_tokens, .. } = backend.shape().clone();
        let grammars = Grammars::start(Arc::clone(&tokenizer), vocabulary, end_tokens)
            .map_err(WorkerError::Thread)?;
        let engine = Engine::start(backend, engine_options, clock.clone(), journal.for_engine())
            .map_err(WorkerError::Thread)?;
        if let Some(monitor) = &monitor {
            monitor.watch(engine.handle());
        }
        let streams = JournalStreams::new(options.name.clone(), journal.clone());
        let service = Service {
            streams,
            attempts: OpenAttempts::default(),
            health,
            health_terms,
            announcement,
            model: options.model_name.clone(),
            epoch,
            assets: [Some(tokenizer_asset), template_asset].into_iter().flatten().collect(),
            tokenizer,
            grammars,
            engine: engine.handle(),
            journal: journal.clone(),
            tasks: TaskTracker::new(),
            ended: CancellationToken::new(),
        };
        Ok(Self { service, engine, journal, journal_folder, monitor })
    }
}

/// Starts the health monitor of a GPU. Returns `None` for a device that has no
/// driver to ask.
fn start_monitor(
    options: &WorkerOptions,
    device: &DeviceInfo,
    clock: Arc<dyn Clock>,
    (health, terms): (&LatestHealth, &HealthTerms),
    meter: &Meter,
) -> Result<Option<Monitor>, WorkerError> {
    let is_monitored = device.class.is_gpu() || options.health.nvml.is_some();
    // The monitor finds its device by the UUID.
    if !is_monitored || device.uuid.is_empty() {
        return Ok(None);
    }
    // The energy counter of a shared GPU includes the work of other workers.
    let is_ours = options.gpu.turn.is_none();
    let parts = MonitorParts {
        nvml: options.health.nvml.clone(),
        terms: terms.clone(),
        uuid: device.uuid.clone(),
        clock,
        health: health.clone(),
        meter: is_ours.then(|| meter.clone()),
    };
    Monitor::start(parts).map(Some).map_err(WorkerError::Thread)
}

/// Returns the cost table. Measures it, if necessary, in a turn of the GPU, so that
/// no other worker's step distorts the measurement.
fn measured(
    options: &WorkerOptions,
    backend: &mut dyn Backend,
    clock: &dyn Clock,
) -> Result<Calibrated, WorkerError> {
    backend.acquire().map_err(WorkerError::Setup)?;
    let calibrated = calibration::table(&options.data, backend, clock);
    // Other workers wait for the turn, so it ends after an error, too.
    backend.release();
    calibrated
}

fn engine_options(options: &WorkerOptions, device: &DeviceInfo, table: CostTable) -> EngineOptions {
    // Other workers wait for the end of the current step on a shared GPU, so one
    // step must not exceed a turn.
    let step_time_budget = match options.gpu.turn {
        Some(turn) if !device.uuid.is_empty() => options.step_time_budget.min(turn),
        _ => options.step_time_budget,
    };
    let defaults = EngineOptions::new(table);
    let (policy, speed) = match &options.engine {
        EngineChoice::Model => (defaults.policy, 1.0),
        EngineChoice::Synthetic(device) => (device.policy, device.cost.speed),
    };
    EngineOptions {
        max_sequences: options.max_sequences,
        queue_capacity: options.queue_capacity,
        batch_step: options.batch_step,
        policy,
        // These durations are in device time, which a faster synthetic device uses
        // up in less wall time.
        step_time_budget: tollgate_engine::step_time_budget(
            &defaults.table,
            step_time_budget.div_f64(speed),
        ),
        preemption_guard: defaults.preemption_guard.div_f64(speed),
        preemption_rest: defaults.preemption_rest.div_f64(speed),
        ..defaults
    }
}

/// The end of a worker's life.
enum End {
    /// The engine finished all its work.
    Idle,
    /// The engine was in a step that did not end within [`LAST_STEP`].
    InStep,
    /// The engine failed.
    Broken(EngineError),
    /// A step did not end in time.
    Hung(Hung),
    /// The gRPC server failed, so no gateway can reach the worker.
    ServerFailed(WorkerError),
}

type EngineEnd = oneshot::Receiver<Result<Totals, EngineError>>;

async fn life(
    shutdown: &mut ShutdownListener,
    handle: &EngineHandle,
    engine: &mut EngineEnd,
) -> End {
    loop {
        let request = tokio::select! {
            ended = &mut *engine => return end_of(ended),
            request = shutdown.next() => request,
        };
        match request {
            ShutdownRequest::Drain => {
                tracing::info!("draining: finishing the current requests");
                handle.drain();
            }
            ShutdownRequest::Stop => {
                tracing::info!("the parent process ended; stopping after the current step");
                handle.stop();
                // A hung device must not keep the process alive after its parent.
                return match tokio::time::timeout(LAST_STEP, engine).await {
                    Ok(ended) => end_of(ended),
                    Err(_) => End::InStep,
                };
            }
        }
    }
}

fn end_of(ended: Result<Result<Totals, EngineError>, oneshot::error::RecvError>) -> End {
    match ended {
        Ok(Ok(totals)) => {
            let Totals { steps, billed, overhead, idle } = totals;
            tracing::info!(steps, %billed, %overhead, %idle, "engine ended");
            End::Idle
        }
        Ok(Err(error)) => End::Broken(error),
        Err(_) => End::Broken(EngineError::Panic("the engine's thread was lost".to_owned())),
    }
}

/// Waits for the end of the engine on a thread of its own.
fn watch(engine: Engine) -> Result<EngineEnd, WorkerError> {
    let (sender, receiver) = oneshot::channel();
    // `join` blocks as long as the worker lives, so it must not hold a thread of the
    // runtime's pool.
    std::thread::Builder::new()
        .name("engine-watch".to_owned())
        .spawn(move || {
            // The receiver is gone once the worker has stopped waiting.
            let _ = sender.send(engine.join());
        })
        .map_err(WorkerError::Thread)?;
    Ok(receiver)
}

/// The listener for the gateway's connections.
enum Listener {
    Socket(UnixListener),
    Network(TcpListener, LinkFiles),
}

impl Listener {
    /// Listens as the options say. Also returns the guard of the socket's file, if there is
    /// one.
    async fn open(options: &WorkerOptions) -> Result<(Self, Option<SocketFile>), WorkerError> {
        match &options.listen {
            ListenAt::Socket(path) => {
                let Socket { listener, file } = socket::listen(path).await?;
                Ok((Self::Socket(listener), Some(file)))
            }
            ListenAt::Network { address, files } => {
                let listener = network::listen(*address, files, &options.name).await?;
                Ok((Self::Network(listener, files.clone()), None))
            }
        }
    }
}

async fn serve_calls(
    listener: Listener,
    service: Service,
    ended: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    match listener {
        Listener::Socket(listener) => {
            serve_on(UnixListenerStream::new(listener), Server::builder(), service, ended).await
        }
        Listener::Network(listener, files) => {
            // A gateway whose machine is gone closes no connection, and its requests must
            // not run on.
            let server = Server::builder()
                .http2_keepalive_interval(Some(PING_INTERVAL))
                .http2_keepalive_timeout(Some(PING_TIMEOUT));
            let incoming = network::accept(listener, files, &service.tasks);
            serve_on(incoming, server, service, ended).await
        }
    }
}

async fn serve_on<C>(
    incoming: impl Stream<Item = io::Result<C>>,
    mut server: Server,
    service: Service,
    ended: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    C: AsyncRead
        + AsyncWrite
        + Connected<ConnectInfo: Clone + Send + Sync + 'static>
        + Unpin
        + Send
        + 'static,
{
    let (health_reporter, health) = tonic_health::server::health_reporter();
    // tonic's limit for received messages, 4 MiB, is too small for long prompts.
    let worker = WorkerServer::new(service)
        .max_decoding_message_size(LARGEST_MESSAGE)
        .max_encoding_message_size(LARGEST_MESSAGE);
    health_reporter.set_serving::<WorkerServer<Service>>().await;
    server
        .add_service(health)
        .add_service(worker)
        .serve_with_incoming_shutdown(incoming, ended.cancelled_owned())
        .await
}

async fn close(journal: &Journal, tail: Tail) -> io::Result<()> {
    let journal = journal.clone();
    // A sync blocks, so it must not run on a thread of the runtime.
    let closed = tokio::task::spawn_blocking(move || journal.close(tail)).await;
    closed.unwrap_or_else(|error| Err(error.into()))
}

/// Waits until the gateway has acknowledged every block or has disconnected. The
/// next start with this data folder reports the remaining blocks.
async fn acknowledged(journal: &Journal) {
    let mut checks = tokio::time::interval(Duration::from_millis(10));
    while journal.is_followed() && !journal.is_acknowledged() {
        checks.tick().await;
    }
    // The last block goes to the gateways that did not record it, too.
    tokio::time::sleep(LAST_COPIES).await;
}

#[expect(clippy::expect_used, reason = "a cost table is numbers and names, which serialise")]
fn announcement(
    options: &WorkerOptions,
    epoch: WorkerEpoch,
    loaded: &Loaded,
    table: &CostTable,
) -> v1::Announcement {
    let ModelShape { context, vocabulary, end_tokens, sampling_defaults, hash, .. } =
        loaded.backend.shape();
    let &SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty } =
        sampling_defaults;
    let DeviceInfo { class, name, uuid, threads } = loaded.backend.device();
    v1::Announcement {
        worker: options.name.to_string(),
        epoch: epoch.to_string(),
        engine_version: env!("CARGO_PKG_VERSION").to_owned(),
        device: Some(v1::Device {
            class: class.to_string(),
            name: name.clone(),
            uuid: uuid.clone(),
            threads: *threads,
        }),
        models: vec![v1::Model {
            name: options.model_name.to_string(),
            hash: hash.clone(),
            tokenizer_asset: loaded.tokenizer_asset.hash.clone(),
            template_asset: loaded
                .template_asset
                .as_ref()
                .map(|asset| asset.hash.clone())
                .unwrap_or_default(),
            context_length: *context,
            vocabulary: *vocabulary,
            end_tokens: end_tokens.clone(),
            cost_table_json: serde_json::to_string(table)
                .expect("a table is numbers and names, which serialise"),
            template_context_json: loaded.template_context.clone(),
            sampling_defaults: Some(v1::SamplingDefaults {
                temperature,
                top_k,
                top_p,
                repetition_penalty,
                min_p,
            }),
        }],
    }
}

fn device(info: &DeviceInfo) -> Device {
    let DeviceInfo { class, name, uuid, threads: _ } = info;
    // The driver chooses the name, and every block repeats it, so its length is
    // bounded.
    Device { class: class.clone(), name: name.chars().take(200).collect(), uuid: uuid.clone() }
}

/// Returns `<data>/workers/<name>/journal`, with the separators in the name
/// replaced.
fn journal_folder(data: &Path, name: &str) -> PathBuf {
    // A separator in the name must not lead to another folder.
    data.join("workers").join(name.replace(['/', ':'], "_")).join("journal")
}

fn new_epoch() -> io::Result<WorkerEpoch> {
    // The epoch is random and not a time, so that a clock that is set back cannot
    // repeat it.
    let mut bits = [0; 16];
    let mut filled = 0;
    while filled < bits.len() {
        // The system call may return fewer bytes than requested.
        filled += getrandom(&mut bits[filled..], GetRandomFlags::empty())?;
    }
    Ok(WorkerEpoch(u128::from_le_bytes(bits)))
}

/// Returns the host's clock, for the dates in the journal.
#[expect(clippy::disallowed_methods, reason = "the worker reads the date here")]
fn utc() -> UtcTime {
    // A clock before 1970 is wrong. A wrong date must not stop the worker.
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    UtcTime(since.as_nanos() as u64) // fits until the year 2554
}

/// Time that the current step has once the parent has ended.
const LAST_STEP: Duration = Duration::from_millis(700);
/// Time that the journal's last sync has.
const LAST_SYNC: Duration = Duration::from_secs(2);
/// Time that a drained worker waits for the gateway to acknowledge its last blocks.
const LAST_BLOCKS: Duration = Duration::from_secs(2);
/// Time for the copies of the last block to the other gateways.
const LAST_COPIES: Duration = Duration::from_millis(50);
/// Time between two pings of a connection of the network.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Time that a gateway has to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that open streams have to end.
const LAST_ANSWERS: Duration = Duration::from_millis(200);
/// Bytes of the largest message: an assignment of long prompts, or their log
/// probabilities.
const LARGEST_MESSAGE: usize = 16 << 20;
