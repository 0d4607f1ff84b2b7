//! Probes of connections: the timeouts of their phases, their number, and the
//! limits of HTTP/2. Each probe uses a loopback address of its own, so that no
//! probe uses up the limits of another.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate_config::{Config, Connections, Gateway};
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::frames::{self, Ends, Frame, FrameKind};

use super::{Canary, Finding, ProbeResult, shown};

/// Probes every limit of a connection.
pub(super) async fn probe(
    config: &Config,
    canary: &Canary,
    budget: Duration,
) -> Result<Vec<ProbeResult>> {
    let gateway = config.gateway();
    let addresses = canary.target.addresses().await?;
    let is_here =
        addresses.iter().any(|address| address.ip().is_ipv4() && address.ip().is_loopback());
    // Linux serves all of 127.0.0.0/8, so each probe can have an address of its own.
    let from = |last: u8| match is_here {
        true => canary.target.from_source(IpAddr::V4(Ipv4Addr::new(127, 99, 0, last))),
        false => canary.target.clone(),
    };
    let times = &gateway.timeouts;
    // The probes mostly wait, so they wait at the same time.
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
    let per_source =
        ProbeResult::new("gateway.connections.per_source", connections.per_source.to_string());
    let new = format!("{} a second, {} at once", connections.new_per_second, connections.new_burst);
    let new = ProbeResult::new("gateway.connections.new_per_second", new);
    if !is_here {
        let why = "probed on this machine only, where each probe can use an address of its own";
        rows.extend([per_source.not_probed(why), new.not_probed(why)]);
    } else {
        rows.push(open_at_once(&from(8), per_source, gateway).await?);
        rows.push(opened(&from(9), new, connections, budget).await?);
    }
    rows.extend(without_probe(gateway));
    Ok(rows)
}

/// Returns the limits that a probe cannot test, each with the reason.
fn without_probe(gateway: &Gateway) -> Vec<ProbeResult> {
    let (connections, times) = (&gateway.connections, &gateway.timeouts);
    [
        (
            "connections.total",
            connections.total.to_string(),
            "the probe would lock out every other client",
        ),
        (
            "connections.handshakes",
            connections.handshakes.to_string(),
            "the probe would lock out every other client",
        ),
        (
            "sources.requests_per_second",
            gateway.sources.requests_per_second.to_string(),
            "the probe needs more requests a second than a canary should send; use the scenario flood",
        ),
        (
            "timeouts.write_progress",
            shown(times.write_progress),
            "the probe needs a stream larger than all buffers; use the scenario slow_readers",
        ),
        (
            "timeouts.connection_age",
            shown(times.connection_age),
            "the probe would take as long as the limit",
        ),
        (
            "deadlines.queue",
            shown(gateway.deadlines.queue),
            "the probe needs a queue that is full for as long",
        ),
        (
            "deadlines.request",
            shown(gateway.deadlines.request),
            "the probe would take as long as the limit",
        ),
    ]
    .into_iter()
    .map(|(key, configured, why)| {
        ProbeResult::new(format!("gateway.{key}"), configured).has_no_probe(why)
    })
    .collect()
}

/// The phase in which a connection stops sending.
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

    /// Returns the bytes that are sent before the silence.
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

/// Stops sending and waits for the end of the connection.
async fn silent(
    target: Target,
    deadline: Duration,
    phase: Phase,
    budget: Duration,
) -> Result<ProbeResult> {
    let row = ProbeResult::new(format!("gateway.timeouts.{}", phase.key()), shown(deadline));
    if deadline > budget {
        return Ok(row.not_probed(format!("the probe would take {}", shown(deadline))));
    }
    let wait = deadline + SLACK;
    // A TLS client would send its handshake, so this phase uses plain TCP.
    let took = if let Phase::Handshake = phase {
        let mut tcp = target.connect_tcp().await?;
        end_of(&mut tcp, wait).await
    } else {
        let mut tls = target.connect_tls(Protocol::Http1).await?;
        tls.write_all(&phase.words(&target)).await?;
        tls.flush().await?;
        end_of(&mut tls, wait).await
    };
    Ok(match took {
        None => row.saw(Finding::Broken, format!("open after {}", shown(wait))),
        Some(took) => {
            // Clocks may differ slightly.
            let holds = took + Duration::from_millis(300) >= deadline;
            row.saw(Finding::of(holds), format!("ended after {:.2} s", took.as_secs_f64()))
        }
    })
}

/// Reads until the peer ends the connection. Returns the time it took.
async fn end_of(io: &mut (impl AsyncRead + Unpin), wait: Duration) -> Option<Duration> {
    let started = Instant::now();
    let mut buffer = [0; 4_096];
    let ended =
        timeout(wait, async { while !matches!(io.read(&mut buffer).await, Ok(0) | Err(_)) {} });
    ended.await.ok().map(|()| started.elapsed())
}

/// Opens as many streams on one connection as the limit allows, and a few more, which must be
/// refused. The streams are requests without their bodies.
async fn streams(target: &Target, most: u32) -> Result<ProbeResult> {
    let row = ProbeResult::new("gateway.http2.streams", most.to_string());
    if most > MOST_STREAMS {
        return Ok(row.not_probed(format!("the probe would hold {most} requests at once")));
    }
    let mut tls = target.connect_tls(Protocol::Http2).await?;
    tls.write_all(&frames::preface()).await?;
    tls.write_all(&frames::settings_acknowledged()).await?;
    let authorization = String::from_utf8_lossy(target.authorization().as_bytes()).into_owned();
    for number in 0..most + MORE_STREAMS {
        let fields = [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", target.authority()),
            (":path", "/v1/chat/completions"),
            ("authorization", &authorization),
            ("content-length", "1000"),
        ];
        tls.write_all(&frames::headers(number * 2 + 1, &fields, Ends::Nothing)).await?;
    }
    tls.flush().await?;
    let mut ended = BTreeMap::new();
    // The reading ends before the bodies are late, which would end the first streams.
    let _ = timeout(SLACK, ends_beyond(&mut tls, most * 2, &mut ended)).await;
    let (within, beyond): (Vec<_>, Vec<_>) =
        ended.iter().partition(|(stream, _)| **stream < most * 2);
    if let Some((stream, _)) = within.iter().find(|(_, kind)| **kind == FrameKind::HEADERS) {
        return Ok(
            row.not_probed(format!("another limit applies first: stream {stream} is answered"))
        );
    }
    let refused = beyond.iter().filter(|(_, kind)| **kind == FrameKind::RST_STREAM).count();
    let holds = within.is_empty() && refused == MORE_STREAMS as usize;
    let open = most as usize - within.len();
    Ok(row.saw(
        Finding::of(holds),
        format!("{open} open at once; of {MORE_STREAMS} more {refused} were refused"),
    ))
}

/// Notes the first end of each stream: a reset or an answer. Returns when as many streams from
/// number `beyond` on have ended as were opened there, or with the connection.
async fn ends_beyond(
    io: &mut (impl AsyncRead + Unpin),
    beyond: u32,
    ended: &mut BTreeMap<u32, FrameKind>,
) {
    let mut buffer = BytesMut::new();
    while ended.range(beyond..).count() < MORE_STREAMS as usize {
        while let Some(frame) = Frame::take(&mut buffer) {
            if matches!(frame.kind, FrameKind::RST_STREAM | FrameKind::HEADERS) {
                ended.entry(frame.stream).or_insert(frame.kind);
            }
        }
        if !matches!(io.read_buf(&mut buffer).await, Ok(1..)) {
            return;
        }
    }
}

/// Opens and cancels streams one by one until the connection is closed.
async fn cancels(target: &Target, most: u32, budget: Duration) -> Result<ProbeResult> {
    let row = ProbeResult::new("gateway.http2.cancels", most.to_string());
    let tls = target.connect_tls(Protocol::Http2).await?;
    let (mut reading, mut writing) = tokio::io::split(tls);
    writing.write_all(&frames::preface()).await?;
    writing.write_all(&frames::settings_acknowledged()).await?;
    let authorization = String::from_utf8_lossy(target.authorization().as_bytes()).into_owned();
    let started = Instant::now();
    let mut sent = 0u32;
    let writer = async {
        while started.elapsed() < budget {
            // Streams that a client opens have odd numbers (RFC 9113, section 5.1.1).
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
            // The pause lets the gateway accept the stream: resets before that
            // count against another limit.
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
                if frame.kind == FrameKind::GOAWAY {
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
            // The GOAWAY frame arrives a moment after the limit was reached.
            let holds = sent <= most + most / 4 + 16;
            row.saw(Finding::of(holds), format!("closed after {sent}"))
        }
        false => row.saw(Finding::Broken, format!("open after {sent}")),
    })
}

/// Opens more connections than one source may have. Those beyond the limit are refused,
/// or wait until the first ones are closed, which send nothing.
async fn open_at_once(target: &Target, row: ProbeResult, gateway: &Gateway) -> Result<ProbeResult> {
    let Connections { per_source: most, new_burst: burst, .. } = gateway.connections;
    // A few more connections than allowed show that the limit refuses them.
    let wanted = most.saturating_add(8);
    // With a smaller burst, the limit of new connections would refuse them first.
    if wanted > burst || wanted > MOST_CONNECTIONS {
        return Ok(row.not_probed(format!("the probe needs {wanted} connections at once")));
    }
    let mut opening = JoinSet::new();
    for _ in 0..wanted {
        let target = target.clone();
        opening.spawn(async move {
            let connection = target.connect_tls(Protocol::Http1).await.ok()?;
            Some((Instant::now(), connection))
        });
    }
    let open: Vec<_> = opening.join_all().await.into_iter().flatten().collect();
    let mut accepted: Vec<Instant> = open.iter().map(|(at, _)| *at).collect();
    accepted.sort_unstable();
    let most = most as usize;
    let waited = accepted.get(most).map(|late| late.duration_since(accepted[0]));
    let seen = match waited {
        None => format!("{} of {wanted} were accepted", accepted.len()),
        Some(waited) => {
            format!("{most} were accepted at once, and others {} later", shown(waited))
        }
    };
    // None of the first ones is closed earlier than its deadline. Half of it, because a
    // busy machine may note the first one late.
    let holds = match waited {
        None => accepted.len() == most,
        Some(waited) => waited >= gateway.timeouts.first_byte / 2,
    };
    Ok(row.saw(Finding::of(holds), seen))
}

/// Opens connections until one is refused, or until they come as slowly as the limit
/// allows: connections beyond it wait for a moment.
async fn opened(
    target: &Target,
    row: ProbeResult,
    limits: &Connections,
    budget: Duration,
) -> Result<ProbeResult> {
    let Connections { new_per_second: per_second, new_burst: burst, .. } = *limits;
    let started = Instant::now();
    let (mut accepted, mut paced) = (0u64, 0);
    while started.elapsed() < budget {
        let mut opening = JoinSet::new();
        for _ in 0..AT_ONCE {
            let target = target.clone();
            opening.spawn(async move { target.connect_tls(Protocol::Http1).await.is_ok() });
        }
        let came = opening.join_all().await;
        accepted += came.iter().filter(|came| **came).count() as u64;
        // The allowance grows while the probe runs.
        let refilled = (f64::from(per_second) * started.elapsed().as_secs_f64()).ceil();
        let most = u64::from(burst) + refilled as u64;
        let seen = format!(
            "{accepted} accepted within {:.1} s ({most} allowed)",
            started.elapsed().as_secs_f64()
        );
        if came.contains(&false) || accepted > most {
            let holds = accepted <= most && accepted + 1 >= u64::from(burst);
            return Ok(row.saw(Finding::of(holds), seen));
        }
        // All that is allowed has come, three times in a row.
        let is_paced = accepted >= u64::from(burst) && accepted + AT_ONCE as u64 > most;
        paced = if is_paced { paced + 1 } else { 0 };
        if paced >= 3 {
            return Ok(row.saw(Finding::Holds, seen));
        }
    }
    Ok(row.not_probed(format!(
        "not reached: {accepted} connections in {} are within the limit",
        shown(budget)
    )))
}

/// Time after a timeout in which its effect must be visible.
const SLACK: Duration = Duration::from_secs(2);

/// Streams that a probe opens on one connection at most; each is a request under way.
const MOST_STREAMS: u32 = 200;

/// Streams that are opened beyond the limit.
const MORE_STREAMS: u32 = 4;

/// Connections that a probe opens at once at most.
const MOST_CONNECTIONS: u32 = 512;

/// Connections that the probe of the rate opens at once.
const AT_ONCE: usize = 16;
