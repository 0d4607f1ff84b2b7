//! `tollgate up`: starts the gateway, the ledger and one worker process for each
//! device, announces when requests will succeed, and shuts everything down in
//! order.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_config::{Config, Flags};
use tollgate_domain::WorkerName;
use tollgate_gateway::audit::{config_loaded, plans_in_force, record, sign};
use tollgate_gateway::auth::KeyStore;
use tollgate_gateway::workers::WorkerReport;
use tollgate_gateway::{
    Clock, Gateway, GatewayOptions, GatewayService, ReloadRun, Reloader, Shutdown,
};
use tollgate_ledger::caps::{Home, Slices};
use tollgate_ledger::{DatabasePlace, Ledger, LedgerError, LedgerHandle, LedgerOptions, Loss};

use crate::common::{load, now};
use crate::{audit, data, databases, logging, manifest, progress};

mod banner;
mod demo_key;
mod demo_model;
mod gpus;
mod liveness;
mod notify;
pub mod remote;
mod sockets;
mod supervisor;
pub mod workers;

use liveness::Heartbeats;
use remote::{WorkerPlan, Workers};
use supervisor::{Ended, Phases};
use workers::Planned;

/// Run the gateway, the ledger and one worker process for each device.
#[derive(clap::Args)]
pub struct UpArguments {
    /// A config file, or a folder of *.toml files.
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// The data folder, for ledger, keys, journals and certificates [default:
    /// data].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// The address for callers; port 0 takes a free port [default: 127.0.0.1:8443].
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// The address for admins, probes and metrics [default: 127.0.0.1:9443].
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<String>,
    /// Serve only the model in this Hugging Face folder, under the folder's name.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The device: auto, cpu, cuda, cuda:INDEX or cuda:UUID.
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Start although ledger.db, keys.db or idempotency.db is missing, empty or older
    /// than the data folder. The audit log records the loss.
    #[arg(long)]
    accept_loss: bool,
    /// The control of a benchmark, in no program but its own: what is posted
    /// is answered and forgotten.
    #[cfg(feature = "bench")]
    #[arg(long, hide = true)]
    without_ledger: bool,
}

/// Serves until SIGTERM or SIGINT, then drains.
pub fn run(arguments: UpArguments) -> Result<()> {
    logging::start();
    let UpArguments {
        config,
        data,
        listen,
        admin_listen,
        model,
        device,
        accept_loss,
        #[cfg(feature = "bench")]
        without_ledger,
    } = arguments;
    #[cfg(feature = "bench")]
    let open: OpenLedger = if without_ledger { Ledger::open_null } else { Ledger::open_with };
    #[cfg(not(feature = "bench"))]
    let open: OpenLedger = Ledger::open_with;
    let flags = Flags { listen, admin_listen, data, model, device };
    let config = Arc::new(load(config, flags)?);
    run_with(serve(config, open, accept_loss, Workers::Own))
}

/// Serves with workers on other machines until SIGTERM or SIGINT, then drains.
pub fn run_gateway(config: Option<PathBuf>, flags: Flags, accept_loss: bool) -> Result<()> {
    let config = Arc::new(load(config, flags)?);
    run_with(serve(config, Ledger::open_with, accept_loss, Workers::Remote))
}

fn run_with(serving: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serving)
}

/// Opens the ledger: the real one, or the control of a benchmark.
type OpenLedger = fn(LedgerOptions) -> Result<LedgerHandle, LedgerError>;

async fn serve(
    config: Arc<Config>,
    open: OpenLedger,
    accept_loss: bool,
    place: Workers,
) -> Result<()> {
    place.check(&config)?;
    // Before all work: without this handler the signal ends the process.
    let hangups = signal(SignalKind::hangup())?;
    // Workers get this path in a file, so it must not depend on a working folder.
    let folder = workers::text_path(std::path::absolute(config.data()).context("data folder")?)?;
    // The lock comes first: two instances on one ledger would damage it.
    let lock = data::lock(&folder)?;
    let ledger_place = databases::ledger_in(&config, &folder)?;
    // Before any database is opened, because that makes an empty one.
    let losses = find_losses(&folder, &ledger_place, accept_loss).await?;
    let home = begin_life(&folder, &ledger_place)?;
    let home_id = home.as_ref().map(|home| home.id.clone());
    let ledger = open_ledger(&config, &folder, (&ledger_place, home_id), open).await?;
    let slices = open_slices(home, &ledger_place).await?;
    manifest::record_losses(&ledger, &losses).await?;
    let keys = open_keys(&config, &folder).await?;
    let WorkerPlan { planned, endpoints, sockets: _sockets } =
        WorkerPlan::new(&config, &folder, place)?;
    let service = GatewayService::bind(GatewayOptions {
        config: Arc::clone(&config),
        data: folder.clone(),
        workers: endpoints,
        ledger: ledger.clone(),
        keys,
        clock: Clock::system(),
        slices,
        redis: databases::redis(&config)?,
    })
    .await?;
    // All three databases are open by now.
    manifest::begin(&folder, &ledger_place).await?;

    let gateway = service.gateway();
    let reloader = service.reloader();
    let addresses = banner::Addresses { public: service.local_addr(), admin: service.admin_addr() };
    let announced = data::announce(&folder, addresses.admin)?;
    // The ports are bound by now: a port in use must fail before the models are
    // loaded.
    let processes = Arc::new(WorkerProcesses::start(planned, &gateway));
    let (serving, stop) = (TaskTracker::new(), CancellationToken::new());
    serving.spawn(manifest::follow(folder.clone(), ledger_place.clone(), stop.clone()));
    // The watchdog watches the drain, too.
    let watched = CancellationToken::new();
    serving.spawn(watched.clone().run_until_cancelled_owned(notify::feed_watchdog()));
    let ready = processes.ready.clone();
    serving.spawn(stop.clone().run_until_cancelled_owned(reload_on(hangups, reloader, ready)));
    let workers = Arc::clone(&processes);
    let stop_now = CancellationToken::new();
    let shutdown = Shutdown { drain: stop.clone(), now: stop_now.clone() };
    let served = serving.spawn(service.run(shutdown, async move {
        if let Err(error) = workers.end().await {
            tracing::error!(error = format!("{error:#}"), "a worker process could not be ended");
        }
    }));
    let mut stops = StopSignals::listen()?;
    let ended = tokio::select! {
        ready = progress::told(STARTING, processes.until_ready(&gateway)) => match ready {
            Ok(()) => {
                // Scripts wait for the banner, so it appears only when requests
                // succeed.
                banner::print(&config, addresses, &gateway)?;
                notify::ready().await;
                until_ended(&mut stops, &gateway).await
            }
            Err(error) => Err(error),
        },
        () = stops.next() => Ok(()),
    };
    // The service ends requests first, then the workers, then the tasks that post
    // the workers' journals: each stage needs the next one until it has ended.
    notify::stopping().await;
    stop.cancel();
    let served = until_served(served, &mut stops, &stop_now).await;
    watched.cancel();
    // An error waits until the audit log is signed and the lock is released.
    serving.close();
    serving.wait().await;
    sign_last_records(&ledger, &folder, &ledger_place).await;
    drop(announced);
    // Released last: the next instance must find the ledger and the journals at
    // rest.
    drop(lock);
    // An error before the shutdown is the cause of later ones, so it is reported
    // first.
    ended.and(served)
}

/// Waits for a signal to stop. Fails if another gateway has taken this one for lost.
async fn until_ended(stops: &mut StopSignals, gateway: &Gateway) -> Result<()> {
    tokio::select! {
        () = stops.next() => Ok(()),
        () = gateway.retired() => Err(anyhow!(RETIRED)),
    }
}

/// Waits for the end of the drain. A second signal cuts the running requests.
async fn until_served<T>(
    mut served: JoinHandle<T>,
    stops: &mut StopSignals,
    stop_now: &CancellationToken,
) -> Result<T> {
    let served = tokio::select! {
        served = &mut served => served,
        () = stops.next() => {
            tracing::warn!("second signal; running requests are cut now");
            stop_now.cancel();
            served.await
        }
    };
    served.context("the gateway panicked")
}

/// Finds the databases that have lost data, away from the runtime: the server of a ledger is
/// asked by a blocking call.
async fn find_losses(folder: &Path, place: &DatabasePlace, accept: bool) -> Result<Vec<Loss>> {
    let (folder, place) = (folder.to_owned(), place.clone());
    tokio::task::spawn_blocking(move || manifest::check(&folder, &place, accept)).await?
}

/// Counts this start of the gateway, if it is one of several that share a database server.
fn begin_life(folder: &Path, place: &DatabasePlace) -> Result<Option<Home>> {
    Ok(match place {
        DatabasePlace::File(_) => None,
        DatabasePlace::Server(_) => Some(Home::begin_life(folder)?),
    })
}

/// Opens the gateway's slices of caps away from the runtime.
async fn open_slices(home: Option<Home>, place: &DatabasePlace) -> Result<Option<Slices>> {
    let (Some(home), DatabasePlace::Server(server)) = (home, place.clone()) else {
        return Ok(None);
    };
    let opened = tokio::task::spawn_blocking(move || Slices::open(&server, home, now().day()));
    Ok(Some(opened.await??))
}

/// Opens the ledger with a signed audit log. The first record of this start is the
/// config in force.
async fn open_ledger(
    config: &Config,
    folder: &Path,
    (place, home): (&DatabasePlace, Option<String>),
    open: OpenLedger,
) -> Result<LedgerHandle> {
    let (of_check, of_key, folder) = (place.clone(), place.clone(), folder.to_owned());
    // The check reads the database, which blocks.
    let checked = tokio::task::spawn_blocking(move || Ledger::check_start(of_check));
    let checked = progress::told("checking the ledger", checked).await?;
    checked.with_context(|| {
        format!(
            "{place} is damaged, so the gateway does not start; `tollgate ledger check` lists the damage, and `tollgate ledger restore` replaces the ledger by a backup"
        )
    })?;
    let opened = tokio::task::spawn_blocking(move || -> Result<_> {
        let key = Arc::new(audit::signing_key(&folder, &of_key)?);
        let mut options = LedgerOptions::at(of_key);
        (options.key, options.home) = (Some(Arc::clone(&key)), home);
        Ok((open(options).context("cannot open the ledger")?, key))
    });
    let (ledger, key) = opened.await??;
    let actor = format!("uid {}", rustix::process::getuid().as_raw());
    let action = config_loaded(config, key.verifier(), actor.clone(), now());
    record(&ledger, action).await.context("cannot write the audit log")?;
    plans_in_force(&ledger, config, actor, now()).await.context("cannot write the ledger")?;
    tracing::info!(key = key.verifier(), "signing the audit log");
    Ok(ledger)
}

/// Opens the keys away from the runtime, because a server's answers are waited for in
/// blocking calls.
async fn open_keys(config: &Arc<Config>, folder: &Path) -> Result<KeyStore> {
    let (config, folder) = (Arc::clone(config), folder.to_owned());
    let opened = tokio::task::spawn_blocking(move || -> Result<_> {
        let place = databases::keys_in(&config, &folder)?;
        let keys = KeyStore::open_at(&folder, place).context("cannot open the keys")?;
        demo_key::follow(&config, &folder, &keys)?;
        Ok(keys)
    });
    opened.await?
}

/// Signs the audit log and notes the checkpoint in the manifest. An error must not
/// keep the process from ending.
async fn sign_last_records(ledger: &LedgerHandle, folder: &Path, place: &DatabasePlace) {
    if let Err(error) = sign(ledger).await {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot sign the audit log; its last records stay unsigned"
        );
    }
    if let Err(error) = manifest::refresh(folder, place).await {
        tracing::error!(error = format!("{error:#}"), "the manifest of the data folder stays old");
    }
}

/// Reloads the config at each SIGHUP. Signals that come during a reload cause one more.
async fn reload_on(mut hangups: Signal, reloader: Reloader, ready: CancellationToken) {
    while hangups.recv().await.is_some() {
        // A gateway that still starts must not say that it is ready after a reload.
        let is_ready = ready.is_cancelled();
        if is_ready {
            notify::reloading().await;
        }
        // The reload logs its result.
        let _ = reloader.reload("SIGHUP", ReloadRun::Apply).await;
        if is_ready {
            notify::ready().await;
        }
    }
}

/// The signals that stop the gateway: SIGTERM and SIGINT.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn listen() -> Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The worker processes, each with a supervisor task.
struct WorkerProcesses {
    supervisors: tokio::sync::Mutex<tokio::task::JoinSet<Result<Ended>>>,
    ready: CancellationToken,
    stop: CancellationToken,
}

impl WorkerProcesses {
    fn start(planned: Vec<Planned>, gateway: &Arc<Gateway>) -> Self {
        let (ready, stop) = (CancellationToken::new(), CancellationToken::new());
        let phases = Phases { ready: ready.clone(), stop: stop.clone() };
        let mut supervisors = tokio::task::JoinSet::new();
        for worker in planned {
            let (name, gateway) = (worker.endpoint().name, Arc::clone(gateway));
            let restarted = {
                let (name, gateway) = (name.clone(), Arc::clone(&gateway));
                move |why| gateway.worker_restarted(&name, why)
            };
            let heartbeats = move || heartbeats(&gateway, &name);
            let command = worker.into_command();
            supervisors.spawn(command.supervise(phases.clone(), heartbeats, restarted));
        }
        Self { supervisors: tokio::sync::Mutex::new(supervisors), ready, stop }
    }

    /// Waits until every worker accepts requests. Fails if a worker ends before. Does not
    /// wait for workers on other machines: they come and go by themselves.
    async fn until_ready(&self, gateway: &Gateway) -> Result<()> {
        // Held during the whole wait. A stop drops this future, and `end` then gets the lock.
        let mut supervisors = self.supervisors.lock().await;
        if supervisors.is_empty() {
            self.ready.cancel();
            return Ok(());
        }
        let mut poll = tokio::time::interval(Duration::from_millis(20));
        loop {
            tokio::select! {
                Some(ended) = supervisors.join_next() => match ended?? {
                    Ended::NeverReady(status) => {
                        bail!("a worker could not start ({status}); see its message above")
                    }
                    Ended::Stopped => bail!("a worker was stopped before every worker was ready"),
                },
                _ = poll.tick() => {
                    let all = gateway.worker_reports().iter().all(|report| report.ready);
                    if all && gateway.readiness().is_ready() {
                        self.ready.cancel();
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Ends every worker and waits for the processes.
    async fn end(&self) -> Result<()> {
        self.stop.cancel();
        let mut supervisors = self.supervisors.lock().await;
        while let Some(ended) = supervisors.join_next().await {
            ended.map_err(|error| anyhow!(error).context("the supervisor of a worker"))??;
        }
        Ok(())
    }
}

/// Returns the gateway's knowledge of the worker `name`.
fn heartbeats(gateway: &Gateway, name: &WorkerName) -> Heartbeats {
    let report = gateway.worker_reports().into_iter().find(|report| report.name == *name);
    report.map_or(Heartbeats::default(), |WorkerReport { heartbeat, distrusted, .. }| Heartbeats {
        last: heartbeat,
        distrusted,
    })
}

/// The work of a start that takes long, for people.
const RETIRED: &str = "another gateway has taken this one for lost, because it did not reach the database server for \
     long; start it again";
const STARTING: &str = "loading models; a first start also measures the device, for up to 30 s";
