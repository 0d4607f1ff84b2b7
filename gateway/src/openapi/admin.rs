//! The OpenAPI document of the admin API, from the table of its routes.

use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, header};
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::{Content, RouteOperation, components, operations};
use crate::admin::{DocumentedRoute, documented_routes};

/// Answers `GET /openapi.json` on the admin listener.
pub(crate) async fn show() -> Response {
    let mut response = document().to_string().into_response();
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Returns the document. A route without an operation is left out.
pub(super) fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12().for_serialize();
    settings.definitions_path = "/components/schemas".into();
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for DocumentedRoute { method, path, roles, operation } in documented_routes(&mut generator) {
        let Some(operation) = operation else { continue };
        // A parameter that takes the rest of the path has a star in the router alone.
        let path = path.replace("{*", "{");
        let described = operation.to_json(&path, roles.as_deref());
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method.as_str().to_ascii_lowercase()] = described;
    }
    let key = "The key in `admin.key` of the data folder, or the key of a named admin.";
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "tollgate admin",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "State, keys, limits and the configuration of a tollgate gateway",
            "description": "docs/admin-api.md has the meaning of each route.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "https://127.0.0.1:9443", "description": "The default address" }],
        "security": [{ "bearer": [] }],
        "paths": paths,
        "components": components(&mut generator, key),
    })
}

impl RouteOperation {
    /// Returns the operation. `roles` are those that may use the route; `None` if it needs no
    /// key.
    fn to_json(&self, path: &str, roles: Option<&str>) -> Value {
        let Self { id, summary, query, body, status, answer, other, errors } = self;
        let mut responses = Map::new();
        let headers = json!({ "x-request-id": { "$ref": "#/components/headers/RequestId" } });
        let response = |meaning: &str, content: &Content| json!({ "description": meaning, "headers": headers, "content": content.to_json() });
        responses.insert(status.to_string(), response("The answer.", answer));
        for status in *errors {
            let reference = format!("#/components/responses/{}", operations::error_name(*status));
            responses.insert(status.to_string(), json!({ "$ref": reference }));
        }
        for (status, meaning, content) in other {
            responses.insert(status.to_string(), response(meaning, content));
        }
        let mut parameters: Vec<Value> = path_names(path).map(path_parameter).collect();
        parameters.extend(query.iter().cloned());
        let mut operation = json!({
            "operationId": id, "summary": summary, "parameters": parameters,
            "responses": responses,
        });
        match roles {
            Some(roles) => operation["description"] = json!(format!("For {roles}.")),
            // The document asks for a key everywhere, so an open route has to say otherwise.
            None => operation["security"] = json!([]),
        }
        if let Some(schema) = body {
            operation["requestBody"] = json!({ "required": true,
                "content": { "application/json": { "schema": schema } } });
        }
        operation
    }
}

impl Content {
    fn to_json(&self) -> Value {
        let text = json!({ "schema": { "type": "string" } });
        match self {
            Self::Json(schema) => json!({ "application/json": { "schema": schema } }),
            Self::Text => json!({ "text/plain": text }),
            Self::Metrics => json!({ "text/plain": text, "application/openmetrics-text": text }),
            Self::Events(schema) => {
                let event = json!({ "type": "object", "required": ["data"],
                    "description": "One server-sent event each second.",
                    "properties": { "data": { "type": "string",
                        "contentMediaType": "application/json", "contentSchema": schema } } });
                json!({ "application/json": { "schema": schema },
                    "text/event-stream": { "schema": event } })
            }
        }
    }
}

/// Returns the names of a path's parameters.
fn path_names(path: &str) -> impl Iterator<Item = &str> {
    path.split('{').skip(1).filter_map(|rest| rest.split('}').next())
}

fn path_parameter(name: &str) -> Value {
    json!({ "name": name, "in": "path", "required": true,
        "schema": { "type": "string", "minLength": 1 } })
}
