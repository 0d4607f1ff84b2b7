//! What a worker answers over gRPC. Each call's work is on a tracked task, and
//! each task ends with its caller or with the worker.

use std::io;
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
use tollgate_text::Tokenizer;
use tollgate_wire::v1;
use tollgate_wire::v1::run_event::Event;
use tollgate_wire::v1::run_request::Message;
use tollgate_wire::v1::worker_server::Worker;
use tonic::{Request, Response, Status, Streaming};

use crate::assignment::Work;
use crate::journal::{Feed, Journal};
use crate::load::Asset;
use crate::monitor::Seen;
use crate::outbox::{self, Outbox};
use crate::sink::{Sink, refused};

/// Everything that the calls need.
pub(crate) struct Service {
    pub(crate) announcement: v1::Announcement,
    pub(crate) model: ModelName,
    pub(crate) epoch: WorkerEpoch,
    pub(crate) assets: Vec<Asset>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) engine: EngineHandle,
    pub(crate) journal: Journal,
    /// How the device is.
    pub(crate) seen: Seen,
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the worker ends: streams without an end of their own end.
    pub(crate) ended: CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    async fn announce(
        &self,
        _: Request<v1::AnnounceRequest>,
    ) -> Result<Response<v1::Announcement>, Status> {
        Ok(Response::new(self.announcement.clone()))
    }

    type AssetStream = Answers<v1::AssetChunk>;

    async fn asset(
        &self,
        request: Request<v1::AssetRequest>,
    ) -> Result<Response<Self::AssetStream>, Status> {
        let hash = request.into_inner().hash;
        let asset = self.assets.iter().find(|asset| asset.hash == hash);
        let bytes = asset.ok_or_else(|| Status::not_found("no such asset"))?.bytes.clone();
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
        let mut requests = request.into_inner();
        let first = tokio::time::timeout(FIRST_MESSAGE, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no assignment came"))??;
        let Some(v1::RunRequest { message: Some(Message::Assignment(assignment)) }) = first else {
            return Err(Status::invalid_argument("the first message must be an assignment"));
        };
        let answers: Self::RunStream = match self.start(assignment) {
            Ok((request, attempt, events)) => {
                let hearing = CancellationToken::new();
                let listening = Listening { hearing: hearing.clone().drop_guard(), events };
                self.tasks.spawn(hear_cancel(
                    requests,
                    self.engine.clone(),
                    (request, attempt),
                    hearing,
                ));
                Box::pin(listening)
            }
            Err(refusal) => Box::pin(tokio_stream::once(Ok(v1::RunEvent {
                event: Some(Event::Refused(refusal)),
            }))),
        };
        Ok(Response::new(answers))
    }

    type StatusStream = Answers<v1::WorkerStatus>;

    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<Self::StatusStream>, Status> {
        let (sender, receiver) = mpsc::channel(1);
        let (engine, epoch, seen) = (self.engine.clone(), self.epoch, self.seen.clone());
        let ended = self.ended.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => (),
                () = tell_status(engine, seen, epoch, sender) => (),
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type JournalStream = Answers<v1::JournalBlock>;

    async fn journal(
        &self,
        request: Request<Streaming<v1::JournalAck>>,
    ) -> Result<Response<Self::JournalStream>, Status> {
        let (sender, receiver) = mpsc::channel(JOURNAL_WINDOW);
        let acks = request.into_inner();
        let (hearing, telling) = (self.journal.clone(), self.journal.clone());
        let ended = self.ended.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => (),
                () = hear_acks(acks, hearing) => (),
                () = tell_blocks(telling, sender) => (),
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

impl Service {
    /// Hands an assignment to the engine; the stream of what becomes of it.
    fn start(
        &self,
        assignment: v1::Assignment,
    ) -> Result<(RequestId, u32, outbox::Inbox), v1::Refused> {
        let work = Work::check(assignment, &self.model).map_err(refused)?;
        if self.seen.rests() {
            return Err(refused(Refusal {
                reason: RefusedReason::Draining,
                retry_after: Some(REST),
                message: "the worker's device is not well".to_owned(),
            }));
        }
        if self.journal.is_full() {
            return Err(refused(Refusal {
                reason: RefusedReason::Overloaded,
                retry_after: Some(JOURNAL_WAIT),
                message: "the worker's journal waits to be taken".to_owned(),
            }));
        }
        let (request, attempt) = (work.request.clone(), work.attempt);
        let (outbox, events) = self.channel(&request, attempt);
        let sink = Sink::new(Arc::clone(&self.tokenizer), work.choices, &work.stops, outbox);
        match self.engine.submit(work.submission(Box::new(sink))) {
            Ok(()) => Ok((request, attempt, events)),
            Err(error) => {
                // The stream was never the gateway's: dropping it cancels
                // nothing that is not there, unless its id is another's.
                events.forget();
                Err(refused(error.into()))
            }
        }
    }

    /// Where the engine answers. When the gateway drops its stream without a
    /// cancel the request ends too, by our fault: nobody is left to read it.
    fn channel(&self, request: &RequestId, attempt: u32) -> (Outbox, outbox::Inbox) {
        let (engine, request) = (self.engine.clone(), request.clone());
        outbox::channel(move || engine.cancel(&request, attempt, CancelReason::Fault))
    }
}

/// The events of a request; dropped, it ends the task that hears its cancel.
struct Listening {
    events: outbox::Inbox,
    #[expect(dead_code, reason = "it acts when it is dropped")]
    hearing: tokio_util::sync::DropGuard,
}

impl Stream for Listening {
    type Item = Result<v1::RunEvent, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        Pin::new(&mut self.events).poll_next(context)
    }
}

/// Waits for the gateway's cancel. A gateway that means one says so: where its
/// messages merely end, it has died, and that is no client's doing.
async fn hear_cancel(
    mut requests: Streaming<v1::RunRequest>,
    engine: EngineHandle,
    (request, attempt): (RequestId, u32),
    hearing: CancellationToken,
) {
    let message = tokio::select! {
        () = hearing.cancelled() => return,
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

/// Says at once how things are, then each change, at most ten a second, and at
/// least one: who hears nothing knows that nobody is there.
async fn tell_status(
    engine: EngineHandle,
    seen: Seen,
    epoch: WorkerEpoch,
    sender: mpsc::Sender<Result<v1::WorkerStatus, Status>>,
) {
    let mut ticks = tokio::time::interval(STATUS_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut told: Option<(v1::WorkerStatus, Instant)> = None;
    loop {
        tokio::select! {
            () = sender.closed() => return,
            _ = ticks.tick() => (),
        }
        let status = status_message(epoch, &engine.status(), seen.message());
        let is_news = told
            .as_ref()
            .is_none_or(|(said, at)| *said != status || at.elapsed() >= STATUS_AT_LEAST_EVERY);
        if !is_news {
            continue;
        }
        if sender.send(Ok(status.clone())).await.is_err() {
            return;
        }
        told = Some((status, Instant::now()));
    }
}

/// A worker whose device rests takes nothing new, as one that drains.
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
    }
}

async fn hear_acks(mut acks: Streaming<v1::JournalAck>, journal: Journal) {
    while let Ok(Some(v1::JournalAck { epoch, block })) = acks.message().await {
        let Ok(epoch) = WorkerEpoch::try_from(epoch) else {
            tracing::warn!("a gateway acknowledged a block of no epoch");
            continue;
        };
        let journal = journal.clone();
        // It deletes files.
        let done = tokio::task::spawn_blocking(move || journal.acknowledge(epoch, block)).await;
        if done.is_err() {
            return;
        }
    }
}

/// Sends every block that is on the disk, then waits for more.
async fn tell_blocks(journal: Journal, sender: mpsc::Sender<Result<v1::JournalBlock, Status>>) {
    let mut synced = journal.watch();
    let mut feed = journal.feed();
    loop {
        synced.mark_unchanged();
        loop {
            let (next, block) = match next_block(feed).await {
                Ok(Some(next)) => next,
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(%error, "the journal cannot be read");
                    let _ = sender.send(Err(Status::data_loss("the journal is damaged"))).await;
                    return;
                }
            };
            feed = next;
            let Some(block) = block else { break };
            if sender.send(Ok(block)).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = sender.closed() => return,
            changed = synced.changed() => if changed.is_err() { return },
        }
    }
}

type Next = (Feed, Option<v1::JournalBlock>);

/// Reads a file, so not on this thread. `None`: the runtime is ending.
async fn next_block(mut feed: Feed) -> io::Result<Option<Next>> {
    let read = tokio::task::spawn_blocking(move || {
        let block = feed.next()?;
        Ok((feed, block.map(v1::JournalBlock::from)))
    });
    read.await.ok().transpose()
}

/// Bytes of an asset in one message.
const ASSET_CHUNK: usize = 256 * 1024;
/// How long a stream may stay without its assignment.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// How often the status is looked at.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// How long nothing is said where nothing changes.
const STATUS_AT_LEAST_EVERY: Duration = Duration::from_millis(500);
/// When to ask again a worker whose device is not well.
const REST: Duration = Duration::from_secs(10);
/// When to ask again a worker whose journal is full.
const JOURNAL_WAIT: Duration = Duration::from_secs(1);
/// Blocks on their way to the gateway.
const JOURNAL_WINDOW: usize = 64;
