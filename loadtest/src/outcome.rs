//! Sends one request and measures it. Times are taken when bytes arrive and count
//! from the request's due time.

use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use serde::Deserialize;
use tokio::time::Instant;

use crate::client::{ClientError, Connection};
use crate::clock;
use crate::sse::Events;

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// The answer is complete.
    Done,
    /// The gateway refused the request, with a status and a code.
    Refused {
        /// The HTTP status.
        status: u16,
        /// The body's `error.code`, or else its `type`.
        code: String,
    },
    /// The stream contained an error event with this code.
    BrokenOff(String),
    /// The connection, the protocol or the body was faulty.
    Error(&'static str),
    /// The request did not end within the timeout.
    TimedOut,
    /// The request was not sent, because too many were in flight.
    NotSent,
}

/// The measurements of one request.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The index of the tenant.
    pub tenant: usize,
    /// The end of the request.
    pub end: End,
    /// The time from due to sent: the generator's lateness and the wait for a
    /// connection. `None` if the request was not sent.
    pub late: Option<Duration>,
    /// The time from due to the first content (streams only).
    pub first_token: Option<Duration>,
    /// The times between pieces of content (streams only).
    pub gaps: Vec<Duration>,
    /// The time from due to the end.
    pub whole: Duration,
    /// Completion tokens: from `usage` if the answer has it, or else the number of
    /// pieces.
    pub tokens: u64,
    /// The time at the worker, if the answer reports it.
    pub at_worker: Option<AtWorker>,
}

/// The time of a request at the worker, from tollgate's figures in `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtWorker {
    /// The time from the arrival at the worker to the batch.
    pub queued: Duration,
    /// The time from there to the end of the prompt.
    pub read: Duration,
}

/// The content of a request.
#[derive(Clone, Debug)]
pub struct Question {
    /// The path.
    pub path: &'static str,
    /// The body.
    pub body: Bytes,
    /// True if the body asks for a stream.
    pub stream: bool,
    /// The value of the header `idempotency-key`.
    pub idempotency_key: Option<String>,
}

impl Question {
    /// The path of chats.
    pub const CHAT: &str = "/v1/chat/completions";

    /// The path of completions.
    pub const COMPLETIONS: &str = "/v1/completions";

    /// Creates a question to the chat.
    pub(crate) fn chat(body: Bytes, stream: bool) -> Self {
        Self { path: Self::CHAT, body, stream, idempotency_key: None }
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let key = self.idempotency_key.as_deref().and_then(|key| HeaderValue::from_str(key).ok());
        headers.extend(key.map(|key| (HeaderName::from_static("idempotency-key"), key)));
        headers
    }
}

/// Sends `question` and reads the answer to its end. Sets `begun` at the first content
/// of a stream, for callers that do not wait for the end.
pub async fn follow(
    connection: &Connection,
    question: Question,
    due: Instant,
    begun: &OnceLock<Duration>,
) -> Result<FollowedAnswer, ClientError> {
    let (headers, streams) = (question.headers(), question.stream);
    let response = connection.post_with(question.path, question.body, headers).await?;
    let status = response.status();
    if status != StatusCode::OK {
        return refused(status, response).await;
    }
    if streams { stream(response, due, begun).await } else { whole(response).await }
}

/// The measurements of [`follow`].
#[derive(Debug)]
pub struct FollowedAnswer {
    /// The end of the request.
    pub end: End,
    /// See [`Outcome::first_token`].
    pub first_token: Option<Duration>,
    /// See [`Outcome::gaps`].
    pub gaps: Vec<Duration>,
    /// See [`Outcome::tokens`].
    pub tokens: u64,
    /// See [`Outcome::at_worker`].
    pub at_worker: Option<AtWorker>,
}

impl FollowedAnswer {
    fn ended(end: End) -> Self {
        Self { end, first_token: None, gaps: Vec::new(), tokens: 0, at_worker: None }
    }
}

async fn refused(
    status: StatusCode,
    response: Response<Incoming>,
) -> Result<FollowedAnswer, ClientError> {
    let body = response.into_body().collect().await?.to_bytes();
    let code = match serde_json::from_slice::<Envelope>(&body) {
        Ok(Envelope { error }) => error.name(),
        Err(_) => "not an error body".to_owned(),
    };
    Ok(FollowedAnswer::ended(End::Refused { status: status.as_u16(), code }))
}

async fn whole(response: Response<Incoming>) -> Result<FollowedAnswer, ClientError> {
    let body = response.into_body().collect().await?.to_bytes();
    let Ok(answer) = serde_json::from_slice::<Chunk>(&body) else {
        return Ok(FollowedAnswer::ended(End::Error("the answer is not a chat completion")));
    };
    let finished = answer.choices.iter().all(|choice| choice.finish_reason.is_some());
    let end = if finished { End::Done } else { End::Error("a choice without finish_reason") };
    let (tokens, at_worker) = (answer.tokens().unwrap_or(0), answer.at_worker());
    Ok(FollowedAnswer { tokens, at_worker, ..FollowedAnswer::ended(end) })
}

async fn stream(
    mut response: Response<Incoming>,
    due: Instant,
    begun: &OnceLock<Duration>,
) -> Result<FollowedAnswer, ClientError> {
    let mut events = Events::default();
    let mut seen = FollowedAnswer::ended(End::Error("the stream ended without [DONE]"));
    let (mut last, mut pieces, mut counted) = (None, 0, None);
    while let Some(frame) = response.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let now = clock::now();
        let Ok(payloads) = events.push(&data) else {
            return Ok(FollowedAnswer::ended(End::Error("an event that does not end")));
        };
        for payload in payloads {
            if payload == "[DONE]" {
                seen.end = End::Done;
                continue;
            }
            let Ok(chunk) = serde_json::from_slice::<Chunk>(&payload) else {
                return Ok(FollowedAnswer::ended(End::Error("an event that is not a chunk")));
            };
            if let Some(error) = chunk.error {
                seen.end = End::BrokenOff(error.name());
                return Ok(seen);
            }
            counted = chunk.tokens().or(counted);
            seen.at_worker = chunk.at_worker().or(seen.at_worker);
            if chunk.has_content() {
                pieces += 1;
                match last.replace(now) {
                    None => seen.first_token = Some(*begun.get_or_init(|| now - due)),
                    Some(before) => seen.gaps.push(now - before),
                }
            }
        }
    }
    seen.tokens = counted.unwrap_or(pieces);
    Ok(seen)
}

#[derive(Deserialize)]
struct Envelope {
    error: ErrorBody,
}

#[derive(Deserialize)]
struct ErrorBody {
    code: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
}

impl ErrorBody {
    fn name(self) -> String {
        self.code.or(self.kind).unwrap_or_else(|| "no code".to_owned())
    }
}

/// The common fields of a chat completion and of its chunks.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    /// The text of a completion, which has no delta.
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
    tollgate: Option<OurFigures>,
}

/// Tollgate's own figures in `usage`.
#[derive(Deserialize)]
struct OurFigures {
    queue_ns: u64,
    prefill_ns: u64,
}

impl Chunk {
    fn tokens(&self) -> Option<u64> {
        self.usage.as_ref().map(|usage| usage.completion_tokens)
    }

    fn at_worker(&self) -> Option<AtWorker> {
        let OurFigures { queue_ns, prefill_ns } = self.usage.as_ref()?.tollgate.as_ref()?;
        let [queued, read] = [queue_ns, prefill_ns].map(|&nanos| Duration::from_nanos(nanos));
        Some(AtWorker { queued, read })
    }

    fn has_content(&self) -> bool {
        let content = |choice: &Choice| {
            let chat = choice.delta.as_ref().and_then(|delta| delta.content.as_ref());
            chat.or(choice.text.as_ref()).map(String::len)
        };
        self.choices.iter().any(|choice| content(choice).is_some_and(|length| length > 0))
    }
}
