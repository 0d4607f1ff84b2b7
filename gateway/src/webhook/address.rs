//! The addresses to which a webhook may be sent. The names of a URL are resolved here, and
//! the connection is made to an address that passed the check, so a name that changes
//! between check and connection leads nowhere else.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tollgate_domain::Network;

/// The networks that an admin has allowed, beside the public ones. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct AllowedAddresses(Arc<[Network]>);

/// An error for a name or an address outside of the allowed networks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} is an address of a private network, which gateway.webhook.allowed_networks does not list"
)]
pub(super) struct ForbiddenAddress(String);

impl AllowedAddresses {
    /// Allows public addresses and those in `networks`.
    pub(super) fn new(networks: &[Network]) -> Self {
        Self(networks.into())
    }

    /// Checks the host of a URL, if it is an address. Names are checked when they are
    /// resolved.
    ///
    /// # Errors
    /// The host is an address that is not allowed.
    pub(super) fn check_host(&self, host: &str) -> Result<(), ForbiddenAddress> {
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        match literal.parse::<IpAddr>() {
            Ok(address) if !self.allows(address) => Err(ForbiddenAddress(address.to_string())),
            _ => Ok(()),
        }
    }

    fn allows(&self, address: IpAddr) -> bool {
        is_public(address) || self.0.iter().any(|network| network.contains(address))
    }
}

impl Resolve for AllowedAddresses {
    fn resolve(&self, name: Name) -> Resolving {
        let allowed = self.clone();
        Box::pin(async move {
            let host = name.as_str().to_owned();
            let found: Vec<SocketAddr> =
                tokio::net::lookup_host((host.as_str(), 0)).await?.take(MOST_ADDRESSES).collect();
            // A name may also have private addresses, which are passed over.
            let passed: Vec<SocketAddr> =
                found.iter().copied().filter(|found| allowed.allows(found.ip())).collect();
            if let (true, Some(first)) = (passed.is_empty(), found.first()) {
                return Err(ForbiddenAddress(format!("{host} ({})", first.ip())).into());
            }
            if passed.is_empty() {
                return Err(
                    io::Error::new(io::ErrorKind::NotFound, "the name has no address").into()
                );
            }
            Ok(Box::new(passed.into_iter()) as Addrs)
        })
    }
}

/// Returns true if `address` belongs to the public Internet.
fn is_public(address: IpAddr) -> bool {
    // An IPv4 address in the form of IPv6 must meet the rules of IPv4.
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || address.is_multicast()
        // This network; shared by providers; protocol assignments; benchmarks; reserved.
        || a == 0
        || (a == 100 && b & 0xc0 == 64)
        || [a, b, c] == [192, 0, 0]
        || (a == 198 && b & 0xfe == 18)
        || a >= 240;
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [first, second, ..] = address.segments();
    // Only 2000::/3 is handed out. Within it, Teredo, documentation and 6to4 are no
    // addresses of the Internet, and the first and last contain IPv4 addresses.
    first & 0xe000 == 0x2000
        && !(first == 0x2001 && (second == 0 || second == 0xdb8))
        && first != 0x2002
}

/// Addresses of one name that are considered.
const MOST_ADDRESSES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_forbidden_unless_allowed() {
        let check = |address: &str, expected: bool| {
            assert_eq!(is_public(address.parse().expect("an address")), expected, "{address}");
        };
        for public in ["1.1.1.1", "100.63.0.1", "172.32.0.1", "198.20.0.1", "2606:4700::1111"] {
            check(public, true);
        }
        for private in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "fc00::1",
            "fe80::1",
            "ff02::1",
        ] {
            check(private, false);
        }
        let allowed = AllowedAddresses::new(&["10.0.0.0/8".parse().expect("a network")]);
        assert!(allowed.allows("10.9.9.9".parse().expect("an address")));
        assert!(!allowed.allows("192.168.0.1".parse().expect("an address")));
        assert!(allowed.check_host("hooks.example").is_ok());
        assert!(allowed.check_host("[::1]").is_err() && allowed.check_host("127.0.0.1").is_err());
    }

    #[tokio::test]
    async fn names_of_private_addresses_are_forbidden() {
        let name = || "localhost".parse::<Name>().expect("a name");
        let public = AllowedAddresses::new(&[]);
        let error = public.resolve(name()).await.err().expect("forbidden").to_string();
        assert!(error.starts_with("localhost (") && error.contains("private network"), "{error}");
        let networks = ["127.0.0.0/8", "::1/128"].map(|text| text.parse().expect("a network"));
        let found = AllowedAddresses::new(&networks).resolve(name()).await.expect("allowed");
        assert!(found.count() > 0);
    }
}
