//! Whose prompt is counted next. Prompts become tokens on a few threads only;
//! those who share the devices take turns there, one prompt each, so that
//! whoever sends a thousand waits behind himself and not before others. What
//! waits is bounded, for each of them and in all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::reply::ApiError;

/// Requests of one holder that may wait to be counted.
const MOST_OF_ONE: usize = 256;

/// Requests of all that may wait to be counted.
const MOST_OF_ALL: usize = 4_096;

/// The places where prompts are counted, and who waits for them.
#[derive(Debug)]
pub(super) struct Turns {
    places: Arc<Semaphore>,
    waiting: Mutex<Waiting>,
}

/// Holders that have a request waiting; others are not remembered.
#[derive(Debug, Default)]
struct Waiting {
    all: usize,
    holders: HashMap<String, Holder>,
}

#[derive(Debug)]
struct Holder {
    waiting: usize,
    /// Of its requests one at a time stands in line for a place.
    turn: Arc<Semaphore>,
}

impl Turns {
    pub(super) fn new(places: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), waiting: Mutex::default() }
    }

    /// A place, once it is the turn of `holder`.
    ///
    /// # Errors
    /// Too many wait already.
    pub(super) async fn take(&self, holder: &str) -> Result<OwnedSemaphorePermit, ApiError> {
        let (_leaves, turn) = self.enter(holder)?;
        let _turn = turn.acquire_owned().await.map_err(|_| ApiError::Internal)?;
        Arc::clone(&self.places).acquire_owned().await.map_err(|_| ApiError::Internal)
    }

    fn enter<'a>(&'a self, name: &'a str) -> Result<(Leaves<'a>, Arc<Semaphore>), ApiError> {
        let mut waiting = self.lock();
        let own = waiting.holders.get(name).map_or(0, |holder| holder.waiting);
        if own >= MOST_OF_ONE || waiting.all >= MOST_OF_ALL {
            return Err(ApiError::Overloaded { retry_after: Some(Duration::from_secs(1)) });
        }
        waiting.all += 1;
        let holder = waiting
            .holders
            .entry(name.to_owned())
            .or_insert_with(|| Holder { waiting: 0, turn: Arc::new(Semaphore::new(1)) });
        holder.waiting += 1;
        Ok((Leaves { turns: self, name }, Arc::clone(&holder.turn)))
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("nobody panics under it")
    }
}

/// Somebody who waits; dropped, he does not any more.
struct Leaves<'a> {
    turns: &'a Turns,
    name: &'a str,
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        let mut waiting = self.turns.lock();
        waiting.all -= 1;
        if let Some(holder) = waiting.holders.get_mut(self.name) {
            holder.waiting -= 1;
            if holder.waiting == 0 {
                waiting.holders.remove(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets every task that can go on do so.
    async fn settle() {
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn whoever_comes_later_with_one_is_not_behind_a_hundred() {
        let turns = Arc::new(Turns::new(1));
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.take("mallory").await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        let enter = |name: &'static str, tasks: &mut tokio::task::JoinSet<()>| {
            let (turns, order) = (Arc::clone(&turns), Arc::clone(&order));
            tasks.spawn(async move {
                let _place = turns.take(name).await.unwrap();
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
        assert!(place <= 1, "behind {place} of another's");
        assert_eq!(order.len(), 101);
        assert!(turns.lock().holders.is_empty() && turns.lock().all == 0, "nobody is remembered");
    }

    #[tokio::test]
    async fn one_holder_cannot_fill_it() {
        let turns = Arc::new(Turns::new(1));
        let held = turns.take("mallory").await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..MOST_OF_ONE {
            let turns = Arc::clone(&turns);
            tasks.spawn(async move { turns.take("mallory").await.map(drop) });
        }
        settle().await;
        let refused = turns.take("mallory").await.unwrap_err();
        assert!(matches!(refused, ApiError::Overloaded { retry_after: Some(_) }), "{refused:?}");
        drop(held);
        drop(turns.take("acme").await.unwrap());
        assert!(tasks.join_all().await.into_iter().all(|taken| taken.is_ok()));
        // Whoever leaves while waiting makes room.
        let held = turns.take("mallory").await.unwrap();
        let waits = tokio::time::timeout(Duration::from_millis(1), turns.take("mallory")).await;
        assert!(waits.is_err() && turns.lock().all == 0);
        drop(held);
    }
}
