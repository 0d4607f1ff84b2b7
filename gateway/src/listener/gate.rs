//! Who may connect: connections of one source, new ones a second, and all
//! together. Decided before a byte is read.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};

use crate::source::{MOST_SOURCES, Source};

/// Bounds on connections.
#[derive(Clone, Debug)]
pub struct GateOptions {
    /// Connections of all sources.
    pub connections: usize,
    /// Connections of one source on which nobody has authenticated.
    pub per_source: u32,
    /// New connections of one source a second ...
    pub new_per_second: NonZeroU32,
    /// ... and at once.
    pub new_burst: NonZeroU32,
}

impl Default for GateOptions {
    fn default() -> Self {
        Self {
            connections: 10_000,
            per_source: 64,
            new_per_second: const { NonZeroU32::new(20).unwrap() },
            new_burst: const { NonZeroU32::new(100).unwrap() },
        }
    }
}

/// Why a connection was closed as soon as it was accepted; a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Connections,
    PerSource,
    Rate,
}

impl Refused {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::PerSource => "per_source",
            Self::Rate => "source_rate",
        }
    }
}

/// The gate of one listener.
pub(super) struct Gate {
    options: GateOptions,
    open: AtomicUsize,
    /// Unauthenticated connections by source; an entry goes with its last one.
    sources: Mutex<HashMap<Source, u32>>,
    /// Swept each second.
    rate: RateLimiter<Source, DefaultKeyedStateStore<Source>, DefaultClock>,
    crowded: AtomicBool,
}

impl Gate {
    pub(super) fn new(options: GateOptions) -> Arc<Self> {
        let quota = Quota::per_second(options.new_per_second).allow_burst(options.new_burst);
        Arc::new(Self {
            options,
            open: AtomicUsize::new(0),
            sources: Mutex::default(),
            rate: RateLimiter::dashmap(quota),
            crowded: AtomicBool::new(false),
        })
    }

    /// Admits a connection or says why not.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Permit, Refused> {
        let mut source = Source::of(address);
        if self.crowded.load(Ordering::Relaxed) {
            source = source.in_crowd();
        }
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.options.connections {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::Connections);
        }
        // From here on the permit gives back what was taken.
        let permit = Permit { gate: Arc::clone(self), source, counted: AtomicBool::new(false) };
        {
            let mut sources = self.sources();
            let open = sources.entry(source).or_default();
            if *open >= self.options.per_source {
                return Err(Refused::PerSource);
            }
            *open += 1;
            permit.counted.store(true, Ordering::Relaxed);
        }
        // Last, so that a refusal by another bound uses up no rate.
        self.rate.check_key(&source).map_err(|_| Refused::Rate)?;
        Ok(permit)
    }

    /// Forgets sources that have not connected for a while. Called each second.
    pub(super) fn sweep(&self) {
        self.rate.retain_recent();
        self.crowded.store(self.rate.len() > MOST_SOURCES, Ordering::Relaxed);
    }

    /// Connections open now.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<Source, u32>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, given back when it is dropped.
pub(super) struct Permit {
    gate: Arc<Gate>,
    source: Source,
    /// Whether it counts against its source.
    counted: AtomicBool,
}

impl Permit {
    fn uncount(&self) {
        if !self.counted.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut sources = self.gate.sources();
        if let Some(open) = sources.get_mut(&self.source) {
            *open -= 1;
            if *open == 0 {
                sources.remove(&self.source);
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.uncount();
        self.gate.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Who is on the wire. Rides in a request's extensions, because hyper hands
/// over nothing else.
#[derive(Clone)]
pub struct Peer {
    address: SocketAddr,
    permit: Arc<Permit>,
}

impl Peer {
    pub(super) fn new(address: SocketAddr, permit: Permit) -> Self {
        Self { address, permit: Arc::new(permit) }
    }

    /// The other end of the connection, be it a client or a proxy.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Somebody authenticated on this connection: it no longer counts against
    /// the unauthenticated ones of its source.
    pub fn vouch(&self) {
        self.permit.uncount();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(connections: usize, per_source: u32, burst: u32) -> Arc<Gate> {
        Gate::new(GateOptions {
            connections,
            per_source,
            new_per_second: NonZeroU32::MIN,
            new_burst: NonZeroU32::new(burst).unwrap(),
        })
    }

    fn ip(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    #[test]
    fn each_bound_bites_and_gives_back() {
        let gate = gate(3, 2, 100);
        let first = gate.admit(ip(1)).ok().unwrap();
        let _second = gate.admit(ip(1)).ok().unwrap();
        assert_eq!(gate.admit(ip(1)).err(), Some(Refused::PerSource));
        let _other = gate.admit(ip(2)).ok().unwrap();
        assert_eq!(gate.admit(ip(3)).err(), Some(Refused::Connections));
        drop(first);
        assert!(gate.admit(ip(1)).is_ok());
        assert_eq!(gate.open(), 2);
        drop((_second, _other));
        assert_eq!(gate.open(), 0);
        assert!(gate.sources().is_empty(), "no entry outlives its connections");
    }

    #[test]
    fn the_vouched_do_not_count() {
        let gate = gate(10, 1, 100);
        let peer = Peer::new((ip(1), 1).into(), gate.admit(ip(1)).ok().unwrap());
        assert_eq!(gate.admit(ip(1)).err(), Some(Refused::PerSource));
        peer.vouch();
        peer.vouch();
        assert!(gate.admit(ip(1)).is_ok());
        drop(peer);
        assert_eq!(gate.open(), 0);
        assert!(gate.sources().is_empty());
    }

    #[test]
    fn new_connections_have_a_rate() {
        let gate = gate(100, 100, 5);
        let admitted = (0..10).filter(|_| gate.admit(ip(1)).is_ok()).count();
        assert_eq!(admitted, 5);
        assert!(gate.admit(ip(2)).is_ok(), "another source is not its neighbour's victim");
    }
}
