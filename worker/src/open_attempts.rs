//! The attempts that wait or run, by the gateway that ordered them. A gateway that is gone can be
//! retired: nothing new of it begins, and its last attempt can be waited for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Retired gateways that are remembered. Numbers are drawn one by one, and a gateway that is gone
/// for long asks no more.
const MOST_RETIRED: usize = 4_096;

/// The attempts of all gateways; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenAttempts(Arc<AttemptsState>);

#[derive(Debug, Default)]
struct AttemptsState {
    state: Mutex<OpenState>,
    /// Changes when an attempt ends.
    ended: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct OpenState {
    /// The number of open attempts of each gateway that has some.
    open: BTreeMap<u32, u64>,
    retired: VecDeque<u32>,
}

/// An attempt from its check to its last record in the journal. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct OpenAttempt {
    attempts: OpenAttempts,
    gateway: u32,
}

/// The refusal of work of a gateway that was retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetiredGateway;

impl OpenAttempts {
    /// Begins an attempt of the gateway with the number `gateway`.
    pub(crate) fn begin(&self, gateway: u32) -> Result<OpenAttempt, RetiredGateway> {
        let mut state = self.lock();
        // Checked and counted under one lock, so that no attempt begins unseen.
        if state.retired.contains(&gateway) {
            return Err(RetiredGateway);
        }
        *state.open.entry(gateway).or_default() += 1;
        drop(state);
        Ok(OpenAttempt { attempts: self.clone(), gateway })
    }

    /// Refuses new attempts of these gateways, and waits until theirs have ended.
    pub(crate) async fn retire(&self, gateways: &[u32]) {
        let mut ended = self.0.ended.subscribe();
        self.note_retired(gateways);
        // The sender lives as long as `self`, so an error cannot come.
        let _ = ended.wait_for(|()| !self.have_open(gateways)).await;
    }

    fn note_retired(&self, gateways: &[u32]) {
        let mut state = self.lock();
        for gateway in gateways {
            if !state.retired.contains(gateway) {
                state.retired.push_back(*gateway);
            }
        }
        while state.retired.len() > MOST_RETIRED {
            state.retired.pop_front();
        }
    }

    fn have_open(&self, gateways: &[u32]) -> bool {
        let state = self.lock();
        gateways.iter().any(|gateway| state.open.contains_key(gateway))
    }

    fn lock(&self) -> MutexGuard<'_, OpenState> {
        // Every change under the lock is complete before a panic could happen.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenAttempt {
    fn drop(&mut self) {
        let mut state = self.attempts.lock();
        if let Some(open) = state.open.get_mut(&self.gateway) {
            *open -= 1;
            if *open == 0 {
                state.open.remove(&self.gateway);
            }
        }
        drop(state);
        self.attempts.0.ended.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn retired_gateway_begins_nothing_and_is_waited_for() {
        let attempts = OpenAttempts::default();
        let (first, second) = (attempts.begin(3).expect("new"), attempts.begin(3).expect("new"));
        let other = attempts.begin(4).expect("new");
        let waiting = attempts.clone();
        let tracker = tokio_util::task::TaskTracker::new();
        let retired = tracker.spawn(async move { waiting.retire(&[2, 3]).await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(attempts.begin(3).map(drop), Err(RetiredGateway));
        assert_eq!(attempts.begin(2).map(drop), Err(RetiredGateway));
        drop(first);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!retired.is_finished(), "one attempt is open");
        drop(second);
        retired.await.expect("ends");
        drop((other, attempts.begin(4).expect("it was not retired")));
        attempts.retire(&[3]).await;
    }

    #[test]
    fn retired_gateways_are_bounded() {
        let attempts = OpenAttempts::default();
        let numbers: Vec<u32> = (1..=MOST_RETIRED as u32 + 1).collect();
        attempts.note_retired(&numbers);
        attempts.note_retired(&numbers[5..]);
        assert_eq!(attempts.lock().retired.len(), MOST_RETIRED);
        assert!(attempts.begin(1).is_ok());
        assert!(attempts.begin(2).is_err());
    }
}
