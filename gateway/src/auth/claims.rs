//! The two JSON objects of a token, parsed strictly: typed, bounded, and without
//! duplicate names at any depth. Parsers differ in which duplicate they take, so
//! forged claims could pass one parser and not another.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// The header of a token. A field that points to a key, or that changes what the
/// signature covers, is parsed only so that the token can be refused.
#[derive(Debug, Deserialize)]
pub(super) struct TokenHeader {
    pub(super) alg: String,
    pub(super) typ: Option<String>,
    pub(super) kid: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) crit: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) b64: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) jku: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) jwk: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) x5u: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) x5c: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) enc: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) zip: bool,
    #[serde(default, deserialize_with = "present")]
    pub(super) cty: bool,
}

impl TokenHeader {
    /// True if the header asks for anything beyond the check of the signature with
    /// a key that the gateway has.
    pub(super) fn has_refused_field(&self) -> bool {
        // Exhaustive, so that a field cannot be parsed and then be forgotten here.
        let Self { alg: _, typ: _, kid: _, crit, b64, jku, jwk, x5u, x5c, enc, zip, cty } = self;
        *crit || *b64 || *jku || *jwk || *x5u || *x5c || *enc || *zip || *cty
    }
}

/// The registered claims that every token must carry. Times are in whole Unix
/// seconds.
#[derive(Debug, Deserialize)]
pub(super) struct Claims {
    pub(super) iss: String,
    pub(super) sub: String,
    pub(super) aud: Audience,
    pub(super) exp: u64,
    pub(super) nbf: u64,
    pub(super) iat: Option<u64>,
}

/// The audience of a token: one name or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Audience {
    One(String),
    Several(Vec<String>),
}

impl Audience {
    pub(super) fn names(&self, accepted: &[String]) -> bool {
        match self {
            Self::One(name) => accepted.contains(name),
            Self::Several(names) => names.iter().any(|name| accepted.contains(name)),
        }
    }
}

/// True if `json` is one object in which no name occurs twice at any depth.
pub(super) fn is_object_with_unique_names(json: &[u8]) -> bool {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    // A derived struct can also be read from an array, which no other parser takes for claims.
    let starts_object = json.trim_ascii_start().first() == Some(&b'{');
    // Bytes after the object are refused, because another parser might read them.
    starts_object && Unique.deserialize(&mut deserializer).is_ok() && deserializer.end().is_ok()
}

/// Returns the text of the claim `name`; `None` if there is no such claim or its
/// value is not text.
pub(super) fn text_claim(json: &[u8], name: &str) -> Option<String> {
    serde_json::Deserializer::from_slice(json).deserialize_map(TextClaim(name)).ok().flatten()
}

/// Reads a field of which only the presence counts. A null counts, too.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| true)
}

/// A visitor of any JSON value that fails at a duplicate name.
#[derive(Clone, Copy)]
struct Unique;

impl<'de> DeserializeSeed<'de> for Unique {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON without duplicate names")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            // The value is visited as well, so that duplicates are found at any depth. The parser
            // bounds the depth, and with it this recursion.
            map.next_value_seed(self)?;
            if !names.insert(name) {
                return Err(A::Error::custom("a duplicate name"));
            }
        }
        Ok(())
    }
}

struct TextClaim<'a>(&'a str);

impl<'de> Visitor<'de> for TextClaim<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<String>, A::Error> {
        let mut found = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == self.0 {
                // A value of another type is an error, which the caller reads as no claim.
                found = Some(map.next_value()?);
            } else {
                map.next_value::<serde::de::IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_names_are_found_at_any_depth() {
        for (json, good) in [
            (r#"{}"#, true),
            (r#" {"a": 1, "b": [{"a": null}, {"a": 2.5}]} "#, true),
            (r#"{"a": 1, "a": 1}"#, false),
            (r#"{"a": 1, "\u0061": 1}"#, false),
            (r#"{"a": {"b": 1, "c": 2, "b": 3}}"#, false),
            (r#"{"a": [[{"b": 1, "b": 1}]]}"#, false),
            (r#"[]"#, false),
            (r#""text""#, false),
            (r#"{} {}"#, false),
            (r#"{"#, false),
            ("", false),
        ] {
            assert_eq!(is_object_with_unique_names(json.as_bytes()), good, "{json}");
        }
        let deep = format!("{}1{}", r#"{"a":"#.repeat(4_000), "}".repeat(4_000));
        assert!(!is_object_with_unique_names(deep.as_bytes()), "depth is bounded");
    }

    #[test]
    fn text_claim_ignores_other_types() {
        for (json, expected) in [
            (r#"{"tenant": "acme", "x": [1]}"#, Some("acme")),
            (r#"{"x": {"tenant": "acme"}}"#, None),
            (r#"{"tenant": 1}"#, None),
            (r#"{"tenant": null}"#, None),
            (r#"{"tenant": ["acme"]}"#, None),
        ] {
            assert_eq!(text_claim(json.as_bytes(), "tenant").as_deref(), expected, "{json}");
        }
    }
}
