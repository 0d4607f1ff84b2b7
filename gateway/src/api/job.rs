//! A job: what was asked, counted and bounded by the model that will answer.
//! Rendering and tokenising happen here, on a bounded part of the blocking
//! pool, never on the threads that serve connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tollgate_domain::{DeviceNanos, PromptWork, RequestId, Sampling, UtcTime};
use tollgate_openai::{CHAT, CompletionRequest, Echo, Interface, ResponseMeta};
use tollgate_text::{ChatMessage, Prompt, TextError, encode_chat};

use super::turns::Turns;
use crate::path::InFront;
use crate::reply::ApiError;
use crate::upstream::ServedModel;

/// One unit of requested work. Its maker is [`Counting::count`] alone.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// As `x-request-id` says it.
    pub(crate) id: RequestId,
    /// The model as the worker that looks best now serves it.
    pub(crate) model: Arc<ServedModel>,
    /// Token ids, none empty.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// For each prompt.
    pub(crate) choices: u32,
    /// For each choice; with every prompt it fits the context.
    pub(crate) max_tokens: u32,
    pub(crate) sampling: Sampling,
    pub(crate) stop: Vec<String>,
    /// Whether the answer goes out as it comes.
    pub(crate) streamed: bool,
    /// The dialect of the API in which the client asked.
    pub(crate) interface: &'static dyn Interface,
    /// The frame of the response.
    pub(crate) meta: ResponseMeta,
    /// Where its time went so far.
    pub(crate) in_front: InFront,
}

impl Job {
    /// Tokens of all prompts.
    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.len() as u64).sum()
    }

    /// Choices over all prompts.
    pub(crate) fn all_choices(&self) -> u64 {
        self.prompts.len() as u64 * u64::from(self.choices)
    }

    /// Whether the answer tells the log-probabilities of the prompts too.
    pub(crate) fn scores_prompts(&self) -> bool {
        !self.meta.echoes.is_empty() && self.sampling.top_logprobs.is_some()
    }

    /// Reference cost if each choice has `tokens` tokens.
    pub(crate) fn cost(&self, tokens: u32) -> DeviceNanos {
        let scored = self.scores_prompts();
        let prompts = self.prompts.iter().map(|prompt| PromptWork::of(prompt.len() as u64, scored));
        let choices = self.prompts.iter().flat_map(|prompt| {
            std::iter::repeat_n((prompt.len() as u64, u64::from(tokens)), self.choices as usize)
        });
        self.model.table.request(prompts, choices)
    }
}

/// The bounded place where prompts become tokens.
#[derive(Debug)]
pub(crate) struct Counting {
    turns: Turns,
}

impl Counting {
    /// A place for as many at once as there are cores.
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { turns: Turns::new(cores) }
    }

    /// Turns what was asked into a job for `model`, once it is the turn of
    /// `holder`: the pool or tenant on whose share of the devices it will run.
    pub(crate) async fn count(
        &self,
        holder: &str,
        id: RequestId,
        request: CompletionRequest,
        model: Arc<ServedModel>,
        context: CountContext,
    ) -> Result<Job, ApiError> {
        let place = self.turns.take(holder).await?;
        let counted = tokio::task::spawn_blocking(move || {
            let _place = place; // held until the work is done, even if nobody waits for it
            count(id, request, model, context)
        });
        counted.await.unwrap_or(Err(ApiError::Internal))
    }
}

/// What a count depends on beside what was asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountContext {
    /// The dialect of the API in which the client asked.
    pub(crate) interface: &'static dyn Interface,
    /// The date that a template may print, and the answer's `created`.
    pub(crate) now: UtcTime,
    /// Tokens of an answer where the request says nothing.
    pub(crate) default_max_tokens: u32,
    /// How long the body took to come.
    pub(crate) read: Duration,
    /// When it began to be parsed.
    pub(crate) parsed: Instant,
}

fn count(
    id: RequestId,
    request: CompletionRequest,
    model: Arc<ServedModel>,
    context: CountContext,
) -> Result<Job, ApiError> {
    let CountContext { interface, now, default_max_tokens, read, parsed } = context;
    let CompletionRequest { model: _, prompt, choices, max_tokens, sampling, stop, stream, echo } =
        request;
    let sampling = sampling.resolve(model.defaults);
    if let Some(token) = sampling.logit_bias.keys().find(|&&token| token >= model.vocabulary) {
        return Err(ApiError::invalid(
            "logit_bias",
            format!("'logit_bias' names token {token}; the model has {} tokens.", model.vocabulary),
        ));
    }
    let prompts = encode(&prompt, interface, &model, now)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u64;
    let context = u64::from(model.context_length);
    let too_long = |completion| ApiError::ContextLength {
        param: interface.prompt_field(),
        limit: context,
        prompt: longest,
        completion,
    };
    let room = u32::try_from(context.saturating_sub(longest)).unwrap_or(u32::MAX);
    if room == 0 {
        return Err(too_long(None));
    }
    let max_tokens = match max_tokens {
        None => default_max_tokens.min(room),
        Some(most) if most.tokens > room => return Err(too_long(Some(u64::from(most.tokens)))),
        Some(most) => most.tokens,
    };
    let meta = ResponseMeta {
        id: ResponseMeta::id(interface, &id),
        created: now.unix_seconds(),
        model: model.name.as_str().to_owned(),
        fingerprint: format!("fp_{}", model.hash.get(..10).unwrap_or(&model.hash)),
        choices,
        echoes: if echo { echoes(&prompt, &prompts, &model) } else { Vec::new() },
        prompts: prompts.len() as u32,
        logprobs: sampling.top_logprobs.is_some(),
        include_usage: stream.is_some_and(|stream| stream.include_usage),
    };
    let streamed = stream.is_some();
    let in_front = InFront { read, preprocess: parsed.elapsed() };
    Ok(Job {
        id,
        model,
        prompts,
        choices,
        max_tokens,
        sampling,
        stop,
        streamed,
        interface,
        meta,
        in_front,
    })
}

fn encode(
    prompt: &Prompt,
    interface: &dyn Interface,
    model: &ServedModel,
    now: UtcTime,
) -> Result<Vec<Vec<u32>>, ApiError> {
    match prompt {
        Prompt::Messages(messages) => {
            check_bytes(
                messages.iter().map(|message| message.content.len()).sum(),
                interface,
                model,
            )?;
            encode_messages(messages, model, now).map(|prompt| vec![prompt])
        }
        Prompt::Texts(texts) => texts
            .iter()
            .map(|text| {
                check_bytes(text.len(), interface, model)?;
                let tokens = model.text.tokenizer.encode_prompt(text);
                tokens.map_err(|error| refused(interface, error))
            })
            .collect(),
        Prompt::Tokens(prompts) => {
            if prompts.iter().flatten().any(|&token| token >= model.vocabulary) {
                return Err(ApiError::invalid(
                    "prompt",
                    format!(
                        "'prompt' holds a token id that the model does not have: it has {}.",
                        model.vocabulary
                    ),
                ));
            }
            Ok(prompts.clone())
        }
    }
}

fn encode_messages(
    messages: &[ChatMessage],
    model: &ServedModel,
    now: UtcTime,
) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &model.template else {
        return Err(ApiError::invalid(
            "model",
            format!("The model '{}' has no chat template: use /v1/completions.", model.name),
        ));
    };
    encode_chat(&model.text.tokenizer, template, messages, now)
        .map_err(|error| refused(CHAT, error))
}

/// Refuses a text that cannot fit whatever its tokens are, before anything is
/// spent on counting them. A normaliser may shorten a text, by four at most.
fn check_bytes(
    bytes: usize,
    interface: &dyn Interface,
    model: &ServedModel,
) -> Result<(), ApiError> {
    let most = (model.context_length as usize)
        .saturating_mul(model.text.longest_token.max(1))
        .saturating_mul(4);
    if bytes <= most {
        return Ok(());
    }
    Err(ApiError::ContextLength {
        param: interface.prompt_field(),
        limit: u64::from(model.context_length),
        prompt: (bytes / model.text.longest_token.max(1)) as u64,
        completion: None,
    })
}

/// What a text's refusal means to the client; what only the model's files can
/// be blamed for is our fault.
fn refused(interface: &dyn Interface, error: TextError) -> ApiError {
    match error {
        TextError::Refused(_)
        | TextError::NoMark
        | TextError::Allowance(_)
        | TextError::Encode(_) => ApiError::invalid(interface.prompt_field(), error.to_string()),
        TextError::Tokenizer(_)
        | TextError::Decoder(_)
        | TextError::Config(_)
        | TextError::Template { .. } => {
            tracing::error!(error = %error, "a model's template or tokenizer failed");
            ApiError::Internal
        }
    }
}

fn echoes(asked: &Prompt, prompts: &[Vec<u32>], model: &ServedModel) -> Vec<Echo> {
    let tokenizer = &model.text.tokenizer;
    prompts
        .iter()
        .enumerate()
        .map(|(index, tokens)| Echo {
            text: match asked {
                Prompt::Texts(texts) => texts[index].clone(),
                _ => tokenizer.decode(tokens),
            },
            first_token: match tokens.first() {
                Some(&token) if !tokenizer.is_control(token) => {
                    tokenizer.token_bytes(token).to_vec()
                }
                _ => Vec::new(),
            },
        })
        .collect()
}
