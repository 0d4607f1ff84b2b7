//! The library's notation for each form of answer.

use std::fmt::Write;

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use tollgate_domain::{CallForm, CallGrammar, Grammar};

use super::GrammarError;

/// Returns the library's notation for `grammar`.
///
/// # Errors
/// [`GrammarError::Compile`] if a schema is not JSON, or a call does not begin with the
/// trigger.
pub(super) fn form_of(
    grammar: &Grammar,
    controls: &[(String, u32)],
) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar {
        Grammar::JsonObject => TopLevelGrammar::from_json_schema(object()),
        Grammar::JsonSchema(text) => TopLevelGrammar::from_json_schema(schema(text)?),
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Grammar::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
            TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
        }
        Grammar::Calls(calls) => TopLevelGrammar::from_lark(calls_form(calls, controls)?),
    })
}

/// Returns the schema of any object.
fn object() -> Value {
    json!({ "type": "object", OPTIONS: options() })
}

/// Parses a schema and puts the options of the compiler in place.
fn schema(text: &str) -> Result<Value, GrammarError> {
    let mut schema: Value = serde_json::from_str(text)
        .map_err(|error| GrammarError::Compile(format!("the schema is not JSON: {error}")))?;
    match &mut schema {
        Value::Object(fields) => {
            // A caller's options would switch the enforcement off.
            fields.insert(OPTIONS.to_owned(), options());
            Ok(schema)
        }
        // The schema `true`: any value.
        Value::Bool(true) => Ok(json!({ OPTIONS: options() })),
        _ => Err(GrammarError::Compile("the schema is not an object".to_owned())),
    }
}

/// Returns the options of every schema: at most one space between two JSON tokens. A model
/// could otherwise fill its answer with white space.
fn options() -> Value {
    json!({ "whitespace_flexible": true, "whitespace_pattern": " ?" })
}

/// Returns the form of an answer with calls: rules for the arguments of each call, the text
/// up to the trigger, and the answer itself.
fn calls_form(calls: &CallGrammar, controls: &[(String, u32)]) -> Result<String, GrammarError> {
    let CallGrammar { calls, trigger, required, separator, content } = calls;
    if trigger.is_empty() || calls.is_empty() {
        return Err(GrammarError::Compile("a call needs a trigger".to_owned()));
    }
    let mut lark = String::from("%llguidance {}\n");
    let mut alternatives = Vec::new();
    for (number, CallForm { begin, schema: text, end }) in calls.iter().enumerate() {
        let rest = begin.strip_prefix(trigger.as_str()).ok_or_else(|| {
            GrammarError::Compile("a call does not begin with the trigger".to_owned())
        })?;
        let arguments = schema(text)?;
        let (rest, end) = (literal(rest, controls), literal(end, controls));
        // Writing to a string cannot fail.
        let _ = writeln!(lark, "call_{number}: {rest} arguments_{number} {end}");
        let _ = writeln!(lark, "arguments_{number}: %json {arguments}");
        alternatives.push(format!("call_{number}"));
    }
    let _ = writeln!(lark, "call: {}", alternatives.join(" | "));
    let trigger_literal = literal(trigger, controls);
    let more = match separator {
        Some(separator) => {
            format!("({} {trigger_literal} call)*", literal(separator, controls))
        }
        None => String::new(),
    };
    let _ = writeln!(lark, "calls: call {more}");
    if let Some(content) = content.as_ref().filter(|_| !required) {
        let _ = writeln!(lark, "start: content | {trigger_literal} calls");
        let _ = writeln!(lark, "content: %json {}", schema(content)?);
        return Ok(lark);
    }
    let is_control = controls.iter().any(|(text, _)| text == trigger);
    let _ = match (required, is_control) {
        (true, _) => writeln!(lark, "start: {trigger_literal} calls"),
        // A control token ends the free text by itself: no text contains it.
        (false, true) => {
            writeln!(lark, "start: TEXT | TEXT {trigger_literal} calls\nTEXT: /(.|\\n)*/")
        }
        // Lazy: the text ends where the trigger occurs first.
        (false, false) => writeln!(
            lark,
            "start: TEXT | opening calls\nopening[lazy]: TEXT {}\nTEXT: /(.|\\n)*/",
            quoted(trigger)
        ),
    };
    Ok(lark)
}

/// Returns terms that match `text`, in which the texts of control tokens are those tokens.
fn literal(text: &str, controls: &[(String, u32)]) -> String {
    let mut terms = Vec::new();
    let (mut plain, mut rest) = (0, 0);
    while rest < text.len() {
        let here = &text[rest..];
        // The longest one wins, as in the tokenizer.
        let control = controls
            .iter()
            .filter(|(control, _)| !control.is_empty() && here.starts_with(control.as_str()))
            .max_by_key(|(control, _)| control.len());
        match control {
            Some((control, id)) => {
                terms.extend((plain < rest).then(|| quoted(&text[plain..rest])));
                terms.push(format!("<[{id}]>"));
                rest += control.len();
                plain = rest;
            }
            None => rest += here.chars().next().map_or(1, char::len_utf8),
        }
    }
    terms.extend((plain < text.len()).then(|| quoted(&text[plain..])));
    if terms.is_empty() { "\"\"".to_owned() } else { terms.join(" ") }
}

/// Returns `text` as a literal of the notation, which quotes as JSON does.
fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

/// The key in a schema under which the library reads options.
const OPTIONS: &str = "x-guidance";
