//! The tools of a chat request, and the calls of tools in its messages.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tollgate_domain::{Grammar, ToolFormat};
use tollgate_text::{
    AnsweredCall, CallRules, ToolCall, ToolSignature, ToolSignatures, call_grammar,
};

use crate::fields::{Field, Violation, known_fields, object};
use crate::json::depth;
use crate::schema_check;

/// Tools of one request.
pub(crate) const MAX_TOOLS: u32 = 128;
/// Bytes of all tools as JSON.
const MAX_TOOLS_BYTES: usize = 256 << 10;
/// Bytes of a tool's name.
pub(crate) const MAX_NAME_BYTES: usize = 64;
/// Calls in one message.
pub(crate) const MAX_CALLS: u32 = 128;
/// Bytes of a call's id.
pub(crate) const MAX_ID_BYTES: usize = 256;
/// Levels of objects and arrays in the arguments of a call.
const MAX_ARGUMENTS_DEPTH: usize = 32;

/// The tools that the answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolUse {
    /// The tools, with distinct names; at least one.
    pub tools: Vec<Tool>,
    /// The calls that the answer must or may have.
    pub choice: ToolChoice,
    /// True if the answer may have more than one call.
    pub is_parallel: bool,
}

/// The calls that an answer must or may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// At least one call, of any tool.
    Required,
    /// A call of the tool with this name.
    Named(String),
}

/// A function that the application offers to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The name: letters, digits, `_` and `-`.
    pub name: String,
    /// A description for the model.
    pub description: Option<String>,
    /// The JSON schema of the arguments; `None` if there are no arguments.
    pub parameters: Option<Map<String, Value>>,
    /// True if the arguments must be valid under the schema.
    pub is_strict: bool,
}

impl Tool {
    /// Returns the schema of the arguments that a form enforces.
    fn enforced(&self) -> String {
        let Some(parameters) = &self.parameters else {
            return json!({ "type": "object", "additionalProperties": false }).to_string();
        };
        let mut schema = parameters.clone();
        // Arguments that are no object make no call, so a list of types and a schema without
        // a type mean an object, too. A reference decides the type itself.
        if !schema.contains_key("$ref") {
            schema.insert("type".into(), "object".into());
        }
        // Strict schemas have passed the check already. Others are enforced if they can be.
        schema_check::check(Value::Object(schema), "parameters")
            .unwrap_or_else(|_| json!({ "type": "object" }).to_string())
    }
}

impl ToolUse {
    /// Returns the form of the answer's calls; `None` if the model is free. `content` is
    /// the form of an answer without a call.
    ///
    /// # Errors
    /// The model's form of calls, `format`, cannot be enforced, or `content` is no JSON.
    pub fn grammar(
        &self,
        format: ToolFormat,
        content: Option<Grammar>,
    ) -> Result<Option<Grammar>, Violation> {
        let content = content.map(schema_of_content).transpose()?;
        let is_strict = content.is_some() || self.tools.iter().any(|tool| tool.is_strict);
        let named = match &self.choice {
            // The price of a form is paid by those who ask for it.
            ToolChoice::Auto if !is_strict => return Ok(None),
            ToolChoice::Auto | ToolChoice::Required => None,
            ToolChoice::Named(name) => Some(name),
        };
        let tools = self.tools.iter().filter(|tool| named.is_none_or(|name| tool.name == *name));
        let calls = tools.map(|tool| (tool.name.as_str(), tool.enforced())).collect();
        let rules = CallRules {
            is_required: self.choice != ToolChoice::Auto,
            // With a tool by name the answer is exactly this call.
            is_parallel: self.is_parallel && named.is_none(),
        };
        let has_content = content.is_some();
        match call_grammar(format, calls, rules, content) {
            Some(grammar) => Ok(Some(Grammar::Calls(grammar))),
            None => {
                let (field, what) = match self.choice {
                    ToolChoice::Auto if has_content => {
                        ("response_format", "a form of the answer cannot be set beside tools")
                    }
                    ToolChoice::Auto => ("tools", "'strict' is not enforced with \"auto\""),
                    _ => ("tool_choice", "calls cannot be required"),
                };
                let message = format!("In the form in which this model writes calls, {what}.");
                Err(Violation::field(field, message))
            }
        }
    }

    /// Returns the tools as chat templates read them, with their keys in the order of
    /// the API's description.
    pub(crate) fn for_template(&self) -> Vec<Value> {
        let tool = |tool: &Tool| {
            let mut function = Map::new();
            function.insert("name".into(), tool.name.clone().into());
            if let Some(description) = &tool.description {
                function.insert("description".into(), description.clone().into());
            }
            if let Some(parameters) = &tool.parameters {
                function.insert("parameters".into(), parameters.clone().into());
            }
            json!({ "type": "function", "function": function })
        };
        self.tools.iter().map(tool).collect()
    }

    /// Returns the names and parameters of the tools, for the parser of answers.
    pub fn signatures(&self) -> ToolSignatures {
        let signature = |tool: &Tool| {
            let parameters = tool.parameters.clone().map(Value::Object).unwrap_or_default();
            (tool.name.clone(), ToolSignature::of_schema(&parameters))
        };
        self.tools.iter().map(signature).collect()
    }
}

/// Returns the schema of an answer without a call.
///
/// # Errors
/// The form is no JSON. A call could then not be told from it.
fn schema_of_content(form: Grammar) -> Result<String, Violation> {
    match form {
        Grammar::JsonObject => Ok(json!({ "type": "object" }).to_string()),
        Grammar::JsonSchema(schema) => Ok(schema),
        Grammar::Regex(_) | Grammar::Choice(_) | Grammar::Calls(_) => Err(Violation::field(
            "structured_outputs",
            "With tools the form of the answer must be JSON. Send a schema, or \"tool_choice\": \"none\".",
        )),
    }
}

known_fields! {
    /// The fields that say which tools an answer may call.
    ToolFields { tools, tool_choice, parallel_tool_calls }
}

known_fields! {
    /// The fields of one tool.
    DefinitionFields { r#type, function }
}

known_fields! {
    /// The fields of one function.
    FunctionFields { name, description, parameters, strict }
}

known_fields! {
    /// The fields of the function that `tool_choice` names.
    ChosenFields { name }
}

known_fields! {
    /// The fields of one call.
    CallFields { id, r#type, function }
}

known_fields! {
    /// The fields of the function of one call.
    CalledFields { name, arguments }
}

/// Reads the tools; `None` if the answer may call none.
pub(crate) fn tool_use(fields: &ToolFields<'_>) -> Result<Option<ToolUse>, Violation> {
    let tools = tools(&Field::new("tools", fields.tools), fields.tools)?;
    let parallel = Field::new("parallel_tool_calls", fields.parallel_tool_calls).flag()?;
    let choice = tool_choice(fields.tool_choice, &tools)?;
    // "auto" without a tool allows no call.
    let choice = choice.filter(|_| !tools.is_empty());
    Ok(choice.map(|choice| ToolUse { tools, choice, is_parallel: parallel.unwrap_or(true) }))
}

/// Reads `tool_choice`; `None` if the answer may have no call.
fn tool_choice(raw: Option<&RawValue>, tools: &[Tool]) -> Result<Option<ToolChoice>, Violation> {
    const EXPECTED: &str =
        "'none', 'auto', 'required' or an object with the type 'function' and a tool's name";
    let field = Field::new("tool_choice", raw);
    let Some(raw) = raw.filter(|raw| raw.get() != "null") else {
        return Ok(Some(ToolChoice::Auto));
    };
    if !raw.get().starts_with('{') {
        let word: Cow<'_, str> = field.required(EXPECTED)?;
        return match &*word {
            "none" => Ok(None),
            "auto" => Ok(Some(ToolChoice::Auto)),
            "required" if tools.is_empty() => Err(Violation::field(
                "tool_choice",
                "'tool_choice' is 'required', and 'tools' has no tool. Send 'tools', or leave 'tool_choice' out.",
            )),
            "required" => Ok(Some(ToolChoice::Required)),
            _ => Err(Violation::field("tool_choice", format!("'tool_choice' must be {EXPECTED}."))),
        };
    }
    let fields: DefinitionFields<'_> = object(raw.get(), "tool_choice")?;
    check_type(&Field::new("tool_choice.type", fields.r#type), "choice")?;
    let place = "tool_choice.function";
    let function: &RawValue = Field::new(place, fields.function).required("an object")?;
    let fields: ChosenFields<'_> = object(function.get(), place)?;
    let name = name(&Field::new("tool_choice.function.name", fields.name))?;
    match tools.iter().any(|tool| tool.name == name) {
        true => Ok(Some(ToolChoice::Named(name))),
        false => Err(Violation::field(
            "tool_choice.function.name",
            format!("'tools' has no tool '{name}'."),
        )),
    }
}

fn tools(field: &Field<'_>, raw: Option<&RawValue>) -> Result<Vec<Tool>, Violation> {
    let expected = format!("an array of at most {MAX_TOOLS} tools and {MAX_TOOLS_BYTES} bytes");
    if let Some(bytes) = raw.map(|raw| raw.get().len())
        && bytes > MAX_TOOLS_BYTES
    {
        return Err(field.must_be(&expected, &format!("{bytes} bytes")));
    }
    let raw = field.list::<&RawValue>(MAX_TOOLS, &expected)?.unwrap_or_default();
    let tools = raw.iter().enumerate().map(|(index, raw)| tool(raw, &format!("tools[{index}]")));
    let tools: Vec<Tool> = tools.collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    match tools.iter().position(|tool| !names.insert(&tool.name)) {
        None => Ok(tools),
        Some(index) => {
            let message = format!("'tools' names '{}' twice.", tools[index].name);
            Err(Violation::field(format!("tools[{index}].function.name"), message))
        }
    }
}

fn tool(raw: &RawValue, place: &str) -> Result<Tool, Violation> {
    let fields: DefinitionFields<'_> = object(raw.get(), place)?;
    check_type(&Field::new(&format!("{place}.type"), fields.r#type), "tool")?;
    let place = format!("{place}.function");
    let function: &RawValue = Field::new(&place, fields.function).required("an object")?;
    let fields: FunctionFields<'_> = object(function.get(), &place)?;
    let name = name(&Field::new(&format!("{place}.name"), fields.name))?;
    let description =
        Field::new(&format!("{place}.description"), fields.description).read("a string")?;
    let parameters = Field::new(&format!("{place}.parameters"), fields.parameters)
        .read("a JSON schema, an object")?;
    if let Some(parameters) = &parameters {
        check_object(parameters, &format!("{place}.parameters"))?;
    }
    let is_strict = Field::new(&format!("{place}.strict"), fields.strict).flag()?.unwrap_or(false);
    // The schemas of other tools are enforced as far as they can be, so none is refused.
    if let (true, Some(parameters)) = (is_strict, &parameters) {
        let schema = Value::Object(Map::clone(parameters));
        schema_check::check(schema, &format!("{place}.parameters"))?;
    }
    Ok(Tool { name, description, parameters, is_strict })
}

/// Refuses a schema whose type is not an object: the arguments of a call have names.
fn check_object(schema: &Map<String, Value>, place: &str) -> Result<(), Violation> {
    let is_object = match schema.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "object"),
        Some(kind) => kind == "object",
    };
    match is_object {
        true => Ok(()),
        false => {
            let place = format!("{place}.type");
            let message = format!("'{place}' must be 'object': arguments have names.");
            Err(Violation::field(place, message))
        }
    }
}

/// Refuses a type other than `function`.
fn check_type(field: &Field<'_>, owner: &str) -> Result<(), Violation> {
    let kind: Cow<'_, str> = field.required("a string")?;
    if kind == "function" {
        return Ok(());
    }
    Err(Violation {
        param: Some(field.name().into()),
        code: Some("unsupported_parameter"),
        message: format!("Only functions are supported: a {owner}'s type must be 'function'."),
    })
}

/// Reads the name of a tool.
fn name(field: &Field<'_>) -> Result<String, Violation> {
    let expected = format!("1 to {MAX_NAME_BYTES} letters, digits, underscores and dashes");
    let name: String = field.required(&expected)?;
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_part) {
        true => Ok(name),
        false => {
            Err(Violation::field(field.name(), format!("'{}' must be {expected}.", field.name())))
        }
    }
}

/// Reads `tool_calls` of an assistant's message at `place`.
pub(crate) fn tool_calls(raw: Option<&RawValue>, place: &str) -> Result<Vec<ToolCall>, Violation> {
    let expected = format!("an array of at most {MAX_CALLS} calls");
    let raw = Field::new(place, raw).list::<&RawValue>(MAX_CALLS, &expected)?.unwrap_or_default();
    let calls = raw.iter().enumerate().map(|(index, raw)| call(raw, &format!("{place}[{index}]")));
    let calls: Vec<ToolCall> = calls.collect::<Result<_, _>>()?;
    let mut ids = BTreeSet::new();
    match calls.iter().position(|call| !ids.insert(&call.id)) {
        None => Ok(calls),
        Some(index) => Err(Violation::field(
            format!("{place}[{index}].id"),
            format!("'{place}' has two calls of one id."),
        )),
    }
}

fn call(raw: &RawValue, place: &str) -> Result<ToolCall, Violation> {
    let fields: CallFields<'_> = object(raw.get(), place)?;
    let kind = format!("{place}.type");
    if fields.r#type.is_some() {
        check_type(&Field::new(&kind, fields.r#type), "call")?;
    }
    let id = format!("{place}.id");
    let id = required_text(&Field::new(&id, fields.id), MAX_ID_BYTES)?;
    let place = format!("{place}.function");
    let function: &RawValue = Field::new(&place, fields.function).required("an object")?;
    let fields: CalledFields<'_> = object(function.get(), &place)?;
    let name = format!("{place}.name");
    let name = required_text(&Field::new(&name, fields.name), MAX_NAME_BYTES)?;
    let arguments = format!("{place}.arguments");
    let arguments = arguments_of(&Field::new(&arguments, fields.arguments))?;
    Ok(ToolCall { id, name, arguments })
}

/// Reads the arguments of a call, a string of JSON. A text that holds no object becomes an
/// object without fields.
fn arguments_of(field: &Field<'_>) -> Result<Value, Violation> {
    let text: Cow<'_, str> = field.required("a string of JSON")?;
    if depth(&text) > MAX_ARGUMENTS_DEPTH {
        let name = field.name();
        let message = format!("'{name}' nests deeper than {MAX_ARGUMENTS_DEPTH} levels.");
        return Err(Violation::field(name, message));
    }
    // The text is a model's: it can be empty, or cut off at `max_tokens`. Agents send it back
    // with the error in the tool's message, and templates read an object.
    let arguments: Option<Map<String, Value>> = serde_json::from_str(&text).ok();
    Ok(Value::Object(arguments.unwrap_or_default()))
}

/// Returns a text of 1 to `max` bytes.
pub(crate) fn required_text(field: &Field<'_>, max: usize) -> Result<String, Violation> {
    let expected = format!("a string of 1 to {max} bytes");
    let text = field.text(max)?.ok_or_else(|| field.missing(&expected))?;
    if text.is_empty() { Err(field.must_be(&expected, "empty")) } else { Ok(text) }
}

/// The calls of the latest message with calls that no message has answered yet.
#[derive(Debug, Default)]
pub(crate) struct OpenCalls(BTreeMap<String, String>);

impl OpenCalls {
    /// Notes the calls of a message.
    pub(crate) fn begin(&mut self, calls: &[ToolCall]) {
        if !calls.is_empty() {
            self.0 = calls.iter().map(|call| (call.id.clone(), call.name.clone())).collect();
        }
    }

    /// Returns the call that a tool's message answers by the id in `field`.
    pub(crate) fn answer(&mut self, field: &Field<'_>) -> Result<AnsweredCall, Violation> {
        let id = required_text(field, MAX_ID_BYTES)?;
        match self.0.remove(&id) {
            Some(name) => Ok(AnsweredCall { id, name }),
            None => {
                let message = format!(
                    "'{}' names no call: a message of a tool must follow the assistant's message that has the call in 'tool_calls', and answer it once.",
                    field.name()
                );
                Err(Violation::field(field.name(), message))
            }
        }
    }
}
