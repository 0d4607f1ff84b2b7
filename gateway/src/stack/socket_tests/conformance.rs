//! RFC 9113 by our own frames: what a peer must not send is an error of its
//! connection or of its stream, and what it may send is answered. T09

use tokio::io::AsyncWriteExt as _;

use super::*;

/// The listener's reaction to a sequence of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// GOAWAY with this error, or the end without one (255).
    Connection(u32),
    /// RST_STREAM with this error.
    Stream(u32),
    /// A response, with the first byte of its header block.
    Answered(u8),
}

/// The reaction that the RFC asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// An error of the connection.
    Connection,
    /// An error of the stream, which may be made one of the connection (5.4.2).
    Stream,
    /// A stream's error, or a response that says so.
    Refused,
    /// An ordinary response.
    Ok,
    /// A response with status 400.
    BadRequest,
}

impl Wanted {
    fn is(self, outcome: Outcome) -> bool {
        match self {
            Self::Connection => matches!(outcome, Outcome::Connection(1..)),
            Self::Stream => matches!(outcome, Outcome::Connection(1..) | Outcome::Stream(1..)),
            Self::Refused => !matches!(outcome, Outcome::Answered(STATUS_200)),
            Self::Ok => outcome == Outcome::Answered(STATUS_200),
            Self::BadRequest => outcome == Outcome::Answered(STATUS_400),
        }
    }
}

/// `:status` 200 and 400 in the static table of HPACK.
const STATUS_200: u8 = 0x88;
const STATUS_400: u8 = 0x8c;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
/// The flags of a request in one frame.
pub(super) const WHOLE: u8 = END_STREAM | END_HEADERS;

pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

pub(super) fn opening() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &frame(SETTINGS, 0, 0, &[])].concat()
}

/// A header block of literals that are neither indexed nor compressed.
pub(super) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        bytes.push(0);
        for text in [name, value] {
            // An integer with a prefix of 7 bits.
            match text.len().checked_sub(127) {
                None => bytes.push(u8::try_from(text.len()).unwrap()),
                Some(mut rest) => {
                    bytes.push(127);
                    while rest >= 128 {
                        bytes.push(u8::try_from(rest % 128).unwrap() | 128);
                        rest /= 128;
                    }
                    bytes.push(u8::try_from(rest).unwrap());
                }
            }
            bytes.extend(text.as_bytes());
        }
    }
    bytes
}

pub(super) const METHOD: (&str, &str) = (":method", "GET");
pub(super) const SCHEME: (&str, &str) = (":scheme", "https");
const PATH: (&str, &str) = (":path", "/hello");
pub(super) const AUTHORITY: (&str, &str) = (":authority", "localhost");
const POST: (&str, &str) = (":method", "POST");
const ECHO: (&str, &str) = (":path", "/echo");
const NEVER: (&str, &str) = (":path", "/never");

/// GET /hello with `more` fields.
fn get(stream: u32, more: &[(&str, &str)]) -> Vec<u8> {
    let fields = [&[METHOD, SCHEME, PATH, AUTHORITY][..], more].concat();
    frame(HEADERS, WHOLE, stream, &block(&fields))
}

/// The head of POST /echo with `more` fields; its body follows.
fn post(stream: u32, more: &[(&str, &str)]) -> Vec<u8> {
    let fields = [&[POST, SCHEME, ECHO, AUTHORITY][..], more].concat();
    frame(HEADERS, END_HEADERS, stream, &block(&fields))
}

/// A request that stays open.
fn never(stream: u32, flags: u8) -> Vec<u8> {
    frame(HEADERS, flags, stream, &block(&[METHOD, SCHEME, NEVER, AUTHORITY]))
}

impl TestListener {
    /// Sends frames; returns the outcome for the connection or for stream `watched`.
    async fn outcome(&self, sent: &[u8], watched: u32) -> Outcome {
        let mut stream = self.tls(&["h2"]).await;
        // It may be closed before all is sent.
        let _ = stream.write_all(sent).await;
        let _ = stream.flush().await;
        let reading = async {
            loop {
                let mut header = [0; 9];
                if stream.read_exact(&mut header).await.is_err() {
                    return Outcome::Connection(255);
                }
                let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
                let id = u32::from_be_bytes([header[5], header[6], header[7], header[8]]);
                let mut payload = vec![0; length as usize];
                if stream.read_exact(&mut payload).await.is_err() {
                    return Outcome::Connection(255);
                }
                let error = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
                match header[3] {
                    GOAWAY => return Outcome::Connection(error(4)),
                    RST_STREAM if id == watched => return Outcome::Stream(error(0)),
                    HEADERS if id == watched => return Outcome::Answered(payload[0]),
                    _ => {}
                }
            }
        };
        timeout(PATIENCE, reading).await.expect("an outcome")
    }
}

/// Frames that are wrong whatever the streams do.
fn connection_errors() -> Vec<(&'static str, Vec<u8>)> {
    let setting = |id: u16, value: u32| {
        frame(SETTINGS, 0, 0, &[&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
    };
    let torn = |follows: Vec<u8>| [frame(HEADERS, 0, 1, &block(&[METHOD])), follows].concat();
    vec![
        ("SETTINGS on a stream", frame(SETTINGS, 0, 1, &[])),
        ("SETTINGS of 5 bytes", frame(SETTINGS, 0, 0, &[0; 5])),
        ("SETTINGS ACK with a payload", frame(SETTINGS, ACK, 0, &[0; 6])),
        ("ENABLE_PUSH of 2", setting(2, 2)),
        ("INITIAL_WINDOW_SIZE of 2^31", setting(4, 1 << 31)),
        ("MAX_FRAME_SIZE too small", setting(5, 16_383)),
        ("MAX_FRAME_SIZE too large", setting(5, 1 << 24)),
        ("PING on a stream", frame(PING, 0, 1, &[0; 8])),
        ("PING of 7 bytes", frame(PING, 0, 0, &[0; 7])),
        ("GOAWAY on a stream", frame(GOAWAY, 0, 1, &[0; 8])),
        ("WINDOW_UPDATE of 3 bytes", frame(WINDOW_UPDATE, 0, 0, &[0; 3])),
        ("WINDOW_UPDATE of 0", frame(WINDOW_UPDATE, 0, 0, &[0; 4])),
        ("a window beyond 2^31", frame(WINDOW_UPDATE, 0, 0, &[0x7f, 255, 255, 255])),
        ("WINDOW_UPDATE on an idle stream", frame(WINDOW_UPDATE, 0, 9, &[0, 0, 0, 1])),
        ("RST_STREAM on the connection", frame(RST_STREAM, 0, 0, &[0; 4])),
        ("RST_STREAM of 3 bytes", frame(RST_STREAM, 0, 1, &[0; 3])),
        ("RST_STREAM on an idle stream", frame(RST_STREAM, 0, 9, &[0, 0, 0, 8])),
        ("PRIORITY on the connection", frame(PRIORITY, 0, 0, &[0; 5])),
        ("DATA on the connection", frame(DATA, 0, 0, b"x")),
        ("DATA on an idle stream", frame(DATA, 0, 1, b"x")),
        ("HEADERS on the connection", frame(HEADERS, WHOLE, 0, &block(&[METHOD]))),
        ("an even stream", get(2, &[])),
        ("a pad longer than its HEADERS", frame(HEADERS, WHOLE | PADDED, 1, &[9, 0])),
        ("a pad longer than its DATA", [post(1, &[]), frame(DATA, PADDED, 1, &[9, 0])].concat()),
        ("a stream below the last one", [get(3, &[]), get(1, &[])].concat()),
        ("CONTINUATION of nothing", frame(CONTINUATION, END_HEADERS, 1, &[])),
        ("PING within a header block", torn(frame(PING, 0, 0, &[0; 8]))),
        ("DATA within a header block", torn(frame(DATA, 0, 1, b"x"))),
        ("HEADERS within a header block", torn(get(3, &[]))),
        ("another's CONTINUATION", torn(frame(CONTINUATION, END_HEADERS, 3, &[]))),
        ("an unknown frame within a header block", torn(frame(0xee, 0, 1, b"x"))),
        ("PUSH_PROMISE by a client", frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2])),
        ("a frame beyond MAX_FRAME_SIZE", [post(1, &[]), frame(DATA, 0, 1, &[0; 16_385])].concat()),
        ("an index of HPACK that is none", frame(HEADERS, WHOLE, 1, &[0xff, 0xff, 0x7f])),
        ("an index of 0", frame(HEADERS, WHOLE, 1, &[0x80])),
        ("a torn literal", frame(HEADERS, WHOLE, 1, &[0, 10, b'x'])),
        ("a table beyond its bound", frame(HEADERS, WHOLE, 1, &[0x3f, 0xff, 0xff, 0x7f])),
    ]
}

/// Requests that are malformed, each on stream 1. One is missing: h2 takes
/// pseudo-headers in trailers, and we read no trailers.
fn stream_errors() -> Vec<(&'static str, Vec<u8>)> {
    let head = |fields: &[(&str, &str)]| frame(HEADERS, WHOLE, 1, &block(fields));
    vec![
        ("an upper-case name", get(1, &[("X-Name", "y")])),
        ("connection", get(1, &[("connection", "keep-alive")])),
        ("keep-alive", get(1, &[("keep-alive", "1")])),
        ("proxy-connection", get(1, &[("proxy-connection", "close")])),
        ("transfer-encoding", get(1, &[("transfer-encoding", "chunked")])),
        ("upgrade", get(1, &[("upgrade", "h2c")])),
        ("te of gzip", get(1, &[("te", "gzip")])),
        ("a pseudo-header that is late", head(&[METHOD, SCHEME, ("x", "y"), PATH, AUTHORITY])),
        ("a pseudo-header that is unknown", get(1, &[(":protocols", "x")])),
        ("a response's pseudo-header", head(&[METHOD, SCHEME, PATH, (":status", "200")])),
        ("no method", head(&[SCHEME, PATH, AUTHORITY])),
        ("no scheme", head(&[METHOD, PATH, AUTHORITY])),
        ("no path", head(&[METHOD, SCHEME, AUTHORITY])),
        ("an empty path", head(&[METHOD, SCHEME, (":path", ""), AUTHORITY])),
        ("two paths", head(&[METHOD, SCHEME, PATH, PATH, AUTHORITY])),
        ("two methods", head(&[METHOD, POST, SCHEME, PATH, AUTHORITY])),
        ("a line feed in a value", get(1, &[("x", "a\nb")])),
        ("a carriage return in a value", get(1, &[("x", "a\rb")])),
        ("a zero in a value", get(1, &[("x", "a\0b")])),
        ("a space in a name", get(1, &[("x y", "z")])),
        ("an empty name", get(1, &[("", "z")])),
        ("a length without a body", get(1, &[("content-length", "5")])),
        (
            "a body beyond its length",
            [post(1, &[("content-length", "1")]), frame(DATA, END_STREAM, 1, b"123")].concat(),
        ),
        (
            "a body short of its length",
            [post(1, &[("content-length", "5")]), frame(DATA, END_STREAM, 1, b"123")].concat(),
        ),
        ("two lengths", post(1, &[("content-length", "1"), ("content-length", "2")])),
        (
            "trailers that do not end",
            [post(1, &[]), frame(HEADERS, END_HEADERS, 1, &block(&[("x", "y")]))].concat(),
        ),
        ("DATA after the end", [never(1, WHOLE), frame(DATA, 0, 1, b"x")].concat()),
        (
            "HEADERS after the end",
            [never(1, WHOLE), frame(HEADERS, WHOLE, 1, &block(&[("x", "y")]))].concat(),
        ),
        (
            "WINDOW_UPDATE of 0 on a stream",
            [never(1, WHOLE), frame(WINDOW_UPDATE, 0, 1, &[0; 4])].concat(),
        ),
        (
            "a stream's window beyond 2^31",
            [never(1, WHOLE), frame(WINDOW_UPDATE, 0, 1, &[0x7f, 255, 255, 255])].concat(),
        ),
        ("PRIORITY of 4 bytes", [never(1, WHOLE), frame(PRIORITY, 0, 1, &[0; 4])].concat()),
        (
            "DATA beyond the window",
            [never(1, END_HEADERS), frame(DATA, 0, 1, &[0; 16_384]).repeat(5)].concat(),
        ),
    ]
}

/// Frames on stream 1 that are allowed and look like errors.
fn allowed() -> Vec<(&'static str, Vec<u8>)> {
    let fields = block(&[METHOD, SCHEME, PATH, AUTHORITY]);
    let (start, end) = fields.split_at(7);
    let padded = [&[3_u8][..], &fields, &[0; 3]].concat();
    let weighed = [&[0, 0, 0, 0, 200][..], &fields].concat();
    vec![
        ("a plain request", get(1, &[])),
        ("te of trailers", get(1, &[("te", "trailers")])),
        ("an unknown frame", [frame(0xee, 0xff, 0, b"x"), get(1, &[])].concat()),
        (
            "an unknown setting",
            [frame(SETTINGS, 0, 0, &[0xff, 0xff, 0, 0, 0, 1]), get(1, &[])].concat(),
        ),
        ("an unknown flag", frame(PING, 0xfe, 0, &[0; 8]).into_iter().chain(get(1, &[])).collect()),
        ("PRIORITY on an idle stream", [frame(PRIORITY, 0, 9, &[0; 5]), get(1, &[])].concat()),
        ("padding", frame(HEADERS, WHOLE | PADDED, 1, &padded)),
        ("a priority in HEADERS", frame(HEADERS, WHOLE | 0x20, 1, &weighed)),
        (
            "a header block in pieces",
            [
                frame(HEADERS, END_STREAM, 1, start),
                frame(CONTINUATION, 0, 1, &[]),
                frame(CONTINUATION, END_HEADERS, 1, end),
            ]
            .concat(),
        ),
        (
            "a body with padding and trailers",
            [
                post(1, &[("content-length", "5")]),
                frame(DATA, PADDED, 1, &[2, b'1', b'2', 0, 0]),
                frame(DATA, 0, 1, b"345"),
                frame(HEADERS, WHOLE, 1, &block(&[("x", "y")])),
            ]
            .concat(),
        ),
        ("the same host twice", get(1, &[("host", "localhost")])),
        (
            "a host and no authority",
            frame(HEADERS, WHOLE, 1, &block(&[METHOD, SCHEME, PATH, ("host", "localhost")])),
        ),
    ]
}

#[tokio::test]
async fn http2_listener_follows_rfc_9113() {
    let door = TestListener::open(patient());
    let cases = (connection_errors().into_iter().map(|case| (case, Wanted::Connection)))
        .chain(stream_errors().into_iter().map(|case| (case, Wanted::Refused)))
        .chain(allowed().into_iter().map(|case| (case, Wanted::Ok)))
        .chain([
            (("another host", get(1, &[("host", "elsewhere")])), Wanted::BadRequest),
            (
                ("no host", frame(HEADERS, WHOLE, 1, &block(&[METHOD, SCHEME, PATH]))),
                Wanted::BadRequest,
            ),
        ]);
    let mut wrong = Vec::new();
    for ((name, sent), wanted) in cases {
        let outcome = door.outcome(&[opening(), sent].concat(), 1).await;
        if !wanted.is(outcome) {
            wrong.push(format!("{name}: {outcome:?}, not {wanted:?}"));
        }
    }
    for (name, sent) in [
        ("another preface", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec()),
        ("HTTP/1 over h2", b"GET /hello HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec()),
        ("no SETTINGS first", [&opening()[..24], &get(1, &[])].concat()),
    ] {
        let outcome = door.outcome(&sent, 1).await;
        if !Wanted::Connection.is(outcome) {
            wrong.push(format!("{name}: {outcome:?}"));
        }
    }
    // One stream more than are allowed at once.
    let many: Vec<u8> = (0..=100).flat_map(|n| never(2 * n + 1, WHOLE)).collect();
    let outcome = door.outcome(&[opening(), many].concat(), 201).await;
    if !Wanted::Stream.is(outcome) {
        wrong.push(format!("101 streams: {outcome:?}"));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(
        door.outcome(&[opening(), get(1, &[])].concat(), 1).await,
        Outcome::Answered(STATUS_200)
    );
}

/// T05, T07: floods of each kind end their connection, and soon.
#[tokio::test]
async fn http2_floods_close_the_connection() {
    let door = TestListener::open(patient());
    let reset = |stream| frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]);
    let streams = |make: &dyn Fn(u32) -> Vec<u8>| -> Vec<u8> {
        (0..2_000).flat_map(|n| make(2 * n + 1)).collect()
    };
    for (name, sent) in [
        ("SETTINGS", frame(SETTINGS, 0, 0, &[]).repeat(5_000)),
        ("PING", frame(PING, 0, 0, &[0; 8]).repeat(5_000)),
        ("answers to no PING", frame(PING, ACK, 0, &[0; 8]).repeat(5_000)),
        ("PRIORITY", frame(PRIORITY, 0, 9, &[0; 5]).repeat(5_000)),
        ("unknown frames", frame(0xee, 0, 0, &[]).repeat(5_000)),
        (
            "grants",
            [never(1, WHOLE), frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]).repeat(5_000)].concat(),
        ),
        ("empty DATA", [never(1, END_HEADERS), frame(DATA, 0, 1, &[]).repeat(5_000)].concat()),
        (
            "CONTINUATION",
            [frame(HEADERS, 0, 1, &block(&[METHOD])), frame(CONTINUATION, 0, 1, &[]).repeat(5_000)]
                .concat(),
        ),
        ("rapid reset", streams(&|n| [never(n, WHOLE), reset(n)].concat())),
        // MadeYouReset: each stream is reset by us, for the peer's error.
        (
            "streams that make us reset",
            streams(&|n| [never(n, WHOLE), frame(WINDOW_UPDATE, 0, n, &[0; 4])].concat()),
        ),
    ] {
        let ended = door.outcome(&[opening(), sent].concat(), u32::MAX).await;
        assert!(matches!(ended, Outcome::Connection(_)), "{name}: {ended:?}");
    }
    door.counted(r#"tollgate_connections_ended_total{reason="frames"}"#, 5).await;
    assert_eq!(
        door.outcome(&[opening(), get(1, &[])].concat(), 1).await,
        Outcome::Answered(STATUS_200)
    );
}
