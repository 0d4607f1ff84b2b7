//! Untyped values with their places. Files are merged into one tree; environment
//! variables and flags are then laid over the tree.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::problem::{Place, Problem};

/// A table of the tree.
pub(crate) type Table = BTreeMap<String, Node>;

/// The tables whose entries the admin names. A name may occur only once over all
/// files.
const NAMED: [&str; 6] = ["plans", "pools", "tenants", "models", "prices", "auth.jwt"];

/// The deepest nesting of tables. The bound protects the stack; no key needs more.
const DEEPEST: usize = 16;

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub(crate) place: Place,
    pub(crate) value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// Text of an environment variable or a flag. The key determines its type.
    Text(String),
    String(String),
    Integer(i128),
    Float(f64),
    Boolean(bool),
    /// A date in TOML's spelling; empty for a value that was refused.
    Datetime(String),
    Array(Vec<Node>),
    Table(Table),
}

impl Value {
    /// Returns the type's name for error messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) | Self::String(_) => "text",
            Self::Integer(_) => "a whole number",
            Self::Float(_) => "a number with a fraction",
            Self::Boolean(_) => "true or false",
            Self::Datetime(_) => "a date",
            Self::Array(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

impl Node {
    pub(crate) fn table(&self) -> Option<&Table> {
        match &self.value {
            Value::Table(table) => Some(table),
            _ => None,
        }
    }
}

/// Returns the node at a path of keys.
pub(crate) fn find<'a>(table: &'a Table, keys: &[&str]) -> Option<&'a Node> {
    let (first, rest) = keys.split_first()?;
    let node = table.get(*first)?;
    if rest.is_empty() { Some(node) } else { find(node.table()?, rest) }
}

/// Parses one file. Adds its syntax errors to `problems`.
pub(crate) fn parse(path: &Arc<PathBuf>, text: &str, problems: &mut Vec<Problem>) -> Table {
    let lines = Lines::of(path, text);
    // This function reports every syntax error and not only the first.
    let (document, errors) = DeTable::parse_recoverable(text);
    let broken = !errors.is_empty();
    for error in errors {
        problems.push(Problem {
            place: lines.place(error.span().map_or(0, |span| span.start)),
            key: String::new(),
            message: error.message().trim().replace('\n', ": "),
        });
    }
    if broken {
        // The values of a broken file would only cause misleading errors.
        return Table::new();
    }
    lines.table(document.get_ref(), 0, problems)
}

/// Merges `from` into `into`. Tables are joined. A key or a name that is given
/// twice is an error that shows both places.
pub(crate) fn merge(into: &mut Table, from: Table, path: &str, problems: &mut Vec<Problem>) {
    for (key, node) in from {
        let dotted = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let Some(old) = into.get_mut(&key) else {
            into.insert(key, node);
            continue;
        };
        match (&mut old.value, node.value) {
            // An entry with a name must stand in one file, so that no tenant is
            // defined in parts.
            (Value::Table(old), Value::Table(new)) if !NAMED.contains(&path) => {
                merge(old, new, &dotted, problems);
            }
            _ => problems.push(Problem {
                message: format!("given twice; also given at {}", old.place),
                place: node.place,
                key: dotted,
            }),
        }
    }
}

/// Sets one value in the tree. `keys` is not empty. A name among the keys may be
/// spelt like in an environment variable.
pub(crate) fn overlay(table: &mut Table, keys: &[String], node: Node) {
    let Some((first, rest)) = keys.split_first() else { return };
    // The name of a variable has only letters, digits and `_`, so a name such as
    // `my-plan` is compared in that form.
    let spelt = |key: &str| key.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let key = table
        .keys()
        .find(|key| spelt(key) == spelt(first))
        .cloned()
        .unwrap_or_else(|| first.clone());
    if rest.is_empty() {
        table.insert(key, node);
        return;
    }
    let below = table
        .entry(key)
        // A variable may set a key in a table that no file has.
        .or_insert_with(|| Node { place: node.place.clone(), value: Value::Table(Table::new()) });
    // A later source takes precedence even over a value of another type.
    if below.table().is_none() {
        below.value = Value::Table(Table::new());
    }
    if let Value::Table(below) = &mut below.value {
        overlay(below, rest, node);
    }
}

/// Parses the text of an environment variable or a flag: a TOML list or inline
/// table, or else untyped text.
pub(crate) fn untyped(place: Place, text: &str) -> Node {
    // Most text, such as a path, is no TOML. Only text that looks like TOML is
    // parsed.
    if text.starts_with(['[', '{', '"']) {
        let document = format!("v = {text}");
        let mut problems = Vec::new();
        let mut table = parse(&Arc::new(PathBuf::new()), &document, &mut problems);
        if let (true, Some(mut node)) = (problems.is_empty(), table.remove("v")) {
            // The place in the made-up document means nothing to an admin.
            replace_places(&mut node, &place);
            return node;
        }
    }
    Node { place, value: Value::Text(text.to_owned()) }
}

fn replace_places(node: &mut Node, place: &Place) {
    node.place = place.clone();
    match &mut node.value {
        Value::Array(items) => items.iter_mut().for_each(|item| replace_places(item, place)),
        Value::Table(table) => table.values_mut().for_each(|item| replace_places(item, place)),
        _ => {}
    }
}

/// The line ends of a file, which convert offsets to lines.
struct Lines<'a> {
    path: &'a Arc<PathBuf>,
    ends: Vec<usize>,
}

impl<'a> Lines<'a> {
    fn of(path: &'a Arc<PathBuf>, text: &str) -> Self {
        let bytes = text.bytes().enumerate();
        Self { path, ends: bytes.filter(|&(_, byte)| byte == b'\n').map(|(at, _)| at).collect() }
    }

    fn place(&self, offset: usize) -> Place {
        // Editors count lines from 1.
        let line = 1 + self.ends.partition_point(|&end| end < offset);
        Place::File { path: Arc::clone(self.path), line }
    }

    fn table(&self, table: &DeTable<'_>, depth: usize, problems: &mut Vec<Problem>) -> Table {
        let entries = table.iter().map(|(key, value)| {
            let place = self.place(key.span().start);
            let value = self.value(value, &place, depth, problems);
            (key.get_ref().to_string(), Node { place, value })
        });
        entries.collect()
    }

    fn value(
        &self,
        value: &Spanned<DeValue<'_>>,
        place: &Place,
        depth: usize,
        problems: &mut Vec<Problem>,
    ) -> Value {
        let mut refuse = |message: &str| {
            let (place, key) = (place.clone(), String::new());
            problems.push(Problem { place, key, message: message.to_owned() });
            Value::Datetime(String::new())
        };
        if depth >= DEEPEST {
            return refuse("nested too deeply");
        }
        match value.get_ref() {
            DeValue::String(text) => Value::String(text.to_string()),
            // TOML also has hexadecimal, octal and binary integers.
            DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
                .map_or_else(|_| refuse("the number is too large"), Value::Integer),
            DeValue::Float(number) => number
                .as_str()
                .parse()
                .map_or_else(|_| refuse("the number cannot be read"), Value::Float),
            DeValue::Boolean(flag) => Value::Boolean(*flag),
            DeValue::Datetime(date) => Value::Datetime(date.to_string()),
            DeValue::Array(items) => {
                let items = items.iter().map(|item| {
                    let place = self.place(item.span().start);
                    let value = self.value(item, &place, depth + 1, problems);
                    Node { place, value }
                });
                Value::Array(items.collect())
            }
            DeValue::Table(table) => Value::Table(self.table(table, depth + 1, problems)),
        }
    }
}
