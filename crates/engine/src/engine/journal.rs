//! Records that the engine writes to its journal before it reports them anywhere else.
//!
//! Steps are in order and never overlap. The time from the end of one step (`started +
//! busy`) to the start of the next is idle time, so busy and idle time sum to wall time
//! exactly.

use std::io;

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, MonotonicTime, RequestId, SequenceId, Tier, Usage,
};

use super::submission::Stages;

/// Keeper of the engine's account. All methods run on the engine's thread: they may write a
/// file but must not wait for another process. An error ends the engine, because a token
/// that is not journalled must not leave.
pub trait StepJournal: Send {
    /// Records that a step starts at `at`, before its time is known. If the process dies
    /// during the step, the record tells where the unbooked time started. `at` is never
    /// before the end of the booked time.
    ///
    /// # Errors
    ///
    /// An I/O error if the record cannot be kept.
    fn began(&mut self, at: MonotonicTime) -> io::Result<()> {
        let _ = at;
        Ok(())
    }

    /// Records a finished step. Called before any token of the step reaches a sink.
    ///
    /// # Errors
    ///
    /// An I/O error if the record cannot be kept.
    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()>;

    /// Records the final figures of attempts that ended. Called before their sinks get
    /// [`done`](super::submission::TokenSink::done). All their shares were recorded with
    /// earlier steps. Refused requests are never recorded.
    ///
    /// # Errors
    ///
    /// An I/O error if the record cannot be kept.
    fn finished(&mut self, at: MonotonicTime, requests: &[RequestFigures]) -> io::Result<()>;

    /// Records that nothing runs. Called when the engine becomes idle, and about once a
    /// second while it stays idle.
    ///
    /// # Errors
    ///
    /// An I/O error if the records so far cannot be closed.
    fn idle(&mut self, now: MonotonicTime) -> io::Result<()>;
}

/// One step of the device and its shares.
#[derive(Debug)]
pub struct StepRecord<'a> {
    /// Number of the step, from 1 without gaps.
    pub step: u64,
    /// Start of the step, on the engine's clock.
    pub started: MonotonicTime,
    /// T: duration of the step.
    pub busy: DeviceNanos,
    /// T split over the sequences in the step. The shares sum to `busy` exactly.
    pub shares: &'a [StepShare],
}

/// The share of one sequence in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShare {
    /// Id of the sequence. Each choice of a request has one, and each recomputation after a
    /// preemption has one of its own.
    pub sequence: SequenceId,
    /// Account that pays.
    pub owner: Owner,
    /// Device time of the share.
    pub attributed: DeviceNanos,
}

/// The account that pays for a share of device time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// An attempt at a caller's request.
    Request {
        /// Tenant and key that pay.
        caller: Caller,
        /// Id of the request.
        request: RequestId,
        /// Number of the attempt.
        attempt: u32,
        /// Tier of the request.
        tier: Tier,
    },
    /// The platform: recomputation after a preemption.
    Overhead,
}

/// The final figures of an attempt that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFigures {
    /// Id of the request.
    pub request: RequestId,
    /// Number of the attempt.
    pub attempt: u32,
    /// Tenant and key that pay.
    pub caller: Caller,
    /// Work that the device did for the attempt. `attributed` is the sum of its shares.
    pub usage: Usage,
    /// Time spent in each stage.
    pub stages: Stages,
    /// Finish reason: the gravest of its choices.
    pub reason: FinishReason,
    /// Tier of the request.
    pub tier: Tier,
}
