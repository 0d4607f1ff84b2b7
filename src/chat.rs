//! `tollgate chat`: sends questions to a running gateway and prints the answers as
//! they arrive. The requests are the same that any OpenAI client sends.
//!
//! An interrupt (Ctrl-C) during an answer ends the answer alone if a user types the
//! questions. At the prompt it ends the program, as it does whenever the questions come
//! from elsewhere.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::sse::Events;

use crate::common::{demo_key, exit, say};

/// Ask a model from the terminal.
#[derive(clap::Args)]
pub struct ChatArguments {
    /// The question. Without one, questions are read line by line from standard
    /// input.
    question: Option<String>,
    /// The gateway's address.
    #[arg(long, value_name = "URL", default_value = "https://127.0.0.1:8443")]
    url: String,
    /// The data folder with the CA and the demo key.
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// The CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A file with the API key [default: DATA/demo.key].
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// The model [default: the first one that the key may use].
    #[arg(long)]
    model: Option<String>,
    /// A system message.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The largest number of tokens in an answer.
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// The sampling temperature; 0 gives the same answer every time.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
}

/// Sends one question, or a conversation until the input ends.
pub fn run(arguments: ChatArguments) -> ExitCode {
    // One request runs at a time, so one thread is enough.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = runtime.context("cannot start").and_then(|it| it.block_on(converse(arguments)));
    ended.unwrap_or_else(|error| exit(Err(error)))
}

async fn converse(arguments: ChatArguments) -> Result<ExitCode> {
    let ca = arguments.ca.clone().unwrap_or_else(|| arguments.data.join("tls/ca.pem"));
    let key_file = match &arguments.key_file {
        Some(file) => file.clone(),
        None => demo_key(&arguments.data, "--key-file")?,
    };
    let key = std::fs::read_to_string(&key_file)
        .with_context(|| format!("key {}", key_file.display()))?;
    let target = Target::new(&arguments.url, &ca, &key)?;
    let model = match &arguments.model {
        Some(model) => model.clone(),
        None => first_model(&target).await?,
    };
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(message(Role::System, system));
    }
    // Not before: until then an interrupt ends the program at once.
    let mut interrupts = signal(SignalKind::interrupt())?;
    if let Some(question) = &arguments.question {
        messages.push(message(Role::User, question));
        let request = body(&model, &messages, &arguments);
        let answer = answer(&target, request, &mut interrupts).await?;
        return Ok(if answer.is_whole { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) });
    }
    let is_typed = std::io::stdin().is_terminal();
    while let Some(question) = next_line(is_typed, &mut interrupts).await? {
        messages.push(message(Role::User, &question));
        let request = body(&model, &messages, &arguments);
        let answer = answer(&target, request, &mut interrupts).await?;
        if !answer.is_whole && !is_typed {
            return Ok(ExitCode::from(INTERRUPTED));
        }
        // The gateway keeps no conversation, so all of it is sent again with each
        // question: also the part of an answer that the user has seen.
        messages.push(message(Role::Assistant, &answer.text));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the next line of standard input; `None` at its end, and after an interrupt.
/// Prompts for the line if a user types it.
async fn next_line(is_typed: bool, interrupts: &mut Signal) -> Result<Option<String>> {
    if is_typed {
        // The prompt goes to standard error, so that standard output holds the answers
        // alone.
        eprint!("> ");
    }
    let (sender, line) = oneshot::channel();
    // A thread of its own: the runtime would wait for a task that reads the line before it
    // ends.
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line).map(|bytes| (bytes > 0).then_some(line));
        // After an interrupt the line is not needed.
        drop(sender.send(read));
    });
    tokio::select! {
        line = line => Ok(line??.map(|line| line.trim_end().to_owned())),
        _ = interrupts.recv() => {
            say("\n")?;
            Ok(None)
        }
    }
}

/// The author of a message.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    User,
    Assistant,
}

fn message(role: Role, content: &str) -> serde_json::Value {
    serde_json::json!({ "role": role, "content": content })
}

async fn first_model(target: &Target) -> Result<String> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    let response = target.connect(Protocol::Either).await?.get("/v1/models").await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    if !status.is_success() {
        bail!("{}", refusal(status, &body));
    }
    let list: List = serde_json::from_slice(&body).context("cannot parse the list of models")?;
    let first =
        list.data.into_iter().next().context("this key may not use any model that is served")?;
    Ok(first.id)
}

/// An answer, or the part of it that came before an interrupt.
struct Answer {
    text: String,
    is_whole: bool,
}

/// Streams one answer to standard output and returns it. An interrupt closes the stream.
async fn answer(target: &Target, request: String, interrupts: &mut Signal) -> Result<Answer> {
    let mut text = String::new();
    let is_whole = tokio::select! {
        ended = stream(target, request, &mut text) => {
            ended?;
            true
        }
        // The stream is dropped, so the gateway cancels the request.
        _ = interrupts.recv() => false,
    };
    say("\n")?;
    Ok(Answer { text, is_whole })
}

/// Returns the body of the request for an answer.
fn body(model: &str, messages: &[serde_json::Value], arguments: &ChatArguments) -> String {
    let mut body = serde_json::json!({
        "model": model,
        "messages": messages,
        "stream": true,
        "temperature": arguments.temperature,
    });
    if let Some(limit) = arguments.max_tokens {
        body["max_completion_tokens"] = limit.into();
    }
    body.to_string()
}

/// Streams one answer to standard output and to `text`.
async fn stream(target: &Target, request: String, text: &mut String) -> Result<()> {
    // A new connection for each answer: an idle one may have been closed while the
    // user typed.
    let connection = target.connect(Protocol::Either).await?;
    let mut response = connection.post("/v1/chat/completions", request.into()).await?;
    let status = response.status();
    if !status.is_success() {
        let body = response.into_body().collect().await?.to_bytes();
        bail!("{}", refusal(status, &body));
    }
    let mut events = Events::default();
    while let Some(frame) = response.frame().await {
        let frame = frame.context("the connection ended within the answer")?;
        for event in events.push(frame.data_ref().map_or(&[], |data| data.as_ref()))? {
            // The OpenAI protocol ends a stream with this word, which is no JSON.
            if event == "[DONE]" {
                continue;
            }
            let piece = delta(&event)?;
            say(&piece)?;
            text.push_str(&piece);
        }
    }
    Ok(())
}

/// The exit code of a program that SIGINT ended, as shells report it.
const INTERRUPTED: u8 = 130;

/// Returns the text in one chunk of a stream. Fails on an error event.
fn delta(event: &[u8]) -> Result<String> {
    #[derive(Deserialize)]
    struct Chunk {
        #[serde(default)]
        choices: Vec<Choice>,
        error: Option<Refusal>,
    }
    #[derive(Deserialize)]
    struct Choice {
        delta: Delta,
    }
    #[derive(Deserialize)]
    struct Delta {
        content: Option<String>,
    }
    let chunk: Chunk = serde_json::from_slice(event).context("a chunk of the answer")?;
    if let Some(error) = chunk.error {
        bail!("{}", error.message);
    }
    // Some chunks have no text, such as the one that ends a choice.
    Ok(chunk.choices.into_iter().filter_map(|choice| choice.delta.content).collect())
}

#[derive(Deserialize)]
struct Refusal {
    message: String,
}

/// Returns the gateway's refusal, with its message if it has one.
fn refusal(status: impl std::fmt::Display, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Envelope {
        error: Refusal,
    }
    match serde_json::from_slice::<Envelope>(body) {
        Ok(envelope) => format!("{status}: {}", envelope.error.message),
        Err(_) => format!("{status}"),
    }
}
