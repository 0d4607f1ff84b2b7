//! Schemas of all served keywords, drawn at random. Most describe short values, so that answers
//! of random weights end by themselves.

use serde_json::{Map, Value, json};

use crate::kills::load::SeededRandom;

/// A schema and the definitions that it refers to.
pub struct RandomSchema {
    root: Value,
    definitions: Map<String, Value>,
}

/// The state of a draw.
struct Draw<'a> {
    random: &'a mut SeededRandom,
    /// The names of the definitions that may be referred to.
    names: Vec<String>,
    /// True if the schema has its `multipleOf`; it may have one.
    has_multiple: bool,
}

impl RandomSchema {
    /// Draws a schema.
    pub fn draw(random: &mut SeededRandom) -> Self {
        let count = random.below(3);
        let names = (0..count).map(|number| format!("d{number}")).collect::<Vec<_>>();
        let mut draw = Draw { random, names: names.clone(), has_multiple: false };
        let definitions = names.into_iter().map(|name| (name, draw.definition())).collect();
        let root = draw.schema(3);
        Self { root, definitions }
    }

    /// Returns the schema of a whole answer.
    pub fn of_answer(self) -> Value {
        self.with_definitions(|root| root)
    }

    /// Returns the schema of a function's arguments, which are an object.
    pub fn of_arguments(self) -> Value {
        self.with_definitions(|root| {
            json!({ "type": "object", "properties": { "v": root }, "required": ["v"],
                "additionalProperties": false })
        })
    }

    fn with_definitions(self, wrap: impl FnOnce(Value) -> Value) -> Value {
        let Self { root, definitions } = self;
        let mut schema = wrap(root);
        if !definitions.is_empty() {
            schema["$defs"] = definitions.into();
        }
        schema
    }
}

impl Draw<'_> {
    fn one_in(&mut self, chances: u64) -> bool {
        self.random.below(chances) == 0
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize].clone()
    }

    fn number(&mut self, low: i64, high: i64) -> i64 {
        low + self.random.below((high - low + 1) as u64) as i64
    }

    /// Draws a schema with up to `depth` levels of containers.
    fn schema(&mut self, depth: u32) -> Value {
        let mut schema = match self.random.below(if depth == 0 { 9 } else { 17 }) {
            0 => json!({ "type": self.pick(&["null", "boolean"]) }),
            1 => self.integer(),
            2 => self.decimal(),
            3 | 4 => self.string(),
            5 => json!({ "enum": self.values() }),
            6 => json!({ "const": self.value() }),
            7 => json!({ "type": ["null", "integer"], "minimum": -9, "maximum": 9 }),
            8 => json!({ "type": ["boolean", "string"], "maxLength": self.number(0, 5) }),
            9 | 10 => self.array(depth),
            11..=13 => self.object(depth),
            14 => json!({ "anyOf": self.list(depth, 1, 4) }),
            15 => self.both(),
            _ => match self.names.is_empty() {
                true => self.apart(depth),
                false => json!({ "$ref": format!("#/$defs/{}", self.pick(&self.names.clone())) }),
            },
        };
        if self.one_in(8) {
            schema["description"] = json!("Says nothing about the value.");
        }
        schema
    }

    /// Draws a definition. It may contain itself, and it can end.
    fn definition(&mut self) -> Value {
        let back = json!({ "$ref": format!("#/$defs/{}", self.pick(&self.names.clone())) });
        match self.random.below(3) {
            0 => self.object(1),
            1 => json!({ "type": "object", "additionalProperties": false, "required": ["kind"],
                "properties": { "kind": { "enum": ["leaf", "node"] }, "next": back } }),
            _ => json!({ "type": "array", "maxItems": 2, "items": {
                "anyOf": [back, { "type": "boolean" }, { "type": "null" }] } }),
        }
    }

    fn integer(&mut self) -> Value {
        let mut schema = json!({ "type": "integer" });
        let low = self.number(-2_000, 2_000);
        if !self.one_in(3) {
            schema[self.pick(&["minimum", "exclusiveMinimum"])] = json!(low);
        }
        if !self.one_in(3) {
            let high = low + self.number(2, 3_000);
            schema[self.pick(&["maximum", "exclusiveMaximum"])] = json!(high);
        }
        if !self.has_multiple && self.one_in(4) {
            self.has_multiple = true;
            // One of the numbers between the bounds is a multiple.
            schema = json!({ "type": "integer", "minimum": low, "maximum": low + 300,
                "multipleOf": self.number(1, 150) });
        }
        schema
    }

    fn decimal(&mut self) -> Value {
        let mut schema = json!({ "type": "number" });
        let low = self.number(-40, 40) as f64 / 4.0;
        if self.one_in(2) {
            schema[self.pick(&["minimum", "exclusiveMinimum"])] = json!(low);
        }
        if self.one_in(2) {
            let high = low + self.number(1, 400) as f64 / 8.0;
            schema[self.pick(&["maximum", "exclusiveMaximum"])] = json!(high);
        }
        schema
    }

    fn string(&mut self) -> Value {
        let low = self.number(0, 4);
        match self.random.below(5) {
            0 => json!({ "type": "string", "pattern": self.pick(&PATTERNS) }),
            1 => json!({ "type": "string", "format": self.pick(&FORMATS) }),
            2 => json!({ "type": "string", "maxLength": low }),
            3 => json!({ "type": "string", "pattern": "^[a-z]+$", "minLength": low,
                "maxLength": low + 3 }),
            _ => json!({ "type": "string", "minLength": low, "maxLength": low + 4 }),
        }
    }

    fn array(&mut self, depth: u32) -> Value {
        let low = self.number(0, 2);
        let high = low + self.number(0, 2);
        let mut schema = match self.one_in(3) {
            true => json!({ "type": "array", "prefixItems": self.list(depth, 1, 3),
                "items": match self.one_in(2) { true => json!(false), false => self.schema(depth - 1) } }),
            false => json!({ "type": "array", "items": self.schema(depth - 1) }),
        };
        if schema["items"] != json!(false) {
            schema["maxItems"] = json!(high);
            if self.one_in(2) {
                schema["minItems"] = json!(low);
            }
        }
        schema
    }

    fn object(&mut self, depth: u32) -> Value {
        let count = self.random.below(4) as usize;
        let names = &NAMES[self.random.below(4) as usize..][..count];
        let properties: Map<_, _> =
            names.iter().map(|name| ((*name).to_owned(), self.schema(depth - 1))).collect();
        let required: Vec<&str> = names.iter().filter(|_| self.one_in(2)).copied().collect();
        let mut schema = json!({ "type": "object", "properties": properties });
        if !required.is_empty() || self.one_in(4) {
            schema["required"] = json!(required);
        }
        match self.random.below(8) {
            0 => {
                schema["additionalProperties"] = self.schema(0);
                schema["maxProperties"] = json!(count as i64 + self.number(0, 1));
            }
            1 => {
                schema["patternProperties"] = json!({ "^x[0-9]{1,2}$": self.schema(0) });
                schema["additionalProperties"] = json!(false);
                schema["maxProperties"] = json!(count + 2);
            }
            2 => {
                schema["additionalProperties"] = json!(false);
                schema["minProperties"] = json!(required.len());
            }
            _ => schema["additionalProperties"] = json!(false),
        }
        schema
    }

    fn list(&mut self, depth: u32, low: i64, high: i64) -> Vec<Value> {
        let count = self.number(low, high);
        (0..count).map(|_| self.schema(depth - 1)).collect()
    }

    /// Draws alternatives of which a value can match one alone.
    fn apart(&mut self, depth: u32) -> Value {
        let object = json!({ "type": "object", "additionalProperties": false,
            "required": ["kind", "v"],
            "properties": { "kind": { "const": "a" }, "v": self.schema(depth - 1) } });
        let other = json!({ "type": "object", "additionalProperties": false,
            "required": ["kind"], "properties": { "kind": { "const": "b" } } });
        json!({ "oneOf": [object, other, self.integer(), { "type": "null" }] })
    }

    /// Draws two schemas that both hold.
    fn both(&mut self) -> Value {
        let low = self.number(-20, 20);
        match self.random.below(3) {
            0 => json!({ "allOf": [{ "type": "integer", "minimum": low },
                { "maximum": low + 50 }] }),
            1 => json!({ "allOf": [
                { "type": "object", "properties": { "a": { "type": "boolean" } }, "required": ["a"] },
                { "type": "object", "properties": { "a": {}, "b": self.integer() },
                    "additionalProperties": false } ] }),
            _ => json!({ "type": "string", "allOf": [{ "minLength": 1 }, { "maxLength": 5 }] }),
        }
    }

    fn values(&mut self) -> Vec<Value> {
        let count = self.number(1, 4);
        let mut values: Vec<Value> = (0..count).map(|_| self.value()).collect();
        values.dedup();
        values
    }

    fn value(&mut self) -> Value {
        let number = self.number(-100, 100);
        self.pick(&[
            json!(null),
            json!(true),
            json!(number),
            json!(0.5),
            json!("it's \"so\"\n"),
            json!("\u{1f600} \\ /"),
            json!(""),
            json!([1, "a", null]),
            json!({ "a": { "b": [] } }),
            json!({}),
        ])
    }
}

/// Names of properties. Some need an escape in JSON.
const NAMES: [&str; 8] = ["a", "kind", "b b", "\u{e9}t\u{e9}", "q\"q", "x1", "$ref", "length"];
/// Regular expressions of short texts.
const PATTERNS: [&str; 6] = [
    "^[0-9]{2,4}$",
    "^(yes|no|may be)$",
    "^[A-Z][a-z]{0,3}-\\d$",
    "^\\w{1,3}$",
    "^(a|b\\|c)+d?$",
    "^[^\"\\\\]{1,4}$",
];
/// Formats of strings that the gateway enforces.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
