//! The fields of a request, read one by one. Each field stays raw JSON under its
//! own name until it is asked for, so a mistake is answered with the field that
//! holds it. A reader never builds a value that is larger than its bound. Null
//! counts as absent. A known field that is not supported is refused unless its
//! value changes nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Deserializer as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// A rule that a request breaks: the field, and the value that would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The path of the field, such as `messages[3].content`; `None` if the body as
    /// a whole is wrong.
    pub param: Option<String>,
    /// A code that clients know, if one exists for this mistake.
    pub code: Option<&'static str>,
    /// A sentence for the client.
    pub message: String,
}

impl Violation {
    /// Returns the violation of a rule by field `param`.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: None, message: message.into() }
    }

    /// Returns the violation of a rule by the body as a whole.
    pub fn body(message: impl Into<String>) -> Self {
        Self { param: None, code: None, message: message.into() }
    }
}

/// One field of a request: its path for messages, and its JSON if the client
/// sent the field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field<'a> {
    name: &'a str,
    raw: Option<&'a RawValue>,
}

impl<'a> Field<'a> {
    /// Makes the field `name` with the JSON `raw`.
    pub(crate) fn new(name: &'a str, raw: Option<&'a RawValue>) -> Self {
        Self { name, raw: raw.filter(|raw| raw.get() != "null") }
    }

    /// Returns the path of the field.
    pub(crate) fn name(&self) -> &'a str {
        self.name
    }

    /// True if the client did not send the field.
    pub(crate) fn is_absent(&self) -> bool {
        self.raw.is_none()
    }

    /// True if the client sent an array.
    pub(crate) fn is_array(&self) -> bool {
        // Raw JSON has no space in front of it.
        self.raw.is_some_and(|raw| raw.get().starts_with('['))
    }

    /// Returns the value as a `T`, or `None` if the field is absent. `expected`
    /// describes the right value for the violation.
    pub(crate) fn read<T: Deserialize<'a>>(&self, expected: &str) -> Result<Option<T>, Violation> {
        let Some(raw) = self.raw else { return Ok(None) };
        match serde_json::from_str(raw.get()) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(self.wrong(expected, &error)),
        }
    }

    /// Returns an array of at most `max` elements.
    pub(crate) fn list<T: Deserialize<'a>>(
        &self,
        max: u32,
        expected: &str,
    ) -> Result<Option<Vec<T>>, Violation> {
        let Some(raw) = self.raw else { return Ok(None) };
        read_list(raw.get(), max as usize).map(Some).map_err(|error| self.wrong(expected, &error))
    }

    /// Returns an object of at most `max` entries.
    pub(crate) fn map<V: Deserialize<'a>>(
        &self,
        max: u32,
        expected: &str,
    ) -> Result<Option<BTreeMap<String, V>>, Violation> {
        let Some(raw) = self.raw else { return Ok(None) };
        read_map(raw.get(), max as usize).map(Some).map_err(|error| self.wrong(expected, &error))
    }

    /// Returns the value, or the violation that the field is required.
    pub(crate) fn required<T: Deserialize<'a>>(&self, expected: &str) -> Result<T, Violation> {
        self.read(expected)?.ok_or_else(|| self.missing(expected))
    }

    /// Returns a finite number within `range`.
    pub(crate) fn number(&self, range: RangeInclusive<f64>) -> Result<Option<f32>, Violation> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        match self.read::<f64>(&expected)? {
            None => Ok(None),
            // Checked before it is rounded, so that no value is rounded into the range.
            Some(value) if range.contains(&value) => Ok(Some(value as f32)),
            Some(value) => Err(self.must_be(&expected, &value.to_string())),
        }
    }

    /// Returns a whole number within `range`.
    pub(crate) fn integer(&self, range: RangeInclusive<u32>) -> Result<Option<u32>, Violation> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        // Read with a wider type, so that a number out of range is reported as
        // such and not as a mistake of form.
        match self.read::<i64>(&expected)? {
            None => Ok(None),
            Some(value) => match u32::try_from(value) {
                Ok(value) if range.contains(&value) => Ok(Some(value)),
                _ => Err(self.must_be(&expected, &value.to_string())),
            },
        }
    }

    /// Returns a Boolean.
    pub(crate) fn flag(&self) -> Result<Option<bool>, Violation> {
        self.read("true or false")
    }

    /// Returns text of at most `max` bytes.
    pub(crate) fn text(&self, max: usize) -> Result<Option<String>, Violation> {
        let expected = format!("a string of at most {max} bytes");
        match self.read::<String>(&expected)? {
            Some(text) if text.len() > max => {
                Err(self.must_be(&expected, &format!("{} bytes", text.len())))
            }
            text => Ok(text),
        }
    }

    /// Refuses a field that is not supported, unless its value is one of `neutral`,
    /// the values that change nothing.
    pub(crate) fn only_neutral(&self, neutral: &[Neutral]) -> Result<(), Violation> {
        // Silently ignoring a field would give the client another result than
        // the one it asked for.
        let Some(raw) = self.raw else { return Ok(()) };
        if neutral.iter().any(|neutral| neutral.matches(raw.get())) {
            return Ok(());
        }
        Err(Violation {
            param: Some(self.name.into()),
            code: Some("unsupported_parameter"),
            message: self.unserved(neutral),
        })
    }

    /// Returns the sentence for a value that is not served.
    fn unserved(&self, neutral: &[Neutral]) -> String {
        let own_name = self.name.rsplit('.').next().unwrap_or_default();
        let purpose = PURPOSES.iter().find(|(name, _)| *name == own_name);
        let purpose = purpose.map(|(_, purpose)| format!(" ({purpose})")).unwrap_or_default();
        let served: Vec<String> = neutral.iter().filter_map(|value| value.described()).collect();
        match served.is_empty() {
            true => format!("This gateway does not serve '{}'{purpose}. Leave it out.", self.name),
            false => format!(
                "This gateway serves '{}'{purpose} only as {}.",
                self.name,
                served.join(" or ")
            ),
        }
    }

    /// Returns the violation that the field is absent.
    pub(crate) fn missing(&self, expected: &str) -> Violation {
        Violation {
            param: Some(self.name.into()),
            code: Some("missing_required_parameter"),
            message: format!("Missing required parameter: '{}', {expected}.", self.name),
        }
    }

    /// Returns the violation that the value is `found` and not `expected`.
    pub(crate) fn must_be(&self, expected: &str, found: &str) -> Violation {
        Violation::field(self.name, format!("'{}' must be {expected}; it is {found}.", self.name))
    }

    fn wrong(&self, expected: &str, error: &serde_json::Error) -> Violation {
        // The parser counts lines and columns from the start of the field; in a
        // message about the body they would mislead.
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        Violation::field(self.name, format!("'{}' must be {expected}: {text}.", self.name))
    }
}

/// A value of an unsupported field that changes nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    /// An empty array or object.
    Empty,
    /// A certain string.
    Word(&'static str),
    /// A certain Boolean.
    Flag(bool),
    /// A certain number.
    Number(f64),
    /// An array that holds a certain string and nothing else.
    Only(&'static str),
}

/// The purposes of fields whose names alone do not tell a client what is missing.
const PURPOSES: &[(&str, &str)] = &[
    ("functions", "the older form of 'tools'"),
    ("function_call", "the older form of tool calls"),
    ("guided_grammar", "an answer in the form of a grammar"),
    ("structured_outputs.grammar", "an answer in the form of a grammar"),
    ("structured_outputs.structural_tag", "an answer with tagged parts"),
    ("best_of", "choices that are not returned"),
];

impl Neutral {
    /// Returns the value for a message; `None` for an empty one, which says the same
    /// as no value.
    fn described(self) -> Option<String> {
        match self {
            Self::Empty | Self::Word("") => None,
            Self::Word(word) => Some(format!("\"{word}\"")),
            Self::Flag(flag) => Some(flag.to_string()),
            Self::Number(number) => Some(number.to_string()),
            Self::Only(word) => Some(format!("[\"{word}\"]")),
        }
    }

    fn matches(self, raw: &str) -> bool {
        fn parsed<T: DeserializeOwned>(raw: &str) -> Option<T> {
            serde_json::from_str(raw).ok()
        }
        match self {
            Self::Empty => {
                // The JSON is valid already, so the brackets match.
                let inner =
                    raw.strip_prefix(['[', '{']).and_then(|raw| raw.strip_suffix([']', '}']));
                inner.is_some_and(|inner| inner.trim().is_empty())
            }
            // Parsed, not compared as text: a string may be written with escapes.
            Self::Word(word) => parsed::<String>(raw).is_some_and(|found| found == word),
            Self::Flag(flag) => parsed(raw) == Some(flag),
            Self::Number(number) => parsed(raw) == Some(number),
            Self::Only(word) => read_list::<String>(raw, 1).is_ok_and(|found| found == [word]),
        }
    }
}

/// Declares the known fields of an object. Each field stays the raw JSON of the
/// body: nothing is parsed or copied until the field is read. Parsing refuses a
/// field that comes twice and ignores unknown fields.
macro_rules! known_fields {
    ($(#[$doc:meta])* $name:ident { $($field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(serde::Deserialize)]
        pub(crate) struct $name<'a> {
            $(
                #[serde(borrow)]
                pub(crate) $field: Option<&'a serde_json::value::RawValue>,
            )*
        }
    };
}
pub(crate) use known_fields;

/// Parses the known fields of an object from `text`. `place` is the path of the
/// object for messages; it is empty for the body.
pub(crate) fn object<'a, T: Deserialize<'a>>(text: &'a str, place: &str) -> Result<T, Violation> {
    let param = |inner: Option<&str>| match (place, inner) {
        ("", inner) => inner.map(str::to_owned),
        (place, None) => Some(place.to_owned()),
        (place, Some(inner)) => Some(format!("{place}.{inner}")),
    };
    let object = if place.is_empty() { "The body" } else { place };
    // Serde would also accept an array of the fields' values for a struct.
    if !text.trim_start().starts_with('{') {
        return Err(Violation {
            param: param(None),
            code: None,
            message: format!("{object} must be a JSON object."),
        });
    }
    // Serde reports a duplicate field by its message alone, so the name of the
    // field is taken from there.
    serde_json::from_str(text).map_err(|error| {
        let text = error.to_string();
        let twice = text.strip_prefix("duplicate field `").and_then(|rest| rest.split('`').next());
        Violation {
            param: param(twice),
            code: None,
            message: match twice {
                Some(field) => format!("{object} holds '{field}' more than once."),
                None => format!("{object} is not valid JSON: {text}."),
            },
        }
    })
}

/// Reads an array of at most `max` elements. Reading stops at the first element
/// beyond, so a long array never becomes a large value in memory.
fn read_list<'a, T: Deserialize<'a>>(text: &'a str, max: usize) -> serde_json::Result<Vec<T>> {
    struct Elements<T> {
        max: usize,
        element: PhantomData<T>,
    }
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an array of at most {} elements", self.max)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut elements = Vec::new();
            while let Some(element) = seq.next_element()? {
                // Tested before the push, so no more than `max` are ever held.
                if elements.len() == self.max {
                    let max = self.max;
                    return Err(de::Error::custom(format_args!("it has more than {max} elements")));
                }
                elements.push(element);
            }
            Ok(elements)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let list = deserializer.deserialize_seq(Elements { max, element: PhantomData })?;
    // Text after the array would otherwise go unnoticed.
    deserializer.end()?;
    Ok(list)
}

/// Reads an object of at most `max` entries with distinct keys.
fn read_map<'a, V: Deserialize<'a>>(
    text: &'a str,
    max: usize,
) -> serde_json::Result<BTreeMap<String, V>> {
    struct Entries<V> {
        max: usize,
        value: PhantomData<V>,
    }
    impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an object of at most {} entries", self.max)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<String, V>()? {
                if entries.len() == self.max {
                    let max = self.max;
                    return Err(de::Error::custom(format_args!("it has more than {max} entries")));
                }
                // Two values for one key could pass a check of the first alone.
                if entries.contains_key(&key) {
                    return Err(de::Error::custom(format_args!("it holds {key:?} twice")));
                }
                entries.insert(key, value);
            }
            Ok(entries)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let map = deserializer.deserialize_map(Entries { max, value: PhantomData })?;
    // Text after the object would otherwise go unnoticed.
    deserializer.end()?;
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        serde_json::from_str(text).expect("test JSON")
    }

    #[test]
    fn neutral_values_are_accepted() {
        for (neutral, text, expected) in [
            (Neutral::Empty, "[]", true),
            (Neutral::Empty, "[ \n]", true),
            (Neutral::Empty, "{}", true),
            (Neutral::Empty, "[1]", false),
            (Neutral::Empty, "\"\"", false),
            (Neutral::Word("auto"), "\"auto\"", true),
            (Neutral::Word("auto"), "\"\\u0061uto\"", true),
            (Neutral::Word("auto"), "\"flex\"", false),
            (Neutral::Flag(false), "false", true),
            (Neutral::Flag(false), "true", false),
            (Neutral::Flag(false), "0", false),
            (Neutral::Number(1.0), "1", true),
            (Neutral::Number(1.0), "2", false),
            (Neutral::Only("text"), "[\"text\"]", true),
            (Neutral::Only("text"), "[\"text\",\"audio\"]", false),
            (Neutral::Only("text"), "[]", false),
        ] {
            let raw = raw(text);
            let found = Field::new("field", Some(&raw)).only_neutral(&[neutral]).is_ok();
            assert_eq!(found, expected, "{neutral:?} {text}");
        }
    }

    #[test]
    fn numbers_keep_their_bounds() {
        for (text, number, integer) in [
            ("0", true, false),
            ("1", true, true),
            ("2", true, true),
            ("1.5", true, false),
            ("2.0000001", false, false),
            ("-0.1", false, false),
            ("3", false, false),
            ("1e999", false, false),
            ("\"1\"", false, false),
            ("true", false, false),
            ("4294967297", false, false),
            ("99999999999999999999", false, false),
        ] {
            let raw = raw(text);
            let field = Field::new("field", Some(&raw));
            assert_eq!(field.number(0.0..=2.0).is_ok(), number, "number {text}");
            assert_eq!(field.integer(1..=2).is_ok(), integer, "integer {text}");
        }
    }

    #[test]
    fn null_is_absent() {
        let raw = raw("null");
        assert_eq!(Field::new("field", Some(&raw)).flag(), Ok(None));
        assert!(Field::new("field", Some(&raw)).required::<bool>("a flag").is_err());
    }

    #[test]
    fn list_reading_stops_at_bound() {
        assert_eq!(read_list::<u8>("[1,2]", 2).expect("fits"), [1, 2]);
        let error = read_list::<u8>("[1,2,3]", 2).expect_err("too many");
        assert!(error.to_string().contains("more than 2 elements"), "{error}");
        let error = read_map::<u8>(r#"{"a":1,"b":2}"#, 1).expect_err("too many");
        assert!(error.to_string().contains("more than 1 entries"), "{error}");
        let error = read_map::<u8>(r#"{"a":1,"a":2}"#, 2).expect_err("twice");
        assert!(error.to_string().contains("twice"), "{error}");
    }
}
