//! The limits in front of every request, as a reload changes them: the listeners, the
//! rates of sources, callers and admins, and the memory for bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate_config::Gateway;
use tollgate_domain::Caller;
use tollgate_edge::ListenerOptions;
use tollgate_edge::listener::{ConnectionLimitOptions, ListenerControl};
use tollgate_edge::source::{Proxies, SourceRing};

use crate::api::{BodyBudget, body_budget_options};
use crate::edge_options;
use crate::read_limit::{AdminReadLimit, ReadLimit};

/// The limits of both listeners. Clones share them.
#[derive(Clone)]
pub(crate) struct Doors {
    pub(crate) public: ListenerControl,
    pub(crate) admin: ListenerControl,
    pub(crate) requests: RequestDoors,
}

/// The limits on requests, whose connections are counted elsewhere.
#[derive(Clone)]
pub(crate) struct RequestDoors {
    pub(crate) sources: SourceRing,
    pub(crate) reads: ReadLimit<Caller>,
    pub(crate) admin_reads: AdminReadLimit,
    pub(crate) bodies: BodyBudget,
    pub(crate) largest_body: LargestBody,
}

/// The size of the largest body of any route. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct LargestBody(Arc<AtomicU64>);

impl Doors {
    /// Puts the limits of `config` in force for the next connections and requests.
    pub(crate) fn adopt(&self, config: &Gateway) {
        let options = edge_options::listener(config);
        self.admin.adopt(admin_listener(options.clone()));
        self.public.adopt(options);
        self.requests.adopt(config);
    }
}

impl RequestDoors {
    /// Makes the limits of `config`.
    pub(crate) fn new(config: &Gateway) -> Self {
        Self {
            sources: SourceRing::new(&edge_options::sources(&config.sources)),
            reads: ReadLimit::new(&config.reads),
            admin_reads: ReadLimit::new(&config.reads),
            bodies: BodyBudget::new(body_budget_options(&config.requests)),
            largest_body: LargestBody::new(config.requests.body.0),
        }
    }

    fn adopt(&self, config: &Gateway) {
        // Exhaustive, so that no limit is forgotten in a reload.
        let Self { sources, reads, admin_reads, bodies, largest_body } = self;
        sources.adopt(&edge_options::sources(&config.sources));
        reads.adopt(&config.reads);
        admin_reads.adopt(&config.reads);
        bodies.adopt(body_budget_options(&config.requests));
        largest_body.0.store(config.requests.body.0, Ordering::Relaxed);
    }

    /// Drops buckets that are full again. Called once a second, which bounds their memory.
    pub(crate) fn sweep(&self) {
        self.sources.sweep();
        self.reads.sweep();
    }
}

impl LargestBody {
    /// Makes a size of `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        Self(Arc::new(AtomicU64::new(bytes)))
    }

    /// Returns the bytes of the largest body.
    pub(crate) fn bytes(&self) -> u64 {
        // Relaxed: the number guards no other memory.
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns the options of the admin listener: few connections, short drain.
pub(crate) fn admin_listener(options: ListenerOptions) -> ListenerOptions {
    let connection_limits =
        ConnectionLimitOptions { connections: ADMIN_CONNECTIONS, ..options.connection_limits };
    // No proxy stands in front of this listener: probes and admins connect
    // directly.
    let proxies = Proxies::default();
    ListenerOptions { name: "admin", connection_limits, proxies, drain: ADMIN_DRAIN, ..options }
}

/// Most connections of the admin listener.
const ADMIN_CONNECTIONS: usize = 256;

/// Time in which admin requests must end when the gateway stops.
const ADMIN_DRAIN: Duration = Duration::from_secs(1);
