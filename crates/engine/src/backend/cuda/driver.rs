//! The only module that uses cudarc: contexts, memory, streams and launches.
//!
//! cudarc panics if a library or a symbol is missing. Therefore nothing here may be
//! called before [`check`](library::check) has found all of them. The module uses
//! cudarc's bare bindings: one context that owns everything, one stream, no allocation
//! after the setup, and no implicit synchronisation.

mod blas;
mod compiler;
mod library;

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{DriverError, result};

pub(super) use blas::{Blas, GemmPlan, GemmShape};
pub(super) use compiler::{Compiler, KernelSource};
pub(super) use library::{Library, LibraryFault, check};

/// A failed call of the driver. The device must not be used again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {reason}")]
pub struct DriverFault {
    call: &'static str,
    reason: String,
    code: u32,
}

impl DriverFault {
    /// Returns true if another process uses the device exclusively, or an administrator
    /// has closed it.
    pub(super) fn is_busy(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as u32
    }

    /// Returns true if the vendor's matrix library refused a product. Nothing was
    /// started in this case.
    pub(super) fn is_refusal(&self) -> bool {
        blas::REFUSALS.iter().any(|refusal| self.call == blas::RUN && self.code == *refusal as u32)
    }

    /// Returns true if the driver found no device.
    pub(super) fn is_no_device(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_NO_DEVICE as u32
    }
}

/// A device in the driver's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedDevice {
    /// Index in the driver's list.
    pub(super) ordinal: u32,
    /// Product name of the device.
    pub(super) name: String,
    /// UUID with the prefix `GPU-`, or `MIG-` for a slice of a device.
    pub(super) uuid: String,
    /// Compute capability, major and minor.
    pub(super) capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub(super) multiprocessors: u32,
}

/// Starts the driver. Further calls in the same process have no effect.
pub(super) fn start() -> Result<(), DriverFault> {
    result::init().map_err(|error| fault("cuInit", error))
}

/// Returns the CUDA version that the driver supports, as 1000 * major + 10 * minor.
pub(super) fn version() -> Result<u32, DriverFault> {
    let mut version: c_int = 0;
    // SAFETY: the library is loaded, and the pointer is to a local integer.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    code.result().map_err(|error| fault("cuDriverGetVersion", error))?;
    Ok(version.max(0) as u32)
}

/// Returns every device that this process may see, in the driver's order.
pub(super) fn devices() -> Result<Vec<ListedDevice>, DriverFault> {
    let count = result::device::get_count().map_err(|error| fault("cuDeviceGetCount", error))?;
    (0..count.max(0)).map(listed).collect()
}

fn listed(ordinal: c_int) -> Result<ListedDevice, DriverFault> {
    let device = result::device::get(ordinal).map_err(|error| fault("cuDeviceGet", error))?;
    let name = result::device::get_name(device).map_err(|error| fault("cuDeviceGetName", error))?;
    let uuid = result::device::get_uuid(device).map_err(|error| fault("cuDeviceGetUuid", error))?;
    let attribute = |attribute| {
        // SAFETY: the driver has just returned this device.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.map(|value| value.max(0) as u32).map_err(|error| fault("cuDeviceGetAttribute", error))
    };
    Ok(ListedDevice {
        ordinal: ordinal as u32,
        uuid: written_uuid(&name, uuid.bytes.map(|byte| byte as u8)),
        name,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// Returns true if a device of this name is a MIG slice. The driver reports slices only
/// in the name.
pub(super) fn is_slice(name: &str) -> bool {
    name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word.eq_ignore_ascii_case("mig"))
}

/// Returns a UUID in the form that `nvidia-smi` prints and NVML accepts.
fn written_uuid(name: &str, bytes: [u8; 16]) -> String {
    let mut text = String::from(if is_slice(name) { "MIG" } else { "GPU" });
    for (index, byte) in bytes.into_iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The primary context of a device, and one stream in it.
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread; a thread makes the context
// current first (`bind`).
unsafe impl Send for Context {}
// SAFETY: the driver does its own locking.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device and makes its context current on the calling thread.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>, DriverFault> {
        let device =
            result::device::get(ordinal as c_int).map_err(|error| fault("cuDeviceGet", error))?;
        // SAFETY: the driver returned this device.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|error| fault("cuDevicePrimaryCtxRetain", error))?;
        let release = |failed| {
            // SAFETY: the context was retained once, and nothing lives in it.
            let _ = unsafe { result::primary_ctx::release(device) };
            failed
        };
        // SAFETY: the context was retained above.
        unsafe { result::ctx::set_current(context) }
            .map_err(|error| release(fault("cuCtxSetCurrent", error)))?;
        // A non-blocking stream does not synchronise with the default stream.
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| release(fault("cuStreamCreate", error)))?;
        Ok(Arc::new(Self { device, context, stream }))
    }

    /// Makes the context current on the calling thread.
    pub(super) fn bind(&self) -> Result<(), DriverFault> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|error| fault("cuCtxSetCurrent", error))
    }

    /// Returns the free bytes of the device.
    pub(super) fn free_bytes(&self) -> Result<u64, DriverFault> {
        let (free, _total) =
            result::mem_get_info().map_err(|error| fault("cuMemGetInfo", error))?;
        Ok(free as u64)
    }

    /// Takes device memory. Its content is unspecified.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<DeviceMemory, DriverFault> {
        // The driver refuses allocations of 0 bytes.
        let bytes = bytes.max(1);
        // SAFETY: the context is current on this thread, and the size is not 0.
        let pointer =
            unsafe { result::malloc_sync(bytes) }.map_err(|error| fault("cuMemAlloc", error))?;
        Ok(DeviceMemory { context: Arc::clone(self), pointer, bytes })
    }

    /// Fills the memory with zeros.
    pub(super) fn clear(&self, memory: &DeviceMemory) -> Result<(), DriverFault> {
        // SAFETY: the memory lives and is `bytes` long.
        unsafe { result::memset_d8_async(memory.pointer, 0, memory.bytes, self.stream) }
            .map_err(|error| fault("cuMemsetD8Async", error))
    }

    /// Takes pinned host memory, which the device reads and writes directly, filled
    /// with zeros.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, DriverFault> {
        let bytes = bytes.max(1);
        // SAFETY: the context is current on this thread, and the size is not 0. The
        // flags are 0 because memory that the host reads back must be cached.
        let pointer = unsafe { result::malloc_host(bytes, 0) }
            .map_err(|error| fault("cuMemHostAlloc", error))?;
        let pinned = Pinned { context: Arc::clone(self), pointer: pointer.cast(), bytes };
        // SAFETY: the memory belongs to `pinned` alone and is `bytes` long.
        unsafe { pinned.pointer.write_bytes(0, bytes) };
        Ok(pinned)
    }

    /// Copies bytes to the device and waits until they have arrived. The driver's own
    /// copy returns earlier, as soon as it has read the bytes.
    pub(super) fn write(&self, to: Address, from: &[u8]) -> Result<(), DriverFault> {
        // SAFETY: every maker of an address keeps it inside memory of this context with
        // room for the bytes. The bytes live until the stream was waited for.
        unsafe { result::memcpy_htod_async(to.0, from, self.stream) }
            .map_err(|error| fault("cuMemcpyHtoDAsync", error))?;
        self.wait()
    }

    /// Queues a copy of the first `bytes` of `from` to the device.
    pub(super) fn upload(
        &self,
        to: Address,
        from: &Pinned,
        bytes: usize,
    ) -> Result<(), DriverFault> {
        let from = &from.as_slice()[..bytes];
        // SAFETY: the address is valid as in `write`. Pinned memory outlives the copy,
        // because its owner waits for the stream before writing there again.
        unsafe { result::memcpy_htod_async(to.0, from, self.stream) }
            .map_err(|error| fault("cuMemcpyHtoDAsync", error))
    }

    /// Queues a copy of `bytes` bytes from the device to the start of `to`. The content
    /// is valid after the stream was waited for.
    pub(super) fn download(
        &self,
        to: &mut Pinned,
        from: Address,
        bytes: usize,
    ) -> Result<(), DriverFault> {
        let to = &mut to.as_mut_slice()[..bytes];
        // SAFETY: the same conditions as in `upload` hold.
        unsafe { result::memcpy_dtoh_async(to, from.0, self.stream) }
            .map_err(|error| fault("cuMemcpyDtoHAsync", error))
    }

    /// Queues a copy within the device, of as many bytes as both memories hold, and
    /// returns that number.
    pub(super) fn copy(
        &self,
        to: &DeviceMemory,
        from: &DeviceMemory,
    ) -> Result<usize, DriverFault> {
        self.copy_behind(to, 0, from)
    }

    /// Fills all of `to` with repetitions of `from`.
    pub(super) fn repeat(&self, to: &DeviceMemory, from: &DeviceMemory) -> Result<(), DriverFault> {
        let mut place = 0;
        while place < to.bytes {
            place += self.copy_behind(to, place, from)?;
        }
        Ok(())
    }

    /// Copies as many bytes as `from` holds and `to` has room for after `place`.
    fn copy_behind(
        &self,
        to: &DeviceMemory,
        place: usize,
        from: &DeviceMemory,
    ) -> Result<usize, DriverFault> {
        let bytes = (to.bytes - place).min(from.bytes);
        // SAFETY: both live in this context and are at least `bytes` long.
        unsafe { result::memcpy_dtod_async(to.at(place).0, from.pointer, bytes, self.stream) }
            .map_err(|error| fault("cuMemcpyDtoDAsync", error))?;
        Ok(bytes)
    }

    /// Waits until the stream has finished all queued work.
    pub(super) fn wait(&self) -> Result<(), DriverFault> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| fault("cuStreamSynchronize", error))
    }

    /// Loads machine code into the context.
    pub(super) fn load(self: &Arc<Self>, image: &[u8]) -> Result<Module, DriverFault> {
        // SAFETY: the image is a whole cubin; the driver checks its header.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(|error| fault("cuModuleLoadData", error))?;
        Ok(Module { context: Arc::clone(self), module })
    }

    /// Creates an event that records its time.
    pub(super) fn event(self: &Arc<Self>) -> Result<CudaEvent, DriverFault> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|error| fault("cuEventCreate", error))?;
        Ok(CudaEvent { context: Arc::clone(self), event })
    }

    /// Queues an event behind all work that the stream has so far.
    pub(super) fn record(&self, event: &CudaEvent) -> Result<(), DriverFault> {
        // SAFETY: both live in this context.
        unsafe { result::event::record(event.event, self.stream) }
            .map_err(|error| fault("cuEventRecord", error))
    }

    /// Captures the work that `work` queues as a graph. Nothing runs.
    pub(super) fn capture(
        self: &Arc<Self>,
        work: impl FnOnce() -> Result<(), DriverFault>,
    ) -> Result<Graph, DriverFault> {
        // Other threads of the process may call the driver during a capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`, and no other capture is under
        // way.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|error| fault("cuStreamBeginCapture", error))?;
        let worked = work();
        // SAFETY: the capture began above. It must end even if the work failed;
        // otherwise the stream could never be used again.
        let captured = unsafe { result::stream::end_capture(self.stream) };
        if let (Err(fault), Ok(half)) = (&worked, &captured) {
            // SAFETY: the graph was just made, and nothing else refers to it.
            let _ = unsafe { result::graph::destroy(*half) };
            return Err(fault.clone());
        }
        worked?;
        let graph = captured.map_err(|error| fault("cuStreamEndCapture", error))?;
        // SAFETY: the graph was just made, and the instance does not need it.
        let (ready, _) = unsafe {
            let flags = sys::CUgraphInstantiate_flags(0);
            (result::graph::instantiate(graph, flags), result::graph::destroy(graph))
        };
        let graph = ready.map_err(|error| fault("cuGraphInstantiateWithFlags", error))?;
        Ok(Graph { context: Arc::clone(self), graph })
    }

    /// Queues all of a graph.
    ///
    /// # Safety
    /// Every captured address must still have room for the graph's reads and writes.
    pub(super) unsafe fn replay(&self, graph: &Graph) -> Result<(), DriverFault> {
        // SAFETY: the graph lives; the caller vouches for its addresses.
        unsafe { result::graph::launch(graph.graph, self.stream) }
            .map_err(|error| fault("cuGraphLaunch", error))
    }

    /// Queues a kernel. With `overlaps`, its blocks may start while the kernel before
    /// it ends; the kernel itself then waits for that kernel's results.
    ///
    /// # Safety
    /// `arguments` must be the one structure that the function takes, and every address
    /// in it must have room for the kernel's reads and writes.
    pub(super) unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        threads: u32,
        arguments: *const c_void,
        overlaps: bool,
    ) -> Result<(), DriverFault> {
        let mut parameters = [arguments.cast_mut()];
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.stream,
            attrs: &mut overlap,
            numAttrs: u32::from(overlaps),
        };
        // SAFETY: the caller vouches for the arguments. The driver copies them and the
        // attribute before it returns.
        let code = unsafe {
            let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernelEx(&config, function.function, parameters, none)
        };
        code.result().map_err(|error| fault("cuLaunchKernelEx", error))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything that lived in the context held an `Arc` of it.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address(u64);

impl Address {
    /// Returns the address as a kernel takes it.
    pub(super) fn raw(self) -> u64 {
        self.0
    }

    /// Returns the address `bytes` after this one.
    pub(super) fn plus(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Device memory, freed when dropped.
pub(super) struct DeviceMemory {
    context: Arc<Context>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// Returns the address of the first byte.
    pub(super) fn address(&self) -> Address {
        Address(self.pointer)
    }

    /// Returns the address `bytes` after the first byte.
    ///
    /// # Panics
    /// If the address is outside the memory.
    pub(super) fn at(&self, bytes: usize) -> Address {
        assert!(bytes < self.bytes, "a place in this memory");
        self.address().plus(bytes)
    }

    /// Returns the size, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A failed device frees everything together with its context, so errors are
        // ignored here.
        let _ = self.context.bind();
        // SAFETY: the memory was taken once in this context, and every launch that used
        // it was waited for.
        let _ = unsafe { result::free_sync(self.pointer) };
    }
}

/// Owned host memory that the device can access directly.
pub(super) struct Pinned {
    context: Arc<Context>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: this is owned memory like a `Box<[u8]>`.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Returns the whole memory.
    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` bytes were taken and zeroed, and `self` owns them.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// Returns the whole memory for writing.
    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the same conditions hold as in `as_slice`, and `self` is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Drops run on any thread, and the driver frees memory of the current context.
        let _ = self.context.bind();
        // SAFETY: the memory was taken once in this context.
        let _ = unsafe { result::free_host(self.pointer.cast()) };
    }
}

/// Machine code in the context, unloaded when dropped.
pub(super) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Module {}

impl Module {
    /// Returns a kernel of the module by its name.
    #[expect(
        clippy::expect_used,
        reason = "names of kernels are identifiers in this crate's source, without a zero byte"
    )]
    pub(super) fn function(&self, name: &str) -> Result<Function, DriverFault> {
        let name = CString::new(name).expect("kernels' names are identifiers");
        // SAFETY: the module lives.
        let function = unsafe { result::module::get_function(self.module, name) }
            .map_err(|error| fault("cuModuleGetFunction", error))?;
        Ok(Function { function })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the module was loaded once, and no launch uses it any more.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// A kernel of a module. The module must outlive it.
#[derive(Clone, Copy)]
pub(super) struct Function {
    function: sys::CUfunction,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Function {}

/// A captured graph that is ready to run.
pub(super) struct Graph {
    context: Arc<Context>,
    graph: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the graph was instantiated once, and every replay was waited for.
        let _ = unsafe { result::graph::exec_destroy(self.graph) };
    }
}

/// An event in the stream, with its time.
pub(super) struct CudaEvent {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    /// Waits until the stream has passed the event.
    pub(super) fn wait(&self) -> Result<(), DriverFault> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }
            .map_err(|error| fault("cuEventSynchronize", error))
    }

    /// Returns the device's nanoseconds from this event to `end`. The stream must have
    /// passed both.
    pub(super) fn nanos_until(&self, end: &Self) -> Result<u64, DriverFault> {
        // SAFETY: both events live.
        let milliseconds = unsafe { result::event::elapsed(self.event, end.event) }
            .map_err(|error| fault("cuEventElapsedTime", error))?;
        // The driver reports f32 milliseconds.
        Ok((f64::from(milliseconds.max(0.0)) * 1e6).round() as u64)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the event was created once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

fn fault(call: &'static str, error: DriverError) -> DriverFault {
    // Both calls look names up in a library that the probe has checked.
    let name = error.error_name().ok().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().ok().map(|text| text.to_string_lossy().into_owned());
    let code = error.0 as u32;
    let reason = match (name, text) {
        (Some(name), Some(text)) => format!("{text} ({name})"),
        (Some(name), None) => name,
        _ => format!("error {code}"),
    };
    DriverFault { call, reason, code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_uuid_has_the_form_of_nvidia_smi() {
        let bytes = std::array::from_fn(|index| 0x10 + index as u8);
        let written = |name| written_uuid(name, bytes);
        assert_eq!(written("NVIDIA H100"), "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
        let slice = "NVIDIA H100 80GB HBM3 MIG 1g.10gb";
        assert_eq!(written(slice), "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f");
    }
}
