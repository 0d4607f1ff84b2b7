//! The ledger over real processes: checked and copied while the gateway serves, refused
//! when damaged, restored from a backup.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tollgate_domain::{
    Block, BlockParts, Device, DeviceClass, DeviceNanos, ModelName, UtcMonth, UtcTime, WorkerEpoch,
    WorkerName,
};
use tollgate_ledger::{Act, AuditKey, Ledger, LedgerOptions};
use tollgate_loadtest::client::Connection;

use crate::support::{self, Tollgate, binary, command};

fn count(max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Sends a request and returns its id after it is on the bill.
async fn billed(connection: &Connection) -> String {
    let body = count(8).to_string().into();
    let response = connection.post("/v1/chat/completions", body).await.expect("answers");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    assert_eq!(support::read(response).await.0, 200);
    let path = format!("/v1/usage/{id}");
    for _ in 0..600 {
        let (status, usage) = support::get(connection, &path).await;
        if status == 200 && usage["state"] == "posted" {
            return id;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("{id} is not on the bill");
}

/// Returns the exit code and output of `tollgate ledger check --json`.
fn check(data: &Path) -> (Option<i32>, Value) {
    let data = data.display().to_string();
    let words = ["ledger", "check", "--json", "--data", &data];
    let output = Command::new(binary()).args(words).output().expect("the binary starts");
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), json)
}

#[tokio::test]
async fn ledger_is_checked_copied_and_restored() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let first = billed(&connection).await;

    // The check runs beside the gateway.
    let (code, said) = check(gateway.data());
    assert_eq!((code, &said["sound"]), (Some(0), &json!(true)), "{said:#}");
    assert!(said["entries"].as_u64() > Some(0) && said["damage"] == json!([]), "{said:#}");
    let backup = gateway.data().with_file_name("backup.db");
    let shown = backup.display().to_string();
    let absent = gateway.data().with_file_name("absent/").display().to_string();
    let data = gateway.data().display().to_string();
    let refused = support::failing(&["ledger", "backup", &absent, "--data", &data]);
    assert!(refused.contains("there is no folder ") && refused.contains("create it"), "{refused}");
    let told = gateway.command(&["ledger", "backup", &shown]);
    assert!(told.contains("sound"), "{told}");
    assert!(command(&["ledger", "check", &shown]).starts_with("sound: "));
    let second = billed(&connection).await;
    let restoring = Command::new(binary())
        .args(["ledger", "restore", &shown, "--data", &gateway.data().display().to_string()])
        .output()
        .expect("the binary starts");
    let told = String::from_utf8_lossy(&restoring.stderr).into_owned();
    assert!(!restoring.status.success() && told.contains("is in use by"), "{told}");
    assert_eq!(gateway.stop(), Some(0));

    // One nanosecond is moved from a tenant's entry; the check reports it and `up`
    // refuses.
    let path = gateway.data().join("ledger.db");
    flip_an_amount(&path);
    let (code, said) = check(gateway.data());
    assert_eq!((code, &said["sound"]), (Some(1), &json!(false)), "{said:#}");
    let listed = said["damage"].as_array().expect("a list");
    assert!(listed.iter().any(|it| it["kind"] == "block"), "{said:#}");
    let started = Command::new(binary())
        .args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
        .args(["--data", &gateway.data().display().to_string()])
        .args(["--config", &gateway.config().display().to_string()])
        .output()
        .expect("the binary starts");
    let told = String::from_utf8_lossy(&started.stderr).into_owned();
    assert_eq!(started.status.code(), Some(1), "{told}");
    assert!(told.contains("ledger.db is damaged, so the gateway does not start"), "{told}");
    let data = gateway.data().display().to_string();
    let broken = Command::new(binary())
        .args(["ledger", "backup", &shown, "--data", &data])
        .output()
        .expect("the binary starts");
    assert!(!broken.status.success(), "what is damaged is not copied over a good backup");

    // The backup replaces the ledger; later blocks come from the worker's journal,
    // which still exists.
    let told = gateway.command(&["ledger", "restore", &shown]);
    assert!(told.contains("is restored; the old ledger is"), "{told}");
    let mut gateway = gateway.restart();
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    billed(&connection).await;
    for id in [first, second] {
        let (status, usage) = support::get(&connection, &format!("/v1/usage/{id}")).await;
        assert_eq!((status, &usage["completion_tokens"]), (200, &json!(8)), "{id}: {usage}");
    }
    assert_eq!(gateway.stop(), Some(0));
    let (code, said) = check(gateway.data());
    assert_eq!(code, Some(0), "{said:#}");
    let reader = Ledger::open_read_only(&path).expect("a ledger");
    for epoch in reader.epochs().expect("reads") {
        assert!(reader.balance(epoch).expect("reads").is_exact());
    }
}

/// Checks that blocks of a hundred days ago leave the ledger and that the ledger works
/// without them.
#[tokio::test]
async fn archived_months_stay_one_audit_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    fs::create_dir(&data).expect("makes");
    #[allow(clippy::disallowed_methods, reason = "months are those of the wall clock")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
    let options = LedgerOptions {
        key: Some(Arc::new(AuditKey::make(&data.join("audit")).expect("makes"))),
        ..LedgerOptions::new(&data.join("ledger.db"))
    };
    let ledger = Ledger::open_with(options).expect("opens");
    for number in 1..=3 {
        let block = idle_block(number, UtcTime(now - 100 * DAY_NS + number));
        ledger.submit(block).await.expect("posts");
    }
    ledger.submit(Act::Sign).await.expect("signs");
    drop(ledger);

    let (shown, out) = (data.display().to_string(), folder.path().join("archive"));
    let out = out.display().to_string();
    let archive = |before: UtcMonth| {
        let before = before.to_string();
        Command::new(binary())
            .args(["ledger", "archive", "--before", &before, "--out", &out, "--data", &shown])
            .output()
            .expect("the binary starts")
    };
    let unsettled = archive(UtcTime(now + 40 * DAY_NS).day().month());
    let told = String::from_utf8_lossy(&unsettled.stderr).into_owned();
    assert!(!unsettled.status.success() && told.contains("settled a day after"), "{told}");
    let done = archive(UtcTime(now - 40 * DAY_NS).day().month());
    let told = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(told.contains("records 0 to 3") && told.contains("sound: "), "{told}");
    let (code, said) = check(&data);
    assert_eq!((code, &said["blocks"]), (Some(0), &json!(0)), "{said:#}");
    let (code, said) = check(Path::new(&out));
    assert_eq!((code, &said["blocks"]), (Some(0), &json!(3)), "{said:#}");

    let mut gateway = Tollgate::start_on(&data, support::OPEN, Command::new(binary()));
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    billed(&connection).await;
    assert_eq!(gateway.stop(), Some(0));
    let rest = folder.path().join("rest").display().to_string();
    command(&["audit", "export", "--from", "4", "--out", &rest, "--data", &shown]);
    let public = command(&["audit", "key", "--data", &shown]);
    let sound = command(&["audit", "verify", &out, &rest, "--key", public.trim()]);
    assert!(sound.starts_with("sound: records 0 to "), "{sound}");
    let (code, said) = check(&data);
    assert_eq!(code, Some(0), "{said:#}");
}

fn idle_block(number: u64, started: UtcTime) -> Block {
    let wall = DeviceNanos(1_000);
    let parts = BlockParts {
        epoch: WorkerEpoch(7),
        number,
        worker: WorkerName::new("0").expect("a name"),
        device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: String::new() },
        model: ModelName::new("m").expect("a name"),
        calibration: "v1".into(),
        first_step: 0,
        last_step: 0,
        started,
        wall,
        overhead: DeviceNanos::ZERO,
        idle: wall,
        loss: DeviceNanos::ZERO,
        shares: Vec::new(),
        finished: Vec::new(),
        last_of_epoch: false,
        energy: None,
    };
    Block::try_from(parts).expect("it balances")
}

/// Changes the file like a flipped bit, which no constraint sees.
fn flip_an_amount(path: &Path) {
    let connection = rusqlite::Connection::open(path).expect("opens");
    let changed = connection.execute(
        "UPDATE entries SET amount_ns = amount_ns + 1 WHERE account = 1 AND epoch_id = 1
         AND block = (SELECT min(block) FROM entries WHERE account = 1)",
        [],
    );
    assert!(changed.expect("changes") > 0);
}

const DAY_NS: u64 = 24 * 3_600 * 1_000_000_000;
