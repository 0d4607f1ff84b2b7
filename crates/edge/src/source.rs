//! Network sources, and the source ring: a rate of requests for each source,
//! checked before anything else about a client is known.
//!
//! A source is an IPv4 address or an IPv6 /64, because one subscriber owns a
//! whole /64. Headers that name another client count only if a trusted proxy
//! sent them. Memory is bounded whatever the sources do: the ring is swept once
//! a second, and beyond [`MOST_SOURCES`] new sources share buckets.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use governor::clock::{Clock as _, DefaultClock};
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use http::{HeaderMap, HeaderName};
use tollgate_domain::Network;

/// A network source, the key of limits before authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// One IPv4 address.
    V4(Ipv4Addr),
    /// The first 64 bits of an IPv6 address.
    V6([u8; 8]),
    /// One of the buckets that sources share while there are too many sources
    /// for a bucket each.
    Crowd(u16),
}

impl Source {
    /// Returns the source that an address belongs to.
    #[expect(clippy::expect_used, reason = "an IPv6 address has 16 octets")]
    pub fn of(address: IpAddr) -> Self {
        // An IPv4 client of a dual-stack socket must not count as an IPv6 one.
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let octets = address.octets();
                Self::V6(octets[..8].try_into().expect("8 of 16 octets"))
            }
        }
    }

    /// Returns the shared bucket of this source.
    pub fn in_crowd(self) -> Self {
        // Without a random seed, because every table must find the same bucket for a source.
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        Self::Crowd((hasher.finish() % CROWD) as u16)
    }
}

/// Shows `192.0.2.7`, `2001:db8::/64` or `crowd-17`.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(address) => address.fmt(f),
            Self::V6(prefix) => {
                let mut octets = [0; 16];
                octets[..8].copy_from_slice(prefix);
                write!(f, "{}/64", Ipv6Addr::from(octets))
            }
            Self::Crowd(bucket) => write!(f, "{CROWD_NAME}{bucket}"),
        }
    }
}

/// An error for a text that names no source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an address such as 192.0.2.7 or 2001:db8::1")]
pub struct InvalidSource;

/// Parses a source as it is shown, or any address of the source.
impl std::str::FromStr for Source {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<Self, InvalidSource> {
        // A penalty of a crowd is listed by this name, and lifted by it.
        if let Some(bucket) = text.strip_prefix(CROWD_NAME) {
            return bucket.parse().map(Self::Crowd).map_err(|_| InvalidSource);
        }
        let address = text.strip_suffix("/64").unwrap_or(text);
        address.parse().map(Self::of).map_err(|_| InvalidSource)
    }
}

/// The proxies that may name a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies {
    /// The networks of trusted proxies; none by default.
    pub trusted: Vec<Network>,
    /// True if trusted proxies must name the client by the PROXY protocol, false
    /// if they name the client in `X-Forwarded-For`.
    pub proxy_protocol: bool,
}

impl Proxies {
    /// Returns true if `address` is a trusted proxy.
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(address))
    }

    /// Returns the client of a request: the peer, or behind a trusted proxy the
    /// nearest address in `X-Forwarded-For` that is no trusted proxy.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        // With the PROXY protocol the peer is the client itself, whose headers prove nothing.
        if self.proxy_protocol || !self.trusts(peer) {
            return peer;
        }
        let mut client = peer;
        let mut hops = 0;
        // Each proxy appends the address of its peer. Addresses further left may
        // be forged by the client.
        for value in headers.get_all(FORWARDED_FOR).iter().rev() {
            let Ok(value) = value.to_str() else { return client };
            for hop in value.rsplit(',') {
                // An entry that cannot be read has no certain sender, so those left of it do not
                // count.
                let Ok(hop) = hop.trim().parse() else { return client };
                client = hop;
                hops += 1;
                // Bounded, because a client chooses the length of the list.
                if hops == MOST_HOPS || !self.trusts(hop) {
                    return client;
                }
            }
        }
        client
    }
}

/// The rate of requests of one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceOptions {
    /// Requests of one source in a second.
    pub per_second: NonZeroU32,
    /// Requests that a source may send at once.
    pub burst: NonZeroU32,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            per_second: const { NonZeroU32::new(1_000).unwrap() },
            burst: const { NonZeroU32::new(2_000).unwrap() },
        }
    }
}

/// The source ring. Clones share one set of buckets.
#[derive(Clone)]
pub struct SourceRing {
    buckets: Arc<ArcSwap<Buckets>>,
}

struct Buckets {
    options: SourceOptions,
    limiter: RateLimiter<Source, DefaultKeyedStateStore<Source>, DefaultClock>,
    /// True while there are too many sources for a bucket each.
    crowded: AtomicBool,
}

/// A refusal by the source ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRefusal {
    /// Requests that a source may send in a second.
    pub per_second: u32,
    /// Time until the next request of the source passes.
    pub retry_after: Duration,
}

impl SourceRing {
    /// Creates a ring without any source.
    pub fn new(options: &SourceOptions) -> Self {
        Self { buckets: Arc::new(ArcSwap::from_pointee(Buckets::new(options))) }
    }

    /// Puts another rate in force. A changed rate begins with a full burst for every
    /// source; the same rate keeps every bucket.
    pub fn adopt(&self, options: &SourceOptions) {
        if self.buckets.load().options != *options {
            self.buckets.store(Arc::new(Buckets::new(options)));
        }
    }

    /// Counts one request of `client`.
    ///
    /// # Errors
    /// The source of `client` has sent too many requests.
    pub fn check(&self, client: IpAddr) -> Result<(), SourceRefusal> {
        let buckets = self.buckets.load();
        let Buckets { options, limiter, crowded } = &**buckets;
        let mut source = Source::of(client);
        // Relaxed is enough: a request that sees the change late costs one bucket more.
        if crowded.load(Ordering::Relaxed) {
            source = source.in_crowd();
        }
        limiter.check_key(&source).map_err(|refused| SourceRefusal {
            per_second: options.per_second.get(),
            retry_after: refused.wait_time_from(limiter.clock().now()),
        })
    }

    /// Drops sources with a full bucket. Called once a second.
    pub fn sweep(&self) {
        let buckets = self.buckets.load();
        let Buckets { options: _, limiter, crowded } = &**buckets;
        // A full bucket says nothing more than no bucket.
        limiter.retain_recent();
        let sources = limiter.len();
        crowded.store(sources > MOST_SOURCES, Ordering::Relaxed);
        // Only an empty map shrinks, because shrinking locks every shard.
        if sources == 0 {
            limiter.shrink_to_fit();
        }
    }

    #[cfg(test)]
    fn sources(&self) -> usize {
        self.buckets.load().limiter.len()
    }
}

impl Buckets {
    fn new(options: &SourceOptions) -> Self {
        let quota = Quota::per_second(options.per_second).allow_burst(options.burst);
        let limiter = RateLimiter::dashmap(quota);
        Self { options: options.clone(), limiter, crowded: AtomicBool::new(false) }
    }
}

/// The header in which proxies list the addresses of their peers.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Sources that have a bucket each; about 100 bytes a source.
pub const MOST_SOURCES: usize = 100_000;

/// Buckets that further sources share.
const CROWD: u64 = 4_096;

const CROWD_NAME: &str = "crowd-";

/// Most entries of the header that are read.
const MOST_HOPS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn source_is_address_or_prefix_64() {
        let check = |a: &str, b: &str, same: bool| {
            assert_eq!(Source::of(ip(a)) == Source::of(ip(b)), same, "{a} {b}");
        };
        check("192.0.2.1", "192.0.2.1", true);
        check("192.0.2.1", "192.0.2.2", false);
        check("192.0.2.1", "::ffff:192.0.2.1", true);
        check("2001:db8::1", "2001:db8::ffff:1", true);
        check("2001:db8::1", "2001:db8:0:1::1", false);
    }

    #[test]
    fn source_text_round_trips() {
        for (address, shown) in [("192.0.2.1", "192.0.2.1"), ("2001:db8::1", "2001:db8::/64")] {
            let source = Source::of(ip(address));
            assert_eq!(source.to_string(), shown);
            assert_eq!(shown.parse(), Ok(source));
            assert_eq!(address.parse(), Ok(source));
        }
        assert_eq!(Source::Crowd(17).to_string().parse(), Ok(Source::Crowd(17)));
        for text in ["", "acme", "192.0.2.1/24", "crowd-x"] {
            assert_eq!(text.parse::<Source>(), Err(InvalidSource), "{text}");
        }
    }

    #[test]
    fn proxies_name_clients_only_if_trusted() {
        let trusted = ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"].map(|n| n.parse().unwrap());
        let mut proxies = Proxies { trusted: trusted.into(), proxy_protocol: false };
        let check = |peer: &str, forwarded: &[&str], expected: &str| {
            let mut headers = HeaderMap::new();
            for value in forwarded {
                headers.append("x-forwarded-for", value.parse().unwrap());
            }
            assert_eq!(proxies.client(ip(peer), &headers), ip(expected), "{forwarded:?}");
        };
        check("203.0.113.9", &["198.51.100.1"], "203.0.113.9"); // T10: no trusted proxy
        check("10.1.2.3", &[], "10.1.2.3");
        check("10.1.2.3", &["198.51.100.1"], "198.51.100.1");
        check("10.1.2.3", &["1.1.1.1, 198.51.100.1"], "198.51.100.1"); // forged on the left
        check("10.1.2.3", &["1.1.1.1", "198.51.100.1, 10.9.9.9"], "198.51.100.1");
        check("10.1.2.3", &["nonsense"], "10.1.2.3");
        check("192.0.2.7", &["198.51.100.1"], "198.51.100.1");
        check("192.0.2.8", &["198.51.100.1"], "192.0.2.8");
        check("2001:db8::5", &["198.51.100.1"], "198.51.100.1");
        check("10.1.2.3", &["198.51.100.1, 10.0.0.1, 10.0.0.2"], "198.51.100.1");
        check("10.1.2.3", &[&"10.0.0.1,".repeat(100)], "10.1.2.3"); // ends with nothing
        check("10.1.2.3", &[&format!("198.51.100.1{}", ", 10.0.0.1".repeat(100))], "10.0.0.1");
        // With the PROXY protocol, headers count for nothing.
        proxies.proxy_protocol = true;
        let headers = HeaderMap::from_iter([(FORWARDED_FOR, "198.51.100.1".parse().unwrap())]);
        assert_eq!(proxies.client(ip("10.1.2.3"), &headers), ip("10.1.2.3"));
    }

    #[test]
    fn source_ring_shares_buckets_in_crowd() {
        // T02: however many sources there are, the buckets are bounded.
        let buckets: std::collections::HashSet<_> =
            (0..50_000u32).map(|n| Source::V4(Ipv4Addr::from_bits(n)).in_crowd()).collect();
        assert!(buckets.len() <= CROWD as usize);
    }

    #[test]
    fn source_ring_sweep_drops_idle_sources() {
        let ring = SourceRing::new(&SourceOptions {
            per_second: NonZeroU32::new(1_000_000).unwrap(),
            ..SourceOptions::default()
        });
        for n in 0..1_000 {
            ring.check(Ipv4Addr::from_bits(n).into()).unwrap();
        }
        assert_eq!(ring.sources(), 1_000);
        // A bucket is full again a microsecond after its one request.
        while ring.sources() > 0 {
            ring.sweep();
        }
    }

    #[test]
    fn source_ring_keeps_buckets_of_same_rate() {
        let of = |burst| SourceOptions {
            per_second: NonZeroU32::MIN,
            burst: NonZeroU32::new(burst).unwrap(),
        };
        let ring = SourceRing::new(&of(3));
        let passed = || (0..9).filter(|_| ring.check(ip("192.0.2.1")).is_ok()).count();
        assert_eq!(passed(), 3);
        ring.adopt(&of(3));
        assert_eq!(passed(), 0);
        ring.clone().adopt(&of(5));
        assert_eq!(passed(), 5);
    }

    #[test]
    fn source_ring_refusal_has_retry_after() {
        let (per_second, burst) = (NonZeroU32::MIN, NonZeroU32::MIN);
        let ring = SourceRing::new(&SourceOptions { per_second, burst });
        let client = ip("192.0.2.1");
        ring.check(client).unwrap();
        let Err(SourceRefusal { per_second: 1, retry_after }) = ring.check(client) else {
            panic!("one a second");
        };
        assert!(retry_after <= Duration::from_secs(1) && !retry_after.is_zero());
        ring.check(ip("192.0.2.2")).unwrap();
    }
}
