//! The OpenAPI document of the public API: the paths of the route table, the schemas of the
//! types that handlers write, and the bounds of the config in force.

pub(crate) mod admin;
mod jobs;
mod operations;

use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, header};
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};
use tollgate_openai::RequestLimits;

use self::operations::Operation;
use crate::api::{Api, Call, request_limits};
use crate::reply::ApiError;
use crate::routes;

/// Answers `GET /openapi.json` with the bounds of the config in force.
pub(crate) async fn show(_: Api, call: Call) -> Result<Response, ApiError> {
    let limits = request_limits(&call.caller.tenant.config().gateway().requests);
    let mut response = document(&limits).to_string().into_response();
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    Ok(response)
}

/// Returns the document. A route without an operation is left out.
fn document(limits: &RequestLimits) -> Value {
    // The types are those of answers; the schemas of requests are written by hand.
    let mut settings = SchemaSettings::draft2020_12().for_serialize();
    settings.definitions_path = "/components/schemas".into();
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for (method, path) in routes::documented_routes() {
        let Some(operation) = operations::of(&format!("{method} {path}"), limits, &mut generator)
        else {
            continue;
        };
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method.to_ascii_lowercase()] = operation.to_json();
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "tollgate",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "A part of the OpenAI API with limits and bills by device time",
            "description": "docs/api.md has the meaning of each field and of each error.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "https://127.0.0.1:8443", "description": "The default address" }],
        "security": [{ "bearer": [] }],
        "paths": paths,
        "components": components(&mut generator, "An API key, or a JWT of a configured issuer."),
    })
}

/// The operation of a route of the admin API.
pub(crate) struct RouteOperation {
    /// The name of the operation in generated clients.
    pub(crate) id: &'static str,
    pub(crate) summary: &'static str,
    /// The parameters of the query string.
    pub(crate) query: Vec<Value>,
    /// The schema of the body; `None` if the operation has none.
    pub(crate) body: Option<Value>,
    /// The status of the answer.
    pub(crate) status: u16,
    pub(crate) answer: Content,
    /// Answers with another status and a form of their own: status, meaning and content.
    pub(crate) other: Vec<(u16, &'static str, Content)>,
    /// The statuses of errors.
    pub(crate) errors: &'static [u16],
}

/// The content of an answer of the admin API.
#[derive(Clone)]
pub(crate) enum Content {
    /// JSON with this schema.
    Json(Value),
    /// Plain text.
    Text,
    /// Metrics in one of two text formats.
    Metrics,
    /// JSON with this schema, or events with such JSON.
    Events(Value),
}

/// Returns everything that operations refer to. `credential` says what the bearer token is.
fn components(generator: &mut SchemaGenerator, credential: &str) -> Value {
    // Taken last, because each operation adds the schemas that it names.
    let mut schemas = generator.take_definitions(true);
    schemas.insert("Error".to_owned(), error_schema());
    json!({
        "schemas": schemas,
        "securitySchemes": { "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": credential,
        } },
        "headers": {
            "RequestId": {
                "description": "The identifier of the request, for GET /v1/usage/{id}.",
                "schema": { "type": "string" },
            },
            "RetryAfter": {
                "description": "Seconds to wait; absent if the refusal does not end by itself.",
                "schema": { "type": "integer", "minimum": 1 },
            },
        },
        "responses": operations::error_responses(),
    })
}

fn error_schema() -> Value {
    json!({
        "type": "object",
        "required": ["error"],
        "additionalProperties": false,
        "properties": { "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": false,
            "properties": {
                "message": { "type": "string" },
                "type": { "type": "string" },
                "param": { "type": ["string", "null"], "description": "The field that is wrong." },
                "code": { "type": ["string", "null"] },
            },
        } },
    })
}

impl Operation {
    fn to_json(&self) -> Value {
        let Self { id, summary, parameters, request, answer, errors } = self;
        let mut responses = Map::new();
        let mut headers = json!({ "x-request-id": { "$ref": "#/components/headers/RequestId" } });
        if errors.contains(&409) {
            headers["x-tollgate-replay-of"] = json!({
                "description": "The request whose answer this is, for a repeated one.",
                "schema": { "type": "string" },
            });
        }
        responses.insert(
            "200".to_owned(),
            json!({ "description": "The answer.", "headers": headers, "content": answer }),
        );
        for status in *errors {
            let reference = format!("#/components/responses/{}", operations::error_name(*status));
            responses.insert(status.to_string(), json!({ "$ref": reference }));
        }
        let mut operation = json!({
            "operationId": id, "summary": summary, "parameters": parameters,
            "responses": responses,
        });
        if let Some(content) = request {
            operation["requestBody"] = json!({ "required": true, "content": content });
        }
        operation
    }
}

#[cfg(test)]
mod tests;
