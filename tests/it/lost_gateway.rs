//! The list of gateways that share a database server, and one of them that is given up.

use std::time::{Duration, Instant};

use serde_json::Value;
use tollgate_sql::testing::TestServer;

use crate::postgres::{Database, apart, told, until_gateways};
use crate::support::{Tollgate, failing, get};

fn listed(gateway: &Tollgate) -> Vec<Value> {
    let data = gateway.data().display().to_string();
    let listed = told(gateway, &["gateways", "list", "--json", "--data", &data]);
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    listed["gateways"].as_array().expect("a list").clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_gateway_is_listed_and_freed() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let first = database.gateway("a");
    database.share_secrets(&first, "b");
    let mut second = database.gateway("b");
    until_gateways(&first, 2).await;
    let rows = listed(&first);
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert!(rows.iter().all(|row| row["state"] == "running"), "{rows:?}");
    let other = rows.iter().find(|row| row["is_this"] == false).expect("the other one");
    let home = other["home"].as_str().expect("an id").to_owned();
    second.kill();
    let place = [first.config(), first.data().to_owned()].map(|path| path.display().to_string());
    let free = ["gateways", "free", &home, "--config", &place[0], "--data", &place[1]];
    let refused = failing(&free);
    assert!(refused.contains("may still run"), "{refused}");
    let unknown = failing(&["gateways", "free", "xy", "--config", &place[0], "--data", &place[1]]);
    assert!(unknown.contains("no gateway has an id that begins with \"xy\""), "{unknown}");
    // As if it had been silent for that long, by the server's clock.
    let silent =
        format!("UPDATE homes SET seen_at = seen_at - interval '2 h' WHERE home = '{home}'");
    apart(|| server.run(database.name(), &silent));
    let text = told(&first, &["gateways", "list", "--data", &place[1]]);
    assert!(
        text.lines().any(|line| line.starts_with(&home[..12]) && line.contains("silent")),
        "{text}"
    );
    assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    let freed = told(&first, &["gateways", "free", &home[..12], "--data", &place[1]]);
    assert!(freed.contains("has nothing of the caps now"), "{freed}");
    // It starts again after all, and stops as it should.
    let mut second = second.restart();
    let admin = first.connect_admin().await;
    let state = async || {
        let (status, rows) = get(&admin, "/v1/gateways").await;
        assert_eq!(status, 200, "{rows}");
        let rows = rows["gateways"].as_array().expect("a list").clone();
        let row = rows.into_iter().find(|row| row["home"] == home.as_str());
        row.expect("it is listed")["state"].clone()
    };
    assert_eq!(state().await, "running");
    assert_eq!(tokio::task::block_in_place(|| second.stop()), Some(0));
    let begun = Instant::now();
    while state().await != "stopped" {
        assert!(begun.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
