//! A worker for tests: the real protocol over a real Unix socket. Instead of an
//! engine the test answers each request by hand.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Mutex;

use aws_lc_rs::digest::{SHA256, digest};
use futures_util::{Stream, StreamExt};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream, WatchStream};
use tollgate_domain::WorkerName;
use tollgate_wire::WorkerAddress;
use tollgate_wire::v1::run_event::Event;
use tollgate_wire::v1::run_request::Message;
use tollgate_wire::v1::worker_server::{Worker, WorkerServer};
use tollgate_wire::v1::*;
use tonic::{Request, Response, Status, Streaming};

use crate::workers::WorkerEndpoint;

/// The model that the fake worker serves, with the shipped tokenizer.
pub const MODEL: &str = "fake";
/// Tokens of that model's context.
pub const CONTEXT: u32 = 256;

/// A fake worker that listens on a socket.
pub struct FakeWorker {
    /// The worker's address.
    pub endpoint: WorkerEndpoint,
    /// The requests that arrive, in order.
    pub runs: mpsc::Receiver<FakeRun>,
    /// The sender of blocks into the worker's journal.
    pub journal: mpsc::Sender<JournalBlock>,
    /// The blocks that were acknowledged.
    pub acks: mpsc::Receiver<JournalAck>,
    /// The load that the worker reports.
    pub status: watch::Sender<WorkerStatus>,
    /// The worker's epoch, 32 hex digits.
    pub epoch: String,
    server: JoinHandle<()>,
}

/// One request as the fake worker sees it.
pub struct FakeRun {
    /// The gateway's order.
    pub assignment: Assignment,
    /// The gateway's cancels.
    pub cancels: mpsc::Receiver<CancelReason>,
    events: mpsc::Sender<Result<RunEvent, Status>>,
}

impl FakeRun {
    /// Sends `event`. Returns false if the gateway has dropped the stream.
    pub async fn send(&self, event: Event) -> bool {
        self.events.send(Ok(RunEvent { event: Some(event) })).await.is_ok()
    }

    /// Sends one token of a choice with its text, at a cost of `figure` so far.
    pub async fn token(&self, choice: u32, text: &str, figure: u64) -> bool {
        self.send(Event::Delta(delta(choice, text, figure))).await
    }

    /// Sends one token of the first choice, after so much device time.
    pub async fn token_after(&self, text: &str, attributed_ns: u64) -> bool {
        self.send(Event::Delta(Delta { attributed_ns, ..delta(0, text, 100) })).await
    }

    /// Ends a choice.
    pub async fn end_choice(&self, choice: u32, reason: FinishReason) {
        let finished = ChoiceFinished { choice, reason: reason.into(), completion_tokens: 1 };
        self.send(Event::ChoiceFinished(finished)).await;
    }

    /// Ends the request with `tokens` generated at a cost of `figure`.
    pub async fn end(self, tokens: u64, figure: u64) {
        self.end_with_times(tokens, figure, [1, 2, 3, 4, 5]).await;
    }

    /// Ends the request like [`Self::end`], with these `times` for queue, prefill,
    /// decode and both transfers, nanoseconds.
    pub async fn end_with_times(self, tokens: u64, figure: u64, times: [u64; 5]) {
        let usage = self.usage(tokens, figure);
        self.finish(usage, times).await;
    }

    /// Ends a request that has taken so much device time and has `tokens` tokens.
    pub async fn end_after(self, tokens: u64, attributed_ns: u64) {
        let usage = Usage { attributed_ns, ..self.usage(tokens, 100) };
        self.finish(usage, [1, 2, 3, 4, 5]).await;
    }

    fn usage(&self, tokens: u64, figure: u64) -> Usage {
        Usage {
            prompt_tokens: self.assignment.prompts.iter().map(|p| p.tokens.len() as u64).sum(),
            cached_tokens: 0,
            completion_tokens: tokens,
            attributed_ns: figure,
            reference_ns: figure,
        }
    }

    async fn finish(self, usage: Usage, times: [u64; 5]) {
        let [queue_ns, prefill_ns, decode_ns, to_device_ns, to_host_ns] = times;
        let stages = Stages { queue_ns, prefill_ns, decode_ns };
        let transfers = Some(Transfers { to_device_ns, to_host_ns });
        let (usage, stages) = (Some(usage), Some(stages));
        self.send(Event::Finished(Finished { usage, stages, transfers, grammar_ns: 0 })).await;
    }

    /// Answers with `text` in one token and ends the request.
    pub async fn answer(self, text: &str) {
        self.token(0, text, 100).await;
        self.end_choice(0, FinishReason::Stop).await;
        self.end(1, 100).await;
    }

    /// Refuses the request.
    pub async fn refuse(self, reason: RefusedReason) {
        self.refuse_after(reason, 0).await;
    }

    /// Refuses the request after so much host time for its form.
    pub async fn refuse_after(self, reason: RefusedReason, grammar_ns: u64) {
        let refused = Refused {
            reason: reason.into(),
            retry_after_ms: 1_500,
            message: "refused".into(),
            grammar_ns,
        };
        self.send(Event::Refused(refused)).await;
    }
}

fn delta(choice: u32, text: &str, figure: u64) -> Delta {
    Delta {
        choice,
        text: text.into(),
        tokens: vec![7],
        logprobs: Vec::new(),
        attributed_ns: figure,
        reference_ns: figure,
        text_bytes: Vec::new(),
    }
}

impl FakeWorker {
    /// Starts worker `name` in folder `at`.
    pub fn start(at: &Path, name: &str) -> Self {
        Self::start_announcing(at, name, |_| {})
    }

    /// Starts a worker like [`Self::start`], with a changed announcement.
    pub fn start_announcing(at: &Path, name: &str, change: impl FnOnce(&mut Announcement)) -> Self {
        let socket = at.join(format!("{name}.sock"));
        let listener = UnixListener::bind(&socket).expect("binds");
        let epoch = format!("{:032x}", u128::from(name.as_bytes()[0]));
        let assets = [tokenizer(), TEMPLATE.as_bytes().to_vec()];
        let mut announcement = announcement(name, &epoch, &assets);
        change(&mut announcement);
        let (run_sender, runs) = mpsc::channel(64);
        let (journal, blocks) = mpsc::channel(64);
        let (ack_sender, acks) = mpsc::channel(64);
        let first = WorkerStatus { epoch: epoch.clone(), ..WorkerStatus::default() };
        let (status, statuses) = watch::channel(first);
        let service = Service {
            announcement,
            assets,
            runs: run_sender,
            statuses,
            blocks: Mutex::new(Some(blocks)),
            acks: ack_sender,
        };
        let name = WorkerName::new(name).expect("a name");
        let serving = tonic::transport::Server::builder()
            .add_service(WorkerServer::new(service))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let server = tests_runtime_spawn(async move {
            serving.await.expect("serves");
        });
        Self {
            endpoint: WorkerEndpoint {
                name,
                address: WorkerAddress::Socket(socket),
                is_shareable: false,
            },
            runs,
            journal,
            acks,
            status,
            epoch,
            server,
        }
    }

    /// Waits for the next request.
    pub async fn run(&mut self) -> FakeRun {
        self.runs.recv().await.expect("the worker serves")
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[allow(clippy::disallowed_methods, reason = "a test's runtime ends with the test")]
fn tests_runtime_spawn(future: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(future)
}

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn tokenizer() -> Vec<u8> {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tollgate-demo/tokenizer.json");
    std::fs::read(path).expect("the shipped model has a tokenizer")
}

fn hash(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn announcement(name: &str, epoch: &str, [tokenizer, template]: &[Vec<u8>; 2]) -> Announcement {
    let table = r#"{"version":"test","step_ns":1000.0,"linear":[[1,10000.0],[256,100000.0]],
        "head":[[1,1000.0],[32,2000.0]],"ns_per_kv_byte":0.001,"ns_per_attention_flop":0.0001,
        "shape":{"kv_bytes_per_token":1024,"flop_per_pair":1024},"reference_batch":32,
        "reference_chunk":256}"#;
    let model = Model {
        name: MODEL.into(),
        hash: "0123456789abcdef".into(),
        tokenizer_asset: hash(tokenizer),
        template_asset: hash(template),
        context_length: CONTEXT,
        vocabulary: 2_048,
        end_tokens: vec![2],
        cost_table_json: table.into(),
        template_context_json: r#"{"eos_token":"<|im_end|>"}"#.into(),
        sampling_defaults: None,
    };
    Announcement {
        worker: name.into(),
        epoch: epoch.into(),
        engine_version: "0".into(),
        device: Some(Device {
            class: "cpu".into(),
            name: "fake".into(),
            uuid: String::new(),
            threads: 1,
        }),
        models: vec![model],
    }
}

struct Service {
    announcement: Announcement,
    assets: [Vec<u8>; 2],
    runs: mpsc::Sender<FakeRun>,
    statuses: watch::Receiver<WorkerStatus>,
    blocks: Mutex<Option<mpsc::Receiver<JournalBlock>>>,
    acks: mpsc::Sender<JournalAck>,
}

type Stream_<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    async fn announce(
        &self,
        _: Request<AnnounceRequest>,
    ) -> Result<Response<Announcement>, Status> {
        Ok(Response::new(self.announcement.clone()))
    }

    type AssetStream = Stream_<AssetChunk>;

    async fn asset(
        &self,
        request: Request<AssetRequest>,
    ) -> Result<Response<Self::AssetStream>, Status> {
        let wanted = request.into_inner().hash;
        let found = self.assets.iter().find(|asset| hash(asset) == wanted);
        let bytes = found.ok_or_else(|| Status::not_found("no such asset"))?;
        let chunks: Vec<_> =
            bytes.chunks(256 * 1024).map(|data| Ok(AssetChunk { data: data.to_vec() })).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(chunks))))
    }

    type RunStream = Stream_<RunEvent>;

    async fn run(
        &self,
        request: Request<Streaming<RunRequest>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|request| request.message);
        let Some(Message::Assignment(assignment)) = first else {
            return Err(Status::invalid_argument("no assignment"));
        };
        let (events, receiver) = mpsc::channel(8);
        let (cancel, cancels) = mpsc::channel(8);
        tests_runtime_spawn(async move {
            while let Ok(Some(RunRequest { message: Some(Message::Cancel(found)) })) =
                requests.message().await
            {
                let _ = cancel.send(found.reason()).await;
            }
        });
        let run = FakeRun { assignment, cancels, events };
        self.runs.send(run).await.map_err(|_| Status::unavailable("the test ended"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type StatusStream = Stream_<WorkerStatus>;

    async fn status(
        &self,
        _: Request<StatusRequest>,
    ) -> Result<Response<Self::StatusStream>, Status> {
        Ok(Response::new(Box::pin(WatchStream::new(self.statuses.clone()).map(Ok))))
    }

    async fn set_health_terms(
        &self,
        _: Request<HealthTerms>,
    ) -> Result<Response<HealthTermsInForce>, Status> {
        Ok(Response::new(HealthTermsInForce {}))
    }

    async fn settle(&self, _: Request<SettleRequest>) -> Result<Response<Settled>, Status> {
        // As a worker of the version before there were shared workers.
        Err(Status::unimplemented("unknown call"))
    }

    async fn echo(&self, request: Request<EchoMessage>) -> Result<Response<EchoMessage>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    type JournalStream = Stream_<JournalBlock>;

    async fn journal(
        &self,
        request: Request<Streaming<JournalAck>>,
    ) -> Result<Response<Self::JournalStream>, Status> {
        let mut requests = request.into_inner();
        let acks = self.acks.clone();
        tests_runtime_spawn(async move {
            while let Ok(Some(ack)) = requests.message().await {
                let _ = acks.send(ack).await;
            }
        });
        let blocks = self.blocks.lock().expect("a test").take();
        let blocks = blocks.ok_or_else(|| Status::unavailable("followed already"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(blocks).map(Ok))))
    }
}
