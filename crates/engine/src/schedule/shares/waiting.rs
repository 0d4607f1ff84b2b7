//! Entries of the queues, and their order in the queue of one key.

use tollgate_domain::{DeviceNanos, MonotonicTime, SequenceId};

use crate::schedule::{Rows, SchedulePolicy};

/// An entry of a queue: a prompt that has not started, or a preempted sequence.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// Sequence of the first choice.
    pub sequence: SequenceId,
    /// The request, by the id of its first sequence.
    pub request: SequenceId,
    /// Position in the queue of the key.
    pub rank: Rank,
    /// Time at which the request is refused if it has not started.
    pub deadline: MonotonicTime,
    /// Tokens that the cache must hold before the sequence continues.
    pub tokens: u32,
    /// Tokens that the first steps feed on one account.
    pub pending: u32,
    /// Largest number of tokens that one sequence can reach.
    pub most: u32,
    /// Logit rows to compute for the pending tokens.
    pub rows: Rows,
    /// Choices besides the first.
    pub followers: u32,
    /// Predicted cost of reading the unread part of the prompt.
    pub predicted: DeviceNanos,
}

/// The position of an entry in the queue of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// False for a preempted sequence: such sequences come first.
    fresh: bool,
    /// Then the earliest deadline comes first.
    deadline: MonotonicTime,
    /// Then the earliest arrival comes first.
    sequence: SequenceId,
}

impl Rank {
    /// Creates the rank of a prompt that must start by `deadline`.
    pub fn fresh(policy: SchedulePolicy, deadline: MonotonicTime, sequence: SequenceId) -> Self {
        let deadline = match policy {
            // Equal deadlines leave the order of arrival.
            SchedulePolicy::FirstComeFirstServed => MonotonicTime(0),
            _ => deadline,
        };
        Self { fresh: true, deadline, sequence }
    }

    /// Creates the rank of a preempted sequence.
    pub fn again(sequence: SequenceId) -> Self {
        // One deadline for all, so that preempted sequences keep the order of arrival.
        Self { fresh: false, deadline: MonotonicTime(0), sequence }
    }

    /// Returns the sequence that has this rank.
    pub fn sequence(self) -> SequenceId {
        self.sequence
    }

    /// Returns true if the sequence had started before.
    pub fn is_again(self) -> bool {
        !self.fresh
    }
}
