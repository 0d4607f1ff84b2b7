//! The device as this process may use it: a backend, and around it what
//! others have a say in. A test may make a synthetic one fail.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_engine::backend::{StepLimits, StepOutput, StepPlan};
use tollgate_engine::{Backend, BackendError, DeviceInfo, ModelShape};

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

/// A backend that fails when a test asks for it.
pub(crate) struct Faulty {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) faults: Faults,
}

impl Backend for Faulty {
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

    fn step(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        self.faults.strike()?;
        self.backend.step(plan, output)
    }
}
