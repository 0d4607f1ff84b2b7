//! Who may connect: connections of one source, new ones a second, and all
//! together. Decided before a byte is read.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use http::HeaderMap;

use crate::source::{MOST_SOURCES, Proxies, Source};

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

    /// Takes a connection among all, whosever it is.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Permit, Refused> {
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.options.connections {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::Connections);
        }
        // From here on the permit gives back what was taken.
        let (source, counted) = (OnceLock::new(), AtomicBool::new(false));
        Ok(Permit { gate: Arc::clone(self), source, counted })
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
    /// Known once it was counted.
    source: OnceLock<Source>,
    /// Whether it counts against its source.
    counted: AtomicBool,
}

impl Permit {
    /// Counts the connection against the source of `address`, once. A trusted
    /// proxy's own are not counted.
    ///
    /// # Errors
    /// When the source has too many, or too many new ones.
    pub(super) fn count(&self, address: IpAddr) -> Result<(), Refused> {
        let gate = &*self.gate;
        let mut source = Source::of(address);
        if gate.crowded.load(Ordering::Relaxed) {
            source = source.in_crowd();
        }
        let source = *self.source.get_or_init(|| source);
        {
            let mut sources = gate.sources();
            let open = sources.entry(source).or_default();
            if *open >= gate.options.per_source {
                return Err(Refused::PerSource);
            }
            *open += 1;
            self.counted.store(true, Ordering::Relaxed);
        }
        // Last, so that a refusal by another bound uses up no rate.
        gate.rate.check_key(&source).map_err(|_| Refused::Rate)
    }

    fn uncount(&self) {
        if !self.counted.swap(false, Ordering::Relaxed) {
            return;
        }
        let Some(source) = self.source.get() else { return };
        let mut sources = self.gate.sources();
        if let Some(open) = sources.get_mut(source) {
            *open -= 1;
            if *open == 0 {
                sources.remove(source);
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
    known: Arc<Known>,
}

struct Known {
    address: SocketAddr,
    proxies: Arc<Proxies>,
    permit: Permit,
}

impl Peer {
    pub(super) fn new(address: SocketAddr, proxies: Arc<Proxies>, permit: Permit) -> Self {
        Self { known: Arc::new(Known { address, proxies, permit }) }
    }

    /// The other end of the connection, be it a client or a proxy; the client
    /// where a trusted proxy has said it by the PROXY protocol.
    pub fn address(&self) -> SocketAddr {
        self.known.address
    }

    /// The client of a request with these headers: the peer, unless that is a
    /// trusted proxy that names another.
    pub fn client(&self, headers: &HeaderMap) -> IpAddr {
        self.known.proxies.client(self.known.address.ip(), headers)
    }

    /// Somebody authenticated on this connection: it no longer counts against
    /// the unauthenticated ones of its source.
    pub fn vouch(&self) {
        self.known.permit.uncount();
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

    impl Gate {
        fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Permit, Refused> {
            let permit = self.enter()?;
            permit.count(address)?;
            Ok(permit)
        }
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
        let peer = Peer::new((ip(1), 1).into(), Arc::default(), gate.admit(ip(1)).ok().unwrap());
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

    #[test]
    fn a_proxys_own_connections_are_not_counted() {
        let gate = gate(3, 1, 1);
        let proxy = [gate.enter().ok().unwrap(), gate.enter().ok().unwrap()];
        // One of them says for whom it speaks.
        assert_eq!(proxy[0].count(ip(1)), Ok(()));
        assert_eq!(gate.admit(ip(1)).err(), Some(Refused::PerSource));
        drop(proxy);
        assert_eq!(gate.open(), 0);
        assert!(gate.sources().is_empty());
    }

    /// T02
    #[test]
    fn many_sources_take_bounded_memory() {
        let gate = gate(1_000_000, 1, 1);
        let v6 = |n: u64| IpAddr::from(((u128::from(n) << 64) | 1).to_be_bytes());
        for n in 0..50_000 {
            drop(gate.admit(v6(n)));
        }
        assert!(gate.rate.len() <= 50_000 && gate.sources().is_empty());
        gate.sweep();
        assert!(!gate.crowded.load(Ordering::Relaxed), "this many are told apart");
        // What a sweep decides once there are more than MOST_SOURCES.
        gate.crowded.store(true, Ordering::Relaxed);
        let before = gate.rate.len();
        for n in 0..50_000 {
            drop(gate.admit(v6((1 << 40) + n)));
        }
        // However many more come, they share a few buckets.
        assert!(gate.rate.len() <= before + 4_096, "{before}, then {}", gate.rate.len());
    }
}
