//! Workers that several gateways share: each gateway places requests on each worker, one of them
//! records a worker's journal, and whichever is killed or stopped, another one goes on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_sql::testing::{Passing, Relay, TestServer};

use crate::fleet::{
    ALONE, Answer, Fleet, INSTANT_DEVICE, Load, failures, failures_beside, figures, one_token,
    until_known,
};
use crate::fleet_faults::until_posted;
use crate::machines::{Machines, RemoteProcess};
use crate::postgres::{
    Database, apart, share_secrets, spend, spend_rest, until_gateways, until_spent,
};
use crate::support::{self, signal};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// A plan with room and a cap.
fn plan(cap: &str) -> String {
    format!(
        "[plans.open]\nrequests_per_minute = 100_000\nconcurrent = 64\nqueued = 64\n\
         device_time_per_day = \"{cap}\"\n[tenants.acme]\nplan = \"open\"\n"
    )
}

/// Gateways and their workers.
struct Shared {
    machines: Machines,
    workers: Vec<RemoteProcess>,
    fleet: Fleet,
}

impl Shared {
    /// Starts workers with `engine` in their config, and gateways that all use all of them.
    async fn start(
        database: &Database<'_>,
        numbers: (usize, usize),
        plan: &str,
        engine: &str,
    ) -> Self {
        Self::start_over(database, numbers, (plan, engine), &[]).await
    }

    /// Starts workers and gateways as [`Self::start`]. The gateways reach the database over
    /// `relays`, if there are some.
    async fn start_over(
        database: &Database<'_>,
        (gateways, workers): (usize, usize),
        (plan, engine): (&str, &str),
        relays: &[Relay],
    ) -> Self {
        let machines = Machines::new();
        let names = ["gpu0", "gpu1"];
        let start = |at: usize| machines.worker_with(at, ("tls", names[at]), engine);
        let processes: Vec<RemoteProcess> = (0..workers).map(start).collect();
        for process in &processes {
            process.until_logged("is ready to serve").await;
        }
        let mut all: Vec<support::Tollgate> = Vec::new();
        for (at, name) in NAMES[..gateways].iter().enumerate() {
            if let Some(first) = all.first() {
                share_secrets(first, &machines.path(name));
            }
            let config = database.config_with(plan) + &machines.sections(name, workers);
            let config = match relays.get(at) {
                Some(relay) => relay.url(&config, database.port()),
                None => config,
            };
            all.push(machines.gateway_with(name, &config));
        }
        let key = all[0].key("acme", &[]);
        for gateway in &all {
            until_gateways(gateway, u32::try_from(gateways).expect("a few")).await;
            gateway.until_ready(workers, Duration::from_secs(60)).await;
            until_known(gateway, &key).await;
        }
        let fleet = Fleet::of(all, key, workers);
        Self { machines, workers: processes, fleet }
    }

    fn restart_worker(&mut self, at: usize, engine: &str) {
        let owner = format!("gpu{at}");
        self.workers[at] = self.machines.worker_with(at, ("tls", &owner), engine);
    }

    /// Returns how many blocks each gateway has seen, by what became of them.
    async fn blocks(&self) -> Vec<BTreeMap<String, u64>> {
        let mut all = Vec::new();
        for gateway in &self.fleet.all {
            let metrics = gateway.metrics().await;
            let prefix = "tollgate_ledger_blocks_total{outcome=\"";
            let rows = metrics.lines().filter_map(|line| line.strip_prefix(prefix));
            let rows = rows.map(|row| {
                let (outcome, count) = row.split_once("\"} ").expect("a value");
                (outcome.to_owned(), count.parse().expect("a number"))
            });
            all.push(rows.collect());
        }
        all
    }

    fn stop(&mut self) {
        for gateway in &mut self.fleet.all {
            assert_eq!(apart(|| gateway.stop()), Some(0));
        }
    }
}

async fn pause(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

/// Returns the answers of the gateways but one.
fn of_others(answers: &[Answer], at: usize) -> Vec<Answer> {
    answers.iter().filter(|answer| answer.gateway != at).cloned().collect()
}

/// Returns a number that a statement selects.
fn number(server: &TestServer, database: &Database<'_>, select: &str) -> u64 {
    apart(|| {
        let connection = server.connect(database.name());
        connection.query_row(select, (), |row| row.get(0)).expect("reads")
    })
}

/// Two workers serve three gateways. One gateway is killed and starts again, then one is stopped
/// for a while, then a worker is killed: nothing is lost or billed twice, and the requests of the
/// others do not fail.
#[tokio::test(flavor = "multi_thread")]
async fn shared_workers_outlive_gateways() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let mut shared = Shared::start(&database, (3, 2), &plan("10h"), INSTANT_DEVICE).await;
    let rest = Duration::from_millis(20);
    let load = Load::begin(shared.fleet.targets(), &[2, 2, 2], &one_token(), rest);
    pause(2).await;
    shared.fleet.all[0].kill();
    pause(1).await;
    shared.fleet.restart(0).await;
    pause(1).await;
    let (answers, _) = load.end().await;
    assert_eq!(failures(&of_others(&answers, 0)).len(), 0, "{:#?}", failures(&answers));
    until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
    let blocks = shared.blocks().await;
    let seen = |outcome: &str| blocks.iter().filter(|seen| seen.get(outcome) > Some(&0)).count();
    assert!(seen("posted") >= 1 && seen("elsewhere") >= 2, "{blocks:?}");
    assert_eq!(seen("skipped") + seen("dropped"), 0, "{blocks:?}");

    // Whoever records must be replaced while it stands still.
    let load = Load::begin(shared.fleet.targets(), &[0, 2, 2], &one_token(), rest);
    let stopped = (1..3).max_by_key(|at| blocks[*at].get("posted")).expect("two");
    pause(1).await;
    signal(shared.fleet.all[stopped].pid(), "STOP");
    pause(7).await;
    let (before, asked) = (load.now(), Instant::now());
    let others: u64 = number(&server, &database, "SELECT count(*) FROM attempts");
    pause(3).await;
    let more = number(&server, &database, "SELECT count(*) FROM attempts");
    assert!(more > others + 20, "{others} and {more}: nobody records, {:?}", asked.elapsed());
    signal(shared.fleet.all[stopped].pid(), "CONT");
    pause(1).await;
    let (answers, _) = load.end().await;
    let failed = of_others(&answers, stopped);
    assert_eq!(failures(&failed).len(), 0, "{:#?} since {before:?}", failures(&failed));
    until_posted(&server, &database, &answers, Duration::from_secs(20)).await;

    // A worker's death costs no request: it is placed on the other one.
    let load = Load::begin(shared.fleet.targets(), &[2, 2, 2], &one_token(), rest);
    pause(1).await;
    shared.workers[0].kill();
    pause(1).await;
    shared.restart_worker(0, INSTANT_DEVICE);
    for gateway in &shared.fleet.all {
        gateway.until_ready(2, Duration::from_secs(20)).await;
    }
    pause(1).await;
    let (answers, _) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
    until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
    let untrusted = "tollgate_worker_protocol_violations_total 0";
    for gateway in &shared.fleet.all {
        let metrics = gateway.metrics().await;
        assert!(metrics.contains(untrusted), "an honest worker was not believed");
    }
    shared.stop();
    database.assert_sound();
}

/// Both gateways together spend a cap to its end and not beyond, also when one of them is killed
/// and the other one records what it had ordered.
#[tokio::test(flavor = "multi_thread")]
async fn shared_workers_keep_the_cap() {
    let Some(server) = apart(TestServer::shared) else { return };
    support::stay_within_a_day().await;
    let database = Database::new(&server);
    let plan = support::capped("60ms");
    let mut shared = Shared::start(&database, (2, 1), &plan, "").await;
    let key = shared.fleet.key.clone();
    let mut cut = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let connection = shared.fleet.all[1].connect(&key).await;
        cut.spawn(async move {
            // The gateway ends before some of the answers.
            let _ = connection.post(CHAT, support::story().to_string().into()).await;
        });
    }
    tokio::time::sleep(Duration::from_millis(3)).await;
    shared.fleet.all[1].kill();
    cut.join_all().await;
    shared.fleet.restart(1).await;
    let [first, second] = &shared.fleet.all[..] else { panic!("two gateways") };
    tokio::join!(spend_rest(first, &key), spend_rest(second, &key));
    let spent = until_spent(first).await;
    assert!(spent <= CAP && spent * 10 >= CAP * 8, "{spent} of {CAP}");
    shared.stop();
    database.assert_sound();
}

/// A gateway dies in the middle of an answer. Nobody knows what reached the client, so nobody
/// pays, once the gateway is back.
#[tokio::test(flavor = "multi_thread")]
async fn shared_workers_void_answers_of_killed_gateway() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    // A token takes 5 ms, so that the answer is not at its end when the gateway is killed.
    let slow = INSTANT_DEVICE.replace("step = \"10us\"", "step = \"5ms\"");
    let mut shared = Shared::start(&database, (2, 1), &plan("10h"), &slow).await;
    let connection = shared.fleet.all[0].connect(&shared.fleet.key).await;
    let long = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 400, "stream": true,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    let response = connection.post(CHAT, long.to_string().into()).await.expect("answers");
    assert_eq!(response.status(), 200);
    tokio::time::sleep(Duration::from_millis(150)).await;
    shared.fleet.all[0].kill();
    let ended = "SELECT count(*) FROM requests WHERE reason = 'fault'";
    until(&server, &database, ended, 1).await;
    // The other gateway records it, and leaves it to the one that ordered it.
    assert_eq!(number(&server, &database, "SELECT count(*) FROM faults"), 1);
    shared.fleet.restart(0).await;
    until(&server, &database, "SELECT count(*) FROM faults", 0).await;
    let paid = "SELECT coalesce(sum(reference_ns + counted), 0)::bigint FROM requests";
    assert_eq!(number(&server, &database, paid), 0);
    // The control: an answer that reaches its client is paid.
    let (status, body): (u16, Value) =
        support::post(&shared.fleet.all[0].connect(&shared.fleet.key).await, CHAT, &one_token())
            .await;
    assert_eq!(status, 200, "{body}");
    until(&server, &database, "SELECT sum(counted)::bigint FROM requests", 1).await;
    shared.stop();
    database.assert_sound();
}

/// Waits until a statement selects a number.
async fn until(server: &TestServer, database: &Database<'_>, select: &str, wanted: u64) {
    let begun = Instant::now();
    while number(server, database, select) != wanted {
        assert!(begun.elapsed() < Duration::from_secs(30), "{select} is not {wanted}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

const CHAT: &str = "/v1/chat/completions";
/// 60 ms of device time.
const CAP: u64 = 60_000_000;

mod long {
    use super::*;

    /// The database is silent for a minute, and a worker starts again meanwhile. Workers try one
    /// gateway after the other, and none of them can record; requests are answered all the same, and
    /// billed once afterwards.
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "a minute"]
    async fn shared_workers_serve_without_the_database() {
        let _alone = ALONE.lock().await;
        let Some(server) = apart(TestServer::start) else { return };
        let database = Database::new(&server);
        let mut shared = Shared::start(&database, (2, 2), &plan("10h"), INSTANT_DEVICE).await;
        let rest = Duration::from_millis(20);
        let load = Load::begin(shared.fleet.targets(), &[1, 1], &one_token(), rest);
        // Until each gateway has enough of the cap for a while.
        pause(8).await;
        server.freeze();
        pause(30).await;
        shared.workers[0].kill();
        shared.restart_worker(0, INSTANT_DEVICE);
        for gateway in &shared.fleet.all {
            gateway.until_ready(2, Duration::from_secs(20)).await;
        }
        pause(20).await;
        server.thaw();
        pause(3).await;
        let (answers, _) = load.end().await;
        assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
        let posted = until_posted(&server, &database, &answers, Duration::from_secs(30)).await;
        figures(
            "shared_workers_without_database",
            &json!({ "served": answers.len(), "posted_within_s": posted.as_secs_f64() }),
        );
        shared.stop();
        database.assert_sound();
    }

    /// Gateways are killed one after the other. Others take over the journals at once, and no
    /// request to them fails.
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "minutes"]
    async fn fifty_killed_gateways_leave_their_journals() {
        let _alone = ALONE.lock().await;
        let Some(server) = apart(TestServer::shared) else { return };
        let database = Database::new(&server);
        let mut shared = Shared::start(&database, (3, 2), &plan("10h"), INSTANT_DEVICE).await;
        let rest = Duration::from_millis(30);
        let load = Load::begin(shared.fleet.targets(), &[2, 2, 2], &one_token(), rest);
        let (mut absences, mut worst) = (Vec::new(), Duration::ZERO);
        for kill in 0..50 {
            tokio::time::sleep(Duration::from_millis(300 + 137 * (kill as u64 % 5))).await;
            let at = kill % 3;
            let connection = shared.fleet.all[at].connect(&shared.fleet.key).await;
            let body = one_token().to_string().into();
            let response = connection.post(CHAT, body).await.expect("answers");
            let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
            assert_eq!(support::read(response).await.0, 200);
            let (since, killed) = (load.now(), Instant::now());
            shared.fleet.all[at].kill();
            let posted = format!("SELECT count(*) FROM attempts WHERE request_id = '{id}'");
            until(&server, &database, &posted, 1).await;
            worst = worst.max(killed.elapsed());
            shared.fleet.restart(at).await;
            absences.push((at, since, load.now()));
        }
        pause(1).await;
        let (answers, _) = load.end().await;
        let failed = failures_beside(&answers, &absences);
        assert!(failed.is_empty(), "{failed:#?}");
        let posted = until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
        assert!(worst < Duration::from_secs(8), "a journal was taken over after {worst:?}");
        let served = answers.iter().filter(|answer| answer.status == 200).count();
        figures(
            "killed_gateways_of_shared_workers",
            &json!({
                "kills": 50, "served": served, "posted_within_s": posted.as_secs_f64(),
                "worst_takeover_s": worst.as_secs_f64(),
            }),
        );
        shared.stop();
        database.assert_sound();
    }

    /// A gateway is cut off from one worker. Its requests go to the other one, and those of the
    /// other gateways to both.
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "half a minute"]
    async fn gateway_cut_from_a_worker_uses_the_other() {
        let _alone = ALONE.lock().await;
        let Some(server) = apart(TestServer::shared) else { return };
        let database = Database::new(&server);
        let mut shared = Shared::start(&database, (2, 2), &plan("10h"), INSTANT_DEVICE).await;
        // The second gateway starts anew over a relay to the first worker.
        let address = shared.machines.address().to_owned();
        let port: u16 = address.rsplit(':').next().expect("a port").parse().expect("a number");
        let relay = Relay::to(port);
        let config = std::fs::read_to_string(shared.fleet.all[1].config()).expect("reads");
        std::fs::write(shared.fleet.all[1].config(), relay.url(&config, port)).expect("writes");
        assert_eq!(apart(|| shared.fleet.all[1].stop()), Some(0));
        shared.fleet.restart(1).await;
        let rest = Duration::from_millis(20);
        let load = Load::begin(shared.fleet.targets(), &[2, 2], &one_token(), rest);
        pause(2).await;
        relay.pass(Passing::Silent);
        pause(15).await;
        relay.pass(Passing::Open);
        shared.fleet.all[1].until_ready(2, Duration::from_secs(30)).await;
        pause(2).await;
        let (answers, _) = load.end().await;
        // What was on the way to the worker when the way was cut waits for the pings, and is placed
        // on the other one.
        assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
        let posted = until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
        let slowest = answers.iter().map(|answer| answer.answered - answer.sent).max();
        let slowest = slowest.expect("answers");
        figures(
            "gateway_cut_from_a_worker",
            &json!({
                "served": answers.len(), "posted_within_s": posted.as_secs_f64(),
                "slowest_s": slowest.as_secs_f64(),
            }),
        );
        shared.stop();
        database.assert_sound();
    }

    /// A gateway dies and never comes back. Within two minutes the other one has what it did not
    /// spend of the cap.
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "two minutes"]
    async fn lost_gateway_is_settled_by_another() {
        let Some(server) = apart(TestServer::shared) else { return };
        support::stay_within_a_day().await;
        let database = Database::new(&server);
        let plan = support::capped("60ms");
        let mut shared = Shared::start(&database, (2, 1), &plan, "").await;
        let key = shared.fleet.key.clone();
        spend(&shared.fleet.all[1], &key, 3).await;
        let mut cut = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let connection = shared.fleet.all[1].connect(&key).await;
            cut.spawn(async move {
                let _ = connection.post(CHAT, support::story().to_string().into()).await;
            });
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
        shared.fleet.all[1].kill();
        let killed = Instant::now();
        cut.join_all().await;
        let home = std::fs::read_to_string(shared.fleet.all[1].data().join("gateway.id"));
        let home = home.expect("an id").split_whitespace().next().expect("an id").to_owned();
        let slice = format!(
            "SELECT coalesce(sum(granted - used), 0)::bigint FROM slices WHERE home = '{home}'"
        );
        assert!(number(&server, &database, &slice) > 0, "it had nothing that could be freed");
        let stopped = "SELECT count(*) FROM homes WHERE has_stopped";
        while number(&server, &database, stopped) == 0 {
            assert!(killed.elapsed() < Duration::from_secs(120), "its slice is not free");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let freed = killed.elapsed();
        assert!(freed > Duration::from_secs(99), "{freed:?}: it may have been alive");
        assert_eq!(number(&server, &database, &slice), 0);
        assert_eq!(number(&server, &database, "SELECT count(*) FROM faults"), 0);
        spend_rest(&shared.fleet.all[0], &key).await;
        let spent = until_spent(&shared.fleet.all[0]).await;
        assert!(spent <= CAP && spent * 10 >= CAP * 8, "{spent} of {CAP}");
        figures(
            "lost_gateway",
            &json!({ "freed_after_s": freed.as_secs_f64(), "spent_ns": spent }),
        );
        // It comes back after all, and finds the cap spent.
        shared.fleet.restart(1).await;
        spend_rest(&shared.fleet.all[1], &key).await;
        let spent_now = until_spent(&shared.fleet.all[0]).await;
        assert!((spent..=CAP).contains(&spent_now), "{spent_now} of {CAP}, {spent} before");
        shared.stop();
        database.assert_sound();
    }

    /// A gateway that was only cut off from the database is taken for lost, and ends when it hears
    /// of it.
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "two minutes"]
    async fn cut_off_gateway_ends_when_it_was_retired() {
        let Some(server) = apart(TestServer::shared) else { return };
        let database = Database::new(&server);
        let relays = [Relay::to(server.port()), Relay::to(server.port())];
        let settings = (&*plan("10h"), INSTANT_DEVICE);
        let mut shared = Shared::start_over(&database, (2, 1), settings, &relays).await;
        let rest = Duration::from_millis(50);
        let load = Load::begin(shared.fleet.targets(), &[1, 1], &one_token(), rest);
        pause(3).await;
        relays[1].pass(Passing::Silent);
        let cut = Instant::now();
        let retired = "SELECT count(*) FROM gateway_lives WHERE is_retired";
        while number(&server, &database, retired) == 0 {
            assert!(cut.elapsed() < Duration::from_secs(125), "it is not retired");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        pause(3).await;
        relays[1].pass(Passing::Open);
        let code = apart(|| shared.fleet.all[1].ended_within(Duration::from_secs(60)));
        assert_eq!(code, Some(1), "it must be started again");
        shared.fleet.restart(1).await;
        pause(1).await;
        let (answers, _) = load.end().await;
        let others = of_others(&answers, 1);
        assert_eq!(failures(&others).len(), 0, "{:#?}", failures(&others));
        until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
        shared.stop();
        database.assert_sound();
    }
}
