//! A checked request, and the fields that every dialect shares. The bounds on
//! fields that multiply the cost of a request come from [`RequestLimits`].

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use tollgate_domain::{Grammar, REPETITION_PENALTIES, Sampling, SamplingDefaults, Tier};
use tollgate_text::Prompt;

use crate::Violation;
use crate::fields::{Field, Neutral, known_fields, object};
use crate::structured::structured_outputs;
use crate::tools::ToolUse;

/// The largest number of tokens that a client may name. The model's context
/// bounds the number further.
pub(crate) const MAX_TOKENS: u32 = i32::MAX as u32;
/// Bytes of a model's name.
pub(crate) const MAX_MODEL_BYTES: usize = 128;
/// Entries of `stop_token_ids`; a worker accepts no more.
pub(crate) const MAX_STOP_TOKENS: u32 = 64;
/// Bytes of `user`, `safety_identifier` and `prompt_cache_key`.
pub(crate) const MAX_IDENTIFIER_BYTES: usize = 512;

/// The bounds on fields that multiply the cost of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// The largest `n`.
    pub choices: u32,
    /// The largest `best_of`; an equal `n` is always allowed.
    pub best_of: u32,
    /// The largest number of prompts in one request.
    pub prompts: u32,
    /// The largest number of messages in one chat.
    pub messages: u32,
    /// The largest number of stop strings.
    pub stop: u32,
    /// Bytes of the longest stop string.
    pub stop_bytes: u64,
    /// The largest number of entries of `logit_bias`.
    pub logit_bias: u32,
    /// The largest number of alternatives reported for each token.
    pub top_logprobs: u32,
}

/// A checked request. Its prompt is not tokens yet.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The model's name as the client wrote it.
    pub model: String,
    /// The prompt, or several.
    pub prompt: Prompt,
    /// The number of choices for each prompt, at least 1.
    pub choices: u32,
    /// The limit on the tokens of each choice, if the client named one.
    pub max_tokens: Option<MaxTokens>,
    /// The sampling parameters.
    pub sampling: SamplingFields,
    /// The strings that end a choice.
    pub stop: Vec<String>,
    /// The options of a stream; `None` asks for a response in one piece.
    pub stream: Option<StreamOptions>,
    /// True if the response repeats the prompt before the generated text.
    pub echo: bool,
    /// The tools that the answer may call; `None` if it may call none.
    pub tools: Option<ToolUse>,
    /// The class of service.
    pub tier: Tier,
}

/// A limit on generated tokens, and the field that set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxTokens {
    /// The limit.
    pub tokens: u32,
    /// The name of the field.
    pub param: &'static str,
}

/// The sampling parameters of a request. For a parameter that is `None` the
/// model's default applies.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingFields {
    /// The temperature, 0 to 2.
    pub temperature: Option<f32>,
    /// The number of likeliest tokens to sample from; 0 means all tokens.
    pub top_k: Option<u32>,
    /// The probability mass to sample from, 0 to 1.
    pub top_p: Option<f32>,
    /// The part of the likeliest token's probability that a token must reach, 0 to 1.
    pub min_p: Option<f32>,
    /// The factor that makes earlier tokens less likely, in
    /// [`REPETITION_PENALTIES`].
    pub repetition_penalty: Option<f32>,
    /// The penalty for each token that has occurred, -2 to 2.
    pub presence_penalty: f32,
    /// The penalty for each occurrence of a token, -2 to 2.
    pub frequency_penalty: f32,
    /// The bias of tokens, by token id, -100 to 100.
    pub logit_bias: BTreeMap<u32, f32>,
    /// The seed of the random numbers.
    pub seed: Option<u64>,
    /// The number of alternatives to report for each token; `None` reports no
    /// log-probabilities.
    pub top_logprobs: Option<u32>,
    /// The ids of tokens that end a choice, as the model's own end tokens do.
    pub stop_tokens: Vec<u32>,
    /// True if the model's own end tokens do not end a choice.
    pub ignores_end: bool,
    /// The form that the answer must have; `None` for free text.
    pub grammar: Option<Grammar>,
    /// The field of the request that asks for the form; `None` for free text.
    pub form_field: Option<&'static str>,
}

impl SamplingFields {
    /// Sets the form of the answer, which the field `name` asks for.
    ///
    /// # Errors
    /// The request ignores end tokens: a complete answer has no next token but the end.
    pub fn set_form(&mut self, form: Grammar, name: &'static str) -> Result<(), Violation> {
        if self.ignores_end {
            let message =
                format!("'ignore_eos' must be false with '{name}': the answer would have no end.");
            return Err(Violation::field("ignore_eos", message));
        }
        self.grammar = Some(form);
        self.form_field = Some(name);
        Ok(())
    }

    /// Returns the complete parameters: those of the request, and `defaults` for
    /// the absent ones.
    pub fn resolve(self, defaults: SamplingDefaults) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias,
            seed: self.seed,
            top_logprobs: self.top_logprobs,
            stop_tokens: self.stop_tokens,
            ignores_end: self.ignores_end,
            grammar: self.grammar,
        }
    }
}

/// The options of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// True if a last chunk reports the usage.
    pub include_usage: bool,
}

/// Passes the names of the fields that every dialect shares, and the tokens after
/// `=>`, to the macro `$then`.
macro_rules! with_shared_fields {
    ($then:ident => $($rest:tt)*) => {
        $then! {
            [
                model, n, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                frequency_penalty, logit_bias, seed, stop, stop_token_ids, ignore_eos, stream,
                stream_options, user, metadata, service_tier, min_tokens, length_penalty,
                use_beam_search, allowed_token_ids, bad_words, logits_processors, prompt_logprobs,
                truncate_prompt_tokens, skip_special_tokens, include_stop_str_in_output,
                structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar,
            ]
            $($rest)*
        }
    };
}
pub(crate) use with_shared_fields;

/// Declares the known fields of a dialect's request: those that every dialect
/// shares, and the dialect's own.
macro_rules! request_fields {
    ($(#[$doc:meta])* $name:ident { $($field:ident),* $(,)? }) => {
        $crate::request::with_shared_fields! {
            request_fields => $(#[$doc])* $name { $($field),* }
        }
    };
    (
        [$($shared:ident),* $(,)?] $(#[$doc:meta])* $name:ident { $($field:ident),* }
    ) => {
        $crate::fields::known_fields! { $(#[$doc])* $name { $($shared,)* $($field),* } }

        impl<'a> $name<'a> {
            /// Returns the fields that every dialect shares.
            fn shared(&self) -> $crate::request::SharedFields<'a> {
                $crate::request::SharedFields { $($shared: self.$shared),* }
            }
        }
    };
}
pub(crate) use request_fields;

macro_rules! shared_fields {
    ([$($shared:ident),* $(,)?]) => {
        known_fields! {
            /// The fields that every dialect shares, as raw JSON.
            SharedFields { $($shared),* }
        }
    };
}
with_shared_fields! { shared_fields => }

impl SharedFields<'_> {
    /// Checks the shared fields and makes a request of them. The dialect reads
    /// `prompt` and `top_logprobs` in its own way, and sets what else it knows.
    ///
    /// # Errors
    /// The first field that breaks a rule.
    pub(crate) fn check(
        &self,
        limits: &RequestLimits,
        top_logprobs: Option<u32>,
    ) -> Result<CompletionRequest, Violation> {
        let model: String = Field::new("model", self.model).required("a model's name, a string")?;
        // The name goes back to the client in errors and responses.
        if model.len() > MAX_MODEL_BYTES {
            return Err(Violation::field(
                "model",
                format!("'model' is longer than {MAX_MODEL_BYTES} bytes."),
            ));
        }
        // The end user's name is checked and dropped: usage is counted by API key.
        Field::new("user", self.user).text(MAX_IDENTIFIER_BYTES)?;
        Ok(CompletionRequest {
            model,
            prompt: Prompt::Texts(Vec::new()), // the dialect sets the prompt
            choices: Field::new("n", self.n).integer(1..=limits.choices)?.unwrap_or(1),
            max_tokens: None,
            sampling: self.sampling(limits, top_logprobs)?,
            stop: stop(&Field::new("stop", self.stop), limits)?,
            stream: stream(
                &Field::new("stream", self.stream),
                &Field::new("stream_options", self.stream_options),
            )?,
            echo: false,
            tools: None,
            tier: service_tier(&Field::new(SERVICE_TIER, self.service_tier))?,
        })
    }

    /// Checks the fields of every dialect that change nothing at their neutral
    /// values and are refused at other values.
    pub(crate) fn check_neutral(&self) -> Result<(), Violation> {
        for (name, raw, neutral) in [
            // vLLM's fields: each would change the answer there.
            ("min_tokens", self.min_tokens, &[Neutral::Number(0.0)][..]),
            ("length_penalty", self.length_penalty, &[Neutral::Number(1.0)]),
            ("use_beam_search", self.use_beam_search, &[Neutral::Flag(false)]),
            ("allowed_token_ids", self.allowed_token_ids, &[]),
            ("bad_words", self.bad_words, &[Neutral::Empty]),
            ("logits_processors", self.logits_processors, &[Neutral::Empty]),
            ("prompt_logprobs", self.prompt_logprobs, &[]),
            ("truncate_prompt_tokens", self.truncate_prompt_tokens, &[]),
            ("skip_special_tokens", self.skip_special_tokens, &[Neutral::Flag(true)]),
            (
                "include_stop_str_in_output",
                self.include_stop_str_in_output,
                &[Neutral::Flag(false)],
            ),
            ("guided_grammar", self.guided_grammar, &[]),
        ] {
            Field::new(name, raw).only_neutral(neutral)?;
        }
        check_metadata(&Field::new("metadata", self.metadata))
    }

    fn sampling(
        &self,
        limits: &RequestLimits,
        top_logprobs: Option<u32>,
    ) -> Result<SamplingFields, Violation> {
        let grammar = structured_outputs(self)?;
        let penalty = |name, raw| Ok(Field::new(name, raw).number(-2.0..=2.0)?.unwrap_or_default());
        let mut sampling = SamplingFields {
            temperature: Field::new("temperature", self.temperature).number(0.0..=2.0)?,
            top_k: top_k(&Field::new("top_k", self.top_k))?,
            top_p: Field::new("top_p", self.top_p).number(0.0..=1.0)?,
            min_p: Field::new("min_p", self.min_p).number(0.0..=1.0)?,
            repetition_penalty: Field::new("repetition_penalty", self.repetition_penalty)
                .number(REPETITION_PENALTIES)?,
            presence_penalty: penalty("presence_penalty", self.presence_penalty)?,
            frequency_penalty: penalty("frequency_penalty", self.frequency_penalty)?,
            logit_bias: logit_bias(&Field::new("logit_bias", self.logit_bias), limits.logit_bias)?,
            // Clients may send a negative seed: its bits are as good as others.
            seed: Field::new("seed", self.seed)
                .read::<i64>("a whole number of 64 bits")?
                .map(|seed| seed as u64),
            top_logprobs,
            stop_tokens: Field::new("stop_token_ids", self.stop_token_ids)
                .list(MAX_STOP_TOKENS, &expected_stop_tokens())?
                .unwrap_or_default(),
            ignores_end: Field::new("ignore_eos", self.ignore_eos).flag()?.unwrap_or(false),
            grammar: None,
            form_field: None,
        };
        // Last, because the check needs `ignores_end`.
        if let Some((grammar, name)) = grammar {
            sampling.set_form(grammar, name)?;
        }
        Ok(sampling)
    }
}

fn expected_stop_tokens() -> String {
    format!("an array of at most {MAX_STOP_TOKENS} token ids")
}

/// Reads field `param` as a limit on generated tokens, at least `min`.
pub(crate) fn max_tokens(
    param: &'static str,
    raw: Option<&RawValue>,
    min: u32,
) -> Result<Option<MaxTokens>, Violation> {
    let tokens = Field::new(param, raw).integer(min..=MAX_TOKENS)?;
    Ok(tokens.map(|tokens| MaxTokens { tokens, param }))
}

/// The name of the field that chooses the tier.
pub const SERVICE_TIER: &str = "service_tier";
/// The value of [`SERVICE_TIER`] for the batch tier.
pub const FLEX: &str = "flex";

/// Reads `service_tier`.
fn service_tier(field: &Field<'_>) -> Result<Tier, Violation> {
    const EXPECTED: &str = "'auto', 'default' or 'flex'";
    match field.read::<String>(EXPECTED)?.as_deref() {
        None | Some("auto" | "default") => Ok(Tier::Interactive),
        Some(FLEX) => Ok(Tier::Batch),
        // The value goes back to the client, so only its start does.
        Some(other) => {
            let shown: String = other.chars().take(32).collect();
            Err(field.must_be(EXPECTED, &format!("'{shown}'")))
        }
    }
}

/// Reads `top_k`. OpenAI's API does not have this field; vLLM reads 0 and -1 as
/// all tokens, and so does this function.
fn top_k(field: &Field<'_>) -> Result<Option<u32>, Violation> {
    let expected = format!("a whole number from -1 to {MAX_TOKENS}");
    match field.read::<i64>(&expected)? {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(number) => match u32::try_from(number) {
            Ok(number) if number <= MAX_TOKENS => Ok(Some(number)),
            _ => Err(field.must_be(&expected, &number.to_string())),
        },
    }
}

/// Checks `metadata`. It is not stored, but it must keep the bounds that clients
/// know from OpenAI.
fn check_metadata(field: &Field<'_>) -> Result<(), Violation> {
    const EXPECTED: &str = "an object of at most 16 strings, keys up to 64 bytes, values up to 512";
    let Some(metadata) = field.map::<String>(16, EXPECTED)? else { return Ok(()) };
    match metadata.iter().find(|(key, value)| key.len() > 64 || value.len() > 512) {
        None => Ok(()),
        Some(_) => {
            Err(Violation::field(field.name(), format!("'{}' must be {EXPECTED}.", field.name())))
        }
    }
}

fn logit_bias(field: &Field<'_>, max: u32) -> Result<BTreeMap<u32, f32>, Violation> {
    const EXPECTED: &str = "an object of token ids with a bias from -100 to 100 each";
    let Some(entries) = field.map::<f64>(max, EXPECTED)? else {
        return Ok(BTreeMap::new());
    };
    let mut biases = BTreeMap::new();
    for (token, bias) in entries {
        // The key goes back to the client, so only its start does.
        let at = || format!("{}.{}", field.name(), token.chars().take(32).collect::<String>());
        let id: u32 = token.parse().map_err(|_| {
            Violation::field(
                at(),
                format!("'{}' must be {EXPECTED}: a key is not a token id.", field.name()),
            )
        })?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(Violation::field(
                at(),
                format!("'{}' must be {EXPECTED}; one is {bias}.", field.name()),
            ));
        }
        // Distinct keys can name one token: "1" and "01" do.
        if biases.insert(id, bias as f32).is_some() {
            return Err(Violation::field(
                at(),
                format!("'{}' names token {id} twice.", field.name()),
            ));
        }
    }
    Ok(biases)
}

fn stop(field: &Field<'_>, limits: &RequestLimits) -> Result<Vec<String>, Violation> {
    let (max, bytes) = (limits.stop, limits.stop_bytes);
    let expected =
        format!("a string or an array of at most {max} strings, each of 1 to {bytes} bytes");
    let strings = if field.is_array() {
        field.list::<String>(max, &expected)?.unwrap_or_default()
    } else {
        // Some clients send an empty string as a default: it asks for nothing.
        field.read::<String>(&expected)?.into_iter().filter(|one| !one.is_empty()).collect()
    };
    for (index, string) in strings.iter().enumerate() {
        if string.is_empty() || string.len() as u64 > bytes {
            let at = if strings.len() == 1 { "stop".to_owned() } else { format!("stop[{index}]") };
            return Err(Violation::field(
                at,
                format!("'stop' must be {expected}; one has {} bytes.", string.len()),
            ));
        }
    }
    Ok(strings)
}

known_fields! {
    /// The fields of `stream_options`.
    StreamFields { include_usage, include_obfuscation }
}

fn stream(stream: &Field<'_>, options: &Field<'_>) -> Result<Option<StreamOptions>, Violation> {
    let streamed = stream.flag()?.unwrap_or(false);
    let raw = options.read::<&RawValue>("an object")?;
    let Some(raw) = raw else { return Ok(streamed.then(StreamOptions::default)) };
    // OpenAI refuses this, too: the options would have no effect.
    if !streamed {
        return Err(Violation::field(
            "stream_options",
            "'stream_options' is only allowed when 'stream' is true.",
        ));
    }
    let fields: StreamFields<'_> = object(raw.get(), "stream_options")?;
    // Obfuscation pads chunks. No chunk is padded here, whatever the value is.
    Field::new("stream_options.include_obfuscation", fields.include_obfuscation).flag()?;
    let include_usage =
        Field::new("stream_options.include_usage", fields.include_usage).flag()?.unwrap_or(false);
    Ok(Some(StreamOptions { include_usage }))
}
