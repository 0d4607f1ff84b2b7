//! An answer in one piece: events in, at the end one JSON object.

use serde::Serialize;

use super::asked::Dialect;
use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use super::telling::{Telling, UsageBody, finish_reason};
use tollgate_domain::{StopReason, TextDelta, TokenLogprob};

use crate::pump::Receipt;

/// Collects an answer choice by choice.
#[derive(Debug)]
pub(crate) struct Whole {
    telling: Telling,
    choices: Vec<Choice>,
}

#[derive(Debug, Default)]
struct Choice {
    text: String,
    chat_logprobs: ChatLogprobs,
    logprobs: CompletionLogprobs,
    /// Characters told so far, echo included.
    offset: u64,
    ending: Option<StopReason>,
}

impl Whole {
    /// An empty answer in the frame of `telling`.
    pub(crate) fn new(telling: Telling) -> Self {
        let choices =
            (0..telling.all_choices()).map(|index| Choice::new(&telling, index)).collect();
        Self { telling, choices }
    }

    /// Forgets all that was collected.
    pub(crate) fn restart(&mut self) {
        for (index, choice) in self.choices.iter_mut().enumerate() {
            *choice = Choice::new(&self.telling, index as u32);
        }
    }

    /// Text and tokens of a choice.
    pub(crate) fn delta(&mut self, delta: &TextDelta) {
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else { return };
        choice.text.push_str(&delta.text);
        match self.telling.dialect {
            Dialect::Chat => choice.chat_logprobs.push(&delta.logprobs),
            Dialect::Completion => {
                choice.offset = choice.logprobs.push(&delta.logprobs, choice.offset);
            }
        }
    }

    /// Log-probabilities of a prompt that is echoed.
    pub(crate) fn prompt_logprobs(&mut self, prompt: u32, tokens: &[TokenLogprob]) {
        for index in self.telling.choices_of(prompt) {
            let choice = &mut self.choices[index as usize];
            choice.offset = choice.logprobs.push(tokens, choice.offset);
        }
    }

    /// A choice ended.
    pub(crate) fn finished(&mut self, choice: u32, ending: StopReason) {
        if let Some(choice) = self.choices.get_mut(choice as usize) {
            choice.ending = Some(ending);
        }
    }

    /// The JSON of the answer.
    pub(crate) fn into_json(self, receipt: &Receipt) -> Vec<u8> {
        let Self { telling, choices } = self;
        let choices = choices.into_iter().enumerate();
        let body = |object, choices| Body {
            id: &telling.id,
            object,
            created: telling.created,
            model: &telling.model,
            choices,
            usage: UsageBody::of(receipt),
            system_fingerprint: &telling.fingerprint,
        };
        let choices = choices.map(|(index, choice)| choice.into_body(&telling, index)).collect();
        let object = match telling.dialect {
            Dialect::Chat => "chat.completion",
            Dialect::Completion => "text_completion",
        };
        serde_json::to_vec(&body(object, choices)).expect("strings and finite numbers serialise")
    }
}

impl Choice {
    fn new(telling: &Telling, index: u32) -> Self {
        let mut choice = Self::default();
        if let Some(echo) = telling.echo(index) {
            choice.text.push_str(&echo.text);
            choice.offset = choice.logprobs.push_first(&echo.first);
        }
        choice
    }

    fn into_body(self, telling: &Telling, index: usize) -> ChoiceBody {
        // A worker that ends a request ends its choices; one that did not
        // finish was cut short.
        let finish_reason = finish_reason(self.ending.unwrap_or(StopReason::Length));
        match telling.dialect {
            Dialect::Chat => ChoiceBody::Chat {
                index,
                message: Message { role: "assistant", content: self.text, refusal: () },
                logprobs: telling.logprobs.then_some(self.chat_logprobs),
                finish_reason,
            },
            Dialect::Completion => ChoiceBody::Completion {
                text: self.text,
                index,
                logprobs: telling.logprobs.then_some(self.logprobs),
                finish_reason,
            },
        }
    }
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceBody>,
    usage: UsageBody<'a>,
    system_fingerprint: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChoiceBody {
    Chat {
        index: usize,
        message: Message,
        logprobs: Option<ChatLogprobs>,
        finish_reason: &'static str,
    },
    Completion {
        text: String,
        index: usize,
        logprobs: Option<CompletionLogprobs>,
        finish_reason: &'static str,
    },
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: (),
}
