//! The facts that every part of one response repeats, and the complete response
//! for a dialect to render.

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::{StopReason, TextDelta, TokenLogprob, ToolFormat};
use tollgate_text::{AnswerParser, AnswerPiece, AnswerSyntax};

use crate::usage::UsageBody;
use crate::{FLEX, UsageReport, sse};

/// The frame of one response: the values that each chunk, or the whole
/// response, repeats.
#[derive(Clone, Debug)]
pub struct ResponseMeta {
    /// The response's id, from [`crate::Interface::response_id`].
    pub id: String,
    /// The time when the request arrived, in Unix seconds.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The name of the weights that answered.
    pub fingerprint: String,
    /// The number of choices for each prompt, at least 1.
    pub choices: u32,
    /// The prompts to repeat before the generated text: one for each prompt, or
    /// none at all.
    pub echoes: Vec<Echo>,
    /// The number of prompts.
    pub prompts: u32,
    /// True if the response reports log-probabilities.
    pub logprobs: bool,
    /// True if a stream reports its usage in a last chunk.
    pub include_usage: bool,
    /// The parts that the answers may have.
    pub answer: AnswerSyntax,
    /// True if the request asked for the batch tier, which the response repeats.
    pub flex: bool,
}

/// A prompt that the response repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Echo {
    /// The whole prompt.
    pub text: String,
    /// The bytes of the prompt's first token.
    pub first_token: Vec<u8>,
}

impl ResponseMeta {
    /// Returns the value of `service_tier`, if the response has one.
    fn service_tier(&self) -> Option<&'static str> {
        self.flex.then_some(FLEX)
    }

    /// Returns the number of choices over all prompts.
    pub(crate) fn all_choices(&self) -> u32 {
        // The config bounds both factors, so the product fits.
        self.prompts * self.choices
    }

    /// Returns the indices of the choices of prompt `prompt`; empty if there is
    /// no such prompt.
    pub(crate) fn choices_of(&self, prompt: u32) -> std::ops::Range<u32> {
        if prompt >= self.prompts {
            return 0..0;
        }
        // A choice's index is `prompt * n + i`, in the worker's protocol, too.
        prompt * self.choices..(prompt + 1) * self.choices
    }

    /// Returns the prompt that choice `choice` repeats, if it repeats one.
    pub(crate) fn echo(&self, choice: u32) -> Option<&Echo> {
        self.echoes.get((choice / self.choices) as usize)
    }

    /// Returns the id of a call. It is the same for each response with this response's id.
    pub(crate) fn call_id(&self, place: CallPlace) -> String {
        let bare = self.id.rsplit('-').next().unwrap_or_default();
        match self.answer.tools {
            // Templates of this family take ids of nine letters and digits alone.
            Some((ToolFormat::Mistral, _)) => short_id(bare, place),
            _ => format!("call_{bare}_{}_{}", place.choice, place.call),
        }
    }

    /// Appends a chunk with one choice.
    pub(crate) fn write_choice<C: Serialize>(
        &self,
        object: &'static str,
        choice: C,
        out: &mut Vec<u8>,
    ) {
        // Clients that asked for the usage expect `usage: null` in each chunk
        // before the last one.
        self.write_chunk(object, &[choice], self.include_usage.then_some(None), out);
    }

    /// Appends the chunk that reports the usage. It has no choices.
    pub(crate) fn write_usage(
        &self,
        object: &'static str,
        usage: UsageBody<'_>,
        out: &mut Vec<u8>,
    ) {
        self.write_chunk::<()>(object, &[], Some(Some(usage)), out);
    }

    fn write_chunk<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: Option<Option<UsageBody<'_>>>,
        out: &mut Vec<u8>,
    ) {
        let chunk = ChunkBody {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            service_tier: self.service_tier(),
            choices,
            usage,
        };
        sse::write_event(&chunk, out);
    }
}

/// One chunk as JSON, with the choices in the shape of a dialect.
#[derive(Serialize, JsonSchema)]
pub(crate) struct ChunkBody<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    choices: &'a [C],
    /// Absent, null, or the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody<'a>>>,
}

/// The place of a call in a response.
#[derive(Clone, Copy)]
pub(crate) struct CallPlace {
    /// The index of the choice.
    pub(crate) choice: u32,
    /// The index of the call in the choice.
    pub(crate) call: u32,
}

/// Returns nine letters and digits made of a response's id and the place of a call.
fn short_id(response: &str, CallPlace { choice, call }: CallPlace) -> String {
    // Calls of one conversation must differ, and nothing else depends on the id, so any
    // hash will do.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in format!("{response}/{choice}/{call}").bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    let mut id = String::with_capacity(9);
    for _ in 0..9 {
        id.push(char::from(DIGITS[(hash % 36) as usize]));
        hash /= 36;
    }
    id
}

const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// A call of a tool.
#[derive(Clone, Debug, Default)]
pub struct CollectedCall {
    /// The name of the tool.
    pub name: String,
    /// The arguments as the model wrote them.
    pub arguments: String,
}

/// The parts of one choice that have come so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct CollectedChoice {
    parser: Option<AnswerParser>,
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<CollectedCall>,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) end: Option<StopReason>,
}

impl CollectedChoice {
    /// Makes an empty choice whose answer has the parts of `syntax`.
    pub(crate) fn new(syntax: &AnswerSyntax) -> Self {
        Self { parser: syntax.parser(), ..Self::default() }
    }

    /// Adds text of the model.
    pub(crate) fn push(&mut self, delta: &TextDelta) {
        match &mut self.parser {
            None => self.text.push_str(&delta.text),
            Some(parser) => {
                let pieces = parser.push(delta);
                self.add(pieces);
            }
        }
    }

    /// Returns the number of tokens of reasoning so far.
    pub(crate) fn reasoning_tokens(&self) -> u64 {
        self.parser.as_ref().map_or(0, AnswerParser::reasoning_tokens)
    }

    /// Adds the text that the parser holds back.
    pub(crate) fn finish(&mut self) {
        let pieces = self.parser.as_mut().map(AnswerParser::finish);
        self.add(pieces.unwrap_or_default());
    }

    /// Returns true if the choice calls a tool and its last call is complete.
    fn has_called(&self) -> bool {
        self.parser.as_ref().is_some_and(AnswerParser::has_called)
    }

    fn add(&mut self, pieces: Vec<AnswerPiece>) {
        for piece in pieces {
            match piece {
                AnswerPiece::Content(text) => self.text.push_str(&text),
                AnswerPiece::Reasoning(text) => self.reasoning.push_str(&text),
                AnswerPiece::Call(name) => {
                    self.calls.push(CollectedCall { name, arguments: String::new() });
                }
                AnswerPiece::Arguments(text) => {
                    // The parser gives the name of a call before its arguments.
                    if let Some(call) = self.calls.last_mut() {
                        call.arguments.push_str(&text);
                    }
                }
            }
        }
    }
}

/// A complete response, for a dialect to render.
#[derive(Clone, Copy, Debug)]
pub struct WholeResponse<'a> {
    /// The frame of the response.
    pub meta: &'a ResponseMeta,
    /// The measured figures.
    pub usage: &'a UsageReport,
    /// The log-probabilities of each prompt's tokens after the first one.
    pub(crate) prompts: &'a [Vec<TokenLogprob>],
    pub(crate) choices: &'a [CollectedChoice],
}

/// One choice of a complete response.
#[derive(Clone, Copy, Debug)]
pub struct ResponseChoice<'a> {
    /// The index of the choice over all prompts.
    pub index: u32,
    /// The repeated prompt; empty if the response repeats none.
    pub echo: &'a str,
    /// The bytes of the repeated prompt's first token.
    pub first_token: Option<&'a [u8]>,
    /// The log-probabilities of the repeated prompt after its first token.
    pub prompt_logprobs: &'a [TokenLogprob],
    /// The generated text; without reasoning and calls, if those are told apart.
    pub text: &'a str,
    /// The reasoning; `None` if there is none.
    pub reasoning: Option<&'a str>,
    /// The calls of tools.
    pub calls: &'a [CollectedCall],
    /// True if there are calls and the last one is complete.
    pub called: bool,
    /// The log-probabilities of the generated tokens.
    pub logprobs: &'a [TokenLogprob],
    /// The reason why the choice ended.
    pub end: StopReason,
}

impl<'a> WholeResponse<'a> {
    /// Returns all choices in the order of their indices.
    pub fn choices(&self) -> impl Iterator<Item = ResponseChoice<'a>> {
        let Self { meta, prompts, choices, usage: _ } = *self;
        choices.iter().zip(0..).map(move |(choice, index)| {
            let echo = meta.echo(index);
            ResponseChoice {
                index,
                echo: echo.map_or("", |echo| &echo.text),
                first_token: echo.map(|echo| echo.first_token.as_slice()),
                // The prompts and the choices were made from the same counts, so the index fits.
                prompt_logprobs: &prompts[(index / meta.choices) as usize],
                text: &choice.text,
                reasoning: Some(choice.reasoning.as_str()).filter(|text| !text.is_empty()),
                calls: &choice.calls,
                called: choice.has_called(),
                logprobs: &choice.logprobs,
                // A worker ends each choice before it ends a request. A choice
                // without an end was cut short, so its text is incomplete.
                end: choice.end.unwrap_or(StopReason::Length),
            }
        })
    }
}

/// Renders `response` with `choices` in the shape of a dialect.
#[expect(
    clippy::expect_used,
    reason = "strings and finite numbers serialise, and writing to a vector does not fail"
)]
pub(crate) fn render<C: Serialize>(
    response: &WholeResponse<'_>,
    object: &'static str,
    choices: Vec<C>,
) -> Vec<u8> {
    let body = ResponseBody {
        id: &response.meta.id,
        object,
        created: response.meta.created,
        model: &response.meta.model,
        choices,
        usage: UsageBody::new(
            response.usage,
            response.choices.iter().map(CollectedChoice::reasoning_tokens).sum(),
        ),
        system_fingerprint: &response.meta.fingerprint,
        service_tier: response.meta.service_tier(),
    };
    serde_json::to_vec(&body).expect("strings and finite numbers serialise")
}

/// A response in one piece as JSON, with the choices in the shape of a dialect.
#[derive(Serialize, JsonSchema)]
pub(crate) struct ResponseBody<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    usage: UsageBody<'a>,
    system_fingerprint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
}
