//! Responses to admitted requests with an `Idempotency-Key`.
//!
//! A task of its own keeps the response, so the request runs to its end even if
//! its first client leaves. A client that sends the request again gets the same
//! response; of a stream it gets every byte that went out.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures_util::stream::unfold;
use http_body_util::BodyExt;
use tokio::sync::{mpsc, oneshot};
use tollgate_openai::sse;

use super::response::Rendering;
use crate::admit::Admitted;
use crate::idempotency::{Answer, First};
use crate::pump::{self, Failure};
use crate::reply::ApiError;
use crate::serving::Serving;

/// Writes of a stream that may wait for their client.
const UNREAD_WRITES: usize = 4;

/// Runs `admitted`, the first request with its key, and answers its client.
///
/// # Errors
/// The request failed, or its key could not be recorded.
pub(super) async fn respond(
    serving: &Arc<Serving>,
    first: First,
    rendering: Rendering,
    admitted: Admitted,
) -> Result<Response, ApiError> {
    let (client, response) = oneshot::channel();
    let keeping = keep(Arc::clone(serving), first, rendering, admitted, client);
    serving.pumps.spawn(keeping);
    // The sender is dropped without a value only if the task panics.
    response.await.unwrap_or(Err(ApiError::Internal))
}

/// The way to the client. Sending fails if the client has left, which changes
/// nothing here: the response is kept for the next request with the key.
type Client = oneshot::Sender<Result<Response, ApiError>>;

async fn keep(
    serving: Arc<Serving>,
    first: First,
    rendering: Rendering,
    admitted: Admitted,
    client: Client,
) {
    // The record comes before any work: after a crash, a request whose key is
    // not on disk must not have run.
    if let Err(error) = first.record().await {
        admitted.give_back(&serving);
        let _ = client.send(Err(error));
        return;
    }
    let is_streamed = rendering.streamed;
    let events = pump::start(&serving, admitted);
    match rendering.respond(events).await {
        Ok(response) if is_streamed => keep_stream(&serving, first, response, client).await,
        Ok(response) => keep_whole(first, response, client).await,
        Err(Failure { error, is_charged }) => {
            // A request that cost nothing may run again under the same key.
            if is_charged {
                first.charged(error.clone());
            } else {
                first.free(error.clone()).await;
            }
            let _ = client.send(Err(error));
        }
    }
}

async fn keep_whole(first: First, response: Response, client: Client) {
    let (parts, body) = response.into_parts();
    // The body is in memory already, so collecting cannot fail.
    let Ok(body) = body.collect().await else { return };
    let body = body.to_bytes();
    first.answered(Answer { head: Ok(parts.headers.clone()), body: body.clone() });
    let _ = client.send(Ok(Response::from_parts(parts, Body::from(body))));
}

/// Passes the stream on as it comes, and keeps it up to the size of the largest
/// response that is kept.
async fn keep_stream(serving: &Serving, first: First, response: Response, client: Client) {
    let (parts, mut body) = response.into_parts();
    let headers = parts.headers.clone();
    let (writes, unread) = mpsc::channel::<Bytes>(UNREAD_WRITES);
    let live = Body::from_stream(unfold(unread, |mut unread| async move {
        let bytes = unread.recv().await?;
        Some((Ok::<_, Infallible>(bytes), unread))
    }));
    let _ = client.send(Ok(Response::from_parts(parts, live)));
    let max = serving.idempotency.largest_answer();
    let mut kept = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        let Ok(bytes) = frame.into_data() else { continue };
        // One byte more than the limit is kept, so that a response of exactly the
        // limit can be told from one that was cut.
        if bytes != sse::KEEP_ALIVE && kept.len() <= max {
            kept.extend_from_slice(&bytes[..bytes.len().min(max + 1 - kept.len())]);
        }
        // An error means that the client has left; the request goes on. A client
        // that stalls holds this task until the listener closes its connection.
        let _ = writes.send(bytes).await;
    }
    first.answered(Answer { head: Ok(headers), body: kept.into() });
}
