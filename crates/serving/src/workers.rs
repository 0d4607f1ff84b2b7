//! The configured workers: which are connected, what each serves, how busy each
//! is, and the streams of the requests that run on them.
//!
//! One keeper task for each worker connects, learns the announcement, follows
//! status and journal, and starts again when one of them ends. Every message of
//! a worker is checked where it arrives. A worker that sends an invalid report
//! gets no more requests.

mod announce;
mod assets;
mod batch_places;
mod keeper;
mod stream;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_config::Health;
use tollgate_domain::{DeviceClass, DeviceNanos, ModelName, StepCounts, WorkerEpoch, WorkerName};
use tollgate_ledger::gateways::OtherGateway;
use tollgate_wire::WorkerAddress;
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_wire::v1::{self, SettleRequest};
use tonic::transport::Channel;

pub(crate) use self::batch_places::{BatchPlace, BatchPlaces, PlaceSharers};
pub(crate) use self::stream::{
    Lost, Progress, RefusedWork, Running, StreamCheck, WorkOrder, WorkerEvent,
};
use crate::orders::Orders;
use crate::serving::SharedLedger;
use crate::settlement::Settlement;
use crate::worker_identity::{ProtocolViolations, Trust, WorkerIdentity};

/// The address of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEndpoint {
    /// The worker's name in config. The worker must announce the same name.
    pub name: WorkerName,
    /// The place where the worker listens.
    pub address: WorkerAddress,
    /// True if other gateways can reach the worker, too. They may order work there if they share
    /// the ledger.
    pub is_shareable: bool,
}

/// All configured workers; clones share them.
#[derive(Clone, Debug)]
pub struct Workers {
    slots: Arc<[WorkerSlot]>,
    violations: ProtocolViolations,
    losses: Arc<AtomicU64>,
    /// The terms of the health checks in force.
    health: Arc<watch::Sender<Health>>,
    /// Held while a request chooses its worker.
    choice: Arc<Mutex<()>>,
    /// Told when a place for batch work becomes free.
    batch_freed: Arc<Notify>,
    /// The number of gateways that divide the places for batch work.
    sharers: PlaceSharers,
}

#[derive(Debug)]
struct WorkerSlot {
    name: WorkerName,
    connected: watch::Receiver<Option<Arc<ConnectedWorker>>>,
    heartbeat: watch::Receiver<Option<Heartbeat>>,
    /// True while an admin wants no new requests there. A restart of the gateway ends it.
    rests: AtomicBool,
    /// True once everything that earlier starts of this gateway ordered is in the ledger.
    settled: watch::Receiver<bool>,
}

/// The options of [`Workers`].
pub(crate) struct WorkersOptions<'a> {
    pub(crate) endpoints: Vec<WorkerEndpoint>,
    pub(crate) config: &'a tollgate_config::Worker,
    /// Set if other gateways may use the workers, too.
    pub(crate) shared: Option<SharedLedger>,
}

/// An admin's wish for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The worker finishes its requests and gets no new ones.
    Resting,
    /// The worker gets requests.
    Awake,
}

/// The latest sign of life of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// The worker's epoch.
    pub epoch: WorkerEpoch,
    /// The number of status reports in this epoch. A worker sends two a second.
    pub times: u64,
}

/// One connection to one epoch of a worker.
#[derive(Debug)]
pub struct ConnectedWorker {
    /// The worker's checked announcement.
    pub identity: Arc<WorkerIdentity>,
    client: WorkerClient<Channel>,
    load: watch::Receiver<Load>,
    /// Predicted device time of the requests that this gateway has placed there.
    placed: Arc<AtomicU64>,
    /// Nanoseconds of the latest round trip; 0 before the first one.
    round_trip: AtomicU64,
    /// The orders of this gateway to all workers.
    orders: Orders,
    /// The places in the worker's queue for batch work.
    pub(crate) batch_places: BatchPlaces,
}

/// The load of a worker, as the worker reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait at the worker.
    pub queued: u32,
    /// Requests that run.
    pub running: u32,
    /// Predicted device time of both.
    pub backlog: DeviceNanos,
    /// The work and the memory of the engine.
    pub device: DeviceLoad,
    /// True if the worker takes no new requests.
    pub draining: bool,
    /// The state of the device, if the worker watches it.
    pub health: Option<v1::DeviceHealth>,
}

/// The work and the memory of an engine, as the worker reports them. Bills come from the
/// journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLoad {
    /// Blocks of the KV cache that hold something.
    pub kv_blocks_used: u32,
    /// Free blocks of the KV cache.
    pub kv_blocks_free: u32,
    /// Steps in this epoch.
    pub steps: u64,
    /// Device time of these steps.
    pub busy: DeviceNanos,
    /// The steps by length and by sequences, if the worker reports them.
    pub counts: Option<StepCounts>,
    /// Sequences that lost their place in the batch.
    pub preemptions: u64,
    /// Predicted device time of waiting interactive requests.
    pub waiting_interactive: DeviceNanos,
    /// Predicted device time of waiting batch requests.
    pub waiting_batch: DeviceNanos,
}

/// The state of a worker, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerReport {
    /// The worker's name.
    pub name: WorkerName,
    /// True if the worker is connected and takes requests.
    pub ready: bool,
    /// True if an admin lets the worker rest.
    pub resting: bool,
    /// True if the worker is connected and gets no requests because it sent an
    /// invalid report.
    pub distrusted: bool,
    /// The class of the device, while connected.
    pub class: Option<DeviceClass>,
    /// The device's name for people, while connected.
    pub device: Option<String>,
    /// The models that the worker serves, while connected.
    pub models: Vec<ModelName>,
    /// Requests that wait at the worker.
    pub queued: u32,
    /// Requests that run at the worker.
    pub running: u32,
    /// Predicted device time of both.
    pub backlog: DeviceNanos,
    /// The work and the memory of the engine, while connected.
    pub load: Option<DeviceLoad>,
    /// The state of the device, while connected and if the worker watches it.
    pub health: Option<v1::DeviceHealth>,
    /// The latest sign of life, if there ever was one.
    pub heartbeat: Option<Heartbeat>,
    /// The time of the latest message to the worker and back, while connected.
    pub round_trip: Option<Duration>,
}

impl Workers {
    /// Starts a keeper for each worker on `tasks`. The keepers write journals through
    /// `settlement`. They end at `stop`, which comes after the last request has been settled.
    pub(crate) fn start(
        options: WorkersOptions<'_>,
        settlement: &Settlement,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Self {
        let WorkersOptions { endpoints, config, shared } = options;
        // Shared, so that workers of one model share its tokenizer.
        let assets = Arc::new(assets::Assets::default());
        let violations = ProtocolViolations::default();
        let losses = Arc::new(AtomicU64::new(0));
        let (health, terms) = watch::channel(config.health.clone());
        let (batch_freed, sharers) = (Arc::<Notify>::default(), PlaceSharers::default());
        let slots = endpoints
            .into_iter()
            .map(|endpoint| {
                let (publish, connected) = watch::channel(None);
                let (beat, heartbeat) = watch::channel(None);
                let (settle, settled) = watch::channel(false);
                let name = endpoint.name.clone();
                let keeper = keeper::Keeper {
                    endpoint,
                    assets: Arc::clone(&assets),
                    settlement: settlement.clone(),
                    trust: Trust::new(violations.clone()),
                    violations: violations.clone(),
                    losses: Arc::clone(&losses),
                    health: terms.clone(),
                    batch_places: BatchPlaces::new(
                        config.queue_capacity,
                        sharers.clone(),
                        Arc::clone(&batch_freed),
                    ),
                    shared: shared.clone(),
                    settle,
                    publish,
                    beat,
                };
                tasks.spawn(keeper.keep(stop.clone()));
                let rests = AtomicBool::new(false);
                WorkerSlot { name, connected, heartbeat, rests, settled }
            })
            .collect();
        Self {
            slots,
            violations,
            losses,
            health: Arc::new(health),
            choice: Arc::default(),
            batch_freed,
            sharers,
        }
    }

    /// Returns the connected workers that take requests for `model`.
    pub(crate) fn serving(&self, model: &str) -> Vec<Arc<ConnectedWorker>> {
        self.taking_requests().filter(|worker| worker.identity.models.contains_key(model)).collect()
    }

    /// Returns the connected workers that may be given more requests.
    fn taking_requests(&self) -> impl Iterator<Item = Arc<ConnectedWorker>> {
        let awake = self.slots.iter().filter(|slot| slot.rest() == Rest::Awake);
        let connected = awake.filter_map(|slot| slot.connected.borrow().clone());
        connected.filter(|worker| worker.takes_requests())
    }

    /// Returns an admin's wish for the worker `name`; `None` if no worker has this name.
    pub fn rest_of(&self, name: &WorkerName) -> Option<Rest> {
        self.slots.iter().find(|slot| slot.name == *name).map(WorkerSlot::rest)
    }

    /// Lets the worker `name` rest, or wakes it. Its requests run to their end, also those
    /// that are choosing a worker at this moment.
    pub fn set_rest(&self, name: &WorkerName, rest: Rest) {
        if let Some(slot) = self.slots.iter().find(|slot| slot.name == *name) {
            // Relaxed: the flag orders no other memory, and a choice at this moment may miss it.
            slot.rests.store(rest == Rest::Resting, Ordering::Relaxed);
        }
    }

    /// Judges the devices of all workers by `health` from now on. A worker that is not
    /// connected gets the terms when it connects.
    pub fn set_health(&self, health: &Health) {
        // Keepers are told of a change only, so that a reload with equal terms sends nothing.
        self.health.send_if_modified(|terms| {
            let is_new = terms != health;
            terms.clone_from(health);
            is_new
        });
    }

    /// Divides the places for batch work in the workers' queues among this number of gateways.
    pub fn share_among(&self, gateways: NonZeroU32) {
        self.sharers.set(gateways);
    }

    /// Makes other choices of a worker wait until the guard is dropped.
    pub(crate) fn begin_choice(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data, so a panic leaves nothing half done.
        self.choice.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a place for batch work becomes free. A place that becomes free between
    /// this call and the first poll of the future counts.
    pub(crate) fn batch_place_freed(&self) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.batch_freed).notified_owned()
    }

    /// Returns the connected workers.
    pub fn connected(&self) -> impl Iterator<Item = Arc<ConnectedWorker>> {
        self.slots.iter().filter_map(|slot| slot.connected.borrow().clone())
    }

    /// True while every configured worker is connected. A worker that is not
    /// connected may come back within a second.
    pub(crate) fn all_connected(&self) -> bool {
        self.slots.iter().all(|slot| slot.connected.borrow().is_some())
    }

    /// True once everything that earlier starts of this gateway have ordered is in the ledger.
    pub(crate) fn are_settled(&self) -> bool {
        self.slots.iter().all(|slot| *slot.settled.borrow())
    }

    /// Has the workers of a gateway refuse its new work, and waits until all that it ordered is in
    /// the ledger. Returns false if one of them is not connected, or is none of this gateway's, or
    /// cannot tell.
    pub(crate) async fn settle(&self, lost: &OtherGateway) -> bool {
        for name in &lost.workers {
            let slot = self.slots.iter().find(|slot| slot.name.as_str() == name);
            let worker = slot.and_then(|slot| slot.connected.borrow().clone());
            let Some(worker) = worker.filter(|worker| worker.identity.is_shared) else {
                return false;
            };
            let request = SettleRequest { gateways: vec![lost.number] };
            if worker.client.clone().settle(request).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Waits until [`Self::are_settled`].
    pub(crate) async fn settled(&self) {
        for slot in self.slots.iter() {
            // A keeper that has ended, at shutdown, settles nothing any more.
            if slot.settled.clone().wait_for(|settled| *settled).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until a worker connects or leaves after this call. A change between
    /// this call and the first poll of the future counts.
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut waits = Vec::with_capacity(self.slots.len());
        for slot in self.slots.iter() {
            let mut connected = slot.connected.clone();
            // A change before this call must not end the wait.
            connected.mark_unchanged();
            waits.push(Box::pin(async move {
                // A keeper that has ended, at shutdown, changes nothing any more.
                if connected.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }));
        }
        async move {
            // `select_all` panics without a future.
            if waits.is_empty() {
                return std::future::pending().await;
            }
            futures_util::future::select_all(waits).await;
        }
    }

    /// Returns the state of each worker.
    pub fn report(&self) -> Vec<WorkerReport> {
        self.slots
            .iter()
            .map(|slot| {
                let worker = slot.connected.borrow().clone();
                let load = worker.as_ref().map(|worker| worker.load()).unwrap_or_default();
                let identity = worker.as_ref().map(|worker| &worker.identity);
                WorkerReport {
                    name: slot.name.clone(),
                    ready: slot.rest() == Rest::Awake
                        && worker.as_ref().is_some_and(|worker| worker.takes_requests()),
                    resting: slot.rest() == Rest::Resting,
                    distrusted: identity.is_some_and(|identity| !identity.is_trusted()),
                    class: identity.map(|identity| identity.class.clone()),
                    device: identity.map(|identity| identity.device.clone()),
                    models: identity
                        .map_or(Vec::new(), |identity| identity.models.keys().cloned().collect()),
                    queued: load.queued,
                    running: load.running,
                    backlog: load.backlog,
                    load: worker.as_ref().map(|_| load.device),
                    health: load.health,
                    heartbeat: *slot.heartbeat.borrow(),
                    round_trip: worker.as_ref().and_then(|worker| worker.round_trip()),
                }
            })
            .collect()
    }

    /// True while any worker takes requests.
    pub fn is_ready(&self) -> bool {
        self.taking_requests().next().is_some()
    }

    /// Returns the number of invalid messages from workers since the start.
    pub fn protocol_violations(&self) -> u64 {
        self.violations.count()
    }

    /// Returns how often a connected worker was lost since the start.
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }
}

impl WorkerSlot {
    fn rest(&self) -> Rest {
        if self.rests.load(Ordering::Relaxed) { Rest::Resting } else { Rest::Awake }
    }
}

impl ConnectedWorker {
    /// Makes a connection's state. `load` follows the worker's status.
    pub(crate) fn new(
        identity: Arc<WorkerIdentity>,
        client: WorkerClient<Channel>,
        load: watch::Receiver<Load>,
        orders: Orders,
        batch_places: BatchPlaces,
    ) -> Self {
        let (placed, round_trip) = (Arc::default(), AtomicU64::new(0));
        Self { identity, client, load, placed, round_trip, orders, batch_places }
    }

    /// True while the worker may be given more requests.
    pub fn takes_requests(&self) -> bool {
        !self.load().draining && self.identity.is_trusted()
    }

    /// Returns the time of the latest message to the worker and back, as the gateway
    /// measures it; `None` before the first measurement.
    pub fn round_trip(&self) -> Option<Duration> {
        let nanos = self.round_trip.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// Notes the time of a round trip.
    pub(crate) fn record_round_trip(&self, time: Duration) {
        // A figure for operators: no other memory depends on its order.
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        self.round_trip.store(nanos, Ordering::Relaxed);
    }

    /// Returns the worker's load.
    pub(crate) fn load(&self) -> Load {
        *self.load.borrow()
    }

    /// Returns the predicted device time before a new request would be done.
    pub(crate) fn predicted_wait(&self) -> DeviceNanos {
        // Requests that this gateway has just placed are not in the reported load yet.
        self.load().backlog.max(DeviceNanos(self.placed.load(Ordering::Relaxed)))
    }

    /// Counts `cost` as placed at the worker until the guard is dropped.
    pub(crate) fn place(&self, cost: DeviceNanos) -> PlacedCost {
        // An estimate for placement: no other memory depends on its order.
        self.placed.fetch_add(cost.nanos(), Ordering::Relaxed);
        PlacedCost { placed: Arc::clone(&self.placed), cost: cost.nanos() }
    }
}

/// A guard that keeps a request's predicted cost in its worker's account.
#[derive(Debug)]
pub(crate) struct PlacedCost {
    // Shared, because a request may outlive the connection that it was placed on.
    placed: Arc<AtomicU64>,
    cost: u64,
}

impl Drop for PlacedCost {
    fn drop(&mut self) {
        self.placed.fetch_sub(self.cost, Ordering::Relaxed);
    }
}

/// Time that a worker may take to answer a call that computes nothing.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(10);
