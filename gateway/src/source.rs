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
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use governor::middleware::NoOpMiddleware;
use http::{HeaderMap, Request};
use tollgate_domain::Network;
use tower_governor::governor::{GovernorConfig, GovernorConfigBuilder};
use tower_governor::key_extractor::KeyExtractor;
use tower_governor::{GovernorError, GovernorLayer};

use crate::ApiError;
use crate::listener::Peer;

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

/// The client of a request: the peer, or where the peer is a trusted proxy,
/// the nearest address in `X-Forwarded-For` that is not one.
pub fn client_address(peer: IpAddr, headers: &HeaderMap, trusted: &[Network]) -> IpAddr {
    let is_trusted = |address| trusted.iter().any(|network| network.contains(address));
    if !is_trusted(peer) {
        return peer;
    }
    let mut client = peer;
    // Each proxy appends whom it saw, so the right-most are the truest.
    for value in headers.get_all("x-forwarded-for").iter().rev() {
        let Ok(value) = value.to_str() else { return client };
        for hop in value.rsplit(',').take(MOST_HOPS) {
            let Ok(hop) = hop.trim().parse() else { return client };
            client = hop;
            if !is_trusted(hop) {
                return client;
            }
        }
    }
    client
}

/// Whose request it is: who is at the other end of its connection.
pub(crate) fn client_of(extensions: &http::Extensions) -> Option<IpAddr> {
    extensions.get::<Peer>().map(|peer| peer.address().ip())
}

/// What the source ring allows.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// Requests a second of one source.
    pub per_second: NonZeroU32,
    /// Requests that it may send at once.
    pub burst: NonZeroU32,
    /// Proxies whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<Network>,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            per_second: const { NonZeroU32::new(1_000).unwrap() },
            burst: const { NonZeroU32::new(2_000).unwrap() },
            trusted_proxies: Vec::new(),
        }
    }
}

impl From<&tollgate_config::SourceLimits> for SourceOptions {
    fn from(config: &tollgate_config::SourceLimits) -> Self {
        let tollgate_config::SourceLimits { requests_per_second, request_burst } = *config;
        let positive = |value: u32| NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN);
        Self {
            per_second: positive(requests_per_second),
            burst: positive(request_burst),
            trusted_proxies: Vec::new(),
        }
    }
}

/// The ring: a layer for the stack and a sweep for the clockwork.
#[derive(Clone)]
pub(crate) struct SourceRing {
    config: Arc<GovernorConfig<SourceKey, NoOpMiddleware>>,
    key: SourceKey,
    per_second: u32,
    period: Duration,
}

impl SourceRing {
    pub(crate) fn new(options: &SourceOptions) -> Self {
        let key = SourceKey {
            trusted: options.trusted_proxies.as_slice().into(),
            crowded: Arc::new(AtomicBool::new(false)),
        };
        let period = Duration::from_secs(1) / options.per_second.get();
        let config = GovernorConfigBuilder::default()
            .period(period)
            .burst_size(options.burst.get())
            .key_extractor(key.clone())
            .finish()
            .expect("neither a second's part nor a burst is zero");
        Self { config: Arc::new(config), key, per_second: options.per_second.get(), period }
    }

    /// The layer. A refused request always passes after one period at the
    /// latest: tower_governor says the wait in whole seconds, cut, so the
    /// period is added.
    pub(crate) fn layer(&self) -> GovernorLayer<SourceKey, NoOpMiddleware, Body> {
        let (per_second, period) = (self.per_second, self.period);
        GovernorLayer::new(Arc::clone(&self.config))
            .error_handler(move |error| refusal(&error, per_second, period).into_response())
    }

    /// Forgets sources whose bucket is full again. Called each second.
    pub(crate) fn sweep(&self) {
        let limiter = self.config.limiter();
        limiter.retain_recent();
        let sources = limiter.len();
        self.key.crowded.store(sources > MOST_SOURCES, Ordering::Relaxed);
        if sources == 0 {
            limiter.shrink_to_fit();
        }
    }

    #[cfg(test)]
    fn sources(&self) -> usize {
        self.config.limiter().len()
    }
}

fn refusal(error: &GovernorError, per_second: u32, period: Duration) -> ApiError {
    match error {
        GovernorError::TooManyRequests { wait_time, .. } => ApiError::SourceLimit {
            per_second,
            retry_after: Duration::from_secs(*wait_time) + period,
        },
        // Only a request that did not come through the listener has no peer.
        GovernorError::UnableToExtractKey | GovernorError::Other { .. } => ApiError::Internal,
    }
}

/// Finds the source of a request.
#[derive(Clone, Debug)]
pub(crate) struct SourceKey {
    trusted: Arc<[Network]>,
    crowded: Arc<AtomicBool>,
}

impl KeyExtractor for SourceKey {
    type Key = Source;

    fn extract<T>(&self, request: &Request<T>) -> Result<Source, GovernorError> {
        let peer = request.extensions().get::<Peer>().ok_or(GovernorError::UnableToExtractKey)?;
        let client = client_address(peer.address().ip(), request.headers(), &self.trusted);
        let source = Source::of(client);
        Ok(if self.crowded.load(Ordering::Relaxed) { source.in_crowd() } else { source })
    }
}

/// Sources told apart at once; about 100 bytes each.
pub(crate) const MOST_SOURCES: usize = 100_000;

/// Buckets that sources share beyond that.
const CROWD: u64 = 4_096;

const CROWD_NAME: &str = "crowd-";

/// Addresses of one `X-Forwarded-For` that are looked at.
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
        let check = |peer: &str, forwarded: &[&str], expected: &str| {
            let mut headers = HeaderMap::new();
            for value in forwarded {
                headers.append("x-forwarded-for", value.parse().unwrap());
            }
            assert_eq!(client_address(ip(peer), &headers, &trusted), ip(expected), "{forwarded:?}");
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
    }

    #[test]
    fn the_defaults_are_those_of_config() {
        let config = tollgate_config::Config::load(&tollgate_config::Sources::default()).unwrap();
        let options = SourceOptions::from(&config.gateway().sources);
        let SourceOptions { per_second, burst, trusted_proxies } = SourceOptions::default();
        assert_eq!((options.per_second, options.burst), (per_second, burst));
        assert_eq!(options.trusted_proxies, trusted_proxies);
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
            let _ = ring.config.limiter().check_key(&Source::V4(Ipv4Addr::from_bits(n)));
        }
        assert_eq!(ring.sources(), 1_000);
        // A bucket is full again a microsecond after its one request.
        while ring.sources() > 0 {
            ring.sweep();
        }
    }

    #[test]
    fn a_refusal_says_when() {
        let error = GovernorError::TooManyRequests { wait_time: 0, headers: None };
        assert_eq!(
            refusal(&error, 20, Duration::from_millis(50)),
            ApiError::SourceLimit { per_second: 20, retry_after: Duration::from_millis(50) }
        );
    }
}
