//! The requests of a probe, and their answers reduced to the parts that limits
//! determine.

use anyhow::{Context, Result};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tollgate_loadtest::client::{Connection, Protocol};

use super::Canary;

/// An answer or a refusal.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) status: u16,
    pub(super) code: String,
    pub(super) param: String,
    pub(super) message: String,
    /// Reference cost of the answer, in nanoseconds.
    pub(super) reference: u64,
    pub(super) tokens: u64,
}

impl Told {
    pub(super) fn is_ok(&self) -> bool {
        self.status == 200
    }

    /// Returns true if another limit or an overload refused the request.
    pub(super) fn is_about_something_else(&self) -> bool {
        self.status == 429 || self.status == 503
    }

    /// Returns the reason for a result that is not about the probed limit.
    pub(super) fn masks(&self) -> String {
        let Self { status, code, message, .. } = self;
        format!("another limit applies first: {status} {code}: {message}")
    }

    /// Returns true if the answer is a refusal and its message contains `words`.
    pub(super) fn names(&self, words: &str) -> bool {
        self.status == 429 && self.message.contains(words)
    }
}

#[derive(Deserialize)]
struct Body {
    error: Option<Failure>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Failure {
    code: Option<String>,
    param: Option<String>,
    message: String,
}

#[derive(Deserialize)]
struct Usage {
    total_tokens: u64,
}

impl Canary {
    pub(super) async fn connect(&self) -> Result<Connection> {
        Ok(self.target.connect(Protocol::Http2).await?)
    }

    /// Returns the body of a chat with one question.
    pub(super) fn chat(&self, content: &str, max_tokens: u32) -> Value {
        json!({
            "model": self.model, "temperature": 0, "max_tokens": max_tokens,
            "messages": [{ "role": "user", "content": content }],
        })
    }
}

/// Sends `body` to `path` and reads the answer.
pub(super) async fn ask(connection: &Connection, path: &str, body: String) -> Result<Told> {
    let response = connection.post(path, body.into()).await?;
    let status = response.status().as_u16();
    let header = |name: &str| {
        let value = response.headers().get(name).and_then(|value| value.to_str().ok());
        // A refusal has no such header and costs nothing.
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    let reference = header("x-tollgate-reference-ns");
    let bytes = response.into_body().collect().await?.to_bytes();
    let body: Body = serde_json::from_slice(&bytes)
        .with_context(|| format!("the answer with status {status} is not JSON"))?;
    let tokens = body.usage.map_or(0, |usage| usage.total_tokens);
    let told = Told { status, reference, tokens, ..Told::default() };
    Ok(match body.error {
        None => told,
        Some(Failure { code, param, message }) => Told {
            code: code.unwrap_or_default(),
            param: param.unwrap_or_default(),
            message,
            ..told
        },
    })
}

/// Sends the raw `request` over HTTP/1.1. Returns the status of the answer, or
/// `None` if the connection ends without an answer.
pub(super) async fn status_of(canary: &Canary, request: &[u8]) -> Result<Option<u16>> {
    let mut tls = canary.target.connect_tls(Protocol::Http1).await?;
    // The gateway may refuse the request and close before all of it is sent.
    let _ = tls.write_all(request).await;
    let _ = tls.flush().await;
    let mut answer = Vec::new();
    let mut piece = [0; 1_024];
    // The status line is enough, and the answer may never end.
    while !answer.contains(&b'\n') {
        match tls.read(&mut piece).await {
            Ok(0) | Err(_) => break,
            Ok(count) => answer.extend_from_slice(&piece[..count]),
        }
    }
    let line = String::from_utf8_lossy(&answer);
    Ok(line.split_whitespace().nth(1).and_then(|status| status.parse().ok()))
}
