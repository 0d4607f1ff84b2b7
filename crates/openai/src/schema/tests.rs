//! Schemas against the parsers: each field has a schema or is refused, and no schema asks for
//! more than a parser takes.

use std::fmt;

use schemars::generate::SchemaSettings;
use serde::de::{self, Deserialize, Deserializer, Visitor};

use super::*;
use crate::chat::{ChatFields, MessageFields, PartFields};
use crate::completions::CompletionFields;
use crate::request::StreamFields;
use crate::{CHAT, COMPLETIONS, Interface};

const LIMITS: RequestLimits = RequestLimits {
    choices: 8,
    best_of: 2,
    prompts: 16,
    messages: 2_048,
    stop: 16,
    stop_bytes: 256,
    logit_bias: 300,
    top_logprobs: 20,
};

/// A format that tells the names of a struct's fields, and nothing else.
struct FieldNames<'a>(&'a mut &'static [&'static str]);

/// The error that ends [`FieldNames`].
#[derive(Debug)]
struct Told;

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the names are told")
    }
}

impl std::error::Error for Told {}

impl de::Error for Told {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self
    }
}

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = Told;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Told> {
        Err(Told)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Told> {
        *self.0 = fields;
        Err(Told)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn names<'a, T: Deserialize<'a>>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    assert!(T::deserialize(FieldNames(&mut names)).is_err());
    assert!(!names.is_empty());
    names
}

/// Returns the request's schemas of both dialects.
fn requests() -> (Value, Value) {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    (chat(&LIMITS, &mut generator).request, completions(&LIMITS, &mut generator).request)
}

/// Returns a chat whose message has the field `name` with `value`.
fn with_message_field(name: &str, value: &Value) -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": "hi", name: value }] })
}

fn with_field(request: &Value, name: &str, value: &Value) -> Value {
    let mut request = request.clone();
    request[name] = value.clone();
    request
}

/// Returns true if `dialect` refuses the field that `request` sets as one that is not served.
fn is_unserved(dialect: &dyn Interface, request: &Value) -> bool {
    let parsed = dialect.parse(&request.to_string(), &LIMITS);
    parsed.err().and_then(|violation| violation.code) == Some("unsupported_parameter")
}

/// Checks that each of `names` is in `properties`, or is refused whatever its value is.
fn check_fields(
    (what, names): (&str, &[&str]),
    properties: &Value,
    is_unserved: impl Fn(&str, &Value) -> bool,
) {
    for name in names {
        // Neither value is neutral for any field that is refused.
        let probes = [json!({ "type": "probe" }), json!("probe")];
        let refused = probes.iter().all(|probe| is_unserved(name, probe));
        match properties.get(name) {
            Some(_) => assert!(
                !refused,
                "the {what} field '{name}' has a schema in crates/openai/src/schema.rs, and the \
                 parser refuses it as unsupported"
            ),
            None => assert!(
                refused,
                "the {what} field '{name}' is served and has no schema; give it one in \
                 crates/openai/src/schema.rs"
            ),
        }
    }
    for name in properties.as_object().expect("properties").keys() {
        assert!(names.contains(&name.as_str()), "no parser knows the {what} field '{name}'");
    }
}

#[test]
fn every_request_field_has_a_schema() {
    let (chat, completion) = requests();
    let whole = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
    check_fields(("chat", names::<ChatFields>()), &chat["properties"], |name, value| {
        is_unserved(CHAT, &with_field(&whole, name, value))
    });
    let whole = json!({ "model": "m", "prompt": "hi" });
    check_fields(
        ("completion", names::<CompletionFields>()),
        &completion["properties"],
        |name, value| is_unserved(COMPLETIONS, &with_field(&whole, name, value)),
    );
    let message = &chat["properties"]["messages"]["items"]["properties"];
    check_fields(("message", names::<MessageFields>()), message, |name, value| {
        is_unserved(CHAT, &with_message_field(name, value))
    });
    let parts = &message["content"]["anyOf"][1]["items"]["properties"];
    check_fields(("part", names::<PartFields>()), parts, |_, _| false);
    let options = &chat["properties"]["stream_options"]["properties"];
    check_fields(("stream option", names::<StreamFields>()), options, |_, _| false);
}

/// The bounds of the schemas are those of the parsers, on both sides.
#[test]
fn schema_bounds_are_the_parsers_bounds() {
    let (chat, completion) = requests();
    for (dialect, schema, whole) in [
        (CHAT, &chat, json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] })),
        (COMPLETIONS, &completion, json!({ "model": "m", "prompt": "hi" })),
    ] {
        for (name, field) in schema["properties"].as_object().expect("properties") {
            for (bound, beyond) in [("minimum", -1.0), ("maximum", 1.0)] {
                let Some(value) = field.get(bound) else { continue };
                let mut request = with_field(&whole, name, value);
                // These fields need another one.
                match name.as_str() {
                    "top_logprobs" => request["logprobs"] = true.into(),
                    "best_of" => request["n"] = value.clone(),
                    "max_tokens" => request["echo"] = true.into(),
                    _ => {}
                }
                let parse = |request: &Value| dialect.parse(&request.to_string(), &LIMITS);
                assert!(parse(&request).is_ok(), "{name} {bound} {value}: {:?}", parse(&request));
                // A number beyond the range of 64 bits is no number of the parser at all.
                if name != "seed" {
                    request[name] = json!(value.as_f64().expect("a number") + beyond);
                    assert!(parse(&request).is_err(), "{name} beyond its {bound} {value}");
                }
            }
            let null = with_field(&whole, name, &Value::Null);
            let is_required = schema["required"].as_array().expect("names").contains(&json!(name));
            assert_eq!(dialect.parse(&null.to_string(), &LIMITS).is_ok(), !is_required, "{name}");
        }
    }
}

/// Definitions of responses have names that clients generate types from.
#[test]
fn response_schemas_have_plain_names() {
    let mut generator = SchemaSettings::draft2020_12().for_serialize().into_generator();
    let whole = [chat(&LIMITS, &mut generator), completions(&LIMITS, &mut generator)];
    for DialectSchemas { response, chunk, .. } in &whole {
        for schema in [response, chunk] {
            assert!(schema.get("$ref").is_some(), "{schema:?}");
        }
    }
    let names: Vec<String> = generator.definitions().keys().cloned().collect();
    for name in ["ChatCompletion", "ChatCompletionChunk", "Completion", "CompletionChunk", "Usage"]
    {
        assert!(names.contains(&name.to_owned()), "{names:?}");
    }
    let is_plain = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric());
    assert!(names.iter().all(is_plain), "{names:?}");
}
