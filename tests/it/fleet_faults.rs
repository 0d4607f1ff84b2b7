//! Gateways that share everything, while one of them or one of their servers fails: no answered
//! request is lost or billed twice, limits hold, and the others serve on.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;
use tollgate_ledger::{DatabasePlace, Ledger};
use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::{Passing, TestServer};

use crate::fleet::{
    ALONE, Absence, Answer, Fleet, INSTANT_DEVICE, Load, Relays, assert_rate_holds, failures,
    failures_beside, figures, metric, one_token, until_known, until_shared,
};
use crate::postgres::{Database, apart};
use crate::shared_rates::{BURST, PER_MINUTE, plan};
use crate::support::{self, signal};

/// A tenant whose limits leave room.
pub(crate) fn open() -> String {
    format!(
        "[plans.open]\nrequests_per_minute = 100_000\nconcurrent = 64\nqueued = 64\n\
         device_time_per_day = \"10h\"\n[tenants.acme]\nplan = \"open\"\n{INSTANT_DEVICE}"
    )
}

/// A tenant that asks for more than its rate.
fn rated() -> String {
    format!("{}{INSTANT_DEVICE}", plan(PER_MINUTE, BURST))
}

async fn pause(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

/// Waits until every answered request is billed once, at most for `within`. Returns the time. A
/// request that was placed again has two attempts, and pays for one of them.
pub(crate) async fn until_posted(
    server: &TestServer,
    database: &Database<'_>,
    answers: &[Answer],
    within: Duration,
) -> Duration {
    let served = answers.iter().filter(|answer| answer.status == 200);
    let served: BTreeSet<&str> = served.map(|answer| answer.text.as_str()).collect();
    let begun = Instant::now();
    loop {
        let posted: Vec<String> = apart(|| {
            let connection = server.connect(database.name());
            let billed = "SELECT request_id FROM requests WHERE counted <> 0";
            let mut rows = connection.prepare(billed).expect("prepares");
            let rows = rows.query_map((), |row| row.get::<String>(0)).expect("reads");
            rows.collect::<Result<_, _>>().expect("reads")
        });
        let ids: BTreeSet<&str> = posted.iter().map(String::as_str).collect();
        let (missing, twice) = (served.difference(&ids).count(), posted.len() - ids.len());
        if missing == 0 && twice == 0 {
            return begun.elapsed();
        }
        let is_late = begun.elapsed() >= within;
        assert!(!is_late, "of {} {missing} are not posted, {twice} twice", served.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Kills one gateway after the other under load. The others answer every request, and nothing is
/// lost or billed twice.
async fn kill_gateways(kills: usize) {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let mut fleet = Fleet::start(&database, &redis, &open(), 3).await;
    // A saturated database would hold up the starts.
    let rest = Duration::from_millis(30);
    let load = Load::begin(fleet.targets(), &[2, 2, 2], &one_token(), rest);
    let mut absences: Vec<Absence> = Vec::new();
    for kill in 0..kills {
        tokio::time::sleep(Duration::from_millis(300 + 137 * (kill as u64 % 5))).await;
        let (at, since) = (kill % 3, load.now());
        fleet.all[at].kill();
        pause(1).await;
        fleet.restart(at).await;
        absences.push((at, since, load.now()));
    }
    pause(1).await;
    let (answers, _) = load.end().await;
    let failed = failures_beside(&answers, &absences);
    assert!(failed.is_empty(), "{failed:#?}");
    let posted = until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
    let served = answers.iter().filter(|answer| answer.status == 200).count();
    figures(
        "kill_gateways",
        &json!({ "kills": kills, "served": served, "posted_within_s": posted.as_secs_f64() }),
    );
    for gateway in &mut fleet.all {
        assert_eq!(apart(|| gateway.stop()), Some(0));
    }
    database.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_survives_killed_gateways() {
    kill_gateways(3).await;
}

/// Stops one gateway for a while under load that asks for more than the rate.
async fn stop_gateway(seconds: u64) {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &rated(), 3).await;
    let load = fleet.load(&[2, 2, 2], &one_token());
    pause(3).await;
    signal(fleet.all[0].pid(), "STOP");
    pause(seconds).await;
    signal(fleet.all[0].pid(), "CONT");
    pause(5).await;
    let (answers, time) = load.end().await;
    // The gateway itself may answer 503 when it goes on, until it has heard from the servers.
    let failed: Vec<_> =
        failures(&answers).into_iter().filter(|answer| answer.gateway != 0).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_rate_holds(&answers, PER_MINUTE, BURST);
    let posted = until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
    let admitted = answers.iter().filter(|answer| answer.status == 200).count();
    let refilled = PER_MINUTE * time.as_millis() as u64 / 60_000;
    assert!(admitted as u64 * 100 >= refilled * 70, "{admitted} of {refilled}");
    figures(
        &format!("stop_gateway_{seconds}"),
        &json!({
            "admitted": admitted, "refilled": refilled, "posted_within_s": posted.as_secs_f64(),
        }),
    );
    database.assert_sound();
}

/// The PostgreSQL server is silent for a time: requests are answered, and posted afterwards.
async fn silence_database(seconds: u64) {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::start) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &open(), 3).await;
    // A saturated server would be behind with its work afterwards.
    let rest = Duration::from_millis(20);
    let load = Load::begin(fleet.targets(), &[1, 1, 1], &one_token(), rest);
    // Until each gateway has enough of the cap for a while.
    pause(10).await;
    let silent = load.now();
    server.freeze();
    pause(seconds).await;
    server.thaw();
    let back = load.now();
    pause(3).await;
    let (answers, _) = load.end().await;
    let meanwhile = |answer: &&Answer| answer.answered >= silent && answer.sent <= back;
    let asked = answers.iter().filter(meanwhile).count();
    let served = answers.iter().filter(meanwhile).filter(|answer| answer.status == 200).count();
    let failed = failures(&answers);
    assert!(served * 1_000 >= asked * 999, "{served} of {asked}: {:#?}", failed.first());
    let posted = until_posted(&server, &database, &answers, Duration::from_secs(30)).await;
    figures(
        &format!("silence_database_{seconds}"),
        &json!({ "asked": asked, "served": served, "posted_within_s": posted.as_secs_f64() }),
    );
    database.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_serves_without_its_database() {
    silence_database(14).await;
}

/// The PostgreSQL server is lost, and its standby takes over. No request fails, nothing is lost or
/// billed twice, and what was revoked stays revoked.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_goes_on_with_the_standby() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::start) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let standby = apart(|| server.start_standby());
    let relays = Relays::new(server.port(), redis.port(), 3);
    let database = Database::new(&server);
    let fleet = Fleet::start_over(&database, &redis, &open(), 3, &relays).await;
    let admin = fleet.all[0].connect_admin().await;
    let (_, made) = support::post(&admin, "/v1/keys", &json!({ "tenant": "acme" })).await;
    let secret = made["secret"].as_str().expect("a key").to_owned();
    for gateway in &fleet.all {
        until_known(gateway, &secret).await;
    }
    let load = fleet.load(&[1, 1, 1], &one_token());
    pause(10).await;
    let path = format!("/v1/keys/{}", made["key"].as_str().expect("an id"));
    assert_eq!(admin.delete(&path).await.expect("answers").status(), 200);
    server.kill();
    pause(2).await;
    apart(|| standby.promote());
    relays.postgres.iter().for_each(|relay| relay.lead_to(standby.port()));
    pause(8).await;
    let (answers, _) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers).first());
    let posted = until_posted(&standby, &database, &answers, Duration::from_secs(30)).await;
    for gateway in &fleet.all {
        let status = support::get(&gateway.connect(&secret).await, "/v1/models").await.0;
        assert_eq!(status, 401, "a revoked key is accepted");
    }
    let place = DatabasePlace::Server(standby.address(database.name()));
    let checked = apart(|| Ledger::check(&place).expect("reads"));
    assert!(checked.findings.is_empty(), "{:#?}", checked.findings);
    let served = answers.iter().filter(|answer| answer.status == 200).count();
    figures(
        "failover_to_standby",
        &json!({ "served": served, "posted_within_s": posted.as_secs_f64() }),
    );
}

/// The Redis server is slow, and then replaced by its replica. One gateway alone is cut off from
/// it, and then from the PostgreSQL server.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_keeps_rate_over_slow_and_cut_servers() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let Some(replica) = TestRedis::start() else { return };
    let relays = Relays::new(server.port(), redis.port(), 3);
    let database = Database::new(&server);
    let fleet = Fleet::start_over(&database, &redis, &rated(), 3, &relays).await;
    let port = redis.port().to_string();
    apart(|| replica.run::<String>(&["REPLICAOF", "127.0.0.1", &port]));
    let load = fleet.load(&[2, 2, 2], &one_token());
    pause(3).await;
    let slow = load.now();
    relays.redis.iter().for_each(|relay| relay.pass(Passing::Slow(Duration::from_millis(500))));
    pause(6).await;
    relays.redis.iter().for_each(|relay| relay.pass(Passing::Open));
    let fast = load.now();
    for gateway in &fleet.all {
        let back = until_shared(gateway, true).await;
        assert!(back < Duration::from_secs(3), "back after {back:?}");
    }
    pause(2).await;
    apart(|| replica.run::<String>(&["REPLICAOF", "NO", "ONE"]));
    relays.redis.iter().for_each(|relay| relay.lead_to(replica.port()));
    redis.kill();
    pause(3).await;
    // Cut off from the PostgreSQL server alone.
    relays.postgres[1].pass(Passing::Silent);
    pause(4).await;
    relays.postgres[1].pass(Passing::Open);
    pause(2).await;
    let (answers, time) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
    assert_rate_holds(&answers, PER_MINUTE, BURST);
    let posted = until_posted(&server, &database, &answers, Duration::from_secs(30)).await;
    let admitted = answers.iter().filter(|answer| answer.status == 200).count();
    let refilled = PER_MINUTE * time.as_millis() as u64 / 60_000;
    assert!(admitted as u64 * 100 >= refilled * 60, "{admitted} of {refilled}");
    // Once three calls have failed, no request waits for the server.
    let open = slow + Duration::from_secs(2);
    let latency = |from: Duration, to: Duration| {
        let within = answers.iter().filter(|answer| answer.sent >= from && answer.sent < to);
        let mut times: Vec<Duration> = within.map(|answer| answer.answered - answer.sent).collect();
        times.sort();
        times[times.len() * 99 / 100]
    };
    let (quiet, slowed) = (latency(Duration::from_secs(1), slow), latency(open, fast));
    assert!(slowed < Duration::from_millis(250), "p99 {slowed:?}, {quiet:?} before");
    figures(
        "slow_and_cut_servers",
        &json!({
            "admitted": admitted, "refilled": refilled, "posted_within_s": posted.as_secs_f64(),
            "p99_before_ms": quiet.as_secs_f64() * 1e3, "p99_slow_ms": slowed.as_secs_f64() * 1e3,
        }),
    );
}

/// Revokes keys one after the other. Each is refused everywhere soon after the answer.
async fn revoke_keys(gateways: u32, keys: usize) {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    // Each look at a revoked key is a failed authentication.
    let plan =
        format!("[gateway.penalties]\nfailed_authentications_per_minute = 1_000_000\n{}", open());
    let fleet = Fleet::start(&database, &redis, &plan, gateways).await;
    let admin = fleet.all[0].connect_admin().await;
    let mut made = Vec::new();
    for _ in 0..keys {
        let (status, key) = support::post(&admin, "/v1/keys", &json!({ "tenant": "acme" })).await;
        assert_eq!(status, 201, "{key}");
        let text = |name: &str| key[name].as_str().expect("text").to_owned();
        made.push((text("key"), text("secret")));
    }
    let last = &made.last().expect("a key").1;
    let mut connections = Vec::new();
    for gateway in &fleet.all {
        until_known(gateway, last).await;
        connections.push(gateway.connect(last).await);
    }
    let mut worst = Duration::ZERO;
    for (key, secret) in &made {
        let begun = Instant::now();
        let revoked = admin.delete(&format!("/v1/keys/{key}")).await.expect("answers");
        assert_eq!(revoked.status(), 200);
        for connection in &connections {
            let with_key = connection.with_key(secret).expect("a key");
            while support::get(&with_key, "/v1/models").await.0 != 401 {
                assert!(begun.elapsed() < Duration::from_secs(20), "{key} is not revoked");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        worst = worst.max(begun.elapsed());
    }
    figures(
        &format!("revoke_keys_{gateways}"),
        &json!({ "gateways": gateways, "keys": keys, "worst_s": worst.as_secs_f64() }),
    );
    // The machine may be busy; the promise of a second is in the figures.
    assert!(worst < Duration::from_secs(5), "the slowest took {worst:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_hears_of_revocations() {
    revoke_keys(3, 20).await;
}

/// Many requests ask several gateways for a cap that a hundred of them spend.
async fn spend_cap(gateways: u32, requests: usize) {
    const CAP: u64 = 60_000_000;
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    support::stay_within_a_day().await;
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &support::capped("60ms"), gateways).await;
    let clients = vec![(requests / 100 / gateways as usize).max(1); gateways as usize];
    let load = fleet.load(&clients, &support::story());
    let mut spent = (0, 0, 0);
    let begun = Instant::now();
    // Until nothing more was spent for five seconds of retries.
    while spent.2 < 10 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let row = apart(|| {
            let connection = server.connect(database.name());
            let sql = "SELECT CAST(COALESCE(SUM(reference_ns), 0) AS BIGINT),
                CAST(COALESCE(MAX(reference_ns), 0) AS BIGINT) FROM attempts";
            let read = |row: &tollgate_sql::Row<'_>| Ok((row.get::<i64>(0)?, row.get::<i64>(1)?));
            connection.query_row(sql, (), read).expect("reads")
        });
        spent = (row.0, row.1, if row.0 == spent.0 && row.0 > 0 { spent.2 + 1 } else { 0 });
        assert!(begun.elapsed() < Duration::from_secs(120), "{spent:?}");
    }
    let (answers, _) = load.end().await;
    // On a busy machine the database may not answer the first calls in time.
    let failed = failures(&answers);
    let is_known = |answer: &&Answer| answer.text.contains("ledger_unavailable");
    assert!(failed.iter().copied().all(|answer| is_known(&answer)), "{failed:#?}");
    until_posted(&server, &database, &answers, Duration::from_secs(20)).await;
    let (all, largest) = (spent.0 as u64, spent.1 as u64);
    figures(
        &format!("spend_cap_{gateways}"),
        &json!({
            "asked": answers.len(), "unavailable": failed.len(),
            "cap_ns": CAP, "spent_ns": all, "largest_ns": largest,
        }),
    );
    assert!(all <= CAP, "{all} of {CAP}");
    assert!(all + largest > CAP, "{all} of {CAP}, and no request cost more than {largest}");
    database.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_spends_one_cap() {
    spend_cap(3, 1_000).await;
}

/// Saturates many gateways. All together admit the whole rate, and no more.
async fn saturate(gateways: u32, per_minute: u64, clients: &[usize], name: &str) {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let burst = per_minute / 10;
    let plan = format!("{}{INSTANT_DEVICE}", plan(per_minute, burst));
    let fleet = Fleet::start(&database, &redis, &plan, gateways).await;
    let load = fleet.load(clients, &one_token());
    // Until the burst is spent and the parts have found their places.
    pause(6).await;
    let calls = async || {
        let mut calls = 0;
        for gateway in &fleet.all {
            calls += metric(&gateway.metrics().await, "tollgate_rate_calls_total");
        }
        calls
    };
    let (from, calls_before) = (load.now(), calls().await);
    pause(20).await;
    let (to, calls_after) = (load.now(), calls().await);
    let (answers, _) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers).first());
    assert_rate_holds(&answers, per_minute, burst);
    let within = |answer: &&Answer| answer.status == 200 && (from..to).contains(&answer.answered);
    let admitted = answers.iter().filter(within).count() as f64;
    let seconds = (to - from).as_secs_f64();
    let part = admitted / (per_minute as f64 / 60.0 * seconds);
    let calls = (calls_after - calls_before) as f64;
    // Each gateway beats twice a second, whatever is asked of it.
    let beats = 2.0 * f64::from(gateways) * seconds;
    figures(
        name,
        &json!({
            "gateways": gateways, "per_minute": per_minute, "clients": clients,
            "admitted_of_limit": part, "calls_per_request": calls / admitted,
            "without_beats": (calls - beats).max(0.0) / admitted,
            "asked_per_second": answers.len() as f64 / seconds,
        }),
    );
    assert!((0.85..=1.02).contains(&part), "{part}");
}

mod long {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes three minutes"]
    async fn sixteen_gateways_admit_the_whole_rate() {
        let even = [1; 16];
        let mut skewed = [1; 16];
        (skewed[0], skewed[1]) = (8, 4);
        let mut few = [0; 16];
        (few[0], few[5]) = (6, 2);
        saturate(16, 600, &even, "sixteen_even_600").await;
        saturate(16, 6_000, &skewed, "sixteen_skewed_6000").await;
        saturate(16, 6_000, &few, "sixteen_few_6000").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes five minutes"]
    async fn fifty_kills_lose_and_double_nothing() {
        kill_gateways(50).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes three minutes"]
    async fn stopped_gateways_exceed_no_rate() {
        stop_gateway(30).await;
        stop_gateway(120).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes a minute"]
    async fn database_may_be_silent_for_a_minute() {
        silence_database(60).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes minutes"]
    async fn sixteen_gateways_hear_of_revocations() {
        revoke_keys(16, 1_000).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes minutes"]
    async fn sixteen_gateways_spend_one_cap() {
        spend_cap(16, 10_000).await;
    }
}
