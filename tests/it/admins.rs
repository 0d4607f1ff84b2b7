//! Named admins over the real binary: made before the first start and while a gateway runs,
//! held to their roles, revoked, and named in the audit log.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tollgate_loadtest::client::{Connection, Protocol, Target};

use crate::support::{self, Tollgate, command, failing, get, read};

/// Opens a connection to the admin listener with `key`.
async fn connect(gateway: &Tollgate, key: &str) -> Connection {
    let target = Target::new(&gateway.admin, &gateway.ca(), key.trim()).expect("a target");
    target.connect(Protocol::Either).await.expect("connects")
}

/// Reads the records of the audit log with this operation as (actor, detail).
fn recorded(gateway: &Tollgate, operation: &str) -> Vec<(String, Value)> {
    let out = gateway.data().join(format!("export-{operation}"));
    gateway.command(&["audit", "export", "--out", &out.display().to_string()]);
    let lines = fs::read_to_string(out.join("records.jsonl")).expect("an export");
    let records = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of = records.map(|line| line["record"].clone());
    let of = of.filter(|record| record["operation.type"] == operation);
    of.map(|record| (record["actor"].as_str().unwrap_or("").to_owned(), record["detail"].clone()))
        .collect()
}

fn start(data: &Path) -> Tollgate {
    let command = std::process::Command::new(support::binary());
    Tollgate::start_on(data, support::OPEN, command)
}

#[tokio::test]
async fn admins_keep_to_roles_and_are_recorded() {
    // Before the first start there is not even a data folder.
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    let place = data.display().to_string();
    let early = ["admins", "create", "early", "--role", "auditor", "--quiet", "--data", &place];
    let early = command(&early);
    let mut gateway = start(&data);
    let auditor = connect(&gateway, &early).await;
    assert_eq!(get(&auditor, "/v1/status").await.0, 200);

    // While the gateway runs, the command uses its admin API, on a port that no config names.
    let bob = gateway.command(&["admins", "create", "bob", "--role", "operator", "--quiet"]);
    let bob_file = folder.path().join("bob.key");
    fs::write(&bob_file, &bob).expect("writes");
    let operator = connect(&gateway, &bob).await;
    let reload = |connection: Connection| async move {
        read(connection.post("/config/reload", Default::default()).await.expect("answers")).await
    };
    assert_eq!(reload(operator.clone()).await.0, 200);
    let (status, refused) = reload(auditor.clone()).await;
    let message = "This needs the role operator or admin; admin early has the role auditor.";
    assert_eq!((status, &refused["error"]["message"]), (403, &json!(message)));
    // A command works as the admin whose key it is given.
    let by_bob = ["--admin-key", &bob_file.display().to_string(), "--data", &place];
    let said = failing(&[&["admins", "create", "eve", "--role", "admin"][..], &by_bob].concat());
    assert!(said.contains("This needs the role admin; admin bob has the role operator."), "{said}");

    let listed = gateway.command(&["admins", "list"]);
    let names: Vec<&str> =
        listed.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["bob", "early"], "{listed}");
    let again = failing(&["admins", "create", "bob", "--role", "admin", "--data", &place]);
    assert!(again.contains("There is an admin bob already"), "{again}");

    // A revoked admin is refused at once, also on an open connection.
    gateway.command(&["admins", "revoke", "bob"]);
    assert_eq!(get(&operator, "/v1/status").await.0, 401);
    assert_eq!(get(&auditor, "/v1/status").await.0, 200);
    drop((auditor, operator));
    assert_eq!(gateway.stop(), Some(0));

    // Without a gateway the files do, and the next start knows.
    assert!(!data.join("admin.address").exists());
    gateway.command(&["admins", "revoke", "early"]);
    let gateway = start(&data);
    assert_eq!(get(&connect(&gateway, &early).await, "/v1/status").await.0, 401);
    let mut gateway = gateway;
    assert_eq!(gateway.stop(), Some(0));
    let created: Vec<(String, Value)> = recorded(&gateway, "admin.created");
    let user = created[0].0.clone();
    assert!(user.starts_with("uid "), "{created:?}");
    let detail = |name, role| json!({ "admin": name, "role": role });
    assert_eq!(created[0].1, detail("early", "auditor"));
    assert_eq!(created[1..], [("admin key".to_owned(), detail("bob", "operator"))]);
    assert_eq!(
        recorded(&gateway, "admin.revoked"),
        [("admin key".to_owned(), detail("bob", "operator")), (user, detail("early", "auditor"))]
    );
}

#[test]
fn admin_without_printed_key_is_revoked() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().display().to_string();
    let words = ["admins", "create", "lost", "--role", "admin", "--data", &place];
    // Every write to this device fails, as on a full disk.
    let full = fs::File::options().write(true).open("/dev/full").expect("opens");
    let mut create = std::process::Command::new(support::binary());
    let created = create.args(words).stdout(full).output().expect("the binary starts");
    assert!(!created.status.success());
    let said = String::from_utf8_lossy(&created.stderr);
    assert!(said.contains("the key could not be printed; lost was revoked"), "{said}");
    assert_eq!(command(&["admins", "list", "--data", &place]).lines().count(), 1, "the head");
}

const CHAT: &str = "/v1/chat/completions";

fn ask() -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": 1, "temperature": 0,
        "messages": [{ "role": "user", "content": "Hello" }],
    })
}

async fn send(connection: &Connection, path: &str, body: Value) -> (u16, Value) {
    support::post(connection, path, &body).await
}

async fn delete(connection: &Connection, path: &str) -> (u16, Value) {
    read(connection.delete(path).await.expect("answers")).await
}

/// A key works from the answer that creates it until the answer that revokes it.
#[tokio::test]
async fn keys_change_over_admin_api() {
    let gateway = Tollgate::with_config(support::OPEN);
    let admin = gateway.connect_admin().await;
    let wanted = json!({ "tenant": "acme", "label": "ci", "expires_in_seconds": 3600 });
    let (status, made) = send(&admin, "/v1/keys", wanted).await;
    assert_eq!((status, &made["label"]), (201, &json!("ci")), "{made}");
    let id = made["key"].as_str().expect("an id").to_owned();
    let client = gateway.connect(made["secret"].as_str().expect("a key")).await;
    assert_eq!(get(&client, "/v1/models").await.0, 200);

    let (status, listed) = get(&admin, "/v1/keys?tenant=acme").await;
    let [row] = &listed["rows"].as_array().expect("rows")[..] else { panic!("{listed}") };
    assert_eq!((status, &row["key"], &row["state"]), (200, &json!(id), &json!("active")));
    assert!(row["last_used_ns"].as_u64() >= row["created_ns"].as_u64(), "{row}");
    assert!(row["last_used_ns"].is_u64() && row.get("secret").is_none(), "{row}");

    let rotate = format!("/v1/keys/{id}/rotate");
    let (status, newer) = send(&admin, &rotate, json!({ "overlap_seconds": 60 })).await;
    assert_eq!((status, &newer["rotated_from"]), (201, &json!(id)), "{newer}");
    let (status, revoked) = delete(&admin, &format!("/v1/keys/{id}")).await;
    assert_eq!((status, revoked["revoked_ns"].is_u64()), (200, true), "{revoked}");
    assert_eq!(get(&client, "/v1/models").await.0, 401);
    let newer = gateway.connect(newer["secret"].as_str().expect("a key")).await;
    assert_eq!(get(&newer, "/v1/models").await.0, 200);

    for (path, body, code, why) in [
        (
            "/v1/keys",
            json!({ "tenant": "nobody" }),
            400,
            "Unknown tenant nobody; the config has: acme.",
        ),
        ("/v1/keys", json!({ "tenant": "acme", "plan": "gone" }), 400, "Unknown plan gone"),
        ("/v1/keys", json!({ "tenant": "acme", "models": ["x"] }), 400, "Unknown model x"),
        ("/v1/keys", json!({ "tenant": "acme", "tier": 1 }), 400, "unknown field `tier`"),
        ("/v1/keys", json!({ "tenant": "acme", "expires_in_seconds": 0 }), 400, "expire at once"),
        (
            "/v1/keys",
            json!({ "tenant": "acme", "expires_in_seconds": u64::MAX }),
            400,
            "after the year 2262",
        ),
        ("/v1/keys", json!({ "tenant": "acme", "label": "x".repeat(201) }), 400, "200 characters"),
        ("/v1/keys", json!({}), 400, "missing field `tenant`"),
        ("/v1/keys/gone/rotate", json!({ "overlap_seconds": 1 }), 404, "No such key"),
        (rotate.as_str(), json!({ "overlap_seconds": 1 }), 400, "revoked or expired"),
    ] {
        let (status, answer) = send(&admin, path, body.clone()).await;
        assert_eq!(status, code, "{path} {body}: {answer}");
        let message = answer["error"]["message"].as_str().expect("a sentence");
        assert!(message.contains(why), "{path} {body}: {answer}");
    }
    let large = json!({ "tenant": "acme", "label": "x".repeat(70_000) });
    assert_eq!(send(&gateway.connect_admin().await, "/v1/keys", large).await.0, 413);
}

/// Lists have pages of 50 rows; the command reads all of them.
#[tokio::test]
async fn key_list_has_pages() {
    let gateway = Tollgate::with_config(support::OPEN);
    let admin = gateway.connect_admin().await;
    for _ in 0..51 {
        assert_eq!(send(&admin, "/v1/keys", json!({ "tenant": "acme" })).await.0, 201);
    }
    let (_, first) = get(&admin, "/v1/keys").await;
    assert_eq!(first["rows"].as_array().map(Vec::len), Some(50));
    let next = first["next"].as_str().expect("a next page");
    let (_, second) = get(&admin, &format!("/v1/keys?after={next}")).await;
    assert_eq!((second["rows"].as_array().map(Vec::len), &second["next"]), (Some(1), &Value::Null));
    let listed: Value =
        serde_json::from_str(&gateway.command(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(listed["keys"].as_array().map(Vec::len), Some(51));
}

/// A rested worker finishes its request and gets no new one until it is woken.
#[tokio::test]
async fn rested_worker_gets_no_new_request() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let client = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let mut stream = ask();
    stream["stream"] = json!(true);
    stream["max_tokens"] = json!(200);
    let running = client.post(CHAT, stream.to_string().into()).await.expect("answers");
    assert_eq!(running.status(), 200);
    let (status, rested) = send(&admin, "/v1/workers/0/rest", Value::Null).await;
    assert_eq!((status, &rested["resting"]), (200, &json!(true)), "{rested}");
    let (status, refused) = send(&client, CHAT, ask()).await;
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("overloaded")), "{refused}");
    let (_, shown) = get(&admin, "/v1/status").await;
    let worker = &shown["workers"][0];
    assert_eq!((&worker["resting"], &worker["ready"]), (&json!(true), &json!(false)), "{shown}");
    assert!(support::rest(running).await.ends_with("data: [DONE]\n\n"));
    // A second rest changes nothing and is not recorded.
    assert_eq!(send(&admin, "/v1/workers/0/rest", Value::Null).await.0, 200);
    assert_eq!(send(&admin, "/v1/workers/0/wake", Value::Null).await.0, 200);
    assert_eq!(send(&client, CHAT, ask()).await.0, 200);
    assert_eq!(send(&admin, "/v1/workers/9/rest", Value::Null).await.0, 404);
    drop((client, admin));
    assert_eq!(gateway.stop(), Some(0));
    let by_key = || vec![("admin key".to_owned(), json!({ "worker": "0" }))];
    assert_eq!(recorded(&gateway, "worker.rested"), by_key());
    assert_eq!(recorded(&gateway, "worker.woken"), by_key());
}

/// Usage and statements equal those of the commands; an operator sees no money.
#[tokio::test]
async fn usage_and_statements_over_admin_api() {
    let prices = "[prices.standard]\nfrom = 2020-01-01\ncurrency = \"EUR\"\n\
        per_device_second = { default = \"0.0003\" }\n";
    let gateway = Tollgate::with_config(&format!("{}{prices}", support::OPEN));
    let client = gateway.connect(&gateway.key("acme", &["--label", "the build, at night"])).await;
    let answer = client.post(CHAT, ask().to_string().into()).await.expect("answers");
    let id = answer.headers()["x-request-id"].to_str().expect("text").to_owned();
    assert_eq!(read(answer).await.0, 200);
    support::posted(&client, &id).await;
    let admin = gateway.connect_admin().await;
    let (status, usage) = get(&admin, "/v1/usage?tenant=acme&group_by=tenant").await;
    let [row] = &usage["rows"].as_array().expect("rows")[..] else { panic!("{usage}") };
    assert_eq!((status, &row["tenant"], &row["requests"]), (200, &json!("acme"), &json!(1)));
    let shown = gateway.command(&["usage", "--json", "--by", "tenant", "--tenant", "acme"]);
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(&shown["rows"][0], row);
    assert!(gateway.command(&["usage"]).contains("  the build, at night\n"));
    for (query, param) in [("start=yesterday", "start"), ("group_by=plan", "group_by")] {
        let (status, answer) = get(&admin, &format!("/v1/usage?{query}")).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    // The month of the record, because midnight may pass during the test.
    let (_, days) = get(&admin, "/v1/usage?group_by=day").await;
    let month = &days["rows"][0]["day"].as_str().expect("a day")[..7];
    let path = format!("/v1/tenants/acme/statements/{month}");
    let (status, statement) = get(&admin, &path).await;
    assert_eq!((status, &statement["currency"]), (200, &json!("EUR")), "{statement}");
    let config = gateway.config().display().to_string();
    let words = ["statement", "--tenant", "acme", "--month", month, "--json", "--config", &config];
    let shown: Value = serde_json::from_str(&gateway.command(&words)).expect("JSON");
    assert_eq!(shown, statement);
    assert_eq!(get(&admin, "/v1/tenants/acme/statements/May").await.0, 400);
    let operator = gateway.command(&["admins", "create", "o", "--role", "operator", "--quiet"]);
    let operator = connect(&gateway, &operator).await;
    assert_eq!(get(&operator, &path).await.0, 403);
    assert_eq!(get(&operator, "/v1/usage").await.0, 200);
}

/// A tenant's limits show what requests have taken, by the API and by the command.
#[tokio::test]
async fn tenant_shows_used_limits() {
    let config = support::OPEN
        .replace("requests_per_minute = 100_000", "requests_per_minute = { limit = 1, burst = 5 }");
    let config = format!("{config}[tenants.other]\nplan = \"open\"\n");
    let mut gateway = Tollgate::with_config(&config);
    let client = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    for _ in 0..3 {
        assert_eq!(send(&client, CHAT, ask()).await.0, 200);
    }
    let (status, shown) = get(&admin, "/v1/tenants/acme").await;
    assert_eq!((status, &shown["plan"]), (200, &json!("open")), "{shown}");
    let limits = shown["limits"].as_array().expect("limits");
    let requests = limits.iter().find(|limit| limit["limit"] == "requests_per_minute");
    let requests = requests.expect("the plan has this limit");
    assert_eq!((&requests["scope"], &requests["value"]), (&json!("tenant acme"), &json!(1)));
    // One request a minute comes back, so a slow machine sees fewer than three.
    let used = requests["used"].as_u64().expect("a number");
    assert!((1..=3).contains(&used), "{requests}");
    assert_eq!(requests["remaining"], 5 - used);
    assert!(requests["refills_ms"].as_u64() > Some(0), "{requests}");
    assert_eq!(shown["keys"]["rows"].as_array().map(Vec::len), Some(1));
    assert!(!shown.to_string().contains("secret"), "{shown}");
    // The control: another tenant has used nothing.
    let (_, other) = get(&admin, "/v1/tenants/other").await;
    let limits = other["limits"].as_array().expect("limits");
    assert!(limits.iter().all(|limit| limit["used"] == 0), "{other}");
    assert_eq!(get(&admin, "/v1/tenants/nobody").await.0, 404);

    let shown = gateway.command(&["tenants", "show", "acme"]);
    assert!(shown.contains("tenant acme  requests_per_minute"), "{shown}");
    let config = gateway.config().display().to_string();
    drop((client, admin));
    assert_eq!(gateway.stop(), Some(0));
    let listed = gateway.command(&["tenants", "list", "--config", &config]);
    let names: Vec<&str> =
        listed.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["acme", "other"], "{listed}");
}
