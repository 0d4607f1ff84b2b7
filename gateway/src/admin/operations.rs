//! The operations of the admin API for its OpenAPI document: one for each route.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};
use tollgate_openai::batches::BatchObject;
use tollgate_openai::files::ListObject;

use super::admins::{CreatedAdmin, Wanted};
use super::gateways::{FreedHome, HomeRows};
use super::keys::{CreatedKey, KeyListRow, KeysQuery, Revocation, RevokedKey, Rotation};
use super::live::LiveView;
use super::page::{Page, PageQuery};
use super::penalties::{Lifted, Penalties};
use super::raises::{EndedQuery, RaisesOfTenant, WantedRaise};
use super::reload::{Mistaken, Options};
use super::tenants::{Refusals, TenantRow, TenantState};
use super::usage::{StatementOptions, UsageFilter};
use super::workers::Changed;
use super::{Readiness, Status};
use crate::api::usage::UsageRowSchema;
use crate::auth::{AdminRecord, KeyRequest};
use crate::openapi::{Content, RouteOperation};
use crate::reload::ReloadReport;

/// Returns the operation of a route such as `GET /v1/keys`; `None` if none is described here.
pub(crate) fn of(route: &str, schemas: &mut SchemaGenerator) -> Option<RouteOperation> {
    Some(match route {
        "GET /healthz" => read("health", "Answers while the process runs", Content::Text, OPEN),
        "GET /readyz" => {
            let answer = json_of::<Readiness>(schemas);
            let ready = read("readiness", "Tells if requests will succeed", answer.clone(), OPEN);
            RouteOperation { other: vec![(503, "Requests would fail.", answer)], ..ready }
        }
        "GET /metrics" => read("metrics", "Shows the metrics", Content::Metrics, OPEN),
        "GET /openapi.json" => {
            let answer = Content::Json(json!({ "type": "object" }));
            read("describeAdminApi", "Returns this document", answer, READ)
        }
        "GET /v1/status" => {
            let answer = json_of::<Status>(schemas);
            read("status", "Shows workers, queues and the health of devices", answer, READ)
        }
        "GET /v1/live" => {
            let answer = Content::Events(schema_of::<LiveView>(schemas));
            read("live", "Shows the state of the moment, once or each second", answer, READ)
        }
        "GET /audit/checkpoint" => {
            read("newestCheckpoint", "Returns the newest signed checkpoint", Content::Text, LEDGER)
        }
        "GET /audit/key" => {
            read("auditKey", "Returns the public key of the audit log", Content::Text, FIND)
        }
        "GET /v1/penalties" => {
            let answer = json_of::<Penalties>(schemas);
            read("listPenalties", "Lists the penalties that hold", answer, READ)
        }
        "DELETE /v1/penalties/tenant/{*name}" => {
            let answer = json_of::<Lifted>(schemas);
            read("liftTenantPenalty", "Lifts the penalties of a tenant", answer, LEDGER)
        }
        "DELETE /v1/penalties/source/{*name}" => {
            let answer = json_of::<Lifted>(schemas);
            read("liftSourcePenalty", "Lifts the penalties of an address", answer, LEDGER)
        }
        "GET /v1/gateways" => {
            let answer = json_of::<HomeRows>(schemas);
            read("listGateways", "Lists the gateways that share a database server", answer, LEDGER)
        }
        "POST /v1/gateways/{home}/free" => {
            let answer = json_of::<FreedHome>(schemas);
            read("freeGateway", "Frees what a lost gateway has of the caps", answer, CANCEL)
        }
        "POST /v1/workers/{worker}/rest" => {
            let answer = json_of::<Changed>(schemas);
            read("restWorker", "Lets a worker get no new requests", answer, LEDGER)
        }
        "POST /v1/workers/{worker}/wake" => {
            let answer = json_of::<Changed>(schemas);
            read("wakeWorker", "Ends the rest of a worker", answer, LEDGER)
        }
        _ => {
            return of_config(route, schemas)
                .or_else(|| of_batches(route, schemas))
                .or_else(|| of_names(route, schemas));
        }
    })
}

fn of_config(route: &str, schemas: &mut SchemaGenerator) -> Option<RouteOperation> {
    let (id, summary, query) = match route {
        "GET /config/difference" => {
            ("configDifference", "Shows what a reload would change", Vec::new())
        }
        "POST /config/reload" => {
            ("reloadConfig", "Reads the configuration again", parameters::<Options>())
        }
        _ => return None,
    };
    let answer = json_of::<ReloadReport>(schemas);
    let mistakes = json_of::<Mistaken>(schemas);
    let other = vec![(422, "The files have mistakes; nothing has changed.", mistakes)];
    Some(RouteOperation { query, other, ..read(id, summary, answer, LEDGER) })
}

fn of_batches(route: &str, schemas: &mut SchemaGenerator) -> Option<RouteOperation> {
    Some(match route {
        "GET /v1/tenants/{tenant}/batches" => {
            let answer = json_of::<ListObject<BatchObject>>(schemas);
            let list = read("listBatches", "Lists the batches of a tenant", answer, LEDGER);
            RouteOperation { query: parameters::<PageQuery>(), ..list }
        }
        "GET /v1/tenants/{tenant}/batches/{batch}" => {
            let answer = json_of::<BatchObject>(schemas);
            read("showBatch", "Shows a batch of a tenant", answer, LEDGER)
        }
        "POST /v1/tenants/{tenant}/batches/{batch}/cancel" => {
            let answer = json_of::<BatchObject>(schemas);
            read("cancelBatch", "Cancels a batch of a tenant", answer, CANCEL)
        }
        _ => return None,
    })
}

fn of_names(route: &str, schemas: &mut SchemaGenerator) -> Option<RouteOperation> {
    Some(match route {
        "GET /v1/admins" => {
            let answer = json_of::<Page<AdminRecord>>(schemas);
            let list = read("listAdmins", "Lists the named admins", answer, READ);
            RouteOperation { query: parameters::<PageQuery>(), ..list }
        }
        "POST /v1/admins" => {
            let answer = json_of::<CreatedAdmin>(schemas);
            create("createAdmin", "Creates a named admin", body::<Wanted>(), answer)
        }
        "DELETE /v1/admins/{name}" => {
            let answer = json_of::<AdminRecord>(schemas);
            read("revokeAdmin", "Revokes a named admin", answer, FIND)
        }
        "GET /v1/keys" => {
            let answer = json_of::<Page<KeyListRow>>(schemas);
            let list = read("listKeys", "Lists the API keys", answer, READ);
            RouteOperation { query: parameters::<KeysQuery>(), ..list }
        }
        "POST /v1/keys" => {
            let answer = json_of::<CreatedKey>(schemas);
            create("createKey", "Creates an API key", body::<KeyRequest>(), answer)
        }
        "POST /v1/keys/{key}/rotate" => {
            let answer = json_of::<CreatedKey>(schemas);
            create("rotateKey", "Creates a key in place of another", body::<Rotation>(), answer)
        }
        "DELETE /v1/keys/{key}" => {
            let answer = json_of::<RevokedKey>(schemas);
            let revoke = read("revokeKey", "Revokes an API key", answer, FIND);
            RouteOperation { query: parameters::<Revocation>(), ..revoke }
        }
        _ => return of_tenants(route, schemas),
    })
}

fn of_tenants(route: &str, schemas: &mut SchemaGenerator) -> Option<RouteOperation> {
    Some(match route {
        "GET /v1/usage" => {
            let answer = json_of::<Page<UsageRowSchema>>(schemas);
            let usage = read("listAllUsage", "Sums the usage of all tenants", answer, LEDGER);
            RouteOperation { query: parameters::<UsageFilter>(), ..usage }
        }
        "GET /v1/tenants" => {
            let answer = json_of::<Page<TenantRow>>(schemas);
            let list = read("listTenants", "Lists the tenants", answer, READ);
            RouteOperation { query: parameters::<PageQuery>(), ..list }
        }
        "GET /v1/refusals" => {
            let answer = json_of::<Refusals>(schemas);
            read("listRefusals", "Lists the refusals of the last hour by tenant", answer, READ)
        }
        "GET /v1/tenants/{tenant}" => {
            let answer = json_of::<TenantState>(schemas);
            read("showTenant", "Shows a tenant with limits, penalties and keys", answer, FIND)
        }
        "POST /v1/tenants/{tenant}/raises" => {
            let answer = json_of::<RaisesOfTenant>(schemas);
            create(
                "raiseLimits",
                "Raises limits of a tenant for a time",
                body::<WantedRaise>(),
                answer,
            )
        }
        "DELETE /v1/tenants/{tenant}/raises" => {
            let answer = json_of::<RaisesOfTenant>(schemas);
            let end = read("endRaises", "Ends raises of a tenant", answer, LEDGER);
            RouteOperation { query: parameters::<EndedQuery>(), ..end }
        }
        "GET /v1/tenants/{tenant}/statements/{month}" => {
            let answer = Content::Json(json!({ "type": "object" }));
            let statement = read("showStatement", "Returns a tenant's statement", answer, LEDGER);
            RouteOperation { query: parameters::<StatementOptions>(), ..statement }
        }
        _ => return None,
    })
}

fn read(
    id: &'static str,
    summary: &'static str,
    answer: Content,
    errors: &'static [u16],
) -> RouteOperation {
    RouteOperation {
        id,
        summary,
        query: Vec::new(),
        body: None,
        status: 200,
        answer,
        other: Vec::new(),
        errors,
    }
}

fn create(id: &'static str, summary: &'static str, body: Value, answer: Content) -> RouteOperation {
    RouteOperation { body: Some(body), status: 201, ..read(id, summary, answer, CREATE) }
}

fn json_of<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Content {
    Content::Json(schema_of::<T>(schemas))
}

fn schema_of<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Value {
    schemas.subschema_for::<T>().to_value()
}

/// Returns the schema of a body as it is read, in one piece.
fn body<T: JsonSchema>() -> Value {
    let mut settings = schemars::generate::SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    // The name of a type of this program tells clients nothing.
    schema.remove("title");
    schema.to_value()
}

/// Returns the parameters of a query string, one for each field of `T`.
fn parameters<T: JsonSchema>() -> Vec<Value> {
    let schema = body::<T>();
    let required = |name: &str| {
        schema["required"].as_array().is_some_and(|names| names.iter().any(|it| it == name))
    };
    let fields = schema["properties"].as_object().into_iter().flatten();
    let parameter = |(name, field): (&String, &Value)| {
        let mut field = field.clone();
        let description = field.as_object_mut().and_then(|field| field.remove("description"));
        // A query string has no null.
        if let Some([kind, ..]) = field["type"].as_array().map(Vec::as_slice) {
            field["type"] = kind.clone();
        }
        json!({ "name": name, "in": "query", "required": required(name), "schema": field,
            "description": description.unwrap_or_default() })
    };
    fields.map(parameter).collect()
}

/// The statuses of errors of routes that need no key.
const OPEN: &[u16] = &[400, 413, 415, 429, 431, 500];
const READ: &[u16] = &[400, 401, 403, 408, 413, 415, 429, 431, 500];
const FIND: &[u16] = &[400, 401, 403, 404, 408, 413, 415, 429, 431, 500];
const LEDGER: &[u16] = &[400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503];
const CREATE: &[u16] = LEDGER;
const CANCEL: &[u16] = &[400, 401, 403, 404, 408, 409, 413, 415, 429, 431, 500, 503];
