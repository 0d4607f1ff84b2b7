//! A rolling restart of every part of several gateways under load: clients that go to the next
//! gateway when one drains, as a load balancer does, see no failure.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_loadtest::client::{ClientError, Connection, Protocol, Target};
use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::TestServer;

use crate::fleet::{ALONE, Answer, Fleet, figures, one_token};
use crate::fleet_faults::{open, until_posted};
use crate::postgres::{Database, apart};
use crate::support;

/// The longest time in which a request must be served, over all gateways.
const PATIENCE: Duration = Duration::from_secs(10);

/// A client of all gateways, as one behind a load balancer.
struct Balanced {
    targets: Vec<Arc<Mutex<Target>>>,
    begun: Instant,
    stop: Arc<AtomicBool>,
}

/// The requests of one client.
#[derive(Default)]
struct Served {
    answers: Vec<Answer>,
    /// The attempts at a gateway that did not take the request.
    moved: usize,
    failures: Vec<String>,
}

/// The result of one attempt.
enum Attempt {
    Served(String),
    /// The gateway has not begun the request.
    NotTaken(String),
    Failed(String),
}

impl Balanced {
    async fn run(self, first: usize) -> Served {
        let (mut served, mut at) = (Served::default(), first);
        let mut connection: Option<Connection> = None;
        while !self.stop.load(Ordering::Relaxed) {
            let sent = self.begun.elapsed();
            loop {
                let failure = match self.attempt(at, &mut connection).await {
                    Attempt::Served(text) => {
                        let answered = self.begun.elapsed();
                        let answer = Answer { gateway: at, status: 200, text, sent, answered };
                        served.answers.push(answer);
                        break;
                    }
                    Attempt::NotTaken(_) if self.begun.elapsed() < sent + PATIENCE => {
                        (connection, at) = (None, (at + 1) % self.targets.len());
                        served.moved += 1;
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        continue;
                    }
                    Attempt::NotTaken(why) | Attempt::Failed(why) => why,
                };
                served.failures.push(format!("gateway {at} at {sent:?}: {failure}"));
                connection = None;
                break;
            }
            // As much as the processor has time for.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        served
    }

    async fn attempt(&self, at: usize, connection: &mut Option<Connection>) -> Attempt {
        if connection.is_none() {
            let target = self.targets[at].lock().expect("no panic").clone();
            match target.connect(Protocol::Http2).await {
                Ok(connected) => *connection = Some(connected),
                Err(error) => return Attempt::NotTaken(error.to_string()),
            }
        }
        let Some(connection) = connection else { return Attempt::NotTaken(String::new()) };
        let body = one_token().to_string().into();
        let response = match connection.post("/v1/chat/completions", body).await {
            Ok(response) => response,
            Err(ClientError::Http(error)) if is_not_taken(&error) => {
                return Attempt::NotTaken(error.to_string());
            }
            Err(error) => return Attempt::Failed(format!("{error:?}")),
        };
        let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
        match support::read(response).await {
            (200, _) => Attempt::Served(id),
            (503, body) if body["error"]["code"] == "draining" => {
                Attempt::NotTaken("draining".to_owned())
            }
            (status, body) => Attempt::Failed(format!("{status} {body}")),
        }
    }
}

/// Returns true if the gateway has not begun the request: it was never sent, or the gateway closes
/// the connection and names an earlier request as the last one that it takes (RFC 9113, 6.8).
fn is_not_taken(error: &hyper::Error) -> bool {
    let goes_away = || format!("{error:?}").contains("GoAway(b\"\", NO_ERROR");
    error.is_canceled() || error.is_closed() || goes_away()
}

/// Returns the binary of an earlier version, from which the gateways are restarted, if
/// `TOLLGATE_PREVIOUS` names one.
fn previous() -> Option<PathBuf> {
    std::env::var_os("TOLLGATE_PREVIOUS").map(PathBuf::from)
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restart_fails_no_request() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::start) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let mut fleet = match previous() {
        Some(program) => Fleet::start_by(&database, &redis, &open(), 3, &program).await,
        None => Fleet::start(&database, &redis, &open(), 3).await,
    };
    let (begun, stop) = (Instant::now(), Arc::<AtomicBool>::default());
    let mut clients = Vec::new();
    for number in 0..4 {
        let (targets, stop) = (fleet.targets().to_vec(), Arc::clone(&stop));
        clients.push(tokio::spawn(Balanced { targets, begun, stop }.run(number % 3)));
    }
    let pause = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
    // Each gateway with its worker; the first ones run beside the last ones of the version before.
    for at in 0..3 {
        pause(1).await;
        assert_eq!(apart(|| fleet.all[at].stop()), Some(0));
        fleet.restart(at).await;
    }
    pause(1).await;
    redis.kill();
    pause(1).await;
    apart(|| redis.resume());
    pause(4).await;
    server.kill();
    apart(|| server.resume());
    pause(3).await;
    stop.store(true, Ordering::Relaxed);
    let (mut answers, mut moved, mut failures) = (Vec::new(), 0, Vec::new());
    for client in clients {
        let served = client.await.expect("the client ends");
        answers.extend(served.answers);
        moved += served.moved;
        failures.extend(served.failures);
    }
    assert!(failures.is_empty(), "{failures:#?}");
    until_posted(&server, &database, &answers, Duration::from_secs(30)).await;
    // A request that a gateway did not take has no cost.
    let sql = "SELECT CAST(COUNT(*) AS BIGINT) FROM attempts";
    let posted = apart(|| {
        let connection = server.connect(database.name());
        connection.query_row(sql, (), |row| row.get::<i64>(0)).expect("reads")
    });
    assert_eq!(posted, answers.len() as i64);
    let slowest = answers.iter().map(|answer| answer.answered - answer.sent).max();
    let slowest = slowest.expect("answers").as_secs_f64();
    let figures_of: Value =
        json!({ "served": answers.len(), "moved": moved, "slowest_s": slowest });
    figures("rolling_restart", &figures_of);
    database.assert_sound();
}
