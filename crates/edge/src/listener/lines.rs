//! Lines of connections that wait for a place, one line for each source. Whoever came
//! first is served first, and the source's newcomers stand behind. A line is bounded in
//! length and in time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use crate::source::Source;

/// The lines of all sources.
pub(super) struct Lines {
    /// Connections in all lines, at most. Those that wait stay if it is lowered.
    most: AtomicUsize,
    /// The number in all lines. A number beside the lock, because each connection that
    /// ends asks for it.
    waiting: AtomicUsize,
    /// The lines with a connection in them.
    lines: Mutex<HashMap<Source, Arc<Line>>>,
}

/// The line of one source.
#[derive(Default)]
struct Line {
    /// Held by the connection at the front. The lock serves in the order of arrival.
    front: tokio::sync::Mutex<()>,
    /// Notified when the connection at the front may try again.
    changed: Notify,
    length: AtomicUsize,
}

/// One connection in a line. Its drop leaves the line.
pub(super) struct InLine {
    lines: Arc<Lines>,
    source: Source,
    line: Arc<Line>,
}

impl Lines {
    /// Creates empty lines, which hold at most `most` connections together.
    pub(super) fn new(most: usize) -> Arc<Self> {
        let (most, waiting) = (AtomicUsize::new(most), AtomicUsize::new(0));
        Arc::new(Self { most, waiting, lines: Mutex::default() })
    }

    /// Changes the largest number of connections in all lines.
    pub(super) fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Returns true if a connection of `source` waits.
    pub(super) fn has(&self, source: Source) -> bool {
        !self.is_empty() && self.lines().contains_key(&source)
    }

    /// Enters the line of `source`. Returns `None` if `most_of_source` wait there, or if
    /// all lines together are full.
    pub(super) fn enter(self: &Arc<Self>, source: Source, most_of_source: usize) -> Option<InLine> {
        let mut lines = self.lines();
        // Relaxed: a length changes only under the lock of the lines.
        let length = lines.get(&source).map_or(0, |line| line.length.load(Ordering::Relaxed));
        let is_full = self.waiting.load(Ordering::Relaxed) >= self.most.load(Ordering::Relaxed);
        if length >= most_of_source || is_full {
            return None;
        }
        let line = Arc::clone(lines.entry(source).or_default());
        line.length.fetch_add(1, Ordering::Relaxed);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Some(InLine { lines: Arc::clone(self), source, line })
    }

    /// Lets the front of the line of `source` try again.
    pub(super) fn changed(&self, source: Source) {
        if !self.is_empty()
            && let Some(line) = self.lines().get(&source)
        {
            line.changed.notify_one();
        }
    }

    /// Lets the front of every line try again.
    pub(super) fn all_changed(&self) {
        if !self.is_empty() {
            self.lines().values().for_each(|line| line.changed.notify_one());
        }
    }

    fn is_empty(&self) -> bool {
        // Relaxed: whoever enters a line tries once at its front, so a change that was
        // missed here is seen there.
        self.waiting.load(Ordering::Relaxed) == 0
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<Source, Arc<Line>>> {
        // Every change under the lock is complete before a panic could happen.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InLine {
    /// Waits for the front of the line, and there until `attempt` succeeds. A failed
    /// attempt tells the time after which it is worth another one, if nothing changes
    /// before. Returns `None` after `longest`.
    #[expect(clippy::disallowed_methods, reason = "the wait begins now")]
    pub(super) async fn wait<T>(
        self,
        longest: Duration,
        mut attempt: impl FnMut() -> Result<T, Duration>,
    ) -> Option<T> {
        let waiting = async {
            let _front = self.line.front.lock().await;
            loop {
                match attempt() {
                    Ok(place) => return place,
                    // `Notify` keeps a notice, so no change before the wait is lost.
                    Err(retry) => _ = timeout(retry, self.line.changed.notified()).await,
                }
            }
        };
        timeout_at(Instant::now() + longest, waiting).await.ok()
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        let mut lines = self.lines.lines();
        self.lines.waiting.fetch_sub(1, Ordering::Relaxed);
        // The last one takes the line away, so that only sources that wait take memory.
        if self.line.length.fetch_sub(1, Ordering::Relaxed) == 1 {
            lines.remove(&self.source);
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::net::Ipv4Addr;

    use tokio::join;

    use super::*;

    fn source(n: u32) -> Source {
        Source::V4(Ipv4Addr::from_bits(n))
    }

    const LONGEST: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn line_serves_in_order_of_arrival() {
        let lines = Lines::new(10);
        let places = Cell::new(0);
        let served = RefCell::new(Vec::new());
        let client = |number: u32| {
            let place = lines.enter(source(1), 3).expect("room in the line");
            let (places, served) = (&places, &served);
            async move {
                let attempt = || match places.get() {
                    0 => Err(LONGEST),
                    free => {
                        places.set(free - 1);
                        Ok(())
                    }
                };
                place.wait(LONGEST, attempt).await.expect("a place");
                served.borrow_mut().push(number);
            }
        };
        let clients = (client(1), client(2), client(3));
        assert!(lines.has(source(1)) && !lines.has(source(2)));
        let freeing = async {
            for _ in 0..3 {
                tokio::time::sleep(LONGEST / 10).await;
                places.set(1);
                lines.changed(source(1));
            }
        };
        join!(clients.0, clients.1, clients.2, freeing);
        assert_eq!(*served.borrow(), [1, 2, 3]);
        assert!(!lines.has(source(1)) && lines.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn line_is_bounded_in_length_and_time() {
        let lines = Lines::new(3);
        let first = lines.enter(source(1), 2).expect("room");
        let _second = lines.enter(source(1), 2).expect("room");
        assert!(lines.enter(source(1), 2).is_none(), "the line of one source");
        let _other = lines.enter(source(2), 2).expect("room");
        assert!(lines.enter(source(3), 2).is_none(), "all lines together");
        let before = Instant::now();
        assert_eq!(first.wait(LONGEST, || Err::<(), _>(LONGEST / 7)).await, None);
        assert_eq!(before.elapsed(), LONGEST);
        assert!(lines.enter(source(1), 2).is_some(), "it has left the line");
    }
}
