//! Amounts that count in virtual times. Production counts device time; the control policies
//! of benchmarks count other amounts.

use tollgate_domain::{CostTable, DeviceNanos, PromptWork};

use crate::schedule::SchedulePolicy;

/// Tokens of one sequence in one or more steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tokens {
    pub(super) read: u32,
    pub(super) generated: u32,
}

impl SchedulePolicy {
    /// Returns the predicted amount for reading `work` of a prompt.
    pub(super) fn predicted(self, table: &CostTable, work: PromptWork) -> DeviceNanos {
        match self {
            Self::Fair | Self::KeyCounters => table.request([work], []),
            Self::FirstComeFirstServed => DeviceNanos::ZERO,
            Self::TokenCounters => DeviceNanos(work.uncached * READ_TOKEN.nanos()),
        }
    }

    /// Returns the amount for a share of a step.
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

/// Amounts of the token-counting control policy: one unit for a prompt token, two for a
/// generated token. A unit is a millisecond, so that guards in device time keep their
/// meaning.
const READ_TOKEN: DeviceNanos = DeviceNanos(1_000_000);
const GENERATED_TOKEN: DeviceNanos = DeviceNanos(2_000_000);
