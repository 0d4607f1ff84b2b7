//! The JSON schema of config files, from the same declarations that read them.

use serde_json::{Map, Value, json};

use crate::read::Section;
use crate::sections::Root;

/// Adds a description to a value's schema.
pub(crate) fn described(mut schema: Value, doc: &[&str]) -> Value {
    if let Some(object) = schema.as_object_mut() {
        object.insert("description".to_owned(), Value::String(sentence(doc)));
    }
    schema
}

/// Returns the schema of a table with exactly these keys.
pub(crate) fn table(properties: Map<String, Value>, doc: &[&str]) -> Value {
    json!({
        "type": "object",
        "description": sentence(doc),
        "properties": properties,
        // The reader refuses unknown keys, too, so an editor shows a typing error early.
        "additionalProperties": false,
    })
}

/// Returns the schema of a table of named entries.
pub(crate) fn names(entry: Value) -> Value {
    json!({ "type": "object", "additionalProperties": entry })
}

/// Returns the schema of the whole config, which `tollgate config schema` prints.
pub(crate) fn whole() -> Value {
    let mut schema = Root::schema();
    if let Some(object) = schema.as_object_mut() {
        object.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
        object.insert("title".to_owned(), json!("tollgate"));
    }
    schema
}

/// Joins doc lines to one text.
pub(crate) fn sentence(doc: &[&str]) -> String {
    doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
