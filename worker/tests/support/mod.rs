//! A whole worker in this process, on the demo model, and the gateway's end of its
//! socket.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tollgate_domain::{Block, ModelName, WorkerName};
use tollgate_wire::v1;
use tollgate_wire::v1::run_event::Event;
use tollgate_wire::v1::run_request::Message;
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_worker::{ListenAt, WorkerError, WorkerOptions, serve};
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

pub const MODEL: &str = "tollgate-demo";

/// A running worker.
pub struct Bench {
    pub client: WorkerClient<Channel>,
    pub announcement: v1::Announcement,
    pub serving: JoinHandle<Result<(), WorkerError>>,
    /// The write end of the parent's pipe. Dropping it stops the worker.
    pub parent: Option<PipeWriter>,
}

pub fn options(data: &Path) -> WorkerOptions {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tollgate-demo");
    let mut options = WorkerOptions::new(
        WorkerName::new("0").expect("a name"),
        ListenAt::Socket(socket(data)),
        data.to_owned(),
        model,
        ModelName::new(MODEL).expect("a name"),
    );
    options.threads = Some(1);
    options.kv_bytes = 64 << 20;
    options
}

fn socket(data: &Path) -> PathBuf {
    data.join("run/worker.sock")
}

pub async fn start(data: &Path, change: impl FnOnce(&mut WorkerOptions)) -> Bench {
    let mut options = options(data);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    options.parent = Some(OwnedFd::from(reader));
    change(&mut options);
    let tasks = tokio_util::task::TaskTracker::new();
    let serving = tasks.spawn(serve(options));
    let mut client = loop {
        match connect(data).await {
            Ok(client) => break client,
            Err(_) if !serving.is_finished() => tokio::task::yield_now().await,
            Err(error) => panic!("{error}: {:?}", serving.await),
        }
    };
    let announcement =
        client.announce(v1::AnnounceRequest::default()).await.expect("announces").into_inner();
    Bench { client, announcement, serving, parent: Some(writer) }
}

async fn connect(data: &Path) -> std::io::Result<WorkerClient<Channel>> {
    let mut stream = Some(TokioIo::new(UnixStream::connect(socket(data)).await?));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| std::io::Error::other("the connection ended")) }
    });
    let channel = Endpoint::from_static("http://worker")
        .connect_with_connector(connector)
        .await
        .map_err(std::io::Error::other)?;
    Ok(WorkerClient::new(channel))
}

pub fn assignment(request: &str, tenant: &str, tokens: Vec<u32>) -> v1::Assignment {
    v1::Assignment {
        request_id: request.to_owned(),
        tenant: tenant.to_owned(),
        key: "k1".to_owned(),
        model: MODEL.to_owned(),
        weight: 1.0,
        prompts: vec![v1::Prompt { tokens }],
        choices: 1,
        max_tokens: 24,
        sampling: Some(v1::Sampling { top_p: 1.0, seed: 7, ..v1::Sampling::default() }),
        queue_deadline_ms: 60_000,
        ..v1::Assignment::default()
    }
}

/// A running request: a sender for further messages and the stream of events.
pub struct Running {
    pub messages: mpsc::Sender<v1::RunRequest>,
    pub events: Streaming<v1::RunEvent>,
}

/// The outcome of a request.
#[derive(Debug, Default)]
pub struct Outcome {
    pub texts: Vec<String>,
    pub tokens: usize,
    pub logprobs: usize,
    pub reasons: Vec<v1::FinishReason>,
    pub usage: Option<v1::Usage>,
    pub refused: Option<v1::Refused>,
}

impl Bench {
    pub async fn run(&self, assignment: v1::Assignment) -> Running {
        let choices = assignment.prompts.len() * assignment.choices as usize;
        assert!(choices > 0);
        let (messages, receiver) = mpsc::channel(2);
        let first = v1::RunRequest { message: Some(Message::Assignment(assignment)) };
        messages.send(first).await.expect("there is room");
        let events = self
            .client
            .clone()
            .run(ReceiverStream::new(receiver))
            .await
            .expect("runs")
            .into_inner();
        Running { messages, events }
    }

    /// Returns a reader of all blocks, which acknowledges each one.
    pub async fn blocks(&self) -> BlockReader {
        let (acks, receiver) = mpsc::channel(8);
        let blocks = self
            .client
            .clone()
            .journal(ReceiverStream::new(receiver))
            .await
            .expect("reads")
            .into_inner();
        BlockReader { acks, blocks }
    }

    /// Opens another connection, as another gateway.
    pub async fn another(&self, data: &Path) -> Self {
        let client = connect(data).await.expect("connects");
        let tasks = tokio_util::task::TaskTracker::new();
        // Only the first one ends the worker.
        let serving = tasks.spawn(async { Ok(()) });
        Self { client, announcement: self.announcement.clone(), serving, parent: None }
    }

    /// Closes the parent's pipe and waits for the worker.
    pub async fn end(mut self) -> Result<(), WorkerError> {
        drop(self.parent.take());
        self.serving.await.expect("does not panic")
    }
}

pub struct BlockReader {
    acks: mpsc::Sender<v1::JournalAck>,
    blocks: Streaming<v1::JournalBlock>,
}

impl BlockReader {
    /// Returns the next block. Checks it like a gateway and acknowledges it.
    pub async fn next(&mut self) -> Option<Block> {
        let block = self.peek().await?;
        self.acknowledge(&block).await;
        Some(Block::try_from(block).expect("an honest block"))
    }

    /// Returns the next message and does not acknowledge it.
    pub async fn peek(&mut self) -> Option<v1::JournalBlock> {
        self.blocks.message().await.ok()?
    }

    pub async fn acknowledge(&self, block: &v1::JournalBlock) {
        let ack = v1::JournalAck { epoch: block.epoch.clone(), block: block.block };
        let _ = self.acks.send(ack).await;
    }
}

impl Running {
    pub async fn outcome(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while let Some(event) = self.events.message().await.expect("no error") {
            outcome.take(event.event.expect("an event"));
        }
        outcome
    }
}

impl Outcome {
    fn take(&mut self, event: Event) {
        match event {
            Event::Delta(delta) => {
                let choice = delta.choice as usize;
                if self.texts.len() <= choice {
                    self.texts.resize(choice + 1, String::new());
                }
                self.texts[choice].push_str(&delta.text);
                self.tokens += delta.tokens.len();
                self.logprobs += delta.logprobs.len();
            }
            Event::ChoiceFinished(finished) => self.reasons.push(finished.reason()),
            Event::Finished(finished) => self.usage = finished.usage,
            Event::Refused(refused) => self.refused = Some(refused),
            Event::PromptLogprobs(prompt) => self.logprobs += prompt.logprobs.len(),
        }
    }
}
