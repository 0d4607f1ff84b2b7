//! An answer as a stream of server-sent events: each event of a request
//! becomes zero or more `data:` lines. Nothing else is ever written but
//! comments: SDKs die of an `event:` without data and of an empty `data:`.

use serde::Serialize;

use super::asked::Dialect;
use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use super::telling::{Telling, UsageBody, finish_reason};
use tollgate_domain::{StopReason, TextDelta, TokenLogprob};

use crate::pump::Receipt;
use crate::reply::ApiError;

/// What says that the connection lives while nothing is to be told.
pub(crate) const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Writes the chunks of one answer.
#[derive(Debug)]
pub(crate) struct Chunks {
    telling: Telling,
    choices: Vec<Told>,
}

/// What one choice has told.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    begun: bool,
    /// Characters, echo included.
    offset: u64,
}

impl Chunks {
    /// A stream in the frame of `telling`.
    pub(crate) fn new(telling: Telling) -> Self {
        let choices = vec![Told::default(); telling.all_choices() as usize];
        Self { telling, choices }
    }

    /// Writes text and tokens of a choice. Tokens that are not whole
    /// characters yet are told when they are.
    pub(crate) fn delta(&mut self, delta: &TextDelta, out: &mut Vec<u8>) {
        let choice = delta.choice;
        if !self.begin(choice, out) || delta.text.is_empty() && delta.logprobs.is_empty() {
            return;
        }
        let part = match self.telling.dialect {
            Dialect::Chat => Part::Chat {
                index: choice,
                delta: ChatDelta { role: None, content: Some(&delta.text) },
                logprobs: self.telling.logprobs.then(|| ChatLogprobs::of(&delta.logprobs)),
                finish_reason: None,
            },
            Dialect::Completion => {
                let told = &mut self.choices[choice as usize];
                let mut logprobs = CompletionLogprobs::default();
                told.offset = logprobs.push(&delta.logprobs, told.offset);
                Part::Completion {
                    text: &delta.text,
                    index: choice,
                    logprobs: self.telling.logprobs.then_some(logprobs),
                    finish_reason: None,
                }
            }
        };
        self.telling.write(part, out);
    }

    /// Writes an echoed prompt with its log-probabilities, once for each of
    /// its choices.
    pub(crate) fn prompt_logprobs(
        &mut self,
        prompt: u32,
        tokens: &[TokenLogprob],
        out: &mut Vec<u8>,
    ) {
        for index in self.telling.choices_of(prompt) {
            let (Some(echo), Some(told)) =
                (self.telling.echo(index), self.choices.get_mut(index as usize))
            else {
                continue;
            };
            let mut logprobs = CompletionLogprobs::default();
            let offset = logprobs.push_first(&echo.first);
            *told = Told { begun: true, offset: logprobs.push(tokens, offset) };
            let part = Part::Completion {
                text: &echo.text,
                index,
                logprobs: Some(logprobs),
                finish_reason: None,
            };
            self.telling.write(part, out);
        }
    }

    /// Writes that a choice ended.
    pub(crate) fn finished(&mut self, choice: u32, ending: StopReason, out: &mut Vec<u8>) {
        if !self.begin(choice, out) {
            return;
        }
        let finish_reason = Some(finish_reason(ending));
        let part = match self.telling.dialect {
            Dialect::Chat => Part::Chat {
                index: choice,
                delta: ChatDelta::default(),
                logprobs: None,
                finish_reason,
            },
            Dialect::Completion => {
                Part::Completion { text: "", index: choice, logprobs: None, finish_reason }
            }
        };
        self.telling.write(part, out);
    }

    /// Writes the usage, where it was asked for, and the end.
    pub(crate) fn end(&self, receipt: &Receipt, out: &mut Vec<u8>) {
        if self.telling.include_usage {
            self.telling.write_usage(receipt, out);
        }
        out.extend_from_slice(DONE);
    }

    /// Writes what went wrong, and the end.
    pub(crate) fn fail(&self, error: &ApiError, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&error.envelope().to_json());
        out.extend_from_slice(b"\n\n");
        out.extend_from_slice(DONE);
    }

    /// Writes what stands first in a choice, once; false where there is no
    /// such choice.
    fn begin(&mut self, choice: u32, out: &mut Vec<u8>) -> bool {
        let Some(told) = self.choices.get_mut(choice as usize) else { return false };
        if std::mem::replace(&mut told.begun, true) {
            return true;
        }
        match (self.telling.dialect, self.telling.echo(choice)) {
            (Dialect::Chat, _) => {
                let delta = ChatDelta { role: Some("assistant"), content: Some("") };
                let part = Part::Chat { index: choice, delta, logprobs: None, finish_reason: None };
                self.telling.write(part, out);
            }
            (Dialect::Completion, Some(echo)) => {
                told.offset = echo.text.chars().count() as u64;
                let part = Part::Completion {
                    text: &echo.text,
                    index: choice,
                    logprobs: None,
                    finish_reason: None,
                };
                self.telling.write(part, out);
            }
            (Dialect::Completion, None) => {}
        }
        true
    }
}

impl Telling {
    fn write(&self, part: Part<'_>, out: &mut Vec<u8>) {
        // With include_usage each chunk but the last says that it has none.
        self.write_chunk(&[part], self.include_usage.then_some(None), out);
    }

    fn write_usage(&self, receipt: &Receipt, out: &mut Vec<u8>) {
        self.write_chunk(&[], Some(Some(UsageBody::of(receipt))), out);
    }

    fn write_chunk(
        &self,
        choices: &[Part<'_>],
        usage: Option<Option<UsageBody<'_>>>,
        out: &mut Vec<u8>,
    ) {
        let chunk = Chunk {
            id: &self.id,
            object: match self.dialect {
                Dialect::Chat => "chat.completion.chunk",
                Dialect::Completion => "text_completion",
            },
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage,
        };
        out.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut *out, &chunk).expect("strings and finite numbers serialise");
        out.extend_from_slice(b"\n\n");
    }
}

const DONE: &[u8] = b"data: [DONE]\n\n";

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [Part<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody<'a>>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Part<'a> {
    Chat {
        index: u32,
        delta: ChatDelta<'a>,
        logprobs: Option<ChatLogprobs>,
        finish_reason: Option<&'static str>,
    },
    Completion {
        text: &'a str,
        index: u32,
        logprobs: Option<CompletionLogprobs>,
        finish_reason: Option<&'static str>,
    },
}

#[derive(Default, Serialize)]
struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}
