//! Heads in pieces, heads in a row, and heads that must not pass.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]

use crate::listener::RequestRefusal;
use proptest::prelude::*;
use tokio::io::AsyncReadExt as _;
use tokio::time::Instant;

use super::super::activity::Protocol;
use super::*;

const LIMIT: usize = 16 * 1024;

/// Returns the bytes of `pieces` that pass until the end or the first refusal, and
/// that refusal. Each piece is read by itself.
fn pass(pieces: &[&[u8]]) -> (Vec<u8>, Option<BadHead>) {
    let mut io = Pieces::of(pieces);
    let activity =
        Arc::new(Activity::new(Protocol::Http1, Instant::now(), std::time::Duration::MAX));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut heads = Heads::new(&mut io, Arc::clone(&activity), LIMIT);
        let mut passed = Vec::new();
        loop {
            let mut space = [0; 1_000];
            let read = heads.read(&mut space);
            // After a refusal the stream stays open and silent.
            match tokio::time::timeout(std::time::Duration::from_millis(5), read).await {
                Ok(Ok(0)) | Err(_) => break,
                Ok(Ok(read)) => passed.extend_from_slice(&space[..read]),
                Ok(Err(error)) => panic!("{error}"),
            }
        }
        let refused = (0..=heads.passed).find_map(|_| activity.request_began().1);
        let bad = refused.map(|unwelcome| match unwelcome {
            RequestRefusal::BadHead(bad) => bad,
            RequestRefusal::Closing => panic!("the connection is open"),
        });
        (passed, bad)
    })
}

/// A stream that gives one piece for each read.
struct Pieces(std::collections::VecDeque<Vec<u8>>);

impl Pieces {
    fn of(pieces: &[&[u8]]) -> Self {
        Self(pieces.iter().filter(|piece| !piece.is_empty()).map(|piece| piece.to_vec()).collect())
    }
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(mut piece) = self.0.pop_front() {
            let take = piece.len().min(buffer.remaining());
            buffer.put_slice(&piece[..take]);
            if take < piece.len() {
                self.0.push_front(piece.split_off(take));
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[test]
fn heads_pass_good_requests_unchanged() {
    let get = "GET /v1/models HTTP/1.1\r\nHost: localhost:8443\r\nAccept: */*\r\n\r\n";
    let post = "POST /v1/x HTTP/1.1\r\nhost: a\r\nContent-Length: 5\r\n\r\n12345";
    let chunked =
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: Chunked\r\n\r\n2\r\nab\r\n0\r\n\r\nGET";
    for text in [
        get.to_owned(),
        format!("\r\n{get}"),
        format!("{post}{get}{post}"),
        format!("{post}\r\n{get}"),
        format!("{get}{get}{chunked}"),
        "GET / HTTP/1.0\r\n\r\n".to_owned(),
        "OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET https://a:1/x HTTP/1.1\r\nhost: A:1\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: [::1]:8443\r\nx: \t caf\u{e9} \t\r\ny:\r\n\r\n".to_owned(),
        format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3000\r\n\r\n{}", "x".repeat(3_000)),
    ] {
        let bytes = text.as_bytes();
        assert_eq!(pass(&[bytes]), (bytes.to_vec(), None), "{text}");
        let each: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(pass(&each), (bytes.to_vec(), None), "byte by byte: {text}");
    }
}

/// T11, T12
#[test]
fn heads_refuse_malformed_requests() {
    let many: String = (0..65).map(|n| format!("x-{n}: y\r\n")).collect();
    let huge = format!("x: {}\r\n", "y".repeat(LIMIT));
    let post = |headers: &str| format!("POST / HTTP/1.1\r\nhost: a\r\n{headers}\r\n");
    for text in [
        post("content-length: 5\r\ntransfer-encoding: chunked\r\n"),
        post("transfer-encoding: chunked\r\ncontent-length: 5\r\n"),
        post("content-length: 5\r\ncontent-length: 5\r\n"),
        post("content-length: 5\r\ncontent-length: 6\r\n"),
        post("content-length: 5, 5\r\n"),
        post("content-length: +5\r\n"),
        post("content-length: 0x5\r\n"),
        post("content-length:\r\n"),
        post("content-length: 99999999999999999999\r\n"),
        post("content-length : 5\r\n"),
        post("transfer-encoding: chunked, identity\r\n"),
        post("transfer-encoding: identity\r\n"),
        post("transfer-encoding: xchunked\r\n"),
        post("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
        post("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n"),
        post("transfer-encoding:\u{b}chunked\r\n"),
        post("transfer\u{b}encoding: chunked\r\n"),
        post("content-length: 5\u{c}\r\n"),
        post("x: y\r\n folded\r\n"),
        post(" x: y\r\n"),
        post("x: a\0b\r\n"),
        post("x: a\rb\r\n"),
        post("no colon\r\n"),
        post(": no name\r\n"),
        post("x: y\n"),
        post("host: b\r\n"),
        "POST / HTTP/1.1\nhost: a\n\n".to_owned(),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost:\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: a, b\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: a/b\r\n\r\n".to_owned(),
        "GET https://a/ HTTP/1.1\r\nhost: b\r\n\r\n".to_owned(),
        "GET https://u@a/ HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET a HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n".to_owned(),
        "GET  / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET / HTTP/1.1 \r\nhost: a\r\n\r\n".to_owned(),
        "GET /\tHTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET /x#y HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET https://a/x#y HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET / HTTP/2.0\r\nhost: a\r\n\r\n".to_owned(),
        "GET / HTTP/1.10\r\nhost: a\r\n\r\n".to_owned(),
        "GET /\r\n\r\n".to_owned(),
        "G(T / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "\n\nGET / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n".to_owned(),
        post(&many),
        post(&huge),
        format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "x".repeat(LIMIT)),
        "x".repeat(LIMIT + 1),
    ] {
        let hidden = "GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n";
        let good = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        let all = format!("{good}{text}{hidden}");
        let shown = &text[..text.len().min(100)];
        let expected = [good.as_bytes(), STAND_IN].concat();
        let (passed, refused) = pass(&[all.as_bytes()]);
        assert_eq!(String::from_utf8_lossy(&passed), String::from_utf8_lossy(&expected), "{shown}");
        let too_large = text.len() > 400;
        assert_eq!(refused == Some(BadHead::TooLarge), too_large, "{shown}");
        assert!(refused.is_some(), "{shown}");
        let halves = all.as_bytes().split_at(all.len() / 2);
        assert_eq!(pass(&[halves.0, halves.1]).0, expected, "in two pieces: {shown}");
    }
}

#[test]
fn byte_classes_equal_their_lists() {
    for byte in 0..=255_u8 {
        let is = |class| all_are(&[byte], class);
        // RFC 9110, 5.6.2: the bytes of a token.
        let token = byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let host = byte.is_ascii_graphic() && !b",/@?#\\\"<>".contains(&byte);
        let text = byte == b'\t' || (byte >= b' ' && byte != 0x7f);
        let expected = (token, host, text, byte.is_ascii_graphic());
        assert_eq!((is(TOKEN), is(HOST), is(TEXT), is(GRAPHIC)), expected, "{byte}");
    }
    assert!(all_are(b"GET", TOKEN) && !all_are(b"G(T", TOKEN));
}

#[test]
fn heads_hold_incomplete_requests() {
    let torn = b"GET / HTTP/1.1\r\nhost: a\r\n";
    assert_eq!(pass(&[torn]), (Vec::new(), None));
    assert_eq!(pass(&[&torn[..7], &torn[7..]]), (Vec::new(), None));
}

proptest! {
    /// However the bytes are cut, the same passes.
    #[test]
    fn pieces_change_nothing(
        requests in prop::collection::vec(
            prop::sample::select(vec![
                "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
                "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 7\r\n\r\nGET / H",
                "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
                "GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
                "\u{0}\r\n",
            ]),
            1..5,
        ),
        cuts in prop::collection::vec(0_usize..200, 0..6),
    ) {
        let all: Vec<u8> = requests.concat().into_bytes();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(all.len())).collect();
        cuts.extend([0, all.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &all[cut[0]..cut[1]]).collect();
        prop_assert_eq!(pass(&pieces), pass(&[&all]));
    }
}
