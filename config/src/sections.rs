//! Every section, key, default and bound, declared once. The comments here
//! are the texts of the example file and of the schema.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tollgate_domain::{
    ByClass, Currency, DeviceNanos, ModelName, Network, PlanName, PoolName, Price, PriceListName,
    Rate, TenantId, UtcDay,
};

use crate::devices::{Health, Sharing, Watchdog};
use crate::read::{DeviceRate, section};

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// The name of a token issuer in config.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IssuerName(String);

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn kib(kib: u64) -> ByteSize {
    ByteSize(kib << 10)
}

const fn mib(mib: u64) -> ByteSize {
    ByteSize(mib << 20)
}

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// No wait of a deadline is longer.
const DAY: Duration = Duration::from_secs(86_400);
const MILLISECOND: Duration = Duration::from_millis(1);

section! {
    /// Everything.
    pub(crate) struct Root {
        /// Where the ledger, the keys, the journals and the development
        /// certificates live. Paths in a file are relative to that file.
        data: PathBuf = PathBuf::from("data");
    }
    sections {
        /// The front door.
        gateway: Gateway;
        /// The process around a device.
        worker: Worker;
        /// Limits by name.
        plans: BTreeMap<PlanName, RawPlan>;
        /// Shared limits by name.
        pools: BTreeMap<PoolName, RawPool>;
        /// Who pays, by name.
        tenants: BTreeMap<TenantId, RawTenant>;
        /// What is served, by name.
        models: BTreeMap<ModelName, RawModel>;
        /// What usage costs, by name.
        prices: BTreeMap<PriceListName, RawPriceList>;
        /// Who callers are.
        auth: RawAuth;
    }
}

section! {
    /// The front door.
    pub struct Gateway {
        /// Where callers connect. Port 0 takes any free one.
        listen: SocketAddr = loopback(8443);
        /// Where admins, probes and metrics connect.
        admin_listen: SocketAddr = loopback(9443);
    }
    sections {
        /// The certificate.
        tls: Tls;
        /// Deadlines of a connection.
        timeouts: Timeouts;
        /// Bounds on connections.
        connections: Connections;
        /// Bounds on what one source asks.
        sources: SourceLimits;
        /// Proxies before the front door.
        proxies: Proxies;
        /// Bounds within an HTTP/2 connection.
        http2: Http2;
        /// Bounds on a request.
        requests: RequestLimits;
        /// Deadlines of a request.
        deadlines: Deadlines;
        /// Requests that are sent again.
        idempotency: Idempotency;
        /// What repeated offences earn.
        penalties: Penalties;
    }
}

section! {
    /// The certificate of both listeners. Without one, a development authority
    /// and certificate are made under data/tls.
    pub struct Tls {
        /// The chain in PEM, the leaf first.
        certificate: Option<PathBuf> = None;
        /// Its private key in PEM.
        key: Option<PathBuf> = None;
    }
}

section! {
    /// Deadlines of a connection, each from the start of its own phase.
    pub struct Timeouts {
        /// The TLS handshake.
        handshake: Duration = seconds(5), MILLISECOND..=DAY;
        /// From the handshake to the first byte.
        first_byte: Duration = seconds(5), MILLISECOND..=DAY;
        /// From the first byte of a request to the end of its headers.
        headers: Duration = seconds(5), MILLISECOND..=DAY;
        /// A connection between requests.
        idle: Duration = seconds(60), MILLISECOND..=DAY;
        /// A connection's whole life; then it is drained.
        connection_age: Duration = seconds(3_600), MILLISECOND..=DAY;
        /// A request body must bring body_progress_bytes in every such span.
        body_progress: Duration = seconds(5), MILLISECOND..=DAY;
        /// See body_progress.
        body_progress_bytes: ByteSize = kib(1), ByteSize(1)..=mib(1);
        /// A response must be taken up, in part at least, in every such span.
        write_progress: Duration = seconds(15), MILLISECOND..=DAY;
        /// An HTTP/2 peer that was silent for so long is asked for a sign.
        ping_interval: Duration = seconds(15), MILLISECOND..=DAY;
        /// How long it may take to give one.
        ping_answer: Duration = seconds(10), MILLISECOND..=DAY;
        /// How long requests may go on after a signal to stop.
        drain: Duration = seconds(30), MILLISECOND..=DAY;
    }
}

section! {
    /// Bounds on connections. A source is an IPv4 address or an IPv6 /64.
    pub struct Connections {
        /// Open at once.
        total: u32 = 4_096, 1..=1_000_000;
        /// Open at once from one source that has not authenticated.
        per_source: u32 = 64, 1..=1_000_000;
        /// New ones a second from one source.
        new_per_second: u32 = 20, 1..=1_000_000;
        /// New ones at once from one source.
        new_burst: u32 = 100, 1..=1_000_000;
        /// Handshakes in flight over all sources.
        handshakes: u32 = 256, 1..=1_000_000;
    }
}

section! {
    /// Bounds on what one source asks, over all its connections and whoever it
    /// says it is. A source is an IPv4 address or an IPv6 /64.
    pub struct SourceLimits {
        /// Requests a second.
        requests_per_second: u32 = 1_000, 1..=1_000_000;
        /// Requests at once.
        request_burst: u32 = 2_000, 1..=1_000_000;
    }
}

section! {
    /// Proxies before the front door. Nobody's word about the client is taken
    /// unless they are named here.
    pub struct Proxies {
        /// Their networks. Their connections count against the total alone,
        /// and the client that they name is the source.
        trusted: Vec<Network> = Vec::new();
        /// How they name the client: "x-forwarded-for" in each request, or
        /// "proxy-v2", the PROXY protocol before TLS; a connection of theirs
        /// without it is closed.
        client_from: ClientFrom = ClientFrom::XForwardedFor;
    }
}

section! {
    /// Bounds within an HTTP/2 connection.
    pub struct Http2 {
        /// Streams at once.
        streams: u32 = 100, 1..=10_000;
        /// Streams reset before they were accepted.
        pending_accept_resets: u32 = 20, 1..=10_000;
        /// Streams that were reset for the peer's errors.
        local_error_resets: u32 = 64, 1..=10_000;
        /// All headers of a request.
        header_size: ByteSize = kib(16), kib(1)..=mib(1);
        /// Streams that the peer may cancel; then the connection is closed.
        cancels: u32 = 200, 1..=1_000_000;
        /// Frames a second that ask for nothing (SETTINGS, PING, PRIORITY,
        /// empty DATA and the like), ten seconds' worth at once; beyond, the
        /// connection is closed.
        idle_frames_per_second: u32 = 100, 1..=1_000_000;
    }
}

section! {
    /// Bounds on a request.
    pub struct RequestLimits {
        /// The body of a chat or completion request.
        body: ByteSize = mib(2), kib(1)..=mib(256);
        /// How deep JSON may nest.
        json_depth: u32 = 32, 4..=128;
        /// Messages of a chat.
        messages: u32 = 2_048, 1..=65_536;
        /// Choices of an answer (n).
        choices: u32 = 8, 1..=128;
        /// Candidates of a completion (best_of).
        best_of: u32 = 2, 1..=128;
        /// Prompts of a completion.
        prompts: u32 = 16, 1..=2_048;
        /// Stop strings.
        stop: u32 = 4, 1..=64;
        /// One stop string.
        stop_size: ByteSize = ByteSize(256), ByteSize(1)..=kib(16);
        /// Alternatives reported for a token (top_logprobs).
        top_logprobs: u32 = 20, 1..=20;
        /// Entries of logit_bias.
        logit_bias: u32 = 300, 1..=1_024;
        /// Tokens of an answer where the request says nothing; the model's
        /// context bounds it too.
        default_max_tokens: u32 = 1_024, 1..=1_000_000;
    }
}

section! {
    /// Requests that bring an Idempotency-Key: what is sent again is not run
    /// again.
    pub struct Idempotency {
        /// How long a key stands for its request.
        kept: Duration = DAY, seconds(60)..=DAY * 7;
        /// Keys of one tenant within that time; requests beyond it are refused
        /// unless they bring none.
        keys_per_tenant: u32 = 100_000, 1..=10_000_000;
        /// Memory for answers to give again, over all tenants; the oldest go
        /// first. They are never written to disk.
        answers: ByteSize = mib(64), ByteSize(0)..=mib(65_536);
        /// The longest answer that is kept.
        largest_answer: ByteSize = mib(1), ByteSize(0)..=mib(1_024);
    }
}

section! {
    /// Deadlines of a request.
    pub struct Deadlines {
        /// Waiting for a place to run.
        queue: Duration = seconds(30), MILLISECOND..=DAY;
        /// From its headers to its last byte.
        request: Duration = seconds(600), MILLISECOND..=DAY;
        /// How long after that a lost request's limits are held.
        hold_grace: Duration = seconds(30), MILLISECOND..=DAY;
    }
}

section! {
    /// What repeated offences earn: a wait that decays by itself. An admin sees
    /// it and lifts it by tollgate penalties.
    pub struct Penalties {
        /// Clients of one tenant that may be waiting to come back as they were
        /// told to. More refusals than so many could cause come from clients
        /// that do not wait.
        refused_clients: u32 = 1_000, 1..=1_000_000;
        /// Requests that a tenant may cancel in a minute while they wait or
        /// run.
        cancels_per_minute: u32 = 60, 1..=1_000_000;
        /// Credentials that one source may show in a minute and that do not
        /// authenticate. Its good ones are served all the same.
        failed_authentications_per_minute: u32 = 60, 1..=1_000_000;
        /// No penalty lasts longer after the last offence.
        longest: Duration = seconds(60), seconds(1)..=seconds(3_600);
    }
}

section! {
    /// The process around a device.
    pub struct Worker {
        /// Threads that compute on a CPU; as many as there are cores unless
        /// given.
        threads: Option<u32> = None, Some(1)..=Some(1_024);
        /// Memory for the KV cache on a CPU.
        kv_memory: ByteSize = mib(512), mib(1)..=ByteSize(1 << 44);
        /// Percent of a GPU's free memory that a worker takes: weights,
        /// buffers, and for the KV cache what is left of it.
        gpu_memory: u32 = 90, 1..=100;
        /// Whether the same request is answered the same to the bit whatever
        /// else is in the batch; steps take longer.
        deterministic: bool = false;
        /// Sequences in one batch.
        max_sequences: u32 = 64, 1..=4_096;
        /// How long one step should take at most; where the model is fast, less:
        /// sixteen of its shortest steps, but at least 1 ms.
        step_box: Duration = Duration::from_millis(80), MILLISECOND..=seconds(10);
        /// Prompt tokens that one sequence brings into one step.
        max_chunk_tokens: u32 = 512, 1..=65_536;
        /// Requests that wait for the batch; more are refused.
        queue_capacity: u32 = 256, 1..=65_536;
        /// "model", or "synthetic": a device that is not there, which computes
        /// nothing and takes the time that worker.synthetic says. Answers are
        /// without meaning; tokenizer and template are the model's.
        engine: EngineKind = EngineKind::Model;
    }
    sections {
        /// Workers that do not go on.
        watchdog: Watchdog;
        /// Devices that are not well.
        health: Health;
        /// Cards that are shared.
        sharing: Sharing;
        /// The synthetic engine.
        synthetic: Synthetic;
    }
}

section! {
    /// The synthetic engine, for planning with devices that one does not have.
    /// A step takes (step + sequence for each drawn token + prefill_token for
    /// each token of a prompt + kv_token for each token of context) / speed.
    pub struct Synthetic {
        /// Any step.
        step: Duration = Duration::from_millis(28), Duration::ZERO..=seconds(60);
        /// Each token that is drawn: one for each sequence that generates.
        sequence: Duration = Duration::from_micros(300), Duration::ZERO..=seconds(60);
        /// Each token of context that the step reads.
        kv_token: Duration = Duration::from_nanos(1_200), Duration::ZERO..=seconds(1);
        /// Each token of a prompt.
        prefill_token: Duration = Duration::from_micros(210), Duration::from_nanos(1)..=seconds(1);
        /// How much faster than all that. What the scheduler counts in device
        /// time is divided by it too: worker.step_box and its guards.
        speed: f64 = 1.0, 0.001..=1_000.0;
        /// Who runs next: "fair", as on every other device, or, to compare with
        /// it, "first_come", "token_counters" or "key_counters".
        policy: SyntheticPolicy = SyntheticPolicy::Fair;
        /// Tokens that its KV cache holds.
        kv_tokens: u32 = 10_000, 16..=100_000_000;
        /// Tokens that one sequence may hold.
        context: u32 = 8_192, 2..=1_048_576;
        /// To rehearse what is done about faults: a folder. A file in it with a
        /// worker's name that says "hang", "fail" or "memory" makes its next
        /// step do so, once; NAME.start makes its next start fail.
        faults: Option<PathBuf> = None;
    }
}

section! {
    /// A set of limits. What is not given is not limited; device time is
    /// reference cost, by device class, with default for those not named.
    pub(crate) struct RawPlan {
        /// A token bucket: a number, or { limit, burst }.
        requests_per_minute: Option<Rate> = None;
        /// Prompt and completion tokens: a number, or { limit, burst }.
        tokens_per_minute: Option<Rate> = None;
        /// Requests that run at once.
        concurrent: Option<u32> = None, Some(1)..=Some(1_000_000);
        /// Requests that may wait for one of those places; none unless given.
        queued: Option<u32> = None, Some(0)..=Some(65_536);
        /// The worst case of a single request.
        largest_job: ByClass<DeviceNanos> = ByClass::default();
        /// A token bucket, too: a duration, or { limit, burst }.
        device_time_per_minute: ByClass<DeviceRate> = ByClass::default();
        /// A cap for a calendar day (UTC), never exceeded.
        device_time_per_day: ByClass<DeviceNanos> = ByClass::default();
        /// A cap for a calendar month (UTC), never exceeded.
        device_time_per_month: ByClass<DeviceNanos> = ByClass::default();
        /// Its share of a contended device, relative to others.
        weight: f64 = 1.0, 0.001..=1_000.0;
    }
}

section! {
    /// Tenants that share one set of limits, beside those of their own.
    pub(crate) struct RawPool {
        /// The limits that bind them together.
        plan: Option<PlanName> = None;
    }
}

section! {
    /// Who pays. A plan or a pool is needed; where both are given, both bind.
    pub(crate) struct RawTenant {
        /// Limits of its own. Its weight is this plan's, else its pool's.
        plan: Option<PlanName> = None;
        /// Limits shared with the pool's other tenants.
        pool: Option<PoolName> = None;
        /// The models it may use; all unless given.
        models: Option<BTreeSet<ModelName>> = None;
    }
}

section! {
    /// What usage costs from a day on, for statements. Prices are decimals in
    /// quotes, with at most nine digits after the point.
    pub(crate) struct RawPriceList {
        /// The first UTC day of these prices; they hold until the next list
        /// of the same plan begins.
        from: Option<UtcDay> = None;
        /// For this plan's tenants, before the list that names no plan.
        plan: Option<PlanName> = None;
        /// Three capital letters, the same in every list.
        currency: Option<Currency> = None;
        /// A second of device time (reference cost), by device class.
        per_device_second: ByClass<Price> = ByClass::default();
        /// A million tokens of prompts.
        per_million_prompt_tokens: Price = Price::default();
        /// A million tokens generated.
        per_million_completion_tokens: Price = Price::default();
    }
}

section! {
    /// A model as callers name it.
    pub(crate) struct RawModel {
        /// A folder with config.json, safetensors and tokenizer.json; the
        /// model that comes along needs none.
        path: Option<PathBuf> = None;
        /// Where it runs: "auto", "cpu", "cuda", "cuda:INDEX" or "cuda:UUID".
        devices: Vec<DeviceSelector> = vec![DeviceSelector::Auto];
        /// Limits over all who call it together; none unless given.
        plan: Option<PlanName> = None;
    }
}

section! {
    /// Who callers are, beside the keys in the database.
    pub(crate) struct RawAuth {
    }
    sections {
        /// Token issuers by name.
        jwt: BTreeMap<IssuerName, RawIssuer>;
    }
}

section! {
    /// An issuer whose tokens (JWT) are believed. One of keys, jwks and
    /// jwks_url is needed.
    pub(crate) struct RawIssuer {
        /// The token's iss.
        issuer: Option<String> = None;
        /// The token's aud.
        audience: Option<String> = None;
        /// The signatures it may bear.
        algorithms: Vec<JwtAlgorithm> = Vec::new();
        /// Public keys in PEM, one a file.
        keys: Vec<PathBuf> = Vec::new();
        /// A file with a JSON Web Key Set.
        jwks: Option<PathBuf> = None;
        /// Where such a set is fetched, over https alone. What cannot be
        /// fetched or used leaves the keys that there are.
        jwks_url: Option<HttpsUrl> = None;
        /// The authorities that may vouch for jwks_url, in PEM; those of the
        /// system unless given.
        jwks_ca: Option<PathBuf> = None;
        /// How often it is fetched; a token with an unknown key asks for it
        /// sooner, every 30 seconds at most.
        jwks_refresh: Duration = seconds(600), seconds(30)..=DAY;
        /// The claim that names the tenant.
        tenant_claim: String = "tenant".to_owned();
        /// The tenants that it may name; all unless given. An issuer that one
        /// tenant runs must not speak for another.
        tenants: Option<BTreeSet<TenantId>> = None;
        /// How far clocks may be apart.
        leeway: Duration = seconds(5), Duration::ZERO..=seconds(60);
    }
}

/// A token issuer that is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Its name in config.
    pub name: String,
    /// The `iss` that its tokens bear.
    pub issuer: String,
    /// The `aud` that they are for.
    pub audience: String,
    /// The signatures that they may bear; not empty.
    pub algorithms: Vec<JwtAlgorithm>,
    /// Its public keys.
    pub keys: JwtKeys,
    /// The claim that names the tenant.
    pub tenant_claim: String,
    /// The tenants that it may name; all where `None`.
    pub tenants: Option<BTreeSet<TenantId>>,
    /// How far clocks may be apart.
    pub leeway: Duration,
}

/// Where an issuer's public keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JwtKeys {
    /// In PEM, one a file; all of the one family that the algorithms name.
    Pem(Vec<PathBuf>),
    /// In a JSON Web Key Set.
    Jwks(PathBuf),
    /// In a JSON Web Key Set that is fetched.
    Url {
        /// Where it is.
        url: HttpsUrl,
        /// Who may vouch for that place; the system's authorities where `None`.
        ca: Option<PathBuf>,
        /// How often it is fetched.
        refresh: Duration,
    },
}

/// An address of the web: `https://`, a host, perhaps a port and a path; no
/// name, no password, no fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpsUrl(String);

impl HttpsUrl {
    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HttpsUrl {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let rest = text.strip_prefix("https://").ok_or(())?;
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        let host = authority.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        let host = host.map_or(authority, |(host, _)| host);
        let is_plain =
            text.bytes().all(|byte| byte.is_ascii_graphic() && !b"#@\\\"".contains(&byte));
        let is_host = host.starts_with('[') && host.ends_with(']')
            || host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
        if is_plain && is_host && !host.is_empty() && text.len() <= 2_048 {
            Ok(Self(text.to_owned()))
        } else {
            Err(())
        }
    }
}

/// As it is written.
impl fmt::Display for HttpsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What computes in a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// The model, on its device.
    Model,
    /// Nothing: time passes as if something did.
    Synthetic,
}

impl FromStr for EngineKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "model" => Ok(Self::Model),
            "synthetic" => Ok(Self::Synthetic),
            _ => Err(()),
        }
    }
}

/// As it is written.
impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Synthetic => "synthetic",
        })
    }
}

/// Who runs next on a synthetic device. All but the first are there to be
/// compared with it, and no other device can be given them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticPolicy {
    /// Shares of device time by holder, tenant and key.
    Fair,
    /// In order of arrival.
    FirstCome,
    /// Shares of tokens.
    TokenCounters,
    /// Each key has a share of its own.
    KeyCounters,
}

impl SyntheticPolicy {
    const ALL: [Self; 4] = [Self::Fair, Self::FirstCome, Self::TokenCounters, Self::KeyCounters];
}

impl FromStr for SyntheticPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|policy| policy.to_string() == text).ok_or(())
    }
}

/// As it is written.
impl fmt::Display for SyntheticPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fair => "fair",
            Self::FirstCome => "first_come",
            Self::TokenCounters => "token_counters",
            Self::KeyCounters => "key_counters",
        })
    }
}

/// Where a model runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceSelector {
    /// On the first GPU that can be used, else on the CPU.
    Auto,
    /// On the CPU.
    Cpu,
    /// On the first GPU that can be used, or on the one with this UUID or
    /// place in the driver's list.
    Cuda(Option<String>),
}

impl FromStr for DeviceSelector {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => match text.strip_prefix("cuda:") {
                Some(uuid) if !uuid.is_empty() => Ok(Self::Cuda(Some(uuid.to_owned()))),
                _ => Err(()),
            },
        }
    }
}

/// As it is written.
impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(uuid)) => write!(f, "cuda:{uuid}"),
        }
    }
}

/// How a trusted proxy names the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientFrom {
    /// By the header of each request.
    XForwardedFor,
    /// By the binary PROXY protocol, before a connection's first byte.
    ProxyV2,
}

impl FromStr for ClientFrom {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::XForwardedFor, Self::ProxyV2]
            .into_iter()
            .find(|from| from.to_string() == text)
            .ok_or(())
    }
}

/// As it is written.
impl fmt::Display for ClientFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::ProxyV2 => "proxy-v2",
        })
    }
}

/// A signature by a private key that only the issuer has; those by a shared
/// secret are not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are RFC 7518's and RFC 8037's")]
pub enum JwtAlgorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

impl JwtAlgorithm {
    const ALL: [Self; 9] = [
        Self::RS256,
        Self::RS384,
        Self::RS512,
        Self::PS256,
        Self::PS384,
        Self::PS512,
        Self::ES256,
        Self::ES384,
        Self::EdDSA,
    ];

    /// The kind of key that makes it: `RSA`, `EC` or `Ed25519`.
    pub fn family(self) -> &'static str {
        match self {
            Self::RS256 | Self::RS384 | Self::RS512 => "RSA",
            Self::PS256 | Self::PS384 | Self::PS512 => "RSA",
            Self::ES256 | Self::ES384 => "EC",
            Self::EdDSA => "Ed25519",
        }
    }
}

impl FromStr for JwtAlgorithm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|algorithm| algorithm.to_string() == text).ok_or(())
    }
}

/// As the token's `alg` says it.
impl fmt::Display for JwtAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl IssuerName {
    pub(crate) fn new(name: &str) -> Result<Self, tollgate_domain::ids::InvalidName> {
        // An issuer's name follows the rules of every other name.
        TenantId::new(name)
            .map(|name| Self(name.as_str().to_owned()))
            .map_err(|error| tollgate_domain::ids::InvalidName { kind: "issuer", ..error })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}
