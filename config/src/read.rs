//! Reads the tree into values: every mistake is noted with its place and key,
//! and reading goes on, so that all come back together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::problem::{Place, Problem};
use crate::tree::{Node, Table, Value};

mod fields;
mod quantity;

pub(crate) use fields::{DeviceRate, Named};
pub(crate) use quantity::{parse_duration, show_duration};

/// A value that a key may hold.
pub(crate) trait Field: Sized {
    /// What stands in the example where nothing is the default.
    fn sample() -> String;
    /// The value, or `None` with a problem noted.
    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self>;
    /// As TOML; `None` where nothing is set.
    fn show(&self) -> Option<String>;
    /// As JSON schema.
    fn schema() -> serde_json::Value;
}

/// A table with fixed keys.
pub(crate) trait Section: Default {
    fn read(node: Option<&Node>, key: &str, reader: &mut Reader) -> Self;
    /// Calls `visit` for every key in order, with its dotted key, description,
    /// value and sample.
    fn visit(&self, key: &str, visit: &mut dyn FnMut(Visited<'_>));
    fn schema() -> serde_json::Value;
}

/// What a walk over a section meets.
pub(crate) enum Visited<'a> {
    /// A table begins.
    Table { key: &'a str, doc: &'a [&'a str] },
    /// A key in it.
    Field { key: &'a str, doc: &'a [&'a str], value: Option<String>, sample: String },
}

/// Collects problems while values are read.
#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) problems: Vec<Problem>,
}

impl Reader {
    /// Notes a mistake of `key`, which stands at `place`.
    pub(crate) fn problem(&mut self, place: &Place, key: &str, message: impl Into<String>) {
        let (place, key) = (place.clone(), key.to_owned());
        self.problems.push(Problem { place, key, message: message.into() });
    }

    /// Notes that a value is of the wrong kind.
    pub(crate) fn expected<T>(&mut self, node: &Node, key: &str, what: &str) -> Option<T> {
        let message = match &node.value {
            Value::Text(text) | Value::String(text) => {
                format!("expected {what}, found {:?}", text.chars().take(64).collect::<String>())
            }
            Value::Integer(number) => format!("expected {what}, found {number}"),
            value => format!("expected {what}, found {}", value.kind()),
        };
        self.problem(&node.place, key, message);
        None
    }

    /// The entries of a table, of which only `known` keys may be there.
    pub(crate) fn table<'a>(
        &mut self,
        node: Option<&'a Node>,
        key: &str,
        known: &[&str],
    ) -> Option<&'a Table> {
        let node = node?;
        let Some(table) = node.table() else {
            return self.expected(node, key, "a table");
        };
        for (name, entry) in table {
            if known.contains(&name.as_str()) {
                continue;
            }
            let hint = match closest(name, known) {
                Some(near) => format!("no such key: did you mean {near:?}?"),
                None => format!("no such key: known are {}", known.join(", ")),
            };
            self.problem(&entry.place, &join(key, name), hint);
        }
        Some(table)
    }

    /// One key of a section, or its default.
    pub(crate) fn field<T: Field>(
        &mut self,
        table: Option<&Table>,
        path: (&str, &str),
        default: impl FnOnce() -> T,
        check: impl FnOnce(&T) -> Option<String>,
    ) -> T {
        let Some(node) = table.and_then(|table| table.get(path.1)) else { return default() };
        let key = join(path.0, path.1);
        let Some(value) = T::read(node, &key, self) else { return default() };
        match check(&value) {
            None => value,
            Some(message) => {
                self.problem(&node.place, &key, message);
                default()
            }
        }
    }

    /// A table whose keys are names, each with a section of its own.
    pub(crate) fn named<N: Named, S: Section>(
        &mut self,
        node: Option<&Node>,
        key: &str,
    ) -> BTreeMap<N, S> {
        let mut entries = BTreeMap::new();
        let Some(node) = node else { return entries };
        let Some(table) = node.table() else {
            self.expected::<()>(node, key, "a table of names");
            return entries;
        };
        for (name, entry) in table {
            let dotted = join(key, name);
            let section = S::read(Some(entry), &dotted, self);
            match N::named(name) {
                Ok(name) => _ = entries.insert(name, section),
                Err(message) => self.problem(&entry.place, &dotted, message),
            }
        }
        entries
    }
}

/// `within(1..=8)` as a check: the bounds in the words of the value's type.
pub(crate) fn within<T: Field + PartialOrd>(
    range: std::ops::RangeInclusive<T>,
) -> impl FnOnce(&T) -> Option<String> {
    move |value| {
        let shown = |bound: &T| bound.show().unwrap_or_default();
        (!range.contains(value))
            .then(|| format!("must be from {} to {}", shown(range.start()), shown(range.end())))
    }
}

/// A dotted key.
pub(crate) fn join(path: &str, key: &str) -> String {
    // A name with a dot in it is quoted, as TOML wants it.
    let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let key = if plain { key.to_owned() } else { format!("{key:?}") };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// A path as its file means it: relative to the file's own folder.
pub(crate) fn beside(place: &Place, path: &str) -> PathBuf {
    match place {
        Place::File { path: file, .. } => file.parent().unwrap_or(Path::new("")).join(path),
        _ => PathBuf::from(path),
    }
}

/// The known word that was probably meant.
fn closest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|candidate| (distance(word, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 2).min(2))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's distance over bytes; words beyond 64 bytes are far from all.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len().max(b.len()) > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Declares a section once: the struct, its defaults, how it is read, shown
/// and described. A field is `name: Type = default;`, with `, low..=high`
/// before the semicolon where its value is bounded.
macro_rules! section {
    (
        $(#[doc = $doc:literal])+
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $field_doc:literal])+
                $field:ident: $type:ty = $default:expr $(, $range:expr)?;
            )*
        }
        $(sections {
            $(
                $(#[doc = $sub_doc:literal])+
                $sub:ident: $sub_type:ty;
            )*
        })?
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $name {
            $($(#[doc = $field_doc])+ pub $field: $type,)*
            $($($(#[doc = $sub_doc])+ pub $sub: $sub_type,)*)?
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($field: $default,)*
                    $($($sub: Default::default(),)*)?
                }
            }
        }

        impl $crate::read::Section for $name {
            fn read(
                node: Option<&$crate::tree::Node>,
                key: &str,
                reader: &mut $crate::read::Reader,
            ) -> Self {
                let known = [$(stringify!($field),)* $($(stringify!($sub),)*)?];
                let table = reader.table(node, key, &known);
                Self {
                    $($field: reader.field(
                        table,
                        (key, stringify!($field)),
                        || $default,
                        $crate::read::section!(@check $($range)?),
                    ),)*
                    $($($sub: $crate::read::Section::read(
                        table.and_then(|table| table.get(stringify!($sub))),
                        &$crate::read::join(key, stringify!($sub)),
                        reader,
                    ),)*)?
                }
            }

            fn visit(&self, key: &str, visit: &mut dyn FnMut($crate::read::Visited<'_>)) {
                visit($crate::read::Visited::Table { key, doc: &[$($doc),+] });
                $(visit($crate::read::Visited::Field {
                    key: &$crate::read::join(key, stringify!($field)),
                    doc: &[$($field_doc),+],
                    value: $crate::read::Field::show(&self.$field),
                    sample: <$type as $crate::read::Field>::sample(),
                });)*
                $($($crate::read::Section::visit(
                    &self.$sub,
                    &$crate::read::join(key, stringify!($sub)),
                    visit,
                );)*)?
            }

            fn schema() -> serde_json::Value {
                #[allow(unused_mut, reason = "a section may have no keys of one kind")]
                let mut properties = serde_json::Map::new();
                $(properties.insert(
                    stringify!($field).to_owned(),
                    $crate::schema::described(
                        <$type as $crate::read::Field>::schema(),
                        &[$($field_doc),+],
                    ),
                );)*
                $($(properties.insert(
                    stringify!($sub).to_owned(),
                    <$sub_type as $crate::read::Section>::schema(),
                );)*)?
                $crate::schema::table(properties, &[$($doc),+])
            }
        }
    };
    (@check) => { |_| None };
    (@check $range:expr) => { $crate::read::within($range) };
}
pub(crate) use section;
