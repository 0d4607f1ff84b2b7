//! The configuration changes while the gateway runs: live keys take effect at the client's
//! side, other keys wait for a restart, a mistake changes nothing, and no request is lost.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tollgate_loadtest::client::{Connection, Protocol, Target};

use crate::support::{self, Tollgate, get, post, read, signal};

const BASE: &str = r#"
[gateway.idempotency]
keys_per_tenant = 1_000
[gateway.reads]
requests_per_second = 10_000
request_burst = 100_000
[gateway.connections]
new_per_second = 10_000
new_burst = 10_000
[plans.open]
requests_per_minute = 100_000
concurrent = 256
queued = 1024
[plans.three]
requests_per_minute = { limit = 60, burst = 3 }
[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"
"#;

/// The path of the only request of these tests.
const CHAT: &str = "/v1/chat/completions";

fn ask(max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

pub(crate) fn write(gateway: &Tollgate, text: &str) {
    // Replaced in one step: a reload must not read half a file.
    let draft = gateway.config().with_extension("draft");
    fs::write(&draft, text).expect("writes the config");
    fs::rename(&draft, gateway.config()).expect("replaces the config");
}

async fn reload(admin: &Connection) -> (u16, Value) {
    read(admin.post("/config/reload", Default::default()).await.expect("answers")).await
}

/// Reloads `text` as the config, and asserts that it is in force.
pub(crate) async fn put_in_force(gateway: &Tollgate, admin: &Connection, text: &str) {
    write(gateway, text);
    let (answer, report) = reload(admin).await;
    assert_eq!((answer, &report["applied"]), (200, &json!(true)), "{report}");
}

/// Returns the changes that a reload would make, as `key effect`.
async fn difference(admin: &Connection) -> Vec<String> {
    let answer = admin.post("/config/reload?dry_run", Default::default()).await.expect("answers");
    let (status, report) = read(answer).await;
    assert_eq!(status, 200, "{report}");
    assert_eq!(report["applied"], false);
    let changes = report["changes"].as_array().expect("changes").iter();
    let word = |change: &Value, key: &str| change[key].as_str().expect("text").to_owned();
    changes.map(|change| word(change, "key") + " " + &word(change, "effect")).collect()
}

/// Waits until the files of the gateway are in force.
async fn until_in_force(admin: &Connection) {
    let started = Instant::now();
    while !difference(admin).await.is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", difference(admin).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the value of a metric without labels.
async fn metric(admin: &Connection, name: &str) -> f64 {
    let answer = admin.get("/metrics").await.expect("answers");
    let text = answer.into_body().collect().await.expect("a body").to_bytes();
    let text = String::from_utf8(text.to_vec()).expect("text");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.expect(name).parse().expect("a number")
}

async fn status(connection: &Connection) -> u16 {
    post(connection, CHAT, &ask(1)).await.0
}

#[tokio::test]
async fn reload_applies_plans_and_tenants() {
    let gateway = Tollgate::with_config(BASE);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let admin = gateway.connect_admin().await;
    assert_eq!(status(&acme).await, 200);

    // A plan by SIGHUP. The process goes on, and so do its connections.
    write(
        &gateway,
        &BASE.replace("[tenants.acme]\nplan = \"open\"", "[tenants.acme]\nplan = \"three\""),
    );
    assert_eq!(metric(&admin, "tollgate_config_ok").await, 1.0);
    signal(gateway.pid(), "HUP");
    until_in_force(&admin).await;
    let mut admitted = 0;
    let started = Instant::now();
    for _ in 0..12 {
        admitted += u64::from(status(&acme).await == 200);
    }
    let most = 3 + started.elapsed().as_secs() + 1;
    assert!((3..=most).contains(&admitted), "{admitted} of at most {most}");
    // The control: the other tenant keeps its plan.
    assert_eq!(status(&other).await, 200);

    // A tenant by the admin's request. The key works from then on.
    reload_with(&gateway, &admin, "[tenants.later]\nplan = \"open\"\n").await;
    let key = gateway.key("later", &[]);
    let later = gateway.connect(&key).await;
    assert_eq!(status(&later).await, 200);

    // A tenant that goes gets 401 for new requests; what runs ends as it began.
    let mut stream = ask(60);
    stream["stream"] = json!(true);
    let running = later.post(CHAT, stream.to_string().into()).await.expect("answers");
    assert_eq!(running.status(), 200);
    write(&gateway, BASE);
    assert_eq!(reload(&admin).await.0, 200);
    let (refused, body) = post(&later, CHAT, &ask(1)).await;
    assert_eq!((refused, &body["error"]["code"]), (401, &json!("tenant_not_served")), "{body}");
    assert!(support::rest(running).await.ends_with("data: [DONE]\n\n"));
    assert_eq!(status(&acme).await, 200);
}

#[tokio::test]
async fn reload_lists_restart_keys_without_effect() {
    let gateway = Tollgate::with_config(BASE);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let text = BASE.replace("keys_per_tenant = 1_000", "keys_per_tenant = 1");
    write(&gateway, &format!("{text}[plans.unused]\nconcurrent = 3\n"));
    let (answer, report) = reload(&admin).await;
    assert_eq!(answer, 200, "{report}");
    assert_eq!(difference(&admin).await, ["gateway.idempotency.keys_per_tenant restart"]);
    let with_key = async |connection: &Connection, key: &'static str| {
        let mut headers = http::HeaderMap::new();
        headers.insert("idempotency-key", http::HeaderValue::from_static(key));
        let answer = connection.post_with(CHAT, ask(1).to_string().into(), headers).await;
        read(answer.expect("answers")).await.0
    };
    assert_eq!(with_key(&connection, "first").await, 200);
    assert_eq!(with_key(&connection, "second").await, 200);
    // The control: after a restart the key has its effect.
    let gateway = {
        let mut gateway = gateway;
        gateway.stop();
        gateway.restart()
    };
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    assert_eq!(with_key(&connection, "third").await, 429);
}

/// Limits of requests hold for the next request, also on connections that are open.
#[tokio::test]
async fn reload_applies_limits_of_requests() {
    let gateway = Tollgate::with_config(BASE);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let mut two = ask(1);
    two["messages"] =
        json!([{ "role": "user", "content": "a" }, { "role": "user", "content": "b" }]);
    let mut large = ask(1);
    large["messages"][0]["content"] = json!("a ".repeat(1_000));
    let answers = async || {
        let mut answers = Vec::new();
        for body in [&two, &large] {
            answers.push(post(&connection, CHAT, body).await.0);
        }
        for _ in 0..3 {
            answers.push(get(&connection, "/v1/models").await.0);
        }
        answers
    };
    assert_eq!(answers().await, [200; 5]);
    let more = "[gateway.requests]\nmessages = 1\nbody = \"1KiB\"\n";
    let text = BASE.replace("request_burst = 100_000", "request_burst = 2");
    let text = text.replace("per_second = 10_000\nrequest", "per_second = 1\nrequest");
    put_in_force(&gateway, &admin, &format!("{text}{more}")).await;
    assert_eq!(answers().await[..4], [400, 413, 200, 200]);
    // The rate may have given back one request by now, and not two.
    let reads = [get(&connection, "/v1/models").await.0, get(&connection, "/v1/models").await.0];
    assert!(reads.contains(&429), "{reads:?}");
    // A source's rate binds all its requests.
    put_in_force(&gateway, &admin, &format!("{BASE}{SLOW_SOURCE}")).await;
    let asked = [status(&connection).await, status(&connection).await, status(&connection).await];
    assert!(asked[0] == 200 && asked.contains(&429), "{asked:?}");
    put_in_force(&gateway, &admin, BASE).await;
    assert_eq!(answers().await, [200; 5]);
}

/// A rate of one request a second for each source, with a burst of one.
const SLOW_SOURCE: &str = "[gateway.sources]\nrequests_per_second = 1\nrequest_burst = 1\n";

/// Limits of connections hold for the next connection; open ones keep their timeouts.
#[tokio::test]
async fn reload_applies_limits_of_connections() {
    let gateway = Tollgate::with_config(BASE);
    let key = gateway.key("acme", &[]);
    let target = gateway.target(&key).from_source([127, 5, 0, 1].into());
    let connect = async || target.connect(Protocol::Http1).await.expect("connects");
    let admin = gateway.connect_admin().await;
    let kept = connect().await;
    assert_eq!(status(&kept).await, 200);
    let hurried = "[gateway.timeouts]\nidle = \"300ms\"\n";
    reload_with(&gateway, &admin, hurried).await;
    let closed = connect().await;
    assert_eq!(status(&closed).await, 200);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(closed.post(CHAT, ask(1).to_string().into()).await.is_err(), "idle for too long");
    assert_eq!(status(&kept).await, 200, "an earlier connection keeps its deadline");
    // A tenant's bound counts the connections that are open.
    let narrow = BASE.replace("new_burst = 10_000", "new_burst = 10_000\nper_tenant = 1");
    put_in_force(&gateway, &admin, &narrow).await;
    let second = connect().await;
    let mut streamed = ask(900);
    streamed["stream"] = json!(true);
    streamed["ignore_eos"] = json!(true);
    // A connection with a request is not idle, so it does not give way.
    let running = kept.post(CHAT, streamed.to_string().into()).await.expect("answers");
    assert_eq!(running.status(), 200);
    let (refused, body) = post(&second, CHAT, &ask(1)).await;
    assert_eq!((refused, &body["error"]["code"]), (429, &json!("rate_limit_exceeded")), "{body}");
    put_in_force(&gateway, &admin, BASE).await;
    assert_eq!(status(&connect().await).await, 200);
    drop(running);
}

/// A drain lasts as long as the config in force says, also on earlier connections.
#[tokio::test]
async fn reload_applies_drain() {
    let config =
        format!("{BASE}[worker]\nengine = \"synthetic\"\n[worker.synthetic]\nstep = \"200ms\"\n");
    let mut gateway = Tollgate::with_config(&config);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let mut stream = ask(1_000);
    stream["stream"] = json!(true);
    let running = connection.post(CHAT, stream.to_string().into()).await.expect("answers");
    assert_eq!(running.status(), 200);
    let short = "[gateway.timeouts]\ndrain = \"1s\"\n";
    put_in_force(&gateway, &admin, &format!("{config}{short}")).await;
    // The request would run for minutes, and the drain was 30 s.
    let started = Instant::now();
    let reading = tokio::spawn(running.into_body().collect());
    assert_eq!(gateway.stop(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    let _ = reading.await;
}

#[tokio::test]
async fn reload_with_mistakes_changes_nothing() {
    let gateway = Tollgate::with_config(BASE);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let loaded = metric(&admin, "tollgate_config_loaded_timestamp_seconds").await;
    assert!(loaded > 1_700_000_000.0);
    let text = BASE
        .replace("concurrent = 256", "concurrent = 0")
        .replace("acme]", "acme]\npool = \"gone\"");
    write(&gateway, &text);
    let (answer, body) = reload(&admin).await;
    assert_eq!((answer, &body["error"]["code"]), (422, &json!("invalid_config")), "{body}");
    let mistakes = body["error"]["mistakes"].as_array().expect("mistakes");
    let lines: Vec<&str> = mistakes.iter().filter_map(Value::as_str).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].contains("tollgate.toml:12: plans.open.concurrent: "), "{lines:?}");
    assert!(lines[1].contains("tenants.acme.pool: unknown pool \"gone\""), "{lines:?}");
    assert_eq!(metric(&admin, "tollgate_config_ok").await, 0.0);
    assert_eq!(status(&connection).await, 200);
    write(&gateway, BASE);
    assert_eq!(reload(&admin).await.0, 200);
    assert_eq!(metric(&admin, "tollgate_config_ok").await, 1.0);
}

#[test]
fn config_commands_show_difference_of_running_gateway() {
    let gateway = Tollgate::with_config(BASE);
    let config = gateway.config().with_file_name("client.toml");
    // The file of the command, which only names the gateway.
    fs::write(&config, BASE).expect("writes");
    let (config, data) = (config.display().to_string(), gateway.data().display().to_string());
    let words = |action| {
        ["config", action, "--url", &gateway.admin, "--data", &data, "--config", &config]
            .map(str::to_owned)
    };
    let run =
        |action, run: fn(&[&str]) -> String| run(&words(action).each_ref().map(String::as_str));
    assert_eq!(run("diff", support::command), "no key differs from the config in force\n");
    // A key that needs a restart, because a live one is soon in force by itself.
    write(&gateway, &BASE.replace("keys_per_tenant = 1_000", "keys_per_tenant = 999"));
    let shown = run("diff", support::command);
    assert!(shown.starts_with("restart gateway.idempotency.keys_per_tenant  "), "{shown}");
    assert!(
        shown.ends_with("\n        1000 -> 999\n0 changes live, 1 after a restart\n"),
        "{shown}"
    );
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    let shown = run("reload", support::command);
    assert!(shown.ends_with("0 changes in force, 1 pending until a restart\n"), "{shown}");
    write(&gateway, "[plans");
    let shown = run("reload", support::failing);
    assert!(shown.contains("the config in force stays, because:\n"), "{shown}");
    assert!(shown.contains("tollgate.toml:1: "), "{shown}");
}

#[tokio::test]
async fn reload_checks_value_of_dry_run() {
    let gateway = Tollgate::with_config(BASE);
    let admin = gateway.connect_admin().await;
    for (query, status, applied) in [
        ("?dry_run", 200, json!(false)),
        ("?dry_run=true", 200, json!(false)),
        ("?dry_run=false", 200, json!(true)),
        ("?dry_run=banana", 400, json!(null)),
        ("", 200, json!(true)),
    ] {
        let path = format!("/config/reload{query}");
        let answer = admin.post(&path, Default::default()).await.expect("answers");
        let (found, report) = read(answer).await;
        assert_eq!((found, &report["applied"]), (status, &applied), "{path}: {report}");
    }
}

#[tokio::test]
async fn changed_file_is_loaded_and_recorded() {
    let mut gateway = Tollgate::with_config(BASE);
    let admin = gateway.connect_admin().await;
    write(&gateway, &BASE.replace("burst = 3", "burst = 4"));
    until_in_force(&admin).await;
    write(&gateway, &BASE.replace("burst = 3", "burst = 5"));
    assert_eq!(reload(&admin).await.0, 200);
    drop(admin);
    assert_eq!(gateway.stop(), Some(0));
    let out = gateway.data().join("export");
    gateway.command(&["audit", "export", "--out", &out.display().to_string()]);
    let lines = fs::read_to_string(out.join("records.jsonl")).expect("an export");
    let records = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let changed: Vec<Value> = records
        .map(|line| line["record"].clone())
        .filter(|record| record["operation.type"] == "config.changed")
        .collect();
    assert_eq!(changed.len(), 2, "{changed:#?}");
    for (record, actors) in changed.iter().zip([&["file"][..], &["admin key", "file"]]) {
        let text = record.to_string();
        // The second file may be found before the admin asks.
        assert!(actors.iter().any(|actor| text.contains(&format!("\"{actor}\""))), "{text}");
        assert!(text.contains("\"key\":\"plans.three.requests_per_minute\""), "{text}");
    }
}

/// A renewed certificate is seen by new connections, and open ones go on.
#[tokio::test]
async fn certificate_renewal_keeps_open_connections() {
    let gateway = Tollgate::with_config(BASE);
    let key = gateway.key("acme", &[]);
    let admin = gateway.connect_admin().await;
    let open = gateway.target(&key).connect(Protocol::Http2).await.expect("connects");
    let mut stream = ask(60);
    stream["stream"] = json!(true);
    let running = open.post(CHAT, stream.to_string().into()).await.expect("answers");
    assert_eq!(running.status(), 200);
    // Another gateway has a certificate of another authority.
    let other = Tollgate::demo();
    let files = other.data().join("tls");
    let shown = files.display();
    let tls = format!(
        "[gateway.tls]\ncertificate = \"{shown}/server.pem\"\nkey = \"{shown}/server.key\"\n"
    );
    write(&gateway, &format!("{BASE}{tls}"));
    let (answer, report) = reload(&admin).await;
    assert_eq!((answer, &report["certificate_renewed"]), (200, &json!(true)), "{report}");
    assert_eq!(status(&open).await, 200);
    assert!(support::rest(running).await.ends_with("data: [DONE]\n\n"));
    let renewed = Target::new(&gateway.url, &files.join("ca.pem"), &key).expect("a target");
    let connection = renewed.connect(Protocol::Http2).await.expect("trusts the new certificate");
    assert_eq!(status(&connection).await, 200);
    assert!(gateway.target(&key).connect(Protocol::Http2).await.is_err(), "the old one is gone");
    // A key that does not belong to the certificate changes nothing.
    let mismatched = tls.replace("server.key", "ca.key");
    write(&gateway, &format!("{BASE}{mismatched}"));
    let (answer, body) = reload(&admin).await;
    assert_eq!(answer, 422, "{body}");
    assert_eq!(status(&renewed.connect(Protocol::Http2).await.expect("connects")).await, 200);
}

/// Puts the config that is `BASE` and `more` in force.
async fn reload_with(gateway: &Tollgate, admin: &Connection, more: &str) {
    put_in_force(gateway, admin, &format!("{BASE}{more}")).await;
}

/// Asserts that a burst of three requests binds the clients together.
async fn served_by_three(clients: [&Connection; 2]) {
    let (started, mut served) = (Instant::now(), 0);
    for _ in 0..4 {
        for client in clients {
            served += u64::from(status(client).await == 200);
        }
    }
    let most = 3 + started.elapsed().as_secs() + 1;
    assert!((3..=most).contains(&served), "{served} of at most {most}");
}

#[tokio::test]
async fn reload_applies_pools_and_plans_of_models() {
    let gateway = Tollgate::with_config(BASE);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let admin = gateway.connect_admin().await;
    served_by_all(&[&acme, &other]).await;
    let pool = "pool = \"trial\"\n[pools.trial]\nplan = \"three\"\n";
    let pooled = BASE.replace(
        "plan = \"open\"\n[tenants.other]\nplan = \"open\"\n",
        "pool = \"trial\"\n[tenants.other]\n",
    );
    put_in_force(&gateway, &admin, &format!("{pooled}{pool}")).await;
    served_by_three([&acme, &other]).await;
    // Without the pool both are free again, and a plan of the model binds them together.
    reload_with(&gateway, &admin, "").await;
    served_by_all(&[&acme, &other]).await;
    reload_with(&gateway, &admin, "[models.tollgate-demo]\nplan = \"three\"\n").await;
    served_by_three([&acme, &other]).await;
}

/// Asserts that four requests of each client are served.
async fn served_by_all(clients: &[&Connection]) {
    for _ in 0..4 {
        for client in clients {
            assert_eq!(status(client).await, 200);
        }
    }
}

#[tokio::test]
async fn reload_applies_deadlines_and_penalties() {
    let gateway = Tollgate::with_config(BASE);
    let key = gateway.key("acme", &[]);
    let acme = gateway.connect(&key).await;
    let admin = gateway.connect_admin().await;
    let mut long = ask(900);
    long["ignore_eos"] = json!(true);
    // An answer that runs keeps the deadline with which its request came.
    let mut streamed = long.clone();
    streamed["stream"] = json!(true);
    let running = acme.post(CHAT, streamed.to_string().into()).await.expect("answers");
    let hurried = "[gateway.deadlines]\nqueue = \"100ms\"\nrequest = \"100ms\"\n";
    reload_with(&gateway, &admin, hurried).await;
    let started = Instant::now();
    loop {
        // On a busy machine the request may wait too long to be tokenized.
        let (answer, body) = post(&acme, CHAT, &long).await;
        if answer == 504 {
            assert_eq!(body["error"]["code"], "deadline_exceeded", "{body}");
            break;
        }
        assert_eq!(answer, 503, "{body}");
        assert!(started.elapsed() < Duration::from_secs(30), "{body}");
    }
    assert!(support::rest(running).await.ends_with("data: [DONE]\n\n"));

    // A client that leaves wastes device time, by default less than is free.
    let leave = async || {
        let answer = post(&acme, CHAT, &long);
        drop(tokio::time::timeout(Duration::from_millis(300), answer).await);
    };
    reload_with(&gateway, &admin, "").await;
    leave().await;
    assert_eq!(status(&acme).await, 200);
    reload_with(&gateway, &admin, "[gateway.penalties]\nwasted_time_per_minute = \"1ms\"\n").await;
    let started = Instant::now();
    while status(&acme).await == 200 {
        assert!(started.elapsed() < Duration::from_secs(30), "no penalty");
        leave().await;
    }
    let (refused, body) = post(&acme, CHAT, &ask(1)).await;
    let message = body["error"]["message"].as_str().expect("text");
    assert!(refused == 429 && message.contains("leaves too many requests"), "{body}");
}

/// Reloads ten times a second under load, every tenth file with a mistake: no request is
/// lost or fails, and the rate of a limited tenant gives no free burst.
#[tokio::test]
async fn reloads_under_load_lose_no_request() {
    reload_under_load(Duration::from_secs(10)).await;
}

mod long {
    use std::time::Duration;

    #[tokio::test]
    #[ignore = "long: a minute of reloads"]
    async fn reloads_of_a_minute_lose_no_request() {
        super::reload_under_load(Duration::from_secs(60)).await;
    }
}

async fn reload_under_load(time: Duration) {
    let limited = format!("{BASE}[tenants.limited]\nplan = \"three\"\n");
    let gateway = Tollgate::with_config(&limited);
    let stop = Arc::new(AtomicBool::new(false));
    let (served, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut clients = tokio::task::JoinSet::new();
    for tenant in ["acme", "other", "acme", "other"] {
        let connection = gateway.connect(&gateway.key(tenant, &[])).await;
        let (stop, served, failed) = (Arc::clone(&stop), Arc::clone(&served), Arc::clone(&failed));
        clients.spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let answer = connection.post(CHAT, ask(2).to_string().into()).await;
                let is_whole = match answer {
                    Ok(answer) => {
                        answer.status() == 200 && answer.into_body().collect().await.is_ok()
                    }
                    Err(_) => false,
                };
                if is_whole { &served } else { &failed }.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    let bursts = gateway.connect(&gateway.key("limited", &[])).await;
    let admin = gateway.connect_admin().await;
    let (started, mut admitted, mut reloads, mut bad) = (Instant::now(), 0, 0_u64, 0);
    while started.elapsed() < time {
        reloads += 1;
        // Each file differs from the one before.
        let text = limited.replace("queued = 1024", &format!("queued = {}", 1_000 + reloads % 7));
        let is_bad = reloads % 10 == 0;
        write(&gateway, &if is_bad { text.replace("= 256", "= \"many\"") } else { text });
        let (answer, report) = reload(&admin).await;
        assert_eq!(answer, if is_bad { 422 } else { 200 }, "{report}");
        bad += u64::from(is_bad);
        for _ in 0..2 {
            admitted += u64::from(status(&bursts).await == 200);
        }
        let most = 3 + started.elapsed().as_secs() + 1;
        assert!(admitted <= most, "{admitted} admitted, {most} allowed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.store(true, Ordering::SeqCst);
    clients.join_all().await;
    let (served, failed) = (served.load(Ordering::SeqCst), failed.load(Ordering::SeqCst));
    println!("{reloads} reloads, {bad} with mistakes; {served} requests served, {failed} failed");
    assert_eq!(failed, 0);
    assert!(served > 0 && bad > 0);
    let (_, report) = get(&admin, "/v1/status").await;
    assert_eq!(report["ready"], true);
}

#[tokio::test]
async fn second_signal_cuts_running_requests() {
    let config =
        format!("{BASE}[worker]\nengine = \"synthetic\"\n[worker.synthetic]\nstep = \"200ms\"\n");
    let mut gateway = Tollgate::with_config(&config);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let mut stream = ask(1_000);
    stream["stream"] = json!(true);
    let running = connection.post(CHAT, stream.to_string().into()).await.expect("answers");
    assert_eq!(running.status(), 200);
    signal(gateway.pid(), "INT");
    let started = Instant::now();
    // The request would run for minutes, and the drain is 30 s.
    let ended = tokio::spawn(async move { running.into_body().collect().await.map(|_| ()) });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!ended.is_finished(), "the first signal lets requests run");
    assert_eq!(gateway.stop(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    let _ = ended.await;
}
