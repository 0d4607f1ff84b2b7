//! The device as this process may use it: a backend, and around it what
//! others have a say in. A test may make a synthetic one fail.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_engine::backend::{StepLimits, StepOutput, StepPlan};
use tollgate_engine::{Backend, BackendError, DeviceInfo, ModelShape};

use crate::card::Card;

/// Faults on demand, to test what is done about them: a step that finds the
/// file takes it away and does what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) file: PathBuf,
}

/// What a device may do to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The step never ends.
    Hang,
    /// The device fails in it.
    Fail,
    /// It has no memory left.
    Memory,
}

impl Faults {
    /// The fault that is asked for, once.
    fn take(&self) -> Option<Fault> {
        let text = fs::read_to_string(&self.file).ok()?;
        // Taken away first: the next process on this device must not find it.
        fs::remove_file(&self.file).ok()?;
        match text.trim() {
            "hang" => Some(Fault::Hang),
            "fail" => Some(Fault::Fail),
            "memory" => Some(Fault::Memory),
            other => {
                tracing::warn!(fault = other, "no such fault");
                None
            }
        }
    }

    /// Does what is asked for, if anything is.
    pub(crate) fn strike(&self) -> Result<(), BackendError> {
        match self.take() {
            None => Ok(()),
            Some(Fault::Fail) => Err(BackendError::Device("it failed, as a test asked".into())),
            Some(Fault::Memory) => {
                Err(BackendError::Device("out of memory, as a test asked".into()))
            }
            Some(Fault::Hang) => loop {
                std::thread::sleep(Duration::from_secs(3_600));
            },
        }
    }
}

/// A backend on a device that is shared with others, or fails when a test asks
/// for it.
pub(crate) struct Device {
    pub(crate) backend: Box<dyn Backend>,
    /// None: the device has no identity that others could know it by.
    pub(crate) card: Option<Card>,
    pub(crate) faults: Option<Faults>,
}

impl Backend for Device {
    fn shape(&self) -> &ModelShape {
        self.backend.shape()
    }

    fn device(&self) -> &DeviceInfo {
        self.backend.device()
    }

    fn kv_blocks(&self) -> u32 {
        self.backend.kv_blocks()
    }

    fn limits(&self) -> StepLimits {
        self.backend.limits()
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        self.backend.copy_block(from, to);
    }

    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        if let Some(faults) = &self.faults {
            faults.strike()?;
        }
        self.backend.begin(plan, output)
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.backend.finish(output)
    }

    /// Not where others may have the device after any step.
    fn runs_ahead(&self) -> bool {
        self.backend.runs_ahead() && self.card.as_ref().is_none_or(|card| !card.takes_turns())
    }

    fn enter(&mut self) {
        self.backend.enter();
    }

    fn acquire(&mut self) -> Result<(), BackendError> {
        let Some(card) = &mut self.card else { return Ok(()) };
        card.acquire().map_err(|error| {
            BackendError::Device(format!("its lock cannot be had any more: {error}"))
        })
    }

    fn stepped(&mut self, busy: Duration) {
        if let Some(card) = &mut self.card {
            card.stepped(busy);
        }
    }

    fn release(&mut self) {
        if let Some(card) = &mut self.card {
            card.release();
        }
    }
}
