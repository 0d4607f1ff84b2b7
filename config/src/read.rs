//! The reading of a tree into values. Each mistake is recorded with its place and
//! key, and reading continues, so that all mistakes are reported together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::problem::{Place, Problem};
use crate::tree::{Node, Table, Value};

mod fields;
mod quantity;

pub(crate) use fields::{DeviceRate, Named};
pub(crate) use quantity::{parse_duration, show_duration};

/// A type of value that a key may have.
pub(crate) trait Field: Sized {
    /// Returns the value that the example shows for a key without a default.
    fn sample() -> String;
    /// Reads the value. Returns `None` and records a problem if the value is
    /// invalid.
    fn read(node: &Node, key: &str, reader: &mut Reader) -> Option<Self>;
    /// Returns the value as TOML; `None` if it is not set.
    fn show(&self) -> Option<String>;
    /// Returns the type's JSON schema.
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

/// An item of a walk over a section.
pub(crate) enum Visited<'a> {
    /// The beginning of a table.
    Table { key: &'a str, doc: &'a [&'a str] },
    /// A key of the table.
    Field { key: &'a str, doc: &'a [&'a str], value: Option<String>, sample: String },
}

/// The problems that are found while values are read.
#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) problems: Vec<Problem>,
}

impl Reader {
    /// Records a mistake of `key` at `place`.
    pub(crate) fn problem(&mut self, place: &Place, key: &str, message: impl Into<String>) {
        let (place, key) = (place.clone(), key.to_owned());
        self.problems.push(Problem { place, key, message: message.into() });
    }

    /// Records that a value has the wrong type. Always returns `None`.
    pub(crate) fn expected<T>(&mut self, node: &Node, key: &str, what: &str) -> Option<T> {
        let message = match &node.value {
            Value::Text(text) | Value::String(text) => {
                // A long text must not fill the message.
                format!("expected {what}, found {:?}", text.chars().take(64).collect::<String>())
            }
            Value::Integer(number) => format!("expected {what}, found {number}"),
            value => format!("expected {what}, found {}", value.kind()),
        };
        self.problem(&node.place, key, message);
        None
    }

    /// Returns the entries of a table. Records a problem for every key that is not
    /// `known`.
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
                Some(near) => format!("unknown key; did you mean {near:?}?"),
                None => format!("unknown key; the keys are {}", known.join(", ")),
            };
            self.problem(&entry.place, &join(key, name), hint);
        }
        // Also with unknown keys: the mistakes in the known ones are reported, too.
        Some(table)
    }

    /// Reads one key of a section. Returns the default if the key is missing or
    /// invalid.
    pub(crate) fn field<T: Field>(
        &mut self,
        table: Option<&Table>,
        path: (&str, &str),
        default: impl FnOnce() -> T,
        check: impl FnOnce(&T) -> Option<String>,
    ) -> T {
        let Some(node) = table.and_then(|table| table.get(path.1)) else { return default() };
        let key = join(path.0, path.1);
        // The default stands in for an invalid value, so that later checks can
        // still run.
        let Some(value) = T::read(node, &key, self) else { return default() };
        match check(&value) {
            None => value,
            Some(message) => {
                self.problem(&node.place, &key, message);
                default()
            }
        }
    }

    /// Reads a table of named sections.
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
            // The section is read even if its name is invalid, so that its mistakes
            // are reported, too.
            let section = S::read(Some(entry), &dotted, self);
            match N::named(name) {
                Ok(name) => _ = entries.insert(name, section),
                Err(message) => self.problem(&entry.place, &dotted, message),
            }
        }
        entries
    }
}

/// Returns a check of bounds. The message shows the bounds like values of the
/// type.
pub(crate) fn within<T: Field + PartialOrd>(
    range: std::ops::RangeInclusive<T>,
) -> impl FnOnce(&T) -> Option<String> {
    move |value| {
        let shown = |bound: &T| bound.show().unwrap_or_default();
        (!range.contains(value))
            .then(|| format!("must be from {} to {}", shown(range.start()), shown(range.end())))
    }
}

/// Joins a dotted key.
pub(crate) fn join(path: &str, key: &str) -> String {
    // TOML requires quotes around a name with a dot.
    let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let key = if plain { key.to_owned() } else { format!("{key:?}") };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// Resolves a path relative to the folder of the file that names it.
pub(crate) fn beside(place: &Place, path: &str) -> PathBuf {
    match place {
        Place::File { path: file, .. } => file.parent().unwrap_or(Path::new("")).join(path),
        // A flag or variable has no file, so its path starts at the working folder.
        _ => PathBuf::from(path),
    }
}

/// Returns the known word that is most similar, if one is similar enough.
fn closest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|candidate| (distance(word, candidate), *candidate))
        // A larger distance would give misleading hints.
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 2).min(2))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Returns the Levenshtein distance in bytes. Words over 64 bytes are far from all
/// others, which bounds the time.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len().max(b.len()) > 64 {
        return usize::MAX;
    }
    // One row is enough: a value needs only its neighbours on the left, above and between.
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

/// Declares a section once: the struct, its defaults, and the code that reads,
/// shows and describes it. A field is `name: Type = default;`, with `, low..=high`
/// before the semicolon if its value has bounds.
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
