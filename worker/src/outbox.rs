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
    shared: Arc<Mutex<Shared>>,
}

/// The gateway's end: a stream of the events.
pub(crate) struct Inbox {
    shared: Arc<Mutex<Shared>>,
    /// Called when the gateway drops its end.
    on_drop: Option<Box<dyn FnOnce() + Send>>,
}

#[derive(Default)]
struct Shared {
    events: VecDeque<Event>,
    /// `Some` once the queue is complete, with the error if the engine failed.
    end: Option<Option<Status>>,
    waker: Option<Waker>,
}

/// Creates a queue. `on_drop` runs when the gateway's end is dropped.
pub(crate) fn channel(on_drop: impl FnOnce() + Send + 'static) -> (Outbox, Inbox) {
    let shared = Arc::<Mutex<Shared>>::default();
    let inbox = Inbox { shared: Arc::clone(&shared), on_drop: Some(Box::new(on_drop)) };
    (Outbox { shared }, inbox)
}

impl Outbox {
    pub(crate) fn push(&self, event: Event) {
        let mut shared = lock(&self.shared);
        shared.events.push_back(event);
        shared.wake();
    }

    /// Queues text and tokens. If many events are queued, the delta joins the last
    /// delta of the same choice. The joined delta moves to the end of the queue,
    /// because its meter readings must not precede older ones.
    pub(crate) fn push_delta(&self, delta: Delta) {
        let mut shared = lock(&self.shared);
        let earlier = (shared.events.len() >= SINGLE)
            .then(|| shared.events.iter().rposition(|event| is_delta_of(event, delta.choice)))
            .flatten()
            .and_then(|place| shared.events.remove(place));
        let delta = match earlier {
            Some(Event::Delta(earlier)) => joined(earlier, delta),
            _ => delta,
        };
        shared.events.push_back(Event::Delta(delta));
        shared.wake();
    }

    /// Queues the last event.
    pub(crate) fn finish(&self, event: Event) {
        let mut shared = lock(&self.shared);
        shared.events.push_back(event);
        shared.end.get_or_insert(None);
        shared.wake();
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let mut shared = lock(&self.shared);
        // `finish` has set the end already if the engine ended the request in
        // order.
        shared.end.get_or_insert(Some(Status::internal("the worker's engine failed")));
        shared.wake();
    }
}

impl Inbox {
    /// Drops this end without calling `on_drop`.
    pub(crate) fn forget(mut self) {
        self.on_drop = None;
    }
}

impl Stream for Inbox {
    type Item = Result<RunEvent, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut shared = lock(&self.shared);
        if let Some(event) = shared.events.pop_front() {
            return Poll::Ready(Some(Ok(RunEvent { event: Some(event) })));
        }
        match &mut shared.end {
            Some(error) => Poll::Ready(error.take().map(Err)),
            None => {
                shared.waker = Some(context.waker().clone());
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

impl Shared {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Ignores poisoning: no panic can leave a change half done.
fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_delta_of(event: &Event, choice: u32) -> bool {
    matches!(event, Event::Delta(delta) if delta.choice == choice)
}

fn joined(mut earlier: Delta, later: Delta) -> Delta {
    let Delta { choice: _, text, tokens, logprobs, attributed_ns, reference_ns } = later;
    earlier.text.push_str(&text);
    earlier.tokens.extend(tokens);
    earlier.logprobs.extend(logprobs);
    (earlier.attributed_ns, earlier.reference_ns) = (attributed_ns, reference_ns);
    earlier
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
