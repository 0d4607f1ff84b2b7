//! The step from a parsed request to a job, and to the facts that its response
//! repeats. Response facts travel beside the job, which knows no API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tollgate_domain::{Grammar, RequestId, SamplingDefaults, Tier, ToolFormat, UtcTime};
use tollgate_openai::{CompletionRequest, Echo, Interface, ResponseMeta};
use tollgate_serving::job::{Delivery, Job};
use tollgate_serving::tokenize::{PromptEcho, TokenizeRequest, Tokenized};
use tollgate_text::{AnswerSyntax, Prompt, ReasoningSyntax, ToolSignatures, tool_markers};

/// The facts of a request that its body does not hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestFacts {
    /// The dialect of the API in which the client asked.
    pub(super) interface: &'static dyn Interface,
    /// The date that a chat template may print, and the response's `created`.
    pub(super) now: UtcTime,
    /// Tokens of an answer if the request names no limit.
    pub(super) default_max_tokens: u32,
    /// The model's parameters for requests that name none.
    pub(super) sampling_defaults: SamplingDefaults,
    /// Time in which the body arrived.
    pub(super) read: Duration,
    /// The moment when parsing began.
    pub(super) parsing_began: Instant,
    /// The form in which the model writes calls of tools, if it is known.
    pub(super) tool_format: Option<ToolFormat>,
    /// True if the model may reason before its answer.
    pub(super) thinks: bool,
}

/// The facts of a parsed request that its response needs.
#[derive(Clone, Debug)]
pub(super) struct ResponseFacts {
    interface: &'static dyn Interface,
    choices: u32,
    created: UtcTime,
    logprobs: bool,
    include_usage: bool,
    thinks: bool,
    tools: Option<(ToolFormat, Arc<ToolSignatures>)>,
    flex: bool,
}

impl ResponseFacts {
    /// Returns the facts of `request`.
    pub(super) fn of(request: &CompletionRequest, facts: &RequestFacts) -> Self {
        let signatures = request.tools.as_ref().map(|tools| Arc::new(tools.signatures()));
        Self {
            tools: facts.tool_format.zip(signatures),
            thinks: facts.thinks
                // Text of `/v1/completions` passes no chat template, so nothing marks reasoning.
                && matches!(request.prompt, Prompt::Chat(_))
                && !is_form_from_start(request.sampling.grammar.as_ref()),
            interface: facts.interface,
            choices: request.choices,
            created: facts.now,
            logprobs: request.sampling.top_logprobs.is_some(),
            include_usage: request.stream.is_some_and(|stream| stream.include_usage),
            flex: request.tier == Tier::Batch,
        }
    }

    /// Completes the facts with those of the job.
    pub(super) fn meta(self, tokenized: Tokenized) -> (Job, ResponseMeta) {
        let Self { interface, choices, created, logprobs, include_usage, thinks, tools, flex } =
            self;
        let Tokenized { job, echoes, opens_reasoning } = tokenized;
        let reasoning = match (thinks, opens_reasoning) {
            (false, _) => ReasoningSyntax::Absent,
            (true, false) => ReasoningSyntax::Marked,
            (true, true) => ReasoningSyntax::Open,
        };
        let meta = ResponseMeta {
            id: interface.response_id(job.id()),
            created: created.unix_seconds(),
            model: job.model().name.as_str().to_owned(),
            fingerprint: weights_fingerprint(&job),
            choices,
            echoes: echoes.into_iter().map(echo).collect(),
            prompts: job.prompts(),
            logprobs,
            include_usage,
            answer: AnswerSyntax { tools, reasoning },
            flex,
        };
        (job, meta)
    }
}

/// Returns true if the form of the answer begins with its first token, so that the model
/// cannot reason before.
fn is_form_from_start(grammar: Option<&Grammar>) -> bool {
    match grammar {
        None => false,
        // Beside free text, calls are optional, and the model may reason before both.
        Some(Grammar::Calls(calls)) => calls.required || calls.content.is_some(),
        Some(_) => true,
    }
}

/// Turns a parsed request into one that can be tokenized.
pub(super) fn tokenize_request(
    id: RequestId,
    request: CompletionRequest,
    facts: RequestFacts,
) -> TokenizeRequest {
    // Exhaustive, so that a new field of the request cannot be lost on the way to the worker.
    let CompletionRequest {
        // The model was looked up by this name already.
        model: _,
        prompt,
        choices,
        max_tokens,
        sampling,
        stop,
        stream,
        echo,
        tools,
        tier,
    } = request;
    let RequestFacts {
        interface,
        now,
        default_max_tokens,
        sampling_defaults,
        read,
        parsing_began,
        tool_format,
        thinks: _,
    } = facts;
    let calls = tools.and(tool_format);
    // A request without a form has none to refuse, so any name serves.
    let form_field = sampling.form_field.unwrap_or("response_format");
    TokenizeRequest {
        id,
        prompt,
        prompt_field: interface.prompt_field(),
        form_field,
        choices,
        max_tokens: max_tokens.map(|most| most.tokens),
        default_max_tokens,
        sampling: sampling.resolve(sampling_defaults),
        stop,
        // The decoder hides control tokens, and calls are found by these markers.
        shown_markers: calls.map_or(&[], tool_markers),
        delivery: if stream.is_some() { Delivery::Streamed } else { Delivery::Whole },
        echo,
        tier,
        now,
        read,
        parsing_began,
    }
}

/// Returns the value of `system_fingerprint`, which names the weights.
fn weights_fingerprint(job: &Job) -> String {
    let hash = &job.model().hash;
    // The worker announces the hash, so it may be shorter than ten bytes.
    format!("fp_{}", hash.get(..10).unwrap_or(hash))
}

fn echo(echo: PromptEcho) -> Echo {
    let PromptEcho { text, first_token } = echo;
    Echo { text, first_token }
}
