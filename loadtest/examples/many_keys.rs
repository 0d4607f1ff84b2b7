//! Sends requests one after the other over one connection, each with one of many
//! keys. Benchmarks compare how the number of keys affects an answer.
//!
//! `many_keys URL CA KEYS MODEL` reads the keys, one a line, and prints `ready`.
//! Then it answers each line of its standard input with a line of JSON: `chat N M`
//! gives the times of N chats of one token, each with one of M keys.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::io::{BufRead, Write as _};
use std::num::NonZeroUsize;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::json;
use tollgate_loadtest::client::{Connection, Protocol, Target};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [url, ca, keys, model] = &words[..] else {
        return Err("usage: many_keys URL CA KEYS MODEL".into());
    };
    let keys = std::fs::read_to_string(keys)?;
    let keys: Vec<&str> = keys.lines().collect();
    let first = keys.first().ok_or("no keys")?;
    let body = json!({
        "model": model, "max_completion_tokens": 1,
        "messages": [{ "role": "user", "content": "What is a rate limit?" }],
    });
    let body = Bytes::from(body.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let target = Target::new(url, ca.as_ref(), first)?;
    println!("ready to ask");
    let mut random = 1;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let ["chat", count, of] = line.split(' ').collect::<Vec<_>>()[..] else {
            return Err(format!("no such order: {line}").into());
        };
        let (count, of): (NonZeroUsize, NonZeroUsize) = (count.parse()?, of.parse()?);
        let callers: Vec<&str> =
            keys.iter().step_by((keys.len() / of).max(1)).take(of.get()).copied().collect();
        let times = runtime.block_on(async {
            // A new connection: the gateway would close one that is idle between
            // orders.
            let connection = target.connect(Protocol::Http2).await?;
            chat(&connection, &callers, &body, count.get(), &mut random).await
        })?;
        let at = |part: usize| times[times.len() * part / 100];
        println!("{}", json!({ "p50_ns": at(50), "p99_ns": at(99) }));
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Returns the sorted times from sending to the end of the answer.
async fn chat(
    connection: &Connection,
    keys: &[&str],
    body: &Bytes,
    count: usize,
    random: &mut u64,
) -> Result<Vec<u64>, Box<dyn Error>> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let caller = connection.with_key(keys[(*random >> 33) as usize % keys.len()])?;
        let began = Instant::now();
        let response = caller.post("/v1/chat/completions", body.clone()).await?;
        let status = response.status();
        let answer = response.into_body().collect().await?.to_bytes();
        times.push(u64::try_from(began.elapsed().as_nanos())?);
        if !status.is_success() {
            return Err(format!("{status}: {}", String::from_utf8_lossy(&answer)).into());
        }
    }
    times.sort_unstable();
    Ok(times)
}
