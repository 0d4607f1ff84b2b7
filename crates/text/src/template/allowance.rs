//! The memory allowance of a template. Every operation that can make a long text or
//! list in a few steps is counted against the allowance before it allocates.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

/// The bytes that one rendering may still allocate.
#[derive(Debug)]
pub(super) struct Allowance {
    left: AtomicUsize,
    spent: AtomicBool,
}

impl Allowance {
    pub(super) fn new(bytes: usize) -> Self {
        Self { left: AtomicUsize::new(bytes), spent: AtomicBool::new(false) }
    }

    /// True if an operation was refused because too few bytes were left.
    pub(super) fn is_spent(&self) -> bool {
        self.spent.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> Result<(), Error> {
        // Relaxed: one thread renders. The callbacks of the library need a type that is `Sync`.
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        if taken.is_err() {
            self.spent.store(true, Ordering::Relaxed);
            return Err(Error::new(ErrorKind::InvalidOperation, "out of memory allowance"));
        }
        Ok(())
    }

    /// Returns the concatenation of `values`.
    fn text(&self, values: &[&dyn fmt::Display]) -> Result<Value, Error> {
        let mut counted = Counted { text: String::new(), allowance: self };
        for value in values {
            counted.write(value)?;
        }
        Ok(Value::from(counted.text))
    }

    fn list(&self, values: impl Iterator<Item = Value>) -> Result<Vec<Value>, Error> {
        let mut list = Vec::new();
        for value in values {
            self.take(size_of::<Value>())?;
            list.push(value);
        }
        Ok(list)
    }
}

/// A text that counts its growth against the allowance.
struct Counted<'a> {
    text: String,
    allowance: &'a Allowance,
}

impl Counted<'_> {
    fn write(&mut self, value: &dyn fmt::Display) -> Result<(), Error> {
        write!(self, "{value}").map_err(Error::from)
    }
}

impl Write for Counted<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.allowance.take(text.len()).map_err(|_| fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}

/// Returns an environment in which every operation that makes text or lists is
/// counted.
pub(super) fn checked_environment(allowance: &Arc<Allowance>) -> Environment<'static> {
    let mut environment = Environment::new();
    // Templates test optional fields of messages, which are undefined here.
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    // Deep macro calls would use up the thread's stack.
    environment.set_recursion_limit(100);
    // These filters pad or repeat by a number, or make lists of lists, so counting
    // their output would be complex. No chat template needs them.
    for filter in ["batch", "slice", "format", "indent", "center", "pprint", "urlencode", "debug"] {
        environment.remove_filter(filter);
    }
    // `operators` adds `range` again, with its numbers counted.
    for function in ["debug", "range", "lipsum", "cycler", "joiner"] {
        environment.remove_global(function);
    }
    operators(&mut environment, allowance);
    filters(&mut environment, allowance);
    let counting = Arc::clone(allowance);
    environment.set_formatter(move |out, _state, value| {
        // Jinja prints nothing for an undefined value.
        if value.is_undefined() {
            return Ok(());
        }
        let text = counting.text(&[&Shown(value)])?;
        out.write_str(text.as_str().unwrap_or_default()).map_err(Error::from)
    });
    let counting = Arc::clone(allowance);
    environment.set_unknown_method_callback(move |state, value, method, arguments| {
        method_call(&counting, state, value, method, arguments)
    });
    environment
}

/// A wrapper that prints a value as Python's Jinja does.
struct Shown<'a>(&'a Value);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.kind() {
            ValueKind::Bool => f.write_str(if self.0.is_true() { "True" } else { "False" }),
            ValueKind::None => f.write_str("None"),
            _ => fmt::Display::fmt(self.0, f),
        }
    }
}

fn operators(environment: &mut Environment<'static>, allowance: &Arc<Allowance>) {
    let counting = Arc::clone(allowance);
    environment
        .add_function("~", move |a: &Value, b: &Value| counting.text(&[&Shown(a), &Shown(b)]));
    let counting = Arc::clone(allowance);
    environment.add_function("+", move |a: &Value, b: &Value| add(&counting, a, b));
    let counting = Arc::clone(allowance);
    environment.add_function("*", move |a: &Value, b: &Value| multiply(&counting, a, b));
    let counting = Arc::clone(allowance);
    environment.add_function("range", move |first: i64, end: Option<i64>, step: Option<i64>| {
        range(&counting, first, end, step)
    });
}

fn filters(environment: &mut Environment<'static>, allowance: &Arc<Allowance>) {
    let counting = Arc::clone(allowance);
    environment.add_filter("join", move |list: &Value, between: Option<&str>| {
        join(&counting, list, between.unwrap_or_default())
    });
    let counting = Arc::clone(allowance);
    environment.add_filter("replace", move |text: &str, from: &str, to: &str| {
        replace(&counting, text, from, to)
    });
    let counting = Arc::clone(allowance);
    environment
        .add_filter("list", move |value: &Value| counting.list(value.try_iter()?).map(Value::from));
    let counting = Arc::clone(allowance);
    environment.add_filter("string", move |value: &Value| counting.text(&[&Shown(value)]));
    let counting = Arc::clone(allowance);
    environment.add_filter("tojson", move |value: &Value, options: Kwargs| {
        to_json(&counting, value, &options)
    });
}

fn add(allowance: &Allowance, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return allowance.text(&[&a, &b]);
    }
    if a.is_number() && b.is_number() {
        return number(a, b, i128::checked_add, |a, b| a + b);
    }
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(a) && is_list(b) {
        return allowance.list(a.try_iter()?.chain(b.try_iter()?)).map(Value::from);
    }
    Err(cannot("+", a, b))
}

fn multiply(allowance: &Allowance, a: &Value, b: &Value) -> Result<Value, Error> {
    if a.is_number() && b.is_number() {
        // Numbers cannot grow into long texts, so they are not counted.
        return number(a, b, i128::checked_mul, |a, b| a * b);
    }
    let (text, times) = if a.as_str().is_some() { (a, b) } else { (b, a) };
    let (Some(text), Some(times)) = (text.as_str(), times.as_usize()) else {
        return Err(cannot("*", a, b));
    };
    // Counted first: the repetition itself would allocate at once.
    allowance.take(text.len().saturating_mul(times))?;
    Ok(Value::from(text.repeat(times)))
}

fn number(
    a: &Value,
    b: &Value,
    whole: impl Fn(i128, i128) -> Option<i128>,
    real: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    if let (Ok(a), Ok(b)) = (i128::try_from(a.clone()), i128::try_from(b.clone())) {
        let result = whole(a, b);
        return result
            .map(Value::from)
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "a number is too large"));
    }
    Ok(Value::from(real(f64::try_from(a.clone())?, f64::try_from(b.clone())?)))
}

fn cannot(operator: &str, a: &Value, b: &Value) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("cannot use {operator} with {} and {}", a.kind(), b.kind()),
    )
}

fn range(
    allowance: &Allowance,
    first: i64,
    end: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let (mut at, end) = end.map_or((0, first), |end| (first, end));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "range with step 0"));
    }
    let numbers = std::iter::from_fn(|| {
        let inside = if step > 0 { at < end } else { at > end };
        let number = inside.then(|| Value::from(at));
        // Saturating, so that a range near the largest number ends.
        at = at.saturating_add(step);
        number
    });
    allowance.list(numbers).map(Value::from)
}

fn join(allowance: &Allowance, list: &Value, between: &str) -> Result<Value, Error> {
    let mut counted = Counted { text: String::new(), allowance };
    for (index, value) in list.try_iter()?.enumerate() {
        if index > 0 {
            counted.write(&between)?;
        }
        counted.write(&Shown(&value))?;
    }
    Ok(Value::from(counted.text))
}

fn replace(allowance: &Allowance, text: &str, from: &str, to: &str) -> Result<Value, Error> {
    // An empty pattern matches before each character and at the end.
    let found = if from.is_empty() { text.len() + 1 } else { text.matches(from).count() };
    allowance.take(text.len().saturating_add(found.saturating_mul(to.len())))?;
    Ok(Value::from(text.replace(from, to)))
}

/// Renders JSON in the form that published templates expect: not escaped for HTML,
/// and with a space after `,` and `:` as in Python.
fn to_json(allowance: &Allowance, value: &Value, options: &Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted and not used: non-ASCII text stays readable either way.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut writer = JsonWriter { bytes: Vec::new(), allowance };
    let written = match indent {
        Some(width) => {
            // Bounded: the width is a number of the template's choice.
            let spaces = " ".repeat(width.min(16));
            let format = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            write_json(value, &mut writer, format)
        }
        None => write_json(value, &mut writer, PythonFormatter),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    // The serializer writes UTF-8 only, so nothing is replaced.
    Ok(Value::from(String::from_utf8_lossy(&writer.bytes).into_owned()))
}

fn write_json(
    value: &Value,
    writer: &mut JsonWriter<'_>,
    format: impl serde_json::ser::Formatter,
) -> serde_json::Result<()> {
    serde::Serialize::serialize(value, &mut serde_json::Serializer::with_formatter(writer, format))
}

struct JsonWriter<'a> {
    bytes: Vec<u8>,
    allowance: &'a Allowance,
}

impl std::io::Write for JsonWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.allowance.take(bytes.len()).map_err(std::io::Error::other)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Calls a Python method of a string or a map.
fn method_call(
    allowance: &Allowance,
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), method, arguments) {
        (Some(between), "join", [list]) => return join(allowance, list, between),
        (Some(text), "replace", [from, to]) => {
            if let (Some(from), Some(to)) = (from.as_str(), to.as_str()) {
                return replace(allowance, text, from, to);
            }
        }
        // This method can pad by any number.
        (Some(_), "format", _) => return Err(Error::from(ErrorKind::UnknownMethod)),
        // Many short parts cost more memory than the text itself.
        (Some(text), "split" | "splitlines", _) => {
            let parts = text.bytes().filter(u8::is_ascii_whitespace).count() + 1;
            let separator = arguments.first().and_then(Value::as_str).unwrap_or_default();
            let parts =
                if separator.is_empty() { parts } else { text.matches(separator).count() + 1 };
            allowance
                .take(text.len().saturating_add(parts.saturating_mul(2 * size_of::<Value>())))?;
        }
        // The other methods return at most one text of this length.
        (Some(text), _, _) => allowance.take(text.len())?,
        (None, ..) => {}
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}
