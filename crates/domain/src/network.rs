//! Networks of addresses as admins write them: one address, or all addresses with a common
//! prefix.
//!
//! The module does not use the `ipnet` crate. A [`Network`] stores IPv4 as a mapped IPv6
//! network, so that `10.0.0.0/8` contains `::ffff:10.0.0.1` and `::/0` contains all
//! addresses. An `IpNet` keeps the two families apart, and both would have to be mapped
//! around every call.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One address, or all addresses with a common prefix. Bits after the prefix are zero, so
/// each network has exactly one representation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network {
    /// First address. IPv4 addresses are in their mapped form.
    address: Ipv6Addr,
    /// Length of the prefix, of 128 bits.
    prefix: u8,
}

/// A text that is not `ADDRESS` or `ADDRESS/PREFIX`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a network: write it as 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32")]
pub struct InvalidNetwork(pub String);

impl Network {
    /// Returns true if the network contains `address`.
    pub fn contains(&self, address: IpAddr) -> bool {
        masked(mapped(address), self.prefix) == self.address
    }
}

impl FromStr for Network {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        // Cut, because the text goes to the log.
        let invalid = || InvalidNetwork(text.chars().take(64).collect());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix: u8 = prefix.map_or(Ok(bits), str::parse).map_err(|_| invalid())?;
        // Checked against the family as written: 10.0.0.0/33 must not mean an IPv6 prefix.
        if prefix > bits {
            return Err(invalid());
        }
        // In its mapped form an IPv4 address follows 96 fixed bits.
        let prefix = prefix + (128 - bits);
        Ok(Self { address: masked(mapped(address), prefix), prefix })
    }
}

/// Formats the network like `10.0.0.0/8`, and a single address without a prefix.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, bits) = match self.address.to_ipv4_mapped() {
            Some(address) if self.prefix >= MAPPED => (IpAddr::V4(address), 32),
            // A prefix shorter than the mapped range covers more than IPv4.
            _ => (IpAddr::V6(self.address), 128),
        };
        let prefix = self.prefix - (128 - bits);
        if prefix == bits { write!(f, "{address}") } else { write!(f, "{address}/{prefix}") }
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl TryFrom<String> for Network {
    type Error = InvalidNetwork;

    fn try_from(text: String) -> Result<Self, InvalidNetwork> {
        text.parse()
    }
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

fn masked(address: Ipv6Addr, prefix: u8) -> Ipv6Addr {
    // A shift by 128 is not defined, and an empty prefix has an empty mask.
    let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
    Ipv6Addr::from_bits(address.to_bits() & mask)
}

/// Number of bits before the IPv4 address in its mapped form.
const MAPPED: u8 = 96;

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        text.parse().expect(text)
    }

    #[test]
    fn invalid_networks_are_rejected() {
        for text in ["10.0.0.0/33", "::/129", "10.0.0", "a/8", "10.0.0.0/", "10.0.0.0/-1", ""] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }

    #[test]
    fn networks_survive_their_text_form() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("192.0.2.7", "192.0.2.7"),
            ("192.0.2.7/32", "192.0.2.7"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("2001:db8::1", "2001:db8::1"),
            ("::/0", "::/0"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ] {
            assert_eq!(network(text).to_string(), shown);
            assert_eq!(network(shown), network(text));
        }
        let json = serde_json::to_string(&network("10.0.0.0/8")).expect("serialises");
        assert_eq!(json, "\"10.0.0.0/8\"");
        assert_eq!(serde_json::from_str::<Network>(&json).expect("parses"), network("10.0.0.0/8"));
        assert!(serde_json::from_str::<Network>("\"10.0.0.0/40\"").is_err());
    }

    #[test]
    fn network_contains_addresses_with_its_prefix() {
        for (text, address, expected) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.0.0.0/8", "::ffff:10.0.0.1", true),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.8", false),
            ("0.0.0.0/0", "203.0.113.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("::/0", "203.0.113.1", true),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
        ] {
            let address: IpAddr = address.parse().expect("an address");
            assert_eq!(network(text).contains(address), expected, "{text} {address}");
        }
    }
}
