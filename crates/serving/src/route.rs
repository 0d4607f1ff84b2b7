//! Placement: the choice of the worker that will have a place soonest. A request
//! that is placed again stays on the same class of device and the same model,
//! because its cost was admitted for them.

use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{DeviceNanos, ModelName, WorkerEpoch};

use crate::model::ServedModel;
use crate::workers::{ConnectedWorker, PlacedCost, Workers};

/// A worker chosen for a request. The request's cost counts at the worker until
/// this is dropped.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) worker: Arc<ConnectedWorker>,
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

/// Chooses a worker that serves `model` and is none of `excluded`.
fn place(
    workers: &Workers,
    model: &ServedModel,
    cost: DeviceNanos,
    excluded: &[WorkerEpoch],
) -> Option<Placed> {
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
    let worker = soonest(able)?;
    let cost = worker.place(cost);
    Some(Placed { worker, _cost: cost })
}

/// Chooses a worker like [`place`], and waits up to `timeout` for one to come back.
pub(crate) async fn place_within(
    workers: &Workers,
    model: &ServedModel,
    cost: DeviceNanos,
    excluded: &[WorkerEpoch],
    timeout: Duration,
) -> Option<Placed> {
    let wait = async {
        loop {
            // The wait begins before the choice, so no change in between is missed.
            let changed = workers.changed();
            if let Some(placed) = place(workers, model, cost, excluded) {
                return placed;
            }
            // A worker that stops draining shows in its load alone, not in a change.
            let _ = tokio::time::timeout(LOAD_POLL, changed).await;
        }
    };
    tokio::time::timeout(timeout, wait).await.ok()
}

fn soonest(able: Vec<Arc<ConnectedWorker>>) -> Option<Arc<ConnectedWorker>> {
    able.into_iter().min_by_key(|worker| {
        let load = worker.load();
        // Idle workers predict no wait, so the number of requests decides among them.
        (worker.predicted_wait(), load.queued + load.running)
    })
}

/// Time between two looks at the workers' loads while a request waits for one.
const LOAD_POLL: Duration = Duration::from_millis(250);
