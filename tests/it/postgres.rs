//! Ledger and keys on a PostgreSQL server, over real processes: bills, the audit log, a server
//! that goes away, gateways that share ledger, keys and rates, and servers that cannot be used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate_ledger::{DatabasePlace, Ledger};
use tollgate_loadtest::client::Connection;
use tollgate_sql::testing::{PASSWORD, TestServer};

use crate::support::{self, Tollgate, binary, command, failing, get, post, posted};

/// A folder with the file of the password, and a database of `server`.
pub(crate) struct Database<'s> {
    server: &'s TestServer,
    name: String,
    folder: TempDir,
}

impl<'s> Database<'s> {
    pub(crate) fn new(server: &'s TestServer) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("password"), format!("{PASSWORD}\n")).expect("writes");
        Self { server, name: apart(|| server.new_database()), folder }
    }

    /// Returns the config of a gateway with its ledger in this database.
    pub(crate) fn config(&self) -> String {
        self.config_with(support::OPEN)
    }

    pub(crate) fn config_with(&self, other: &str) -> String {
        let url = self.server.url(&self.name);
        let password = self.folder.path().join("password").display().to_string();
        format!("{other}\n[cluster.postgres]\nurl = \"{url}\"\npassword = \"{password}\"\n")
    }

    /// Gives a new data folder `to` the secrets that all gateways have in common.
    pub(crate) fn share_secrets(&self, from: &Tollgate, to: &str) {
        share_secrets(from, &self.folder.path().join(to));
    }

    /// Starts a gateway with the data folder `name`.
    pub(crate) fn gateway(&self, name: &str) -> Tollgate {
        self.gateway_with(name, &self.config())
    }

    pub(crate) fn gateway_with(&self, name: &str, config: &str) -> Tollgate {
        self.gateway_by(name, config, Path::new(binary()))
    }

    /// Starts a gateway by another binary.
    pub(crate) fn gateway_by(&self, name: &str, config: &str, program: &Path) -> Tollgate {
        Tollgate::start_on(&self.folder.path().join(name), config, Command::new(program))
    }

    /// Returns the name of the database.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the port of the server.
    pub(crate) fn port(&self) -> u16 {
        self.server.port()
    }

    /// Returns the path of a file or folder beside the data folders.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn assert_sound(&self) {
        let place = DatabasePlace::Server(self.server.address(&self.name));
        let checked = apart(|| Ledger::check(&place).expect("reads"));
        assert!(checked.findings.is_empty(), "{:#?}", checked.findings);
        assert!(checked.entries > 0);
    }
}

/// Gives a new data folder `to` the secrets that all gateways have in common.
pub(crate) fn share_secrets(from: &Tollgate, to: &Path) {
    fs::create_dir_all(to.join("audit")).expect("makes the folder");
    for secret in ["audit/signing.key", "pepper"] {
        fs::copy(from.data().join(secret), to.join(secret)).expect("copies");
    }
}

fn count(max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Runs a subcommand with the data folder and the config of `gateway`.
pub(crate) fn told(gateway: &Tollgate, words: &[&str]) -> String {
    command(&[words, &["--config", &gateway.config().display().to_string()]].concat())
}

/// Sends requests one after the other and returns the device time that they were billed, ns.
async fn billed(gateway: &Tollgate, key: &str, requests: u32) -> u64 {
    let connection = gateway.connect(key).await;
    let mut sum = 0;
    for _ in 0..requests {
        let body = count(8).to_string().into();
        let response = connection.post("/v1/chat/completions", body).await.expect("answers");
        let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
        assert_eq!(support::read(response).await.0, 200);
        let usage = posted(&connection, &id).await;
        sum += usage["attributed_ns"].as_u64().expect("a figure");
    }
    sum
}

fn usage(gateway: &Tollgate) -> (u64, u64) {
    let data = gateway.data().display().to_string();
    let rows: Value =
        serde_json::from_str(&told(gateway, &["usage", "--json", "--data", &data])).expect("JSON");
    let rows = rows["rows"].as_array().expect("a list").clone();
    let sum = |name: &str| rows.iter().map(|row| row[name].as_u64().expect("a number")).sum();
    (sum("requests"), sum("attributed_ns"))
}

#[tokio::test]
async fn ledger_on_server_bills_every_request() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let mut gateway = database.gateway("data");
    let key = gateway.key("acme", &[]);
    let sum = billed(&gateway, &key, 5).await;
    assert_eq!(usage(&gateway), (5, sum));
    assert!(!gateway.data().join("ledger.db").exists(), "no file has the ledger");

    // A start goes on with the same ledger.
    gateway = gateway.restart();
    let sum = sum + billed(&gateway, &key, 2).await;
    let data = gateway.data().display().to_string();
    let public = told(&gateway, &["audit", "key", "--data", &data]);
    let config = gateway.config().display().to_string();
    assert_eq!(gateway.stop(), Some(0));
    assert_eq!(usage(&gateway), (7, sum));
    let checked = command(&["ledger", "check", "--config", &config, "--data", &data]);
    assert!(checked.starts_with("sound: tollgate@127.0.0.1/"), "{checked}");
    let out = database.folder.path().join("export").display().to_string();
    command(&["audit", "export", "--out", &out, "--config", &config, "--data", &data]);
    let sound = command(&["audit", "verify", &out, "--key", public.trim()]);
    assert!(sound.starts_with("sound: records 0 to "), "{sound}");
    let to = database.folder.path().join("copy.db").display().to_string();
    let refused = failing(&["ledger", "backup", &to, "--config", &config, "--data", &data]);
    assert!(refused.contains("copy it with PostgreSQL's own tools"), "{refused}");

    // A server that was restored from an older backup has lost what the folder knows of.
    apart(|| server.run(&database.name, "DELETE FROM checkpoints"));
    let refused = failing(&["up", "--config", &config, "--data", &data]);
    let lost = "has lost data: the ledger on the database server is another or an older ledger";
    assert!(refused.contains(lost), "{refused}");
}

/// The move copies every row: the same usage, and one audit log over both places.
#[tokio::test]
async fn migrate_keeps_bills_and_log() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let data = database.folder.path().join("data");
    let mut file = Tollgate::start_on(&data, support::OPEN, Command::new(binary()));
    let key = file.key("acme", &[]);
    let sum = billed(&file, &key, 4).await;
    assert_eq!(usage(&file), (4, sum));
    let public = told(&file, &["audit", "key", "--data", &shown(&data)]);
    let config = database.folder.path().join("moved.toml");
    fs::write(&config, database.config()).expect("writes");
    let config = shown(&config);
    let words = ["migrate", "--to", "postgres", "--config", &config, "--data", &shown(&data)];
    let running = failing(&words);
    assert!(running.contains("in use") || running.contains("another"), "{running}");
    assert_eq!(file.stop(), Some(0));
    let before = database.folder.path().join("before").display().to_string();
    told(&file, &["audit", "export", "--out", &before, "--data", &shown(&data)]);

    let moved = command(&words);
    assert!(moved.starts_with("moved: tollgate@127.0.0.1/"), "{moved}");
    assert!(moved.contains(": 1 keys; the old file is kept as "), "{moved}");
    for file in ["ledger.db", "keys.db"] {
        assert!(!data.join(file).exists() && data.join(format!("{file}.moved")).exists());
    }
    // A gateway that still reads files does not begin an empty ledger.
    let refused = failing(&["up", "--data", &shown(&data)]);
    assert!(refused.contains("has lost data: ledger.db is missing"), "{refused}");

    let mut gateway = database.gateway("data");
    let sum = sum + billed(&gateway, &key, 2).await;
    assert_eq!(usage(&gateway), (6, sum));
    assert_eq!(gateway.stop(), Some(0));
    database.assert_sound();
    let after = database.folder.path().join("after").display().to_string();
    command(&["audit", "export", "--out", &after, "--config", &config, "--data", &shown(&data)]);
    let sound = command(&["audit", "verify", &after, "--key", public.trim()]);
    assert!(sound.starts_with("sound: records 0 to "), "{sound}");
    // The log before the move is the beginning of the log after it.
    let records = |folder: &str| {
        fs::read_to_string(Path::new(folder).join("records.jsonl")).expect("an export")
    };
    let (old, new) = (records(&before), records(&after));
    assert!(new.starts_with(&old) && new.len() > old.len(), "the log goes on");
    assert!(new.contains("ledger.moved"), "the move is recorded");

    // Put back, the file is not moved over the ledger that went on without it.
    fs::rename(data.join("ledger.db.moved"), data.join("ledger.db")).expect("renames");
    let again = command(&words);
    assert!(again.starts_with("moved by an earlier run: "), "{again}");
    let other = Database::new(&server);
    let gateway = other.gateway("other");
    drop(gateway);
    let file = Tollgate::start_on(
        &other.folder.path().join("file"),
        support::OPEN,
        Command::new(binary()),
    );
    let (folder, _kept) = file.into_data();
    let config = other.folder.path().join("moved.toml");
    fs::write(&config, other.config()).expect("writes");
    let refused = failing(&[
        "migrate",
        "--to",
        "postgres",
        "--config",
        &shown(&config),
        "--data",
        &shown(&folder),
    ]);
    assert!(refused.contains("has another ledger already"), "{refused}");
}

#[tokio::test]
async fn absent_server_loses_no_answered_request() {
    let Some(server) = apart(TestServer::start) else { return };
    let database = Database::new(&server);
    let gateway = database.gateway("data");
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let mut answered = 0;
    for _ in 0..2 {
        assert_eq!(post(&connection, "/v1/chat/completions", &count(8)).await.0, 200);
        answered += 1;
        server.kill();
        // The journal of the worker keeps the usage.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(4) {
            let (status, body) = post(&connection, "/v1/chat/completions", &count(8)).await;
            assert_eq!(status, 200, "{body}");
            answered += 1;
        }
        let ready = gateway.connect_admin().await.get("/readyz").await.expect("answers");
        assert_eq!(ready.status(), 200);
        let refused = keyed_over(&connection, "one").await;
        assert_eq!(refused.0, "ledger_unavailable", "another gateway may run it");
        apart(|| server.resume());
        let begun = Instant::now();
        while !gateway.metrics().await.contains("\ntollgate_ledger_writable 1\n") {
            assert!(begun.elapsed() < Duration::from_secs(30), "the ledger is still away");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    let begun = Instant::now();
    while usage(&gateway).0 != answered {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?} of {answered}", usage(&gateway));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(get(&connection, "/v1/usage").await.0, 200);
    database.assert_sound();
}

#[tokio::test]
async fn gateways_share_one_ledger() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let mut first = database.gateway("a");
    // Both sign one log and check the same keys.
    database.share_secrets(&first, "b");
    let mut second = database.gateway("b");
    let keys = [first.key("acme", &[]), second.key("acme", &[])];
    let sums = tokio::join!(billed(&first, &keys[0], 5), billed(&second, &keys[1], 5));
    let expected = (10, sums.0 + sums.1);
    assert_eq!((usage(&first), usage(&second)), (expected, expected));
    let public = told(&first, &["audit", "key", "--data", &shown(first.data())]);
    let (config, data) = (first.config().display().to_string(), shown(first.data()));
    assert_eq!((first.stop(), second.stop()), (Some(0), Some(0)));
    database.assert_sound();
    let out = database.folder.path().join("export").display().to_string();
    command(&["audit", "export", "--out", &out, "--config", &config, "--data", &data]);
    let sound = command(&["audit", "verify", &out, "--key", public.trim()]);
    assert!(sound.starts_with("sound: records 0 to "), "{sound}");
    // Without the key a third one would sign the log with a key that nobody trusts.
    let third = shown(&database.folder.path().join("c"));
    let refused = failing(&["up", "--config", &config, "--data", &third]);
    assert!(refused.contains("the key that signed the audit log is missing"), "{refused}");
}

#[tokio::test]
async fn gateways_share_keys_and_hear_of_revocations() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let first = database.gateway("a");
    database.share_secrets(&first, "b");
    let second = database.gateway("b");
    let key = first.key("acme", &[]);
    let connection = second.connect(&key).await;
    until_status(&connection, 200).await;
    let revoked = revoke_active(&first);
    assert!(revoked.ends_with("; seen by 2 of 2 gateways\n"), "{revoked}");
    // Asked once: the command has said that both know.
    assert_eq!(get(&connection, "/v1/models").await.0, 401);
    assert_eq!(get(&first.connect(&key).await, "/v1/models").await.0, 401);

    // One that is stopped has not heard. It is named, with the time at which it stops.
    let key = first.key("acme", &[]);
    let connection = second.connect(&key).await;
    until_status(&connection, 200).await;
    support::signal(second.pid(), "STOP");
    let revoked = revoke_active(&first);
    support::signal(second.pid(), "CONT");
    assert!(revoked.contains("; seen by 1 of 2 gateways; not yet by "), "{revoked}");
    let seconds = revoked.split("which stops within ").nth(1).expect("a time");
    let seconds: u64 = seconds.split(' ').next().expect("a word").parse().expect("a number");
    assert!((80..=95).contains(&seconds), "{revoked}");
    until_status(&connection, 401).await;

    // A third one with another pepper would refuse every key.
    database.share_secrets(&first, "c");
    let (other, config) = (database.folder.path().join("c"), shown(&first.config()));
    let third = shown(&other);
    let words = ["up", "--config", &config, "--data", &third];
    fs::write(other.join("pepper"), [7; 32]).expect("writes");
    let refused = failing(&words);
    assert!(refused.contains("this is not the pepper of the keys on the server"), "{refused}");
    fs::remove_file(other.join("pepper")).expect("removes");
    let refused = failing(&words);
    assert!(refused.contains("or copy it from another gateway"), "{refused}");
    // The keys of a file would stop working without a word.
    fs::write(other.join("keys.db"), "").expect("writes");
    let refused = failing(&words);
    assert!(refused.contains("move them with `tollgate migrate --to postgres`"), "{refused}");
}

/// Revokes the only active key.
fn revoke_active(gateway: &Tollgate) -> String {
    let data = shown(gateway.data());
    let listed = told(gateway, &["keys", "list", "--json", "--data", &data]);
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let rows = listed["keys"].as_array().expect("keys");
    let active: Vec<&Value> = rows.iter().filter(|row| row["state"] == "active").collect();
    let [active] = active[..] else { panic!("{listed:#}") };
    told(gateway, &["keys", "revoke", active["key"].as_str().expect("an id"), "--data", &data])
}

/// Asks until the answer has the status, for at most five seconds.
async fn until_status(connection: &Connection, wanted: u16) {
    let begun = Instant::now();
    loop {
        let status = get(connection, "/v1/models").await.0;
        if status == wanted {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{status} and not {wanted}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Both gateways together admit the rate of the plan.
#[tokio::test]
async fn gateways_divide_rates() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let config = database
        .config_with("[plans.small]\nrequests_per_minute = 60\n[tenants.acme]\nplan = \"small\"\n");
    let first = database.gateway_with("a", &config);
    database.share_secrets(&first, "b");
    let mut second = database.gateway_with("b", &config);
    until_gateways(&first, 2).await;
    until_gateways(&second, 2).await;
    let key = first.key("acme", &[]);
    let begun = Instant::now();
    let admitted = tokio::join!(admitted(&first, &key), admitted(&second, &key));
    // A part of the rate comes back while the requests run.
    let refilled = begun.elapsed().as_secs() + 1;
    let all = admitted.0 + admitted.1;
    assert!(all <= 60 + refilled, "{admitted:?} in {refilled} s");
    assert!(admitted.0 >= 25 && admitted.1 >= 25, "{admitted:?}");
    assert_eq!(second.stop(), Some(0));
    until_gateways(&first, 1).await;
}

/// A cap that a hundred requests spend, ns.
const CAP: u64 = 60_000_000;

/// Both gateways together spend the cap of the plan, and not more, also when one of them is
/// killed on the way.
#[tokio::test(flavor = "multi_thread")]
async fn gateways_share_cap_over_kill() {
    let Some(server) = apart(TestServer::shared) else { return };
    support::stay_within_a_day().await;
    let database = Database::new(&server);
    let config = database.config_with(&support::capped("60ms"));
    let first = database.gateway_with("a", &config);
    database.share_secrets(&first, "b");
    let mut second = database.gateway_with("b", &config);
    until_gateways(&second, 2).await;
    let key = first.key("acme", &[]);
    // Some requests on each, then many at once on one that is killed among them.
    let largest = spend(&first, &key, 5).await.max(spend(&second, &key, 5).await);
    let mut cut = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let connection = second.connect(&key).await;
        cut.spawn(async move {
            // The gateway ends before some of the answers.
            let _ = connection.post(CHAT, support::story().to_string().into()).await;
        });
    }
    tokio::time::sleep(Duration::from_millis(3)).await;
    second.kill();
    cut.join_all().await;
    let second = second.restart();
    tokio::join!(spend_rest(&first, &key), spend_rest(&second, &key));
    let spent = until_spent(&first).await;
    assert!(spent <= CAP, "{spent} of {CAP}");
    assert!(spent + largest > CAP, "{spent} of {CAP}, and no request cost more than {largest}");
    // A start finds the cap spent.
    let mut second = second;
    assert_eq!(second.stop(), Some(0));
    let second = second.restart();
    let (status, refused) = post(&second.connect(&key).await, CHAT, &support::story()).await;
    assert_eq!((status, &refused["error"]["code"]), (429, &json!("insufficient_quota")));
    assert_eq!(until_spent(&first).await, spent);
    database.assert_sound();
}

const CHAT: &str = "/v1/chat/completions";

/// Sends requests and returns the largest cost of one, ns.
pub(crate) async fn spend(gateway: &Tollgate, key: &str, requests: usize) -> u64 {
    let connection = gateway.connect(key).await;
    let mut largest = 0;
    for _ in 0..requests {
        let response =
            connection.post(CHAT, support::story().to_string().into()).await.expect("answers");
        let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
        assert_eq!(support::read(response).await.0, 200);
        let usage = posted(&connection, &id).await;
        largest = largest.max(usage["reference_ns"].as_u64().expect("a figure"));
    }
    largest
}

/// Sends requests until the cap refuses them for the rest of the day.
pub(crate) async fn spend_rest(gateway: &Tollgate, key: &str) {
    let connection = gateway.connect(key).await;
    let begun = Instant::now();
    let mut moments = 0;
    loop {
        let waited = begun.elapsed() < Duration::from_secs(60);
        assert!(waited, "the cap was never spent; refused for a moment {moments} times");
        let (status, body) = post(&connection, CHAT, &support::story()).await;
        match (status, body["error"]["code"].as_str()) {
            (200, _) => {}
            (429, Some("insufficient_quota")) => break,
            // The other gateway has some of the cap, and gives back what it does not need. Who
            // comes back before `retry-after` says would get a penalty.
            (429, Some("rate_limit_exceeded")) => {
                moments += 1;
                tokio::time::sleep(Duration::from_millis(1_050)).await;
            }
            _ => panic!("{status} {body}"),
        }
    }
}

/// Waits until the bill stays the same, and returns it, ns.
pub(crate) async fn until_spent(gateway: &Tollgate) -> u64 {
    let mut before = None;
    loop {
        let data = gateway.data().display().to_string();
        let rows = told(gateway, &["usage", "--json", "--data", &data]);
        let rows: Value = serde_json::from_str(&rows).expect("JSON");
        let rows = rows["rows"].as_array().expect("a list").clone();
        let spent = rows.iter().map(|row| row["reference_ns"].as_u64().expect("a number")).sum();
        if before == Some(spent) {
            return spent;
        }
        before = Some(spent);
        tokio::time::sleep(Duration::from_millis(1_500)).await;
    }
}

/// A request that is sent to two gateways with one key runs once, also if it goes to both at the
/// same time.
#[tokio::test(flavor = "multi_thread")]
async fn gateways_share_idempotency_keys() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let first = database.gateway("a");
    database.share_secrets(&first, "b");
    let second = database.gateway("b");
    let key = first.key("acme", &[]);
    until_status(&second.connect(&key).await, 200).await;
    let (code, _) = keyed(&first, &key, "one").await;
    assert_eq!(code, "200");
    // The answer is in the first gateway alone. The second one knows of the charge once it is
    // in the ledger.
    let begun = Instant::now();
    loop {
        match keyed(&second, &key, "one").await.0.as_str() {
            "idempotency_answer_gone" => break,
            "idempotency_unsettled" if begun.elapsed() < Duration::from_secs(10) => {}
            other => panic!("{other}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut sent = tokio::task::JoinSet::new();
    for number in 0..24 {
        let gateway = if number % 2 == 0 { &first } else { &second };
        let connection = gateway.connect(&key).await;
        sent.spawn(async move { keyed_over(&connection, "two").await.0 });
    }
    let codes = sent.join_all().await;
    assert!(codes.iter().any(|code| code == "200"), "{codes:?}");
    let are_known = |code: &String| {
        ["200", "idempotency_unsettled", "idempotency_answer_gone"].contains(&code.as_str())
    };
    assert!(codes.iter().all(are_known), "{codes:?}");
    until_spent(&first).await;
    assert_eq!(usage(&first).0, 2, "each key was charged once");
}

/// Sends a request with an idempotency key. Returns the error's code, or `200`, and the id of the
/// request.
async fn keyed(gateway: &Tollgate, key: &str, idempotency: &str) -> (String, String) {
    keyed_over(&gateway.connect(key).await, idempotency).await
}

async fn keyed_over(connection: &Connection, idempotency: &str) -> (String, String) {
    let mut headers = http::HeaderMap::new();
    headers.insert("idempotency-key", idempotency.parse().expect("visible"));
    let sent = connection.post_with(CHAT, count(8).to_string().into(), headers).await;
    let response = sent.expect("answers");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    let (status, body) = support::read(response).await;
    let code = match status {
        200 => "200".to_owned(),
        _ => body["error"]["code"].as_str().expect("a code").to_owned(),
    };
    (code, id)
}

/// Waits until the gateway divides its rates by this number.
pub(crate) async fn until_gateways(gateway: &Tollgate, number: u32) {
    let begun = Instant::now();
    let wanted = format!("\ntollgate_gateways {number}\n");
    while !gateway.metrics().await.contains(&wanted) {
        assert!(begun.elapsed() < Duration::from_secs(5), "still not {number} gateways");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sends 50 requests one after the other and returns the number of those that were answered.
async fn admitted(gateway: &Tollgate, key: &str) -> u64 {
    let connection = gateway.connect(key).await;
    until_status(&connection, 200).await;
    let mut admitted = 0;
    for _ in 0..50 {
        match post(&connection, "/v1/chat/completions", &count(1)).await {
            (200, _) => admitted += 1,
            (429, _) => {}
            other => panic!("{other:?}"),
        }
    }
    admitted
}

#[test]
fn unusable_servers_stop_the_start() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let folder = database.folder.path();
    let start = |section: &str| -> String {
        let config = folder.join("tollgate.toml");
        fs::write(&config, format!("[cluster.postgres]\n{section}\n")).expect("writes");
        failing(&["up", "--config", &shown(&config), "--data", &shown(&folder.join("data"))])
    };
    let password = format!("password = \"{}\"", folder.join("password").display());
    fs::write(folder.join("wrong"), "wrong").expect("writes");
    let wrong = format!("password = \"{}\"", folder.join("wrong").display());
    let url = server.url(&database.name);
    for (section, said) in [
        (password.clone(), "cluster.postgres.url: is required"),
        (format!("url = \"{url}\"\npassword = \"{}/no\"", shown(folder)), "does not exist"),
        (format!("url = \"mysql://u@localhost/x\"\n{password}"), "not the URL of a PostgreSQL"),
        ("url = \"postgres://u:secret@localhost/x\"".to_owned(), "the URL has a password"),
        ("url = \"postgres://u@10.1.2.3/x\"".to_owned(), "10.1.2.3 is on another machine"),
        (format!("url = \"{url}\"\n{wrong}"), "password authentication failed"),
        (format!("url = \"{url}_no\"\n{password}"), "does not exist"),
    ] {
        let refused = start(&section);
        assert!(refused.contains(said), "{section}: {refused}");
        assert!(!refused.contains("secret@") && !refused.contains(PASSWORD), "{refused}");
        assert!(!refused.contains("panicked"), "{refused}");
    }
}

/// Runs `work` on a thread of its own: a connection blocks, which async code must not do.
pub(crate) fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().expect("no panic"))
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

mod long {
    use super::*;

    #[tokio::test]
    #[ignore = "takes two minutes"]
    async fn server_away_for_long_stops_requests() {
        let Some(server) = apart(TestServer::start) else { return };
        let database = Database::new(&server);
        let gateway = database.gateway("data");
        let key = gateway.key("acme", &[]);
        let connection = gateway.connect(&key).await;
        assert_eq!(post(&connection, CHAT, &count(8)).await.0, 200);
        server.kill();
        let begun = Instant::now();
        let refusal = loop {
            assert!(begun.elapsed() < Duration::from_secs(130), "requests are still answered");
            match post(&connection, CHAT, &count(8)).await {
                (200, _) => tokio::time::sleep(Duration::from_millis(200)).await,
                (503, body) => break body,
                other => panic!("{other:?}"),
            }
        };
        assert!(begun.elapsed() > Duration::from_secs(80), "{:?}", begun.elapsed());
        assert_eq!(refusal["error"]["code"], "ledger_unavailable", "{refusal}");
        let ready = gateway.connect_admin().await.get("/readyz").await.expect("answers");
        assert_eq!(ready.status(), 503);
        apart(|| server.resume());
        let begun = Instant::now();
        while post(&connection, CHAT, &count(8)).await.0 != 200 {
            assert!(begun.elapsed() < Duration::from_secs(30), "requests are still refused");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        drop(gateway);
        database.assert_sound();
    }
}
