//! Parts of a JSON schema that libraries write and that demand nothing here. They are left
//! out before the check, because the compiler of schemas does not know them.

use serde_json::{Map, Value};

/// Removes from `schema`, and from every schema in it, the parts that demand nothing:
///
/// - a `format` that only describes a text, such as `password`;
/// - a `format` beside a `pattern`, unless a form enforces it: the pattern is enforced;
/// - `propertyNames` that any name fulfils, and `uniqueItems: false`.
///
/// `enforced` lists the formats that a form enforces.
pub(crate) fn without_hints(schema: Value, enforced: &[&str]) -> Value {
    each_schema(schema, &|fields| {
        let has_pattern = fields.contains_key("pattern");
        let demands = |(keyword, value): &(String, Value)| match (keyword.as_str(), value) {
            ("format", Value::String(format)) if !enforced.contains(&format.as_str()) => {
                !has_pattern && !DESCRIBING_FORMATS.contains(&format.as_str())
            }
            ("propertyNames", names) => !is_any_name(names),
            ("uniqueItems", unique) => *unique != Value::Bool(false),
            _ => true,
        };
        fields.into_iter().filter(demands).collect()
    })
}

/// A change of the keywords of one schema.
pub(crate) type SchemaChange<'a> = &'a dyn Fn(Map<String, Value>) -> Map<String, Value>;

/// Applies `change` to the keywords of `schema` and of every schema in it, from the outside to
/// the inside. Values of `enum`, `const`, `default` and the like are no schemas.
pub(crate) fn each_schema(schema: Value, change: SchemaChange<'_>) -> Value {
    let Value::Object(fields) = schema else { return schema };
    change(fields).into_iter().map(|(keyword, value)| below(keyword, value, change)).collect()
}

/// Applies `change` to the schemas in the value of a keyword.
fn below(keyword: String, value: Value, change: SchemaChange<'_>) -> (String, Value) {
    let list = |schemas: Vec<Value>| -> Value {
        schemas.into_iter().map(|schema| each_schema(schema, change)).collect()
    };
    let value = match (keyword.as_str(), value) {
        ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
            let schemas = schemas.into_iter();
            schemas.map(|(name, schema)| (name, each_schema(schema, change))).collect()
        }
        ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(schemas)) => list(schemas),
        ("items" | "additionalItems", Value::Array(schemas)) => list(schemas),
        ("items" | "additionalItems" | "additionalProperties", schema) => {
            each_schema(schema, change)
        }
        (_, value) => value,
    };
    (keyword, value)
}

/// Returns true if every name of a property is valid under a `propertyNames`.
fn is_any_name(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(fields) => {
            fields.iter().all(|(keyword, value)| keyword == "type" && value == "string")
        }
        _ => false,
    }
}

/// Formats that describe the use of a text and not its characters.
const DESCRIBING_FORMATS: [&str; 5] = ["password", "path", "file-path", "directory-path", "binary"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn hints_go_and_demands_stay() {
        for (given, expected) in [
            (json!({"type": "string", "format": "password"}), json!({"type": "string"})),
            (json!({"format": "cuid2", "pattern": "^[a-z]+$"}), json!({"pattern": "^[a-z]+$"})),
            (
                json!({"format": "date", "pattern": "^2"}),
                json!({"format": "date", "pattern": "^2"}),
            ),
            (json!({"format": "cuid2"}), json!({"format": "cuid2"})),
            (
                json!({"propertyNames": {"type": "string"}, "additionalProperties": {"format": "path"}}),
                json!({"additionalProperties": {}}),
            ),
            (
                json!({"propertyNames": {"pattern": "a"}}),
                json!({"propertyNames": {"pattern": "a"}}),
            ),
            (json!({"uniqueItems": false, "items": true}), json!({"items": true})),
            (json!({"uniqueItems": true}), json!({"uniqueItems": true})),
            // Names of properties and values are no keywords.
            (
                json!({"properties": {"format": {"const": {"format": "path"}}, "propertyNames": {}}}),
                json!({"properties": {"format": {"const": {"format": "path"}}, "propertyNames": {}}}),
            ),
            (
                json!({"$defs": {"a": {"anyOf": [{"format": "binary"}, {"items": [{"format": "path"}]}]}}}),
                json!({"$defs": {"a": {"anyOf": [{}, {"items": [{}]}]}}}),
            ),
            (json!([1]), json!([1])),
        ] {
            assert_eq!(without_hints(given.clone(), &["date"]), expected, "{given}");
        }
    }
}
