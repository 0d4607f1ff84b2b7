//! Connections that have not shaken hands yet. Their number is bounded, and
//! who comes last is not kept out by those who came first and say nothing:
//! when the bound is reached, the oldest of the source with the most of them
//! goes. An honest handshake takes milliseconds and is rarely the oldest.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::source::Source;

/// All of a listener.
pub(super) struct Openings {
    most: usize,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    next: u64,
    /// By number, the oldest first; at most `most`.
    connections: BTreeMap<u64, (Source, CancellationToken)>,
}

/// One connection that opens. Dropped when it has shaken hands or ended.
pub(super) struct Opening {
    openings: Arc<Openings>,
    number: u64,
    displaced: CancellationToken,
}

impl Openings {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), open: Mutex::default() })
    }

    /// Takes a place, another's if there is none.
    pub(super) fn begin(self: &Arc<Self>, source: Source) -> Opening {
        let displaced = CancellationToken::new();
        let mut open = self.open();
        if open.connections.len() >= self.most {
            open.displace();
        }
        let number = open.next;
        open.next += 1;
        open.connections.insert(number, (source, displaced.clone()));
        Opening { openings: Arc::clone(self), number, displaced }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Only when it is full, so the count is over a few hundred.
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

impl Opening {
    /// Whose connection it is, once a proxy has said it.
    pub(super) fn belongs_to(&self, source: Source) {
        if let Some((known, _)) = self.openings.open().connections.get_mut(&self.number) {
            *known = source;
        }
    }

    /// Ends when another took its place.
    pub(super) async fn displaced(&self) {
        self.displaced.cancelled().await;
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.openings.open().connections.remove(&self.number);
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
    fn the_oldest_of_the_many_makes_room() {
        let openings = Openings::new(4);
        let honest = openings.begin(source(1));
        let flood: Vec<Opening> = (0..3).map(|_| openings.begin(source(2))).collect();
        let late = openings.begin(source(3));
        let gone = |opening: &Opening| opening.displaced.is_cancelled();
        assert!(gone(&flood[0]) && !gone(&flood[1]) && !gone(&honest) && !gone(&late));
        // The flood's next ones push out its own.
        let more: Vec<Opening> = (0..10).map(|_| openings.begin(source(2))).collect();
        assert!(!gone(&honest) && !gone(&late));
        assert_eq!(more.iter().filter(|opening| !gone(opening)).count(), 2);
        // Where all have one, the oldest goes.
        drop((flood, more));
        let others: Vec<Opening> = (4..6).map(|n| openings.begin(source(n))).collect();
        assert!(!gone(&honest));
        let last = openings.begin(source(9));
        assert!(gone(&honest) && !gone(&last) && others.iter().all(|opening| !gone(opening)));
        drop((honest, late, others, last));
        assert!(openings.open().connections.is_empty(), "no entry outlives its connection");
    }

    #[test]
    fn a_client_is_counted_for_itself_behind_a_proxy() {
        let openings = Openings::new(3);
        let first = openings.begin(source(1));
        first.belongs_to(source(7));
        let second = openings.begin(source(1));
        let _third = openings.begin(source(1));
        let _fourth = openings.begin(source(1));
        assert!(!first.displaced.is_cancelled() && second.displaced.is_cancelled());
    }
}
