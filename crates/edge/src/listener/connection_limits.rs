//! Limits on connections: all connections, those of one source, and new ones of
//! one source in a second. They are checked before a byte is read.

use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};

use crate::source::{MOST_SOURCES, Source};

/// The bounds that connections must keep.
#[derive(Clone, Debug)]
pub struct ConnectionLimitOptions {
    /// Connections of all sources together.
    pub connections: usize,
    /// Connections of one source without an authenticated request.
    pub per_source: u32,
    /// New connections of one source in a second.
    pub new_per_second: NonZeroU32,
    /// New connections of one source at once.
    pub new_burst: NonZeroU32,
}

impl Default for ConnectionLimitOptions {
    fn default() -> Self {
        Self {
            connections: 10_000,
            per_source: 64,
            new_per_second: const { NonZeroU32::new(20).unwrap() },
            new_burst: const { NonZeroU32::new(100).unwrap() },
        }
    }
}

/// The limit for which a connection was closed as soon as it was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitReached {
    /// All connections together.
    Connections,
    /// The connections of one source.
    PerSource,
    /// The new connections of one source.
    Rate,
}

impl LimitReached {
    /// Returns the label in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::PerSource => "per_source",
            Self::Rate => "source_rate",
        }
    }
}

/// The connection limits of one listener.
pub(super) struct ConnectionLimits {
    options: ConnectionLimitOptions,
    open: AtomicUsize,
    /// Unauthenticated connections by source. The last connection of a source
    /// removes the entry, so the map has at most `connections` entries.
    sources: Mutex<HashMap<Source, u32>>,
    /// New connections by source; swept once a second.
    rate: RateLimiter<Source, DefaultKeyedStateStore<Source>, DefaultClock>,
    /// True while there are too many sources for a bucket each.
    crowded: AtomicBool,
}

impl ConnectionLimits {
    pub(super) fn new(options: ConnectionLimitOptions) -> Arc<Self> {
        let quota = Quota::per_second(options.new_per_second).allow_burst(options.new_burst);
        Arc::new(Self {
            options,
            open: AtomicUsize::new(0),
            sources: Mutex::default(),
            rate: RateLimiter::dashmap(quota),
            crowded: AtomicBool::new(false),
        })
    }

    /// Counts a connection against the total.
    pub(super) fn acquire(self: &Arc<Self>) -> Result<ConnectionPermit, LimitReached> {
        // Relaxed: the counter guards no other memory.
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.options.connections {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(LimitReached::Connections);
        }
        // From here on the drop of the permit takes the count back.
        let (source, counted) = (OnceLock::new(), AtomicBool::new(false));
        Ok(ConnectionPermit { limits: Arc::clone(self), source, counted })
    }

    /// Drops sources that have not connected for a while. Called once a second.
    pub(super) fn sweep(&self) {
        self.rate.retain_recent();
        self.crowded.store(self.rate.len() > MOST_SOURCES, Ordering::Relaxed);
    }

    /// Returns the number of open connections.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<Source, u32>> {
        // Counts change in single steps, so a panic leaves them usable.
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The count of one open connection; its drop counts down.
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    /// The source, once the connection was counted against it.
    source: OnceLock<Source>,
    /// True while the connection counts against its source.
    counted: AtomicBool,
}

impl ConnectionPermit {
    /// Counts the connection against the source of `address`, once. Connections
    /// that a trusted proxy opens for itself are never counted here.
    ///
    /// # Errors
    /// The source has too many connections, or too many new ones.
    pub(super) fn count_source(&self, address: IpAddr) -> Result<(), LimitReached> {
        let limits = &*self.limits;
        let mut source = Source::of(address);
        if limits.crowded.load(Ordering::Relaxed) {
            source = source.in_crowd();
        }
        // The first source stays, so that the release finds the same entry.
        let source = *self.source.get_or_init(|| source);
        {
            let mut sources = limits.sources();
            let open = sources.entry(source).or_default();
            if *open >= limits.options.per_source {
                return Err(LimitReached::PerSource);
            }
            *open += 1;
            self.counted.store(true, Ordering::Relaxed);
        }
        // Checked last, so that a refusal by another limit uses up no rate.
        limits.rate.check_key(&source).map_err(|_| LimitReached::Rate)
    }

    /// Takes the connection off the count of its source. A second call does
    /// nothing.
    pub(super) fn release_source(&self) {
        if !self.counted.swap(false, Ordering::Relaxed) {
            return;
        }
        let Some(source) = self.source.get() else { return };
        let mut sources = self.limits.sources();
        if let Some(open) = sources.get_mut(source) {
            *open -= 1;
            if *open == 0 {
                sources.remove(source);
            }
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.release_source();
        self.limits.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::Peer;

    fn connection_limits(connections: usize, per_source: u32, burst: u32) -> Arc<ConnectionLimits> {
        ConnectionLimits::new(ConnectionLimitOptions {
            connections,
            per_source,
            new_per_second: NonZeroU32::MIN,
            new_burst: NonZeroU32::new(burst).unwrap(),
        })
    }

    fn ip(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    impl ConnectionLimits {
        fn admit(self: &Arc<Self>, address: IpAddr) -> Result<ConnectionPermit, LimitReached> {
            let permit = self.acquire()?;
            permit.count_source(address)?;
            Ok(permit)
        }
    }

    #[test]
    fn connection_limits_count_open_connections() {
        let limits = connection_limits(3, 2, 100);
        let first = limits.admit(ip(1)).ok().unwrap();
        let _second = limits.admit(ip(1)).ok().unwrap();
        assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
        let _other = limits.admit(ip(2)).ok().unwrap();
        assert_eq!(limits.admit(ip(3)).err(), Some(LimitReached::Connections));
        drop(first);
        assert!(limits.admit(ip(1)).is_ok());
        assert_eq!(limits.open(), 2);
        drop((_second, _other));
        assert_eq!(limits.open(), 0);
        assert!(limits.sources().is_empty(), "no entry outlives its connections");
    }

    #[test]
    fn connection_limits_ignore_authenticated_connections() {
        let limits = connection_limits(10, 1, 100);
        let peer = Peer::new((ip(1), 1).into(), Arc::default(), limits.admit(ip(1)).ok().unwrap());
        assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
        peer.mark_authenticated();
        peer.mark_authenticated();
        assert!(limits.admit(ip(1)).is_ok());
        drop(peer);
        assert_eq!(limits.open(), 0);
        assert!(limits.sources().is_empty());
    }

    #[test]
    fn connection_limits_bound_new_connections() {
        let limits = connection_limits(100, 100, 5);
        let admitted = (0..10).filter(|_| limits.admit(ip(1)).is_ok()).count();
        assert_eq!(admitted, 5);
        assert!(limits.admit(ip(2)).is_ok(), "one source does not exhaust the rate of another");
    }

    #[test]
    fn connection_limits_skip_sources_of_proxies() {
        let limits = connection_limits(3, 1, 1);
        let proxy = [limits.acquire().ok().unwrap(), limits.acquire().ok().unwrap()];
        // One of the proxies names its client.
        assert_eq!(proxy[0].count_source(ip(1)), Ok(()));
        assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
        drop(proxy);
        assert_eq!(limits.open(), 0);
        assert!(limits.sources().is_empty());
    }

    /// T02
    #[test]
    fn connection_limits_bound_memory_for_many_sources() {
        let limits = connection_limits(1_000_000, 1, 1);
        let v6 = |n: u64| IpAddr::from(((u128::from(n) << 64) | 1).to_be_bytes());
        for n in 0..50_000 {
            drop(limits.admit(v6(n)));
        }
        assert!(limits.rate.len() <= 50_000 && limits.sources().is_empty());
        limits.sweep();
        assert!(
            !limits.crowded.load(Ordering::Relaxed),
            "each of so many sources has its own bucket"
        );
        // A sweep sets this flag beyond MOST_SOURCES.
        limits.crowded.store(true, Ordering::Relaxed);
        let before = limits.rate.len();
        for n in 0..50_000 {
            drop(limits.admit(v6((1 << 40) + n)));
        }
        // More sources share a bounded number of buckets.
        assert!(limits.rate.len() <= before + 4_096, "{before}, then {}", limits.rate.len());
    }
}
