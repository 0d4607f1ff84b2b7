//! A request with an `Idempotency-Key`, once it is admitted: it belongs to a
//! task of its own that keeps the answer, so that it runs to its end whether
//! or not its first client waits for it. Whoever sends it again gets the same
//! answer, a stream as well: all of it then, as it went out.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures_util::stream::unfold;
use http_body_util::BodyExt;
use tokio::sync::{mpsc, oneshot};

use super::chunks::KEEP_ALIVE;
use super::{Head, tell_stream, tell_whole};
use crate::admit::Admitted;
use crate::idempotency::{Answer, First};
use crate::pump::{self, Failure};
use crate::reply::ApiError;
use crate::serving::Serving;

/// Writes of a stream that its client has not taken yet.
const UNREAD_WRITES: usize = 4;

/// Runs `admitted`, which is the first with its key, and answers its client.
pub(super) async fn answer(
    serving: &Arc<Serving>,
    first: First,
    head: Head,
    admitted: Admitted,
) -> Result<Response, ApiError> {
    let (client, answered) = oneshot::channel();
    let keeping = keep(Arc::clone(serving), first, head, admitted, client);
    serving.pumps.spawn(keeping);
    answered.await.unwrap_or(Err(ApiError::Internal)) // the task panicked
}

/// The client's side; it may have left.
type Client = oneshot::Sender<Result<Response, ApiError>>;

async fn keep(serving: Arc<Serving>, first: First, head: Head, admitted: Admitted, client: Client) {
    if let Err(error) = first.record().await {
        admitted.give_back(&serving);
        let _ = client.send(Err(error)); // if it left, nobody hears it
        return;
    }
    let is_streamed = head.streamed;
    let events = pump::start(&serving, admitted);
    let told = match is_streamed {
        true => tell_stream(head, events).await,
        false => tell_whole(head, events).await,
    };
    match told {
        Ok(response) if is_streamed => keep_stream(&serving, first, response, client).await,
        Ok(response) => keep_whole(first, response, client).await,
        Err(Failure { error, is_charged }) => {
            if is_charged {
                first.charged(error.clone());
            } else {
                first.free(error.clone()).await;
            }
            let _ = client.send(Err(error)); // likewise
        }
    }
}

async fn keep_whole(first: First, response: Response, client: Client) {
    let (parts, body) = response.into_parts();
    let Ok(body) = body.collect().await else { return }; // it is in memory
    let body = body.to_bytes();
    first.answered(Answer { head: Ok(parts.headers.clone()), body: body.clone() });
    let _ = client.send(Ok(Response::from_parts(parts, Body::from(body)))); // likewise
}

/// Passes the stream on as it comes, and keeps it as far as there is room.
async fn keep_stream(serving: &Serving, first: First, response: Response, client: Client) {
    let (parts, mut body) = response.into_parts();
    let headers = parts.headers.clone();
    let (writes, unread) = mpsc::channel::<Bytes>(UNREAD_WRITES);
    let live = Body::from_stream(unfold(unread, |mut unread| async move {
        let bytes = unread.recv().await?;
        Some((Ok::<_, Infallible>(bytes), unread))
    }));
    let _ = client.send(Ok(Response::from_parts(parts, live))); // likewise
    let most = serving.idempotency.largest_answer();
    let mut kept = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        let Ok(bytes) = frame.into_data() else { continue };
        // One byte too many says that it was too long.
        if bytes != KEEP_ALIVE && kept.len() <= most {
            kept.extend_from_slice(&bytes[..bytes.len().min(most + 1 - kept.len())]);
        }
        // A client that has left or stalled does not end it; one that stalls
        // is cut off by the listener.
        let _ = writes.send(bytes).await;
    }
    first.answered(Answer { head: Ok(headers), body: kept.into() });
}
