//! Connections with an unfinished TLS handshake. Their number is bounded, and
//! silent connections cannot keep new ones out. At the bound, a newcomer of the source
//! with the most pending handshakes waits in the line of its source, unless one of
//! them is quiet and gives way. A newcomer of another source displaces the oldest
//! connection of the busiest source. So a burst of handshakes from one address goes
//! through in the order in which it came, and keeps no other address out.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lines::Lines;
use crate::source::Source;

/// All pending handshakes of a listener.
pub(super) struct PendingHandshakes {
    table: Mutex<HandshakeTable>,
    /// Connections that wait for a place. Each has passed the connection limits, which
    /// bound their number.
    lines: Arc<Lines>,
}

/// The table behind the lock.
struct HandshakeTable {
    most: usize,
    /// Time without a byte from the peer after which a handshake gives way to the next
    /// one of its source.
    quiet: Duration,
    next: u64,
    /// Connections by number, the oldest first; at most `most` entries, or as many as
    /// there were when `most` was lowered.
    connections: BTreeMap<u64, Pending>,
}

#[derive(Clone)]
struct Pending {
    source: Source,
    displaced: CancellationToken,
    peer: Arc<PeerWait>,
}

/// One pending handshake. Its drop frees the place.
pub(super) struct PendingHandshake {
    all: Arc<PendingHandshakes>,
    number: u64,
    displaced: CancellationToken,
    peer: Arc<PeerWait>,
}

/// The wait of a handshake for its peer.
#[derive(Debug, Default)]
pub(super) struct PeerWait {
    /// The time since when nothing came from the peer; `None` while the handshake itself
    /// has something to do.
    since: Mutex<Option<Instant>>,
}

impl PeerWait {
    /// Runs `wait`, which waits for the peer.
    #[expect(clippy::disallowed_methods, reason = "the wait begins now")]
    pub(super) async fn during<F: Future>(&self, wait: F) -> F::Output {
        self.set(Some(Instant::now()));
        let output = wait.await;
        self.set(None);
        output
    }

    fn set(&self, since: Option<Instant>) {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// Returns true if the peer has been quiet for `quiet`.
    fn is_quiet(&self, quiet: Duration, now: Instant) -> bool {
        let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| now.saturating_duration_since(since) >= quiet)
    }
}

impl PendingHandshakes {
    /// Creates places for `most` handshakes. One whose peer has been quiet for `quiet`
    /// gives way to the next one of its source.
    pub(super) fn new(most: usize, quiet: Duration) -> Arc<Self> {
        let mut table =
            HandshakeTable { most: 0, quiet, next: 0, connections: BTreeMap::default() };
        table.set_bounds(most, quiet);
        Arc::new(Self { table: Mutex::new(table), lines: Lines::new(usize::MAX) })
    }

    /// Changes the number of places and the quiet time. Handshakes that have begun go on.
    pub(super) fn adopt(&self, most: usize, quiet: Duration) {
        self.table().set_bounds(most, quiet);
        self.lines.all_changed();
    }

    /// Takes a place for a connection of `source`, or waits for one. Returns `None` if
    /// the line did not move for too long.
    pub(super) async fn begin(self: &Arc<Self>, source: Source) -> Option<PendingHandshake> {
        // A newcomer must not pass those that wait.
        if !self.lines.has(source)
            && let Some(begun) = self.try_begin(source)
        {
            return Some(begun);
        }
        let place = self.lines.enter(source, usize::MAX)?;
        place.wait(LONGEST_WAIT, || self.try_begin(source).ok_or(RETRY)).await
    }

    /// Takes a place, if one is free or another connection gives way.
    #[expect(clippy::disallowed_methods, reason = "the handshake begins now")]
    fn try_begin(self: &Arc<Self>, source: Source) -> Option<PendingHandshake> {
        let (mut table, now) = (self.table(), Instant::now());
        let (is_full, quiet) = (table.connections.len() >= table.most, table.quiet);
        if is_full && !table.displace_for(source, |peer| peer.is_quiet(quiet, now)) {
            return None;
        }
        let (displaced, peer) = (CancellationToken::new(), Arc::<PeerWait>::default());
        let number = table.next;
        table.next += 1;
        let pending = Pending { source, displaced: displaced.clone(), peer: Arc::clone(&peer) };
        table.connections.insert(number, pending);
        Some(PendingHandshake { all: Arc::clone(self), number, displaced, peer })
    }

    fn table(&self) -> MutexGuard<'_, HandshakeTable> {
        // Every update is a single insert or remove, so a panic leaves the
        // table consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HandshakeTable {
    fn set_bounds(&mut self, most: usize, quiet: Duration) {
        // Without any place, no handshake could ever run.
        (self.most, self.quiet) = (most.max(1), quiet);
    }

    /// Cancels a connection that gives way to one of `source`. Returns false if none
    /// does. The scan is cheap: the table has a few hundred entries, and a scan happens
    /// only when the table is full.
    fn displace_for(&mut self, source: Source, is_quiet: impl Fn(&PeerWait) -> bool) -> bool {
        let mut counts: HashMap<Source, usize> = HashMap::new();
        for pending in self.connections.values() {
            *counts.entry(pending.source).or_default() += 1;
        }
        let most = counts.values().copied().max().unwrap_or_default();
        let own = counts.get(&source).copied().unwrap_or_default();
        let gives_way = |pending: &Pending| match own < most {
            true => counts.get(&pending.source) == Some(&most),
            false => pending.source == source && is_quiet(&pending.peer),
        };
        let oldest = self.connections.iter().find(|(_, pending)| gives_way(pending));
        let oldest = oldest.map(|(number, _)| *number);
        // Removed at once: the displaced task may run late, and the newcomer needs the place now.
        let displaced = oldest.and_then(|number| self.connections.remove(&number));
        displaced.inspect(|pending| pending.displaced.cancel()).is_some()
    }
}

impl PendingHandshake {
    /// Changes the source to the client that a proxy has named.
    pub(super) fn set_source(&self, source: Source) {
        // A displaced connection is no longer in the table.
        if let Some(pending) = self.all.table().connections.get_mut(&self.number) {
            pending.source = source;
        }
    }

    /// Returns when another connection took the place.
    pub(super) async fn displaced(&self) {
        self.displaced.cancelled().await;
    }

    /// Returns the wait of this handshake for its peer.
    pub(super) fn peer(&self) -> &PeerWait {
        &self.peer
    }
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        self.all.table().connections.remove(&self.number);
        // Any line may have the place: the newcomers of each find it equally near.
        self.all.lines.all_changed();
    }
}

/// Time between two looks at the full table, in which a peer may have become quiet.
const RETRY: Duration = Duration::from_millis(500);

/// Time that a connection waits for a place. Each handshake ahead of it ends within its
/// own deadlines, so a line that does not move for so long is beyond help.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use std::net::Ipv4Addr;

    use futures_util::future::join_all;
    use futures_util::poll;
    use tokio::time::sleep;

    use super::*;

    fn source(n: u32) -> Source {
        Source::V4(Ipv4Addr::from_bits(n))
    }

    const QUIET: Duration = Duration::from_secs(2);

    fn gone(handshake: &PendingHandshake) -> bool {
        handshake.displaced.is_cancelled()
    }

    impl PendingHandshakes {
        /// Takes a place that is free or made free.
        fn take(self: &Arc<Self>, from: u32) -> PendingHandshake {
            self.try_begin(source(from)).expect("a place")
        }
    }

    /// T08
    #[tokio::test]
    async fn pending_handshakes_displace_oldest_of_busiest_source() {
        let pending = PendingHandshakes::new(4, QUIET);
        let honest = pending.take(1);
        let flood: Vec<PendingHandshake> = (0..3).map(|_| pending.take(2)).collect();
        let late = pending.take(3);
        assert!(gone(&flood[0]) && !gone(&flood[1]) && !gone(&honest) && !gone(&late));
        // Further connections of the flood wait behind those of the flood.
        assert!(pending.try_begin(source(2)).is_none());
        assert!(!gone(&honest) && !gone(&late));
        // If every source has one connection, the oldest is displaced.
        drop(flood);
        let others: Vec<PendingHandshake> = (4..6).map(|n| pending.take(n)).collect();
        assert!(!gone(&honest));
        let last = pending.take(9);
        assert!(gone(&honest) && !gone(&last) && others.iter().all(|handshake| !gone(handshake)));
        drop((honest, late, others, last));
        assert!(pending.table().connections.is_empty(), "no entry outlives its connection");
    }

    #[tokio::test]
    async fn pending_handshakes_count_clients_behind_proxies() {
        let pending = PendingHandshakes::new(3, QUIET);
        let first = pending.take(1);
        first.set_source(source(7));
        let (second, _third) = (pending.take(1), pending.take(1));
        let _fourth = pending.take(7);
        assert!(!gone(&first) && gone(&second));
    }

    #[tokio::test(start_paused = true)]
    async fn burst_of_one_source_gets_through_in_line() {
        let pending = PendingHandshakes::new(4, QUIET);
        let handshake = || async {
            let begun = pending.begin(source(1)).await.expect("a place in time");
            // The peer answers late, and always in time.
            begun.peer().during(sleep(QUIET / 2)).await;
            !gone(&begun)
        };
        let through = join_all((0..40).map(|_| handshake())).await;
        assert!(through.iter().all(|through| *through), "{through:?}");
        assert!(pending.table().connections.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn quiet_handshakes_give_way_to_their_source() {
        let pending = PendingHandshakes::new(2, QUIET);
        let quiet = pending.take(1);
        let busy = pending.take(1);
        let newcomer = async {
            let began = pending.begin(source(1)).await.expect("a place");
            (began, Instant::now())
        };
        let started = Instant::now();
        tokio::pin!(newcomer);
        let silence = quiet.peer().during(sleep(QUIET * 10));
        tokio::pin!(silence);
        assert!(poll!(&mut silence).is_pending() && poll!(&mut newcomer).is_pending());
        let (_newcomer, at) = newcomer.await;
        assert!(gone(&quiet) && !gone(&busy));
        assert_eq!(at - started, QUIET);
    }

    #[tokio::test(start_paused = true)]
    async fn line_that_does_not_move_ends() {
        let pending = PendingHandshakes::new(1, QUIET);
        let _held = pending.take(1);
        assert!(pending.begin(source(1)).await.is_none());
    }
}
