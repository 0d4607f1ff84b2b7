//! Connections with an unfinished TLS handshake. Their number is bounded, and
//! silent connections cannot keep new ones out: at the bound, the oldest
//! connection of the source with the most pending handshakes is closed. An
//! honest handshake takes milliseconds and is rarely the oldest.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::source::Source;

/// All pending handshakes of a listener.
pub(super) struct PendingHandshakes {
    most: usize,
    table: Mutex<HandshakeTable>,
}

/// The table behind the lock.
#[derive(Default)]
struct HandshakeTable {
    next: u64,
    /// Connections by number, the oldest first; at most `most` entries.
    connections: BTreeMap<u64, (Source, CancellationToken)>,
}

/// One pending handshake. Its drop frees the place.
pub(super) struct PendingHandshake {
    all: Arc<PendingHandshakes>,
    number: u64,
    displaced: CancellationToken,
}

impl PendingHandshakes {
    pub(super) fn new(most: usize) -> Arc<Self> {
        // Without any place, no handshake could ever run.
        Arc::new(Self { most: most.max(1), table: Mutex::default() })
    }

    /// Takes a place. If every place is taken, displaces another connection.
    pub(super) fn begin(self: &Arc<Self>, source: Source) -> PendingHandshake {
        let displaced = CancellationToken::new();
        let mut table = self.table();
        if table.connections.len() >= self.most {
            table.displace();
        }
        let number = table.next;
        table.next += 1;
        table.connections.insert(number, (source, displaced.clone()));
        PendingHandshake { all: Arc::clone(self), number, displaced }
    }

    fn table(&self) -> MutexGuard<'_, HandshakeTable> {
        // Every update is a single insert or remove, so a panic leaves the
        // table consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HandshakeTable {
    /// Cancels the oldest connection of the busiest source. The scan is cheap:
    /// the table has a few hundred entries, and a scan happens only when the
    /// table is full.
    fn displace(&mut self) {
        let mut counts: HashMap<Source, usize> = HashMap::new();
        for (source, _) in self.connections.values() {
            *counts.entry(*source).or_default() += 1;
        }
        let most = counts.values().copied().max().unwrap_or_default();
        let oldest = self
            .connections
            .iter()
            .find(|(_, (source, _))| counts.get(source) == Some(&most))
            .map(|(number, _)| *number);
        if let Some((_, displaced)) = oldest.and_then(|number| self.connections.remove(&number)) {
            displaced.cancel();
        }
    }
}

impl PendingHandshake {
    /// Changes the source to the client that a proxy has named.
    pub(super) fn set_source(&self, source: Source) {
        // A displaced connection is no longer in the table.
        if let Some((known, _)) = self.all.table().connections.get_mut(&self.number) {
            *known = source;
        }
    }

    /// Returns when another connection took the place.
    pub(super) async fn displaced(&self) {
        self.displaced.cancelled().await;
    }
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        self.all.table().connections.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(n: u32) -> Source {
        Source::V4(Ipv4Addr::from_bits(n))
    }

    /// T08
    #[test]
    fn pending_handshakes_displace_oldest_of_busiest_source() {
        let pending = PendingHandshakes::new(4);
        let honest = pending.begin(source(1));
        let flood: Vec<PendingHandshake> = (0..3).map(|_| pending.begin(source(2))).collect();
        let late = pending.begin(source(3));
        let gone = |handshake: &PendingHandshake| handshake.displaced.is_cancelled();
        assert!(gone(&flood[0]) && !gone(&flood[1]) && !gone(&honest) && !gone(&late));
        // Further connections of the flood displace those of the flood.
        let more: Vec<PendingHandshake> = (0..10).map(|_| pending.begin(source(2))).collect();
        assert!(!gone(&honest) && !gone(&late));
        assert_eq!(more.iter().filter(|handshake| !gone(handshake)).count(), 2);
        // If every source has one connection, the oldest is displaced.
        drop((flood, more));
        let others: Vec<PendingHandshake> = (4..6).map(|n| pending.begin(source(n))).collect();
        assert!(!gone(&honest));
        let last = pending.begin(source(9));
        assert!(gone(&honest) && !gone(&last) && others.iter().all(|handshake| !gone(handshake)));
        drop((honest, late, others, last));
        assert!(pending.table().connections.is_empty(), "no entry outlives its connection");
    }

    #[test]
    fn pending_handshakes_count_clients_behind_proxies() {
        let pending = PendingHandshakes::new(3);
        let first = pending.begin(source(1));
        first.set_source(source(7));
        let second = pending.begin(source(1));
        let _third = pending.begin(source(1));
        let _fourth = pending.begin(source(1));
        assert!(!first.displaced.is_cancelled() && second.displaced.is_cancelled());
    }
}
