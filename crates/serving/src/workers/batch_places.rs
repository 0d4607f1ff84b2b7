//! The places in a worker's queue that batch work may fill: a quarter of the queue, so that
//! interactive requests always find room. Gateways that share the worker divide them.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::Notify;

/// The divisor of a worker's queue: batch work fills at most one part in this many.
const QUEUE_PARTS: u32 = 4;

/// The number of gateways that divide the places of all workers; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct PlaceSharers(Arc<AtomicU32>);

/// The places of one worker for batch requests that wait there; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct BatchPlaces {
    places: u32,
    sharers: PlaceSharers,
    taken: Arc<AtomicU32>,
    /// Told when a place of any worker becomes free.
    freed: Arc<Notify>,
}

/// The place of a batch request in a worker's queue. The place becomes free when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct BatchPlace {
    taken: Arc<AtomicU32>,
    freed: Arc<Notify>,
}

impl PlaceSharers {
    /// Sets the number of gateways. Places that are taken stay taken.
    pub(crate) fn set(&self, gateways: NonZeroU32) {
        // Relaxed: the number guards no other memory.
        self.0.store(gateways.get(), Ordering::Relaxed);
    }
}

impl Default for PlaceSharers {
    fn default() -> Self {
        Self(Arc::new(AtomicU32::new(1)))
    }
}

impl BatchPlaces {
    /// Makes the places of a worker whose queue holds `queue_capacity` requests.
    pub(crate) fn new(queue_capacity: u32, sharers: PlaceSharers, freed: Arc<Notify>) -> Self {
        Self { places: queue_capacity / QUEUE_PARTS, sharers, taken: Arc::default(), freed }
    }

    /// Takes a place if one is free.
    pub(crate) fn take(&self) -> Option<BatchPlace> {
        let gateways = self.sharers.0.load(Ordering::Relaxed);
        // At least one, so that batch work runs on any worker.
        let most = (self.places / gateways).max(1);
        let add = |taken: u32| (taken < most).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(BatchPlace { taken: Arc::clone(&self.taken), freed: Arc::clone(&self.freed) })
    }
}

impl Drop for BatchPlace {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
        // One place serves one request, but the first one told may have left.
        self.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(places: &BatchPlaces) -> Vec<BatchPlace> {
        std::iter::from_fn(|| places.take()).collect()
    }

    #[test]
    fn batch_places_are_a_quarter_of_the_queue() {
        for (queue, expected) in [(1, 1), (4, 1), (9, 2), (256, 64)] {
            let places = BatchPlaces::new(queue, PlaceSharers::default(), Arc::default());
            let taken = take_all(&places);
            assert_eq!(taken.len(), expected, "{queue}");
            drop(taken);
            assert!(places.take().is_some());
        }
    }

    #[test]
    fn batch_places_are_divided_among_gateways() {
        let sharers = PlaceSharers::default();
        let places = BatchPlaces::new(64, sharers.clone(), Arc::default());
        let mut taken = take_all(&places);
        assert_eq!(taken.len(), 16);
        let gateways = |number| sharers.set(NonZeroU32::new(number).expect("not zero"));
        gateways(5);
        taken.truncate(4);
        assert!(places.take().is_none(), "a fifth of the places is taken");
        taken.truncate(2);
        assert_eq!(take_all(&places).len(), 1);
        gateways(100);
        taken.clear();
        assert_eq!(take_all(&places).len(), 1);
    }
}
