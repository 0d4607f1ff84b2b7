//! Measures the latency that the gateway adds to a request. The same short greedy
//! chat is sent over TLS through the gateway, on a reused connection, and directly
//! over the worker's socket with the same tokens: in turn, one at a time.
//!
//! `direct URL CA KEYFILE SOCKET MODEL_DIR REQUESTS MAX_TOKENS` prints JSON: the
//! microseconds of each pair. Fails if the two answers differ, because then the
//! work differed, too.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tollgate_domain::{RequestId, UtcTime};
use tollgate_loadtest::client::{Connection, Protocol, Target};
use tollgate_text::{
    Chat, ChatMessage, ChatTemplate, Role, Tokenizer, TokenizerConfig, encode_chat,
};
use tollgate_wire::v1::run_event::Event;
use tollgate_wire::v1::run_request::Message;
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_wire::v1::{self, AnnounceRequest, Assignment, RunRequest};
use tonic::transport::{Channel, Endpoint};

const QUESTION: &str = "What is a rate limit?";

/// Pairs that are run first and not counted.
const WARM_UP: u32 = 20;

struct Arguments {
    url: String,
    ca: PathBuf,
    key: String,
    socket: PathBuf,
    model: PathBuf,
    requests: u32,
    max_tokens: u32,
}

/// The answer by one of the two ways.
#[derive(PartialEq, Debug)]
struct Answer {
    text: String,
    prompt_tokens: u64,
    completion_tokens: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = arguments()?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(&arguments))
}

async fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut worker = connect(&arguments.socket).await?;
    let announced = worker.announce(AnnounceRequest::default()).await?.into_inner();
    let model = announced.models.first().ok_or("the worker serves no model")?.name.clone();
    let target = Target::new(&arguments.url, &arguments.ca, &arguments.key)?;
    let gateway = target.connect(Protocol::Http2).await?;
    let body = serde_json::json!({
        "model": model, "temperature": 0, "max_completion_tokens": arguments.max_tokens,
        "messages": [{ "role": "user", "content": QUESTION }],
    });
    let assignment = assignment(arguments, &model)?;
    let (mut through, mut direct) = (Vec::new(), Vec::new());
    let mut last = None;
    for pair in 0..WARM_UP + arguments.requests {
        let began = Instant::now();
        let asked = ask_gateway(&gateway, body.to_string()).await?;
        let gateway_time = began.elapsed();
        let mut assignment = assignment.clone();
        assignment.request_id =
            RequestId::from_random(0xbe_u128 << 120 | u128::from(pair)).to_string();
        let began = Instant::now();
        let answered = ask_worker(&mut worker, assignment).await?;
        let direct_time = began.elapsed();
        if asked != answered {
            return Err(format!("{asked:?} is not {answered:?}").into());
        }
        if pair >= WARM_UP {
            through.push(gateway_time.as_micros() as u64);
            direct.push(direct_time.as_micros() as u64);
        }
        last = Some(answered);
    }
    let Answer { text, prompt_tokens, completion_tokens } = last.ok_or("no request was made")?;
    let report = serde_json::json!({
        "model": model, "answer": text, "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens, "gateway_us": through, "direct_us": direct,
    });
    println!("{report}");
    Ok(())
}

async fn ask_gateway(gateway: &Connection, body: String) -> Result<Answer, Box<dyn Error>> {
    let response = gateway.post("/v1/chat/completions", body.into()).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    if status != 200 {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&body)).into());
    }
    let answer: serde_json::Value = serde_json::from_slice(&body)?;
    let text = answer["choices"][0]["message"]["content"].as_str().ok_or("no content")?;
    let tokens = |name: &str| answer["usage"][name].as_u64().ok_or("no usage");
    Ok(Answer {
        text: text.to_owned(),
        prompt_tokens: tokens("prompt_tokens")?,
        completion_tokens: tokens("completion_tokens")?,
    })
}

async fn ask_worker(
    worker: &mut WorkerClient<Channel>,
    assignment: Assignment,
) -> Result<Answer, Box<dyn Error>> {
    let request = RunRequest { message: Some(Message::Assignment(assignment)) };
    // The request stream stays open, because its end would cancel the request.
    let (open, requests) = tokio::sync::mpsc::channel(1);
    open.try_send(request)?;
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut events = worker.run(requests).await?.into_inner();
    let mut text = String::new();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Delta(delta)) => text += &delta.text,
            Some(Event::Finished(finished)) => {
                let usage = finished.usage.ok_or("no usage")?;
                return Ok(Answer {
                    text,
                    prompt_tokens: usage.prompt_tokens,
                    completion_tokens: usage.completion_tokens,
                });
            }
            Some(Event::Refused(refused)) => return Err(refused.message.into()),
            _ => {}
        }
    }
    Err("the worker's stream ended early".into())
}

/// Returns the assignment that the gateway would send for the question.
fn assignment(arguments: &Arguments, model: &str) -> Result<Assignment, Box<dyn Error>> {
    let read = |name: &str| std::fs::read(arguments.model.join(name));
    let config = TokenizerConfig::from_json(&read("tokenizer_config.json")?)?;
    let source = config.chat_template.clone().ok_or("the model has no chat template")?;
    let template = ChatTemplate::compile(&source, &config)?;
    let tokenizer = Arc::new(Tokenizer::from_json(&read("tokenizer.json")?)?);
    let question = ChatMessage::new(Role::User, QUESTION);
    let tokens =
        encode_chat(&tokenizer, &template, &Chat::from(vec![question]), UtcTime(0), usize::MAX)?;
    Ok(Assignment {
        request_id: String::new(),
        attempt: 0,
        tenant: "bench".to_owned(),
        key: "direct".to_owned(),
        model: model.to_owned(),
        weight: 1.0,
        prompts: vec![v1::Prompt { tokens }],
        choices: 1,
        max_tokens: arguments.max_tokens,
        sampling: Some(v1::Sampling { top_p: 1.0, seed: 1, ..v1::Sampling::default() }),
        stop: Vec::new(),
        budget_ns: None,
        queue_deadline_ms: Duration::from_secs(30).as_millis() as u64,
        echo_logprobs: false,
        pool: String::new(),
        tier: v1::Tier::Interactive.into(),
        shown_tokens: Vec::new(),
    })
}

async fn connect(socket: &Path) -> Result<WorkerClient<Channel>, Box<dyn Error>> {
    let mut only = Some(TokioIo::new(UnixStream::connect(socket).await?));
    let connector = tower::service_fn(move |_| {
        let stream = only.take();
        async move { stream.ok_or_else(|| std::io::Error::other("this connection has ended")) }
    });
    let channel = Endpoint::from_static("http://worker").connect_with_connector(connector).await?;
    Ok(WorkerClient::new(channel))
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [url, ca, key, socket, model, requests, max_tokens] = words.as_slice() else {
        return Err("usage: direct URL CA KEYFILE SOCKET MODEL_DIR REQUESTS MAX_TOKENS".into());
    };
    Ok(Arguments {
        url: url.clone(),
        ca: ca.into(),
        key: std::fs::read_to_string(key)?.trim().to_owned(),
        socket: socket.into(),
        model: model.into(),
        requests: requests.parse()?,
        max_tokens: max_tokens.parse()?,
    })
}
