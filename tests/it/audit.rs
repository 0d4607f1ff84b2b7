//! The audit log over real processes. Each action is in the log exactly once, even
//! after kills, and a changed copy is rejected with the number of its record (T53).

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tollgate_ledger::Ledger;
use tollgate_loadtest::client::{Protocol, Target};

use crate::support::{self, Tollgate, command, failing};

fn count(max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Reads the records of an export.
fn records(folder: &Path) -> Vec<Value> {
    let lines = fs::read_to_string(folder.join("records.jsonl")).expect("an export");
    let read = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["record"].clone();
    lines.lines().map(read).collect()
}

fn export(gateway: &Tollgate, folder: &Path) -> String {
    gateway.command(&["audit", "export", "--out", &folder.display().to_string()])
}

/// Returns the public part of a key.
pub(crate) fn id_of(key: &str) -> &str {
    key["tg-".len()..].split('.').next().expect("an id before the dot")
}

fn operations<'a>(records: &'a [Value], operation: &str) -> Vec<&'a Value> {
    records.iter().filter(|record| record["operation.type"] == operation).collect()
}

#[tokio::test]
#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
async fn audit_log_records_actors_and_shows_tampering() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let other = gateway.key("acme", &["--expires", "30d"]);
    gateway.command(&["keys", "rotate", "--quiet", id_of(&key)]);
    gateway.command(&["keys", "revoke", id_of(&other)]);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let mut requests = Vec::new();
    for _ in 0..3 {
        let body = count(8).to_string().into();
        let response = connection.post("/v1/chat/completions", body).await.expect("answers");
        requests.push(response.headers()["x-request-id"].to_str().expect("text").to_owned());
        assert_eq!(support::read(response).await.0, 200);
    }
    let public = gateway.command(&["audit", "key"]);
    let public = public.trim();
    assert_eq!(gateway.stop(), Some(0));

    // Every action is in the log once, and the end of the log is signed.
    let out = gateway.data().join("export");
    let said = export(&gateway, &out);
    assert!(!said.contains("not signed"), "{said}");
    let shown = out.display().to_string();
    let sound = command(&["audit", "verify", &shown, "--key", public]);
    assert!(sound.starts_with("sound: records 0 to "), "{sound}");
    let all = records(&out);
    for (operation, times) in [
        ("ledger.genesis", 1),
        ("config.loaded", 1),
        ("key.created", 3),
        ("key.rotated", 1),
        ("key.changed", 1), // the rotated key ends in an hour
        ("key.revoked", 1),
        ("inference", 3),
    ] {
        assert_eq!(operations(&all, operation).len(), times, "{operation}: {all:#?}");
    }
    let loaded = operations(&all, "config.loaded")[0];
    assert_eq!(loaded["detail"]["audit_key"], public);
    let file = gateway.data().with_file_name("tollgate.toml");
    let sum = std::process::Command::new("sha256sum").arg(&file).output().expect("sha256sum runs");
    let sum = String::from_utf8(sum.stdout).expect("UTF-8");
    assert_eq!(loaded["detail"]["config_sha256"].as_str(), sum.split(' ').next());
    let overrides = loaded["detail"]["overrides"].as_array().expect("a list");
    assert!(overrides.contains(&json!("--listen=127.0.0.1:0")), "{overrides:?}");
    let revoked = operations(&all, "key.revoked")[0];
    assert_eq!(revoked["user.id"], json!({ "tenant": "acme", "key": id_of(&other) }));
    assert_eq!(revoked["actor"], "admin key", "a command uses the running gateway");
    let text = fs::read_to_string(out.join("records.jsonl")).expect("an export");
    assert!(!text.contains(&key) && !text.contains("PRIVATE"), "no secret is in it");
    for done in operations(&all, "inference") {
        assert!(requests.contains(&done["request"].as_str().expect("an id").to_owned()), "{done}");
        assert_eq!(done["gpu.id"], "worker/0");
        assert_eq!(done["user.id"]["tenant"], "acme");
        assert!(done["resource.consumption"]["attributed_ns"].as_u64() > Some(0), "{done}");
    }

    // The public key is enough to check the proof of one request.
    let proof = gateway.command(&["audit", "prove", &requests[1]]);
    let file = gateway.data().join("proof.json");
    fs::write(&file, &proof).expect("writes");
    let file = file.display().to_string();
    let proved = command(&["audit", "verify", "--proof", &file, "--key", public]);
    assert!(proved.contains(&requests[1]), "{proved}");
    fs::write(&file, proof.replace("completion_tokens\\\":8", "completion_tokens\\\":9"))
        .expect("writes");
    let refused = failing(&["audit", "verify", "--proof", &file, "--key", public]);
    assert!(refused.contains("is not in the log"), "{refused}");

    // A cheaper bill in a copy is rejected, and the message names the record.
    let cheaper = operations(&all, "inference")[2];
    let seq = cheaper["seq"].as_u64().expect("a number");
    let line = text.lines().nth(seq as usize).expect("its line");
    let changed =
        text.replace(line, &line.replacen("\"attributed_ns\":", "\"attributed_ns\":0", 1));
    assert_ne!(changed, text);
    fs::write(out.join("records.jsonl"), changed).expect("writes");
    let refused = failing(&["audit", "verify", &shown, "--key", public]);
    assert!(refused.contains(&format!("record {seq}: ")), "{refused}");
    // An earlier checkpoint shows that a copy was cut.
    let kept = gateway.data().join("kept");
    fs::write(&kept, gateway.command(&["audit", "checkpoint"])).expect("writes");
    let cut: String = text.lines().take(seq as usize).map(|line| format!("{line}\n")).collect();
    fs::write(out.join("records.jsonl"), cut).expect("writes");
    let kept = kept.display().to_string();
    let refused = failing(&["audit", "verify", &shown, "--key", public, "--checkpoint", &kept]);
    assert!(refused.contains(&format!("record {seq}: it is missing")), "{refused}");
}

/// Gets a path of the admin listener with the admin key.
async fn watched(gateway: &Tollgate, path: &str) -> String {
    let key = fs::read_to_string(gateway.data().join("admin.key")).expect("an admin key");
    let target = Target::new(&gateway.admin, &gateway.ca(), key.trim()).expect("a target");
    let connection = target.connect(Protocol::Either).await.expect("connects");
    let response = connection.get(path).await.expect("answers");
    assert_eq!(response.status(), 200, "{path}");
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(body.to_vec()).expect("UTF-8")
}

/// Checks C01 for the log: after a kill the chain is whole, goes on from its last
/// record, and still holds the signed records.
#[tokio::test]
async fn audit_log_after_a_kill_is_whole() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let public = gateway.command(&["audit", "key"]);
    let public = public.trim().to_owned();
    let folder = tempfile::tempdir().expect("a folder");
    let mut kept = Vec::new();
    for round in 0..3 {
        let target = gateway.target(&key);
        let answered = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&answered);
        let mut load = tokio::task::JoinSet::new();
        load.spawn(async move {
            let connection = target.connect(Protocol::Either).await.expect("connects");
            loop {
                let body = count(6).to_string().into();
                // The kill breaks one of these requests and so ends the loop.
                let Ok(response) = connection.post("/v1/chat/completions", body).await else {
                    return;
                };
                if response.into_body().collect().await.is_ok() {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        // Keys are made and exports are taken while the gateway serves.
        let another = gateway.key("acme", &[]);
        gateway.command(&["keys", "revoke", id_of(&another)]);
        let started = Instant::now();
        while answered.load(Ordering::Relaxed) < 2 + round {
            assert!(started.elapsed() < Duration::from_secs(60), "nothing is answered");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let beside = folder.path().join(format!("beside-{round}"));
        export(&gateway, &beside);
        command(&["audit", "verify", &beside.display().to_string(), "--key", &public]);
        let checkpoint = folder.path().join(format!("kept-{round}"));
        // The listener's checkpoint comes first, so it has at most as many records as
        // the command's.
        let note = watched(&gateway, "/audit/checkpoint").await;
        let size = |note: &str| note.lines().nth(1).and_then(|size| size.parse::<u64>().ok());
        let said = gateway.command(&["audit", "checkpoint"]);
        assert!(size(&note) > Some(0) && size(&note) <= size(&said), "{note}\n{said}");
        assert_eq!(watched(&gateway, "/audit/key").await.trim(), public);
        fs::write(&checkpoint, note).expect("writes");
        kept.push(checkpoint.display().to_string());
        gateway.kill();
        load.shutdown().await;
        gateway = gateway.restart();
    }
    assert_eq!(gateway.stop(), Some(0));
    let whole = folder.path().join("whole");
    export(&gateway, &whole);
    let shown = whole.display().to_string();
    let mut words = vec!["audit", "verify", &shown, "--key", &public];
    for checkpoint in &kept {
        words.extend(["--checkpoint", checkpoint]);
    }
    command(&words);
    let all = records(&whole);
    assert_eq!(operations(&all, "config.loaded").len(), 4, "one for each start");
    assert_eq!(operations(&all, "key.created").len(), 4, "each once, whatever was killed");
    assert_eq!(operations(&all, "key.revoked").len(), 3);
    assert!(operations(&all, "inference").len() >= 2 + 3 + 4, "what was answered is billed");
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    let findings = reader.check();
    assert!(findings.is_empty(), "{findings:#?}");
}
