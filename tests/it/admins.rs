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
