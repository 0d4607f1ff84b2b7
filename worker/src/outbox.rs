//! The queue of a request's events between the engine and the gateway. The engine
//! never waits here: when the gateway reads slowly, the deltas of a choice are
//! joined. At most a few events for each choice are queued, and no more text than
//! the request may produce.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio_stream::Stream;
use tollgate_wire::v1::run_event::Event;
use tollgate_wire::v1::{Delta, RunEvent};
use tonic::Status;

/// Queued events up to which deltas stay separate.
const SINGLE: usize = 16;

/// The engine's end. Dropping it without [`Self::finish`] reports that the engine
/// failed.
pub(crate) struct Outbox {
    queue: Arc<Mutex<Queue>>,
}

/// The gateway's end: a stream of the events.
pub(crate) struct Inbox {
    queue: Arc<Mutex<Queue>>,
    /// Called when the gateway drops its end.
    on_drop: Option<Box<dyn FnOnce() + Send>>,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<Event>,
    /// `Some` once the queue is complete, with the error if the engine failed.
    end: Option<Option<Status>>,
    waker: Option<Waker>,
}

/// Creates a queue. `on_drop` runs when the gateway's end is dropped.
pub(crate) fn channel(on_drop: impl FnOnce() + Send + 'static) -> (Outbox, Inbox) {
    let queue = Arc::<Mutex<Queue>>::default();
    let inbox = Inbox { queue: Arc::clone(&queue), on_drop: Some(Box::new(on_drop)) };
    (Outbox { queue }, inbox)
}

impl Outbox {
    pub(crate) fn push(&self, event: Event) {
        let mut queue = lock(&self.queue);
        queue.events.push_back(event);
        queue.wake();
    }

    /// Queues text and tokens. If many events are queued, the delta joins the last
    /// delta of the same choice. The joined delta moves to the end of the queue,
    /// because its meter readings must not precede older ones.
    pub(crate) fn push_delta(&self, delta: Delta) {
        let mut queue = lock(&self.queue);
        // A short queue is not joined, so that a client that keeps up gets each token
        // by itself.
        let earlier = (queue.events.len() >= SINGLE)
            .then(|| queue.events.iter().rposition(|event| is_delta_of(event, delta.choice)))
            .flatten()
            .and_then(|place| queue.events.remove(place));
        let delta = match earlier {
            Some(Event::Delta(earlier)) => joined(earlier, delta),
            _ => delta,
        };
        queue.events.push_back(Event::Delta(delta));
        queue.wake();
    }

    /// Queues the last event.
    pub(crate) fn finish(&self, event: Event) {
        let mut queue = lock(&self.queue);
        queue.events.push_back(event);
        queue.end.get_or_insert(None);
        queue.wake();
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue);
        // `finish` has set the end already if the engine ended the request in
        // order.
        queue.end.get_or_insert(Some(Status::internal("the worker's engine failed")));
        queue.wake();
    }
}

impl Inbox {
    /// Drops this end without calling `on_drop`.
    pub(crate) fn forget(mut self) {
        // `drop` runs at the end of this function and finds nothing to call.
        self.on_drop = None;
    }
}

impl Stream for Inbox {
    type Item = Result<RunEvent, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut queue = lock(&self.queue);
        // Queued events come before the end, so that a failure of the engine loses no
        // text.
        if let Some(event) = queue.events.pop_front() {
            return Poll::Ready(Some(Ok(RunEvent { event: Some(event) })));
        }
        match &mut queue.end {
            // The error is delivered once. The next poll ends the stream.
            Some(error) => Poll::Ready(error.take().map(Err)),
            None => {
                // The lock is held since the check, so no event can come between the
                // check and the wait.
                queue.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        if let Some(on_drop) = self.on_drop.take() {
            on_drop();
        }
    }
}

impl Queue {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Ignores poisoning: no panic can leave a change half done.
fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_delta_of(event: &Event, choice: u32) -> bool {
    matches!(event, Event::Delta(delta) if delta.choice == choice)
}

fn joined(mut earlier: Delta, later: Delta) -> Delta {
    // Before the texts are joined: afterwards nothing tells where a token's text ends.
    let mut text_bytes = text_bytes_of(&earlier);
    text_bytes.extend(text_bytes_of(&later));
    earlier.text_bytes = text_bytes;
    let Delta { choice: _, text, tokens, logprobs, attributed_ns, reference_ns, text_bytes: _ } =
        later;
    earlier.text.push_str(&text);
    earlier.tokens.extend(tokens);
    earlier.logprobs.extend(logprobs);
    // The figures are totals of the request, so the later ones replace the earlier
    // ones.
    (earlier.attributed_ns, earlier.reference_ns) = (attributed_ns, reference_ns);
    earlier
}

/// Returns the bytes of text that came with each token of a delta.
fn text_bytes_of(delta: &Delta) -> Vec<u32> {
    match (&delta.tokens[..], delta.text.len()) {
        // The text of one token is all of the text; it is far shorter than 4 GiB.
        ([_], bytes) => vec![bytes as u32],
        _ => delta.text_bytes.clone(),
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;
    use tollgate_wire::v1::Finished;

    use super::*;

    fn delta(choice: u32, number: u32) -> Delta {
        Delta {
            choice,
            text: format!("{number} "),
            tokens: vec![number],
            attributed_ns: number.into(),
            ..Delta::default()
        }
    }

    #[tokio::test]
    async fn outbox_joins_deltas_for_slow_readers() {
        let (outbox, mut inbox) = channel(|| ());
        let mut sent = [String::new(), String::new()];
        for number in 0..1_000 {
            let delta = delta(number % 2, number);
            sent[(number % 2) as usize].push_str(&delta.text);
            outbox.push_delta(delta);
        }
        outbox.finish(Event::Finished(Finished::default()));
        drop(outbox);
        let (mut received, mut events, mut meter) = ([String::new(), String::new()], 0, 0);
        let mut finished = false;
        while let Some(event) = inbox.next().await {
            match event.expect("no error").event.expect("an event") {
                Event::Delta(delta) => {
                    assert!(delta.attributed_ns >= meter, "the meter went back");
                    meter = delta.attributed_ns;
                    let sizes = &delta.text_bytes;
                    if !sizes.is_empty() {
                        assert_eq!(sizes.len(), delta.tokens.len());
                        // Each text is its number and a space.
                        let digits = |token: u32| token.to_string().len() as u32 + 1;
                        let expected: Vec<u32> = delta.tokens.iter().copied().map(digits).collect();
                        assert_eq!(*sizes, expected);
                    }
                    received[delta.choice as usize].push_str(&delta.text);
                }
                _ => finished = true,
            }
            events += 1;
        }
        assert!(finished && events <= SINGLE + 3, "{events} events");
        assert_eq!(received, sent);
    }

    #[tokio::test]
    async fn outbox_reports_engine_failure_last() {
        let (outbox, mut inbox) = channel(|| ());
        outbox.push_delta(delta(0, 1));
        drop(outbox);
        assert!(inbox.next().await.is_some_and(|event| event.is_ok()));
        let error = inbox.next().await.expect("an error").expect_err("an error");
        assert_eq!(error.code(), tonic::Code::Internal);
        assert!(inbox.next().await.is_none());
    }
}
