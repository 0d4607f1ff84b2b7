//! The data folder: closed to other users, and damaged files in it.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use http_body_util::BodyExt as _;
use serde_json::json;

use crate::kills::checker::journals::crc32;
use crate::support::{self, Tollgate, binary, post, posted};

const CONFIG: &str = r#"
[worker]
engine = "synthetic"

[worker.synthetic]
speed = 50.0

[plans.open]

[tenants.acme]
plan = "open"
"#;

/// Returns everything below `folder`.
fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("lists") {
        let path = entry.expect("an entry").path();
        if fs::symlink_metadata(&path).expect("is there").is_dir() {
            found.extend(below(&path));
        }
        found.push(path);
    }
    found
}

/// Returns the files below `folder` that other users may read, write or enter.
fn open_to_others(folder: &Path) -> Vec<PathBuf> {
    let mode = |path: &PathBuf| fs::symlink_metadata(path).expect("is there").mode();
    below(folder).into_iter().filter(|path| mode(path) & 0o077 != 0).collect()
}

/// Sends a request and waits until the ledger has it.
async fn bill(gateway: &Tollgate, key: &str) {
    let connection = gateway.connect(key).await;
    let body = json!({
        "model": "tollgate-demo", "max_tokens": 5,
        "messages": [{ "role": "user", "content": "Hello" }],
    });
    let body = body.to_string().into();
    let response = connection.post("/v1/chat/completions", body).await.expect("answers");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    assert_eq!(support::read(response).await.0, 200);
    posted(&connection, &id).await;
}

#[tokio::test]
async fn data_folder_is_closed_to_other_users() {
    for umask in ["000", "022"] {
        // A folder that an admin made before the first start, with a file that an
        // earlier version left open.
        let folder = tempfile::tempdir().expect("a folder");
        let data = folder.path().join("data");
        fs::create_dir_all(data.join("workers/0")).expect("a folder");
        fs::write(data.join("workers/0/old"), "").expect("writes");
        for path in [&data, &data.join("workers"), &data.join("workers/0/old")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("sets");
        }
        assert!(!open_to_others(&data).is_empty(), "the control");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("umask {umask}; exec \"$0\" \"$@\""), binary()]);
        let mut gateway = Tollgate::start_on(&data, CONFIG, command);
        bill(&gateway, &gateway.key("acme", &[])).await;
        gateway.command(&["ledger", "backup", &data.join("backup.db").display().to_string()]);
        // The logs of the databases are there while the gateway runs.
        for name in ["ledger.db", "keys.db", "idempotency.db"] {
            for end in ["", "-wal", "-shm"] {
                assert!(data.join(format!("{name}{end}")).exists(), "{name}{end}");
            }
        }
        assert_eq!(open_to_others(&data), Vec::<PathBuf>::new(), "umask {umask}, running");
        assert_eq!(gateway.stop(), Some(0));
        let out = data.join("export").display().to_string();
        gateway.command(&["audit", "export", "--out", &out]);
        assert_eq!(open_to_others(&data), Vec::<PathBuf>::new(), "umask {umask}, stopped");
        assert_eq!(fs::metadata(&data).expect("is there").mode() & 0o777, 0o700);
    }
}

/// A demo key that works nowhere is not left behind, and a further demo start makes a new one.
#[tokio::test]
async fn demo_key_ends_once_tenants_are_configured() {
    let gateway = Tollgate::demo();
    let first = gateway.demo_key();
    let (data, _folder) = gateway.into_data();
    let demo = "[plans.open]\n[tenants.demo]\nplan = \"open\"\n";
    let gateway = Tollgate::start_on(&data, demo, Command::new(binary()));
    let connection = gateway.connect(&first).await;
    assert_eq!(support::get(&connection, "/v1/models").await.0, 200, "a tenant demo keeps it");
    drop(gateway.into_data());

    let gateway = Tollgate::start_on(&data, CONFIG, Command::new(binary()));
    assert!(!data.join("demo.key").exists());
    let connection = gateway.connect(&first).await;
    assert_eq!(support::get(&connection, "/v1/models").await.0, 401);
    let listed = gateway.command(&["keys", "list", "--tenant", "demo", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    assert!(listed["keys"][0]["revoked_ns"].is_u64(), "{listed}");
    drop(gateway.into_data());

    let gateway = Tollgate::start_on(&data, "", Command::new(binary()));
    assert_ne!(gateway.demo_key(), first);
    let connection = gateway.connect(&gateway.demo_key()).await;
    assert_eq!(support::get(&connection, "/v1/models").await.0, 200);
}

/// A posted journal with flipped bits is served at the first start. The log names the
/// file, and the ledger keeps every figure.
#[tokio::test]
async fn damaged_posted_journal_is_served() {
    let mut gateway = Tollgate::with_config(CONFIG);
    let key = gateway.key("acme", &[]);
    for _ in 0..6 {
        bill(&gateway, &key).await;
    }
    gateway.kill();
    let usage = gateway.command(&["usage", "--json"]);
    let journal = |data: &Path| -> PathBuf {
        let files = below(&data.join("workers"));
        let mut files =
            files.into_iter().filter(|path| path.extension().is_some_and(|it| it == "journal"));
        files.next().expect("the worker was killed")
    };
    let length = fs::metadata(journal(gateway.data())).expect("is there").len() as usize;
    assert!(length > 600, "six requests in {length} bytes");
    // The first bytes, the header, and places within the blocks. One bit can be
    // corrected, two in a frame cannot.
    for (byte, bits) in [
        (0, 0x01),
        (20, 0x01),
        (length / 3, 0x01),
        (length / 3, 0x11),
        (length / 2, 0x11),
        (length - 1, 0x11),
    ] {
        let parent = tempfile::tempdir().expect("a folder");
        let data = parent.path().join("data");
        copy(gateway.data(), &data);
        let path = journal(&data);
        let mut bytes = fs::read(&path).expect("reads");
        bytes[byte] ^= bits;
        fs::write(&path, bytes).expect("writes");
        let log = parent.path().join("log");
        let mut command = Command::new(binary());
        command.env("TOLLGATE_LOG", "warn").stderr(fs::File::create(&log).expect("a log"));
        // It gets ready: a worker with an invalid report would end the start.
        let mut again = Tollgate::start_on(&data, CONFIG, command);
        assert_eq!(again.command(&["usage", "--json"]), usage, "byte {byte}");
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let said = fs::read_to_string(&log).expect("reads");
        let named = said.lines().any(|line| line.contains(&name) && line.contains("journal"));
        assert!(named && !said.contains("invalid report"), "byte {byte}: {said}");
        bill(&again, &key).await;
        assert_eq!(again.stop(), Some(0));
        again.books();
    }
}

/// The start of a frame's payload that ends an attempt of `acme`: the kind, the length of
/// the name, the name.
const END_OF_ACME: &[u8] = b"\x05\x04acme";

/// Flips one bit in the tenant's name of the last end of an attempt in a journal, as faulty
/// memory would before the checksum is computed.
fn flip_tenant_of_last_end(journal: &Path) {
    const MAGIC: usize = 8;
    let mut bytes = fs::read(journal).expect("reads");
    let (mut at, mut last) = (MAGIC, None);
    while at + 8 <= bytes.len() {
        let length: [u8; 4] = bytes[at..at + 4].try_into().expect("four");
        let end = at + 8 + u32::from_le_bytes(length) as usize;
        if bytes[at + 8..end].starts_with(END_OF_ACME) {
            last = Some((at, length, end));
        }
        at = end;
    }
    let (at, length, end) = last.expect("a request has ended");
    bytes[at + 8 + 3] ^= 1;
    let sum = crc32(&[&length, &bytes[at + 8..end]]).to_le_bytes();
    bytes[at + 4..at + 8].copy_from_slice(&sum);
    fs::write(journal, bytes).expect("writes");
}

/// Answers a request while the gateway is stopped, so that only the worker's journal has
/// it, and kills the gateway. Returns the data folder and the journal.
async fn journal_ahead_of_ledger(gateway: &mut Tollgate) -> PathBuf {
    let key = gateway.key("acme", &[]);
    bill(gateway, &key).await;
    let body = json!({
        "model": "tollgate-demo", "max_tokens": 200, "stream": true,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    });
    let connection = gateway.connect(&key).await;
    let mut response =
        connection.post("/v1/chat/completions", body.to_string().into()).await.expect("answers");
    // The first frame shows that the worker runs the request.
    response.frame().await.expect("a frame").expect("a frame");
    let workers = gateway.workers();
    support::signal(gateway.pid(), "STOP");
    let journals = |data: &Path| -> Vec<PathBuf> {
        let files = below(&data.join("workers")).into_iter();
        files.filter(|path| path.extension().is_some_and(|it| it == "journal")).collect()
    };
    let [journal] = &journals(gateway.data())[..] else { panic!("one worker with one file") };
    // The worker ends the request without the gateway, and writes the end within a second.
    let has_second_end = || {
        let bytes = fs::read(journal).expect("reads");
        bytes.windows(END_OF_ACME.len()).filter(|part| *part == END_OF_ACME).count() >= 2
    };
    while !has_second_end() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    gateway.kill();
    while workers.iter().any(|pid| support::runs(*pid)) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    journal.clone()
}

/// Starts the gateway again on its data. Returns its log, its count of violations, and the
/// output of `ledger check` after a further request.
async fn served_again(config: &str, data: &Path, log: &Path) -> (String, f64, String) {
    let mut command = Command::new(binary());
    command.env("TOLLGATE_LOG", "warn").stderr(fs::File::create(log).expect("a log"));
    let mut gateway = Tollgate::start_on(data, config, command);
    gateway.until_ready(1, Duration::from_secs(60)).await;
    bill(&gateway, &gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let metrics = support::rest(admin.get("/metrics").await.expect("metrics")).await;
    let count = metrics
        .lines()
        .find_map(|line| line.strip_prefix("tollgate_worker_protocol_violations_total "))
        .unwrap_or_else(|| panic!("{metrics}"));
    let count = count.parse().expect("a figure");
    assert_eq!(gateway.stop(), Some(0));
    let checked = gateway.command(&["ledger", "check"]);
    (fs::read_to_string(log).expect("reads"), count, checked)
}

/// Checks T66 for a record that has a valid checksum and cannot be true. The block is posted
/// without the record, the gateway serves, and the log, the metric and the check of the
/// ledger show the record. The control is the same journal without the flipped bit.
#[tokio::test]
async fn partly_posted_block_is_shown() {
    // The request takes six seconds, so the gateway is stopped long before its end.
    let config = CONFIG.replace("speed = 50.0", "speed = 1.0");
    let mut gateway = Tollgate::with_config(&config);
    let journal = journal_ahead_of_ledger(&mut gateway).await;
    let name = journal.strip_prefix(gateway.data()).expect("is below");
    for is_flipped in [false, true] {
        let parent = tempfile::tempdir().expect("a folder");
        let data = parent.path().join("data");
        copy(gateway.data(), &data);
        if is_flipped {
            flip_tenant_of_last_end(&data.join(name));
        }
        let log = parent.path().join("log");
        let (log, violations, checked) = served_again(&config, &data, &log).await;
        let said = "worker journalled an invalid record; it is not billed";
        assert_eq!(log.contains(said), is_flipped, "{log}");
        assert_eq!(violations > 0.0, is_flipped, "{violations}: {log}");
        let remark = "was posted in part: a tenant that has no such key";
        assert_eq!(checked.contains(remark), is_flipped, "{checked}");
        assert!(checked.contains("sound: "), "{checked}");
    }
}

/// Sends requests until the daily cap refuses one. Returns the number of answers.
async fn spend(gateway: &Tollgate, key: &str) -> usize {
    let connection = gateway.connect(key).await;
    let body = support::story();
    for answers in 0..200 {
        let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
        if status == 429 && reply["error"]["code"] == "insufficient_quota" {
            return answers;
        }
        assert_eq!(status, 200, "{reply}");
    }
    panic!("the cap was never reached");
}

/// Returns a stopped gateway with a spent cap and no journals, the key of its tenant,
/// and a copy of its data from before the spending.
async fn spent_gateway() -> (Tollgate, String, PathBuf) {
    support::stay_within_a_day().await;
    let mut gateway = Tollgate::with_config(&support::capped("20ms"));
    let key = gateway.key("acme", &[]);
    assert_eq!(gateway.stop(), Some(0));
    let older = gateway.data().with_file_name("older");
    copy(gateway.data(), &older);
    let mut gateway = gateway.restart();
    // The copy lacks this key.
    gateway.key("acme", &[]);
    assert!(spend(&gateway, &key).await > 0);
    assert_eq!(gateway.stop(), Some(0));
    // Journals would bring the usage back. They are deleted once they are posted.
    fs::remove_dir_all(gateway.data().join("workers")).expect("removes");
    (gateway, key, older)
}

/// A database that is missing, empty or old stops the start, so a spent cap is not
/// spent again.
#[tokio::test]
async fn lost_databases_are_refused_by_name() {
    let (gateway, key, older) = spent_gateway().await;
    let config = gateway.config().display().to_string();
    for (file, how) in [
        ("ledger.db", "is missing"),
        ("ledger.db", "is empty"),
        ("ledger.db", "is another or an older ledger"),
        ("keys.db", "is missing"),
        ("keys.db", "is empty"),
        ("keys.db", "is older"),
        ("idempotency.db", "is missing"),
        ("idempotency.db", "is empty"),
        ("idempotency.db", "is another or an older database"),
    ] {
        let parent = tempfile::tempdir().expect("a folder");
        let data = parent.path().join("data");
        copy(gateway.data(), &data);
        for path in below(&data) {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            match how {
                _ if !name.starts_with(file) || path.parent() != Some(&data) => {}
                "is empty" => fs::write(&path, "").expect("empties"),
                _ => fs::remove_file(&path).expect("removes"),
            }
        }
        if !["is missing", "is empty"].contains(&how) {
            fs::copy(older.join(file), data.join(file)).expect("copies");
        }
        let shown = data.display().to_string();
        let up = ["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
        let refused =
            support::failing(&[&up[..], &["--data", &shown, "--config", &config]].concat());
        assert!(refused.contains(&format!("has lost data: {file} {how}")), "{refused}");
        assert!(refused.contains("--accept-loss"), "{refused}");
        // Other commands make no new file, either.
        if file == "keys.db" {
            let words =
                ["keys", "create", "--tenant", "acme", "--data", &shown, "--config", &config];
            assert!(support::failing(&words).contains(how), "{file} {how}");
        }
        if file == "ledger.db" {
            assert!(support::failing(&["usage", "--data", &shown]).contains(how), "{file} {how}");
        }
        assert_eq!(data.join(file).exists(), how != "is missing");
    }

    // The untouched folder still starts, and its cap is spent.
    let mut gateway = gateway.restart();
    assert_eq!(spend(&gateway, &key).await, 0);
    assert_eq!(gateway.stop(), Some(0));
}

/// `--accept-loss` starts without the lost ledger. The audit log has a record, and the
/// next start needs no flag.
#[tokio::test]
async fn accepted_loss_has_a_record() {
    let (gateway, key, _) = spent_gateway().await;
    let parent = tempfile::tempdir().expect("a folder");
    let data = parent.path().join("data");
    copy(gateway.data(), &data);
    for name in ["ledger.db", "ledger.db-wal", "ledger.db-shm"] {
        let _ = fs::remove_file(data.join(name));
    }
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" --accept-loss", binary()]);
    let mut accepted = Tollgate::start_on(&data, &support::capped("20ms"), command);
    assert!(spend(&accepted, &key).await > 0, "the control: without the ledger the cap is new");
    assert_eq!(accepted.stop(), Some(0));
    let out = parent.path().join("export");
    accepted.command(&["audit", "export", "--out", &out.display().to_string()]);
    let records = fs::read_to_string(out.join("records.jsonl")).expect("reads");
    let record = records.lines().find(|line| line.contains("data.loss_accepted"));
    let record = record.expect("the loss has a record");
    assert!(record.contains("uid ") && record.contains("ledger.db"), "{record}");
    let mut again = accepted.restart();
    assert_eq!(spend(&again, &key).await, 0);
    assert_eq!(again.stop(), Some(0));
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(copied.expect("cp runs").success());
}
