//! Misbehaving clients are closed.

use std::convert::Infallible;

use http::Method;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt as _;
use tokio::time::{interval, sleep};

use super::*;

/// T03: each phase of a connection has its own end.
#[tokio::test]
async fn listener_closes_silent_peers_in_every_phase() {
    let door = TestListener::open(quick());
    // Before a byte of TLS.
    until_closed(door.tcp().await).await;
    door.counted(r#"tollgate_handshakes_failed_total{reason="silent"}"#, 1).await;
    // Within the handshake.
    let mut stream = door.tcp().await;
    stream.write_all(&[0x16, 3, 1]).await.unwrap();
    until_closed(stream).await;
    door.counted(r#"tollgate_handshakes_failed_total{reason="timeout"}"#, 1).await;
    // After it, before a byte of HTTP.
    for protocol in ["http/1.1", "h2"] {
        until_closed(door.tls(&[protocol]).await).await;
    }
    door.counted(r#"tollgate_connections_ended_total{reason="head_timeout"}"#, 2).await;
    // Within a head, and within HTTP/2's preface.
    for (protocol, part) in [("http/1.1", "GET /hello HTTP/1.1\r\nhost:"), ("h2", "PRI * HTTP/2.0")]
    {
        let mut stream = door.tls(&[protocol]).await;
        stream.write_all(part.as_bytes()).await.unwrap();
        until_closed(stream).await;
    }
    door.counted(r#"tollgate_connections_ended_total{reason="head_timeout"}"#, 4).await;
    // Between requests.
    let mut stream = door.tls(&["http/1.1"]).await;
    stream.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let answer = until_closed(stream).await;
    assert!(answer.ends_with(b"hello"));
    door.counted(r#"tollgate_connections_ended_total{reason="idle"}"#, 1).await;
    let client = door.http2().await;
    door.counted(r#"tollgate_connections_ended_total{reason="idle"}"#, 2).await;
    drop(client);
}

/// Sends the first flight of a client with this server name and returns the first record of
/// the answer: its type, and its last byte.
async fn first_record(door: &TestListener, name: &[u8]) -> (u8, u8) {
    // A name of the same length, so that no length in the flight changes.
    let valid = b"localhost-8443";
    let text = std::str::from_utf8(valid).unwrap();
    let server = ServerName::try_from(text).unwrap();
    let mut client = rustls::ClientConnection::new(Arc::clone(&door.client), server).unwrap();
    let mut flight = Vec::new();
    client.write_tls(&mut flight).unwrap();
    let at = flight.windows(valid.len()).position(|part| part == valid).expect("its server name");
    flight[at..at + valid.len()].copy_from_slice(name);
    let mut stream = door.tcp().await;
    stream.write_all(&flight).await.unwrap();
    let mut head = [0; 5];
    timeout(PATIENCE, stream.read_exact(&mut head)).await.unwrap().unwrap();
    let mut record = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
    timeout(PATIENCE, stream.read_exact(&mut record)).await.unwrap().unwrap();
    (head[0], *record.last().unwrap())
}

/// The TLS library refuses a server name with a port, before the certificate is chosen, and
/// has no option for it. The alert tells the client why.
#[tokio::test]
async fn listener_refuses_server_name_with_port() {
    const ALERT: u8 = 21;
    const HANDSHAKE: u8 = 22;
    const ILLEGAL_PARAMETER: u8 = 47;
    let door = TestListener::open(patient());
    assert_eq!(first_record(&door, b"localhost:8443").await, (ALERT, ILLEGAL_PARAMETER));
    door.counted(r#"tollgate_handshakes_failed_total{reason="tls"}"#, 1).await;
    // The control: the same flight with a name that no certificate has.
    assert_eq!(first_record(&door, b"localhost-8443").await.0, HANDSHAKE);
}

#[tokio::test]
async fn listener_closes_slow_heads() {
    let door = TestListener::open(quick());
    let stream = door.tls(&["http/1.1"]).await;
    let (reads, mut writes) = tokio::io::split(stream);
    let dripping = async {
        let mut ticks = interval(Duration::from_millis(20));
        for byte in b"GET /hello HTTP/1.1\r\nx: ".iter().chain(std::iter::repeat(&b'y')) {
            ticks.tick().await;
            if writes.write_all(&[*byte]).await.is_err() || writes.flush().await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = until_closed(reads) => {}
        () = dripping => {}
    }
    door.counted(r#"tollgate_connections_ended_total{reason="head_timeout"}"#, 1).await;
}

/// An HTTP/2 peer that opens well and then says nothing, not to PING either.
#[tokio::test]
async fn listener_closes_peers_silent_to_ping() {
    let door = TestListener::open(ListenerOptions { idle: PATIENCE * 2, ..quick() });
    let mut stream = door.tls(&["h2"]).await;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap(); // SETTINGS, empty
    until_closed(stream).await;
}

#[tokio::test]
async fn plain_http_gets_an_explanation() {
    let door = TestListener::open(patient());
    let mut stream = door.tcp().await;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let answer = String::from_utf8(until_closed(stream).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
    assert!(answer.contains("HTTPS only") && answer.contains(r#""code":null"#), "{answer}");
}

/// T09: a client that knows TLS 1.1 and nothing newer.
#[tokio::test]
async fn tls_refuses_old_versions() {
    let door = TestListener::open(patient());
    let mut hello = vec![0x03, 0x02]; // client_version: TLS 1.1
    hello.extend([7; 32]); // random
    hello.push(0); // no session
    hello.extend([0, 4, 0xc0, 0x13, 0x00, 0x2f]); // ECDHE-RSA and RSA with AES-128-CBC
    hello.extend([1, 0]); // no compression
    let mut record = vec![0x16, 0x03, 0x01];
    let length = u16::try_from(hello.len()).unwrap();
    record.extend((length + 4).to_be_bytes());
    record.extend([1, 0]); // ClientHello
    record.extend(length.to_be_bytes());
    record.extend(hello);
    let mut stream = door.tcp().await;
    stream.write_all(&record).await.unwrap();
    let answer = until_closed(stream).await;
    assert_eq!(answer.first(), Some(&0x15), "an alert, not a ServerHello: {answer:?}");
    door.counted(r#"tollgate_handshakes_failed_total{reason="tls"}"#, 1).await;
}

/// T12
#[tokio::test]
async fn header_bombs_get_431() {
    let door = TestListener::open(patient());
    let many: String = (0..65).map(|n| format!("x-{n}: y\r\n")).collect();
    let huge = format!("x: {}\r\n", "y".repeat(17 * 1024));
    for bomb in [many, huge] {
        let mut stream = door.tls(&["http/1.1"]).await;
        let head = format!("GET /hello HTTP/1.1\r\nhost: a\r\n{bomb}\r\n");
        // It may close before it has read all.
        let _ = stream.write_all(head.as_bytes()).await;
        let _ = stream.flush().await;
        let answer = String::from_utf8(until_closed(stream).await).unwrap();
        assert!(answer.starts_with("HTTP/1.1 431 "), "{}: {answer}", head.len());
        assert!(answer.contains("connection: close\r\n"), "{answer}");
        assert!(answer.contains(r#""code":"headers_too_large""#), "{answer}");
    }
    // HTTP/2: 16 KiB of headers.
    let mut client = door.http2().await;
    let mut request = get("/hello");
    request.headers_mut().insert("x", "y".repeat(20 * 1024).parse().unwrap());
    match client.send_request(request).await {
        Ok(response) => assert_eq!(response.status(), 431),
        Err(refused) => assert!(refused.is_user() || !refused.is_timeout(), "{refused}"),
    }
}

/// T11: what a proxy and we might read differently is refused, or is the last
/// on its connection.
#[tokio::test]
async fn request_smuggling_is_refused() {
    let door = TestListener::open(ListenerOptions { connection_limits: generous(), ..quick() });
    let hidden = "GET /hello HTTP/1.1\r\nhost: a\r\n\r\n";
    for (name, head, status) in [
        ("two lengths", "content-length: 5\r\ncontent-length: 6\r\n\r\n12345", 400),
        ("signed length", "content-length: +5\r\n\r\n12345", 400),
        ("list of lengths", "content-length: 5, 6\r\n\r\n12345", 400),
        ("not last chunked", "transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        ("unknown coding", "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        ("space before colon", "content-length : 5\r\n\r\n12345", 400),
        ("folded header", "x: y\r\n content-length: 5\r\n\r\n", 400),
        ("control byte in name", "transfer\u{b}-encoding: chunked\r\n\r\n", 400),
        (
            "length, then chunks",
            "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            "chunks, then length",
            "transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
            400,
        ),
        ("the same length twice", "content-length: 5\r\ncontent-length: 5\r\n\r\n12345", 400),
        ("chunks twice", "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        ("bare LF", "x: y\ncontent-length: 5\r\n\r\n12345", 400),
        ("another host", "host: b\r\n\r\n", 400),
        ("a chunk's size that is none", "transfer-encoding: chunked\r\n\r\nx\r\n0\r\n\r\n", 400),
        (
            "LF in a chunk's extension",
            "transfer-encoding: chunked\r\n\r\n2;a\nxx\r\n0\r\n\r\n",
            400,
        ),
        ("LF after a chunk's size", "transfer-encoding: chunked\r\n\r\n2\nab\r\n0\r\n\r\n", 400),
        (
            "a chunk without its end",
            "transfer-encoding: chunked\r\n\r\n2\r\nabGET / HTTP/1.1\r\n0\r\n\r\n",
            400,
        ),
        (
            "a chunk too large to count",
            "transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n",
            400,
        ),
        (
            "endless extensions",
            &format!("transfer-encoding: chunked\r\n\r\n2;{}", "x".repeat(20 * 1024)),
            400,
        ),
        // Well formed, and the last on its connection all the same.
        ("chunks", "transfer-encoding: chunked\r\n\r\n2;a=b\r\nab\r\n0\r\n\r\n", 200),
    ] {
        let mut stream = door.tls(&["http/1.1"]).await;
        let bytes = format!("POST /echo HTTP/1.1\r\nhost: a\r\n{head}{hidden}");
        stream.write_all(bytes.as_bytes()).await.unwrap();
        let answer = String::from_utf8(until_closed(stream).await).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{name}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{name}: one answer: {answer}");
        assert!(answer.contains("connection: close\r\n"), "{name}: {answer}");
        // What is wrong with a body only its reader finds out.
        let is_head = status == 400 && !head.starts_with("transfer-encoding: chunked\r\n\r\n");
        assert_eq!(answer.contains(r#""type":"invalid_request_error""#), is_head, "{answer}");
    }
}

/// T04: a reader that stops, over HTTP/1 by not reading its socket, over
/// HTTP/2 by granting no window.
#[tokio::test]
async fn listener_ends_unread_responses() {
    let door = TestListener::open(ListenerOptions { ping_interval: PATIENCE, ..quick() });
    let mut stream = door.tls(&["http/1.1"]).await;
    stream.write_all(b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    door.counted(r#"tollgate_connections_ended_total{reason="write_timeout"}"#, 1).await;
    drop(stream);
    let mut client = door.http2().await;
    let response = client.send_request(get("/endless")).await.unwrap();
    door.counted("tollgate_responses_unread_total", 1).await;
    // The buffered part comes, and then the reset of the stream.
    assert!(timeout(PATIENCE, response.into_body().collect()).await.expect("an end").is_err());
    assert_eq!(client.send_request(get("/hello")).await.unwrap().status(), 200);
}

/// T63: an answer of one piece, from a handler or a refusal, to a peer without a window
/// ends at the same deadline. Then the connection is idle and ends, too.
#[tokio::test]
async fn unread_short_responses_end() {
    let door = TestListener::open(ListenerOptions { ping_interval: PATIENCE, ..quick() });
    for (n, (path, status)) in [("/hello", 200), ("/missing", 404)].into_iter().enumerate() {
        let stream = TokioIo::new(door.tls(&["h2"]).await);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(0);
        let (mut client, connection) = builder.handshake(stream).await.unwrap();
        TaskTracker::new().spawn(connection);
        let response = client.send_request(get(path)).await.unwrap();
        assert_eq!(response.status(), status);
        door.counted("tollgate_responses_unread_total", n as u64 + 1).await;
        door.counted(r#"tollgate_connections_ended_total{reason="idle"}"#, n as u64 + 1).await;
        drop(response);
    }
}

/// T63: a response that is not read ends beside streams that are alive: one waits
/// for its turn, one brings its body byte by byte.
#[tokio::test]
async fn unread_response_ends_beside_live_streams() {
    let deadline = Duration::from_millis(300);
    for (write_progress, unread) in [(deadline, 1), (PATIENCE * 2, 0)] {
        let options = ListenerOptions { idle: PATIENCE, write_progress, ..quick() };
        let door = TestListener::open(options);
        let stream = TokioIo::new(door.tls(&["h2"]).await);
        let (mut client, connection) =
            http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        TaskTracker::new().spawn(connection);
        let waiting = client.send_request(no_body("/never"));
        let dripping = client.send_request(dripping(Method::POST, "/echo"));
        let ask = |path| client.clone().send_request(no_body(path));
        let attack = async {
            door.reached.notified().await;
            let response = ask("/endless").await.unwrap();
            if unread > 0 {
                door.counted("tollgate_responses_unread_total", unread).await;
            } else {
                // The control: without the deadline the response stays for as long as
                // the other streams last.
                sleep(deadline * 4).await;
            }
            assert_eq!(door.count("tollgate_responses_unread_total"), unread);
            // The connection lives, and so do its other streams.
            assert_eq!(ask("/hello").await.unwrap().status(), 200);
            drop(response);
        };
        tokio::select! {
            () = attack => {}
            ended = waiting => panic!("{ended:?}"),
            ended = dripping => panic!("{ended:?}"),
        }
    }
}

type AnyBody = UnsyncBoxBody<Bytes, Infallible>;

fn no_body(path: &str) -> Request<AnyBody> {
    get(path).map(BodyExt::boxed_unsync)
}

/// Builds a request with a body that brings a byte every 50 ms, without an end.
fn dripping(method: Method, path: &str) -> Request<AnyBody> {
    let drops = futures_util::stream::unfold((), |()| async {
        sleep(Duration::from_millis(50)).await;
        Some((Ok(Frame::data(Bytes::from_static(b"x"))), ()))
    });
    let mut request = get(path).map(|_| BodyExt::boxed_unsync(StreamBody::new(drops)));
    *request.method_mut() = method;
    request
}

/// T06: cancelling at leisure is bounded, too.
#[tokio::test]
async fn listener_closes_after_too_many_cancels() {
    // HEAD has no body to wait for, and a reset before its response is a cancel, too.
    for method in [Method::GET, Method::HEAD] {
        closes_after_too_many_cancels(method).await;
    }
}

async fn closes_after_too_many_cancels(method: Method) {
    let door = TestListener::open(ListenerOptions { cancels: 20, ..patient() });
    let mut client = door.http2().await;
    let mut handlers = 0;
    let cancelling = async {
        loop {
            let mut request = get("/never");
            *request.method_mut() = method.clone();
            let answer = client.send_request(request);
            tokio::select! {
                () = door.reached.notified() => handlers += 1, // and the request is dropped
                answer = answer => match answer {
                    Err(_) => break,
                    Ok(response) => assert_eq!(response.status(), 503),
                },
            }
            if client.ready().await.is_err() {
                break;
            }
        }
    };
    timeout(PATIENCE, cancelling).await.expect("the connection is closed");
    assert!((20..=22).contains(&handlers), "{method}: {handlers} handlers for 20 cancels");
    door.counted(r#"tollgate_connections_ended_total{reason="cancels"}"#, 1).await;
}

#[tokio::test]
async fn connection_limits_cap_connections() {
    let check = async |connection_limits: ConnectionLimitOptions, reason: &str| {
        let door = TestListener::open(ListenerOptions { connection_limits, ..patient() });
        let first = door.tls(&["http/1.1"]).await;
        let second = door.tls(&["http/1.1"]).await;
        // Of so many, most are still in line when its time is over.
        let others = futures_util::future::join_all((0..6).map(|_| door.try_tls(&["http/1.1"])));
        assert!(others.await.iter().any(Result::is_err));
        let series = format!(r#"tollgate_connections_refused_total{{reason="{reason}"}}"#);
        door.counted(&series, 1).await;
        drop((first, second));
    };
    check(ConnectionLimitOptions { connections: 2, ..generous() }, "connections").await;
    check(ConnectionLimitOptions { per_source: 2, ..generous() }, "per_source").await;
    let (one, two) = (NonZeroU32::MIN, NonZeroU32::new(2).unwrap());
    check(
        ConnectionLimitOptions { new_per_second: one, new_burst: two, ..generous() },
        "source_rate",
    )
    .await;
}

#[tokio::test]
async fn connection_limits_free_closed_connections() {
    let connection_limits = ConnectionLimitOptions { connections: 1, ..generous() };
    let door = TestListener::open(ListenerOptions { connection_limits, ..patient() });
    for _ in 0..5 {
        // The last one's end may take a moment to be noticed.
        let connected = async {
            while door.try_tls(&["http/1.1"]).await.is_err() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, connected).await.expect("a place");
    }
}

fn get(path: &str) -> Request<Empty<Bytes>> {
    Request::get(format!("https://localhost{path}")).body(Empty::new()).unwrap()
}
