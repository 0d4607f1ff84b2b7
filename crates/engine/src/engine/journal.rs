//! What the engine tells its journal, always before anyone else hears of it.
//!
//! Steps never overlap and come in order, so what lies between the end of one
//! (`started + busy`) and the start of the next is idle, and busy and idle add
//! up to wall time exactly.

use std::io;

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, MonotonicTime, RequestId, SequenceId, Usage,
};

use super::submission::Stages;

/// Keeps the account. Called on the engine's thread: it may write a file but
/// must never wait for another party. An error ends the engine, because a
/// token that is not journalled must not leave.
pub trait StepJournal: Send {
    /// A step begins at `at`. Nothing is booked yet: it says whose the time is
    /// from here on, should the process not live to book it. It is never before
    /// the end of what is booked.
    ///
    /// # Errors
    /// When the account can no longer be kept.
    fn began(&mut self, at: MonotonicTime) -> io::Result<()> {
        let _ = at;
        Ok(())
    }

    /// One step ran. Called before tokens of it reach any sink.
    ///
    /// # Errors
    /// When the record cannot be kept.
    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()>;

    /// Request attempts ended, with their final figures. Called before their
    /// sinks hear [`done`](super::submission::TokenSink::done); all their
    /// shares were in earlier steps. Refused requests never appear.
    ///
    /// # Errors
    /// When the record cannot be kept.
    fn finished(&mut self, at: MonotonicTime, requests: &[RequestFigures]) -> io::Result<()>;

    /// There is nothing to run: called when that begins, then about once a
    /// second while it lasts.
    ///
    /// # Errors
    /// When what was kept so far cannot be closed.
    fn idle(&mut self, now: MonotonicTime) -> io::Result<()>;
}

/// One step of the device and whose it was.
#[derive(Debug)]
pub struct StepRecord<'a> {
    /// Counted from 1 without gaps.
    pub step: u64,
    /// When it began, on the engine's clock.
    pub started: MonotonicTime,
    /// T: how long it took.
    pub busy: DeviceNanos,
    /// T split over the sequences in the step: sums to `busy` exactly.
    pub shares: &'a [StepShare],
}

/// The part of one sequence in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShare {
    /// The sequence. One choice of a request has one; recompute after a
    /// preemption has its own each time.
    pub sequence: SequenceId,
    /// Who answers for it.
    pub owner: Owner,
    /// Its part of the step's time.
    pub attributed: DeviceNanos,
}

/// Who answers for a share of device time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// An attempt of a caller's request.
    Request {
        /// The tenant and key that pay.
        caller: Caller,
        /// The request.
        request: RequestId,
        /// Which placement of it.
        attempt: u32,
    },
    /// The platform: what it computed again after a preemption.
    Overhead,
}

/// A request attempt that ended, with its final figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFigures {
    /// The request.
    pub request: RequestId,
    /// Which placement of it.
    pub attempt: u32,
    /// Who pays.
    pub caller: Caller,
    /// What the device did for it; `attributed` is the sum of its shares.
    pub usage: Usage,
    /// Where its time went.
    pub stages: Stages,
    /// Why it ended: of its choices' reasons the gravest.
    pub reason: FinishReason,
}
