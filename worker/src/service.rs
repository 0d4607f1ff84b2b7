//! The gRPC service of a worker. Each call runs on a tracked task, and each task
//! ends with its caller or with the worker.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_domain::{DeviceNanos, ModelName, RequestId, WorkerEpoch};
use tollgate_engine::{CancelReason, EngineHandle, EngineStatus, Refusal, RefusedReason};
use tollgate_text::{TextStream, Tokenizer};
use tollgate_wire::v1;
use tollgate_wire::v1::run_event::Event;
use tollgate_wire::v1::run_request::Message;
use tollgate_wire::v1::worker_server::Worker;
use tonic::{Request, Response, Status, Streaming};

use crate::assignment::Work;
use crate::grammars::{Grammars, RefusedForm};
use crate::journal::Journal;
use crate::journal_streams::JournalStreams;
use crate::load::Asset;
use crate::monitor::{CheckTerms, HealthTerms, LatestHealth};
use crate::open_attempts::{OpenAttempts, RetiredGateway};
use crate::outbox::{self, Outbox};
use crate::served::{self, check_claim, link_of};
use crate::sink::{Sink, refused};

/// The state that all calls share.
pub(crate) struct Service {
    pub(crate) announcement: v1::Announcement,
    pub(crate) model: ModelName,
    pub(crate) epoch: WorkerEpoch,
    pub(crate) assets: Vec<Asset>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) grammars: Grammars,
    pub(crate) engine: EngineHandle,
    pub(crate) journal: Journal,
    pub(crate) streams: JournalStreams,
    pub(crate) attempts: OpenAttempts,
    /// The device's health.
    pub(crate) health: LatestHealth,
    /// The terms by which the health is judged.
    pub(crate) health_terms: HealthTerms,
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the worker ends, which ends the streams that have no end of
    /// their own.
    pub(crate) ended: CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    async fn announce(
        &self,
        request: Request<v1::AnnounceRequest>,
    ) -> Result<Response<v1::Announcement>, Status> {
        let v1::AnnounceRequest { ledger, probe } = request.get_ref();
        served::announce(&request, ledger, *probe)?;
        Ok(Response::new(self.announcement.clone()))
    }

    type AssetStream = Answers<v1::AssetChunk>;

    async fn asset(
        &self,
        request: Request<v1::AssetRequest>,
    ) -> Result<Response<Self::AssetStream>, Status> {
        check_claim(&request)?;
        let hash = request.into_inner().hash;
        let asset = self.assets.iter().find(|asset| asset.hash == hash);
        let bytes = asset.ok_or_else(|| Status::not_found("no such asset"))?.bytes.clone();
        // Chunks keep each message below the limit of gRPC messages.
        let chunks = bytes.len().div_ceil(ASSET_CHUNK);
        let chunk = move |index: usize| {
            let end = bytes.len().min((index + 1) * ASSET_CHUNK);
            Ok(v1::AssetChunk { data: bytes[index * ASSET_CHUNK..end].to_vec() })
        };
        Ok(Response::new(Box::pin(tokio_stream::iter((0..chunks).map(chunk)))))
    }

    type RunStream = Answers<v1::RunEvent>;

    async fn run(
        &self,
        request: Request<Streaming<v1::RunRequest>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        check_claim(&request)?;
        let mut requests = request.into_inner();
        // A caller that sends nothing must not hold a task for ever.
        let first = tokio::time::timeout(FIRST_MESSAGE, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no assignment arrived in time"))??;
        let Some(v1::RunRequest { message: Some(Message::Assignment(assignment)) }) = first else {
            return Err(Status::invalid_argument("the first message must be an assignment"));
        };
        let answers: Self::RunStream = match self.start(assignment).await {
            Ok((request, attempt, events)) => {
                // Ends the task that waits for a cancel as soon as the answer ends.
                let listening = CancellationToken::new();
                let stream = EventStream { listening: listening.clone().drop_guard(), events };
                self.tasks.spawn(receive_cancel(
                    requests,
                    self.engine.clone(),
                    (request, attempt),
                    listening,
                ));
                Box::pin(stream)
            }
            // A refusal is an event and not a gRPC error, so that all its fields
            // reach the gateway.
            Err(refusal) => Box::pin(tokio_stream::once(Ok(v1::RunEvent {
                event: Some(Event::Refused(refusal)),
            }))),
        };
        Ok(Response::new(answers))
    }

    type StatusStream = Answers<v1::WorkerStatus>;

    async fn status(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<Self::StatusStream>, Status> {
        check_claim(&request)?;
        // A slow gateway must not collect old statuses, so the channel has one place.
        let (sender, receiver) = mpsc::channel(1);
        let (engine, epoch, health) = (self.engine.clone(), self.epoch, self.health.clone());
        let ended = self.ended.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => (),
                () = send_status(engine, health, epoch, sender) => (),
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn set_health_terms(
        &self,
        request: Request<v1::HealthTerms>,
    ) -> Result<Response<v1::HealthTermsInForce>, Status> {
        check_claim(&request)?;
        let terms = CheckTerms::try_from(request.into_inner());
        self.health_terms.set(terms.map_err(|error| Status::invalid_argument(error.to_string()))?);
        Ok(Response::new(v1::HealthTermsInForce {}))
    }

    async fn echo(
        &self,
        request: Request<v1::EchoMessage>,
    ) -> Result<Response<v1::EchoMessage>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    type JournalStream = Answers<v1::JournalBlock>;

    async fn journal(
        &self,
        request: Request<Streaming<v1::JournalAck>>,
    ) -> Result<Response<Self::JournalStream>, Status> {
        check_claim(&request)?;
        let (sender, receiver) = mpsc::channel(JOURNAL_WINDOW);
        let gateway = link_of(&request).map(|link| link.gateway().clone());
        let streams = self.streams.clone();
        let ended = self.ended.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => (),
                () = streams.serve(gateway, request.into_inner(), sender) => (),
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn settle(
        &self,
        request: Request<v1::SettleRequest>,
    ) -> Result<Response<v1::Settled>, Status> {
        check_claim(&request)?;
        let v1::SettleRequest { gateways } = request.into_inner();
        if gateways.len() > MOST_SETTLED {
            return Err(Status::invalid_argument("too many gateways in one call"));
        }
        self.attempts.retire(&gateways).await;
        // The engine has journalled the end of each attempt by now.
        let last = self.journal.newest_block();
        while !self.journal.is_acknowledged_to(last) {
            tokio::time::sleep(SETTLED_POLL).await;
        }
        Ok(Response::new(v1::Settled {}))
    }
}

impl Service {
    /// Submits an assignment to the engine. Returns the stream of its events.
    async fn start(
        &self,
        assignment: v1::Assignment,
    ) -> Result<(RequestId, u32, outbox::Inbox), v1::Refused> {
        let mut work = Work::check(assignment, &self.model).map_err(refused)?;
        if self.health.rests() {
            return Err(refused(Refusal {
                reason: RefusedReason::Draining,
                retry_after: Some(REST),
                message: "the worker's device is not well".to_owned(),
            }));
        }
        // Work that cannot be journalled cannot be billed, so it must not begin.
        if self.journal.is_full() {
            return Err(refused(Refusal {
                reason: RefusedReason::Overloaded,
                retry_after: Some(JOURNAL_WAIT),
                message: "the worker's journal waits to be taken".to_owned(),
            }));
        }
        // Ids of another form name no gateway that could be retired.
        let attempt = work.request.gateway().map(|gateway| self.attempts.begin(gateway));
        let attempt = attempt.transpose().map_err(|RetiredGateway| {
            let message = "the gateway was taken for lost; it must be started again".to_owned();
            refused(Refusal { reason: RefusedReason::Draining, retry_after: None, message })
        })?;
        // Last, because it is the only check that costs processor time.
        if let Some(grammar) = work.grammar.take() {
            let compiled = self.grammars.compile(work.tenant(), grammar).await;
            work.constrain(compiled.map_err(|RefusedForm { refusal, spent }| v1::Refused {
                grammar_ns: spent.as_nanos() as u64,
                ..refused(refusal)
            })?);
        }
        let (request, number) = (work.request.clone(), work.attempt);
        let (outbox, events) = self.channel(&request, number);
        let tokenizer = Arc::clone(&self.tokenizer);
        let text = TextStream::showing(tokenizer, work.shown_tokens.as_slice().into());
        let sink = Sink::new(text, (&work, attempt), outbox);
        match self.engine.submit(work.submission(Box::new(sink))) {
            Ok(()) => Ok((request, number, events)),
            Err(error) => {
                // The gateway never had this stream. Dropping it must not cancel
                // anything: the refused request may have the id of a running one.
                events.forget();
                Err(refused(error.into()))
            }
        }
    }

    /// Creates the queue of the request's events. A gateway that drops the stream
    /// without a cancel has failed, so the request ends as a fault and not by the
    /// client.
    fn channel(&self, request: &RequestId, attempt: u32) -> (Outbox, outbox::Inbox) {
        let (engine, request) = (self.engine.clone(), request.clone());
        outbox::channel(move || engine.cancel(&request, attempt, CancelReason::Fault))
    }
}

/// The event stream of a request. Dropping it ends the task that waits for the
/// cancel.
struct EventStream {
    events: outbox::Inbox,
    #[expect(dead_code, reason = "it acts when it is dropped")]
    listening: tokio_util::sync::DropGuard,
}

impl Stream for EventStream {
    type Item = Result<v1::RunEvent, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        Pin::new(&mut self.events).poll_next(context)
    }
}

/// Waits for the gateway's cancel message. If the messages end without one, the
/// gateway has died, which is a fault and not the client's doing.
async fn receive_cancel(
    mut requests: Streaming<v1::RunRequest>,
    engine: EngineHandle,
    (request, attempt): (RequestId, u32),
    listening: CancellationToken,
) {
    let message = tokio::select! {
        () = listening.cancelled() => return,
        message = requests.message() => message,
    };
    let reason = match message {
        Ok(Some(v1::RunRequest { message: Some(Message::Cancel(cancel)) })) => {
            match cancel.reason() {
                v1::CancelReason::Client => CancelReason::Client,
                v1::CancelReason::Deadline => CancelReason::Deadline,
            }
        }
        _ => CancelReason::Fault,
    };
    engine.cancel(&request, attempt, reason);
}

/// Sends the status at once and after each change, at most every [`STATUS_EVERY`]
/// and at least every [`STATUS_AT_LEAST_EVERY`]. The gateway takes silence for a
/// dead worker.
#[expect(clippy::disallowed_methods, reason = "the pause between two messages is measured")]
async fn send_status(
    engine: EngineHandle,
    health: LatestHealth,
    epoch: WorkerEpoch,
    sender: mpsc::Sender<Result<v1::WorkerStatus, Status>>,
) {
    let mut ticks = tokio::time::interval(STATUS_EVERY);
    // After a stall one status is enough; a burst of old ones has no use.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last_sent: Option<(v1::WorkerStatus, Instant)> = None;
    loop {
        tokio::select! {
            // A gateway that leaves is noticed even if the status never changes.
            () = sender.closed() => return,
            _ = ticks.tick() => (),
        }
        let status = status_message(epoch, &engine.status(), health.message());
        let is_due = last_sent
            .as_ref()
            .is_none_or(|(sent, at)| *sent != status || at.elapsed() >= STATUS_AT_LEAST_EVERY);
        if !is_due {
            continue;
        }
        if sender.send(Ok(status.clone())).await.is_err() {
            return;
        }
        last_sent = Some((status, Instant::now()));
    }
}

/// Builds the status message. A worker with an unhealthy device reports that it
/// drains, so that the gateway sends it no requests.
fn status_message(
    epoch: WorkerEpoch,
    status: &EngineStatus,
    health: Option<v1::DeviceHealth>,
) -> v1::WorkerStatus {
    let EngineStatus {
        queued,
        running,
        kv_blocks_total,
        kv_blocks_free,
        backlog,
        draining,
        steps,
        busy,
        counts,
        preemptions,
        waiting_interactive,
        waiting_batch,
    } = *status;
    let DeviceNanos(backlog_ns) = backlog;
    let DeviceNanos(busy_ns) = busy;
    v1::WorkerStatus {
        epoch: epoch.to_string(),
        queued,
        running,
        kv_blocks_total,
        kv_blocks_free,
        backlog_ns,
        draining: draining || health.is_some_and(|health| health.rests),
        steps,
        busy_ns,
        health,
        preemptions,
        step_counts: Some(v1::StepCounts {
            by_time: counts.by_time().to_vec(),
            by_sequences: counts.by_sequences().to_vec(),
            sequences: counts.sequences(),
        }),
        waiting_interactive_ns: waiting_interactive.nanos(),
        waiting_batch_ns: waiting_batch.nanos(),
    }
}

/// Bytes of an asset in one message at most.
const ASSET_CHUNK: usize = 256 * 1024;
/// Time that a caller has to send its assignment.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// Time between two checks of the status.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// Time between two status messages if nothing changes.
const STATUS_AT_LEAST_EVERY: Duration = Duration::from_millis(500);
/// Time after which a worker with an unhealthy device may be asked again.
const REST: Duration = Duration::from_secs(10);
/// Time after which a worker with a full journal may be asked again.
const JOURNAL_WAIT: Duration = Duration::from_secs(1);
/// Gateways that one call settles at most.
const MOST_SETTLED: usize = 1_024;
/// Time between two looks for the acknowledgement of a retired gateway's last block.
const SETTLED_POLL: Duration = Duration::from_millis(20);
/// Blocks that are sent ahead of the gateway's reads.
const JOURNAL_WINDOW: usize = 64;
