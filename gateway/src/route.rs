//! Where: the worker that will have a place soonest. A request that has to be
//! placed again stays on the same class of device and the same model, for
//! which its cost was admitted.

use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{DeviceNanos, ModelName, WorkerEpoch};

use crate::upstream::{Online, PlacedCost, ServedModel, Workers};

/// A worker chosen for a request; its cost counts there until this is dropped.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) worker: Arc<Online>,
    _cost: PlacedCost,
}

/// The model as the worker that looks best now serves it; none where no
/// worker takes requests for it.
pub(crate) fn offer(workers: &Workers, model: &str) -> Option<Arc<ServedModel>> {
    let best = soonest(workers.serving(model))?;
    best.models.get(model).cloned()
}

/// The names that any worker serves now.
pub(crate) fn offered(workers: &Workers) -> Vec<ModelName> {
    let mut names: Vec<ModelName> = workers
        .online()
        .flat_map(|online| online.models.keys().cloned().collect::<Vec<_>>())
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Chooses a worker that serves `model` and is none of `refused`.
pub(crate) fn place(
    workers: &Workers,
    model: &ServedModel,
    cost: DeviceNanos,
    refused: &[WorkerEpoch],
) -> Option<Placed> {
    let mut able = workers.serving(model.name.as_str());
    able.retain(|online| {
        let same = online
            .models
            .get(model.name.as_str())
            .is_some_and(|served| served.class == model.class && served.hash == model.hash);
        same && !refused.contains(&online.epoch)
    });
    let worker = soonest(able)?;
    let cost = worker.place(cost);
    Some(Placed { worker, _cost: cost })
}

/// As [`place`], waiting up to `patience` for a worker to come back.
pub(crate) async fn place_within(
    workers: &Workers,
    model: &ServedModel,
    cost: DeviceNanos,
    refused: &[WorkerEpoch],
    patience: Duration,
) -> Option<Placed> {
    let wait = async {
        loop {
            let changed = workers.changed();
            if let Some(placed) = place(workers, model, cost, refused) {
                return placed;
            }
            // A worker that stops draining says so in its load alone.
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    };
    tokio::time::timeout(patience, wait).await.ok()
}

fn soonest(able: Vec<Arc<Online>>) -> Option<Arc<Online>> {
    able.into_iter().min_by_key(|online| {
        let load = online.load();
        (online.predicted_wait(), load.queued + load.running)
    })
}

/// How often workers' loads are looked at while a request waits for one.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
