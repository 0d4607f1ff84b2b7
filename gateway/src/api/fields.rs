//! The fields of a request, one by one: each is looked at as raw JSON under
//! its own name, so that a mistake is answered with the field that holds it,
//! and nothing is ever built larger than its bound. Null is absent. A known
//! field that we do not support is refused unless its value changes nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Deserializer as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::reply::ApiError;

/// A request that breaks a rule: where, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// The field, as `messages[3].content`; none where the body is at fault.
    pub(crate) param: Option<String>,
    /// A code that clients know, where there is one.
    pub(crate) code: Option<&'static str>,
    /// A sentence for the client.
    pub(crate) message: String,
}

impl Violation {
    /// The field `param` is at fault.
    pub(crate) fn of(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: None, message: message.into() }
    }

    /// The body as a whole is at fault.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self { param: None, code: None, message: message.into() }
    }
}

impl From<Violation> for ApiError {
    fn from(violation: Violation) -> Self {
        let Violation { param, code, message } = violation;
        // A body that is wrong as a whole has no field and no code.
        let code = code.or(param.is_some().then_some("invalid_value"));
        Self::Invalid { param: param.map(Into::into), code, message: message.into() }
    }
}

/// One field of a request: its name for people, its JSON if it was given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field<'a> {
    name: &'a str,
    raw: Option<&'a RawValue>,
}

impl<'a> Field<'a> {
    /// The field `name`, whose JSON is `raw`.
    pub(crate) fn new(name: &'a str, raw: Option<&'a RawValue>) -> Self {
        Self { name, raw: raw.filter(|raw| raw.get() != "null") }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'a str {
        self.name
    }

    /// Whether an array was given.
    pub(crate) fn is_array(&self) -> bool {
        self.raw.is_some_and(|raw| raw.get().starts_with('['))
    }

    /// Its value as a `T`, or a violation that says what it must be.
    pub(crate) fn read<T: Deserialize<'a>>(&self, expected: &str) -> Result<Option<T>, Violation> {
        let Some(raw) = self.raw else { return Ok(None) };
        match serde_json::from_str(raw.get()) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(self.wrong(expected, &error)),
        }
    }

    /// An array of at most `most` elements.
    pub(crate) fn list<T: Deserialize<'a>>(
        &self,
        most: u32,
        expected: &str,
    ) -> Result<Option<Vec<T>>, Violation> {
        let Some(raw) = self.raw else { return Ok(None) };
        read_list(raw.get(), most as usize).map(Some).map_err(|error| self.wrong(expected, &error))
    }

    /// An object of at most `most` entries.
    pub(crate) fn map<V: Deserialize<'a>>(
        &self,
        most: u32,
        expected: &str,
    ) -> Result<Option<BTreeMap<String, V>>, Violation> {
        let Some(raw) = self.raw else { return Ok(None) };
        read_map(raw.get(), most as usize).map(Some).map_err(|error| self.wrong(expected, &error))
    }

    /// Its value, or a violation that says that it is required.
    pub(crate) fn required<T: Deserialize<'a>>(&self, expected: &str) -> Result<T, Violation> {
        self.read(expected)?.ok_or_else(|| self.missing(expected))
    }

    /// A finite number within `low..=high`.
    pub(crate) fn number(&self, low: f64, high: f64) -> Result<Option<f32>, Violation> {
        let expected = format!("a number from {low} to {high}");
        match self.read::<f64>(&expected)? {
            None => Ok(None),
            Some(value) if (low..=high).contains(&value) => Ok(Some(value as f32)),
            Some(value) => Err(self.must_be(&expected, &value.to_string())),
        }
    }

    /// A whole number within `low..=high`.
    pub(crate) fn integer(&self, low: u32, high: u32) -> Result<Option<u32>, Violation> {
        let expected = format!("a whole number from {low} to {high}");
        match self.read::<i64>(&expected)? {
            None => Ok(None),
            Some(value) => match u32::try_from(value) {
                Ok(value) if (low..=high).contains(&value) => Ok(Some(value)),
                _ => Err(self.must_be(&expected, &value.to_string())),
            },
        }
    }

    /// True or false.
    pub(crate) fn flag(&self) -> Result<Option<bool>, Violation> {
        self.read("true or false")
    }

    /// Text of at most `most` bytes.
    pub(crate) fn text(&self, most: usize) -> Result<Option<String>, Violation> {
        let expected = format!("a string of at most {most} bytes");
        match self.read::<String>(&expected)? {
            Some(text) if text.len() > most => {
                Err(self.must_be(&expected, &format!("{} bytes", text.len())))
            }
            text => Ok(text),
        }
    }

    /// A field that we do not support: fine where its value is one of
    /// `neutral`, which change nothing; refused otherwise.
    pub(crate) fn only_neutral(&self, neutral: &[Neutral]) -> Result<(), Violation> {
        let Some(raw) = self.raw else { return Ok(()) };
        if neutral.iter().any(|neutral| neutral.is(raw.get())) {
            return Ok(());
        }
        Err(Violation {
            param: Some(self.name.into()),
            code: Some("unsupported_parameter"),
            message: format!("'{}' is not supported with this value.", self.name),
        })
    }

    /// The violation that it is not there.
    pub(crate) fn missing(&self, expected: &str) -> Violation {
        Violation {
            param: Some(self.name.into()),
            code: Some("missing_required_parameter"),
            message: format!("Missing required parameter: '{}', {expected}.", self.name),
        }
    }

    /// The violation that it is not `expected` but `found`.
    pub(crate) fn must_be(&self, expected: &str, found: &str) -> Violation {
        Violation::of(self.name, format!("'{}' must be {expected}; it is {found}.", self.name))
    }

    fn wrong(&self, expected: &str, error: &serde_json::Error) -> Violation {
        // The position within the field would mislead: it is not the body's.
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        Violation::of(self.name, format!("'{}' must be {expected}: {text}.", self.name))
    }
}

/// A value of an unsupported field that asks for nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    /// `[]` or `{}`.
    Empty,
    /// This word.
    Word(&'static str),
    /// This truth value.
    Flag(bool),
    /// This number.
    Number(f64),
    /// An object whose `type` is this word, whatever else it has.
    Type(&'static str),
    /// An array with this word alone.
    Only(&'static str),
}

impl Neutral {
    fn is(self, raw: &str) -> bool {
        #[derive(Deserialize)]
        struct Typed {
            r#type: String,
        }
        fn parsed<T: DeserializeOwned>(raw: &str) -> Option<T> {
            serde_json::from_str(raw).ok()
        }
        match self {
            Self::Empty => {
                let inner =
                    raw.strip_prefix(['[', '{']).and_then(|raw| raw.strip_suffix([']', '}']));
                inner.is_some_and(|inner| inner.trim().is_empty())
            }
            Self::Word(word) => parsed::<String>(raw).is_some_and(|found| found == word),
            Self::Flag(flag) => parsed(raw) == Some(flag),
            Self::Number(number) => parsed(raw) == Some(number),
            Self::Type(word) => {
                raw.starts_with('{')
                    && parsed::<Typed>(raw).is_some_and(|found| found.r#type == word)
            }
            Self::Only(word) => read_list::<String>(raw, 1).is_ok_and(|found| found == [word]),
        }
    }
}

/// Declares the known fields of an object, each kept as the raw JSON it came
/// as: nothing is parsed or copied until the field is asked for, a field given
/// twice is refused, unknown ones are passed over.
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

/// Parses an object's known fields from `text`; `place` names it for people.
pub(crate) fn object<'a, T: Deserialize<'a>>(text: &'a str, place: &str) -> Result<T, Violation> {
    let param = |inner: Option<&str>| match (place, inner) {
        ("", inner) => inner.map(str::to_owned),
        (place, None) => Some(place.to_owned()),
        (place, Some(inner)) => Some(format!("{place}.{inner}")),
    };
    let whole = if place.is_empty() { "The body" } else { place };
    // A derived struct would also take an array of its fields' values.
    if !text.trim_start().starts_with('{') {
        return Err(Violation {
            param: param(None),
            code: None,
            message: format!("{whole} must be a JSON object."),
        });
    }
    serde_json::from_str(text).map_err(|error| {
        let text = error.to_string();
        let twice = text.strip_prefix("duplicate field `").and_then(|rest| rest.split('`').next());
        Violation {
            param: param(twice),
            code: None,
            message: match twice {
                Some(field) => format!("{whole} holds '{field}' more than once."),
                None => format!("{whole} is not valid JSON: {text}."),
            },
        }
    })
}

/// Reads an array of at most `most` elements: the one beyond is an error as
/// soon as it is met, so that a long array never becomes a large one in memory.
fn read_list<'a, T: Deserialize<'a>>(text: &'a str, most: usize) -> serde_json::Result<Vec<T>> {
    struct Elements<T> {
        most: usize,
        element: PhantomData<T>,
    }
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an array of at most {} elements", self.most)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut elements = Vec::new();
            while let Some(element) = seq.next_element()? {
                if elements.len() == self.most {
                    let most = self.most;
                    return Err(de::Error::custom(format_args!(
                        "it has more than {most} elements"
                    )));
                }
                elements.push(element);
            }
            Ok(elements)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let list = deserializer.deserialize_seq(Elements { most, element: PhantomData })?;
    deserializer.end()?;
    Ok(list)
}

/// Reads an object of at most `most` entries under distinct keys.
fn read_map<'a, V: Deserialize<'a>>(
    text: &'a str,
    most: usize,
) -> serde_json::Result<BTreeMap<String, V>> {
    struct Entries<V> {
        most: usize,
        value: PhantomData<V>,
    }
    impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an object of at most {} entries", self.most)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<String, V>()? {
                if entries.len() == self.most {
                    let most = self.most;
                    return Err(de::Error::custom(format_args!("it has more than {most} entries")));
                }
                if entries.contains_key(&key) {
                    return Err(de::Error::custom(format_args!("it holds {key:?} twice")));
                }
                entries.insert(key, value);
            }
            Ok(entries)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let map = deserializer.deserialize_map(Entries { most, value: PhantomData })?;
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
    fn neutral_values_ask_for_nothing() {
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
            (Neutral::Type("text"), "{\"type\": \"text\"}", true),
            (Neutral::Type("text"), "{\"type\": \"json_object\"}", false),
            (Neutral::Type("text"), "[\"text\"]", false),
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
            assert_eq!(field.number(0.0, 2.0).is_ok(), number, "number {text}");
            assert_eq!(field.integer(1, 2).is_ok(), integer, "integer {text}");
        }
    }

    #[test]
    fn null_is_absent() {
        let raw = raw("null");
        assert_eq!(Field::new("field", Some(&raw)).flag(), Ok(None));
        assert!(Field::new("field", Some(&raw)).required::<bool>("a flag").is_err());
    }

    #[test]
    fn an_array_is_cut_off_at_its_bound() {
        assert_eq!(read_list::<u8>("[1,2]", 2).expect("fits"), [1, 2]);
        let error = read_list::<u8>("[1,2,3]", 2).expect_err("too many");
        assert!(error.to_string().contains("more than 2 elements"), "{error}");
        let error = read_map::<u8>(r#"{"a":1,"b":2}"#, 1).expect_err("too many");
        assert!(error.to_string().contains("more than 1 entries"), "{error}");
        let error = read_map::<u8>(r#"{"a":1,"a":2}"#, 2).expect_err("twice");
        assert!(error.to_string().contains("twice"), "{error}");
    }
}
