//! A journal for measurements. The cost of writing belongs to the worker's figures.

use std::io;

use tollgate_domain::MonotonicTime;
use tollgate_engine::{RequestFigures, StepJournal, StepRecord};

/// A journal that stores nothing.
pub(crate) struct Unwritten;

impl StepJournal for Unwritten {
    fn step(&mut self, _: &StepRecord<'_>) -> io::Result<()> {
        Ok(())
    }

    fn finished(&mut self, _: MonotonicTime, _: &[RequestFigures]) -> io::Result<()> {
        Ok(())
    }

    fn idle(&mut self, _: MonotonicTime) -> io::Result<()> {
        Ok(())
    }
}
