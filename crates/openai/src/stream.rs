//! A response as a stream of server-sent events. Each result of a request becomes
//! zero or more events.

use tollgate_domain::{StopReason, TextDelta, TokenLogprob};
use tollgate_text::{AnswerParser, AnswerPiece};

use crate::usage::UsageBody;
use crate::{ChunkPart, Interface, ResponseMeta, UsageReport, logprobs, sse};

/// Writes the events of one response.
#[derive(Debug)]
pub struct ChunkWriter {
    interface: &'static dyn Interface,
    meta: ResponseMeta,
    choices: Vec<ChoiceProgress>,
    /// Tokens of reasoning in all choices.
    reasoning_tokens: u64,
}

/// The progress of one choice.
#[derive(Clone, Debug, Default)]
struct ChoiceProgress {
    /// True once the first chunk of the choice is written.
    started: bool,
    /// Characters written so far, the repeated prompt included.
    offset: u64,
    /// The parser of the answer, if it may have more than content.
    parser: Option<AnswerParser>,
    /// Calls that have begun.
    calls: u32,
    /// Tokens whose text is held back by the parser.
    held: Vec<TokenLogprob>,
}

impl ChunkWriter {
    /// Makes a writer that has written nothing.
    pub fn new(interface: &'static dyn Interface, meta: ResponseMeta) -> Self {
        let choice = ChoiceProgress { parser: meta.answer.parser(), ..Default::default() };
        let choices = vec![choice; meta.all_choices() as usize];
        Self { interface, meta, choices, reasoning_tokens: 0 }
    }

    /// Appends text and tokens of a choice to `out`. An empty delta only starts
    /// the choice: its tokens are not whole characters yet and come later.
    pub fn delta(&mut self, delta: &TextDelta, out: &mut Vec<u8>) {
        let Some(offset) = self.start(delta.choice, out) else { return };
        if delta.text.is_empty() && delta.logprobs.is_empty() {
            return;
        }
        // `start` has found the choice, so the index fits.
        let progress = &mut self.choices[delta.choice as usize];
        if let Some(parser) = &mut progress.parser {
            let before = parser.reasoning_tokens();
            let pieces = parser.push(delta);
            self.reasoning_tokens += parser.reasoning_tokens() - before;
            progress.held.extend_from_slice(&delta.logprobs);
            self.pieces(delta.choice, &pieces, out);
            return;
        }
        let part = ChunkPart::Delta { delta, offset };
        self.interface.write_chunk(&self.meta, delta.choice, part, out);
        // The offset counts the characters of reported tokens; nothing reads it
        // when no log-probabilities are reported.
        self.choices[delta.choice as usize].offset += logprobs::characters(&delta.logprobs);
    }

    /// Appends a repeated prompt with its log-probabilities to `out`, once for
    /// each choice of the prompt.
    pub fn prompt_logprobs(&mut self, prompt: u32, tokens: &[TokenLogprob], out: &mut Vec<u8>) {
        // A client sees `n` independent choices, and each repeats the prompt.
        for choice in self.meta.choices_of(prompt) {
            let (Some(echo), Some(progress)) =
                (self.meta.echo(choice), self.choices.get_mut(choice as usize))
            else {
                continue;
            };
            let offset =
                logprobs::token_characters(&echo.first_token) + logprobs::characters(tokens);
            (progress.started, progress.offset) = (true, offset);
            let part = ChunkPart::ScoredPrompt { echo, tokens };
            self.interface.write_chunk(&self.meta, choice, part, out);
        }
    }

    /// Appends the end of a choice to `out`.
    pub fn finish_choice(&mut self, choice: u32, reason: StopReason, out: &mut Vec<u8>) {
        if self.start(choice, out).is_none() {
            return;
        }
        let progress = &mut self.choices[choice as usize];
        let mut called = false;
        if let Some(mut parser) = progress.parser.take() {
            let mut pieces = parser.finish();
            called = parser.has_called();
            // Every token is reported, also the last ones without text of their own.
            if pieces.is_empty() && !progress.held.is_empty() {
                pieces.push(AnswerPiece::Content(String::new()));
            }
            self.pieces(choice, &pieces, out);
        }
        self.interface.write_chunk(&self.meta, choice, ChunkPart::End { reason, called }, out);
    }

    /// Appends `pieces` of a choice. The tokens whose text was held back go with the first
    /// one.
    fn pieces(&mut self, choice: u32, pieces: &[AnswerPiece], out: &mut Vec<u8>) {
        for piece in pieces {
            let progress = &mut self.choices[choice as usize];
            progress.calls += u32::from(matches!(piece, AnswerPiece::Call(_)));
            let tokens = std::mem::take(&mut progress.held);
            let call = progress.calls.saturating_sub(1);
            let part = ChunkPart::Piece { piece, call, tokens: &tokens };
            self.interface.write_chunk(&self.meta, choice, part, out);
        }
    }

    /// Appends the usage, if the client asked for it, and the end of the stream.
    pub fn finish(&self, usage: &UsageReport, out: &mut Vec<u8>) {
        if self.meta.include_usage {
            self.meta.write_usage(
                self.interface.chunk_object(),
                UsageBody::new(usage, self.reasoning_tokens),
                out,
            );
        }
        sse::write_done(out);
    }

    /// Appends an error event and the end of the stream. `envelope` is the JSON
    /// object that a plain refusal would have as its body.
    pub fn fail(&self, envelope: &[u8], out: &mut Vec<u8>) {
        sse::write_json(envelope, out);
        sse::write_done(out);
    }

    /// Starts a choice unless it has started; returns its offset, or `None` if
    /// there is no such choice.
    fn start(&mut self, choice: u32, out: &mut Vec<u8>) -> Option<u64> {
        // The index comes from a worker, so it may be out of range.
        let progress = self.choices.get_mut(choice as usize)?;
        if progress.started {
            return Some(progress.offset);
        }
        let echo = self.meta.echo(choice);
        let offset = echo.map_or(0, |echo| echo.text.chars().count() as u64);
        (progress.started, progress.offset) = (true, offset);
        self.interface.write_chunk(&self.meta, choice, ChunkPart::Start { echo }, out);
        Some(offset)
    }
}
