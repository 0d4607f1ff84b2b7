//! The timing of responses on their way out, as bodies that report when the
//! connection has taken them.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::Full;

use crate::telemetry::Metrics;

/// A timer of the last stage: from the worker's last event until the connection
/// has taken the last byte of the response. The body of the response owns the
/// timer, and its drop ends the stage.
pub(crate) struct Outgoing {
    metrics: Arc<Metrics>,
    /// `None` until the worker's last event has arrived.
    since: Option<Instant>,
}

impl Outgoing {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, since: None }
    }

    /// Starts the timer: the worker's last event has arrived.
    #[expect(clippy::disallowed_methods, reason = "the stages of a request are measured")]
    pub(crate) fn begins(&mut self) {
        self.since = Some(Instant::now());
    }
}

/// A body in one piece, with the timer of the last stage.
pub(crate) struct TimedBody {
    bytes: Full<Bytes>,
    _out: Outgoing,
}

impl TimedBody {
    pub(crate) fn new(bytes: Bytes, out: Outgoing) -> Self {
        Self { bytes: Full::new(bytes), _out: out }
    }
}

impl http_body::Body for TimedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.bytes).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.bytes.size_hint()
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        // A response that failed before the worker's last event has no such stage.
        if let Some(since) = self.since {
            self.metrics.stage("out", since.elapsed());
        }
    }
}
