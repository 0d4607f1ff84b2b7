//! What counts towards who is next: device time, but for the controls that a
//! benchmark runs beside it.

use tollgate_domain::{CostTable, DeviceNanos, PromptWork};

use crate::schedule::SchedulePolicy;

/// Tokens of one sequence in one step, or in several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tokens {
    pub(super) read: u32,
    pub(super) generated: u32,
}

impl SchedulePolicy {
    /// What reading `work` of a prompt should come to.
    pub(super) fn predicted(self, table: &CostTable, work: PromptWork) -> DeviceNanos {
        match self {
            Self::Fair | Self::KeyCounters => table.request([work], []),
            Self::FirstComeFirstServed => DeviceNanos::ZERO,
            Self::TokenCounters => DeviceNanos(work.uncached * READ_TOKEN.nanos()),
        }
    }

    /// What a share of a step comes to.
    pub(super) fn counted(self, attributed: DeviceNanos, tokens: Tokens) -> DeviceNanos {
        match self {
            Self::Fair | Self::KeyCounters => attributed,
            Self::FirstComeFirstServed => DeviceNanos::ZERO,
            Self::TokenCounters => {
                let Tokens { read, generated } = tokens;
                let read = u64::from(read) * READ_TOKEN.nanos();
                DeviceNanos(read + u64::from(generated) * GENERATED_TOKEN.nanos())
            }
        }
    }
}

/// Where tokens are counted a token of a prompt counts as one and a generated
/// one as two; a millisecond for each, so that guards still mean something.
const READ_TOKEN: DeviceNanos = DeviceNanos(1_000_000);
const GENERATED_TOKEN: DeviceNanos = DeviceNanos(2_000_000);
