//! Placement: the choice of the worker that will have a place soonest. A request
//! that is placed again stays on the same class of device and the same model,
//! because its cost was admitted for them.

use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{DeviceNanos, ModelName, Tier, WorkerEpoch};

use crate::job::Job;
use crate::model::ServedModel;
use crate::workers::{BatchPlace, ConnectedWorker, PlacedCost, Workers};

/// A worker chosen for a request. The request's cost counts at the worker until
/// this is dropped.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) worker: Arc<ConnectedWorker>,
    /// The place of batch work in the worker's queue. The request gives it back when it
    /// leaves the queue.
    pub(crate) batch_place: Option<BatchPlace>,
    _cost: PlacedCost,
}

/// Returns the model as the worker that looks best now serves it; `None` if no
/// worker takes requests for the model.
pub fn offer(workers: &Workers, model: &str) -> Option<Arc<ServedModel>> {
    let best = soonest(workers.serving(model))?;
    best.identity.models.get(model).cloned()
}

/// Returns the names of the models that any connected worker serves, sorted.
pub fn offered(workers: &Workers) -> Vec<ModelName> {
    let mut names: Vec<ModelName> = workers
        .connected()
        .flat_map(|worker| worker.identity.models.keys().cloned().collect::<Vec<_>>())
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Chooses a worker that serves the job's model and is none of `excluded`. Batch work also
/// needs a place in the worker's queue.
fn place(
    workers: &Workers,
    job: &Job,
    cost: DeviceNanos,
    excluded: &[WorkerEpoch],
) -> Option<Placed> {
    let model = &job.model;
    let mut able = workers.serving(model.name.as_str());
    able.retain(|worker| {
        // Other weights would answer differently, another class would cost otherwise.
        let same = worker
            .identity
            .models
            .get(model.name.as_str())
            .is_some_and(|served| served.class == model.class && served.hash == model.hash);
        same && !excluded.contains(&worker.identity.epoch)
    });
    // Requests that choose at once must see each other's cost, or both take one worker.
    let _choice = workers.begin_choice();
    let (worker, batch_place) = match job.tier {
        Tier::Interactive => (soonest(able)?, None),
        Tier::Batch => {
            able.sort_by_key(order);
            able.into_iter().find_map(|worker| {
                let place = worker.batch_places.take()?;
                Some((worker, Some(place)))
            })?
        }
    };
    let cost = worker.place(cost);
    Some(Placed { worker, batch_place, _cost: cost })
}

/// Chooses a worker like [`place`], and waits up to `timeout` for one to come back.
pub(crate) async fn place_within(
    workers: &Workers,
    job: &Job,
    cost: DeviceNanos,
    excluded: &[WorkerEpoch],
    timeout: Duration,
) -> Option<Placed> {
    let wait = async {
        loop {
            // The wait begins before the choice, so no change in between is missed.
            let (changed, freed) = (workers.changed(), workers.batch_place_freed());
            if let Some(placed) = place(workers, job, cost, excluded) {
                return placed;
            }
            // A worker that stops draining shows in its load alone, not in a change.
            tokio::select! {
                () = changed => {}
                () = freed, if job.tier == Tier::Batch => {}
                () = tokio::time::sleep(LOAD_POLL) => {}
            }
        }
    };
    tokio::time::timeout(timeout, wait).await.ok()
}

fn soonest(able: Vec<Arc<ConnectedWorker>>) -> Option<Arc<ConnectedWorker>> {
    able.into_iter().min_by_key(order)
}

/// Returns the place of a worker in the order in which workers are chosen.
fn order(worker: &Arc<ConnectedWorker>) -> (DeviceNanos, u32) {
    let load = worker.load();
    // Idle workers predict no wait, so the number of requests decides among them.
    (worker.predicted_wait(), load.queued + load.running)
}

/// Time between two looks at the workers' loads while a request waits for one.
const LOAD_POLL: Duration = Duration::from_millis(250);
