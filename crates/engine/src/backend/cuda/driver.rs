//! The one module that touches cudarc: contexts, memory, streams, launches.
//!
//! cudarc panics where a library or a symbol is missing, so nothing here is
//! called before [`check`](library::check) has found all of them. Only its
//! bare bindings are used: a context that everything belongs to, one stream
//! of our own, no allocation after the start, no tracking behind our back.

mod blas;
mod compiler;
mod library;

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{DriverError, result};

pub(super) use blas::{Blas, Matrices, Plan};
pub(super) use compiler::{Compiler, Source};
pub(super) use library::{Library, LibraryFault, check};

/// A call of the driver that failed: the device is not to be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {reason}")]
pub struct DriverFault {
    call: &'static str,
    reason: String,
    code: u32,
}

impl DriverFault {
    /// Whether another process holds the device for itself, or an
    /// administrator has closed it.
    pub(super) fn is_busy(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as u32
    }

    /// Whether NVIDIA's library of products has refused one, of which nothing was
    /// begun.
    pub(super) fn is_refusal(&self) -> bool {
        blas::REFUSALS.iter().any(|refusal| self.call == blas::RUN && self.code == *refusal as u32)
    }

    /// Whether the driver found nothing that it drives.
    pub(super) fn is_no_device(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_NO_DEVICE as u32
    }
}

/// A device as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    /// Its place in the driver's list.
    pub(super) ordinal: u32,
    /// What its maker calls it.
    pub(super) name: String,
    /// `GPU-`, or `MIG-` where it is a slice of a card, and its identity.
    pub(super) uuid: String,
    /// Compute capability, major and minor.
    pub(super) capability: (u32, u32),
    /// Streaming multiprocessors.
    pub(super) multiprocessors: u32,
}

/// Starts the driver: once for a process, and harmless again.
pub(super) fn start() -> Result<(), DriverFault> {
    result::init().map_err(|error| fault("cuInit", error))
}

/// The version of CUDA that the driver speaks, as 1000 major + 10 minor.
pub(super) fn version() -> Result<u32, DriverFault> {
    let mut version: c_int = 0;
    // SAFETY: the library is there, and the pointer is to an integer of ours.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    code.result().map_err(|error| fault("cuDriverGetVersion", error))?;
    Ok(version.max(0) as u32)
}

/// Every device that this process may see, in the driver's order.
pub(super) fn devices() -> Result<Vec<Listed>, DriverFault> {
    let count = result::device::get_count().map_err(|error| fault("cuDeviceGetCount", error))?;
    (0..count.max(0)).map(listed).collect()
}

fn listed(ordinal: c_int) -> Result<Listed, DriverFault> {
    let device = result::device::get(ordinal).map_err(|error| fault("cuDeviceGet", error))?;
    let name = result::device::get_name(device).map_err(|error| fault("cuDeviceGetName", error))?;
    let uuid = result::device::get_uuid(device).map_err(|error| fault("cuDeviceGetUuid", error))?;
    let attribute = |attribute| {
        // SAFETY: the device is one that the driver has just named.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.map(|value| value.max(0) as u32).map_err(|error| fault("cuDeviceGetAttribute", error))
    };
    Ok(Listed {
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

/// Whether a device of this name is a slice of a card: the driver says it
/// nowhere else.
pub(super) fn is_slice(name: &str) -> bool {
    name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word.eq_ignore_ascii_case("mig"))
}

/// As `nvidia-smi` writes the identity of a device of this name, and NVML wants it.
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

/// A device of which this process holds a part, and its stream.
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread; a thread that
// uses them makes the context its own first (`bind`).
unsafe impl Send for Context {}
// SAFETY: likewise; the driver locks for itself.
unsafe impl Sync for Context {}

impl Context {
    /// Takes the device and makes the calling thread use it.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>, DriverFault> {
        let device =
            result::device::get(ordinal as c_int).map_err(|error| fault("cuDeviceGet", error))?;
        // SAFETY: the device was named by the driver.
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
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| release(fault("cuStreamCreate", error)))?;
        Ok(Arc::new(Self { device, context, stream }))
    }

    /// Makes the calling thread use this device.
    pub(super) fn bind(&self) -> Result<(), DriverFault> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|error| fault("cuCtxSetCurrent", error))
    }

    /// Bytes of the device that nobody has taken.
    pub(super) fn free_bytes(&self) -> Result<u64, DriverFault> {
        let (free, _total) =
            result::mem_get_info().map_err(|error| fault("cuMemGetInfo", error))?;
        Ok(free as u64)
    }

    /// Takes memory of the device; what it holds is left over from others.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Memory, DriverFault> {
        let bytes = bytes.max(1);
        // SAFETY: the context is current on this thread; the size is not 0.
        let pointer =
            unsafe { result::malloc_sync(bytes) }.map_err(|error| fault("cuMemAlloc", error))?;
        Ok(Memory { context: Arc::clone(self), pointer, bytes })
    }

    /// Makes all of it zero.
    pub(super) fn clear(&self, memory: &Memory) -> Result<(), DriverFault> {
        // SAFETY: the memory lives and is `bytes` long.
        unsafe { result::memset_d8_async(memory.pointer, 0, memory.bytes, self.stream) }
            .map_err(|error| fault("cuMemsetD8Async", error))
    }

    /// Takes memory of the host that the device reads and writes directly.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, DriverFault> {
        let bytes = bytes.max(1);
        // SAFETY: the context is current on this thread; the size is not 0.
        // Without flags: what the host reads back must be cached.
        let pointer = unsafe { result::malloc_host(bytes, 0) }
            .map_err(|error| fault("cuMemHostAlloc", error))?;
        let pinned = Pinned { context: Arc::clone(self), pointer: pointer.cast(), bytes };
        // SAFETY: the memory is ours alone and `bytes` long.
        unsafe { pinned.pointer.write_bytes(0, bytes) };
        Ok(pinned)
    }

    /// Copies bytes to the device and waits until they are there: in the stream,
    /// for what the driver itself waits for is no more than that they have left.
    pub(super) fn write(&self, to: Address, from: &[u8]) -> Result<(), DriverFault> {
        // SAFETY: `to` is a place in memory of this context with room for the
        // bytes; every maker of an address keeps it so. The bytes stay until
        // the stream has been waited for.
        unsafe { result::memcpy_htod_async(to.0, from, self.stream) }
            .map_err(|error| fault("cuMemcpyHtoDAsync", error))?;
        self.wait()
    }

    /// Copies the first `bytes` of `from` to the device, in the stream's order.
    pub(super) fn upload(
        &self,
        to: Address,
        from: &Pinned,
        bytes: usize,
    ) -> Result<(), DriverFault> {
        let from = &from.as_slice()[..bytes];
        // SAFETY: as in `write`; pinned memory outlives the copy, because its
        // owner waits for the stream before it writes there again.
        unsafe { result::memcpy_htod_async(to.0, from, self.stream) }
            .map_err(|error| fault("cuMemcpyHtoDAsync", error))
    }

    /// Copies `bytes` from the device to the start of `to`, in the stream's
    /// order: what is there counts once the stream has been waited for.
    pub(super) fn download(
        &self,
        to: &mut Pinned,
        from: Address,
        bytes: usize,
    ) -> Result<(), DriverFault> {
        let to = &mut to.as_mut_slice()[..bytes];
        // SAFETY: as in `upload`.
        unsafe { result::memcpy_dtoh_async(to, from.0, self.stream) }
            .map_err(|error| fault("cuMemcpyDtoHAsync", error))
    }

    /// Copies as much as both hold within the device, in the stream's order; how
    /// many bytes that is.
    pub(super) fn copy(&self, to: &Memory, from: &Memory) -> Result<usize, DriverFault> {
        self.copy_behind(to, 0, from)
    }

    /// Fills all of `to` with what `from` holds, over and over.
    pub(super) fn repeat(&self, to: &Memory, from: &Memory) -> Result<(), DriverFault> {
        let mut place = 0;
        while place < to.bytes {
            place += self.copy_behind(to, place, from)?;
        }
        Ok(())
    }

    /// Copies as much as `from` holds and `to` has room for behind `place`.
    fn copy_behind(&self, to: &Memory, place: usize, from: &Memory) -> Result<usize, DriverFault> {
        let bytes = (to.bytes - place).min(from.bytes);
        // SAFETY: both live in this context and are at least as long.
        unsafe { result::memcpy_dtod_async(to.at(place).0, from.pointer, bytes, self.stream) }
            .map_err(|error| fault("cuMemcpyDtoDAsync", error))?;
        Ok(bytes)
    }

    /// Waits until the stream has done all it was given.
    pub(super) fn wait(&self) -> Result<(), DriverFault> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| fault("cuStreamSynchronize", error))
    }

    /// Loads machine code.
    pub(super) fn load(self: &Arc<Self>, image: &[u8]) -> Result<Module, DriverFault> {
        // SAFETY: the image is a whole cubin; the driver checks its header.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(|error| fault("cuModuleLoadData", error))?;
        Ok(Module { context: Arc::clone(self), module })
    }

    /// A mark in the stream that knows its time.
    pub(super) fn event(self: &Arc<Self>) -> Result<Event, DriverFault> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|error| fault("cuEventCreate", error))?;
        Ok(Event { context: Arc::clone(self), event })
    }

    /// Sets the mark behind what the stream was given so far.
    pub(super) fn record(&self, event: &Event) -> Result<(), DriverFault> {
        // SAFETY: both live, and in this context.
        unsafe { result::event::record(event.event, self.stream) }
            .map_err(|error| fault("cuEventRecord", error))
    }

    /// Takes what `work` puts into the stream as a graph, in place of running
    /// it.
    pub(super) fn capture(
        self: &Arc<Self>,
        work: impl FnOnce() -> Result<(), DriverFault>,
    ) -> Result<Graph, DriverFault> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`, and is not being captured.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|error| fault("cuStreamBeginCapture", error))?;
        let worked = work();
        // SAFETY: the capture began above. It ends whatever came of the work,
        // or the stream could never be used again.
        let captured = unsafe { result::stream::end_capture(self.stream) };
        if let (Err(fault), Ok(half)) = (&worked, &captured) {
            // SAFETY: the graph was just made, and nobody else knows it.
            let _ = unsafe { result::graph::destroy(*half) };
            return Err(fault.clone());
        }
        worked?;
        let graph = captured.map_err(|error| fault("cuStreamEndCapture", error))?;
        // SAFETY: the graph was just made, and what it will run does not need it.
        let (ready, _) = unsafe {
            let flags = sys::CUgraphInstantiate_flags(0);
            (result::graph::instantiate(graph, flags), result::graph::destroy(graph))
        };
        let graph = ready.map_err(|error| fault("cuGraphInstantiateWithFlags", error))?;
        Ok(Graph { context: Arc::clone(self), graph })
    }

    /// Puts all of a graph into the stream.
    ///
    /// # Safety
    /// Every address that was captured has room yet for what is read and
    /// written there.
    pub(super) unsafe fn replay(&self, graph: &Graph) -> Result<(), DriverFault> {
        // SAFETY: the graph lives; the caller vouches for what it points to.
        unsafe { result::graph::launch(graph.graph, self.stream) }
            .map_err(|error| fault("cuGraphLaunch", error))
    }

    /// Puts a kernel into the stream; `overlaps`: its blocks may come while those
    /// of the kernel before it end, and wait for that by themselves.
    ///
    /// # Safety
    /// `arguments` is the one structure that the function takes, and every
    /// address in it has room for what the kernel reads and writes.
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
        // SAFETY: the caller vouches for the arguments, which the driver
        // copies before it returns, as it does the attribute.
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

/// A place in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address(u64);

impl Address {
    /// As a kernel takes it.
    pub(super) fn raw(self) -> u64 {
        self.0
    }

    /// The place `bytes` behind this one.
    pub(super) fn plus(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Memory of the device.
pub(super) struct Memory {
    context: Arc<Context>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// Its first byte.
    pub(super) fn address(&self) -> Address {
        Address(self.pointer)
    }

    /// The place `bytes` behind its first.
    ///
    /// # Panics
    /// If that is not inside.
    pub(super) fn at(&self, bytes: usize) -> Address {
        assert!(bytes < self.bytes, "a place in this memory");
        self.address().plus(bytes)
    }

    /// Its size.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A device that has failed frees everything with its context.
        let _ = self.context.bind();
        // SAFETY: it was taken in this context, once, and nothing uses it:
        // whoever launched on it has waited.
        let _ = unsafe { result::free_sync(self.pointer) };
    }
}

/// Memory of the host that the device reaches by itself.
pub(super) struct Pinned {
    context: Arc<Context>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it is owned memory like a `Box<[u8]>`.
unsafe impl Send for Pinned {}

impl Pinned {
    /// All of it.
    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` bytes were taken and zeroed, and are ours.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// All of it, to write.
    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was taken in this context, once.
        let _ = unsafe { result::free_host(self.pointer.cast()) };
    }
}

/// Loaded machine code.
pub(super) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Module {}

impl Module {
    /// A kernel of it, by its name.
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
        // SAFETY: it was loaded once, and nobody launches from it any more.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// A kernel of a module, which must outlive it.
#[derive(Clone, Copy)]
pub(super) struct Function {
    function: sys::CUfunction,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Function {}

/// Launches that are given to the device as one.
pub(super) struct Graph {
    context: Arc<Context>,
    graph: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was made once, and whoever replayed it has waited.
        let _ = unsafe { result::graph::exec_destroy(self.graph) };
    }
}

/// A mark in the stream.
pub(super) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Event {}

impl Event {
    /// Waits until the stream has passed the mark.
    pub(super) fn wait(&self) -> Result<(), DriverFault> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }
            .map_err(|error| fault("cuEventSynchronize", error))
    }

    /// Nanoseconds of the device from this mark to `end`; both must have been
    /// passed.
    pub(super) fn nanos_until(&self, end: &Self) -> Result<u64, DriverFault> {
        // SAFETY: both events live.
        let milliseconds = unsafe { result::event::elapsed(self.event, end.event) }
            .map_err(|error| fault("cuEventElapsedTime", error))?;
        Ok((f64::from(milliseconds.max(0.0)) * 1e6).round() as u64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was made once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

fn fault(call: &'static str, error: DriverError) -> DriverFault {
    // Both look names up in a library that the probe has found.
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
    fn an_identity_is_written_as_the_tools_write_it() {
        let bytes = std::array::from_fn(|index| 0x10 + index as u8);
        let written = |name| written_uuid(name, bytes);
        assert_eq!(written("NVIDIA H100"), "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
        let slice = "NVIDIA H100 80GB HBM3 MIG 1g.10gb";
        assert_eq!(written(slice), "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f");
    }
}
