//! Responses to admitted requests with an `Idempotency-Key`.
//!
//! A task of its own keeps the response, so a request that has a place at a worker
//! runs to its end even if its first client leaves. A client that sends the request
//! again gets the same response; of a stream it gets every byte that went out. A
//! request that still waits for its place ends with its last client.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures_util::stream::unfold;
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body_util::BodyExt;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tollgate_domain::RequestId;
use tollgate_openai::sse;
use tollgate_serving::event::Failure;
use tollgate_serving::idempotency::{IdempotencyGuard, IdempotencyKey, StoredAnswer};
use tollgate_serving::{RequestError, Serving};

use super::Run;
use super::response::Rendering;
use crate::reply::ApiError;

/// Writes of a stream that may wait for their client.
const UNREAD_WRITES: usize = 4;

/// Returns the request's idempotency key, if it has one.
///
/// # Errors
/// 400: there are several keys, or the key is not 1 to 255 visible characters of
/// ASCII.
pub(super) fn key(headers: &HeaderMap) -> Result<Option<IdempotencyKey>, ApiError> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    match IdempotencyKey::new(value.as_bytes()) {
        Some(key) if values.next().is_none() => Ok(Some(key)),
        _ => Err(ApiError::invalid(
            "Idempotency-Key",
            format!(
                "'Idempotency-Key' must be one header of 1 to {} visible ASCII characters.",
                IdempotencyKey::LONGEST
            ),
        )),
    }
}

/// Runs an admitted request, the first one with its key, and answers its client.
///
/// # Errors
/// The request failed, or its key could not be recorded.
pub(super) async fn respond(
    serving: &Arc<Serving>,
    guard: IdempotencyGuard,
    rendering: Rendering,
    run: Run,
) -> Result<Response, ApiError> {
    let (client, response) = oneshot::channel();
    let keeping = keep(Arc::clone(serving), guard, rendering, run, client);
    // The tracker makes a drain wait until the answer is kept.
    serving.tasks().spawn(keeping);
    // The sender is dropped without a value only if the task panics.
    response.await.unwrap_or(Err(ApiError::Internal))
}

/// Returns the response to a repeat of request `first`.
pub(super) fn repeat(
    first: &RequestId,
    answer: Result<Arc<StoredAnswer>, RequestError>,
) -> Result<Response, ApiError> {
    let answer = answer?;
    let mut response = Response::new(Body::from(answer.body.clone()));
    *response.headers_mut() = decode_head(&answer.head);
    // An id is always a valid header.
    if let Ok(first) = HeaderValue::from_str(first.as_str()) {
        response.headers_mut().insert(REPLAY_OF, first);
    }
    Ok(response)
}

/// The way to the client. Sending fails if the client has left, which changes
/// nothing here: the response is kept for the next request with the key.
type Client = oneshot::Sender<Result<Response, ApiError>>;

async fn keep(
    serving: Arc<Serving>,
    guard: IdempotencyGuard,
    rendering: Rendering,
    Run { admitted, record }: Run,
    mut client: Client,
) {
    // The record comes before any work: after a crash, a request whose key is
    // not on disk must not have run.
    if let Err(error) = guard.record().await {
        serving.give_back(admitted);
        let error = ApiError::from(error);
        record.failed(&error);
        let _ = client.send(Err(error));
        return;
    }
    let is_streamed = rendering.streamed;
    let abandoned = CancellationToken::new();
    let events = serving.run_until_abandoned(admitted, abandoned.clone(), record.on_end());
    let mut answering = pin!(rendering.respond(events));
    let answer = tokio::select! {
        answer = &mut answering => answer,
        // Clients that send and leave would otherwise keep the queue full of long answers.
        () = left(&mut client, &guard) => {
            abandoned.cancel();
            // The task still reports an end, which decides what becomes of the key.
            answering.await
        }
    };
    match answer {
        Ok(response) if is_streamed => keep_stream(&serving, guard, response, client).await,
        Ok(response) => keep_whole(guard, response, client).await,
        Err(Failure { error, is_charged }) => {
            // A request that cost nothing may run again under the same key.
            if is_charged {
                guard.charged(error.clone());
            } else if abandoned.is_cancelled() {
                // A repeat that came meanwhile runs instead.
                guard.release().await;
            } else {
                guard.free(error.clone()).await;
            }
            let _ = client.send(Err(error.into()));
        }
    }
}

/// Waits until the client and every repeat have left.
async fn left(client: &mut Client, guard: &IdempotencyGuard) {
    client.closed().await;
    guard.unawaited().await;
}

async fn keep_whole(guard: IdempotencyGuard, response: Response, client: Client) {
    let (parts, body) = response.into_parts();
    // The body is in memory already, so collecting cannot fail.
    let Ok(body) = body.collect().await else { return };
    let body = body.to_bytes();
    guard.answered(StoredAnswer { head: encode_head(&parts.headers), body: body.clone() });
    let _ = client.send(Ok(Response::from_parts(parts, Body::from(body))));
}

/// Passes the stream on as it comes, and keeps it up to the size of the largest
/// response that is kept.
async fn keep_stream(
    serving: &Serving,
    guard: IdempotencyGuard,
    response: Response,
    client: Client,
) {
    let (parts, mut body) = response.into_parts();
    let head = encode_head(&parts.headers);
    let (writes, unread) = mpsc::channel::<Bytes>(UNREAD_WRITES);
    let live = Body::from_stream(unfold(unread, |mut unread| async move {
        let bytes = unread.recv().await?;
        Some((Ok::<_, Infallible>(bytes), unread))
    }));
    let _ = client.send(Ok(Response::from_parts(parts, live)));
    let max = serving.idempotency().largest_answer();
    let mut kept = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        let Ok(bytes) = frame.into_data() else { continue };
        // One byte more than the limit is kept, so that a response of exactly the
        // limit can be told from one that was cut.
        if bytes != sse::KEEP_ALIVE && kept.len() <= max {
            kept.extend_from_slice(&bytes[..bytes.len().min(max + 1 - kept.len())]);
        }
        // An error means that the client has left; the request goes on. A client
        // that stalls holds this task until the listener ends its response.
        let _ = writes.send(bytes).await;
    }
    guard.answered(StoredAnswer { head, body: kept.into() });
}

/// Writes headers as lines of a flag, the name, a colon and the value. Neither a
/// name nor a value can hold a line feed.
fn encode_head(headers: &HeaderMap) -> Bytes {
    let mut head = Vec::new();
    for (name, value) in headers {
        // HTTP/2 must not index a value that was marked, so the mark is kept too.
        head.push(if value.is_sensitive() { SENSITIVE } else { PLAIN });
        head.extend_from_slice(name.as_str().as_bytes());
        head.push(b':');
        head.extend_from_slice(value.as_bytes());
        head.push(b'\n');
    }
    head.into()
}

/// Reads the headers that [`encode_head`] wrote.
fn decode_head(head: &[u8]) -> HeaderMap {
    let lines = head.split(|byte| *byte == b'\n');
    lines.filter_map(decode_header).collect()
}

fn decode_header(line: &[u8]) -> Option<(HeaderName, HeaderValue)> {
    let (flag, line) = line.split_first()?;
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = HeaderName::from_bytes(&line[..colon]).ok()?;
    let mut value = HeaderValue::from_bytes(&line[colon + 1..]).ok()?;
    value.set_sensitive(*flag == SENSITIVE);
    Some((name, value))
}

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The header of a repeated response; it names the request that ran first.
const REPLAY_OF: HeaderName = HeaderName::from_static("x-tollgate-replay-of");

/// The flag of a header with an ordinary value.
const PLAIN: u8 = b'p';

/// The flag of a header with a value that HTTP/2 must not index.
const SENSITIVE: u8 = b's';

#[cfg(test)]
mod head_tests {
    use super::*;

    #[test]
    fn stored_head_decodes_to_the_same_headers() {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_static("one: two"));
        headers.append("x-a", HeaderValue::from_static(""));
        let mut marked = HeaderValue::from_static("12");
        marked.set_sensitive(true);
        headers.append("x-b", marked);
        let decoded = decode_head(&encode_head(&headers));
        assert_eq!(decoded, headers);
        assert!(decoded["x-b"].is_sensitive() && !decoded["x-a"].is_sensitive());
    }
}
