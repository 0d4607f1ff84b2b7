//! Limits on connections: bounds, lines and known sources.

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
        permit.count(self.source_of(address)).map_err(|full| full.reached)?;
        Ok(permit)
    }

    fn is_empty(&self) -> bool {
        self.table().unauthenticated_of(Source::of(ip(1))) == 0
            && self.counts() == ConnectionCounts::default()
    }
}

/// Returns the number of sources with a bucket.
fn sources(limits: &ConnectionLimits) -> usize {
    limits.bounds.load().rates.unknown.len()
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

/// Options with a bound of ten new connections, which nothing refills soon.
fn options(connections: usize, per_source: u32) -> ConnectionLimitOptions {
    ConnectionLimitOptions {
        connections,
        per_source,
        authenticated_per_source: 2,
        new_per_second: NonZeroU32::MIN,
        new_burst: NonZeroU32::new(10).unwrap(),
    }
}

#[test]
fn connection_limits_lower_total_ends_idle_connections() {
    let limits = ConnectionLimits::new(options(100, 100));
    let mut open: Vec<_> = (0..8).map(|_| limits.admit(ip(1)).ok().unwrap()).collect();
    limits.adopt(options(5, 100));
    assert_eq!(limits.admit(ip(2)).err(), Some(LimitReached::Connections));
    limits.sweep(Instant::now());
    let is_ending = |permit: &ConnectionPermit| permit.connection().eviction().is_some();
    assert_eq!(open.iter().filter(|permit| is_ending(permit)).count(), 3);
    open.retain(|permit| !is_ending(permit));
    drop(open.pop());
    assert!(limits.admit(ip(2)).is_ok(), "the lower total has a place again");
}

#[test]
fn connection_limits_adopt_bounds_and_keep_rate() {
    let limits = ConnectionLimits::new(options(100, 3));
    let held: Vec<_> = (0..3).map(|_| limits.admit(ip(1)).ok().unwrap()).collect();
    assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
    limits.adopt(options(100, 8));
    let more: Vec<_> = (0..5).map(|_| limits.admit(ip(1)).ok().unwrap()).collect();
    assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
    drop((held, more));
    // Eight of the burst of ten are used up, whatever bound has changed.
    limits.adopt(options(99, 100));
    assert_eq!((0..5).filter(|_| limits.admit(ip(1)).is_ok()).count(), 2);
    // The control: another rate begins with its burst.
    let new_burst = NonZeroU32::new(4).unwrap();
    limits.adopt(ConnectionLimitOptions { new_burst, ..options(99, 100) });
    assert_eq!((0..5).filter(|_| limits.admit(ip(1)).is_ok()).count(), 4);
}

#[test]
fn connection_limits_bound_new_connections() {
    let limits = connection_limits(100, 100, 5);
    let admitted = (0..10).filter(|_| limits.admit(ip(1)).is_ok()).count();
    assert_eq!(admitted, 5);
    assert!(limits.admit(ip(2)).is_ok(), "one source does not exhaust the rate of another");
}

#[tokio::test]
async fn connection_limits_skip_sources_of_proxies() {
    let limits = connection_limits(3, 1, 1);
    let proxy = [limits.acquire().ok().unwrap(), limits.acquire().ok().unwrap()];
    // One of the proxies names its client.
    assert_eq!(proxy[0].count_named(ip(1)).await, Ok(()));
    assert_eq!(limits.admit(ip(1)).err(), Some(LimitReached::PerSource));
    drop(proxy);
    assert_eq!(limits.open(), 0);
    assert!(limits.is_empty());
}

/// Waits in line for a connection of `address`.
async fn wait(
    limits: &Arc<ConnectionLimits>,
    address: IpAddr,
) -> Result<ConnectionPermit, LimitReached> {
    let source = limits.source_of(address);
    match limits.permit(source) {
        Ok(permit) => Ok(permit),
        Err(full) => limits.wait_in_line(source, (limits.enter_line(source, full)?, full)).await,
    }
}

#[tokio::test(start_paused = true)]
async fn source_at_its_bound_waits_for_a_place() {
    let limits = connection_limits(100, 1, 100);
    let first = limits.admit(ip(1)).ok().unwrap();
    // Another source does not wait.
    assert!(limits.permit(limits.source_of(ip(2))).is_ok());
    let started = Instant::now();
    assert_eq!(wait(&limits, ip(1)).await.err(), Some(LimitReached::PerSource));
    assert_eq!(started.elapsed(), LONGEST_WAIT);
    // The one that waits gets the place as soon as it is free.
    let waits = wait(&limits, ip(1));
    let frees = async {
        tokio::time::sleep(LONGEST_WAIT / 2).await;
        drop(first);
        Instant::now()
    };
    let (waited, freed) = tokio::join!(waits, frees);
    assert!(waited.is_ok());
    assert_eq!(Instant::now(), freed);
}

#[tokio::test(start_paused = true)]
async fn line_of_source_is_bounded() {
    let limits = connection_limits(800, 2, 100);
    let _open = [limits.admit(ip(1)).ok().unwrap(), limits.admit(ip(1)).ok().unwrap()];
    let source = limits.source_of(ip(1));
    let enter = || {
        let full = limits.permit(source).err().expect("the source is at its bound");
        limits.enter_line(source, full)
    };
    let line: Vec<_> = (0..2 * LINE).map(|_| enter().expect("room")).collect();
    assert_eq!(enter().err(), Some(LimitReached::PerSource));
    drop(line);
    assert!(enter().is_ok());
}

#[tokio::test]
async fn known_source_has_larger_bounds() {
    let limits = connection_limits(1_000, 4, 4);
    let admitted = |limits: &Arc<ConnectionLimits>| {
        let source = limits.source_of(ip(1));
        (0..100).map_while(|_| limits.permit(source).ok()).collect::<Vec<_>>()
    };
    let stranger = admitted(&limits);
    assert_eq!(stranger.len(), 4);
    let permit = stranger.into_iter().next().expect("four");
    let peer = Peer::new((ip(1), 1).into(), Arc::default(), permit);
    assert_eq!(peer.authenticate(&owners()), Ok(()));
    drop(peer);
    assert_eq!(admitted(&limits).len(), 32);
    // The memory of it ends, and so do the bounds.
    limits.sweep(Instant::now() + LATELY);
    assert!(!limits.is_known(limits.source_of(ip(1))));
}

/// T02
#[test]
fn connection_limits_bound_memory_for_many_sources() {
    let limits = connection_limits(1_000_000, 1, 1);
    let v6 = |n: u64| IpAddr::from(((u128::from(n) << 64) | 1).to_be_bytes());
    for n in 0..50_000 {
        drop(limits.admit(v6(n)));
    }
    assert!(sources(&limits) <= 50_000 && limits.is_empty());
    limits.sweep(Instant::now());
    assert!(!limits.crowded.load(Ordering::Relaxed), "each of so many sources has its own bucket");
    // A sweep sets this flag beyond MOST_SOURCES.
    limits.crowded.store(true, Ordering::Relaxed);
    let before = sources(&limits);
    for n in 0..50_000 {
        drop(limits.admit(v6((1 << 40) + n)));
    }
    // More sources share a bounded number of buckets.
    assert!(sources(&limits) <= before + 4_096, "{before}, then {}", sources(&limits));
}
