//! Handshakes take turns. Each is a millisecond of arithmetic for whoever asks,
//! before we know who asks: of hundreds at once only a few compute at a time,
//! and between two of them whatever else is ready runs first. So a storm of
//! new connections makes new connections wait, and no request on an old one.

use std::future::poll_fn;
use std::mem::replace;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::task::Poll;
use std::thread::available_parallelism;

use tokio::sync::Semaphore;
use tokio::task::yield_now;

/// How many may compute at once.
pub(super) struct Turns(Semaphore);

impl Turns {
    /// Half of the cores, at least one.
    pub(super) fn for_this_machine() -> Self {
        Self::of((available_parallelism().map_or(1, NonZeroUsize::get) / 2).max(1))
    }

    fn of(at_once: usize) -> Self {
        Self(Semaphore::new(at_once))
    }

    /// `work`, which takes a turn whenever it computes, and none while it
    /// waits for its peer.
    pub(super) async fn take<F: Future>(&self, work: F) -> F::Output {
        let mut work = pin!(work);
        loop {
            let turn = self.0.acquire().await;
            // Until all that is ready has run, and the network was asked.
            yield_now().await;
            let polled = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
            drop(turn);
            if let Poll::Ready(done) = polled {
                return done;
            }
            woken().await;
        }
    }
}

/// Until the task is woken once more.
async fn woken() {
    let mut waited = false;
    poll_fn(|_| if replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::join;

    use super::*;

    /// What ran, in order: `h` for a handshake's part, `r` for a request's.
    async fn played(turns: &Turns) -> String {
        let ran = Mutex::new(String::new());
        let note = |what| ran.lock().expect("nobody panics").push(what);
        let has_ended = AtomicBool::new(false);
        let handshake = || {
            turns.take(async {
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
    async fn a_request_waits_for_no_more_than_may_at_once() {
        let ran = played(&Turns::of(2)).await;
        assert_eq!(ran.matches('h').count(), 300);
        // Two, and the two of the round before: `join` changes who is first.
        assert!(longest_wait(&ran) <= 4, "{ran}");
        // Which it would without turns.
        let ran = played(&Turns::of(100)).await;
        assert!(longest_wait(&ran) >= 100, "{ran}");
    }

    /// A turn is not held while its holder waits, nor by one that is dropped.
    #[tokio::test]
    async fn who_waits_for_its_peer_holds_no_turn() {
        let turns = Turns::of(1);
        let silent = turns.take(std::future::pending::<()>());
        let waiting = turns.take(std::future::ready("done"));
        tokio::select! {
            biased;
            () = silent => unreachable!("it never ends"),
            done = waiting => assert_eq!(done, "done"),
        }
        assert_eq!(turns.0.available_permits(), 1);
    }
}
