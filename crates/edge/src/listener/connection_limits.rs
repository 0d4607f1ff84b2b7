//! Limits on connections: all connections, those of one source, and new ones of
//! one source in a second. They are checked before a byte is read. The bounds on
//! authenticated connections are checked at the first authenticated request.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use tokio::time::Instant;

use super::connection_table::{
    BoundReached, ConnectionCounts, ConnectionNumber, ConnectionOwners, ConnectionTable,
    OpenConnection,
};
use crate::source::{MOST_SOURCES, Source};

/// The bounds that connections must keep.
#[derive(Clone, Debug)]
pub struct ConnectionLimitOptions {
    /// Connections of all sources together.
    pub connections: usize,
    /// Connections of one source without an authenticated request.
    pub per_source: u32,
    /// Connections of one source with an authenticated request.
    pub authenticated_per_source: u32,
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
            authenticated_per_source: 4_096,
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
    /// The connections by holder; at most `connections` entries.
    table: Mutex<ConnectionTable>,
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
            table: Mutex::default(),
            rate: RateLimiter::dashmap(quota),
            crowded: AtomicBool::new(false),
        })
    }

    /// Counts a connection against the total.
    #[expect(clippy::disallowed_methods, reason = "a connection begins now")]
    pub(super) fn acquire(self: &Arc<Self>) -> Result<ConnectionPermit, LimitReached> {
        // Relaxed: the counter guards no other memory.
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.options.connections {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(LimitReached::Connections);
        }
        // From here on the drop of the permit takes the count back.
        Ok(ConnectionPermit {
            limits: Arc::clone(self),
            connection: OpenConnection::new(Instant::now()),
            number: OnceLock::new(),
            authenticated: AtomicBool::new(false),
        })
    }

    /// Ends a connection of the holder with most, if few places are left. Called
    /// for each new connection that passed the limits.
    pub(super) fn make_room(&self) {
        // The places that are free for new connections while others end.
        let room = self.options.connections / ROOM;
        let most = self.options.connections - room;
        if room == 0 || self.open() <= most {
            return;
        }
        let mut table = self.table();
        // Connections that are ending leave their places by themselves. Both numbers
        // are read under the lock, because a connection leaves both under it.
        if self.open().saturating_sub(table.ending()) > most {
            table.make_room(room);
        }
    }

    /// Drops sources that have not connected for a while. Called once a second.
    pub(super) fn sweep(&self) {
        self.rate.retain_recent();
        self.crowded.store(self.rate.len() > MOST_SOURCES, Ordering::Relaxed);
    }

    /// Returns the number of open connections.
    fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns the numbers of open connections by state.
    pub(super) fn counts(&self) -> ConnectionCounts {
        self.table().counts(self.open())
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        // A panic could leave a wrong count behind, and no dangling entry: every
        // connection removes its own.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The count of one open connection; its drop counts down.
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    connection: Arc<OpenConnection>,
    /// The place in the table, once the connection was counted against a source.
    number: OnceLock<ConnectionNumber>,
    /// True once the connection counts for the owners of a request.
    authenticated: AtomicBool,
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
        {
            let mut table = limits.table();
            if table.unauthenticated_of(source) >= limits.options.per_source as usize {
                return Err(LimitReached::PerSource);
            }
            self.number.get_or_init(|| table.insert(source, Arc::clone(&self.connection)));
        }
        // Checked last, so that a refusal by another limit uses up no rate.
        limits.rate.check_key(&source).map_err(|_| LimitReached::Rate)
    }

    /// Returns the connection as the table sees it.
    pub(super) fn connection(&self) -> &Arc<OpenConnection> {
        &self.connection
    }

    /// Returns true once the connection counts for the owners of a request.
    pub(super) fn is_authenticated(&self) -> bool {
        self.authenticated.load(Ordering::Relaxed)
    }

    /// Takes the connection off the count of its source, and counts it for
    /// `owners`. A second call does nothing.
    ///
    /// # Errors
    /// A bound of the owners or of the source. The connection ends then.
    #[expect(clippy::disallowed_methods, reason = "the table gets the time of this request")]
    pub(super) fn authenticate(&self, owners: &ConnectionOwners) -> Result<(), BoundReached> {
        // A connection of a trusted proxy carries the requests of many clients and
        // counts for none of them.
        if let Some(&number) = self.number.get() {
            let per_source = self.limits.options.authenticated_per_source;
            self.limits.table().authenticate(number, owners, per_source, Instant::now())?;
        }
        self.authenticated.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut table = self.limits.table();
        if let Some(&number) = self.number.get() {
            table.remove(number);
        }
        self.limits.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The part of all places that is kept free for new connections: one in this many.
const ROOM: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::{OwnerId, Peer};

    fn connection_limits(connections: usize, per_source: u32, burst: u32) -> Arc<ConnectionLimits> {
        ConnectionLimits::new(ConnectionLimitOptions {
            connections,
            per_source,
            authenticated_per_source: 2,
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

        fn is_empty(&self) -> bool {
            self.table().unauthenticated_of(Source::of(ip(1))) == 0
                && self.counts() == ConnectionCounts::default()
        }
    }

    fn owners() -> ConnectionOwners {
        ConnectionOwners { bounds: Vec::new(), holder: OwnerId(1) }
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
        assert!(limits.is_empty(), "no entry outlives its connections");
    }

    #[test]
    fn connection_limits_ignore_authenticated_connections() {
        let limits = connection_limits(10, 1, 100);
        let peer = Peer::new((ip(1), 1).into(), Arc::default(), limits.admit(ip(1)).ok().unwrap());
        assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
        assert!(!peer.is_authenticated());
        assert_eq!(peer.authenticate(&owners()), Ok(()));
        assert_eq!(peer.authenticate(&owners()), Ok(()));
        assert!(peer.is_authenticated());
        assert!(limits.admit(ip(1)).is_ok());
        drop(peer);
        assert_eq!(limits.open(), 0);
        assert!(limits.is_empty());
    }

    #[test]
    fn connection_limits_count_no_owner_of_proxied() {
        let limits = connection_limits(10, 1, 100);
        for _ in 0..3 {
            let peer = Peer::new((ip(1), 1).into(), Arc::default(), limits.acquire().ok().unwrap());
            assert_eq!(peer.authenticate(&owners()), Ok(()));
            assert_eq!(limits.counts().uncounted, 1);
        }
    }

    #[test]
    fn connection_limits_keep_places_for_newcomers() {
        let limits = connection_limits(16, 100, 100);
        let mut held: Vec<_> = (0..15).map(|_| limits.admit(ip(1)).ok().unwrap()).collect();
        limits.make_room();
        assert_eq!(
            limits.counts(),
            ConnectionCounts { unauthenticated: 14, uncounted: 1, ..ConnectionCounts::default() }
        );
        // Fewer than the seven eighths give way to none.
        held.truncate(10);
        limits.make_room();
        assert_eq!(limits.counts().uncounted, 1);
    }

    #[test]
    fn connection_limits_count_ending_as_gone() {
        let limits = connection_limits(16, 100, 100);
        let mut open: Vec<_> = (0..15).map(|_| limits.admit(ip(1)).ok().unwrap()).collect();
        let evicted = |open: &[ConnectionPermit]| {
            open.iter().filter(|permit| permit.connection().eviction().is_some()).count()
        };
        limits.make_room();
        assert_eq!(evicted(&open), 1);
        // Two others end by themselves, and two new ones come. With the evicted one,
        // which is still open, there are 15, and 14 of them stay.
        open.truncate(13);
        for _ in 0..2 {
            open.push(limits.admit(ip(1)).ok().unwrap());
            limits.make_room();
        }
        assert_eq!(evicted(&open), 1);
        // Once the evicted one is closed, it leaves no place to a further one.
        open.retain(|permit| permit.connection().eviction().is_none());
        open.push(limits.admit(ip(1)).ok().unwrap());
        limits.make_room();
        assert_eq!((open.len(), evicted(&open)), (15, 1));
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
        assert!(limits.is_empty());
    }

    /// T02
    #[test]
    fn connection_limits_bound_memory_for_many_sources() {
        let limits = connection_limits(1_000_000, 1, 1);
        let v6 = |n: u64| IpAddr::from(((u128::from(n) << 64) | 1).to_be_bytes());
        for n in 0..50_000 {
            drop(limits.admit(v6(n)));
        }
        assert!(limits.rate.len() <= 50_000 && limits.is_empty());
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
