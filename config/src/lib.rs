//! What admins write: listeners, tenants, plans, pools, models and limits.
//!
//! Text from files, the environment and flags becomes one tree in which every
//! value knows its place; the tree is read once into checked values, and all
//! mistakes come back together, each with its place and key. A [`Config`] that
//! exists is whole: what it names is there, and nothing in it contradicts.
//! This is the only crate that reads the environment. Config holds paths to
//! secrets, never secrets, so that showing it is always safe.

mod config;
mod example;
mod problem;
mod read;
mod reference;
mod schema;
mod sections;
mod show;
mod source;
mod tree;

pub use crate::config::{Config, Model, Plan, Pool, Tenant};
pub use crate::problem::{ConfigErrors, Place, Problem};
pub use crate::sections::{
    ByteSize, ClientFrom, Connections, Deadlines, DeviceSelector, EngineKind, Gateway, Health,
    Http2, HttpsUrl, Idempotency, Issuer, JwtAlgorithm, JwtKeys, Penalties, Proxies, RequestLimits,
    Sharing, SourceLimits, Synthetic, SyntheticPolicy, Timeouts, Tls, Watchdog, Worker,
};
pub use crate::source::{Flags, Loaded, Sources};

/// Reads a span of time as config writes it: `30d`, `2h`, `250ms`.
pub fn parse_span(text: &str) -> Option<std::time::Duration> {
    read::parse_duration(text).map(std::time::Duration::from_nanos)
}

/// What is logged, by `TOLLGATE_LOG`: `info`, or `info,tollgate_gateway=debug`;
/// empty where it is not set.
#[expect(clippy::disallowed_methods, reason = "this is the config that reads the environment")]
pub fn log_filter() -> String {
    std::env::var("TOLLGATE_LOG").unwrap_or_default()
}
