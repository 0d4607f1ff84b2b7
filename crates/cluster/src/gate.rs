//! A worker's side: the gateways whose work it takes.

use std::collections::BTreeSet;

use crate::{GatewayNumber, Timeline};

/// The gateways that a worker refuses, and the newest history of the database that it heard
/// of.
#[derive(Clone, Debug)]
pub struct WorkerGate {
    timeline: Timeline,
    retired: BTreeSet<GatewayNumber>,
}

/// The reason for which a worker refuses work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkRefused {
    /// The gateway is retired; it must end itself.
    #[error("this gateway is retired")]
    Retired,
    /// The gateway speaks to a database that a standby has replaced.
    #[error(
        "the gateway's database was replaced: its timeline {of_gateway:?} is older than {newest:?}"
    )]
    OldTimeline {
        /// The timeline of the gateway's database.
        of_gateway: Timeline,
        /// The newest timeline.
        newest: Timeline,
    },
}

impl WorkerGate {
    /// Creates the gate of a worker that starts. `timeline` is the newest one that the worker
    /// has heard of in any of its lives: it keeps it beside its journal, because a gateway of
    /// a replaced database may come before a gateway of the new one.
    pub fn new(timeline: Timeline) -> Self {
        Self { timeline, retired: BTreeSet::new() }
    }

    /// Returns the newest timeline that the worker has heard of.
    pub fn timeline(&self) -> Timeline {
        self.timeline
    }

    /// Checks new work of a gateway whose database is in `timeline`, and hears of the timeline.
    ///
    /// # Errors
    /// [`WorkRefused`]
    pub fn check(&mut self, number: GatewayNumber, timeline: Timeline) -> Result<(), WorkRefused> {
        self.hear(timeline);
        self.judge(number, timeline)
    }

    /// Returns the answer of [`Self::check`] and changes nothing.
    ///
    /// # Errors
    /// [`WorkRefused`]
    pub fn judge(&self, number: GatewayNumber, timeline: Timeline) -> Result<(), WorkRefused> {
        if timeline < self.timeline {
            return Err(WorkRefused::OldTimeline { of_gateway: timeline, newest: self.timeline });
        }
        if self.retired.contains(&number) { Err(WorkRefused::Retired) } else { Ok(()) }
    }

    /// Hears of a history of the database.
    pub fn hear(&mut self, timeline: Timeline) {
        self.timeline = self.timeline.max(timeline);
    }

    /// Refuses all further work of a gateway.
    pub fn retire(&mut self, number: GatewayNumber) {
        self.retired.insert(number);
    }
}
