//! Calls of tools in an answer. Each family of models writes them in a form of its own;
//! a [`ToolFormat`] is one form, and [`ToolParser`] reads all of them piece by piece.

mod parser;
mod pattern;
mod xml;

use std::collections::BTreeMap;

use serde_json::Value;
use tollgate_domain::{CallForm, CallGrammar, ToolFormat};

pub(crate) use self::parser::{ToolParser, ToolPiece};

/// Returns the form that a template's `source` shows to the model; `None` if it shows none
/// that is known.
pub(crate) fn format_of_template(source: &str) -> Option<ToolFormat> {
    // In this order: the template of Qwen3-Coder has both markers of the first two.
    [
        ("<function=", ToolFormat::Qwen3Coder),
        ("<tool_call>", ToolFormat::Hermes),
        ("[TOOL_CALLS]", ToolFormat::Mistral),
        ("<|python_tag|>", ToolFormat::Llama3),
        ("\"parameters\": dictionary", ToolFormat::Llama3),
    ]
    .into_iter()
    .find_map(|(marker, format)| source.contains(marker).then_some(format))
}

/// Returns the texts that mark calls and are control tokens in the vocabularies of some
/// models. An answer with calls must show these tokens.
pub fn tool_markers(format: ToolFormat) -> &'static [&'static str] {
    match format {
        ToolFormat::Hermes | ToolFormat::Qwen3Coder => &["<tool_call>", "</tool_call>"],
        ToolFormat::Llama3 => &["<|python_tag|>"],
        ToolFormat::Mistral => &["[TOOL_CALLS]", "[ARGS]"],
    }
}

/// The rules for the calls of one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRules {
    /// True if the answer begins with a call.
    pub is_required: bool,
    /// True if the answer may have more than one call.
    pub is_parallel: bool,
}

/// Returns the form of an answer with calls of tools, each with its name and the schema of
/// its arguments. An answer without a call is valid under the schema `content` if one is
/// given. Returns `None` if the form cannot be enforced: the arguments are no JSON, the call
/// looks like the content, or a model that is free writes its calls in several ways.
pub fn call_grammar(
    format: ToolFormat,
    tools: Vec<(&str, String)>,
    rules: CallRules,
    content: Option<String>,
) -> Option<CallGrammar> {
    const OBJECT: &str = "{\"name\": \"";
    // No text stands before a call then.
    let begins_with_call = rules.is_required || content.is_some();
    if format == ToolFormat::Llama3 && content.is_some() && !rules.is_required {
        // A call in this form is a JSON object, too, and the mask cannot tell the two apart.
        return None;
    }
    let (trigger, opening, key, end) = match (format, begins_with_call) {
        (ToolFormat::Hermes, _) => {
            ("<tool_call>", format!("<tool_call>\n{OBJECT}"), "arguments", "}\n</tool_call>")
        }
        // A list of one call, with the control token before it.
        (ToolFormat::Mistral, true) => {
            ("[TOOL_CALLS]", format!("[TOOL_CALLS][{OBJECT}"), "arguments", "}]")
        }
        (ToolFormat::Llama3, true) => (OBJECT, OBJECT.to_owned(), "parameters", "}"),
        (ToolFormat::Mistral | ToolFormat::Llama3 | ToolFormat::Qwen3Coder, _) => return None,
    };
    let calls = tools.into_iter().map(|(name, schema)| CallForm {
        // A name has no character that JSON escapes.
        begin: format!("{opening}{name}\", \"{key}\": "),
        schema,
        end: end.to_owned(),
    });
    // The other forms have one call in an answer, or a list that this one does not write.
    let separator = (rules.is_parallel && format == ToolFormat::Hermes).then(|| "\n".to_owned());
    Some(CallGrammar {
        calls: calls.collect(),
        trigger: trigger.to_owned(),
        required: rules.is_required,
        separator,
        content: content.filter(|_| !rules.is_required),
    })
}

/// The tools of a request, by name. A call of another name is text.
pub type ToolSignatures = BTreeMap<String, ToolSignature>;

/// The parameters of a tool, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolSignature {
    /// The kinds of the parameters whose type is known.
    pub parameters: BTreeMap<String, ParameterKind>,
}

/// The kind of a parameter in a form that writes values without quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// The value is text, whatever it looks like.
    Text,
    /// The value is JSON.
    Json,
}

impl ToolSignature {
    /// Returns the signature of a tool with the JSON schema `parameters`.
    pub fn of_schema(parameters: &Value) -> Self {
        let properties = parameters.get("properties").and_then(Value::as_object);
        let kinds = properties.into_iter().flatten().filter_map(|(name, schema)| {
            // A list of types decides nothing, so the value itself tells its kind.
            let kind = match schema.get("type")?.as_str()? {
                "string" => ParameterKind::Text,
                _ => ParameterKind::Json,
            };
            Some((name.clone(), kind))
        });
        Self { parameters: kinds.collect() }
    }
}

#[cfg(test)]
mod tests;
