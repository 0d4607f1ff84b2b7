//! Well-behaved clients are served.

use http::StatusCode;
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::Bytes;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::sleep;

use super::*;

impl TestListener {
    /// A working HTTP/1 client on its own connection.
    async fn http1(&self) -> http1::SendRequest<Full<Bytes>> {
        let stream = TokioIo::new(self.tls(&["http/1.1"]).await);
        let (sender, connection) = http1::handshake(stream).await.unwrap();
        TaskTracker::new().spawn(connection);
        sender
    }

    /// A working HTTP/2 client on its own connection.
    pub(super) async fn http2(&self) -> http2::SendRequest<Empty<Bytes>> {
        let stream = TokioIo::new(self.tls(&["h2"]).await);
        let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        TaskTracker::new().spawn(connection);
        sender
    }
}

/// Builds a request for either protocol; the client of HTTP/1 adds no host.
fn request<B: Default>(path: &str) -> Request<B> {
    let request = Request::get(format!("https://localhost{path}")).header("host", "localhost");
    request.body(B::default()).unwrap()
}

async fn text(response: http::Response<hyper::body::Incoming>) -> (StatusCode, String) {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (parts.status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn listener_serves_http1_and_http2() {
    let door = TestListener::open(patient());
    let mut http1 = door.http1().await;
    let mut http2 = door.http2().await;
    for _ in 0..3 {
        let response = http1.send_request(request("/hello")).await.unwrap();
        assert!(response.headers().contains_key("x-request-id"));
        assert_eq!(text(response).await, (StatusCode::OK, "hello".into()));
        let response = http2.send_request(request("/hello")).await.unwrap();
        assert_eq!(text(response).await, (StatusCode::OK, "hello".into()));
    }
    assert_eq!(door.count(r#"tollgate_requests_total{endpoint="other",status="2xx"}"#), 6);
}

#[tokio::test]
async fn listener_serves_http1_without_alpn() {
    let door = TestListener::open(patient());
    let mut stream = door.tls(&[]).await;
    stream.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let answer = String::from_utf8(until_closed(stream).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("hello"), "{answer}");
}

#[tokio::test]
async fn listener_passes_large_bodies() {
    let door = TestListener::open(patient());
    let mut client = door.http1().await;
    let body = vec![b'x'; 1 << 20];
    let request =
        Request::post("/echo").header("host", "a").body(Full::from(body.clone())).unwrap();
    let response = client.send_request(request).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), body);
}

#[tokio::test]
async fn drain_lets_running_requests_end() {
    let door = TestListener::open(patient());
    let mut http1 = door.http1().await;
    let mut http2 = door.http2().await;
    let first = http1.send_request(request("/gated"));
    let second = http2.send_request(request("/gated"));
    let drain = async {
        door.reached.notified().await;
        door.reached.notified().await;
        door.stop.end.cancel();
        // No new connection while the old ones end.
        while TcpStream::connect(door.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        door.gate.notify_one();
        door.gate.notify_one();
    };
    let (first, second, ()) = tokio::join!(first, second, drain);
    assert_eq!(text(first.unwrap()).await.1, "let through");
    assert_eq!(text(second.unwrap()).await.1, "let through");
    door.ended().await;
}

/// Sends `GET /hello` over HTTP/1 and returns everything until the close.
async fn last_answer(mut stream: TlsStream<TcpStream>) -> String {
    stream.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    String::from_utf8(until_closed(stream).await).unwrap()
}

#[tokio::test]
async fn drain_refuses_further_requests_politely() {
    let long = PATIENCE * 2;
    let door = TestListener::open(ListenerOptions { first_byte: long, head: long, ..patient() });
    let idle = door.tls(&["http/1.1"]).await;
    let mut used = door.tls(&["http/1.1"]).await;
    used.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"hello") {
        assert_ne!(used.read_buf(&mut answer).await.unwrap(), 0);
    }
    let mut running = door.http2().await;
    let first = running.send_request(request("/gated"));
    let drain = async {
        door.reached.notified().await;
        door.stop.refuse.cancel();
        // Open connections, one of them used before, and a new one.
        for stream in [idle, used, door.tls(&["http/1.1"]).await] {
            let answer = last_answer(stream).await;
            assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
            assert!(answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
            assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        }
        let mut new = door.http2().await;
        let refused = new.send_request(request("/hello")).await.unwrap();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.headers()["retry-after"], "1");
        drop(refused);
        // GOAWAY, and the close.
        let closed = async {
            while new.ready().await.is_ok() {
                tokio::task::yield_now().await
            }
        };
        timeout(PATIENCE, closed).await.expect("the connection ends");
        door.gate.notify_one();
    };
    let (first, ()) = tokio::join!(first, drain);
    assert_eq!(text(first.unwrap()).await.1, "let through");
    // The socket closes last.
    assert!(TcpStream::connect(door.address).await.is_ok());
    door.stop.end.cancel();
    door.ended().await;
    assert!(TcpStream::connect(door.address).await.is_err());
}

#[tokio::test]
async fn drain_cuts_requests_at_its_bound() {
    let door = TestListener::open(ListenerOptions { idle: PATIENCE * 2, ..quick() });
    let mut client = door.http1().await;
    let asking = client.send_request(request("/never"));
    let draining = async {
        door.reached.notified().await;
        door.stop.end.cancel();
    };
    let (answer, ()) = tokio::join!(asking, draining);
    assert!(answer.is_err(), "cut at the drain's bound");
    door.ended().await;
}

#[tokio::test]
async fn drain_closes_idle_connections_at_once() {
    let door = TestListener::open(patient());
    let mut http1 = door.http1().await;
    let mut http2 = door.http2().await;
    http1.send_request(request("/hello")).await.unwrap();
    http2.send_request(request("/hello")).await.unwrap();
    door.stop.end.cancel();
    door.ended().await;
}

#[tokio::test]
async fn drain_does_not_wait_for_sleeping_peers() {
    let door = TestListener::open(patient());
    let mut asleep = door.tls(&["h2"]).await;
    asleep.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    asleep.read_u8().await.unwrap(); // it is served, and then sends nothing more
    door.stop.end.cancel();
    door.ended().await;
}

#[tokio::test]
async fn listener_drains_aged_connections() {
    let options = ListenerOptions { connection_age: Duration::from_millis(200), ..patient() };
    let door = TestListener::open(options);
    let mut client = door.http1().await;
    let asking = client.send_request(request("/gated"));
    let aging = async {
        door.reached.notified().await;
        sleep(Duration::from_millis(250)).await; // the age under test
        door.gate.notify_one();
    };
    let (answer, ()) = tokio::join!(asking, aging);
    assert_eq!(text(answer.unwrap()).await.1, "let through", "a request that began may end");
    door.counted(r#"tollgate_connections_ended_total{reason="age"}"#, 1).await;
}

#[tokio::test]
async fn listener_adopts_options_for_new_connections() {
    let door = TestListener::open(patient());
    let mut open = door.http1().await;
    open.send_request(request("/hello")).await.unwrap();
    let idle = Duration::from_millis(200);
    door.control.adopt(ListenerOptions { idle, drain: idle, ..patient() });
    let mut new = door.http1().await;
    new.send_request(request("/hello")).await.unwrap();
    door.counted(r#"tollgate_connections_ended_total{reason="idle"}"#, 1).await;
    // The earlier connection is as idle and keeps its own deadline.
    let answer = text(open.send_request(request("/hello")).await.unwrap()).await;
    assert_eq!(answer.1, "hello");
    // The bound of the drain is the new one on every connection.
    let asking = open.send_request(request("/never"));
    let draining = async {
        door.reached.notified().await;
        door.stop.end.cancel();
    };
    let (cut, ()) = tokio::join!(asking, draining);
    assert!(cut.is_err());
    door.ended().await;
}

#[tokio::test]
async fn source_ring_answers_with_retry_after() {
    let sources = SourceOptions { per_second: NonZeroU32::MIN, burst: NonZeroU32::new(3).unwrap() };
    let door = TestListener::with_sources(patient(), Some(sources));
    let mut client = door.http1().await;
    let mut statuses = Vec::new();
    for n in 0..6 {
        // T10: a forged client address changes nothing.
        let mut request = request("/hello");
        let forged = format!("198.51.100.{n}").parse().unwrap();
        request.headers_mut().insert("x-forwarded-for", forged);
        let response = client.send_request(request).await.unwrap();
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            let headers = response.headers();
            assert!(headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
            assert!(headers.contains_key("x-request-id"));
        }
        let (status, body) = text(response).await;
        if status != StatusCode::OK {
            let body: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!(body["error"]["code"], "rate_limit_exceeded");
        }
        statuses.push(status.as_u16());
    }
    assert_eq!(statuses[..3], [200; 3]);
    assert!(statuses.contains(&429), "{statuses:?}");
}
