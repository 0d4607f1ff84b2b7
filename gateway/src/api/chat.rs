//! The body of a chat request, as it may be written: messages of text, the
//! sampling fields, and the many fields that are accepted only where they ask
//! for nothing.

use std::borrow::Cow;

use serde_json::value::RawValue;
use tollgate_config::RequestLimits;
use tollgate_text::{ChatMessage, Prompt, Role};

use super::asked::{
    Asked, Dialect, MaxTokens, Shared, check_metadata, check_service_tier, max_tokens,
};
use super::fields::{Field, Neutral, Violation, known_fields, object};

/// Parts of one message's content.
const MOST_PARTS: u32 = 2_048;

/// A speaker's name.
const MOST_NAME_BYTES: usize = 256;

known_fields! {
    /// The fields of a chat request that mean something to anyone.
    ChatFields {
        model, messages, max_tokens, max_completion_tokens, temperature, top_k, top_p, n, stop, seed,
        presence_penalty, frequency_penalty, logit_bias, logprobs, top_logprobs, stream,
        stream_options, user, safety_identifier, metadata, service_tier, response_format, tools,
        tool_choice, parallel_tool_calls, functions, function_call, store, modalities, audio,
        prediction, web_search_options, reasoning_effort, verbosity, prompt_cache_key,
        prompt_cache_retention, moderation, chat_template, chat_template_kwargs, documents,
        add_generation_prompt, continue_final_message,
    }
}

known_fields! {
    /// One message.
    MessageFields {
        role, content, name, refusal, audio, annotations, tool_calls, tool_call_id, function_call,
    }
}

known_fields! {
    /// One part of a message's content.
    PartFields { r#type, text }
}

/// Parses and checks the body of `POST /v1/chat/completions`.
pub(crate) fn parse(body: &str, limits: &RequestLimits) -> Result<Asked, Violation> {
    let fields: ChatFields<'_> = object(body, "")?;
    check_unsupported(&fields)?;
    let top_logprobs = top_logprobs(&fields, limits.top_logprobs)?;
    let shared = shared(&fields).check(limits, top_logprobs)?;
    let messages = messages(&Field::new("messages", fields.messages), limits.messages)?;
    Ok(Asked {
        dialect: Dialect::Chat,
        model: shared.model,
        prompt: Prompt::Messages(messages),
        choices: shared.choices,
        max_tokens: limit(&fields)?,
        sampling: shared.sampling,
        stop: shared.stop,
        stream: shared.stream,
        echo: false,
    })
}

fn shared<'a>(fields: &ChatFields<'a>) -> Shared<'a> {
    Shared {
        model: fields.model,
        n: fields.n,
        temperature: fields.temperature,
        top_k: fields.top_k,
        top_p: fields.top_p,
        presence_penalty: fields.presence_penalty,
        frequency_penalty: fields.frequency_penalty,
        logit_bias: fields.logit_bias,
        seed: fields.seed,
        stop: fields.stop,
        stream: fields.stream,
        stream_options: fields.stream_options,
        user: fields.user,
    }
}

fn check_unsupported(fields: &ChatFields<'_>) -> Result<(), Violation> {
    let none_or_auto = [Neutral::Word("none"), Neutral::Word("auto")];
    for (name, raw, neutral) in [
        ("tools", fields.tools, &[Neutral::Empty][..]),
        ("tool_choice", fields.tool_choice, &none_or_auto),
        // Without tools there is nothing to call, in parallel or not.
        (
            "parallel_tool_calls",
            fields.parallel_tool_calls,
            &[Neutral::Flag(true), Neutral::Flag(false)],
        ),
        ("functions", fields.functions, &[Neutral::Empty]),
        ("function_call", fields.function_call, &none_or_auto),
        ("response_format", fields.response_format, &[Neutral::Type("text")]),
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
        ("chat_template_kwargs", fields.chat_template_kwargs, &[Neutral::Empty]),
        ("documents", fields.documents, &[Neutral::Empty]),
        ("add_generation_prompt", fields.add_generation_prompt, &[Neutral::Flag(true)]),
        ("continue_final_message", fields.continue_final_message, &[Neutral::Flag(false)]),
    ] {
        Field::new(name, raw).only_neutral(neutral)?;
    }
    check_service_tier(&Field::new("service_tier", fields.service_tier))?;
    check_metadata(&Field::new("metadata", fields.metadata))?;
    Field::new("safety_identifier", fields.safety_identifier).text(512)?;
    // A hint for someone else's cache; ours is salted by tenant, not by it.
    Field::new("prompt_cache_key", fields.prompt_cache_key).text(512)?;
    Ok(())
}

fn top_logprobs(fields: &ChatFields<'_>, most: u32) -> Result<Option<u32>, Violation> {
    let wanted = Field::new("logprobs", fields.logprobs).flag()?.unwrap_or(false);
    let top = Field::new("top_logprobs", fields.top_logprobs).integer(0, most)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        // Some clients send 0 whether or not they want any.
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(Violation::of(
            "top_logprobs",
            "'top_logprobs' is only allowed when 'logprobs' is true.",
        )),
    }
}

/// The two spellings of one limit must agree: a client may not be charged by
/// one and served by the other.
fn limit(fields: &ChatFields<'_>) -> Result<Option<MaxTokens>, Violation> {
    let old = max_tokens("max_tokens", fields.max_tokens, 1)?;
    let new = max_tokens("max_completion_tokens", fields.max_completion_tokens, 1)?;
    match (old, new) {
        (Some(old), Some(new)) if old.tokens != new.tokens => Err(Violation::of(
            "max_tokens",
            "'max_tokens' and 'max_completion_tokens' are the same limit: send one, or the same value in both.",
        )),
        (old, new) => Ok(new.or(old)),
    }
}

fn messages(field: &Field<'_>, most: u32) -> Result<Vec<ChatMessage>, Violation> {
    let expected = format!("an array of 1 to {most} messages");
    let Some(raw) = field.list::<&RawValue>(most, &expected)? else {
        return Err(field.missing(&expected));
    };
    if raw.is_empty() {
        return Err(Violation::of(
            "messages",
            format!("'messages' must be {expected}; it is empty."),
        ));
    }
    raw.iter().enumerate().map(|(index, raw)| message(raw, &format!("messages[{index}]"))).collect()
}

fn message(raw: &RawValue, place: &str) -> Result<ChatMessage, Violation> {
    let fields: MessageFields<'_> = object(raw.get(), place)?;
    for (name, raw, neutral) in [
        ("refusal", fields.refusal, &[][..]),
        ("audio", fields.audio, &[]),
        ("annotations", fields.annotations, &[Neutral::Empty]),
        ("tool_calls", fields.tool_calls, &[Neutral::Empty]),
        ("tool_call_id", fields.tool_call_id, &[]),
        ("function_call", fields.function_call, &[]),
    ] {
        Field::new(&format!("{place}.{name}"), raw).only_neutral(neutral)?;
    }
    // Tells speakers apart; the templates of the models that we serve show none.
    Field::new(&format!("{place}.name"), fields.name).text(MOST_NAME_BYTES)?;
    let param = format!("{place}.role");
    let role: Cow<'_, str> = Field::new(&param, fields.role).required("a string")?;
    let role: Role = role.parse().map_err(|_| {
        Violation::of(param, "A role must be one of 'system', 'developer', 'user' and 'assistant'.")
    })?;
    Ok(ChatMessage { role, content: content(fields.content, &format!("{place}.content"))? })
}

fn content(raw: Option<&RawValue>, place: &str) -> Result<String, Violation> {
    const EXPECTED: &str = "a string or an array of text parts";
    let field = Field::new(place, raw);
    if !field.is_array() {
        return field.required(EXPECTED);
    }
    let parts = field.list::<&RawValue>(MOST_PARTS, EXPECTED)?.unwrap_or_default();
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
