//! What goes into a reservation and what comes out of it, as values.

use tollgate_domain::{DeviceClass, DeviceNanos, MonotonicTime, RequestId};

use crate::refusal::Refusal;
use crate::scope::ScopeLimits;

/// The bounds of the whole. The defaults serve one gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionOptions {
    /// Holds open at once, running and waiting.
    pub max_holds: usize,
    /// Scopes remembered at once; idle ones are forgotten first.
    pub max_scopes: usize,
    /// Resolved and expired holds remembered, so that a second resolve is
    /// told so and late usage is posted; the oldest are forgotten first.
    pub max_resolved: usize,
}

impl Default for AdmissionOptions {
    fn default() -> Self {
        Self { max_holds: 65_536, max_scopes: 131_072, max_resolved: 65_536 }
    }
}

/// What a request asks to be admitted with.
#[derive(Clone, Debug)]
pub struct Reserve {
    /// Names the hold; never used twice.
    pub id: RequestId,
    /// Every scope that limits it, narrowest first, none twice.
    pub scopes: Vec<ScopeLimits>,
    /// The class of the devices that would serve it.
    pub class: DeviceClass,
    /// What it will probably cost.
    pub estimate: Estimate,
    /// How long it may wait for a place to run; then it is voided.
    pub queue_deadline: MonotonicTime,
    /// The end of the hold's life: the whole request's deadline and a grace.
    pub expires: MonotonicTime,
}

/// The predicted cost of a request. Device time is reference cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Prompt and expected output tokens.
    pub tokens: u64,
    /// The cost with the expected output.
    pub expected: DeviceNanos,
    /// The cost with the longest output that it may have. Where a cap applies
    /// this is what the worker is told never to exceed, so estimate it with
    /// whatever margin the cost table needs.
    pub worst: DeviceNanos,
    /// The cost below which it is of no use: the prompt and a first token. A
    /// cap with less than that left refuses.
    pub least: DeviceNanos,
}

/// Whether a request may run or waits for another to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldState {
    /// It holds a place in every scope.
    Running,
    /// It waits, first come first served within its scopes.
    Queued,
}

/// Why there is no hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// A limit said no; nothing was taken.
    #[error("refused by {} of {}", .0.limit.as_str(), .0.scope)]
    Refused(Box<Refusal>),
    /// The id has been used: a second hold would charge twice.
    #[error("a hold of this id exists or has been resolved")]
    AlreadyHeld,
}

/// What a request really used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Prompt and completion tokens, cached ones included.
    pub tokens: u64,
    /// Reference cost.
    pub reference: DeviceNanos,
}

/// How a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// Its true cost was posted.
    Posted,
    /// All of it was given back.
    Voided,
    /// Nobody resolved it in time; only late usage may still be posted.
    Expired,
}

/// Why a hold was not resolved; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// It was resolved before, or has expired and is voided now.
    #[error("already settled: {0:?}")]
    AlreadySettled(Resolved),
    /// There never was such a hold, or it was forgotten long after its end.
    #[error("no such hold")]
    Unknown,
}

/// What a settlement or void did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// The expected cost that was held against rates.
    pub held: DeviceNanos,
    /// What is charged now.
    pub spent: Spent,
    /// By how much the true cost exceeded what was held against caps; zero
    /// while workers keep to their budgets.
    pub overrun: DeviceNanos,
    /// Whether the hold had expired before.
    pub late: bool,
    /// Waiting requests that run from now on.
    pub promoted: Vec<RequestId>,
}

/// What a sweep did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Running holds that nobody resolved in time: released, charged nothing.
    pub expired: Vec<RequestId>,
    /// Waiting holds whose queue deadline passed: voided.
    pub timed_out: Vec<RequestId>,
    /// Waiting requests that run from now on.
    pub promoted: Vec<RequestId>,
    /// Idle scopes that were forgotten.
    pub scopes_forgotten: usize,
}

/// How much is being kept; for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionStatus {
    /// Holds that may run.
    pub running: usize,
    /// Holds that wait.
    pub queued: usize,
    /// Scopes remembered.
    pub scopes: usize,
    /// Ended holds remembered.
    pub resolved: usize,
}
