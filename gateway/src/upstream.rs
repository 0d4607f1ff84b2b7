//! The workers, as the gateway sees them: who is there, what each serves, how
//! busy it is, and the streams of requests that run on them.
//!
//! One keeper task for each configured worker connects, learns, follows its
//! status and its journal, and starts over when anything of that ends. A
//! worker is heard, never trusted: what it says is checked where it arrives,
//! and one that lies is dropped and counted.

mod announce;
mod assets;
mod connect;
pub(crate) mod fuzz;
mod journal;
mod keeper;
mod orders;
mod run;
mod terms;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_domain::{
    CostTable, DeviceClass, DeviceNanos, ModelName, SamplingDefaults, WorkerEpoch, WorkerName,
};
use tollgate_text::ChatTemplate;
use tollgate_wire::v1::{self, worker_client::WorkerClient};
use tonic::transport::Channel;

pub(crate) use self::assets::BuiltTokenizer;
pub(crate) use self::journal::Books;
pub(crate) use self::orders::Orders;
pub(crate) use self::run::{Lost, Order, Progress, Running, Said};

/// Where a worker listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEndpoint {
    /// Its name in config; its announcement must say the same.
    pub name: WorkerName,
    /// Its Unix socket.
    pub socket: PathBuf,
}

/// Why a worker's connection ended, or never began.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// Its socket cannot be reached.
    #[error("cannot connect to the worker's socket")]
    Connect(#[source] std::io::Error),
    /// The connection broke.
    #[error("the connection to the worker broke")]
    Transport(#[source] tonic::transport::Error),
    /// It refused or broke off a call.
    #[error("the worker broke off a call")]
    Call(#[source] Box<tonic::Status>),
    /// It did not answer in time.
    #[error("the worker did not answer while {0}")]
    Silent(&'static str),
    /// What it says cannot be true.
    #[error("the worker's word is refused: {0}")]
    Lied(&'static str),
    /// Its cost table is refused.
    #[error("the worker's cost table is refused")]
    CostTable(#[source] serde_json::Error),
    /// Its tokenizer or template is refused.
    #[error("the worker's tokenizer or template is refused")]
    Text(#[source] tollgate_text::TextError),
    /// It ended a stream that has no end.
    #[error("the worker ended its {0} stream")]
    Ended(&'static str),
}

impl From<tonic::Status> for UpstreamError {
    fn from(status: tonic::Status) -> Self {
        Self::Call(Box::new(status))
    }
}

/// All configured workers; clones share them.
#[derive(Clone, Debug)]
pub struct Workers {
    slots: Arc<[Slot]>,
    counters: Arc<Counters>,
}

#[derive(Debug)]
struct Slot {
    name: WorkerName,
    online: watch::Receiver<Option<Arc<Online>>>,
    heard: watch::Receiver<Option<Heard>>,
}

/// That a worker gives signs of life, for whoever started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Which life of it.
    pub epoch: WorkerEpoch,
    /// How often it has said how it is; a worker says so twice a second.
    pub times: u64,
}

/// What went wrong with workers since the start.
#[derive(Debug, Default)]
struct Counters {
    lies: AtomicU64,
    losses: AtomicU64,
}

/// A worker that is there: one connection to one epoch of it.
#[derive(Debug)]
pub(crate) struct Online {
    pub(crate) name: WorkerName,
    pub(crate) epoch: WorkerEpoch,
    pub(crate) class: DeviceClass,
    /// The device's name, for people.
    device: String,
    pub(crate) models: BTreeMap<ModelName, Arc<ServedModel>>,
    client: WorkerClient<Channel>,
    load: watch::Receiver<Load>,
    /// Predicted device time of what this gateway has placed there.
    placed: Arc<AtomicU64>,
    /// What this gateway has ordered there and elsewhere.
    orders: Orders,
    trust: Trust,
}

/// Whether a worker has said what cannot be true. Who has gets nothing new
/// for the rest of its life, whether its connection lasts or not.
#[derive(Clone, Debug)]
pub(super) struct Trust {
    lied: Arc<Mutex<Option<WorkerEpoch>>>,
    counters: Arc<Counters>,
}

/// How busy a worker says it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) queued: u32,
    pub(crate) running: u32,
    pub(crate) backlog: DeviceNanos,
    pub(crate) draining: bool,
    /// How its device is, where that is watched.
    pub(crate) health: Option<v1::DeviceHealth>,
}

/// A model as a worker serves it.
#[derive(Debug)]
pub(crate) struct ServedModel {
    pub(crate) name: ModelName,
    /// Of weights and config, hex.
    pub(crate) hash: String,
    pub(crate) class: DeviceClass,
    pub(crate) text: Arc<BuiltTokenizer>,
    /// None: completions only.
    pub(crate) template: Option<Arc<ChatTemplate>>,
    /// Tokens, prompt and completion together.
    pub(crate) context_length: u32,
    /// Rows of logits.
    pub(crate) vocabulary: u32,
    pub(crate) table: CostTable,
    /// The sampling parameters of requests that name none.
    pub(crate) defaults: SamplingDefaults,
}

/// A worker for the operator: `/readyz`, metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerReport {
    /// Its name.
    pub name: WorkerName,
    /// Whether it is connected and takes requests.
    pub ready: bool,
    /// Whether it is connected and takes none because it lied.
    pub distrusted: bool,
    /// The class of its device, while connected.
    pub class: Option<DeviceClass>,
    /// The device's name for people, while connected.
    pub device: Option<String>,
    /// The models it serves, while connected.
    pub models: Vec<ModelName>,
    /// Requests that wait there.
    pub queued: u32,
    /// Requests that run there.
    pub running: u32,
    /// Predicted device time of both.
    pub backlog: DeviceNanos,
    /// How its device is, while connected and where that is watched.
    pub health: Option<v1::DeviceHealth>,
    /// What was last heard of it, if anything ever was.
    pub heard: Option<Heard>,
}

impl Workers {
    /// Starts a keeper for each of `endpoints` on `tasks`; they end at `stop`,
    /// which comes after the last request has been settled. Journals go into
    /// `books`.
    pub(crate) fn start(
        endpoints: Vec<WorkerEndpoint>,
        books: &Books,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Self {
        let (left, ending) = (books.clone(), stop.clone());
        tasks.spawn(ending.run_until_cancelled_owned(async move {
            left.close_what_was_left().await;
        }));
        let assets = Arc::new(assets::Assets::default());
        let counters = Arc::new(Counters::default());
        let slots = endpoints
            .into_iter()
            .map(|endpoint| {
                let (publish, online) = watch::channel(None);
                let (hear, heard) = watch::channel(None);
                let name = endpoint.name.clone();
                let keeper = keeper::Keeper {
                    endpoint,
                    assets: Arc::clone(&assets),
                    books: books.clone(),
                    trust: Trust { lied: Arc::default(), counters: Arc::clone(&counters) },
                    publish,
                    hear,
                };
                tasks.spawn(keeper.keep(stop.clone()));
                Slot { name, online, heard }
            })
            .collect();
        Self { slots, counters }
    }

    /// The workers that are there and take requests for `model`.
    pub(crate) fn serving(&self, model: &str) -> Vec<Arc<Online>> {
        self.online()
            .filter(|online| online.takes_requests() && online.models.contains_key(model))
            .collect()
    }

    /// The workers that are there.
    pub(crate) fn online(&self) -> impl Iterator<Item = Arc<Online>> {
        self.slots.iter().filter_map(|slot| slot.online.borrow().clone())
    }

    /// Whether every configured worker is connected; one that is not may come
    /// back within a second.
    pub(crate) fn are_all_there(&self) -> bool {
        self.slots.iter().all(|slot| slot.online.borrow().is_some())
    }

    /// Waits until any worker comes or goes after this call, which counts
    /// from now on, not from when it is first awaited.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut waits = Vec::with_capacity(self.slots.len());
        for slot in self.slots.iter() {
            let mut online = slot.online.clone();
            online.mark_unchanged();
            waits.push(Box::pin(async move {
                // A keeper that has ended, at shutdown, changes nothing any more.
                if online.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }));
        }
        async move {
            if waits.is_empty() {
                return std::future::pending().await;
            }
            futures_util::future::select_all(waits).await;
        }
    }

    /// Each worker as it stands.
    pub fn report(&self) -> Vec<WorkerReport> {
        self.slots
            .iter()
            .map(|slot| {
                let online = slot.online.borrow().clone();
                let load = online.as_ref().map(|online| online.load()).unwrap_or_default();
                WorkerReport {
                    name: slot.name.clone(),
                    ready: online.as_ref().is_some_and(|online| online.takes_requests()),
                    distrusted: online.as_ref().is_some_and(|online| !online.is_trusted()),
                    class: online.as_ref().map(|online| online.class.clone()),
                    device: online.as_ref().map(|online| online.device.clone()),
                    models: online
                        .map_or(Vec::new(), |online| online.models.keys().cloned().collect()),
                    queued: load.queued,
                    running: load.running,
                    backlog: load.backlog,
                    health: load.health,
                    heard: *slot.heard.borrow(),
                }
            })
            .collect()
    }

    /// Whether any worker takes requests.
    pub fn is_ready(&self) -> bool {
        self.online().any(|online| online.takes_requests())
    }

    /// How often a worker said what cannot be true.
    pub fn lies(&self) -> u64 {
        self.counters.lies.load(Ordering::Relaxed)
    }

    /// How often a worker that had been there was lost.
    pub fn losses(&self) -> u64 {
        self.counters.losses.load(Ordering::Relaxed)
    }
}

impl Online {
    /// Whether it may be given more.
    fn takes_requests(&self) -> bool {
        !self.load().draining && self.is_trusted()
    }

    fn is_trusted(&self) -> bool {
        self.trust.holds(self.epoch)
    }

    /// Notes that it lied.
    pub(crate) fn distrust(&self) {
        self.trust.lose(self.epoch);
    }

    /// How busy it is.
    pub(crate) fn load(&self) -> Load {
        *self.load.borrow()
    }

    /// Predicted device time before a new request would be done: what it says
    /// itself, or what we have sent it where that has not reached its status.
    pub(crate) fn predicted_wait(&self) -> DeviceNanos {
        self.load().backlog.max(DeviceNanos(self.placed.load(Ordering::Relaxed)))
    }

    /// Counts `cost` as placed there until the guard is dropped.
    pub(crate) fn place(&self, cost: DeviceNanos) -> PlacedCost {
        self.placed.fetch_add(cost.nanos(), Ordering::Relaxed);
        PlacedCost { placed: Arc::clone(&self.placed), cost: cost.nanos() }
    }
}

impl Trust {
    fn holds(&self, epoch: WorkerEpoch) -> bool {
        *self.lock() != Some(epoch)
    }

    /// Counts a lie told in `epoch`, and says once what follows from it.
    fn lose(&self, epoch: WorkerEpoch) {
        self.counters.lies.fetch_add(1, Ordering::Relaxed);
        if self.lock().replace(epoch) != Some(epoch) {
            tracing::error!(%epoch, "a worker lied: it gets no requests until it is started anew");
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<WorkerEpoch>> {
        self.lied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a request's predicted cost in its worker's account while it runs.
#[derive(Debug)]
pub(crate) struct PlacedCost {
    placed: Arc<AtomicU64>,
    cost: u64,
}

impl Drop for PlacedCost {
    fn drop(&mut self) {
        self.placed.fetch_sub(self.cost, Ordering::Relaxed);
    }
}

/// How long a worker may take to answer a call that computes nothing.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod lies;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
