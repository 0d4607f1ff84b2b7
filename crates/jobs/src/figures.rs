//! Figures of files and batches, for metrics: a snapshot that costs one read.

use std::collections::BTreeMap;

use crate::store::StoredFigures;

/// The outcome of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LineOutcome {
    /// The line has an answer of status 200.
    Completed,
    /// The line has an answer of another status.
    Refused,
    /// The line was cancelled with its batch.
    Cancelled,
    /// The completion window was over first.
    Expired,
    /// The line ended with a batch that failed.
    Failed,
}

impl LineOutcome {
    /// Every outcome.
    pub const ALL: [Self; 5] =
        [Self::Completed, Self::Refused, Self::Cancelled, Self::Expired, Self::Failed];

    /// Returns the word of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
            Self::Failed => "failed",
        }
    }
}

/// The figures of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFigures {
    /// Batches, lines and bytes in the store.
    pub stored: StoredFigures,
    /// Lines that this process has ended, by outcome.
    pub lines: BTreeMap<LineOutcome, u64>,
    /// Lines on workers.
    pub in_flight: u64,
    /// Batches that wait, by reason.
    pub waiting: BTreeMap<&'static str, u64>,
}
