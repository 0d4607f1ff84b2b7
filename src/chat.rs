//! `tollgate chat`: sends questions to a running gateway and prints the answers as
//! they arrive. The requests are the same that any OpenAI client sends.

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use serde::{Deserialize, Serialize};
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::sse::Events;

use crate::common::say;

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
pub fn run(arguments: ChatArguments) -> Result<()> {
    // One request runs at a time, so one thread is enough.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(converse(arguments))
}

async fn converse(arguments: ChatArguments) -> Result<()> {
    let ca = arguments.ca.clone().unwrap_or_else(|| arguments.data.join("tls/ca.pem"));
    let key_file = arguments.key_file.clone().unwrap_or_else(|| arguments.data.join("demo.key"));
    let key = std::fs::read_to_string(&key_file).with_context(|| {
        format!("key {} (is `tollgate up` running with this data folder?)", key_file.display())
    })?;
    let target = Target::new(&arguments.url, &ca, &key)?;
    let model = match &arguments.model {
        Some(model) => model.clone(),
        None => first_model(&target).await?,
    };
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(message(Role::System, system));
    }
    if let Some(question) = &arguments.question {
        messages.push(message(Role::User, question));
        answer(&target, &model, &messages, &arguments).await?;
        return Ok(());
    }
    for question in lines() {
        messages.push(message(Role::User, &question?));
        let text = answer(&target, &model, &messages, &arguments).await?;
        // The gateway keeps no conversation, so all of it is sent again with each
        // question.
        messages.push(message(Role::Assistant, &text));
    }
    Ok(())
}

/// Returns the lines of standard input. Prompts for them on a terminal.
fn lines() -> impl Iterator<Item = std::io::Result<String>> {
    let prompt = || {
        if std::io::stdin().is_terminal() {
            // The prompt goes to standard error, so that standard output holds the
            // answers alone.
            eprint!("> ");
        }
    };
    std::iter::from_fn(move || {
        prompt();
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(Ok(line.trim_end().to_owned())),
            Err(error) => Some(Err(error)),
        }
    })
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

/// Streams one answer to standard output and returns it.
async fn answer(
    target: &Target,
    model: &str,
    messages: &[serde_json::Value],
    arguments: &ChatArguments,
) -> Result<String> {
    let mut body = serde_json::json!({
        "model": model,
        "messages": messages,
        "stream": true,
        "temperature": arguments.temperature,
    });
    if let Some(limit) = arguments.max_tokens {
        body["max_completion_tokens"] = limit.into();
    }
    // A new connection for each answer: an idle one may have been closed while the
    // user typed.
    let connection = target.connect(Protocol::Either).await?;
    let mut response = connection.post("/v1/chat/completions", body.to_string().into()).await?;
    let status = response.status();
    if !status.is_success() {
        let body = response.into_body().collect().await?.to_bytes();
        bail!("{}", refusal(status, &body));
    }
    let (mut events, mut text) = (Events::default(), String::new());
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
    say("\n")?;
    Ok(text)
}

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
