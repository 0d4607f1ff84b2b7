//! What a client asked for, checked field by field but not yet counted: the
//! common ground of chat and completions. What multiplies cost is bounded by
//! the configured [`RequestLimits`].

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use tollgate_config::RequestLimits;
use tollgate_domain::Sampling;
use tollgate_text::Prompt;

use super::fields::{Field, Neutral, Violation, known_fields, object};

/// The largest number that a client may name; the context bounds it further.
const MOST_TOKENS: u32 = i32::MAX as u32;
/// Bytes of a model's name.
const MOST_NAME_BYTES: usize = 128;
/// Bytes of `user` and `safety_identifier`.
const MOST_USER_BYTES: usize = 512;

/// A checked request whose prompt is not yet tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    pub(crate) dialect: Dialect,
    /// The model's name as the client wrote it.
    pub(crate) model: String,
    pub(crate) prompt: Prompt,
    /// n: choices for each prompt.
    pub(crate) choices: u32,
    /// Tokens to generate for each choice at most, with the field that said
    /// so; none if the client named no limit.
    pub(crate) max_tokens: Option<MaxTokens>,
    pub(crate) sampling: Sampling,
    pub(crate) stop: Vec<String>,
    /// How to stream; none to answer in one piece.
    pub(crate) stream: Option<StreamOptions>,
    /// Completions only: the prompt stands before the generated text.
    pub(crate) echo: bool,
}

/// Which of the two interfaces was spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Chat,
    Completion,
}

impl Dialect {
    /// The field that holds the prompt.
    pub(crate) fn prompt_param(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completion => "prompt",
        }
    }
}

/// A limit on generated tokens and the field that set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaxTokens {
    pub(crate) tokens: u32,
    pub(crate) param: &'static str,
}

/// How a stream is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamOptions {
    /// A last chunk with the usage.
    pub(crate) include_usage: bool,
}

/// The fields that both dialects share, raw.
pub(crate) struct Shared<'a> {
    pub(crate) model: Option<&'a RawValue>,
    pub(crate) n: Option<&'a RawValue>,
    pub(crate) temperature: Option<&'a RawValue>,
    pub(crate) top_k: Option<&'a RawValue>,
    pub(crate) top_p: Option<&'a RawValue>,
    pub(crate) presence_penalty: Option<&'a RawValue>,
    pub(crate) frequency_penalty: Option<&'a RawValue>,
    pub(crate) logit_bias: Option<&'a RawValue>,
    pub(crate) seed: Option<&'a RawValue>,
    pub(crate) stop: Option<&'a RawValue>,
    pub(crate) stream: Option<&'a RawValue>,
    pub(crate) stream_options: Option<&'a RawValue>,
    pub(crate) user: Option<&'a RawValue>,
}

/// The shared fields, checked.
pub(crate) struct SharedChecked {
    pub(crate) model: String,
    pub(crate) choices: u32,
    pub(crate) sampling: Sampling,
    pub(crate) stop: Vec<String>,
    pub(crate) stream: Option<StreamOptions>,
}

impl Shared<'_> {
    /// Checks them all; `top_logprobs` is read by the dialect.
    pub(crate) fn check(
        &self,
        limits: &RequestLimits,
        top_logprobs: Option<u32>,
    ) -> Result<SharedChecked, Violation> {
        let model: String = Field::new("model", self.model).required("a model's name, a string")?;
        if model.len() > MOST_NAME_BYTES {
            return Err(Violation::of(
                "model",
                format!("'model' is longer than {MOST_NAME_BYTES} bytes."),
            ));
        }
        Field::new("user", self.user).text(MOST_USER_BYTES)?;
        Ok(SharedChecked {
            model,
            choices: Field::new("n", self.n).integer(1, limits.choices)?.unwrap_or(1),
            sampling: Sampling {
                temperature: Field::new("temperature", self.temperature)
                    .number(0.0, 2.0)?
                    .unwrap_or(1.0),
                top_k: top_k(&Field::new("top_k", self.top_k))?,
                top_p: Field::new("top_p", self.top_p).number(0.0, 1.0)?.unwrap_or(1.0),
                presence_penalty: Field::new("presence_penalty", self.presence_penalty)
                    .number(-2.0, 2.0)?
                    .unwrap_or(0.0),
                frequency_penalty: Field::new("frequency_penalty", self.frequency_penalty)
                    .number(-2.0, 2.0)?
                    .unwrap_or(0.0),
                logit_bias: logit_bias(
                    &Field::new("logit_bias", self.logit_bias),
                    limits.logit_bias,
                )?,
                // A negative seed is as good as any other: its bits are used.
                seed: Field::new("seed", self.seed)
                    .read::<i64>("a whole number of 64 bits")?
                    .map(|seed| seed as u64),
                top_logprobs,
            },
            stop: stop(&Field::new("stop", self.stop), limits)?,
            stream: stream(
                &Field::new("stream", self.stream),
                &Field::new("stream_options", self.stream_options),
            )?,
        })
    }
}

/// Reads field `param` as a limit on generated tokens, `least` or more.
pub(crate) fn max_tokens(
    param: &'static str,
    raw: Option<&RawValue>,
    least: u32,
) -> Result<Option<MaxTokens>, Violation> {
    let tokens = Field::new(param, raw).integer(least, MOST_TOKENS)?;
    Ok(tokens.map(|tokens| MaxTokens { tokens, param }))
}

/// `top_k`, which OpenAI's API does not have: as vLLM means it, 0 and -1 are
/// all tokens.
fn top_k(field: &Field<'_>) -> Result<u32, Violation> {
    let expected = format!("a whole number from -1 to {MOST_TOKENS}");
    match field.read::<i64>(&expected)? {
        None | Some(-1) => Ok(0),
        Some(number) => match u32::try_from(number) {
            Ok(number) if number <= MOST_TOKENS => Ok(number),
            _ => Err(field.must_be(&expected, &number.to_string())),
        },
    }
}

/// `metadata`: kept nowhere, but held to the bounds that clients know.
pub(crate) fn check_metadata(field: &Field<'_>) -> Result<(), Violation> {
    const EXPECTED: &str = "an object of at most 16 strings, keys up to 64 bytes, values up to 512";
    let Some(metadata) = field.map::<String>(16, EXPECTED)? else { return Ok(()) };
    match metadata.iter().find(|(key, value)| key.len() > 64 || value.len() > 512) {
        None => Ok(()),
        Some(_) => {
            Err(Violation::of(field.name(), format!("'{}' must be {EXPECTED}.", field.name())))
        }
    }
}

/// Fields of every dialect that change nothing at these values and are
/// refused at others.
pub(crate) fn check_service_tier(field: &Field<'_>) -> Result<(), Violation> {
    field.only_neutral(&[Neutral::Word("auto"), Neutral::Word("default")])
}

fn logit_bias(field: &Field<'_>, most: u32) -> Result<BTreeMap<u32, f32>, Violation> {
    const EXPECTED: &str = "an object of token ids with a bias from -100 to 100 each";
    let Some(entries) = field.map::<f64>(most, EXPECTED)? else {
        return Ok(BTreeMap::new());
    };
    let mut biases = BTreeMap::new();
    for (token, bias) in entries {
        let at = || format!("{}.{}", field.name(), token.chars().take(32).collect::<String>());
        let id: u32 = token.parse().map_err(|_| {
            Violation::of(
                at(),
                format!("'{}' must be {EXPECTED}: a key is not a token id.", field.name()),
            )
        })?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(Violation::of(
                at(),
                format!("'{}' must be {EXPECTED}; one is {bias}.", field.name()),
            ));
        }
        // "1" and "01" name the same token.
        if biases.insert(id, bias as f32).is_some() {
            return Err(Violation::of(at(), format!("'{}' names token {id} twice.", field.name())));
        }
    }
    Ok(biases)
}

fn stop(field: &Field<'_>, limits: &RequestLimits) -> Result<Vec<String>, Violation> {
    let (most, size) = (limits.stop, limits.stop_size.0);
    let expected =
        format!("a string or an array of at most {most} strings, each of 1 to {size} bytes");
    let strings = if field.is_array() {
        field.list::<String>(most, &expected)?.unwrap_or_default()
    } else {
        // An empty string asks for nothing; some clients send it as a default.
        field.read::<String>(&expected)?.into_iter().filter(|one| !one.is_empty()).collect()
    };
    for (index, string) in strings.iter().enumerate() {
        if string.is_empty() || string.len() as u64 > size {
            let at = if strings.len() == 1 { "stop".to_owned() } else { format!("stop[{index}]") };
            return Err(Violation::of(
                at,
                format!("'stop' must be {expected}; one has {} bytes.", string.len()),
            ));
        }
    }
    Ok(strings)
}

known_fields! {
    /// `stream_options`.
    StreamFields { include_usage, include_obfuscation }
}

fn stream(stream: &Field<'_>, options: &Field<'_>) -> Result<Option<StreamOptions>, Violation> {
    let streamed = stream.flag()?.unwrap_or(false);
    let raw = options.read::<&RawValue>("an object")?;
    let Some(raw) = raw else { return Ok(streamed.then(StreamOptions::default)) };
    if !streamed {
        return Err(Violation::of(
            "stream_options",
            "'stream_options' is only allowed when 'stream' is true.",
        ));
    }
    let fields: StreamFields<'_> = object(raw.get(), "stream_options")?;
    // Obfuscation pads chunks; we send none either way.
    Field::new("stream_options.include_obfuscation", fields.include_obfuscation).flag()?;
    let include_usage =
        Field::new("stream_options.include_usage", fields.include_usage).flag()?.unwrap_or(false);
    Ok(Some(StreamOptions { include_usage }))
}
