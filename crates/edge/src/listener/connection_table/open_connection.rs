//! An open connection as the table knows it: its last use, and the reason for which it
//! must end.

use std::sync::{Arc, OnceLock};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::super::activity::Activity;

/// The reason for which a connection must give up its place; a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Eviction {
    /// Few places are left, and its holder has most of them.
    Displaced,
    /// A newer connection of the same owner took its place.
    Replaced,
    /// Its owner has as many connections as it may.
    OverBound,
}

impl Eviction {
    pub(in super::super) fn as_str(self) -> &'static str {
        match self {
            Self::Displaced => "displaced",
            Self::Replaced => "replaced",
            Self::OverBound => "over_bound",
        }
    }
}

/// An open connection, shared by its task and the table.
#[derive(Debug)]
pub(in super::super) struct OpenConnection {
    opened: Instant,
    /// The activity, once the handshake has ended.
    activity: OnceLock<Arc<Activity>>,
    eviction: OnceLock<Eviction>,
    evicted: CancellationToken,
}

impl OpenConnection {
    pub(in super::super) fn new(now: Instant) -> Arc<Self> {
        Arc::new(Self {
            opened: now,
            activity: OnceLock::new(),
            eviction: OnceLock::new(),
            evicted: CancellationToken::new(),
        })
    }

    /// Sets the activity, at the end of the handshake.
    pub(in super::super) fn report(&self, activity: Arc<Activity>) {
        // Set once, because a connection has one handshake.
        let _ = self.activity.set(activity);
    }

    /// Returns when the connection must give up its place.
    #[expect(clippy::expect_used, reason = "the reason is set before the token is cancelled")]
    pub(in super::super) async fn evicted(&self) -> Eviction {
        self.evicted.cancelled().await;
        *self.eviction.get().expect("the reason is set before the token")
    }

    /// Returns the reason for which the connection must give up its place, if any.
    pub(in super::super) fn eviction(&self) -> Option<Eviction> {
        self.eviction.get().copied()
    }

    /// Asks the connection to end.
    pub(super) fn evict(&self, eviction: Eviction) {
        // The first reason stays.
        let _ = self.eviction.set(eviction);
        self.evicted.cancel();
    }

    /// Returns whether a request is in flight, and the time of the last use.
    pub(super) fn last_use(&self) -> (bool, Instant) {
        // A connection in its handshake has had no request, so it counts as idle.
        self.activity.get().map_or((false, self.opened), |activity| activity.last_use())
    }
}
