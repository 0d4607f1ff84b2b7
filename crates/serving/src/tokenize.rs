//! Prompts become tokens, and requests become jobs.
//!
//! Rendering and tokenizing run on a bounded part of the blocking pool, never
//! on the threads that serve connections. The owners of device shares take
//! turns there.

mod fair_queue;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tollgate_domain::{RequestId, Sampling, UtcTime};
use tollgate_text::{ChatMessage, Prompt, TextError, encode_chat};

use self::fair_queue::FairQueue;
use crate::error::{Fault, Refusal, RequestError};
use crate::job::{Delivery, Job};
use crate::model::ServedModel;
use crate::timings::FrontTimings;

/// A parsed request with a prompt that is not tokenized yet.
#[derive(Clone, Debug)]
pub struct TokenizeRequest {
    /// The request's id, which the client reads as `x-request-id`.
    pub id: RequestId,
    /// The prompts.
    pub prompt: Prompt,
    /// The prompt's name in the caller's interface, for refusals.
    pub prompt_field: &'static str,
    /// Choices for each prompt.
    pub choices: u32,
    /// Tokens for each choice at most, if the client named a limit.
    pub max_tokens: Option<u32>,
    /// Tokens for each choice at most, if the client named no limit.
    pub default_max_tokens: u32,
    /// The parameters by which tokens are sampled.
    pub sampling: Sampling,
    /// Strings that end a choice.
    pub stop: Vec<String>,
    /// The way in which the client takes the answer.
    pub delivery: Delivery,
    /// True if the answer repeats the prompts.
    pub echo: bool,
    /// The date that a chat template may print.
    pub now: UtcTime,
    /// Time in which the body arrived.
    pub read: Duration,
    /// The moment when parsing began.
    pub parsing_began: Instant,
}

/// A job, and its prompts as an answer repeats them.
#[derive(Clone, Debug)]
pub struct Tokenized {
    /// The job.
    pub job: Job,
    /// One entry for each prompt; empty if the answer does not repeat them.
    pub echoes: Vec<PromptEcho>,
}

/// A prompt as an answer repeats it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptEcho {
    /// The whole prompt as text.
    pub text: String,
    /// The bytes of the prompt's first token; empty for a control token.
    pub first_token: Vec<u8>,
}

/// The bounded set of threads on which prompts become tokens.
#[derive(Debug)]
pub struct TokenizePool {
    queue: FairQueue,
}

impl TokenizePool {
    /// Makes a pool that tokenizes as many prompts at once as there are cores.
    pub fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { queue: FairQueue::new(cores) }
    }

    /// Turns `request` into a job for `model` when it is the turn of `owner`, the
    /// pool or tenant that owns the job's share of the devices.
    ///
    /// # Errors
    /// The request does not fit the model, or too many requests wait.
    pub async fn tokenize(
        &self,
        owner: &str,
        request: TokenizeRequest,
        model: Arc<ServedModel>,
    ) -> Result<Tokenized, RequestError> {
        let slot = self.queue.acquire(owner).await?;
        let tokenized = tokio::task::spawn_blocking(move || {
            // The slot is held until the work is done, even if the client has left:
            // the thread is busy until then.
            let _slot = slot;
            tokenize(request, model)
        });
        tokenized.await.unwrap_or(Err(RequestError::INTERNAL))
    }
}

impl Default for TokenizePool {
    fn default() -> Self {
        Self::new()
    }
}

fn tokenize(request: TokenizeRequest, model: Arc<ServedModel>) -> Result<Tokenized, RequestError> {
    // Checked here, because only the model tells how many tokens there are.
    let TokenizeRequest { sampling, prompt_field, .. } = &request;
    if let Some(token) = sampling.logit_bias.keys().find(|&&token| token >= model.vocabulary) {
        let tokens = model.vocabulary;
        let message = format!("'logit_bias' names token {token}; the model has {tokens} tokens.");
        return Err(Refusal::invalid("logit_bias", message).into());
    }
    let prompts = encode(&request.prompt, prompt_field, &model, request.now)?;
    let max_tokens = max_tokens(&request, &prompts, &model)?;
    let echoes = if request.echo { echoes(&request.prompt, &prompts, &model) } else { Vec::new() };
    let scores_prompts = !echoes.is_empty() && sampling.top_logprobs.is_some();
    let TokenizeRequest { id, prompt_field, choices, sampling, stop, delivery, .. } = request;
    let timings = FrontTimings { read: request.read, preprocess: request.parsing_began.elapsed() };
    let job = Job {
        id,
        model,
        prompts,
        prompt_field,
        choices,
        max_tokens,
        sampling,
        stop,
        delivery,
        scores_prompts,
        timings,
    };
    Ok(Tokenized { job, echoes })
}

/// Returns the tokens that each choice may have: prompt and answer must fit the
/// context together.
fn max_tokens(
    request: &TokenizeRequest,
    prompts: &[Vec<u32>],
    model: &ServedModel,
) -> Result<u32, Refusal> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u64;
    let limit = u64::from(model.context_length);
    let too_long = |completion| Refusal::ContextLength {
        field: request.prompt_field,
        limit,
        prompt: longest,
        completion,
    };
    let room = u32::try_from(limit.saturating_sub(longest)).unwrap_or(u32::MAX);
    if room == 0 {
        return Err(too_long(None));
    }
    match request.max_tokens {
        // The client named no limit, so a short room shortens the answer.
        None => Ok(request.default_max_tokens.min(room)),
        Some(most) if most > room => Err(too_long(Some(u64::from(most)))),
        Some(most) => Ok(most),
    }
}

fn encode(
    prompt: &Prompt,
    field: &'static str,
    model: &ServedModel,
    now: UtcTime,
) -> Result<Vec<Vec<u32>>, RequestError> {
    match prompt {
        Prompt::Messages(messages) => {
            let bytes = messages.iter().map(|message| message.content.len()).sum();
            check_bytes(bytes, field, model)?;
            encode_messages(messages, field, model, now).map(|prompt| vec![prompt])
        }
        Prompt::Texts(texts) => texts
            .iter()
            .map(|text| {
                check_bytes(text.len(), field, model)?;
                let tokens = model.text.tokenizer.encode_prompt(text);
                tokens.map_err(|error| text_error(field, error))
            })
            .collect(),
        Prompt::Tokens(prompts) => {
            // The engine indexes its embedding by the id.
            if prompts.iter().flatten().any(|&token| token >= model.vocabulary) {
                let message = format!(
                    "'{field}' holds a token id that the model does not have: it has {}.",
                    model.vocabulary
                );
                return Err(Refusal::invalid(field, message).into());
            }
            Ok(prompts.clone())
        }
    }
}

fn encode_messages(
    messages: &[ChatMessage],
    field: &'static str,
    model: &ServedModel,
    now: UtcTime,
) -> Result<Vec<u32>, RequestError> {
    let Some(template) = &model.template else {
        let message =
            format!("The model '{}' has no chat template: use /v1/completions.", model.name);
        return Err(Refusal::invalid("model", message).into());
    };
    encode_chat(&model.text.tokenizer, template, messages, now)
        .map_err(|error| text_error(field, error))
}

/// Refuses a text that cannot fit whatever its tokens are, before time is spent
/// on tokenizing it.
fn check_bytes(bytes: usize, field: &'static str, model: &ServedModel) -> Result<(), Refusal> {
    let longest_token = model.text.longest_token.max(1);
    // A normalizer may shorten a text, by a factor of four at most.
    let most = (model.context_length as usize).saturating_mul(longest_token).saturating_mul(4);
    if bytes <= most {
        return Ok(());
    }
    Err(Refusal::ContextLength {
        field,
        limit: u64::from(model.context_length),
        prompt: (bytes / longest_token) as u64,
        completion: None,
    })
}

/// Turns an error of the text crate into an error of the request. An error of the
/// model's own files is a fault of the gateway.
fn text_error(field: &'static str, error: TextError) -> RequestError {
    match error {
        TextError::Refused(_)
        | TextError::NoMark
        | TextError::Allowance(_)
        | TextError::Encode(_) => Refusal::invalid(field, error.to_string()).into(),
        TextError::Tokenizer(_)
        | TextError::Decoder(_)
        | TextError::Config(_)
        | TextError::Template { .. } => {
            tracing::error!(error = %error, "template or tokenizer of a model failed; the request fails");
            Fault::Internal.into()
        }
    }
}

fn echoes(prompt: &Prompt, prompts: &[Vec<u32>], model: &ServedModel) -> Vec<PromptEcho> {
    let tokenizer = &model.text.tokenizer;
    prompts
        .iter()
        .enumerate()
        .map(|(index, tokens)| PromptEcho {
            text: match prompt {
                Prompt::Texts(texts) => texts[index].clone(),
                _ => tokenizer.decode(tokens),
            },
            first_token: match tokens.first() {
                Some(&token) if !tokenizer.is_control(token) => {
                    tokenizer.token_bytes(token).to_vec()
                }
                // The tokenizer added a control token that the client did not write.
                _ => Vec::new(),
            },
        })
        .collect()
}
