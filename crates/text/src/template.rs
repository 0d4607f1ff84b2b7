//! Chat templates: Jinja programs that come with a model. They run within an
//! allowance of steps (fuel) and memory.
//!
//! Model files come from outside, so a template is a foreign program. A template
//! gets the messages, the tools, the client's arguments, the date and the texts of the begin
//! and end tokens. It cannot read files or include other templates.

mod allowance;
mod date;

use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Error, ErrorKind, Value, context};
use self_cell::self_cell;
use serde::Deserialize;
use tollgate_domain::{ToolFormat, UtcTime};

use crate::reasoning;
use crate::template::allowance::{Allowance, checked_environment};
use crate::tools::format_of_template;
use crate::{AnsweredCall, Chat, ChatMessage, TextError, ToolCall};

/// The parts of `tokenizer_config.json` that concern the template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// The template's source, if the file holds one.
    pub chat_template: Option<String>,
    /// The text of the begin token, if there is one.
    pub bos_token: Option<String>,
    /// The text of the end token, if there is one.
    pub eos_token: Option<String>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    program: OwnedProgram,
    bos_token: String,
    eos_token: String,
    tool_format: Option<ToolFormat>,
    thinks: bool,
}

/// The instructions of a template, and of its blocks by name.
#[derive(Debug)]
struct Program<'source> {
    root: Instructions<'source>,
    blocks: BTreeMap<&'source str, Instructions<'source>>,
}

self_cell!(
    /// A program together with its source, from which it borrows.
    struct OwnedProgram {
        owner: String,
        #[covariant]
        dependent: Program,
    }

    impl {Debug}
);

impl TokenizerConfig {
    /// Reads a `tokenizer_config.json`. If the file holds several templates, the one
    /// named `default` is used, and the one named `tool_use` for chats with tools.
    ///
    /// # Errors
    /// The file is not JSON, or one of the fields has a wrong type.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        #[derive(Deserialize)]
        struct File {
            chat_template: Option<Templates>,
            bos_token: Option<Token>,
            eos_token: Option<Token>,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Templates {
            One(String),
            Named(Vec<NamedTemplate>),
        }
        #[derive(Deserialize)]
        struct NamedTemplate {
            name: String,
            template: String,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Token {
            Text(String),
            Added { content: String },
        }
        let text = |token: Token| match token {
            Token::Text(text) | Token::Added { content: text } => text,
        };
        let file: File =
            serde_json::from_slice(bytes).map_err(|error| TextError::Config(error.to_string()))?;
        let chat_template = match file.chat_template {
            None => None,
            Some(Templates::One(source)) => Some(source),
            Some(Templates::Named(list)) => {
                let named = |name: &str| list.iter().find(|named| named.name == name);
                let Some(default) = named("default") else {
                    return Err(TextError::Config(
                        "chat_template: none of the templates is named default".into(),
                    ));
                };
                let with_tools = named("tool_use");
                Some(with_tools.map_or_else(
                    || default.template.clone(),
                    |with_tools| either(&with_tools.template, &default.template),
                ))
            }
        };
        Ok(Self {
            chat_template,
            bos_token: file.bos_token.map(text),
            eos_token: file.eos_token.map(text),
        })
    }
}

/// Returns one template that is `with_tools` for a chat with tools, and else `without`.
fn either(with_tools: &str, without: &str) -> String {
    // A template's last line feed is not printed; within another one it would be.
    let whole = |source: &str| source.strip_suffix('\n').unwrap_or(source).to_owned();
    let (with_tools, without) = (whole(with_tools), whole(without));
    // A block takes the line feed behind it, so each template begins at the start of a line. It
    // also takes the spaces before it, and the empty expressions keep those of the templates.
    format!(
        "{{% if tools %}}\n{with_tools}{{{{ '' }}}}{{% else %}}\n{without}{{{{ '' }}}}{{% endif %}}"
    )
}

impl ChatTemplate {
    /// Compiles `source`, the template in `tokenizer_config.json` or in
    /// `chat_template.jinja`. `config` names the begin and end tokens.
    ///
    /// # Errors
    /// [`TextError::Template`] with the line of the mistake.
    pub fn compile(source: &str, config: &TokenizerConfig) -> Result<Self, TextError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(TextError::Template {
                line: None,
                message: format!("{} bytes; at most {MAX_SOURCE_BYTES} are read", source.len()),
            });
        }
        let program = OwnedProgram::try_new(source.to_owned(), |source| program(source));
        Ok(Self {
            program: program.map_err(template_error)?,
            bos_token: config.bos_token.clone().unwrap_or_default(),
            eos_token: config.eos_token.clone().unwrap_or_default(),
            tool_format: format_of_template(source),
            thinks: source.contains(reasoning::OPEN),
        })
    }

    /// Returns the form in which the model writes calls of tools, if the template shows
    /// one that is known.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// True if the template knows reasoning between `<think>` and `</think>`.
    pub fn thinks(&self) -> bool {
        self.thinks
    }

    /// Returns the prompt text that asks for an answer to `chat`. The text of a
    /// caller in it may look like a control token, so only
    /// [`encode_chat`](crate::encode_chat) may encode the result.
    ///
    /// # Errors
    /// [`TextError::Refused`] if the template raises an exception,
    /// [`TextError::Allowance`] if it needs too many steps or too much memory.
    pub(crate) fn render(&self, chat: &Chat, now: UtcTime) -> Result<String, TextError> {
        // Honest templates copy each message a few times, so the allowance grows
        // with the content.
        let allowance = Arc::new(Allowance::new(MEMORY + MEMORY_PER_BYTE * chat.bytes()));
        let mut environment = checked_environment(&allowance);
        let messages = FUEL_PER_MESSAGE * chat.messages.len() as u64;
        let values = FUEL_PER_VALUE * chat.json_values() as u64;
        environment.set_fuel(Some(FUEL + messages + values));
        let Program { root, blocks } = self.program.borrow_dependent();
        let mut text = String::new();
        let rendered = machinery::eval(
            &environment,
            root,
            self.context(chat, now)?,
            blocks,
            &mut machinery::make_string_output(&mut text),
            AutoEscape::None,
        );
        match rendered {
            Ok(_) => Ok(text),
            // A failed write reports only that formatting failed, so the allowance
            // itself tells why the rendering stopped.
            Err(_) if allowance.is_spent() => Err(TextError::Allowance("memory")),
            Err(error) => Err(template_error(error)),
        }
    }

    fn context(&self, chat: &Chat, now: UtcTime) -> Result<Value, TextError> {
        let messages: Vec<Value> =
            chat.messages.iter().map(message).collect::<Result<_, _>>().map_err(json_error)?;
        // Null without tools, as in the Python library that templates are written for.
        let tools = match chat.tools.is_empty() {
            true => None,
            false => Some(Value::deserialize(serde_json::Value::Array(chat.tools.clone()))),
        };
        let own = context! {
            messages,
            tools => tools.transpose().map_err(json_error)?,
            add_generation_prompt => true,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            raise_exception => Value::from_function(raise_exception),
            strftime_now => Value::from_function(move |format: &str| date::strftime(format, now)),
        };
        // The first map wins, so no argument replaces a value of the gateway.
        let arguments: serde_json::Result<Vec<(&str, Value)>> = chat
            .arguments
            .iter()
            .map(|(name, value)| Ok((name.as_str(), Value::deserialize(value)?)))
            .collect();
        let arguments = arguments.map_err(json_error)?;
        Ok(context! { ..own, ..Value::from_pairs(arguments) })
    }
}

/// Returns a message as templates read it. A key is absent if the message has no such
/// part: templates ask whether `tool_calls` is defined.
fn message(message: &ChatMessage) -> serde_json::Result<Value> {
    let ChatMessage { role, content, reasoning, tool_calls, answers } = message;
    let mut fields =
        vec![("role", Value::from(role.as_str())), ("content", Value::from(content.as_str()))];
    if let Some(reasoning) = reasoning {
        fields.push(("reasoning_content", Value::from(reasoning.as_str())));
    }
    if !tool_calls.is_empty() {
        let calls = tool_calls.iter().map(tool_call);
        fields.push(("tool_calls", calls.collect::<serde_json::Result<Vec<Value>>>()?.into()));
    }
    if let Some(AnsweredCall { id, name }) = answers {
        fields.push(("tool_call_id", Value::from(id.as_str())));
        fields.push(("name", Value::from(name.as_str())));
    }
    Ok(Value::from_pairs(fields))
}

fn tool_call(call: &ToolCall) -> serde_json::Result<Value> {
    let ToolCall { id, name, arguments } = call;
    let function =
        [("name", Value::from(name.as_str())), ("arguments", Value::deserialize(arguments)?)];
    Ok(Value::from_pairs([
        ("id", Value::from(id.as_str())),
        ("type", Value::from("function")),
        ("function", Value::from_pairs(function)),
    ]))
}

fn json_error(error: serde_json::Error) -> TextError {
    TextError::Template { line: None, message: error.to_string() }
}

/// Returns true if a client may give a chat template a value of this `name`. A name is an
/// identifier, so that it cannot replace an operator of the template, and is not one of
/// the names that the gateway or the template language gives a meaning.
pub fn is_template_argument(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && !RESERVED_NAMES.contains(&name)
}

/// Compiles a template and replaces its concatenations by counted ones.
fn program(source: &str) -> Result<Program<'_>, Error> {
    // The same options as in the Python library that templates are written for.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    let parsed = machinery::parse(source, "chat template", syntax)?;
    let mut generator = CodeGenerator::new("chat template", source);
    generator.compile_stmt(&parsed);
    let (mut root, mut blocks) = generator.finish();
    for part in std::iter::once(&mut root).chain(blocks.values_mut()) {
        count_concatenations(part)?;
    }
    Ok(Program { root, blocks })
}

fn count_concatenations(part: &mut Instructions<'_>) -> Result<(), Error> {
    let mut at = 0;
    while let Some(instruction) = part.get_mut(at) {
        // A template cannot define these names, because they are not identifiers.
        let counted = match instruction {
            Instruction::StringConcat => Some("~"),
            Instruction::Add => Some("+"),
            Instruction::Mul => Some("*"),
            Instruction::EmitRaw(text) if text.len() > MAX_LITERAL_BYTES => {
                return Err(Error::new(
                    ErrorKind::SyntaxError,
                    format!("a literal of {} bytes; at most {MAX_LITERAL_BYTES}", text.len()),
                ));
            }
            _ => None,
        };
        if let Some(name) = counted {
            *instruction = Instruction::CallFunction(name, Some(2));
        }
        at += 1;
    }
    Ok(())
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    // The message goes to the client; a template may try to print a whole chat.
    let message = message.chars().take(500).collect::<String>();
    Err(Error::new(ErrorKind::InvalidOperation, RAISED).with_source(Raised(message)))
}

/// The message of a template that refused a chat.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn template_error(error: Error) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::Allowance("steps");
    }
    // An error inside a macro or a block is wrapped in other errors.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return TextError::Refused(message.clone());
        }
        cause = current.source();
    }
    let message = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    TextError::Template { line: error.line(), message }
}

const RAISED: &str = "raised by the template";
/// Names that no argument of a client has: the variables that the gateway or other servers
/// set, and the functions of the template language.
const RESERVED_NAMES: &[&str] = &[
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "raise_exception",
    "strftime_now",
    "range",
    "dict",
    "namespace",
    "loop",
    "self",
    "super",
    "caller",
];
/// Bytes of the largest template. Published templates have less than 20 kB.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Bytes of the longest literal. A literal costs one step whatever its length is.
const MAX_LITERAL_BYTES: usize = 16 << 10;
/// Steps of a rendering. Published templates take some hundred steps.
const FUEL: u64 = 20_000;
/// Further steps for each message, of which some hundred are needed.
const FUEL_PER_MESSAGE: u64 = 1_000;
/// Further steps for each JSON value in tools and calls. Templates that print a tool
/// property by property take less than 50.
const FUEL_PER_VALUE: u64 = 60;
/// Bytes that a rendering may allocate, intermediate texts included.
const MEMORY: usize = 1 << 20;
/// Further bytes for each byte of the messages.
const MEMORY_PER_BYTE: usize = 32;
