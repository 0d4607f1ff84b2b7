//! Probes of what callers hold: authenticated connections of a key, a tenant and a
//! source, and memory for bodies on their way. Each probe takes more than the limit
//! allows and counts what the gateway lets it keep.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate_config::{Config, Gateway};
use tollgate_loadtest::client::{ClientTls, Protocol, Target};

use super::place::Canaries;
use super::{Finding, ProbeResult, shown};

/// Probes the connections and the bodies that callers may hold.
pub(super) async fn probe(
    config: &Config,
    canaries: &Canaries,
    budget: Duration,
) -> Result<Vec<ProbeResult>> {
    let gateway = config.gateway();
    let [key, tenant, source] = connection_rows(gateway);
    let [of_tenant, of_all] = body_rows(gateway);
    let holders = canaries.holders();
    let [first, ..] = holders else {
        let why = "probed on a temporary gateway only: the probe takes all that the limit allows";
        return Ok([key, tenant, source, of_tenant, of_all].map(|row| row.not_probed(why)).into());
    };
    let bounds = &gateway.connections;
    let (per_key, per_tenant) = (bounds.per_key, bounds.per_tenant);
    let per_source = bounds.authenticated_per_source;
    let probe = ConnectionProbe { gateway, budget };
    // Each probe has a tenant of its own: closed connections of the one before may
    // still count.
    let own = |number: usize| holders.get(number).unwrap_or(first);
    let of_key = Spread { keys: &first[..1], most: per_key, sources: Sources::Many(16) };
    let of_tenant_keys = Spread { keys: own(1), most: per_tenant, sources: Sources::Many(32) };
    let one_source = Spread { keys: own(2), most: per_source, sources: Sources::One };
    let keys = own(1).len() as u64;
    let key = match per_key > per_tenant {
        true => key.has_no_probe("the limit of a tenant applies first"),
        false => probe.row(key, of_key).await?,
    };
    let tenant = match keys * u64::from(per_key) <= u64::from(per_tenant) {
        true => tenant.has_no_probe("the limit of a key applies first"),
        false => probe.row(tenant, of_tenant_keys).await?,
    };
    let within_one = u64::from(per_tenant).min(keys * u64::from(per_key));
    let source = match within_one <= u64::from(per_source) {
        true => source.has_no_probe("the limit of one tenant applies first"),
        false => probe.row(source, one_source).await?,
    };
    let bodies = BodyProbe { gateway, holders, budget };
    let of_tenant = bodies.row(of_tenant, per_owner(gateway), 1).await?;
    let total = gateway.requests.body_memory.0.max(per_owner(gateway));
    let tenants = total.div_ceil(per_owner(gateway)) as usize + 1;
    let of_all = bodies.row(of_all, total, tenants).await?;
    Ok(vec![key, tenant, source, of_tenant, of_all])
}

fn connection_rows(gateway: &Gateway) -> [ProbeResult; 3] {
    let bounds = &gateway.connections;
    [
        ("per_key", bounds.per_key),
        ("per_tenant", bounds.per_tenant),
        ("authenticated_per_source", bounds.authenticated_per_source),
    ]
    .map(|(key, most)| ProbeResult::new(format!("gateway.connections.{key}"), most.to_string()))
}

fn body_rows(gateway: &Gateway) -> [ProbeResult; 2] {
    let limits = &gateway.requests;
    [
        ("body_memory_per_tenant", limits.body_memory_per_tenant.0),
        ("body_memory", limits.body_memory.0),
    ]
    .map(|(key, bytes)| ProbeResult::new(format!("gateway.requests.{key}"), kib(bytes)))
}

/// Returns the memory for bodies of one tenant: at least one body of the largest size.
fn per_owner(gateway: &Gateway) -> u64 {
    gateway.requests.body_memory_per_tenant.0.max(gateway.requests.body.0)
}

fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes / 1_024)
}

/// Returns the finding for an amount that was kept: at most the limit, and at least nine
/// tenths of it.
fn near(kept: u64, limit: u64) -> Finding {
    Finding::of(kept <= limit && kept * 10 >= limit * 9)
}

/// The addresses from which a probe connects.
#[derive(Clone, Copy)]
enum Sources {
    /// One address.
    One,
    /// The addresses from this third part on: as many as the limits of one address need.
    Many(u8),
}

/// The connections of one probe.
struct Spread<'a> {
    keys: &'a [Target],
    most: u32,
    sources: Sources,
}

/// The parameters of the probes of connections.
struct ConnectionProbe<'a> {
    gateway: &'a Gateway,
    budget: Duration,
}

impl ConnectionProbe<'_> {
    async fn row(&self, row: ProbeResult, spread: Spread<'_>) -> Result<ProbeResult> {
        let Spread { keys, most, sources } = spread;
        let (bounds, times) = (&self.gateway.connections, &self.gateway.timeouts);
        // A tenth more than allowed shows that the limit applies.
        let wanted = most + (most / 10).max(8);
        // Beyond seven eighths of the total, connections are closed for another reason.
        if u64::from(wanted) * 8 > u64::from(bounds.total) * 7 {
            return Ok(row.has_no_probe("the limit of all connections applies first"));
        }
        let of_source = bounds.new_burst.min(bounds.authenticated_per_source);
        let of_source = of_source.clamp(1, MOST_OF_SOURCE);
        let spans = wanted.saturating_sub(bounds.new_burst) / bounds.new_per_second.max(1);
        if matches!(sources, Sources::One) && Duration::from_secs(spans.into()) > self.budget {
            let why = format!("the probe needs {wanted} new connections from one address");
            return Ok(row.not_probed(why));
        }
        let (started, mut open, mut opened) = (Instant::now(), JoinSet::new(), 0);
        while opened < wanted {
            // A connection of the probe must not end because it is idle.
            if started.elapsed() > self.budget.min(times.idle / 2) {
                let why = format!("{opened} of {wanted} connections in {}", shown(self.budget));
                return Ok(row.not_probed(why));
            }
            let source = match sources {
                Sources::One => Ipv4Addr::new(127, 98, 0, 1),
                Sources::Many(range) => {
                    let first = u32::from(Ipv4Addr::new(127, 98, range, 1));
                    Ipv4Addr::from(first + opened / of_source)
                }
            };
            let key = &keys[opened as usize % keys.len()];
            match HeldConnection::open(&key.from_source(IpAddr::V4(source))).await {
                Some(held) => _ = open.spawn(held.until_closed()),
                // The rate of new connections of one address needs time.
                None if matches!(sources, Sources::One) => {
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
                None => return Ok(row.not_probed("a connection was closed before its request")),
            }
            opened += 1;
        }
        // The last connections that were told to close need a moment.
        sleep(SETTLING).await;
        while open.try_join_next().is_some() {}
        let kept = open.len() as u64;
        drop(open);
        // The next probe must not find these connections.
        sleep(SETTLING).await;
        let seen = format!("{kept} of {wanted} were kept open");
        Ok(row.saw(near(kept, most.into()), seen))
    }
}

/// A connection with an answered request.
struct HeldConnection {
    reading: ReadHalf<ClientTls>,
    /// The connection would end with its writing half.
    _writing: WriteHalf<ClientTls>,
}

impl HeldConnection {
    /// Opens a connection and sends a request on it. Returns `None` if the connection
    /// ends without an answer.
    async fn open(target: &Target) -> Option<Self> {
        let authorization = String::from_utf8_lossy(target.authorization().as_bytes()).into_owned();
        let tls = target.connect_tls(Protocol::Http1).await.ok()?;
        let (mut reading, mut writing) = tokio::io::split(tls);
        let head = format!(
            "GET /v1/models HTTP/1.1\r\nhost: {}\r\nauthorization: {authorization}\r\n\r\n",
            target.authority()
        );
        writing.write_all(head.as_bytes()).await.ok()?;
        writing.flush().await.ok()?;
        let mut piece = [0; 1_024];
        match timeout(ANSWER_WAIT, reading.read(&mut piece)).await {
            Ok(Ok(1..)) => Some(Self { reading, _writing: writing }),
            _ => None,
        }
    }

    /// Returns when the gateway closes the connection.
    async fn until_closed(mut self) {
        let mut piece = [0; 1_024];
        while let Ok(1..) = self.reading.read(&mut piece).await {}
    }
}

/// The parameters of the probes of bodies.
struct BodyProbe<'a> {
    gateway: &'a Gateway,
    holders: &'a [Vec<Target>],
    budget: Duration,
}

impl BodyProbe<'_> {
    /// Sends bodies of `tenants` tenants that never end, until two in a row of each are
    /// refused, and counts the bytes of the others.
    async fn row(&self, row: ProbeResult, limit: u64, tenants: usize) -> Result<ProbeResult> {
        let body = self.gateway.requests.body.0;
        if limit > MOST_BODY_BYTES {
            return Ok(row.not_probed(format!("the probe would send {}", kib(limit))));
        }
        let Some(holders) = self.holders.get(..tenants) else {
            return Ok(row.not_probed(format!("the probe needs {tenants} tenants")));
        };
        // Small enough to fill nine tenths of the memory.
        let size = (limit / 32).max(LEAST_BODY).min(body);
        let pace = self.gateway.timeouts.body_progress / 4;
        let until = Instant::now() + self.budget;
        let mut filling = JoinSet::new();
        for (number, holder) in holders.iter().enumerate() {
            let source = Ipv4Addr::new(127, 98, 64 + number as u8, 1);
            let target = holder[0].from_source(IpAddr::V4(source));
            filling.spawn(Filling { target, size, pace, until }.fill());
        }
        let (mut bytes, mut refused, mut bodies) = (0, 0, Vec::new());
        for filled in filling.join_all().await {
            let filled = filled?;
            if let Some(why) = filled.unfinished {
                return Ok(row.not_probed(why));
            }
            refused += filled.refused;
            bodies.push(filled.open);
        }
        // A gateway under load refuses late, and a body that it has not refused yet looks held.
        sleep(LATE_REFUSAL).await;
        let mut count = 0;
        for open in &mut bodies {
            while open.try_join_next().is_some() {}
            count += open.len();
            bytes += open.len() as u64 * size;
        }
        drop(bodies);
        // The next probe must not find the memory of these bodies.
        sleep(SETTLING).await;
        let seen = format!("{} held in {count} bodies, {refused} refused", kib(bytes));
        Ok(row.saw(near(bytes, limit), seen))
    }
}

/// The bodies of one tenant that are about to be sent.
struct Filling {
    target: Target,
    /// Bytes of each body.
    size: u64,
    /// Time between two pieces of a body.
    pace: Duration,
    until: Instant,
}

/// The bodies of one tenant that were sent.
struct Filled {
    /// The bodies that the gateway waits for. The end of the set ends them.
    open: JoinSet<()>,
    refused: u32,
    /// The reason why this is not all that the gateway allows, if so.
    unfinished: Option<String>,
}

impl Filling {
    async fn fill(self) -> Result<Filled> {
        let Self { target, size, pace, until } = self;
        let mut filled = Filled { open: JoinSet::new(), refused: 0, unfinished: None };
        let mut in_a_row = 0;
        while in_a_row < 2 {
            if Instant::now() > until {
                filled.unfinished = Some(format!("{} bodies in the time", filled.open.len()));
                break;
            }
            match UnendedBody::send(&target, size).await? {
                Sent::Open(body) => {
                    in_a_row = 0;
                    filled.open.spawn(body.drip(pace));
                }
                Sent::Refused(429 | 503) => {
                    in_a_row += 1;
                    filled.refused += 1;
                }
                Sent::Refused(status) => {
                    filled.unfinished = Some(format!("a body got status {status}"));
                    break;
                }
            }
        }
        Ok(filled)
    }
}

/// A body that was sent except for its end.
struct UnendedBody {
    reading: ReadHalf<ClientTls>,
    writing: WriteHalf<ClientTls>,
    /// Bytes of the body that were not sent.
    left: u64,
}

/// The result of sending a body.
enum Sent {
    /// The gateway waits for the rest.
    Open(UnendedBody),
    /// The gateway refused the body with this status.
    Refused(u16),
}

impl UnendedBody {
    async fn send(target: &Target, size: u64) -> Result<Sent> {
        let authorization = String::from_utf8_lossy(target.authorization().as_bytes()).into_owned();
        let tls = target.connect_tls(Protocol::Http1).await?;
        let (mut reading, mut writing) = tokio::io::split(tls);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\nauthorization: {authorization}\r\n\
             content-type: application/json\r\ncontent-length: {size}\r\n\r\n",
            target.authority()
        );
        // Less than a piece, so that all of the body counts from the start.
        let left = LEFT.min(size / 4);
        let mut bytes = head.into_bytes();
        bytes.resize(bytes.len() + (size - left) as usize, b' ');
        // The gateway may refuse the body and close before all of it is sent.
        let _ = writing.write_all(&bytes).await;
        let _ = writing.flush().await;
        let mut piece = [0; 64];
        match timeout(REFUSAL_WAIT, reading.read(&mut piece)).await {
            Err(_) => Ok(Sent::Open(Self { reading, writing, left })),
            Ok(read) => {
                let line = String::from_utf8_lossy(&piece[..read.unwrap_or(0)]).into_owned();
                let status = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
                Ok(Sent::Refused(status.unwrap_or(0)))
            }
        }
    }

    /// Sends a little of the body at each `pace`, so that the gateway goes on waiting.
    /// Returns when the gateway answers, or when nothing is left to send but the end.
    async fn drip(mut self, pace: Duration) {
        let mut piece = [0; 64];
        loop {
            tokio::select! {
                _ = self.reading.read(&mut piece) => return,
                () = sleep(pace) => {}
            }
            let some = DRIP.min(self.left.saturating_sub(1));
            self.left -= some;
            let sent = self.writing.write_all(&vec![b' '; some as usize]).await;
            if some == 0 || sent.is_err() || self.writing.flush().await.is_err() {
                return;
            }
        }
    }
}

/// Time after which a closed connection or a refused body has shown.
const SETTLING: Duration = Duration::from_millis(500);

/// Time after which a gateway under load has refused a body.
const LATE_REFUSAL: Duration = Duration::from_secs(3);

/// Longest wait for an answer to a small request.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Time in which the gateway has read a body and refuses it, if it does.
const REFUSAL_WAIT: Duration = Duration::from_millis(150);

/// Connections of a probe from one address.
const MOST_OF_SOURCE: u32 = 48;

/// Largest memory for bodies that a probe fills.
const MOST_BODY_BYTES: u64 = 512 << 20;

/// Smallest body of a probe: memory is taken in pieces of 64 KiB, and each tenant may
/// hold 256 KiB whatever the others hold.
const LEAST_BODY: u64 = 320 << 10;

/// Bytes of a body that are sent later, a few at a time.
const LEFT: u64 = 48 << 10;

/// Bytes that are sent at a time: four times a window, so more than the gateway demands.
const DRIP: u64 = 1 << 10;
