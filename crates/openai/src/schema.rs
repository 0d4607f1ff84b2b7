//! The JSON schemas of requests and responses, for a document of the API. The schemas of
//! responses come from the types that are written. A request is read field by field, so its
//! schema stands here; tests fail if a field has none, or if the schema and the parser differ
//! about what is served.

use std::ops::RangeInclusive;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Value, json};
use tollgate_domain::REPETITION_PENALTIES;

use crate::request::{MAX_IDENTIFIER_BYTES, MAX_MODEL_BYTES, MAX_STOP_TOKENS, MAX_TOKENS};
use crate::{
    FLEX, RequestLimits, SERVICE_TIER, chat, completions, schema_check, structured, tools,
};

/// The schemas of one dialect.
#[derive(Clone, Debug)]
pub struct DialectSchemas {
    /// The schema of the request's body.
    pub request: Value,
    /// The schema of a response in one piece.
    pub response: Schema,
    /// The schema of the data of one event of a stream.
    pub chunk: Schema,
}

/// Returns the schemas of `POST /v1/chat/completions`. The types of the response become
/// definitions of `generator`.
pub fn chat(limits: &RequestLimits, generator: &mut SchemaGenerator) -> DialectSchemas {
    let (response, chunk) = chat::response_schemas(generator);
    let mut fields = shared(limits);
    fields.extend([
        ("messages", messages(limits)),
        ("max_tokens", max_tokens("the older name of `max_completion_tokens`", 1)),
        ("max_completion_tokens", max_tokens("the most tokens of an answer", 1)),
        ("logprobs", flag("reports the log-probabilities of the answer's tokens")),
        (
            "top_logprobs",
            integer(
                0..=limits.top_logprobs.into(),
                "alternatives for each token; needs `logprobs`",
            ),
        ),
        ("response_format", response_format()),
        ("tools", tools_field()),
        ("tool_choice", tool_choice()),
        ("parallel_tool_calls", flag("the answer may have more than one call")),
        ("safety_identifier", identifier()),
        ("prompt_cache_key", identifier()),
        (
            "chat_template_kwargs",
            json!({ "type": ["object", "null"], "maxProperties": chat::MAX_ARGUMENTS,
                "description": "Variables for the model's chat template, with vLLM's meaning." }),
        ),
    ]);
    DialectSchemas { request: body(fields, &["model", "messages"]), response, chunk }
}

/// Returns the schemas of `POST /v1/completions`. The types of the response become
/// definitions of `generator`.
pub fn completions(limits: &RequestLimits, generator: &mut SchemaGenerator) -> DialectSchemas {
    let (response, chunk) = completions::response_schemas(generator);
    let logprobs = limits.top_logprobs.min(completions::MAX_LOGPROBS);
    let mut fields = shared(limits);
    fields.extend([
        ("prompt", prompt(limits)),
        ("max_tokens", max_tokens("the most tokens of an answer; 0 needs `echo`", 0)),
        ("best_of", integer(1..=limits.choices.into(), "accepted if it equals `n`")),
        ("logprobs", integer(0..=logprobs.into(), "alternatives for each token")),
        ("echo", flag("repeats the prompt before the answer")),
        (
            "suffix",
            json!({ "type": ["string", "null"],
                "description": "The text after the answer: the model fills in the middle." }),
        ),
    ]);
    DialectSchemas { request: body(fields, &["model", "prompt"]), response, chunk }
}

/// Makes the schema of `T` a definition with the name `name`, and returns a reference to it.
pub(crate) fn named<T: JsonSchema>(name: &str, generator: &mut SchemaGenerator) -> Schema {
    let schema = T::json_schema(generator);
    let path = generator.settings().definitions_path.clone();
    // By a name of its own, because the generic types serve both dialects.
    generator.definitions_mut().insert(name.to_owned(), schema.to_value());
    Schema::new_ref(format!("#{path}/{name}"))
}

/// A field of an object and its schema.
type FieldSchema = (&'static str, Value);

/// Returns the fields that every dialect shares.
fn shared(limits: &RequestLimits) -> Vec<FieldSchema> {
    let (least, most) = (*REPETITION_PENALTIES.start(), *REPETITION_PENALTIES.end());
    vec![
        (
            "model",
            json!({ "type": "string", "minLength": 1, "maxLength": MAX_MODEL_BYTES,
                "description": "The name of a model that the key may use." }),
        ),
        ("n", integer(1..=limits.choices.into(), "choices for each prompt")),
        ("temperature", number(0.0..=2.0, "0 is greedy")),
        (
            "top_k",
            integer(-1..=MAX_TOKENS.into(), "samples from the likeliest tokens; -1 and 0 mean all"),
        ),
        ("top_p", number(0.0..=1.0, "the probability mass to sample from")),
        ("min_p", number(0.0..=1.0, "the least part of the likeliest token's probability")),
        ("repetition_penalty", number(least..=most, "makes earlier tokens less likely; 1 is none")),
        ("presence_penalty", number(-2.0..=2.0, "for each token that has occurred")),
        ("frequency_penalty", number(-2.0..=2.0, "for each occurrence of a token")),
        (
            "logit_bias",
            json!({ "type": ["object", "null"], "maxProperties": limits.logit_bias,
                // Nine digits always fit into a token id of 32 bits.
                "propertyNames": { "pattern": "^[0-9]{1,9}$" },
                "additionalProperties": { "type": "number", "minimum": -100, "maximum": 100 },
                "description": "A bias for each token id." }),
        ),
        ("seed", integer(i64::MIN..=i64::MAX, "the seed of the random numbers")),
        ("stop", stop(limits)),
        (
            "stop_token_ids",
            json!({ "type": ["array", "null"], "maxItems": MAX_STOP_TOKENS,
                "items": { "type": "integer", "minimum": 0, "maximum": u32::MAX },
                "description": "Ids of tokens that end the answer." }),
        ),
        ("ignore_eos", flag("the model's own end tokens do not end the answer")),
        ("stream", flag("answers with server-sent events")),
        (
            "stream_options",
            json!({ "type": ["object", "null"],
                "properties": {
                    "include_usage": { "type": ["boolean", "null"] },
                    "include_obfuscation": { "type": ["boolean", "null"] },
                },
                "description": "Needs `stream`." }),
        ),
        ("structured_outputs", structured_outputs()),
        ("guided_json", json_schema()),
        ("guided_regex", regex()),
        ("guided_choice", texts()),
        ("user", identifier()),
        (
            SERVICE_TIER,
            json!({ "enum": ["auto", "default", FLEX, null],
                "description": "`flex` runs the request in the batch tier, if the plan allows it." }),
        ),
        (
            "metadata",
            json!({ "type": ["object", "null"], "maxProperties": 16,
                "propertyNames": { "maxLength": 64 },
                "additionalProperties": { "type": "string", "maxLength": 512 },
                "description": "Accepted and not stored." }),
        ),
    ]
}

fn messages(limits: &RequestLimits) -> Value {
    let part = json!({ "type": "object", "required": ["type", "text"],
        "properties": { "type": { "const": "text" }, "text": { "type": "string" } } });
    let call = json!({ "type": "object", "required": ["id", "function"],
        "properties": {
            "id": { "type": "string", "minLength": 1, "maxLength": tools::MAX_ID_BYTES },
            "type": { "const": "function" },
            "function": { "type": "object", "required": ["name", "arguments"],
                "properties": {
                    "name": { "type": "string", "minLength": 1, "maxLength": tools::MAX_NAME_BYTES },
                    "arguments": { "type": "string", "description": "A JSON object." },
                } },
        } });
    let message = json!({ "type": "object", "required": ["role", "content"],
        "properties": {
            "role": { "enum": ["system", "developer", "user", "assistant", "tool"] },
            "tool_calls": { "type": ["array", "null"], "maxItems": tools::MAX_CALLS, "items": call },
            "tool_call_id": { "type": ["string", "null"], "maxLength": tools::MAX_ID_BYTES,
                "description": "The call that a tool's message answers." },
            "reasoning_content": { "type": ["string", "null"] },
            "content": { "anyOf": [
                { "type": "string" },
                { "type": "array", "maxItems": chat::MAX_PARTS, "items": part },
            ] },
            "name": { "type": ["string", "null"], "maxLength": chat::MAX_NAME_BYTES },
        } });
    json!({ "type": "array", "minItems": 1, "maxItems": limits.messages, "items": message,
        "description": "The conversation; the model writes its next message." })
}

fn prompt(limits: &RequestLimits) -> Value {
    let text = json!({ "type": "string", "minLength": 1 });
    let tokens = json!({ "type": "array", "minItems": 1, "maxItems": completions::MAX_PROMPT_TOKENS,
        "items": { "type": "integer", "minimum": 0, "maximum": u32::MAX } });
    let several = |one: &Value| {
        json!({ "type": "array", "minItems": 1, "maxItems": limits.prompts,
        "items": one })
    };
    json!({ "anyOf": [text, several(&text), tokens, several(&tokens)],
        "description": "A text, token ids, or several of either." })
}

fn response_format() -> Value {
    let format = |name: &str| {
        json!({ "type": "object", "required": ["type"],
        "properties": { "type": { "const": name } } })
    };
    let described = json!({ "type": "object", "required": ["schema"],
        "properties": {
            "name": { "type": ["string", "null"], "maxLength": structured::MAX_NAME_BYTES },
            "description":
                { "type": ["string", "null"], "maxLength": structured::MAX_DESCRIPTION_BYTES },
            "schema": { "type": "object" },
            "strict": { "type": ["boolean", "null"] },
        } });
    let schema = json!({ "type": "object", "required": ["type", "json_schema"],
        "properties": { "type": { "const": "json_schema" }, "json_schema": described } });
    json!({ "anyOf": [format("text"), format("json_object"), schema, { "type": "null" }],
        "description": "The form of the answer. Only keywords that are enforced are accepted." })
}

fn tools_field() -> Value {
    let function = json!({ "type": "object", "required": ["name"],
        "properties": {
            "name": tool_name(),
            "description": { "type": ["string", "null"] },
            "parameters": { "type": ["object", "null"] },
            "strict": { "type": ["boolean", "null"] },
        } });
    let tool = json!({ "type": "object", "required": ["type", "function"],
        "properties": { "type": { "const": "function" }, "function": function } });
    json!({ "type": ["array", "null"], "maxItems": tools::MAX_TOOLS, "items": tool,
        "description": "The functions that the model may call." })
}

fn tool_choice() -> Value {
    let named = json!({ "type": "object", "required": ["type", "function"],
        "properties": { "type": { "const": "function" },
            "function": { "type": "object", "required": ["name"],
                "properties": { "name": tool_name() } } } });
    json!({ "anyOf": [{ "enum": ["none", "auto", "required", null] }, named],
        "description": "The calls that the answer must or may have." })
}

fn tool_name() -> Value {
    json!({ "type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$" })
}

fn structured_outputs() -> Value {
    json!({ "type": ["object", "null"],
                "properties": {
                    "json": json_schema(),
                    "regex": regex(),
                    "choice": texts(),
                    "json_object": { "type": ["boolean", "null"] },
                },
                "description": "The form of the answer, with vLLM's meaning: one of these." })
}

/// Returns the schema of a field that holds a schema, as an object or as text.
fn json_schema() -> Value {
    json!({ "type": ["object", "string", "null"],
        "description": "The answer is JSON that is valid under this schema." })
}

fn regex() -> Value {
    json!({ "type": ["string", "null"], "minLength": 1,
        "maxLength": schema_check::MAX_PATTERN_BYTES,
        "description": "The answer matches this expression as a whole." })
}

fn texts() -> Value {
    json!({ "type": ["array", "null"], "minItems": 1, "maxItems": structured::MAX_CHOICES,
        "items": { "type": "string", "minLength": 1 },
        "description": "The answer is one of these texts." })
}

fn stop(limits: &RequestLimits) -> Value {
    // A schema counts characters and the gateway counts bytes, so the schema allows more.
    let one = json!({ "type": "string", "minLength": 1, "maxLength": limits.stop_bytes });
    json!({ "anyOf": [
            { "type": "string", "maxLength": limits.stop_bytes },
            { "type": "array", "maxItems": limits.stop, "items": one },
            { "type": "null" },
        ],
        "description": "Texts that end the answer, bytes counted." })
}

fn max_tokens(meaning: &str, least: i64) -> Value {
    integer(least..=MAX_TOKENS.into(), meaning)
}

fn integer(range: RangeInclusive<i64>, meaning: &str) -> Value {
    json!({ "type": ["integer", "null"], "minimum": range.start(), "maximum": range.end(),
        "description": sentence(meaning) })
}

fn number(range: RangeInclusive<f64>, meaning: &str) -> Value {
    json!({ "type": ["number", "null"], "minimum": range.start(), "maximum": range.end(),
        "description": sentence(meaning) })
}

fn flag(meaning: &str) -> Value {
    json!({ "type": ["boolean", "null"], "description": sentence(meaning) })
}

fn identifier() -> Value {
    json!({ "type": ["string", "null"], "maxLength": MAX_IDENTIFIER_BYTES,
        "description": "Accepted and not stored." })
}

/// Returns `meaning` with a capital letter and a full stop.
fn sentence(meaning: &str) -> String {
    let mut chars = meaning.chars();
    let first = chars.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(chars).chain(['.']).collect()
}

fn body(fields: Vec<FieldSchema>, required: &[&str]) -> Value {
    let properties: serde_json::Map<String, Value> =
        fields.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect();
    json!({ "type": "object", "required": required, "properties": properties })
}

#[cfg(test)]
mod tests;
