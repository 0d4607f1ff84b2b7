//! Turns for the tokenizing threads. The owners of device shares take turns,
//! one prompt each, so that an owner with a thousand prompts waits behind its
//! own prompts and not in front of others. The number of waiting prompts is
//! bounded, for each owner and in all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Refusal, RequestError};

/// Requests of one owner that may wait.
const MOST_OF_ONE_OWNER: usize = 256;

/// Requests of all owners that may wait.
const MOST_OF_ALL: usize = 4_096;

/// A fair queue in front of the tokenizing threads.
#[derive(Debug)]
pub(super) struct FairQueue {
    slots: Arc<Semaphore>,
    waiting: Mutex<Waiting>,
}

/// The owners that have a request waiting. An owner without one is forgotten.
#[derive(Debug, Default)]
struct Waiting {
    all: usize,
    owners: HashMap<String, ShareOwner>,
}

#[derive(Debug)]
struct ShareOwner {
    waiting: usize,
    /// Lets one request of the owner at a time wait for a slot.
    turn: Arc<Semaphore>,
}

impl FairQueue {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: Arc::new(Semaphore::new(slots)), waiting: Mutex::default() }
    }

    /// Waits for the turn of `owner` and returns a slot.
    ///
    /// # Errors
    /// Too many requests wait already.
    pub(super) async fn acquire(&self, owner: &str) -> Result<OwnedSemaphorePermit, RequestError> {
        let (_waiter, turn) = self.enter(owner)?;
        // The slots' semaphore is first come, first served. Since each owner has
        // one request in that line, the owners take turns.
        let _turn = turn.acquire_owned().await.map_err(|_| RequestError::INTERNAL)?;
        Arc::clone(&self.slots).acquire_owned().await.map_err(|_| RequestError::INTERNAL)
    }

    fn enter<'a>(&'a self, name: &'a str) -> Result<(Waiter<'a>, Arc<Semaphore>), Refusal> {
        let mut waiting = self.lock();
        let own = waiting.owners.get(name).map_or(0, |owner| owner.waiting);
        if own >= MOST_OF_ONE_OWNER || waiting.all >= MOST_OF_ALL {
            return Err(Refusal::Overloaded { retry_after: Some(Duration::from_secs(1)) });
        }
        waiting.all += 1;
        let owner = waiting
            .owners
            .entry(name.to_owned())
            .or_insert_with(|| ShareOwner { waiting: 0, turn: Arc::new(Semaphore::new(1)) });
        owner.waiting += 1;
        Ok((Waiter { queue: self, name }, Arc::clone(&owner.turn)))
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Both counters change together, so a poisoned lock still holds true sums.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that waits. Dropping the waiter removes the request from the counts.
struct Waiter<'a> {
    queue: &'a FairQueue,
    name: &'a str,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        waiting.all -= 1;
        if let Some(owner) = waiting.owners.get_mut(self.name) {
            owner.waiting -= 1;
            // Bounds the map by the requests that wait.
            if owner.waiting == 0 {
                waiting.owners.remove(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs every task that is ready.
    async fn settle() {
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn fair_queue_serves_second_owner_next() {
        let queue = Arc::new(FairQueue::new(1));
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = queue.acquire("mallory").await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        let enter = |name: &'static str, tasks: &mut tokio::task::JoinSet<()>| {
            let (queue, order) = (Arc::clone(&queue), Arc::clone(&order));
            tasks.spawn(async move {
                let _place = queue.acquire(name).await.unwrap();
                order.lock().unwrap().push(name);
            });
        };
        for _ in 0..100 {
            enter("mallory", &mut tasks);
        }
        settle().await;
        enter("acme", &mut tasks);
        settle().await;
        drop(first);
        tasks.join_all().await;
        let order = order.lock().unwrap();
        let place = order.iter().position(|name| *name == "acme").unwrap();
        assert!(place <= 1, "{place} prompts of the other owner came first");
        assert_eq!(order.len(), 101);
        assert!(
            queue.lock().owners.is_empty() && queue.lock().all == 0,
            "owners without a waiting request are forgotten"
        );
    }

    #[tokio::test]
    async fn fair_queue_bounds_one_owner() {
        let queue = Arc::new(FairQueue::new(1));
        let held = queue.acquire("mallory").await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..MOST_OF_ONE_OWNER {
            let queue = Arc::clone(&queue);
            tasks.spawn(async move { queue.acquire("mallory").await.map(drop) });
        }
        settle().await;
        let refused = queue.acquire("mallory").await.unwrap_err();
        assert!(
            matches!(refused, RequestError::Refused(Refusal::Overloaded { retry_after: Some(_) })),
            "{refused:?}"
        );
        drop(held);
        drop(queue.acquire("acme").await.unwrap());
        assert!(tasks.join_all().await.into_iter().all(|taken| taken.is_ok()));
        // A request that leaves while it waits makes room.
        let held = queue.acquire("mallory").await.unwrap();
        let waits = tokio::time::timeout(Duration::from_millis(1), queue.acquire("mallory")).await;
        assert!(waits.is_err() && queue.lock().all == 0);
        drop(held);
    }
}
