//! The loaded kernels, found by name.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

use super::driver::{Context, DriverFault, Function, KernelSource, Module};
use super::kernels::{self, Launch};

/// The source that the compiler is given.
pub(super) const SOURCE: KernelSource = KernelSource {
    name: kernels::UNIT.0,
    text: kernels::UNIT.1,
    headers: &kernels::INCLUDED,
    options: &kernels::OPTIONS,
};

/// Loaded machine code and every entry point in it.
pub(super) struct KernelModule {
    functions: BTreeMap<&'static str, Function>,
    /// True if a kernel may start while the kernel before it ends.
    overlaps: bool,
    /// The driver's module. The functions are valid only while it lives.
    _module: Module,
}

impl KernelModule {
    /// Loads machine code. Every kernel must be in it.
    ///
    /// # Errors
    /// [`DriverFault`] if the driver refuses the code or a kernel is missing.
    pub(super) fn load(
        context: &Arc<Context>,
        image: &[u8],
        overlaps: bool,
    ) -> Result<Self, DriverFault> {
        let module = context.load(image)?;
        let functions = kernels::NAMES
            .into_iter()
            .map(|name| Ok((name, module.function(name)?)))
            .collect::<Result<_, DriverFault>>()?;
        Ok(Self { functions, overlaps, _module: module })
    }

    /// Queues a kernel in the stream.
    ///
    /// # Safety
    /// Every address in the arguments must have room for the kernel's reads and writes
    /// with this grid.
    pub(super) unsafe fn launch<A>(
        &self,
        context: &Context,
        launch: &Launch<A>,
    ) -> Result<(), DriverFault> {
        let &Launch { kernel, grid, threads, ref args } = launch;
        let function = self.functions[kernel];
        // SAFETY: `kernels` builds the arguments from the kernel's own structure; the
        // caller vouches for the addresses.
        unsafe {
            context.launch(function, grid, threads, ptr::from_ref(args).cast(), self.overlaps)
        }
    }
}
