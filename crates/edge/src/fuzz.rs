//! Fuzz targets for the first bytes of a connection. A header of the PROXY
//! protocol names a client or none; the head of a request is complete, refused
//! or incomplete; and neither parser takes a byte that belongs to what follows.

use futures_util::FutureExt;

use crate::listener::heads::head;
use crate::listener::proxy::{self, ProxyHeader, SIGNATURE};

/// Checks the reader of PROXY protocol headers.
#[expect(clippy::expect_used, reason = "reading from a slice never waits")]
pub fn proxy_header(data: &[u8]) {
    let mut stream = data;
    let named = proxy::read(&mut stream).now_or_never().expect("bytes never wait");
    let taken = data.len() - stream.len();
    let Ok(named) = named else { return };
    assert!(data.starts_with(&SIGNATURE));
    assert_eq!(taken, 16 + usize::from(u16::from_be_bytes([data[14], data[15]])));
    if let ProxyHeader::Client(client) = named {
        assert!(!client.ip().is_unspecified() && !client.ip().is_multicast(), "{client}");
    }
    // A header without its last byte is invalid.
    let mut cut = &data[..taken - 1];
    assert!(proxy::read(&mut cut).now_or_never().expect("bytes never wait").is_err());
}

/// Checks the parser of HTTP/1 heads.
pub fn request_head(data: &[u8]) {
    const LIMIT: usize = 16 * 1024;
    let Ok(Some((length, framing))) = head(data, LIMIT) else { return };
    assert!(length <= data.len() && data[..length].ends_with(b"\r\n\r\n"));
    // Further bytes change nothing, and fewer bytes are not enough.
    assert_eq!(head(&data[..length], LIMIT), Ok(Some((length, framing))));
    for cut in [1, 2, length / 2, length - 1] {
        assert_eq!(head(&data[..cut.min(length - 1)], LIMIT), Ok(None), "cut at {cut}");
    }
    assert!(!data[..length].contains(&0));
}
