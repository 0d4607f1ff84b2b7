//! Refusals that come before the body is read: the client gets to read them,
//! and what it still sends is never taken for a request.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]

use std::convert::Infallible;

use futures_util::StreamExt as _;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt as _;

use super::*;

/// Sends one request on a connection of its own, with `body` and then `more`
/// behind its head; returns all answers.
async fn answers(door: &TestListener, head: &str, body: &[u8], more: &str) -> String {
    let mut stream = door.tls(&["http/1.1"]).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    // The refusal may be on its way already; a client writes on regardless.
    for piece in body.chunks(16 * 1024) {
        if stream.write_all(piece).await.is_err() {
            break;
        }
    }
    let _ = stream.write_all(more.as_bytes()).await;
    let _ = stream.flush().await;
    String::from_utf8(until_closed(stream).await).unwrap()
}

fn head(path: &str, length: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n")
}

const LAST: &str = "GET /hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn refusal_drains_small_body_and_keeps_connection() {
    let door = TestListener::open(patient());
    for length in [1, 1_000, 60_000] {
        // Nothing there, and nothing that reads.
        let answer = answers(&door, &head("/nothing", length), &vec![b'x'; length], LAST).await;
        assert!(answer.starts_with("HTTP/1.1 404 "), "{length}: {answer}");
        assert!(answer.contains("HTTP/1.1 200 OK") && answer.ends_with("hello"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 2, "{answer}");
    }
}

#[tokio::test]
async fn refusal_of_large_body_arrives_then_closes() {
    let door = TestListener::open(patient());
    for (path, status) in [("/nothing", 404), ("/hello", 405)] {
        let length = 2 << 20;
        let answer = answers(&door, &head(path, length), &vec![b'x'; length], LAST).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        assert!(answer.contains("connection: close\r\n"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "no body is a request: {answer}");
    }
    // Too large to be taken at all, and refused by its declared length alone.
    let answer = answers(&door, &head("/echo", 3 << 20), &vec![b'x'; 3 << 20], "").await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    // A client that expects `100 Continue` does not send the body.
    let head = "POST /nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\
                expect: 100-continue\r\n\r\n";
    let answer = answers(&door, head, b"", "").await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
}

/// A connection over HTTP/2.
async fn client<B>(door: &TestListener) -> http2::SendRequest<B>
where
    B: hyper::body::Body<Data = Bytes, Error = Infallible> + Send + Unpin + 'static,
{
    let stream = TokioIo::new(door.tls(&["h2"]).await);
    let (client, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    TaskTracker::new().spawn(connection);
    client
}

/// Over HTTP/2 the response is whole before its stream is reset, if it is.
#[tokio::test]
async fn http2_refusal_arrives_before_the_body() {
    let door = TestListener::open(patient());
    let mut client = client(&door).await;
    for length in [100, 60_000, 1 << 20] {
        let body = Full::new(Bytes::from(vec![b'x'; length]));
        let request =
            Request::post("https://localhost/echo").header("content-encoding", "gzip").body(body);
        let response = client.send_request(request.unwrap()).await.unwrap();
        assert_eq!(response.status(), 415, "{length}");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert!(body.ends_with(b"}"), "{length}: a whole envelope");
        client.ready().await.unwrap();
    }
}

/// Nor is it waited for: as many as a connection may have are answered at once,
/// and what they hold is given back although none of them ever ends.
#[tokio::test]
async fn http2_endless_bodies_do_not_delay_refusals() {
    let door = TestListener::open(patient());
    let mut client = client(&door).await;
    let began = Instant::now();
    let mut open = Vec::new();
    for number in 0..150 {
        // The first piece comes, and fills most of the stream's window.
        let first = [Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; 40_000])))];
        let pieces = futures_util::stream::iter(first).chain(futures_util::stream::pending());
        let body = StreamBody::new(pieces);
        let request =
            Request::post("https://localhost/echo").header("content-encoding", "gzip").body(body);
        client.ready().await.unwrap();
        let response = client.send_request(request.unwrap()).await.unwrap();
        assert_eq!(response.status(), 415, "{number}");
        open.push(response);
    }
    // A hundred are open at once; the others wait until those are given up.
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test]
async fn refusal_stops_waiting_for_late_body() {
    let door = TestListener::open(patient());
    let answer = answers(&door, &head("/nothing", 10), b"123", "").await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    assert!(answer.contains("connection: close\r\n"), "{answer}");
}
