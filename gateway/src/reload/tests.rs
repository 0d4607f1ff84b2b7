//! Changes of the config and of raises that fail halfway: a table of a database is gone for
//! a while.

use std::path::{Path, PathBuf};

use http::StatusCode;
use tokio::time::timeout;

use super::*;
use crate::gateway::tests::{CONFIG, RunningGateway};
use crate::raises;

/// The config of these tests with `plan` as the plan of the tenant acme.
fn config(plan: &str) -> String {
    let acme = format!("[tenants.acme]\nplan = \"{plan}\"");
    let config = CONFIG.replace("[tenants.acme]\nplan = \"open\"", &acme);
    format!("{config}[plans.team]\nconcurrent = 4\n")
}

/// A table that the gateway cannot read.
struct HiddenTable {
    database: PathBuf,
    table: &'static str,
}

impl HiddenTable {
    fn new(gateway: &RunningGateway, database: &str, table: &'static str) -> Self {
        let hidden = Self { database: gateway.data.path().join(database), table };
        hidden.execute(&format!("ALTER TABLE {table} RENAME TO hidden"));
        hidden
    }

    fn show(self) {
        self.execute(&format!("ALTER TABLE hidden RENAME TO {}", self.table));
    }

    fn execute(&self, sql: &str) {
        rusqlite::Connection::open(&self.database).unwrap().execute(sql, []).unwrap();
    }
}

/// Starts a gateway with the config in `path`.
async fn start(path: &Path, plan: &str) -> RunningGateway {
    std::fs::write(path, config(plan)).unwrap();
    RunningGateway::with_file(path).await
}

/// Statements take their prices from the records of plans.
#[tokio::test]
async fn failed_reload_records_no_plans() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("tollgate.toml");
    let gateway = start(&path, "open").await;
    let spent = HiddenTable::new(&gateway, "jobs/jobs.db", "spent");
    std::fs::write(&path, config("team")).unwrap();
    let reloader = gateway.state.reloader.clone();
    let failed = reloader.reload("test", ReloadRun::Apply).await;
    assert!(matches!(failed, Err(ReloadError::Jobs(_))), "{failed:?}");
    assert_eq!(gateway.recorded("plans.in_force"), [""; 0]);
    assert_eq!(gateway.recorded("config.changed"), [""; 0]);
    spent.show();
    reloader.reload("test", ReloadRun::Apply).await.unwrap();
    assert_eq!(gateway.recorded("plans.in_force").len(), 1);
    assert_eq!(gateway.recorded("config.changed").len(), 1);
    gateway.close().await;
}

#[tokio::test]
async fn changed_file_is_tried_again_after_fault() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("tollgate.toml");
    let gateway = start(&path, "open").await;
    let daily = HiddenTable::new(&gateway, "ledger.db", "daily");
    std::fs::write(&path, config("team")).unwrap();
    let wait_for = async |config_ok: &str, plans: usize| {
        let wait = async {
            loop {
                let text = gateway.state.metrics.text();
                let is_there = text.contains(&format!("tollgate_config_ok {config_ok}"));
                if is_there && gateway.recorded("plans.in_force").len() == plans {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(Duration::from_secs(60), wait).await.expect("the follower looks again");
    };
    wait_for("0", 0).await;
    daily.show();
    wait_for("1", 1).await;
    gateway.close().await;
}

#[tokio::test]
async fn failed_raise_is_not_kept() {
    let files = tempfile::tempdir().unwrap();
    let gateway = start(&files.path().join("tollgate.toml"), "team").await;
    let daily = HiddenTable::new(&gateway, "ledger.db", "daily");
    let (path, admin_key) = ("/v1/tenants/acme/raises", gateway.admin_key());
    let body = r#"{"limits": {"concurrent": 8}, "seconds": 600}"#;
    let raise =
        async || gateway.send(gateway.admin, ("POST", path), Some(&admin_key), body).await.status;
    assert_eq!(raise().await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(raises::read(gateway.data.path()).unwrap(), []);
    assert_eq!(gateway.recorded("limits.raised"), [""; 0]);
    daily.show();
    assert_eq!(raise().await, StatusCode::CREATED);
    assert_eq!(raises::read(gateway.data.path()).unwrap().len(), 1);
    gateway.close().await;
}
