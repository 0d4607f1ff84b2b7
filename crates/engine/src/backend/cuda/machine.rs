//! The kernels on the device, by name.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

use super::driver::{Context, DriverFault, Function, Module, Source};
use super::kernels::{self, Launch};

/// What a compiler is given.
pub(super) const SOURCE: Source = Source {
    name: kernels::UNIT.0,
    text: kernels::UNIT.1,
    headers: &kernels::INCLUDED,
    options: &kernels::OPTIONS,
};

/// Loaded machine code and every entry point in it.
pub(super) struct Machine {
    functions: BTreeMap<&'static str, Function>,
    /// Whether a kernel may begin while the one before it ends.
    overlaps: bool,
    /// Outlives its functions.
    _module: Module,
}

impl Machine {
    /// Loads machine code; every kernel must be in it.
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

    /// Puts a kernel into the stream.
    ///
    /// # Safety
    /// Every address in the arguments has room for what the kernel, with that
    /// grid, reads and writes there.
    pub(super) unsafe fn launch<A>(
        &self,
        context: &Context,
        launch: &Launch<A>,
    ) -> Result<(), DriverFault> {
        let &Launch { kernel, grid, threads, ref args } = launch;
        let function = self.functions[kernel];
        // SAFETY: the arguments are the kernel's own structure, by its maker
        // in `kernels`; the caller vouches for what they point to.
        unsafe {
            context.launch(function, grid, threads, ptr::from_ref(args).cast(), self.overlaps)
        }
    }
}
