//! Rates that several gateways share on a Redis server: the rate goes where the requests go, and
//! all gateways together admit no more than one bucket would, whatever becomes of the server.

use std::fs;
use std::ops::Range;
use std::time::Duration;

use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::TestServer;

use crate::fleet::{
    ALONE, Answer, Fleet, assert_rate_holds, failures, metric, one_token, until_shared,
};
use crate::postgres::{Database, apart};
use crate::support::failing;

/// The rate of a tenant that asks for more.
pub(crate) const PER_MINUTE: u64 = 600;
pub(crate) const BURST: u64 = 60;

/// Returns the config of a tenant with a rate.
pub(crate) fn plan(per_minute: u64, burst: u64) -> String {
    format!(
        "[plans.small]\nrequests_per_minute = {{ limit = {per_minute}, burst = {burst} }}\n\
         [tenants.acme]\nplan = \"small\"\n"
    )
}

/// Returns the number of requests that some gateways admitted.
fn served(answers: &[Answer], gateways: Range<usize>) -> u64 {
    let of_these = answers.iter().filter(|answer| gateways.contains(&answer.gateway));
    of_these.filter(|answer| answer.status == 200).count() as u64
}

/// One gateway that gets all requests of a tenant admits the whole rate. Then all get as much as
/// they can take, and together no more than the rate.
#[tokio::test(flavor = "multi_thread")]
async fn rates_go_where_requests_go() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &plan(PER_MINUTE, BURST), 3).await;
    let load = fleet.load(&[4, 0, 0], &one_token());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (answers, time) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
    assert_rate_holds(&answers, PER_MINUTE, BURST);
    let whole = BURST + PER_MINUTE * time.as_millis() as u64 / 60_000;
    let admitted = served(&answers, 0..3);
    assert!(admitted * 100 >= whole * 90, "one gateway admitted {admitted} of {whole}");

    // The others take over what the first one has.
    let load = fleet.load(&[1, 3, 3], &one_token());
    tokio::time::sleep(Duration::from_secs(12)).await;
    let (answers, time) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
    assert_rate_holds(&answers, PER_MINUTE, BURST);
    let refilled = PER_MINUTE * time.as_millis() as u64 / 60_000;
    let admitted = served(&answers, 0..3);
    assert!(admitted * 100 >= refilled * 90, "three gateways admitted {admitted} of {refilled}");
    // Each has more to do than a third of the rate.
    let each = [0, 1, 2].map(|at| served(&answers, at..at + 1));
    assert!(each.iter().all(|each| each * 5 >= admitted), "{each:?}");
    for gateway in &fleet.all {
        let metrics = gateway.metrics().await;
        let waits = metric(&metrics, "tollgate_rate_waits_total");
        // The server has 50 ms for an answer, and this machine may be busy.
        let unanswered = metric(&metrics, "tollgate_rate_waits_unanswered_total");
        assert!(waits > 0 && unanswered * 10 <= waits, "{unanswered} of {waits}");
    }
}

/// The rate holds while the server is emptied and frozen. No request fails, and the server is used
/// again at once.
#[tokio::test(flavor = "multi_thread")]
async fn rates_hold_while_server_fails() {
    let _alone = ALONE.lock().await;
    let Some(server) = apart(TestServer::shared) else { return };
    let Some(redis) = TestRedis::start() else { return };
    let database = Database::new(&server);
    let fleet = Fleet::start(&database, &redis, &plan(PER_MINUTE, BURST), 3).await;
    let load = fleet.load(&[3, 2, 1], &one_token());
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
    let (answers, time) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers));
    assert_rate_holds(&answers, PER_MINUTE, BURST);
    let refilled = PER_MINUTE * time.as_millis() as u64 / 60_000;
    let admitted = served(&answers, 0..3);
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
