//! Sends several loads at once to one gateway, each with its own tenants, sizes and
//! rate, and measures the lateness of this machine meanwhile.
//!
//! `mixed PLAN` reads the plan (JSON) and finds prompts of the requested sizes. It
//! prints a line `begin` when the first request is due, and at the end one line of
//! JSON: the report of each awaited group, and the machine's lateness.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollgate_loadtest::client::{Connection, Protocol, Target};
use tollgate_loadtest::{Arrivals, Load, Progress, Prompt, Prompts, Rates, Tenant, run};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    url: String,
    ca: PathBuf,
    model: String,
    /// The time in which requests are due.
    seconds: f64,
    seed: u64,
    /// The time that an answer may take.
    timeout_seconds: f64,
    groups: Vec<Group>,
}

/// A group of equal senders.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: String,
    /// Files with one key each; every key sends the same number of requests.
    keys: Vec<PathBuf>,
    /// Requests a second of all senders together.
    rate: f64,
    prompt_tokens: u32,
    /// Tokens of an answer.
    answer: u32,
    max_tokens: u32,
    connections: u32,
    /// True if answers are awaited; otherwise they are dropped at the end.
    awaited: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("mixed PLAN")?;
    let plan: Plan = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let told = runtime.block_on(play(&plan))?;
    println!("{told}");
    Ok(())
}

async fn play(plan: &Plan) -> Result<Value, Box<dyn Error>> {
    let mut loads = Vec::new();
    let mut sizes = serde_json::Map::new();
    for (number, group) in (0..).zip(&plan.groups) {
        let (load, prompt_tokens) = load(plan, group, number).await?;
        sizes.insert(group.name.clone(), prompt_tokens.into());
        loads.push((group, load));
    }
    let jitter = Jitter::watch();
    println!("begin");
    let stop = CancellationToken::new();
    let mut awaited = tokio::task::JoinSet::new();
    let mut dropped = tokio::task::JoinSet::new();
    for (group, load) in loads {
        let running = run(load, Arc::new(Progress::default()), stop.clone());
        let name = group.name.clone();
        let named = async move { (name, running.await) };
        if group.awaited {
            awaited.spawn(named);
        } else {
            dropped.spawn(named);
        }
    }
    // A tenth of a second after the last request can be due.
    let end = tokio::time::sleep(Duration::from_secs_f64(plan.seconds + 0.1));
    let mut reports = serde_json::Map::new();
    while let Some(ended) = awaited.join_next().await {
        let (name, report) = ended?;
        reports.insert(name, serde_json::to_value(report?.report)?);
    }
    end.await;
    dropped.abort_all();
    Ok(json!({ "groups": reports, "prompt_tokens": sizes, "jitter_ms": jitter.end()? }))
}

/// Returns a group as a load, and the tokens of its prompts.
async fn load(plan: &Plan, group: &Group, number: u64) -> Result<(Load, u32), Box<dyn Error>> {
    let mut tenants = Vec::new();
    for path in &group.keys {
        let key = std::fs::read_to_string(path)?;
        let target = Target::new(&plan.url, &plan.ca, key.trim())?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        tenants.push(Tenant { name, target });
    }
    let first = tenants.first().ok_or("a group without keys")?;
    let connection = first.target.connect(Protocol::Http2).await?;
    let (prompt, tokens) = prompt(plan, group, &connection).await?;
    let load = Load {
        tenants,
        model: plan.model.clone(),
        rates: Rates::constant(group.rate),
        duration: Duration::from_secs_f64(plan.seconds),
        arrivals: Arrivals::Poisson,
        stream_percent: 100,
        prompts: Prompts::InTurn(vec![Prompt::text(&prompt)]),
        max_tokens: NonZeroU32::new(group.max_tokens).ok_or("max_tokens is 0")?,
        connections: NonZeroU32::new(group.connections).ok_or("no connections")?,
        protocol: Protocol::Http2,
        in_flight: NonZeroU32::MAX,
        timeout: Duration::from_secs_f64(plan.timeout_seconds),
        seed: plan.seed.wrapping_mul(1_000_003).wrapping_add(number),
    };
    Ok((load, tokens))
}

/// Finds a prompt with the requested number of tokens, including the template, or
/// as close as possible. Returns the prompt and its tokens.
async fn prompt(
    plan: &Plan,
    group: &Group,
    connection: &Connection,
) -> Result<(String, u32), Box<dyn Error>> {
    let wish = if group.answer < group.max_tokens {
        format!("[{} tokens]", group.answer)
    } else {
        String::new()
    };
    let mut words = 0;
    for _ in 0..8 {
        let text = "a ".repeat(words) + &wish;
        let tokens = count(plan, connection, &text).await?;
        let off = i64::from(group.prompt_tokens) - i64::from(tokens);
        // The estimate is off, because words have more or less than one token:
        // correct it.
        let next = words as i64 + off;
        if off == 0 || next <= 0 {
            return Ok((text, tokens));
        }
        words = next as usize;
    }
    Err(format!("no prompt of {} tokens was found", group.prompt_tokens).into())
}

/// Returns the tokens of a prompt, as the gateway counts them.
async fn count(plan: &Plan, connection: &Connection, text: &str) -> Result<u32, Box<dyn Error>> {
    let body = json!({
        "model": plan.model, "max_completion_tokens": 1,
        "messages": [{ "role": "user", "content": text }],
    });
    let response = connection.post("/v1/chat/completions", body.to_string().into()).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    let answer: Value = serde_json::from_slice(&body)?;
    let tokens = answer["usage"]["prompt_tokens"].as_u64();
    let tokens = tokens.ok_or_else(|| format!("{status}: {answer}"))?;
    Ok(u32::try_from(tokens)?)
}

/// Measures how late an idle thread wakes up: the machine's own effect on every
/// figure.
struct Jitter {
    ended: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<Duration>>,
}

impl Jitter {
    fn watch() -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        let thread = std::thread::spawn(move || {
            let mut late = Vec::new();
            while !seen.load(Ordering::Relaxed) {
                let due = Instant::now() + NAP;
                std::thread::sleep(NAP);
                late.push(due.elapsed());
            }
            late
        });
        Self { ended, thread }
    }

    fn end(self) -> Result<Value, Box<dyn Error>> {
        self.ended.store(true, Ordering::Relaxed);
        let mut late = self.thread.join().map_err(|_| "the watch panicked")?;
        late.sort_unstable();
        let at = |quantile: f64| {
            let rank = (late.len() as f64 * quantile).ceil() as usize;
            late.get(rank.saturating_sub(1)).map(|late| late.as_secs_f64() * 1e3)
        };
        Ok(json!({ "naps": late.len(), "p50": at(0.5), "p99": at(0.99), "max": at(1.0) }))
    }
}

/// The time that the measuring thread sleeps.
const NAP: Duration = Duration::from_millis(1);
