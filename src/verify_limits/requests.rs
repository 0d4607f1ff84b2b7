//! Probes of `[gateway.requests]`: a request exactly at each limit must pass, and a
//! request beyond it must be refused with the field's name.

use anyhow::Result;
use serde_json::{Value, json};
use tollgate_config::Config;

use super::caller::{Told, ask, status_of};
use super::{Canary, Finding, ProbeResult};

/// A limit on a field of a body.
struct Bound {
    key: &'static str,
    most: u32,
    path: &'static str,
    /// The field that a refusal names.
    param: &'static str,
    body: fn(&Canary, u32) -> Value,
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

/// Probes every limit of a request.
pub(super) async fn probe(config: &Config, canary: &Canary) -> Result<Vec<ProbeResult>> {
    let limits = &config.gateway().requests;
    let bound = |key, most, path, param, body| Bound { key, most, path, param, body };
    let bounds = [
        bound("messages", limits.messages, CHAT, "messages", |canary, most| {
            let one = json!({ "role": "user", "content": "a" });
            let mut body = canary.chat("", 1);
            body["messages"] = json!(vec![one; most as usize]);
            body
        }),
        bound("choices", limits.choices, CHAT, "n", |canary, most| {
            let mut body = canary.chat("Say hello.", 1);
            body["n"] = json!(most);
            body
        }),
        bound(
            "best_of",
            limits.best_of,
            COMPLETION,
            "best_of",
            |canary, most| json!({ "model": canary.model, "prompt": "a", "max_tokens": 1, "best_of": most }),
        ),
        bound(
            "prompts",
            limits.prompts,
            COMPLETION,
            "prompt",
            |canary, most| json!({ "model": canary.model, "prompt": vec!["a"; most as usize], "max_tokens": 1 }),
        ),
        bound("stop", limits.stop, CHAT, "stop", |canary, most| {
            let mut body = canary.chat("Say hello.", 1);
            let words: Vec<String> = (0..most).map(|number| format!("stop {number}")).collect();
            body["stop"] = json!(words);
            body
        }),
        bound("stop_size", limits.stop_size.0 as u32, CHAT, "stop", |canary, most| {
            let mut body = canary.chat("Say hello.", 1);
            body["stop"] = json!(["x".repeat(most as usize)]);
            body
        }),
        bound("top_logprobs", limits.top_logprobs, CHAT, "top_logprobs", |canary, most| {
            let mut body = canary.chat("Say hello.", 1);
            body["logprobs"] = json!(true);
            body["top_logprobs"] = json!(most);
            body
        }),
        bound("logit_bias", limits.logit_bias, CHAT, "logit_bias", |canary, most| {
            let mut body = canary.chat("Say hello.", 1);
            let biases = (0..most).map(|token| (token.to_string(), json!(0)));
            body["logit_bias"] = Value::Object(biases.collect());
            body
        }),
    ];
    let mut rows = Vec::new();
    for bound in bounds {
        rows.push(field(canary, &bound).await?);
    }
    rows.push(depth(canary, limits.json_depth).await?);
    rows.push(size(canary, limits.body.0).await?);
    rows.push(headers(canary, config.gateway().http2.header_size.0).await?);
    Ok(rows)
}

async fn field(canary: &Canary, bound: &Bound) -> Result<ProbeResult> {
    let Bound { key, most, path, param, body } = bound;
    let row = ProbeResult::new(format!("gateway.requests.{key}"), most.to_string());
    let connection = canary.connect().await?;
    let is_refused = |told: &Told| {
        // Other refusals come from the model's own limits or unsupported features.
        told.status == 400 && told.param.starts_with(param) && told.code == "invalid_value"
    };
    let within = ask(&connection, path, body(canary, *most).to_string()).await?;
    let beyond = ask(&connection, path, body(canary, most + 1).to_string()).await?;
    // An answer from another limit shows nothing about this one.
    if let Some(other) = [&within, &beyond].into_iter().find(|told| told.is_about_something_else())
    {
        return Ok(row.not_probed(other.masks()));
    }
    let holds = !is_refused(&within) && is_refused(&beyond);
    let seen = |told: &Told| match told.status {
        200 => "passes".to_owned(),
        status => format!("{status} {}", told.code),
    };
    let observed = format!("{most}: {}; {}: {}", seen(&within), most + 1, seen(&beyond));
    Ok(row.saw(Finding::of(holds), observed))
}

async fn depth(canary: &Canary, most: u32) -> Result<ProbeResult> {
    let row = ProbeResult::new("gateway.requests.json_depth", most.to_string());
    let connection = canary.connect().await?;
    // The body's object is the first level.
    let body = |depth: u32| {
        let (open, close) = ("[".repeat(depth as usize - 1), "]".repeat(depth as usize - 1));
        format!("{{\"x\":{open}{close}}}")
    };
    let within = ask(&connection, CHAT, body(most)).await?;
    let beyond = ask(&connection, CHAT, body(most + 1)).await?;
    if let Some(other) = [&within, &beyond].into_iter().find(|told| told.is_about_something_else())
    {
        return Ok(row.not_probed(other.masks()));
    }
    let is_too_deep = |told: &Told| told.status == 400 && told.message.contains("deeper");
    let holds = !is_too_deep(&within) && is_too_deep(&beyond);
    Ok(row.saw(Finding::of(holds), format!("{}: {} {}", most + 1, beyond.status, beyond.message)))
}

async fn size(canary: &Canary, most: u64) -> Result<ProbeResult> {
    let row = ProbeResult::new("gateway.requests.body", format!("{most} bytes"));
    let status = |length: u64| async move {
        let connection = canary.connect().await?;
        let frame = canary.chat("", 1).to_string();
        // White space between values has no meaning.
        let filling = " ".repeat((length as usize).saturating_sub(frame.len()));
        let body = format!("{{{filling}{}", &frame[1..]);
        let told = ask(&connection, CHAT, body).await;
        // A client that still sends after the refusal may find the connection
        // closed.
        anyhow::Ok(told.map_or(0, |told| told.status))
    };
    let (within, beyond) = (status(most).await?, status(most + 1).await?);
    if [429, 503].contains(&within) {
        return Ok(row.not_probed(format!("another limit applies first: {within}")));
    }
    // Status 0 stands for a connection that was closed while the client still sent.
    let holds = within != 413 && within != 0 && (beyond == 413 || beyond == 0);
    Ok(row.saw(Finding::of(holds), format!("{most}: {within}; {}: {beyond}", most + 1)))
}

async fn headers(canary: &Canary, most: u64) -> Result<ProbeResult> {
    let row = ProbeResult::new("gateway.http2.header_size", format!("{most} bytes"));
    let status = |length: u64| async move {
        let authorization = String::from_utf8_lossy(canary.target.authorization().as_bytes());
        let mut head = format!(
            "GET /v1/models HTTP/1.1\r\nhost: {}\r\nauthorization: {authorization}\r\nx-filling: ",
            canary.target.authority(),
        );
        // The empty line at the end takes four bytes.
        head.push_str(&"x".repeat((length as usize).saturating_sub(head.len() + 4)));
        head.push_str("\r\n\r\n");
        status_of(canary, head.as_bytes()).await
    };
    // Protocols count the size of headers slightly differently, so the probe stays
    // clear of the exact limit.
    let (less, more) = (most * 19 / 20, most * 21 / 20);
    let (within, beyond) = (status(less).await?, status(more).await?);
    let holds = within == Some(200) && beyond != Some(200);
    let said =
        |status: Option<u16>| status.map_or("closed".to_owned(), |status| status.to_string());
    let observed = format!("{less}: {}; {more}: {}", said(within), said(beyond));
    Ok(row.saw(Finding::of(holds), observed))
}
