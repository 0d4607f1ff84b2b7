//! HTTP responses to requests for work: the headers with the request's figures,
//! and the body in one piece or as a stream.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use tokio::sync::mpsc;
use tollgate_admission::Figures;
use tollgate_domain::DeviceNanos;
use tollgate_openai::{ChunkWriter, Interface, ResponseBuilder, ResponseMeta, UsageReport};
use tollgate_serving::admit::Admitted;
use tollgate_serving::event::{Event, Failure, Receipt};
use tollgate_serving::timings::{FrontTimings, RequestTimings, WorkerTimings};

use super::outgoing::{Outgoing, TimedBody};
use super::stream_body::stream_body;
use crate::reply::write_figures;
use crate::telemetry::Metrics;

/// The facts that a response needs of its request. The request itself belongs to
/// its task by then.
pub(super) struct Rendering {
    interface: &'static dyn Interface,
    meta: ResponseMeta,
    /// True if the response is a stream.
    pub(super) streamed: bool,
    headers: ResponseHeaders,
    metrics: Arc<Metrics>,
}

/// The headers that are known once a request is admitted.
struct ResponseHeaders {
    figures: Figures,
    reserved: DeviceNanos,
    class: String,
}

impl Rendering {
    /// Returns the facts of `admitted`.
    pub(super) fn new(
        interface: &'static dyn Interface,
        meta: ResponseMeta,
        streamed: bool,
        (admitted, metrics): (&Admitted, Arc<Metrics>),
    ) -> Self {
        Self {
            interface,
            meta,
            streamed,
            headers: ResponseHeaders {
                figures: admitted.figures().clone(),
                reserved: admitted.reserved(),
                class: admitted.job().model().class.as_str().to_owned(),
            },
            metrics,
        }
    }

    /// Answers with the events of the request, in the form that the client asked
    /// for.
    ///
    /// # Errors
    /// The request failed before the first byte of the response.
    pub(super) async fn respond(self, events: mpsc::Receiver<Event>) -> Result<Response, Failure> {
        match self.streamed {
            true => self.stream(events).await,
            false => self.whole(events).await,
        }
    }

    /// Collects the response and sends it in one piece.
    async fn whole(self, mut events: mpsc::Receiver<Event>) -> Result<Response, Failure> {
        let Collected { body, receipt, .. } =
            collect(self.interface, self.meta, &mut events).await?;
        let mut out = Outgoing::new(self.metrics);
        out.begins();
        let mut response = Response::new(Body::new(TimedBody::new(Bytes::from(body), out)));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, JSON);
        self.headers.write(headers);
        headers.extend(receipt_headers(&receipt));
        Ok(response)
    }

    /// Waits for the first token, before which a refusal is still a plain status,
    /// and answers with a stream.
    async fn stream(self, mut events: mpsc::Receiver<Event>) -> Result<Response, Failure> {
        let first = loop {
            match events.recv().await {
                // The task ended without a last event: it panicked.
                None => return Err(Failure::UNKNOWN),
                Some(Event::Failed(failure)) => return Err(failure),
                // Nothing has gone out yet, so there is nothing to take back.
                Some(Event::Restarted) => {}
                Some(event) => break event,
            }
        };
        let writer = ChunkWriter::new(self.interface, self.meta);
        let out = Outgoing::new(self.metrics);
        let mut response =
            Body::from_stream(stream_body(writer, (first, events), out)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, EVENT_STREAM);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // nginx would otherwise collect the stream before it passes it on.
        headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
        self.headers.write(headers);
        Ok(response)
    }
}

/// A whole answer.
pub(super) struct Collected {
    /// The JSON object of the response.
    pub(super) body: Vec<u8>,
    pub(super) receipt: Box<Receipt>,
    /// Tokens of reasoning, which are a part of those of the answer.
    pub(super) reasoning_tokens: u64,
}

/// Collects the events of a request into the body of its response.
///
/// # Errors
/// The request failed.
pub(super) async fn collect(
    interface: &'static dyn Interface,
    meta: ResponseMeta,
    events: &mut mpsc::Receiver<Event>,
) -> Result<Collected, Failure> {
    let mut builder = ResponseBuilder::new(interface, meta);
    while let Some(event) = events.recv().await {
        match event {
            Event::Delta(delta) => builder.delta(delta),
            Event::PromptLogprobs { prompt, tokens } => builder.prompt_logprobs(prompt, tokens),
            Event::ChoiceFinished { choice, reason } => builder.finish_choice(choice, reason),
            Event::Restarted => builder.restart(),
            Event::Failed(failure) => return Err(failure),
            Event::Finished(receipt) => {
                let body = builder.finish(&usage_report(Receipt::clone(&receipt)));
                let reasoning_tokens = builder.reasoning_tokens();
                return Ok(Collected { body, receipt, reasoning_tokens });
            }
        }
    }
    // The task ended without a last event: it panicked.
    Err(Failure::UNKNOWN)
}

impl ResponseHeaders {
    fn write(&self, headers: &mut HeaderMap) {
        write_figures(&self.figures, headers);
        headers.insert(RESERVED, self.reserved.nanos().into());
        if let Ok(class) = HeaderValue::from_str(&self.class) {
            headers.insert(DEVICE_CLASS, class);
        }
    }
}

/// Returns the headers that only a response in one piece can have, because its
/// request has ended.
fn receipt_headers(receipt: &Receipt) -> [(HeaderName, HeaderValue); 3] {
    [
        (ATTRIBUTED, receipt.usage.attributed.nanos().into()),
        (REFERENCE, receipt.usage.reference.nanos().into()),
        (QUEUE, receipt.timings.worker.stages.queue_ns.into()),
    ]
}

/// Returns the figures of `receipt` for the `usage` object.
pub(super) fn usage_report(receipt: Receipt) -> UsageReport {
    let Receipt { usage, timings, class, reserved } = receipt;
    let RequestTimings { front: FrontTimings { read, preprocess }, place, worker } = timings;
    let WorkerTimings { stages, transfers, grammar } = worker;
    UsageReport { usage, class, reserved, stages, transfers, grammar, read, preprocess, place }
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
const DEVICE_CLASS: HeaderName = HeaderName::from_static("x-tollgate-device-class");
const RESERVED: HeaderName = HeaderName::from_static("x-tollgate-reserved-ns");
const REFERENCE: HeaderName = HeaderName::from_static("x-tollgate-reference-ns");
const ATTRIBUTED: HeaderName = HeaderName::from_static("x-tollgate-attributed-ns");
const QUEUE: HeaderName = HeaderName::from_static("x-tollgate-queue-ns");
