//! Bodies of requests to the API: a request that is accepted keeps every bound,
//! and a refusal is a short, printable sentence.

use tollgate_gateway::fuzz as gateway;
use tollgate_openai::{
    CHAT, COMPLETIONS, CompletionRequest, Interface, RequestLimits, Violation, json,
};
use tollgate_text::{Chat, Prompt};

/// The defaults of the gateway's config.
const LIMITS: RequestLimits = RequestLimits {
    choices: 8,
    best_of: 2,
    prompts: 16,
    messages: 2_048,
    stop: 4,
    stop_bytes: 256,
    logit_bias: 300,
    top_logprobs: 20,
};

/// The depth to which JSON may nest by default.
const JSON_DEPTH: u32 = 32;

/// Parses the body of `POST /v1/chat/completions`.
pub(crate) fn chat_body(data: &[u8]) {
    check(data, CHAT);
}

/// Parses the body of `POST /v1/completions`.
pub(crate) fn completion_body(data: &[u8]) {
    check(data, COMPLETIONS);
}

/// Checks the input of a batch. The body of an accepted line is read as a request's.
pub(crate) fn batch_lines(data: &[u8]) {
    gateway::batch_lines(data, &mut |body| check(body.as_bytes(), CHAT));
}

fn check(data: &[u8], interface: &dyn Interface) {
    let request = json::text(data, JSON_DEPTH).and_then(|text| interface.parse(text, &LIMITS));
    match request {
        Ok(request) => assert_bounds(&request, data.len()),
        Err(Violation { param, message, .. }) => {
            let param = param.unwrap_or_default();
            assert!(!message.is_empty() && message.len() < 4_096, "{message}");
            assert!(param.len() < 512, "{param}");
        }
    }
}

fn assert_bounds(request: &CompletionRequest, size: usize) {
    let CompletionRequest { prompt, choices, max_tokens, sampling, stop, .. } = request;
    assert!((1..=8).contains(choices));
    assert!(max_tokens.is_none_or(|max| max.tokens <= i32::MAX as u32));
    assert!(sampling.temperature.is_none_or(|value| (0.0..=2.0).contains(&value)));
    assert!(sampling.top_p.is_none_or(|value| (0.0..=1.0).contains(&value)));
    assert!(sampling.min_p.is_none_or(|value| (0.0..=1.0).contains(&value)));
    assert!(sampling.top_k.is_none_or(|value| value <= i32::MAX as u32));
    assert!(sampling.repetition_penalty.is_none_or(|value| (0.01..=10.0).contains(&value)));
    assert!((-2.0..=2.0).contains(&sampling.presence_penalty));
    assert!((-2.0..=2.0).contains(&sampling.frequency_penalty));
    assert!(sampling.logit_bias.len() <= 300);
    assert!(sampling.logit_bias.values().all(|bias| (-100.0..=100.0).contains(bias)));
    assert!(sampling.top_logprobs.is_none_or(|top| top <= 20));
    assert!(stop.len() <= 4 && stop.iter().all(|stop| (1..=256).contains(&stop.len())));
    let bytes: usize = match prompt {
        Prompt::Chat(Chat { messages, arguments, tools }) => {
            assert!(tools.len() <= 128);
            assert!((1..=2_048).contains(&messages.len()));
            assert!(arguments.len() <= 32);
            messages.iter().map(|message| message.content.len()).sum()
        }
        Prompt::Texts(texts) => {
            assert!((1..=16).contains(&texts.len()));
            texts.iter().map(String::len).sum()
        }
        Prompt::Infill { before, after } => {
            assert!((1..=16).contains(&before.len()) && !after.is_empty());
            before.iter().map(String::len).sum::<usize>() + after.len()
        }
        Prompt::Tokens(prompts) => {
            assert!((1..=16).contains(&prompts.len()));
            prompts.iter().map(Vec::len).sum()
        }
    };
    // A JSON escape is longer than the text that it stands for, so no prompt is
    // larger than its body.
    assert!(bytes <= size, "{bytes} out of {size}");
}
