//! The places in a worker's queue that batch work may fill: a quarter of the queue, so that
//! interactive requests always find room.

use std::sync::Arc;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The divisor of a worker's queue: batch work fills at most one part in this many.
const QUEUE_PARTS: u32 = 4;

/// The places of one worker for batch requests that wait there; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct BatchPlaces {
    free: Arc<Semaphore>,
    /// Told when a place of any worker becomes free.
    freed: Arc<Notify>,
}

/// The place of a batch request in a worker's queue. The place becomes free when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct BatchPlace {
    /// Released before the waiting requests are told; `None` only while dropping.
    permit: Option<OwnedSemaphorePermit>,
    freed: Arc<Notify>,
}

impl BatchPlaces {
    /// Makes the places of a worker whose queue holds `queue_capacity` requests.
    pub(crate) fn new(queue_capacity: u32, freed: Arc<Notify>) -> Self {
        // At least one, so that batch work runs on any worker.
        let places = (queue_capacity / QUEUE_PARTS).max(1);
        Self { free: Arc::new(Semaphore::new(places as usize)), freed }
    }

    /// Takes a place if one is free.
    pub(crate) fn take(&self) -> Option<BatchPlace> {
        let permit = Arc::clone(&self.free).try_acquire_owned().ok()?;
        Some(BatchPlace { permit: Some(permit), freed: Arc::clone(&self.freed) })
    }
}

impl Drop for BatchPlace {
    fn drop(&mut self) {
        self.permit = None;
        // One place serves one request, but the first one told may have left.
        self.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_places_are_a_quarter_of_the_queue() {
        for (queue, expected) in [(1, 1), (4, 1), (9, 2), (256, 64)] {
            let places = BatchPlaces::new(queue, Arc::default());
            let taken: Vec<_> = std::iter::from_fn(|| places.take()).collect();
            assert_eq!(taken.len(), expected, "{queue}");
            drop(taken);
            assert!(places.take().is_some());
        }
    }
}
