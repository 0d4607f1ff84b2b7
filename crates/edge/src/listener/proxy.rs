//! The binary PROXY protocol, version 2: a trusted proxy names its client before
//! TLS. The reader takes the header to its last byte and no further byte, and
//! skips extensions.
//!
//! A crate such as `ppp` parses a complete buffer. The exact read, the bound on
//! the length and the checks of addresses would stay here, and `ppp` rejects a
//! LOCAL header of an unknown family, which the protocol tells a receiver to
//! accept. Only the twenty lines of `parse` would become shorter.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::io::{AsyncRead, AsyncReadExt};

/// The content of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyHeader {
    /// The client of the connection.
    Client(SocketAddr),
    /// No client: the proxy itself connects, for example for a health check.
    Proxy,
}

/// An error for bytes that are no header, or a header that is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidHeader;

/// Reads one header from `stream`.
pub(crate) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<ProxyHeader, InvalidHeader> {
    let mut fixed = [0; FIXED];
    stream.read_exact(&mut fixed).await.map_err(|_| InvalidHeader)?;
    let length = length(&fixed)?;
    // On the stack: nothing is allocated for a peer that is not known yet.
    let mut rest = [0; LONGEST];
    let rest = &mut rest[..length];
    stream.read_exact(rest).await.map_err(|_| InvalidHeader)?;
    parse(&fixed, rest)
}

/// Returns the number of bytes after the fixed part.
fn length(fixed: &[u8; FIXED]) -> Result<usize, InvalidHeader> {
    if fixed[..SIGNATURE.len()] != SIGNATURE {
        return Err(InvalidHeader);
    }
    let length = usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    if length > LONGEST { Err(InvalidHeader) } else { Ok(length) }
}

fn parse(fixed: &[u8; FIXED], rest: &[u8]) -> Result<ProxyHeader, InvalidHeader> {
    let (command, family) = (fixed[12], fixed[13]);
    match (command, family) {
        // The protocol requires that a LOCAL header of any family is accepted.
        (LOCAL, _) => Ok(ProxyHeader::Proxy),
        // The proxy does not know the client, either.
        (PROXY, UNSPECIFIED) => Ok(ProxyHeader::Proxy),
        (PROXY, TCP4) => {
            let (addresses, _) = rest.split_first_chunk::<12>().ok_or(InvalidHeader)?;
            let [a, b, c, d, .., port, trop, _, _] = *addresses;
            client(Ipv4Addr::new(a, b, c, d).into(), [port, trop])
        }
        (PROXY, TCP6) => {
            let (addresses, _) = rest.split_first_chunk::<36>().ok_or(InvalidHeader)?;
            let (address, _) = addresses.split_first_chunk::<16>().ok_or(InvalidHeader)?;
            client(Ipv6Addr::from(*address).into(), [addresses[32], addresses[33]])
        }
        _ => Err(InvalidHeader),
    }
}

/// Checks the address of a client. An address that no client can have means
/// that the proxy is misconfigured.
fn client(address: IpAddr, port: [u8; 2]) -> Result<ProxyHeader, InvalidHeader> {
    if address.is_unspecified() || address.is_multicast() {
        return Err(InvalidHeader);
    }
    Ok(ProxyHeader::Client((address, u16::from_be_bytes(port)).into()))
}

/// The bytes with which every header of version 2 begins.
pub(crate) const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// Bytes before the addresses.
const FIXED: usize = 16;

/// Most bytes of addresses and extensions, many times what proxies send.
const LONGEST: usize = 1_024;

/// Version 2 with a command.
const LOCAL: u8 = 0x20;
const PROXY: u8 = 0x21;

/// Address families with their transport.
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

    /// Parses `bytes`; also returns how many following bytes were consumed.
    fn parsed(bytes: &[u8]) -> (Result<ProxyHeader, InvalidHeader>, usize) {
        let follows = b"\x16\x03\x01";
        let all = [bytes, follows].concat();
        let mut reader = &all[..];
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let named = runtime.block_on(read(&mut reader));
        (named, follows.len().saturating_sub(reader.len()))
    }

    const V4: [u8; 12] = [198, 51, 100, 7, 10, 0, 0, 1, 0xd9, 0x03, 0x20, 0xfb];

    #[test]
    fn proxy_header_names_the_client() {
        let client = |text: &str| Ok(ProxyHeader::Client(text.parse().unwrap()));
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
            (header(LOCAL, 0, &[]), Ok(ProxyHeader::Proxy)),
            (header(LOCAL, TCP4, &V4), Ok(ProxyHeader::Proxy)),
            (header(PROXY, UNSPECIFIED, &[7; 20]), Ok(ProxyHeader::Proxy)),
            (header(PROXY, TCP4, &V4[..11]), Err(InvalidHeader)),
            (header(PROXY, TCP6, &v6[..35]), Err(InvalidHeader)),
            (header(PROXY, TCP4, &[0; 12]), Err(InvalidHeader)), // 0.0.0.0
            (header(PROXY, 0x12, &V4), Err(InvalidHeader)),      // UDP
            (header(PROXY, 0x31, &[0; 216]), Err(InvalidHeader)), // a Unix socket
            (header(0x22, TCP4, &V4), Err(InvalidHeader)),       // no such command
            (header(0x11, TCP4, &V4), Err(InvalidHeader)),       // version 1 in binary
            (header(PROXY, TCP4, &long), Err(InvalidHeader)),
            (b"PROXY TCP4 198.51.100.7 10.0.0.1 55555 8443\r\n".to_vec(), Err(InvalidHeader)),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00\x00".to_vec(), Err(InvalidHeader)),
        ] {
            let (named, eaten) = parsed(&bytes);
            assert_eq!(named, expected, "{bytes:?}");
            assert!(named.is_err() || eaten == 0, "the bytes after the header belong to TLS");
        }
    }

    #[test]
    fn proxy_header_cut_short_is_invalid() {
        let whole = header(PROXY, TCP4, &V4);
        for length in 0..whole.len() {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let named = runtime.block_on(read(&mut &whole[..length]));
            assert_eq!(named, Err(InvalidHeader), "{length}");
        }
    }

    proptest! {
        #[test]
        fn proxy_header_parser_never_panics(fixed: [u8; 4], rest in prop::collection::vec(any::<u8>(), 0..1_200)) {
            let mut bytes = SIGNATURE.to_vec();
            bytes.extend(fixed);
            bytes.extend(rest);
            let _ = parsed(&bytes);
        }
    }
}
