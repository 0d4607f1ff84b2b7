//! The figures that serving reports while it works. The composition root
//! passes in an observer; the gateway's fills its metrics.

use std::time::Duration;

use tollgate_admission::{CapReached, Offence};
use tollgate_domain::{DeviceClass, ModelName, Usage};

use crate::timings::RequestTimings;

/// A receiver of figures. Calls come from request tasks and must not block.
pub trait Observer: Send + Sync {
    /// Takes the usage of an ended request. `model` is one that a worker serves.
    fn usage(&self, model: &ModelName, class: &DeviceClass, usage: &Usage);

    /// Takes the time from a request's admission to its first token.
    fn first_token(&self, model: &ModelName, class: &DeviceClass, elapsed: Duration);

    /// Takes the time that an answered request spent in each stage.
    fn timings(&self, timings: &RequestTimings);

    /// Takes the time from a block's arrival at the gateway until the ledger had it on
    /// the disk.
    fn block_committed(&self, elapsed: Duration);

    /// Notes that a penalty began.
    fn penalty_began(&self, offence: Offence);

    /// Notes that a threshold of a cap was reached.
    fn cap_reached(&self, reached: &CapReached);
}

/// An observer that keeps nothing, for tests and simulations.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn usage(&self, _: &ModelName, _: &DeviceClass, _: &Usage) {}
    fn first_token(&self, _: &ModelName, _: &DeviceClass, _: Duration) {}
    fn timings(&self, _: &RequestTimings) {}
    fn block_committed(&self, _: Duration) {}
    fn penalty_began(&self, _: Offence) {}
    fn cap_reached(&self, _: &CapReached) {}
}
