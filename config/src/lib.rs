//! The configuration that admins write: listeners, tenants, plans, pools, models
//! and limits.
//!
//! Text from files, the environment and flags becomes one tree, in which every
//! value has its place. The tree is read once into checked values. All mistakes are
//! reported together, each with its place and key. A [`Config`] that exists is
//! valid: every name that it refers to exists, and no limit contradicts another.
//! Only this crate reads the environment. A config contains the paths of secrets
//! and never secrets, so it is always safe to show.

mod config;
mod difference;
mod example;
mod live;
mod problem;
mod raise;
mod read;
mod reference;
mod schema;
mod sections;
mod show;
mod source;
mod tree;

pub use crate::config::{Cluster, Config, Model, Plan, Pool, Postgres, Redis, Reload, Tenant};
pub use crate::difference::{Change, Effect};
pub use crate::live::LiveConfig;
pub use crate::problem::{ConfigErrors, Place, Problem};
pub use crate::raise::{RaiseError, RaisedLimits};
pub use crate::sections::{
    AccessLog, AccessLogRequests, BatchQuotas, ByteSize, ClientFrom, Connections, Cors, Deadlines,
    DeviceSelector, EngineKind, Gateway, Health, HostPort, Http2, HttpsUrl, Idempotency, Issuer,
    JobLimits, JwtAlgorithm, JwtKeys, Origin, Penalties, Proxies, ReadLimits, RequestLimits,
    Sharing, SourceLimits, Synthetic, SyntheticPolicy, Timeouts, Tls, Watchdog, Webhook, Worker,
};
pub use crate::source::{Flags, Loaded, Sources};

/// Parses a duration in the config's syntax: `30d`, `2h`, `250ms`.
pub fn parse_span(text: &str) -> Option<std::time::Duration> {
    read::parse_duration(text).map(std::time::Duration::from_nanos)
}

/// Returns the log filter of the variable `TOLLGATE_LOG`, such as `info` or
/// `info,tollgate_gateway=debug`; empty if it is not set.
#[expect(clippy::disallowed_methods, reason = "this is the config that reads the environment")]
pub fn log_filter() -> String {
    std::env::var("TOLLGATE_LOG").unwrap_or_default()
}

/// Returns true if the user wants no colours on the terminal: `NO_COLOR` is set and not
/// empty (<https://no-color.org>).
#[expect(clippy::disallowed_methods, reason = "this is the config that reads the environment")]
pub fn wants_no_colours() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}
