//! The JSON schema of the files, from the same declarations that read them.

use serde_json::{Map, Value, json};

use crate::read::Section;
use crate::sections::Root;

/// A value's schema with its description.
pub(crate) fn described(mut schema: Value, doc: &[&str]) -> Value {
    if let Some(object) = schema.as_object_mut() {
        object.insert("description".to_owned(), Value::String(sentence(doc)));
    }
    schema
}

/// A table of exactly these keys.
pub(crate) fn table(properties: Map<String, Value>, doc: &[&str]) -> Value {
    json!({
        "type": "object",
        "description": sentence(doc),
        "properties": properties,
        "additionalProperties": false,
    })
}

/// A table whose keys are names.
pub(crate) fn names(entry: Value) -> Value {
    json!({ "type": "object", "additionalProperties": entry })
}

/// The whole, as `tollgate config schema` prints it.
pub(crate) fn whole() -> Value {
    let mut schema = Root::schema();
    if let Some(object) = schema.as_object_mut() {
        object.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
        object.insert("title".to_owned(), json!("tollgate"));
    }
    schema
}

/// Doc lines as one text.
pub(crate) fn sentence(doc: &[&str]) -> String {
    doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
