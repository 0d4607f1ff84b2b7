//! Attacks end to end, with the real engine and the shipped model: honest tenants and
//! attackers share one gateway. The bounds here hold on any busy machine: answered
//! requests, order of service, closed connections, returned resources. The scenarios of
//! `cargo xtask test --long` compare latencies with a baseline.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::drill::{self, Live, Stage, held_by, play};
use tollgate_loadtest::scenario::Scenario;
use tollgate_loadtest::verdict::{DrillReport, Verdict};

use crate::support::{self, Tollgate};

mod resources;

/// A lock that lets one attack run at a time, because two attacks would disturb each
/// other's figures.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The start of every short drill: two honest tenants with eight requests a second
/// together.
const HONEST: &str = r#"
about = "A short drill."
[phases]
alone = "2s"
attack = "5s"
after = "2s"
[capacity]
tenant = "surveyor"
plan = "team"
seconds = "1s"
[[honest]]
tenants = ["acme", "globex"]
plan = "team"
rate = 4.0
max_tokens = 16
"#;

/// The part of a scenario with deadlines that are short enough for a drill.
const GATEWAY: &str = r#"
[gateway]
config = """
[gateway.timeouts]
handshake = "1s"
first_byte = "1s"
headers = "1s"
body_progress = "1s"
write_progress = "2s"
[plans.team]
concurrent = 16
queued = 64
[plans.trial]
concurrent = 8
queued = 16
[plans.narrow]
concurrent = 1
queued = 16
[plans.small]
requests_per_minute = { limit = 300, burst = 5 }
concurrent = 64
queued = 64
[pools.trial]
plan = "trial"
"""
"#;

/// The bound that every honest request is answered.
const SERVED: &str = "[hold]\nsuccess = 1.0\nmemory_growth = \"64MiB\"\n";

/// Plays a scenario on a gateway of its own and asserts that no bound broke.
async fn drill(attackers: &str, hold: &str) -> DrillReport {
    let report = played(&format!("{HONEST}{attackers}{hold}{GATEWAY}")).await;
    assert_unbroken(&report);
    report
}

/// Asserts that no bound broke. A figure may be unclear on a busy machine, because the
/// load itself came late.
fn assert_unbroken(report: &DrillReport) {
    assert_ne!(report.verdict, Verdict::Broken, "{report}");
}

async fn played(text: &str) -> DrillReport {
    let _alone = ONE_AT_A_TIME.lock().await;
    let scenario = Scenario::parse("drill", text).unwrap_or_else(|error| panic!("{error}"));
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let mut gateway = Tollgate::logging(&scenario.own_config(), "info", &log);
    let mut keys = BTreeMap::new();
    for wanted in scenario.tenants() {
        let own: Vec<Target> =
            (0..wanted.keys).map(|_| gateway.target(&gateway.key(wanted.name, &[]))).collect();
        keys.insert(wanted.name.to_owned(), own);
    }
    let workers = gateway.workers().into_iter().map(|pid| ("worker".to_owned(), pid));
    let stage = Stage {
        keys,
        admin: Some(Target::new(&gateway.admin, &gateway.ca(), "none").expect("a target")),
        processes: workers.chain([(drill::GATEWAY.to_owned(), gateway.pid())]).collect(),
        log: Some(log),
        allowed_host: None,
    };
    let drill = play(&scenario, &stage, Arc::new(Live::default()), CancellationToken::new()).await;
    let report = DrillReport::new(&scenario, &drill.unwrap_or_else(|error| panic!("{error}")));
    assert_eq!(gateway.stop(), Some(0), "{report}");
    report
}

/// Checks T01: a tenant with the same plan sends twenty times its share.
#[tokio::test]
async fn flood_waits_behind_honest_tenants() {
    let attackers = r#"
[[attackers]]
kind = "flood"
tenants = ["mallory"]
plan = "team"
times_share = 20.0
at_most = 60.0
max_tokens = 200
prompts = ["Count from 1 to 400."]
"#;
    drill(attackers, SERVED).await;
}

/// Checks T30: prompts fill the model's context.
#[tokio::test]
async fn costly_prompts_wait_behind_the_honest() {
    let attackers = r#"
[[attackers]]
kind = "costly_prompts"
tenants = ["mallory"]
plan = "team"
times_share = 20.0
at_most = 60.0
prompt_words = 450
max_tokens = 1
"#;
    drill(attackers, SERVED).await;
}

/// Checks T31: requests reserve the longest answer and need a short one.
#[tokio::test]
async fn hogs_take_no_more_than_they_use() {
    let attackers = r#"
[[attackers]]
kind = "hogs"
tenants = ["mallory"]
plan = "team"
times_share = 20.0
at_most = 60.0
max_tokens = 960
"#;
    drill(attackers, SERVED).await;
}

/// Checks T32: answers are as long as the model allows.
#[tokio::test]
async fn endless_outputs_wait_behind_the_honest() {
    let attackers = r#"
[[attackers]]
kind = "endless_outputs"
tenants = ["mallory"]
plan = "team"
times_share = 20.0
at_most = 40.0
max_tokens = 900
"#;
    drill(attackers, SERVED).await;
}

/// Checks T02 and T24: trial tenants of one pool, and one tenant with many keys, send
/// from many addresses.
#[tokio::test]
async fn sybils_get_one_share() {
    let attackers = r#"
[[attackers]]
kind = "sybils"
tenants = ["trial-{1..4}"]
pool = "trial"
times_share = 10.0
at_most = 30.0
sources = 50
max_tokens = 200
prompts = ["Count from 1 to 400."]
[[attackers]]
kind = "sybils"
tenants = ["mallory"]
plan = "team"
keys = 6
times_share = 10.0
at_most = 30.0
sources = 50
max_tokens = 200
prompts = ["Count from 1 to 400."]
"#;
    drill(attackers, SERVED).await;
}

/// Checks T42: clients that disconnect early harm no other tenant.
#[tokio::test]
async fn early_disconnects_harm_no_other_tenant() {
    let attackers = r#"
[[attackers]]
kind = "early_leavers"
tenants = ["mallory"]
plan = "team"
rate = 20.0
leave_within = "200ms"
max_tokens = 900
prompts = ["Count from 1 to 400."]
"#;
    let report = drill(attackers, SERVED).await;
    assert!(report.attackers[0].outcomes["left early"] > 10, "{report}");
}

/// Checks T03, T04 and T05 beside honest tenants: slow and resetting connections are
/// closed within their deadlines and return their descriptors.
#[tokio::test]
async fn slow_and_resetting_connections_are_ended() {
    let attackers = r#"
[[attackers]]
kind = "slowloris"
slow = "silent"
tenants = ["silent"]
plan = "team"
connections = 8
closed_within = "3s"
[[attackers]]
kind = "slowloris"
slow = "headers"
tenants = ["headers"]
plan = "team"
connections = 8
closed_within = "3s"
[[attackers]]
kind = "slowloris"
slow = "body"
tenants = ["body"]
plan = "team"
connections = 8
closed_within = "4s"
[[attackers]]
kind = "slow_readers"
tenants = ["sleeper"]
plan = "team"
connections = 8
closed_within = "4s"
[[attackers]]
kind = "rapid_reset"
tenants = ["resetter"]
plan = "team"
connections = 2
closed_within = "3s"
"#;
    let hold = format!("{SERVED}descriptors_growth = 8\n");
    drill(attackers, &hold).await;
}

/// Checks C17: under ten times its capacity the gateway still works at its capacity,
/// and honest requests are answered during and after the load.
#[tokio::test]
async fn overload_keeps_honest_tenants_served() {
    let attackers = r#"
[[attackers]]
kind = "flood"
tenants = ["crowd-{1..4}"]
plan = "narrow"
times_capacity = 10.0
at_most = 80.0
max_tokens = 400
prompts = ["Count from 1 to 400."]
"#;
    let report = drill(attackers, SERVED).await;
    // Few long answers at a time, so that a slow machine ends some of them in the drill.
    let outcomes = &report.attackers[0].outcomes;
    assert!(outcomes.get("answered").is_some_and(|count| *count > 0), "{report}");
}

/// Checks C18: a tenant that sends every request five times again gets no more answers.
#[tokio::test]
async fn retry_storm_gains_nothing() {
    let attackers = r#"
[[attackers]]
kind = "retry_storm"
tenants = ["mallory"]
plan = "small"
rate = 15.0
retries = 5
max_tokens = 4
"#;
    let hold = format!("{SERVED}accepted = 1.1\n");
    let report = drill(attackers, &hold).await;
    let outcomes = &report.attackers[0].outcomes;
    // The plan allows 300 a minute with a burst of 5; the attack lasts seven seconds.
    let allowed = 5 + 5 * 7 + 1;
    assert!(outcomes["answered"] <= allowed, "{report}");
    assert!(outcomes["429 rate_limit_exceeded"] > 2 * outcomes["answered"], "{report}");
}

/// Checks C21: all attacks run at once for a minute; memory and descriptors return to
/// their level.
#[tokio::test]
async fn gateway_after_a_minute_of_attacks_is_unchanged() {
    soak("50s").await;
}

async fn soak(attack: &str) {
    let attackers = r#"
[[attackers]]
kind = "flood"
tenants = ["flooder"]
plan = "team"
rate = 15.0
max_tokens = 100
prompts = ["Count from 1 to 400."]
[[attackers]]
kind = "retry_storm"
tenants = ["stubborn"]
plan = "small"
rate = 6.0
max_tokens = 4
[[attackers]]
kind = "early_leavers"
tenants = ["leaver"]
plan = "team"
rate = 4.0
leave_within = "200ms"
max_tokens = 400
prompts = ["Count from 1 to 400."]
[[attackers]]
kind = "slowloris"
slow = "headers"
tenants = ["loris"]
plan = "team"
connections = 8
closed_within = "4s"
[[attackers]]
kind = "slow_readers"
tenants = ["sleeper"]
plan = "team"
connections = 4
closed_within = "6s"
[[attackers]]
kind = "rapid_reset"
tenants = ["resetter"]
plan = "team"
connections = 1
closed_within = "4s"
"#;
    let hold = "[hold]\nsuccess = 1.0\nmemory_growth = \"64MiB\"\ndescriptors_growth = 8\n";
    let text = format!("{HONEST}{attackers}{hold}{GATEWAY}")
        .replace("attack = \"5s\"", &format!("attack = {attack:?}"))
        .replace("after = \"2s\"", "after = \"6s\"");
    let report = played(&text).await;
    assert_unbroken(&report);
}

/// Checks the exit codes of the command: 0 and a page if every bound held, 1 if a bound
/// broke, 2 if the scenario cannot be played.
#[tokio::test]
async fn loadtest_command_reports_its_verdict() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let folder = tempfile::tempdir().expect("a folder");
    let (scenario, page) = (folder.path().join("small.toml"), folder.path().join("small.html"));
    let attackers = r#"
[[attackers]]
kind = "flood"
tenants = ["mallory"]
plan = "team"
times_share = 1.0
at_most = 10.0
max_tokens = 4
"#;
    let run = |hold: &str| {
        let text = format!("{HONEST}{attackers}{hold}{GATEWAY}").replace("5s", "1s");
        std::fs::write(&scenario, text).expect("writes");
        let mut command = std::process::Command::new(support::binary());
        command.args(["loadtest", "--scenario"]).arg(&scenario).arg("--report").arg(&page);
        command.output().expect("the binary starts")
    };
    let held = run("[hold]\nsuccess = 1.0\n");
    let said = String::from_utf8_lossy(&held.stdout);
    let error = String::from_utf8_lossy(&held.stderr);
    assert_eq!(held.status.code(), Some(0), "{said}\n{error}");
    assert!(said.contains("everything held"), "{said}");
    let html = std::fs::read_to_string(&page).expect("a page");
    assert!(html.contains("<svg") && html.contains("Everything held"), "{html}");
    for elsewhere in ["<script", "http://", "https://", "url("] {
        assert!(!html.contains(elsewhere), "{elsewhere} in {html}");
    }
    let json = std::fs::read_to_string(page.with_extension("json")).expect("JSON beside it");
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["verdict"], "holds", "{json:#}");
    // No gateway answers a thousand times its capacity.
    let broken = run("[hold]\ngoodput = 1000.0\n");
    assert_eq!(broken.status.code(), Some(1), "{}", String::from_utf8_lossy(&broken.stdout));
    let unplayable = run("[hold]\nsucces = 1.0\n");
    let error = String::from_utf8_lossy(&unplayable.stderr);
    assert_eq!(unplayable.status.code(), Some(2), "{error}");
    assert!(error.contains("succes"), "{error}");
}

const FULL: &str = r#"
[worker]
queue_capacity = 4
max_sequences = 4

[plans.open]
concurrent = 2000
queued = 2000

[tenants.acme]
plan = "open"
"#;

/// Checks that a full worker queue, a full queue of prompts to tokenize and a slow
/// reader each cause a clear refusal or a closed connection, that other requests are
/// answered, and that no state remains.
#[tokio::test]
async fn full_queues_refuse_clearly_and_keep_nothing() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let gateway = Tollgate::with_config(FULL);
    let key = gateway.key("acme", &[]);
    let target = gateway.target(&key);
    let before = held_by(gateway.pid()).expect("it runs").1;
    // More long prompts at once than may wait for tokenization.
    let long = "word ".repeat(450);
    let answers = at_once(&target, 5, 80, &ask(&long, 1)).await;
    assert_clear_refusals(&answers, 400);
    // More long answers than the worker queues.
    let answers = at_once(&target, 1, 60, &ask("Count from 1 to 400.", 400)).await;
    let refused = assert_clear_refusals(&answers, 60);
    assert!(refused > 0, "a queue of four took sixty");
    // A single request is answered as before.
    let answers = at_once(&target, 1, 1, &ask("Say hello.", 8)).await;
    assert_eq!(answers[0].0, 200, "{answers:?}");
    let started = Instant::now();
    loop {
        let (memory, now) = held_by(gateway.pid()).expect("it runs");
        if now <= before + 4 {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(15), "{before}, then {now}; {memory}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let admin = Target::new(&gateway.admin, &gateway.ca(), &admin_key(&gateway)).expect("a target");
    let connection = admin.connect(Protocol::Either).await.expect("connects");
    loop {
        let (status, workers) = support::get(&connection, "/v1/status").await;
        assert_eq!(status, 200, "{workers}");
        let all = workers["workers"].as_array().expect("workers");
        if all.iter().all(|worker| worker["queued"] == 0 && worker["running"] == 0) {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{workers}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn ask(content: &str, max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": content }],
    })
}

fn admin_key(gateway: &Tollgate) -> String {
    std::fs::read_to_string(gateway.data().join("admin.key")).expect("made at the start")
}

/// Sends `count` requests at once on each of `connections` and returns the status and
/// body of each answer.
async fn at_once(
    target: &Target,
    connections: usize,
    count: usize,
    body: &Value,
) -> Vec<(u16, Value)> {
    let mut sent = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let connection = target.connect(Protocol::Http2).await.expect("connects");
        for _ in 0..count {
            let (connection, body) = (connection.clone(), body.to_string());
            sent.spawn(async move {
                let response = connection.post("/v1/chat/completions", body.into()).await;
                support::read(response.expect("answers")).await
            });
        }
    }
    sent.join_all().await
}

/// Asserts that every reply is an answer or a 503 with a time to retry, and returns the
/// number of 503 replies.
fn assert_clear_refusals(answers: &[(u16, Value)], asked: usize) -> usize {
    assert_eq!(answers.len(), asked);
    let refused = answers.iter().filter(|(status, _)| *status != 200);
    for (status, body) in refused.clone() {
        assert_eq!((*status, &body["error"]["code"]), (503, &json!("overloaded")), "{body}");
        let message = body["error"]["message"].as_str().expect("a message");
        assert!(message.contains("Try again"), "{message}");
    }
    assert!(refused.clone().count() < asked, "none was answered");
    refused.count()
}

/// Tests that only `cargo xtask test --long` runs.
mod long {
    use std::process::Command;

    use crate::support::{self, Tollgate};

    /// Checks C21 for ten minutes.
    #[tokio::test]
    #[ignore = "long: ten minutes of attacks"]
    async fn ten_minutes_of_attacks_leave_nothing_behind() {
        super::soak("600s").await;
    }

    /// The findings that every self-made certificate causes: no public authority signed
    /// it, and it names no service for revocation.
    const SELF_SIGNED_FINDINGS: [&str; 3] =
        ["cert_chain_of_trust", "cert_revocation", "cert_caIssuers"];

    /// Checks T09 with all tests of testssl.sh.
    #[test]
    #[ignore = "long: testssl.sh takes minutes"]
    fn testssl_finds_nothing() {
        let Some(testssl) = support::program("testssl") else { return };
        let gateway = Tollgate::with_config(support::OPEN);
        let folder = tempfile::tempdir().expect("a folder");
        let found = folder.path().join("found.json");
        let status = Command::new(testssl)
            .args(["--quiet", "--color", "0", "--warnings", "off", "--jsonfile"])
            .arg(&found)
            .arg(&gateway.url)
            .status();
        status.expect("testssl runs");
        let text = std::fs::read_to_string(&found).expect("its findings");
        let findings: Vec<serde_json::Value> = serde_json::from_str(&text).expect("JSON");
        assert!(findings.len() > 100, "{} findings: it did not look", findings.len());
        let is_grave = |finding: &&serde_json::Value| {
            let severity = finding["severity"].as_str().unwrap_or("FATAL");
            let id = finding["id"].as_str().unwrap_or_default();
            let is_rating = id.starts_with("overall_grade") || id.starts_with("grade_cap");
            !["OK", "INFO", "LOW", "DEBUG", "WARN"].contains(&severity)
                && !SELF_SIGNED_FINDINGS.iter().any(|own| id.starts_with(own))
                && !is_rating
        };
        let grave: Vec<_> = findings.iter().filter(is_grave).collect();
        assert!(grave.is_empty(), "{grave:#?}");
    }
}
