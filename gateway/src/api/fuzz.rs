//! Request bodies as hostile bytes: what passes keeps every bound, what does
//! not is told in a few printable words.

use tollgate_config::RequestLimits;
use tollgate_text::Prompt;

use super::asked::Asked;
use super::fields::Violation;
use super::{body, chat, completions};

/// The body of `POST /v1/chat/completions`.
pub fn chat_body(data: &[u8]) {
    check(data, chat::parse);
}

/// The body of `POST /v1/completions`.
pub fn completion_body(data: &[u8]) {
    check(data, completions::parse);
}

fn check(data: &[u8], parse: fn(&str, &RequestLimits) -> Result<Asked, Violation>) {
    let limits = RequestLimits::default();
    let asked = body::text(data, limits.json_depth).and_then(|text| parse(text, &limits));
    match asked {
        Ok(asked) => keeps_bounds(&asked, data.len()),
        Err(Violation { param, message, .. }) => {
            let param = param.unwrap_or_default();
            assert!(!message.is_empty() && message.len() < 4_096, "{message}");
            assert!(param.len() < 512, "{param}");
        }
    }
}

fn keeps_bounds(asked: &Asked, size: usize) {
    let Asked { prompt, choices, max_tokens, sampling, stop, .. } = asked;
    assert!((1..=8).contains(choices));
    assert!(max_tokens.is_none_or(|most| most.tokens <= i32::MAX as u32));
    assert!((0.0..=2.0).contains(&sampling.temperature) && (0.0..=1.0).contains(&sampling.top_p));
    assert!(sampling.top_k <= i32::MAX as u32);
    assert!((-2.0..=2.0).contains(&sampling.presence_penalty));
    assert!((-2.0..=2.0).contains(&sampling.frequency_penalty));
    assert!(sampling.logit_bias.len() <= 300);
    assert!(sampling.logit_bias.values().all(|bias| (-100.0..=100.0).contains(bias)));
    assert!(sampling.top_logprobs.is_none_or(|top| top <= 20));
    assert!(stop.len() <= 4 && stop.iter().all(|stop| (1..=256).contains(&stop.len())));
    // An escape is longer than what it stands for, so nothing grows.
    let bytes: usize = match prompt {
        Prompt::Messages(messages) => {
            assert!((1..=2_048).contains(&messages.len()));
            messages.iter().map(|message| message.content.len()).sum()
        }
        Prompt::Texts(texts) => {
            assert!((1..=16).contains(&texts.len()));
            texts.iter().map(String::len).sum()
        }
        Prompt::Tokens(prompts) => {
            assert!((1..=16).contains(&prompts.len()));
            prompts.iter().map(Vec::len).sum()
        }
    };
    assert!(bytes <= size, "{bytes} out of {size}");
}
