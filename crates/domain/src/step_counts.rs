//! Counts of steps by their length and by the number of their sequences, as a histogram
//! shows them.

use crate::DeviceNanos;

/// Upper limits of a step's device time, in nanoseconds.
pub const STEP_NANOS: [u64; 13] = [
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    1_000_000_000,
    10_000_000_000,
];

/// Upper limits of the sequences in a step.
pub const STEP_SEQUENCES: [u64; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// The steps of an engine, counted by length and by sequences. Each count holds the steps
/// that reach the limit at its place and exceed the one before; the last count has no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCounts {
    by_time: [u64; STEP_NANOS.len() + 1],
    by_sequences: [u64; STEP_SEQUENCES.len() + 1],
    sequences: u64,
}

/// An error for counts that no engine can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the counts of steps do not belong together")]
pub struct InvalidStepCounts;

impl StepCounts {
    /// Makes counts from their parts. `sequences` is the sum over all steps.
    ///
    /// # Errors
    /// A list has another length, or the two lists count different numbers of steps.
    pub fn from_parts(
        by_time: &[u64],
        by_sequences: &[u64],
        sequences: u64,
    ) -> Result<Self, InvalidStepCounts> {
        let by_time = by_time.try_into().map_err(|_| InvalidStepCounts)?;
        let by_sequences = by_sequences.try_into().map_err(|_| InvalidStepCounts)?;
        let counts = Self { by_time, by_sequences, sequences };
        match (total(&counts.by_time), total(&counts.by_sequences)) {
            (Some(by_time), Some(by_sequences)) if by_time == by_sequences => Ok(counts),
            _ => Err(InvalidStepCounts),
        }
    }

    /// Counts a step of this device time with this number of sequences.
    pub fn add(&mut self, busy: DeviceNanos, sequences: usize) {
        let sequences = sequences as u64;
        // A step exactly at a limit belongs to it, as in the buckets of a Prometheus histogram.
        self.by_time[STEP_NANOS.partition_point(|limit| *limit < busy.nanos())] += 1;
        self.by_sequences[STEP_SEQUENCES.partition_point(|limit| *limit < sequences)] += 1;
        self.sequences += sequences;
    }

    /// Returns the number of steps.
    pub fn steps(&self) -> u64 {
        // Both lists have this sum, and the constructors have checked that it exists.
        self.by_time.iter().sum()
    }

    /// Returns the steps by their length, in the order of [`STEP_NANOS`].
    pub fn by_time(&self) -> &[u64] {
        &self.by_time
    }

    /// Returns the steps by their sequences, in the order of [`STEP_SEQUENCES`].
    pub fn by_sequences(&self) -> &[u64] {
        &self.by_sequences
    }

    /// Returns the sum of the sequences of all steps.
    pub fn sequences(&self) -> u64 {
        self.sequences
    }
}

fn total(counts: &[u64]) -> Option<u64> {
    counts.iter().try_fold(0_u64, |sum, count| sum.checked_add(*count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_counts_place_limits_in_lower_bucket() {
        let mut counts = StepCounts::default();
        for (busy, sequences) in [(0, 1), (100_000, 2), (100_001, 3), (u64::MAX, 1_000)] {
            counts.add(DeviceNanos(busy), sequences);
        }
        assert_eq!(counts.by_time()[..3], [2, 1, 0]);
        assert_eq!(counts.by_time().last(), Some(&1));
        assert_eq!(counts.by_sequences()[..3], [1, 1, 1]);
        assert_eq!(counts.by_sequences().last(), Some(&1));
        assert_eq!((counts.steps(), counts.sequences()), (4, 1_006));
        let again =
            StepCounts::from_parts(counts.by_time(), counts.by_sequences(), counts.sequences());
        assert_eq!(again, Ok(counts));
    }

    #[test]
    fn step_counts_refuse_parts_that_differ() {
        let (times, sequences) = (vec![0; 14], vec![0; 11]);
        let with = |list: &[u64], first: u64| [&[first], &list[1..]].concat();
        for (times, sequences) in [
            (&times[1..], &sequences[..]),
            (&times, &[&sequences[..], &[0]].concat()),
            (&with(&times, 1), &sequences),
            (&[&[u64::MAX, 1], &times[2..]].concat(), &sequences),
        ] {
            assert_eq!(StepCounts::from_parts(times, sequences, 0), Err(InvalidStepCounts));
        }
    }
}
