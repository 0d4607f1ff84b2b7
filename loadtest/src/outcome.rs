//! Sends one request and says how it went. Times are taken as bytes arrive,
//! and kept relative to when the request was due.

use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use serde::Deserialize;
use tokio::time::Instant;

use crate::client::{ClientError, Connection};
use crate::sse::Events;

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Answered whole.
    Done,
    /// Refused in so many words: status and the error's code.
    Refused {
        /// The HTTP status.
        status: u16,
        /// `error.code` (or `type`) of the body.
        code: String,
    },
    /// The stream carried an error event, with its code.
    BrokenOff(String),
    /// The connection, the protocol or the body was wrong.
    Error(&'static str),
    /// No end within the load's timeout.
    TimedOut,
    /// Not sent: too many were under way.
    NotSent,
}

/// What one request saw.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Index of the tenant.
    pub tenant: usize,
    /// How it ended.
    pub end: End,
    /// From due to sent: the generator's own lateness, and waiting for a
    /// connection.
    pub late: Duration,
    /// From due to the first content (streams only).
    pub first_token: Option<Duration>,
    /// Gaps between pieces of content after the first (streams only).
    pub gaps: Vec<Duration>,
    /// From due to the end.
    pub whole: Duration,
    /// Completion tokens: from `usage` where there is one, else pieces.
    pub tokens: u64,
    /// What of it the answer says was the worker's.
    pub at_worker: Option<AtWorker>,
}

/// Time of a request at the worker, as tollgate's own figures in `usage` say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtWorker {
    /// From its arrival there to its place in the batch.
    pub queued: Duration,
    /// From there to its prompt's end.
    pub read: Duration,
}

/// Sends `body` and follows the answer to its end. `begun` is set at the first
/// content of a stream, for who does not wait for the end.
pub async fn follow(
    connection: &Connection,
    body: Bytes,
    streams: bool,
    due: Instant,
    begun: &OnceLock<Duration>,
) -> Result<Seen, ClientError> {
    let response = connection.post("/v1/chat/completions", body).await?;
    let status = response.status();
    if status != StatusCode::OK {
        return refused(status, response).await;
    }
    if streams { stream(response, due, begun).await } else { whole(response).await }
}

/// What [`follow`] saw of an answer.
#[derive(Debug)]
pub struct Seen {
    /// How it ended.
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

impl Seen {
    fn ended(end: End) -> Self {
        Self { end, first_token: None, gaps: Vec::new(), tokens: 0, at_worker: None }
    }
}

async fn refused(status: StatusCode, response: Response<Incoming>) -> Result<Seen, ClientError> {
    let body = response.into_body().collect().await?.to_bytes();
    let code = match serde_json::from_slice::<Envelope>(&body) {
        Ok(Envelope { error }) => error.name(),
        Err(_) => "not an error body".to_owned(),
    };
    Ok(Seen::ended(End::Refused { status: status.as_u16(), code }))
}

async fn whole(response: Response<Incoming>) -> Result<Seen, ClientError> {
    let body = response.into_body().collect().await?.to_bytes();
    let Ok(answer) = serde_json::from_slice::<Chunk>(&body) else {
        return Ok(Seen::ended(End::Error("the answer is not a chat completion")));
    };
    let finished = answer.choices.iter().all(|choice| choice.finish_reason.is_some());
    let end = if finished { End::Done } else { End::Error("a choice without finish_reason") };
    let (tokens, at_worker) = (answer.tokens().unwrap_or(0), answer.at_worker());
    Ok(Seen { tokens, at_worker, ..Seen::ended(end) })
}

async fn stream(
    mut response: Response<Incoming>,
    due: Instant,
    begun: &OnceLock<Duration>,
) -> Result<Seen, ClientError> {
    let mut events = Events::default();
    let mut seen = Seen::ended(End::Error("the stream ended without [DONE]"));
    let (mut last, mut pieces, mut counted) = (None, 0, None);
    while let Some(frame) = response.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let now = Instant::now();
        let Ok(payloads) = events.push(&data) else {
            return Ok(Seen::ended(End::Error("an event without end")));
        };
        for payload in payloads {
            if payload == "[DONE]" {
                seen.end = End::Done;
                continue;
            }
            let Ok(chunk) = serde_json::from_slice::<Chunk>(&payload) else {
                return Ok(Seen::ended(End::Error("an event that is not a chunk")));
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

/// A chat completion or a chunk of one: what both share.
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

/// What tollgate says beside what everybody does.
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
        let content = |choice: &Choice| choice.delta.as_ref()?.content.as_ref().map(String::len);
        self.choices.iter().any(|choice| content(choice).is_some_and(|length| length > 0))
    }
}
