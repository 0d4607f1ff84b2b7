//! The operations on files and batches in the OpenAPI document.

use schemars::SchemaGenerator;
use serde_json::{Value, json};
use tollgate_openai::batches::BatchObject;
use tollgate_openai::files::{DeletedFile, FileObject, ListObject};

use super::operations::{Operation, idempotency_key, json_of, path_parameter};

/// Returns the operation of a route such as `GET /v1/files`; `None` if none is described here.
pub(super) fn of(route: &str, generator: &mut SchemaGenerator) -> Option<Operation> {
    let read = Operation {
        id: "",
        summary: "",
        parameters: Vec::new(),
        request: None,
        answer: Value::Null,
        errors: ERRORS,
    };
    match route.contains("/v1/files") {
        true => on_files(route, read, generator),
        false => on_batches(route, read, generator),
    }
}

/// Returns the operation of a route of files; its other fields are those of `read`.
fn on_files(route: &str, read: Operation, generator: &mut SchemaGenerator) -> Option<Operation> {
    let file_id = || vec![path_parameter("id", "The identifier of a file.")];
    Some(match route {
        "POST /v1/files" => Operation {
            id: "createFile",
            summary: "Uploads the input of a batch",
            parameters: vec![idempotency_key()],
            request: Some(json!({ "multipart/form-data": { "schema": form() } })),
            answer: json_of::<FileObject>(generator),
            errors: MAKE_ERRORS,
        },
        "GET /v1/files" => Operation {
            id: "listFiles",
            summary: "Lists the tenant's files",
            parameters: vec![
                after("file"),
                limit(10_000),
                words("order", &["asc", "desc"]),
                words("purpose", &["batch", "batch_output"]),
            ],
            answer: json_of::<ListObject<FileObject>>(generator),
            ..read
        },
        "GET /v1/files/{id}" => Operation {
            id: "retrieveFile",
            summary: "Shows a file of the tenant",
            parameters: file_id(),
            answer: json_of::<FileObject>(generator),
            ..read
        },
        "DELETE /v1/files/{id}" => Operation {
            id: "deleteFile",
            summary: "Deletes a file of the tenant",
            parameters: file_id(),
            answer: json_of::<DeletedFile>(generator),
            errors: CHANGE_ERRORS,
            ..read
        },
        "GET /v1/files/{id}/content" => Operation {
            id: "downloadFile",
            summary: "Returns the bytes of a file",
            parameters: file_id(),
            answer: json!({ "application/jsonl": { "schema": { "type": "string" } } }),
            ..read
        },
        _ => return None,
    })
}

/// Returns the operation of a route of batches; its other fields are those of `read`.
fn on_batches(route: &str, read: Operation, generator: &mut SchemaGenerator) -> Option<Operation> {
    let batch_id = || vec![path_parameter("id", "The identifier of a batch.")];
    Some(match route {
        "POST /v1/batches" => Operation {
            id: "createBatch",
            summary: "Runs every line of a file as a request",
            parameters: vec![idempotency_key()],
            request: Some(json!({ "application/json": { "schema": request() } })),
            answer: json_of::<BatchObject>(generator),
            errors: MAKE_ERRORS,
        },
        "GET /v1/batches" => Operation {
            id: "listBatches",
            summary: "Lists the tenant's batches, newest first",
            parameters: vec![after("batch"), limit(100)],
            answer: json_of::<ListObject<BatchObject>>(generator),
            ..read
        },
        "GET /v1/batches/{id}" => Operation {
            id: "retrieveBatch",
            summary: "Shows a batch of the tenant",
            parameters: batch_id(),
            answer: json_of::<BatchObject>(generator),
            ..read
        },
        "POST /v1/batches/{id}/cancel" => Operation {
            id: "cancelBatch",
            summary: "Cancels a batch; finished answers are kept",
            parameters: batch_id(),
            answer: json_of::<BatchObject>(generator),
            errors: CHANGE_ERRORS,
            ..read
        },
        _ => return None,
    })
}

fn form() -> Value {
    json!({
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": { "type": "string", "contentMediaType": "application/octet-stream" },
            "purpose": { "const": "batch" },
            "expires_after[anchor]": { "const": "created_at" },
            "expires_after[seconds]": { "type": "integer", "minimum": 3_600, "maximum": 2_592_000 },
        },
    })
}

fn request() -> Value {
    json!({
        "type": "object",
        "required": ["input_file_id", "endpoint", "completion_window"],
        "properties": {
            "input_file_id": { "type": "string", "maxLength": 128 },
            "endpoint": { "enum": ["/v1/chat/completions", "/v1/completions"] },
            "completion_window": { "const": "24h" },
            "metadata": { "type": ["object", "null"], "maxProperties": 16,
                "propertyNames": { "maxLength": 64 },
                "additionalProperties": { "type": "string", "maxLength": 512 } },
            "output_expires_after": { "type": ["object", "null"],
                "required": ["anchor", "seconds"],
                "properties": {
                    "anchor": { "const": "created_at" },
                    "seconds": { "type": "integer", "minimum": 3_600, "maximum": 2_592_000 },
                } },
        },
    })
}

fn after(what: &str) -> Value {
    json!({ "name": "after", "in": "query", "required": false,
        "description": format!("The last {what} of the page before."),
        "schema": { "type": "string" } })
}

fn limit(most: u32) -> Value {
    json!({ "name": "limit", "in": "query", "required": false,
        "description": "The largest number of entries.",
        "schema": { "type": "integer", "minimum": 1, "maximum": most } })
}

fn words(name: &str, known: &[&str]) -> Value {
    json!({ "name": name, "in": "query", "required": false, "schema": { "enum": known } })
}

const ERRORS: &[u16] = &[400, 401, 403, 404, 413, 415, 429, 431, 500, 503];
/// The errors of a creation, whose `Idempotency-Key` may have been used for another one.
const MAKE_ERRORS: &[u16] = &[400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 431, 500, 503];
const CHANGE_ERRORS: &[u16] = &[400, 401, 403, 404, 408, 409, 413, 415, 429, 431, 500, 503];
