//! Slots for the computing of TLS handshakes. A handshake costs a millisecond of
//! arithmetic before the client is known. Only a few handshakes compute at a
//! time, and other ready tasks run between two of them. So a storm of new
//! connections delays new connections, and no request on an open connection.

use std::future::poll_fn;
use std::mem::replace;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::task::Poll;
use std::thread::available_parallelism;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::pending_handshakes::PeerWait;

/// A semaphore with one permit for each handshake that may compute.
pub(super) struct HandshakeSlots(Semaphore);

impl HandshakeSlots {
    /// Creates slots for half of the cores, at least one.
    pub(super) fn for_this_machine() -> Self {
        // The other half of the cores stays free for requests on open connections.
        Self::with_slots((available_parallelism().map_or(1, NonZeroUsize::get) / 2).max(1))
    }

    fn with_slots(slots: usize) -> Self {
        Self(Semaphore::new(slots))
    }

    /// Runs `work`, a handshake. The work holds a slot while it computes, and no slot
    /// while it waits for its `peer`, for `longest` in all. The wait for a slot does
    /// not count: in a burst of handshakes it is no fault of the peer.
    ///
    /// # Errors
    /// The peer took too long.
    #[expect(clippy::disallowed_methods, reason = "the waits for the peer are measured")]
    pub(super) async fn run<F: Future>(
        &self,
        work: F,
        peer: &PeerWait,
        longest: Duration,
    ) -> Result<F::Output, PeerTooSlow> {
        let mut work = pin!(work);
        let mut left = longest;
        loop {
            // The semaphore is never closed, so every wait ends with a permit.
            let slot = self.0.acquire().await;
            // Yields until every ready task has run and the network was polled.
            yield_now().await;
            let polled = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
            // Released before the wait, so that a silent peer holds no slot.
            drop(slot);
            if let Poll::Ready(done) = polled {
                return Ok(done);
            }
            let began = Instant::now();
            // The clock decides, because the alarm wakes this task as the peer does.
            let _ = timeout(left, peer.during(woken())).await;
            left = left.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(PeerTooSlow);
            }
        }
    }
}

/// The peer of a handshake took more time than it has.
#[derive(Debug)]
pub(super) struct PeerTooSlow;

/// Returns when the task is woken once more.
async fn woken() {
    let mut waited = false;
    poll_fn(|_| if replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::join;

    use super::*;

    impl HandshakeSlots {
        /// Runs `work` with a peer that has all the time.
        async fn run_patiently<F: Future>(&self, work: F) -> F::Output {
            self.run(work, &PeerWait::default(), Duration::MAX).await.expect("it has all the time")
        }
    }

    /// Returns the order of execution: `h` for a part of a handshake, `r` for a
    /// part of a request.
    async fn order_of_execution(slots: &HandshakeSlots) -> String {
        let ran = Mutex::new(String::new());
        let note = |what| ran.lock().expect("nobody panics").push(what);
        let has_ended = AtomicBool::new(false);
        let handshake = || {
            slots.run_patiently(async {
                for _ in 0..3 {
                    note('h');
                    yield_now().await;
                }
            })
        };
        let storm = async {
            let mut storm: Vec<_> = (0..100).map(|_| Box::pin(handshake())).collect();
            poll_fn(|context| {
                storm.retain_mut(|one| one.as_mut().poll(context).is_pending());
                if storm.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            has_ended.store(true, Ordering::Relaxed);
        };
        let request = async {
            while !has_ended.load(Ordering::Relaxed) {
                note('r');
                yield_now().await;
            }
        };
        join!(storm, request);
        ran.into_inner().expect("nobody panics")
    }

    fn longest_wait(ran: &str) -> usize {
        ran.split('r').map(str::len).max().unwrap_or_default()
    }

    #[tokio::test]
    async fn handshake_slots_bound_the_wait_of_requests() {
        let ran = order_of_execution(&HandshakeSlots::with_slots(2)).await;
        assert_eq!(ran.matches('h').count(), 300);
        // Two, and the two of the round before: `join` alternates the order.
        assert!(longest_wait(&ran) <= 4, "{ran}");
        // With a slot for each handshake the request waits for all of them.
        let ran = order_of_execution(&HandshakeSlots::with_slots(100)).await;
        assert!(longest_wait(&ran) >= 100, "{ran}");
    }

    /// A handshake that waits or is dropped holds no slot.
    #[tokio::test]
    async fn handshake_slots_are_free_while_waiting() {
        let slots = HandshakeSlots::with_slots(1);
        let silent = slots.run_patiently(std::future::pending::<()>());
        let waiting = slots.run_patiently(std::future::ready("done"));
        tokio::select! {
            biased;
            () = silent => unreachable!("it never ends"),
            done = waiting => assert_eq!(done, "done"),
        }
        assert_eq!(slots.0.available_permits(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn handshake_deadline_counts_waits_for_peer_alone() {
        let slots = HandshakeSlots::with_slots(1);
        let (peer, longest) = (PeerWait::default(), Duration::from_secs(5));
        let started = Instant::now();
        let silent = slots.run(std::future::pending::<()>(), &peer, longest).await;
        assert!(silent.is_err());
        assert_eq!(started.elapsed(), longest);
        // A slot that comes late costs the handshake nothing.
        let slot = slots.0.acquire().await.expect("never closed");
        let waits = slots.run(std::future::ready("done"), &peer, longest);
        let frees = async {
            tokio::time::sleep(longest * 10).await;
            drop(slot);
        };
        let (done, ()) = join!(waits, frees);
        assert_eq!(done.expect("in time"), "done");
    }
}
