//! Several gateways on one PostgreSQL server and one Redis server, and clients that ask them all
//! the time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_loadtest::client::{Connection, Protocol, Target};
use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::Relay;

use crate::postgres::{Database, until_gateways};
use crate::support::{self, Tollgate, get};

/// Held by a test that saturates gateways: two at once would share the processor.
pub(crate) static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A device that takes almost no time, so that limits decide.
pub(crate) const INSTANT_DEVICE: &str = r#"
[worker]
engine = "synthetic"
[worker.synthetic]
step = "10us"
sequence = "100ns"
kv_token = "1ns"
prefill_token = "10ns"
kv_tokens = 100_000
context = 4_096
"#;

/// Gateways that share limits, and a key of `acme`.
pub(crate) struct Fleet {
    pub(crate) all: Vec<Tollgate>,
    pub(crate) key: String,
    /// The workers of each gateway.
    workers: usize,
    /// The places at which clients find the gateways: a gateway that starts again has another.
    targets: Vec<Arc<Mutex<Target>>>,
}

/// The ways of gateways to the servers.
#[derive(Default)]
pub(crate) struct Relays {
    /// To the PostgreSQL server, for the gateways by number.
    pub(crate) postgres: Vec<Relay>,
    /// To the Redis server.
    pub(crate) redis: Vec<Relay>,
}

impl Relays {
    /// Makes relays for `number` gateways.
    pub(crate) fn new(postgres: u16, redis: u16, number: u32) -> Self {
        let relays = |port| (0..number).map(|_| Relay::to(port)).collect();
        Self { postgres: relays(postgres), redis: relays(redis) }
    }
}

impl Fleet {
    /// Starts gateways with `other` in their config, and waits until all of them share limits and
    /// know the key.
    pub(crate) async fn start(
        database: &Database<'_>,
        redis: &TestRedis,
        other: &str,
        number: u32,
    ) -> Self {
        Self::start_over(database, redis, other, number, &Relays::default()).await
    }

    /// Starts gateways, as [`Self::start`], by another binary.
    pub(crate) async fn start_by(
        database: &Database<'_>,
        redis: &TestRedis,
        other: &str,
        number: u32,
        program: &Path,
    ) -> Self {
        let configs = (0..number).map(|_| config(database, redis, other, 0, &Relays::default()));
        Self::start_all(database, configs, program).await
    }

    /// Starts gateways, as [`Self::start`], that reach the servers over relays where there are some.
    pub(crate) async fn start_over(
        database: &Database<'_>,
        redis: &TestRedis,
        other: &str,
        number: u32,
        relays: &Relays,
    ) -> Self {
        let configs = (0..number as usize).map(|at| config(database, redis, other, at, relays));
        Self::start_all(database, configs, Path::new(support::binary())).await
    }

    async fn start_all(
        database: &Database<'_>,
        configs: impl Iterator<Item = String>,
        program: &Path,
    ) -> Self {
        let mut all: Vec<Tollgate> = Vec::new();
        for (at, config) in configs.enumerate() {
            if let Some(first) = all.first() {
                database.share_secrets(first, &at.to_string());
            }
            all.push(database.gateway_by(&at.to_string(), &config, program));
        }
        let number = u32::try_from(all.len()).expect("a few");
        let key = all[0].key("acme", &[]);
        for gateway in &all {
            until_gateways(gateway, number).await;
            until_shared(gateway, true).await;
            until_known(gateway, &key).await;
        }
        Self::of(all, key, 1)
    }

    /// Makes a fleet of gateways that know the key and have as many `workers` each.
    pub(crate) fn of(all: Vec<Tollgate>, key: String, workers: usize) -> Self {
        let targets = all.iter().map(|gateway| Arc::new(Mutex::new(gateway.target(&key))));
        Self { targets: targets.collect(), all, key, workers }
    }

    /// Returns the places at which clients find the gateways.
    pub(crate) fn targets(&self) -> &[Arc<Mutex<Target>>] {
        &self.targets
    }

    /// Starts a gateway again after it was killed or stopped, and waits until it serves.
    pub(crate) async fn restart(&mut self, at: usize) {
        let ended = self.all.remove(at);
        self.all.insert(at, ended.restart());
        self.all[at].until_ready(self.workers, Duration::from_secs(20)).await;
        until_known(&self.all[at], &self.key).await;
        *self.targets[at].lock().expect("no panic") = self.all[at].target(&self.key);
    }

    /// Begins clients at each gateway that ask until the load is ended, as many as `clients` says.
    pub(crate) fn load(&self, clients: &[usize], body: &Value) -> Load {
        Load::begin(&self.targets, clients, body, Duration::ZERO)
    }
}

/// Returns the config of gateway `at`.
fn config(
    database: &Database<'_>,
    redis: &TestRedis,
    other: &str,
    at: usize,
    Relays { postgres, redis: to_redis }: &Relays,
) -> String {
    let config = database.config_with(other);
    let config = match postgres.get(at) {
        Some(relay) => relay.url(&config, database.port()),
        None => config,
    };
    let url = redis.url();
    let url = to_redis.get(at).map_or_else(|| url.clone(), |relay| relay.url(&url, redis.port()));
    format!("{config}\n[cluster.redis]\nurl = \"{url}\"\n")
}

/// Returns the body of a request for one token.
pub(crate) fn one_token() -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "Count." }],
    })
}

/// Clients that ask until they are stopped.
pub(crate) struct Load {
    begun: Instant,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<Vec<Answer>>>,
}

/// The answer to one request, or its failure.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) gateway: usize,
    /// The status; zero if there was no whole answer.
    pub(crate) status: u16,
    /// The request id, or the failure.
    pub(crate) text: String,
    /// The times since the load began.
    pub(crate) sent: Duration,
    pub(crate) answered: Duration,
}

impl Load {
    /// Begins clients, as many for each target as `clients` says. Each rests for `rest` after an
    /// answer.
    pub(crate) fn begin(
        targets: &[Arc<Mutex<Target>>],
        clients: &[usize],
        body: &Value,
        rest: Duration,
    ) -> Self {
        let (begun, stop) = (Instant::now(), Arc::<AtomicBool>::default());
        let mut tasks = Vec::new();
        for (gateway, (target, clients)) in targets.iter().zip(clients).enumerate() {
            for _ in 0..*clients {
                let (target, stop) = (Arc::clone(target), Arc::clone(&stop));
                let client = Client { gateway, target, body: body.to_string(), rest, begun, stop };
                tasks.push(tokio::spawn(client.run()));
            }
        }
        Self { begun, stop, tasks }
    }

    /// Returns the time since the load began.
    pub(crate) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Stops the clients. Returns their answers and the time for which they asked.
    pub(crate) async fn end(self) -> (Vec<Answer>, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for task in self.tasks {
            all.extend(task.await.expect("the client ends"));
        }
        (all, self.begun.elapsed())
    }
}

/// One client of one gateway.
struct Client {
    gateway: usize,
    target: Arc<Mutex<Target>>,
    body: String,
    rest: Duration,
    begun: Instant,
    stop: Arc<AtomicBool>,
}

impl Client {
    async fn run(self) -> Vec<Answer> {
        let mut answers = Vec::new();
        let mut connection: Option<Connection> = None;
        while !self.stop.load(Ordering::Relaxed) {
            let sent = self.begun.elapsed();
            let result = self.ask(&mut connection).await;
            let (status, text) = result.unwrap_or_else(|failure| (0, failure));
            let answered = self.begun.elapsed();
            let rest = if status == 200 { self.rest } else { PAUSE };
            if !rest.is_zero() {
                tokio::time::sleep(rest).await;
            }
            if status == 0 {
                connection = None;
            }
            answers.push(Answer { gateway: self.gateway, status, text, sent, answered });
        }
        answers
    }

    async fn ask(&self, connection: &mut Option<Connection>) -> Result<(u16, String), String> {
        if connection.is_none() {
            let target = self.target.lock().expect("no panic").clone();
            let connected = target.connect(Protocol::Http2).await;
            *connection = Some(connected.map_err(|error| error.to_string())?);
        }
        let Some(connection) = connection else { return Err("no connection".to_owned()) };
        let path = "/v1/chat/completions";
        let response = connection.post(path, self.body.clone().into()).await;
        let response = response.map_err(|error| error.to_string())?;
        let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        let id = id.unwrap_or_default().to_owned();
        let status = response.status().as_u16();
        let text = tokio::time::timeout(LONGEST, support::rest(response));
        let text = text.await.map_err(|_| "no end of the answer".to_owned())?;
        Ok((status, if status == 200 { id } else { text }))
    }
}

/// The pause of a client after a refusal or a failure.
const PAUSE: Duration = Duration::from_millis(15);
/// The longest time for an answer.
const LONGEST: Duration = Duration::from_secs(200);

/// Asserts that in each window no more was admitted than 1.02 times what one bucket gives. A
/// request was admitted between the times at which it was sent and answered.
pub(crate) fn assert_rate_holds(answers: &[Answer], per_minute: u64, burst: u64) {
    let rate = per_minute as f64 / 60.0;
    let admitted: Vec<&Answer> = answers.iter().filter(|answer| answer.status == 200).collect();
    for Answer { sent: from, .. } in &admitted {
        let since = admitted.iter().filter(|answer| answer.sent >= *from);
        let mut ends: Vec<Duration> = since.map(|answer| answer.answered).collect();
        ends.sort();
        for (at, end) in ends.iter().enumerate() {
            let most = (burst as f64 + rate * (*end - *from).as_secs_f64()) * 1.02;
            assert!(at as f64 + 1.0 <= most, "{} between {from:?} and {end:?}", at + 1);
        }
    }
}

/// Returns the value of a metric without labels.
pub(crate) fn metric(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.expect(name).parse().expect("a number")
}

/// Returns the answers that are neither served nor refused by a limit.
pub(crate) fn failures(answers: &[Answer]) -> Vec<&Answer> {
    answers.iter().filter(|answer| !matches!(answer.status, 200 | 429)).collect()
}

/// A gateway that was away, with the times of the load from which and until which it was.
pub(crate) type Absence = (usize, Duration, Duration);

/// Returns the failures of requests that were not on their way to a gateway while it was away.
pub(crate) fn failures_beside<'a>(answers: &'a [Answer], absences: &[Absence]) -> Vec<&'a Answer> {
    let is_absent = |answer: &Answer| {
        let overlaps = |(at, from, to): &Absence| {
            *at == answer.gateway && answer.answered >= *from && answer.sent <= *to
        };
        absences.iter().any(overlaps)
    };
    failures(answers).into_iter().filter(|answer| !is_absent(answer)).collect()
}

pub(crate) async fn until_known(gateway: &Tollgate, key: &str) {
    let begun = Instant::now();
    while get(&gateway.connect(key).await, "/v1/models").await.0 == 401 {
        assert!(begun.elapsed() < Duration::from_secs(5), "the key is not known");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the gateway shares limits on the server, or until it does not. Returns the time.
pub(crate) async fn until_shared(gateway: &Tollgate, are_shared: bool) -> Duration {
    let begun = Instant::now();
    let wanted = format!("\ntollgate_rates_shared {}\n", u8::from(are_shared));
    while !gateway.metrics().await.contains(&wanted) {
        assert!(begun.elapsed() < Duration::from_secs(20), "still not {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}

/// Writes figures of a test where a reader of its output finds them.
pub(crate) fn figures(of: &str, figures: &Value) {
    eprintln!("figures of {of}: {figures}");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("figures");
    fs::create_dir_all(&folder).expect("makes the folder");
    fs::write(folder.join(format!("{of}.json")), format!("{figures:#}\n")).expect("writes");
}
