//! Every section, key, default and bound, declared once. The comments here
//! are the texts of the example file and of the schema.

mod devices;
mod gateway;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tollgate_domain::{
    ByClass, Currency, DeviceNanos, ModelName, PlanName, PoolName, Price, PriceListName, Rate,
    TenantId, UtcDay,
};

pub use devices::{Health, Sharing, Watchdog};
pub use gateway::{
    Connections, Deadlines, Gateway, Http2, Idempotency, Penalties, Proxies, RequestLimits,
    SourceLimits, Timeouts, Tls,
};
pub(crate) use values::IssuerName;
pub use values::{
    ByteSize, ClientFrom, DeviceSelector, EngineKind, HttpsUrl, Issuer, JwtAlgorithm, JwtKeys,
    SyntheticPolicy,
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
        /// Whether a request with a seed is answered the same whatever else is
        /// in the batch: logits are, to the bit. Steps take longer.
        deterministic: bool = false;
        /// Sequences in one batch.
        max_sequences: u32 = 64, 1..=4_096;
        /// How long one step should take at most; where the model is fast, less:
        /// sixteen of its shortest steps, but at least 1 ms.
        step_time_budget: Duration = Duration::from_millis(80), MILLISECOND..=seconds(10);
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
        /// time is divided by it too: worker.step_time_budget and its guards.
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
