//! Every section, key, default and bound, declared once. The doc comments here are
//! also the texts of the example file, of the schema and of the reference page.

mod cluster;
mod devices;
mod gateway;
mod jobs;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tollgate_domain::{
    Budget, ByClass, Currency, DeviceNanos, ModelName, PlanName, PoolName, Price, PriceFactor,
    PriceListName, Rate, TenantId, ToolFormat, UtcDay,
};

pub(crate) use cluster::{RawCluster, RawPostgres, RawRedis, RawRemoteWorker};
pub use devices::{Health, Sharing, Watchdog};
pub use gateway::{
    AccessLog, Connections, Cors, Deadlines, Gateway, Http2, Idempotency, Penalties, Proxies,
    ReadLimits, RequestLimits, SourceLimits, Timeouts, Tls, Webhook,
};
pub use jobs::{BatchQuotas, JobLimits};
pub(crate) use values::IssuerName;
pub use values::{
    AccessLogRequests, ByteSize, ClientFrom, DeviceSelector, EngineKind, HostPort, HttpsUrl,
    Issuer, JwtAlgorithm, JwtKeys, Origin, SyntheticPolicy,
};

use crate::read::{DeviceRate, section};

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

/// The name of the demo model, which is part of the program.
pub(crate) const DEMO_MODEL: &str = "tollgate-demo";
/// The longest duration of most keys.
const DAY: Duration = Duration::from_secs(86_400);
const MILLISECOND: Duration = Duration::from_millis(1);

section! {
    /// The configuration of tollgate.
    pub(crate) struct Root {
        /// The data folder, for the ledger, the keys, the journals and the
        /// development certificates. A relative path in a file is relative to that
        /// file.
        data: PathBuf = PathBuf::from("data");
    }
    sections {
        /// The gateway's listeners and their limits.
        gateway: Gateway;
        /// The process around a device.
        worker: Worker;
        /// Plans: named sets of limits.
        plans: BTreeMap<PlanName, RawPlan>;
        /// Pools: tenants that share limits.
        pools: BTreeMap<PoolName, RawPool>;
        /// Tenants: the customers that usage is billed to.
        tenants: BTreeMap<TenantId, RawTenant>;
        /// The models to serve.
        models: BTreeMap<ModelName, RawModel>;
        /// Price lists.
        prices: BTreeMap<PriceListName, RawPriceList>;
        /// Authentication by tokens of other systems.
        auth: RawAuth;
        /// Other machines: workers, and a database server.
        cluster: RawCluster;
    }
}

section! {
    /// The process around a device.
    pub struct Worker {
        /// The number of threads that compute on a CPU. The default is one for each
        /// core.
        threads: Option<u32> = None, Some(1)..=Some(1_024);
        /// The memory for the KV cache on a CPU. A worker takes more than this if
        /// one sequence of the model's full context needs more.
        kv_memory: ByteSize = mib(512), mib(1)..=ByteSize(1 << 44);
        /// The percentage of a GPU's free memory that a worker takes: for weights
        /// and buffers first, and for the KV cache with the remainder.
        gpu_memory: u32 = 90, 1..=100;
        /// True if a request with a seed gets the same answer in any batch: logits
        /// are then bitwise the same. Steps take longer.
        deterministic: bool = false;
        /// The largest number of sequences in a batch.
        max_sequences: u32 = 64, 1..=4_096;
        /// The longest time that the scheduler plans for a step. On a fast model
        /// the limit is lower: sixteen times the model's shortest step, but at
        /// least 1 ms.
        step_time_budget: Duration = Duration::from_millis(80), MILLISECOND..=seconds(10);
        /// The percentage by which batch work may make a step longer that also has
        /// interactive work.
        batch_step: u32 = 23, 1..=1_000;
        /// The largest number of prompt tokens of one sequence in one step.
        max_chunk_tokens: u32 = 512, 1..=65_536;
        /// The largest number of requests that wait for the batch. The worker
        /// refuses more.
        queue_capacity: u32 = 256, 1..=65_536;
        /// "model", or "synthetic" for a simulated device. A synthetic device
        /// computes nothing and takes the time that worker.synthetic gives. Its
        /// answers have no meaning; the tokenizer and the chat template are the
        /// model's.
        engine: EngineKind = EngineKind::Model;
    }
    sections {
        /// Detection of workers that hang.
        watchdog: Watchdog;
        /// Health checks of GPUs.
        health: Health;
        /// GPUs that several workers share.
        sharing: Sharing;
        /// The synthetic engine.
        synthetic: Synthetic;
    }
}

section! {
    /// The synthetic engine, a simulated device for capacity planning. A step takes
    /// (step + sequence for each sampled token + prefill_token for each token of a
    /// prompt + kv_token for each token of context) / speed.
    pub struct Synthetic {
        /// The time that any step takes.
        step: Duration = Duration::from_millis(28), Duration::ZERO..=seconds(60);
        /// The time for each sampled token. Each sequence that generates samples
        /// one token a step.
        sequence: Duration = Duration::from_micros(300), Duration::ZERO..=seconds(60);
        /// The time for each token of context that a step reads.
        kv_token: Duration = Duration::from_nanos(1_200), Duration::ZERO..=seconds(1);
        /// The time for each token of a prompt.
        prefill_token: Duration = Duration::from_micros(210), Duration::from_nanos(1)..=seconds(1);
        /// The factor by which the device is faster than these times. The
        /// scheduler's durations in device time are divided by the factor, too, for
        /// example worker.step_time_budget.
        speed: f64 = 1.0, 0.001..=1_000.0;
        /// The scheduling policy: "fair", which every other device uses, or one of
        /// the policies to compare it with: "first_come", "token_counters" or
        /// "key_counters".
        policy: SyntheticPolicy = SyntheticPolicy::Fair;
        /// The number of tokens that the KV cache holds.
        kv_tokens: u32 = 10_000, 16..=100_000_000;
        /// The largest number of tokens of one sequence.
        context: u32 = 8_192, 2..=1_048_576;
        /// A folder of fault requests, to rehearse failures. A file with a worker's
        /// name that contains "hang", "fail" or "memory" makes the worker's next
        /// step fail in that way, once. A file NAME.start makes the worker's next
        /// start fail.
        faults: Option<PathBuf> = None;
    }
}

section! {
    /// A set of limits. A limit that is not given does not exist. Device time means
    /// reference cost. It is given for all device classes, or as a table of device
    /// classes in which `default` stands for the other classes.
    pub(crate) struct RawPlan {
        /// Requests a minute (a token bucket): a number, or { limit, burst }.
        requests_per_minute: Option<Rate> = None;
        /// Prompt and completion tokens a minute (a token bucket): a number, or {
        /// limit, burst }.
        tokens_per_minute: Option<Rate> = None;
        /// The largest number of requests that run at the same time.
        concurrent: Option<u32> = None, Some(1)..=Some(1_000_000);
        /// The largest number of requests that wait because `concurrent` is
        /// reached. The default is 0: such requests are refused.
        queued: Option<u32> = None, Some(0)..=Some(65_536);
        /// The largest number of authenticated connections. The default of keys and
        /// tenants is in gateway.connections; pools have no default.
        connections: Option<u32> = None, Some(1)..=Some(1_000_000);
        /// The largest worst-case device time of a single request.
        largest_job: ByClass<DeviceNanos> = ByClass::default();
        /// Device time a minute (a token bucket): a duration, or { limit, burst }.
        device_time_per_minute: ByClass<DeviceRate> = ByClass::default();
        /// Time of the host a minute for the forms of answers: JSON schemas, required
        /// calls of tools and the like (a token bucket), at least 20ms. The default is
        /// 2s; a model's plan has no default.
        grammar_time_per_minute: Option<DeviceRate> = None;
        /// The largest device time in a calendar day (UTC). docs/limits.md names the few
        /// cases in which usage can exceed it.
        device_time_per_day: ByClass<DeviceNanos> = ByClass::default();
        /// The largest device time in a calendar month (UTC), with the same exceptions.
        device_time_per_month: ByClass<DeviceNanos> = ByClass::default();
        /// The largest cost in a calendar month (UTC) at the tenant's prices, such as
        /// { EUR = "500" }. Usage without a price costs nothing.
        budget_per_month: Option<Budget> = None;
        /// True if requests may ask for service_tier "flex". They run in the batch
        /// tier: after all interactive requests, and without the limits on tokens and
        /// device time a minute. Each plan of a key, tenant or pool must allow it.
        flex: bool = false;
        /// The share of a contended device, relative to other plans.
        weight: f64 = 1.0, 0.001..=1_000.0;
    }
    sections {
        /// Quotas of batches and of their files.
        batches: BatchQuotas;
    }
}

section! {
    /// A pool: tenants that share one set of limits, in addition to their own
    /// limits.
    pub(crate) struct RawPool {
        /// The plan with the limits for all tenants of the pool together.
        plan: Option<PlanName> = None;
    }
}

section! {
    /// A tenant. A tenant needs a plan or a pool. If both are given, the limits of
    /// both apply.
    pub(crate) struct RawTenant {
        /// The plan of this tenant alone. The tenant's weight is the weight of this
        /// plan, or else of the pool's plan.
        plan: Option<PlanName> = None;
        /// The pool that the tenant belongs to.
        pool: Option<PoolName> = None;
        /// The models that the tenant may use. The default is all models.
        models: Option<BTreeSet<ModelName>> = None;
    }
}

section! {
    /// The prices of usage from a day on, for statements. Prices are decimals in
    /// quotes with at most nine digits after the point.
    pub(crate) struct RawPriceList {
        /// The first UTC day of these prices. They apply until the next list of the
        /// same plan and model begins.
        from: Option<UtcDay> = None;
        /// The plan that the prices are for. A list without a plan applies
        /// to all other tenants.
        plan: Option<PlanName> = None;
        /// The model that the prices are for. A list without a model applies to all
        /// other models.
        model: Option<ModelName> = None;
        /// True if the model is no longer served. The list then sets the prices of
        /// its past usage.
        retired: bool = false;
        /// The currency, as three capital letters. It must be the same in every
        /// list.
        currency: Option<Currency> = None;
        /// The price of a second of device time (reference cost), by device class.
        /// Usage on the class `synthetic` is free unless it is named here.
        per_device_second: ByClass<Price> = ByClass::default();
        /// The price of a million prompt tokens.
        per_million_prompt_tokens: Price = Price::default();
        /// The price of a million completion tokens.
        per_million_completion_tokens: Price = Price::default();
        /// The factor of the amount for usage of the batch tier: more than 0, and at
        /// most 1.
        batch: PriceFactor = PriceFactor::ONE;
    }
}

section! {
    /// A model, by the name that requests use.
    pub(crate) struct RawModel {
        /// The folder with config.json, safetensors files and tokenizer.json. The
        /// demo model needs none.
        path: Option<PathBuf> = None;
        /// The devices that run the model, each with a worker of its own: "auto",
        /// "cpu", "cuda", "cuda:INDEX" or "cuda:UUID".
        devices: Vec<DeviceSelector> = vec![DeviceSelector::Auto];
        /// The plan with the limits for all callers of the model together. The
        /// default is no limits.
        plan: Option<PlanName> = None;
        /// The form in which the model writes calls of tools: "hermes",
        /// "qwen3-coder", "llama3" or "mistral". The default is the form that the
        /// chat template shows.
        tool_format: Option<ToolFormat> = None;
    }
}

section! {
    /// Authentication by tokens of other systems, in addition to API keys.
    pub(crate) struct RawAuth {
    }
    sections {
        /// Token issuers.
        jwt: BTreeMap<IssuerName, RawIssuer>;
    }
}

section! {
    /// A trusted issuer of tokens (JWT). The issuer needs one of keys,
    /// jwks and jwks_url.
    pub(crate) struct RawIssuer {
        /// The value of the token's iss claim.
        issuer: Option<String> = None;
        /// The value of the token's aud claim.
        audience: Option<String> = None;
        /// The signature algorithms that are accepted.
        algorithms: Vec<JwtAlgorithm> = Vec::new();
        /// Files with a public key each, in PEM.
        keys: Vec<PathBuf> = Vec::new();
        /// A file with a JSON Web Key Set.
        jwks: Option<PathBuf> = None;
        /// The https address of a JSON Web Key Set. A set that cannot be fetched or
        /// used leaves the previous keys in place.
        jwks_url: Option<HttpsUrl> = None;
        /// A PEM file with the certificate authorities for jwks_url. The default is
        /// the system's authorities.
        jwks_ca: Option<PathBuf> = None;
        /// The time between two fetches of jwks_url. A token with an unknown key
        /// triggers an earlier fetch, at most every 30 seconds.
        jwks_refresh: Duration = seconds(600), seconds(30)..=DAY;
        /// The claim that contains the tenant's name.
        tenant_claim: String = "tenant".to_owned();
        /// The tenants that this issuer may name. The default is all tenants.
        /// Restrict it for an issuer that one tenant runs, so that it cannot speak
        /// for another.
        tenants: Option<BTreeSet<TenantId>> = None;
        /// The tolerated difference between the issuer's clock and this host's
        /// clock.
        leeway: Duration = seconds(5), Duration::ZERO..=seconds(60);
    }
}
