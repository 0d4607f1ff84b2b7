//! The operations of the OpenAPI document, one for each route of the public API.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};
use tollgate_openai::RequestLimits;
use tollgate_openai::schema::{self, DialectSchemas};

use crate::api::limits::LimitList;
use crate::api::models::{ModelBody, ModelList};
use crate::api::usage::{RequestUsage, UsageList};

/// One operation: a method on a path.
pub(super) struct Operation {
    /// The name of the operation in generated clients.
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    pub(super) parameters: Vec<Value>,
    /// The content of the body, by media type; `None` if the operation has none.
    pub(super) request: Option<Value>,
    /// The content of an answer with status 200, by media type.
    pub(super) answer: Value,
    /// The statuses of errors.
    pub(super) errors: &'static [u16],
}

/// Returns the operation of a route such as `GET /v1/models`; `None` if none is described here.
pub(super) fn of(
    route: &str,
    limits: &RequestLimits,
    generator: &mut SchemaGenerator,
) -> Option<Operation> {
    let read = Operation {
        id: "",
        summary: "",
        parameters: Vec::new(),
        request: None,
        answer: Value::Null,
        errors: READ_ERRORS,
    };
    Some(match route {
        "POST /v1/chat/completions" => {
            let schemas = schema::chat(limits, generator);
            work("createChatCompletion", "Answers a chat, whole or as a stream", schemas)
        }
        "POST /v1/completions" => {
            let schemas = schema::completions(limits, generator);
            work("createCompletion", "Completes a prompt, whole or as a stream", schemas)
        }
        "GET /v1/models" => Operation {
            id: "listModels",
            summary: "Lists the models that the key may use",
            answer: json_of::<ModelList>(generator),
            ..read
        },
        "GET /v1/models/{name}" => Operation {
            id: "retrieveModel",
            summary: "Shows a model that the key may use",
            parameters: vec![path_parameter("name", "The name of a model.")],
            answer: json_of::<ModelBody>(generator),
            errors: FIND_ERRORS,
            ..read
        },
        "GET /v1/limits" => Operation {
            id: "listLimits",
            summary: "Lists every limit of the key with what is left of it",
            answer: json_of::<LimitList>(generator),
            ..read
        },
        "GET /v1/usage" => Operation {
            id: "listUsage",
            summary: "Sums the tenant's usage",
            parameters: usage_parameters(),
            answer: json_of::<UsageList>(generator),
            errors: LEDGER_ERRORS,
            ..read
        },
        "GET /v1/usage/{id}" => Operation {
            id: "retrieveUsage",
            summary: "Shows the figures of one request",
            parameters: vec![path_parameter("id", "The identifier of a request or of an answer.")],
            answer: json_of::<RequestUsage>(generator),
            errors: LEDGER_ERRORS,
            ..read
        },
        "GET /openapi.json" => Operation {
            id: "describeApi",
            summary: "Returns this document, with the bounds of the configuration in force",
            answer: json!({ "application/json": { "schema": { "type": "object" } } }),
            ..read
        },
        _ => return super::jobs::of(route, generator),
    })
}

fn work(id: &'static str, summary: &'static str, schemas: DialectSchemas) -> Operation {
    let DialectSchemas { request, response, chunk } = schemas;
    let event = json!({
        "type": "object",
        "required": ["data"],
        "description": "One server-sent event. The data of the last one is [DONE]; a stream that \
            fails has an error before that.",
        "properties": { "data": { "type": "string", "contentMediaType": "application/json",
            "contentSchema": chunk } },
    });
    Operation {
        id,
        summary,
        parameters: vec![idempotency_key()],
        request: Some(json!({ "application/json": { "schema": request } })),
        answer: json!({
            "application/json": { "schema": response },
            "text/event-stream": { "schema": event },
        }),
        errors: WORK_ERRORS,
    }
}

pub(super) fn json_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    json!({ "application/json": { "schema": generator.subschema_for::<T>() } })
}

pub(super) fn path_parameter(name: &str, meaning: &str) -> Value {
    json!({ "name": name, "in": "path", "required": true, "description": meaning,
        "schema": { "type": "string", "minLength": 1 } })
}

pub(super) fn idempotency_key() -> Value {
    json!({ "name": "Idempotency-Key", "in": "header", "required": false,
        "description": "A new value for each request that may be sent twice.",
        "schema": { "type": "string", "pattern": "^[!-~]{1,255}$" } })
}

fn usage_parameters() -> Vec<Value> {
    let parameter = |name: &str, meaning: &str, schema: Value| {
        json!({ "name": name, "in": "query", "required": false, "description": meaning,
            "schema": schema })
    };
    let day = json!({ "type": "string", "format": "date" });
    let columns = "The columns of the rows: `model`, `day`, `key` and `tier`, with commas between.";
    vec![
        parameter("start", "The first day (UTC).", day.clone()),
        parameter("end", "The last day (UTC), inclusive.", day),
        parameter("model", "One model.", json!({ "type": "string", "minLength": 1 })),
        parameter("key", "One key, by its id.", json!({ "type": "string", "minLength": 1 })),
        parameter("group_by", columns, json!({ "type": "string" })),
    ]
}

/// Returns the responses of all errors by their names.
pub(super) fn error_responses() -> Value {
    let mut responses = Map::new();
    for (status, name, meaning) in ERRORS {
        let mut headers = json!({ "x-request-id": { "$ref": "#/components/headers/RequestId" } });
        // Of the errors, only these may be over after a wait.
        if matches!(status, 409 | 429 | 503) {
            headers["retry-after"] = json!({ "$ref": "#/components/headers/RetryAfter" });
        }
        let response = json!({ "description": meaning, "headers": headers, "content": {
            "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } } });
        responses.insert((*name).to_owned(), response);
    }
    Value::Object(responses)
}

/// Returns the name of the response of an error.
pub(super) fn error_name(status: u16) -> &'static str {
    let found = ERRORS.iter().find(|(known, ..)| *known == status);
    found.map_or("Internal", |(_, name, _)| name)
}

/// The errors by status: the name of the response, and its meaning.
pub(super) const ERRORS: &[(u16, &str, &str)] = &[
    (400, "BadRequest", "The request is wrong; `param` names the field."),
    (401, "Unauthorized", "The credential is missing or does not authenticate."),
    (403, "Forbidden", "The key may not use this endpoint."),
    (404, "NotFound", "No such thing, or not for this key."),
    (408, "RequestTimeout", "The body arrived too slowly."),
    (
        409,
        "Conflict",
        "The state does not allow it, or an Idempotency-Key leaves no answer to repeat.",
    ),
    (413, "PayloadTooLarge", "The body is too large."),
    (415, "UnsupportedMediaType", "The body is compressed."),
    (422, "UnprocessableContent", "The Idempotency-Key was used with another body."),
    (429, "TooManyRequests", "A limit is reached; the message names it."),
    (431, "HeadersTooLarge", "The headers are too many or too large."),
    (500, "Internal", "The gateway or a worker failed."),
    (503, "Unavailable", "No worker, a full queue, a drain, or usage cannot be recorded."),
    (504, "DeadlineExceeded", "No token came within the deadline."),
];

const WORK_ERRORS: &[u16] = &[400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 431, 500, 503, 504];
const READ_ERRORS: &[u16] = &[400, 401, 403, 413, 415, 429, 431, 500];
const FIND_ERRORS: &[u16] = &[400, 401, 403, 404, 413, 415, 429, 431, 500];
const LEDGER_ERRORS: &[u16] = &[400, 401, 403, 404, 413, 415, 429, 431, 500, 503];
