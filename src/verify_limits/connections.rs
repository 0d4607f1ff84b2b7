//! Probes of connections: deadlines of their phases, how many there may be,
//! what HTTP/2 allows on one. Each comes from a loopback address of its own,
//! so that no probe spends what another is given.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate_config::Config;
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::frames::{self, Ends, Frame, Kind};

use super::{Canary, Finding, Row, shown};

/// Probes them all.
pub(super) async fn probe(config: &Config, canary: &Canary, budget: Duration) -> Result<Vec<Row>> {
    let gateway = config.gateway();
    let addresses = canary.target.addresses().await?;
    let is_here =
        addresses.iter().any(|address| address.ip().is_ipv4() && address.ip().is_loopback());
    let from = |last: u8| match is_here {
        true => canary.target.from_source(IpAddr::V4(Ipv4Addr::new(127, 99, 0, last))),
        false => canary.target.clone(),
    };
    let times = &gateway.timeouts;
    let (handshake, first, headers, body, idle) = tokio::join!(
        silent(from(1), times.handshake, Phase::Handshake, budget),
        silent(from(2), times.first_byte, Phase::FirstByte, budget),
        silent(from(3), times.headers, Phase::Headers, budget),
        silent(from(4), times.body_progress, Phase::Body, budget),
        silent(from(5), times.idle, Phase::Idle, budget),
    );
    let mut rows = vec![handshake?, first?, headers?, body?, idle?];
    let http2 = &gateway.http2;
    rows.push(streams(&from(6), http2.streams).await?);
    rows.push(cancels(&from(7), http2.cancels, budget).await?);
    let connections = &gateway.connections;
    let per_source = Row::new("gateway.connections.per_source", connections.per_source.to_string());
    let new = format!("{} a second, {} at once", connections.new_per_second, connections.new_burst);
    let new = Row::new("gateway.connections.new_per_second", new);
    if !is_here {
        let why = "only probed on this machine: there every probe has an address of its own";
        rows.extend([per_source.not_probed(why), new.not_probed(why)]);
    } else {
        rows.push(
            open_at_once(&from(8), per_source, connections.per_source, connections.new_burst)
                .await?,
        );
        rows.push(
            opened(&from(9), new, connections.new_per_second, connections.new_burst, budget)
                .await?,
        );
    }
    for (key, configured, why) in [
        ("connections.total", connections.total.to_string(), "it would shut everybody else out"),
        (
            "connections.handshakes",
            connections.handshakes.to_string(),
            "it would shut everybody else out",
        ),
        (
            "sources.requests_per_second",
            gateway.sources.requests_per_second.to_string(),
            "it wants more requests a second than a canary should send; see the scenario flood",
        ),
        (
            "timeouts.write_progress",
            shown(times.write_progress),
            "it wants a stream larger than all buffers; see the scenario slow_readers",
        ),
        ("timeouts.connection_age", shown(times.connection_age), "it would take as long"),
        (
            "deadlines.queue",
            shown(gateway.deadlines.queue),
            "it would want a queue that is full for as long",
        ),
        ("deadlines.request", shown(gateway.deadlines.request), "it would take as long"),
    ] {
        rows.push(Row::new(format!("gateway.{key}"), configured).not_probed(why));
    }
    Ok(rows)
}

/// Where a connection falls silent.
#[derive(Clone, Copy)]
enum Phase {
    Handshake,
    FirstByte,
    Headers,
    Body,
    Idle,
}

impl Phase {
    fn key(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::FirstByte => "first_byte",
            Self::Headers => "headers",
            Self::Body => "body_progress",
            Self::Idle => "idle",
        }
    }

    /// What is said before the silence.
    fn words(self, target: &Target) -> Vec<u8> {
        let authorization = String::from_utf8_lossy(target.authorization().as_bytes());
        let authority = target.authority();
        let text = match self {
            Self::Handshake | Self::FirstByte => String::new(),
            Self::Headers => format!("GET /v1/models HTTP/1.1\r\nhost: {authority}\r\n"),
            Self::Body => format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: {authority}\r\n\
                 authorization: {authorization}\r\ncontent-length: 1000\r\n\r\n{{"
            ),
            Self::Idle => format!(
                "GET /v1/models HTTP/1.1\r\nhost: {authority}\r\nauthorization: {authorization}\r\n\r\n"
            ),
        };
        text.into_bytes()
    }
}

/// Falls silent and waits for the end of the connection.
async fn silent(target: Target, deadline: Duration, phase: Phase, budget: Duration) -> Result<Row> {
    let row = Row::new(format!("gateway.timeouts.{}", phase.key()), shown(deadline));
    if deadline > budget {
        return Ok(row.not_probed(format!("it would take {}", shown(deadline))));
    }
    let patience = deadline + SLACK;
    let took = if let Phase::Handshake = phase {
        let mut tcp = target.connect_tcp().await?;
        end_of(&mut tcp, patience).await
    } else {
        let mut tls = target.connect_tls(Protocol::Http1).await?;
        tls.write_all(&phase.words(&target)).await?;
        tls.flush().await?;
        end_of(&mut tls, patience).await
    };
    Ok(match took {
        None => row.saw(Finding::Broken, format!("open after {}", shown(patience))),
        Some(took) => {
            // A little early is as good: clocks tick.
            let holds = took + Duration::from_millis(300) >= deadline;
            row.saw(Finding::of(holds), format!("ended after {:.2} s", took.as_secs_f64()))
        }
    })
}

/// How long after now the peer ends the connection; what it says is read.
async fn end_of(io: &mut (impl AsyncRead + Unpin), patience: Duration) -> Option<Duration> {
    let started = Instant::now();
    let mut buffer = [0; 4_096];
    let ended =
        timeout(patience, async { while !matches!(io.read(&mut buffer).await, Ok(0) | Err(_)) {} });
    ended.await.ok().map(|()| started.elapsed())
}

/// What the gateway's own settings say about streams.
async fn streams(target: &Target, most: u32) -> Result<Row> {
    let row = Row::new("gateway.http2.streams", most.to_string());
    let mut tls = target.connect_tls(Protocol::Http2).await?;
    tls.write_all(&frames::preface()).await?;
    tls.flush().await?;
    let mut buffer = BytesMut::new();
    let reading = async {
        loop {
            while let Some(frame) = Frame::take(&mut buffer) {
                if let Some(streams) = frame.setting(MAX_CONCURRENT_STREAMS) {
                    return Some(streams);
                }
            }
            if !matches!(tls.read_buf(&mut buffer).await, Ok(1..)) {
                return None;
            }
        }
    };
    Ok(match timeout(SLACK, reading).await.ok().flatten() {
        Some(told) => row.saw(Finding::of(told == most), format!("the settings say {told}")),
        None => row.saw(Finding::Broken, "the settings say nothing"),
    })
}

/// Opens streams and cancels them one by one until the connection is closed.
async fn cancels(target: &Target, most: u32, budget: Duration) -> Result<Row> {
    let row = Row::new("gateway.http2.cancels", most.to_string());
    let tls = target.connect_tls(Protocol::Http2).await?;
    let (mut reading, mut writing) = tokio::io::split(tls);
    writing.write_all(&frames::preface()).await?;
    writing.write_all(&frames::settings_acknowledged()).await?;
    let authorization = String::from_utf8_lossy(target.authorization().as_bytes()).into_owned();
    let started = Instant::now();
    let mut sent = 0u32;
    let writer = async {
        while started.elapsed() < budget {
            let stream = sent * 2 + 1;
            let fields = [
                (":method", "POST"),
                (":scheme", "https"),
                (":authority", target.authority()),
                (":path", "/v1/chat/completions"),
                ("authorization", &authorization),
            ];
            let opened = writing.write_all(&frames::headers(stream, &fields, Ends::Nothing)).await;
            if opened.is_err() || writing.flush().await.is_err() {
                return;
            }
            // Long enough to be accepted: a reset before that is another limit.
            sleep(Duration::from_millis(8)).await;
            let reset = writing.write_all(&frames::cancel(stream)).await;
            if reset.is_err() || writing.flush().await.is_err() {
                return;
            }
            sent += 1;
        }
    };
    let reader = async {
        let mut buffer = BytesMut::new();
        while matches!(reading.read_buf(&mut buffer).await, Ok(1..)) {
            while let Some(frame) = Frame::take(&mut buffer) {
                if frame.kind == Kind::GOAWAY {
                    return;
                }
            }
        }
    };
    let closed = tokio::select! {
        () = reader => true,
        () = writer => false,
    };
    Ok(match closed || sent < most {
        _ if !closed && sent <= most => row.not_probed(format!("{sent} in {}", shown(budget))),
        true => {
            // It is told a moment after it has happened.
            let holds = sent <= most + most / 4 + 16;
            row.saw(Finding::of(holds), format!("closed after {sent}"))
        }
        false => row.saw(Finding::Broken, format!("open after {sent}")),
    })
}

/// More connections than one source may have open.
async fn open_at_once(target: &Target, row: Row, most: u32, burst: u32) -> Result<Row> {
    let wanted = most.saturating_add(8);
    if wanted > burst || wanted > MOST_CONNECTIONS {
        return Ok(row.not_probed(format!("it wants {wanted} connections at once")));
    }
    let mut opening = JoinSet::new();
    for _ in 0..wanted {
        let target = target.clone();
        opening.spawn(async move { target.connect_tls(Protocol::Http1).await.ok() });
    }
    let open: Vec<_> = opening.join_all().await.into_iter().flatten().collect();
    let seen = format!("{} of {wanted} were let in", open.len());
    Ok(row.saw(Finding::of(open.len() == most as usize), seen))
}

/// Connections one after the other, until one is not let in.
async fn opened(
    target: &Target,
    row: Row,
    per_second: u32,
    burst: u32,
    budget: Duration,
) -> Result<Row> {
    let started = Instant::now();
    let mut let_in = 0u64;
    while started.elapsed() < budget {
        let mut opening = JoinSet::new();
        for _ in 0..AT_ONCE {
            let target = target.clone();
            opening.spawn(async move { target.connect_tls(Protocol::Http1).await.is_ok() });
        }
        let came = opening.join_all().await;
        let_in += came.iter().filter(|came| **came).count() as u64;
        let refilled = (f64::from(per_second) * started.elapsed().as_secs_f64()).ceil();
        let most = u64::from(burst) + refilled as u64;
        let seen = format!(
            "{let_in} let in within {:.1} s ({most} allowed)",
            started.elapsed().as_secs_f64()
        );
        if came.contains(&false) || let_in > most {
            let holds = let_in <= most && let_in + 1 >= u64::from(burst);
            return Ok(row.saw(Finding::of(holds), seen));
        }
    }
    Ok(row.not_probed(format!(
        "not reached: {let_in} connections in {} were within it",
        shown(budget)
    )))
}

/// How much later than a deadline its effect may be seen.
const SLACK: Duration = Duration::from_secs(2);

/// The setting of RFC 9113, 6.5.2.
const MAX_CONCURRENT_STREAMS: u16 = 3;

/// The most connections that a probe opens at once.
const MOST_CONNECTIONS: u32 = 512;

/// Connections that are opened at once by the probe of their rate.
const AT_ONCE: usize = 16;
