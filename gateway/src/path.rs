//! Where the time of an answered request went, on its way from the client to
//! the device and back. Host time by stage, for the answer's usage and the
//! metrics; nobody pays by it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::Full;
use tollgate_domain::Transfers;
use tollgate_domain::block::Stages;

use crate::telemetry::Metrics;

/// The stages before a request is admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFront {
    /// Its body came in.
    pub(crate) read: Duration,
    /// It was parsed and became tokens, the turn for that included.
    pub(crate) preprocess: Duration,
}

/// The stages in a worker, as it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InWorker {
    pub(crate) stages: Stages,
    /// `None` where the device is the host.
    pub(crate) transfers: Option<Transfers>,
}

/// All stages up to the last token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) in_front: InFront,
    /// From admission until a worker that answered it was chosen.
    pub(crate) place: Duration,
    pub(crate) in_worker: InWorker,
}

impl Path {
    /// Each stage that there was, by the name that its metric has.
    pub(crate) fn stages(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let Self { in_front: InFront { read, preprocess }, place, in_worker } = *self;
        let InWorker { stages: Stages { queue_ns, prefill_ns, decode_ns }, transfers } = in_worker;
        let moved = transfers.map(|Transfers { to_device, to_host }| {
            [("to_device", to_device), ("to_host", to_host)]
                .map(|(name, time)| (name, Duration::from_nanos(time.nanos())))
        });
        [
            ("read", read),
            ("preprocess", preprocess),
            ("place", place),
            ("queue", Duration::from_nanos(queue_ns)),
            ("prefill", Duration::from_nanos(prefill_ns)),
            ("decode", Duration::from_nanos(decode_ns)),
        ]
        .into_iter()
        .chain(moved.into_iter().flatten())
    }
}

/// The last stage: from the worker's last word until the connection has taken
/// the last of the answer. Lies with the answer's body, and ends with it.
pub(crate) struct Outgoing {
    metrics: Arc<Metrics>,
    /// `None` while the last word has not come.
    since: Option<Instant>,
}

impl Outgoing {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, since: None }
    }

    /// The worker's last word is here.
    pub(crate) fn begins(&mut self) {
        self.since = Some(Instant::now());
    }
}

/// A whole answer on its way out.
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
        if let Some(since) = self.since {
            self.metrics.stage("out", since.elapsed());
        }
    }
}
