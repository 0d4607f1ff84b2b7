//! Places (`concurrent`, `queued`) that several gateways share on a Redis server: they go where the
//! requests go, and all gateways together run no more than the limit.

use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::json;
use tollgate_loadtest::client::Connection;
use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::TestServer;

use crate::fleet::{ALONE, Fleet, until_shared};
use crate::postgres::{Database, apart};
use crate::support::{self, Tollgate, get};

/// Six requests at once, of which none waits. Each takes three quarters of a minute, if nobody
/// ends it.
const CONFIG: &str = r#"
[gateway.penalties]
wasted_time_per_minute = "24h"

[plans.small]
concurrent = 6
queued = 0

[tenants.acme]
plan = "small"

[worker]
engine = "synthetic"
max_sequences = 16
[worker.synthetic]
step = "50ms"
sequence = "10us"
kv_token = "1ns"
prefill_token = "10us"
kv_tokens = 200_000
context = 1_024
"#;
const PLACES: usize = 6;

/// Requests that run on one gateway.
struct Open {
    connection: Connection,
    /// The tasks that read the answers, so that no answer is ended for not being read.
    readers: Vec<tokio::task::JoinHandle<()>>,
}

impl Open {
    async fn at(gateway: &Tollgate, key: &str) -> Self {
        Self { connection: gateway.connect(key).await, readers: Vec::new() }
    }

    /// Sends one request after the other. Returns the number of those that run.
    async fn begin(&mut self, requests: usize) -> usize {
        let mut begun = 0;
        for _ in 0..requests {
            let body = json!({
                "model": "tollgate-demo", "max_tokens": 900, "ignore_eos": true, "stream": true,
                "messages": [{ "role": "user", "content": "Count." }],
            });
            let path = "/v1/chat/completions";
            let response = self.connection.post(path, body.to_string().into()).await;
            let response = response.expect("answers");
            match response.status().as_u16() {
                200 => {
                    begun += 1;
                    self.readers.push(tokio::spawn(read(response)));
                }
                429 => {
                    let text = support::rest(response).await;
                    // The limit of the plan, whatever part of it this gateway has.
                    assert!(text.contains("6"), "{text}");
                }
                other => panic!("{other}"),
            }
        }
        begun
    }

    /// Asks until `requests` run, for `within`. Returns the time that it took.
    async fn begin_within(&mut self, requests: usize, within: Duration) -> Duration {
        let (since, mut begun) = (Instant::now(), 0);
        while begun < requests {
            begun += self.begin(1).await;
            assert!(since.elapsed() < within, "{begun} of {requests} in {within:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        since.elapsed()
    }

    /// Ends some of the requests.
    fn end(&mut self, requests: usize) {
        self.readers.drain(..requests).for_each(|reader| reader.abort());
    }
}

async fn read(mut response: http::Response<Incoming>) {
    while let Some(Ok(_)) = response.frame().await {}
}

#[tokio::test(flavor = "multi_thread")]
async fn places_go_where_requests_go() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, CONFIG, 3).await;
    let mut open = Vec::new();
    for gateway in &fleet.all {
        open.push(Open::at(gateway, &fleet.key).await);
    }
    let [first, second, third] = &mut open[..] else { panic!("three gateways") };
    // One gateway that gets all requests runs as many as the plan allows.
    assert_eq!(first.begin(PLACES + 3).await, PLACES);
    assert_eq!(second.begin(2).await, 0);
    let (status, limits) = get(&third.connection, "/v1/limits").await;
    assert_eq!(status, 200, "{limits}");
    // The others take what becomes free.
    first.end(4);
    let time = second.begin_within(4, Duration::from_secs(5)).await;
    assert!(time < Duration::from_secs(3), "free places came after {time:?}");
    assert_eq!(first.begin(1).await + third.begin(2).await, 0);

    // A server that forgets everything is told again.
    apart(|| redis.run::<String>(&["FLUSHALL"]));
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(4) {
        assert_eq!(third.begin(1).await, 0);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    second.end(1);
    third.begin_within(1, Duration::from_secs(5)).await;

    // Without the server each gateway has a third. The second one has three already.
    redis.freeze();
    for gateway in &fleet.all {
        until_shared(gateway, false).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!((first.begin(1).await, second.begin(1).await, third.begin(2).await), (0, 0, 1));
    redis.thaw();
    for gateway in &fleet.all {
        until_shared(gateway, true).await;
    }
    // Seven run: none begins before two have ended.
    third.end(1);
    assert_eq!(first.begin(1).await + second.begin(1).await, 0);
    third.begin_within(0, Duration::ZERO).await;
    third.end(1);
    second.begin_within(1, Duration::from_secs(5)).await;
    assert_eq!(first.begin(1).await + third.begin(1).await, 0);

    // The places of a gateway that is killed are free once its parts have ended.
    support::signal(fleet.all[1].pid(), "KILL");
    let time = third.begin_within(4, Duration::from_secs(10)).await;
    assert!(time > Duration::from_secs(1), "a killed gateway's places were free after {time:?}");
    assert_eq!(first.begin(1).await + third.begin(1).await, 0);
}
