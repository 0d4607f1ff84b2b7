//! The first bytes of a connection as hostile bytes: a proxy's header names a
//! client or nobody, a request's head is whole, refused or not yet there, and
//! neither takes a byte that is not its own.

use futures_util::FutureExt;

use super::heads::head;
use super::proxy::{self, Named, SIGNATURE};

/// The header of the PROXY protocol.
pub fn proxy_header(data: &[u8]) {
    let mut stream = data;
    let named = proxy::read(&mut stream).now_or_never().expect("bytes never wait");
    let taken = data.len() - stream.len();
    let Ok(named) = named else { return };
    assert!(data.starts_with(&SIGNATURE));
    assert_eq!(taken, 16 + usize::from(u16::from_be_bytes([data[14], data[15]])));
    if let Named::Client(client) = named {
        assert!(!client.ip().is_unspecified() && !client.ip().is_multicast(), "{client}");
    }
    // Cut anywhere it is none.
    let mut cut = &data[..taken - 1];
    assert!(proxy::read(&mut cut).now_or_never().expect("bytes never wait").is_err());
}

/// The head of a request over HTTP/1.
pub fn request_head(data: &[u8]) {
    const LIMIT: usize = 16 * 1024;
    let Ok(Some((length, framing))) = head(data, LIMIT) else { return };
    assert!(length <= data.len() && data[..length].ends_with(b"\r\n\r\n"));
    // What follows changes nothing, and less is not enough.
    assert_eq!(head(&data[..length], LIMIT), Ok(Some((length, framing))));
    for cut in [1, 2, length / 2, length - 1] {
        assert_eq!(head(&data[..cut.min(length - 1)], LIMIT), Ok(None), "cut at {cut}");
    }
    assert!(!data[..length].contains(&0));
}
