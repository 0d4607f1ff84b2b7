//! The chat dialect, `POST /v1/chat/completions`: messages of text, tools and their calls,
//! the sampling fields, and the many fields that are accepted only at their neutral values.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tollgate_domain::StopReason;
use tollgate_text::{AnswerPiece, Chat, ChatMessage, Prompt, Role, is_template_argument};

use crate::fields::{Field, Neutral, Violation, known_fields, object};
use crate::json::depth;
use crate::logprobs::ChatLogprobs;
use crate::request::{MAX_IDENTIFIER_BYTES, SamplingFields, max_tokens, request_fields};
use crate::response::{CallPlace, ChunkBody, CollectedCall, ResponseBody, render};
use crate::schema::named;
use crate::structured;
use crate::tools::{OpenCalls, ToolFields, ToolUse, tool_calls, tool_use};
use crate::usage::finish_reason;
use crate::{
    ChunkPart, CompletionRequest, Interface, MaxTokens, RequestLimits, ResponseMeta, WholeResponse,
};

/// The chat dialect.
pub const CHAT: &dyn Interface = &ChatDialect;

/// Parts of one message's content.
pub(crate) const MAX_PARTS: u32 = 2_048;

/// Bytes of `chat_template_kwargs`. The memory and the steps of a template are counted
/// without it.
const MAX_ARGUMENT_BYTES: usize = 4 << 10;

/// Entries of `chat_template_kwargs`.
pub(crate) const MAX_ARGUMENTS: u32 = 32;

/// Levels of objects and arrays in `chat_template_kwargs`, itself included.
const MAX_ARGUMENT_DEPTH: usize = 4;

/// Bytes of a speaker's name.
pub(crate) const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
struct ChatDialect;

impl Interface for ChatDialect {
    fn prompt_field(&self) -> &'static str {
        "messages"
    }

    fn id_prefix(&self) -> &'static str {
        "chatcmpl-"
    }

    fn chunk_object(&self) -> &'static str {
        "chat.completion.chunk"
    }

    fn parse(&self, body: &str, limits: &RequestLimits) -> Result<CompletionRequest, Violation> {
        let fields: ChatFields<'_> = object(body, "")?;
        // First, because this check copies nothing: the messages may be megabytes.
        check_unsupported(&fields)?;
        let top_logprobs = top_logprobs(&fields, limits.top_logprobs)?;
        let mut request = fields.shared().check(limits, top_logprobs)?;
        set_format(&mut request.sampling, fields.response_format)?;
        let arguments = template_arguments(fields.chat_template_kwargs)?;
        let tools = tool_use(&ToolFields {
            tools: fields.tools,
            tool_choice: fields.tool_choice,
            parallel_tool_calls: fields.parallel_tool_calls,
        })?;
        let messages = messages(&Field::new("messages", fields.messages), limits.messages)?;
        let for_template = tools.as_ref().map(ToolUse::for_template).unwrap_or_default();
        Ok(CompletionRequest {
            prompt: Prompt::Chat(Chat { messages, arguments, tools: for_template }),
            max_tokens: limit(&fields)?,
            tools,
            ..request
        })
    }

    fn response(&self, response: &WholeResponse<'_>) -> Vec<u8> {
        let meta = response.meta;
        let choices = response.choices().map(|choice| ChatChoice {
            index: choice.index,
            message: Message {
                role: "assistant",
                // Clients expect null where the answer is calls alone.
                content: (choice.calls.is_empty() || !choice.text.is_empty())
                    .then_some(choice.text),
                refusal: (),
                reasoning_content: choice.reasoning,
                tool_calls: (0..)
                    .zip(choice.calls)
                    .map(|(at, call)| whole_call(meta, (choice.index, at), call))
                    .collect(),
            },
            logprobs: meta.logprobs.then(|| ChatLogprobs::new(choice.logprobs)),
            finish_reason: end(choice.end, choice.called),
        });
        render(response, "chat.completion", choices.collect())
    }

    fn write_chunk(
        &self,
        meta: &ResponseMeta,
        choice: u32,
        part: ChunkPart<'_>,
        out: &mut Vec<u8>,
    ) {
        let chunk = |delta| ChatChunk { index: choice, delta, logprobs: None, finish_reason: None };
        let logprobs = |tokens| meta.logprobs.then(|| ChatLogprobs::new(tokens));
        let chunk = match part {
            ChunkPart::Start { .. } => {
                // An answer of calls alone has no text, not an empty one.
                let content = meta.answer.tools.is_none().then_some("");
                chunk(ChatDelta {
                    role: Some("assistant"),
                    content: Some(content),
                    ..ChatDelta::default()
                })
            }
            // No chat repeats its prompt.
            ChunkPart::ScoredPrompt { .. } => return,
            ChunkPart::Delta { delta, offset: _ } => ChatChunk {
                logprobs: logprobs(&delta.logprobs),
                ..chunk(ChatDelta { content: Some(Some(&delta.text)), ..ChatDelta::default() })
            },
            ChunkPart::Piece { piece, call, tokens } => {
                let delta = match piece {
                    AnswerPiece::Content(text) => {
                        ChatDelta { content: Some(Some(text)), ..ChatDelta::default() }
                    }
                    AnswerPiece::Reasoning(text) => {
                        ChatDelta { reasoning_content: Some(text), ..ChatDelta::default() }
                    }
                    // With empty arguments, to which clients append the parts that follow.
                    AnswerPiece::Call(name) => ChatDelta::call(
                        call,
                        Some((meta.call_id(CallPlace { choice, call }), name)),
                        "",
                    ),
                    AnswerPiece::Arguments(text) => ChatDelta::call(call, None, text),
                };
                ChatChunk { logprobs: logprobs(tokens), ..chunk(delta) }
            }
            ChunkPart::End { reason, called } => ChatChunk {
                finish_reason: Some(end(reason, called)),
                ..chunk(ChatDelta::default())
            },
        };
        meta.write_choice(self.chunk_object(), chunk, out);
    }
}

/// Returns the schemas of a response in one piece and of a chunk.
pub(crate) fn response_schemas(generator: &mut SchemaGenerator) -> (Schema, Schema) {
    (
        named::<ResponseBody<'_, ChatChoice<'_>>>("ChatCompletion", generator),
        named::<ChunkBody<'_, ChatChunk<'_>>>("ChatCompletionChunk", generator),
    )
}

/// Returns the value of `finish_reason` of a choice that ended by `reason`.
fn end(reason: StopReason, called: bool) -> &'static str {
    match reason {
        // Clients run the calls of such an answer, so an incomplete one must not be among them.
        StopReason::Stop if called => "tool_calls",
        reason => finish_reason(reason),
    }
}

fn whole_call<'a>(
    meta: &ResponseMeta,
    (choice, at): (u32, u32),
    call: &'a CollectedCall,
) -> Call<'a> {
    let CollectedCall { name, arguments } = call;
    Call {
        index: None,
        id: Some(meta.call_id(CallPlace { choice, call: at })),
        r#type: Some("function"),
        function: Called { name: Some(name), arguments },
    }
}

/// One choice of a response in one piece.
#[derive(Serialize, JsonSchema)]
struct ChatChoice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatMessage")]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: (),
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

/// A call, or a part of one in a chunk.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ToolCall")]
struct Call<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: Called<'a>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "CalledFunction")]
struct Called<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// One choice of a chunk.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatChunkChoice")]
struct ChatChunk<'a> {
    index: u32,
    delta: ChatDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize, JsonSchema)]
struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Absent, null or text.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[Call<'a>; 1]>,
}

impl<'a> ChatDelta<'a> {
    /// Returns a part of call `index`. The first part has the call's id and name.
    fn call(index: u32, start: Option<(String, &'a str)>, arguments: &'a str) -> Self {
        let (id, name) = start.unzip();
        let call = Call {
            index: Some(index),
            r#type: id.is_some().then_some("function"),
            id,
            function: Called { name, arguments },
        };
        Self { tool_calls: Some([call]), ..Self::default() }
    }
}

request_fields! {
    /// The fields of a chat request that have a meaning in some implementation of
    /// the API.
    ChatFields {
        messages, max_tokens, max_completion_tokens, logprobs, top_logprobs, safety_identifier,
        response_format, tools, tool_choice, parallel_tool_calls, functions, function_call, store,
        modalities, audio, prediction, web_search_options, reasoning_effort, verbosity,
        prompt_cache_key, prompt_cache_retention, moderation, chat_template, chat_template_kwargs,
        documents, add_generation_prompt, continue_final_message,
    }
}

known_fields! {
    /// The fields of one message.
    MessageFields {
        role, content, name, refusal, audio, annotations, tool_calls, tool_call_id, function_call,
        reasoning_content,
    }
}

known_fields! {
    /// The fields of one part of a message's content.
    PartFields { r#type, text }
}

/// Sets the form that `response_format` asks for.
fn set_format(
    sampling: &mut SamplingFields,
    response_format: Option<&RawValue>,
) -> Result<(), Violation> {
    match (structured::response_format(response_format)?, &sampling.grammar) {
        (None, _) => Ok(()),
        (Some(_), Some(_)) => Err(structured::two_forms("response_format", "structured_outputs")),
        (Some(format), None) => sampling.set_form(format, "response_format"),
    }
}

fn check_unsupported(fields: &ChatFields<'_>) -> Result<(), Violation> {
    let none_or_auto = [Neutral::Word("none"), Neutral::Word("auto")];
    for (name, raw, neutral) in [
        ("functions", fields.functions, &[Neutral::Empty][..]),
        ("function_call", fields.function_call, &none_or_auto),
        ("store", fields.store, &[Neutral::Flag(false)]),
        ("modalities", fields.modalities, &[Neutral::Only("text")]),
        ("audio", fields.audio, &[]),
        ("prediction", fields.prediction, &[]),
        ("web_search_options", fields.web_search_options, &[]),
        ("reasoning_effort", fields.reasoning_effort, &[Neutral::Word("none")]),
        ("verbosity", fields.verbosity, &[Neutral::Word("medium")]),
        ("prompt_cache_retention", fields.prompt_cache_retention, &[Neutral::Word("in_memory")]),
        ("moderation", fields.moderation, &[]),
        ("chat_template", fields.chat_template, &[]),
        ("documents", fields.documents, &[Neutral::Empty]),
        ("add_generation_prompt", fields.add_generation_prompt, &[Neutral::Flag(true)]),
        ("continue_final_message", fields.continue_final_message, &[Neutral::Flag(false)]),
    ] {
        Field::new(name, raw).only_neutral(neutral)?;
    }
    fields.shared().check_neutral()?;
    Field::new("safety_identifier", fields.safety_identifier).text(MAX_IDENTIFIER_BYTES)?;
    // A hint for OpenAI's prefix cache. There is none here, so the hint is checked and not used.
    Field::new("prompt_cache_key", fields.prompt_cache_key).text(MAX_IDENTIFIER_BYTES)?;
    Ok(())
}

fn top_logprobs(fields: &ChatFields<'_>, max: u32) -> Result<Option<u32>, Violation> {
    let wanted = Field::new("logprobs", fields.logprobs).flag()?.unwrap_or(false);
    let top = Field::new("top_logprobs", fields.top_logprobs).integer(0..=max)?;
    match (wanted, top) {
        // With 0 alternatives, the response still has the token's own probability.
        (true, top) => Ok(Some(top.unwrap_or(0))),
        // Some clients always send 0.
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(Violation::field(
            "top_logprobs",
            "'top_logprobs' is only allowed when 'logprobs' is true.",
        )),
    }
}

/// Reads the limit on generated tokens from its two spellings, which must agree.
/// Otherwise a client could be charged by one limit and served by the other.
fn limit(fields: &ChatFields<'_>) -> Result<Option<MaxTokens>, Violation> {
    let old = max_tokens("max_tokens", fields.max_tokens, 1)?;
    let new = max_tokens("max_completion_tokens", fields.max_completion_tokens, 1)?;
    match (old, new) {
        (Some(old), Some(new)) if old.tokens != new.tokens => Err(Violation::field(
            "max_tokens",
            "'max_tokens' and 'max_completion_tokens' are the same limit: send one, or the same value in both.",
        )),
        (old, new) => Ok(new.or(old)),
    }
}

/// Reads `chat_template_kwargs`, the client's values for the chat template.
fn template_arguments(raw: Option<&RawValue>) -> Result<BTreeMap<String, Value>, Violation> {
    let field = Field::new("chat_template_kwargs", raw);
    let expected = format!(
        "an object of at most {MAX_ARGUMENTS} entries, {MAX_ARGUMENT_DEPTH} levels and {MAX_ARGUMENT_BYTES} bytes"
    );
    // Bounded as text, before any value is made of it.
    if let Some(raw) = raw {
        let (bytes, levels) = (raw.get().len(), depth(raw.get()));
        if bytes > MAX_ARGUMENT_BYTES {
            return Err(field.must_be(&expected, &format!("{bytes} bytes")));
        }
        if levels > MAX_ARGUMENT_DEPTH {
            return Err(field.must_be(&expected, &format!("{levels} levels")));
        }
    }
    let arguments = field.map::<Value>(MAX_ARGUMENTS, &expected)?.unwrap_or_default();
    // The counted operators of templates are functions by name, which no client may replace.
    match arguments.keys().find(|name| !is_template_argument(name)) {
        None => Ok(arguments),
        Some(name) => {
            // The name goes back to the client, so only its start does.
            let at: String = name.chars().take(32).collect();
            let message = format!(
                "'chat_template_kwargs' must not set '{at}': a name is an identifier that the gateway or the template language does not use."
            );
            Err(Violation::field(format!("{}.{at}", field.name()), message))
        }
    }
}

fn messages(field: &Field<'_>, max: u32) -> Result<Vec<ChatMessage>, Violation> {
    let expected = format!("an array of 1 to {max} messages");
    let Some(raw) = field.list::<&RawValue>(max, &expected)? else {
        return Err(field.missing(&expected));
    };
    if raw.is_empty() {
        return Err(Violation::field(
            "messages",
            format!("'messages' must be {expected}; it is empty."),
        ));
    }
    // In the order of the messages, because a tool's message answers a call before it.
    let mut open = OpenCalls::default();
    let read =
        |(index, raw): (usize, &&RawValue)| message(raw, &format!("messages[{index}]"), &mut open);
    raw.iter().enumerate().map(read).collect()
}

fn message(raw: &RawValue, place: &str, open: &mut OpenCalls) -> Result<ChatMessage, Violation> {
    let fields: MessageFields<'_> = object(raw.get(), place)?;
    let at = |name: &str| format!("{place}.{name}");
    let role: Cow<'_, str> = Field::new(&at("role"), fields.role).required("a string")?;
    let role: Role = role.parse().map_err(|_| {
        Violation::field(
            at("role"),
            "A role must be one of 'system', 'developer', 'user', 'assistant' and 'tool'.",
        )
    })?;
    check_message(&fields, place, role)?;
    let tool_calls = match role {
        Role::Assistant => tool_calls(fields.tool_calls, &at("tool_calls"))?,
        _ => Vec::new(),
    };
    let answers = match role {
        Role::Tool => Some(open.answer(&Field::new(&at("tool_call_id"), fields.tool_call_id))?),
        _ => None,
    };
    open.begin(&tool_calls);
    let reasoning: Option<String> = Field::new(&at("reasoning_content"), fields.reasoning_content)
        .read("a string")?
        .filter(|_| role == Role::Assistant);
    let content = match Field::new("content", fields.content).is_absent() {
        // A message with calls often has no text, nor has an answer that was cut off while
        // the model reasoned.
        true if !tool_calls.is_empty() || reasoning.is_some() => String::new(),
        _ => content(fields.content, &at("content"))?,
    };
    Ok(ChatMessage { role, content, reasoning, tool_calls, answers })
}

/// Refuses fields that a message of `role` cannot have, and fields that are not served.
fn check_message(fields: &MessageFields<'_>, place: &str, role: Role) -> Result<(), Violation> {
    let other = [
        ("tool_calls", fields.tool_calls, &[Neutral::Empty][..], Role::Assistant),
        ("tool_call_id", fields.tool_call_id, &[], Role::Tool),
    ];
    for (name, raw, neutral, owner) in other {
        let name = format!("{place}.{name}");
        if role != owner && Field::new(&name, raw).only_neutral(neutral).is_err() {
            let message =
                format!("'{name}' belongs to a message with the role '{}'.", owner.as_str());
            return Err(Violation::field(name, message));
        }
    }
    for (name, raw, neutral) in [
        ("refusal", fields.refusal, &[][..]),
        ("audio", fields.audio, &[]),
        ("annotations", fields.annotations, &[Neutral::Empty]),
        ("function_call", fields.function_call, &[]),
    ] {
        Field::new(&format!("{place}.{name}"), raw).only_neutral(neutral)?;
    }
    // The name tells speakers apart. Templates of the supported models do not
    // print names, so the field is checked and not used.
    Field::new(&format!("{place}.name"), fields.name).text(MAX_NAME_BYTES)?;
    Ok(())
}

fn content(raw: Option<&RawValue>, place: &str) -> Result<String, Violation> {
    const EXPECTED: &str = "a string or an array of text parts";
    let field = Field::new(place, raw);
    if !field.is_array() {
        return field.required(EXPECTED);
    }
    // The parts stay raw, so that a mistake names the index of its part.
    let parts = field.list::<&RawValue>(MAX_PARTS, EXPECTED)?.unwrap_or_default();
    let mut content = String::new();
    for (index, raw) in parts.iter().enumerate() {
        let place = format!("{place}[{index}]");
        let fields: PartFields<'_> = object(raw.get(), &place)?;
        let param = format!("{place}.type");
        let kind: Cow<'_, str> = Field::new(&param, fields.r#type).required("a string")?;
        if kind != "text" {
            return Err(Violation {
                param: Some(param),
                code: Some("unsupported_content"),
                message: "Only text is supported: a part's type must be 'text'.".into(),
            });
        }
        let text: String =
            Field::new(&format!("{place}.text"), fields.text).required("a string")?;
        content.push_str(&text);
    }
    Ok(content)
}
