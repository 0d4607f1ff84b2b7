//! The check of a JSON schema before a worker compiles it. Compiling has no limit of its
//! own on time and stack, so everything that makes it long is bounded here. A keyword that
//! would not be enforced is refused: the client must not believe in it.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use crate::Violation;
use crate::regex_check::fault_of;
use crate::schema_formats::with_patterns;
use crate::schema_hints::without_hints;

/// Checks that a schema can be enforced within the bounds, and returns it as text, without the
/// parts that demand nothing and with patterns in the place of some formats. `path` is the schema's own place in the request.
///
/// # Errors
/// The first rule that the schema breaks, with the path to its place.
pub fn check(schema: Value, path: &str) -> Result<String, Violation> {
    let schema = without_hints(schema, &FORMATS);
    let text = schema.to_string();
    let bytes = text.len();
    if bytes > MAX_BYTES {
        return Err(Violation::field(
            path,
            format!("The schema in '{path}' has {bytes} bytes; at most {MAX_BYTES} are allowed."),
        ));
    }
    let mut check = Check {
        root: &schema,
        root_path: path,
        heights: BTreeMap::new(),
        open: Vec::new(),
        patterns: 0,
        pattern_bytes: 0,
        multiples: 0,
    };
    check.schema(&schema, path, Depth { levels: 0, containers: 0 })?;
    // After the check: our patterns do not count against the caller's.
    // The text serves as it is where no pattern can take the place of a format.
    Ok(if text.contains("\"format\"") { with_patterns(schema).to_string() } else { text })
}

/// Checks a regular expression outside a schema. `path` is its place in the request.
///
/// # Errors
/// The expression is empty, too long, or not one that can be enforced.
pub fn check_regex(regex: &str, FieldPath(path): FieldPath<'_>) -> Result<(), Violation> {
    let message = match regex.len() {
        1..=MAX_PATTERN_BYTES => match fault_of(regex) {
            None => return Ok(()),
            Some(fault) => {
                format!("The regular expression in '{path}' cannot be enforced: {fault}.")
            }
        },
        bytes => format!("'{path}' must have 1 to {MAX_PATTERN_BYTES} bytes; it has {bytes}."),
    };
    Err(Violation::field(path, message))
}

/// The place of a value in the request, as in `response_format.json_schema.schema.items`.
#[derive(Clone, Copy)]
pub struct FieldPath<'a>(pub &'a str);

/// The state of a check.
struct Check<'a> {
    root: &'a Value,
    root_path: &'a str,
    /// Levels below the target of each reference that was followed to its end.
    heights: BTreeMap<String, usize>,
    /// References that are being followed, each with the containers above its target.
    open: Vec<(String, usize)>,
    /// Entries of all `patternProperties`.
    patterns: usize,
    /// Bytes of all patterns.
    pattern_bytes: usize,
    /// Occurrences of `multipleOf`.
    multiples: usize,
}

/// The place of a schema under the root.
#[derive(Clone, Copy)]
struct Depth {
    /// Levels of schemas, references included.
    levels: usize,
    /// Objects and arrays among them: values, and not only schemas, nest at these.
    containers: usize,
}

impl Depth {
    fn below(self) -> Self {
        Self { levels: self.levels + 1, ..self }
    }

    fn inside(self) -> Self {
        Self { levels: self.levels + 1, containers: self.containers + 1 }
    }
}

impl Check<'_> {
    /// Checks a schema and everything below it. Returns the number of its levels.
    fn schema(&mut self, schema: &Value, path: &str, depth: Depth) -> Result<usize, Violation> {
        // Before anything else, because each level of the schema is a call of this function.
        if depth.levels > MAX_DEPTH {
            return Err(self.too_deep());
        }
        let fields = match schema {
            Value::Bool(true) => return Ok(1),
            Value::Bool(false) => {
                let message =
                    format!("No value is valid under the schema in '{path}': it is false.");
                return Err(Violation::field(path, message));
            }
            Value::Object(fields) => fields,
            _ => return Err(must_be(path, "a schema: an object or true")),
        };
        let mut below = 0;
        for (keyword, value) in fields {
            let place = format!("{path}.{keyword}");
            below = below.max(self.keyword(keyword, value, &place, depth)?);
        }
        optional_properties(fields, path)?;
        Ok(below + 1)
    }

    /// Checks a keyword. Returns the levels below it.
    fn keyword(
        &mut self,
        keyword: &str,
        value: &Value,
        path: &str,
        depth: Depth,
    ) -> Result<usize, Violation> {
        match keyword {
            "anyOf" | "oneOf" | "allOf" => {
                // An empty list describes no value.
                self.list(value, path, (1..=MAX_ALTERNATIVES, depth.below()))
            }
            "prefixItems" => self.list(value, path, (0..=MAX_ALTERNATIVES, depth.inside())),
            "items" | "additionalItems" | "additionalProperties" => match value {
                // Not a value: no more items or properties.
                Value::Bool(_) => Ok(0),
                Value::Array(_) => self.list(value, path, (0..=MAX_ALTERNATIVES, depth.inside())),
                _ => self.schema(value, path, depth.inside()),
            },
            "properties" => self.map(value, path, depth.inside()),
            // Definitions are checked where they are used; others are not compiled.
            "$defs" | "definitions" => match value.is_object() {
                true => Ok(0),
                false => Err(must_be(path, "an object of schemas")),
            },
            "patternProperties" => self.pattern_properties(value, path, depth),
            "$ref" => self.reference(value, path, depth),
            "pattern" => self.pattern(text(value, path)?, FieldPath(path)).map(|()| 0),
            "format" => format(text(value, path)?, FieldPath(path)).map(|()| 0),
            "minLength" | "maxLength" => integer(value, path, 0..=MAX_LENGTH).map(|_| 0),
            "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                integer(value, path, 0..=MAX_ITEMS).map(|_| 0)
            }
            "multipleOf" => {
                self.multiples += 1;
                if self.multiples > 1 {
                    let message = format!(
                        "'{path}' is the second 'multipleOf' of the schema; one is allowed."
                    );
                    return Err(Violation::field(path, message));
                }
                integer(value, path, 1..=MAX_MULTIPLE).map(|_| 0)
            }
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                // The compiler's arithmetic overflows at the ends of 64 bits.
                match value.as_f64().is_some_and(|number| number.abs() <= MAX_NUMBER) {
                    true => Ok(0),
                    false => Err(must_be(path, "a number from -2^53 to 2^53")),
                }
            }
            "type" => types(value, path).map(|()| 0),
            "enum" => match value.as_array().map(Vec::len) {
                Some(1..) => Ok(0),
                _ => Err(must_be(path, "a list with at least one value")),
            },
            "required" => match value.as_array() {
                Some(names) if names.iter().all(Value::is_string) => Ok(0),
                _ => Err(must_be(path, "a list of names")),
            },
            "const" => Ok(0),
            annotation if ANNOTATIONS.contains(&annotation) => Ok(0),
            unknown => {
                // Pydantic writes it for a set.
                let way_out = match unknown {
                    "uniqueItems" => "; use a list instead of a set",
                    _ => "; leave it out",
                };
                let message =
                    format!("'{path}': the keyword '{unknown}' is not enforced here{way_out}.");
                Err(Violation::field(path, message))
            }
        }
    }

    fn list(
        &mut self,
        value: &Value,
        path: &str,
        (count, depth): (std::ops::RangeInclusive<usize>, Depth),
    ) -> Result<usize, Violation> {
        let schemas = value.as_array().ok_or_else(|| must_be(path, "a list of schemas"))?;
        if !count.contains(&schemas.len()) {
            let (low, high) = (count.start(), count.end());
            let found = schemas.len();
            let message = format!("'{path}' must have {low} to {high} schemas; it has {found}.");
            return Err(Violation::field(path, message));
        }
        let mut below = 0;
        for (index, schema) in schemas.iter().enumerate() {
            below = below.max(self.schema(schema, &format!("{path}[{index}]"), depth)?);
        }
        Ok(below)
    }

    fn map(&mut self, value: &Value, path: &str, depth: Depth) -> Result<usize, Violation> {
        let schemas = value.as_object().ok_or_else(|| must_be(path, "an object of schemas"))?;
        let mut below = 0;
        for (name, schema) in schemas {
            below = below.max(match schema {
                // A property that may not be there.
                Value::Bool(_) => 1,
                _ => self.schema(schema, &format!("{path}.{name}"), depth)?,
            });
        }
        Ok(below)
    }

    fn pattern_properties(
        &mut self,
        value: &Value,
        path: &str,
        depth: Depth,
    ) -> Result<usize, Violation> {
        for pattern in value.as_object().into_iter().flat_map(Map::keys) {
            self.patterns += 1;
            if self.patterns > MAX_PATTERN_PROPERTIES {
                let message = format!(
                    "'{path}': a schema has at most {MAX_PATTERN_PROPERTIES} 'patternProperties' in all."
                );
                return Err(Violation::field(path, message));
            }
            self.pattern(pattern, FieldPath(path))?;
        }
        self.map(value, path, depth.inside())
    }

    fn pattern(&mut self, pattern: &str, place: FieldPath<'_>) -> Result<(), Violation> {
        check_regex(pattern, place)?;
        let FieldPath(path) = place;
        self.pattern_bytes += pattern.len();
        match self.pattern_bytes {
            0..=MAX_PATTERNS_BYTES => Ok(()),
            _ => Err(Violation::field(
                path,
                format!(
                    "'{path}': the patterns of a schema have at most {MAX_PATTERNS_BYTES} bytes in all."
                ),
            )),
        }
    }

    /// Follows a reference, once for each target.
    fn reference(&mut self, value: &Value, path: &str, depth: Depth) -> Result<usize, Violation> {
        let target = text(value, path)?;
        let (root, root_path) = (self.root, self.root_path);
        // Nothing is ever fetched for a client, so a reference must stay in the schema.
        let pointer = target.strip_prefix('#').ok_or_else(|| {
            must_be(path, "a reference within the schema, such as '#/$defs/name'")
        })?;
        let Some(schema) = root.pointer(pointer) else {
            let message = format!("'{path}' refers to '{target}', which the schema does not have.");
            return Err(Violation::field(path, message));
        };
        // A loop must pass an object or an array. Without one it describes no value.
        let entered = match target {
            // The root is open during the whole check and needs no entry.
            "#" => Some(0),
            _ => self.open.iter().find(|(open, _)| open == target).map(|&(_, entered)| entered),
        };
        if let Some(entered) = entered {
            return match depth.containers > entered {
                true => Ok(1),
                false => Err(Violation::field(
                    path,
                    format!("'{path}' refers to itself without an object or an array between."),
                )),
            };
        }
        // Each target is followed once: definitions that name the next one twice would otherwise
        // double the work at each level.
        if let Some(&height) = self.heights.get(target) {
            return match depth.levels + height > MAX_DEPTH {
                true => Err(self.too_deep()),
                false => Ok(height),
            };
        }
        self.open.push((target.to_owned(), depth.containers));
        let height =
            self.schema(schema, &format!("{root_path}{}", dotted(pointer)), depth.below())?;
        self.open.pop();
        self.heights.insert(target.to_owned(), height);
        Ok(height)
    }

    fn too_deep(&self) -> Violation {
        let path = self.root_path;
        Violation::field(
            path,
            format!(
                "The schema in '{path}' nests deeper than {MAX_DEPTH} levels, references included."
            ),
        )
    }
}

/// Checks the number of properties that may be absent.
fn optional_properties(fields: &Map<String, Value>, path: &str) -> Result<(), Violation> {
    let required: Vec<&str> = fields
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let properties = fields.get("properties").and_then(Value::as_object);
    let names = properties.into_iter().flat_map(Map::keys);
    let optional = names.filter(|name| !required.contains(&name.as_str())).count();
    match optional {
        0..=MAX_OPTIONAL => Ok(()),
        _ => Err(Violation::field(
            path,
            format!(
                "'{path}' has {optional} properties that are not required; at most {MAX_OPTIONAL} are allowed."
            ),
        )),
    }
}

fn types(value: &Value, path: &str) -> Result<(), Violation> {
    let known = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    let is_known = match value {
        Value::Array(types) => !types.is_empty() && types.iter().all(known),
        one => known(one),
    };
    if is_known { Ok(()) } else { Err(must_be(path, format!("of {}", TYPES.join(", ")))) }
}

fn format(name: &str, FieldPath(path): FieldPath<'_>) -> Result<(), Violation> {
    match FORMATS.contains(&name) {
        true => Ok(()),
        false => Err(Violation::field(
            path,
            format!(
                "'{path}': the format '{name}' is not enforced here; known are {}.",
                FORMATS.join(", ")
            ),
        )),
    }
}

fn text<'v>(value: &'v Value, path: &str) -> Result<&'v str, Violation> {
    value.as_str().ok_or_else(|| must_be(path, "a string"))
}

fn integer(
    value: &Value,
    path: &str,
    range: std::ops::RangeInclusive<u64>,
) -> Result<u64, Violation> {
    let (low, high) = (range.start(), range.end());
    value
        .as_u64()
        .filter(|number| range.contains(number))
        .ok_or_else(|| must_be(path, format!("a whole number from {low} to {high}")))
}

fn must_be(path: &str, expected: impl fmt::Display) -> Violation {
    Violation::field(path, format!("'{path}' must be {expected}."))
}

/// Returns a JSON pointer in the notation of paths.
fn dotted(pointer: &str) -> String {
    pointer.replace('/', ".")
}

/// Bytes of a schema.
const MAX_BYTES: usize = 64 << 10;
/// Levels of schemas, references included.
const MAX_DEPTH: usize = 32;
/// Schemas of one `anyOf`, `oneOf`, `allOf` or `prefixItems`.
const MAX_ALTERNATIVES: usize = 64;
/// Properties of one object that may be absent.
const MAX_OPTIONAL: usize = 200;
/// Entries of all `patternProperties`: each one is compared with each other one.
const MAX_PATTERN_PROPERTIES: usize = 16;
/// Bytes of one regular expression.
pub(crate) const MAX_PATTERN_BYTES: usize = 512;
/// Bytes of all regular expressions of a schema.
const MAX_PATTERNS_BYTES: usize = 4 << 10;
/// Characters of a string with a bound: a lexer has ten states for each. Pydantic bounds URLs
/// by this number.
const MAX_LENGTH: u64 = 2_083;
/// Items of an array, or properties of an object, with a bound.
const MAX_ITEMS: u64 = 1_000_000;
/// The largest bound of a number, 2^53: every whole number up to it has a double of its own.
const MAX_NUMBER: f64 = 9_007_199_254_740_992.0;
/// The largest `multipleOf`: a lexer has a state for each remainder.
const MAX_MULTIPLE: u64 = 1_000;
/// The types of JSON values.
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];
/// The formats of strings that are enforced.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
/// Keywords that describe a schema and demand nothing. `discriminator` is a hint beside
/// `oneOf`.
const ANNOTATIONS: [&str; 10] = [
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "discriminator",
    "readOnly",
    "writeOnly",
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn fault(schema: &Value) -> Option<(String, String)> {
        let violation = check(schema.clone(), "s").err()?;
        Some((violation.param.unwrap_or_default(), violation.message))
    }

    /// Returns a chain of definitions, each of which refers to the next one.
    fn chain(length: usize) -> Value {
        let mut definitions = Map::new();
        for number in 0..length {
            let next = format!("#/$defs/d{}", number + 1);
            definitions.insert(format!("d{number}"), json!({ "$ref": next }));
        }
        definitions.insert(format!("d{length}"), json!({ "type": "string" }));
        json!({ "$ref": "#/$defs/d0", "$defs": definitions })
    }

    #[test]
    fn check_accepts_what_libraries_generate() {
        for schema in [
            json!({}),
            json!(true),
            json!({"type": ["string", "null"], "title": "A", "default": null}),
            json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
                    "kind": {"const": "x"}, "when": {"type": "string", "format": "date-time"},
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}}},
                "required": ["a"], "additionalProperties": false}),
            json!({"$defs": {"node": {"type": "object", "properties": {
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
                "$ref": "#/$defs/node"}),
            json!({"type": "array", "items": {"$ref": "#"}}),
            json!({"properties": {"not": {"type": "string"}, "x-guidance": {"type": "null"}}}),
            json!({"multipleOf": 5, "type": "integer"}),
            // Zod's record, and Pydantic's secret and URL.
            json!({"type": "object", "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "number"}}),
            json!({"type": "string", "format": "password", "writeOnly": true}),
            json!({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}),
            chain(20),
        ] {
            assert_eq!(fault(&schema), None, "{schema}");
        }
    }

    #[test]
    fn check_names_the_place_and_the_rule() {
        let many = |count: usize| vec![json!({"type": "null"}); count];
        let properties = |count: usize| -> Value {
            (0..count).map(|number| (format!("p{number}"), json!({}))).collect::<Map<_, _>>().into()
        };
        for (schema, place, rule) in [
            (json!([]), "s", "a schema"),
            (json!(false), "s", "No value"),
            (json!({"not": {}}), "s.not", "'not' is not enforced"),
            (json!({"x-guidance": {"lenient": true}}), "s.x-guidance", "'x-guidance'"),
            (json!({"items": {"frobnicate": 1}}), "s.items.frobnicate", "'frobnicate'"),
            (
                json!({"properties": {"a": {"uniqueItems": true}}}),
                "s.properties.a.uniqueItems",
                "'uniqueItems'",
            ),
            (json!({"anyOf": []}), "s.anyOf", "1 to 64 schemas; it has 0"),
            (json!({"anyOf": many(65)}), "s.anyOf", "it has 65"),
            (json!({"anyOf": [{"type": "wish"}]}), "s.anyOf[0].type", "must be of null"),
            (json!({"type": []}), "s.type", "must be of"),
            (json!({"properties": properties(201)}), "s", "201 properties"),
            (json!({"pattern": "a".repeat(513)}), "s.pattern", "512 bytes"),
            (
                json!({"properties": {"a": {"pattern": "(b"}}}),
                "s.properties.a.pattern",
                "unclosed group",
            ),
            (
                json!({"items": {"patternProperties": {r"^\bx": {}}}}),
                "s.items.patternProperties",
                "word boundaries",
            ),
            (json!({"maxLength": 2_084}), "s.maxLength", "0 to 2083"),
            (json!({"minLength": -1}), "s.minLength", "0 to 2083"),
            (json!({"multipleOf": 1_001}), "s.multipleOf", "1 to 1000"),
            (json!({"multipleOf": 0.5}), "s.multipleOf", "1 to 1000"),
            (
                json!({"allOf": [{"multipleOf": 3}, {"multipleOf": 5}]}),
                "s.allOf[1].multipleOf",
                "second",
            ),
            (json!({"maximum": u64::MAX}), "s.maximum", "2^53"),
            (json!({"minimum": i64::MIN}), "s.minimum", "2^53"),
            (json!({"minimum": "1"}), "s.minimum", "2^53"),
            (json!({"format": "regex"}), "s.format", "'regex'"),
            (json!({"enum": []}), "s.enum", "at least one"),
            (json!({"required": [1]}), "s.required", "names"),
            (json!({"$ref": "https://example.com"}), "s.$ref", "within the schema"),
            (json!({"$ref": "#/$defs/a"}), "s.$ref", "does not have"),
            (json!({"$ref": "#"}), "s.$ref", "refers to itself"),
            (
                json!({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}),
                "s.$defs.a.anyOf[0].$ref",
                "refers to itself",
            ),
            (chain(40), "s", "32 levels"),
            (chain(500), "s", "32 levels"),
        ] {
            let (param, message) = fault(&schema).expect("the schema breaks a rule");
            assert!(message.contains(rule), "{message} has {rule}");
            assert_eq!(param, place, "{message}");
        }
        let patterns: Map<String, Value> = (0..17).map(|n| (format!("^a{n}"), json!({}))).collect();
        assert!(fault(&json!({ "patternProperties": patterns })).is_some());
        assert!(fault(&json!({ "enum": ["x".repeat(64 << 10)] })).is_some());
        let mut deep = json!({"type": "null"});
        (0..33).for_each(|_| deep = json!({ "items": deep }));
        assert!(fault(&deep).expect("too deep").1.contains("32 levels"));
    }

    #[test]
    fn check_follows_shared_definitions_once() {
        // Each definition refers to the next one 64 times: 64^15 ways lead to the last one.
        let mut definitions = Map::new();
        for number in 0..15 {
            let next = json!({ "$ref": format!("#/$defs/d{}", number + 1) });
            definitions.insert(format!("d{number}"), json!({ "anyOf": vec![next; 64] }));
        }
        definitions.insert("d15".to_owned(), json!({ "type": "null" }));
        let schema = json!({ "$ref": "#/$defs/d0", "$defs": definitions });
        assert_eq!(fault(&schema), None);
    }

    /// Returns values that resemble schemas.
    fn schemas() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(json!(null)),
            Just(json!(true)),
            Just(json!(3)),
            Just(json!("#")),
            Just(json!("#/$defs/a")),
            Just(json!("string")),
            Just(json!(["a"])),
        ];
        leaf.prop_recursive(6, 60, 5, |inner| {
            let keyword = prop::sample::select(vec![
                "anyOf",
                "allOf",
                "items",
                "properties",
                "$defs",
                "$ref",
                "type",
                "pattern",
                "a",
                "patternProperties",
                "prefixItems",
                "required",
                "multipleOf",
                "enum",
                "format",
            ]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((keyword, inner), 0..5).prop_map(|fields| {
                    let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value));
                    Value::Object(fields.collect())
                }),
            ]
        })
    }

    proptest! {
        /// The check of any value ends, and an error names a place within the schema.
        #[test]
        fn check_of_any_value_ends_with_a_place(schema in schemas()) {
            if let Some((place, message)) = fault(&schema) {
                prop_assert!(place == "s" || place.starts_with("s."), "{place}: {message}");
            }
        }
    }
}
