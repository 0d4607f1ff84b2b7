//! Batches while the gateway restarts, a key is rotated, the day changes or the disk is full:
//! each line has one result, and the bill is the sum of the answers.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tollgate_loadtest::client::Connection;

use crate::audit::id_of;
use crate::batch_results::{self, FIGURES, Sums, check_completed, check_lines, figure};
use crate::batches::{create, ended, until_cap_spent, upload};
use crate::disk::SmallDisk;
use crate::support::{self, Tollgate, binary, get, post, program};

/// Returns a configuration whose plan has these quotas of batches. A line takes tens of
/// milliseconds.
fn config(quotas: &str) -> String {
    format!(
        r#"
[worker]
engine = "synthetic"
[worker.synthetic]
step = "2ms"
kv_tokens = 100_000

[gateway.jobs]
spare = "4MiB"

[plans.open]
requests_per_minute = 100_000
concurrent = 64
[plans.open.batches]
{quotas}

# No other class of device has a price.
[prices.standard]
from = 2020-01-01
currency = "EUR"
per_device_second = {{ synthetic = "1" }}

[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"
"#
    )
}

/// Returns the lines of an input. Their answers have up to 40 tokens.
fn input(lines: usize) -> String {
    batch_results::input(lines, |number| 1 + number as u64 * 17 % 40)
}

/// Creates a batch of `lines` lines.
async fn make(connection: &Connection, lines: usize) -> Value {
    let (status, file) = upload(connection, &input(lines)).await;
    assert_eq!(status, 200, "{file}");
    let (status, batch) = create(connection, &file).await;
    assert_eq!(status, 200, "{batch}");
    batch
}

fn path_of(batch: &Value) -> String {
    format!("/v1/batches/{}", batch["id"].as_str().expect("an id"))
}

/// Waits until `lines` lines of a batch that still runs have an answer.
async fn until_answered(connection: &Connection, batch: &Value, lines: u64) {
    let started = Instant::now();
    loop {
        let (_, batch) = get(connection, &path_of(batch)).await;
        assert_ne!(batch["status"], "completed", "the batch is too short");
        if figure(&batch["request_counts"]["completed"]) >= lines {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{batch}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the rows of the usage of a tenant.
fn usage(gateway: &Tollgate, tenant: &str, by: &str) -> Vec<Value> {
    let words = ["usage", "--json", "--tenant", tenant, "--by", by];
    let usage: Value = serde_json::from_str(&gateway.command(&words)).expect("JSON");
    usage["rows"].as_array().expect("rows").clone()
}

/// Asserts that the ledger and the statements bill `answered`. Returns the usage by day.
async fn check_bill(gateway: &Tollgate, tenant: &str, answered: Sums) -> Vec<Value> {
    let bill = || -> Sums { usage(gateway, tenant, "day").iter().map(Sums::of_row).sum() };
    let started = Instant::now();
    // The last blocks are on their way from the worker's journal.
    while bill() != answered && started.elapsed() < Duration::from_secs(20) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(bill(), answered, "{FIGURES:?}");
    let days = usage(gateway, tenant, "day");
    let month = |day: &Value| day["day"].as_str().expect("a day")[..7].to_owned();
    let months: BTreeSet<String> = days.iter().map(month).collect();
    let config = gateway.config().display().to_string();
    let of_month = |month: &String| {
        let words = ["statement", "--month", month, "--tenant", tenant, "--json"];
        let words = [&words[..], &["--config", &config]].concat();
        let statement: Value = serde_json::from_str(&gateway.command(&words)).expect("JSON");
        Sums::of_row(&statement["total"])
    };
    assert_eq!(months.iter().map(of_month).sum::<Sums>(), answered, "{FIGURES:?}");
    days
}

/// Returns the number of tries of lines that the ledger has, billed or not.
fn tries(gateway: &Tollgate) -> u64 {
    let ledger = rusqlite::Connection::open(gateway.data().join("ledger.db")).expect("opens");
    let count = "SELECT count(*) FROM requests";
    ledger.query_row(count, [], |row| row.get(0)).expect("reads")
}

/// Checks that three restarts lose no line, answer none twice and repeat no work.
#[tokio::test]
async fn batches_survive_rolling_restart() {
    const LINES: usize = 300;
    let mut gateway = Tollgate::with_config(&config("in_flight = 4"));
    let key = gateway.key("acme", &[]);
    let mut acme = gateway.connect(&key).await;
    let batch = make(&acme, LINES).await;
    for answered in [30, 80, 130] {
        until_answered(&acme, &batch, answered).await;
        assert_eq!(gateway.stop(), Some(0));
        gateway = gateway.restart();
        acme = gateway.connect(&key).await;
    }
    until_answered(&acme, &batch, 140).await;
    let batch = ended(&acme, &batch).await;
    let sums = check_completed(&acme, &batch, LINES).await;
    check_bill(&gateway, "acme", sums).await;
    assert_eq!(gateway.stop(), Some(0));
    gateway.books();
    assert_eq!(tries(&gateway), sums.requests(), "lines on workers had time to end");
}

/// Returns the spent part of a tenant's cap on lines.
async fn spent(connection: &Connection) -> u64 {
    let (_, limits) = get(connection, "/v1/limits").await;
    let rows = limits["data"].as_array().expect("rows");
    figure(&rows.iter().find(|row| row["scope"] == "tenant_batches").expect("the cap")["used"])
}

/// Checks that a batch outlives its rotated key. The control: it ends with a revoked key.
#[tokio::test]
async fn batches_survive_rotation_of_their_key() {
    support::stay_within_a_day().await;
    const LINES: usize = 400;
    let quotas = "in_flight = 3\ndevice_time_per_day = \"1h\"";
    let mut gateway = Tollgate::with_config(&config(quotas));
    let (key, revoked) = (gateway.key("acme", &[]), gateway.key("other", &[]));
    let (acme, other) = (gateway.connect(&key).await, gateway.connect(&revoked).await);
    let control = make(&other, LINES).await;
    let batch = make(&acme, LINES).await;
    until_answered(&acme, &batch, 5).await;
    let new = gateway.command(&["keys", "rotate", "--quiet", "--overlap", "1s", id_of(&key)]);
    let started = Instant::now();
    while get(&acme, "/v1/models").await.0 != 401 {
        assert!(started.elapsed() < Duration::from_secs(10), "the old key does not expire");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let acme = gateway.connect(new.trim()).await;
    let (_, now) = get(&acme, &path_of(&batch)).await;
    let answered = figure(&now["request_counts"]["completed"]);
    until_answered(&acme, &batch, answered + 20).await;

    until_answered(&other, &control, 5).await;
    gateway.command(&["keys", "revoke", id_of(&revoked)]);
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let control = ended(&other, &control).await;
    assert_eq!(control["status"], "cancelled", "{control}");
    let answers = check_lines(&other, &control, LINES).await;
    // The work on cancelled lines is billed, too, and no answer names it.
    let bill: Sums = usage(&gateway, "other", "day").iter().map(Sums::of_row).sum();
    assert_eq!(control["usage"]["output_tokens"], bill.completion_tokens(), "{control}");
    assert_eq!(spent(&other).await, bill.reference_ns(), "{FIGURES:?} {bill:?}");
    assert!(bill.reference_ns() >= answers.reference_ns(), "{bill:?} {answers:?}");

    let batch = ended(&acme, &batch).await;
    let sums = check_completed(&acme, &batch, LINES).await;
    check_bill(&gateway, "acme", sums).await;
    let keys = usage(&gateway, "acme", "key");
    assert_eq!((keys.len(), &keys[0]["key"]), (1, &json!(id_of(&key))), "{keys:?}");
    assert_eq!(gateway.stop(), Some(0));
    gateway.books();
}

const DAY: u64 = 86_400;

/// Returns a command of the binary whose clock shows `seconds` after 1970 now.
fn at(seconds: u64) -> Option<Command> {
    let faketime = program("faketime")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let offset = i128::from(seconds) - i128::from(now);
    let shown = Command::new(faketime).args(["-f", "+0s", "env"]).output().expect("it runs");
    let shown = String::from_utf8(shown.stdout).expect("UTF-8");
    let library = shown.lines().find_map(|line| line.strip_prefix("LD_PRELOAD="));
    let mut command = Command::new(binary());
    command.env("LD_PRELOAD", library.expect("a library"));
    command.env("FAKETIME", format!("{offset:+}s")).env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    Some(command)
}

/// Checks that a batch whose cap of the day is spent goes on by itself at midnight.
#[tokio::test]
async fn batches_go_on_after_day_cap_renews() {
    const LINES: usize = 55;
    let config = config("in_flight = 4\ndevice_time_per_day = \"300ms\"");
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let midnight = now / DAY * DAY;
    let Some(noon) = at(midnight - DAY / 2) else { return };
    let mut gateway = Tollgate::start_on(&data, &config, noon);
    let key = gateway.key("acme", &[]);
    let acme = gateway.connect(&key).await;
    let batch = make(&acme, LINES).await;
    let (_, used) = until_cap_spent(&gateway, &acme, &path_of(&batch)).await;
    let (_, waiting) = get(&acme, &path_of(&batch)).await;
    assert_eq!(waiting["tollgate"]["until"], midnight, "{waiting}");
    assert_eq!(gateway.stop(), Some(0));

    // The calendar of a gateway follows no jump of the clock, so midnight comes by itself.
    let mut gateway = Tollgate::start_on(&data, &config, at(midnight - 4).expect("as before"));
    let acme = gateway.connect(&key).await;
    let batch = ended(&acme, &batch).await;
    let ended_at = figure(&batch["completed_at"]);
    assert!((midnight..midnight + 60).contains(&ended_at), "{batch}");
    let sums = check_completed(&acme, &batch, LINES).await;
    let days = check_bill(&gateway, "acme", sums).await;
    let days: Vec<u64> = days.iter().map(|day| Sums::of_row(day).reference_ns()).collect();
    assert_eq!(days, [used, sums.reference_ns() - used], "the cost of each day in ns");
    assert_eq!(spent(&acme).await, days[1]);
    assert_eq!(gateway.stop(), Some(0));
    gateway.books();
}

/// Waits until a batch says that it waits. Returns the reason.
async fn until_waiting(connection: &Connection, batch: &Value) -> String {
    let started = Instant::now();
    loop {
        let (status, batch) = get(connection, &path_of(batch)).await;
        assert_eq!(status, 200, "{batch}");
        if let Some(reason) = batch["tollgate"]["waiting"].as_str() {
            return reason.to_owned();
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{batch}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Starts a gateway on a small disk. Returns it with a key and a batch that runs.
async fn start_on(disk: &SmallDisk) -> (Tollgate, String, Value) {
    let data = disk.path().join("data");
    let gateway = Tollgate::start_on(&data, &config("in_flight = 4"), Command::new(binary()));
    let key = gateway.key("acme", &[]);
    let acme = gateway.connect(&key).await;
    let batch = make(&acme, DISK_LINES).await;
    until_answered(&acme, &batch, 30).await;
    (gateway, key, batch)
}

const DISK_LINES: usize = 250;

/// Waits until the batch ends by itself, stops the gateway and checks results and bill.
async fn check_end(mut gateway: Tollgate, acme: &Connection, batch: &Value) {
    let batch = ended(acme, batch).await;
    let sums = check_completed(acme, &batch, DISK_LINES).await;
    check_bill(&gateway, "acme", sums).await;
    assert_eq!(gateway.stop(), Some(0));
    gateway.books();
}

async fn assert_upload_is_refused(connection: &Connection) {
    let (status, error) = upload(connection, &input(1)).await;
    let error = &error["error"];
    assert_eq!((status, &error["code"]), (503, &json!("job_storage_unavailable")), "{error}");
    assert_eq!(error["message"], "The server has no room for files.");
}

/// Checks that a full disk stops a batch, which goes on when there is space.
#[tokio::test]
async fn batches_survive_full_disk() {
    let Some(disk) = SmallDisk::mount("48m") else { return };
    let (gateway, key, batch) = start_on(&disk).await;
    let acme = gateway.connect(&key).await;
    let ballast = disk.fill();
    assert_upload_is_refused(&acme).await;
    // First the ledger takes no record, or jobs.db takes no answer.
    let reason = until_waiting(&acme, &batch).await;
    assert!(["ledger_unavailable", "fault", "no_room"].contains(&&*reason), "{reason}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    until_waiting(&acme, &batch).await;
    fs::remove_file(ballast).expect("removes");
    check_end(gateway, &acme, &batch).await;
}

/// Checks that batches leave the spare space of the disk to other requests, and go on when
/// there is more space.
#[tokio::test]
async fn batches_leave_spare_space_to_other_requests() {
    let Some(disk) = SmallDisk::mount("48m") else { return };
    let (gateway, key, batch) = start_on(&disk).await;
    let acme = gateway.connect(&key).await;
    let ballast = disk.fill();
    // Half of the spare space is left.
    let size = fs::metadata(&ballast).expect("a size").len();
    let file = File::options().write(true).open(&ballast).expect("opens");
    file.set_len(size - (2 << 20)).expect("cuts");
    // A removed file that is open keeps its space.
    drop(file);
    assert_upload_is_refused(&acme).await;
    let started = Instant::now();
    while until_waiting(&acme, &batch).await != "no_room" {
        assert!(started.elapsed() < Duration::from_secs(30), "the batch does not wait for room");
    }
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let line: Value =
        serde_json::from_str(input(2).lines().nth(1).expect("a right line")).expect("JSON");
    let (status, answer) = post(&other, "/v1/chat/completions", &line["body"]).await;
    assert_eq!(status, 200, "{answer}");
    fs::remove_file(ballast).expect("removes");
    check_end(gateway, &acme, &batch).await;
}

/// Checks that a gateway that is killed on a full disk goes on with its batch after a start.
#[tokio::test]
async fn batches_survive_kill_on_full_disk() {
    let Some(disk) = SmallDisk::mount("48m") else { return };
    let (mut gateway, key, batch) = start_on(&disk).await;
    let ballast = disk.fill();
    until_waiting(&gateway.connect(&key).await, &batch).await;
    gateway.kill();
    fs::remove_file(ballast).expect("removes");
    let gateway = gateway.restart();
    let acme = gateway.connect(&key).await;
    check_end(gateway, &acme, &batch).await;
}
