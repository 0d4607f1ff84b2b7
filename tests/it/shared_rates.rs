//! Rates that several gateways share on a Redis server: the rate goes where the requests go, and
//! all gateways together admit no more than one bucket would, whatever becomes of the server.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::TestServer;

use crate::fleet::{ALONE, Fleet, until_shared};
use crate::postgres::{Database, apart};
use crate::support::{self, Tollgate, failing, post};

const PER_MINUTE: u64 = 600;
const BURST: u64 = 60;

fn plan() -> String {
    format!(
        "[plans.small]\nrequests_per_minute = {{ limit = {PER_MINUTE}, burst = {BURST} }}\n\
         [tenants.acme]\nplan = \"small\"\n"
    )
}

fn one_token() -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "Count." }],
    })
}

/// Saturates the gateways until `stop`, with as many clients at each as `clients` says.
fn saturate(fleet: &Fleet, clients: &[usize], stop: &Arc<AtomicBool>) -> Load {
    let begun = Instant::now();
    let mut tasks = Vec::new();
    for (at, (gateway, clients)) in fleet.all.iter().zip(clients).enumerate() {
        for _ in 0..*clients {
            let (gateway, key, stop) = (Arc::clone(gateway), fleet.key.clone(), stop.clone());
            tasks.push((at, tokio::spawn(client(gateway, key, begun, stop))));
        }
    }
    Load { begun, tasks }
}

/// Clients that ask until they are stopped.
struct Load {
    begun: Instant,
    /// The clients, each with the number of its gateway.
    tasks: Vec<(usize, tokio::task::JoinHandle<Asked>)>,
}

/// The answers to one client, or to all of them.
#[derive(Default)]
struct Asked {
    /// The times at which the admitted requests were sent and answered.
    admitted: Vec<(Duration, Duration)>,
    /// The number of these by gateway.
    by_gateway: BTreeMap<usize, usize>,
    refused: u64,
    /// The other answers.
    failed: Vec<String>,
}

impl Load {
    /// Waits for the clients. Returns their answers and the time for which they asked.
    async fn ended(self) -> (Asked, Duration) {
        let mut all = Asked::default();
        for (at, task) in self.tasks {
            let asked = task.await.expect("the client ends");
            *all.by_gateway.entry(at).or_default() += asked.admitted.len();
            all.admitted.extend(asked.admitted);
            all.refused += asked.refused;
            all.failed.extend(asked.failed);
        }
        (all, self.begun.elapsed())
    }
}

async fn client(
    gateway: Arc<Tollgate>,
    key: String,
    begun: Instant,
    stop: Arc<AtomicBool>,
) -> Asked {
    let connection = gateway.connect(&key).await;
    let mut asked = Asked::default();
    while !stop.load(Ordering::Relaxed) {
        let sent = begun.elapsed();
        match post(&connection, "/v1/chat/completions", &one_token()).await {
            (200, _) => asked.admitted.push((sent, begun.elapsed())),
            (429, _) => {
                asked.refused += 1;
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
            other => asked.failed.push(format!("{other:?}")),
        }
    }
    asked
}

impl Asked {
    /// Asserts that in each window no more was admitted than 1.02 times what one bucket gives. A
    /// request was admitted between the times at which it was sent and answered.
    fn assert_within(&self) {
        let rate = PER_MINUTE as f64 / 60.0;
        for (from, _) in &self.admitted {
            let since = self.admitted.iter().filter(|(sent, _)| sent >= from);
            let mut ends: Vec<Duration> = since.map(|(_, answered)| *answered).collect();
            ends.sort();
            for (at, end) in ends.iter().enumerate() {
                let most = (BURST as f64 + rate * (*end - *from).as_secs_f64()) * 1.02;
                assert!(at as f64 + 1.0 <= most, "{} between {from:?} and {end:?}", at + 1);
            }
        }
    }
}

fn figure(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.expect(name).parse().expect("a number")
}

/// One gateway that gets all requests of a tenant admits the whole rate. Then all get as much as
/// they can take, and together no more than the rate.
#[tokio::test(flavor = "multi_thread")]
async fn rates_go_where_requests_go() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &plan(), 3).await;
    let stop = Arc::<AtomicBool>::default();
    let load = saturate(&fleet, &[4, 0, 0], &stop);
    tokio::time::sleep(Duration::from_secs(5)).await;
    stop.store(true, Ordering::Relaxed);
    let (asked, time) = load.ended().await;
    assert_eq!(asked.failed, Vec::<String>::new());
    asked.assert_within();
    let whole = BURST + PER_MINUTE * time.as_millis() as u64 / 60_000;
    let admitted = asked.admitted.len() as u64;
    assert!(admitted * 100 >= whole * 90, "one gateway admitted {admitted} of {whole}");

    // The others take over what the first one has.
    let stop = Arc::<AtomicBool>::default();
    let load = saturate(&fleet, &[1, 3, 3], &stop);
    tokio::time::sleep(Duration::from_secs(12)).await;
    stop.store(true, Ordering::Relaxed);
    let (asked, time) = load.ended().await;
    assert_eq!(asked.failed, Vec::<String>::new());
    asked.assert_within();
    let refilled = PER_MINUTE * time.as_millis() as u64 / 60_000;
    let admitted = asked.admitted.len() as u64;
    assert!(admitted * 100 >= refilled * 90, "three gateways admitted {admitted} of {refilled}");
    // Each has more to do than a third of the rate.
    let least = asked.by_gateway.values().min().expect("gateways");
    assert!(*least as u64 * 5 >= admitted, "{:?}", asked.by_gateway);
    for gateway in &fleet.all {
        let metrics = gateway.metrics().await;
        let waits = figure(&metrics, "tollgate_rate_waits_total");
        // The server has 50 ms for an answer, and this machine may be busy.
        let unanswered = figure(&metrics, "tollgate_rate_waits_unanswered_total");
        assert!(waits > 0 && unanswered * 10 <= waits, "{unanswered} of {waits}");
    }
}

/// The rate holds while the server is frozen, emptied, killed and started again, and while a
/// gateway is stopped and goes on. No request fails, and the server is used again at once.
#[tokio::test(flavor = "multi_thread")]
async fn rates_hold_while_server_fails() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &plan(), 3).await;
    let stop = Arc::<AtomicBool>::default();
    let load = saturate(&fleet, &[3, 2, 1], &stop);
    let pause = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
    pause(3).await;
    apart(|| redis.run::<String>(&["FLUSHALL"]));
    pause(3).await;
    redis.freeze();
    pause(8).await;
    for gateway in &fleet.all {
        until_shared(gateway, false).await;
    }
    redis.thaw();
    for gateway in &fleet.all {
        let back = until_shared(gateway, true).await;
        assert!(back < Duration::from_secs(2), "back after {back:?}");
    }
    pause(3).await;
    redis.kill();
    pause(4).await;
    apart(|| redis.resume());
    pause(3).await;
    support::signal(fleet.all[0].pid(), "STOP");
    pause(5).await;
    support::signal(fleet.all[0].pid(), "CONT");
    pause(3).await;
    stop.store(true, Ordering::Relaxed);
    let (asked, time) = load.ended().await;
    assert_eq!(asked.failed, Vec::<String>::new());
    asked.assert_within();
    let refilled = PER_MINUTE * time.as_millis() as u64 / 60_000;
    let admitted = asked.admitted.len() as u64;
    // While the server is away, parts that nobody uses are lost.
    assert!(admitted * 100 >= refilled * 60, "{admitted} of {refilled} in {time:?}");
}

#[test]
fn unusable_rate_servers_stop_the_start() {
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start_with(&["--requirepass", "secret"]) else { return };
    let database = Database::new(&server);
    fs::write(database.path("redis"), "secret\n").expect("writes");
    fs::write(database.path("wrong"), "wrong").expect("writes");
    let file = |name: &str| format!("password = \"{}\"", database.path(name).display());
    let start = |section: &str| -> String {
        let config = database.path("tollgate.toml");
        let text = format!("{}[cluster.redis]\n{section}\n", database.config());
        fs::write(&config, text).expect("writes");
        let data = database.path("data").display().to_string();
        failing(&["up", "--config", &config.display().to_string(), "--data", &data])
    };
    let url = format!("url = \"{}\"", redis.url());
    redis.run::<i64>(&["HSET", "tollgate:server", "cluster", "another"]);
    for (section, said) in [
        (file("redis"), "cluster.redis.url: is required"),
        (url.clone(), "Authentication required"),
        (format!("{url}\n{}", file("wrong")), "refuses the gateway"),
        (format!("{url}\n{}", file("redis")), "is used by another cluster"),
        ("url = \"http://localhost\"".to_owned(), "not the URL of a Redis server"),
        ("url = \"redis://:hidden@localhost\"".to_owned(), "the URL has a password"),
        ("url = \"redis://10.1.2.3\"".to_owned(), "10.1.2.3:6379 is on another machine"),
    ] {
        let refused = start(&section);
        assert!(refused.contains(said), "{section}: {refused}");
        assert!(!refused.contains("hidden@") && !refused.contains("panicked"), "{refused}");
    }
}
