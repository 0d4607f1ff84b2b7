//! The device as this process may use it: a backend together with the lock of
//! its GPU. A synthetic device can also fail on demand.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_engine::backend::{BlockCopy, StepLimits, StepOutput, StepPlan};
use tollgate_engine::{Backend, BackendError, DeviceInfo, ModelShape};

use crate::gpu_lock::GpuLock;

/// Faults of a synthetic device, requested by a file. Admins rehearse failures
/// with them, and tests check the recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FaultInjector {
    pub(crate) file: PathBuf,
}

/// A fault that a file can request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The step never ends.
    Hang,
    /// The device fails during the step.
    Fail,
    /// The device runs out of memory.
    Memory,
}

impl FaultInjector {
    /// Takes the requested fault, if there is one, and removes the request.
    fn take(&self) -> Option<Fault> {
        let text = fs::read_to_string(&self.file).ok()?;
        // Removed before the fault: the restarted process must not find it again.
        fs::remove_file(&self.file).ok()?;
        match text.trim() {
            "hang" => Some(Fault::Hang),
            "fail" => Some(Fault::Fail),
            "memory" => Some(Fault::Memory),
            other => {
                tracing::warn!(fault = other, "ignored an unknown fault request");
                None
            }
        }
    }

    /// Causes the requested fault, if there is one.
    pub(crate) fn inject(&self) -> Result<(), BackendError> {
        match self.take() {
            None => Ok(()),
            Some(Fault::Fail) => Err(BackendError::Device("injected device failure".into())),
            Some(Fault::Memory) => Err(BackendError::Device("injected: out of memory".into())),
            // The watchdog must see a hang, so the thread never returns.
            Some(Fault::Hang) => loop {
                std::thread::sleep(Duration::from_secs(3_600));
            },
        }
    }
}

/// A backend that runs steps only while this process has its GPU.
pub(crate) struct LockedBackend {
    pub(crate) backend: Box<dyn Backend>,
    /// `None` if the device has no identity to lock, like a CPU.
    pub(crate) gpu: Option<GpuLock>,
    /// `None` for every device but a synthetic one.
    pub(crate) faults: Option<FaultInjector>,
}

impl Backend for LockedBackend {
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

    fn copy_block(&mut self, copy: BlockCopy) {
        self.backend.copy_block(copy);
    }

    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        if let Some(faults) = &self.faults {
            faults.inject()?;
        }
        self.backend.begin(plan, output)
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.backend.finish(output)
    }

    fn runs_ahead(&self) -> bool {
        // Another worker may get a shared GPU after any step, so no step may
        // already be queued on it by then.
        self.backend.runs_ahead() && self.gpu.as_ref().is_none_or(|gpu| !gpu.takes_turns())
    }

    fn enter(&mut self) {
        self.backend.enter();
    }

    fn acquire(&mut self) -> Result<(), BackendError> {
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        gpu.acquire().map_err(|error| {
            BackendError::Device(format!("the lock of the GPU cannot be taken: {error}"))
        })
    }

    fn stepped(&mut self, busy: Duration) {
        if let Some(gpu) = &mut self.gpu {
            gpu.stepped(busy);
        }
    }

    fn release(&mut self) {
        if let Some(gpu) = &mut self.gpu {
            gpu.release();
        }
    }
}
