//! The completions dialect, `POST /v1/completions`: prompts as text or as token
//! ids, one or several, and the older shape of log-probabilities.

use std::ops::RangeInclusive;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde_json::value::RawValue;
use tollgate_text::Prompt;

use crate::fields::{Field, Neutral, Violation, object};
use crate::logprobs::CompletionLogprobs;
use crate::request::{max_tokens, request_fields};
use crate::response::{ChunkBody, ResponseBody, render};
use crate::schema::named;
use crate::usage::finish_reason;
use crate::{
    ChunkPart, CompletionRequest, Interface, RequestLimits, ResponseChoice, ResponseMeta,
    WholeResponse,
};

/// The completions dialect.
pub const COMPLETIONS: &dyn Interface = &Completions;

/// Tokens in one prompt of token ids. The model's context bounds the number
/// further.
pub(crate) const MAX_PROMPT_TOKENS: u32 = 1 << 20;

/// Alternatives reported for each token; the original API allows no more.
pub(crate) const MAX_LOGPROBS: u32 = 5;

#[derive(Debug)]
struct Completions;

impl Interface for Completions {
    fn prompt_field(&self) -> &'static str {
        "prompt"
    }

    fn id_prefix(&self) -> &'static str {
        "cmpl-"
    }

    fn chunk_object(&self) -> &'static str {
        "text_completion"
    }

    fn parse(&self, body: &str, limits: &RequestLimits) -> Result<CompletionRequest, Violation> {
        let fields: CompletionFields<'_> = object(body, "")?;
        Field::new("store", fields.store).only_neutral(&[Neutral::Flag(false)])?;
        fields.shared().check_neutral()?;
        let top_logprobs = Field::new("logprobs", fields.logprobs)
            .integer(0..=limits.top_logprobs.min(MAX_LOGPROBS))?;
        let request = fields.shared().check(limits, top_logprobs)?;
        let best_of = Field::new("best_of", fields.best_of);
        check_best_of(&best_of, 1..=limits.best_of, request.choices)?;
        let prompt = prompt(&Field::new("prompt", fields.prompt), limits.prompts)?;
        let echo = Field::new("echo", fields.echo).flag()?.unwrap_or(false);
        let prompt = with_suffix(prompt, &Field::new("suffix", fields.suffix), echo)?;
        // A repeated prompt is a response without any generated token.
        let min_tokens = u32::from(!echo);
        let max_tokens = max_tokens("max_tokens", fields.max_tokens, min_tokens)?;
        Ok(CompletionRequest { prompt, max_tokens, echo, ..request })
    }

    fn response(&self, response: &WholeResponse<'_>) -> Vec<u8> {
        let choices = response.choices().map(|choice| Choice {
            text: [choice.echo, choice.text].concat(),
            index: choice.index,
            logprobs: response.meta.logprobs.then(|| logprobs(&choice)),
            finish_reason: Some(finish_reason(choice.end)),
        });
        render(response, "text_completion", choices.collect())
    }

    fn write_chunk(
        &self,
        meta: &ResponseMeta,
        choice: u32,
        part: ChunkPart<'_>,
        out: &mut Vec<u8>,
    ) {
        let chunk = |text| Choice::new(choice, text);
        let chunk = match part {
            // A choice has no chunk of its own for its start.
            ChunkPart::Start { echo: None } => return,
            ChunkPart::Start { echo: Some(echo) } => chunk(&echo.text),
            ChunkPart::ScoredPrompt { echo, tokens } => {
                let mut logprobs = CompletionLogprobs::default();
                let offset = logprobs.push_first(&echo.first_token);
                logprobs.push(tokens, offset);
                Choice { logprobs: Some(logprobs), ..chunk(&echo.text) }
            }
            ChunkPart::Delta { delta, offset } => {
                let mut logprobs = CompletionLogprobs::default();
                logprobs.push(&delta.logprobs, offset);
                Choice { logprobs: meta.logprobs.then_some(logprobs), ..chunk(&delta.text) }
            }
            // A completion is its text, whatever it looks like.
            ChunkPart::Piece { .. } => return,
            ChunkPart::End { reason, called: _ } => {
                Choice { finish_reason: Some(finish_reason(reason)), ..chunk("") }
            }
        };
        meta.write_choice(self.chunk_object(), chunk, out);
    }
}

/// Returns the log-probabilities of a choice, the repeated prompt first.
fn logprobs(choice: &ResponseChoice<'_>) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    let mut offset = 0;
    if let Some(first) = choice.first_token {
        offset = logprobs.push_first(first);
        offset = logprobs.push(choice.prompt_logprobs, offset);
    }
    logprobs.push(choice.logprobs, offset);
    logprobs
}

/// Returns the schemas of a response in one piece and of a chunk.
pub(crate) fn response_schemas(generator: &mut SchemaGenerator) -> (Schema, Schema) {
    (
        named::<ResponseBody<'_, Choice<&str>>>("Completion", generator),
        named::<ChunkBody<'_, Choice<&str>>>("CompletionChunk", generator),
    )
}

/// One choice; a response in one piece and a chunk have the same shape.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "CompletionChoice")]
struct Choice<T> {
    text: T,
    index: u32,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
}

impl<'a> Choice<&'a str> {
    fn new(index: u32, text: &'a str) -> Self {
        Self { text, index, logprobs: None, finish_reason: None }
    }
}

request_fields! {
    /// The fields of a completion request that have a meaning in some
    /// implementation of the API.
    CompletionFields { prompt, suffix, max_tokens, best_of, logprobs, echo, store }
}

/// Checks `best_of`, which is supported only if it equals `n`: then every choice
/// that is generated is also returned.
fn check_best_of(
    field: &Field<'_>,
    allowed: RangeInclusive<u32>,
    choices: u32,
) -> Result<(), Violation> {
    // `best_of` may always equal `n`, even above the configured bound.
    field.integer(1..=choices.max(*allowed.end()))?;
    field.only_neutral(&[Neutral::Number(f64::from(choices))])
}

/// Makes the end of each prompt a gap before the text in `suffix`, if the client sent one.
fn with_suffix(prompt: Prompt, suffix: &Field<'_>, echo: bool) -> Result<Prompt, Violation> {
    let after = suffix.read::<String>("a string")?.filter(|after| !after.is_empty());
    match (after, prompt) {
        (None, prompt) => Ok(prompt),
        (Some(_), _) if echo => Err(Violation::field(
            "echo",
            "'echo' must not be true with 'suffix': the answer is the text between both.",
        )),
        (Some(after), Prompt::Texts(before)) => Ok(Prompt::Infill { before, after }),
        (Some(_), _) => Err(Violation::field(
            suffix.name(),
            "'suffix' needs a 'prompt' of text; token ids have no place for it.",
        )),
    }
}

fn prompt(field: &Field<'_>, max: u32) -> Result<Prompt, Violation> {
    let expected = format!(
        "a string, an array of token ids, or an array of at most {max} of either, none empty"
    );
    // The first characters show which form it is. Trying one form after another
    // would parse a long array several times.
    let form: &RawValue = field.required(&expected)?;
    // White space may stand between the first brackets.
    let mut starts = form.get().chars().filter(|c| !c.is_ascii_whitespace());
    let prompt = match (starts.next(), starts.next()) {
        (Some('"'), _) => Prompt::Texts(vec![field.required(&expected)?]),
        (Some('['), Some('"')) => Prompt::Texts(field.list(max, &expected)?.unwrap_or_default()),
        // No minus: a token id is never negative.
        (Some('['), Some('0'..='9')) => {
            Prompt::Tokens(vec![field.list(MAX_PROMPT_TOKENS, &expected)?.unwrap_or_default()])
        }
        (Some('['), Some('[')) => {
            let prompts: Vec<&RawValue> = field.list(max, &expected)?.unwrap_or_default();
            let tokens =
                |raw| Field::new(field.name(), Some(raw)).list(MAX_PROMPT_TOKENS, &expected);
            Prompt::Tokens(
                prompts
                    .into_iter()
                    .map(|raw| Ok(tokens(raw)?.unwrap_or_default()))
                    .collect::<Result<_, Violation>>()?,
            )
        }
        _ => return Err(Violation::field(field.name(), format!("'prompt' must be {expected}."))),
    };
    // A model needs at least one token to continue.
    let has_empty = match &prompt {
        Prompt::Texts(texts) => texts.iter().any(String::is_empty),
        Prompt::Tokens(tokens) => tokens.iter().any(Vec::is_empty),
        Prompt::Chat(_) | Prompt::Infill { .. } => false,
    };
    if has_empty {
        return Err(Violation::field(
            field.name(),
            format!("'prompt' must be {expected}; one is empty."),
        ));
    }
    Ok(prompt)
}
