//! Connections that a client holds and does not use: unread answers, and more
//! connections than its part. Each test has a control in which the limit is open wide
//! and the attack succeeds.

use std::time::Duration;

use bytes::BytesMut;
use serde_json::{Value, json};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf, split,
};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tollgate_loadtest::client::{Connection, Protocol, Target};
use tollgate_loadtest::frames::{self, Ends, Frame, FrameKind};

use crate::support::{Tollgate, post};

/// A bound on every wait, far beyond the deadlines under test.
const PATIENCE: Duration = Duration::from_secs(60);

/// An HTTP/2 client that grants no window for answers.
struct NoWindow<T> {
    target: Target,
    reads: ReadHalf<T>,
    writes: WriteHalf<T>,
    buffer: BytesMut,
}

impl NoWindow<()> {
    async fn connect(target: Target) -> NoWindow<impl AsyncRead + AsyncWrite> {
        let tls = target.connect_tls(Protocol::Http2).await.expect("connects");
        let (reads, mut writes) = split(tls);
        let mut opening = frames::preface();
        // SETTINGS_INITIAL_WINDOW_SIZE (4) is zero.
        opening.extend(frames::frame(FrameKind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]));
        writes.write_all(&opening).await.expect("writes");
        NoWindow { target, reads, writes, buffer: BytesMut::new() }
    }
}

impl<T: AsyncRead + AsyncWrite> NoWindow<T> {
    /// Sends the head of a chat on `stream`.
    async fn begin(&mut self, stream: u32) {
        let authorization = self.target.authorization().to_str().expect("text").to_owned();
        let fields = [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", self.target.authority()),
            (":path", "/v1/chat/completions"),
            ("content-type", "application/json"),
            ("authorization", &authorization),
        ];
        let head = frames::headers(stream, &fields, Ends::Nothing);
        self.send(&head).await;
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.writes.write_all(bytes).await.expect("the connection lives");
        self.writes.flush().await.expect("the connection lives");
    }

    /// Reads until every one of `streams` got a frame of this kind.
    async fn until(&mut self, kind: FrameKind, mut streams: Vec<u32>) {
        let reading = async {
            while !streams.is_empty() {
                while let Some(frame) = Frame::take(&mut self.buffer) {
                    assert_ne!(frame.kind, FrameKind::GOAWAY, "the connection must live");
                    streams.retain(|stream| frame.kind != kind || frame.stream != *stream);
                }
                let read = self.reads.read_buf(&mut self.buffer);
                if !streams.is_empty() && read.await.expect("the connection lives") == 0 {
                    panic!("the connection was closed, and {streams:?} got no {kind:?}");
                }
            }
        };
        timeout(PATIENCE, reading).await.expect("the frames come");
    }
}

fn chat(content: &str, max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens, "stream": true,
        "messages": [{ "role": "user", "content": content }],
    })
}

/// Checks T63: two answers that are not read, beside a request that brings its body
/// slowly, keep another tenant from a shared limit only until the write deadline.
#[tokio::test]
async fn unread_answers_free_a_shared_limit() {
    // The second case is the control.
    for (write_progress, queue, expected) in [("1s", "30s", 200), ("60s", "3s", 503)] {
        let gateway = Tollgate::with_config(&format!(
            r#"
[gateway.timeouts]
write_progress = "{write_progress}"
[gateway.deadlines]
queue = "{queue}"
[plans.open]
[plans.shared]
concurrent = 2
queued = 8
[models.tollgate-demo]
plan = "shared"
[tenants.acme]
plan = "open"
[tenants.mallory]
plan = "open"
"#
        ));
        let (acme, mallory) = (gateway.key("acme", &[]), gateway.key("mallory", &[]));
        let mut attack = NoWindow::connect(gateway.target(&mallory)).await;
        let long = chat("Count from 1 to 400.", 900).to_string();
        for stream in [1, 3] {
            attack.begin(stream).await;
            attack.send(&frames::data(stream, long.as_bytes(), Ends::Stream)).await;
        }
        // A body that brings just enough to be waited for.
        attack.begin(5).await;
        attack.send(&frames::data(5, &[b' '; 1_100], Ends::Nothing)).await;
        attack.until(FrameKind::HEADERS, vec![1, 3]).await;
        let honest = gateway.connect(&acme).await;
        let body = json!({
            "model": "tollgate-demo", "max_tokens": 4,
            "messages": [{ "role": "user", "content": "Hello!" }],
        });
        let (status, reply) = post(&honest, "/v1/chat/completions", &body).await;
        assert_eq!(status, expected, "{write_progress}: {reply}");
        if expected == 200 {
            attack.until(FrameKind::RST_STREAM, vec![1, 3]).await;
            attack.send(&frames::data(5, &[b' '; 1_100], Ends::Nothing)).await;
        }
    }
}

/// The part of a config in which a tenant has a trial plan and another has one of its
/// own, and 64 places are all.
const FEW_PLACES: &str = r#"
[gateway.connections]
total = 64
new_per_second = 1_000
new_burst = 1_000
[plans.trial]
requests_per_minute = 60
[plans.open]
[tenants.acme]
plan = "open"
[tenants.mallory]
plan = "trial"
"#;

/// Opens a connection from 127.`network`.0.`last` and asks for the models on it.
async fn hold(target: &Target, network: u8, last: u8) -> Option<Connection> {
    let target = target.from_source([127, network, 0, last].into());
    let connection = target.connect(Protocol::Http1).await.ok()?;
    is_served(&connection).await.then_some(connection)
}

async fn is_served(connection: &Connection) -> bool {
    match connection.get("/v1/models").await {
        Ok(response) => response.status() == 200,
        Err(_) => false,
    }
}

/// Checks T60: one trial key takes every place with `GET /v1/models`; newcomers with
/// another key and other addresses get in, and stay.
#[tokio::test]
async fn newcomers_get_in_beside_one_full_key() {
    // The control: connections of a trusted proxy give way to none.
    let proxied = format!("{FEW_PLACES}[gateway.proxies]\ntrusted = [\"127.2.0.0/16\"]\n");
    for (config, expected) in [(FEW_PLACES.to_owned(), 20), (proxied, 0)] {
        let gateway = Tollgate::with_config(&config);
        let (acme, mallory) = (gateway.key("acme", &[]), gateway.key("mallory", &[]));
        let (acme, mallory) = (gateway.target(&acme), gateway.target(&mallory));
        let mut attack = Vec::new();
        for n in 0..80 {
            attack.extend(hold(&mallory, 2, n).await);
        }
        assert!(attack.len() >= 56, "{} connections held", attack.len());
        let mut honest = Vec::new();
        for n in 0..20 {
            honest.extend(hold(&acme, 3, n).await);
            // A use each now and then gains the attacker nothing.
            is_served(&attack[usize::from(n)]).await;
        }
        assert_eq!(honest.len(), expected);
        for connection in &honest {
            assert!(is_served(connection).await, "it stays");
        }
    }
}

/// Opens `number` connections of one key from one address under a plan with this many
/// `connections`, and returns how many are served a second time.
async fn served_again(number: u32, connections: u32) -> usize {
    let gateway = Tollgate::with_config(&format!(
        r#"
[gateway.reads]
requests_per_second = 10_000
request_burst = 100_000
[gateway.connections]
authenticated_per_source = {}
new_per_second = 10_000
new_burst = 10_000
# On a busy machine the first connections are idle for more than the default minute.
[gateway.timeouts]
idle = "10m"
[plans.pool]
connections = {connections}
[tenants.acme]
plan = "pool"
"#,
        number * 2
    ));
    let target = gateway.target(&gateway.key("acme", &[]));
    let mut pool = Vec::new();
    for _ in 0..number {
        let connection = target.connect(Protocol::Http1).await.expect("connects");
        is_served(&connection).await;
        pool.push(connection);
    }
    let mut served = 0;
    for connection in &pool {
        served += usize::from(is_served(connection).await);
    }
    served
}

/// Checks that a plan's number of connections serves a pool of that size.
#[tokio::test]
async fn plan_serves_a_pool_of_its_connections() {
    // A few more, because the connection that created the key may not be closed yet.
    assert_eq!(served_again(100, 104).await, 100);
    // The control: a plan for half of the pool.
    assert!(served_again(100, 50).await <= 50);
}

/// A config in which no deadline depends on the speed of the machine.
const PATIENT: &str = r#"
[gateway.timeouts]
handshake = "2m"
first_byte = "2m"
headers = "2m"
idle = "10m"
[plans.open]
[tenants.acme]
plan = "open"
"#;

/// Opens `number` connections at once from one address, each of which asks for the models.
/// Returns how many are served.
async fn served_at_once(target: &Target, number: usize) -> usize {
    let mut asking = JoinSet::new();
    for _ in 0..number {
        let target = target.clone();
        asking.spawn(async move {
            let connection = target.connect(Protocol::Http1).await.ok()?;
            is_served(&connection).await.then_some(connection)
        });
    }
    let asked = timeout(PATIENCE * 2, asking.join_all()).await.expect("an end");
    asked.into_iter().flatten().count()
}

/// Checks that the clients of a known address reconnect at once with the default bounds.
#[tokio::test]
async fn two_hundred_connections_of_known_source_are_served() {
    let gateway = Tollgate::with_config(PATIENT);
    let target = gateway.target(&gateway.key("acme", &[])).from_source([127, 4, 0, 1].into());
    let known = target.connect(Protocol::Http1).await.expect("connects");
    assert!(is_served(&known).await);
    assert_eq!(served_at_once(&target, 200).await, 200);
}

/// Checks that a burst of twice as many handshakes as have a place is served.
#[tokio::test]
async fn handshakes_beyond_their_places_are_served_in_line() {
    let limits = "per_source = 1_000\nnew_per_second = 1_000\nnew_burst = 1_000\n";
    let config = format!("[gateway.connections]\n{limits}{PATIENT}");
    let gateway = Tollgate::with_config(&config);
    let target = gateway.target(&gateway.key("acme", &[])).from_source([127, 4, 0, 2].into());
    assert_eq!(served_at_once(&target, 512).await, 512);
}

/// Connects and asks for the models, and tries again as the SDKs do by default: twice, after
/// half a second and after a second. Returns the connection, and the number of attempts.
async fn reconnect(target: Target, retries: u32) -> Option<(Connection, u32)> {
    for attempt in 0..=retries {
        if attempt > 0 {
            tokio::time::sleep(Duration::from_millis(500) * 2_u32.pow(attempt - 1)).await;
        }
        // A new connection each time, because the last one was closed.
        if let Ok(connection) = target.connect(Protocol::Http1).await
            && is_served(&connection).await
        {
            return Some((connection, attempt + 1));
        }
    }
    None
}

/// Lets a thousand clients connect at once, an equal part with each of `targets`. Each keeps
/// its connection until all have ended. Returns how many were served, and how many of those
/// needed a further attempt.
async fn thousand_clients(targets: &[Target], retries: u32) -> (usize, usize) {
    let mut clients = JoinSet::new();
    for number in 0..1_000 {
        clients.spawn(reconnect(targets[number % targets.len()].clone(), retries));
    }
    let ended = timeout(PATIENCE * 2, clients.join_all()).await.expect("an end");
    let served: Vec<(Connection, u32)> = ended.into_iter().flatten().collect();
    (served.len(), served.iter().filter(|(_, attempts)| *attempts > 1).count())
}

/// Checks that a thousand clients of a known address reconnect at once with the default
/// bounds. A key may have 512 connections, so they have two.
#[tokio::test]
async fn thousand_clients_of_known_source_reconnect() {
    let gateway = Tollgate::with_config(PATIENT);
    let keys = [gateway.key("acme", &[]), gateway.key("acme", &[])];
    let from =
        |last| keys.each_ref().map(|key| gateway.target(key).from_source([127, 5, 0, last].into()));
    let known = from(1);
    let connection = known[0].connect(Protocol::Http1).await.expect("connects");
    assert!(is_served(&connection).await);
    let (served, again) = thousand_clients(&known, 2).await;
    println!("{again} of {served} clients needed a further attempt");
    assert_eq!(served, 1_000);
    // The control: an address on which nobody has authenticated, without further attempts.
    let (served, _) = thousand_clients(&from(2), 0).await;
    assert!(served < 1_000, "the bounds of an unknown address");
}

/// Tests that only `cargo xtask test --long` runs.
mod long {
    use super::{PATIENT, Tollgate, served_at_once};

    /// Checks that a burst from an unknown address is served with the default bounds. The
    /// first request must come within two seconds, which a busy machine may not allow.
    #[tokio::test]
    #[ignore = "long: depends on the speed of the machine"]
    async fn two_hundred_connections_of_unknown_source_are_served() {
        let gateway = Tollgate::with_config(PATIENT);
        let target = gateway.target(&gateway.key("acme", &[])).from_source([127, 4, 0, 3].into());
        assert_eq!(served_at_once(&target, 200).await, 200);
    }

    #[tokio::test]
    #[ignore = "long: a thousand connections"]
    async fn plan_serves_a_thousand_connections() {
        assert_eq!(super::served_again(1_000, 1_004).await, 1_000);
    }
}
