//! The document against the route table, the code and the committed copy.

use std::collections::BTreeSet;
use std::path::Path;

use tollgate_config::Config;
use tollgate_domain::{Tier, UtcDay};
use tollgate_ledger::{EntryRow, UsageRow};

use super::*;

const PUBLIC: &str = "docs/reference/openapi.json";
const ADMIN: &str = "docs/reference/admin-openapi.json";
const RENEW: &str = "TOLLGATE_REGENERATE=1 cargo test -p tollgate-gateway --lib openapi::";

/// Returns the document of the default config.
fn current() -> Value {
    let config = "[plans.p]\n[tenants.t]\nplan = \"p\"\n";
    let config = Config::from_toml(Path::new("test.toml"), config).expect("a config");
    document(&request_limits(&config.gateway().requests))
}

/// Returns both documents, each with the path of its committed copy.
fn documents() -> [(&'static str, Value); 2] {
    [(PUBLIC, current()), (ADMIN, admin::document())]
}

#[test]
fn committed_documents_are_current() {
    #[allow(clippy::disallowed_methods, reason = "the developer's own switch")]
    let renew = std::env::var_os("TOLLGATE_REGENERATE").is_some();
    for (committed, current) in documents() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(committed);
        if renew {
            let text = format!("{:#}\n", sorted(current));
            std::fs::write(&path, text).expect("the document is written");
            continue;
        }
        // As values, because the order of keys depends on how the workspace is built.
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        let kept: Value = serde_json::from_str(&kept).unwrap_or_default();
        assert!(kept == current, "{committed} is stale; renew it with\n{RENEW}");
    }
}

/// Returns `value` with its keys in order, whatever map it is made of.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            let mut entries: Vec<(String, Value)> =
                object.into_iter().map(|(name, value)| (name, sorted(value))).collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(entries.into_iter().collect())
        }
        Value::Array(list) => Value::Array(list.into_iter().map(sorted).collect()),
        value => value,
    }
}

#[test]
fn every_route_has_an_operation() {
    let document = current();
    for (method, path) in routes::documented_routes() {
        let operation = &document["paths"][&path][method.to_ascii_lowercase()];
        assert!(
            operation.is_object(),
            "the route `{method} {path}` has no operation; describe it in \
             gateway/src/openapi/operations.rs, then run\n{RENEW}"
        );
    }
}

#[test]
fn every_admin_route_has_an_operation() {
    let document = admin::document();
    let mut schemas = SchemaSettings::draft2020_12().into_generator();
    for route in crate::admin::documented_routes(&mut schemas) {
        let (method, path) = (route.method.as_str().to_ascii_lowercase(), route.path);
        let operation = &document["paths"][path.replace("{*", "{")][&method];
        assert!(
            operation.is_object(),
            "the route `{method} {path}` has no operation; describe it in \
             gateway/src/admin/operations.rs, then run\n{RENEW}"
        );
        let is_open = operation["security"] == json!([]);
        assert_eq!(is_open, route.roles.is_none(), "{method} {path}");
    }
}

/// The bodies and the queries of the admin API have the fields that handlers read.
#[test]
fn admin_inputs_have_their_fields() {
    let document = admin::document();
    let body = &document["paths"]["/v1/keys"]["post"]["requestBody"]["content"];
    let schema = &body["application/json"]["schema"];
    assert_eq!(schema["required"], json!(["tenant"]), "{schema}");
    assert_eq!(schema["additionalProperties"], json!(false), "{schema}");
    assert!(schema["properties"]["expires_in_seconds"].is_object(), "{schema}");
    let parameters = &document["paths"]["/v1/usage"]["get"]["parameters"];
    let names: BTreeSet<&str> =
        parameters.as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    let expected = ["after", "class", "end", "group_by", "key", "model", "start", "tenant"];
    assert_eq!(names, BTreeSet::from(expected));
    let tenant = &document["paths"]["/v1/tenants/{tenant}"]["get"]["parameters"][0];
    assert_eq!((&tenant["in"], &tenant["name"]), (&json!("path"), &json!("tenant")));
}

#[test]
fn every_reference_has_a_target() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(object) => {
                found.extend(object.get("$ref").and_then(Value::as_str).map(str::to_owned));
                object.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    for (_, document) in documents() {
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 20, "{found:?}");
        for reference in &found {
            let pointer = reference.strip_prefix('#').expect("a reference within the document");
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        let schemas = document["components"]["schemas"].as_object().expect("schemas");
        for name in schemas.keys() {
            let plain = name.chars().all(|c| c.is_ascii_alphanumeric());
            assert!(plain, "the schema '{name}' needs a plain name, which clients use for a type");
        }
    }
}

#[test]
fn operations_have_distinct_names() {
    for (_, document) in documents() {
        let paths = document["paths"].as_object().expect("paths");
        let methods = paths.values().flat_map(|path| path.as_object().expect("methods").values());
        let names: Vec<&str> =
            methods.map(|operation| operation["operationId"].as_str().expect("a name")).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    }
}

/// Every status of an error has a response.
#[test]
fn statuses_of_errors_are_described() {
    for status in [400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 431, 503, 504] {
        assert_ne!(operations::error_name(status), "Internal", "{status}");
    }
}

/// The rows of the ledger are written by another crate, so their schemas stand in this one.
#[test]
fn rows_of_ledger_match_their_schemas() {
    let document = current();
    let check = |name: &str, row: Value| {
        let schema = &document["components"]["schemas"][name];
        let keys = |value: &Value| -> BTreeSet<String> {
            value.as_object().into_iter().flat_map(|object| object.keys().cloned()).collect()
        };
        assert_eq!(keys(&schema["properties"]), keys(&row), "{name} in gateway/src/api/usage.rs");
    };
    let text = || Some("a".to_owned());
    let row = UsageRow {
        tenant: text(),
        key: text(),
        model: text(),
        day: Some(UtcDay(20_000)),
        tier: Some(Tier::Batch),
        device_class: "cpu".to_owned(),
        requests: 1,
        prompt_tokens: 1,
        cached_tokens: 0,
        completion_tokens: 1,
        attributed_ns: 1,
        reference_ns: 1,
        gpu_ns: 0,
        energy_mj: None,
    };
    check("UsageRow", json!(row));
    check("EntryRow", json!(EntryRow { id: "e".to_owned(), account: "tenant", amount_ns: 1 }));
}
