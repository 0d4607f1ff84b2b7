//! The body of a stream: events as they come, what has gathered in one write,
//! and a comment now and then while nothing comes.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::chunks::{Chunks, KEEP_ALIVE};
use super::outgoing::Outgoing;
use super::telling::Telling;
use crate::pump::{Event, Failure};

/// How long a stream is silent before it says that it lives.
const SILENCE: Duration = Duration::from_secs(15);
/// What is gathered for one write, bytes.
const GATHER: usize = 16 * 1024;

/// The stream that begins with `first` and goes on with `events`. Dropping it
/// tells the request's task that the client has left.
pub(super) fn transcript(
    telling: Telling,
    (first, events): (Event, mpsc::Receiver<Event>),
    out: Outgoing,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let chunks = Chunks::new(telling);
    let transcript = Transcript { chunks, first: Some(first), events, ended: false, out };
    unfold(transcript, |mut transcript| async move {
        let bytes = transcript.next().await?;
        Some((Ok(bytes), transcript))
    })
}

struct Transcript {
    chunks: Chunks,
    first: Option<Event>,
    events: mpsc::Receiver<Event>,
    ended: bool,
    out: Outgoing,
}

impl Transcript {
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        while !self.ended && out.is_empty() {
            let event = match self.first.take() {
                Some(first) => Some(first),
                None => match timeout(SILENCE, self.events.recv()).await {
                    Ok(event) => event,
                    Err(_) => return Some(Bytes::from_static(KEEP_ALIVE)),
                },
            };
            // A task that panicked ends its events without a last one.
            self.write(event.unwrap_or(Event::Failed(Failure::UNKNOWN)), &mut out);
            while !self.ended
                && out.len() < GATHER
                && let Ok(event) = self.events.try_recv()
            {
                self.write(event, &mut out);
            }
        }
        (!out.is_empty()).then(|| out.into())
    }

    fn write(&mut self, event: Event, out: &mut Vec<u8>) {
        match event {
            Event::Delta(delta) => self.chunks.delta(&delta, out),
            Event::PromptLogprobs { prompt, tokens } => {
                self.chunks.prompt_logprobs(prompt, &tokens, out);
            }
            Event::ChoiceFinished { choice, reason } => self.chunks.finished(choice, reason, out),
            // Only what nobody has been told of starts again.
            Event::Restarted => {}
            Event::Finished(receipt) => {
                self.out.begins();
                self.chunks.end(&receipt, out);
                self.ended = true;
            }
            Event::Failed(failure) => {
                self.chunks.fail(&failure.error, out);
                self.ended = true;
            }
        }
    }
}
