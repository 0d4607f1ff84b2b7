//! Connections that clients hold: their bounds, and the way in for newcomers.

use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpSocket;
use tokio::time::sleep;
use tollgate_edge::source::Proxies;

use super::*;

/// A connection from `127.0.0.last` that has asked once.
struct Held(TlsStream<TcpStream>);

impl TestListener {
    /// Opens a connection from 127.0.0.`last` and asks for `/hello` as `owner`.
    async fn hold(&self, last: u8, owner: &str) -> Option<Held> {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, last], 0).into()).unwrap();
        let tcp = socket.connect(self.address).await.ok()?;
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::clone(&self.client)).connect(name, tcp);
        let mut held = Held(timeout(PATIENCE, connecting).await.unwrap().ok()?);
        held.ask(owner).await.then_some(held)
    }
}

impl Held {
    /// Asks for `/hello`. Returns false if there is no answer.
    async fn ask(&mut self, owner: &str) -> bool {
        let head = format!("GET /hello HTTP/1.1\r\nhost: a\r\nx-owner: {owner}\r\n\r\n");
        let asked = self.0.write_all(head.as_bytes()).await.is_ok() && self.0.flush().await.is_ok();
        let mut answer = Vec::new();
        while asked && !answer.ends_with(b"hello") {
            let mut part = [0; 1_024];
            match timeout(PATIENCE, self.0.read(&mut part)).await.unwrap() {
                Ok(0) | Err(_) => return false,
                Ok(read) => answer.extend(&part[..read]),
            }
        }
        asked
    }
}

/// T60: one owner takes every place that it can get, and asks once on each.
#[tokio::test]
async fn newcomers_get_in_beside_one_holder_of_all() {
    // The control: connections of trusted proxies give way to none.
    let proxied = Proxies { trusted: vec!["127.0.0.9/32".parse().unwrap()], proxy_protocol: false };
    for (proxies, expected) in [(Proxies::default(), 20), (proxied, 0)] {
        let connection_limits = ConnectionLimitOptions { connections: 40, ..generous() };
        let door = TestListener::open(ListenerOptions { connection_limits, proxies, ..patient() });
        let mut attack = Vec::new();
        for _ in 0..60 {
            attack.extend(door.hold(9, "1/1000").await);
        }
        assert!(attack.len() >= 40, "{} of 40 places", attack.len());
        let mut honest = Vec::new();
        for n in 0..20 {
            honest.extend(door.hold(10 + n, &format!("{}/1000", 10 + n)).await);
        }
        assert_eq!(honest.len(), expected);
        let mut kept = 0;
        for (n, held) in honest.iter_mut().enumerate() {
            kept += usize::from(held.ask(&format!("{}/1000", 10 + n)).await);
        }
        assert_eq!(kept, expected, "each stays, because none holds less");
    }
}

#[tokio::test]
async fn full_owner_with_busy_connections_gets_429() {
    let door = TestListener::open(patient());
    let owned = |path: &str| {
        let request = Request::get(format!("https://localhost{path}")).header("x-owner", "1/2");
        request.body(Empty::<Bytes>::new()).unwrap()
    };
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut client = door.http2().await;
        busy.push(TaskTracker::new().spawn(client.send_request(owned("/never"))));
        door.reached.notified().await;
    }
    let mut stream = door.tls(&["http/1.1"]).await;
    stream.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\nx-owner: 1/2\r\n\r\n").await.unwrap();
    let answer = String::from_utf8(until_closed(stream).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    assert!(answer.contains("connection: close\r\n"), "{answer}");
    assert!(answer.contains("2 connections at once for tenant acme"), "{answer}");
    // Over HTTP/2 the answer comes whole, and then the connection closes.
    let mut client = door.http2().await;
    let response = client.send_request(owned("/hello")).await.unwrap();
    assert_eq!(response.status(), 429);
    assert!(!response.into_body().collect().await.unwrap().to_bytes().is_empty());
    door.counted(r#"tollgate_connections_ended_total{reason="over_bound"}"#, 2).await;
    assert!(busy.iter().all(|request| !request.is_finished()));
    // Another owner is served, and this one again once a connection is free.
    assert!(door.hold(1, "2/2").await.is_some());
    busy.pop().expect("two").abort();
    let admitted = async {
        while door.hold(1, "1/2").await.is_none() {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, admitted).await.expect("a place");
}

/// An owner at its bound with idle connections keeps its newest ones.
#[tokio::test]
async fn full_owner_with_idle_connections_replaces_oldest() {
    let door = TestListener::open(patient());
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(door.hold(1, "1/2").await.expect("within the bound"));
    }
    // Beyond the second for which a connection may be about to be used.
    sleep(Duration::from_millis(1_100)).await;
    assert!(held[1].ask("1/2").await, "used again");
    let _third = door.hold(1, "1/2").await.expect("in place of the first");
    door.counted(r#"tollgate_connections_ended_total{reason="replaced"}"#, 1).await;
    assert!(!held[0].ask("1/2").await);
    assert!(held[1].ask("1/2").await);
}

/// A burst of connections from one address, each of which asks once.
async fn served_of(door: &TestListener, burst: usize) -> usize {
    let ask = || async {
        let tcp = TcpStream::connect(door.address).await.ok()?;
        let name = ServerName::try_from("localhost").unwrap();
        let connected = TlsConnector::from(Arc::clone(&door.client)).connect(name, tcp).await;
        let mut held = Held(connected.ok()?);
        held.ask("1/1000").await.then_some(held)
    };
    let asked = futures_util::future::join_all((0..burst).map(|_| ask()));
    timeout(PATIENCE * 6, asked).await.expect("an end").into_iter().flatten().count()
}

/// More handshakes at once than have a place: each waits for its turn.
#[tokio::test]
async fn burst_of_handshakes_of_one_source_gets_through() {
    let door = TestListener::open(ListenerOptions { handshakes: 16, ..patient() });
    assert_eq!(served_of(&door, 128).await, 128);
    assert_eq!(door.count(r#"tollgate_handshakes_failed_total{reason="displaced"}"#), 0);
}

/// More connections at once than an unknown source may have.
#[tokio::test]
async fn burst_of_known_source_is_served() {
    let connection_limits = ConnectionLimitOptions { per_source: 4, ..generous() };
    let door = TestListener::open(ListenerOptions { connection_limits, ..patient() });
    // The control: a source without an authenticated request.
    let silent = futures_util::future::join_all((0..6).map(|_| door.try_tls(&["http/1.1"])));
    let opened = silent.await.into_iter().filter(Result::is_ok).count();
    assert_eq!(opened, 4);
    door.counted(r#"tollgate_connections_refused_total{reason="per_source"}"#, 2).await;
    let _known = door.hold(1, "1/1000").await.expect("a place");
    assert_eq!(served_of(&door, 32).await, 32);
}
