//! `tollgate chat`: asks a running gateway from the terminal and prints the
//! answer as it comes. The same request any OpenAI client would send.

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use serde::Deserialize;
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::sse::Events;

use crate::common::say;

/// Ask a model from the terminal.
#[derive(clap::Args)]
pub struct Arguments {
    /// What to ask; without it, a conversation is read line by line from the terminal.
    question: Option<String>,
    /// The gateway.
    #[arg(long, value_name = "URL", default_value = "https://127.0.0.1:8443")]
    url: String,
    /// The data folder whose CA and demo key are used.
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// The CA to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A file with the API key [default: DATA/demo.key].
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// The model [default: the first that the key may use].
    #[arg(long)]
    model: Option<String>,
    /// A system message.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The most tokens to answer with.
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// 0 answers the same every time.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
}

/// Asks once, or in turns until the input ends.
pub fn run(arguments: Arguments) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(converse(arguments))
}

async fn converse(arguments: Arguments) -> Result<()> {
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
        messages.push(message("system", system));
    }
    if let Some(question) = &arguments.question {
        messages.push(message("user", question));
        answer(&target, &model, &messages, &arguments).await?;
        return Ok(());
    }
    for question in lines() {
        messages.push(message("user", &question?));
        let text = answer(&target, &model, &messages, &arguments).await?;
        messages.push(message("assistant", &text));
    }
    Ok(())
}

/// The lines of standard input, prompted for when a person types them.
fn lines() -> impl Iterator<Item = std::io::Result<String>> {
    let prompt = || {
        if std::io::stdin().is_terminal() {
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

fn message(role: &str, content: &str) -> serde_json::Value {
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
    let list: List = serde_json::from_slice(&body).context("the list of models")?;
    let first = list.data.into_iter().next().context("this key may use no model that is served")?;
    Ok(first.id)
}

/// Streams one answer to standard output and returns it.
async fn answer(
    target: &Target,
    model: &str,
    messages: &[serde_json::Value],
    arguments: &Arguments,
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
    let connection = target.connect(Protocol::Either).await?;
    let mut response = connection.post("/v1/chat/completions", body.to_string().into()).await?;
    let status = response.status();
    if !status.is_success() {
        let body = response.into_body().collect().await?.to_bytes();
        bail!("{}", refusal(status, &body));
    }
    let (mut events, mut text) = (Events::default(), String::new());
    while let Some(frame) = response.frame().await {
        let frame = frame.context("the answer broke off")?;
        for event in events.push(frame.data_ref().map_or(&[], |data| data.as_ref()))? {
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

/// The text in one chunk of a stream; an error event is an error.
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

/// What the gateway said no with, in its own words where it has some.
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
