//! The step from sampled tokens to events for the gateway: decodes text, matches
//! stop strings, fills in events. Runs on the engine's thread and never waits.

use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{FinishReason, Transfers};
use tollgate_engine::grammar::RequestGrammar;
use tollgate_engine::{
    Flow, GeneratedToken, PromptLogprob, Refusal, RefusedReason, RequestOutcome, Stages,
    TokenLogprobs, TokenSink,
};
use tollgate_text::{Released, StopMatcher, TextStream, Tokenizer};
use tollgate_wire::v1;
use tollgate_wire::v1::run_event::Event;

use crate::assignment::Work;
use crate::open_attempts::OpenAttempt;
use crate::outbox::Outbox;

/// The sink of one request's tokens.
pub(crate) struct Sink {
    tokenizer: Arc<Tokenizer>,
    choices: Vec<Choice>,
    /// The request's grammar, which knows its host time.
    grammar: Option<RequestGrammar>,
    outbox: Outbox,
    /// The request's device time as of its last token, in nanoseconds.
    attributed_ns: u64,
    reference_ns: u64,
    /// Dropped with the sink, after the engine has journalled the request's end.
    #[expect(dead_code, reason = "it acts when it is dropped")]
    attempt: Option<OpenAttempt>,
}

struct Choice {
    text: TextStream,
    stops: StopMatcher,
}

impl Sink {
    /// Creates the sink of `work`, which is `attempt`. Each choice is decoded by a copy of `text`,
    /// which has no tokens yet.
    pub(crate) fn new(
        text: TextStream,
        (work, attempt): (&Work, Option<OpenAttempt>),
        outbox: Outbox,
    ) -> Self {
        let choice =
            |_| Choice { text: text.clone(), stops: StopMatcher::new(work.stops.iter().cloned()) };
        let choices = (0..work.choices).map(choice).collect();
        let (tokenizer, grammar) = (Arc::clone(text.tokenizer()), work.constraint());
        Self { tokenizer, choices, grammar, outbox, attributed_ns: 0, reference_ns: 0, attempt }
    }

    fn logprob(&self, token: u32, logprobs: TokenLogprobs) -> v1::TokenLogprob {
        let bytes = |token| self.tokenizer.token_bytes(token).to_vec();
        v1::TokenLogprob {
            token,
            bytes: bytes(token),
            logprob: logprobs.logprob,
            top: logprobs
                .top
                .into_iter()
                .map(|(token, logprob)| v1::TopLogprob { token, bytes: bytes(token), logprob })
                .collect(),
        }
    }
}

impl TokenSink for Sink {
    fn prompt_logprobs(&mut self, prompt: u32, logprobs: Vec<PromptLogprob>) {
        let logprobs = logprobs.into_iter().map(|it| self.logprob(it.token, it.logprobs)).collect();
        self.outbox.push(Event::PromptLogprobs(v1::PromptLogprobs { prompt, logprobs }));
    }

    fn token(&mut self, choice: u32, token: GeneratedToken) -> Flow {
        let GeneratedToken { token: id, end, logprobs, attributed, reference } = token;
        // The engine numbers the choices of the same assignment, so the index is in
        // range.
        let state = &mut self.choices[choice as usize];
        // An end token has no text for the client.
        let released = if end {
            Released { text: String::new(), stopped: false }
        } else {
            let text = state.text.push(id);
            state.stops.push(&text)
        };
        (self.attributed_ns, self.reference_ns) = (attributed.nanos(), reference.nanos());
        self.outbox.push_delta(v1::Delta {
            choice,
            text: released.text,
            // Also for an end token: the bill counts it, and the gateway compares the two numbers.
            tokens: vec![id],
            logprobs: logprobs.map(|logprobs| self.logprob(id, logprobs)).into_iter().collect(),
            attributed_ns: self.attributed_ns,
            reference_ns: self.reference_ns,
            text_bytes: Vec::new(),
        });
        if released.stopped { Flow::Stop } else { Flow::Continue }
    }

    fn finished(&mut self, choice: u32, reason: FinishReason, completion_tokens: u32) {
        let state = &mut self.choices[choice as usize];
        // After a stop string, no further text may reach the client.
        if !state.stops.is_stopped() {
            // The decoder and the matcher may still hold text: an incomplete
            // character, or the beginning of a stop string.
            let rest = state.text.finish();
            let mut text = state.stops.push(&rest).text;
            text.push_str(&state.stops.finish());
            if !text.is_empty() {
                self.outbox.push_delta(v1::Delta {
                    choice,
                    text,
                    attributed_ns: self.attributed_ns,
                    reference_ns: self.reference_ns,
                    ..v1::Delta::default()
                });
            }
        }
        let reason = v1::FinishReason::from(reason).into();
        self.outbox.push(Event::ChoiceFinished(v1::ChoiceFinished {
            choice,
            reason,
            completion_tokens,
        }));
    }

    fn done(&mut self, outcome: RequestOutcome) {
        self.outbox.finish(match outcome {
            RequestOutcome::Finished { usage, stages } => {
                let Stages { queue_ns, prefill_ns, decode_ns, transfers } = stages;
                let spent = self.grammar.as_ref().map_or(Duration::ZERO, RequestGrammar::spent);
                Event::Finished(v1::Finished {
                    // 2^64 ns are 584 years.
                    grammar_ns: spent.as_nanos() as u64,
                    usage: Some(usage.into()),
                    stages: Some(v1::Stages { queue_ns, prefill_ns, decode_ns }),
                    transfers: transfers.map(|Transfers { to_device, to_host }| v1::Transfers {
                        to_device_ns: to_device.nanos(),
                        to_host_ns: to_host.nanos(),
                    }),
                })
            }
            RequestOutcome::Refused(refusal) => Event::Refused(refused(refusal)),
        });
    }
}

/// Converts a refusal to its message.
pub(crate) fn refused(refusal: Refusal) -> v1::Refused {
    let Refusal { reason, retry_after, message } = refusal;
    let reason = match reason {
        RefusedReason::Overloaded => v1::RefusedReason::Overloaded,
        RefusedReason::Deadline => v1::RefusedReason::Deadline,
        RefusedReason::Draining => v1::RefusedReason::Draining,
        RefusedReason::Invalid => v1::RefusedReason::Invalid,
        RefusedReason::Budget => v1::RefusedReason::Budget,
        RefusedReason::Grammar => v1::RefusedReason::Grammar,
    };
    let retry_after_ms = retry_after.map_or(0, |wait| wait.as_millis().min(86_400_000) as u64);
    v1::Refused { reason: reason.into(), retry_after_ms, message, grammar_ns: 0 }
}
