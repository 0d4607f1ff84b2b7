//! The body of a streamed response. Events that are ready together go out in one
//! write, and a comment goes out from time to time while none comes.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tollgate_openai::{ChunkWriter, sse};
use tollgate_serving::event::{Event, Failure};

use super::outgoing::Outgoing;
use super::response::usage_report;
use crate::reply::ApiError;

/// The time after which a silent stream sends a comment. Proxies commonly close
/// connections that are silent for 30 or 60 seconds.
const SILENCE: Duration = Duration::from_secs(15);
/// Bytes after which a write goes out even if more events are ready.
const GATHER: usize = 16 * 1024;

/// Returns the body that begins with `first` and goes on with `events`, written by
/// `writer`. Dropping the body drops `events`, by which the request's task learns
/// that the client has left.
pub(super) fn stream_body(
    writer: ChunkWriter,
    (first, events): (Event, mpsc::Receiver<Event>),
    out: Outgoing,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let body = StreamBody { writer, first: Some(first), events, ended: false, out };
    unfold(body, |mut body| async move {
        let bytes = body.next().await?;
        Some((Ok(bytes), body))
    })
}

struct StreamBody {
    writer: ChunkWriter,
    first: Option<Event>,
    events: mpsc::Receiver<Event>,
    ended: bool,
    out: Outgoing,
}

impl StreamBody {
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        while !self.ended && out.is_empty() {
            let event = match self.first.take() {
                Some(first) => Some(first),
                None => match timeout(SILENCE, self.events.recv()).await {
                    Ok(event) => event,
                    Err(_) => return Some(Bytes::from_static(sse::KEEP_ALIVE)),
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
            Event::Delta(delta) => self.writer.delta(&delta, out),
            Event::PromptLogprobs { prompt, tokens } => {
                self.writer.prompt_logprobs(prompt, &tokens, out);
            }
            Event::ChoiceFinished { choice, reason } => {
                self.writer.finish_choice(choice, reason, out)
            }
            // A request restarts only while no text has gone out, so nothing that
            // is written has to be taken back.
            Event::Restarted => {}
            Event::Finished(receipt) => {
                // Only when the event is taken, so that a wait behind a slow client is left out.
                self.out.begins();
                self.writer.finish(&usage_report(*receipt), out);
                self.ended = true;
            }
            Event::Failed(failure) => {
                // The status has gone out already, so the error can only be an event.
                let error = ApiError::from(failure);
                self.writer.fail(&error.envelope().to_json(), out);
                self.ended = true;
            }
        }
    }
}
