//! The types of keys: numbers, names, paths, addresses, rates, limits by device
//! class, lists, and tables of named entries.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde_json::json;
use tollgate_domain::{
    ByClass, ClusterName, Currency, DeviceClass, ModelName, Network, PlanName, PoolName, Price,
    PriceFactor, PriceListName, Rate, TenantId, ToolFormat, UtcDay, WorkerName,
};

use super::quantity::{duration_schema, read_duration, show_duration};
use super::{Field, Reader, Section, Visited, beside, join};
use crate::schema;
use crate::sections::{
    AccessLogRequests, ClientFrom, DeviceSelector, EngineKind, HostPort, HttpsUrl, IssuerName,
    JwtAlgorithm, Origin, SyntheticPolicy,
};
use crate::tree::{Node, Table, Value};

/// The largest number of entries in a list.
const LONGEST_LIST: usize = 1_024;

impl<T: Field> Field for Option<T> {
    fn sample() -> String {
        T::sample()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        T::read(node, key, reader).map(Some)
    }

    fn show(&self) -> Option<String> {
        self.as_ref().and_then(T::show)
    }

    fn schema() -> serde_json::Value {
        T::schema()
    }
}

/// Implements [`Field`] for unsigned integers. A variable may contain `_`.
macro_rules! whole_number {
    ($type:ty) => {
        impl Field for $type {
            fn sample() -> String {
        "16".to_owned()
    }

            fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
                let number = match &node.value {
                    // A cast would wrap negative and too large numbers; `try_from`
                    // refuses them.
                    Value::Integer(number) => Self::try_from(*number).ok(),
                    Value::Text(text) => text.replace('_', "").parse().ok(),
                    _ => None,
                };
                number.or_else(|| {
                    reader.expected(node, key, &format!("a whole number from 0 to {}", Self::MAX))
                })
            }

            fn show(&self) -> Option<String> {
                Some(self.to_string())
            }

            fn schema() -> serde_json::Value {
                json!({ "type": "integer", "minimum": 0 })
            }
        }
    };
}
whole_number!(u32);
whole_number!(u64);

impl Field for f64 {
    fn sample() -> String {
        "1.0".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let number = match &node.value {
            // A number without a point is a TOML integer, and it is valid here, too.
            Value::Integer(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            Value::Text(text) => text.parse().ok(),
            _ => None,
        };
        // TOML has `nan` and `inf`, and no key can mean them.
        number
            .filter(|number| number.is_finite())
            .or_else(|| reader.expected(node, key, "a number"))
    }

    fn show(&self) -> Option<String> {
        // `Debug` keeps the point of a whole number, so that TOML reads a float
        // again.
        Some(format!("{self:?}"))
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "number" })
    }
}

impl Field for bool {
    fn sample() -> String {
        "true".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let flag = match &node.value {
            Value::Boolean(flag) => Some(*flag),
            // A variable has no types, so its value arrives as text.
            Value::Text(text) => text.parse().ok(),
            _ => None,
        };
        flag.or_else(|| reader.expected(node, key, "true or false"))
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "boolean" })
    }
}

impl Field for String {
    fn sample() -> String {
        "\"text\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            // Empty text could mean no value, and a missing key means that already.
            Value::String(text) | Value::Text(text) if !text.is_empty() => Some(text.clone()),
            _ => reader.expected(node, key, "text"),
        }
    }

    fn show(&self) -> Option<String> {
        (!self.is_empty()).then(|| quoted(self))
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "string", "minLength": 1 })
    }
}

impl Field for PathBuf {
    fn sample() -> String {
        "\"path\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let text = String::read(node, key, reader)?;
        // A path in a file is relative to that file, so that it does not depend on
        // the working folder.
        Some(beside(&node.place, &text))
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string_lossy()))
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "string", "minLength": 1 })
    }
}

/// A name that may be the key of a table's entry.
pub(crate) trait Named: Ord {
    fn named(text: &str) -> Result<Self, String>
    where
        Self: Sized;
    fn text(&self) -> &str;
}

/// Implements [`Field`] and [`Named`] for types of names.
macro_rules! names {
    ($($type:ty, $sample:literal;)*) => {
        $(
            impl Named for $type {
                fn named(text: &str) -> Result<Self, String> {
                    Self::new(text).map_err(|error| error.to_string())
                }

                fn text(&self) -> &str {
                    self.as_str()
                }
            }

            impl Field for $type {
                fn sample() -> String {
        $sample.to_owned()
    }

                fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
                    let text = String::read(node, key, reader)?;
                    match Self::new(&text) {
                        Ok(name) => Some(name),
                        Err(error) => {
                            reader.problem(&node.place, key, error.to_string());
                            None
                        }
                    }
                }

                fn show(&self) -> Option<String> {
                    Some(quoted(self.as_str()))
                }

                fn schema() -> serde_json::Value {
                    json!({ "type": "string", "maxLength": 128 })
                }
            }
        )*
    };
}
names! {
    PlanName, "\"team\"";
    PoolName, "\"trial\"";
    TenantId, "\"acme\"";
    ModelName, "\"tollgate-demo\"";
    IssuerName, "\"corporate\"";
    PriceListName, "\"standard\"";
    ClusterName, "\"prod\"";
    WorkerName, "\"gpu0\"";
}

impl<N: Named, S: Section> Section for BTreeMap<N, S> {
    fn read(node: Option<&Node>, key: &str, reader: &mut Reader) -> Self {
        reader.named(node, key)
    }

    fn visit(&self, key: &str, visit: &mut dyn FnMut(Visited<'_>)) {
        for (name, section) in self {
            section.visit(&join(key, name.text()), visit);
        }
    }

    fn schema() -> serde_json::Value {
        schema::names(S::schema())
    }
}

impl<T: Field + Ord> Field for BTreeSet<T> {
    fn sample() -> String {
        Vec::<T>::sample()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        Vec::read(node, key, reader).map(|items: Vec<T>| items.into_iter().collect())
    }

    fn show(&self) -> Option<String> {
        list(self.iter())
    }

    fn schema() -> serde_json::Value {
        Vec::<T>::schema()
    }
}

impl<T: Field> Field for Vec<T> {
    fn sample() -> String {
        format!("[{}]", T::sample())
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let items = match &node.value {
            Value::Array(items) => items.clone(),
            // An environment variable separates the entries by commas.
            Value::Text(text) => text
                .split(',')
                .map(|item| Node {
                    place: node.place.clone(),
                    value: Value::Text(item.trim().to_owned()),
                })
                .collect(),
            _ => return reader.expected(node, key, "a list"),
        };
        // An empty list could mean nothing or everything, so the key must be left out
        // instead.
        if items.is_empty() || items.len() > LONGEST_LIST {
            let wanted = format!("a list of 1 to {LONGEST_LIST} entries");
            reader.problem(&node.place, key, format!("expected {wanted}, found {}", items.len()));
            return None;
        }
        // Collected first, so that every entry's mistake is reported and not only the first.
        let read: Vec<Option<T>> = items.iter().map(|item| T::read(item, key, reader)).collect();
        read.into_iter().collect()
    }

    fn show(&self) -> Option<String> {
        list(self.iter())
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "array", "items": T::schema(), "minItems": 1, "maxItems": LONGEST_LIST })
    }
}

fn list<'a, T: Field + 'a>(items: impl Iterator<Item = &'a T>) -> Option<String> {
    let shown: Vec<String> = items.filter_map(T::show).collect();
    // An empty list cannot be read again, so the key is shown as not set.
    (!shown.is_empty()).then(|| format!("[{}]", shown.join(", ")))
}

/// A number a minute, or `{ limit, burst }`.
impl Field for Rate {
    fn sample() -> String {
        "600".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        rate(node, key, reader, u64::read)
    }

    fn show(&self) -> Option<String> {
        show_rate(*self, |amount| amount.to_string())
    }

    fn schema() -> serde_json::Value {
        rate_schema(&json!({ "type": "integer", "minimum": 1 }))
    }
}

/// Device time a minute: a duration, or `{ limit, burst }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRate(pub(crate) Rate);

impl Field for DeviceRate {
    fn sample() -> String {
        "\"60s\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        rate(node, key, reader, read_duration).map(Self)
    }

    fn show(&self) -> Option<String> {
        show_rate(self.0, |nanos| quoted(&show_duration(nanos)))
    }

    fn schema() -> serde_json::Value {
        rate_schema(&duration_schema())
    }
}

fn rate(
    node: &Node,
    key: &str,
    reader: &mut Reader,
    amount: impl Fn(&Node, &str, &mut Reader) -> Option<u64>,
) -> Option<Rate> {
    let at_least_one = |node: &Node, key: &str, reader: &mut Reader| {
        let found = amount(node, key, reader)?;
        if found == 0 {
            reader.problem(&node.place, key, "must be at least 1; 0 would refuse every request");
            return None;
        }
        Some(found)
    };
    if node.table().is_none() {
        return at_least_one(node, key, reader).map(Rate::per_minute);
    }
    let table = reader.table(Some(node), key, &["limit", "burst"])?;
    let Some(limit) = table.get("limit") else {
        reader.problem(&node.place, key, "burst also needs limit");
        return None;
    };
    let per_minute = at_least_one(limit, &join(key, "limit"), reader);
    let burst = match table.get("burst") {
        Some(burst) => at_least_one(burst, &join(key, "burst"), reader),
        // Without a burst, the amount of a whole minute may come at once.
        None => per_minute,
    };
    // Both values are read before the first `?`, so that both mistakes are reported.
    Some(Rate { per_minute: per_minute?, burst: burst? })
}

fn show_rate(rate: Rate, show: impl Fn(u64) -> String) -> Option<String> {
    let limit = show(rate.per_minute);
    // The short form means that both numbers are equal.
    Some(if rate.burst == rate.per_minute {
        limit
    } else {
        format!("{{ limit = {limit}, burst = {} }}", show(rate.burst))
    })
}

fn rate_schema(amount: &serde_json::Value) -> serde_json::Value {
    json!({ "anyOf": [amount, {
        "type": "object",
        "properties": { "limit": amount, "burst": amount },
        "required": ["limit"],
        "additionalProperties": false,
    }] })
}

/// One limit for every device class, or a table of classes with `default`.
impl<T: Field> Field for ByClass<T> {
    fn sample() -> String {
        T::sample()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        // A rate is a table, too, so the keys of the table decide.
        let Some(table) = node.table().filter(|table| !is_rate(table)) else {
            let default = Some(T::read(node, key, reader)?);
            return Some(Self { default, classes: BTreeMap::new() });
        };
        let mut limits = Self { default: None, classes: BTreeMap::new() };
        for (class, entry) in table {
            let dotted = join(key, class);
            let value = T::read(entry, &dotted, reader);
            match (class.as_str(), DeviceClass::new(class)) {
                // `default` stands for every class without an entry, so it is no
                // class itself.
                ("default", _) => limits.default = value,
                (_, Ok(class)) => limits.classes.extend(value.map(|value| (class, value))),
                (_, Err(error)) => reader.problem(&entry.place, &dotted, error.to_string()),
            }
        }
        Some(limits)
    }

    fn show(&self) -> Option<String> {
        let default = self.default.as_ref().and_then(T::show);
        if self.classes.is_empty() {
            return default;
        }
        // A class with a dot, for example, needs quotes, as in a file.
        let named = self.classes.iter().map(|(class, value)| (join("", class.as_str()), value));
        let mut entries: Vec<String> = named
            .filter_map(|(class, value)| Some(format!("{class} = {}", value.show()?)))
            .collect();
        entries.extend(default.map(|default| format!("default = {default}")));
        Some(format!("{{ {} }}", entries.join(", ")))
    }

    fn schema() -> serde_json::Value {
        json!({ "anyOf": [T::schema(), {
            "type": "object",
            "additionalProperties": T::schema(),
        }] })
    }
}

/// Returns true if the table is one rate and not a table of classes.
fn is_rate(table: &Table) -> bool {
    table.contains_key("limit") || table.contains_key("burst")
}

/// Implements [`Field`] for types that have one text form, by `FromStr` and `Display`.
macro_rules! words {
    ($type:ty, $sample:literal, $what:literal) => {
        words!($type, $sample, $what, |text| text.parse());
    };
    ($type:ty, $sample:literal, $what:literal, |$text:ident| $parse:expr) => {
        impl Field for $type {
            fn sample() -> String {
        $sample.to_owned()
    }

            fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
                let word = match &node.value {
                    Value::String($text) | Value::Text($text) => $parse.ok(),
                    _ => None,
                };
                word.or_else(|| reader.expected(node, key, $what))
            }

            fn show(&self) -> Option<String> {
                Some(quoted(&self.to_string()))
            }

            fn schema() -> serde_json::Value {
                json!({ "type": "string" })
            }
        }
    };
}
words!(
    SocketAddr,
    "\"127.0.0.1:8443\"",
    "an address and port such as \"127.0.0.1:8443\"",
    // The name is always this host (RFC 6761); other names would need a resolver at start.
    |text| match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}").parse(),
        None => text.parse(),
    }
);
words!(AccessLogRequests, "\"all\"", "\"off\", \"refusals\" or \"all\"");
words!(EngineKind, "\"model\"", "\"model\" or \"synthetic\"");
words!(ToolFormat, "\"hermes\"", "\"hermes\", \"qwen3-coder\", \"llama3\" or \"mistral\"");
words!(HttpsUrl, "\"https://issuer.example/jwks.json\"", "an address that begins with https://");
words!(
    Network,
    "\"10.0.0.0/8\"",
    "a network such as \"10.0.0.0/8\", \"192.0.2.7\" or \"2001:db8::/32\""
);
words!(
    Origin,
    "\"https://app.example\"",
    "an origin such as \"https://app.example\" or \"http://localhost:5173\", or \"*\""
);
words!(HostPort, "\"10.0.0.7:7443\"", "a host and a port such as \"10.0.0.7:7443\"");
words!(ClientFrom, "\"x-forwarded-for\"", "\"x-forwarded-for\" or \"proxy-v2\"");
words!(
    SyntheticPolicy,
    "\"fair\"",
    "\"fair\", \"first_come\", \"token_counters\" or \"key_counters\""
);
words!(DeviceSelector, "\"auto\"", "\"auto\", \"cpu\", \"cuda\", \"cuda:INDEX\" or \"cuda:UUID\"");
words!(
    JwtAlgorithm,
    "\"RS256\"",
    "a signature with a public key: RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384 or EdDSA"
);

words!(Currency, "\"EUR\"", "a currency of three capital letters such as \"EUR\"");

/// A date without a time, with or without quotes.
impl Field for UtcDay {
    fn sample() -> String {
        "2026-12-01".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let day = match &node.value {
            Value::Datetime(text) | Value::String(text) | Value::Text(text) => text.parse().ok(),
            _ => None,
        };
        day.or_else(|| reader.expected(node, key, "a day from 1970 to 9999 such as 2026-12-01"))
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "string", "format": "date" })
    }
}

/// A decimal in quotes, or a whole number. A TOML float is refused, because it is
/// not exact.
impl Field for Price {
    fn sample() -> String {
        "\"0.0025\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let price = match &node.value {
            Value::String(text) | Value::Text(text) => text.parse().ok(),
            Value::Integer(number) => number.to_string().parse().ok(),
            _ => None,
        };
        let largest = Self::LARGEST;
        price.or_else(|| {
            let wanted = format!(
                "a price in quotes such as \"0.0025\", from 0 to {largest} with at most nine \
                 digits after the point"
            );
            reader.expected(node, key, &wanted)
        })
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string()))
    }

    fn schema() -> serde_json::Value {
        json!({ "anyOf": [
            { "type": "string", "pattern": "^[0-9]{1,7}([.][0-9]{1,9})?$" },
            { "type": "integer", "minimum": 0, "maximum": Self::LARGEST },
        ] })
    }
}

/// A decimal in quotes, or the whole number 1. A TOML float is refused, as for prices.
impl Field for PriceFactor {
    fn sample() -> String {
        "\"0.5\"".to_owned()
    }

    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self> {
        let factor = match &node.value {
            Value::String(text) | Value::Text(text) => text.parse().ok(),
            Value::Integer(number) => number.to_string().parse().ok(),
            _ => None,
        };
        let wanted = "a factor in quotes such as \"0.5\", more than 0 and at most 1 with at most \
                      nine digits after the point";
        factor.or_else(|| reader.expected(node, key, wanted))
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string()))
    }

    fn schema() -> serde_json::Value {
        json!({ "anyOf": [
            { "type": "string", "pattern": "^(0[.][0-9]{1,9}|0?1([.]0{1,9})?)$" },
            { "type": "integer", "minimum": 1, "maximum": 1 },
        ] })
    }
}

/// Returns the text as a TOML string.
pub(crate) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            // TOML allows no such character in a string without an escape.
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
