//! The OpenAPI document against the real server: Schemathesis sends requests that the document
//! allows and forbids, and checks each answer against the document.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::sdks::variable;
use crate::support::{Tollgate, get, tool};

const CONFIG: &str = r#"
[plans.open]
concurrent = 64
[tenants.acme]
plan = "open"
# Some checks open a connection for each request.
[gateway.connections]
new_per_second = 10_000
new_burst = 10_000
"#;

/// Checks of every answer. Whether a valid request is answered with 200 depends on more than a
/// schema can say: two fields may not go together, and bounds count bytes.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,\
    response_headers_conformance,response_schema_conformance,negative_data_rejection,\
    unsupported_method,allow_header_conformance,ignored_auth";

#[tokio::test]
async fn server_keeps_its_openapi_document() {
    let python = variable("TOLLGATE_PYTHON");
    let program = python.map(|python| python.with_file_name("schemathesis"));
    let Some(program) = tool("Schemathesis", program) else { return };
    let gateway = Tollgate::with_config(CONFIG);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let (status, mut document) = get(&connection, "/openapi.json").await;
    assert_eq!(status, 200);
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let operation = &mut document["paths"][path]["post"];
        shorten(&mut operation["requestBody"]["content"]["application/json"]["schema"]);
    }
    check(&program, (&gateway, &gateway.url, &key), &document, &[]);
}

/// Checks the routes that change nothing. Those that change something would leave another
/// gateway than they found.
#[tokio::test]
async fn admin_listener_keeps_its_openapi_document() {
    let python = variable("TOLLGATE_PYTHON");
    let program = python.map(|python| python.with_file_name("schemathesis"));
    let Some(program) = tool("Schemathesis", program) else { return };
    // Schemathesis tries wrong keys, which would earn a penalty.
    let penalties = "[gateway.penalties]\nfailed_authentications_per_minute = 1_000_000\n";
    let gateway = Tollgate::with_config(&format!("{CONFIG}{penalties}"));
    gateway.key("acme", &[]);
    let (status, document) = get(&gateway.connect_admin().await, "/openapi.json").await;
    assert_eq!(status, 200);
    let key = std::fs::read_to_string(gateway.data().join("admin.key")).expect("a key");
    let of = (&gateway, gateway.admin.as_str(), key.trim());
    check(&program, of, &document, &["--include-method", "GET"]);
}

/// Lets Schemathesis check the listener at `url` against `document` with `key`.
fn check(
    program: &Path,
    (gateway, url, key): (&Tollgate, &str, &str),
    document: &Value,
    more: &[&str],
) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("openapi.json");
    std::fs::write(&file, document.to_string()).expect("the document is written");
    let output = Command::new(program)
        .args(["--no-color", "run"])
        .arg(&file)
        .args(["--url", url, "--checks", CHECKS])
        .arg("--tls-verify")
        .arg(gateway.ca())
        .args(["--header", &format!("Authorization: Bearer {key}")])
        .args(more)
        .args(["--phases", "examples,coverage,fuzzing", "--max-examples", "50"])
        .args(["--seed", "1", "--generation-database", "none", "--request-timeout", "30"])
        .args(["--suppress-health-check", "all", "--warnings", "off", "--no-shrink"])
        .current_dir(folder.path())
        .output()
        .expect("Schemathesis starts");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
}

/// Narrows a request's schema to short answers of the model that is served, and to bodies that
/// are not refused for their size. Wrong values are still sent.
fn shorten(schema: &mut Value) {
    forget_long_arrays(schema);
    let properties = &mut schema["properties"];
    properties["model"] = json!({ "const": "tollgate-demo" });
    properties["max_tokens"] = json!({ "type": "integer", "minimum": 1, "maximum": 4 });
    for (field, most) in [("n", 2), ("max_completion_tokens", 4), ("best_of", 2)] {
        let property = &mut properties[field];
        if property.is_object() {
            property["maximum"] = json!(most);
        }
    }
    schema["required"].as_array_mut().expect("names").push(json!("max_tokens"));
}

/// Removes the bounds of long arrays. An array at such a bound is a body of megabytes, which the
/// server refuses before it is sent whole.
fn forget_long_arrays(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            if object.get("maxItems").and_then(Value::as_u64).is_some_and(|most| most > 1_000) {
                object.remove("maxItems");
            }
            object.values_mut().for_each(forget_long_arrays);
        }
        Value::Array(list) => list.iter_mut().for_each(forget_long_arrays),
        _ => {}
    }
}
