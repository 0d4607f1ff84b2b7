//! Who is on the wire, and the first ring: how much one network source may
//! ask before anything else about it is known.
//!
//! A source is an IPv4 address or an IPv6 /64, because one subscriber owns a
//! whole /64. Headers that name another client count only from proxies that
//! config trusts. Memory is bounded whatever the sources do: the rings are
//! swept each second, and beyond `MOST_SOURCES` new sources share buckets.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use governor::clock::{Clock as _, DefaultClock};
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use http::{HeaderMap, HeaderName};
use tollgate_domain::Network;

use crate::ApiError;

/// A network source: what limits before authentication are keyed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// One IPv4 address.
    V4(Ipv4Addr),
    /// The first 64 bits of an IPv6 address.
    V6([u8; 8]),
    /// One of `CROWD` buckets that sources share when there are too many to
    /// tell apart.
    Crowd(u16),
}

impl Source {
    /// The source that an address belongs to.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let octets = address.octets();
                Self::V6(octets[..8].try_into().expect("8 of 16 octets"))
            }
        }
    }

    /// The shared bucket of this source.
    pub(crate) fn in_crowd(self) -> Self {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        Self::Crowd((hasher.finish() % CROWD) as u16)
    }
}

/// `192.0.2.7`, `2001:db8::/64` or `crowd-17`.
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

/// A text that names no source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an address such as 192.0.2.7 or 2001:db8::1")]
pub struct InvalidSource;

/// As it is shown, or any address of it.
impl std::str::FromStr for Source {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<Self, InvalidSource> {
        if let Some(bucket) = text.strip_prefix(CROWD_NAME) {
            return bucket.parse().map(Self::Crowd).map_err(|_| InvalidSource);
        }
        let address = text.strip_suffix("/64").unwrap_or(text);
        address.parse().map(Self::of).map_err(|_| InvalidSource)
    }
}

/// Who is believed about the client behind a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies {
    /// Nobody, unless named here.
    pub trusted: Vec<Network>,
    /// Whether they say it by the PROXY protocol, and must, instead of by
    /// `X-Forwarded-For`.
    pub proxy_protocol: bool,
}

impl From<&tollgate_config::Proxies> for Proxies {
    fn from(config: &tollgate_config::Proxies) -> Self {
        let tollgate_config::Proxies { trusted, client_from } = config;
        Self {
            trusted: trusted.clone(),
            proxy_protocol: *client_from == tollgate_config::ClientFrom::ProxyV2,
        }
    }
}

impl Proxies {
    /// Whether `address` is one of them.
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(address))
    }

    /// The client of a request: the peer, or where the peer is a trusted
    /// proxy, the nearest address in `X-Forwarded-For` that is not one.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if self.proxy_protocol || !self.trusts(peer) {
            return peer;
        }
        let mut client = peer;
        let mut hops = 0;
        // Each proxy appends whom it saw, so the right-most are the truest.
        for value in headers.get_all(FORWARDED_FOR).iter().rev() {
            let Ok(value) = value.to_str() else { return client };
            for hop in value.rsplit(',') {
                let Ok(hop) = hop.trim().parse() else { return client };
                client = hop;
                hops += 1;
                if hops == MOST_HOPS || !self.trusts(hop) {
                    return client;
                }
            }
        }
        client
    }
}

/// What the source ring allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceOptions {
    /// Requests a second of one source.
    pub per_second: NonZeroU32,
    /// Requests that it may send at once.
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

impl From<&tollgate_config::SourceLimits> for SourceOptions {
    fn from(config: &tollgate_config::SourceLimits) -> Self {
        let tollgate_config::SourceLimits { requests_per_second, request_burst } = *config;
        let positive = |value: u32| NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN);
        Self { per_second: positive(requests_per_second), burst: positive(request_burst) }
    }
}

/// The ring. Clones share its buckets.
#[derive(Clone)]
pub(crate) struct SourceRing {
    buckets: Arc<Buckets>,
    per_second: u32,
}

struct Buckets {
    limiter: RateLimiter<Source, DefaultKeyedStateStore<Source>, DefaultClock>,
    /// There are too many sources to tell them apart.
    crowded: AtomicBool,
}

impl SourceRing {
    pub(crate) fn new(options: &SourceOptions) -> Self {
        let quota = Quota::per_second(options.per_second).allow_burst(options.burst);
        let limiter = RateLimiter::dashmap(quota);
        let buckets = Arc::new(Buckets { limiter, crowded: AtomicBool::new(false) });
        Self { buckets, per_second: options.per_second.get() }
    }

    /// Counts one request of `client`.
    ///
    /// # Errors
    /// [`ApiError::SourceLimit`] when its source has sent too many.
    pub(crate) fn check(&self, client: IpAddr) -> Result<(), ApiError> {
        let Buckets { limiter, crowded } = &*self.buckets;
        let mut source = Source::of(client);
        if crowded.load(Ordering::Relaxed) {
            source = source.in_crowd();
        }
        limiter.check_key(&source).map_err(|refused| ApiError::SourceLimit {
            per_second: self.per_second,
            retry_after: refused.wait_time_from(limiter.clock().now()),
        })
    }

    /// Forgets sources whose bucket is full again. Called each second.
    pub(crate) fn sweep(&self) {
        let Buckets { limiter, crowded } = &*self.buckets;
        limiter.retain_recent();
        let sources = limiter.len();
        crowded.store(sources > MOST_SOURCES, Ordering::Relaxed);
        if sources == 0 {
            limiter.shrink_to_fit();
        }
    }

    #[cfg(test)]
    fn sources(&self) -> usize {
        self.buckets.limiter.len()
    }
}

/// Where proxies write whom they saw.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Sources told apart at once; about 100 bytes each.
pub(crate) const MOST_SOURCES: usize = 100_000;

/// Buckets that sources share beyond that.
const CROWD: u64 = 4_096;

const CROWD_NAME: &str = "crowd-";

/// Proxies in a row that are believed.
const MOST_HOPS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn sources_are_addresses_or_64s() {
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
    fn sources_are_read_as_they_are_shown() {
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
    fn only_trusted_proxies_name_the_client() {
        let trusted = ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"].map(|n| n.parse().unwrap());
        let mut proxies = Proxies { trusted: trusted.into(), proxy_protocol: false };
        let check = |peer: &str, forwarded: &[&str], expected: &str| {
            let mut headers = HeaderMap::new();
            for value in forwarded {
                headers.append("x-forwarded-for", value.parse().unwrap());
            }
            assert_eq!(proxies.client(ip(peer), &headers), ip(expected), "{forwarded:?}");
        };
        check("203.0.113.9", &["198.51.100.1"], "203.0.113.9"); // T10: a stranger's word
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
        // Who speaks the PROXY protocol says nothing in headers.
        proxies.proxy_protocol = true;
        let headers = HeaderMap::from_iter([(FORWARDED_FOR, "198.51.100.1".parse().unwrap())]);
        assert_eq!(proxies.client(ip("10.1.2.3"), &headers), ip("10.1.2.3"));
    }

    #[test]
    fn the_defaults_are_those_of_config() {
        let config = tollgate_config::Config::load(&tollgate_config::Sources::default()).unwrap();
        assert_eq!(SourceOptions::from(&config.gateway().sources), SourceOptions::default());
        assert_eq!(Proxies::from(&config.gateway().proxies), Proxies::default());
    }

    #[test]
    fn a_crowd_shares_buckets() {
        // T02: however many sources there are, the buckets are bounded.
        let buckets: std::collections::HashSet<_> =
            (0..50_000u32).map(|n| Source::V4(Ipv4Addr::from_bits(n)).in_crowd()).collect();
        assert!(buckets.len() <= CROWD as usize);
    }

    #[test]
    fn a_sweep_forgets_the_idle() {
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
    fn a_refusal_says_when() {
        let (per_second, burst) = (NonZeroU32::MIN, NonZeroU32::MIN);
        let ring = SourceRing::new(&SourceOptions { per_second, burst });
        let client = ip("192.0.2.1");
        ring.check(client).unwrap();
        let Err(ApiError::SourceLimit { per_second: 1, retry_after }) = ring.check(client) else {
            panic!("one a second");
        };
        assert!(retry_after <= std::time::Duration::from_secs(1) && !retry_after.is_zero());
        ring.check(ip("192.0.2.2")).unwrap();
    }
}
