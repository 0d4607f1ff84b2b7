//! The body of a completion request: prompts as text or as tokens, one or
//! several, and the older spelling of log-probabilities.

use serde_json::value::RawValue;
use tollgate_config::RequestLimits;
use tollgate_text::Prompt;

use super::asked::{Asked, Dialect, Shared, check_metadata, check_service_tier, max_tokens};
use super::fields::{Field, Neutral, Violation, known_fields, object};

/// Tokens in one prompt given as tokens; the context bounds it further.
const MOST_PROMPT_TOKENS: u32 = 1 << 20;
/// Alternatives reported for each token: the older interface knows no more.
const MOST_LOGPROBS: u32 = 5;

known_fields! {
    /// The fields of a completion request that mean something to anyone.
    CompletionFields {
        model, prompt, suffix, max_tokens, temperature, top_k, top_p, n, best_of, stream,
        stream_options, logprobs, echo, stop, seed, presence_penalty, frequency_penalty, logit_bias,
        user, metadata, service_tier, store,
    }
}

/// Parses and checks the body of `POST /v1/completions`.
pub(crate) fn parse(body: &str, limits: &RequestLimits) -> Result<Asked, Violation> {
    let fields: CompletionFields<'_> = object(body, "")?;
    Field::new("suffix", fields.suffix).only_neutral(&[Neutral::Word("")])?;
    Field::new("store", fields.store).only_neutral(&[Neutral::Flag(false)])?;
    check_service_tier(&Field::new("service_tier", fields.service_tier))?;
    check_metadata(&Field::new("metadata", fields.metadata))?;
    let top_logprobs = Field::new("logprobs", fields.logprobs)
        .integer(0, limits.top_logprobs.min(MOST_LOGPROBS))?;
    let shared = Shared {
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
    .check(limits, top_logprobs)?;
    check_best_of(&Field::new("best_of", fields.best_of), limits.best_of, shared.choices)?;
    let prompt = prompt(&Field::new("prompt", fields.prompt), limits.prompts)?;
    let echo = Field::new("echo", fields.echo).flag()?.unwrap_or(false);
    Ok(Asked {
        dialect: Dialect::Completion,
        model: shared.model,
        prompt,
        choices: shared.choices,
        max_tokens: max_tokens(
            "max_tokens",
            fields.max_tokens,
            // With the prompt echoed there is an answer without generating any.
            u32::from(!echo),
        )?,
        sampling: shared.sampling,
        stop: shared.stop,
        stream: shared.stream,
        echo,
    })
}

/// The best of exactly n is each of them: then no more is drawn than shown.
fn check_best_of(field: &Field<'_>, most: u32, choices: u32) -> Result<(), Violation> {
    field.integer(1, most.max(choices))?;
    field.only_neutral(&[Neutral::Number(f64::from(choices))])
}

fn prompt(field: &Field<'_>, most: u32) -> Result<Prompt, Violation> {
    let expected = format!(
        "a string, an array of token ids, or an array of at most {most} of either, none empty"
    );
    // Which form it is shows in its first characters; guessing by trial
    // would read a long array several times over.
    let form: &RawValue = field.required(&expected)?;
    let mut starts = form.get().chars().filter(|c| !c.is_ascii_whitespace());
    let prompt = match (starts.next(), starts.next()) {
        (Some('"'), _) => Prompt::Texts(vec![field.required(&expected)?]),
        (Some('['), Some('"')) => Prompt::Texts(field.list(most, &expected)?.unwrap_or_default()),
        (Some('['), Some('0'..='9')) => {
            Prompt::Tokens(vec![field.list(MOST_PROMPT_TOKENS, &expected)?.unwrap_or_default()])
        }
        (Some('['), Some('[')) => {
            let prompts: Vec<&RawValue> = field.list(most, &expected)?.unwrap_or_default();
            let tokens =
                |raw| Field::new(field.name(), Some(raw)).list(MOST_PROMPT_TOKENS, &expected);
            Prompt::Tokens(
                prompts
                    .into_iter()
                    .map(|raw| Ok(tokens(raw)?.unwrap_or_default()))
                    .collect::<Result<_, Violation>>()?,
            )
        }
        _ => return Err(Violation::of(field.name(), format!("'prompt' must be {expected}."))),
    };
    let empty = match &prompt {
        Prompt::Texts(texts) => texts.iter().any(String::is_empty),
        Prompt::Tokens(tokens) => tokens.iter().any(Vec::is_empty),
        Prompt::Messages(_) => false,
    };
    if empty {
        return Err(Violation::of(
            field.name(),
            format!("'prompt' must be {expected}; one is empty."),
        ));
    }
    Ok(prompt)
}
