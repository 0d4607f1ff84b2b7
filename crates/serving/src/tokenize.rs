//! Prompts become tokens, and requests become jobs.
//!
//! Parsing, rendering and tokenizing run on a bounded number of threads: a small
//! request on the thread that has received it, a larger one on the blocking pool, so
//! that it does not delay other connections. The owner of device shares that has used
//! the least time is served next.

mod fair_queue;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tollgate_domain::{RequestId, Sampling, Tier, UtcTime};
use tollgate_text::{Chat, InfillTokens, Prompt, TextError, TextWithGap, encode_chat};

use self::fair_queue::{FairQueue, Slot, no_turn};
use crate::error::{Fault, Refusal, RequestError};
use crate::job::{Delivery, Job};
use crate::limits::ShareOwner;
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
    /// The field that asks for the form of the answer, for refusals of that form.
    pub form_field: &'static str,
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
    /// Texts that the answer shows even if the model has control tokens for them.
    pub shown_markers: &'static [&'static str],
    /// The way in which the client takes the answer.
    pub delivery: Delivery,
    /// True if the answer repeats the prompts.
    pub echo: bool,
    /// The class of service.
    pub tier: Tier,
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
    /// True if the prompt has begun the model's reasoning, which the answer goes on with.
    pub opens_reasoning: bool,
}

/// A prompt as an answer repeats it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptEcho {
    /// The whole prompt as text.
    pub text: String,
    /// The bytes of the prompt's first token; empty for a control token.
    pub first_token: Vec<u8>,
}

/// The largest body, in bytes, that is worked on by the thread that has received it.
/// Such a request takes less time than the change to another thread and back.
const SMALL_WORK: usize = 4 * 1024;

/// The largest body, in bytes, that is worked on beside others on every core. The tokenizer
/// takes about a hundred bytes of memory for each byte of text.
const LARGEST_BESIDE_OTHERS: usize = 64 * 1024;
/// Cores for each large body that is worked on at once.
const CORES_PER_LARGE: usize = 4;

/// The bounded set of threads on which bodies and prompts become tokens.
#[derive(Debug)]
pub struct TokenizePool {
    queue: FairQueue,
    /// In front of `queue`, for large bodies.
    large: FairQueue,
}

impl TokenizePool {
    /// Makes a pool that works on as many requests at once as there are cores. Few of them
    /// may have large bodies, which bounds the memory.
    pub fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let large = cores.div_ceil(CORES_PER_LARGE);
        Self { queue: FairQueue::new(cores), large: FairQueue::new(large) }
    }

    /// Runs `work` on a body of `bytes` bytes when it is the turn of `owner`, which owns the
    /// request's share of the devices. The time of the work counts against `owner` there.
    /// The work gets a token that is cancelled if the client leaves: then it should end.
    ///
    /// # Errors
    /// The turn has not come within `timeout`, or the work panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        owner: &ShareOwner,
        timeout: Duration,
        bytes: usize,
        work: impl FnOnce(&CancellationToken) -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        let slots = tokio::time::timeout(timeout, self.acquire(owner, timeout, bytes)).await;
        let slot = slots.unwrap_or_else(|_| Err(no_turn()))?;
        let abandoned = CancellationToken::new();
        if bytes <= SMALL_WORK {
            // Kept until the work is done: its drop charges the time to the owner.
            let _slot = slot;
            // The work owns everything that it changes, so a panic leaves nothing half done.
            let done = catch_unwind(AssertUnwindSafe(|| work(&abandoned)));
            return done.map_err(|_| RequestError::INTERNAL);
        }
        // A client that leaves drops this future.
        let _client = abandoned.clone().drop_guard();
        let done = tokio::task::spawn_blocking(move || {
            // The slot is held until the work is done, even if the client has left:
            // the thread is busy until then.
            let _slot = slot;
            work(&abandoned)
        });
        done.await.map_err(|_| RequestError::INTERNAL)
    }

    /// Waits for a thread, and before that for the turn among large bodies.
    async fn acquire(
        &self,
        owner: &ShareOwner,
        timeout: Duration,
        bytes: usize,
    ) -> Result<(Slot, Option<Slot>), RequestError> {
        let large = match bytes > LARGEST_BESIDE_OTHERS {
            true => Some(self.large.acquire(owner, timeout).await?),
            false => None,
        };
        Ok((self.queue.acquire(owner, timeout).await?, large))
    }

    /// Returns the number of requests that wait for a thread.
    pub fn waiting(&self) -> usize {
        self.queue.waiting() + self.large.waiting()
    }
}

impl Default for TokenizePool {
    fn default() -> Self {
        Self::new()
    }
}

/// Checks that the model has all `tokens` of the field `param`.
fn check_tokens<'a>(
    param: &'static str,
    mut tokens: impl Iterator<Item = &'a u32>,
    model: &ServedModel,
) -> Result<(), Refusal> {
    let Some(token) = tokens.find(|&&token| token >= model.vocabulary) else { return Ok(()) };
    let all = model.vocabulary;
    let message = format!("'{param}' names token {token}; the model has {all} tokens.");
    Err(Refusal::invalid(param, message))
}

/// Turns `request` into a job for `model`. The time is bounded by the size of the
/// request and the context of the model; call this on a [`TokenizePool`]. It ends
/// before the next prompt once `abandoned` is cancelled.
///
/// # Errors
/// The request does not fit the model, or no client waits for it any more.
pub fn tokenize(
    request: TokenizeRequest,
    model: Arc<ServedModel>,
    abandoned: &CancellationToken,
) -> Result<Tokenized, RequestError> {
    // Checked here, because only the model tells how many tokens there are.
    let sampling = &request.sampling;
    check_tokens("logit_bias", sampling.logit_bias.keys(), &model)?;
    check_tokens("stop_token_ids", sampling.stop_tokens.iter(), &model)?;
    let prompts = encode(&request, &model, abandoned)?;
    let max_tokens = max_tokens(&request, &prompts, &model)?;
    let echoes = if request.echo { echoes(&request.prompt, &prompts, &model) } else { Vec::new() };
    // Only an answer with the prompts can show their log-probabilities, which cost device time.
    let scores_prompts = !echoes.is_empty() && sampling.top_logprobs.is_some();
    let opens_reasoning =
        matches!(request.prompt, Prompt::Chat(_)) && ends_in_reasoning(&prompts, &model);
    let shown_tokens = shown_tokens(request.shown_markers, &model);
    let TokenizeRequest {
        id,
        prompt_field,
        form_field,
        choices,
        sampling,
        stop,
        delivery,
        tier,
        ..
    } = request;
    let timings = FrontTimings { read: request.read, preprocess: request.parsing_began.elapsed() };
    let job = Job {
        id,
        model,
        prompts,
        prompt_field,
        form_field,
        choices,
        max_tokens,
        sampling,
        stop,
        shown_tokens,
        delivery,
        tier,
        scores_prompts,
        timings,
    };
    Ok(Tokenized { job, echoes, opens_reasoning })
}

/// Returns true if the only prompt ends with the marker that begins reasoning.
fn ends_in_reasoning(prompts: &[Vec<u32>], model: &ServedModel) -> bool {
    let [prompt] = prompts else { return false };
    // The marker has at most a token for each byte, and white space may follow.
    let tail = &prompt[prompt.len().saturating_sub(16)..];
    model.text.tokenizer.decode(tail).trim_end().ends_with("<think>")
}

/// Returns the control tokens that the model has for `markers`.
fn shown_tokens(markers: &[&str], model: &ServedModel) -> Vec<u32> {
    let tokenizer = &model.text.tokenizer;
    let ids = markers.iter().filter_map(|marker| tokenizer.token_id(marker));
    ids.filter(|&id| tokenizer.is_control(id)).collect()
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
    request: &TokenizeRequest,
    model: &ServedModel,
    abandoned: &CancellationToken,
) -> Result<Vec<Vec<u32>>, RequestError> {
    let field = request.prompt_field;
    check_wanted(abandoned)?;
    match &request.prompt {
        Prompt::Chat(chat) => {
            check_bytes(content_bytes(chat), field, model)?;
            encode_messages(chat, field, model, request.now).map(|prompt| vec![prompt])
        }
        Prompt::Texts(texts) => texts
            .iter()
            .map(|text| {
                check_wanted(abandoned)?;
                check_bytes(text.len(), field, model)?;
                let tokens =
                    model.text.tokenizer.encode_prompt(text, model.context_length as usize);
                tokens.map_err(|error| text_error(field, model, error))
            })
            .collect(),
        Prompt::Infill { before, after } => {
            let Some(tokens) = InfillTokens::of(&model.text.tokenizer) else {
                let message = format!(
                    "The model '{}' cannot fill in the middle: leave 'suffix' out.",
                    model.name
                );
                return Err(Refusal::invalid("suffix", message).into());
            };
            let encode = |before: &String| {
                check_wanted(abandoned)?;
                check_bytes(before.len() + after.len(), field, model)?;
                let (text, most) = (TextWithGap { before, after }, model.context_length as usize);
                let encoded = tokens.encode(&model.text.tokenizer, text, most);
                encoded.map_err(|error| text_error(field, model, error))
            };
            before.iter().map(encode).collect()
        }
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

/// Returns the bytes of the messages' texts, which every template prints.
fn content_bytes(chat: &Chat) -> usize {
    chat.messages.iter().map(|message| message.content.len()).sum()
}

/// Ends host work that no client waits for.
///
/// # Errors
/// The client has left. No client gets the error.
pub fn check_wanted(abandoned: &CancellationToken) -> Result<(), RequestError> {
    if abandoned.is_cancelled() { Err(RequestError::INTERNAL) } else { Ok(()) }
}

fn encode_messages(
    chat: &Chat,
    field: &'static str,
    model: &ServedModel,
    now: UtcTime,
) -> Result<Vec<u32>, RequestError> {
    let Some(template) = &model.template else {
        let message =
            format!("The model '{}' has no chat template: use /v1/completions.", model.name);
        return Err(Refusal::invalid("model", message).into());
    };
    encode_chat(&model.text.tokenizer, template, chat, now, model.context_length as usize).map_err(
        |error| match error {
            // A template can fail because of a client's argument, of a type that it does not
            // expect, and is then not at fault.
            TextError::Template { .. } | TextError::Argument { .. }
                if !chat.arguments.is_empty() =>
            {
                argument_error(&error).into()
            }
            error => text_error(field, model, error),
        },
    )
}

/// Returns the refusal of arguments that the chat template failed with.
fn argument_error(error: &TextError) -> Refusal {
    // The message may quote an argument at length.
    let reason: String = error.to_string().chars().take(500).collect();
    let message = format!("The model's chat template cannot use 'chat_template_kwargs': {reason}.");
    Refusal::invalid("chat_template_kwargs", message)
}

/// Refuses a text that cannot fit whatever its tokens are, before time is spent
/// on tokenizing it.
fn check_bytes(bytes: usize, field: &'static str, model: &ServedModel) -> Result<(), Refusal> {
    // A normalizer may shorten a text, by a factor of four at most.
    let most_of_a_token = model.text.longest_token.max(1).saturating_mul(4);
    let tokens = bytes.div_ceil(most_of_a_token);
    if tokens <= model.context_length as usize {
        return Ok(());
    }
    Err(too_long(field, model, tokens))
}

/// Returns the refusal of a prompt of `tokens` or more, which leaves no room for an
/// answer.
fn too_long(field: &'static str, model: &ServedModel, tokens: usize) -> Refusal {
    Refusal::ContextLength {
        field,
        limit: u64::from(model.context_length),
        prompt: tokens as u64,
        completion: None,
    }
}

/// Turns an error of the text crate into an error of the request. An error of the
/// model's own files is a fault of the gateway.
fn text_error(field: &'static str, model: &ServedModel, error: TextError) -> RequestError {
    match error {
        TextError::TooLong { at_least } => too_long(field, model, at_least).into(),
        TextError::Refused(_)
        | TextError::NoMark
        | TextError::Argument { .. }
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
                // As the client wrote it: a normalizer may have changed the text before it
                // became tokens.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;
    use tollgate_domain::TenantId;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const LARGE: usize = SMALL_WORK + 1;

    #[tokio::test]
    async fn small_work_stays_on_its_thread() {
        let owner = owner();
        let pool = TokenizePool::new();
        let here = std::thread::current().id();
        let thread = |_: &CancellationToken| std::thread::current().id();
        assert_eq!(pool.run(&owner, LONG, SMALL_WORK, thread).await, Ok(here));
        // The control: larger work does not delay the connections of the thread.
        assert_ne!(pool.run(&owner, LONG, LARGE, thread).await, Ok(here));
    }

    /// The tokenizer's memory is bounded by the number of large bodies that it works on.
    #[tokio::test]
    async fn large_bodies_wait_for_one_another() {
        let pool = TokenizePool { queue: FairQueue::new(4), large: FairQueue::new(1) };
        let owner = owner();
        let (at_once, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let run = |bytes: usize| {
            let (at_once, most) = (Arc::clone(&at_once), Arc::clone(&most));
            pool.run(&owner, LONG, bytes, move |_: &CancellationToken| {
                most.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(20));
                at_once.fetch_sub(1, Ordering::SeqCst);
            })
        };
        let bytes = LARGEST_BESIDE_OTHERS + 1;
        assert_eq!(tokio::join!(run(bytes), run(bytes), run(bytes)), (Ok(()), Ok(()), Ok(())));
        assert_eq!(most.swap(0, Ordering::SeqCst), 1);
        // A small one does not wait for them, and the control: smaller ones run together.
        assert_eq!(tokio::join!(run(bytes), run(LARGE), run(LARGE)), (Ok(()), Ok(()), Ok(())));
        assert!(most.load(Ordering::SeqCst) > 1);
        assert_eq!(pool.waiting(), 0);
    }

    #[tokio::test]
    async fn panicking_work_is_a_fault_alone() {
        let owner = owner();
        let pool = TokenizePool::new();
        for bytes in [0, LARGE] {
            let work = |_: &CancellationToken| -> () { panic!("a defect in the work") };
            assert_eq!(pool.run(&owner, LONG, bytes, work).await, Err(RequestError::INTERNAL));
            // The slot is free again.
            assert_eq!(pool.run(&owner, LONG, bytes, check_wanted).await, Ok(Ok(())));
        }
    }

    #[tokio::test]
    async fn work_learns_that_its_client_left() {
        let owner = owner();
        let pool = TokenizePool::new();
        let (begun, has_begun) = oneshot::channel();
        let (ended, has_ended) = oneshot::channel();
        let running = pool.run(&owner, LONG, LARGE, move |abandoned| {
            begun.send(()).expect("the test waits");
            while !abandoned.is_cancelled() {
                std::thread::yield_now();
            }
            ended.send(check_wanted(abandoned)).expect("the test waits");
        });
        // The drop of the other future is the client's leave.
        tokio::select! {
            result = running => panic!("the work ended with its client there: {result:?}"),
            begun = has_begun => begun.expect("the work begins"),
        }
        assert_eq!(has_ended.await, Ok(Err(RequestError::INTERNAL)));
        // The control: a client that waits has its work done.
        assert_eq!(pool.run(&owner, LONG, LARGE, check_wanted).await, Ok(Ok(())));
    }

    fn owner() -> ShareOwner {
        ShareOwner::Tenant(TenantId::new("acme").expect("a name"))
    }
}
