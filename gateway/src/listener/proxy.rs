//! The binary PROXY protocol, version 2: a trusted proxy says before TLS whom
//! it speaks for. Read to its last byte and no further, within one deadline;
//! its extensions are passed over.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::io::{AsyncRead, AsyncReadExt};

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// The client whose connection it is.
    Client(SocketAddr),
    /// Nobody: the proxy itself connects, as to see whether we are well.
    Proxy,
}

/// A header that is none, or none that we take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BadHeader;

/// Reads one header off `stream`.
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Named, BadHeader> {
    let mut fixed = [0; FIXED];
    stream.read_exact(&mut fixed).await.map_err(|_| BadHeader)?;
    let length = length(&fixed)?;
    let mut rest = [0; LONGEST];
    let rest = &mut rest[..length];
    stream.read_exact(rest).await.map_err(|_| BadHeader)?;
    parse(&fixed, rest)
}

/// How many bytes follow the fixed ones.
fn length(fixed: &[u8; FIXED]) -> Result<usize, BadHeader> {
    if fixed[..SIGNATURE.len()] != SIGNATURE {
        return Err(BadHeader);
    }
    let length = usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    if length > LONGEST { Err(BadHeader) } else { Ok(length) }
}

fn parse(fixed: &[u8; FIXED], rest: &[u8]) -> Result<Named, BadHeader> {
    let (command, family) = (fixed[12], fixed[13]);
    match (command, family) {
        (LOCAL, _) => Ok(Named::Proxy),
        // The proxy does not know, either.
        (PROXY, UNSPECIFIED) => Ok(Named::Proxy),
        (PROXY, TCP4) => {
            let (addresses, _) = rest.split_first_chunk::<12>().ok_or(BadHeader)?;
            let [a, b, c, d, .., port, trop, _, _] = *addresses;
            client(Ipv4Addr::new(a, b, c, d).into(), [port, trop])
        }
        (PROXY, TCP6) => {
            let (addresses, _) = rest.split_first_chunk::<36>().ok_or(BadHeader)?;
            let (address, _) = addresses.split_first_chunk::<16>().ok_or(BadHeader)?;
            client(Ipv6Addr::from(*address).into(), [addresses[32], addresses[33]])
        }
        _ => Err(BadHeader),
    }
}

/// An address that no client can have says that the proxy is not set up.
fn client(address: IpAddr, port: [u8; 2]) -> Result<Named, BadHeader> {
    if address.is_unspecified() || address.is_multicast() {
        return Err(BadHeader);
    }
    Ok(Named::Client((address, u16::from_be_bytes(port)).into()))
}

/// How a header begins, whatever its version 2 says.
pub(super) const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// The bytes before the addresses.
const FIXED: usize = 16;

/// Bytes of addresses and extensions: many times what proxies send.
const LONGEST: usize = 1_024;

/// Version 2 and a command.
const LOCAL: u8 = 0x20;
const PROXY: u8 = 0x21;

/// Families of addresses.
const UNSPECIFIED: u8 = 0x00;
const TCP4: u8 = 0x11;
const TCP6: u8 = 0x21;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let mut bytes = SIGNATURE.to_vec();
        bytes.extend([command, family]);
        bytes.extend(u16::try_from(rest.len()).unwrap().to_be_bytes());
        bytes.extend(rest);
        bytes
    }

    /// What `bytes` say, and how many bytes of what follows were eaten.
    fn said(bytes: &[u8]) -> (Result<Named, BadHeader>, usize) {
        let follows = b"\x16\x03\x01";
        let all = [bytes, follows].concat();
        let mut reader = &all[..];
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let named = runtime.block_on(read(&mut reader));
        (named, follows.len().saturating_sub(reader.len()))
    }

    const V4: [u8; 12] = [198, 51, 100, 7, 10, 0, 0, 1, 0xd9, 0x03, 0x20, 0xfb];

    #[test]
    fn a_header_names_the_client() {
        let client = |text: &str| Ok(Named::Client(text.parse().unwrap()));
        let mut v6 = [0; 36];
        v6[..4].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
        v6[15] = 9;
        v6[32..34].copy_from_slice(&443_u16.to_be_bytes());
        let with_extensions = [&V4[..], &[4, 0, 3, 1, 2, 3]].concat();
        let long = [&V4[..], &[0; 1_100]].concat();
        for (bytes, expected) in [
            (header(PROXY, TCP4, &V4), client("198.51.100.7:55555")),
            (header(PROXY, TCP4, &with_extensions), client("198.51.100.7:55555")),
            (header(PROXY, TCP6, &v6), client("[2001:db8::9]:443")),
            (header(LOCAL, 0, &[]), Ok(Named::Proxy)),
            (header(LOCAL, TCP4, &V4), Ok(Named::Proxy)),
            (header(PROXY, UNSPECIFIED, &[7; 20]), Ok(Named::Proxy)),
            (header(PROXY, TCP4, &V4[..11]), Err(BadHeader)),
            (header(PROXY, TCP6, &v6[..35]), Err(BadHeader)),
            (header(PROXY, TCP4, &[0; 12]), Err(BadHeader)), // 0.0.0.0
            (header(PROXY, 0x12, &V4), Err(BadHeader)),      // UDP
            (header(PROXY, 0x31, &[0; 216]), Err(BadHeader)), // a Unix socket
            (header(0x22, TCP4, &V4), Err(BadHeader)),       // no such command
            (header(0x11, TCP4, &V4), Err(BadHeader)),       // version 1 in binary
            (header(PROXY, TCP4, &long), Err(BadHeader)),
            (b"PROXY TCP4 198.51.100.7 10.0.0.1 55555 8443\r\n".to_vec(), Err(BadHeader)),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00\x00".to_vec(), Err(BadHeader)),
        ] {
            let (named, eaten) = said(&bytes);
            assert_eq!(named, expected, "{bytes:?}");
            assert!(named.is_err() || eaten == 0, "what follows is TLS's");
        }
    }

    #[test]
    fn a_torn_header_is_bad() {
        let whole = header(PROXY, TCP4, &V4);
        for length in 0..whole.len() {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let named = runtime.block_on(read(&mut &whole[..length]));
            assert_eq!(named, Err(BadHeader), "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(fixed: [u8; 4], rest in prop::collection::vec(any::<u8>(), 0..1_200)) {
            let mut bytes = SIGNATURE.to_vec();
            bytes.extend(fixed);
            bytes.extend(rest);
            let _ = said(&bytes);
        }
    }
}
